"""Hub correction: how near every item is to typical queries, which is what makes some items a hit for everything.

The number of an item is the logarithm of its mean score over a bank of typical queries. It estimates log p(item) under
the same kernel as the score, so subtracting it divides p(item) out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from geoflow_fast.retrieval import marginals
from geoflow_fast.retrieval.freshness import OncePerGallery, flow_marks, marks
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.sources import HeadSource

SCALES = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Factors of the cosines among which a calibration chooses."""
MOST_ROWS = 2000
"""Queries of a bank that are used at most."""


class Hubs:
    """The numbers of items for a bank of queries [R, d]: of their cosines, and of the scores of a head."""

    def __init__(self, bank: Tensor, source: HeadSource | None) -> None:
        self.bank, self.source = bank, source
        self._cosine: OncePerGallery[Tensor] = OncePerGallery()
        self._head: OncePerGallery[Tensor] = OncePerGallery()

    def cosine_numbers(self, gallery: Gallery, scale: float) -> Tensor:
        """log mean_r exp(scale <bank_r, g_j>) of all items: [N]."""
        bank = self.bank.unsqueeze(1)

        def compute() -> Tensor:
            return marginals.log_mean_scores(bank, gallery, scale)

        return self._cosine.of(gallery, (marks([self.bank]), scale), compute)

    def head_numbers(self, gallery: Gallery) -> Tensor:
        """The logarithm of the mean of exp(score) under the head of all items: [N]."""
        assert self.source is not None
        source = self.source

        def compute() -> Tensor:
            drawn = source.draw(self.bank)
            means = marginals.log_mean_scores(drawn.samples, gallery, drawn.kappa, drawn.bias)
            return means + source.learned(gallery).to(means)

        return self._head.of(gallery, (marks([self.bank]), flow_marks(source.head)), compute)

    def of_items(self, items: Tensor, left_out: Tensor | None, scales: Sequence[float]) -> dict[str, Tensor]:
        """The same numbers of some `items` [n, d]: "hub" [S, n] for each of the scales and, with a head, "head_hub"
        [n]. `left_out` [R, n] says which queries of the bank do not count for which item."""
        numbers = {}
        if items.shape[1] == self.bank.shape[1]:
            numbers["hub"] = log_means(self.bank @ items.T, left_out, scales)
        if self.source is not None:
            scores = self.source.all_scores(self.bank, items)
            numbers["head_hub"] = log_mean(scores, left_out) + self.source.learned_about(items)
        return numbers


def log_means(cosine: Tensor, left_out: Tensor | None, scales: Sequence[float]) -> Tensor:
    """`log_mean` of the cosines [R, n] times each of the scales, of which each is twice the one before: [S, n]. Then
    one exponential serves all of them."""
    kept = cosine if left_out is None else cosine.masked_fill(left_out, -math.inf)
    largest = kept.amax(0)
    power = (scales[0] * (kept - largest)).exp()
    log_count = math.log(len(cosine)) if left_out is None else (~left_out).sum(0).double().log()
    numbers = []
    for scale in scales:
        numbers.append(power.sum(0).double().log() + scale * largest.double() - log_count)
        power = power.square()
    return torch.stack(numbers)


def log_mean(scores: Tensor, left_out: Tensor | None) -> Tensor:
    """The logarithm of the mean of exp(scores) [R, n] over the rows that are not left out: float64 [n]."""
    scores = scores.double()
    if left_out is None:
        return scores.logsumexp(0) - math.log(len(scores))
    return scores.masked_fill(left_out, -math.inf).logsumexp(0) - (~left_out).sum(0).double().log()
