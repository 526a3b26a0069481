"""Probes of the divergence: drawn from hashes, made tangent and aligned in one pass, and read off in another.

tangent_probes   reads x (and the direction seen so far), writes K probes: 4 d (2 + K) bytes a row. 16,384 x 1024,
                 K = 1: 201 MB, estimated 0.15 ms on A100, 0.07 ms on H100.
probe_traces     reads x, f, and K probes and products, adds K traces, and of a leading solve updates the direction:
                 4 d (2 + 2 K) bytes a row, or 4 d (4 + 2 K). 16,384 x 1024, K = 1: 403 MB, 0.30 ms and 0.14 ms.

A probe takes about 60 integer operations a number, ten times what it moves in time on neither card. Traces are summed
in float64: two multiplications and additions a number.
"""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoflow_fast.kernels.geodesic import PI, _cos_sinc
from geoflow_fast.kernels.launch import Tile, launch, row_tile
from geoflow_fast.ops.tangent_probes import CLEAR, FIRST, GOLDEN, MEMORY, SECOND

_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FIRST), tl.constexpr(SECOND)
_CLEAR, _MEMORY, _TINY = tl.constexpr(CLEAR), tl.constexpr(MEMORY), tl.constexpr(1e-12)


@triton.jit
def _mix(z):
    """Finaliser of splitmix64 on int64; the masks turn arithmetic shifts into logical ones."""
    z = (z ^ ((z >> 30) & 17179869183)) * _FIRST
    z = (z ^ ((z >> 27) & 137438953471)) * _SECOND
    return z ^ ((z >> 31) & 8589934591)


@triton.jit
def _length(x):
    return tl.sqrt_rn(tl.sum(x * x, axis=1))


@triton.jit
def _project(x, v, SPHERE: tl.constexpr):
    """The tangent part of `v` at the points `x`."""
    if SPHERE:
        v = v - tl.sum(v * x, axis=1)[:, None] * x
    return v


