"""The velocity network and its divergence, one evaluation at one time, as solvers ask for them, and the step of a
solver; float32.

Work: two operations per weight and row; the divergence takes a tangent through the same weights; a step reads and
writes its tensors once. Peers: the network in plain torch, its derivative by autograd (vector-Jacobian product) and by
torch.func.jvp, and guidance, projection and step as separate torch operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import twins
from benchmarks.flows import random_flow, row_flops
from benchmarks.limits import Work
from benchmarks.suite import PEER, Case, Contender, Scaling
from geoflow_fast.geometry import exp_map, log_area, parallel_transport, project_tangent
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.reverse_ode import draw_seed
from geoflow_fast.manifolds import SPHERE
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.tangent_step import tangent_ab2_rows

TIME = 0.5
ONE_STEP = gf.DensitySettings(n_steps=1, solver="euler", tangents="combined", probe="gaussian", orthogonal="none")


@dataclass(frozen=True)
class Rows:
    """A network, its plain twin, and pairs."""

    flow: gf.GeoFlow
    plain: twins.PlainFlow
    image: Tensor
    text: Tensor

    @classmethod
    def draw(cls, config: gf.GeoFlowConfig, rows: int) -> Rows:
        flow = random_flow(config)
        plain = twins.PlainFlow(flow).eval().requires_grad_(False)
        return cls(flow, plain, *(sample_uniform(rows, d) for d in config.flow_dims))

    @property
    def codes(self) -> Tensor:
        return torch.zeros(len(self.image), dtype=torch.int8)

    def velocity(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.flow.velocity(self.image, self.text, TIME, "joint")

    def plain_velocity(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(self.plain(self.image, self.text, torch.full((len(self.image),), TIME), self.codes))

    def probes(self) -> tuple[Tensor, Tensor]:
        """Those that `log_density` draws from a generator of seed 3."""
        seed = int(draw_seed(torch.Generator().manual_seed(3), self.image))
        drawn = Probes(seed, torch.arange(len(self.image)), ONE_STEP, SPHERE)
        return drawn.draw(0, 0, self.image)[0], drawn.draw(0, 1, self.text)[0]

    def divergence(self) -> Tensor:
        """-e^T J e at t=1, from a log-density of one Euler step."""
        generator = torch.Generator().manual_seed(3)
        log_densities = gf.log_density(
            self.flow, self.image, self.text, "joint", generator=generator, settings=ONE_STEP
        )
        return log_densities + log_area(self.image.shape[1]) + log_area(self.text.shape[1])

    def divergence_by_vjp(self) -> Tensor:
        points = [x.detach().requires_grad_() for x in (self.image, self.text)]
        probes = self.probes()
        velocity = self.plain(*points, torch.ones(len(self.image)), self.codes)
        along = sum((v * e).sum() for v, e in zip(velocity, probes))
        pulled = torch.autograd.grad(along, points)
        return -sum((g * e).sum(1) for g, e in zip(pulled, probes))

    def divergence_by_jvp(self) -> Tensor:
        probes, times = self.probes(), torch.ones(len(self.image))
        call = lambda image, text: tuple(self.plain(image, text, times, self.codes))  # noqa: E731
        _, pushed = torch.func.jvp(call, (self.image, self.text), probes)
        return -sum((g * e).sum(1) for g, e in zip(pushed, probes))


@dataclass(frozen=True)
class Step:
    """Points, and what a guided Adams-Bashforth step needs beside them: two velocities and the one carried along."""

    x: Tensor
    v: Tensor
    free: Tensor
    carried: Tensor

    @classmethod
    def draw(cls, rows: int, width: int) -> Step:
        x, *velocities = sample_uniform(rows, width), *torch.randn(3, rows, width).div_(width**0.5)
        return cls(x, velocities[0], velocities[1], project_tangent(x, velocities[2]))

    def fused(self, backend: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        x, v, free, carried = (part.to(dtype) for part in (self.x, self.v, self.free, self.carried))
        return tangent_ab2_rows(x, v, 0.1, free, 3.0, carried, 0.6, backend)

    def separate(self) -> tuple[Tensor, Tensor]:
        """Projections of both velocities, guidance, the combination with the last velocity, the step, transport."""
        v, free = project_tangent(self.x, self.v), project_tangent(self.x, self.free)
        u = torch.add(v, v - free, alpha=3.0)
        y = exp_map(self.x, 0.1 * torch.add(u, u - self.carried, alpha=0.6))
        return y, parallel_transport(self.x, y, u)


def close(result: Any, truth: Any) -> bool:
    return all(torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3) for a, b in zip(result, truth))


VELOCITY = (
    Contender("torch", Rows.plain_velocity, PEER),
    Contender("geoflow_fast", Rows.velocity),
)
DIVERGENCE = (
    Contender("torch, autograd vjp", Rows.divergence_by_vjp, PEER),
    Contender("torch.func.jvp", Rows.divergence_by_jvp, PEER),
    Contender("geoflow_fast", Rows.divergence),
)
STEP = (
    Contender("torch, separate operations", Step.separate, PEER),
    Contender("torch, reference", lambda s: s.fused("reference"), PEER),
    Contender("geoflow_fast", Step.fused),
)


def size_of(quick: bool) -> tuple[gf.GeoFlowConfig, int]:
    return (gf.GeoFlowConfig.small(256, 256), 128) if quick else (gf.GeoFlowConfig.paper(), 512)


def cases(quick: bool) -> list[Case]:
    config, rows = size_of(quick)
    flops = rows * row_flops(config, "joint")
    in_and_out = 16 * rows * sum(config.flow_dims)
    size = f"B = {rows}, d = {config.image_dim}, hidden = {config.hidden}"
    return [
        Case(
            f"Velocity, {size}",
            lambda: Rows.draw(config, rows),
            Rows.plain_velocity,
            close,
            VELOCITY,
            Work(flops=flops, bytes=in_and_out),
        ),
        Case(
            f"Velocity and divergence, {size}",
            lambda: Rows.draw(config, rows),
            Rows.divergence_by_vjp,
            close,
            DIVERGENCE,
            Work(flops=2 * flops, bytes=in_and_out),
        ),
        Case(
            f"Guided Adams-Bashforth step, B = {rows}, d = {config.image_dim}",
            lambda: Step.draw(rows, config.image_dim),
            lambda step: step.fused("reference", torch.float64),
            lambda result, truth: all(torch.allclose(a.double(), b, atol=2e-6) for a, b in zip(result, truth)),
            STEP,
            Work(bytes=24 * rows * config.image_dim),
        ),
    ]


def scalings(quick: bool) -> list[Scaling]:
    config, top = size_of(quick)

    def batch(rows: int) -> Callable[[], Any]:
        return Rows.draw(config, rows).velocity

    return [Scaling("Velocity", "B", (top // 4, top // 2, top, 2 * top), batch)]
