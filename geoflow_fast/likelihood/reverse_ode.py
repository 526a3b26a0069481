"""The augmented reverse ODE: it follows pairs from t = 1 to t = 0 and integrates the divergence on the way.

Along a solution of dx/dt = v(x, t) the log-density changes at the rate -div v. So log p(x_1) is the log-density of the
base distribution at x_0 plus the integral of div v from t = 1 to t = 0, estimated with probes at the same times at
which the solver evaluates v. All directions are solved side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from geoflow_fast.directions import STREAMS, Direction
from geoflow_fast.flow.fields import Field, FlowField, Streams, as_flow
from geoflow_fast.flow.forward_mode import ForwardMode
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.solvers import FiniteMonitor, Points, evaluation_times, integrate, time_grid
from geoflow_fast.geometry import check_rows
from geoflow_fast.likelihood.evaluators import Evaluator, FieldEvaluator, NetworkEvaluator
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.settings import MEMORY, DensitySettings
from geoflow_fast.manifolds import Manifold


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
) -> Tensor:
    """Log-densities in all `directions` at pairs of unit rows [B, d], one estimate per probe: [directions, K, B]
    float64.

    `first_row` is the number of the first pair: its probes are those it would have as row `first_row` of a larger call.
    `given_number` [B], for a single conditional direction: pairs with the same number have the same given point, which
    a network then encodes once.
    """
    flow = as_flow(field, (image.shape[1], text.shape[1]))
    image, text = in_flow(flow, image, "image"), in_flow(flow, text, "text")
    if settings.orthogonal_to == "probes" and not settings.exact:
        least = min(probe_dimensions(flow, directions))
        if settings.n_probes > least:
            raise ValueError(f"n_probes={settings.n_probes} orthogonal probes do not fit into {least} dimensions")
    with flow.without_dropout(), torch.no_grad():
        network, rows, encoded = None, max(1, len(image)), None
        if flow.network is not None:
            flow.network.check_points(image, text)
            times = evaluation_times(time_grid(settings.n_steps, kind=settings.grid, reverse=True), settings.solver)
            solved = len(image) * len(times) * len(directions) * (1 + settings.n_probes)
            network = ForwardMode(flow.network, directions, sorted(set(times)), settings.precision, solved)
            rows = rows_at_once(flow.network, directions, len(image), settings)
            if given_number is not None:
                given = directions[0].queries(image, text)
                encoded = _encode_distinct(network, given, directions[0], given_number)
        estimates = []
        for number, pair in enumerate(zip(image.split(rows), text.split(rows))):
            # guard: noise depends on the row and not on the chunk
            first = first_row + number * rows
            evaluator: Evaluator
            if network is None:
                evaluator = FieldEvaluator(flow, directions, pair, settings, first)
            else:
                known = None if encoded is None else encoded[0][encoded[1][number * rows :][:rows]]
                evaluator = NetworkEvaluator(network, directions, pair, settings, known)
            estimates.append(_ReverseSolve(evaluator, flow.manifold, directions, pair, settings, seed, first).run())
    return torch.cat(estimates, dim=-1)


def rows_at_once(flow: GeoFlow, directions: Sequence[Direction], rows: int, settings: DensitySettings) -> int:
    """Number of rows in chunks of equal size whose buffers and probes fit into the memory of the settings."""
    config, like = flow.config, flow.example
    dims = config.flow_dims
    tangents = dims if settings.exact else (settings.n_probes, settings.n_probes)
    kept = min(Probes.FRAME, settings.n_steps) if settings.orthogonal_to == "steps" else 2
    numbers = kept * settings.n_probes * sum(dims)  # in the probes and buffers of one row
    for direction in directions:
        own = [tangents[stream] for stream in direction.generated]
        count = max(own) if settings.paired_tangents else sum(own)
        numbers += (1 + count) * (14 * config.hidden + 6 * config.inner)
        numbers += sum((1 + tangents[s]) * (2 * dims[s] + config.hidden) for s in direction.generated)
    memory = settings.memory or MEMORY.get(like.device.type, MEMORY["cpu"])
    most = max(1, memory // (numbers * like.element_size()))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


class _ReverseSolve:
    """Follows the pairs in all directions from t = 1 to t = 0 and integrates their divergences on the way.

    The pairs are numbered from `first_row`, on which their probes depend.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        manifold: Manifold,
        directions: Sequence[Direction],
        pair: Streams,
        settings: DensitySettings,
        seed: int | Tensor,
        first_row: int,
    ) -> None:
        self.evaluator, self.pair, self.settings, self.manifold = evaluator, pair, settings, manifold
        self.moving = [(solve, stream) for solve, direction in enumerate(directions) for stream in direction.generated]
        # Aligned probes of a stream learn from the first solve that moves it.
        self.leader = {stream: k for k, (_, stream) in reversed(list(enumerate(self.moving)))}
        rows = torch.arange(first_row, first_row + len(pair[0]), device=pair[0].device)
        self.probes = Probes(seed, torch.zeros_like(rows[:1]) if settings.shared else rows, settings, manifold, pair[0])
        self.draws = 0
        names = [f"{directions[solve].value}: {STREAMS[stream]}" for solve, stream in self.moving]
        self.state_monitor = FiniteMonitor(names, first_row)
        self.divergence_monitor = FiniteMonitor([f"{name.value}: divergence" for name in directions], first_row)
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
        return self.integral

    def _rate(self, points: Points, t: float, weight: float) -> Points:
        """Velocities of the streams that move. Where the solver gives the evaluation a weight, the divergences go into
        the integral with it."""
        if weight == 0:
            return self.evaluator(points, t)[0]
        probes = self._draw_probes(points)
        velocities, products = self.evaluator(points, t, probes)
        if self.probes.fused is None or not self.evaluator.curved:
            self._read_probes(points, velocities, probes, products, weight)
        else:
            for k, (solve, stream) in enumerate(self.moving):
                read = points[k], velocities[k], probes[k], products[k], self.integral.select(0, solve), weight
                self.probes.read(stream, *read, leads=self.leader[stream] == k)
        step = self.draws // (4 if self.settings.solver == "rk4" else 1)
        self.divergence_monitor.check(tuple(self.integral.transpose(1, 2)), step, t, self.settings.solver)
        self.draws += 1
        return velocities

    def _read_probes(self, points: Points, f: Points, probes: Points, products: Points, weight: float) -> None:
        """Adds the divergences of all solves to the integral, and lets aligned probes learn."""
        curvatures = [self.manifold.curvature(x, y) if self.evaluator.curved else 0.0 for x, y in zip(points, f)]
        divergence = divergences(self.moving, probes, products, curvatures, self.settings.exact)
        self.integral.add_(divergence, alpha=weight)
        if self.settings.probe_kind == "aligned" and not self.settings.exact:
            for stream, k in self.leader.items():
                self.probes.learn(stream, points[k], probes[k], products[k])

    def _draw_probes(self, points: Points) -> Points:
        """Probes [K, B, d] at the points of each stream that moves."""
        alternating = self.settings.tangents == "alternating"
        number = self.draws // 2 if alternating else self.draws
        drawn = [
            self.probes.draw(number if self.settings.redraw else 0, stream, x)
            for (_, stream), x in zip(self.moving, points)
        ]
        if alternating and self.draws % 2:
            drawn = [-e if STREAMS[stream] == "text" else e for (_, stream), e in zip(self.moving, drawn)]
        return tuple(drawn)


