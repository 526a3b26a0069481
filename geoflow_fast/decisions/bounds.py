"""Exact bounds of probabilities, and tests in a fixed sequence. scipy is imported where it is used."""

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


def clopper_pearson_lower(count: int, n: int, confidence: float = 0.95) -> float:
    """The lower bound that belongs to `clopper_pearson_upper`; 0 if there was no event."""
    return 1 - clopper_pearson_upper(n - count, n, confidence)


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


def leading_passes(evidence: Floats, level: float) -> int:
    """How many tests pass before the first that fails. With each at the full level, in an order that does not depend
    on the data, a false one passes with probability `level` at most: the first false one would have to."""
    failed = evidence > level
    return int(failed.argmax()) if failed.any() else len(failed)


def check_open_interval(value: float, name: str) -> None:
    """Raises a ValueError unless `value` is above 0 and below 1."""
    if not 0 < checks.number(value, name) < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")
