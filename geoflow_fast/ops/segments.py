"""The network's row operations on the rows of several solves and both streams, points and tangents, in one call.

The points of one solve in one stream, and its tangents one after the other, are a segment. Matrices hold the segments
of both streams below each other, and a table on the device has a line for each segment. All operations write into
contiguous memory that is given to them: C++ on CPUs, Triton on GPUs, or their twins in plain torch, which go from
segment to segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.ops import dispatch, extension, triton_kernels
from geoflow_fast.ops.arguments import Pair, working_dtype
from geoflow_fast.ops.dispatch import Backend
from geoflow_fast.ops.triton_kernels import WIDEST_ROW


class Segment(NamedTuple):
    """A line of the table: numbers of pairs and tangents, and the first rows of points and tangents in what is read, in
    the other stream of what is read and in what is written; which shift and scale, and which stream."""

    pairs: int
    tangents: int
    point: int
    tangent: int
    other_point: int
    other_tangent: int
    to_point: int
    to_tangent: int
    group: int
    stream: int

    def rows(self, x: Tensor, first: str = "") -> Pair:
        """The points [B, W] and the tangents [K, B, W] in a matrix; `first` is "", "other_" or "to_"."""
        point, tangent = getattr(self, f"{first}point"), getattr(self, f"{first}tangent")
        tangents = x.narrow(0, tangent, self.tangents * self.pairs)
        return x.narrow(0, point, self.pairs), tangents.view(self.tangents, self.pairs, x.shape[1])


@dataclass(frozen=True)
class RowTable:
    """The segments that an operation goes over, and the same on the device as a table, int32 [segments, 10]."""

    lines: tuple[Segment, ...]
    table: Tensor

    @staticmethod
    def of(lines: Sequence[Segment], device: torch.device) -> RowTable:
        """The segments with a table on the device."""
        table = torch.tensor(lines, dtype=torch.int32, device="cpu")
        if device.type == "cuda":  # nothing waits for a copy from pinned memory
            table = table.pin_memory().to(device, non_blocking=True)
        return RowTable(tuple(lines), table)

    @property
    def pairs(self) -> int:
        """The most pairs that a segment has."""
        return max(line.pairs for line in self.lines)


def adaln_segments(
    x: Tensor,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    y: Tensor,
    segments: RowTable,
    eps: float,
    by_stream: bool = False,
    *,
    backend: str = "auto",
) -> None:
    """Writes (1 + scale) LayerNorm(x) + shift and its tangents to `y`. `shift` and `scale` have a row for each group of
    segments, or one for each stream; `bias` [2, H] is added to the points before, by stream."""
    dispatch.choose("adaln_segments", x, backend, (y,))(x, bias, shift, scale, y, segments, eps, by_stream)


def gate_adaln_segments(
    h: Tensor,
    branch: Tensor,
    layer_scale: Tensor,
    shift: Tensor,
    scale: Tensor,
    out: Tensor,
    y: Tensor,
    segments: RowTable,
    eps: float,
    by_stream: bool = False,
    *,
    heads: int = 0,
    backend: str = "auto",
) -> None:
    """Writes the states after a branch, h + layer_scale * branch, to `out`, and what `adaln_segments` makes of them to
    `y`, with their tangents. `layer_scale` [2, H] is that of the streams.

    With `heads`, `branch` [R, 2 H] holds the products of a cross-gate, the gates of each head before its values. What
    is added to a row is then sigmoid(gate) * value, of its own gates and the values that the other stream sends."""
    function = dispatch.choose("gate_adaln_segments", h, backend, (y,))
    function(h, branch, heads, layer_scale, shift, scale, out, y, segments, eps, by_stream)


def swiglu_segments(wide: Tensor, inner: Tensor, segments: RowTable, *, backend: str = "auto") -> None:
    """Writes the SwiGLU product of the two halves of `wide` [R, 2 I] and its tangents to `inner` [R, I]."""
    dispatch.choose("swiglu_segments", wide, backend)(wide, inner, segments)


# ---- plain torch ---------------------------------------------------------------------------------------------------


def adaln_segments_reference(
    x: Tensor,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    y: Tensor,
    segments: RowTable,
    eps: float,
    by_stream: bool,
) -> None:
    """See `adaln_segments`."""
    for line in segments.lines:
        group = line.stream if by_stream else line.group
        points, tangents = line.rows(x)
        points = points if bias is None else points + bias[line.stream]
        _write(line.rows(y, "to_"), _adaln(points, tangents, shift[group], scale[group], eps))


def gate_adaln_segments_reference(
    h: Tensor,
    branch: Tensor,
    heads: int,
    layer_scale: Tensor,
    shift: Tensor,
    scale: Tensor,
    out: Tensor,
    y: Tensor,
    segments: RowTable,
    eps: float,
    by_stream: bool,
) -> None:
    """See `gate_adaln_segments`."""
    work = working_dtype(h)

    def part(rows: Pair, number: int) -> list[Tensor]:
        return [x.unflatten(-1, (heads, 2, -1)).select(-2, number).flatten(-2).to(work) for x in rows]

    for line in segments.lines:
        group, weight = line.stream if by_stream else line.group, layer_scale[line.stream].to(work)
        points, tangents = (x.to(work) for x in line.rows(h))
        if heads:
            (gate, d_gate), (value, d_value) = part(line.rows(branch), 0), part(line.rows(branch, "other_"), 1)
            opened = torch.sigmoid(gate)
            added, d_added = opened * value, opened * (d_value + (1 - opened) * value * d_gate)
        else:
            added, d_added = (x.to(work) for x in line.rows(branch))
        after = points + weight * added, tangents + weight * d_added
        _write(line.rows(out, "to_"), after)
        _write(line.rows(y, "to_"), _adaln(*after, shift[group], scale[group], eps))


def swiglu_segments_reference(wide: Tensor, inner: Tensor, segments: RowTable) -> None:
    """See `swiglu_segments`."""
    for line in segments.lines:
        points, tangents = (x.to(working_dtype(wide)) for x in line.rows(wide))
        (gate, value), (d_gate, d_value) = points.chunk(2, dim=-1), tangents.chunk(2, dim=-1)
        opened = torch.sigmoid(gate)
        silu = gate * opened
        along = (opened + silu * (1 - opened)) * value * d_gate + silu * d_value
        _write(line.rows(inner, "to_"), (silu * value, along))


def _adaln(x: Tensor, dx: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Pair:
    """(1 + scale) LayerNorm(x) + shift of the points [B, H], and its derivative along the tangents [K, B, H]."""
    work = working_dtype(x)
    x, dx, shift, factor = x.to(work), dx.to(work), shift.to(work), 1 + scale.to(work)
    unit = functional.layer_norm(x, x.shape[-1:], eps=eps)
    rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    along = dx - dx.mean(-1, keepdim=True) - unit * (unit * dx).mean(-1, keepdim=True)
    return unit * factor + shift, rstd * along * factor


def _write(to: Pair, rows: Pair) -> None:
    for target, x in zip(to, rows):
        target.copy_(x)


# ---- compiled C++ --------------------------------------------------------------------------------------------------


def _compiled() -> Any:
    return extension.loaded()  # which is there where a backend "cpu" is chosen


def _shape(y: Tensor, segments: RowTable, eps: float, by_stream: bool) -> tuple[Any, ...]:
    table = segments.table
    return table.data_ptr(), len(table), y.shape[1], eps, by_stream, extension.usable_threads()


def _adaln_cpu(
    x: Tensor,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    y: Tensor,
    segments: RowTable,
    eps: float,
    by_stream: bool,
) -> None:
    half = torch.bfloat16
    parts = x.data_ptr(), x.dtype == half, 0 if bias is None else bias.data_ptr(), shift.data_ptr(), scale.data_ptr()
    _compiled().adaln_segments(_shape(y, segments, eps, by_stream), *parts, y.data_ptr(), y.dtype == half)


def _gate_adaln_cpu(
    h: Tensor,
    branch: Tensor,
    heads: int,
    layer_scale: Tensor,
    shift: Tensor,
    scale: Tensor,
    out: Tensor,
    y: Tensor,
    segments: RowTable,
    eps: float,
    by_stream: bool,
) -> None:
    addresses = [x.data_ptr() for x in (h, branch, layer_scale, shift, scale, out, y)]
    _compiled().gate_adaln_segments(_shape(y, segments, eps, by_stream), heads, *addresses, y.dtype == torch.bfloat16)


def _swiglu_cpu(wide: Tensor, inner: Tensor, segments: RowTable) -> None:
    _compiled().swiglu_segments(
        _shape(inner, segments, 0.0, False), wide.data_ptr(), inner.data_ptr(), inner.dtype == torch.bfloat16
    )


# ---- Triton --------------------------------------------------------------------------------------------------------


def _triton(function: str) -> Backend:
    kernel = triton_kernels.backend("network", function, widest=None if function.endswith("swiglu") else WIDEST_ROW)

    def call(*arguments: object) -> None:
        flat = [part for x in arguments for part in ((x.table, x.pairs) if isinstance(x, RowTable) else (x,))]
        kernel.function(*flat)

    return dataclasses.replace(kernel, function=call)


def _register(name: str, reference: Callable[..., None], cpu: Callable[..., None]) -> None:
    dispatch.register(
        f"{name}_segments",
        reference=Backend(reference),
        cpu=extension.backend(cpu, (torch.float32, torch.bfloat16)),
        triton=_triton(f"segment_{name}"),
    )
    dispatch._PASSES.add(f"{name}_segments")


_register("adaln", adaln_segments_reference, _adaln_cpu)
_register("gate_adaln", gate_adaln_segments_reference, _gate_adaln_cpu)
_register("swiglu", swiglu_segments_reference, _swiglu_cpu)