@triton.jit(do_not_specialize=["rows", "number", "probes"])
def tangent_probes_kernel(
    x, row_number, seed, seen, e, rows, width, probes, number, stream, long_side, short_side, SPHERE: tl.constexpr,
    SIGNS: tl.constexpr, HAS_SEEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    column = tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    point = tl.load(x + at, mask=valid, other=0.0)
    key = _mix(tl.load(row_number + row, mask=inside, other=0) * _GOLDEN + tl.load(seed))
    half = (width + 1) // 2
    pair = tl.where(column < half, column, column - half).to(tl.int64) + 1
    lead = point
    if HAS_SEEN:
        lead = tl.load(seen + at, mask=valid, other=0.0)
        lead = lead / tl.maximum(_length(lead), _TINY)[:, None]
    lane = (tl.zeros_like(row) + number) * 4294967296 + stream
    for _ in range(probes):
        bits = _mix(_mix(key + lane * _GOLDEN)[:, None] + pair[None, :] * _GOLDEN)
        uniform = (((bits >> 32) & 4294967295).to(tl.float32) + 0.5) * 2.3283064365386963e-10
        turn = (bits & 4294967295).to(tl.float32) * 2.3283064365386963e-10
        # The angle 2 pi turn is pi minus or plus one in [0, pi].
        angle = PI * tl.abs(2.0 * turn - 1.0)
        cosine, sinc = _cos_sinc(angle)
        sine = tl.where(turn < 0.5, sinc * angle, -sinc * angle)
        part = tl.where((column < half)[None, :], -cosine, sine)
        normal = tl.where(valid, tl.sqrt_rn(-2.0 * tl.log(uniform)) * part, 0.0)
        if SIGNS:
            normal = tl.where(valid, tl.where(normal < 0, -1.0, 1.0), 0.0)
        probe = _project(point, normal, SPHERE)
        if not SIGNS:
            plain = probe / tl.maximum(_length(probe), _TINY)[:, None] * long_side
            if HAS_SEEN:
                along = tl.sum(lead * normal, axis=1)
                sign = tl.where(along > 0, 1.0, tl.where(along < 0, -1.0, 0.0))
                ahead = _project(point, lead * sign[:, None], SPHERE)
                clear = _length(ahead)
                ahead = ahead / tl.maximum(clear, _CLEAR)[:, None]
                rest = probe - tl.sum(ahead * probe, axis=1)[:, None] * ahead
                rest = rest / tl.maximum(_length(rest), _TINY)[:, None] * short_side
                plain = tl.where((clear > _CLEAR)[:, None], ahead + rest, plain)
            probe = plain
        tl.store(e + at, probe, mask=valid)
        at += (tl.zeros_like(row) + rows)[:, None] * width
        lane += 2


@triton.jit(do_not_specialize=["rows", "probes"])
def probe_traces_kernel(
    x, f, e, product, seen, learned, integral, rows, width, probes, weight, weight_rest, curvature,
    SPHERE: tl.constexpr, LEARNS: tl.constexpr, HAS_SEEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    column = tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    here = row[:, None] * width + column[None, :]
    point = tl.load(x + here, mask=valid, other=0.0)
    velocity = tl.load(f + here, mask=valid, other=0.0)
    curved = tl.full([ROWS], curvature, tl.float64) * tl.sum(point.to(tl.float64) * velocity.to(tl.float64), axis=1)
    factor = tl.full([ROWS], weight, tl.float64) + tl.full([ROWS], weight_rest, tl.float64)
    along = velocity
    if HAS_SEEN:
        before = tl.load(seen + here, mask=valid, other=0.0)
        along = before / tl.maximum(_length(before), _TINY)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    at = here
    sum_at = row
    for k in range(probes):
        probe = tl.load(e + at, mask=valid, other=0.0)
        image = tl.load(product + at, mask=valid, other=0.0).to(tl.float32)
        # Several threads read a sum that one of them writes: the barriers of the trace stand between.
        before_sum = tl.load(integral + sum_at, mask=inside, other=0.0)
        trace = tl.sum(probe.to(tl.float64) * image.to(tl.float64), axis=1) + curved
        tl.store(integral + sum_at, before_sum + factor * trace, mask=inside)
        if LEARNS:
            image = _project(point, image, SPHERE)
            share = tl.sum(probe * image, axis=1) / tl.sum(probe * probe, axis=1)
            image = tl.where(valid, image - share[:, None] * probe, 0.0)
            unit = image / tl.maximum(_length(image), _TINY)[:, None]
            if not HAS_SEEN:
                along = tl.where(k == 0, unit, along)
            total += image * tl.sum(unit * along, axis=1)[:, None]
        at += (tl.zeros_like(row) + rows)[:, None] * width
        sum_at += rows
    if LEARNS:
        total = total / probes
        if HAS_SEEN:
            total += _MEMORY * before
        tl.store(learned + here, total, mask=valid)


def _tile(width: int) -> Tile:
    """Whole rows with 8 elements a thread, half of what other kernels have: hashes take two registers each."""
    tile = row_tile(width)
    return Tile(tile.rows // 2, tile.columns, tile.warps) if tile.rows > 1 else Tile(1, tile.columns, 2 * tile.warps)


def tangent_probes(
    x: Tensor, rows: Tensor, seed: Tensor, number: int, stream: int, probes: int, signs: bool, seen: Tensor | None,
    freedom: int,
) -> Tensor:  # fmt: skip
    """See `tangent_probes_reference`."""
    count, width = x.shape
    tile = _tile(width)
    x = x.contiguous()
    e = torch.empty((probes, count, width), dtype=x.dtype, device=x.device)
    launch(
        tangent_probes_kernel, (triton.cdiv(count, tile.rows),), x, rows, seed, x if seen is None else seen, e, count,
        width, probes, number, stream, math.sqrt(freedom), math.sqrt(freedom - 1), SPHERE=freedom < width, SIGNS=signs,
        HAS_SEEN=seen is not None, ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    return e


def probe_traces(
    x: Tensor, f: Tensor, e: Tensor, product: Tensor, integral: Tensor, weight: float, curvature: float, freedom: int,
    learns: bool, seen: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `probe_traces_reference`."""
    count, width = x.shape
    tile = _tile(width)
    x, f, e, product = (part.contiguous() for part in (x, f, e, product))
    learned = torch.empty((count if learns else 0, width), dtype=x.dtype, device=x.device)
    # A number goes to a kernel as float32: the rest of it goes beside it.
    near = struct.unpack("f", struct.pack("f", weight))[0]
    launch(
        probe_traces_kernel, (triton.cdiv(count, tile.rows),), x, f, e, product, x if seen is None else seen, learned,
        integral, count, width, len(e), near, weight - near, float(curvature), SPHERE=freedom < width, LEARNS=learns,
        HAS_SEEN=seen is not None and learns, ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    return learned
