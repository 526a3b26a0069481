"""The network's memory-bound parts: each reads its inputs once and writes its outputs once, computing in float32.

Per element of a [R, H] activation, in units of its size: adaln reads 1 (+2 with a shift and scale per row) and writes
1, its backward reads 2 (+1) and writes 1 (+1); gate_residual reads 3 and writes 1, its backward reads 3 and writes 2;
swiglu reads 2 and writes 1, its backward reads 3 and writes 2; flow_loss reads 3 d floats a row, its backward 3 d and
writes d. A segment reads its points once for all K tangents. Arithmetic per element: adaln 8 FLOPs (backward 14),
gate_residual 4 and a sigmoid, swiglu 4 and a sigmoid, flow_loss 7; a tangent about as much again. That is 1 to 3 FLOPs
a byte, a tenth of what either card could do meanwhile: bandwidth is the limit of all of them.

Estimates at 85 % of bandwidth, float32, R = 16384 (8192 rows, two streams):
    adaln, H=512, per row        134 MB   A100 0.10 ms   H100 0.05 ms
    adaln backward               168 MB   A100 0.13 ms   H100 0.06 ms
    gate_residual, H=512         134 MB   A100 0.10 ms   H100 0.05 ms
    swiglu, I=1408               277 MB   A100 0.21 ms   H100 0.10 ms
    flow_loss, 8192 x 2 x 1024   201 MB   A100 0.15 ms   H100 0.07 ms

Rows come in G equal groups that share a shift, scale or LayerScale (G = R: one per row). A tile never crosses a group,
so a group's gradient is a sum of one partial row per tile: no atomics, the same bits on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoflow_fast.kernels.launch import Tile, by_rows, element_tile, launch, row_kernel, row_tile
from geoflow_fast.ops.segments import Segment

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Groups:
    """How R rows in G groups are cut into tiles: `tiles` per group, each within its group."""

    per_row: bool
    count: int
    size: int
    tiles: int

    @staticmethod
    def of(rows: int, groups: int, tile: Tile) -> Groups:
        # One group per row is one group of all rows, whose parameters are then loaded row by row.
        per_row = groups == rows and rows > 1
        count = 1 if per_row else groups
        size = rows // count
        return Groups(per_row, count, size, triton.cdiv(size, tile.rows))


@triton.jit
def _tile_rows(group_size, tiles, ROWS: tl.constexpr):
    """Row numbers of this program (int64), which of them exist, and the group they belong to."""
    tile = tl.program_id(0)
    group = tile // tiles
    local = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    return group.to(tl.int64) * group_size + local, local < group_size, group


@triton.jit
def _shared(parameter, row, group, column, valid, width, PER_ROW: tl.constexpr):
    """A [G, H] parameter for this tile in float32: a tile of it, or one row of it that broadcasts."""
    if PER_ROW:
        at = row[:, None] * width + column[None, :]
    else:
        at = (group * width + column)[None, :]
        valid = (column < width)[None, :]
    return tl.load(parameter + at, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _normalise(x, valid, width, eps):
    """Rows of `x` with mean zero and variance one (zero where not valid), and 1 / sqrt(variance + eps)."""
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(valid, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=1) / width + eps)
    return centred * rstd[:, None], rstd


@row_kernel
def adaln_kernel(
    x, shift, scale, y, group_size, tiles, width, x_stride, eps, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, inside, group = _tile_rows(group_size, tiles, ROWS)
    column = tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    unit, _ = _normalise(value, valid, width, eps)
    factor = 1.0 + _shared(scale, row, group, column, valid, width, PER_ROW)
    out = unit * factor + _shared(shift, row, group, column, valid, width, PER_ROW)
    tl.store(y + row[:, None] * width + column[None, :], out, mask=valid)


@row_kernel
def adaln_backward_kernel(
    grad, x, scale, dx, d_shift, d_scale, group_size, tiles, width, grad_stride, x_stride, eps, PER_ROW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, inside, group = _tile_rows(group_size, tiles, ROWS)
    column = tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    unit, rstd = _normalise(value, valid, width, eps)
    d_unit = dy * (1.0 + _shared(scale, row, group, column, valid, width, PER_ROW))
    mean = tl.sum(d_unit, axis=1) / width
    along = tl.sum(d_unit * unit, axis=1) / width
    tl.store(dx + at, rstd[:, None] * (d_unit - mean[:, None] - unit * along[:, None]), mask=valid)
    if PER_ROW:
        tl.store(d_scale + at, dy * unit, mask=valid)
    else:
        partial = tl.program_id(0).to(tl.int64) * width + column
        tl.store(d_shift + partial, tl.sum(dy, axis=0), mask=column < width)
        tl.store(d_scale + partial, tl.sum(dy * unit, axis=0), mask=column < width)


def adaln_half(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See `adaln_half_reference`."""
    return adaln(x, shift, scale, eps, torch.bfloat16)


