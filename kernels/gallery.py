"""Posterior over a gallery from samples: scores s_qj = log mean_m exp(kappa <g_j, x_qm> + a_qm) + b_j and statistics.

Work: 2 Q M N d FLOP in the inner products, Q M N exponentials, and one read of the gallery per block of queries from
memory (further reads hit the L2 cache). [Q, M, N] and [Q, N] never exist. 25,000 queries x 50 samples x 5,000 items at
d=1024: 12.8 TFLOP. At 60 % of the tensor peak and 89 % packing: bfloat16 76 ms on A100 and 24 ms on H100; float32,
which takes three bfloat16 products for each of its own, 229 ms and 72 ms.

A float32 row x becomes two bfloat16 rows, high = x rounded and low = the rest rounded. One product along 3 d
coordinates, high low + low high + high high, gives the inner product but for 2^-17 of each factor: at d=1024 and unit
rows about 2e-7, as much as float32 sums lose. Beyond kappa=1e4 that would show, and products are in TF32, three each.

A program holds QUERIES queries and walks its share of the gallery, ITEMS at a time. For each tile it takes the draws of
its queries CHUNK at a time: the samples of several queries are packed into one matrix product [ITEMS, CHUNK * QUERIES],
whose reduction over draws stays inside a thread. An online maximum per (item, query) keeps every kappa exact. Over the
tiles it keeps, per query, max s, sum e^(s - max), sum (s - max) e^(s - max) and the best TOP items, which are looked at
only in tiles that hold a better one; a second kernel merges the shares exactly. Scores are in base 2 inside, in nats
outside; a caller who wants them all has them written out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoflow_fast.kernels.launch import element_tile, launch, row_kernel
from geoflow_fast.ops.gallery_lists import EXACT_KAPPA

LOWEST = tl.constexpr(-1e30)  # below every score, and finite: its differences and products stay numbers
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MAX_LISTED = 4096
"""Entries of shares' lists of a query that one program merges; more are merged in several rounds."""
SHORT_LIST = 16
"""Longest list beside which the largest tiles do not spill."""
NO_KAPPA = 1e-20
"""Below this kappa, inner products change no score of samples that have biases."""


@dataclass(frozen=True)
class GalleryConfig:
    """A member of the tuning space: tile sizes, warps and pipeline stages, and the number of queries it is meant for.
    `exact`: for float32 rows as they are, in three TF32 products. `single`: of these, for queries of one sample each,
    as plain search has them. `hopper`: only where a warp group multiplies from shared memory (sm_90), samples have no
    biases, no scores are written and lists are short; elsewhere the registers of so large a tile spill. `registers`:
    of a thread, where ptxas would rather spill than take so many."""

    most: float
    queries: int
    chunk: int
    items: int
    depth: int
    warps: int
    stages: int
    exact: bool = False
    single: bool = False
    hopper: bool = False
    registers: int | None = None

    def triton(self) -> triton.Config:
        sizes = {"QUERIES": self.queries, "CHUNK": self.chunk, "ITEMS": self.items, "DEPTH": self.depth}
        most = None if torch.version.hip else self.registers
        return triton.Config(sizes, num_warps=self.warps, num_stages=self.stages, maxnreg=most)


CONFIGS = {
    "few": GalleryConfig(most=4, queries=2, chunk=32, items=128, depth=32, warps=8, stages=4),
    "some": GalleryConfig(most=16, queries=8, chunk=16, items=128, depth=32, warps=8, stages=4),
    "slim": GalleryConfig(most=math.inf, queries=16, chunk=8, items=128, depth=32, warps=8, stages=4),
    "wide": GalleryConfig(most=math.inf, queries=16, chunk=16, items=128, depth=64, warps=8, stages=3, hopper=True),
    "exact-few": GalleryConfig(
        most=4, queries=2, chunk=32, items=128, depth=16, warps=8, stages=3, exact=True, registers=192
    ),
    "exact": GalleryConfig(most=math.inf, queries=16, chunk=8, items=64, depth=16, warps=8, stages=3, exact=True),
    "search": GalleryConfig(
        most=math.inf, queries=8, chunk=2, items=128, depth=32, warps=4, stages=3, exact=True, single=True
    ),
}
"""The whole tuning space by name. A tile of "wide" is 128 items by 256 samples, of "slim" 128 by 128."""


DEEPEST = max(config.depth for config in CONFIGS.values())


