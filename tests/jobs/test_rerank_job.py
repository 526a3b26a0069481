"""`geoflow rerank`: files of shortlists against the re-ranker, with its calibration, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry as g
from geoflow_fast import noise
from geoflow_fast.data.ids import Ids
from geoflow_fast.jobs import rerank
from geoflow_fast.runtime.parquet import read_columns
from tests.jobs.processes import run_geoflow

DIM, QUERIES, ITEMS, K = 8, 21, 90, 5


def noisy(x: torch.Tensor) -> torch.Tensor:
    return g.normalize(x + 0.15 * torch.randn_like(x))


@pytest.fixture
def world(tmp_path) -> Path:
    """A folder with a saved flow, queries that belong to the first items, a gallery in float16 shards, and pairs."""
    torch.manual_seed(1)
    flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1, layer_scale=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    flow.save_pretrained(tmp_path / "model")
    items = noise.sample_uniform(ITEMS, DIM)
    np.save(tmp_path / "queries.npy", noisy(items[:QUERIES]).numpy())
    (tmp_path / "gallery").mkdir()
    for number, part in enumerate(np.array_split(items.numpy(), 4)):
        np.save(tmp_path / "gallery" / f"img_emb_{number}.npy", part.astype(np.float16))
    for name in ("pairs", "others"):
        image = noise.sample_uniform(80, DIM)
        gf.EmbeddingPairs.from_arrays(image, noisy(image)).save(tmp_path / name)
    return tmp_path


def geoflow_rerank(world: Path, monkeypatch, *more: str, **changes) -> int:
    monkeypatch.chdir(world)
    options = {"model": "model", "queries": "queries.npy", "gallery": "gallery", "out": "ranked.parquet"}
    return run_geoflow(monkeypatch, "rerank", *more, **{**options, "shortlist": K, "steps": 2, **changes})


def reranker_of(world: Path) -> gf.BayesReranker:
    flow = gf.GeoFlow.from_pretrained(world / "model")
    return gf.BayesReranker(flow, world / "gallery", shortlist=K, n_steps=2)


def check_file(world: Path, reranker: gf.BayesReranker) -> None:
    columns = read_columns(world / "ranked.parquet")
    kinds = [f"{rerank.EVIDENCE}{name}" for name in reranker.evidence_names]
    assert list(columns) == ["query", *rerank.COLUMNS, *kinds]
    post = reranker(torch.from_numpy(np.load(world / "queries.npy")))
    for name, part in zip(kinds, post.evidence[:, : rerank.EXPLAINED].unbind(2)):
        np.testing.assert_allclose(np.stack(columns[name]), part.numpy(), atol=1e-5)
    assert np.array_equal(columns["query"], np.arange(QUERIES))
    assert np.array_equal(np.stack(columns["index"]), post.index.numpy())
    assert np.array_equal(columns["answer"], post.answer.numpy())
    for name in ("p_answer", "p_outside", "entropy", "risk_lower_bound"):
        np.testing.assert_allclose(columns[name], getattr(post, name).numpy(), atol=1e-5)
    np.testing.assert_allclose(np.stack(columns["prob"]), post.prob.numpy(), atol=1e-5)


def test_the_file_holds_the_results_of_a_calibrated_reranker(world, monkeypatch, capsys):
    assert geoflow_rerank(world, monkeypatch, held_out="pairs", block=8) == 0
    assert "uncalibrated" not in capsys.readouterr().out
    reranker = reranker_of(world)
    reranker.load_calibration(world / "model" / "rerank_t2i.json")
    check_file(world, reranker)
    # The calibration is now with the model and is used again, and made for these settings only.
    assert geoflow_rerank(world, monkeypatch, "--json", out="again.parquet") == 0
    summary = json.loads(capsys.readouterr().out)
    columns = read_columns(world / "again.parquet")
    assert summary["calibrated"]
    assert summary["queries"] == QUERIES
    assert summary["expected_recall"] == pytest.approx(columns["p_answer"].mean())
    assert summary["changed"] == pytest.approx(np.mean(np.stack(columns["index"])[:, 0] != columns["answer"]))
    assert geoflow_rerank(world, monkeypatch, out="third.parquet", steps=3) == 2
    assert "was made for another --steps" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_missing_calibration_is_reported(world, monkeypatch, capsys):
    assert geoflow_rerank(world, monkeypatch) == 0
    said = capsys.readouterr()
    assert "geoflow: warning: uncalibrated: probabilities are the flow's own and may be far off" in said.err
    assert "model holds no held-out pairs from training" in said.err
    assert "expected share" not in said.out
    check_file(world, reranker_of(world))


@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_a_head_without_a_calibration_is_not_called_a_flow(world, monkeypatch, capsys):
    head = gf.PosteriorHead(gf.HeadConfig(hidden=4, bank=0), DIM, DIM).eval()
    head.save_pretrained(world / "head_alone")
    assert geoflow_rerank(world, monkeypatch, model="head_alone") == 0
    words = capsys.readouterr().err
    assert "uncalibrated: probabilities are the head's own and may be far off" in words
    assert "outside the shortlist; head_alone holds no" in words
    assert "the flow" not in words
    check_file(world, gf.BayesReranker(None, world / "gallery", head=head, shortlist=K))


def test_calibration_in_a_file_of_its_own_is_not_replaced_by_accident(world, monkeypatch, capsys):
    assert geoflow_rerank(world, monkeypatch, held_out="pairs", calibration="c.json") == 0
    kept = (world / "c.json").read_bytes()
    assert not (world / "model" / "rerank_t2i.json").exists()
    assert geoflow_rerank(world, monkeypatch, held_out="others", calibration="c.json", out="b.parquet") == 2
    assert "c.json was computed from other pairs" in capsys.readouterr().err
    assert (world / "c.json").read_bytes() == kept
    assert geoflow_rerank(world, monkeypatch, "--overwrite", held_out="others", calibration="c.json") == 0
    assert (world / "c.json").read_bytes() != kept


def test_an_interrupt_keeps_blocks_and_the_same_command_continues(world, monkeypatch, capsys):
    blocks = []

    def interrupted(self, queries, *rest, **more):
        blocks.append(len(queries))
        if len(blocks) == 2:
            raise KeyboardInterrupt
        return whole(self, queries, *rest, **more)

    whole = gf.BayesReranker.rerank
    with monkeypatch.context() as patch:
        patch.setattr(gf.BayesReranker, "rerank", interrupted)
        assert geoflow_rerank(world, patch, held_out="pairs", block=8) == 130
        assert "run the same command to continue" in capsys.readouterr().err
        assert not (world / "ranked.parquet").exists()
        assert geoflow_rerank(world, patch, held_out="pairs", block=8) == 0
    assert blocks == [8, 8, 8, 5]  # the first block was kept
    reranker = reranker_of(world)
    reranker.load_calibration(world / "model")
    check_file(world, reranker)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queries": "nowhere"}, "queries nowhere is missing"),
        ({"queries": "wide.npy"}, "wide.npy have width 9, but the flow expects 8"),
        ({"queries": "long.npy"}, "long.npy row 0 has norm 2"),
        ({"gallery": "wide.npy"}, "gallery has width 9, but the flow expects 8"),
        ({"model": "nowhere"}, "nowhere/model.safetensors does not exist"),
        ({"calibration": "nowhere.json"}, "nowhere.json"),
        ({"calibration": "queries.npy"}, "queries.npy is damaged or not a calibration"),
        ({"held_out": "gallery"}, "img_emb"),
        ({"held_out": "few"}, "of 40 held-out queries have a right item"),
        ({"shortlist": 0}, "shortlist must be at least 1"),
        ({"steps": 0}, "--steps must be"),
        ({"probes": 0}, "--probes must be"),
        ({"device": "tpu"}, "device 'tpu' cannot be used here"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_no_file(world, monkeypatch, capsys, changes, words):
    np.save(world / "wide.npy", noise.sample_uniform(5, 9).numpy())
    np.save(world / "long.npy", 2 * np.load(world / "queries.npy"))
    image = noise.sample_uniform(40, DIM)
    gf.EmbeddingPairs.from_arrays(image, noisy(image)).save(world / "few")
    (world / "ranked.parquet").write_text("precious")
    before = sorted(world.rglob("*"))
    assert geoflow_rerank(world, monkeypatch, "--overwrite", **changes) == 2
    message = capsys.readouterr().err
    assert message.startswith("geoflow: error:")
    assert words in message
    assert (world / "ranked.parquet").read_text() == "precious"
    assert sorted(world.rglob("*")) == before


def test_without_a_model_cosines_and_hubs_are_the_evidence(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    files = {"queries": "queries.npy", "gallery": "gallery", "out": "plain.parquet", "shortlist": K}
    assert run_geoflow(monkeypatch, "rerank", **files) == 2
    assert "without --model, give --held-out pairs" in capsys.readouterr().err
    assert run_geoflow(monkeypatch, "rerank", held_out="pairs", **files) == 0
    assert "evidence cosine" in capsys.readouterr().out
    reranker = gf.BayesReranker(None, world / "gallery", shortlist=K)
    reranker.calibrate(gf.EmbeddingPairs.open(world / "pairs"))
    expected = reranker(torch.from_numpy(np.load(world / "queries.npy"))).p_answer
    np.testing.assert_allclose(read_columns(world / "plain.parquet")["p_answer"], expected, atol=1e-5)
    assert (world / "plain.parquet.calibration.json").is_file()


def test_ids_and_judgements_of_different_types_are_compared_as_text():
    texts, numbers = Ids(np.array(["7", "10", "a"], dtype=object)), Ids(np.array([7, 10]))
    assert texts.rows(np.array([10, 7]), "qrels").tolist() == [1, 0]
    assert numbers.rows(np.array(["10", "7"], dtype=object), "qrels").tolist() == [1, 0]
    for ids in (texts, numbers):
        with pytest.raises(ValueError, match=r"qrels: no row has the id '?8'?"):
            ids.rows(np.array([7, 8]), "qrels")
    with pytest.raises(ValueError, match=r"no row has the id '7\.5'"):
        numbers.rows(np.array([7.5]), "qrels")


@pytest.mark.parametrize("named", [False, True])
def test_judgements_calibrate_by_row_numbers_or_ids(world, monkeypatch, capsys, named):
    import pyarrow
    import pyarrow.parquet

    items = np.concatenate([np.load(file) for file in sorted((world / "gallery").glob("*.npy"))]).astype(np.float32)
    queries = noisy(torch.from_numpy(items / np.linalg.norm(items, axis=1, keepdims=True)))
    np.save(world / "judged.npy", queries.numpy())
    rows = np.arange(ITEMS)
    (world / "ids.txt").write_text("".join(f"item {k}\n" for k in rows))
    names = [f"item {k}" for k in rows] if named else rows
    pyarrow.parquet.write_table(pyarrow.table({"query": rows, "item": names}), world / "qrels.parquet")
    ids = {"ids": "ids.txt"} if named else {}
    options = {"qrels": "qrels.parquet", "judged": "judged.npy", "calibration": "q.json", **ids}
    assert geoflow_rerank(world, monkeypatch, **options) == 0
    assert "on the judgements of qrels.parquet" in capsys.readouterr().out
    reranker = reranker_of(world)
    reranker.calibrate(gf.Qrels(rows, rows, np.ones(ITEMS)), queries=queries)
    expected = reranker(torch.from_numpy(np.load(world / "queries.npy"))).p_answer
    np.testing.assert_allclose(read_columns(world / "ranked.parquet")["p_answer"], expected, atol=1e-5)
    assert geoflow_rerank(world, monkeypatch, qrels="qrels.parquet", out="b.parquet") == 2
    assert "--qrels and --judged go together" in capsys.readouterr().err
    assert geoflow_rerank(world, monkeypatch, judged_ids="ids.txt", out="b.parquet") == 2
    assert "--judged-ids are the ids by which --qrels names queries" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pairs", "judgements"])
@pytest.mark.parametrize("changed", ["gallery", "bank"])
def test_a_calibration_is_not_used_again_for_another_gallery_or_bank(world, monkeypatch, capsys, kind, changed):
    torch.manual_seed(3)
    own = {"held_out": "pairs"}
    if kind == "judgements":
        items = np.concatenate([np.load(file) for file in sorted((world / "gallery").glob("*.npy"))])
        np.save(world / "judged.npy", noisy(g.normalize(torch.from_numpy(items.astype(np.float32)))).numpy())
        (world / "qrels.csv").write_text("query,item,grade\n" + "".join(f"{k},{k},1\n" for k in range(ITEMS)))
        own = {"qrels": "qrels.csv", "judged": "judged.npy"}
    for name, rows in (("other", ITEMS), ("bank", 30)):
        np.save(world / f"{name}.npy", noise.sample_uniform(rows, DIM).numpy())
    options = {"calibration": "c.json", **own}
    assert geoflow_rerank(world, monkeypatch, **options) == 0
    kept = (world / "c.json").read_bytes()
    assert geoflow_rerank(world, monkeypatch, out="again.parquet", **options) == 0
    assert (world / "c.json").read_bytes() == kept
    capsys.readouterr()
    other = {"gallery": "other.npy"} if changed == "gallery" else {"bank": "bank.npy"}
    assert geoflow_rerank(world, monkeypatch, out="b.parquet", **options, **other) == 2
    assert "for another gallery or with another bank; move it" in capsys.readouterr().err
    assert (world / "c.json").read_bytes() == kept
    assert not (world / "b.parquet").exists()
