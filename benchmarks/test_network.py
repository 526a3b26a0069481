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
from benchmarks.cases import PEER, Case, Contender, Scaling, each, each_size
from benchmarks.inputs import Rows, row_flops
from benchmarks.limits import Work
from geoflow_fast.geometry import exp_map, log_area, parallel_transport, project_tangent
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.reverse_ode import draw_seed
from geoflow_fast.manifolds import SPHERE
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.tangent_step import tangent_ab2_rows

TIME = 0.5
ONE_STEP = gf.DensitySettings(n_steps=1, solver="euler", tangents="combined")


def codes(r: Rows) -> Tensor:
    return torch.zeros(len(r.image), dtype=torch.int8)


@torch.no_grad()
def velocity(r: Rows) -> tuple[Tensor, ...]:
    return r.flow.velocity(r.image, r.text, TIME, "joint")


@torch.no_grad()
def plain_velocity(r: Rows) -> tuple[Tensor, ...]:
    return tuple(r.plain(r.image, r.text, torch.full((len(r.image),), TIME), codes(r)))


def probes(r: Rows) -> tuple[Tensor, Tensor]:
    """Those that `log_density` draws from a generator of seed 3."""
    seed = int(draw_seed(torch.Generator().manual_seed(3), r.image))
    drawn = Probes(seed, torch.arange(len(r.image)), ONE_STEP, SPHERE)
    return drawn.draw(0, 0, r.image)[0], drawn.draw(0, 1, r.text)[0]


def divergence(r: Rows) -> Tensor:
    """-e^T J e at t=1, from a log-density of one Euler step."""
    generator = torch.Generator().manual_seed(3)
    log_densities = gf.log_density(r.flow, r.image, r.text, "joint", generator=generator, settings=ONE_STEP)
    return log_densities + log_area(r.image.shape[1]) + log_area(r.text.shape[1])


def divergence_by_vjp(r: Rows) -> Tensor:
    points = [x.detach().requires_grad_() for x in (r.image, r.text)]
    drawn = probes(r)
    velocity = r.plain(*points, torch.ones(len(r.image)), codes(r))
    along = sum((v * e).sum() for v, e in zip(velocity, drawn))
    pulled = torch.autograd.grad(along, points)
    return -sum((g * e).sum(1) for g, e in zip(pulled, drawn))


def divergence_by_jvp(r: Rows) -> Tensor:
    drawn, times = probes(r), torch.ones(len(r.image))
    call = lambda image, text: tuple(r.plain(image, text, times, codes(r)))  # noqa: E731
    _, pushed = torch.func.jvp(call, (r.image, r.text), drawn)
    return -sum((g * e).sum(1) for g, e in zip(pushed, drawn))


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
    Contender("torch", plain_velocity, PEER),
    Contender("geoflow_fast", velocity),
)
DIVERGENCE = (
    Contender("torch, autograd vjp", divergence_by_vjp, PEER),
    Contender("torch.func.jvp", divergence_by_jvp, PEER),
    Contender("geoflow_fast", divergence),
)
STEP = (
    Contender("torch, separate operations", Step.separate, PEER),
    Contender("torch, reference", lambda s: s.fused("reference"), PEER),
    Contender("geoflow_fast", Step.fused),
)


def cases(config: gf.GeoFlowConfig, rows: int, *, quick: bool = False) -> list[Case]:
    flops = rows * row_flops(config, "joint")
    in_and_out = 16 * rows * sum(config.flow_dims)
    size = f"B = {rows}, d = {config.image_dim}, hidden = {config.hidden}"
    return [
        Case(
            f"Velocity, {size}",
            lambda: Rows.draw(config, rows),
            plain_velocity,
            close,
            VELOCITY,
            Work(flops=flops, bytes=in_and_out),
            quick,
        ),
        Case(
            f"Velocity and divergence, {size}",
            lambda: Rows.draw(config, rows),
            divergence_by_vjp,
            close,
            DIVERGENCE,
            Work(flops=2 * flops, bytes=in_and_out),
            quick,
        ),
        Case(
            f"Guided Adams-Bashforth step, B = {rows}, d = {config.image_dim}",
            lambda: Step.draw(rows, config.image_dim),
            lambda step: step.fused("reference", torch.float64),
            lambda result, truth: all(torch.allclose(a.double(), b, atol=2e-6) for a, b in zip(result, truth)),
            STEP,
            Work(bytes=24 * rows * config.image_dim),
            quick,
        ),
    ]


CASES = (*cases(gf.GeoFlowConfig.small(256, 256), 128, quick=True), *cases(gf.GeoFlowConfig.paper(), 512))


def over_rows(rows: int) -> Callable[[], Any]:
    batch = Rows.draw(gf.GeoFlowConfig.paper(), rows)
    return lambda: velocity(batch)


@each(CASES)
def test_network(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each_size([Scaling("Velocity", "B", (128, 256, 512, 1024), over_rows)])
def test_growth(grow: Any, scaling: Scaling, size: int) -> None:
    grow(scaling, size)
