"""Exact bounds of probabilities, and tests one after the other. scipy is imported where it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def clopper_pearson_upper(count: int, n: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson upper bound of a probability, from `count` events in `n` trials; 1 if they are
    equal."""
    from scipy import stats

    checks.integer(count, "count", 0, checks.integer(n, "n"))
    check_open_interval(confidence, "confidence")
    return 1.0 if count == n else float(stats.beta.ppf(confidence, count + 1, n - count))


def binomial_evidence(wrong: NDArray[Any], answered: NDArray[Any], risk: float) -> Floats:
    """The probability of so few `wrong` among so many `answered` if each were wrong with probability `risk`."""
    from scipy import special

    return np.asarray(special.bdtr(np.round(wrong), np.asarray(answered).astype(np.int64), risk))


def bounded_evidence(loss: NDArray[Any], count: NDArray[Any], mean: float) -> Floats:
    """An upper bound of the probability of so small a sum of losses, each of them between 0 and 1, in `count`
    independent draws if their mean were `mean`: the smaller of Hoeffding's and Bentkus' bound."""
    from scipy import special

    rate = np.clip(loss / np.maximum(count, 1), 0, mean)
    divergence = special.rel_entr(rate, mean) + special.rel_entr(1 - rate, 1 - mean)
    hoeffding = np.exp(-count * divergence)
    bentkus = np.e * binomial_evidence(np.ceil(loss - 1e-9), count, mean)  # sums of thirds are whole up to rounding
    return np.minimum(1.0, np.minimum(hoeffding, bentkus))


def last_passed(evidence: Floats, levels: Floats) -> int:
    """How many tests there are up to the last one that passes, 0 if none does.

    Tests stand in an order, and have levels, that do not depend on the data. One that passes hands its level on to the
    next, which has it besides its own; with one that fails, its level is lost. This is the fallback procedure: a false
    test passes with a probability of at most the sum of the levels. With the whole level at the first test it is that
    of a fixed sequence.
    """
    last, carried = 0, 0.0
    for number, (probability, level) in enumerate(zip(evidence.tolist(), levels.tolist()), start=1):
        carried += level
        if probability <= carried and carried > 0:
            last = number
        else:
            carried = 0.0
    return last


def check_open_interval(value: float, name: str) -> None:
    """Raises a ValueError unless `value` is above 0 and below 1."""
    if not 0 < checks.number(value, name) < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")
