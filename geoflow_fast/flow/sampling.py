"""Samples of the flow: pairs, or one side given the other, with guidance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.solvers import (
    GRIDS,
    SOLVERS,
    Field,
    Points,
    Streams,
    eval_mode,
    evaluation_times,
    integrate,
    time_grid,
)
from geoflow_fast.geometry import check_rows
from geoflow_fast.manifolds import SPHERE, Manifold, manifold_of
from geoflow_fast.noise import NOISE_KINDS
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.progress import Advance
from geoflow_fast.runtime.settings import Settings, settings_from

ROWS_AT_ONCE = 512
"""Network rows that go through the solver together: enough to keep matrix products at the processor's peak, few enough
for activations to stay in the cache and in memory that the allocator hands out again. Does not change results."""


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """How samples are drawn.

    `n_samples` samples for each condition; `n_steps` steps of `solver` on the time grid `grid`; `guidance`; and the
    kind of `noise` they start from. `sample` describes them. The defaults are the paper's.
    """

    KEYWORDS = ("n_samples", "n_steps", "guidance")

    n_samples: int = 50
    n_steps: int = 50
    guidance: float = 3.0
    solver: str = "euler"
    grid: str = "uniform"
    noise: str = "iid"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_samples", checks.integer(self.n_samples, "n_samples", least=1))
        object.__setattr__(self, "n_steps", checks.integer(self.n_steps, "n_steps", 1))
        object.__setattr__(self, "guidance", checks.number(self.guidance, "guidance", least=0.0, most=1e6))
        for name, known in (("solver", SOLVERS), ("grid", GRIDS), ("noise", NOISE_KINDS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    @property
    def times(self) -> Tensor:
        """The time grid [n_steps + 1]."""
        return time_grid(self.n_steps, kind=self.grid)


FAST_SAMPLING = SamplingSettings(n_samples=40, n_steps=8, solver="ab2", grid="late", noise="antithetic")
"""The cheapest setting with which `RetrievalEntropy` ranks queries no worse than with the paper's (docs/entropy.md)."""


def sample(
    flow: Field,
    *,
    image: Tensor | None = None,
    text: Tensor | None = None,
    n_samples: int | None = None,
    n_steps: int | None = None,
    guidance: float | None = None,
    solver: str | None = None,
    generator: torch.Generator | None = None,
    dims: tuple[int, int] | None = None,
    settings: SamplingSettings | None = None,
    **deprecated: Any,
) -> Streams:
    """Draws samples from the flow and returns (image, text).

    Given `text` [Q, d_T], unit rows, it returns M = `n_samples` images for each of them, [Q, M, d_I], and the text as
    given; given `image`, the other way round; given neither, M pairs, [M, d_I] and [M, d_T].

    The ODE is solved in `n_steps` steps of `solver` ("euler", "midpoint", "rk4" or "ab2") on the time grid `grid`:
    "uniform", or with shorter steps near the noise ("early") or near the data ("late"). Conditional samples follow
    v = v_c + guidance (v_c - v_u), where v_u sees noise in place of the condition: a guidance of 0 samples the learned
    conditional distribution itself, larger values sharpen it.

    `settings` holds the same and more; a keyword that is given overrides it. Its `noise` is "iid"; "orthogonal" within
    blocks of d points; or "antithetic", pairs of opposite points. All queries start from the same M noise points, so
    that differences between them are not due to noise, and results do not depend on how queries are batched. `dims`
    (image, text) is needed only for a field that is not a `GeoFlow`.
    """
    if image is not None and text is not None:
        raise ValueError("give image or text, not both; gf.log_density scores a pair")
    keywords = {"n_samples": n_samples, "n_steps": n_steps, "guidance": guidance, "solver": solver}
    settings = settings_from(SamplingSettings(), settings, deprecated, "sample", **keywords)
    widths = _flow_dims(flow, dims)
    if image is None and text is None:
        return _sample_joint(flow, widths, settings, generator)
    direction, given = ("t2i", text) if image is None else ("i2t", image)
    given = checks.with_values(given, "text" if image is None else "image")
    if isinstance(flow, GeoFlow):
        flow.check_dtype("text" if image is None else "image", given)
    start = StartingPoints.draw(settings, widths, direction, generator, manifold_of(flow))
    generated = sample_conditional(flow, given, direction, start.to(given), settings)
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
        settings: SamplingSettings,
        widths: tuple[int, int],
        direction: str,
        generator: torch.Generator | None,
        manifold: Manifold = SPHERE,
    ) -> StartingPoints:
        """Draws the points on the CPU, float32: they depend on the generator's state alone, not on queries or device.
        `widths` are those of image and text."""
        n, kind, direction = settings.n_samples, settings.noise, Direction.of(direction, conditional=True)
        generated = manifold.base_sample(n, direction.items(*widths), kind, generator)
        return cls(generated, manifold.base_sample(n, direction.queries(*widths), kind, generator))

    def to(self, like: Tensor) -> StartingPoints:
        """The same points with the device and dtype of `like`."""
        return StartingPoints(self.generated.to(like), self.condition.to(like))


@torch.no_grad()
def sample_conditional(
    flow: Field,
    given: Tensor,
    direction: str,
    start: StartingPoints,
    settings: SamplingSettings,
    advance: Advance | None = None,
) -> Tensor:
    """Embeddings [Q, M, d] of the generated stream for conditions `given` [Q, d']; `advance` counts done queries."""
    if given.dim() != 2:
        raise ValueError(f"conditions must be [Q, d], got {tuple(given.shape)}")
    check_rows(given, "text" if direction == "t2i" else "image")
    draws = len(start.generated)
    if len(given) == 0:
        return start.generated.new_empty(0, draws, _from_flow_coordinates(flow, start.generated, direction).shape[1])
    at_once = max(1, ROWS_AT_ONCE // (draws if settings.guidance == 0 else 2 * draws))
    manifold, times = manifold_of(flow), settings.times
    parts = []
    with eval_mode(flow):
        rates = GuidedRate(_evaluator(flow, direction, settings), start, settings.guidance)
        for queries in _in_flow_coordinates(flow, given, direction).split(at_once):
            points = (start.generated.repeat(len(queries), 1),)
            (end,) = integrate(rates.of(queries), points, times, solver=settings.solver, manifold=manifold)
            parts.append(_from_flow_coordinates(flow, end, direction).unflatten(0, (len(queries), draws)))
            if advance is not None:
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


def _evaluator(flow: Field, direction: str, settings: SamplingSettings) -> Callable[[Tensor, Tensor, float], Tensor]:
    """(generated, given, t) -> velocity of the generated stream; modulations of all the solve's times are made once."""
    side = 0 if direction == "t2i" else 1
    modulation: dict[float, Tensor] = {}
    if isinstance(flow, GeoFlow):
        times = evaluation_times(settings.times, settings.solver)
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
    flow: Field, widths: tuple[int, int], settings: SamplingSettings, generator: torch.Generator | None
) -> Streams:
    parameter = next(flow.parameters()) if isinstance(flow, nn.Module) else torch.empty(0)
    manifold, n, kind = manifold_of(flow), settings.n_samples, settings.noise
    image, text = (manifold.base_sample(n, d, kind, generator).to(parameter) for d in widths)

    def rate(point: Points, t: float, weight: float) -> Points:  # noqa: ARG001
        return flow.velocity(point[0], point[1], t, "joint")

    with eval_mode(flow):
        image, text = integrate(rate, (image, text), settings.times, solver=settings.solver, manifold=manifold)
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
