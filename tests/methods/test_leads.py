"""Leads of one method over others: paired, over images, and corrected for a whole table."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.methods.leads import corrected, holm, paired_leads
from geoflow_fast.evaluation import auroc, bootstrap_interval
from geoflow_fast.evaluation.compare import ScoredQueries


def scored(method: str, queries: int = 300, seed: int = 0, *, sharp: float = 1.0) -> ScoredQueries:
    """Invented scores; the sharper, the better. Which answers are right depends on the number of queries alone."""
    truth, noise = np.random.default_rng(queries), np.random.default_rng(seed)
    hard = truth.random(queries)
    right = (truth.random(queries) > hard).astype(float)
    p = 1 - np.clip(sharp * hard + (1 - sharp) * noise.random(queries), 0.01, 0.99)
    nll = -np.log(np.where(right > 0, p, 1 - p))
    image = np.arange(queries) // 3
    columns = {"uncertainty": 1 - p, "p_answer": p, "nll": nll, "own_right": right, "first_right": right}
    times = {"fit_seconds": np.zeros(queries), "score_seconds": np.zeros(queries)}
    return ScoredQueries(method, method, "none", "t2i", 0, 50, {**columns, **times, "image": image})


def test_leads_are_differences_of_the_metrics_with_the_interval_of_the_bootstrap():
    ours, other = scored("a"), scored("b", sharp=0.3)
    leads = {lead.measure: lead for lead in paired_leads(ours, [other], resamples=200, seed=5)}
    gain = other.columns["nll"] - ours.columns["nll"]
    interval = bootstrap_interval(np.mean, gain, resamples=200, seed=5, groups=ours.columns["image"])
    assert (leads["nll"].value, leads["nll"].low, leads["nll"].high) == pytest.approx(
        (interval.value, interval.low, interval.high)
    )
    by_auroc = [auroc(x.columns["uncertainty"], x.columns["first_right"]) for x in (ours, other)]
    assert leads["auroc"].value == pytest.approx(by_auroc[0] - by_auroc[1])
    assert leads["aurc"].value > 0  # less is better, so the sign is turned
    assert leads["nll"].p < 0.01
    assert leads["recall"].value == 0
    assert leads["recall"].p == 1
    turned = {lead.measure: lead.value for lead in paired_leads(other, [ours], resamples=2)}
    assert turned == pytest.approx({name: -lead.value for name, lead in leads.items()})


def test_a_method_leads_itself_by_nothing_and_measures_that_one_lacks_are_left_out():
    ours = scored("a", 129)
    without = dataclasses.replace(ours, columns={**ours.columns, "nll": np.full(129, math.nan)})
    leads = paired_leads(ours, [ours, without], resamples=20)
    assert {(lead.value, lead.low, lead.high, lead.p) for lead in leads} == {(0, 0, 0, 1)}
    assert len(leads) == 5 + 4
    with pytest.raises(ValueError, match="same queries"):
        paired_leads(ours, [scored("b", 128)])


def test_a_lead_that_is_the_same_in_every_resample_is_certain():
    ours = scored("a", 129)
    never = dataclasses.replace(ours, columns={**ours.columns, "own_right": np.zeros(129)})
    always = dataclasses.replace(ours, columns={**ours.columns, "own_right": np.ones(129)})
    leads = {lead.measure: lead for lead in paired_leads(always, [never], resamples=20)}
    assert (leads["recall"].value, leads["recall"].p) == (1, 0)
    assert leads["nll"].p == 1


def test_an_auroc_that_does_not_exist_has_no_p_value():
    ours = scored("a", 9)
    ones = {name: np.ones(9) for name in ("first_right", "own_right")}
    ours = dataclasses.replace(ours, columns={**ours.columns, **ones})
    leads = {lead.measure: lead for lead in corrected(paired_leads(ours, [ours], resamples=5))}
    assert math.isnan(leads["auroc"].p)
    assert math.isnan(leads["auroc"].p_holm)
    assert leads["nll"].p_holm == 1


def test_holm_is_the_step_down_procedure():
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    with_nan = holm([math.nan, 0.02])
    assert math.isnan(with_nan[0])
    assert with_nan[1] == 0.02
