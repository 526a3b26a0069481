"""When to answer and when to abstain: a threshold of the uncertainty with a guaranteed error rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geoflow_fast.decisions.bounds import (
    Bools,
    Floats,
    binomial_evidence,
    check_open_interval,
    clopper_pearson_upper,
    last_passed,
)
from geoflow_fast.evaluation.statistics import Values, floats, scored_answers
from geoflow_fast.runtime import checks

CANDIDATES = 40
"""Largest number of thresholds that are tested if the caller gives none."""


@dataclass(frozen=True)
class AbstentionThreshold:
    """A rule for abstaining: answer a query if its uncertainty is at most `threshold`."""

    threshold: float
    """-inf, which means always to abstain, if no candidate could be certified."""
    coverage: float
    """Share of the tested answers at or below the threshold."""
    risk: float
    """Share of wrong answers among those; NaN if there are none."""
    risk_bound: float
    """Clopper-Pearson upper bound of the risk at this threshold taken alone. It is at most `target_risk`, which is what
    is guaranteed, unless nothing is answered."""
    target_risk: float
    confidence: float
    tested: int
    """Number of answers used for the tests; the others served to choose the candidates."""

    @property
    def certified(self) -> bool:
        """True if a threshold could be certified."""
        return self.threshold > -math.inf

    def answers(self, uncertainty: Values) -> Bools:
        """Which queries to answer, bool [n], given their uncertainties [n]."""
        return floats(uncertainty, "uncertainty") <= self.threshold


def abstention_threshold(
    uncertainty: Values,
    correct: Values,
    target_risk: float,
    confidence: float = 0.95,
    *,
    candidates: Sequence[float] | None = None,
    share: float = 0.2,
    seed: int = 0,
) -> AbstentionThreshold:
    """The loosest certified threshold: answers whose uncertainty is at most this are wrong with probability at most
    `target_risk`.

    The guarantee holds for finite samples and any score: with probability at least `confidence` over the draw of these
    answers, a new answer from the same distribution whose uncertainty is at most the threshold is wrong with
    probability at most `target_risk`. The answers must be independent, so use one caption per image.

    The method is fixed-sequence testing of candidates that do not depend on the answers they are tested on. Given the
    number of answers that a fixed threshold accepts, the number of wrong ones is binomial, so the Clopper-Pearson
    bound, and with it the test of "the risk is above the target", is exact. Candidates are tested in a fixed order,
    each at the full level, up to the first that fails: for a false certificate the first candidate whose risk is above
    the target would have to pass its own test. The level therefore need not be divided among the candidates.

    By default a random `share` of the answers, drawn by `seed`, is set aside to choose the candidates: up to 40 of its
    uncertainties, beginning with the one that has the strongest evidence there and going on to looser ones. Your own
    `candidates`, fixed before these answers were seen, are tested in the given order on all answers. If the first
    candidate fails, the threshold is -inf.
    """
    score, right = scored_answers(uncertainty, correct)
    for name, value in (("target_risk", target_risk), ("confidence", confidence), ("share", share)):
        check_open_interval(value, name)
    if candidates is not None:
        thresholds = floats(candidates, "candidates")
    elif len(score) < 2:
        raise ValueError("one answer cannot be divided: give candidates, or more answers")
    else:
        order = np.random.default_rng(checks.integer(seed, "seed")).permutation(len(score))
        set_aside = np.isin(np.arange(len(score)), order[: max(1, round(share * len(score)))])
        thresholds = _promising(score[set_aside], right[set_aside], target_risk)
        score, right = score[~set_aside], right[~set_aside]
    levels = np.where(np.arange(len(thresholds)) == 0, 1 - confidence, 0.0)
    passed = thresholds[: last_passed(_evidence(score, right, thresholds, target_risk), levels)]
    best = float(passed.max()) if len(passed) else -math.inf
    accepted = score <= best
    wrong, given = int((~right[accepted]).sum()), int(accepted.sum())
    risk = wrong / given if given else math.nan
    bound = clopper_pearson_upper(wrong, given, confidence)
    return AbstentionThreshold(best, given / len(score), risk, bound, target_risk, confidence, len(score))


def _promising(score: Floats, right: Bools, target_risk: float) -> Floats:
    """Ascending thresholds at quantiles of the scores, from the one with the strongest evidence for a lower risk."""
    thresholds = np.unique(np.quantile(score, np.linspace(0, 1, CANDIDATES + 1)[1:], method="higher"))
    return thresholds[int(np.argmin(_evidence(score, right, thresholds, target_risk))) :]


def _evidence(score: Floats, right: Bools, thresholds: Floats, target_risk: float) -> Floats:
    """For each threshold, the probability of so few wrong answers among the accepted ones if the risk were
    `target_risk`."""
    order = np.argsort(score)
    accepted = np.searchsorted(score[order], thresholds, side="right")
    wrong = np.concatenate(([0], np.cumsum(~right[order])))[accepted]
    return binomial_evidence(wrong, accepted, target_risk)
