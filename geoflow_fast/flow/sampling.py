"""Draws samples from a flow: pairs, or one stream given the other, with guidance."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.directions import IMAGE, STREAMS, TEXT, Direction
from geoflow_fast.flow.fields import Field, FlowField, Streams, VelocityFunction, as_flow
from geoflow_fast.flow.precision import TF32
from geoflow_fast.flow.solvers import GRIDS, SOLVERS, Points, Rate, evaluation_times, integrate, time_grid
from geoflow_fast.geometry import check_rows
from geoflow_fast.manifolds import SPHERE, GuidedVelocity, Sphere
from geoflow_fast.noise import NOISE_KINDS
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.batches import check_batch_size, in_batches
from geoflow_fast.runtime.device import rows_at_once
from geoflow_fast.runtime.graphs import Compute
from geoflow_fast.runtime.progress import Advance
from geoflow_fast.runtime.settings import settings_from

ROWS_AT_ONCE = 512
"""Network rows that go through the solver together: enough to keep matrix products at the processor's peak, few enough
for activations to stay in the cache and in memory that the allocator hands out again. Does not change results."""


@dataclass(frozen=True)
class SamplingSettings:
    """How samples are drawn.

    `n_samples` samples for each condition; `n_steps` steps of `solver` on the time grid `grid`; `guidance`; and the
    kind of `noise` they start from. `sample` describes them. The defaults are the paper's.

    `precision` of a network's matrix products: "float32"; "tf32" on GPUs that have it; "bfloat16", about twice as fast
    on processors and GPUs with units for it; or "auto", which is bfloat16 where that is faster, else float32. All the
    rest is float32.
    """

    n_samples: int = 50
    n_steps: int = 50
    guidance: float = 3.0
    solver: str = "euler"
    grid: str = "uniform"
    noise: str = "iid"
    precision: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_samples", checks.integer(self.n_samples, "n_samples", least=1))
        object.__setattr__(self, "n_steps", checks.integer(self.n_steps, "n_steps", 1))
        object.__setattr__(self, "guidance", checks.number(self.guidance, "guidance", least=0.0, most=1e6))
        for name, known in (("solver", SOLVERS), ("grid", GRIDS), ("noise", NOISE_KINDS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        checks.precision(self.precision, TF32)


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
    batch_size: int | None = None,
    settings: SamplingSettings | None = None,
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
    that differences between them are not due to noise. `dims` (image, text) is needed only for a field that is not a
    `GeoFlow`.

    The ODE is solved for `batch_size` queries at a time, or pairs, by default as many as keep a processor's caches or a
    GPU's memory busy. Results do not depend on it beyond rounding, and need no memory but their own.
    """
    batch_size = check_batch_size(batch_size)
    if image is not None and text is not None:
        raise ValueError("give image or text, not both; gf.log_density scores a pair")
    keywords = {"n_samples": n_samples, "n_steps": n_steps, "guidance": guidance, "solver": solver}
    settings = settings_from(SamplingSettings(), settings, **keywords)
    field = as_flow(flow, dims)
    if image is None and text is None:
        return _sample_joint(field, settings, generator, batch_size)
    direction, stream = (Direction.T2I, TEXT) if image is None else (Direction.I2T, IMAGE)
    given = checks.with_values(text if image is None else image, STREAMS[stream])
    if given.dim() != 2:
        raise ValueError(f"{STREAMS[stream]} must be [Q, d], got {tuple(given.shape)}")
    field.check_embeddings(given, stream)
    check_rows(given, STREAMS[stream])
    start = StartingPoints.draw(settings, field.flow_dims, direction, generator, field.manifold)
    # Rows of 16 bits are for networks of 16 bits, whose points are float32 all the same.
    points = given if field.network is None else given.to(field.example.dtype)
    generated = sample_conditional(field, points, direction, start.to(points), settings, batch_size=batch_size)
    return direction.pair(given, generated)


@dataclass(frozen=True)
class StartingPoints:
    """The noise that all queries share: where the generated stream starts, and what the unguided field sees in place of
    the condition."""

    generated: Tensor
    """[M, d of the generated stream]."""
    condition: Tensor
    """[M, d of the given stream]."""

    @classmethod
    def draw(
        cls,
        settings: SamplingSettings,
        widths: tuple[int, int],
        direction: Direction,
        generator: torch.Generator | None,
        manifold: Sphere = SPHERE,
    ) -> StartingPoints:
        """Draws the points on the CPU, float32: they depend on the generator's state alone, not on queries or device.
        `widths` are those of image and text."""
        n, kind = settings.n_samples, settings.noise
        generated = manifold.base_sample(n, direction.items(*widths), kind, generator)
        return cls(generated, manifold.base_sample(n, direction.queries(*widths), kind, generator))

    def to(self, like: Tensor) -> StartingPoints:
        """The same points with the device and dtype of `like`."""
        return StartingPoints(self.generated.to(like), self.condition.to(like))


