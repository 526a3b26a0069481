"""What `geoflow train` stores for calibrated results, and how the other commands use it."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry
from geoflow_fast.jobs import calibration
from geoflow_fast.jobs.calibration import (
    StoredCalibration,
    calibrate_model,
    forget_calibration,
    hold_out,
    images_to_hold_out,
)
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.parquet import read_columns
from tests.jobs.processes import run_geoflow

DIM, PAIRS = 6, 260
ROWS = 3.0 * 2 * 32


def noisy(x: torch.Tensor, seed: int, scale: float = 0.2) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return geometry.normalize(x + scale * noise)


def images(count: int, seed: int) -> torch.Tensor:
    return sample_uniform(count, DIM, generator=torch.Generator().manual_seed(seed))


def make_pairs() -> gf.EmbeddingPairs:
    image = images(PAIRS, 0)
    return gf.EmbeddingPairs.from_arrays(image, noisy(image, 1))


@pytest.fixture
def pairs() -> gf.EmbeddingPairs:
    return make_pairs()


def make_cheap(patch: pytest.MonkeyPatch) -> None:
    """Few queries and samples, which decide nothing that is tested here."""
    patch.setattr(calibration, "BANDWIDTH_QUERIES", (12, 12))
    patch.setattr(calibration, "GUIDANCES", (0.0, 1.0))
    patch.setattr(calibration, "LADDER_QUERIES", (70, 70))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a flow with a stored calibration, as `geoflow train` leaves it."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=8, depth=1, layer_scale=0.5)).eval()
    flow.save_pretrained(folder)
    rest = hold_out(make_pairs(), folder, None, 0, announce=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        make_cheap(patch)
        calibrate_model(folder, rest, flow, None, trained_rows=ROWS, seed=0)
    return folder


@pytest.fixture
def model(made, tmp_path, monkeypatch) -> Path:
    """A copy of that folder in the working folder, beside queries and a gallery."""
    monkeypatch.chdir(tmp_path)
    make_cheap(monkeypatch)
    shutil.copytree(made, "model")
    np.save("queries.npy", noisy(images(40, 2), 3).numpy())
    np.save("gallery.npy", images(40, 2).numpy())
    return Path("model")


def stored(folder: Path) -> StoredCalibration:
    known = StoredCalibration.read(folder)
    assert known is not None
    return known


def geoflow(monkeypatch, command: str, *more: str, **options) -> int:
    usual = {"model": "model", "queries": "queries.npy", "gallery": "gallery.npy", "out": f"{command}.parquet"}
    return run_geoflow(monkeypatch, command, *more, **{**usual, **options})


# Pairs that nothing is trained on


@pytest.mark.parametrize(
    ("count", "expected"),
    [(64, 0), (179, 0), (180, 60), (299, 99), (300, 100), (1000, 100), (5000, 500), (20_000, 1000), (10**6, 1000)],
)
def test_how_many_images_are_held_out(count, expected):
    assert images_to_hold_out(count) == expected


def test_held_out_images_are_kept_with_the_model_and_out_of_training(tmp_path):
    image = images(200, 0)
    index = np.repeat(np.arange(200), 2)
    pairs = gf.EmbeddingPairs.from_arrays(image, noisy(image[index], 1), index)
    said: list[str] = []
    rest = hold_out(pairs, tmp_path, None, 5, announce=said.append)
    kept = stored(tmp_path).pairs()
    assert (len(rest), len(kept)) == (268, 132)
    shared = (rest[np.arange(len(rest))][0] @ kept[np.arange(len(kept))][0].T).max()
    assert shared < 1 - 1e-6  # no image is on both sides
    assert said[0].startswith("66 held-out images with 132 texts of 200 for calibration, which nothing is trained on")
    rows = read_columns(tmp_path / "calibration/held_out/text_ids.parquet")["id"]
    np.testing.assert_allclose(kept[np.arange(len(kept))][1], pairs[rows][1], atol=1e-6)
    again = hold_out(pairs, tmp_path, None, 5, announce=said.append)
    assert again.fingerprint() == rest.fingerprint()
    with pytest.raises(ValueError, match="holds other pairs"):
        hold_out(pairs, tmp_path, 0.4, 5, announce=said.append)
    with pytest.raises(ValueError, match="holds other pairs"):
        hold_out(pairs, tmp_path, None, 6, announce=said.append)
    names = [f"text {k}" for k in range(400)]
    (tmp_path / "ids.txt").write_text("\n".join(names))
    rest = hold_out(pairs, tmp_path, 0.4, 5, restart=True, ids=tmp_path / "ids.txt", announce=said.append)
    assert len(rest) == 240
    kept_names = read_columns(tmp_path / "calibration/held_out/text_ids.parquet")["id"].tolist()
    assert sorted(kept_names) == sorted(set(names) - {names[row] for row in rest.text_row})


@pytest.mark.parametrize("mine", ["notes.txt", "held_out/notes.txt", "held_out/img_emb/mine_0.npy"])
def test_files_of_somebody_in_the_folder_of_a_calibration_are_kept(tmp_path, mine):
    pairs = gf.EmbeddingPairs.from_arrays(images(200, 0), images(200, 1))
    hold_out(pairs, tmp_path, None, 5, announce=lambda _: None)
    (tmp_path / "calibration" / mine).write_text("precious")
    with pytest.raises(FileExistsError, match=mine):
        forget_calibration(tmp_path)
    assert (tmp_path / "calibration" / mine).read_text() == "precious"
    assert len(stored(tmp_path).pairs()) == 66
    (tmp_path / "calibration" / mine).unlink()
    forget_calibration(tmp_path)
    assert not (tmp_path / "calibration").exists()


def test_pairs_of_a_folder_of_their_own_are_held_out(tmp_path, pairs):
    others = gf.EmbeddingPairs.from_arrays(images(70, 8), images(70, 9))
    assert hold_out(pairs, tmp_path, others, 0, announce=lambda _: None) is pairs
    assert len(stored(tmp_path).pairs()) == 70


def test_a_share_of_less_than_one_image_holds_one_out(tmp_path, pairs):
    said: list[str] = []
    rest = hold_out(pairs, tmp_path, 0.001, 0, announce=said.append)
    assert stored(tmp_path).held_out.images == 1
    assert len(rest) == len(pairs) - 1
    assert said[0].startswith("1 held-out images of 260 for calibration")


def test_a_run_that_began_without_held_out_pairs_goes_on_without(tmp_path, pairs):
    (tmp_path / "last.safetensors").touch()
    said: list[str] = []
    assert hold_out(pairs, tmp_path, None, 0, announce=said.append) is pairs
    assert "begun without held-out pairs" in said[0]
    assert StoredCalibration.read(tmp_path) is None


def test_a_share_is_not_held_out_of_a_run_that_has_trained_on_it(tmp_path, pairs):
    (tmp_path / "last.safetensors").touch()
    for share in (0.3, 0.001):
        with pytest.raises(ValueError, match=r"begun without held-out pairs.*--overwrite"):
            hold_out(pairs, tmp_path, share, 0, announce=lambda _: None)
    assert not (tmp_path / "calibration").exists()
    others = gf.EmbeddingPairs.from_arrays(images(70, 8), images(70, 9))
    assert hold_out(pairs, tmp_path, others, 0, announce=lambda _: None) is pairs
    assert stored(tmp_path).held_out.images == 70


@pytest.mark.parametrize("kind", ["all", "part", "half precision", "other texts"])
def test_training_images_are_not_held_out(tmp_path, pairs, kind):
    own = pairs if kind == "all" else pairs.subset(range(5, 75))
    if kind == "half precision":
        own.save(tmp_path / "own", dtype=np.float16)
        own = gf.EmbeddingPairs.open(tmp_path / "own")
    elif kind == "other texts":
        mixed = torch.cat([own[range(1)][0], images(69, 8)])
        own = gf.EmbeddingPairs.from_arrays(mixed, images(70, 9))
    shared = {"all": "260 of the 260", "other texts": "1 of the 70"}.get(kind, r"\d+ of the 70")
    with pytest.raises(ValueError, match=f"{shared} held-out images are training images"):
        hold_out(pairs, tmp_path / "run", own, 0, announce=lambda _: None)
    assert not (tmp_path / "run").exists()


def test_a_kill_while_pairs_are_replaced_leaves_nothing_that_counts(model, pairs, monkeypatch):
    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "write_pairs", kill)
        with pytest.raises(KeyboardInterrupt):
            hold_out(pairs, model, 0.4, 0, restart=True, announce=lambda _: None)
    assert StoredCalibration.read(model) is None
    with monkeypatch.context() as patch:
        hold_out(pairs, model, 0.4, 0, announce=lambda _: None)
        patch.setattr(calibration, "remove_own", kill)
        with pytest.raises(KeyboardInterrupt):
            hold_out(pairs, model, 0.3, 0, restart=True, announce=lambda _: None)
    assert StoredCalibration.read(model) is None


def test_a_new_run_with_too_few_images_forgets_the_earlier_calibration(model, pairs):
    (model / "rerank_t2i.0123456789abcdef.bank.safetensors").touch()
    mine = ["rerank_notes.json", "rerank_t2i.mine.json", "rerank_mine.bank.safetensors"]
    for name in mine:
        (model / name).write_text("precious")
    few = pairs.subset(range(100))
    assert hold_out(few, model, None, 0, restart=True, announce=lambda _: None) is few
    assert not (model / "calibration").exists()
    assert sorted(file.name for file in model.glob("rerank_*")) == sorted(mine)


@pytest.mark.parametrize("moment", ["save", "rename"])
def test_a_kill_while_pairs_are_written_leaves_nothing_that_counts(tmp_path, pairs, monkeypatch, moment):
    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "save":
            patch.setattr("geoflow_fast.data.pairs.write_npy", kill)
            patch.setattr("geoflow_fast.data.pairs._save_shards", kill)
        else:
            patch.setattr(StoredCalibration, "write", kill)
        with pytest.raises(KeyboardInterrupt):
            hold_out(pairs, tmp_path, None, 0, announce=lambda _: None)
    assert StoredCalibration.read(tmp_path) is None
    rest = hold_out(pairs, tmp_path, None, 0, announce=lambda _: None)
    assert len(rest) + len(stored(tmp_path).pairs()) == PAIRS


# What the end of training fits


def test_the_end_of_training_fits_both_directions(model, pairs):
    known, flow = stored(model), gf.GeoFlow.from_pretrained(model)
    for direction in ("t2i", "i2t"):
        fit = gf.fit_bandwidth(flow, known.pairs(), direction, guidances=(0.0, 1.0), max_queries=12, seed=0)
        assert known.bandwidth[direction]["kappa"] == fit.kappa
        assert known.bandwidth[direction]["guidance"] == fit.guidance
        assert known.ladder[direction]["items"] == PAIRS - known.held_out.images
    image = pairs.image.parts[0]
    rest = np.setdiff1d(np.arange(PAIRS), pairs.split(known.held_out.images, 0)[1].image_row)
    service = gf.BayesReranker(flow, torch.from_numpy(image[rest]))
    service.load_calibration(model)
    expected = gf.BayesReranker(flow, torch.from_numpy(image[rest]))
    assert service.calibration.weights == pytest.approx(
        expected.calibrate(known.pairs(), max_queries=70).weights, rel=1e-5
    )


def test_a_second_run_fits_nothing_and_other_weights_everything(model, pairs, monkeypatch):
    flow, before = gf.GeoFlow.from_pretrained(model), (model / "calibration/settings.json").read_bytes()
    fits = []
    fit, ladder = calibration.fit_bandwidth, calibration._fit_ladder
    monkeypatch.setattr(calibration, "fit_bandwidth", lambda *a, **k: fits.append("bandwidth") or fit(*a, **k))
    monkeypatch.setattr(calibration, "_fit_ladder", lambda *a, **k: fits.append("ladder") or ladder(*a, **k))
    rest = hold_out(pairs, model, None, 0, announce=lambda _: None)
    calibrate_model(model, rest, flow, None, trained_rows=ROWS, seed=0)
    assert fits == []
    assert (model / "calibration/settings.json").read_bytes() == before
    with torch.no_grad():
        next(flow.parameters()).add_(0.1)
    assert stored(model).bandwidth_of(flow, "t2i") is None
    calibrate_model(model, rest, flow, None, trained_rows=ROWS, seed=0)
    assert fits == ["bandwidth", "ladder"] * 2


def test_an_interrupted_calibration_is_continued(model, pairs, monkeypatch):
    whole = json.loads((model / "calibration/settings.json").read_text())
    for name in ("rerank_t2i.json", "rerank_i2t.json"):
        (model / name).unlink()
    StoredCalibration(model, stored(model).held_out).write()
    rest, flow = hold_out(pairs, model, None, 0, announce=lambda _: None), gf.GeoFlow.from_pretrained(model)
    fit, calls = calibration.fit_bandwidth, []

    def interrupted(*arguments: object, **settings: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(*arguments, **settings)

    monkeypatch.setattr(calibration, "fit_bandwidth", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate_model(model, rest, flow, None, trained_rows=ROWS, seed=0)
    assert len(stored(model).ladder) == 1
    calibrate_model(model, rest, flow, None, trained_rows=ROWS, seed=0)
    assert len(calls) == 3
    again = json.loads((model / "calibration/settings.json").read_text())
    assert again["bandwidth"] == whole["bandwidth"]
    # Costs of rungs are measured, so files differ; weights do not.
    assert [again["ladder"][d]["evidence"] for d in ("t2i", "i2t")] == [
        whole["ladder"][d]["evidence"] for d in ("t2i", "i2t")
    ]


def test_too_few_reached_queries_are_a_reason_and_no_error(model, pairs):
    lost = gf.EmbeddingPairs.from_arrays(images(70, 8), -images(70, 8))
    flow = gf.GeoFlow.from_pretrained(model)
    hold_out(pairs, model, lost, 0, restart=True, announce=lambda _: None)
    known = calibrate_model(model, pairs, flow, None, trained_rows=ROWS, seed=0)
    assert known is not None
    assert "held-out queries have a right item in their shortlist" in known.ladder["t2i"]["reason"]
    assert any("no probabilities of re-ranked items" in line for line in calibration.outcome(known))


def test_different_widths_need_a_head(tmp_path, monkeypatch):
    make_cheap(monkeypatch)
    image = images(200, 0)
    pairs = gf.EmbeddingPairs.from_arrays(image, geometry.normalize(noisy(image, 1)[:, :5]))
    torch.manual_seed(0)
    gf.GeoFlow(gf.GeoFlowConfig(DIM, 5, hidden=8, depth=1)).save_pretrained(tmp_path)
    rest = hold_out(pairs, tmp_path, None, 0, announce=lambda _: None)
    known = calibrate_model(tmp_path, rest, gf.GeoFlow.from_pretrained(tmp_path), None, trained_rows=ROWS, seed=0)
    assert known is not None
    assert "differ in width" in known.ladder["i2t"]["reason"]
    assert known.bandwidth["i2t"]["kappa"] > 0


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"version": 9}, {"held_out": 3}, {"bandwidth": {"up": {}}}, {"ladder": {"t2i": 1}}],
    ids=str,
)
def test_damaged_settings_are_named(model, change):
    file = model / "calibration/settings.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=r"settings\.json"):
        StoredCalibration.read(model)


# How commands use it


def test_entropy_uses_what_is_stored_and_says_so(model, monkeypatch, capsys):
    assert geoflow(monkeypatch, "entropy", "--fast") == 0
    said, fitted = capsys.readouterr(), stored(model).bandwidth["t2i"]
    assert said.err == ""
    assert (
        f"kappa {fitted['kappa']:.3g} and guidance {fitted['guidance']:.3g} as fitted at the end of training"
        in said.out
    )
    flow = gf.GeoFlow.from_pretrained(model)
    scorer = gf.RetrievalEntropy.fast(flow, Path("gallery.npy"), kappa=fitted["kappa"], guidance=fitted["guidance"])
    expected = scorer(torch.from_numpy(np.load("queries.npy"))).entropy
    np.testing.assert_allclose(read_columns(Path("entropy.parquet"))["entropy"], expected, atol=1e-5)
    assert geoflow(monkeypatch, "entropy", "--fast", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["half_or_more"] == np.mean(read_columns(Path("entropy.parquet"))["map_prob"] >= 0.5)
    assert geoflow(monkeypatch, "entropy", "--fast", kappa=7, guidance=2, out="own.parquet") == 0
    assert "as fitted" not in capsys.readouterr().out
    for own in ({"kappa": 7}, {"guidance": 2}):
        assert geoflow(monkeypatch, "entropy", "--fast", "--overwrite", **own) == 0
        said = capsys.readouterr().out
        assert "as fitted" in said
        assert "such held-out queries" not in said


def test_without_a_calibration_there_is_one_warning_and_no_confidence(model, monkeypatch, capsys):
    shutil.rmtree(model / "calibration")
    (model / "rerank_t2i.json").unlink()
    for command, flags in (("entropy", ["--fast"]), ("rerank", ["--steps=2"])):
        assert geoflow(monkeypatch, command, *flags) == 0
        said = capsys.readouterr()
        assert said.err.startswith("geoflow: warning: ")
        assert said.err.count("\n") == 1
        assert "confident" not in said.out + said.err


def test_rerank_calibrates_in_the_gallery_it_is_given(model, monkeypatch, capsys):
    assert geoflow(monkeypatch, "rerank", "--steps=2") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "calibrated in this gallery on 86 held-out images of model" in said.out
    flow = gf.GeoFlow.from_pretrained(model)
    reranker = gf.BayesReranker(flow, Path("gallery.npy"), n_steps=2)
    reranker.calibrate(stored(model).pairs())
    expected = reranker(torch.from_numpy(np.load("queries.npy")))
    np.testing.assert_allclose(read_columns(Path("rerank.parquet"))["p_answer"], expected.p_answer, atol=1e-5)
    # The weights are kept with the model and used again; another gallery has its own.
    calls = []
    fit = calibration._fit_ladder
    monkeypatch.setattr(calibration, "_fit_ladder", lambda *a, **k: calls.append(1) or fit(*a, **k))
    assert geoflow(monkeypatch, "rerank", "--steps=2", out="again.parquet") == 0
    assert calls == []
    np.save("gallery.npy", images(50, 2).numpy())
    assert geoflow(monkeypatch, "rerank", "--steps=2", out="third.parquet") == 0
    assert calls == [1]


@pytest.mark.parametrize("read_only", [False, True])
def test_too_few_held_out_queries_are_no_obstacle_to_a_second_run(model, pairs, monkeypatch, capsys, read_only):
    lost = gf.EmbeddingPairs.from_arrays(images(70, 8), -images(70, 8))
    hold_out(pairs, model, lost, 0, restart=True, announce=lambda _: None)
    calls, fit = [], calibration._fit_ladder
    monkeypatch.setattr(calibration, "_fit_ladder", lambda *a, **k: calls.append(1) or fit(*a, **k))
    if read_only:

        def refuse(*_: object) -> None:
            raise OSError(errno.EROFS, "could not write")

        monkeypatch.setattr(StoredCalibration, "write", refuse)
    for out in ("one.parquet", "two.parquet"):
        assert geoflow(monkeypatch, "rerank", "--steps=2", "--shortlist=5", out=out) == 0
        assert "70 held-out images do not suffice" in capsys.readouterr().err
    assert len(calls) == 1 + read_only


def test_entries_of_other_processes_are_kept(model, monkeypatch):
    """Another process that re-ranks the other way writes its entry while this one computes."""
    fit = calibration._fit_ladder

    def meanwhile(*arguments: object, **settings: object) -> object:
        stored(model).with_ladder(gf.Direction.I2T, {"reason": "another process"}).write()
        return fit(*arguments, **settings)

    monkeypatch.setattr(calibration, "_fit_ladder", meanwhile)
    assert geoflow(monkeypatch, "rerank", "--steps=2") == 0
    assert stored(model).ladder["i2t"] == {"reason": "another process"}
    assert stored(model).ladder["t2i"]["items"] == 40


@pytest.mark.parametrize("kind", ["pairs", "judgements"])
def test_what_training_fitted_may_be_replaced_and_what_the_user_fitted_not(model, monkeypatch, capsys, kind):
    image = images(80, 11)
    for name in ("own", "others"):
        gf.EmbeddingPairs.from_arrays(image, noisy(image, 12 + len(name))).save(name)
    np.save("gallery.npy", image.numpy())
    np.save("judged.npy", noisy(image, 12).numpy())
    Path("qrels.csv").write_text("query,item,grade\n" + "".join(f"{k},{k},1\n" for k in range(80)))
    own = {"held_out": "own"} if kind == "pairs" else {"qrels": "qrels.csv", "judged": "judged.npy"}
    before = (model / "rerank_t2i.json").read_bytes()
    assert geoflow(monkeypatch, "rerank", "--steps=2", **own) == 0
    assert (model / "rerank_t2i.json").read_bytes() != before
    fitted = (model / "rerank_t2i.json").read_bytes()
    assert geoflow(monkeypatch, "rerank", "--steps=2", **own) == 0  # run again, as after a stop
    assert geoflow(monkeypatch, "rerank", "--steps=2", out="more.parquet", **own) == 0
    assert (model / "rerank_t2i.json").read_bytes() == fitted
    Path("fewer.csv").write_text("query,item,grade\n" + "".join(f"{k},{k},1\n" for k in range(79)))
    other = {"held_out": "others"} if kind == "pairs" else {**own, "qrels": "fewer.csv"}
    assert geoflow(monkeypatch, "rerank", "--steps=2", out="again.parquet", **other) == 2
    assert "ask to overwrite" in capsys.readouterr().err


@pytest.mark.usefixtures("model")
def test_held_out_pairs_of_any_norm(monkeypatch, capsys):
    image = images(80, 11)
    for folder, rows in (("img_emb", image), ("text_emb", noisy(image, 12))):
        Path("raw", folder).mkdir(parents=True)
        np.save(f"raw/{folder}/{folder}_0.npy", 3 * rows.numpy())
    assert geoflow(monkeypatch, "rerank", "--steps=2", "--normalize", held_out="raw") == 0
    assert "calibrated on raw" in capsys.readouterr().out


def test_a_copied_model_works_elsewhere(model, monkeypatch, capsys):
    shutil.copytree(model, "elsewhere/copy")
    shutil.rmtree(model)
    assert geoflow(monkeypatch, "rerank", "--steps=2", model="elsewhere/copy") == 0
    assert "held-out images of elsewhere/copy" in capsys.readouterr().out


@pytest.mark.usefixtures("model")
def test_a_folder_that_cannot_be_written_to_is_no_obstacle(monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "could not write")

    monkeypatch.setattr(gf.BayesReranker, "save_calibration", refuse)
    assert geoflow(monkeypatch, "rerank", "--steps=2") == 0
    assert "not kept, as model cannot be written to" in capsys.readouterr().out


def test_a_calibration_on_other_pairs_is_the_users_and_stays(model, monkeypatch, capsys):
    image = images(80, 11)
    gf.EmbeddingPairs.from_arrays(image, noisy(image, 12)).save("own")
    for name in ("rerank_t2i.json", "rerank_i2t.json"):
        (model / name).unlink()
    assert geoflow(monkeypatch, "rerank", "--steps=2", held_out="own") == 0
    kept = (model / "rerank_t2i.json").read_bytes()
    capsys.readouterr()
    assert geoflow(monkeypatch, "rerank", "--steps=2", out="again.parquet") == 0
    assert "calibrated by model/rerank_t2i.json" in capsys.readouterr().out
    assert (model / "rerank_t2i.json").read_bytes() == kept


def test_density_compares_with_held_out_pairs(model, pairs, monkeypatch, capsys):
    pairs.subset(range(20)).save("some")
    options = {"model": model, "pairs": "some", "out": "d.parquet", "steps": 2}
    assert run_geoflow(monkeypatch, "density", **options) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "5% are expected of pairs like the model's 86 held-out ones" in said.out
    columns = read_columns(Path("d.parquet"))
    held_out, flow = stored(model).pairs(), gf.GeoFlow.from_pretrained(model)
    settings = gf.DensitySettings(n_steps=2)
    image, text = held_out[np.arange(len(held_out))]
    generator = torch.Generator().manual_seed(0)
    known = gf.epistemic(flow, image, text, settings=settings, generator=generator).score.numpy()
    assert columns["p_value"].min() > 0
    assert columns["p_value"].max() <= 1
    order = np.argsort(columns["score"])
    assert (np.diff(columns["p_value"][order]) <= 0).all()
    # The probes differ from those of the call above, so the ranks may differ by a few.
    expected = [(1 + (known >= score).sum()) / (1 + len(known)) for score in columns["score"]]
    np.testing.assert_allclose(columns["p_value"], expected, atol=0.2)


# Ids


@pytest.mark.parametrize("kind", ["npy", "txt", "parquet", "numbers"])
@pytest.mark.usefixtures("model")
def test_ids_take_the_place_of_row_numbers(monkeypatch, kind):
    import pyarrow
    import pyarrow.parquet

    names = [f"image-{k}" for k in range(40)]
    values = {"npy": np.array(names), "numbers": 1000 + np.arange(40)}
    if kind == "txt":
        Path("ids.txt").write_text("\n".join(names) + "\n")
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"key": names, "x": range(40)}), "ids.parquet")
    else:
        np.save("ids.npy", values[kind])
    file = {"txt": "ids.txt", "parquet": "ids.parquet:key"}.get(kind, "ids.npy")
    assert geoflow(monkeypatch, "rerank", "--steps=2", out="numbers.parquet") == 0
    assert geoflow(monkeypatch, "rerank", "--steps=2", out="named.parquet", ids=file, query_ids=file) == 0
    plain, named = (read_columns(Path(f"{name}.parquet")) for name in ("numbers", "named"))
    expected = np.array(values["numbers"] if kind == "numbers" else names)
    assert named["query"].tolist() == expected.tolist()
    assert named["answer"].tolist() == expected[plain["answer"]].tolist()
    assert np.stack(named["index"]).tolist() == expected[np.stack(plain["index"])].tolist()
    np.testing.assert_array_equal(named["p_answer"], plain["p_answer"])
    schema = pyarrow.parquet.read_schema("named.parquet")
    assert schema.field("answer").type == (pyarrow.int64() if kind == "numbers" else pyarrow.string())


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("short.npy", "short.npy holds 3 ids, but there are 40 items"),
        ("nowhere.txt", "nowhere.txt does not exist"),
        ("nowhere.parquet:x", "nowhere.parquet:x is no file of ids"),
        ("floats.npy", "must hold integers, strings or UUIDs"),
    ],
)
@pytest.mark.usefixtures("model")
def test_bad_ids_are_named(monkeypatch, capsys, file, words):
    np.save("short.npy", np.arange(3))
    np.save("floats.npy", np.ones(40))
    assert geoflow(monkeypatch, "rerank", "--steps=2", ids=file) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("model")
def test_images_and_texts_of_any_norm(monkeypatch, capsys):
    assert geoflow(monkeypatch, "entropy", "--fast") == 0
    for name in ("queries", "gallery"):
        np.save(f"long_{name}.npy", 3 * np.load(f"{name}.npy"))
    files = {"images": "long_gallery.npy", "texts": "long_queries.npy", "model": "model", "out": "long.parquet"}
    assert run_geoflow(monkeypatch, "entropy", "--fast", **files) == 2
    assert "row 0 has norm 3" in capsys.readouterr().err
    assert run_geoflow(monkeypatch, "entropy", "--fast", "--normalize", **files) == 0
    expected, long = (read_columns(Path(f"{name}.parquet"))["entropy"] for name in ("entropy", "long"))
    np.testing.assert_allclose(long, expected, atol=1e-5)
    assert run_geoflow(monkeypatch, "entropy", queries="queries.npy", **files) == 2
    assert "--images and --texts, not both" in capsys.readouterr().err