def adaln(x: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """See `adaln_reference`; the result is of `dtype`, by default that of `x`."""
    rows, width = x.shape
    x, shift, scale = by_rows(x), shift.contiguous(), scale.contiguous()
    tile = row_tile(width)
    groups = Groups.of(rows, scale.shape[0], tile)
    y = torch.empty((rows, width), dtype=dtype or x.dtype, device=x.device)
    launch(
        adaln_kernel, (groups.count * groups.tiles,), x, shift, scale, y, groups.size, groups.tiles, width, x.stride(0),
        eps, PER_ROW=groups.per_row, ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    return y


def adaln_backward(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `adaln_backward_reference`."""
    rows, width = x.shape
    grad, x, scale = by_rows(grad), by_rows(x), scale.contiguous()
    tile = row_tile(width)
    groups = Groups.of(rows, scale.shape[0], tile)
    dx = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if groups.per_row:
        d_shift, d_scale = grad, torch.empty((rows, width), dtype=scale.dtype, device=x.device)
    else:
        partial = torch.empty((2, groups.count, groups.tiles, width), dtype=torch.float32, device=x.device)
        d_shift, d_scale = partial
    launch(
        adaln_backward_kernel, (groups.count * groups.tiles,), grad, x, scale, dx, d_shift, d_scale, groups.size,
        groups.tiles, width, grad.stride(0), x.stride(0), eps, PER_ROW=groups.per_row, ROWS=tile.rows,
        COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    if groups.per_row:
        return dx, scale.new_empty(0), d_scale
    d_shift = scale.new_empty(0) if rows == groups.count else d_shift.sum(1)
    return dx, d_shift.to(scale.dtype), d_scale.sum(1).to(scale.dtype)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@row_kernel
def gate_residual_kernel(
    residual, gate, value, layer_scale, keep, out, group_size, tiles, width, residual_stride, gate_stride, value_stride,
    kept_factor, HAS_GATE: tl.constexpr, HAS_KEEP: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, inside, group = _tile_rows(group_size, tiles, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    branch = tl.load(value + row[:, None] * value_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_GATE:
        logit = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        branch *= _sigmoid(logit)
    if HAS_KEEP:
        kept = tl.load(keep + row[:, None] * width + column[None, :], mask=valid, other=0)
        branch = tl.where(kept != 0, branch * kept_factor, 0.0)
    before = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    scale = _shared(layer_scale, row, group, column, valid, width, PER_ROW)
    tl.store(out + row[:, None] * width + column[None, :], before + scale * branch, mask=valid)


@row_kernel
def gate_residual_backward_kernel(
    grad, gate, value, layer_scale, keep, d_gate, d_value, d_layer_scale, group_size, tiles, width, grad_stride,
    gate_stride, value_stride, kept_factor, HAS_GATE: tl.constexpr, HAS_KEEP: tl.constexpr, PER_ROW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, inside, group = _tile_rows(group_size, tiles, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    content = tl.load(value + row[:, None] * value_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_KEEP:
        dy = tl.where(tl.load(keep + at, mask=valid, other=0) != 0, dy * kept_factor, 0.0)
    scaled = dy * _shared(layer_scale, row, group, column, valid, width, PER_ROW)
    branch = content
    if HAS_GATE:
        logit = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        open_by = _sigmoid(logit)
        branch = content * open_by
        scaled *= open_by
        tl.store(d_gate + at, scaled * content * (1.0 - open_by), mask=valid)
    tl.store(d_value + at, scaled, mask=valid)
    if PER_ROW:
        tl.store(d_layer_scale + at, dy * branch, mask=valid)
    else:
        partial = tl.program_id(0).to(tl.int64) * width + column
        tl.store(d_layer_scale + partial, tl.sum(dy * branch, axis=0), mask=column < width)


def gate_residual(
    residual: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> Tensor:
    """See `gate_residual_reference`."""
    rows, width = residual.shape
    residual, value, layer_scale = by_rows(residual), by_rows(value), layer_scale.contiguous()
    logits = value if gate is None else by_rows(gate)
    tile = element_tile(width)
    groups = Groups.of(rows, layer_scale.shape[0], tile)
    out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    launch(
        gate_residual_kernel, (groups.count * groups.tiles, triton.cdiv(width, tile.columns)), residual, logits, value,
        layer_scale, _mask_bytes(keep, value), out, groups.size, groups.tiles, width, residual.stride(0),
        logits.stride(0), value.stride(0), 1 / (1 - dropout), HAS_GATE=gate is not None, HAS_KEEP=keep is not None,
        PER_ROW=groups.per_row, ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    return out


def gate_residual_backward(
    grad: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `gate_residual_backward_reference`."""
    rows, width = value.shape
    grad, value, layer_scale = by_rows(grad), by_rows(value), layer_scale.contiguous()
    logits = value if gate is None else by_rows(gate)
    tile = element_tile(width)
    groups = Groups.of(rows, layer_scale.shape[0], tile)
    d_value = torch.empty((rows, width), dtype=value.dtype, device=value.device)
    d_gate = d_value if gate is None else torch.empty((rows, width), dtype=gate.dtype, device=value.device)
    shape = (rows, width) if groups.per_row else (groups.count, groups.tiles, width)
    d_layer_scale = torch.empty(shape, dtype=torch.float32, device=value.device)
    launch(
        gate_residual_backward_kernel, (groups.count * groups.tiles, triton.cdiv(width, tile.columns)), grad, logits,
        value, layer_scale, _mask_bytes(keep, value), d_gate, d_value, d_layer_scale, groups.size, groups.tiles, width,
        grad.stride(0), logits.stride(0), value.stride(0), 1 / (1 - dropout), HAS_GATE=gate is not None,
        HAS_KEEP=keep is not None, PER_ROW=groups.per_row, ROWS=tile.rows, COLUMNS=tile.columns, **tile.roomy,
    )  # fmt: skip
    total = d_layer_scale if groups.per_row else d_layer_scale.sum(1)
    return value.new_empty(0) if gate is None else d_gate, d_value, total.to(layer_scale.dtype)


def _mask_bytes(keep: Tensor | None, stand_in: Tensor) -> Tensor:
    """The mask as bytes, or a tensor that is never read in its place."""
    return stand_in if keep is None else keep.contiguous().view(torch.int8)


@row_kernel
def swiglu_kernel(gate, value, out, rows, width, in_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * in_stride + column[None, :]
    x = tl.load(gate + at, mask=valid, other=0.0).to(tl.float32)
    y = tl.load(value + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * width + column[None, :], x * _sigmoid(x) * y, mask=valid)


@row_kernel
def swiglu_backward_kernel(
    grad, gate, value, d_gate, d_value, rows, width, grad_stride, in_stride, out_stride, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * in_stride + column[None, :]
    dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=valid, other=0.0).to(tl.float32)
    y = tl.load(value + at, mask=valid, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(x)
    silu = x * sigmoid
    to = row[:, None] * out_stride + column[None, :]
    tl.store(d_gate + to, dy * y * (sigmoid + silu * (1.0 - sigmoid)), mask=valid)
    tl.store(d_value + to, dy * silu, mask=valid)


def _two_halves(gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contiguous gate and value, or two views of the packed tensor; either way with one row stride."""
    gate = gate.contiguous()
    if value is not None:
        return gate, value.contiguous()
    first, second = gate.chunk(2, dim=-1)
    return first, second


def swiglu(gate: Tensor, value: Tensor | None) -> Tensor:
    """See `swiglu_reference`."""
    first, second = _two_halves(gate, value)
    rows, width = first.shape
    tile = element_tile(width)
    out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    launch(
        swiglu_kernel, (triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.columns)), first, second, out, rows,
        width, first.stride(0), ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `swiglu_backward_reference`."""
    grad = by_rows(grad)
    first, second = _two_halves(gate, value)
    rows, width = first.shape
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    d_value = None if value is None else torch.empty(value.shape, dtype=value.dtype, device=gate.device)
    d_first, d_second = _two_halves(d_gate, d_value)
    tile = element_tile(width)
    launch(
        swiglu_backward_kernel, (triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.columns)), grad, first, second,
        d_first, d_second, rows, width, grad.stride(0), first.stride(0), d_first.stride(0), ROWS=tile.rows,
        COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    return d_gate, gate.new_empty(0) if d_value is None else d_value


@triton.jit
def _cross_products(row, group, column, rows, width, head_width):
    """Where the gates of a row stand in the products of a cross-gate, and the values that the other stream sends it."""
    in_stream = row - group.to(tl.int64) * rows
    head = (column // head_width).to(tl.int64)
    at = (head[None, :] * rows + in_stream[:, None]) * (2 * head_width) + (column % head_width)[None, :]
    stream = rows.to(tl.int64) * (2 * width)  # numbers in the products of a stream
    return at + group * stream, at + (1 - group) * stream + head_width


@row_kernel
def cross_residual_kernel(
    residual, products, layer_scale, keep, out, group_size, tiles, width, head_width, residual_stride, kept_factor,
    HAS_KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, inside, group = _tile_rows(group_size, tiles, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    gate_at, value_at = _cross_products(row, group, column, group_size, width, head_width)
    branch = tl.load(products + value_at, mask=valid, other=0.0).to(tl.float32)
    branch *= _sigmoid(tl.load(products + gate_at, mask=valid, other=0.0).to(tl.float32))
    at = row[:, None] * width + column[None, :]
    if HAS_KEEP:
        branch = tl.where(tl.load(keep + at, mask=valid, other=0) != 0, branch * kept_factor, 0.0)
    before = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    scale = tl.load(layer_scale + group * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + at, before + scale[None, :] * branch, mask=valid)


@row_kernel
def cross_residual_backward_kernel(
    grad, products, layer_scale, keep, d_products, d_layer_scale, group_size, tiles, width, head_width, grad_stride,
    kept_factor, HAS_KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, inside, group = _tile_rows(group_size, tiles, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    gate_at, value_at = _cross_products(row, group, column, group_size, width, head_width)
    dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    if HAS_KEEP:
        at = row[:, None] * width + column[None, :]
        dy = tl.where(tl.load(keep + at, mask=valid, other=0) != 0, dy * kept_factor, 0.0)
    content = tl.load(products + value_at, mask=valid, other=0.0).to(tl.float32)
    open_by = _sigmoid(tl.load(products + gate_at, mask=valid, other=0.0).to(tl.float32))
    scale = tl.load(layer_scale + group * width + column, mask=column < width, other=0.0).to(tl.float32)
    scaled = dy * scale[None, :] * open_by
    tl.store(d_products + gate_at, scaled * content * (1.0 - open_by), mask=valid)
    tl.store(d_products + value_at, scaled, mask=valid)
    partial = tl.program_id(0).to(tl.int64) * width + column
    tl.store(d_layer_scale + partial, tl.sum(dy * content * open_by, axis=0), mask=column < width)


def cross_residual(
    residual: Tensor, products: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> Tensor:
    """See `cross_residual_reference`."""
    rows, width = residual.shape
    residual, products, layer_scale = by_rows(residual), products.contiguous(), layer_scale.contiguous()
    tile = element_tile(width)
    tiles = triton.cdiv(rows // 2, tile.rows)
    out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    launch(
        cross_residual_kernel, (2 * tiles, triton.cdiv(width, tile.columns)), residual, products, layer_scale,
        _mask_bytes(keep, products), out, rows // 2, tiles, width, products.shape[2] // 2, residual.stride(0),
        1 / (1 - dropout), HAS_KEEP=keep is not None, ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
    return out


def cross_residual_backward(
    grad: Tensor, products: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> Pair:
    """See `cross_residual_backward_reference`."""
    rows, width = grad.shape
    grad, products, layer_scale = by_rows(grad), products.contiguous(), layer_scale.contiguous()
    tile = element_tile(width)
    tiles = triton.cdiv(rows // 2, tile.rows)
    d_products = torch.empty(products.shape, dtype=products.dtype, device=products.device)
    partial = torch.empty((2, tiles, width), dtype=torch.float32, device=products.device)
    launch(
        cross_residual_backward_kernel, (2 * tiles, triton.cdiv(width, tile.columns)), grad, products, layer_scale,
        _mask_bytes(keep, products), d_products, partial, rows // 2, tiles, width, products.shape[2] // 2,
        grad.stride(0), 1 / (1 - dropout), HAS_KEEP=keep is not None, ROWS=tile.rows, COLUMNS=tile.columns,
        **tile.options,
    )  # fmt: skip
    return d_products, partial.sum(1).to(layer_scale.dtype)


@triton.jit
def _tangent_error(velocity, target, point, row, counted, width, COLUMNS: tl.constexpr):
    """Tangent part of velocity - target at the point, zero where the row does not count; offsets and mask beside it."""
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * width + column[None, :]
    valid = counted[:, None] & (column < width)[None, :]
    error = tl.load(velocity + at, mask=valid, other=0.0).to(tl.float32)
    error -= tl.load(target + at, mask=valid, other=0.0).to(tl.float32)
    x = tl.load(point + at, mask=valid, other=0.0).to(tl.float32)
    return error - tl.sum(error * x, axis=1)[:, None] * x


@row_kernel
def flow_loss_kernel(
    v_image, v_text, target_image, target_text, image, text, direction, loss, rows, image_width, text_width,
    ROWS: tl.constexpr, IMAGE_COLUMNS: tl.constexpr, TEXT_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    code = tl.load(direction + row, mask=inside, other=0)
    error = _tangent_error(v_image, target_image, image, row, inside & (code != 1), image_width, IMAGE_COLUMNS)
    total = tl.sum(error * error, axis=1)
    error = _tangent_error(v_text, target_text, text, row, inside & (code != 2), text_width, TEXT_COLUMNS)
    tl.store(loss + row, total + tl.sum(error * error, axis=1), mask=inside)


@triton.jit
def _store_gradient(to, error, weight, row, inside, width, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    tl.store(to + row[:, None] * width + column[None, :], weight[:, None] * error, mask=valid)


@row_kernel
def flow_loss_backward_kernel(
    grad, v_image, v_text, target_image, target_text, image, text, direction, d_image, d_text, rows, image_width,
    text_width, ROWS: tl.constexpr, IMAGE_COLUMNS: tl.constexpr, TEXT_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    code = tl.load(direction + row, mask=inside, other=0)
    weight = 2.0 * tl.load(grad + row, mask=inside, other=0.0).to(tl.float32)
    error = _tangent_error(v_image, target_image, image, row, inside & (code != 1), image_width, IMAGE_COLUMNS)
    _store_gradient(d_image, error, weight, row, inside, image_width, IMAGE_COLUMNS)
    error = _tangent_error(v_text, target_text, text, row, inside & (code != 2), text_width, TEXT_COLUMNS)
    _store_gradient(d_text, error, weight, row, inside, text_width, TEXT_COLUMNS)


def flow_loss(
    v_image: Tensor,
    v_text: Tensor,
    target_image: Tensor,
    target_text: Tensor,
    image: Tensor,
    text: Tensor,
    direction: Tensor,
) -> Tensor:
    """See `flow_loss_reference`."""
    streams = (v_image, v_text, target_image, target_text, image, text)
    image_width, text_width = v_image.shape[1], v_text.shape[1]
    tile = row_tile(max(image_width, text_width))
    rows = direction.shape[0]
    loss = torch.empty(rows, dtype=torch.float32, device=direction.device)
    launch(
        flow_loss_kernel, (triton.cdiv(rows, tile.rows),), *(x.contiguous() for x in streams), direction.contiguous(),
        loss, rows, image_width, text_width, ROWS=tile.rows, IMAGE_COLUMNS=row_tile(image_width).columns,
        TEXT_COLUMNS=row_tile(text_width).columns, **tile.options,
    )  # fmt: skip
    return loss


def flow_loss_backward(
    grad: Tensor,
    v_image: Tensor,
    v_text: Tensor,
    target_image: Tensor,
    target_text: Tensor,
    image: Tensor,
    text: Tensor,
    direction: Tensor,
) -> Pair:
    """See `flow_loss_backward_reference`."""
    streams = (v_image, v_text, target_image, target_text, image, text)
    image_width, text_width = v_image.shape[1], v_text.shape[1]
    tile = row_tile(max(image_width, text_width))
    rows = direction.shape[0]
    d_image, d_text = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (v_image, v_text))
    launch(
        flow_loss_backward_kernel, (triton.cdiv(rows, tile.rows),), grad.contiguous(),
        *(x.contiguous() for x in streams), direction.contiguous(), d_image, d_text, rows, image_width, text_width,
        ROWS=tile.rows, IMAGE_COLUMNS=row_tile(image_width).columns, TEXT_COLUMNS=row_tile(text_width).columns,
        **tile.options,
    )  # fmt: skip
    return d_image, d_text


# ---- rows of several solves in one launch ----------------------------------------------------------------------------
#
# A network that is evaluated with tangents has its rows in segments: the points of one solve in one stream, and one
# tangent of all of them after the other. A table on the device has a line for each segment, so that one launch serves
# all solves and both streams. Row numbers count rows of the flattened matrices; the source is what a kernel reads, the
# other is the same solve in the other stream, and the target is what it writes.

PAIRS, TANGENTS, POINT, TANGENT, OTHER_POINT, OTHER_TANGENT, TO_POINT, TO_TANGENT, GROUP, STREAM = map(
    tl.constexpr, range(len(Segment._fields))
)
LINE = tl.constexpr(len(Segment._fields))


@triton.jit
def _segment(table, tiles, ROWS: tl.constexpr):
    """The line of this program's segment, the numbers of its rows within it, and which of them exist."""
    program = tl.program_id(0)
    line = table + (program // tiles) * LINE
    local = ((program % tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    return line, local, local < tl.load(line + PAIRS)


@triton.jit
def _elements(line, column_of_table, local, pitch, column):
    """Offsets of a tile whose first row the table names."""
    first = tl.load(line + column_of_table).to(tl.int64)
    return (first + local)[:, None] * pitch + column[None, :]


@triton.jit
def _normalise_tangent(tangent, unit, rstd, factor, width):
    """What `_normalise` and a factor make of a tangent."""
    mean = tl.sum(tangent, axis=1) / width
    along = tl.sum(tangent * unit, axis=1) / width
    return rstd[:, None] * (tangent - mean[:, None] - unit * along[:, None]) * factor


@triton.jit(do_not_specialize=["tiles"])
def segment_adaln_kernel(
    x, bias, shift, scale, y, table, tiles, width, eps, GROUP_COLUMN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line, local, inside = _segment(table, tiles, ROWS)
    column = tl.arange(0, COLUMNS)
    present = column < width
    valid = inside[:, None] & present[None, :]
    parameter = tl.load(line + GROUP_COLUMN).to(tl.int64) * width + column
    value = tl.load(x + _elements(line, POINT, local, width, column), mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        own = tl.load(line + STREAM).to(tl.int64) * width + column
        value += tl.where(valid, tl.load(bias + own, mask=present, other=0.0).to(tl.float32)[None, :], 0.0)
    unit, rstd = _normalise(value, valid, width, eps)
    factor = 1.0 + tl.load(scale + parameter, mask=present, other=0.0).to(tl.float32)[None, :]
    out = unit * factor + tl.load(shift + parameter, mask=present, other=0.0).to(tl.float32)[None, :]
    tl.store(y + _elements(line, TO_POINT, local, width, column), out, mask=valid)
    pairs = tl.load(line + PAIRS).to(tl.int64)
    at = _elements(line, TANGENT, local, width, column)
    to = _elements(line, TO_TANGENT, local, width, column)
    for _ in range(tl.load(line + TANGENTS)):
        tangent = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(y + to, _normalise_tangent(tangent, unit, rstd, factor, width), mask=valid)
        at += pairs * width
        to += pairs * width


@triton.jit(do_not_specialize=["tiles"])
def segment_gate_adaln_kernel(
    h, branch, layer_scale, shift, scale, out, y, table, tiles, width, pitch, head_width, eps,
    GROUP_COLUMN: tl.constexpr, HAS_GATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line, local, inside = _segment(table, tiles, ROWS)
    column = tl.arange(0, COLUMNS)
    present = column < width
    valid = inside[:, None] & present[None, :]
    parameter = tl.load(line + GROUP_COLUMN).to(tl.int64) * width + column
    own = tl.load(line + STREAM).to(tl.int64) * width + column
    at = _elements(line, POINT, local, width, column)
    to = _elements(line, TO_POINT, local, width, column)
    along_value = tl.load(layer_scale + own, mask=present, other=0.0).to(tl.float32)[None, :]
    gate_column = column
    value_at = _elements(line, POINT, local, pitch, column)
    if HAS_GATE:
        # Each head has its gates first and then the values that it sends to the other stream.
        gate_column = (column // head_width) * (2 * head_width) + column % head_width
        value_at = _elements(line, OTHER_POINT, local, pitch, gate_column + head_width)
    content = tl.load(branch + value_at, mask=valid, other=0.0).to(tl.float32)
    along_gate = along_value
    if HAS_GATE:
        gate_at = _elements(line, POINT, local, pitch, gate_column)
        open_by = _sigmoid(tl.load(branch + gate_at, mask=valid, other=0.0).to(tl.float32))
        along_value = along_value * open_by
        along_gate = along_value * (1.0 - open_by) * content
    value = tl.load(h + at, mask=valid, other=0.0).to(tl.float32) + along_value * content
    tl.store(out + to, value, mask=valid)
    unit, rstd = _normalise(value, valid, width, eps)
    factor = 1.0 + tl.load(scale + parameter, mask=present, other=0.0).to(tl.float32)[None, :]
    normed = unit * factor + tl.load(shift + parameter, mask=present, other=0.0).to(tl.float32)[None, :]
    tl.store(y + to, normed, mask=valid)
    pairs = tl.load(line + PAIRS).to(tl.int64)
    at = _elements(line, TANGENT, local, width, column)
    to = _elements(line, TO_TANGENT, local, width, column)
    gate_at = _elements(line, TANGENT, local, pitch, gate_column)
    value_at = gate_at
    if HAS_GATE:
        value_at = _elements(line, OTHER_TANGENT, local, pitch, gate_column + head_width)
    for _ in range(tl.load(line + TANGENTS)):
        tangent = tl.load(h + at, mask=valid, other=0.0).to(tl.float32)
        tangent += along_value * tl.load(branch + value_at, mask=valid, other=0.0).to(tl.float32)
        if HAS_GATE:
            tangent += along_gate * tl.load(branch + gate_at, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + to, tangent, mask=valid)
        tl.store(y + to, _normalise_tangent(tangent, unit, rstd, factor, width), mask=valid)
        at += pairs * width
        to += pairs * width
        gate_at += pairs * pitch
        value_at += pairs * pitch


@triton.jit(do_not_specialize=["tiles"])
def segment_swiglu_kernel(wide, inner, table, tiles, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    line, local, inside = _segment(table, tiles, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = inside[:, None] & (column < width)[None, :]
    at = _elements(line, POINT, local, 2 * width, column)
    to = _elements(line, TO_POINT, local, width, column)
    x = tl.load(wide + at, mask=valid, other=0.0).to(tl.float32)
    y = tl.load(wide + at + width, mask=valid, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(x)
    silu = x * sigmoid
    slope = y * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(inner + to, silu * y, mask=valid)
    pairs = tl.load(line + PAIRS).to(tl.int64)
    at = _elements(line, TANGENT, local, 2 * width, column)
    to = _elements(line, TO_TANGENT, local, width, column)
    for _ in range(tl.load(line + TANGENTS)):
        tangent = slope * tl.load(wide + at, mask=valid, other=0.0).to(tl.float32)
        tangent += silu * tl.load(wide + at + width, mask=valid, other=0.0).to(tl.float32)
        tl.store(inner + to, tangent, mask=valid)
        at += 2 * pairs * width
        to += pairs * width


def segment_adaln(
    x: Tensor, bias: Tensor | None, shift: Tensor, scale: Tensor, y: Tensor, table: Tensor, pairs: int, eps: float,
    by_stream: bool,
) -> None:  # fmt: skip
    """See `segments.adaln_segments`."""
    width = y.shape[-1]
    tile = row_tile(width)
    tiles = triton.cdiv(pairs, tile.rows)
    launch(
        segment_adaln_kernel, (len(table) * tiles,), x, x if bias is None else bias, shift, scale, y, table, tiles,
        width, eps, GROUP_COLUMN=(STREAM if by_stream else GROUP).value, HAS_BIAS=bias is not None, ROWS=tile.rows,
        COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip


def segment_gate_adaln(
    h: Tensor, branch: Tensor, heads: int, layer_scale: Tensor, shift: Tensor, scale: Tensor, out: Tensor,
    y: Tensor, table: Tensor, pairs: int, eps: float, by_stream: bool,
) -> None:  # fmt: skip
    """See `segments.gate_adaln_segments`."""
    width = h.shape[-1]
    tile = row_tile(width)
    tiles = triton.cdiv(pairs, tile.rows)
    launch(
        segment_gate_adaln_kernel, (len(table) * tiles,), h, branch, layer_scale, shift, scale,
        out, y, table, tiles, width, branch.shape[-1], width // max(heads, 1), eps,
        GROUP_COLUMN=(STREAM if by_stream else GROUP).value, HAS_GATE=heads > 0, ROWS=tile.rows,
        COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip


def segment_swiglu(wide: Tensor, inner: Tensor, table: Tensor, pairs: int) -> None:
    """See `segments.swiglu_segments`."""
    width = inner.shape[-1]
    tile = element_tile(width)
    tiles = triton.cdiv(pairs, tile.rows)
    launch(
        segment_swiglu_kernel, (len(table) * tiles, triton.cdiv(width, tile.columns)), wide, inner, table, tiles, width,
        ROWS=tile.rows, COLUMNS=tile.columns, **tile.options,
    )  # fmt: skip
