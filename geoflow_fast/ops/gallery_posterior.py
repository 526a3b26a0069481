"""Posterior over a gallery from von Mises-Fisher kernels around samples; its statistics merge exactly across shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from geoflow_fast.geometry import capturing
from geoflow_fast.ops import dispatch, native, reference, triton_kernels
from geoflow_fast.ops.gallery_statistics import GalleryPosterior, GalleryStatistics
from geoflow_fast.ops.pruning import PrefixRows, Pruner
from geoflow_fast.ops.rows import check_floating
from geoflow_fast.runtime import checks

PRUNE = ("auto", "never", "always")
"""Choices for `prune`, whether to skip items that provably do not matter: "auto", where it pays; "never"; "always"."""


def gallery_posterior(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int = 10,
    backend: str = "auto",
    *,
    item_bias: Tensor | None = None,
    index: PrefixRows | None = None,
    prune: str = "auto",
) -> GalleryPosterior:
    """Posterior over the gallery, the softmax of scores s_j = log mean_m exp(kappa <g_j, x_m>), for each query.

    `samples` [Q, M, d] and `gallery` [N, d] are unit rows of one floating-point dtype; any `kappa` from 0 to 1e4 works
    without overflow. `top_k`: how many of the most probable items to return. `item_bias` [N] is added to the scores;
    minus the items' log-marginals gives the Bayes posterior. The gallery is streamed, and the scores [Q, M, N] are
    never stored.

    With the gallery's `index` (`gf.GalleryIndex`), items that provably do not matter are not scored: on CPUs for those
    queries for which a small pilot run finds that it pays (`prune="auto"`), for all queries ("always"), or for none
    ("never"). `entropy_bound` and `mass_bound` of the result bound the effect.
    """
    statistics = gallery_statistics(
        samples, gallery, kappa, top_k, backend, item_bias=item_bias, index=index, prune=prune
    )
    return statistics.posterior(reference.working_dtype(samples))


def gallery_statistics(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int = 10,
    backend: str = "auto",
    *,
    item_bias: Tensor | None = None,
    index: PrefixRows | None = None,
    prune: str = "auto",
    first_index: int = 0,
) -> GalleryStatistics:
    """`gallery_posterior` of one shard in a form that can be merged with that of others (`GalleryStatistics.merge`).

    `first_index`: number of the shard's first item within the whole gallery. The other arguments are those of
    `gallery_posterior`, with `gallery` and `item_bias` of the shard.
    """
    _check(samples, gallery, kappa, top_k, item_bias)
    checks.integer(first_index, "first_index", most=2**62)
    _check_pruning(samples, gallery, index, prune)
    samples, gallery = samples.detach(), gallery.detach()
    item_bias = None if item_bias is None else item_bias.detach()
    if len(samples) == 0:
        nothing = torch.empty(0, dtype=torch.float64, device=samples.device)
        chosen = torch.empty(0, min(top_k, len(gallery)), dtype=torch.int64, device=samples.device)
        return GalleryStatistics.complete((nothing, nothing, nothing, chosen.double(), chosen), top_k)
    run = dispatch.choose("gallery_posterior", samples, backend)

    def reduce(some: Tensor, pick: Tensor | None) -> GalleryStatistics:
        found = GalleryStatistics.complete(_score_items(run, some, gallery, kappa, top_k, item_bias, pick), top_k)
        _check_finite(found.weight + found.moment)
        return found

    if index is None or prune == "never" or (prune == "auto" and samples.device.type != "cpu"):
        found = reduce(samples, None)
    else:
        score = dispatch.choose("gallery_scores", samples, backend)

        def best(some: Tensor, rows: Tensor, k: int) -> Tensor:
            return run(some, rows, kappa, k, item_bias)[4].long()

        pruner = Pruner(gallery, index, kappa, top_k, item_bias, score, best, reduce)
        found = pruner.statistics(samples, always=prune == "always")
    return dataclasses.replace(found, top_index=found.top_index + first_index)


def _score_items(
    run: Callable[..., reference.Statistics],
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    pick: Tensor | None,
) -> reference.Statistics:
    """Statistics over the rows `pick` of the gallery (None: all), with indices of the gallery."""
    if pick is None:
        return run(samples, gallery, kappa, min(top_k, len(gallery)), item_bias)
    bias = None if item_bias is None else item_bias[pick]
    kept = min(top_k, len(pick))
    if run is _cpu:
        found = run(samples, gallery, kappa, kept, bias, pick)
    else:
        found = run(samples, gallery[pick], kappa, kept, bias)
    return (*found[:4], pick[found[4].long()])


def _check_pruning(samples: Tensor, gallery: Tensor, index: PrefixRows | None, prune: str) -> None:
    if prune not in PRUNE:
        raise ValueError(f"prune must be one of {PRUNE}, got {prune!r}")
    if index is None:
        if prune == "always":
            raise ValueError('prune="always" needs the index of the gallery; see gf.GalleryIndex.build')
        return
    if samples.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"pruning works in float32 and float64, not {samples.dtype}")
    index.check(gallery)


def _check(samples: Tensor, gallery: Tensor, kappa: float, top_k: int, item_bias: Tensor | None) -> None:
    check_floating(("item_bias",), samples=samples, gallery=gallery, item_bias=item_bias)
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
    if not isinstance(kappa, (int, float)):
        raise TypeError(f"kappa must be a number, got {kappa!r}")
    if not 0 <= kappa < math.inf:
        raise ValueError(f"kappa must be finite and not negative, got {kappa}")
    checks.integer(top_k, "top_k", 1)
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
    "gallery_posterior",
    "triton",
    devices=triton_kernels.devices,
    missing=triton_kernels.missing,
    dtypes=triton_kernels.DTYPES,
)(triton_kernels.kernel("gallery", "gallery_statistics"))


dispatch.register("gallery_scores", "reference", devices=dispatch.EVERYWHERE)(reference.gallery_scores)


@dispatch.register("gallery_posterior", "cpu", devices=("cpu",), missing=native.missing, dtypes=(torch.float32,))
def _cpu(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    pick: Tensor | None = None,
) -> reference.Statistics:
    bias = None if item_bias is None else item_bias.float().contiguous()
    return native.gallery_posterior(samples.contiguous(), gallery.contiguous(), kappa, top_k, bias, pick)


@dispatch.register("gallery_scores", "cpu", devices=("cpu",), missing=native.missing, dtypes=(torch.float32,))
def _cpu_scores(samples: Tensor, gallery: Tensor, kappa: float, item_bias: Tensor | None) -> Tensor:
    bias = None if item_bias is None else item_bias.float().contiguous()
    return native.gallery_scores(samples.contiguous(), gallery.contiguous(), kappa, bias)
