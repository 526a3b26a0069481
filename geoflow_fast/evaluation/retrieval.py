"""Plain cosine retrieval in both directions, with several captions per image: what uncertainties are judged by.

An item is right for a query when both are of one image: image-to-text search is right when the top caption is one of
the image's own. Galleries are streamed through the kernels of `ops.gallery_posterior`; there is no matrix of all
queries by all items.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.baselines.base import nearest
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.retrieval.entropy import CONDITIONAL
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.progress import progress_bar

BLOCK_QUERIES = 512


@dataclass(frozen=True)
class RetrievalSet:
    """A retrieval task: queries and a gallery. `of` builds it from pairs."""

    direction: str
    """"t2i": texts search images; "i2t": images search texts."""
    queries: Tensor
    """[Q, d]: every text, or every image once."""
    items: Tensor
    """[N, d']: every image once, or every text."""
    query_image: Tensor
    """[Q] int64, number of the image that each query belongs to."""
    item_image: Tensor
    """[N] int64, number of the image that each item belongs to."""
    query_row: np.ndarray
    """[Q], row of each query in the stored embeddings."""
    item_row: np.ndarray
    """[N], row of each item in the stored embeddings."""
    folder: Path | None
    """Folder that the pairs were opened from, or None."""

    @classmethod
    def of(
        cls, pairs: EmbeddingPairs, direction: str, *, max_queries: int | None = None, seed: int = 0
    ) -> RetrievalSet:
        """The task with all items of the pairs, and with all queries or `max_queries` of them drawn by `seed`, in their
        original order."""
        if not isinstance(pairs, EmbeddingPairs):
            raise TypeError(f"pairs must be EmbeddingPairs, got {type(pairs).__name__}")
        if direction not in CONDITIONAL:
            raise ValueError(f"direction must be one of {CONDITIONAL}, got {direction!r}")
        if pairs.image_dim != pairs.text_dim:
            widths = f"{pairs.image_dim} and {pairs.text_dim}"
            raise ValueError(f"plain search needs images and texts of one width, got {widths}")
        if max_queries is not None:
            checks.integer(max_queries, "max_queries", 1)
        checks.integer(seed, "seed")
        if len(pairs) == 0:
            raise ValueError("pairs is empty: there is no query to search for")
        _, first, image = np.unique(pairs.group, return_index=True, return_inverse=True)
        images = pairs.image_row[first], np.arange(len(first))
        texts = pairs.text_row, image
        (asked, query_image), (found, item_image) = (texts, images) if direction == "t2i" else (images, texts)
        chosen = np.arange(len(asked))
        if max_queries is not None:
            chosen = np.sort(np.random.default_rng(seed).permutation(len(asked))[:max_queries])
        sides = (pairs.text, pairs.image) if direction == "t2i" else (pairs.image, pairs.text)
        return cls(
            direction,
            torch.from_numpy(sides[0][asked[chosen]]),
            torch.from_numpy(sides[1][found]),
            torch.from_numpy(query_image[chosen]),
            torch.from_numpy(item_image),
            asked[chosen],
            found,
            pairs.folder,
        )

    def __len__(self) -> int:
        return len(self.queries)

    def is_right(self, index: Tensor, rows: slice = slice(None)) -> Tensor:
        """Whether the items `index` [Q, ...] are right for the queries `rows`: bool [Q, ...]. -1 stands for no item."""
        self._check_index(index, rows, least=-1)
        image = self.query_image[rows].reshape(-1, *[1] * (index.dim() - 1))
        return (self.item_image[index.cpu().clamp(min=0)] == image) & (index.cpu() >= 0)

    @functools.cached_property
    def own(self) -> Tensor:
        """The right items of each query, int64 [Q, m], padded with -1."""
        order = torch.argsort(self.item_image, stable=True)
        ranked = self.item_image[order].contiguous()
        first, last = (torch.searchsorted(ranked, self.query_image, right=right) for right in (False, True))
        place = torch.arange(int((last - first).max())) + first.unsqueeze(1)
        there = place < last.unsqueeze(1)
        return torch.where(there, order[place.clamp(max=len(order) - 1)], -1)

    def pairs_with(self, index: Tensor, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Embeddings (image, text) of the queries `rows`, each paired with its item in `index` [Q]."""
        self._check_index(index, rows)
        if index.dim() != 1:
            raise ValueError(f"index must be one item per query, [Q], got shape {tuple(index.shape)}")
        pair = self.queries[rows], self.items[index]
        return (pair[1], pair[0]) if self.direction == "t2i" else pair

    def _check_index(self, index: Tensor, rows: slice, least: int = 0) -> None:
        if not isinstance(rows, slice):
            raise TypeError(f"rows must be a slice of the queries, got {rows!r}")
        checks.indices(index, "index", len(self.items), least)
        count = len(self.query_image[rows])
        if not index.dim() or len(index) != count:
            raise ValueError(f"index must be [{count}, ...], a row for each of the queries, got {tuple(index.shape)}")


@dataclass(frozen=True)
class Answers:
    """Results of plain search."""

    index: Tensor
    """[Q, k] int64, the nearest items, nearest first."""
    cosine: Tensor
    """[Q, k], their cosines with the query."""
    right: Tensor
    """[Q, k] bool, whether they are right."""

    @property
    def correct(self) -> Tensor:
        """Whether the first item of each query is right: bool [Q]."""
        return self.right[:, 0]

    def recall(self, k: int) -> float:
        """Recall@k: share of queries with a right item among the first k."""
        if checks.integer(k, "k", 1) > self.right.shape[1]:
            raise ValueError(f"k={k} exceeds the {self.right.shape[1]} items that were searched for")
        return float(self.right[:, :k].any(1).double().mean())


def plain_search(
    task: RetrievalSet, top_k: int = 1, *, progress: bool = False, device: torch.device | str = "cpu"
) -> Answers:
    """Plain search: the `top_k` items with the largest cosine for every query, or all items if there are fewer."""
    if not isinstance(task, RetrievalSet):
        raise TypeError(f"task must be a RetrievalSet, got {type(task).__name__}")
    checks.integer(top_k, "top_k", 1)
    device = usable_device(str(checks.device(device)))
    gallery = Gallery(task.items.to(device))
    found: list[tuple[Tensor, Tensor]] = []
    with progress_bar(len(task), 0, "queries", shown=progress) as advance:
        for block in task.queries.split(BLOCK_QUERIES):
            found.append(nearest(block.to(device), gallery, top_k))
            advance(len(block))
    cosine, index = (torch.cat(parts).cpu() for parts in zip(*found))
    return Answers(index, cosine, task.is_right(index))


def recall_at(pairs: EmbeddingPairs, direction: str, ks: Sequence[int] = (1, 5, 10)) -> dict[int, float]:
    """Recall@k of plain search over all the pairs, by k."""
    answers = plain_search(RetrievalSet.of(pairs, direction), max(ks))
    return {k: answers.recall(min(k, answers.right.shape[1])) for k in ks}
