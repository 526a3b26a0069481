"""Fixed-step solvers on a product of spheres (or flat spaces, for the Euclidean twin), in either direction of time."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from geoflow_fast import ops
from geoflow_fast.geometry import capturing, parallel_transport

SOLVERS = ("euler", "midpoint", "ab2", "rk4")


GRIDS = ("uniform", "late", "early")


Streams = tuple[Tensor, Tensor]


Points = tuple[Tensor, ...]
"""One tensor [B, d] per stream that moves."""


Rate = Callable[[Points, float, float], Points]
"""rate(point, t, weight) -> velocities. Integrals along the path are sums of weight times the integrand at the
evaluations, so a caller accumulates what it integrates as it is asked; `weight` 0 marks an auxiliary evaluation."""


class Field(Protocol):
    """A velocity field on pairs of points; a `GeoFlow` is one, the oracles of `worlds` are others."""

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str, /) -> Streams:
        """(v_image, v_text) at `t`, tangent, zero on the given stream."""


def geometry_of(field: object) -> str:
    """ "sphere", unless the field says in its configuration that it is the Euclidean twin."""
    return str(getattr(getattr(field, "config", None), "geometry", "sphere"))


@contextlib.contextmanager
def eval_mode(field: object) -> Iterator[None]:
    """Without dropout for a while; every part gets its own mode back. A field that is no network is left alone."""
    modes = [(module, module.training) for module in field.modules()] if isinstance(field, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def count_of(value: SupportsIndex, name: str) -> int:
    """`value` as an int; ValueError unless it is an integer, numpy's included, of at least 1. A bool is none."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = 0
    if found < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return found


def time_grid(n_steps: SupportsIndex, *, kind: str = "uniform", reverse: bool = False) -> Tensor:
    """Times [n_steps + 1] from 0 to 1 (1 to 0 in `reverse`): "uniform", or with short steps "late" (towards the data,
    t = 1) or "early" (towards the noise): t = 1 - (1 - s)^1.5 or s^1.5 over uniform s."""
    steps = count_of(n_steps, "n_steps")
    if kind not in GRIDS:
        raise ValueError(f"grid must be one of {GRIDS}, got {kind!r}")
    s = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    t = {"uniform": s, "late": 1 - (1 - s) ** 1.5, "early": s**1.5}[kind]
    return t.flip(0) if reverse else t


def evaluation_times(times: Tensor, solver: str) -> list[float]:
    """Every time at which `integrate` will ask for velocities on this grid, each once."""
    _check_solver(solver)
    grid = times.tolist()
    middles = [_middle(now, after) for now, after in itertools.pairwise(grid)]
    if solver in ("euler", "ab2"):
        return grid[:-1]
    return grid[:-1] + middles if solver == "midpoint" else grid + middles


class Watch:
    """Finds states that are not finite: a ValueError names the stream (by `names`), the row (from `first_row` on) and
    the step. On a GPU the steps are looked at when the solve is over, so that none waits; under graph capture never."""

    def __init__(self, names: Sequence[str], first_row: int = 0) -> None:
        self.names, self.first_row = names, first_row
        self._later: list[tuple[int, Tensor, str]] = []

    def see(self, point: Points, step: int, t: float, solver: str) -> None:
        """Looks at the state after `step`, at time `t`."""
        for stream, x in enumerate(point):
            found = stream, torch.isfinite(x).all(dim=-1), f"in step {step} (t={t:.4g}) of {solver}"
            if x.is_cuda:
                self._later.append(found)
            else:
                self._check(*found)

    def close(self) -> None:
        """Looks at what was left for the end."""
        for found in self._later:
            if not capturing(found[1]):
                self._check(*found)

    def _check(self, stream: int, finite: Tensor, where: str) -> None:
        if not bool(finite.all()):
            row = self.first_row + int((~finite).nonzero()[0])
            raise ValueError(f"{self.names[stream]} row {row} became non-finite {where}")


