"""Flat space in place of the sphere: the manifold and the configuration of GeoFlow's Euclidean twin."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.directions import Direction
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.manifolds import GuidedVelocity, Interpolant, Sphere, Velocity
from geoflow_fast.noise import base_noise


class Euclidean(Sphere):
    """Flat space with straight lines and a standard normal base distribution."""

    unit_norm = False

    def project(self, x: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return v

    def step(self, x: Tensor, v: Velocity, h: float) -> Tensor:
        return torch.add(x, self._velocity(v), alpha=h)

    def step_and_normalise(self, x: Tensor, v: Velocity, h: float, at: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.step(x, v, h)

    def runge_kutta_stage(
        self,
        x: Tensor,
        v: Velocity,
        h: float,
        at: Tensor,  # noqa: ARG002
        total: Tensor,
        weight: float,
    ) -> tuple[Tensor, Tensor]:
        u = self._velocity(v)
        return torch.add(x, u, alpha=h), torch.add(total, u, alpha=weight)

    def adams_bashforth_step(
        self, x: Tensor, v: Velocity, h: float, carried: Tensor | None, share: float
    ) -> tuple[Tensor, Tensor]:
        u = self._velocity(v)
        return torch.add(x, u if carried is None else torch.add(u, u - carried, alpha=share), alpha=h), u

    @staticmethod
    def _velocity(v: Velocity) -> Tensor:
        v, free, guidance = v if isinstance(v, GuidedVelocity) else GuidedVelocity(v)
        return v if free is None else torch.add(v, v - free, alpha=guidance)

    def tangent_dim(self, d: int) -> int:
        return d

    def base_sample(self, n: int, d: int, kind: str = "iid", generator: torch.Generator | None = None) -> Tensor:
        points = base_noise(n, d, kind, generator=generator)
        normal = torch.randn(n, d, generator=generator, dtype=torch.float32, device="cpu")
        return points * normal.norm(dim=1, keepdim=True)

    def from_normal(self, x: Tensor) -> Tensor:
        return x

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


EUCLIDEAN = Euclidean()


@dataclass(frozen=True)
class EuclideanConfig(GeoFlowConfig):
    """The architecture of a flow along straight lines with a Gaussian base distribution. The network is the same."""

    geometry: str = "euclidean"
    """Tells its files and digests from those of a flow on the sphere."""

    @functools.cached_property
    def manifold(self) -> Sphere:
        """Flat space."""
        return EUCLIDEAN


def twin_of(config: GeoFlowConfig) -> EuclideanConfig:
    """The configuration of the Euclidean twin."""
    return EuclideanConfig(**dataclasses.asdict(config))
