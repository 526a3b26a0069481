"""The demo: a short run is complete and repeatable, and a full run is as good as it claims."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from geoflow_fast import demo
from geoflow_fast.cli.app import app
from geoflow_fast.demo import clip_world, figures, flows, story, study
from geoflow_fast.worlds import ConceptWorld

PICTURES = set(figures.FILES.values())


@pytest.fixture
def small(monkeypatch):
    """Sizes so small that a run takes seconds."""
    sizes = {"QUERIES": 60, "ITEMS": 100, "HELD_OUT": 150, "UNSEEN_PAIRS": 30, "DENSITY_ROWS": 30}
    sizes |= {"TUNING_QUERIES": 8, "CALIBRATION_QUERIES": 150, "GUIDANCES": (0.0,), "RERANK_STEPS": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(study, name, size)
    for name, size in {"IMAGES": 120, "HELD_OUT": 60, "QUERIES": 50, "ITEMS": 60, "SHORTLIST": 16, "BANK": 50}.items():
        monkeypatch.setattr(clip_world, name, size)
    sizes = {"ITEMS": 60, "CAPTIONS": 10, "HELD_OUT": 60, "BANK": 50, "SHORTLIST": 16, "FITTED": 150}
    for name, size in {**sizes, "CERTIFIED": 150, "QUIET": 100, "CHANGED": 100}.items():
        monkeypatch.setattr(story, name, size)
    for module in (flows, demo):
        monkeypatch.setattr(module, "PAIRS", 2000)


@pytest.mark.usefixtures("small")
def test_a_short_run_writes_report_pictures_and_numbers(tmp_path, monkeypatch):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--steps", "3"])
    assert result.exit_code == 0, result.exception
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    page = (tmp_path / demo.REPORT).read_text(encoding="utf-8")
    assert page.count("<img ") == len(PICTURES)
    assert len(re.findall(r'<img [^>]*alt="[^"]{20,}"', page)) == len(PICTURES)
    numbers = json.loads((tmp_path / "summary.json").read_text())
    held = [check["holds"] for check in numbers["checks"]]
    assert not all(held)  # three steps teach nothing, as both the page and the terminal tell
    assert "Expected, but missed" in page
    assert result.output.count("MISSED") == held.count(False)
    assert f"{held.count(True)} of {len(held)} expectations hold" in result.output
    methods = [row["method"] for row in numbers["retrieval"]["t2i"]]
    assert {"kNN distance", "max softmax", "cosine margin", study.ENTROPY, study.RERANKER} <= set(methods)
    for rows in numbers["clip_world"].values():
        assert [row["method"] for row in rows] == [clip_world.SOFTMAX, clip_world.LADDER, clip_world.EXACT]
        best = rows[-1]
        # What is exact finds missing items better than what knows of none.
        assert all(best["AUROC of missing items"] > row["AUROC of missing items"] for row in rows[:-1])

    # The same call again loads the trained flows and gives the same numbers.
    for draw in ("draw_all", "draw_spheres"):
        monkeypatch.setattr(figures, draw, lambda *_: None)
    again = demo.run(tmp_path, 0, 3, lambda _: None)
    assert again is not None
    assert json.loads(json.dumps(demo.summary(again))) == numbers


def test_paths_stay_on_their_spheres(tmp_path):
    flow = flows.learn_spheres(tmp_path, 0, 2)
    assert flow is not None
    for path in flows.sphere_paths(flow, 0, points=7, stops=5):
        assert path.shape == (5, 7, 3)
        torch.testing.assert_close(path.norm(dim=-1), torch.ones(5, 7))


def test_unseen_pairs_are_compared_with_known_ones():
    unseen = study.UnseenOutcome({"s": {"known": torch.tensor([0.0, 1.0]), "far": torch.tensor([2.0, 3.0, 0.5])}})
    assert unseen.auroc("s", "far") == pytest.approx(5 / 6)


@pytest.mark.slow
def test_a_full_run_meets_every_expectation(tmp_path):
    outcome = demo.run(tmp_path, 0, None, lambda _: None)
    assert outcome is not None
    missed = [check for check in outcome.checks() if not check.holds]
    assert not missed
    for part in outcome.by_direction.values():
        assert part.calibration_error < 0.05
        assert part.reranked_recall > part.plain_recall


def test_the_true_posterior_is_calibrated():
    """The mean true probability of the answers of plain search is the share of them that is right."""
    world = ConceptWorld()
    image, text, _ = world.sample(300, generator=torch.Generator().manual_seed(0))
    truth = world.gallery_posterior(text, image, "t2i")
    answer = (text @ image.T).argmax(1)
    p_answer = truth.gather(1, answer.unsqueeze(1)).squeeze(1)
    right = (answer == torch.arange(300)).double()
    assert float(p_answer.mean()) == pytest.approx(float(right.mean()), abs=0.08)


def test_pictures_of_the_documentation_are_modest():
    folder = Path(__file__).parents[2] / "docs/images"
    assert {path.name for path in folder.glob("*.png")} >= {
        figures.FILES[name] for name in ("spheres", "certain", "densities")
    }
    assert sum(path.stat().st_size for path in folder.glob("*.png")) < 2_000_000
