"""The fit of the three weights of shortlists, against simulated queries whose weights are known."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from geoflow_fast.retrieval import calibration
from geoflow_fast.retrieval.calibration import UNCALIBRATED, fit_calibration, probability_right
from geoflow_fast.retrieval.evidence import Evidence, fit_weights

TRUTH = (0.7, 9.0, 1.5)
K = 12
NAMES = ("flow", "cosine")


def two_features(log_density: Tensor, cosine: Tensor, valid: Tensor) -> Evidence:
    return Evidence({"flow": log_density.double(), "cosine": cosine.double()}, cosine.double(), valid)


def simulate(queries: int, seed: int, truth: tuple[float, float, float] = TRUTH) -> tuple[Evidence, Tensor]:
    """Evidence, and which item is right under the weights `truth`: [Q, K] bool, none if it is outside."""
    generator = torch.Generator().manual_seed(seed)
    # A level per query, as log-densities have it, which must not matter.
    log_density = 2.5 * torch.randn(queries, K, generator=generator) + 30 * torch.randn(queries, 1, generator=generator)
    cosine = 0.3 + 0.1 * torch.randn(queries, K, generator=generator)
    valid = torch.rand(queries, K, generator=generator) < 0.9
    valid[:, 0] = True
    evidence = two_features(log_density, cosine, valid)
    logits = evidence.design(NAMES) @ torch.tensor(truth, dtype=torch.float64)
    prob = logits.masked_fill(~evidence.possible(), -math.inf).softmax(1)
    choice = torch.multinomial(prob, 1, generator=generator)
    return evidence, (choice == torch.arange(K + 1))[:, :-1]


def fitted(evidence: Evidence, right: Tensor, **more):
    queries = len(right)
    return fit_calibration(evidence, right, torch.ones(queries), torch.arange(queries), {}, **more)


def test_weights_are_recovered_within_their_standard_errors():
    runs = [fitted(*simulate(2000, seed)) for seed in range(12)]
    weights = torch.tensor([run.weights for run in runs], dtype=torch.float64)
    stderr = torch.tensor([run.stderr for run in runs], dtype=torch.float64)
    truth = torch.tensor(TRUTH, dtype=torch.float64)
    assert bool((((weights - truth) / stderr).abs() < 5).all())
    assert bool(((weights.mean(0) - truth).abs() < 4 * weights.std(0) / math.sqrt(len(runs))).all())
    ratio = stderr.mean(0) / weights.std(0)
    assert bool(((ratio > 0.6) & (ratio < 1.7)).all()), ratio
    assert bool((stderr.mean(0) < 0.08 * truth).all()), stderr.mean(0)


def test_the_fit_is_the_optimum():
    """Changing any weight up or down lowers the likelihood, which is written out here once more."""
    evidence, right = simulate(300, 5)
    target = torch.cat((right, ~right.any(1, keepdim=True)), dim=1)

    def loss(weights: Tensor) -> float:
        logits = (evidence.design(NAMES) @ weights).masked_fill(~evidence.possible(), -math.inf)
        return float(-logits.log_softmax(1)[target].sum())

    weights = fit_weights(evidence.design(NAMES), evidence.possible(), target.double())
    for change in 0.03 * torch.diag(weights):
        assert min(loss(weights - change), loss(weights + change)) > loss(weights)


@pytest.mark.parametrize("start", [(1.0, 10.0, 1.0), (-3.0, 0.0, 40.0)])
def test_the_optimum_does_not_depend_on_the_start(start):
    """Folds begin with the weights of other folds, which may be far from their own."""
    evidence, right = simulate(300, 5)
    target = torch.cat((right, ~right.any(1, keepdim=True)), dim=1).double()
    data = evidence.design(NAMES), evidence.possible(), target
    begun = fit_weights(*data, torch.tensor(start, dtype=torch.float64))
    torch.testing.assert_close(begun, fit_weights(*data), rtol=1e-6, atol=0)


def test_cross_fitted_loss_is_that_of_new_queries():
    calibration = fitted(*simulate(2000, 1))
    evidence, right = simulate(4000, 2)
    prob = calibration.probabilities(evidence)
    target = torch.cat((right, ~right.any(1, keepdim=True)), dim=1)
    loss = -prob[target].log()
    assert abs(float(loss.mean()) - calibration.nll) < 4 * math.hypot(
        calibration.nll_stderr, float(loss.std()) / math.sqrt(4000)
    )
    torch.testing.assert_close(prob.sum(1), torch.ones(4000, dtype=torch.float64))
    assert not prob[:, :-1][~evidence.valid].any()


def test_a_constant_per_query_does_not_matter():
    evidence, right = simulate(500, 3)
    shifted = two_features(
        evidence.features["flow"] + 1000 * torch.randn(500, 1), evidence.features["cosine"], evidence.valid
    )
    assert fitted(shifted, right).weights == pytest.approx(fitted(evidence, right).weights, rel=1e-6)


@pytest.mark.parametrize("platt", [None, (2.0, 3.0)])
def test_no_probability_exceeds_one_where_several_items_are_right(platt):
    """The probability of the one meant is multiplied by how many are right, five captions for one."""
    prob = torch.tensor([0.0, 0.04, 0.2, 0.7, 1.0], dtype=torch.float64)
    right = probability_right(prob, 5.0, platt)
    assert bool(((right >= 0) & (right <= 1)).all())
    assert bool((right.diff() >= 0).all())
    if platt is None:
        assert right.tolist() == pytest.approx([0.0, 0.2, 1.0, 1.0, 1.0])
    choices = torch.tensor([[0.7, 0.2, 0.1], [0.02, 0.0, 0.98]], dtype=torch.float64)
    several = dataclasses.replace(UNCALIBRATED, right_per_query=5.0)
    torch.testing.assert_close(
        several.item_relevance(choices), torch.tensor([[1.0, 1.0], [0.1, 0.0]], dtype=torch.float64)
    )


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 10])
@pytest.mark.parametrize("missing", [0, 1])
def test_levels_are_those_of_the_less_near_half(length, missing):
    """Of an odd number of items the one in the middle is in neither half; a single item is its own level."""
    generator = torch.Generator().manual_seed(length)
    nearness = torch.randperm(length + missing, generator=generator).double().unsqueeze(0)
    features = {name: torch.randn(1, length + missing, generator=generator).double() for name in NAMES}
    valid = nearness != nearness.min() if missing else torch.ones_like(nearness, dtype=torch.bool)
    evidence = Evidence(features, nearness, valid)
    order = nearness[0].argsort()[missing:]  # the least near first, without the missing one
    far = order[: max(1, length // 2)]
    levels = evidence.levels(NAMES)
    torch.testing.assert_close(levels["cosine"][0, 0], features["cosine"][0, far].mean())
    torch.testing.assert_close(levels["flow"][0, 0], features["flow"][0, far].exp().mean().log())
    asked = torch.zeros_like(valid)
    asked[0, order[-3:]] = True  # the flow was asked about the nearest three, of which one is its half
    tiers = dataclasses.replace(evidence, asked=asked).levels(NAMES)
    torch.testing.assert_close(tiers["cosine"], levels["cosine"])
    torch.testing.assert_close(tiers["flow"][0, 0], features["flow"][0, order[-3:][0]])


def test_separable_data_have_finite_weights():
    """Every right item has the highest density and nothing is outside. Without the prior there would be no optimum."""
    evidence, _ = simulate(200, 4)
    log_density = evidence.features["flow"].masked_fill(~evidence.valid, -math.inf)
    right = log_density == log_density.amax(1, keepdim=True)
    calibration = fitted(evidence, right)
    assert all(map(math.isfinite, calibration.weights))
    prob = calibration.probabilities(evidence)
    assert float(prob[:, :-1][right].mean()) > 0.95
    assert float(prob[:, -1].mean()) < 0.05


def test_one_of_several_right_items_is_meant():
    """Two right items with equal evidence share the probability that a single one would have."""
    queries = 400
    log_density = torch.zeros(queries, K, dtype=torch.float64)
    log_density[:, :2] = 2.0
    cosine = 0.1 * torch.randn(queries, K, generator=torch.Generator().manual_seed(0)).double()
    evidence = two_features(log_density, cosine, torch.ones(queries, K, dtype=torch.bool))
    right = torch.zeros(queries, K, dtype=torch.bool)
    right[:, :2] = True
    right[: queries // 4] = False  # both outside
    calibration = fit_calibration(evidence, right, torch.full((queries,), 2), torch.arange(queries), {})
    prob = calibration.probabilities(evidence)
    assert calibration.right_per_query == 2
    assert float(prob[:, :2].sum(1).mean()) == pytest.approx(0.75, abs=0.03)
    assert float(prob[:, -1].mean()) == pytest.approx(0.25, abs=0.03)


def test_too_few_queries_and_a_single_image_are_refused():
    evidence, right = simulate(60, 6)
    few = right.clone()
    few[49:] = False
    with pytest.raises(ValueError, match=r"only \d+ of 60 held-out queries .* needs 50"):
        fitted(evidence, few)
    evidence, right = simulate(200, 6)
    with pytest.raises(ValueError, match="all held-out queries are of one image"):
        fit_calibration(evidence, right, torch.ones(200), torch.zeros(200), {})


def test_logits_of_items_are_those_of_their_definition():
    prob = torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.75, 0.05]], dtype=torch.float64)
    logits = calibration._item_logits(prob)
    expected = [[[math.log(p / (1 - p)), math.log(p / row[-1])] for p in row[:-1]] for row in prob.tolist()]
    torch.testing.assert_close(logits, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("law", "kept"), [("stated", False), ("overstated", True), ("reversed", False)], ids=["stated", "over", "reversed"]
)
def test_relevance_is_learned_where_probabilities_are_off_and_in_the_right_order(law, kept):
    """Items are right with the probability that is stated, with that of half the log-odds, or the more rarely, the
    more probable they are said to be."""
    generator = torch.Generator().manual_seed(1)
    prob = (3 * torch.randn(600, 6, generator=generator, dtype=torch.float64)).softmax(1)
    stated = prob[:, :-1]
    logit = torch.logit(stated)
    truth = {"stated": stated, "overstated": torch.sigmoid(logit / 2), "reversed": torch.sigmoid(-logit - 4)}[law]
    right = torch.rand(600, 5, generator=generator, dtype=torch.float64) < truth
    evidence = Evidence({}, stated, torch.ones_like(right))
    group = torch.arange(600)
    known = calibration.KnownQueries(evidence, right, right.sum(1), group, group % 5, None)
    weights = calibration._fit_relevance(known, prob, 1.0)
    assert (weights is not None) == kept
    if kept:
        learned = dataclasses.replace(UNCALIBRATED, relevance=weights).item_relevance(prob)
        assert float((learned - truth).abs().mean()) < 0.03 < float((stated - truth).abs().mean())


@pytest.mark.parametrize("useful", [False, True])
def test_a_hub_correction_has_a_scale_where_it_is_used(useful):
    evidence, _ = simulate(200, 3)
    noise = torch.randn(200, K, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    score = -2 * noise if useful else evidence.features["flow"]
    right = score.masked_fill(~evidence.valid, -math.inf).argmax(1, keepdim=True) == torch.arange(K)
    learned = fitted(evidence, right, hubs={3.0: noise})
    assert ("hub" in learned.others) == useful
    assert learned.hub_scale == (3.0 if useful else 0.0)
