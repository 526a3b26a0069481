"""The spaces a flow can live on: a product of unit spheres, or flat space for its Euclidean twin.

A manifold knows how to project velocities, how to follow them, what its base distribution is, and how noise is joined
to data. Points are rows [B, d] of one stream.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from geoflow_fast import geometry, ops
from geoflow_fast.directions import Direction
from geoflow_fast.noise import base_noise
from geoflow_fast.ops.tangent_step import tangent_ab2_rows, tangent_stage_rows, tangent_step_rows

Interpolant = tuple[Tensor, Tensor, Tensor, Tensor]
"""Image and text points, then their velocities."""


class Guided(NamedTuple):
    """The velocity v + guidance (v - free), or `v` without `free`, which the step that follows it computes."""

    v: Tensor
    free: Tensor | None = None
    guidance: float = 0.0


Motion = Tensor | Guided
"""A velocity [B, d] to follow. It need not be tangent: a step takes its tangent part."""


def _parts(v: Motion) -> Guided:
    return v if isinstance(v, Guided) else Guided(v)


class Manifold(ABC):
    """What a flow, its solvers and its training need to know about the space of one stream."""

    name: str
    unit_norm: bool
    """True if all points have unit norm."""

    @abstractmethod
    def project(self, x: Tensor, v: Tensor) -> Tensor:
        """The tangent part of `v` [..., B, d] at the points `x` [B, d]."""

    @abstractmethod
    def step(self, x: Tensor, v: Motion, h: float) -> Tensor:
        """Where the geodesic that leaves `x` with velocity `v` is after a time `h`."""

    @abstractmethod
    def retract(self, x: Tensor, v: Motion, h: float, at: Tensor | None = None) -> Tensor:
        """x + h u, brought back to the manifold, where u is the part of `v` tangent at the points `at`, or `x`.
        Velocities taken at other points may be combined here as they are: the field extended along rays is smooth, so a
        Runge-Kutta method keeps its order."""

    def retract_all(
        self, points: Sequence[Tensor], velocities: Sequence[Motion], h: float, at: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """`retract` for one tensor [B, d] per stream."""
        if at is None:
            return tuple(self.retract(x, v, h) for x, v in zip(points, velocities))
        return tuple(self.retract(x, v, h, y) for x, v, y in zip(points, velocities, at))

    @abstractmethod
    def stage(self, x: Tensor, v: Motion, h: float, at: Tensor, total: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """`retract`, and total + weight u, by which a Runge-Kutta method adds its velocities up."""

    @abstractmethod
    def multistep(self, x: Tensor, v: Motion, h: float, carried: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
        """Where the geodesic that leaves `x` with velocity u + share (u - carried) is after a time `h`, u being the
        tangent part of `v`, and u carried along it. Without `carried` the velocity is u."""

    @abstractmethod
    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Length [B] of the geodesic between points."""

    @abstractmethod
    def freedom(self, d: int) -> int:
        """Dimension of the tangent space at points with `d` coordinates."""

    @abstractmethod
    def base_sample(self, n: int, d: int, kind: str = "iid", generator: torch.Generator | None = None) -> Tensor:
        """`n` points [n, d] of the base distribution, float32 on the CPU; `kind` as in `noise.base_noise`."""

    @abstractmethod
    def from_normal(self, x: Tensor) -> Tensor:
        """Points of the base distribution made from rows `x` [B, d] of independent standard normal numbers."""

    @abstractmethod
    def log_base(self, x: Tensor) -> Tensor:
        """Log-density [B] of the base distribution at `x`, float64."""

    @abstractmethod
    def curvature(self, x: Tensor, f: Tensor) -> Tensor | float:
        """What to add to the trace of the Jacobian of a field f over the tangent space at `x` for the divergence of its
        tangent part: float64 [B], from the values `f` [B, d] of the field."""

    @abstractmethod
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

    @abstractmethod
    def velocity_losses(
        self,
        outputs: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        points: tuple[Tensor, Tensor],
        codes: Tensor,
    ) -> Tensor:
        """Squared error [B] of the network's outputs (image, text), summed over the generated streams."""


