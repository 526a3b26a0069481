"""Results print as a short summary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.summary import Summarised, brief
from tests.evaluation.helpers import captioned

PAIRS = [
    (torch.arange(1000.0), "[1000] 0 to 999, median 499.5"),
    (torch.arange(1000, dtype=torch.int64).view(10, 100), "[10, 100] int64, 0 to 999"),
    (torch.tensor([True] * 3 + [False] * 9), "[12] bool, 25.0% true"),
    (torch.full((9,), math.nan), "[9] float32, all NaN"),
    (torch.tensor([1.0, math.nan] * 5), "[10] 1 to 1, median 1, 50.0% NaN"),
    (torch.empty(0, 4), "[0, 4] float32"),
    (torch.empty(7, device="meta"), "[7] float32"),
    (torch.tensor([1.0, 2.5]), "[1, 2.5]"),
    (np.linspace(0, 1, 11), "[11] 0 to 1, median 0.5"),
    (0.123456, "0.1235"),
    ("words", "'words'"),
    ([0.5] * 99, "99 entries"),
    ({"a": 1}, "{'a': 1}"),
]


@pytest.mark.parametrize(("value", "words"), PAIRS, ids=[words for _, words in PAIRS])
def test_values_in_a_few_words(value, words):
    assert brief(value) == words


@dataclass(frozen=True, repr=False)
class Outcome(Summarised):
    entropy: torch.Tensor
    stderr: torch.Tensor | None = None


def test_a_result_has_a_line_for_each_field_that_it_has():
    assert repr(Outcome(torch.arange(9.0))) == "Outcome(\n  entropy: [9] 0 to 8, median 4\n)"


def test_results_of_the_library_are_short(flow):
    image, text = (sample_uniform(300, width) for width in (10, 7))
    posterior = gf.RetrievalEntropy(flow, image, n_samples=2, n_steps=2)(text[:200])
    densities = gf.epistemic(flow, image[:50], text[:50], n_steps=2)
    pairs = captioned(40, 3, 0)
    comparison = compare(Study(pairs), pairs, ("margin",), resamples=0)
    reranker = gf.BayesReranker(gf.GeoFlow(gf.GeoFlowConfig(8, 8, hidden=8, depth=1)), pairs[range(40)][0], n_steps=1)
    with pytest.warns(UserWarning, match="uncalibrated"):
        reranked = reranker(pairs[range(20)][1])
    curve = gf.evaluation.selective_accuracy(torch.rand(500), torch.rand(500) > 0.5)
    for result in (posterior, densities, comparison, comparison.results[0], reranked, curve):
        words = repr(result)
        assert words.startswith(f"{type(result).__name__}(\n")
        assert len(words) < 1600, words
        assert max(map(len, words.splitlines())) < 200
    assert "entropy: [200] " in repr(posterior)
