"""What the posterior over a gallery needs of the items seen so far, and the posterior that follows from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.runtime.summary import Summarised

Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Per query, of its items' scores s: max s, sum e^(s - max), sum (s - max) e^(s - max), top scores, top indices."""


@dataclass(frozen=True, repr=False)
class GalleryPosterior(Summarised):
    """Posterior over the gallery of each of Q queries: the softmax of the scores s_j."""

    entropy: Tensor
    """[Q], entropy in nats."""
    log_z: Tensor
    """[Q], log sum_j exp(s_j)."""
    top_index: Tensor
    """[Q, k] int64, the most probable items, most probable first; -1 where a filter leaves fewer than k."""
    top_prob: Tensor
    """[Q, k], their probabilities."""


@dataclass(frozen=True, repr=False)
class GalleryStatistics(Summarised):
    """Sums over the items seen so far from which the posterior follows; float64, so that many shards can be merged."""

    peak: Tensor
    """[Q], max_j s_j."""
    weight: Tensor
    """[Q], sum_j exp(s_j - peak)."""
    moment: Tensor
    """[Q], sum_j (s_j - peak) exp(s_j - peak)."""
    top_score: Tensor
    """[Q, k], the largest scores in descending order; k is `top_k`, or the number of items seen if that is smaller."""
    top_index: Tensor
    """[Q, k] int64, the items they belong to; -1, of score -inf, where a filter leaves fewer than k."""
    top_k: int

    @staticmethod
    def of_queries(parts: Sequence[GalleryStatistics]) -> GalleryStatistics:
        """Concatenates the queries of all parts, which must be over the same items."""
        return parts[0]._map(lambda name: torch.cat([getattr(part, name) for part in parts]))

    def select(self, queries: Tensor) -> GalleryStatistics:
        """Statistics of the queries with the numbers `queries`, in that order."""
        return self._map(lambda name: getattr(self, name)[queries])

    @property
    def log_z(self) -> Tensor:
        """log sum exp(s_j): [Q]."""
        return self.peak + self.weight.log()

    def merge(self, other: GalleryStatistics) -> GalleryStatistics:
        """Exact statistics of the union of two disjoint sets of items. The order of merging does not matter."""
        if other.peak.shape != self.peak.shape or other.top_k != self.top_k:
            raise ValueError(
                f"cannot merge statistics of {other.peak.shape[0]} queries and top_k={other.top_k} "
                f"into those of {self.peak.shape[0]} and top_k={self.top_k}"
            )
        mine, theirs = ((s.peak, s.weight, s.moment, s.top_score, s.top_index) for s in (self, other))
        return GalleryStatistics(*merge_statistics(mine, theirs, self.top_k), self.top_k)

    def posterior(self, dtype: torch.dtype = torch.float32) -> GalleryPosterior:
        """The posterior, in `dtype`: H = log weight - moment / weight, with scores relative to the peak."""
        log_weight = self.weight.log()
        log_z = self.peak + log_weight
        entropy = (log_weight - self.moment / self.weight).clamp_min(0.0)
        top_prob = (self.top_score - log_z.unsqueeze(1)).exp()
        return GalleryPosterior(entropy.to(dtype), log_z.to(dtype), self.top_index, top_prob.to(dtype))

    def numbered(self, numbers: Tensor) -> GalleryStatistics:
        """The same for items that have the `numbers` [n], ascending, elsewhere."""
        return dataclasses.replace(self, top_index=numbers[self.top_index])

    def padded(self, length: int) -> GalleryStatistics:
        """The same with lists of at least this length, by items of score -inf and number -1."""
        missing = max(0, length - self.top_score.shape[1])
        score = torch.nn.functional.pad(self.top_score, (0, missing), value=-math.inf)
        index = torch.nn.functional.pad(self.top_index, (0, missing), value=-1)
        return dataclasses.replace(self, top_score=score, top_index=index)

    def pack(self, columns: int) -> Tensor:
        """Packs everything into one float64 tensor [Q, 3 + 2 columns] for sending, integers by their bits. Fewer than
        `columns` top items are padded with items of score -inf."""
        missing = columns - self.top_score.shape[1]
        score = torch.nn.functional.pad(self.top_score, (0, missing), value=-math.inf)
        index = torch.nn.functional.pad(self.top_index, (0, missing))
        sums = torch.stack((self.peak, self.weight, self.moment), dim=1)
        return torch.cat((sums, score, index.view(torch.float64)), dim=1)

    @staticmethod
    def unpack(packed: Tensor, top_k: int) -> GalleryStatistics:
        """Inverse of `pack`."""
        columns = (packed.shape[1] - 3) // 2
        peak, weight, moment = packed[:, :3].unbind(1)
        score, index = packed[:, 3:].split(columns, dim=1)
        return GalleryStatistics(peak, weight, moment, score, index.contiguous().view(torch.int64), top_k)

    def _map(self, made: Callable[[str], Tensor]) -> GalleryStatistics:
        """A copy with every tensor replaced by what `made` returns for its name."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "top_k"]
        tensors: dict[str, Any] = {name: made(name) for name in names}
        return dataclasses.replace(self, **tensors)


def merge_statistics(a: Statistics, b: Statistics, top_k: int) -> Statistics:
    """Statistics of the union of two disjoint sets of items: exact, in any order and grouping."""
    peak = torch.maximum(a[0], b[0])
    weight, moment = torch.zeros_like(peak), torch.zeros_like(peak)
    for part_peak, part_weight, part_moment, _, _ in (a, b):
        shrink = (part_peak - peak).exp()
        weight = weight + shrink * part_weight
        # Moving the reference point from the part's maximum to the common one adds a multiple of its weight.
        moment = moment + shrink * (part_moment + (part_peak - peak) * part_weight)
    score, index = torch.cat((a[3], b[3]), dim=1), torch.cat((a[4], b[4]), dim=1)
    # Equal scores go by index, so that the order of merging does not show.
    index, order = index.sort(dim=1)
    score, order = score.gather(1, order).sort(dim=1, descending=True, stable=True)
    kept = min(top_k, score.shape[1])
    return peak, weight, moment, score[:, :kept], index.gather(1, order)[:, :kept]
