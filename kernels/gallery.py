"""Posterior over a gallery from samples: scores s_qj = log mean_m exp(kappa <g_j, x_qm> + a_qm) + b_j and statistics.

Work: 2 Q M N d FLOP in the inner products, Q M N exponentials, and one read of the gallery per block of queries from
memory (further reads hit the L2 cache). [Q, M, N] and [Q, N] never exist. 25,000 queries x 50 samples x 5,000 items at
d=1024: 12.8 TFLOP. At 60 % of the tensor peak and 89 % packing: bfloat16 76 ms on A100 and 24 ms on H100; float32,
which takes three TF32 products for each of its own, 460 ms and 145 ms.

A program holds QUERIES queries and walks its share of the gallery, ITEMS at a time. For each tile it takes the draws of
its queries CHUNK at a time: the samples of several queries are packed into one matrix product [ITEMS, CHUNK * QUERIES],
whose reduction over draws stays inside a thread. An online maximum per (item, query) keeps every kappa exact. Over the
tiles it keeps, per query, max s, sum e^(s - max), sum (s - max) e^(s - max) and the best TOP items; a second kernel
merges the shares exactly. Scores are in base 2 inside, in nats outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoflow_fast.kernels.launch import launch

LOWEST = tl.constexpr(-1e30)  # below every score, and finite: its differences and products stay numbers
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FEW_QUERIES = 4
MAX_TOP_K = 64
NO_KAPPA = 1e-20
"""Below this kappa, inner products change no score of samples that have biases."""


@dataclass(frozen=True)
class GalleryConfig:
    """A member of the tuning space: tile sizes, warps and pipeline stages, and the calls it is meant for."""

    half: bool
    few: bool
    queries: int
    chunk: int
    items: int
    depth: int
    warps: int
    stages: int

    def triton(self) -> triton.Config:
        sizes = {"QUERIES": self.queries, "CHUNK": self.chunk, "ITEMS": self.items, "DEPTH": self.depth}
        return triton.Config(sizes, num_warps=self.warps, num_stages=self.stages)


CONFIGS = {
    "half-wide": GalleryConfig(half=True, few=False, queries=16, chunk=8, items=128, depth=32, warps=8, stages=4),
    "half-slim": GalleryConfig(half=True, few=False, queries=16, chunk=8, items=64, depth=32, warps=4, stages=4),
    "half-few": GalleryConfig(half=True, few=True, queries=2, chunk=32, items=128, depth=32, warps=8, stages=4),
    "float-wide": GalleryConfig(half=False, few=False, queries=16, chunk=8, items=64, depth=16, warps=8, stages=3),
    "float-slim": GalleryConfig(half=False, few=False, queries=16, chunk=4, items=64, depth=16, warps=4, stages=3),
    "float-few": GalleryConfig(half=False, few=True, queries=2, chunk=32, items=128, depth=16, warps=8, stages=3),
}
"""The whole tuning space by name."""


def eligible(dtype: torch.dtype, queries: int) -> list[str]:
    """Names of the configurations meant for this dtype and number of queries."""
    half, few = dtype != torch.float32, queries <= FEW_QUERIES
    return [name for name, config in CONFIGS.items() if config.half == half and config.few == few]


def _prune(_configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> list[triton.Config]:
    return [CONFIGS[name].triton() for name in eligible(arguments["samples"].dtype, arguments["n_queries"])]


@triton.autotune(
    configs=[config.triton() for config in CONFIGS.values()],
    key=["n_samples", "width"],
    prune_configs_by={"early_config_prune": _prune},
)
@triton.jit(do_not_specialize=["n_queries", "n_samples", "n_items", "items_per_share"])
def gallery_tile_kernel(
    samples,
    gallery,
    bias,
    sample_bias,
    peak_out,
    weight_out,
    moment_out,
    top_score_out,
    top_index_out,
    n_queries,
    n_samples,
    n_items,
    width,
    scale,
    items_per_share,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SAMPLE_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
    ITEMS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    ROWS: tl.constexpr = CHUNK * QUERIES
    row = tl.arange(0, ROWS)  # row r of the product is draw r // QUERIES of query r % QUERIES
    query = tl.program_id(0) * QUERIES + row % QUERIES
    item = tl.arange(0, ITEMS)
    depth = tl.arange(0, DEPTH)
    slot = tl.arange(0, SLOTS)
    first = tl.program_id(1) * items_per_share
    last = tl.minimum(first + items_per_share, n_items)
    x_base = samples + tl.program_id(0).to(tl.int64) * QUERIES * n_samples * width
    a_base = sample_bias + tl.program_id(0).to(tl.int64) * QUERIES * n_samples
    g_base = gallery + first.to(tl.int64) * width

    peak = tl.full([QUERIES], LOWEST, tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    moment = tl.zeros([QUERIES], tl.float32)
    # Slots past TOP hold +inf, so they are never the lowest; empty ones have distinct negative numbers.
    top_score = tl.where(slot < TOP, float("-inf"), float("inf"))[None, :] + tl.zeros([QUERIES, SLOTS], tl.float32)
    top_index = (-1 - slot)[None, :] + tl.zeros([QUERIES, SLOTS], tl.int32)

    for start in range(first, last, ITEMS):
        here = start + item
        best = tl.full([ITEMS, QUERIES], LOWEST, tl.float32)
        total = tl.zeros([ITEMS, QUERIES], tl.float32)
        for draw in range(0, n_samples, CHUNK):
            sample = draw + row // QUERIES
            live = (query < n_queries) & (sample < n_samples)
            x_at = x_base + ((row % QUERIES) * n_samples + sample)[None, :] * width + depth[:, None]
            g_at = g_base + item[:, None] * width + depth[None, :]
            product = tl.zeros([ITEMS, ROWS], tl.float32)
            if HAS_SAMPLE_BIAS:  # before the product: after it, there is no register left to hold them
                a = tl.load(a_base + (row % QUERIES) * n_samples + sample, mask=live, other=0.0)
                product += a[None, :]
            for k in range(0, width, DEPTH):
                x = tl.load(x_at + k, mask=live[None, :] & (k + depth < width)[:, None], other=0.0)
                g = tl.load(g_at + k, mask=(here < last)[:, None] & (k + depth < width)[None, :], other=0.0)
                product = tl.dot(g, x, product, input_precision=PRECISION)
            logit = tl.where((sample < n_samples)[None, :], product * scale, float("-inf"))
            logit = tl.reshape(logit, [ITEMS, CHUNK, QUERIES])
            above = tl.maximum(best, tl.max(logit, axis=1))
            total = total * tl.exp2(best - above) + tl.sum(tl.exp2(logit - above[:, None, :]), axis=1)
            best = above
        g_base += ITEMS * width
        score = tl.trans(best + tl.log2(total / n_samples))  # [QUERIES, ITEMS]
        if HAS_BIAS:
            score += tl.load(bias + here, mask=here < last, other=0.0)[None, :] * LOG2_E
        score = tl.where((here < last)[None, :], score, float("-inf"))

        peak_now = tl.maximum(peak, tl.max(score, axis=1))
        shrink = tl.exp2(peak - peak_now)
        below = tl.where((here < last)[None, :], score - peak_now[:, None], LOWEST)
        mass = tl.exp2(below)
        moment = shrink * (moment + (peak - peak_now) * weight) + tl.sum(mass * below, axis=1)
        weight = shrink * weight + tl.sum(mass, axis=1)
        peak = peak_now

        for _ in range(TOP):
            candidate, column = tl.max(score, axis=1, return_indices=True)
            score = tl.where(item[None, :] == column[:, None], float("-inf"), score)
            low = tl.min(top_score, axis=1)
            # Of equal scores the largest index goes first, so that ties are kept in the order of the gallery.
            going = tl.max(tl.where(top_score == low[:, None], top_index, -2147483648), axis=1)
            replaced = (top_index == going[:, None]) & (slot < TOP)[None, :] & (candidate > low)[:, None]
            top_score = tl.where(replaced, candidate[:, None], top_score)
            top_index = tl.where(replaced, (start + column)[:, None], top_index)

    owner = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = owner < n_queries
    at = tl.program_id(1).to(tl.int64) * n_queries + owner
    tl.store(peak_out + at, peak * LN_2, mask=inside)
    tl.store(weight_out + at, weight, mask=inside)
    tl.store(moment_out + at, moment * LN_2, mask=inside)
    list_at = at[:, None] * TOP + slot[None, :]
    listed = inside[:, None] & (slot < TOP)[None, :]
    tl.store(top_score_out + list_at, top_score * LN_2, mask=listed)
    tl.store(top_index_out + list_at, top_index, mask=listed)


@triton.jit(do_not_specialize=["n_queries", "n_shares"])
def gallery_merge_kernel(
    peak_in,
    weight_in,
    moment_in,
    top_score_in,
    top_index_in,
    peak_out,
    weight_out,
    moment_out,
    top_score_out,
    top_index_out,
    n_queries,
    n_shares,
    TOP: tl.constexpr,
    SHARES: tl.constexpr,
    LISTED: tl.constexpr,
):
    """One query: statistics of all shares merged, and the best TOP of their lists in order."""
    query = tl.program_id(0)
    share = tl.arange(0, SHARES)
    there = share < n_shares
    at = share.to(tl.int64) * n_queries + query
    peaks = tl.load(peak_in + at, mask=there, other=LOWEST)
    weights = tl.load(weight_in + at, mask=there, other=0.0)
    moments = tl.load(moment_in + at, mask=there, other=0.0)
    peak = tl.max(peaks, axis=0)
    shrink = tl.exp(peaks - peak)
    tl.store(peak_out + query, peak)
    tl.store(weight_out + query, tl.sum(shrink * weights, axis=0))
    # Moving the reference point from a share's maximum to the common one adds a multiple of its weight.
    tl.store(moment_out + query, tl.sum(shrink * (moments + (peaks - peak) * weights), axis=0))

    entry = tl.arange(0, LISTED)
    listed = entry < n_shares * TOP
    entry_at = ((entry // TOP).to(tl.int64) * n_queries + query) * TOP + entry % TOP
    scores = tl.load(top_score_in + entry_at, mask=listed, other=float("-inf"))
    indices = tl.load(top_index_in + entry_at, mask=listed, other=-1)
    for k in range(TOP):
        best = tl.max(scores, axis=0)
        index = tl.min(tl.where((scores == best) & (indices >= 0), indices, 2147483647), axis=0)
        tl.store(top_score_out + query * TOP + k, best)
        tl.store(top_index_out + query * TOP + k, index)
        scores = tl.where(indices == index, float("-inf"), scores)


def share_count(queries: int, items: int, tile_queries: int, processors: int) -> int:
    """Into how many shares the gallery is cut: enough programs to fill the device twice, and 1024 items each."""
    blocks = triton.cdiv(queries, tile_queries)
    return max(1, min(triton.cdiv(2 * processors, blocks), triton.cdiv(items, 1024), 128))


def processor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where nothing runs side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def gallery_statistics(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
    *,
    config: str | None = None,
    shares: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of `reference.gallery_statistics`, for float32, float16 or bfloat16 with float32 accumulation.

    The kernel takes `sample_bias` divided by kappa and adds it to the inner products, which it multiplies by kappa.
    `config` names a member of `CONFIGS` in place of measured tuning; `shares` overrides how the gallery is cut.
    """
    if top_k > MAX_TOP_K:
        raise ValueError(f"the Triton kernel keeps at most top_k={MAX_TOP_K}, got {top_k}; use backend='reference'")
    if sample_bias is not None:
        if kappa < NO_KAPPA:
            samples, kappa = torch.zeros_like(samples), 1.0
        sample_bias = (sample_bias.float() / kappa).contiguous()
    # Rows are padded with zeros to whole 16-byte loads; the usual widths need no copy.
    ragged = -samples.shape[2] % 16
    samples, gallery = (torch.nn.functional.pad(x, (0, ragged)) if ragged else x for x in (samples, gallery))
    samples, gallery = samples.contiguous(), gallery.contiguous()
    queries, draws, width = samples.shape
    items, device = gallery.shape[0], samples.device
    names = eligible(samples.dtype, queries) if config is None else [config]
    sizes = CONFIGS[names[0]]
    if shares is None:
        shares = share_count(queries, items, sizes.queries, processor_count(device))
    per_share = triton.cdiv(triton.cdiv(items, shares), sizes.items) * sizes.items
    shares = triton.cdiv(items, per_share)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def outputs(*lead: int) -> tuple[Tensor, ...]:
        return *(empty(*lead) for _ in range(3)), empty(*lead, top_k), empty(*lead, top_k, dtype=torch.int32)

    partial, merged = outputs(shares, queries), outputs(queries)
    meta: dict[str, Any] = {
        "TOP": top_k,
        "SLOTS": max(2, triton.next_power_of_2(top_k)),
        "HAS_BIAS": item_bias is not None,
        "HAS_SAMPLE_BIAS": sample_bias is not None,
        "PRECISION": "ieee" if torch.version.hip or samples.dtype != torch.float32 else "tf32x3",
    }
    kernel: Any = gallery_tile_kernel
    if config is not None or len(names) == 1:
        kernel, chosen = gallery_tile_kernel.fn, sizes.triton()
        meta |= {**chosen.kwargs, "num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    launch(
        kernel,
        (triton.cdiv(queries, sizes.queries), shares),
        samples,
        gallery,
        samples if item_bias is None else item_bias.float().contiguous(),
        samples if sample_bias is None else sample_bias,
        *partial,
        queries,
        draws,
        items,
        width,
        kappa * LOG2_E.value,
        per_share,
        **meta,
    )
    launch(
        gallery_merge_kernel,
        (queries,),
        *partial,
        *merged,
        queries,
        shares,
        TOP=top_k,
        SHARES=max(2, triton.next_power_of_2(shares)),
        LISTED=max(2, triton.next_power_of_2(shares * top_k)),
        num_warps=4,
    )
    peak, weight, moment, top_score, top_index = merged
    return peak, weight, moment, top_score, top_index
