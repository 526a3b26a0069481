"""The augmented reverse ODE: follows pairs from t = 1 to t = 0 and integrates the divergence on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.solvers import (
    Field,
    FiniteMonitor,
    Points,
    Streams,
    eval_mode,
    evaluation_times,
    integrate,
    time_grid,
)
from geoflow_fast.geometry import check_rows
from geoflow_fast.likelihood.evaluators import Evaluator, evaluator_of
from geoflow_fast.likelihood.forward_mode import GENERATED, ForwardMode, Solve
from geoflow_fast.likelihood.probes import STREAMS, Probes
from geoflow_fast.likelihood.settings import MEMORY, DensitySettings
from geoflow_fast.manifolds import Manifold, manifold_of
from geoflow_fast.runtime import checks


def draw_seed(generator: torch.Generator | None, like: Tensor) -> int | Tensor:
    """Seed of the probes: a number from a generator on the CPU, a tensor that nobody waits for from one on a GPU."""
    device = like.device if generator is None else generator.device
    seed = torch.randint(2**62, (), generator=generator, device=device)
    return seed if seed.is_cuda else int(seed)


def density_estimates(
    field: Field,
    image: Tensor,
    text: Tensor,
    directions: Sequence[str],
    settings: DensitySettings,
    seed: int | Tensor,
    first_row: int = 0,
    given_number: Tensor | None = None,
) -> Tensor:
    """Log-densities of all `directions`, one estimate per probe: [directions, K, B] float64.

    `first_row` is the number of the first pair: its probes are those it would have as row `first_row` of a larger call.
    `given_number` [B], of a single conditional direction: pairs of one number have one given point, which a network
    encodes once.
    """
    check_pairs(image, text)
    check_rows(image, "image")
    check_rows(text, "text")
    image, text = (in_flow(field, x, stream, STREAMS[stream]) for stream, x in enumerate((image, text)))
    _check_freedom(settings, min(probe_dimensions(field, image, text, directions)))
    with eval_mode(field), torch.no_grad():
        network = once = None
        at_once = max(1, len(image))
        if isinstance(field, GeoFlow):
            field.check_points(image, text)
            times = evaluation_times(time_grid(settings.n_steps, kind=settings.grid, reverse=True), settings.solver)
            network = ForwardMode(field, directions, sorted(set(times)))
            at_once = _rows_at_once(field, directions, settings, len(image))
            if given_number is not None:
                (given,) = {0, 1} - set(GENERATED[directions[0]])
                once = network.encode_once((image, text)[given], given, given_number)
        parts = []
        for number, pair in enumerate(zip(image.split(at_once), text.split(at_once))):
            points = [pair for _ in directions]
            # guard: noise depends on the row and not on the chunk
            first = first_row + number * at_once
            encoded = None if once is None else once[0][once[1][number * at_once :][:at_once]]
            evaluator = evaluator_of(field, network, directions, points, settings.exact, first, encoded)
            place = manifold_of(field), seed, first
            parts.append(_ReverseSolve(evaluator, directions, points, settings, *place).run())
    return torch.cat(parts, dim=-1)


def _rows_at_once(flow: GeoFlow, directions: Sequence[str], settings: DensitySettings, rows: int) -> int:
    """Rows of equal chunks whose buffers and probes fit into the memory of the settings."""

    def pair(direction: str) -> Solve:
        counts = [
            0 if stream not in GENERATED[direction] else d if settings.exact else settings.n_probes
            for stream, d in enumerate(flow.config.flow_dims)
        ]
        image, text = (
            (torch.empty(1, d, device="meta"), torch.empty(count, 1, d, device="meta"))
            for count, d in zip(counts, flow.config.flow_dims)
        )
        return Solve(direction, image, text, settings.paired_tangents and direction == "joint")

    like = next(flow.parameters())
    kept = min(Probes.FRAME, settings.n_steps) if settings.orthogonal_to == "steps" else 2
    probes = kept * settings.n_probes * sum(flow.config.flow_dims) * like.element_size()
    each = probes + ForwardMode.row_bytes(flow, [pair(direction) for direction in directions])
    most = max(1, (settings.memory or MEMORY.get(like.device.type, MEMORY["cpu"])) // each)
    chunks = -(-rows // most)
    return max(1, -(-rows // max(1, chunks)))


class _ReverseSolve:
    """Follows the pairs of all directions from t=1 to t=0 and integrates their divergences on the way.

    `points` (image, text) of each direction are rows `first_row` and on of the probes of `seed`.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        directions: Sequence[str],
        points: Sequence[Streams],
        settings: DensitySettings,
        manifold: Manifold,
        seed: int | Tensor,
        first_row: int,
    ) -> None:
        self.evaluator, self.points, self.settings, self.manifold = evaluator, points, settings, manifold
        self.moving = [(solve, stream) for solve, name in enumerate(directions) for stream in GENERATED[name]]
        rows = torch.arange(first_row, first_row + len(points[0][0]), device=points[0][0].device)
        own = torch.zeros_like(rows[:1]) if settings.shared else rows
        orthogonal = settings.orthogonal_to
        self.probes = Probes(
            seed, own, settings.n_probes, settings.probe_kind, orthogonal, settings.exact, manifold.name
        )
        self.leading = {stream: solve for solve, stream in reversed(self.moving)}  # of each stream, the first solve
        names = [f"{directions[solve]}: {STREAMS[stream]}" for solve, stream in self.moving]
        self.state = FiniteMonitor(names, first_row)
        self.divergence = FiniteMonitor([f"{name}: divergence" for name in directions], first_row)
        count = 1 if settings.exact else settings.n_probes
        self.integral = torch.zeros(len(points), count, len(rows), dtype=torch.float64, device=rows.device)
        self.drawn = 0

    def run(self) -> Tensor:
        """Estimates [directions, K, B]."""
        times = time_grid(self.settings.n_steps, kind=self.settings.grid, reverse=True)
        begin = tuple(self.points[solve][stream] for solve, stream in self.moving)
        end = integrate(
            self._rate, begin, times, solver=self.settings.solver, manifold=self.manifold, monitor=self.state
        )
        self.divergence.close()
        of_solve = self.integral.unbind()
        for (solve, _), x in zip(self.moving, end):
            of_solve[solve].add_(self.manifold.log_base(x))
        return self.integral

    def _rate(self, at: Points, t: float, weight: float) -> Points:
        """Velocities of the moving streams; divergences go into the integral by their weight."""
        sides = [list(pair) for pair in self.points]
        for (solve, stream), x in zip(self.moving, at):
            sides[solve][stream] = x
        pairs: list[Streams] = [(image, text) for image, text in sides]
        tangents = None if weight == 0 else self._draw(pairs)
        velocities, trace, products = self.evaluator(pairs, t, tangents, self.settings.paired_tangents)
        if trace is not None and tangents is not None:
            if not self.settings.exact:
                for stream, solve in self.leading.items():
                    self.probes.learn(stream, pairs[solve][stream], tangents[solve][stream], products[solve][stream])
            self.integral.add_(trace, alpha=weight)
            step = self.drawn // (4 if self.settings.solver == "rk4" else 1)
            self.divergence.check(tuple(trace.transpose(1, 2)), step, t, self.settings.solver)
            self.drawn += 1
        return tuple(velocities[solve][stream] for solve, stream in self.moving)

    def _draw(self, pairs: Sequence[Streams]) -> list[Streams]:
        """Probes at the points of each solve; a given stream has none."""
        alternating = self.settings.tangents == "alternating"
        number = self.drawn // 2 if alternating else self.drawn
        found = [[x.new_empty(0, *x.shape) for x in pair] for pair in pairs]
        for solve, stream in self.moving:
            e = self.probes.draw(number if self.settings.redraw else 0, stream, pairs[solve][stream])
            found[solve][stream] = -e if alternating and stream == 1 and self.drawn % 2 else e
        return [(image, text) for image, text in found]


