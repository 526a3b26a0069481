"""Pictures that pages draw as SVG, so that they follow the page's colours: risk over coverage, and intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 46.0
POINTS = 200
"""Points of a curve, at most."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    name: str
    points: str
    """As an SVG polyline has them."""
    number: int
    """Which of the chart's colours it has, from 0."""


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    at: float
    words: str


@dataclass(frozen=True)
class Mark:
    """A point with a name."""

    x: float
    y: float
    words: str


@dataclass(frozen=True)
class RiskCoverage:
    """Shares of wrong answers (upwards) over the share of queries that is answered (to the right)."""

    curves: tuple[Curve, ...]
    across: tuple[Tick, ...]
    upwards: tuple[Tick, ...]
    top: float
    """The largest risk of the chart."""
    limit: float | None
    """Height of the line of the largest error that is allowed."""
    mark: Mark | None

    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    above: float = TOP
    below: float = HEIGHT - BOTTOM


def risk_coverage(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    max_error: float | None = None,
    certified: tuple[float, float, str] | None = None,
) -> RiskCoverage:
    """A chart of curves, each of which has coverages and risks between 0 and 1. `certified`: coverage and risk of a
    rule, and its name."""
    risks = [float(risk) for _, each in curves.values() for risk in each if math.isfinite(risk)]
    top = _round_up(max([*risks, max_error or 0.0, 0.02]))

    def x(coverage: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * coverage, 1)

    def y(risk: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(risk, top) / top, 1)

    lines = []
    for number, (name, (coverage, risk)) in enumerate(curves.items()):
        pairs = [(float(c), float(r)) for c, r in zip(coverage, risk) if math.isfinite(r)]
        step = max(1, len(pairs) // POINTS)
        kept = [*pairs[:-1:step], *pairs[-1:]]
        lines.append(Curve(name, " ".join(f"{x(c)},{y(r)}" for c, r in kept), number))
    return RiskCoverage(
        tuple(lines),
        tuple(Tick(x(share), f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
        tuple(Tick(y(top * part), f"{top * part:.{0 if top >= 0.04 else 1}%}") for part in (0.0, 0.5, 1.0)),
        top,
        None if max_error is None else y(max_error),
        None if certified is None else Mark(x(certified[0]), y(certified[1]), certified[2]),
    )


@dataclass(frozen=True)
class Whisker:
    """A row of a chart of intervals."""

    name: str
    words: str
    at: float
    low: float
    high: float
    best: bool


@dataclass(frozen=True)
class Whiskers:
    """Values with their intervals below each other; positions are shares of the width."""

    rows: tuple[Whisker, ...]
    ends: tuple[str, str]

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return any(row.low < row.high for row in self.rows)


def whiskers(rows: Sequence[tuple[str, float, float, float]], best: str | None = None) -> Whiskers:
    """A chart of (name, value, low, high); NaN for no interval. `best` names the row that stands out."""
    known = [float(v) for _, *values in rows for v in values if math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low, high = math.floor(20 * low) / 20, max(math.ceil(20 * high) / 20, math.floor(20 * low) / 20 + 0.05)

    def at(value: float, missing: float) -> float:
        return round(100 * ((missing if math.isnan(value) else value) - low) / (high - low), 2)

    made = (
        Whisker(name, f"{value:.3f}", at(value, low), at(least, value), at(most, value), name == best)
        for name, value, least, most in rows
        if math.isfinite(value)
    )
    return Whiskers(tuple(made), (f"{low:.2f}", f"{high:.2f}"))


def _round_up(risk: float) -> float:
    """A round number that is at least as large as the risk."""
    return next((step for step in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8) if step >= risk), 1.0)
