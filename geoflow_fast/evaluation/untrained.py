"""References that need no training: functions of the cosines of plain search, and the distance to training queries.

Galleries are streamed through the kernels of `ops.gallery_posterior`: there is no matrix of all queries by all items.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.methods import Method, Scores, Study, posterior_scores, right_per_query
from geoflow_fast.evaluation.retrieval import nearest
from geoflow_fast.retrieval.bandwidth import fit_cosine_scale
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask, pair_task, typical_queries

TUNING_QUERIES = 1000
"""The temperature is fitted on at most this many held-out queries."""
NEIGHBOURS, KNOWN_ROWS = 10, 100_000
"""Which neighbour the distance is to, among at most so many training queries."""


def tuned_scale(pairs: EmbeddingPairs, direction: Direction, seed: int = 0, max_queries: int = TUNING_QUERIES) -> float:
    """Inverse temperature of the cosine softmax, a float32 number, with the least -log probability of the true items
    of these pairs. The items of the drawn pairs serve as the gallery."""
    task = pair_task(pairs, direction, max_queries, seed)
    scale = fit_cosine_scale(task.queries, task.items, task.own[:, 0])
    return float(torch.tensor(scale, dtype=torch.float32))


def margin(queries: Tensor, gallery: Gallery) -> Tensor:
    """Minus the difference between the largest and the second largest cosine, [Q]."""
    if len(gallery) < 2:
        return queries.new_zeros(len(queries))
    cosine, _ = nearest(queries, gallery, 2)
    return cosine[:, 1] - cosine[:, 0]


def max_softmax(queries: Tensor, gallery: Gallery, scale: float) -> Tensor:
    """One minus the largest probability of the softmax of `scale` times the cosine over the gallery: float64 [Q]."""
    return 1 - gallery.statistics(queries.unsqueeze(1), scale, 1).posterior(torch.float64).top_prob[:, 0]


def softmax_entropy(queries: Tensor, gallery: Gallery, scale: float) -> Tensor:
    """Entropy, in nats, of the softmax of `scale` times the cosine over the gallery: float64 [Q]."""
    return gallery.statistics(queries.unsqueeze(1), scale, 1).posterior(torch.float64).entropy


def knn_distance(queries: Tensor, known: Tensor, neighbours: int = NEIGHBOURS) -> Tensor:
    """One minus the cosine with the `neighbours`-th nearest of the `known` training queries [R, d]: [Q]."""
    return 1 - nearest(queries, Gallery(known), neighbours)[0][:, -1]


class UntrainedMethod(Method):
    """A reference as a method of a comparison."""

    def facts(self) -> dict[str, Any]:
        """Nothing: it depends on the held-out pairs and the seed alone."""
        return {}

    def fit(self, task: RetrievalTask) -> None:
        """Prepares the gallery and tunes what is to be tuned."""
        self.task, self.gallery = task, Gallery(task.items)
        super().fit(task)


class Margin(UntrainedMethod):
    """Cosine margin."""

    name, title = "margin", "cosine margin"

    def _fit(self, task: RetrievalTask) -> None:
        """Does nothing, because there is nothing to tune."""

    def score(self, rows: slice, answers: Tensor) -> Scores:  # noqa: ARG002
        """Scores queries by `margin`."""
        return Scores.without_probabilities(margin(self.task.queries[rows], self.gallery))


class SoftmaxEntropy(UntrainedMethod):
    """Entropy of the softmax over cosines, whose temperature is fitted on the held-out pairs."""

    name, title = "softmax_entropy", "cosine-softmax entropy"

    def _fit(self, task: RetrievalTask) -> None:
        self.scale = tuned_scale(self.study.val, task.direction, self.study.seed)
        self.right = right_per_query(self.study.val, task.direction)

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """Scores queries by the entropy of the softmax, with its probabilities."""
        queries, own = self.task.queries[rows].unsqueeze(1), self.task.own[rows]
        return posterior_scores(queries, self.gallery, self.scale, own, answers, self.right)


class MaxSoftmax(SoftmaxEntropy):
    """One minus the largest probability of the same softmax."""

    name, title = "max_softmax", "max softmax"

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """Scores queries by `max_softmax`, with the probabilities of the softmax."""
        uncertainty = max_softmax(self.task.queries[rows], self.gallery, self.scale).cpu()
        return dataclasses.replace(super().score(rows, answers), uncertainty=uncertainty)


class KNNDistance(UntrainedMethod):
    """Distance to training queries."""

    name, title = "knn", "kNN distance"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        if study.train is None:
            raise ValueError(f"{self.name} learns from training pairs: give them, or leave it out of the methods")
        if len(study.train) < NEIGHBOURS:
            raise ValueError(f"{len(study.train)} training pairs are fewer than neighbours={NEIGHBOURS}")
        self.train = study.train

    def facts(self) -> dict[str, Any]:
        """The training pairs."""
        return {"train": self.train.fingerprint()}

    def _fit(self, task: RetrievalTask) -> None:
        self.known = typical_queries(self.train, task.direction, KNOWN_ROWS, self.study.seed)

    def score(self, rows: slice, answers: Tensor) -> Scores:  # noqa: ARG002
        """Scores queries by `knn_distance`."""
        return Scores.without_probabilities(knn_distance(self.task.queries[rows], self.known))


UNTRAINED: dict[str, type[UntrainedMethod]] = {
    kind.name: kind for kind in (MaxSoftmax, Margin, SoftmaxEntropy, KNNDistance)
}
"""The references by name."""
