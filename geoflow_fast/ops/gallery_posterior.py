"""Posterior over a gallery from von Mises-Fisher kernels around samples; its statistics merge exactly across shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast import _native, dispatch, reference
from geoflow_fast.geometry import capturing
from geoflow_fast.ops import _triton
from geoflow_fast.ops._rows import check_floating


@dataclass(frozen=True)
class GalleryPosterior:
    """Softmax of the scores s_j over the gallery, per query."""

    entropy: Tensor
    """[Q], nats."""
    log_z: Tensor
    """[Q], log sum_j exp(s_j)."""
    top_index: Tensor
    """[Q, k] int64, most probable first."""
    top_prob: Tensor
    """[Q, k]."""


@dataclass(frozen=True)
class GalleryStatistics:
    """What the posterior of each query needs of the items seen so far; float64, so that many shards can be merged."""

    peak: Tensor
    """[Q], max_j s_j."""
    weight: Tensor
    """[Q], sum_j exp(s_j - peak)."""
    moment: Tensor
    """[Q], sum_j (s_j - peak) exp(s_j - peak)."""
    top_score: Tensor
    """[Q, k], the largest s_j in order; fewer columns than `top_k` while fewer items have been seen."""
    top_index: Tensor
    """[Q, k] int64."""
    top_k: int

    def merge(self, other: GalleryStatistics) -> GalleryStatistics:
        """Statistics of the union of two disjoint sets of items, exactly; the order of merging does not matter."""
        if other.peak.shape != self.peak.shape or other.top_k != self.top_k:
            raise ValueError(
                f"cannot merge statistics of {other.peak.shape[0]} queries and top_k={other.top_k} "
                f"into those of {self.peak.shape[0]} and top_k={self.top_k}"
            )
        mine, theirs = ((s.peak, s.weight, s.moment, s.top_score, s.top_index) for s in (self, other))
        return GalleryStatistics(*reference.merge_statistics(mine, theirs, self.top_k), self.top_k)

    def posterior(self, dtype: torch.dtype = torch.float32) -> GalleryPosterior:
        """The posterior over all items seen: H = log weight - moment / weight, with s measured from the peak."""
        log_weight = self.weight.log()
        entropy = (log_weight - self.moment / self.weight).clamp_min(0.0)
        log_z = self.peak + log_weight
        top_prob = (self.top_score - log_z.unsqueeze(1)).exp()
        return GalleryPosterior(entropy.to(dtype), log_z.to(dtype), self.top_index, top_prob.to(dtype))


def gallery_posterior(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int = 10,
    backend: str = "auto",
    *,
    item_bias: Tensor | None = None,
) -> GalleryPosterior:
    """Posterior over the gallery with scores s_j = log mean_m exp(kappa <g_j, x_m>): entropy, log_z and the top items.

    `samples` [Q, M, d] and `gallery` [N, d] are unit rows of one floating-point dtype; any `kappa` from 0 to 1e4 is
    served without overflow. `item_bias` [N] is added to the scores: minus the items' log-marginals gives the Bayes
    posterior. The gallery is streamed: [Q, M, N] never exists.
    """
    statistics = gallery_statistics(samples, gallery, kappa, top_k, backend, item_bias=item_bias)
    return statistics.posterior(reference.working_dtype(samples))


def gallery_statistics(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int = 10,
    backend: str = "auto",
    *,
    item_bias: Tensor | None = None,
    first_index: int = 0,
) -> GalleryStatistics:
    """The mergeable form of `gallery_posterior`, for a shard whose first item is number `first_index` of all."""
    _check(samples, gallery, kappa, top_k, item_bias)
    queries, _, _ = samples.shape
    kept = min(top_k, gallery.shape[0])
    if queries == 0:
        nothing = torch.empty(0, dtype=torch.float64, device=samples.device)
        index = torch.empty(0, kept, dtype=torch.int64, device=samples.device)
        return GalleryStatistics(nothing, nothing, nothing, index.double(), index, top_k)
    item_bias = None if item_bias is None else item_bias.detach()
    run = dispatch.choose("gallery_posterior", samples, backend)
    peak, weight, moment, top_score, top_index = run(samples.detach(), gallery.detach(), kappa, kept, item_bias)
    _check_finite(weight + moment)
    return GalleryStatistics(
        peak.double(), weight.double(), moment.double(), top_score.double(), top_index.long() + first_index, top_k
    )


def _check(samples: Tensor, gallery: Tensor, kappa: float, top_k: int, item_bias: Tensor | None) -> None:
    check_floating(samples=samples, gallery=gallery, item_bias=item_bias)
    if samples.dim() != 3 or gallery.dim() != 2 or samples.shape[2] != gallery.shape[1]:
        raise ValueError(
            f"samples must be [Q, M, d] and gallery [N, d], got {tuple(samples.shape)} and {tuple(gallery.shape)}"
        )
    if samples.dtype != gallery.dtype:
        raise TypeError(f"gallery is {gallery.dtype}, but samples are {samples.dtype}")
    if samples.shape[1] == 0 or gallery.shape[0] == 0 or gallery.shape[1] == 0:
        raise ValueError(
            f"need at least one sample, item and coordinate, got {tuple(samples.shape)} and {tuple(gallery.shape)}"
        )
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not isinstance(kappa, (int, float)):
        raise TypeError(f"kappa must be a number and top_k an integer, got {kappa!r} and {top_k!r}")
    if not 0 <= kappa < math.inf:
        raise ValueError(f"kappa must be finite and not negative, got {kappa}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if item_bias is not None and item_bias.shape != gallery.shape[:1]:
        raise ValueError(f"item_bias must be [{gallery.shape[0]}], got {tuple(item_bias.shape)}")


def _check_finite(sums: Tensor) -> None:
    """A NaN or infinity anywhere in the input reaches the sums [Q] of the queries it touches."""
    if capturing(sums):
        return
    bad = ~torch.isfinite(sums)
    if bool(bad.any()):
        query = int(bad.nonzero()[0])
        raise ValueError(
            f"scores of query {query} are not finite: samples, gallery or item_bias hold a NaN or infinity"
        )


dispatch.register("gallery_posterior", "reference", devices=dispatch.EVERYWHERE)(reference.gallery_statistics)
dispatch.register(
    "gallery_posterior", "triton", devices=_triton.devices, missing=_triton.missing, dtypes=_triton.DTYPES
)(_triton.kernel("gallery", "gallery_statistics"))


@dispatch.register("gallery_posterior", "cpu", devices=("cpu",), missing=_native.missing, dtypes=(torch.float32,))
def _cpu(samples: Tensor, gallery: Tensor, kappa: float, top_k: int, item_bias: Tensor | None) -> reference.Statistics:
    bias = None if item_bias is None else item_bias.float().contiguous()
    return _native.gallery_posterior(samples.contiguous(), gallery.contiguous(), kappa, top_k, bias)
