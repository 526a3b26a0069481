"""The sentence that names the best method and recommends one, on made-up tables and on a real comparison."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

import geoflow_fast as gf
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.flow_methods import FlowEntropy
from geoflow_fast.evaluation.job import recommendation, write_report
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.metrics import auroc, auroc_leads
from geoflow_fast.evaluation.report import TableRows
from geoflow_fast.evaluation.results import COLUMNS, Comparison, Result, aggregate
from geoflow_fast.evaluation.statistics import bootstrap_interval
from geoflow_fast.evaluation.verdict import recommended, verdict
from tests.evaluation.helpers import drawn_answers

TRAINING = {"rerank": "flow", "entropy": "flow", "adapter": "baseline", "hub": "none", "softmax": "none"}


def table(half_width: float, runs: int = 1, **aurocs: float) -> list[Result]:
    """Results with these AUROCs, whose leads over each other have intervals of the same width."""
    results = []
    for name, value in aurocs.items():
        lead = {o: [value - v, value - v - half_width, value - v + half_width] for o, v in aurocs.items() if o != name}
        numbers = {"auroc": value}
        given = {"training": TRAINING[name], "lead": lead, "seeds": list(range(runs))}
        results.append(Result(name, name.title(), "t2i", 100, 50, 0.5, numbers, [], [], [], **given))
    return results


def test_a_flow_that_leads_beyond_chance_is_recommended():
    words = verdict(table(0.02, rerank=0.9, entropy=0.85, adapter=0.86, hub=0.8, softmax=0.7))
    assert words == (
        "Rerank has the best AUROC, 0.900, and leads every cheaper method beyond chance, the best of them, Adapter "
        "(0.860), by 0.040, 95 % interval 0.020 to 0.060: use Rerank."
    )


def test_a_reference_within_chance_of_the_flow_is_recommended():
    words = verdict(table(0.03, rerank=0.81, adapter=0.805, hub=0.8, softmax=0.7))
    assert words == (
        "Rerank has the best AUROC, 0.810, but its lead over Hub (0.800), which needs no training, is within chance "
        "(0.010, 95 % interval -0.020 to 0.040): use Hub."
    )


def test_the_cheaper_of_two_references_is_recommended_only_if_it_is_as_good():
    assert verdict(table(0.03, rerank=0.81, adapter=0.8, hub=0.77)).endswith("use Adapter.")
    assert verdict(table(0.03, adapter=0.8, hub=0.78, softmax=0.79)).endswith("use Softmax.")


def test_a_reference_that_wins_is_recommended():
    words = verdict(table(0.01, rerank=0.75, hub=0.8, softmax=0.7))
    assert words == (
        "Hub has the best AUROC, 0.800; the best of the flow's methods, Rerank, has 0.750 (0.050, 95 % interval 0.040 "
        "to 0.060): use Hub."
    )
    words = verdict(table(0.01, rerank=0.75, adapter=0.8, hub=0.78))
    assert "leads every cheaper method beyond chance, the best of them, Hub (0.780)" in words
    assert "the best of the flow's methods, Rerank, has 0.750" in words
    assert words.endswith("use Adapter.")


def test_without_intervals_or_numbers_nothing_is_claimed():
    bare = [Result(r.method, r.title, "t2i", 9, 9, 0.5, r.numbers, [], [], []) for r in table(0.1, rerank=0.8, hub=0.7)]
    assert verdict(bare) == "Rerank has the best AUROC, 0.800; no intervals were computed, so this may be chance."
    assert "no AUROC" in verdict(table(0.1, hub=math.nan))
    assert verdict(table(0.1, hub=0.8)) == "Hub has the best AUROC, 0.800: use Hub."


def test_leads_are_a_paired_bootstrap():
    """Against the general bootstrap of a difference, with the same resamples of groups."""
    first, right = drawn_answers(200, 0)
    second = first + 0.2 * np.random.default_rng(1).normal(size=200)
    groups = np.arange(200) // 2
    leads = auroc_leads({"a": first, "b": second}, right, resamples=50, groups=groups, seed=3)
    truth = bootstrap_interval(
        lambda x, y, correct: auroc(x, correct) - auroc(y, correct),
        first,
        second,
        right,
        resamples=50,
        groups=groups,
        seed=3,
    )
    for name in ("value", "low", "high"):
        assert getattr(leads["a"]["b"], name) == pytest.approx(getattr(truth, name))
        assert getattr(leads["b"]["a"], {"low": "high", "high": "low"}.get(name, name)) == pytest.approx(
            -getattr(truth, name)
        )


def test_the_page_of_a_comparison_has_the_sentence(pairs, held_out, small_flow, tmp_path, monkeypatch):
    monkeypatch.setattr(FlowEntropy, "sampling", dataclasses.replace(gf.FAST_SAMPLING, n_samples=4, n_steps=2))
    names = ("margin", "max_softmax", "entropy")
    runs = [compare(Study(held_out, flow=small_flow, seed=s), pairs, names, resamples=20) for s in range(2)]
    comparison = runs[0]
    assert [result.training for result in comparison.of("t2i")] == ["none", "none", "flow"]
    lead = comparison.of("t2i")[0].lead["max_softmax"]
    margin, softmax = (result.numbers["auroc"] for result in comparison.of("t2i")[:2])
    assert lead[0] == pytest.approx(margin - softmax)
    assert lead[1] <= lead[0] <= lead[2]
    comparison.save(tmp_path)
    assert Comparison.load(tmp_path).results[0].lead == comparison.results[0].lead
    page = write_report({"test": comparison}, tmp_path, "title").read_text()
    assert "Which to use" in page
    assert f"test, text to image: {verdict(comparison.of('t2i'))}".replace("'", "&#39;") in page
    mean = aggregate(runs).of("t2i")[0]
    both = [run.of("t2i")[0].lead["max_softmax"] for run in runs]
    assert mean.lead["max_softmax"] == pytest.approx(
        [np.mean([x[0] for x in both]), min(x[1] for x in both), max(x[2] for x in both)]
    )


def test_the_truth_is_no_contender():
    truth = dataclasses.replace(table(0.02, rerank=0.99)[0], method="truth", title="Truth", training="truth")
    results = [*table(0.02, rerank=0.9, hub=0.8), truth]
    assert verdict(results).startswith("Rerank has the best AUROC")
    assert recommended(results).method == "rerank"
    numbers = dict.fromkeys(COLUMNS, 0.9) | {"spearman": -1.0}
    rows = [dataclasses.replace(r, numbers={**numbers, "auroc": r.numbers["auroc"]}).row() for r in results]
    marked = TableRows.of(rows, {"AUROC": "max", "NLL, nats": "min"}).body
    assert [[cell.text for cell in row if cell.best] for row in marked] == [["0.900", "0.900"], ["0.900"], []]


@pytest.mark.parametrize(
    ("auroc", "spearman", "best"),
    [
        (0.36, 0.9, {"Recall@1", "NLL, nats", "ECE"}),
        (0.36, -0.9, {"Recall@1", "NLL, nats", "ECE", "Spearman", "R^2", "R^2, value"}),
    ],
)
def test_what_is_worse_than_chance_is_never_best(auroc, spearman, best):
    numbers = dict.fromkeys(COLUMNS, 0.5) | {"auroc": auroc, "spearman": spearman}
    comparison = Comparison([dataclasses.replace(table(0.02, hub=auroc)[0], numbers=numbers)])
    rows = TableRows.of(comparison.table("t2i"), comparison.best("t2i"))
    assert {head.text for head, cell in zip(rows.head, rows.body[0]) if cell.best} == best
    assert verdict(comparison.results).endswith("no better than chance: use none of these.")
    assert recommendation({"photos": comparison}) == "Recommendation: use none of these."


def test_the_page_opens_with_a_recommendation_and_an_abstention_table(pairs, held_out, tmp_path):
    comparison = compare(Study(held_out), pairs, ("margin", "max_softmax"), resamples=20)
    page = write_report({"photos": comparison}, tmp_path, "Title").read_text()
    opening = page[page.index("Which to use</h2>") : page.index("The numbers</h2>")]
    assert "Recommendation: " in opening
    assert len(re.findall(r'<div class="card[ "]', opening)) == 4  # two for each direction
    assert len(re.findall(r'<polyline class="curve c\d" points="[\d., ]+"', opening)) == 4
    assert opening.count('<figure class="intervals">') == 2
    for direction in ("t2i", "i2t"):
        chosen = recommended(comparison.of(direction))
        if chosen is not None:
            assert re.search(f'class="interval chosen"[^\n]*{chosen.title}', opening)
    whiskers = [
        (float(low), float(high)) for low, high in re.findall(r'<line x1="([\d.]+)" x2="([\d.]+)" y1="5"', opening)
    ]
    assert len(whiskers) == 4
    assert all(low < high for low, high in whiskers)
    assert "lines are 95 % intervals" in opening
    assert opening.count("<table>") == 2
    assert not re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL).count("<table>")  # all tables are folded
    for words in ("at 5 % error", "at 10 % error", "at 20 % error", "95 % interval"):
        assert words in opening
    assert "NLL, nats" in page
    assert "ECE" in page
    for result in comparison.results:
        assert result.answered == sorted(result.answered)


def test_one_recommendation_for_all_or_one_for_each():
    same, other = table(0.02, rerank=0.9, hub=0.8), table(0.02, rerank=0.7, hub=0.8)
    sides = [dataclasses.replace(result, direction="i2t") for result in same]
    assert recommendation({"a": Comparison([*same, *sides])}) == "Recommendation: use Rerank."
    sides = [dataclasses.replace(result, direction="i2t") for result in other]
    words = recommendation({"a": Comparison([*same, *sides])})
    assert words == "Recommendation: for a, text to image, use Rerank; for a, image to text, use Hub."
