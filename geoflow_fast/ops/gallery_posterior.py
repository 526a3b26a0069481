"""Posterior over a gallery from von Mises-Fisher kernels around samples; its statistics merge exactly across shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.geometry import capturing
from geoflow_fast.ops import dispatch, extension, gallery_lists, triton_kernels
from geoflow_fast.ops.allowed import Allowed, Mask, Rows, check_finite, kept_blocks
from geoflow_fast.ops.arguments import check_floating, working_dtype
from geoflow_fast.ops.gallery_statistics import GalleryPosterior, GalleryStatistics, Statistics, merge_statistics
from geoflow_fast.runtime import checks

LARGEST_KAPPA = 1e5
"""Up to this kappa, entropies from float32 rows are within about .01 nats of those computed in float64. At ten times as
much they are off by .1, and at a hundred times by several: kappa multiplies the rounding of the cosines, 1e-7."""
_MASKED_SCORES, _LOWEST = {"cpu": 1 << 21, "cuda": 1 << 25}, -1e30
"""Scores that are in memory at a time where masks are applied to them, and one that is below all others."""


def gallery_posterior(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int = 10,
    backend: str = "auto",
    *,
    item_bias: Tensor | None = None,
    sample_bias: Tensor | None = None,
    precision: str = "float32",
    allowed: Mask | None = None,
) -> GalleryPosterior:
    """Posterior over the gallery, the softmax of scores s_j = log mean_m exp(kappa <g_j, x_m> + a_m) + b_j, for each
    query.

    `samples` x [Q, M, d] and `gallery` g [N, d] are rows of one floating-point dtype, or the gallery is in half
    precision and the samples in float32; `kappa` is from 0 to 1e5, where float32 ceases to resolve the scores of unit
    rows. Half precision is computed in float32, on CPUs without a copy of the gallery. `top_k`: how many of the
    most probable items to return. `item_bias` b [N] is added to the scores; minus the items' log-marginals gives the
    Bayes posterior. The gallery is streamed, and the scores [Q, M, N] are never stored.

    `sample_bias` a [Q, M] weighs the samples of each query: the scores of a mixture of K points x_k with concentrations
    c_k and log-weights w_k, logsumexp_k (w_k + c_k <x_k, g_j>), are those of the samples c_k x_k with kappa = 1 and the
    biases w_k + log K. An entry of -inf leaves its sample out; every query must keep one.

    With `precision="bfloat16"`, factors of inner products are rounded to bfloat16, of the largest coordinates in two
    parts, which takes half the time on processors with AVX512-BF16 and a third on GPUs. About twice as many items as
    `top_k` are then scored in float32, so that only the many others have rounding errors: kappa |x| / (500 sqrt(d))
    nats is what their scores are off by, roughly, if items are unit rows. "auto" is bfloat16 for the queries for which
    this is less than .01, where the processor has such a unit, and float32 for others. The plain torch backend rounds
    in the same way.

    `allowed`: a boolean mask of the items that there are, [N] for all queries or [Q, N]; every query must have one. For
    the posterior the others do not exist: it is that of a gallery of the allowed rows, by their numbers in this one.
    Lists of fewer than `top_k` items end with index -1 and probability 0.
    """
    statistics = gallery_statistics(
        samples,
        gallery,
        kappa,
        top_k,
        backend,
        item_bias=item_bias,
        sample_bias=sample_bias,
        precision=precision,
        allowed=allowed,
    )
    return statistics.posterior(working_dtype(samples))


def gallery_statistics(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int = 10,
    backend: str = "auto",
    *,
    item_bias: Tensor | None = None,
    sample_bias: Tensor | None = None,
    precision: str = "float32",
    first_index: int = 0,
    allowed: Mask | None = None,
) -> GalleryStatistics:
    """`gallery_posterior` of one shard in a form that can be merged with that of others (`GalleryStatistics.merge`).

    `first_index`: number of the shard's first item within the whole gallery. The other arguments are those of
    `gallery_posterior`, with `gallery`, `item_bias` and `allowed` of the shard.
    """
    _check(samples, gallery, kappa, top_k, item_bias)
    check_sample_bias(sample_bias, samples)
    checks.integer(first_index, "first_index", most=2**62)
    checks.precision(precision)
    samples, gallery = samples.detach(), gallery.detach()
    there = Allowed.of(allowed, len(samples), len(gallery), samples.device)
    if there is not None:
        check_filtered(samples, item_bias, there)

        def copied(rows: Rows, kept: Tensor) -> GalleryStatistics:
            weights = None if sample_bias is None else sample_bias[rows]
            shared = kappa, top_k, backend, item_bias, weights, precision
            statistics = block_statistics(kept_blocks(gallery, 0, kept), samples[rows], *shared)
            return statistics.padded(min(top_k, len(gallery)))

        def scored(rows: Rows, mask: Tensor) -> GalleryStatistics:
            weights = None if sample_bias is None else sample_bias[rows]
            shared = kappa, top_k, backend, item_bias, weights
            return masked_statistics([(0, gallery)], mask, samples[rows], *shared)

        statistics = there.serve(len(samples), copied, scored)
        index = statistics.top_index
        return dataclasses.replace(statistics, top_index=torch.where(index < 0, index, index + first_index))
    if _reads_stored(samples, gallery, str(backend)):
        samples = samples.to(torch.float32)
    elif precision != "float32" or samples.dtype != gallery.dtype:
        # Rounding starts from full precision.
        samples, gallery = samples.to(working_dtype(samples)), gallery.to(working_dtype(samples))
    item_bias = None if item_bias is None else item_bias.detach()
    sample_bias = None if sample_bias is None else sample_bias.detach()
    kept = min(top_k, len(gallery))
    if len(samples) == 0:
        return GalleryStatistics(*_no_statistics(samples, kept), top_k)

    def reduce(precision: str, rows: Tensor | None = None) -> GalleryStatistics:
        """Statistics of the queries `rows`, or of all, with inner products in this precision."""
        some, weights = samples, sample_bias
        if rows is not None:
            some, weights = samples[rows], None if sample_bias is None else sample_bias[rows]
        sums: Statistics = _statistics(some, gallery, kappa, kept, item_bias, weights, precision, str(backend))
        _check_finite(sums[1] + sums[2], rows, item_bias)
        return GalleryStatistics(*sums, top_k)

    narrow = _may_be_rounded(samples, kappa, str(backend)) if precision == "auto" else None
    if narrow is None:
        statistics = reduce("float32" if precision == "auto" else precision)
    else:
        by_precision = {"bfloat16": narrow.nonzero().squeeze(1), "float32": (~narrow).nonzero().squeeze(1)}
        each = [reduce(name, rows) for name, rows in by_precision.items() if len(rows)]
        statistics = GalleryStatistics.of_queries(each).select(torch.cat(tuple(by_precision.values())).argsort())
    return dataclasses.replace(statistics, top_index=statistics.top_index + first_index)


def check_filtered(samples: Tensor, item_bias: Tensor | None, allowed: Allowed) -> None:
    """Raises a ValueError that names a query whose samples, or an allowed item whose bias, are not finite: kernels see
    only some of them, by other numbers."""
    check_finite(samples, "samples")
    if item_bias is None:
        return
    bad = ~torch.isfinite(item_bias) & (allowed.mask if allowed.mask.dim() == 1 else allowed.mask.any(0))
    if bool(bad.any()):
        item = int(bad.nonzero()[0])
        raise ValueError(f"item_bias of item {item} is {float(item_bias[item])}, and the item is allowed")


def block_statistics(
    blocks: Iterable[tuple[Tensor, Tensor]],
    samples: Tensor,
    kappa: float,
    top_k: int,
    backend: str,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
    precision: str,
) -> GalleryStatistics:
    """`gallery_statistics` of all items in the `blocks` (numbers, ascending, and rows), of which there is at least one,
    with the `item_bias` [N] of all numbers."""
    running: GalleryStatistics | None = None
    for numbers, items in blocks:
        bias = None if item_bias is None else item_bias[numbers]
        shared = samples, items, kappa, top_k, backend
        part = gallery_statistics(*shared, item_bias=bias, sample_bias=sample_bias, precision=precision)
        part = part.numbered(numbers)
        running = part if running is None else running.merge(part)
    assert running is not None
    return running


def masked_statistics(
    blocks: Iterable[tuple[int, Tensor]],
    mask: Tensor,
    samples: Tensor,
    kappa: float,
    top_k: int,
    backend: str,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
) -> GalleryStatistics:
    """`gallery_statistics` of the items in all `blocks` (number of the first one, rows), of which there are for each
    query those in its row of the `mask` [Q, N], from the scores of all, in float32."""
    running: GalleryStatistics | None = None
    dtype, at_once = working_dtype(samples), max(1, _MASKED_SCORES.get(samples.device.type, 1 << 21) // len(samples))
    for start, items in blocks:
        for first, tile in zip(range(start, start + len(items), at_once), items.split(at_once)):
            some = slice(first, first + len(tile))
            bias = None if item_bias is None else item_bias[some].detach()
            scores = gallery_scores(samples.to(dtype), tile.to(dtype), kappa, bias, sample_bias, backend)
            scores = scores.masked_fill_(~mask[:, some], -math.inf)
            top_score, top_index = gallery_lists.best_of(scores, min(top_k, len(tile)))
            top_index = (top_index + first).masked_fill_(top_score == -math.inf, -1)
            peak = scores.amax(1).double().clamp(min=_LOWEST)  # where there is no item, a number all the same
            below = scores.double().sub_(peak.unsqueeze(1))
            mass = below.exp()
            moment = below.mul_(mass).masked_fill_(~mask[:, some], 0.0).sum(1)
            _check_finite(mass.sum(1) + moment, None, item_bias)
            part = GalleryStatistics(peak, mass.sum(1), moment, top_score, top_index, top_k)
            running = part if running is None else running.merge(part)
    assert running is not None
    return running


def _reads_stored(samples: Tensor, gallery: Tensor, backend: str) -> bool:
    """Whether compiled code reads these rows of the gallery as they are stored."""
    dtypes = samples.dtype in extension.STORAGES and gallery.dtype in extension.STORAGES
    served = dtypes and samples.device.type == "cpu" and backend in ("auto", "cpu") and not capturing(samples)
    return served and extension.missing() is None


def check_kappa(kappa: object) -> float:
    """Returns `kappa` as a float if scores with this concentration are more than rounding errors."""
    if isinstance(kappa, bool) or not isinstance(kappa, (int, float, np.integer, np.floating)):
        raise TypeError(f"kappa must be a number, got {kappa!r}")
    if not 0 <= kappa < math.inf:
        raise ValueError(f"kappa must be finite and not negative, got {kappa}")
    if kappa > LARGEST_KAPPA:
        raise ValueError(f"kappa must be at most {LARGEST_KAPPA:g}, got {kappa:g}: float32 resolves no narrower kernel")
    return float(kappa)


def check_sample_bias(sample_bias: Tensor | None, samples: Tensor) -> None:
    """Refuses biases of samples [Q, M, d] that are not [Q, M], or of which a query has a NaN, +inf, or only -inf."""
    if sample_bias is None:
        return
    check_floating(samples=samples, sample_bias=sample_bias)
    if sample_bias.shape != samples.shape[:2]:
        raise ValueError(f"sample_bias must be {list(samples.shape[:2])}, got {tuple(sample_bias.shape)}")
    if sample_bias.numel() == 0 or capturing(sample_bias):
        return
    # A NaN is the largest of its row; the largest entry is finite in every other case that is allowed.
    bad = ~torch.isfinite(sample_bias.detach().amax(dim=1))
    if bool(bad.any()):
        query = int(bad.nonzero()[0])
        raise ValueError(f"sample_bias of query {query} must have a finite entry and no NaN or +inf")


def _check(samples: Tensor, gallery: Tensor, kappa: float, top_k: int, item_bias: Tensor | None) -> None:
    check_floating(("item_bias",), samples=samples, gallery=gallery, item_bias=item_bias)
    if samples.dim() != 3 or gallery.dim() != 2 or samples.shape[2] != gallery.shape[1]:
        raise ValueError(
            f"samples must be [Q, M, d] and gallery [N, d], got {tuple(samples.shape)} and {tuple(gallery.shape)}"
        )
    if samples.dtype != gallery.dtype and not (samples.dtype == torch.float32 and gallery.dtype in extension.STORAGES):
        raise TypeError(f"gallery is {gallery.dtype}, but samples are {samples.dtype}")
    if samples.shape[1] == 0 or gallery.shape[0] == 0 or gallery.shape[1] == 0:
        raise ValueError(
            f"need at least one sample, item and coordinate, got {tuple(samples.shape)} and {tuple(gallery.shape)}"
        )
    check_kappa(kappa)
    checks.integer(top_k, "top_k", 1)
    if item_bias is not None and item_bias.shape != gallery.shape[:1]:
        raise ValueError(f"item_bias must be [{gallery.shape[0]}], got {tuple(item_bias.shape)}")


def _check_finite(sums: Tensor, numbers: Tensor | None, item_bias: Tensor | None) -> None:
    """A NaN or infinity anywhere in the input reaches the sums [Q] of the queries it touches. `numbers` [Q] are those
    of the queries, if they are not all in order."""
    if capturing(sums):
        return
    bad = ~torch.isfinite(sums)
    if bool(bad.any()):
        query = int(bad.nonzero()[0] if numbers is None else numbers[bad].min())
        if item_bias is not None and bool((left_out := item_bias == -math.inf).any()):
            item = int(left_out.nonzero()[0])
            raise ValueError(
                f"scores of query {query} are not finite: item_bias of item {item} is -inf; allowed= leaves items out"
            )
        raise ValueError(
            f"scores of query {query} are not finite: samples, gallery or item_bias hold a NaN or infinity"
        )


# ---- bfloat16 ------------------------------------------------------------------------------------------------------

ROUNDING_LIMIT = 0.01
"""Nats that `precision="auto"` may cost."""
_LEAST_WIDTH = 128  # of narrower rows, the second parts of coordinates take what rounding saves
_GPU_SAMPLES = 4096
"""From so many samples on a GPU gains more by one product instead of three than it loses by rounding the gallery, which
takes it some ten passes over the rows."""
_SPARE = 16
_PER_LARGE, _LANES, _LOOKS = 32, 16, 512  # as in csrc/cpu/gemm_bfloat16.h


def _gains_by_rounding(samples: Tensor, backend: str) -> bool:
    """Whether the processor is faster in bfloat16 with so many samples, and values can be asked for."""
    on_gpu = samples.device.type == "cuda"
    own, missing = ("triton", triton_kernels.missing) if on_gpu else ("cpu", extension.missing_bfloat16)
    served = samples.dtype == torch.float32 and backend in ("auto", own) and samples.shape[2] >= _LEAST_WIDTH
    if not served or capturing(samples) or missing() is not None:
        return False
    return not on_gpu or samples.shape[0] * samples.shape[1] >= _GPU_SAMPLES


def _may_be_rounded(samples: Tensor, kappa: float, backend: str) -> Tensor | None:
    """Which queries [Q] lose less than `ROUNDING_LIMIT` nats by bfloat16; None where no processor gains by it, or where
    values cannot be asked for.

    A coordinate in bfloat16 has a relative error of at most 2^-8 and of .42 2^-8 in the root mean square, and a product
    of two has .6 2^-8. The errors of different coordinates are independent, so that of kappa <x, g> with unit g is
    .6 2^-8 kappa |x| (sum_i x_i^2 g_i^2)^(1/2) / |x|, in which the root is d^(-1/2) if no coordinates stand out; those
    that do are multiplied in two parts. The entropy changes by the sum of p_j (-log p_j - H) times the errors e_j of
    the items j that are not scored again. As at least 17 items are more probable than each of these, its variance is
    at most e^2 Var(log p) / 18: about half of e, if log p varies by 2 nats. Half of 2^-8 kappa |x| d^(-1/2) leaves room
    for rows that are less even: below this limit, no entropy over embeddings of CLIP changed by more than .006.
    """
    if not _gains_by_rounding(samples, backend):
        return None
    error: Tensor = 2.0**-9 * kappa * samples.norm(dim=2).amax(dim=1) / math.sqrt(samples.shape[2])
    return error < ROUNDING_LIMIT


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _rounded_rows(samples: Tensor, gallery: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose inner products are those of samples and items in bfloat16: of the largest coordinates of the gallery,
    what rounding took away is added, times the other's rounded value."""
    items, width = gallery.shape
    looks = min(items, _LOOKS)
    some = gallery.index_select(0, torch.arange(looks, device=gallery.device) * items // looks)
    kept = min(width, -(-width // (_PER_LARGE * _LANES)) * _LANES)
    largest = some.square().sum(0).sort(descending=True, stable=True).indices.narrow(0, 0, kept)
    x, g = _rounded(samples), _rounded(gallery)
    rest_x, rest_g = (_rounded(rest).index_select(-1, largest) for rest in (samples - x, gallery - g))
    x_large, g_large = (rounded.index_select(-1, largest) for rounded in (x, g))
    return torch.cat((x, x_large, rest_x), -1), torch.cat((g, rest_g, g_large), -1)


def _with_exact_top(rough: Statistics, scores: Tensor, top_k: int) -> Statistics:
    """Statistics in which the listed items have the given `scores` [Q, k'], of which the `top_k` best remain listed."""
    peak, weight, moment, rough_score, index = rough
    below = rough_score - peak.unsqueeze(1)
    rest, rest_moment = weight - below.exp().sum(1), moment - (below * below.exp()).sum(1)
    nothing = (rest < 1e-6 * weight) & moment.isfinite()  # but rounding errors
    rest, rest_moment = rest.masked_fill(nothing, 0), rest_moment.masked_fill(nothing, 0)
    top = scores.amax(1)
    shift = peak - top  # by which the scores of the others are referred to the new peak
    others = top, shift.exp() * rest, shift.exp() * (rest_moment + shift * rest), scores[:, :0], index[:, :0]
    below = scores - top.unsqueeze(1)
    listed = top, below.exp().sum(1), (below * below.exp()).sum(1), scores, index
    return merge_statistics(others, listed, top_k)


# ---- plain torch ---------------------------------------------------------------------------------------------------

_TILE_ROWS, _TILE_ITEMS = 512, 4096  # samples and gallery items per tile of scores: 8 MB of float32


def gallery_scores_reference(
    samples: Tensor, gallery: Tensor, kappa: float, item_bias: Tensor | None, sample_bias: Tensor | None
) -> Tensor:
    """s_qj = log mean_m exp(kappa <g_j, x_qm> + sample_bias_qm) + item_bias_j: [Q, N] for `samples` [Q, M, d] and
    `gallery` [N, d]."""
    work = working_dtype(samples)
    queries, draws, width = samples.shape
    # Item-major, so that the mean over the draws runs along memory.
    logits = (gallery.to(work) @ samples.to(work).reshape(-1, width).T).mul_(kappa).view(-1, queries, draws)
    if sample_bias is not None:
        logits += sample_bias.to(work)
    peak = logits.amax(dim=-1)
    score = logits.sub_(peak.unsqueeze(-1)).exp_().mean(dim=-1).log_().add_(peak).T
    return score if item_bias is None else score + item_bias.to(work)


def gallery_posterior_reference(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the scores in float64, with never more than one tile of [Q, M, N] in memory."""
    if precision == "float32":
        return _streamed(samples, gallery, kappa, top_k, item_bias, sample_bias)
    gallery = gallery.to(working_dtype(samples))
    kept = min(len(gallery), top_k + max(top_k, _SPARE))
    rough = _streamed(*_rounded_rows(samples, gallery), kappa, kept, item_bias, sample_bias)
    exact = [
        gallery_scores_reference(
            samples[q : q + 1],
            gallery[items],
            kappa,
            None if item_bias is None else item_bias[items],
            None if sample_bias is None else sample_bias[q : q + 1],
        )
        for q, items in enumerate(rough[4])
    ]
    return _with_exact_top(rough, torch.cat(exact).double(), top_k)


def _streamed(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
) -> Statistics:
    """Statistics of the scores of all rows of the gallery, from tiles of them."""
    blocks = []
    queries_per_block = max(1, _TILE_ROWS // samples.shape[1])
    for first in range(0, len(samples), queries_per_block):
        some = slice(first, first + queries_per_block)
        weights = None if sample_bias is None else sample_bias[some]
        running: Statistics | None = None
        for start in range(0, gallery.shape[0], _TILE_ITEMS):
            tile = slice(start, start + _TILE_ITEMS)
            bias = None if item_bias is None else item_bias[tile]
            scores = gallery_scores_reference(samples[some], gallery[tile], kappa, bias, weights)
            statistics = _score_statistics(scores.double(), top_k, start)
            running = statistics if running is None else merge_statistics(running, statistics, top_k)
        assert running is not None
        blocks.append(running)
    peak, weight, moment, top_score, top_index = zip(*blocks)
    return torch.cat(peak), torch.cat(weight), torch.cat(moment), torch.cat(top_score), torch.cat(top_index)


def _score_statistics(score: Tensor, top_k: int, first_index: int) -> Statistics:
    """Statistics of the scores [Q, N] of items `first_index`, `first_index` + 1, ..."""
    # A stable sort, not topk: equal scores, as of items that occur twice, must be kept in the order of their indices.
    ranked, order = score.sort(dim=1, descending=True, stable=True)
    peak = ranked[:, 0]
    below = score - peak.unsqueeze(1)
    mass = below.exp()
    return peak, mass.sum(1), (mass * below).sum(1), ranked[:, :top_k], order[:, :top_k] + first_index


def _no_statistics(samples: Tensor, top_k: int) -> Statistics:
    """Uninitialised statistics of as many queries as there are samples."""
    sums = [torch.empty(len(samples), dtype=torch.float64, device=samples.device) for _ in range(3)]
    index = torch.empty(len(samples), top_k, dtype=torch.int64, device=samples.device)
    return sums[0], sums[1], sums[2], torch.empty_like(index, dtype=torch.float64), index


# ---- compiled C++ and Triton ---------------------------------------------------------------------------------------


def _cpu(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
    precision: str,
) -> Statistics:
    reason = extension.missing_bfloat16() if precision == "bfloat16" else None
    if reason is not None:
        raise dispatch.BackendUnavailable(f'precision="bfloat16": {reason}; use "float32", or "auto"')
    rows, biases = (samples.contiguous(), gallery.contiguous()), (_single(item_bias), _single(sample_bias))
    statistics: Statistics = extension.required().gallery_posterior(*rows, kappa, top_k, *biases, precision)
    return statistics


def _cpu_scores(
    samples: Tensor, gallery: Tensor, kappa: float, item_bias: Tensor | None, sample_bias: Tensor | None
) -> Tensor:
    rows, biases = (samples.contiguous(), gallery.contiguous()), (_single(item_bias), _single(sample_bias))
    scores: Tensor = extension.required().gallery_scores(*rows, kappa, *biases)
    return scores


def _single(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _triton(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
    precision: str,
) -> Statistics:
    if precision == "float32":
        return gallery_lists.lists(samples, gallery, kappa, top_k, item_bias, sample_bias)
    kept = min(len(gallery), top_k + max(top_k, _SPARE))
    narrow, narrow_rows = (x.to(torch.bfloat16) for x in _rounded_rows(samples, gallery))
    rough = gallery_lists.lists(narrow, narrow_rows, kappa, kept, item_bias, sample_bias)
    scores = _scores_of_listed(samples, gallery, kappa, rough[4], item_bias, sample_bias)
    return _with_exact_top(rough, scores.double(), top_k)


def _scores_of_listed(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    listed: Tensor,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
) -> Tensor:
    """The scores [Q, k] of the items that `listed` [Q, k] names for each query, in float32."""
    parts = []
    blocks = gallery_lists.some_at_a_time(samples, sample_bias, listed.shape[1] * gallery.shape[1])
    for (some, bias), numbers in zip(blocks, listed.split(gallery_lists.at_once(listed.shape[1] * gallery.shape[1]))):
        items = torch.nn.functional.embedding(numbers, gallery)
        logits = kappa * torch.einsum("qmd,qkd->qkm", some, items)
        if bias is not None:
            logits = logits + bias.unsqueeze(1).to(logits)
        parts.append(logits.logsumexp(2) - math.log(samples.shape[1]))
    scores = torch.cat(parts)
    return scores if item_bias is None else scores + item_bias.to(scores)[listed]


_statistics = dispatch.operation(
    "gallery_posterior",
    gallery_posterior_reference,
    cpu=dataclasses.replace(extension.bound("gallery_posterior"), function=_cpu),
    triton=dataclasses.replace(gallery_lists.KERNEL, function=_triton),
    fake=lambda samples, gallery, kappa, top_k, *_: _no_statistics(samples, top_k),  # noqa: ARG005
    differentiable=False,
)
gallery_scores = dispatch.operation(
    "gallery_scores",
    gallery_scores_reference,
    cpu=dataclasses.replace(extension.bound("gallery_scores"), function=_cpu_scores),
    triton=triton_kernels.backend("gallery", "gallery_scores"),
    fake=lambda samples, gallery, *_: torch.empty(
        (len(samples), len(gallery)), dtype=working_dtype(samples), device=samples.device
    ),
    differentiable=False,
)
"""Scores [Q, N] as `gallery_scores_reference` takes them, unchecked; the last argument is the name of a backend."""