def _encode_distinct(network: ForwardMode, x: Tensor, direction: Direction, number: Tensor) -> tuple[Tensor, Tensor]:
    """Encodings [U, H] of the distinct points among the given ones `x` [B, d], which `number` [B] tells apart, and the
    position of each row's encoding among them [B]."""
    kept, position = number.to(x.device).unique(return_inverse=True)
    row = torch.empty_like(kept).scatter_(0, position, torch.arange(len(x), device=x.device))
    return network.encode(x[row], cast(int, direction.given)), position


def divergences(
    moving: Sequence[tuple[int, int]],
    probes: Sequence[Tensor],
    products: Sequence[Tensor],
    curvatures: Sequence[Tensor | float],
    exact: bool,
) -> Tensor:
    """Sums of e^T J e and curvature over the streams of each solve, [solves, K, B] float64: one estimate per probe e,
    or the sum over all of them, which are a basis, if `exact`."""
    by_solve: dict[int, list[Tensor]] = {}
    for (solve, _), e, product, curvature in zip(moving, probes, products, curvatures):
        trace = (product.double() * e.double()).sum(-1)
        by_solve.setdefault(solve, []).append((trace.sum(0, keepdim=True) if exact else trace) + curvature)
    return torch.stack([torch.stack(of_streams).sum(0) for of_streams in by_solve.values()])


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


def probe_dimensions(flow: FlowField, directions: Sequence[Direction]) -> list[int]:
    """Dimensions of the tangent spaces of the streams that these directions generate."""
    streams = {stream for direction in directions for stream in direction.generated}
    return [flow.manifold.freedom(flow.flow_dims[stream]) for stream in sorted(streams)]
