"""Metrics of uncertainties against scipy, scikit-learn, brute force and cases done by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

import geoflow_fast as gf

ev = gf.evaluation


def draw(n: int, seed: int, levels: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Uncertainties, of only so many `levels` if given, and answers that are wrong more often where these are high."""
    rng = np.random.default_rng(seed)
    score = rng.random(n)
    right = rng.random(n) > 0.8 * score
    return (score if levels is None else np.floor(score * levels)), right


@pytest.mark.parametrize("n", [7, 129, 1023])
@pytest.mark.parametrize("levels", [None, 3])
def test_ranks_and_correlations_are_those_of_scipy(n, levels):
    x, right = draw(n, n, levels)
    y = np.random.default_rng(1).integers(0, 5, n)
    assert np.array_equal(ev.ranks(x), stats.rankdata(x))
    assert ev.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert ev.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
    assert ev.auroc(x, right) == pytest.approx(sk.roc_auc_score(~right, x), abs=1e-12)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_lists_arrays_and_tensors_are_taken(kind):
    score, right = draw(50, 0)
    found = ev.retrieval_calibration(kind(score.tolist()), kind(right.tolist()), bins=5)
    assert found.auroc == ev.auroc(score, right)
    strided = torch.tensor(score).repeat_interleave(2)[::2]
    assert ev.aurc(strided, torch.tensor(right).long()) == found.aurc


def test_ties_count_as_the_mean_over_their_orders():
    score, right = np.array([1.0, 0, 1, 0, 2]), np.array([True, False, False, True, True])
    kept = np.arange(1, 6)
    areas, halves = [], []
    for order in itertools.permutations(range(5)):
        ordered = right[list(order)]
        if (np.diff(score[list(order)]) >= 0).all():
            areas.append((np.cumsum(~ordered) / kept).mean())
            halves.append(ordered[:3].mean())
    assert ev.aurc(score, right) == pytest.approx(np.mean(areas), abs=1e-12)
    assert ev.selective_accuracy(score, right, [0.6]).accuracy[0] == pytest.approx(np.mean(halves), abs=1e-12)
    assert ev.auroc(np.zeros(5), right) == 0.5


def test_calibration_of_a_case_done_by_hand():
    """Recall 1, .5, .5, 0 in four bins of two: ranks 4, 2.5, 2.5, 1 against 1, 2, 3, 4."""
    score = np.arange(8.0)
    right = np.array([1, 1, 1, 0, 0, 1, 0, 0])
    found = ev.retrieval_calibration(score[::-1], right[::-1], bins=4)
    assert found.recall.tolist() == [1, 0.5, 0.5, 0]
    assert found.count.tolist() == [2, 2, 2, 2]
    assert found.spearman == pytest.approx(-4.5 / math.sqrt(5 * 4.5))
    assert found.r2 == pytest.approx(stats.linregress(range(4), 1 - found.recall).rvalue ** 2)
    assert found.r2 == pytest.approx(0.9)
    assert found.r2_value == pytest.approx(0.9)  # evenly spaced scores
    bent = ev.retrieval_calibration(score[::-1] ** 2, right[::-1], bins=4)
    means = [0.5, 6.5, 20.5, 42.5]
    assert bent.r2_value == pytest.approx(stats.linregress(means, 1 - found.recall).rvalue ** 2)
    assert dataclasses.replace(bent, r2_value=found.r2_value, recall=0, count=0) == dataclasses.replace(
        found, recall=0, count=0
    )  # all else depends on the order alone
    assert found.auroc == pytest.approx(14 / 16)
    assert found.aurc == pytest.approx(np.mean([0, 0, 0, 1 / 4, 2 / 5, 2 / 6, 3 / 7, 4 / 8]))
    assert found.accuracy == 0.5
    assert not found.intervals


