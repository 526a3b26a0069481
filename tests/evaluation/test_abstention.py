"""Abstention thresholds keep their promise, and no cheaper procedure would."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

import geoflow_fast as gf

ev = gf.evaluation


def true_risk(threshold: float) -> float:
    """The risk below a threshold of uniform scores if answers are wrong with probability score / 2 below .9, and always
    above."""
    below = min(threshold, 0.9)
    return (below**2 / 4 + (threshold - below)) / threshold if threshold > 0 else 0.0


@pytest.mark.parametrize("levels", [None, 12])
@pytest.mark.parametrize("own", [False, True])
def test_the_promised_risk_is_exceeded_at_most_as_often_as_promised(levels, own):
    """1,000 draws of 800 answers, with and without ties, where the true risk of every threshold is known."""
    target, confidence, exceeded, thresholds = 0.15, 0.9, 0, []
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        score = rng.random(800)
        right = rng.random(800) >= np.where(score < 0.9, score / 2, 1)
        if levels:
            score = np.ceil(score * levels) / levels
        candidates = np.linspace(0.25, 1, 31) if own else None
        act = ev.abstention_threshold(score, right, target, confidence, candidates=candidates, seed=seed)
        edge = act.threshold if not levels else np.floor(max(act.threshold, 0) * levels + 1e-9) / levels
        exceeded += true_risk(max(edge, 0.0)) > target
        thresholds.append(act)
    assert exceeded <= 1000 * (1 - confidence)
    certified = [act for act in thresholds if act.certified]
    assert all(act.risk_bound <= target for act in certified)
    # The promise is not kept by never answering: .6 is where the true risk reaches the target.
    assert len(certified) > 900
    assert np.median([act.threshold for act in certified]) > 0.4


def test_a_search_for_the_loosest_bound_would_break_the_promise():
    """Why the tests stop at the first failure: of many candidates near the target some pass by chance."""
    target, naive, sequence = 0.3, 0, 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        score, right = rng.random(400), rng.random(400) >= target + 0.01  # every threshold is just above the target
        candidates = np.linspace(0.1, 1, 40)
        accepted = score[:, None] <= candidates
        wrong = (accepted & ~right[:, None]).sum(0)
        naive += bool((stats.binom.cdf(wrong, accepted.sum(0), target) <= 0.1).any())
        sequence += ev.abstention_threshold(score, right, target, 0.9, candidates=candidates).certified
    assert naive > 150
    assert sequence <= 100


def test_own_candidates_are_tested_in_order_up_to_the_first_failure():
    score = np.arange(200.0)
    right = (score < 100) | (score > 150)
    act = ev.abstention_threshold(score, right, 0.1, candidates=[60, 90, 140, 80])
    assert (act.threshold, act.tested, act.coverage, act.risk) == (90, 200, 91 / 200, 0)
    assert act.answers(torch.tensor([90.0, 90.1])).tolist() == [True, False]
    none = ev.abstention_threshold(score, right, 0.1, candidates=[5, 90])  # six answers prove nothing
    assert not none.certified
    assert none.coverage == 0
    assert math.isnan(none.risk)
    assert not none.answers([-1e9]).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ev.abstention_threshold([1, 2], [1, 0], 0.0), "target_risk"),
        (lambda: ev.abstention_threshold([1, 2], [1, 0], 0.1, 1.0), "confidence"),
        (lambda: ev.abstention_threshold([1], [1], 0.1), "candidates"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
