"""How the pages of `geoflow evaluate` open: score cards, risk over coverage, and values with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.results import Comparison, Result
from geoflow_fast.evaluation.verdict import recommended
from geoflow_fast.evaluation.zero_shot import Component, ZeroShot
from geoflow_fast.runtime.pages import charts

CURVES = 3
"""Methods of which a chart has a curve."""
Ranked = TypeVar("Ranked", Result, Component)
AUROC = "AUROC, the probability that a wrong answer is less certain than a right one."


def comparison_tiles(datasets: Mapping[str, Comparison]) -> list[tuple[str, str, str]]:
    """The score card: for each data set and direction, how often plain search is right, and what can be answered."""
    tiles = []
    for name, comparison in datasets.items():
        for direction in comparison.directions:
            results = comparison.of(direction)
            chosen, one = recommended(results), results[0]
            where = figures.DIRECTION_TITLES[direction] if len(datasets) == 1 else f"{name}, {direction}"
            tiles.append((f"{where}: plain search is right", f"{one.plain_recall:.0%}", f"{one.queries:,} queries"))
            if chosen is not None:
                answered = f"answers {chosen.answered[1]:.0%} at 10 % error" if chosen.answered else chosen.title
                tiles.append((f"{where}: AUROC of {chosen.title}", f"{chosen.numbers['auroc']:.3f}", answered))
    return tiles


def show_comparison(page: Report, where: str, results: Sequence[Result]) -> None:
    """Risk over coverage of the recommended method and of what it is compared with, and all AUROCs with intervals."""
    ranked, chosen = _ranked(results), recommended(results)
    wrong = "the share of wrong answers of plain search if only the most certain queries are answered."
    _show(page, where, ranked, chosen, wrong)


def image_tiles(datasets: Mapping[str, ZeroShot]) -> list[tuple[str, str, str]]:
    """The score card of zero-shot classification: how often predictions are right, and which score to doubt them by."""
    tiles = []
    for name, outcome in datasets.items():
        best = _ranked(outcome.components)[0]
        tiles.append((f"{name}: predictions are right", f"{outcome.accuracy:.0%}", f"{len(outcome.correct):,} images"))
        tiles.append((f"{name}: AUROC of {best.title}", f"{best.numbers['auroc']:.3f}", "the best of all scores"))
    return tiles


def show_images(page: Report, where: str, components: Sequence[Component]) -> None:
    """Risk over coverage of the best scores of single images, and the AUROC of all with their intervals."""
    ranked = _ranked(components)
    wrong = "the share of wrong predictions if only the most certain images are classified."
    _show(page, where, ranked, ranked[0], wrong)


def _show(
    page: Report,
    where: str,
    ranked: Sequence[Ranked],
    chosen: Ranked | None,
    wrong: str,
) -> None:
    shown = [*([] if chosen is None else [chosen]), *(each for each in ranked if each is not chosen)][:CURVES]
    curves = {each.title: (each.coverage, [1 - share for share in each.accuracy]) for each in shown}
    page.risk(charts.risk_coverage(curves), f"{where}: {wrong}")
    rows = []
    for each in ranked:
        low, high = each.intervals.get("auroc", [math.nan, math.nan])
        rows.append((each.title, each.numbers["auroc"], low, high))
    page.intervals(charts.whiskers(rows, None if chosen is None else chosen.title), f"{where}: {AUROC}")


def _ranked(results: Sequence[Ranked]) -> list[Ranked]:
    """The best first; those without an AUROC last."""
    return sorted(results, key=lambda each: -_or_low(each.numbers["auroc"]))


def _or_low(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
