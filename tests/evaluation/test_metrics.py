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
from tests.evaluation.helpers import drawn_answers

ev = gf.evaluation


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_lists_arrays_and_tensors_are_taken(kind):
    score, right = drawn_answers(50, 0)
    calibration = ev.retrieval_calibration(kind(score.tolist()), kind(right.tolist()), bins=5)
    assert calibration.auroc == ev.auroc(score, right)
    strided = torch.tensor(score).repeat_interleave(2)[::2]
    assert ev.aurc(strided, torch.tensor(right).long()) == calibration.aurc


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
    calibration = ev.retrieval_calibration(score[::-1], right[::-1], bins=4)
    assert calibration.recall.tolist() == [1, 0.5, 0.5, 0]
    assert calibration.count.tolist() == [2, 2, 2, 2]
    assert calibration.spearman == pytest.approx(-4.5 / math.sqrt(5 * 4.5))
    assert calibration.r2 == pytest.approx(stats.linregress(range(4), 1 - calibration.recall).rvalue ** 2)
    assert calibration.r2 == pytest.approx(0.9)
    assert calibration.r2_value == pytest.approx(0.9)  # evenly spaced scores
    bent = ev.retrieval_calibration(score[::-1] ** 2, right[::-1], bins=4)
    means = [0.5, 6.5, 20.5, 42.5]
    assert bent.r2_value == pytest.approx(stats.linregress(means, 1 - calibration.recall).rvalue ** 2)
    assert dataclasses.replace(bent, r2_value=calibration.r2_value, recall=0, count=0) == dataclasses.replace(
        calibration, recall=0, count=0
    )  # all else depends on the order alone
    assert calibration.auroc == pytest.approx(14 / 16)
    assert calibration.aurc == pytest.approx(np.mean([0, 0, 0, 1 / 4, 2 / 5, 2 / 6, 3 / 7, 4 / 8]))
    assert calibration.accuracy == 0.5
    assert not calibration.intervals


@pytest.mark.parametrize("answer", [True, False])
def test_all_right_and_all_wrong(answer):
    score, right = np.arange(20.0), np.full(20, answer)
    calibration = ev.retrieval_calibration(score, right, resamples=20)
    assert math.isnan(calibration.spearman)
    assert math.isnan(calibration.r2)
    assert math.isnan(calibration.r2_value)
    assert math.isnan(calibration.auroc)
    assert math.isnan(calibration.intervals["auroc"].low)
    assert calibration.aurc == 1 - answer
    assert calibration.intervals["aurc"].high == 1 - answer
    assert ev.selective_accuracy(score, right).ausac == answer


def test_an_infinite_uncertainty_has_an_order_but_no_line():
    calibration = ev.retrieval_calibration([1.0, 2.0, 3.0, math.inf], [1, 1, 0, 0], bins=2)
    assert calibration.spearman == pytest.approx(-1)
    assert math.isnan(calibration.r2_value)


def test_ties_at_bin_edges_are_broken_by_the_seed():
    score, right = np.zeros(100), np.arange(100) < 50
    recalls = [ev.retrieval_calibration(score, right, seed=seed).recall for seed in (0, 0, 1)]
    assert np.array_equal(recalls[0], recalls[1])
    assert not np.array_equal(recalls[0], recalls[2])
    # In the order of the rows the first bins would be all right and the last all wrong.
    assert max(recalls[0]) < 1
    assert abs(np.mean([ev.retrieval_calibration(score, right, seed=s).spearman for s in range(200)])) < 0.1


def test_bins_differ_by_one_query_at_most():
    calibration = ev.retrieval_calibration(*drawn_answers(129, 4))
    assert calibration.count.sum() == 129
    assert set(calibration.count) == {12, 13}
    assert (calibration.recall * calibration.count).sum() == pytest.approx(drawn_answers(129, 4)[1].sum())