@pytest.mark.parametrize("answer", [True, False])
def test_all_right_and_all_wrong(answer):
    score, right = np.arange(20.0), np.full(20, answer)
    found = ev.retrieval_calibration(score, right, resamples=20)
    assert math.isnan(found.spearman)
    assert math.isnan(found.r2)
    assert math.isnan(found.r2_value)
    assert math.isnan(found.auroc)
    assert math.isnan(found.intervals["auroc"].low)
    assert found.aurc == 1 - answer
    assert found.intervals["aurc"].high == 1 - answer
    assert ev.selective_accuracy(score, right).ausac == answer
    assert ev.abstention_threshold(score, right, 0.3).certified == answer


def test_an_infinite_uncertainty_has_an_order_but_no_line():
    found = ev.retrieval_calibration([1.0, 2.0, 3.0, math.inf], [1, 1, 0, 0], bins=2)
    assert found.spearman == pytest.approx(-1)
    assert math.isnan(found.r2_value)


def test_ties_at_bin_edges_are_broken_by_the_seed():
    score, right = np.zeros(100), np.arange(100) < 50
    recalls = [ev.retrieval_calibration(score, right, seed=seed).recall for seed in (0, 0, 1)]
    assert np.array_equal(recalls[0], recalls[1])
    assert not np.array_equal(recalls[0], recalls[2])
    # In the order of the rows the first bins would be all right and the last all wrong.
    assert max(recalls[0]) < 1
    assert abs(np.mean([ev.retrieval_calibration(score, right, seed=s).spearman for s in range(200)])) < 0.1


def test_bins_differ_by_one_query_at_most():
    found = ev.retrieval_calibration(*draw(129, 4))
    assert found.count.sum() == 129
    assert set(found.count) == {12, 13}
    assert (found.recall * found.count).sum() == pytest.approx(draw(129, 4)[1].sum())


def test_selective_accuracy_by_brute_force():
    score, right = draw(1023, 5)
    found = ev.selective_accuracy(score, right)
    assert found.coverage.tolist() == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    order = np.argsort(score)
    expected = [right[order[: round(c * 1023)]].mean() for c in found.coverage]
    assert found.accuracy == pytest.approx(expected)
    assert found.ausac == pytest.approx(sk.auc(found.coverage, found.accuracy) / 0.9)
    assert ev.selective_accuracy([3, 1], [0, 1], [0.1]).accuracy[0] == 1  # at least one answer is kept


@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_reliability_is_that_of_scikit_learn(strategy):
    rng = np.random.default_rng(6)
    prob = rng.random(1023) ** 2
    right = rng.random(1023) < prob**1.3
    found = ev.reliability(prob, right, 12, strategy=strategy)
    filled = found.count > 0
    accuracy, confidence = calibration_curve(right, prob, n_bins=12, strategy=strategy)
    assert found.accuracy[filled] == pytest.approx(accuracy)
    assert found.confidence[filled] == pytest.approx(confidence)
    gap = np.abs(found.accuracy - found.confidence)[filled]
    assert found.ece == pytest.approx((gap * found.count[filled]).sum() / 1023)
    assert found.brier == pytest.approx(sk.brier_score_loss(right, prob))


def test_reliability_of_edges_and_of_one_probability():
    found = ev.reliability([0, 0.5, 1, 1], [0, 1, 1, 0], 2)
    assert found.count.tolist() == [2, 2]
    assert found.ece == pytest.approx((0.5 + 1) / 4)
    assert math.isnan(ev.reliability([0.9], [1]).accuracy[0])
    assert ev.reliability([0.25] * 4, [1, 0, 0, 0], strategy="quantile").ece == 0


def test_the_bound_of_clopper_and_pearson_solves_its_equation():
    """At the bound, so few events have the probability that the confidence leaves."""
    for n, count in itertools.product((1, 7, 129, 5000), (0, 1, 5, 100)):
        if count <= n:
            bound = ev.clopper_pearson_upper(count, n, 0.9)
            assert bound == pytest.approx(stats.beta.ppf(0.9, count + 1, n - count) if count < n else 1, abs=1e-9)
            assert count == n or stats.binom.cdf(count, n, bound) == pytest.approx(0.1)


def true_risk(threshold: float) -> float:
    """Of uniform scores that are wrong with probability score / 2 below .9 and always above."""
    below = min(threshold, 0.9)
    return (below**2 / 4 + (threshold - below)) / threshold if threshold > 0 else 0.0