def integrate(
    rate: Rate,
    start: Points,
    times: Tensor,
    *,
    solver: str = "midpoint",
    geometry: str = "sphere",
    watch: Watch | None = None,
) -> Points:
    """Carries `start` along `rate` over the grid `times` [S + 1].

    "euler" and "ab2" (two-step Adams-Bashforth, the last velocity carried along by parallel transport) ask for one
    evaluation a step, "midpoint" for two, "rk4" for four. A state that is not finite is an error naming row and step;
    `watch` says how rows and streams are named.
    """
    _check_solver(solver)
    advance = {"euler": _multistep, "ab2": _multistep, "midpoint": _midpoint, "rk4": _rk4}[solver]
    watch = watch or Watch([f"stream {stream}" for stream in range(len(start))])
    end = advance(rate, start, times.tolist(), geometry, solver, watch)
    watch.close()
    return end


def _check_solver(solver: str) -> None:
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {SOLVERS}, got {solver!r}")


def _middle(now: float, after: float) -> float:
    return now + (after - now) / 2


def _multistep(rate: Rate, point: Points, grid: list[float], geometry: str, solver: str, watch: Watch) -> Points:
    """Euler, and Adams-Bashforth of order two: v_k + h_k / (2 h_{k-1}) (v_k - v_{k-1}), begun with an Euler step."""
    steps = [after - now for now, after in itertools.pairwise(grid)]
    share = [0.0] * (len(steps) + 1)  # of the difference of velocities in step k; 0 for Euler and beyond the end
    if solver == "ab2":
        share[1:-1] = [h / (2 * before) for before, h in itertools.pairwise(steps)]
    previous: tuple[Points, Points] | None = None
    for k, h in enumerate(steps):
        weight = h * (1 + share[k]) - (steps[k + 1] * share[k + 1] if k + 1 < len(steps) else 0.0)
        velocity = combined = rate(point, grid[k], weight)
        if previous is not None and solver == "ab2":
            carried = _carry(previous, point, geometry)
            combined = tuple(torch.add(v, v - old, alpha=share[k]) for v, old in zip(velocity, carried))
        previous = (point, velocity)
        point = _follow(point, combined, h, geometry)
        watch.see(point, k, grid[k + 1], solver)
    return point


def _carry(previous: tuple[Points, Points], point: Points, geometry: str) -> Points:
    """The last velocities, moved from the last points to these."""
    if geometry != "sphere":
        return previous[1]
    return tuple(parallel_transport(x, y, v) for x, y, v in zip(previous[0], point, previous[1]))


def _midpoint(rate: Rate, point: Points, grid: list[float], geometry: str, solver: str, watch: Watch) -> Points:
    for k, (now, after) in enumerate(itertools.pairwise(grid)):
        h = after - now
        halfway = _straight(point, rate(point, now, 0.0), h / 2, geometry)
        point = _straight(point, rate(halfway, _middle(now, after), h), h, geometry)
        watch.see(point, k, after, solver)
    return point


def _rk4(rate: Rate, point: Points, grid: list[float], geometry: str, solver: str, watch: Watch) -> Points:
    for k, (now, after) in enumerate(itertools.pairwise(grid)):
        h = after - now
        middle = _middle(now, after)
        first = rate(point, now, h / 6)
        second = rate(_straight(point, first, h / 2, geometry), middle, h / 3)
        third = rate(_straight(point, second, h / 2, geometry), middle, h / 3)
        fourth = rate(_straight(point, third, h, geometry), after, h / 6)
        mean = tuple((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(first, second, third, fourth))
        point = _straight(point, mean, h, geometry)
        watch.see(point, k, after, solver)
    return point


def _follow(point: Points, velocity: Points, h: float, geometry: str) -> Points:
    """Along the geodesic that leaves with `velocity`, for a time `h`."""
    if geometry != "sphere":
        return _straight(point, velocity, h, geometry)
    return tuple(ops.tangent_step(x, v, h) for x, v in zip(point, velocity))


def _straight(point: Points, velocity: Points, h: float, geometry: str) -> Points:
    """Straight through the surrounding space and back to the sphere. Velocities taken at other points may be combined
    here as they are: the field extended along rays is smooth, so a Runge-Kutta method keeps its order."""
    moved = tuple(torch.add(x, v, alpha=h) for x, v in zip(point, velocity))
    if geometry != "sphere":
        return moved
    return tuple(torch.nn.functional.normalize(x, dim=-1) for x in moved)
