"""The augmented reverse ODE: it follows pairs from t = 1 to t = 0 and integrates the divergence on the way.

Along a solution of dx/dt = v(x, t) the log-density changes at the rate -div v. So log p(x_1) is the log-density of the
base distribution at x_0 plus the integral of div v from t = 1 to t = 0, estimated with probes at the same times at
which the solver evaluates v. All directions are solved side by side.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from geoflow_fast.directions import STREAMS, Direction
from geoflow_fast.flow.fields import Field, FlowField, Streams, as_flow, evaluated
from geoflow_fast.flow.inference import InferenceNetwork
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.solvers import FiniteMonitor, Points, evaluation_times, integrate, time_grid
from geoflow_fast.geometry import capturing, check_rows
from geoflow_fast.likelihood.evaluators import Evaluator, FieldEvaluator, NetworkEvaluator
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.manifolds import Sphere
from geoflow_fast.runtime.batches import batch_rows, in_batches
from geoflow_fast.runtime.device import rows_at_once
from geoflow_fast.runtime.graphs import Compute

CPU_MEMORY = 64 * 2**20
"""Memory for the activations of a network on a CPU, in bytes: they should stay in its last-level cache."""


def draw_seed(generator: torch.Generator | None, like: Tensor) -> int | Tensor:
    """Draws the seed of the probes: a number from a generator on the CPU; from one on a GPU a tensor, for which nothing
    has to wait."""
    device = like.device if generator is None else generator.device
    seed = torch.randint(2**62, (), generator=generator, device=device)
    return seed if seed.is_cuda else int(seed)


def density_estimates(
    field: Field,
    image: Tensor,
    text: Tensor,
    directions: Sequence[Direction],
    settings: DensitySettings,
    seed: int | Tensor,
    first_row: int = 0,
    given_number: Tensor | None = None,
    *,
    batch_size: int | None = None,
    total: int | None = None,
) -> Tensor:
    """Log-densities in all `directions` at pairs of unit rows [B, d], one estimate per probe: [directions, K, B]
    float64. `batch_size` pairs are solved together, by default as many as fit into the memory of a batch. `total`: the
    pairs of the whole call, if these are a part of it, on which depends what precision "auto" is.

    `first_row` is the number of the first pair: its probes are those it would have as row `first_row` of a larger call.
    `given_number` [B], for a single conditional direction: pairs with the same number have the same given point, which
    a network then encodes once.
    """
    flow = as_flow(field, (image.shape[1], text.shape[1]))
    image, text = in_flow(flow, image, "image"), in_flow(flow, text, "text")
    directions = tuple(directions)
    if flow.network is not None:
        flow.network.check_points(image, text)
        with torch.no_grad():
            return _network_estimates(
                flow.network, (image, text), directions, settings, seed, first_row, given_number, batch_size, total
            )
    with evaluated(field), torch.no_grad():
        rows = torch.arange(first_row, first_row + len(image), device=image.device)

        def solved(some: slice) -> Tensor:
            pair = image[some], text[some]
            evaluator = FieldEvaluator(flow, directions, pair, settings, first_row + some.start)
            solve = _ReverseSolve(evaluator, flow.manifold, directions, pair, settings, seed, rows[some])
            return solve.run().movedim(-1, 0)

        size = batch_rows(batch_size, image.device, _field_bytes(image, text, directions, settings))
        return in_batches(solved, len(image), size).movedim(0, -1).contiguous()


def _network_estimates(
    network: GeoFlow,
    pair: Streams,
    directions: tuple[Direction, ...],
    settings: DensitySettings,
    seed: int | Tensor,
    first_row: int,
    given_number: Tensor | None,
    batch_size: int | None,
    total: int | None,
) -> Tensor:
    """`density_estimates` of pairs in the flow's coordinates, in chunks. On a GPU, chunks of one size are replayed."""
    times = evaluation_times(time_grid(settings.n_steps, kind=settings.grid, reverse=True), settings.solver)
    (image, text), count = pair, len(pair[0])
    most = batch_size or pairs_at_once(network, directions, settings)
    # Chunks of a CPU are of equal size; those of a GPU have the size of all other large calls.
    at_once = most if image.is_cuda else max(1, -(-count // max(1, -(-count // most))))
    network_rows = (total or count) * len(times) * len(directions) * (1 + settings.n_probes)
    lent = functools.partial(network.prepared, directions, sorted(set(times)), settings.precision, network_rows)

    def prepare(stack: contextlib.ExitStack) -> Compute:
        inference = stack.enter_context(lent())

        def solve(image: Tensor, text: Tensor, rows: Tensor, seed: Tensor, encoded: Tensor | None = None) -> Tensor:
            evaluator = NetworkEvaluator(inference, directions, (image, text), settings, encoded)
            return _ReverseSolve(evaluator, network.manifold, directions, (image, text), settings, seed, rows).run()

        return solve

    rows = torch.arange(first_row, first_row + count, device=image.device)
    seed = seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=image.device)
    parts: list[tuple[Tensor, ...]] = [x.split(at_once) for x in (image, text, rows)]
    # To learn which points are distinct, the host would have to wait for a GPU, which encodes all of them sooner.
    if given_number is not None and not image.is_cuda:
        given = directions[0].queries(image, text)
        with lent() as inference:
            parts.append(_encode_distinct(inference, given, directions[0], given_number, at_once))
    chunks = list(zip(*parts))
    with network.captured((directions, settings), prepare, settings.precision, network_rows) as call:
        return call.over(lambda run: torch.cat([run(*chunk[:3], seed, *chunk[3:]) for chunk in chunks], dim=-1))


def pairs_at_once(flow: GeoFlow, directions: Sequence[Direction], settings: DensitySettings) -> int:
    """The most pairs whose buffers and probes fit into `CPU_MEMORY`; on a GPU as many as its memory allows and its
    products gain from (`runtime.device.rows_at_once`)."""
    config, like = flow.config, flow.example
    dims = config.flow_dims
    tangents = dims if settings.exact else (settings.n_probes, settings.n_probes)
    kept = min(Probes.FRAME, settings.n_steps) if settings.shared else 2
    numbers = kept * settings.n_probes * sum(dims)  # in the probes and buffers of one pair
    rows = 0  # of one pair in the network
    for direction in directions:
        own = [tangents[stream] for stream in direction.generated]
        count = max(own) if settings.paired_tangents else sum(own)
        rows += 1 + count
        numbers += (1 + count) * (14 * config.hidden + 6 * config.inner)
        numbers += sum((1 + tangents[s]) * (2 * dims[s] + config.hidden) for s in direction.generated)
    size = numbers * like.element_size()
    if like.is_cuda:
        return max(1, rows_at_once(like.device, size / rows, 1) // rows)
    return max(1, CPU_MEMORY // size)


def _field_bytes(image: Tensor, text: Tensor, directions: Sequence[Direction], settings: DensitySettings) -> int:
    """Memory that one pair takes while a field is solved of which nothing is known: points and velocities, and for each
    tangent the probe, what the Jacobian makes of it, and the field's own tape, which is taken to be as large."""
    widths = image.shape[1], text.shape[1]
    numbers = sum(
        widths[stream] * (8 + 4 * (widths[stream] if settings.exact else settings.n_probes))
        for direction in directions
        for stream in direction.generated
    )
    return numbers * image.element_size()


class _ReverseSolve:
    """Follows the pairs in all directions from t = 1 to t = 0 and integrates their divergences on the way.

    `rows` [B] are the numbers of the pairs, on which their probes depend.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        manifold: Sphere,
        directions: Sequence[Direction],
        pair: Streams,
        settings: DensitySettings,
        seed: int | Tensor,
        rows: Tensor,
    ) -> None:
        self.evaluator, self.pair, self.settings, self.manifold = evaluator, pair, settings, manifold
        self.moving = [(solve, stream) for solve, direction in enumerate(directions) for stream in direction.generated]
        # Aligned probes of a stream learn from the first solve that moves it.
        self.leader = {stream: k for k, (_, stream) in reversed(list(enumerate(self.moving)))}
        self.probes = Probes(seed, rows, settings, manifold)
        self.draws = 0
        names = [f"{directions[solve].value}: {STREAMS[stream]}" for solve, stream in self.moving]
        self.state_monitor = FiniteMonitor(names, rows[:1])
        self.divergence_monitor = FiniteMonitor([f"{name.value}: divergence" for name in directions], rows[:1])
        count = 1 if settings.exact else settings.n_probes
        self.integral = torch.zeros(len(directions), count, len(rows), dtype=torch.float64, device=rows.device)

    def run(self) -> Tensor:
        """Solves the ODE and returns the estimates [directions, K, B]."""
        times = time_grid(self.settings.n_steps, kind=self.settings.grid, reverse=True)
        start = tuple(self.pair[stream] for _, stream in self.moving)
        end = integrate(
            self._rate,
            start,
            times,
            solver=self.settings.solver,
            manifold=self.manifold,
            monitor=self.state_monitor,
        )
        self.divergence_monitor.close()
        for (solve, _), x in zip(self.moving, end):
            self.integral.select(0, solve).add_(self.manifold.log_base(x))
            if capturing(x):  # nothing checks the states: one that is not finite must show in the result
                self.integral.select(0, solve).add_(0 * torch.linalg.vector_norm(x, dim=-1))
        return self.integral

    def _rate(self, points: Points, t: float, weight: float) -> Points:
        """Velocities of the streams that move. Where the solver gives the evaluation a weight, the divergences go into
        the integral with it."""
        if weight == 0:
            return self.evaluator(points, t)[0]
        probes = tuple(self.probes.draw(self.draws, stream, x) for (_, stream), x in zip(self.moving, points))
        velocities, products = self.evaluator(points, t, probes)
        for k, (solve, stream) in enumerate(self.moving):
            read = points[k], velocities[k], probes[k], products[k], self.integral.select(0, solve), weight
            self.probes.read(stream, *read, curved=self.evaluator.curved, leads=self.leader[stream] == k)
        step = self.draws // (4 if self.settings.solver == "rk4" else 1)
        self.divergence_monitor.check(tuple(self.integral.transpose(1, 2)), step, t, self.settings.solver)
        self.draws += 1
        return velocities


def _encode_distinct(
    network: InferenceNetwork, x: Tensor, direction: Direction, number: Tensor, at_once: int
) -> tuple[Tensor, ...]:
    """Encodings [B, H] of the given points `x` [B, d], in chunks; those that have the same `number` [B] are encoded
    once."""
    kept, position = number.to(x.device).unique(return_inverse=True)
    row = torch.empty_like(kept).scatter_(0, position, torch.arange(len(x), device=x.device))
    encoded = network.encode(x[row], cast(int, direction.given))
    return tuple(encoded[some] for some in position.split(at_once))


def in_flow(flow: FlowField, x: Tensor, name: str) -> Tensor:
    """The rows `x` [..., d] in the flow's coordinates; `name` begins with that of their stream. Centring and projecting
    may leave nothing of a row, which a ValueError then names."""
    rows = x.flatten(0, -2)
    moved = flow.stream_to_flow(rows, STREAMS.index(name.split("_")[0]))
    if moved is rows:
        return x
    moved = moved.unflatten(0, x.shape[:-1])
    check_rows(moved, f"{name} in the flow's coordinates")
    return moved
