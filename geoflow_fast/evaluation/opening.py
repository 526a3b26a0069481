"""How the pages of `geoflow evaluate` open: score cards, risk over coverage, and values with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.results import Comparison, Result
from geoflow_fast.evaluation.verdict import recommended
from geoflow_fast.runtime.pages import charts

CURVES = 3
"""Methods of which a chart has a curve."""
AUROC = "AUROC, the probability that a wrong answer is less certain than a right one."


class Judged(Protocol):
    """What a chart shows of a method or of anything else that has been judged."""

    @property
    def title(self) -> str:
        """The name that is shown."""

    @property
    def numbers(self) -> dict[str, float]:
        """Its numbers, of which `auroc` is shown."""

    @property
    def coverage(self) -> list[float]:
        """Shares that are answered."""

    @property
    def accuracy(self) -> list[float]:
        """The accuracy at these coverages."""

    @property
    def intervals(self) -> dict[str, list[float]]:
        """[low, high] of some numbers."""


Ranked = TypeVar("Ranked", bound=Judged)


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
    wrong = "the share of wrong answers of plain search if only the most certain queries are answered."
    show_ranked(page, where, best_first(results), recommended(results), wrong)


def show_ranked(page: Report, where: str, ranked: Sequence[Ranked], chosen: Ranked | None, wrong: str) -> None:
    """Risk over coverage, `wrong` in words, of the `chosen` one and the next best, and all AUROCs with intervals."""
    shown = [*([] if chosen is None else [chosen]), *(each for each in ranked if each is not chosen)][:CURVES]
    curves = {each.title: (each.coverage, [1 - share for share in each.accuracy]) for each in shown}
    page.risk(charts.risk_coverage(curves), f"{where}: {wrong}")
    rows = []
    for each in ranked:
        low, high = each.intervals.get("auroc", [math.nan, math.nan])
        rows.append((each.title, each.numbers["auroc"], low, high))
    page.intervals(charts.whiskers(rows, None if chosen is None else chosen.title), f"{where}: {AUROC}")


def best_first(results: Sequence[Ranked]) -> list[Ranked]:
    """The best first; those without an AUROC last."""
    return sorted(results, key=lambda each: -_or_low(each.numbers["auroc"]))


def _or_low(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
