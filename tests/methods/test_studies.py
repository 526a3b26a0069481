"""Studies of quality: their tables and gates, and that every one of them can be called by its name."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods import cli as command
from benchmarks.methods import results, studies
from benchmarks.methods.studies import epistemic, real, watch
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.task import RetrievalTask
from tests.evaluation.helpers import DIM


def test_every_study_can_be_run_by_its_name(monkeypatch, capsys):
    names = command.study_names()
    assert {"bfloat16", "comparison", "density", "entropy", "head", "real", "rerank", "trust"} <= set(names)
    for name in names:
        assert callable(importlib.import_module(f"{studies.__name__}.{name}").run)
    monkeypatch.setattr(watch, "run", lambda: "a table")
    with pytest.raises(SystemExit) as done:
        command.main(["study", "watch"])
    assert done.value.code == 0
    assert capsys.readouterr().out == "a table\n"
    with pytest.raises(ValueError, match="study must be one of"):
        command.main(["study", "nonsense"])


def test_blocks_are_filled_with_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    results.report("a_b_c", [{"x": 1.0, "y": "two"}], {})
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- study: a b/c -->\nold\n<!-- study: end -->\n<!-- study: other -->\nkept\n<!-- study: end -->\n"
    )
    results.write_blocks(page)
    table = "| x | y |\n|---|---|\n| 1 | two |\n"
    assert page.read_text() == (
        f"before\n<!-- study: a b/c -->\n{table}<!-- study: end -->\n<!-- study: other -->\nkept\n<!-- study: end -->\n"
    )


def test_every_block_of_the_documentation_belongs_to_a_study():
    for path in results.DOCS.rglob("*.md"):
        for _, key, _, _ in results.BLOCK.findall(path.read_text()):
            assert key.split()[0] in command.study_names(), f"{path}: {key}"


@pytest.mark.slow
def test_the_study_of_watch_goes_on_where_it_stopped(monkeypatch, tmp_path):
    for name, value in {"FITTED": 300, "CERTIFIED": 400, "SOON": 100, "LONG": 100, "HEAD_PAIRS": 500}.items():
        monkeypatch.setattr(watch, name, value)
    for module in (watch, results):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    searched = watch.Searched("a world", "concept world", True, 0.5, runs=2, long_logs=True)
    for run in range(2):
        watch.one_run(searched, run)
    monkeypatch.setattr(watch, "one_run", None)  # nothing is left to do
    rows = watch.rows_of(searched)
    assert {row["runs"] for row in rows} == {2}
    assert len(rows) == 7  # three changes are looked at in two ways, and logs without a change in one
    monkeypatch.setattr(watch, "made_by", lambda: "other code")
    assert results.load(watch.kept_as(searched, 0)) is None


def test_the_epistemic_study_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(epistemic, "FLICKR", tmp_path / "flickr8k")
    monkeypatch.setattr(epistemic, "IMAGENET", tmp_path / "vitb32.npz")
    monkeypatch.setattr(epistemic, "concept_world", lambda: ([{"score": "truth"}], {"agreement": 1.0}))
    page = tmp_path / "likelihood.md"
    page.write_text("<!-- study: epistemic concept_world -->\nold\n<!-- study: end -->\n")
    monkeypatch.setattr(epistemic, "PAGE", page)
    assert "Flickr8k and ImageNet are left out" in epistemic.run()
    assert "| truth |" in page.read_text()
    assert "old" not in page.read_text()


def test_what_is_recommended_must_be_the_best(monkeypatch):
    monkeypatch.setattr(epistemic, "RECOMMENDED", [("wrong?", "zero_shot", "AUSAC", "the softmax", "max softmax")])
    table = {"max softmax": "0.810", epistemic.PAPERS: "0.560", "flow: -PMI": "0.815", "truth": "0.900"}
    rows = [{"score": name, "AUSAC": value} for name, value in table.items()]
    (row,) = epistemic.recommendation({"zero_shot": rows})
    assert row["measured"] == "0.810; best of the flow 0.815 (-PMI)"
    assert row["the paper's score"] == "0.560"
    rows[2]["AUSAC"] = "0.821"
    with pytest.raises(SystemExit, match="wrong"):
        epistemic.recommendation({"zero_shot": rows})


def test_swapped_captions_never_get_their_own_image():
    generator = torch.Generator().manual_seed(0)
    image, text = sample_uniform(30, 8, generator=generator), sample_uniform(150, 8, generator=generator)
    group = np.repeat(np.arange(30), 5)
    parts = epistemic.swapped(gf.EmbeddingPairs.from_arrays(image, text, group), 0)
    for kind, rows in (("kept", 135), ("random", 15), ("similar", 15)):
        captions, images = parts[kind]
        assert len(captions) == len(images) == rows
        assert ((group[captions] == group[images]) == (kind == "kept")).all()
    cosine = (image @ image.T).fill_diagonal_(-1)
    captions, images = parts["similar"]
    assert np.array_equal(group[images], cosine[group[captions]].argmax(1))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_the_ladder_without_its_head_knows_nothing_of_it(pairs, held_out, direction):
    head = gf.PosteriorHead(gf.HeadConfig(points=2), DIM, DIM).eval()
    hubs_only = real.HubsOnly(Study(held_out, head=head, head_seconds=1e6))
    hubs_only.fit(RetrievalTask.of(pairs, direction))
    assert hubs_only.reranker.head is None
    assert (hubs_only.training, hubs_only.facts()) == ("none", {})
    assert hubs_only.fit_seconds < 1e6
