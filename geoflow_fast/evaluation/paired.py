"""Paired differences between one method and others on the same queries, with intervals and a test of each.

A difference is positive where the one method is better, whatever it measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from geoflow_fast.evaluation.metrics import auroc_leads
from geoflow_fast.evaluation.statistics import RESAMPLES, Floats, Interval, bootstrap_interval
from geoflow_fast.runtime.parquet import Columns


@dataclass(frozen=True)
class Gain:
    """How much better one method is than another by one measure."""

    other: str
    measure: str
    interval: Interval
    """The difference with its 95 % bootstrap interval over images."""
    p_worse: float
    """Probability of a difference at least as bad as this one if the methods were equal, by a normal approximation with
    the width of the interval; Holm's correction over the whole table is applied."""


# unchecked: a comparison calls it with columns of its own
def gains(
    ours: Columns,
    others: Mapping[str, Columns],
    right: Floats,
    images: Floats,
    *,
    resamples: int = RESAMPLES,
) -> list[Gain]:
    """The gains of `ours` over every other method by every measure that both have.

    Columns have the `uncertainty`, `nll` and `hit` [Q] of every query, NaN for what a method does not say; `right` [Q]
    tells whether plain search was, and `images` [Q] which queries are drawn together.
    """
    known: list[tuple[str, str, Interval]] = []
    for name, other in others.items():
        for measure, column, sign in (("NLL", "nll", -1), ("Recall@1", "hit", 1)):
            difference = sign * (ours[column] - other[column])
            if not np.isnan(difference).any():
                known.append(
                    (name, measure, bootstrap_interval(np.mean, difference, groups=images, resamples=resamples))
                )
        pair = {"ours": ours["uncertainty"], "other": other["uncertainty"]}
        lead = auroc_leads(pair, right, resamples=resamples, groups=images)["ours"]["other"]
        known.append((name, "AUROC", lead))
    corrected = holm([p_below_zero(interval) for _, _, interval in known])
    return [Gain(name, measure, interval, p) for (name, measure, interval), p in zip(known, corrected)]


def p_below_zero(interval: Interval) -> float:
    """One-sided probability of a value at least as low as that of the interval if its truth were zero."""
    from scipy import stats

    width = (interval.high - interval.low) / 2
    if not width > 0:
        return 0.0 if interval.value < 0 else 1.0
    return float(stats.norm.cdf(interval.value / width * stats.norm.ppf((1 + interval.confidence) / 2)))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction of the probabilities `p` of several tests; NaN stays NaN and does not count."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values)[: int((~np.isnan(values)).sum())]
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected = np.full(len(values), math.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(order) else steps
    return [float(x) for x in corrected]
