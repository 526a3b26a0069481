"""Ranks, correlations and bootstrap intervals.

scipy does the mathematics. It is imported where it is used, because importing it takes as long as importing torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.decisions.bounds import Bools as Bools
from geoflow_fast.decisions.bounds import Floats as Floats
from geoflow_fast.decisions.bounds import check_open_interval
from geoflow_fast.runtime import checks

Values = Tensor | NDArray[Any] | Sequence[Any]
RowCounts = NDArray[np.int64]
"""[n], how often each row occurs: once, or as often as a resample has drawn it."""

RESAMPLES, MOST_RESAMPLES = 1000, 1_000_000


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval from `low` to `high` of a statistic; `value` is the statistic of the sample itself."""

    value: float
    low: float
    high: float
    confidence: float


def ranks(values: Values) -> Floats:
    """Ranks [n] of the `values`, starting at 1; tied values get the mean of their ranks."""
    from scipy import stats

    return np.asarray(stats.rankdata(floats(values, "values")))


def pearson(x: Values, y: Values) -> float:
    """Pearson's linear correlation of `x` [n] and `y` [n]; NaN if one of them is constant."""
    a, b = floats(x, "x"), floats(y, "y")
    if len(a) != len(b):
        raise ValueError(f"x has {len(a)} values, y has {len(b)}")
    return float(correlation(a, b)) if len(a) > 1 else math.nan


def spearman(x: Values, y: Values) -> float:
    """Spearman's rank correlation of `x` [n] and `y` [n], with mean ranks for ties; NaN if one of them is constant."""
    return pearson(ranks(x), ranks(y))


def correlation(x: NDArray[Any], y: NDArray[Any]) -> Floats:
    """Pearson's correlation along the last axis, between -1 and 1; NaN where one side is constant or not finite."""
    from scipy import stats

    with warnings.catch_warnings(), np.errstate(invalid="ignore", over="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # the NaN already tells the caller
        return np.clip(stats.pearsonr(x, y, axis=-1).statistic, -1, 1)


def bootstrap_interval(
    statistic: Callable[..., float],
    *values: Values,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
    groups: Values | None = None,
) -> Interval:
    """Bootstrap percentile interval of `statistic(*values)`; the rows of all `values` [n] are resampled together.

    `groups` [n]: rows of the same group, such as the captions of an image, are not independent and are drawn together.
    Resamples in which the statistic is NaN are ignored; if it is NaN in all of them, so are both ends.
    """
    arrays = [checks.array(x, f"values[{k}]") for k, x in enumerate(values)]
    if not arrays or any(x.shape[:1] != arrays[0].shape[:1] or not len(x) for x in arrays):
        raise ValueError(f"values must have one common, positive length, got {[x.shape for x in arrays]}")
    rows = np.arange(len(arrays[0]))

    def of_rows(count: RowCounts) -> Floats:
        chosen = np.repeat(rows, count)
        return np.array([statistic(*(x[chosen] for x in arrays))])

    drawn = bootstrap(of_rows, len(rows), resamples, seed, groups)
    return percentile_intervals(of_rows(np.ones_like(rows)), drawn, confidence)[0]


def bootstrap(
    statistic: Callable[[RowCounts], Floats], rows: int, resamples: int, seed: int, groups: Values | None
) -> Floats:
    """Values [resamples, k] of a statistic with k components, computed from how often each of the rows was drawn.

    scipy.stats.bootstrap is not used: it cannot draw groups of rows together, and it would sort all the answers again
    for every resample and every component, where counting the rows needs one sort in all.
    """
    checks.integer(resamples, "resamples", 2, MOST_RESAMPLES)
    names = np.arange(rows) if groups is None else checks.array(groups, "groups")
    if names.shape != (rows,):
        raise ValueError(f"groups must have one entry per row, [{rows}], got {names.shape}")
    group = np.unique(names, return_inverse=True)[1]
    total = int(group.max()) + 1
    generator = np.random.default_rng(checks.integer(seed, "seed"))
    draws = (np.bincount(generator.integers(total, size=total), minlength=total) for _ in range(resamples))
    return np.array([statistic(draw[group]) for draw in draws])


def percentile_intervals(values: Floats, drawn: Floats, confidence: float) -> list[Interval]:
    """Intervals of the statistics `values` [k] from their values `drawn` [resamples, k] in resamples, NaN ignored."""
    check_open_interval(confidence, "confidence")
    tail = (1 - confidence) / 2
    intervals = []
    for value, column in zip(values.tolist(), drawn.T):
        known = column[~np.isnan(column)]
        low, high = np.quantile(known, (tail, 1 - tail)).tolist() if len(known) else (math.nan, math.nan)
        intervals.append(Interval(value, low, high, confidence))
    return intervals


def check_resamples(resamples: int) -> None:
    """Raises a ValueError unless `resamples` is 0, which asks for no intervals, or at least 2."""
    if checks.integer(resamples, "resamples", 0, MOST_RESAMPLES) == 1:
        raise ValueError("resamples must be 0 or at least 2, got 1")


def scored_answers(values: Values, correct: Values, name: str = "uncertainty") -> tuple[Floats, Bools]:
    """The scores `values` and which answers are `correct`, as arrays of one length, which is at least 1."""
    score, right = floats(values, name), floats(correct, "correct")
    if len(score) != len(right):
        raise ValueError(f"{name} has {len(score)} entries, but correct has {len(right)}")
    if not len(score):
        raise ValueError(f"{name} is empty")
    other = ~np.isin(right, (0, 1))
    if other.any():
        row = int(other.argmax())
        raise ValueError(f"correct must be true or false, but row {row} is {right[row]}")
    return score, right.astype(bool)


def scored_shares(values: Values, correct: Values, name: str = "uncertainty") -> tuple[Floats, Floats]:
    """Does what `scored_answers` does, but an answer may be right with a probability, as one of tied items is."""
    share = floats(correct, "correct")
    between = (share > 0) & (share < 1)
    score, known = scored_answers(values, np.where(between, 1, share), name)
    return score, np.where(between, share, known)


def floats(values: Values, name: str) -> Floats:
    """The values as a float64 array [n] without NaN."""
    array = checks.reals(values, name)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one value per query, [n], got shape {array.shape}")
    missing = np.isnan(array)
    if missing.any():
        raise ValueError(f"{name} has NaN at row {int(missing.argmax())}")
    return array
