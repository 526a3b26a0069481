"""The space a flow lives on: a product of unit spheres.

`Sphere` knows how to project velocities, how to follow them, what its base distribution is, and how noise is joined to
data. Points are rows [B, d] of one stream. A configuration may name another space by a subclass, as
`benchmarks.methods.euclidean` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from geoflow_fast import geometry, ops
from geoflow_fast.noise import base_noise
from geoflow_fast.ops.tangent_step import tangent_ab2_rows, tangent_stage_rows, tangent_step_rows

Interpolant = tuple[Tensor, Tensor, Tensor, Tensor]
"""Image and text points, then their velocities."""


class GuidedVelocity(NamedTuple):
    """The velocity v + guidance (v - free), or `v` without `free`, which the step that follows it computes."""

    v: Tensor
    free: Tensor | None = None
    guidance: float = 0.0


Velocity = Tensor | GuidedVelocity
"""A velocity [B, d] to follow. It need not be tangent: a step takes its tangent part."""


def _parts(v: Velocity) -> GuidedVelocity:
    return v if isinstance(v, GuidedVelocity) else GuidedVelocity(v)


class Sphere:
    """The unit sphere with its geodesics and a uniform base distribution."""

    unit_norm = True
    """All points have unit norm."""

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        """The tangent part of `v` [..., B, d] at the points `x` [B, d]."""
        return geometry.tangent_part(x, v)

    def step(self, x: Tensor, v: Velocity, h: float) -> Tensor:
        """Where the geodesic that leaves `x` with velocity `v` is after a time `h`."""
        v, free, guidance = _parts(v)
        return tangent_step_rows(x, v, h, free, guidance, False, "auto")

    def step_and_normalise(self, x: Tensor, v: Velocity, h: float, at: Tensor | None = None) -> Tensor:
        """x + h u, scaled to unit norm, where u is the part of `v` tangent at the points `at`, or `x`.
        Velocities taken at other points may be combined here as they are: the field extended along rays is smooth, so a
        Runge-Kutta method keeps its order."""
        v, free, guidance = _parts(v)
        return tangent_stage_rows(x, x if at is None else at, v, h, free, guidance, None, 0.0, "auto")[0]

    def runge_kutta_stage(
        self, x: Tensor, v: Velocity, h: float, at: Tensor, total: Tensor, weight: float
    ) -> tuple[Tensor, Tensor]:
        """`step_and_normalise`, and total + weight u, by which a Runge-Kutta method adds its velocities up."""
        v, free, guidance = _parts(v)
        return tangent_stage_rows(x, at, v, h, free, guidance, total, weight, "auto")

    def adams_bashforth_step(
        self, x: Tensor, v: Velocity, h: float, carried: Tensor | None, share: float
    ) -> tuple[Tensor, Tensor]:
        """Where the geodesic that leaves `x` with velocity u + share (u - carried) is after a time `h`, u being the
        tangent part of `v`, and u carried along it. Without `carried` the velocity is u."""
        v, free, guidance = _parts(v)
        return tangent_ab2_rows(x, v, h, free, guidance, carried, share, "auto")

    def tangent_dim(self, d: int) -> int:
        """Dimension of the tangent space at points with `d` coordinates."""
        return d - 1

    def base_sample(self, n: int, d: int, kind: str = "iid", generator: torch.Generator | None = None) -> Tensor:
        """`n` points [n, d] of the base distribution, float32 on the CPU; `kind` as in `noise.base_noise`."""
        return base_noise(n, d, kind, generator=generator)

    def from_normal(self, x: Tensor) -> Tensor:
        """Points of the base distribution made from rows `x` [B, d] of independent standard normal numbers."""
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)

    def log_base(self, x: Tensor) -> Tensor:
        """Log-density [B] of the base distribution at `x`, float64."""
        return torch.full((len(x),), -geometry.log_area(x.shape[1]), dtype=torch.float64, device=x.device)

    def interpolant(
        self,
        noise: tuple[Tensor, Tensor],
        data: tuple[Tensor, Tensor],
        t: Tensor,
        codes: Tensor,
        drop: Tensor,
        *,
        check: bool = True,
    ) -> Interpolant:
        """Points and velocities at times `t` [B] between noise and data (image, text), for rows of the directions
        `codes` [B]. A given stream stays at its data, or at its noise where `drop` [B] is true. `check=False` is for
        values that are known to be right."""
        return ops.masked_interpolant(*noise, *data, t, codes, drop=drop, check=check)

    def velocity_losses(
        self,
        outputs: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        points: tuple[Tensor, Tensor],
        codes: Tensor,
    ) -> Tensor:
        """Squared error [B] of the network's outputs (image, text), summed over the generated streams."""
        return ops.flow_loss(*outputs, *target, *points, codes)[1]


SPHERE = Sphere()


def manifold_of(field: object) -> Sphere:
    """The manifold a velocity field lives on: the sphere, unless its configuration has another."""
    return getattr(getattr(field, "config", None), "manifold", SPHERE)
