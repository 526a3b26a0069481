"""Items that are in no gallery, by which the level of a query's scores is known.

Weights that are fitted to choices within a shortlist know how much more probable one item is than another, but not how
probable any of them is: adding a constant to all scores of a query changes no choice. Over items that were drawn
without the query, the mean of exp(score) is one if scores are pointwise mutual information. So its logarithm over a
bank of such items is the constant, and what the gallery has above it tells whether the right item is there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from geoflow_fast.retrieval.hubs import Hubs
from geoflow_fast.retrieval.sources import HeadSource
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.batches import in_batches
from geoflow_fast.runtime.device import rows_at_once

CELLS_AT_ONCE = 1 << 21
"""Scores of pairs (query, item) that are in a processor's memory at a time."""
CELL_BYTES = 32
"""What a GPU needs for each of them."""


class ItemBank:
    """A bank of items [B, d], scored by the head of `source`, if there is one, and corrected by `hubs`, if they are
    evidence."""

    def __init__(self, items: Tensor, source: HeadSource | None, hubs: Hubs | None) -> None:
        self.items, self.source, self.hubs = items, source, hubs

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the items."""
        return hashing.digest([self.items.float()])

    @torch.no_grad()
    def level(
        self, queries: Tensor, weights: Mapping[str, float], hub_scale: float, left_out: Tensor | None = None
    ) -> Tensor:
        """The logarithm [Q] of the mean of exp(score) over the items, where the score is the weighted sum of the
        evidence. `left_out` [Q, B] says which items do not count for which query."""
        numbers = self._numbers(weights, hub_scale)
        source = self.source
        on_cpu = max(1, CELLS_AT_ONCE // len(self.items))
        at_once = rows_at_once(queries.device, CELL_BYTES * len(self.items), on_cpu)

        def level(rows: slice) -> Tensor:
            scores = numbers.expand(len(queries[rows]), -1)
            if "cosine" in weights:
                scores = scores + weights["cosine"] * (queries[rows] @ self.items.T).double()
            if "head" in weights and source is not None:
                scores = scores + weights["head"] * source.all_scores(queries[rows], self.items).double()
            counted = torch.ones_like(scores, dtype=torch.bool) if left_out is None else ~left_out[rows]
            total = scores.masked_fill(~counted, -math.inf).logsumexp(1)
            return total - counted.sum(1).clamp(min=1).double().log()

        return in_batches(level, len(queries), at_once)

    def _numbers(self, weights: Mapping[str, float], hub_scale: float) -> Tensor:
        """What the items have in their scores for every query: [B]."""
        numbers = torch.zeros(len(self.items), dtype=torch.float64, device=self.items.device)
        if "head" in weights and self.source is not None:
            numbers = numbers + weights["head"] * self.source.learned_about(self.items)
        if self.hubs is None or {"hub", "head_hub"}.isdisjoint(weights):
            return numbers
        of_items = self.hubs.of_items(self.items, None, (hub_scale,))
        if "hub" in weights:
            numbers = numbers + weights["hub"] * of_items["hub"][0]
        return numbers + weights["head_hub"] * of_items["head_hub"] if "head_hub" in weights else numbers
