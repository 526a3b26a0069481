"""The network's row operations on the rows of several solves and both streams, points and tangents, in one call.

The points of one solve in one stream, and its tangents one after the other, are a segment. Matrices hold the segments
of both streams below each other. Compiled C++ and plain torch go from segment to segment with the tangent passes of
`adaln`, `gate_residual` and `swiglu`; Triton serves all segments with one launch, for which a table of them stands on
the device. All operations write into memory that is given to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, native, triton_kernels
from geoflow_fast.ops.arguments import Pair
from geoflow_fast.ops.dispatch import Backend
from geoflow_fast.ops.triton_kernels import WIDEST_ROW

Branch = Tensor | Pair
"""What is added to the states: rows [R, H]; or gates and values of a cross-gate, each [R, H], those of a row beside
each other; or both packed as the products of the heads leave them, [R, 2 H] with the gates of each head before its
values,
where the values are those that the row sends to the other stream."""


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
class Segments:
    """The segments that an operation goes over, and the same on the device as a table, int32, where it is needed."""

    lines: tuple[Segment, ...]
    table: Tensor | None = None

    @staticmethod
    def of(lines: Sequence[Segment], device: torch.device) -> Segments:
        """Segments with a table if tensors on the device are served by Triton."""
        if device.type not in triton_kernels.devices() or triton_kernels.missing() is not None:
            return Segments(tuple(lines))
        table = torch.tensor(lines, dtype=torch.int32, device="cpu")
        if device.type == "cuda":  # nothing waits for a copy from pinned memory
            table = table.pin_memory().to(device, non_blocking=True)
        return Segments(tuple(lines), table)

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
    segments: Segments,
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
    branch: Branch,
    layer_scale: Tensor,
    shift: Tensor,
    scale: Tensor,
    out: Tensor,
    y: Tensor,
    segments: Segments,
    eps: float,
    by_stream: bool = False,
    *,
    heads: int = 0,
    backend: str = "auto",
) -> None:
    """Writes the states after a branch, h + layer_scale * branch or h + layer_scale * sigmoid(gate) * value, to `out`,
    and what `adaln_segments` makes of them to `y`, with their tangents. `layer_scale` [2, H] is that of the streams;
    `heads`: how many heads a packed branch has, 0 for any other."""
    function = dispatch.choose("gate_adaln_segments", h, backend, (y,))
    function(h, branch, heads, layer_scale, shift, scale, out, y, segments, eps, by_stream)


def swiglu_segments(wide: Tensor, inner: Tensor, segments: Segments, *, backend: str = "auto") -> None:
    """Writes the SwiGLU product of the two halves of `wide` [R, 2 I] and its tangents to `inner` [R, I]."""
    dispatch.choose("swiglu_segments", wide, backend)(wide, inner, segments)


# ---- segment by segment: plain torch and compiled C++ ---------------------------------------------------------------


class _OneByOne:
    """The operations as loops over the tangent passes of one backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def adaln(
        self,
        x: Tensor,
        bias: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        y: Tensor,
        segments: Segments,
        eps: float,
        by_stream: bool,
    ) -> None:
        adaln = dispatch.choose("adaln_jvp", shift, self.backend)  # which has the type of states, whatever `x` has
        for line in segments.lines:
            points, tangents = line.rows(x)
            if bias is not None:
                points = points + bias[line.stream]
            group = line.stream if by_stream else line.group
            parameters = shift.narrow(0, group, 1), scale.narrow(0, group, 1)
            adaln(points, tangents, *parameters, eps, out=line.rows(y, "to_"))

    def gate_adaln(
        self,
        h: Tensor,
        branch: Branch,
        heads: int,
        layer_scale: Tensor,
        shift: Tensor,
        scale: Tensor,
        out: Tensor,
        y: Tensor,
        segments: Segments,
        eps: float,
        by_stream: bool,
    ) -> None:
        adaln, gate_residual = (dispatch.choose(f"{name}_jvp", h, self.backend) for name in ("adaln", "gate_residual"))
        for line in segments.lines:
            (gate, d_gate), (value, d_value) = self._branch(branch, heads, line)
            after = line.rows(out, "to_")
            weight = layer_scale.narrow(0, line.stream, 1)
            gate_residual(*line.rows(h), gate, d_gate, value, d_value, weight, out=after)
            group = line.stream if by_stream else line.group
            adaln(*after, shift.narrow(0, group, 1), scale.narrow(0, group, 1), eps, out=line.rows(y, "to_"))

    @staticmethod
    def _branch(branch: Branch, heads: int, line: Segment) -> tuple[tuple[Tensor | None, Tensor | None], Pair]:
        """Gates, if there are any, and values of a segment, each with tangents."""
        if isinstance(branch, tuple):
            return line.rows(branch[0]), line.rows(branch[1])
        if not heads:
            return (None, None), line.rows(branch)

        def part(rows: Pair, number: int) -> Pair:
            points, tangents = (x.unflatten(-1, (heads, 2, -1)).select(-2, number).flatten(-2) for x in rows)
            return points, tangents

        return part(line.rows(branch), 0), part(line.rows(branch, "other_"), 1)

    def swiglu(self, wide: Tensor, inner: Tensor, segments: Segments) -> None:
        swiglu = dispatch.choose("swiglu_jvp", wide, self.backend)
        for line in segments.lines:
            swiglu(*line.rows(wide), None, None, out=line.rows(inner, "to_"))


# ---- Triton --------------------------------------------------------------------------------------------------------


def _triton(function: str) -> Backend:
    kernel = triton_kernels.backend("network", function, widest=None if function.endswith("swiglu") else WIDEST_ROW)

    def call(*arguments: object) -> None:
        flat = [part for x in arguments for part in ((x.table, x.pairs) if isinstance(x, Segments) else (x,))]
        kernel.function(*flat)

    return dataclasses.replace(kernel, function=call)


_PLAIN, _COMPILED = _OneByOne("reference"), _OneByOne("cpu")
for _name in ("adaln", "gate_adaln", "swiglu"):
    dispatch.register(
        f"{_name}_segments",
        reference=Backend(getattr(_PLAIN, _name)),
        cpu=native.backend(getattr(_COMPILED, _name), (torch.float32, torch.bfloat16)),
        triton=_triton(f"segment_{_name}"),
    )
    dispatch._PASSES.add(f"{_name}_segments")
