"""How far one method is ahead of others on the same queries, with paired intervals and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from geoflow_fast.evaluation.compare import ScoredQueries
from geoflow_fast.evaluation.metrics import aurc, auroc, reliability
from geoflow_fast.evaluation.statistics import (
    RESAMPLES,
    Floats,
    RowCounts,
    bootstrap,
    percentile_intervals,
)
from geoflow_fast.runtime.parquet import Columns

MEASURES: dict[str, tuple[str, float, Callable[[Columns], float]]] = {
    "nll": ("nll", -1.0, lambda x: float(x["nll"].mean())),
    "auroc": ("uncertainty", 1.0, lambda x: auroc(x["uncertainty"], x["first_right"])),
    "aurc": ("uncertainty", -1.0, lambda x: aurc(x["uncertainty"], x["first_right"])),
    "recall": ("own_right", 1.0, lambda x: float(x["own_right"].mean())),
    "ece": ("p_answer", -1.0, lambda x: reliability(x["p_answer"], x["first_right"]).ece),
}
"""By name: the column that a method must have for it, 1 if more is better and -1 if less is, and how to compute it."""


@dataclass(frozen=True)
class Lead:
    """By how much one method is better than another in one measure; negative if it is worse."""

    measure: str
    direction: str
    over: str
    """Name of the other method."""
    value: float
    low: float
    high: float
    p: float
    """Two-sided p-value of "both are equally good", from the standard deviation of the lead over resamples."""
    p_holm: float = math.nan
    """The same after Holm's correction for all leads of a table, see `corrected`."""


def paired_leads(
    ours: ScoredQueries,
    others: Sequence[ScoredQueries],
    *,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Lead]:
    """The leads of `ours` over the others in every measure that both have; all scored the same queries. The bootstrap
    draws images with all their queries, the same for all methods."""
    from scipy import stats

    columns = [method.columns for method in (ours, *others)]
    image = ours.columns["image"]
    if any(not np.array_equal(image, other["image"]) for other in columns):
        raise ValueError("methods must have scored the same queries in the same order")
    needed = [{name for name, (column, *_) in MEASURES.items() if not np.isnan(x[column]).any()} for x in columns]
    asked = [(k, name) for k in range(1, len(columns)) for name in MEASURES if name in needed[0] & needed[k]]
    rows = np.arange(len(image))

    def of_rows(count: RowCounts) -> Floats:
        drawn = np.repeat(rows, count)
        parts = [{name: x[drawn] for name, x in part.items()} for part in columns]
        value = {(k, name): MEASURES[name][2](part) for k, part in enumerate(parts) for name in needed[k]}
        return np.array([MEASURES[name][1] * (value[0, name] - value[k, name]) for k, name in asked])

    values, drawn = of_rows(np.ones(len(rows), np.int64)), bootstrap(of_rows, len(rows), resamples, seed, image)
    leads = []
    for (k, name), interval, column in zip(asked, percentile_intervals(values, drawn, confidence), drawn.T):
        spread = float(np.std(column[~np.isnan(column)], ddof=1)) if not math.isnan(interval.value) else math.nan
        # Where no resample differs, a lead is certain, unless it is zero, such as that of a method over itself.
        p = float(2 * stats.norm.sf(abs(interval.value) / spread)) if spread else float(interval.value == 0)
        leads.append(Lead(name, ours.direction, others[k - 1].method, interval.value, interval.low, interval.high, p))
    return leads


def corrected(leads: Sequence[Lead]) -> list[Lead]:
    """The leads of one table with p-values after Holm's correction."""
    adjusted = holm([lead.p for lead in leads])
    return [replace(lead, p_holm=p) for lead, p in zip(leads, adjusted)]


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction of the probabilities `p` of several tests; NaN stays NaN and does not count."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values)[: int((~np.isnan(values)).sum())]
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected = np.full(len(values), math.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(order) else steps
    return [float(x) for x in corrected]
