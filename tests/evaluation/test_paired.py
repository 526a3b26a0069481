"""Paired gains of one method over others, against brute force and known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from geoflow_fast.evaluation.metrics import auroc
from geoflow_fast.evaluation.paired import gains, holm, p_below_zero
from geoflow_fast.evaluation.statistics import Interval
from geoflow_fast.runtime.parquet import Columns


def columns(rng: np.random.Generator, right: np.ndarray, skill: float) -> Columns:
    noise = rng.normal(size=len(right))
    return {"uncertainty": noise - skill * right, "nll": rng.exponential(size=len(right)) - skill, "hit": right * 1.0}


def test_gains_are_differences_of_the_measures():
    rng = np.random.default_rng(0)
    right = rng.random(301) < 0.6
    ours, other = columns(rng, right, 2.0), columns(rng, right, 0.5)
    by_measure = {gain.measure: gain for gain in gains(ours, {"x": other}, right, np.arange(301) // 3)}
    assert set(by_measure) == {"NLL", "AUROC", "Recall@1"}
    assert by_measure["NLL"].interval.value == pytest.approx(other["nll"].mean() - ours["nll"].mean())
    lead = auroc(ours["uncertainty"], right) - auroc(other["uncertainty"], right)
    assert by_measure["AUROC"].interval.value == pytest.approx(lead)
    assert by_measure["Recall@1"].interval.value == 0
    assert by_measure["Recall@1"].p_worse == 1
    assert min(by_measure[name].interval.low for name in ("NLL", "AUROC")) > 0
    swapped = {gain.measure: gain for gain in gains(other, {"x": ours}, right, np.arange(301) // 3)}
    assert max(swapped[name].p_worse for name in ("NLL", "AUROC")) < 0.001


def test_what_a_method_does_not_say_is_left_out():
    rng = np.random.default_rng(1)
    right = rng.random(50) < 0.5
    ours, other = columns(rng, right, 1.0), columns(rng, right, 1.0)
    other["nll"] = np.full(50, math.nan)
    assert {gain.measure for gain in gains(ours, {"x": other}, right, np.arange(50))} == {"AUROC", "Recall@1"}


def test_equal_methods_are_rarely_called_worse():
    """The test of one difference has the level it states: 5 % of normal samples around zero, within chance."""
    rng = np.random.default_rng(2)
    worse = 0
    for _ in range(200):
        difference = rng.normal(size=400)
        half = stats.norm.ppf(0.975) * difference.std() / 20
        interval = Interval(difference.mean(), difference.mean() - half, difference.mean() + half, 0.95)
        worse += p_below_zero(interval) < 0.05
    assert stats.binomtest(worse, 200, 0.05).pvalue > 0.001


def test_holm_is_the_step_down_procedure():
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    with_nan = holm([math.nan, 0.02])
    assert math.isnan(with_nan[0])
    assert with_nan[1] == 0.02


@pytest.mark.parametrize(("value", "p"), [(-1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_an_interval_without_width_decides_by_its_sign(value, p):
    assert p_below_zero(Interval(value, value, value, 0.95)) == p
