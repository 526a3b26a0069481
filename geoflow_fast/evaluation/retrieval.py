"""Plain cosine search, the answers of which uncertainties are about.

Galleries are streamed through the kernels of `ops.gallery_posterior`; there is no matrix of all queries by all items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.baselines.base import nearest
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.progress import progress_bar

BLOCK_QUERIES = 512
RetrievalSet = RetrievalTask
"""The public name of the task in this module."""


@dataclass(frozen=True)
class Answers:
    """Results of plain search."""

    index: Tensor
    """[Q, k] int64, the nearest items, nearest first."""
    cosine: Tensor
    """[Q, k], their cosines with the query."""
    right: Tensor
    """[Q, k] bool, true where an item is right for its query."""
    first_right: Tensor
    """[Q] float64, share of right items among all those that tie exactly for the first place: the probability that the
    first item is right if ties are broken at random. It is 0 or 1 where there is no tie."""

    @property
    def correct(self) -> Tensor:
        """[Q] bool, true where the first item of a query, of tied ones the one with the lowest number, is right."""
        return self.right[:, 0]

    def recall(self, k: int) -> float:
        """Recall@k: share of queries with a right item among the first k. Recall@1 counts a tie for the first place as
        `first_right` does; beyond it, tied items are in the order of their numbers."""
        if checks.integer(k, "k", 1) > self.right.shape[1]:
            raise ValueError(f"k={k} exceeds the {self.right.shape[1]} items that were searched for")
        return float((self.first_right if k == 1 else self.right[:, :k].any(1).double()).mean())


def plain_search(
    task: RetrievalTask, top_k: int = 1, *, progress: bool = False, device: torch.device | str = "cpu"
) -> Answers:
    """Finds the `top_k` items with the largest cosine for every query, or all items if there are fewer."""
    if not isinstance(task, RetrievalTask):
        raise TypeError(f"task must be a RetrievalTask, got {type(task).__name__}")
    checks.integer(top_k, "top_k", 1)
    device = usable_device(str(checks.device(device)))
    gallery = Gallery(task.items.to(device))
    blocks: list[tuple[Tensor, Tensor]] = []
    width = max(top_k, 2)  # the second item shows whether the first place is shared
    with progress_bar(len(task), 0, "queries", shown=progress) as advance:
        for queries in task.queries.split(BLOCK_QUERIES):
            blocks.append(nearest(queries.to(device), gallery, width))
            advance(len(queries))
    cosine, index = (torch.cat(parts).cpu() for parts in zip(*blocks))
    first_right, all_tied = _first_place(cosine, task.is_right(index))
    while width < len(task.items) and bool(all_tied.any()):
        # All items that were found for these queries are tied, so there may be more of them.
        width, rows = min(2 * width, len(task.items)), all_tied.nonzero().squeeze(1)
        parts = [nearest(task.queries[part].to(device), gallery, width) for part in rows.split(BLOCK_QUERIES)]
        more_cosine, more_index = (torch.cat(part).cpu() for part in zip(*parts))
        right = task.item_image[more_index] == task.query_image[rows].unsqueeze(1)
        first_right[rows], all_tied[rows] = _first_place(more_cosine, right)
    index, cosine = index[:, :top_k], cosine[:, :top_k]
    return Answers(index, cosine, task.is_right(index), first_right)


def _first_place(cosine: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Share [Q] of right items among those whose cosine equals the first, and whether all [Q] do, given both [Q, k]."""
    tied = cosine == cosine[:, :1]
    return (tied & right).sum(1).double() / tied.sum(1).double(), tied.all(1)
