"""Shifts and scales of training rows that each have a time of their own.

In each direction the conditioning of a stream is a function of time alone, and a smooth one. So the linear maps behind
it, a quarter of the arithmetic of a step, need not see every row: `InterpolatedRows` takes shifts and scales at
Chebyshev points and interpolates between them, where that is as exact as float32. `DirectRows` maps every row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from geoflow_fast.directions import CONDITIONAL, Counts, Direction
from geoflow_fast.ops.product import product, product_into

POINTS = 64
"""Chebyshev points in [0, 1], which resolve about eight oscillations."""
TAIL, RESOLVED = 16, 1e-6
"""A conditioning is resolved if its last TAIL Chebyshev coefficients are below RESOLVED of its largest entry, which is
the size of float32 rounding: the coefficients of a smooth function fall geometrically, so what is left out is less."""
WORTH_ROWS, WORTH_WIDTH = 4 * POINTS, 3 * POINTS
"""Rows of a batch, and width, from which on interpolation is the cheaper way."""


@functools.cache
def chebyshev() -> tuple[Tensor, Tensor]:
    """Chebyshev points in [0, 1], float32 [POINTS], and the matrix [POINTS, POINTS], float64, that turns values at
    these points into the coefficients of Chebyshev polynomials."""
    number = torch.arange(POINTS, dtype=torch.float64, device="cpu")
    angle = math.pi * (number + 0.5) / POINTS
    transform = torch.cos(number.unsqueeze(1) * angle) * (2 / POINTS)
    transform[0] /= 2
    return ((1 + angle.cos()) / 2).float(), transform


def interpolation_weights(t: Tensor) -> Tensor:
    """The weights, float32 [M, POINTS], by which values at the Chebyshev points add up to the value at each of the
    times `t` [M] in [0, 1]."""
    angle = torch.acos((2 * t.double() - 1).clamp(-1, 1)).unsqueeze(1)
    polynomials = torch.cos(angle * torch.arange(POINTS, dtype=torch.float64, device="cpu"))
    return (polynomials @ chebyshev()[1]).float()


def is_resolved(values: Tensor) -> bool:
    """Whether functions with these `values` [..., POINTS, H] at the Chebyshev points are what interpolation says."""
    tail = chebyshev()[1][-TAIL:].float() @ values
    return bool(tail.abs().amax() <= RESOLVED * values.abs().amax())


@dataclass(frozen=True)
class RowRange:
    """Rows of a stream whose shifts and scales are `weights` [rows, points] times those at some of the points; without
    weights there is one point, which serves all rows."""

    rows: slice
    points: slice
    weights: Tensor | None = None


class TimePoints:
    """The times and directions at which shifts and scales are computed for a sorted batch, and which rows they serve:
    one point for the rows in which a stream is given, then those of joint rows, if there are any, and of the other
    rows."""

    def __init__(self, t: Tensor, counts: Counts) -> None:
        n_i2t, n_joint, _ = counts
        end = n_i2t + n_joint
        shared = (Direction.JOINT,) if n_joint else ()
        points, weights = chebyshev()[0], interpolation_weights(t)
        self.t = torch.cat((t.new_zeros(1), points.repeat(len(shared) + 1)))
        ranges = {Direction.I2T: slice(0, n_i2t), Direction.JOINT: slice(n_i2t, end), Direction.T2I: slice(end, len(t))}
        codes_of, self.segments = [], []
        for given in CONDITIONAL:
            directions = (*shared, given.reverse)
            codes = torch.tensor([given.code, *(x.code for x in directions for _ in range(POINTS))], device="cpu")
            segments = [RowRange(ranges[given], slice(0, 1))]
            for number, direction in enumerate(directions):
                rows = ranges[direction]
                segments.append(RowRange(rows, slice(1 + POINTS * number, 1 + POINTS * (number + 1)), weights[rows]))
            codes_of.append(codes)
            self.segments.append([part for part in segments if part.rows.start < part.rows.stop])
        self.codes = codes_of[0], codes_of[1]

    @staticmethod
    def worthwhile(t: Tensor, width: int) -> bool:
        """Whether rows with times `t` [B] should be interpolated. A GPU would have to be waited for to check it."""
        return t.device.type == "cpu" and len(t) >= WORTH_ROWS and width >= WORTH_WIDTH

    @staticmethod
    def resolve(c: Tensor) -> bool:
        """Whether the conditioning [2, S, H] at these points can be interpolated."""
        return is_resolved(c.detach()[:, 1:].unflatten(1, (-1, POINTS)))


class InterpolatedRows(torch.autograd.Function):
    """Shifts and scales of rows, 4 depth tensors [2, B, H], from those at `TimePoints` [4 depth, 2, S, H]."""

    @staticmethod
    def forward(ctx: Any, at_points: Tensor, points: TimePoints) -> tuple[Tensor, ...]:
        ctx.shape, ctx.points = at_points.shape, points
        rows = max(part.rows.stop for part in points.segments[0])
        outputs = []
        for known in at_points:
            out = known.new_empty(2, rows, known.shape[-1])
            for stream, segments in enumerate(points.segments):
                for part in segments:
                    target, source = out[stream, part.rows], known[stream, part.points]
                    target.copy_(source) if part.weights is None else product_into(target, part.weights, source)
            outputs.append(out)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_points = grads[0].new_zeros(ctx.shape)
        for d_known, grad in zip(d_points, grads):
            for stream, segments in enumerate(ctx.points.segments):
                for part in segments:
                    source, target = grad[stream, part.rows], d_known[stream, part.points]
                    if part.weights is None:
                        torch.sum(source, 0, keepdim=True, out=target)
                    else:
                        product_into(target, part.weights.T, source)
        return d_points, None


class DirectRows(torch.autograd.Function):
    """Shifts and scales of rows, 4 depth tensors [2, B, H], by one batched product per stream.

    `image_c`: the conditioning of the image's rows, of which the i2t ones, where the image is given, share the first;
    `text_c`: that of the text's rows, of which the t2i ones share the last. `weight` is [4 depth, 2, H, H] and `bias`
    [4 depth, 2, 1, H].
    """

    @staticmethod
    def forward(
        ctx: Any, image_c: Tensor, text_c: Tensor, weight: Tensor, bias: Tensor, counts: Counts
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(image_c, text_c, weight)
        ctx.counts = counts
        out = image_c.new_empty(len(weight), 2, sum(counts), image_c.shape[1])
        for stream, (c, rows) in enumerate(zip((image_c, text_c), _row_ranges(counts))):
            c = c.expand(len(weight), -1, -1)
            torch.baddbmm(bias[:, stream], c, weight[:, stream], out=out[:, stream, rows.mapped])
            out[:, stream, rows.alike] = out[:, stream, rows.shared]
        return out.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        image_c, text_c, weight = ctx.saved_tensors
        grad, d_weight = torch.stack(grads), torch.empty_like(weight)
        d_bias = grad.sum(2, keepdim=True)
        d_c = []
        for stream, (c, rows) in enumerate(zip((image_c, text_c), _row_ranges(ctx.counts))):
            grad[:, stream, rows.shared] += grad[:, stream, rows.alike].sum(1, keepdim=True)
            own = grad[:, stream, rows.mapped]
            product_into(d_weight[:, stream], c.T.expand(len(weight), -1, -1), own)
            d_c.append(product(own, weight[:, stream].mT).sum(0))
        return d_c[0], d_c[1], d_weight, d_bias, None


class _Rows(NamedTuple):
    """Rows of a stream in a sorted batch: those with a conditioning of their own, of which `shared`, if it is not
    empty, is the one that the rows `alike` take over."""

    mapped: slice
    shared: slice
    alike: slice


def _row_ranges(counts: Counts) -> tuple[_Rows, _Rows]:
    n_i2t, n_joint, _ = counts
    end, rows = n_i2t + n_joint, sum(counts)
    first, last = max(n_i2t - 1, 0), min(end + 1, rows)
    image = _Rows(slice(first, rows), slice(first, n_i2t), slice(0, first))
    return image, _Rows(slice(0, last), slice(end, last), slice(last, rows))
