"""Fixed-step solvers on a product of spheres or of other manifolds, in either direction of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from geoflow_fast.geometry import capturing, eps
from geoflow_fast.manifolds import SPHERE, Sphere, Velocity
from geoflow_fast.runtime import checks

EVALUATIONS = {"euler": 1, "midpoint": 2, "ab2": 1, "rk4": 4}
"""Evaluations of the velocity per step of each solver."""

SOLVERS = tuple(EVALUATIONS)

GRIDS = ("uniform", "late", "early")


Points = tuple[Tensor, ...]
"""One tensor [B, d] per stream that moves."""


Rate = Callable[[Points, float, float], Sequence[Velocity]]
"""rate(point, t, weight) -> velocities, whose tangent parts are followed. The integral of a function along the path is
the sum over all evaluations of `weight` times the function, so a rate can accumulate integrals while it is evaluated; a
weight of 0 marks an auxiliary evaluation."""


def time_grid(n_steps: int, *, kind: str = "uniform", reverse: bool = False) -> Tensor:
    """Times [n_steps + 1] from 0 to 1, or from 1 to 0 if `reverse`. They are "uniform", or the steps are shorter "late"
    (near the data, t = 1) or "early" (near the noise): t = 1 - (1 - s)^1.5 or s^1.5 for uniform s."""
    steps = checks.integer(n_steps, "n_steps", 1)
    if kind not in GRIDS:
        raise ValueError(f"grid must be one of {GRIDS}, got {kind!r}")
    s = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device="cpu")
    t = {"uniform": s, "late": 1 - (1 - s) ** 1.5, "early": s**1.5}[kind]
    return t.flip(0) if reverse else t


def evaluation_times(times: Tensor, solver: str) -> list[float]:
    """Returns every time at which `integrate` evaluates the rate on this grid, each once."""
    grid = times.tolist()
    if solver in ("euler", "ab2"):
        return grid[:-1]
    middles = [now + (after - now) / 2 for now, after in itertools.pairwise(grid)]
    return grid[:-1] + middles if solver == "midpoint" else grid + middles


class FiniteMonitor:
    """Checks that the states of a solve are finite. A ValueError names the stream (by `names`), the row (numbered from
    `first_row`) and the step. On a GPU the checks wait for the end of the solve, so that no step has to synchronise,
    and under graph capture there are none."""

    def __init__(self, names: Sequence[str], first_row: int | Tensor = 0) -> None:
        self.names, self.first_row = names, first_row
        self._postponed: list[tuple[int, Tensor, str]] = []

    def check(self, point: Points, step: int, t: float, solver: str) -> None:
        """Checks the state after `step`, at time `t`."""
        if capturing(point[0]):
            return
        for stream, x in enumerate(point):
            # The norm of a row is finite where the row is, but for numbers whose squares are too large.
            norm = torch.linalg.vector_norm(x, dim=-1) if x.is_cuda else torch.isfinite(x).all(dim=-1)
            self._postponed.append((stream, norm, f"in step {step} (t={t:.4g}) of {solver}"))
        if not point[0].is_cuda:
            self.close()

    def close(self) -> None:
        """Makes the checks that were postponed to the end of the solve; the host waits once for all of them."""
        postponed, self._postponed = self._postponed, []
        if not postponed:
            return
        together = postponed[0][1] if len(postponed) == 1 else torch.cat([x for _, x, _ in postponed])
        if bool(_finite(together).all()):
            return
        for stream, x, where in postponed:
            finite = _finite(x)
            if not bool(finite.all()):
                row = int(self.first_row) + int((~finite).nonzero()[0])
                raise ValueError(f"{self.names[stream]} row {row} became non-finite {where}")


def _finite(x: Tensor) -> Tensor:
    return x if x.dtype == torch.bool else torch.isfinite(x)


def integrate(
    rate: Rate,
    start: Points,
    times: Tensor,
    *,
    solver: str = "midpoint",
    manifold: Sphere = SPHERE,
    monitor: FiniteMonitor | None = None,
) -> Points:
    """Carries `start` along `rate` over the grid `times` [S + 1] and returns where it arrives.

    "euler" and "ab2" (two-step Adams-Bashforth, the last velocity carried along by parallel transport) evaluate the
    rate once a step, "midpoint" twice, "rk4" four times. A state that is not finite raises a ValueError with its row
    and step; `monitor` decides how it names streams and rows.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {SOLVERS}, got {solver!r}")
    advance = {"euler": _euler, "ab2": _ab2, "midpoint": _midpoint, "rk4": _rk4}[solver]
    if solver in ("euler", "ab2") and manifold.unit_norm:
        eps(start[0].dtype)  # geodesics cannot be followed in half precision
    monitor = monitor or FiniteMonitor([f"stream {stream}" for stream in range(len(start))])
    end = advance(rate, start, times.tolist(), manifold, solver, monitor)
    monitor.close()
    return end


