"""The demo: a short run is complete and repeatable, and a full run is as good as it claims."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
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
    for name, size in {**sizes, "CERTIFIED": 150, "QUIET": 100, "CHANGED": 100, "MAX_ERROR": 0.7}.items():
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

    check_opening(page)
    check_story(tmp_path, numbers["story"], page)

    # The same call again loads the trained flows and gives the same numbers.
    for draw in ("draw_all", "draw_spheres"):
        monkeypatch.setattr(figures, draw, lambda *_: None)
    again = demo.run(tmp_path, 0, 3, lambda _: None)
    assert again is not None
    assert json.loads(json.dumps(demo.summary(again))) == numbers


def check_opening(page):
    """A score card and a picture come first; methods have whiskers, one of them stands out, tables are folded."""
    opening = page[page.index('id="short"') : page.index('id="done"')]
    assert len(re.findall(r'<div class="card[ "]', opening)) == 5
    assert len(re.findall(r'<polyline class="curve c\d" points="[\d., ]{50,}"', opening)) == 3
    for direction, following in (("i2t", "t2i"), ("t2i", "curves")):
        part = page[page.index(f'<h2 id="{direction}"') : page.index(f'<h2 id="{following}"')]
        assert part.count('class="interval chosen"') == 1
        assert part.count('class="interval') - part.count('class="intervals') == len(study.TRAINING_FREE) + 3
        assert re.search(r'<line x1="[\d.]+" x2="[\d.]+" y1="5"', part)
    assert page.count("<table>") == 7
    assert not re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL).count("<table>")


def check_story(folder, told, page):
    """The report leads to the page of the log, which has everything that the story is about."""
    assert f'href="{story.PAGE}"' in page
    assert html.escape(told["verdict"]) in page
    shown = (folder / story.PAGE).read_text("utf-8")
    values = json.loads(re.search(r'id="data">(.*?)</script>', shown, re.DOTALL)[1])
    assert values["n"] == 200
    assert values["certified"]["no_match_share"] == told["no_match_share"] == story.NO_MATCH
    assert values["certified"]["threshold"] == told["threshold"]
    assert {each["name"]: len(each["rows"]) for each in values["marked"]} == {
        name: count for name, count in told["marked"].items() if count
    }
    assert {"strangers", "near-duplicates", "suspected wrong captions"} <= {each["name"] for each in values["marked"]}
    assert values["evidenceNames"][:2] == ["cosine", "hub"]  # a head of three steps may be left out
    assert len(values["thumbnails"]) == len(values["items"])
    assert values["thumbnails"][0].startswith("data:image/")
    assert all(f"<b>{rung['name']}</b>" in shown for rung in told["rungs"])
    assert html.escape(told["verdict"]) in shown
    # A tenth of the first part, and half of the second, ask for what is not there, for which nothing is right.
    missing = np.array([row < 0 for row in values["meant"]])
    assert missing[100:].mean() > 0.35 > missing[:100].mean()


@pytest.mark.parametrize(
    ("noticed", "answered", "held"),
    [
        (200, 0.4, [True, True, True]),
        (None, 0.4, [True, True, False]),
        (-100, 0.4, [True, False, False]),
        (None, 0.0, [False, True, False]),
    ],
)
def test_a_story_that_goes_wrong_is_noticed(noticed, answered, held):
    rule = SimpleNamespace(certificate=SimpleNamespace(answered=answered))
    told = story.Story(rule, None, noticed, [], {})
    assert [check.holds for check in told.checks()] == held


def test_paths_stay_on_their_spheres(tmp_path, monkeypatch):
    flow = flows.learn_spheres(tmp_path, 0, 2)
    assert flow is not None
    monkeypatch.setattr(flows, "SPHERE_POINTS", 7)
    monkeypatch.setattr(flows, "SPHERE_STOPS", 5)
    for path in flows.sphere_paths(flow, 0):
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
    values = json.loads(
        re.search(r'id="data">(.*?)</script>', (tmp_path / story.PAGE).read_text("utf-8"), re.DOTALL)[1]
    )
    rows = next(each["rows"] for each in values["marked"] if each["name"] == "suspected wrong captions")
    assert np.mean(["(a wrong caption)" in values["captions"][row] for row in rows]) > 0.5
    assert "seem to have no right item" in outcome.story.verdict


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
    assert {path.name for path in folder.glob("*.png")} >= {figures.FILES[name] for name in ("certain", "densities")}
    assert sum(path.stat().st_size for path in folder.glob("*.png")) < 2_000_000