class Sphere(Manifold):
    """The unit sphere with its geodesics and a uniform base distribution."""

    name = "sphere"
    unit_norm = True

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return geometry.tangent_part(x, v)

    def step(self, x: Tensor, v: Motion, h: float) -> Tensor:
        v, free, guidance = _parts(v)
        return tangent_step_rows(x, v, h, free, guidance, False, "auto")

    def retract(self, x: Tensor, v: Motion, h: float, at: Tensor | None = None) -> Tensor:
        v, free, guidance = _parts(v)
        return tangent_stage_rows(x, x if at is None else at, v, h, free, guidance, None, 0.0, "auto")[0]

    def stage(self, x: Tensor, v: Motion, h: float, at: Tensor, total: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        v, free, guidance = _parts(v)
        return tangent_stage_rows(x, at, v, h, free, guidance, total, weight, "auto")

    def multistep(self, x: Tensor, v: Motion, h: float, carried: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
        v, free, guidance = _parts(v)
        return tangent_ab2_rows(x, v, h, free, guidance, carried, share, "auto")

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        return geometry.angle(a, b)

    def freedom(self, d: int) -> int:
        return d - 1

    def base_sample(self, n: int, d: int, kind: str = "iid", generator: torch.Generator | None = None) -> Tensor:
        return base_noise(n, d, kind, generator=generator)

    def from_normal(self, x: Tensor) -> Tensor:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)

    def curvature(self, x: Tensor, f: Tensor) -> Tensor:
        return (1 - x.shape[1]) * (x.double() * f.double()).sum(-1)

    def log_base(self, x: Tensor) -> Tensor:
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
        return ops.masked_interpolant(*noise, *data, t, codes, drop=drop, check=check)

    def velocity_losses(
        self,
        outputs: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        points: tuple[Tensor, Tensor],
        codes: Tensor,
    ) -> Tensor:
        return ops.flow_loss(*outputs, *target, *points, codes)[1]


class Euclidean(Manifold):
    """Flat space with straight lines and a standard normal base distribution."""

    name = "euclidean"
    unit_norm = False

    def project(self, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return v

    def step(self, x: Tensor, v: Motion, h: float) -> Tensor:
        return torch.add(x, self._velocity(v), alpha=h)

    def retract(self, x: Tensor, v: Motion, h: float, at: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.step(x, v, h)

    def stage(
        self,
        x: Tensor,
        v: Motion,
        h: float,
        at: Tensor,  # noqa: ARG002
        total: Tensor,
        weight: float,
    ) -> tuple[Tensor, Tensor]:
        u = self._velocity(v)
        return torch.add(x, u, alpha=h), torch.add(total, u, alpha=weight)

    def multistep(self, x: Tensor, v: Motion, h: float, carried: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
        u = self._velocity(v)
        return torch.add(x, u if carried is None else torch.add(u, u - carried, alpha=share), alpha=h), u

    @staticmethod
    def _velocity(v: Motion) -> Tensor:
        v, free, guidance = _parts(v)
        return v if free is None else torch.add(v, v - free, alpha=guidance)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.vector_norm(a - b, dim=-1)

    def freedom(self, d: int) -> int:
        return d

    def base_sample(self, n: int, d: int, kind: str = "iid", generator: torch.Generator | None = None) -> Tensor:
        points = base_noise(n, d, kind, generator=generator)
        normal = torch.randn(n, d, generator=generator, dtype=torch.float32, device="cpu")
        return points * normal.norm(dim=1, keepdim=True)

    def from_normal(self, x: Tensor) -> Tensor:
        return x

    def curvature(self, x: Tensor, f: Tensor) -> float:  # noqa: ARG002
        return 0.0

    def log_base(self, x: Tensor) -> Tensor:
        return -0.5 * x.double().square().sum(1) - x.shape[1] / 2 * math.log(2 * math.pi)

    def interpolant(
        self,
        noise: tuple[Tensor, Tensor],
        data: tuple[Tensor, Tensor],
        t: Tensor,
        codes: Tensor,
        drop: Tensor,
        *,
        check: bool = True,  # noqa: ARG002
    ) -> Interpolant:
        points, velocities = [], []
        for start, end, given_in in zip(noise, data, (Direction.I2T, Direction.T2I)):
            given = (codes == given_in.code).unsqueeze(-1)
            shown = torch.where(drop.unsqueeze(-1), start, end)
            points.append(torch.where(given, shown, torch.lerp(start, end, t.unsqueeze(-1))))
            velocities.append(torch.where(given, 0.0, end - start))
        return points[0], points[1], velocities[0], velocities[1]

    def velocity_losses(
        self,
        outputs: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        points: tuple[Tensor, Tensor],  # noqa: ARG002
        codes: Tensor,  # noqa: ARG002
    ) -> Tensor:
        return sum((out - v).square().sum(-1) for out, v in zip(outputs, target))  # type: ignore[return-value]


SPHERE, EUCLIDEAN = Sphere(), Euclidean()
MANIFOLDS: dict[str, Manifold] = {manifold.name: manifold for manifold in (SPHERE, EUCLIDEAN)}


def manifold_of(field: object) -> Manifold:
    """The manifold a velocity field lives on: the sphere, unless its configuration names another."""
    return MANIFOLDS[getattr(getattr(field, "config", None), "geometry", Sphere.name)]
