"""Items that tie exactly count as equal in every metric, whatever their numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.evaluation import aurc, auroc, reliability, selective_accuracy
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Method, Scores, Study
from geoflow_fast.evaluation.retrieval import hit_probability, plain_search
from geoflow_fast.retrieval.task import RetrievalTask
from tests.evaluation.helpers import captioned
from tests.reliability.arguments import unit

ORDERS = 2000


def mean_hit(score: NDArray[Any], right: NDArray[Any], k: int) -> NDArray[np.float64]:
    """Share [Q, k] of `ORDERS` random orders of tied items in which a right one is among the first 1, 2, ..., k."""
    generator, total = np.random.default_rng(0), np.zeros((len(score), k))
    for _ in range(ORDERS):
        order = np.lexsort((generator.random(score.shape), -score), axis=1)[:, :k]
        total += np.take_along_axis(right, order, 1).cumsum(1) > 0
    return total / ORDERS


def assert_is_mean(value: Any, mean: Any) -> None:
    """`value` is within four standard errors of the mean over `ORDERS` outcomes."""
    np.testing.assert_allclose(value, mean, rtol=0, atol=4 * 0.5 / ORDERS**0.5)


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


def test_probability_of_a_hit_is_the_mean_over_the_orders_of_tied_items():
    generator = np.random.default_rng(1)
    score = -np.sort(-generator.integers(6, size=(40, 23)), axis=1)
    right = generator.random((40, 23)) < 0.15
    hit = hit_probability(torch.from_numpy(score), torch.from_numpy(right), 11).numpy()
    assert_is_mean(hit, mean_hit(score, right, 11))
    distinct = hit_probability(torch.arange(23.0).flip(0).repeat(40, 1), torch.from_numpy(right), 30).numpy()
    assert np.array_equal(distinct, right.cumsum(1) > 0)


@pytest.mark.parametrize("top_k", [1, 2, 7, 53, 60])
def test_recall_does_not_depend_on_the_numbers_of_tied_items(top_k):
    """Items of which there are 1, 2, 3, 7 and 40 copies; each image has several items."""
    copies = torch.tensor([1, 2, 3, 7, 40])
    kind = torch.arange(5).repeat_interleave(copies)
    image = torch.from_numpy(np.random.default_rng(0).integers(9, size=53))
    queries, rows = unit(9, 8, seed=1), unit(5, 8)
    expected = mean_hit(
        (queries @ rows.T)[:, kind].numpy(), (image == torch.arange(9)[:, None]).numpy(), min(top_k, 53)
    )
    hits = []
    for seed in range(3):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(53))
        numbers = np.arange(9), np.arange(53)
        task = RetrievalTask("i2t", queries, rows[kind[order]], torch.arange(9), image[order], *numbers)
        answers = plain_search(task, top_k)
        assert_is_mean(answers.hit, expected)
        assert answers.recall(answers.hit.shape[1]) == float(answers.hit[:, -1].mean())
        hits.append(answers.hit)
    assert all(torch.equal(hit, hits[0]) for hit in hits)


def test_answers_that_are_right_with_a_probability_count_as_the_mean_over_their_outcomes():
    generator = np.random.default_rng(0)
    uncertainty = generator.integers(50, size=300)
    share = np.where(generator.random(300) < 0.2, 0.5, generator.random(300) < 0.6)
    outcomes = [generator.random(300) < share for _ in range(1000)]
    metrics = {
        "auroc": auroc,
        "aurc": aurc,
        "ausac": lambda *given: selective_accuracy(*given).ausac,
        "brier": lambda score, right: reliability(score / 50, right).brier,
        "accuracy of a bin": lambda score, right: reliability(score / 50, right).accuracy[3],
    }
    for name, metric in metrics.items():
        values = [metric(uncertainty, outcome) for outcome in outcomes]
        limit = 4 * np.std(values) / 1000**0.5 + 1e-4
        assert metric(uncertainty, share) == pytest.approx(np.mean(values), abs=limit), name


@pytest.mark.parametrize(
    "right", [[1, 0], [1, 0, 0], [0.5, 0.5], [0.1, 0.9], [1, 0.5, 0, 0.2, 0.9], [0.01, 0, 0]], ids=str
)
def test_the_auroc_of_few_answers_is_that_of_their_pairs(right):
    """Each two answers count by the probability that one is right and the other is wrong."""
    uncertainty, right = np.array([2.0, 1.0, 3.0, 1.0, 0.0])[: len(right)], np.array(right)
    won = total = 0.0
    for one, other in itertools.permutations(range(len(right)), 2):
        weight = right[one] * (1 - right[other])
        total += weight
        won += weight * (np.sign(uncertainty[other] - uncertainty[one]) + 1) / 2
    assert auroc(uncertainty, right) == pytest.approx(won / total)


class First(Method):
    """Considers the item most probable that plain search would return, with the lowest number of tied ones."""

    name, title = "first", "First"

    def facts(self) -> dict[str, Any]:
        return {}

    def _fit(self, task: RetrievalTask) -> None:
        self.task = task

    def score(self, rows: slice, answers: Tensor) -> Scores:
        p_answer = (self.task.queries[rows] * self.task.items[answers]).sum(1).double().clamp(0, 1)
        return Scores(1 - p_answer, p_answer, torch.zeros_like(p_answer), answers)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_a_comparison_does_not_depend_on_the_numbers_of_equal_items(direction):
    """Two images each have the same embeddings, so every answer is right with probability 1/2 at most."""
    once, outcomes = captioned(20, 3, 3), []
    image = np.repeat(once.image[np.arange(20)], 2, 0)
    text = np.repeat(once.text[np.argsort(once.image_row, kind="stable")].reshape(20, 3, -1), 2, 0)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(40)
        texts = text[order].reshape(120, -1)
        pairs = gf.EmbeddingPairs.from_arrays(image[order], texts, np.repeat(np.arange(40), 3))
        result = compare(Study(pairs), pairs, [First(Study(pairs))], directions=[direction], resamples=0).results[0]
        outcomes.append([result.plain_recall, *(result.numbers[name] for name in ("recall", "auroc", "aurc", "ece"))])
    np.testing.assert_allclose(outcomes, outcomes[:1] * 3, rtol=1e-9)
    assert outcomes[0][1] == pytest.approx(outcomes[0][0])
    assert 0 < outcomes[0][0] <= 0.5