def test_selective_accuracy_by_brute_force():
    score, right = drawn_answers(1023, 5)
    curve = ev.selective_accuracy(score, right)
    assert curve.coverage.tolist() == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    order = np.argsort(score)
    expected = [right[order[: round(c * 1023)]].mean() for c in curve.coverage]
    assert curve.accuracy == pytest.approx(expected)
    assert curve.ausac == pytest.approx(sk.auc(curve.coverage, curve.accuracy) / 0.9)
    assert ev.selective_accuracy([3, 1], [0, 1], [0.1]).accuracy[0] == 1  # at least one answer is kept


@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_reliability_is_that_of_scikit_learn(strategy):
    rng = np.random.default_rng(6)
    prob = rng.random(1023) ** 2
    right = rng.random(1023) < prob**1.3
    diagram = ev.reliability(prob, right, 12, strategy=strategy)
    filled = diagram.count > 0
    accuracy, confidence = calibration_curve(right, prob, n_bins=12, strategy=strategy)
    assert diagram.accuracy[filled] == pytest.approx(accuracy)
    assert diagram.confidence[filled] == pytest.approx(confidence)
    gap = np.abs(diagram.accuracy - diagram.confidence)[filled]
    assert diagram.ece == pytest.approx((gap * diagram.count[filled]).sum() / 1023)
    assert diagram.brier == pytest.approx(sk.brier_score_loss(right, prob))


def test_reliability_of_edges_and_of_one_probability():
    diagram = ev.reliability([0, 0.5, 1, 1], [0, 1, 1, 0], 2)
    assert diagram.count.tolist() == [2, 2]
    assert diagram.ece == pytest.approx((0.5 + 1) / 4)
    assert math.isnan(ev.reliability([0.9], [1]).accuracy[0])
    assert ev.reliability([0.25] * 4, [1, 0, 0, 0], strategy="quantile").ece == 0


def test_intervals_of_a_calibration_hold_their_values():
    score, right = drawn_answers(400, 8)
    calibration = ev.retrieval_calibration(score, right, resamples=200, groups=np.arange(400) // 4)
    for name in ("auroc", "aurc", "accuracy"):
        assert calibration.intervals[name].value == getattr(calibration, name)
        assert calibration.intervals[name].low < getattr(calibration, name) < calibration.intervals[name].high
    narrow = ev.retrieval_calibration(score, right, resamples=200, confidence=0.5).intervals["auroc"]
    wide = calibration.intervals["auroc"]
    assert narrow.high - narrow.low < wide.high - wide.low


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ev.auroc([0.1, math.nan], [1, 0]), "NaN at row 1"),
        (lambda: ev.auroc([0.1, 0.2], [1]), "2 entries, but correct has 1"),
        (lambda: ev.auroc([], []), "empty"),
        (lambda: ev.auroc([[0.1]], [1]), "shape"),
        (lambda: ev.reliability([0.1, 0.2], [1, -0.5]), "row 1 is -0.5"),
        (lambda: ev.auroc([0.1, 0.2], [1, 1.5]), "row 1 is 1.5"),
        (lambda: ev.auroc([0.1, 0.2, 0.3], [0.5, -1, 1]), "row 1 is -1.0"),
        (lambda: ev.retrieval_calibration(range(9), [1] * 9), "bins=10"),
        (lambda: ev.retrieval_calibration(range(9), [1] * 9, bins=1), "bins=1"),
        (lambda: ev.retrieval_calibration(range(20), [1] * 20, resamples=1), "resamples"),
        (lambda: ev.retrieval_calibration(range(20), [1] * 20, resamples=9, groups=[1]), "groups"),
        (lambda: ev.selective_accuracy([1], [1], [0.0]), "coverage"),
        (lambda: ev.selective_accuracy([1], [1], []), "coverage"),
        (lambda: ev.reliability([1.2], [1]), "row 0 is 1.2"),
        (lambda: ev.reliability([0.2], [1], 0), "bins"),
        (lambda: ev.reliability([0.2], [1], strategy="even"), "strategy"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