@torch.no_grad()
def sample_conditional(
    flow: FlowField,
    given: Tensor,
    direction: Direction,
    start: StartingPoints,
    settings: SamplingSettings,
    advance: Advance | None = None,
    *,
    batch_size: int | None = None,
    total: int | None = None,
) -> Tensor:
    """Samples [Q, M, d] of the generated stream for the conditions `given` [Q, d'], unit rows. `advance(n)` is called
    when those of n more conditions are done. `total`: the conditions of the whole call, if these are a part of it, on
    which depends what precision "auto" is."""
    stream, draws = direction.generated[0], len(start.generated)
    if len(given) == 0:
        return start.generated.new_empty(0, draws, flow.stream_from_flow(start.generated, stream).shape[1])
    copies = 1 if settings.guidance == 0 else 2
    at_once = batch_size or max(1, network_rows_at_once(flow, given, ROWS_AT_ONCE) // (copies * draws))
    times = time_grid(settings.n_steps, kind=settings.grid)
    moments = evaluation_times(times, settings.solver)
    rows = (total or len(given)) * draws * len(moments) * copies

    def prepare(stack: contextlib.ExitStack) -> Compute:
        """A solve for queries and starting points, with a velocity that it borrows for the stack."""
        velocity = stack.enter_context(flow.velocity_at(moments, direction, settings.precision, rows))

        def free_at_start(begin: StartingPoints) -> Tensor | None:
            """The unguided velocity at t=0, where all queries are at the same points: the same for all."""
            if settings.guidance == 0:
                return None
            return velocity(*direction.pair(begin.condition, begin.generated), 0.0)[stream]

        shared = None if start.generated.is_cuda else free_at_start(start)

        def solve(queries: Tensor, *noise: Tensor) -> Tensor:
            begin = StartingPoints(*noise)
            free = free_at_start(begin) if shared is None else shared
            rate = guided_rate(velocity, direction, begin, free, queries, settings.guidance)
            points = (begin.generated.repeat(len(queries), 1),)
            (end,) = integrate(rate, points, times, solver=settings.solver, manifold=flow.manifold)
            return flow.stream_from_flow(end, stream).unflatten(0, (len(queries), draws))

        return solve

    queries = flow.stream_to_flow(given, 1 - stream)

    told = 0

    def draw_all(run: Compute) -> Tensor:
        def drawn(some: slice) -> Tensor:
            nonlocal told
            samples = run(queries[some], start.generated, start.condition)
            if advance is not None and some.stop > told:
                advance(some.stop - told)
                told = some.stop
            return samples

        return in_batches(drawn, len(queries), at_once)

    with flow.captured((direction, settings), prepare, settings.precision, rows) as call:
        return call.over(draw_all)


def network_rows_at_once(flow: FlowField, like: Tensor, on_cpu: int) -> int:
    """Network rows that go through the solver together."""
    network = flow.network
    if network is None:
        return on_cpu
    config = network.config
    numbers = 2 * (8 * config.hidden + 3 * config.inner) + 8 * sum(config.flow_dims)
    return rows_at_once(like.device, 4 * numbers, on_cpu)


def guided_rate(
    velocity: VelocityFunction,
    direction: Direction,
    start: StartingPoints,
    free_at_start: Tensor | None,
    queries: Tensor,
    guidance: float,
) -> Rate:
    """Returns the rate of `integrate` for the M points of each of the `queries` [Q, d], v_c + guidance (v_c - v_u),
    combined and projected by the step.

    v_c and v_u go through the network as one batch, except at t=0, where v_u is `free_at_start` [M, d]; without it
    there is no guidance.
    """
    stream = direction.generated[0]
    condition = queries.repeat_interleave(len(start.generated), 0)
    both = torch.cat((condition, start.condition.repeat(len(queries), 1)))

    def rate(point: Points, t: float, weight: float) -> tuple[GuidedVelocity]:  # noqa: ARG001
        if free_at_start is not None and t > 0:
            conditional, free = velocity(*direction.pair(both, point[0].repeat(2, 1)), t)[stream].chunk(2)
        else:
            conditional = velocity(*direction.pair(condition, point[0]), t)[stream]
            if free_at_start is None:
                return (GuidedVelocity(conditional),)
            free = free_at_start.repeat(len(queries), 1)
        return (GuidedVelocity(conditional, free, guidance),)

    return rate


@torch.no_grad()
def _sample_joint(
    flow: FlowField, settings: SamplingSettings, generator: torch.Generator | None, batch_size: int | None
) -> Streams:
    manifold, n, kind = flow.manifold, settings.n_samples, settings.noise
    start = tuple(manifold.base_sample(n, d, kind, generator).to(flow.example) for d in flow.flow_dims)
    times = time_grid(settings.n_steps, kind=settings.grid)
    moments = evaluation_times(times, settings.solver)
    rows = n * len(moments)

    def prepare(stack: contextlib.ExitStack) -> Compute:
        velocity = stack.enter_context(flow.velocity_at(moments, Direction.JOINT, settings.precision, rows))

        def rate(point: Points, t: float, weight: float) -> list[GuidedVelocity]:  # noqa: ARG001
            return [GuidedVelocity(v) for v in velocity(point[0], point[1], t)]

        def solve(*start: Tensor) -> Tensor:
            return torch.cat(integrate(rate, start, times, solver=settings.solver, manifold=manifold), dim=1)

        return solve

    at_once = batch_size or network_rows_at_once(flow, start[0], ROWS_AT_ONCE)
    with flow.captured((Direction.JOINT, settings), prepare, settings.precision, rows) as call:
        ends = call.over(lambda run: in_batches(lambda some: run(*(x[some] for x in start)), n, at_once))
    image, text = ends.split(flow.flow_dims, dim=1)
    return flow.stream_from_flow(image, IMAGE), flow.stream_from_flow(text, TEXT)
