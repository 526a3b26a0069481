"""Sums over a gallery's scores and lists of its best items by the Triton kernels, whatever the length of the lists."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from geoflow_fast.ops import triton_kernels
from geoflow_fast.ops.gallery_statistics import Statistics

KERNEL = triton_kernels.backend("gallery", "gallery_statistics")
_SPLIT = triton_kernels.backend("gallery", "split_rows")
LONGEST_LIST = 64
"""Items that the kernel lists; longer lists are read from the scores."""
EXACT_KAPPA = 1e4
"""Above this kappa, two bfloat16 parts are too few for float32 rows."""
SCORES_AT_ONCE = 1 << 26
"""Numbers that are in memory where scores have to be: 256 MB."""


def split_rows(gallery: Tensor) -> Tensor:
    """The bfloat16 parts [N, 2, d or a little more] of float32 rows [N, d], as the kernel takes those of items."""
    parts: Tensor = _SPLIT.function(gallery, False)
    return parts


def lists(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
    *,
    exact: bool = False,
) -> Statistics:
    """The kernel's statistics; lists longer than it keeps are read from the scores of some queries at a time. `exact`
    multiplies float32 rows as they are, in TF32."""
    if top_k <= LONGEST_LIST:
        *sums, index = KERNEL.function(samples, gallery, kappa, top_k, item_bias, sample_bias, exact=exact)
        peak, weight, moment, score = (x.double() for x in sums)
        return peak, weight, moment, score, index.long()
    is_split = not exact and samples.dtype == torch.float32 and kappa <= EXACT_KAPPA
    parts = split_rows(gallery) if is_split else None  # once for all queries
    statistics = []
    for some, bias in some_at_a_time(samples, sample_bias, len(gallery)):
        scores = torch.empty((len(some), len(gallery)), dtype=torch.float32, device=samples.device)
        sums = KERNEL.function(some, gallery, kappa, 1, item_bias, bias, scores=scores, parts=parts, exact=exact)[:3]
        statistics.append((*(x.double() for x in sums), *best_of(scores, top_k)))
    peak, weight, moment, score, index = (torch.cat(part) for part in zip(*statistics))
    return peak, weight, moment, score, index


def best_of(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest scores [Q, k] of [Q, N] in descending order, float64, and their columns; of equal ones the first."""
    if scores.dtype == torch.float64:
        ranked, order = scores.sort(dim=1, descending=True, stable=True)
        return ranked[:, :top_k], order[:, :top_k]
    bits = (scores + 0.0).view(torch.int32)  # of the two zeros, one is left
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the floats
    last = scores.shape[1] - 1
    keys = (ordered << 32) | (last - torch.arange(scores.shape[1], device=scores.device))
    index = last - (keys.topk(top_k, dim=1).values & 0xFFFFFFFF)
    return scores.gather(1, index).double(), index


def at_once(numbers: int) -> int:
    """How many queries, each of which takes so many numbers, are in memory together."""
    return max(1, SCORES_AT_ONCE // numbers)


def some_at_a_time(samples: Tensor, sample_bias: Tensor | None, numbers: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The samples of as many queries as are in memory together, and their biases."""
    blocks = samples.split(at_once(numbers))
    biases = [None] * len(blocks) if sample_bias is None else sample_bias.split(at_once(numbers))
    return zip(blocks, biases)
