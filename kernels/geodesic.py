"""Sphere kernels: the masked interpolant with its target velocity, and the solver steps. One read, one write, float32.

masked_interpolant   reads noise and data, writes point and velocity of both spheres: 16 (d_I + d_T) bytes a row, less
                     where a stream is given. 8192 x (1024 + 1024): 268 MB, estimated 0.20 ms on A100, 0.09 ms on H100.
tangent_step         reads x and v (and v_free), writes the new x: 12 d bytes a row (16 d with guidance).
                     400,000 x 1024 (8000 queries of 50 samples): 4.9 GB, estimated 3.7 ms on A100, 1.7 ms on H100.
tangent_stage        reads x, the point of the velocity, v (v_free) and the sum of velocities, writes the next point and
                     the sum: 24 d bytes a row (28 d with guidance).
tangent_ab2          reads x, v (v_free) and the velocity of the last step, writes the new x and the velocity for the
                     next step: 20 d bytes a row (24 d with guidance).

counter_noise          writes 4 d bytes a row; 8192 x (1024 + 1024) in two launches: 67 MB, estimated 0.05 ms on A100.
unit_rows              reads a row as stored and writes it in float32: 6 d bytes a row of a float16 table.

Arithmetic is a few operations a byte: all kernels wait for memory. Angles are per row, by polynomials on [0, pi]:
Triton's sin and cos take a stack frame for their large-argument path, and the interpreter has no atan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoflow_fast.geometry import EPS
from geoflow_fast.kernels.launch import by_rows, launch, row_kernel, row_tile

PI = tl.constexpr(3.141592653589793)


@triton.jit
def _sinc_half(square):
    """sin(x)/x from x^2, 0 <= x <= pi/2; error below 1e-10 before rounding."""
    p = -2.3889498083e-08
    p = p * square + 2.7525287108e-06
    p = p * square - 0.000198408615528
    p = p * square + 0.0083333309775
    p = p * square - 0.166666666169
    return p * square + 1.0


@triton.jit
def _cos_half(square):
    """cos(x) from x^2, 0 <= x <= pi/2; error below 1e-11 before rounding."""
    p = 1.99076798086e-09
    p = p * square - 2.75246831964e-07
    p = p * square + 2.48010402797e-05
    p = p * square - 0.00138888841752
    p = p * square + 0.0416666664731
    p = p * square - 0.49999999997
    return p * square + 1.0


@triton.jit
def _cos_sinc(x):
    """cos(x) and sin(x)/x for 0 <= x <= pi, by half angles, which keep sin(x)/x accurate at both ends."""
    square = 0.25 * x * x
    sinc = _sinc_half(square)
    return 1.0 - 2.0 * square * sinc * sinc, sinc * _cos_half(square)


@triton.jit
def _angle(difference, total):
    """2 atan2(|a-b|, |a+b|) from the two squared norms: the angle between unit a and b, in [0, pi]."""
    low = tl.sqrt_rn(tl.minimum(difference, total))
    high = tl.sqrt_rn(tl.maximum(tl.maximum(difference, total), 1e-30))
    z = low / high
    square = z * z
    p = -0.00174370113575
    p = p * square + 0.0106807194099
    p = p * square - 0.0307175088359
    p = p * square + 0.057463557778
    p = p * square - 0.0837206394377
    p = p * square + 0.109401989636
    p = p * square - 0.1426157368
    p = p * square + 0.199982306403
    p = p * square - 0.333332822955
    p = p * square + 1.0
    twice = 2.0 * z * p
    return tl.where(difference > total, PI - twice, twice)


@triton.jit
def _on_sphere(squared, tolerance):
    low = 1.0 - tolerance
    high = 1.0 + tolerance
    return (squared >= low * low) & (squared <= high * high)


@triton.jit
def _stream(
    noise, data, point, velocity, row, inside, t, given, dropped, width, tolerance, lost_below, COLUMNS: tl.constexpr
):
    """One sphere of a tile of rows; returns which rows hold a point that is read and not on the sphere."""
    column = tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    valid = inside[:, None] & (column < width)[None, :]
    reads_noise = inside & (dropped | (given == 0))
    reads_data = inside & ((dropped == 0) | (given == 0))
    a = tl.load(noise + at, mask=valid & reads_noise[:, None], other=0.0)
    b = tl.load(data + at, mask=valid & reads_data[:, None], other=0.0)
    aa = tl.sum(a * a, axis=1)
    bad = (reads_noise & (_on_sphere(aa, tolerance) == 0)) | (
        reads_data & (_on_sphere(tl.sum(b * b, axis=1), tolerance) == 0)
    )

    w = _angle(tl.sum((a - b) * (a - b), axis=1), tl.sum((a + b) * (a + b), axis=1))
    # The part p of b orthogonal to a, taken twice: near pi the first subtraction cancels.
    inverse = 1.0 / tl.maximum(aa, 1e-30)
    p = b - (tl.sum(a * b, axis=1) * inverse)[:, None] * a
    p -= (tl.sum(a * p, axis=1) * inverse)[:, None] * a
    length = tl.sqrt_rn(tl.sum(p * p, axis=1))
    far = w > 0.5 * PI
    lost = far & (length < lost_below)
    # At the antipode the path leaves along the axis that a leans on least.
    axis = tl.argmin(tl.where((column < width)[None, :], tl.abs(a), float("inf")), axis=1)
    on_axis = column[None, :] == axis[:, None]
    along = tl.sum(tl.where(on_axis, a, 0.0), axis=1)
    p = tl.where(lost[:, None], tl.where(on_axis, 1.0, 0.0) - (along * inverse)[:, None] * a, p)
    length = tl.where(lost, tl.sqrt_rn(tl.maximum(1.0 - along * along * inverse, 1e-30)), tl.maximum(length, 1e-30))
    _, sinc_w = _cos_sinc(tl.minimum(w, 0.5 * PI))
    departure = tl.where(far, w / length, 1.0 / sinc_w)  # the path leaves a with velocity departure * p

    cos, sinc = _cos_sinc(t * w)
    x = cos[:, None] * a + (t * sinc * departure)[:, None] * p
    v = (cos * departure)[:, None] * p - (t * w * w * sinc)[:, None] * a
    shown = tl.where(dropped[:, None], a, b)
    tl.store(point + at, tl.where(given[:, None], shown, x), mask=valid)
    tl.store(velocity + at, tl.where(given[:, None], 0.0, v), mask=valid)
    return bad


@row_kernel
def masked_interpolant_kernel(
    image0,
    text0,
    image1,
    text1,
    t,
    direction,
    drop,
    image_t,
    text_t,
    v_image,
    v_text,
    first_bad,
    rows,
    image_width,
    text_width,
    tolerance,
    lost_below,
    HAS_DROP: tl.constexpr,
    ROWS: tl.constexpr,
    IMAGE_COLUMNS: tl.constexpr,
    TEXT_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    time = tl.load(t + row, mask=inside, other=0.0)
    code = tl.load(direction + row, mask=inside, other=0)
    dropped = row < 0
    if HAS_DROP:
        dropped = tl.load(drop + row, mask=inside, other=0) != 0
    bad = _stream(
        image0, image1, image_t, v_image, row, inside, time, code == 1, dropped, image_width, tolerance, lost_below,
        IMAGE_COLUMNS,
    )  # fmt: skip
    bad |= _stream(
        text0, text1, text_t, v_text, row, inside, time, code == 2, dropped, text_width, tolerance, lost_below,
        TEXT_COLUMNS,
    )  # fmt: skip
    tl.atomic_min(first_bad + 0 * row, row, mask=bad)


def masked_interpolant(
    noise: tuple[Tensor, Tensor],
    data: tuple[Tensor, Tensor],
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    point: tuple[Tensor, Tensor],
    velocity: tuple[Tensor, Tensor],
    tolerance: float,
    check: bool = True,
) -> int:
    """Fills `point` and `velocity` (image, text); returns the first row that is not unit within `tolerance`, or -1.

    Tensors are float32 and contiguous, `direction` int8 [B], `drop` bool [B]. The answer is waited for, unless `check`
    is off or a CUDA graph is being captured, where it is -1.
    """
    rows, image_width, text_width = t.shape[0], noise[0].shape[1], noise[1].shape[1]
    wider = row_tile(max(image_width, text_width))
    if rows == 0:
        return -1
    first_bad = torch.full((), rows, dtype=torch.int32, device=t.device)
    launch(
        masked_interpolant_kernel,
        (triton.cdiv(rows, wider.rows),),
        *noise,
        *data,
        t,
        direction,
        direction if drop is None else drop.view(torch.int8),
        *point,
        *velocity,
        first_bad,
        rows,
        image_width,
        text_width,
        tolerance,
        EPS[torch.float32],
        HAS_DROP=drop is not None,
        ROWS=wider.rows,
        IMAGE_COLUMNS=row_tile(image_width).columns,
        TEXT_COLUMNS=row_tile(text_width).columns,
        **wider.options,
    )
    if not check or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
        return -1
    row = int(first_bad)
    return row if row < rows else -1


@triton.jit
def _cos_sinc_of_turn(turn):
    """cos(x) and sin(x)/x for any x >= 0."""
    # Whole turns come off first (2 pi in two parts); what is left is in [-pi, pi].
    turns = tl.floor(turn * (0.5 / PI) + 0.5)
    left = (turn - turns * 6.28125) - turns * 0.0019353071795864769
    cos, sinc = _cos_sinc(tl.abs(left))
    return cos, tl.where(turns > 0, left * sinc / tl.maximum(turn, 1e-30), sinc)


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows and columns of a program, and which of its entries there are."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    return row, column, (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def _load_rows(x, row, column, stride, valid):
    return tl.load(x + row[:, None] * stride + column[None, :], mask=valid, other=0.0)


@triton.jit
def _tangent_velocity(here, v, v_free, row, column, v_stride, free_stride, valid, guidance, GUIDED: tl.constexpr):
    """The part of v + guidance (v - v_free) that is tangent at the points `here`."""
    speed = _load_rows(v, row, column, v_stride, valid)
    if GUIDED:
        speed += guidance * (speed - _load_rows(v_free, row, column, free_stride, valid))
    return speed - tl.sum(here * speed, axis=1)[:, None] * here


@triton.jit
def _store_unit(out, there, row, column, rows, width, valid):
    """Writes the rows `there`, scaled to unit norm."""
    norm = tl.sqrt_rn(tl.sum(there * there, axis=1))
    there /= tl.where(row < rows, norm, 1.0)[:, None]
    tl.store(out + row[:, None] * width + column[None, :], there, mask=valid)


def _launch_step(
    kernel: Any, read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[float], flags: dict[str, bool]
) -> None:
    """Starts a kernel of solver steps on rows [B, d]: pointers, sizes, strides of what is read, numbers, flags."""
    rows, width = read[0].shape
    tile = row_tile(width)
    strides = (x.stride(0) for x in read)
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns}
    launch(
        kernel,
        (triton.cdiv(rows, tile.rows),),
        *read,
        *written,
        rows,
        width,
        *strides,
        *numbers,
        **flags,
        **sizes,
        **tile.options,
    )


@row_kernel
def tangent_step_kernel(
    x,
    v,
    v_free,
    out,
    rows,
    width,
    x_stride,
    v_stride,
    free_stride,
    h,
    guidance,
    GUIDED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, valid = _tile(rows, width, ROWS, COLUMNS)
    here = _load_rows(x, row, column, x_stride, valid)
    step = h * _tangent_velocity(here, v, v_free, row, column, v_stride, free_stride, valid, guidance, GUIDED)
    if RENORMALISE:
        there = here + step
    else:
        cos, sinc = _cos_sinc_of_turn(tl.sqrt_rn(tl.sum(step * step, axis=1)))
        there = cos[:, None] * here + sinc[:, None] * step
    _store_unit(out, there, row, column, rows, width, valid)


def tangent_step(x: Tensor, v: Tensor, h: float, v_free: Tensor | None, guidance: float, renormalise: bool) -> Tensor:
    """exp_x(h P_x v), or its first-order form; see `ops.tangent_step`. float32 [B, d], rows of any stride."""
    x, v = by_rows(x), by_rows(v)
    free = v if v_free is None else by_rows(v_free)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flags = {"GUIDED": v_free is not None, "RENORMALISE": renormalise}
    _launch_step(tangent_step_kernel, (x, v, free), (out,), (h, guidance), flags)
    return out


@row_kernel
def tangent_stage_kernel(
    x,
    at,
    v,
    v_free,
    total,
    out,
    new_total,
    rows,
    width,
    x_stride,
    at_stride,
    v_stride,
    free_stride,
    total_stride,
    h,
    guidance,
    weight,
    GUIDED: tl.constexpr,
    TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, valid = _tile(rows, width, ROWS, COLUMNS)
    taken = _load_rows(at, row, column, at_stride, valid)
    u = _tangent_velocity(taken, v, v_free, row, column, v_stride, free_stride, valid, guidance, GUIDED)
    if TOTAL:
        summed = _load_rows(total, row, column, total_stride, valid) + weight * u
        tl.store(new_total + row[:, None] * width + column[None, :], summed, mask=valid)
    there = _load_rows(x, row, column, x_stride, valid) + h * u
    _store_unit(out, there, row, column, rows, width, valid)


def tangent_stage(
    x: Tensor,
    at: Tensor,
    v: Tensor,
    h: float,
    v_free: Tensor | None,
    guidance: float,
    total: Tensor | None,
    weight: float,
) -> tuple[Tensor, Tensor]:
    """x + h P_at v scaled to unit norm, and total + weight P_at v; see `ops.tangent_step`. float32 [B, d], rows of any
    stride."""
    x, at, v = by_rows(x), by_rows(at), by_rows(v)
    free, before = (v if y is None else by_rows(y) for y in (v_free, total))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_total = out.new_empty(0) if total is None else torch.empty_like(out)
    flags = {"GUIDED": v_free is not None, "TOTAL": total is not None}
    _launch_step(tangent_stage_kernel, (x, at, v, free, before), (out, new_total), (h, guidance, weight), flags)
    return out, new_total


@row_kernel
def tangent_ab2_kernel(
    x,
    v,
    v_free,
    carried,
    out,
    new_carried,
    rows,
    width,
    x_stride,
    v_stride,
    free_stride,
    carried_stride,
    h,
    guidance,
    share,
    GUIDED: tl.constexpr,
    CARRIED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, valid = _tile(rows, width, ROWS, COLUMNS)
    here = _load_rows(x, row, column, x_stride, valid)
    u = _tangent_velocity(here, v, v_free, row, column, v_stride, free_stride, valid, guidance, GUIDED)
    step = h * u
    if CARRIED:
        step = h * (u + share * (u - _load_rows(carried, row, column, carried_stride, valid)))
    turn = tl.sqrt_rn(tl.sum(step * step, axis=1))
    cos, sinc = _cos_sinc_of_turn(turn)
    _, half = _cos_sinc_of_turn(0.5 * turn)
    along = tl.sum(step * u, axis=1)
    # Transport takes <p, u> ((1 - cos|p|) / |p|^2 p + sin|p| / |p| x) off u, p being the step.
    moved = u - (along * 0.5 * half * half)[:, None] * step - (along * sinc)[:, None] * here
    tl.store(new_carried + row[:, None] * width + column[None, :], moved, mask=valid)
    _store_unit(out, cos[:, None] * here + sinc[:, None] * step, row, column, rows, width, valid)


def tangent_ab2(
    x: Tensor, v: Tensor, h: float, v_free: Tensor | None, guidance: float, carried: Tensor | None, share: float
) -> tuple[Tensor, Tensor]:
    """A step of the two-step Adams-Bashforth method, and P_x v carried along it; see `ops.tangent_step`. float32, rows
    of any stride."""
    x, v = by_rows(x), by_rows(v)
    free, before = (v if y is None else by_rows(y) for y in (v_free, carried))
    out, new_carried = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    flags = {"GUIDED": v_free is not None, "CARRIED": carried is not None}
    _launch_step(tangent_ab2_kernel, (x, v, free, before), (out, new_carried), (h, guidance, share), flags)
    return out, new_carried


@triton.jit
def _normal_pair(first, second):
    """Two independent standard normal numbers from two random words, by Box and Muller."""
    uniform = ((first >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    radius = tl.sqrt_rn(-2.0 * tl.log(uniform))
    # The angle is counted from minus the first axis, so that it stays within half a turn.
    turn = (((second >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08 - 0.5) * (2.0 * PI)
    cos, sinc = _cos_sinc(tl.abs(turn))
    return -radius * cos, -radius * turn * sinc


@triton.jit(do_not_specialize=["rows", "seed", "step", "stream"])
def counter_noise_kernel(
    numbers, out, rows, width, quarter, seed, step, stream, UNIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, COLUMNS)
    number = tl.load(numbers + row, mask=inside, other=0).to(tl.uint32)
    zero = tl.zeros((ROWS, COLUMNS), tl.uint32)
    a, b, c, d = tl.philox(
        seed.to(tl.int64), number[:, None] + zero, column.to(tl.uint32)[None, :] + zero, zero + step.to(tl.uint32),
        zero + stream.to(tl.uint32),
    )  # fmt: skip
    x0, x1 = _normal_pair(a, b)
    x2, x3 = _normal_pair(c, d)
    # Block k of the columns begins at k * quarter; the last one may be shorter.
    present = inside[:, None] & (column < quarter)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    in0 = present & (column < width)[None, :]
    in1 = present & (column + quarter < width)[None, :]
    in2 = present & (column + 2 * quarter < width)[None, :]
    in3 = present & (column + 3 * quarter < width)[None, :]
    if UNIT:
        total = tl.sum(tl.where(in0, x0 * x0, 0.0) + tl.where(in1, x1 * x1, 0.0), axis=1)
        total += tl.sum(tl.where(in2, x2 * x2, 0.0) + tl.where(in3, x3 * x3, 0.0), axis=1)
        factor = (1.0 / tl.sqrt_rn(tl.where(inside, total, 1.0)))[:, None]
        x0, x1, x2, x3 = x0 * factor, x1 * factor, x2 * factor, x3 * factor
    tl.store(out + at, x0, mask=in0)
    tl.store(out + at + quarter, x1, mask=in1)
    tl.store(out + at + 2 * quarter, x2, mask=in2)
    tl.store(out + at + 3 * quarter, x3, mask=in3)


def counter_noise(numbers: Tensor, width: int, seed: int, step: int, stream: int, unit: bool) -> Tensor:
    """See `counter_noise_reference`."""
    rows, quarter = len(numbers), triton.cdiv(width, 4)
    out = torch.empty((rows, width), dtype=torch.float32, device=numbers.device)
    if rows:
        tile = row_tile(quarter)
        launch(
            counter_noise_kernel, (triton.cdiv(rows, tile.rows),), numbers, out, rows, width, quarter, seed, step,
            stream, UNIT=unit, ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
        )  # fmt: skip
    return out


@row_kernel
def unit_rows_kernel(table, index, out, rows, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, valid = _tile(rows, width, ROWS, COLUMNS)
    source = tl.load(index + row, mask=row < rows, other=0)
    x = tl.load(table + source[:, None] * stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    # The largest entry of a row is brought near one by a power of two, so that no square overflows or vanishes.
    exponent = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) >> 23
    power = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    x *= power[:, None]
    norm = tl.sqrt_rn(tl.sum(x * x, axis=1))
    out_rows = x / tl.where(row < rows, norm, 1.0)[:, None]
    tl.store(out + row[:, None] * width + column[None, :], out_rows, mask=valid)


def unit_rows(table: Tensor, index: Tensor) -> Tensor:
    """See `unit_rows_reference`."""
    table, (rows, width) = by_rows(table), (len(index), table.shape[1])
    out = torch.empty((rows, width), dtype=torch.float32, device=table.device)
    if rows:
        tile = row_tile(width)
        launch(
            unit_rows_kernel, (triton.cdiv(rows, tile.rows),), table, index.contiguous(), out, rows, width,
            table.stride(0), ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
        )  # fmt: skip
    return out
