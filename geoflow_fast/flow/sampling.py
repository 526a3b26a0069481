"""Samples of the flow: pairs, or one side given the other, with guidance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.solvers import (
    Field,
    Points,
    Streams,
    eval_mode,
    evaluation_times,
    geometry_of,
    integrate,
    time_grid,
)
from geoflow_fast.geometry import check_rows
from geoflow_fast.noise import base_noise
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.progress import Advance

ROWS_AT_ONCE = 512
"""Network rows that go through the solver together: enough to keep matrix products at the processor's peak, few enough
for activations to stay in the cache and in memory that the allocator hands out again. Does not change results."""


def _base_points(n: int, d: int, kind: str, generator: torch.Generator | None, geometry: str) -> Tensor:
    """Samples of the base law: uniform on the sphere, or for the Euclidean twin Gaussian with the same directions."""
    points = base_noise(n, d, kind, generator=generator)
    if geometry == "sphere":
        return points
    return points * torch.randn(n, d, generator=generator).norm(dim=1, keepdim=True)


@dataclass(frozen=True)
class Solve:
    """How trajectories are followed: `n_steps` steps of `solver` on the time grid `grid`, under `guidance`."""

    n_steps: int = 50
    solver: str = "euler"
    grid: str = "uniform"
    guidance: float = 3.0

    def __post_init__(self) -> None:
        evaluation_times(time_grid(self.n_steps, kind=self.grid), self.solver)
        object.__setattr__(self, "guidance", checks.number(self.guidance, "guidance", least=0.0, most=1e6))


def sample(
    flow: Field,
    *,
    image: Tensor | None = None,
    text: Tensor | None = None,
    n_samples: int = 50,
    n_steps: int = 50,
    guidance: float = 3.0,
    solver: str = "euler",
    grid: str = "uniform",
    noise: str = "iid",
    generator: torch.Generator | None = None,
    dims: tuple[int, int] | None = None,
) -> Streams:
    """Draws samples from the flow and returns (image, text).

    Given `text` [Q, d_T], unit rows, it returns M = `n_samples` images for each of them, [Q, M, d_I], and the text as
    given; given `image`, the other way round; given neither, M pairs, [M, d_I] and [M, d_T].

    The ODE is solved in `n_steps` steps of `solver` ("euler", "midpoint", "rk4" or "ab2") on the time grid `grid`:
    "uniform", or with shorter steps near the noise ("early") or near the data ("late"). Conditional samples follow
    v = v_c + guidance (v_c - v_u), where v_u sees noise in place of the condition: a guidance of 0 samples the learned
    conditional distribution itself, larger values sharpen it.

    `noise`: "iid"; "orthogonal", within blocks of d points; or "antithetic", pairs of opposite points. All queries
    start from the same M noise points, so that differences between them are not due to noise, and results do not depend
    on how queries are batched. `dims` (image, text) is needed only for a field that is not a `GeoFlow`.
    """
    if image is not None and text is not None:
        raise ValueError("give image or text, not both; gf.log_density scores a pair")
    if n_samples < 1:
        raise ValueError(f"n_samples must be at least 1, got {n_samples}")
    solve = Solve(n_steps, solver, grid, guidance)
    widths = _flow_dims(flow, dims)
    if image is None and text is None:
        return _sample_joint(flow, n_samples, widths, solve, noise, generator)
    direction, given = ("t2i", text) if image is None else ("i2t", image)
    given = checks.with_values(given, "text" if image is None else "image")
    if isinstance(flow, GeoFlow):
        flow.check_dtype("text" if image is None else "image", given)
    start = StartingPoints.draw(n_samples, widths, direction, noise, generator, geometry_of(flow))
    generated = sample_conditional(flow, given, direction, start.to(given), solve)
    return (generated, given) if direction == "t2i" else (given, generated)


def _flow_dims(flow: Field, dims: tuple[int, int] | None) -> tuple[int, int]:
    if isinstance(flow, GeoFlow):
        return flow.config.flow_dims
    if dims is None:
        raise ValueError(f"dims=(image, text) is needed to sample from a {type(flow).__name__}")
    return dims


@dataclass(frozen=True)
class StartingPoints:
    """Noise that every query shares: starts of the generated stream, and what the unguided field sees as condition."""

    generated: Tensor
    """[M, d of the generated stream]."""
    condition: Tensor
    """[M, d of the given stream]."""

    @classmethod
    def draw(
        cls,
        n: int,
        widths: tuple[int, int],
        direction: str,
        noise: str,
        generator: torch.Generator | None,
        geometry: str = "sphere",
    ) -> StartingPoints:
        """A function of the generator's state alone, whatever the queries and the device are; on the CPU, float32."""
        moving, given = widths if direction == "t2i" else widths[::-1]
        return cls(*(_base_points(n, d, noise, generator, geometry) for d in (moving, given)))

    def to(self, like: Tensor) -> StartingPoints:
        """The same points with the device and dtype of `like`."""
        return StartingPoints(self.generated.to(like), self.condition.to(like))


