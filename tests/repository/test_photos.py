"""The example on photographs: files of captions, embeddings, folds, and the whole run on drawn pictures."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import geoflow_fast as gf
from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.evaluation.baseline_methods import BaselineMethod
from geoflow_fast.evaluation.ladder_methods import FlowReranker, Ladder
from tests.evaluation.helpers import DIM, captioned

EXAMPLE = Path(__file__).parents[2] / "examples" / "photos"
MODULES = ("inputs", "study", "figures", "page", "run")
IMAGES = 180
COLOURS = dict(gf.ColourEncoder.COLOURS)
COCO = {
    "images": [{"id": 7, "file_name": "a.jpg"}, {"id": 9, "file_name": "b.jpg"}],
    "annotations": [{"image_id": 9, "caption": "a dog, black"}, {"image_id": 7, "caption": "a cat"}],
}


@pytest.fixture(scope="module")
def example():
    """The example's modules by name, which find each other as those of a script do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture
def run(example):
    return example["run"]


@pytest.fixture
def inputs(example):
    return example["inputs"]


@pytest.fixture
def study(example):
    return example["study"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A folder of balls before walls, and captions that name their colours, one of which costs $5."""
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "Images").mkdir()
    generator, lines = np.random.default_rng(0), ["image,caption"]
    for number in range(IMAGES):
        ball, wall = generator.choice(list(COLOURS), 2, replace=False)
        picture, size = Image.new("RGB", (40, 32), COLOURS[wall]), int(generator.integers(6, 24))
        ImageDraw.Draw(picture).ellipse((4, 4, 4 + size, 4 + size), fill=COLOURS[ball])
        picture.save(folder / "Images" / f"{number:03d}.png")
        lines.append(f'{number:03d}.png,"a {ball} ball, $5 or $6, before a {wall} wall"')
        if number % 2:
            lines.append(f"{number:03d}.png,something {wall} and {ball}")
    (folder / "captions.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("Flickr8k.token.txt", "a.jpg#0\ta cat\nb#2.jpg#1\ta dog\n\n", [("a.jpg", "a cat"), ("b#2.jpg", "a dog")]),
        ("captions.txt", 'image,caption\na.jpg,"one, two"\nb.jpg,x\n', [("a.jpg", "one, two"), ("b.jpg", "x")]),
        ("own.tsv", "caption\tid\timage\none, two\t3\ta.jpg\n", [("a.jpg", "one, two")]),
        ("captions_val.json", json.dumps(COCO), [("b.jpg", "a dog, black"), ("a.jpg", "a cat")]),
    ],
)
def test_captions_of_every_format(inputs, tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert inputs.read_captions(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.csv", "path,text\na.jpg,b\n", "needs image and caption"),
        ("x.csv", "image,caption\na.jpg,b,c\n", "line 2 has 3 fields"),
        ("x.csv", "image,caption\n", "no captions"),
        ("x.txt", "a.jpg#0\tfine\nnot fine\n", "line 2"),
        ("x.json", '{"images": []}', "COCO"),
        ("x.json", '{"images": [], "annotations": [{"image_id": 1, "caption": "c"}]}', "COCO"),
    ],
)
def test_bad_captions_are_refused_with_a_reason(inputs, tmp_path, name, content, reason):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        inputs.read_captions(tmp_path / name)


def test_a_few_images_may_be_missing_but_not_most(inputs, tmp_path, capsys):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).touch()
    kept = inputs.existing([("a.jpg", "1"), ("c.jpg", "2"), ("b.jpg", "3")], tmp_path)
    assert [(Path(path).name, caption) for path, caption in kept] == [("a.jpg", "1"), ("b.jpg", "3")]
    assert "1 of 3 images" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"lacks 2 of 3 captioned images, such as x\.jpg"):
        inputs.existing([("a.jpg", "1"), ("x.jpg", "2"), ("y.jpg", "3")], tmp_path)


def test_embeddings_from_an_archive(inputs, tmp_path):
    pairs = captioned(7, 2, 0)
    image, text = pairs.image[np.arange(8)].astype(np.float16), pairs.text[np.arange(14)].astype(np.float16)
    words = np.array([f"caption {k}" for k in range(14)])
    np.savez(tmp_path / "a.npz", image_emb=image, text_emb=text, text_image_index=pairs.image_row, captions=words)
    photos = inputs.open_embeddings(tmp_path / "a.npz")
    np.testing.assert_array_equal(photos.pairs.image_row, pairs.image_row)
    np.testing.assert_allclose(photos.pairs.text[np.arange(14)], pairs.text[np.arange(14)], atol=1e-3)
    assert (photos.captions[13], photos.pictures) == ("caption 13", None)
    np.savez(tmp_path / "b.npz", image_emb=image)
    with pytest.raises(ValueError, match="lacks text_emb"):
        inputs.open_embeddings(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", image_emb=image, text_emb=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        inputs.open_embeddings(tmp_path / "c.npz")


@pytest.mark.parametrize("folds", [1, 2, 5])
def test_every_image_has_one_part_in_a_fold(study, folds):
    pairs = captioned(257, 3, 0)
    made = study.make_folds(pairs, None, folds, None, 3)
    judged = np.concatenate([np.unique(fold.test.group) for fold in made])
    assert len(np.unique(judged)) == len(judged) == (257 if folds > 1 else 52)
    for fold in made:
        parts = [set(part.group.tolist()) for part in (fold.train, fold.calibration, fold.test)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 257
        assert len(fold.train) + len(fold.calibration) + len(fold.test) == len(pairs)
        assert min(map(len, parts[:2])) >= study.LEAST_CALIBRATION


def test_given_training_pairs_and_given_images_to_judge_by(study):
    pairs, train = captioned(200, 2, 0), captioned(90, 2, 1)
    for fold in study.make_folds(pairs, train, 2, None, 0):
        assert fold.train is train
        assert sorted([*fold.calibration.text_row, *fold.test.text_row]) == list(range(400))
        assert not set(fold.calibration.group) & set(fold.test.group)
    chosen = np.arange(201) < 50
    (fold,) = study.make_folds(pairs, None, 1, chosen, 0)
    assert set(fold.test.image_row) == set(range(50))
    with pytest.raises(ValueError, match="must be 151 images"):
        study.make_folds(captioned(149, 1, 0), None, 5, None, 0)


@pytest.mark.parametrize(
    ("folds", "judged", "references"), [(1, 36, 2), pytest.param(3, 180, 5, marks=pytest.mark.slow)]
)
def test_pictures_become_a_page_and_a_second_run_scores_nothing(
    folds, judged, references, run, study, drawn, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(study, "REFERENCES", study.REFERENCES[:references])
    out = tmp_path / "out"
    words = ["--images", str(drawn / "Images"), "--captions", str(drawn / "captions.txt"), "--encoder", "colours"]
    words += ["--folds", str(folds), "--no-flow", "--quick", "--out", str(out)]
    assert run.main(words) == 0
    for name in ("reliability", "calibration", "risk", "rungs", "captions"):
        with Image.open(out / f"{name}.png") as picture:
            assert min(picture.size) > 400
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count("<img") == 5
    assert "270 captions of 180 images" in page
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))["results"]
    counts = {(result["method"], result["direction"]): result["queries"] for result in results}
    assert len(counts) == 2 * (2 + references)
    assert {count for (_, direction), count in counts.items() if direction == "i2t"} == {judged}
    assert len({count for (_, direction), count in counts.items() if direction == "t2i"}) == 1
    leads = json.loads((out / "leads.json").read_text(encoding="utf-8"))
    assert all(lead["low"] <= lead["value"] <= lead["high"] and lead["p"] <= lead["p_holm"] for lead in leads)
    shown = capsys.readouterr().out
    assert f"Wrote {out / 'index.html'}" in shown
    assert shown.count("| GeoFlow ladder without flow |") == 2
    for kind in (Ladder, BaselineMethod):
        monkeypatch.setattr(kind, "score", lambda *_: pytest.fail("scored again"))
    monkeypatch.setattr(run, "write_page", lambda *_: "the page")  # figures are drawn each time
    monkeypatch.setattr(gf.ColourEncoder, "encode_images", lambda *_: pytest.fail("embedded again"))
    assert run.main(words) == 0
    assert json.loads((out / "leads.json").read_text(encoding="utf-8")) == leads
    assert run.main([*words, "--seed", "1"]) == 1
    assert "another seed" in capsys.readouterr().err


def test_names_of_images_to_judge_by(run, inputs, drawn, tmp_path, capsys):
    folder, names = tmp_path / "embeddings", [f"{number:03d}.png" for number in range(IMAGES)]
    lines = [f"{drawn / 'Images' / name},something" for name in names]
    (tmp_path / "table.csv").write_text("\n".join(["path,caption", *lines]))
    gf.embed_images(tmp_path / "table.csv", gf.ColourEncoder(), folder)
    photos, chosen = inputs.open_embeddings(folder), tmp_path / "test.txt"
    chosen.write_text("\n".join(["elsewhere/009.png", "004.png", "", "none.png"]))
    assert np.flatnonzero(inputs.read_names(chosen, photos)).tolist() == [4, 9]
    chosen.write_text("none.png")
    assert run.main(["--embeddings", str(folder), "--split", str(chosen), "--out", str(tmp_path / "out")]) == 1
    assert "names none of the 180 images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give --images with --captions, or --embeddings"),
        (["--captions", "c.txt"], "needs --images"),
        (["--captions", "c.txt", "--images", "i"], "give --model"),
        (["--embeddings", "e", "--train", "t", "--folds", "1"], "too few"),
        (["--embeddings", "e", "--train", "t", "--split", "s"], "give one"),
    ],
)
def test_contradictions_are_refused_before_anything_is_read(run, words, reason, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main([*words, "--out", str(tmp_path / "out")])
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_head_and_flow_are_judged_by_what_they_add(study, inputs, tmp_path, monkeypatch):
    pairs = captioned(160, 1, 0)
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1)).eval()
    monkeypatch.setattr(study, "train_flow", lambda *_: flow)
    folds = study.make_folds(pairs, None, 1, None, 0)
    given = inputs.Photos(pairs), folds, tmp_path, study.Settings(quick=True), ["max_softmax"]
    findings = study.run_study(*given)
    names = ["ladder", "rerank", "hubs_only", "max_softmax"]
    assert [result.method for result in findings.comparison.of("t2i")] == names
    assert {(lead.over, lead.direction) for lead in findings.leads} == {(x, d) for x in names[1:] for d in CONDITIONAL}
    for (judged,) in findings.folds.values():
        assert [rung.name for rung in judged.rungs] == ["cosine", "hub", "head", "flow"]
        assert [rung.name for rung in judged.pipeline.reranker.rungs] == ["cosine", "hub", "head"]
    monkeypatch.setattr(FlowReranker, "_fit", lambda *_: pytest.fail("calibrated with the flow again"))
    again = study.run_study(*given)
    assert [judged.rungs for (judged,) in again.folds.values()] == [
        judged.rungs for (judged,) in findings.folds.values()
    ]
    without = study.HubsOnly(findings.folds["t2i"][0].pipeline.study)
    assert (without.study.head, without.training) == (None, "none")


@pytest.mark.slow
def test_the_flow_is_that_of_the_command(study, tmp_path):
    settings = study.Settings(steps=2)
    flow = study.train_flow(captioned(150, 1, 0), tmp_path / "flow", settings)
    assert (flow.config.image_dim, flow.config.text_dim) == (DIM, DIM)
    again = study.train_flow(captioned(150, 1, 0), tmp_path / "flow", settings)  # finished: read back
    assert all(torch.equal(a, b) for a, b in zip(flow.parameters(), again.parameters()))
