"""Ranks, correlations, exact bounds and bootstrap intervals against scipy and simulations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

import geoflow_fast as gf
from tests.evaluation.helpers import drawn_answers

ev = gf.evaluation


@pytest.mark.parametrize("n", [7, 129, 1023])
@pytest.mark.parametrize("levels", [None, 3])
def test_ranks_and_correlations_are_those_of_scipy(n, levels):
    x, right = drawn_answers(n, n, levels)
    y = np.random.default_rng(1).integers(0, 5, n)
    assert np.array_equal(ev.ranks(x), stats.rankdata(x))
    assert ev.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert ev.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
    assert ev.auroc(x, right) == pytest.approx(sk.roc_auc_score(~right, x), abs=1e-12)


def test_the_bound_of_clopper_and_pearson_solves_its_equation():
    """At the bound, so few events have the probability that the confidence leaves."""
    for n, count in itertools.product((1, 7, 129, 5000), (0, 1, 5, 100)):
        if count <= n:
            bound = ev.clopper_pearson_upper(count, n, 0.9)
            assert bound == pytest.approx(stats.beta.ppf(0.9, count + 1, n - count) if count < n else 1, abs=1e-9)
            assert count == n or stats.binom.cdf(count, n, bound) == pytest.approx(0.1)


def test_bootstrap_interval_covers_the_truth():
    """95 % intervals of a mean of 60 hold the true one in some 95 % of 300 draws."""
    held = 0
    for seed in range(300):
        values = np.random.default_rng(seed).exponential(size=60)
        interval = ev.bootstrap_interval(np.mean, values, resamples=200, seed=seed)
        held += interval.low <= 1 <= interval.high
        assert interval.low < interval.value < interval.high
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ev.clopper_pearson_upper(3, 2), "count"),
        (lambda: ev.bootstrap_interval(np.mean), "length"),
        (lambda: ev.pearson([1], [1, 2]), "x has 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