@torch.no_grad()
def sample_conditional(
    flow: Field,
    given: Tensor,
    direction: str,
    start: StartingPoints,
    solve: Solve,
    advance: Advance = lambda _: None,
) -> Tensor:
    """Embeddings [Q, M, d] of the generated stream for conditions `given` [Q, d']; `advance` counts done queries."""
    if given.dim() != 2:
        raise ValueError(f"conditions must be [Q, d], got {tuple(given.shape)}")
    check_rows(given, "text" if direction == "t2i" else "image")
    draws = len(start.generated)
    if len(given) == 0:
        return start.generated.new_empty(0, draws, _from_flow_coordinates(flow, start.generated, direction).shape[1])
    at_once = max(1, ROWS_AT_ONCE // (draws if solve.guidance == 0 else 2 * draws))
    geometry = geometry_of(flow)
    times = time_grid(solve.n_steps, kind=solve.grid)
    parts = []
    with eval_mode(flow):
        rates = GuidedRate(_evaluator(flow, direction, solve), start, solve.guidance)
        for queries in _in_flow_coordinates(flow, given, direction).split(at_once):
            points = (start.generated.repeat(len(queries), 1),)
            (end,) = integrate(rates.of(queries), points, times, solver=solve.solver, geometry=geometry)
            parts.append(_from_flow_coordinates(flow, end, direction).unflatten(0, (len(queries), draws)))
            advance(len(queries))
    return torch.cat(parts)


class GuidedRate:
    """v_c + guidance (v_c - v_u) for batches of queries; v_c and v_u go through the network as one batch.

    At t=0 every query stands at the same points, where v_u is therefore the same for all: it is computed once.
    """

    def __init__(
        self, velocity: Callable[[Tensor, Tensor, float], Tensor], start: StartingPoints, guidance: float
    ) -> None:
        self.velocity, self.start, self.guidance = velocity, start, guidance
        self.free_at_start = velocity(start.generated, start.condition, 0.0) if guidance > 0 else None

    def of(self, queries: Tensor) -> Callable[[Points, float, float], Points]:
        """The rate of `integrate` for the M points of each of the queries [Q, d]."""
        condition = queries.repeat_interleave(len(self.start.generated), 0)
        both = torch.cat((condition, self.start.condition.repeat(len(queries), 1)))

        def rate(point: Points, t: float, weight: float) -> Points:  # noqa: ARG001
            if self.free_at_start is None:
                return (self.velocity(point[0], condition, t),)
            if t == 0:
                conditional = self.velocity(point[0], condition, t)
                free = self.free_at_start.repeat(len(queries), 1)
            else:
                conditional, free = self.velocity(point[0].repeat(2, 1), both, t).chunk(2)
            return (torch.add(conditional, conditional - free, alpha=self.guidance),)

        return rate


def _evaluator(flow: Field, direction: str, solve: Solve) -> Callable[[Tensor, Tensor, float], Tensor]:
    """(generated, given, t) -> velocity of the generated stream; modulations of all the solve's times are made once."""
    side = 0 if direction == "t2i" else 1
    modulation: dict[float, Tensor] = {}
    if isinstance(flow, GeoFlow):
        times = evaluation_times(time_grid(solve.n_steps, kind=solve.grid), solve.solver)
        parameter = next(flow.parameters())
        stacked = flow.modulations(torch.tensor(times, dtype=parameter.dtype, device=parameter.device), direction)
        modulation = dict(zip(times, stacked))

    def velocity(generated: Tensor, given: Tensor, t: float) -> Tensor:
        image, text = (generated, given) if side == 0 else (given, generated)
        if isinstance(flow, GeoFlow):
            return flow.modulated_velocity(image, text, modulation[t], direction)[side]
        return flow.velocity(image, text, t, direction)[side]

    return velocity


@torch.no_grad()
def _sample_joint(
    flow: Field,
    n: int,
    widths: tuple[int, int],
    solve: Solve,
    noise: str,
    generator: torch.Generator | None,
) -> Streams:
    parameter = next(flow.parameters()) if isinstance(flow, nn.Module) else torch.empty(0)
    image, text = (_base_points(n, d, noise, generator, geometry_of(flow)).to(parameter) for d in widths)
    times = time_grid(solve.n_steps, kind=solve.grid)

    def rate(point: Points, t: float, weight: float) -> Points:  # noqa: ARG001
        return flow.velocity(point[0], point[1], t, "joint")

    with eval_mode(flow):
        image, text = integrate(rate, (image, text), times, solver=solve.solver, geometry=geometry_of(flow))
    return _from_flow_coordinates(flow, image, "t2i"), _from_flow_coordinates(flow, text, "i2t")


def _in_flow_coordinates(flow: Field, given: Tensor, direction: str) -> Tensor:
    if not isinstance(flow, GeoFlow):
        return given
    image, text = flow.to_flow(text=given) if direction == "t2i" else flow.to_flow(image=given)
    found = text if direction == "t2i" else image
    assert found is not None
    return found


def _from_flow_coordinates(flow: Field, generated: Tensor, direction: str) -> Tensor:
    if not isinstance(flow, GeoFlow):
        return generated
    image, text = flow.from_flow(image=generated) if direction == "t2i" else flow.from_flow(text=generated)
    found = image if direction == "t2i" else text
    assert found is not None
    return found
