"""Shifts and scales of training rows that each have a time of their own.

In each direction the conditioning of a stream is a function of time alone, and a smooth one. So the linear maps behind
it, a quarter of the arithmetic of a step, need not see every row: `interpolated_rows` takes shifts and scales at
Chebyshev points and interpolates between them, where that is as exact as float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.directions import CONDITIONAL, Counts, Direction
from geoflow_fast.ops.product import product

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
            own = [part for part in segments if part.rows.start < part.rows.stop]
            self.segments.append(sorted(own, key=lambda part: part.rows.start))
        self.codes = codes_of[0], codes_of[1]

    @staticmethod
    def worthwhile(t: Tensor, width: int) -> bool:
        """Whether rows with times `t` [B] should be interpolated. A GPU would have to be waited for to check it."""
        return t.device.type == "cpu" and len(t) >= WORTH_ROWS and width >= WORTH_WIDTH

    @staticmethod
    def resolve(c: Tensor) -> bool:
        """Whether the conditioning [2, S, H] at these points can be interpolated."""
        return is_resolved(c.detach()[:, 1:].unflatten(1, (-1, POINTS)))


def interpolated_rows(at_points: Tensor, points: TimePoints) -> tuple[Tensor, ...]:
    """Shifts and scales of rows, 4 depth tensors [2, B, H], from those at `TimePoints` [4 depth, 2, S, H]."""

    def of_stream(known: Tensor, segments: list[RowRange]) -> Tensor:
        parts = []
        for part in segments:
            source = known[part.points]
            count = part.rows.stop - part.rows.start
            parts.append(source.expand(count, -1) if part.weights is None else product(part.weights, source))
        return torch.cat(parts)

    return tuple(
        torch.stack([of_stream(*part) for part in zip(known, points.segments)]) for known in at_points.unbind()
    )
