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

    @property
    def correct(self) -> Tensor:
        """[Q] bool, true where the first item of a query is right."""
        return self.right[:, 0]

    def recall(self, k: int) -> float:
        """Recall@k: share of queries with a right item among the first k."""
        if checks.integer(k, "k", 1) > self.right.shape[1]:
            raise ValueError(f"k={k} exceeds the {self.right.shape[1]} items that were searched for")
        return float(self.right[:, :k].any(1).double().mean())


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
    with progress_bar(len(task), 0, "queries", shown=progress) as advance:
        for queries in task.queries.split(BLOCK_QUERIES):
            blocks.append(nearest(queries.to(device), gallery, top_k))
            advance(len(queries))
    cosine, index = (torch.cat(parts).cpu() for parts in zip(*blocks))
    return Answers(index, cosine, task.is_right(index))
