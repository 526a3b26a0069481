"""Plain cosine search, the answers of which uncertainties are about.

Galleries are streamed through the kernels of `ops.gallery_posterior`; there is no matrix of all queries by all items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.progress import progress_bar
from geoflow_fast.runtime.summary import Summarised

BLOCK_QUERIES = 512
MOST_CANDIDATES = 1 << 20
"""(query, item) pairs that are looked at together for ties."""


@dataclass(frozen=True, repr=False)
class Answers(Summarised):
    """Results of plain search."""

    index: Tensor
    """[Q, k] int64, the nearest items, nearest first."""
    cosine: Tensor
    """[Q, k], their cosines with the query."""
    right: Tensor
    """[Q, k] bool, true where an item is right for its query."""
    hit: Tensor
    """[Q, k] float64, the probability that a right item is among the first 1, 2, ..., k if items with equal cosines are
    in random order, those beyond the first k included. It is 0 or 1 where no tie decides."""

    @property
    def first_right(self) -> Tensor:
        """[Q] float64, share of right items among all those that tie exactly for the first place."""
        return self.hit[:, 0]

    @property
    def correct(self) -> Tensor:
        """[Q] bool, true where the first item of a query, of tied ones the one with the lowest number, is right."""
        return self.right[:, 0]

    def recall(self, k: int) -> float:
        """Recall@k: share of queries with a right item among the first k. Ties count as in `hit`."""
        if checks.integer(k, "k", 1) > self.right.shape[1]:
            raise ValueError(f"k={k} exceeds the {self.right.shape[1]} items that were searched for")
        return float(self.hit[:, k - 1].mean())


def nearest(queries: Tensor, gallery: Gallery, count: int = 1) -> tuple[Tensor, Tensor]:
    """Cosines and row numbers, both [Q, min(count, N)], of the items nearest to each query; the gallery is streamed."""
    statistics = gallery.statistics(queries.unsqueeze(1), 1.0, count)
    return statistics.top_score, statistics.top_index


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
    width = top_k + 1  # the item after the last one shows whether the last place is shared
    with progress_bar(len(task), 0, "queries", shown=progress) as advance:
        for queries in task.queries.split(BLOCK_QUERIES):
            blocks.append(nearest(queries.to(device), gallery, width))
            advance(len(queries))
    cosine, index = (torch.cat(parts).cpu() for parts in zip(*blocks))
    hit = hit_probability(cosine, task.is_right(index), top_k)
    open_ended = cosine[:, -1] == cosine[:, min(top_k, cosine.shape[1]) - 1]
    while width < len(task.items) and bool(open_ended.any()):
        # There may be more items that tie for the last place of these queries.
        width, rows = min(2 * width, len(task.items)), open_ended.nonzero().squeeze(1)
        for part in rows.split(max(1, MOST_CANDIDATES // width)):
            cosines, items = (x.cpu() for x in nearest(task.queries[part].to(device), gallery, width))
            hit[part] = hit_probability(cosines, task.is_right(items, part), top_k)
            open_ended[part] = cosines[:, -1] == cosines[:, top_k - 1]
    index, cosine = index[:, :top_k], cosine[:, :top_k]
    return Answers(index, cosine, task.is_right(index), hit)


def hit_probability(score: Tensor, right: Tensor, k: int) -> Tensor:
    """The probability [Q, min(k, n)] that a right item is among the first 1, 2, ..., k if items with equal scores are
    in random order, given the `score` [Q, n] of items, in descending order, and which of them are `right` [Q, n]."""
    descending = -score.contiguous()
    first, end = (torch.searchsorted(descending, descending[:, :k].contiguous(), right=side) for side in (False, True))
    before = torch.nn.functional.pad(right.long().cumsum(1), (1, 0))  # right items before each place
    # One of the tied items that are left goes to each place: the probability that it is wrong if all so far were.
    left = end - torch.arange(end.shape[1], device=end.device)
    wrong = (left - before.gather(1, end) + before.gather(1, first)).clamp(min=0)
    return 1 - (wrong.double() / left.double()).cumprod(1)
