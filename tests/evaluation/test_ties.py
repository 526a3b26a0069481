"""Items that tie exactly for the first place of plain search count as equal, whatever their numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.evaluation import aurc, auroc, selective_accuracy
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.retrieval.task import RetrievalTask
from tests.reliability.targets import unit


@pytest.mark.parametrize("copies", [1, 2, 3, 40])
@pytest.mark.parametrize("top_k", [1, 5])
def test_recall_at_one_is_the_mean_over_the_orders_of_tied_items(copies, top_k):
    """Every image is in the gallery `copies` times, and each query has its own of the copies as the right item. With
    few queries the order of the items would decide whether they are right."""
    image = unit(4, 6).repeat_interleave(copies, 0)
    recalls = []
    for seed in range(3):  # other numbers of the same items
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(image)))
        pairs = gf.EmbeddingPairs.from_arrays(image[order], image[order])
        task = RetrievalTask.of(pairs, "t2i", max_queries=3, seed=seed)
        answers = plain_search(task, top_k)
        assert answers.index.shape == (3, min(top_k, 4 * copies))
        torch.testing.assert_close(answers.first_right, torch.full((3,), 1 / copies, dtype=torch.float64))
        recalls.append(answers.recall(1))
    assert recalls == pytest.approx([1 / copies] * 3)


def test_answers_that_are_right_with_a_probability_count_as_the_mean_over_their_outcomes():
    generator = np.random.default_rng(0)
    uncertainty = generator.integers(50, size=300)
    share = np.where(generator.random(300) < 0.2, 0.5, generator.random(300) < 0.6)
    outcomes = [generator.random(300) < share for _ in range(2000)]
    for metric in (auroc, aurc, lambda *given: selective_accuracy(*given).ausac):
        values = [metric(uncertainty, outcome) for outcome in outcomes]
        assert metric(uncertainty, share) == pytest.approx(np.mean(values), abs=4 * np.std(values) / 2000**0.5 + 1e-4)
