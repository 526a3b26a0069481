"""Retrieval tasks with known answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.runtime import checks


@dataclass(frozen=True)
class RetrievalTask:
    """Queries [Q, d] whose own items are known, by number [Q], among items [N, d']; references [R, d] if Bayes."""

    queries: Tensor
    own: Tensor
    items: Tensor
    reference: Tensor | None


def retrieval_task(pairs: EmbeddingPairs, direction: str, max_queries: int, seed: int, *, bayes: bool) -> RetrievalTask:
    """All items of the pairs, each once. For `bayes` the reference queries are of other images: a query that helped to
    estimate its own item's marginal, by itself or by another caption, would be held against it."""
    if len(pairs) < 1 or max_queries < 1:
        raise ValueError(f"{len(pairs)} pairs and max_queries={max_queries} leave no query to fit on")
    asking, others = pairs.split(0.5, seed) if bayes else (pairs, None)
    asking = _drawn(asking, max_queries, seed)
    side, rows = (1, pairs.image) if direction == "t2i" else (0, pairs.text)
    own, kept = (part.image_row if direction == "t2i" else part.text_row for part in (asking, pairs))
    kept = np.unique(kept)
    return RetrievalTask(
        _all(asking)[side],
        torch.from_numpy(np.searchsorted(kept, own)),
        torch.from_numpy(rows[kept]),
        None if others is None else _all(_drawn(others, max_queries, seed))[side],
    )


def _drawn(pairs: EmbeddingPairs, count: int, seed: int) -> EmbeddingPairs:
    """At most `count` of the pairs, in their order."""
    return pairs.subset(np.sort(np.random.default_rng(checks.integer(seed, "seed")).permutation(len(pairs))[:count]))


def _all(pairs: EmbeddingPairs) -> tuple[Tensor, Tensor]:
    return pairs[np.arange(len(pairs))]


@dataclass(frozen=True)
class HeldOut:
    """Queries [Q, d], their own `items` [Q, m, d] where `valid` [Q, m], and the image [Q] each belongs to."""

    queries: Tensor
    items: Tensor
    valid: Tensor
    group: Tensor

    @classmethod
    def of(cls, pairs: EmbeddingPairs, direction: str, max_queries: int, seed: int) -> HeldOut:
        """Every text with its image, or every image with all its texts; at most `max_queries` of them."""
        if len(pairs) == 0:
            raise ValueError("pairs is empty: there is no query to calibrate on")
        names, member = np.unique(pairs.group, return_inverse=True)
        count = len(pairs) if direction == "t2i" else len(names)
        chosen = np.sort(np.random.default_rng(seed).permutation(count)[:max_queries])
        if direction == "t2i":
            image, text = pairs[chosen]
            return cls(text, image.unsqueeze(1), torch.ones(len(text), 1, dtype=torch.bool), _tensor(member[chosen]))
        order = np.argsort(member, kind="stable")
        first, last = (np.searchsorted(member[order], chosen, side) for side in ("left", "right"))
        own = [order[low:high] for low, high in zip(first, last)]
        place = np.zeros((len(own), max(map(len, own))), np.int64)
        valid = np.zeros(place.shape, bool)
        for row, texts in enumerate(own):
            place[row, : len(texts)], valid[row, : len(texts)] = texts, True
        text = pairs[place.reshape(-1)][1].reshape(*place.shape, pairs.text_dim)
        return cls(pairs[place[:, 0]][0], text, _tensor(valid), _tensor(chosen))


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)
