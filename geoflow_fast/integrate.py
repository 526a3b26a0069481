"""Fixed-step solvers on the product of two spheres (or of two flat spaces, for the Euclidean twin)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

SOLVERS = ("euler", "midpoint")

Streams = tuple[Tensor, Tensor]


class Field(Protocol):
    """A velocity field on pairs of points; a `GeoFlow` is one, the oracles of `worlds` are others."""

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str, /) -> Streams:
        """(v_image, v_text) at `t`, tangent, zero on the given stream."""


def geometry_of(field: object) -> str:
    """ "sphere", unless the field says in its configuration that it is the Euclidean twin."""
    return str(getattr(getattr(field, "config", None), "geometry", "sphere"))


def move(point: Streams, velocity: Streams, h: float, geometry: str) -> Streams:
    """Points after a straight step of length `h` along `velocity`, brought back to the sphere."""
    moved = tuple(torch.add(x, v, alpha=h) for x, v in zip(point, velocity))
    if geometry == "sphere":
        moved = tuple(torch.nn.functional.normalize(x, dim=-1) for x in moved)
    return moved[0], moved[1]


def integrate(
    rate: Callable[[Streams, float, bool], Streams],
    start: Streams,
    times: Tensor,
    *,
    solver: str = "midpoint",
    geometry: str = "sphere",
) -> Streams:
    """Carries `start` along `rate` over the grid `times` [S + 1], in either direction of time.

    `rate(point, t, final)` returns the velocities; `final` tells the evaluation that carries the step from the
    auxiliary ones, so that a caller can accumulate what it integrates along the path with the step's weight.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {SOLVERS}, got {solver!r}")
    point = start
    grid = times.tolist()
    for number, (now, after) in enumerate(itertools.pairwise(grid)):
        h = after - now
        if solver == "euler":
            velocity = rate(point, now, True)
        else:
            halfway = move(point, rate(point, now, False), h / 2, geometry)
            velocity = rate(halfway, now + h / 2, True)
        point = move(point, velocity, h, geometry)
        for name, x in zip(("image", "text"), point):
            if not bool(torch.isfinite(x).all()):
                row = int((~torch.isfinite(x)).any(dim=-1).nonzero()[0])
                raise ValueError(
                    f"{name} row {row} became non-finite in step {number} (t={after:.4g}) of the {solver} solver"
                )
    return point