@pytest.mark.parametrize("levels", [None, 12])
@pytest.mark.parametrize("own", [False, True])
def test_the_promised_risk_is_exceeded_at_most_as_often_as_promised(levels, own):
    """1,000 draws of 800 answers, with and without ties, where the true risk of every threshold is known."""
    target, confidence, exceeded, found = 0.15, 0.9, 0, []
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
        found.append(act)
    assert exceeded <= 1000 * (1 - confidence)
    certified = [act for act in found if act.certified]
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


def test_bootstrap_interval_covers_the_truth():
    """95 % intervals of a mean of 60 hold the true one in some 95 % of 300 draws."""
    held = 0
    for seed in range(300):
        values = np.random.default_rng(seed).exponential(size=60)
        found = ev.bootstrap_interval(np.mean, values, resamples=200, seed=seed)
        held += found.low <= 1 <= found.high
        assert found.low < found.value < found.high
    assert 0.88 * 300 <= held <= 0.98 * 300


def test_bootstrap_draws_groups_together():
    """Ten copies of each value are ten times one value: the interval must not shrink."""
    values = np.random.default_rng(0).normal(size=80)
    copies, groups = np.repeat(values, 10), np.repeat(np.arange(80), 10)
    alone = ev.bootstrap_interval(np.mean, values)
    naive = ev.bootstrap_interval(np.mean, copies)
    grouped = ev.bootstrap_interval(np.mean, copies, groups=groups)
    assert grouped.high - grouped.low == pytest.approx(alone.high - alone.low, rel=0.01)
    assert naive.high - naive.low < 0.4 * (alone.high - alone.low)


def test_intervals_of_a_calibration_hold_their_values():
    score, right = draw(400, 8)
    found = ev.retrieval_calibration(score, right, resamples=200, groups=np.arange(400) // 4)
    for name in ("auroc", "aurc", "accuracy"):
        assert found.intervals[name].value == getattr(found, name)
        assert found.intervals[name].low < getattr(found, name) < found.intervals[name].high
    narrow = ev.retrieval_calibration(score, right, resamples=200, confidence=0.5).intervals["auroc"]
    wide = found.intervals["auroc"]
    assert narrow.high - narrow.low < wide.high - wide.low


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ev.auroc([0.1, math.nan], [1, 0]), "NaN at row 1"),
        (lambda: ev.auroc([0.1, 0.2], [1]), "2 entries, but correct has 1"),
        (lambda: ev.auroc([], []), "empty"),
        (lambda: ev.auroc([[0.1]], [1]), "shape"),
        (lambda: ev.auroc([0.1, 0.2], [1, 0.5]), "row 1 is 0.5"),
        (lambda: ev.retrieval_calibration(range(9), [1] * 9), "bins=10"),
        (lambda: ev.retrieval_calibration(range(9), [1] * 9, bins=1), "bins=1"),
        (lambda: ev.retrieval_calibration(range(20), [1] * 20, resamples=1), "resamples"),
        (lambda: ev.retrieval_calibration(range(20), [1] * 20, resamples=9, groups=[1]), "groups"),
        (lambda: ev.selective_accuracy([1], [1], [0.0]), "coverage"),
        (lambda: ev.selective_accuracy([1], [1], []), "coverage"),
        (lambda: ev.reliability([1.2], [1]), "row 0 is 1.2"),
        (lambda: ev.reliability([0.2], [1], 0), "bins"),
        (lambda: ev.reliability([0.2], [1], strategy="even"), "strategy"),
        (lambda: ev.abstention_threshold([1, 2], [1, 0], 0.0), "target_risk"),
        (lambda: ev.abstention_threshold([1, 2], [1, 0], 0.1, 1.0), "confidence"),
        (lambda: ev.abstention_threshold([1], [1], 0.1), "candidates"),
        (lambda: ev.clopper_pearson_upper(3, 2), "count"),
        (lambda: ev.bootstrap_interval(np.mean), "length"),
        (lambda: ev.pearson([1], [1, 2]), "x has 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