def _euler(
    rate: Rate, point: Points, grid: list[float], manifold: Sphere, solver: str, monitor: FiniteMonitor
) -> Points:
    for k, (now, after) in enumerate(itertools.pairwise(grid)):
        h = after - now
        point = tuple(manifold.step(x, v, h) for x, v in zip(point, rate(point, now, h)))
        monitor.check(point, k, after, solver)
    return point


def _ab2(rate: Rate, point: Points, grid: list[float], manifold: Sphere, solver: str, monitor: FiniteMonitor) -> Points:
    """Adams-Bashforth of order two: v_k + h_k / (2 h_{k-1}) (v_k - v_{k-1}), begun with an Euler step."""
    steps = [after - now for now, after in itertools.pairwise(grid)]
    # Weight of the difference of velocities in step k: zero in the first step and beyond the last one.
    share = [0.0, *(h / (2 * before) for before, h in itertools.pairwise(steps)), 0.0]
    ahead = [*steps[1:], 0.0]
    carried: Sequence[Tensor | None] = [None] * len(point)
    for k, h in enumerate(steps):
        velocities = rate(point, grid[k], h * (1 + share[k]) - ahead[k] * share[k + 1])
        moved = [manifold.adams_bashforth_step(x, v, h, old, share[k]) for x, v, old in zip(point, velocities, carried)]
        point, carried = zip(*moved)
        monitor.check(point, k, grid[k + 1], solver)
    return point


def _midpoint(
    rate: Rate, point: Points, grid: list[float], manifold: Sphere, solver: str, monitor: FiniteMonitor
) -> Points:
    for k, (now, after) in enumerate(itertools.pairwise(grid)):
        h = after - now
        velocities = rate(point, now, 0.0)
        halfway = tuple(manifold.step_and_normalise(x, v, h / 2) for x, v in zip(point, velocities))
        moving = zip(point, rate(halfway, now + h / 2, h), halfway)
        point = tuple(manifold.step_and_normalise(x, v, h, y) for x, v, y in moving)
        monitor.check(point, k, after, solver)
    return point


def _rk4(rate: Rate, point: Points, grid: list[float], manifold: Sphere, solver: str, monitor: FiniteMonitor) -> Points:
    for k, (now, after) in enumerate(itertools.pairwise(grid)):
        h = after - now
        middle = now + h / 2
        at = total = point  # where the rate is evaluated, and the point plus the velocities so far, weighted
        for t, weight, ahead in ((now, h / 6, h / 2), (middle, h / 3, h / 2), (middle, h / 3, h)):
            moving = zip(point, rate(at, t, weight), at, total)
            at, total = zip(*[manifold.runge_kutta_stage(x, v, ahead, y, sum_, weight) for x, v, y, sum_ in moving])
        last = zip(total, rate(at, after, h / 6), at)
        point = tuple(manifold.step_and_normalise(x, v, h / 6, y) for x, v, y in last)
        monitor.check(point, k, after, solver)
    return point