def eligible(exact: bool, queries: int, hopper: bool, single: bool = False) -> list[str]:
    """Names of the configurations meant for these products, number of queries and GPU, and for queries of a `single`
    sample or of more; the usual choice first."""
    fitting = {
        name: config
        for name, config in CONFIGS.items()
        if config.exact == exact and config.single == (single and exact) and (hopper or not config.hopper)
    }
    least = min(config.most for config in fitting.values() if queries <= config.most)
    return [name for name, config in fitting.items() if config.most == least]


def _prune(_configs: list[triton.Config], arguments: dict[str, Any], **_: Any) -> list[triton.Config]:
    samples, single = arguments["samples"], arguments["n_samples"] == 1
    names = eligible(samples.dtype == torch.float32, arguments["n_queries"], is_hopper(samples.device), single)
    return [CONFIGS[name].triton() for name in names]


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
    score_out,
    n_queries,
    n_samples,
    n_items,
    width,
    scale,
    items_per_share,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    WRITE_SCORES: tl.constexpr,
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
    stride = PARTS * width
    # With two parts, a sample's row is (low, high) and an item's (high, low): the last third is high times high.
    turn = 2 * width
    span = width if PARTS == 1 else 3 * width
    x_base = samples + tl.program_id(0).to(tl.int64) * QUERIES * n_samples * stride
    a_base = sample_bias + tl.program_id(0).to(tl.int64) * QUERIES * n_samples
    g_base = gallery + first.to(tl.int64) * stride

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
            x_at = x_base + ((row % QUERIES) * n_samples + sample)[None, :] * stride + depth[:, None]
            g_at = g_base + item[:, None] * stride + depth[None, :]
            product = tl.zeros([ITEMS, ROWS], tl.float32)
            if HAS_SAMPLE_BIAS:  # before the product: after it, there is no register left to hold them
                a = tl.load(a_base + (row % QUERIES) * n_samples + sample, mask=live, other=float("-inf"))
                product += a[None, :]
            for k in range(0, span, DEPTH):
                if PARTS == 1:
                    x = tl.load(x_at + k, mask=live[None, :] & (k + depth < width)[:, None], other=0.0)
                    g = tl.load(g_at + k, mask=(here < last)[:, None] & (k + depth < width)[None, :], other=0.0)
                else:  # whole steps: rows were padded when they were split
                    x = tl.load(x_at + tl.where(k < turn, k, k - width), mask=live[None, :], other=0.0)
                    g = tl.load(g_at + tl.where(k < turn, k, k - turn), mask=(here < last)[:, None], other=0.0)
                product = tl.dot(g, x, product, input_precision=PRECISION)
            logit = product * scale
            if not HAS_SAMPLE_BIAS:  # whose own -inf leaves out the draws past the last one
                logit = tl.where((sample < n_samples)[None, :], logit, float("-inf"))
            logit = tl.reshape(logit, [ITEMS, CHUNK, QUERIES])
            above = tl.maximum(best, tl.max(logit, axis=1))
            total = total * tl.exp2(best - above) + tl.sum(tl.exp2(logit - above[:, None, :]), axis=1)
            best = above
        g_base += ITEMS * stride
        score = tl.trans(best + tl.log2(total / n_samples))  # [QUERIES, ITEMS]
        if HAS_BIAS:
            score += tl.load(bias + here, mask=here < last, other=0.0)[None, :] * LOG2_E
        if WRITE_SCORES:
            number = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
            score_at = number.to(tl.int64)[:, None] * n_items + here[None, :]
            written = (number < n_queries)[:, None] & (here < last)[None, :]
            tl.store(score_out + score_at, score * LN_2, mask=written)
        score = tl.where((here < last)[None, :], score, float("-inf"))

        peak_now = tl.maximum(peak, tl.max(score, axis=1))
        shrink = tl.exp2(peak - peak_now)
        below = tl.where((here < last)[None, :], score - peak_now[:, None], LOWEST)
        mass = tl.exp2(below)
        moment = shrink * (moment + (peak - peak_now) * weight) + tl.sum(mass * below, axis=1)
        weight = shrink * weight + tl.sum(mass, axis=1)
        peak = peak_now

        # Most tiles hold nothing better for any query; no query takes more than its better ones.
        better = tl.sum((score > tl.min(top_score, axis=1)[:, None]).to(tl.int32), axis=1)
        for _ in range(tl.minimum(tl.max(better, axis=0), TOP)):
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