def in_flow(field: Field, x: Tensor, stream: int, name: str) -> Tensor:
    """Rows `x` [..., d] of a stream in the field's coordinates. Centring and projecting may leave nothing of a row: a
    ValueError names it."""
    if not isinstance(field, GeoFlow) or field.preprocess is None:
        return x
    moved = field.to_flow(**{STREAMS[stream]: x.flatten(0, -2)})[stream]
    found = cast(Tensor, moved).unflatten(0, x.shape[:-1])
    check_rows(found, f"{name} in the flow's coordinates")
    return found


def check_pairs(image: Tensor, text: Tensor) -> None:
    for name, x in zip(STREAMS, (image, text)):
        checks.with_values(x, name)
    if image.dim() != 2 or text.dim() != 2 or len(image) != len(text):
        raise ValueError(
            f"image and text must be [B, d] with equal B, got {tuple(image.shape)} and {tuple(text.shape)}"
        )


def _check_freedom(settings: DensitySettings, least: int) -> None:
    """There are only so many orthogonal probes."""
    if settings.orthogonal_to == "probes" and not settings.exact and settings.n_probes > least:
        raise ValueError(f"n_probes={settings.n_probes} orthogonal probes do not fit into {least} dimensions")


def probe_dimensions(field: Field, image: Tensor, text: Tensor, directions: Sequence[str]) -> list[int]:
    """Dimensions that the probes of the streams these directions generate can span."""
    widths = field.config.flow_dims if isinstance(field, GeoFlow) else (image.shape[1], text.shape[1])
    streams = {stream for direction in directions for stream in GENERATED[direction]}
    return [manifold_of(field).freedom(widths[stream]) for stream in sorted(streams)]
