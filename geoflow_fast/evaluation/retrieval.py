"""Plain cosine retrieval in both directions, with several captions per image: what uncertainties are judged by.

An item is right for a query when both are of one image: image-to-text search is right when the top caption is one of
the image's own. Galleries are streamed through the kernels of `ops.gallery_posterior`; there is no matrix of all
queries by all items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.baselines.base import nearest
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask as RetrievalSet
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.progress import progress_bar

__all__ = ["Answers", "RetrievalSet", "plain_search", "recall_at"]
BLOCK_QUERIES = 512


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