@triton.jit(do_not_specialize=["n_queries", "n_shares", "shares_per_program"])
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
    shares_per_program,
    TOP: tl.constexpr,
    SHARES: tl.constexpr,
    LISTED: tl.constexpr,
):
    """One query: statistics of a program's shares merged, and the best TOP of their lists in order."""
    query = tl.program_id(0)
    first = tl.program_id(1) * shares_per_program
    last = tl.minimum(first + shares_per_program, n_shares)
    share = first + tl.arange(0, SHARES)
    there = share < last
    at = share.to(tl.int64) * n_queries + query
    peaks = tl.load(peak_in + at, mask=there, other=LOWEST)
    weights = tl.load(weight_in + at, mask=there, other=0.0)
    moments = tl.load(moment_in + at, mask=there, other=0.0)
    peak = tl.max(peaks, axis=0)
    shrink = tl.exp(peaks - peak)
    out = tl.program_id(1).to(tl.int64) * n_queries + query
    tl.store(peak_out + out, peak)
    tl.store(weight_out + out, tl.sum(shrink * weights, axis=0))
    # Moving the reference point from a share's maximum to the common one adds a multiple of its weight.
    tl.store(moment_out + out, tl.sum(shrink * (moments + (peaks - peak) * weights), axis=0))

    entry = tl.arange(0, LISTED)
    listed = entry < (last - first) * TOP
    entry_at = ((first + entry // TOP).to(tl.int64) * n_queries + query) * TOP + entry % TOP
    scores = tl.load(top_score_in + entry_at, mask=listed, other=float("-inf"))
    indices = tl.load(top_index_in + entry_at, mask=listed, other=-1)
    for k in range(TOP):
        best = tl.max(scores, axis=0)
        index = tl.min(tl.where((scores == best) & (indices >= 0), indices, 2147483647), axis=0)
        tl.store(top_score_out + out * TOP + k, best)
        tl.store(top_index_out + out * TOP + k, index)
        scores = tl.where(indices == index, float("-inf"), scores)


@row_kernel
def gallery_split_kernel(
    x, out, rows, width, padded, LOW_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows [rows, width] in float32 as their two bfloat16 parts [rows, 2, padded], with zeros past the end."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None]
    value = tl.load(x + row[:, None] * width + column[None, :], mask=inside & (column < width)[None, :], other=0.0)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    at = out + row[:, None] * 2 * padded + column[None, :]
    written = inside & (column < padded)[None, :]
    tl.store(at, low if LOW_FIRST else high, mask=written)
    tl.store(at + padded, high if LOW_FIRST else low, mask=written)


def split_rows(x: Tensor, low_first: bool) -> Tensor:
    """The two bfloat16 parts of float32 rows [..., d]: [..., 2, d up to a multiple of the deepest tile]."""
    *lead, width = x.shape
    padded = triton.cdiv(width, DEEPEST) * DEEPEST
    rows = x.reshape(-1, width).contiguous()
    out = torch.empty((len(rows), 2, padded), dtype=torch.bfloat16, device=x.device)
    tile = element_tile(padded)
    grid = triton.cdiv(len(rows), tile.rows), triton.cdiv(padded, tile.columns)
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns}
    launch(
        gallery_split_kernel, grid, rows, out, len(rows), width, padded, LOW_FIRST=low_first, **sizes, **tile.options
    )
    return out.view(*lead, 2, padded)


def share_count(queries: int, items: int, config: GalleryConfig, processors: int) -> int:
    """Into how many shares the gallery is cut: enough programs to fill the device twice, each with a tile of its
    own."""
    blocks = triton.cdiv(queries, config.queries)
    return max(1, min(triton.cdiv(2 * processors, blocks), triton.cdiv(items, config.items)))


def processor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where nothing runs side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def is_hopper(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU of compute capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@dataclass(frozen=True)
class _Rows:
    """Samples and items as the tile kernel takes them: in two parts, or as they are, with rows of whole 16 bytes."""

    samples: Tensor
    gallery: Tensor
    width: int
    parts: int

    @staticmethod
    def of(samples: Tensor, gallery: Tensor, exact: bool, parts: Tensor | None) -> _Rows:
        if samples.dtype == torch.float32 and not exact:
            split = split_rows(samples, True), split_rows(gallery, False) if parts is None else parts
            return _Rows(*split, split[0].shape[-1], 2)
        ragged = -samples.shape[2] % 16  # the usual widths need no copy
        samples, gallery = (torch.nn.functional.pad(x, (0, ragged)) if ragged else x for x in (samples, gallery))
        return _Rows(samples.contiguous(), gallery.contiguous(), samples.shape[2], 1)


_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _outputs(device: torch.device, top_k: int, *lead: int) -> _Outputs:
    """Memory for the statistics and lists of queries."""
    peak, weight, moment = (torch.empty(lead, dtype=torch.float32, device=device) for _ in range(3))
    score = torch.empty((*lead, top_k), dtype=torch.float32, device=device)
    return peak, weight, moment, score, torch.empty_like(score, dtype=torch.int32)


def _merged(partial: _Outputs, queries: int, shares: int, top_k: int) -> _Outputs:
    """The statistics and lists of all shares, from those of each [shares, queries, ...]: as many at a time as one
    program holds, until one is left."""
    together = min(shares, max(2, MAX_LISTED // top_k))
    groups = triton.cdiv(shares, together)
    merged = _outputs(partial[0].device, top_k, groups, queries)
    launch(
        gallery_merge_kernel,
        (queries, groups),
        *partial,
        *merged,
        queries,
        shares,
        together,
        TOP=top_k,
        SHARES=max(2, triton.next_power_of_2(together)),
        LISTED=max(2, triton.next_power_of_2(together * top_k)),
        num_warps=4,
    )
    if groups > 1:
        return _merged(merged, queries, groups, top_k)
    peak, weight, moment, score, index = (x.squeeze(0) for x in merged)
    return peak, weight, moment, score, index


def gallery_statistics(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
    *,
    scores: Tensor | None = None,
    config: str | None = None,
    shares: int | None = None,
    parts: Tensor | None = None,
    exact: bool = False,
) -> _Outputs:
    """Statistics of `reference.gallery_statistics`, for float32, float16 or bfloat16 with float32 accumulation.

    The kernel takes `sample_bias` divided by kappa and adds it to the inner products, which it multiplies by kappa.
    `scores` [Q, N] in float32, if given, is filled. `config` names a member of `CONFIGS`; without it the choice is
    measured once, or the same always where `torch.use_deterministic_algorithms` asks for it, since the shape of tiles
    decides in which order sums are rounded. `shares` overrides how the gallery is cut. `parts` is `split_rows(gallery,
    False)`, if the caller has kept it. `exact` multiplies float32 rows as they are, as large kappas do.
    """
    if sample_bias is not None:
        if kappa < NO_KAPPA:
            samples, kappa = torch.zeros_like(samples), 1.0
        sample_bias = (sample_bias.float() / kappa).contiguous()
    queries, draws, _ = samples.shape
    items, device = gallery.shape[0], samples.device
    exact = exact or kappa > EXACT_KAPPA if config is None else CONFIGS[config].exact
    exact = exact and samples.dtype == torch.float32
    roomy = is_hopper(device) and sample_bias is None and scores is None and top_k <= SHORT_LIST
    names = eligible(exact, queries, roomy, draws == 1) if config is None else [config]
    if torch.are_deterministic_algorithms_enabled():
        names = names[:1]
    sizes = CONFIGS[names[0]]
    rows = _Rows.of(samples, gallery, exact, parts)
    if shares is None:
        shares = share_count(queries, items, sizes, processor_count(device))
    per_share = triton.cdiv(triton.cdiv(items, shares), sizes.items) * sizes.items
    shares = triton.cdiv(items, per_share)

    partial = _outputs(device, top_k, shares, queries)
    meta: dict[str, Any] = {
        "TOP": top_k,
        "SLOTS": max(2, triton.next_power_of_2(top_k)),
        "PARTS": rows.parts,
        "WRITE_SCORES": scores is not None,
        "HAS_BIAS": item_bias is not None,
        "HAS_SAMPLE_BIAS": sample_bias is not None,
        "PRECISION": "tf32x3" if exact and not torch.version.hip else "ieee",
    }
    kernel: Any = gallery_tile_kernel
    if len(names) == 1:
        kernel, meta = gallery_tile_kernel.fn, {**meta, **sizes.triton().all_kwargs()}
    launch(
        kernel,
        (triton.cdiv(queries, sizes.queries), shares),
        rows.samples,
        rows.gallery,
        partial[0] if item_bias is None else item_bias.float().contiguous(),
        partial[0] if sample_bias is None else sample_bias,
        *partial,
        partial[0] if scores is None else scores,
        queries,
        draws,
        items,
        rows.width,
        kappa * LOG2_E.value,
        per_share,
        **meta,
    )
    return _merged(partial, queries, shares, top_k)


def gallery_scores(
    samples: Tensor, gallery: Tensor, kappa: float, item_bias: Tensor | None, sample_bias: Tensor | None
) -> Tensor:
    """See `gallery_scores_reference`; [Q, N] in float32."""
    scores = torch.empty((len(samples), len(gallery)), dtype=torch.float32, device=samples.device)
    gallery_statistics(samples, gallery, kappa, 1, item_bias, sample_bias, scores=scores)
    return scores
