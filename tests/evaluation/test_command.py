"""`geoflow evaluate`: from folders to a folder with results, figures and a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import geoflow_fast as gf
from geoflow_fast.cli.app import app
from geoflow_fast.evaluation import registry
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.head.model import head_digest
from geoflow_fast.jobs.calibration import hold_out
from geoflow_fast.runtime.parquet import read_columns, write_columns
from tests.evaluation.helpers import DIM
from tests.head.test_model import random_head


@pytest.fixture
def folders(tmp_path, pairs, held_out, small_flow):
    pairs.save(tmp_path / "test")
    held_out.save(tmp_path / "val")
    small_flow.save_pretrained(tmp_path / "model")
    return tmp_path


def evaluate(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_retrieval_writes_results_figures_and_a_page(folders):
    out = folders / "report"
    given = ("--pairs", folders / "test", "--held-out", folders / "val", "--out", out, "--resamples", 9)
    code, printed = evaluate(*given, "--methods", "max_softmax, margin", "--json")
    assert code == 0
    facts = json.loads(printed)
    assert [result["method"] for result in facts["results"]] == ["max_softmax", "margin"] * 2
    names = {path.name for path in out.iterdir()}
    assert names == {
        "results.json", "results.parquet", "report.html", "scores",
        "auroc.png", "calibration.png", "selective.png", "reliability.png",
    }  # fmt: skip
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == 4
    assert "cosine margin" in page
    assert evaluate(*given, "--methods", "max_softmax,margin", "--direction", "t2i")[0] == 0


def test_two_files_of_any_norm_and_the_pairs_that_training_held_out(folders, pairs, held_out):
    image, text = (3 * x.numpy() for x in pairs[np.arange(len(pairs))])
    np.save(folders / "images.npy", image)
    np.save(folders / "texts.npy", text)
    files = ("--images", folders / "images.npy", "--texts", folders / "texts.npy", "--normalize", "--resamples", 9)
    options = (*files, "--model", folders / "model", "--methods", "max_softmax", "--direction", "t2i", "--json")
    with pytest.raises(ValueError, match="model holds none from training"):
        evaluate(*options, "--out", folders / "a")
    hold_out(pairs, folders / "model", held_out, 0, announce=lambda _: None)
    same = ("--pairs", folders / "model/calibration/held_out", "--model", folders / "model", "--out", folders / "c")
    with pytest.raises(ValueError, match="methods would be tuned on held_out and tested on it"):
        evaluate(*same)
    assert not (folders / "c").exists()
    assert evaluate(*options, "--out", folders / "a")[0] == 0
    assert evaluate(*options, "--held-out", folders / "val", "--out", folders / "b")[0] == 0
    results = [json.loads((folders / name / "results.json").read_text())["results"] for name in "ab"]
    assert results[0][0]["queries"] == len(pairs)
    for name in ("auroc", "aurc", "nll", "ece"):
        assert results[0][0]["numbers"][name] == pytest.approx(results[1][0]["numbers"][name], rel=1e-3)


@pytest.fixture
def judged(folders, pairs) -> Path:
    """The texts of the pairs as queries, their images as a gallery, and judgements of all but five of the texts."""
    image, text = pairs.image[np.arange(40)], pairs.text[np.arange(len(pairs))]
    np.save(folders / "images.npy", 3 * image)
    np.save(folders / "texts.npy", 3 * text)
    (folders / "images.txt").write_text("".join(f"image {k}\n" for k in range(40)))
    (folders / "texts.txt").write_text("".join(f"text {k}\n" for k in range(len(text))))
    text_row, image_row = pairs.text_row[5:], pairs.image_row[5:]
    write_columns(folders / "rows.parquet", {"query": text_row, "item": image_row}, len(text_row))
    names = {"query": [f"text {k}" for k in text_row], "item": [f"image {k}" for k in image_row]}
    columns = {name: np.array(values, dtype=object) for name, values in names.items()}
    write_columns(folders / "names.parquet", columns, len(text_row))
    return folders


def judged_flags(folder: Path, **changes: object) -> list[object]:
    files = {
        "queries": "texts.npy",
        "gallery": "images.npy",
        "qrels": "rows.parquet",
        "held-out": "val",
        "out": "judged",
    }
    flags = {name: folder / value for name, value in (files | changes).items() if value is not None}
    options = ("--direction", "t2i", "--methods", "max_softmax,margin", "--resamples", 9, "--normalize", "--json")
    return [*(part for name, path in flags.items() for part in (f"--{name}", path)), *options]


def test_judgements_serve_as_well_as_test_pairs(judged, pairs):
    """By row numbers and by ids, which then name the queries in the files of scores."""
    assert evaluate(*judged_flags(judged))[0] == 0
    named = {"qrels": "names.parquet", "ids": "images.txt", "query-ids": "texts.txt", "out": "named"}
    assert evaluate(*judged_flags(judged, **named))[0] == 0
    np.save(judged / "judged.npy", pairs.text[pairs.text_row[5:]])
    np.save(judged / "index.npy", pairs.image_row[5:])
    files = {"images": "images.npy", "texts": "judged.npy", "image-index": "index.npy", "out": "paired"}
    assert evaluate(*judged_flags(judged, queries=None, gallery=None, qrels=None, **files))[0] == 0
    results = [json.loads((judged / name / "results.json").read_text()) for name in ("judged", "named", "paired")]
    assert results[0]["facts"]["test_queries"] == len(pairs) - 5
    for result in results[:2]:
        assert [part["method"] for part in result["results"]] == ["max_softmax", "margin"]
        for part, expected in zip(result["results"], results[2]["results"]):
            assert (part["queries"], part["items"]) == (len(pairs) - 5, 40)
            assert part["numbers"]["auroc"] == expected["numbers"]["auroc"]
    rows, names = (read_columns(judged / name / "scores/margin_t2i.parquet")["query"] for name in ("judged", "named"))
    assert rows.tolist() == sorted(pairs.text_row[5:])
    assert names.tolist() == [f"text {row}" for row in rows]
    assert "Retrieval uncertainty on rows" in (judged / "judged/report.html").read_text()


def test_queries_without_a_right_item_are_counted(judged, pairs):
    result = CliRunner().invoke(
        app, ["evaluate", *map(str, judged_flags(judged, out="counted")), "--max-queries", "30"]
    )
    assert result.exit_code == 0
    assert f"left out: 5 of {len(pairs)} queries, for which no item is judged right" in result.stderr
    assert json.loads(result.stdout)["results"][0]["queries"] == 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qrels": None}, "--queries, --gallery and --qrels go together"),
        ({"queries": None, "gallery": None, "qrels": None, "ids": "images.txt"}, "go together"),
        ({"pairs": "test"}, "give test pairs, or --queries, --gallery and --qrels"),
        ({"qrels": "names.parquet", "ids": "images.txt"}, "names queries by ids such as 'text .*': give the file"),
        ({"qrels": "nowhere.parquet"}, "nowhere.parquet"),
        ({"qrels": "rows.parquet", "ids": "texts.txt"}, "120 ids, but there are 40 items"),
        ({"qrels": "other.parquet", "ids": "images.txt", "query-ids": "texts.txt"}, "no row has the id 'image 99'"),
        ({"qrels": "none.parquet"}, "no judgement has a grade above 0"),
        ({"gallery": "narrow.npy"}, "texts.npy has width 8, but gallery .*narrow.npy has 5"),
        ({"queries": "narrow.npy", "gallery": "narrow.npy", "qrels": "few.parquet"}, "width 5, but the held-out"),
        ({"gallery": "none.npy"}, "none.npy is missing"),
    ],
)
def test_bad_judgements_are_refused_before_anything_is_written(judged, changes, words):
    np.save(judged / "narrow.npy", np.eye(40, 5, dtype=np.float32) + 0.1)
    other = {"query": np.array(["text 0"], dtype=object), "item": np.array(["image 99"], dtype=object)}
    write_columns(judged / "other.parquet", other, 1)
    write_columns(judged / "few.parquet", {"query": np.arange(20), "item": np.arange(20)}, 20)
    write_columns(judged / "none.parquet", {"query": np.arange(2), "item": np.arange(2), "grade": np.zeros(2)}, 2)
    with pytest.raises((ValueError, TypeError, OSError), match=words):
        evaluate(*judged_flags(judged, **changes))
    with pytest.raises(ValueError, match="judgements are of one direction"):
        evaluate(*(flag for flag in judged_flags(judged) if flag not in ("--direction", "t2i")))
    assert not (judged / "judged").exists()


@pytest.mark.parametrize("beside", [True, False])
def test_a_head_is_read_beside_a_flow_or_alone(folders, beside, monkeypatch):
    """`geoflow train` writes it into the flow's folder, and `geoflow train --head` into its own."""
    head = random_head(gf.HeadConfig(points=2, hidden=8, bank=11), DIM, DIM)
    head.save_pretrained(folders / "model" / "head" if beside else folders / "head")
    studies, create = [], registry.create

    def recorded(name: str, study: Study) -> Method:
        studies.append(study)
        return create(name, study)

    monkeypatch.setattr(registry, "create", recorded)
    out = folders / "report"
    given = ("--pairs", folders / "test", "--held-out", folders / "val", "--out", out, "--resamples", 9)
    model = folders / ("model" if beside else "head")
    code, printed = evaluate(*given, "--model", model, "--methods", "ladder,margin", "--direction", "t2i", "--json")
    assert code == 0
    assert [result["method"] for result in json.loads(printed)["results"]] == ["ladder", "margin"]
    assert head_digest(studies[0].head) == head_digest(head)
    assert (studies[0].flow is not None) == beside
    if not beside:
        with pytest.raises(ValueError, match="rerank needs a trained flow"):
            evaluate(*given, "--model", model, "--methods", "rerank")


def test_bad_flags_are_named_before_anything_is_written(folders):
    out = folders / "report"
    given = ("--pairs", folders / "test", "--held-out", folders / "val", "--out", out)
    with pytest.raises(ValueError, match="needs --pairs or --qrels"):
        evaluate("--out", out)
    assert evaluate("--pairs", folders / "test")[0] == 2
    with pytest.raises(ValueError, match="must be one of"):
        evaluate(*given, "--methods", "no such")
    with pytest.raises(FileNotFoundError):
        evaluate(*given, "--train", folders / "nowhere")
    assert not out.exists()
