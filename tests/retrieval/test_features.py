"""What a re-ranker says about a query as a whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.evaluation.metrics import auroc
from geoflow_fast.retrieval.evidence import Evidence
from geoflow_fast.retrieval.features import OF_BANK, OF_LISTS, BankLevel, query_feature_names, query_features
from tests.retrieval.test_evidence import hub_pairs, hub_world


def test_numbers_are_those_of_the_formulas():
    cosine = torch.tensor([[0.9, 0.5, 0.1, 0.3], [0.2, 0.2, 0.2, 0.2]], dtype=torch.float64)
    prob = torch.tensor([[0.6, 0.2, 0.0, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25, 0.0]], dtype=torch.float64)
    evidence = Evidence({"cosine": cosine}, cosine, torch.ones(2, 4, dtype=torch.bool))
    numbers = query_features(evidence, prob, torch.tensor([1, 0]))
    assert tuple(numbers) == query_feature_names(["cosine"]) == (*OF_LISTS, "cosine", "cosine level")
    expected = {
        "answer": np.log([0.2 / 0.8, 0.25 / 0.75]),
        "inside": np.log([0.9 / 0.1, 1e9]),
        "best": np.log([0.6 / 0.1, 0.25 / 1e-9]),
        "margin": np.log([0.6 / 0.2, 1.0]),
        "entropy": [-sum(p * np.log(p) for p in (0.6, 0.2, 0.1, 0.1)), np.log(4)],
        "cosine": [0.9 - 0.2, 0.0],
        "cosine level": [0.2, 0.2],
    }
    for name, values in expected.items():
        assert numbers[name].numpy() == pytest.approx(values, rel=1e-6), name


def test_a_bank_of_items_adds_the_mass_of_the_shortlist_and_the_level():
    cosine = torch.tensor([[0.9, 0.5, 0.1]], dtype=torch.float64)
    prob = torch.tensor([[0.6, 0.2, 0.0, 0.2]], dtype=torch.float64)
    evidence = Evidence({"cosine": cosine}, cosine, torch.tensor([[True, True, False]]))
    bank = BankLevel({"cosine": 10.0}, torch.tensor([1.5], dtype=torch.float64))
    numbers = query_features(evidence, prob, torch.tensor([0]), bank)
    assert tuple(numbers) == query_feature_names(["cosine"], with_bank=True)
    assert float(numbers["mass"]) == pytest.approx(np.log(np.exp(9) + np.exp(5)))
    assert float(numbers["bank"]) == 1.5


@pytest.mark.parametrize("items", [1, 2, 300])
@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_every_query_has_finite_features(items):
    image, text = hub_world(300, 7)
    result = (reranker := gf.BayesReranker(None, image[:items]))(text[:5])
    assert result.features.dtype == torch.float64
    assert result.features.shape == (5, len(reranker.feature_names))
    assert bool(result.features.isfinite().all())
    assert reranker(text[:0]).features.shape == (0, len(reranker.feature_names))


def test_features_tell_right_answers_from_wrong_ones():
    image, text = hub_world(400, 7)
    reranker = gf.BayesReranker(None, image)
    reranker.calibrate(hub_pairs(400, 8))
    result = reranker(text)
    of_bank = OF_BANK if reranker.calibration.items else ()
    assert reranker.feature_names == (*OF_LISTS, *of_bank, "cosine", "cosine level", "hub", "hub level")
    wrong = result.answer != torch.arange(400)
    for name in ("answer", "margin"):
        column = result.features[:, reranker.feature_names.index(name)]
        assert auroc(-column, ~wrong) > 0.6, name
