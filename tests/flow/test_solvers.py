"""Solvers: their order of convergence on a field with a known flow, their quadrature weights, grids, and failures."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.methods.euclidean import EUCLIDEAN
from geoflow_fast import noise
from geoflow_fast.flow.solvers import GRIDS, SOLVERS, evaluation_times, integrate, time_grid

ORDER = {"euler": 1, "ab2": 2, "midpoint": 2, "rk4": 4}


def swirl(t: float) -> torch.Tensor:
    """A rotation generator whose axis changes with time: the flow stays on the sphere."""
    a = torch.zeros(5, 5, dtype=torch.float64)
    a[0, 1], a[2, 3], a[1, 4] = 2.0, 1.0 + t, math.sin(3 * t)
    return a - a.T


def follow(solver: str, steps: int, kind: str = "uniform", *, reverse: bool = False) -> torch.Tensor:
    start = noise.sample_uniform(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grid = time_grid(steps, kind=kind, reverse=reverse)
    return integrate(lambda p, t, _: (p[0] @ swirl(t).T,), (start,), grid, solver=solver)[0]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_solvers_converge_with_their_order(solver, kind, reverse):
    exact = follow("rk4", 400, reverse=reverse)
    coarse, fine = ((follow(solver, n, kind, reverse=reverse) - exact).norm() for n in (20, 40))
    assert math.log2(float(coarse / fine)) == pytest.approx(ORDER[solver], abs=0.35)
    assert torch.allclose(follow(solver, 20, kind).norm(dim=1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", GRIDS)
def test_weights_integrate_along_the_path(solver, kind):
    """Sums of weight times integrand are exact for constants, and converge with the order of the solver."""
    totals = []

    def rate(point, t, weight):
        totals.append((weight, weight * math.cos(t)))
        return (torch.zeros_like(point[0]),)

    errors = []
    for steps in (10, 20):
        totals.clear()
        integrate(rate, (noise.sample_uniform(1, 3),), time_grid(steps, kind=kind), solver=solver)
        constant, cosine = map(sum, zip(*totals))
        assert constant == pytest.approx(1.0)
        errors.append(abs(cosine - math.sin(1.0)))
    assert errors[0] / errors[1] > 2 ** (ORDER[solver] - 0.4)


UNEVEN = torch.tensor([0.0, 0.31, 0.33, 0.5, 0.92, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("grid", [UNEVEN, *(time_grid(7, kind=kind) for kind in GRIDS)], ids=["uneven", *GRIDS])
@pytest.mark.parametrize("reverse", [False, True])
def test_ab2_is_exact_for_a_speed_that_is_linear_in_time(grid, reverse):
    """Only the first step, which is Euler's, has an error, and it is known. Weights for equal steps would converge with
    the same order on smooth grids, so that the order does not tell them from the right ones."""
    grid = grid.flip(0) if reverse else grid
    turn = torch.zeros(3, 3, dtype=torch.float64)
    turn[1, 0], turn[0, 1] = 1.0, -1.0
    summed = []

    def rate(point, t, weight):
        speed = 0.7 - 1.9 * t
        summed.append(weight * speed)
        return point[0] @ turn.T * speed, torch.full_like(point[1], speed)

    def antiderivative(t):
        return 0.7 * t - 1.9 * t**2 / 2

    first_step = float(grid[1] - grid[0])
    expected = float(antiderivative(grid[-1]) - antiderivative(grid[0])) + 1.9 * first_step**2 / 2
    circle = torch.eye(3, dtype=torch.float64)[:1]
    (around, _) = integrate(rate, (circle, circle), grid, solver="ab2")
    assert sum(summed) == pytest.approx(expected, abs=1e-12)
    angle = math.atan2(float(around[0, 1]), float(around[0, 0]))
    assert angle == pytest.approx(expected, abs=1e-12)
    (_, straight) = integrate(rate, (circle, circle), grid, solver="ab2", manifold=EUCLIDEAN)
    torch.testing.assert_close(straight, circle + expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_evaluation_times_are_known_in_advance(solver):
    grid, asked = time_grid(7, kind="late"), set()

    def rate(point, t, _):
        asked.add(t)
        return (torch.zeros_like(point[0]),)

    integrate(rate, (noise.sample_uniform(1, 3),), grid, solver=solver)
    assert asked == set(evaluation_times(grid, solver))


def test_points_of_flat_space_are_not_normalised():
    start = torch.full((1, 3), 2.0)
    (end,) = integrate(lambda p, _t, _w: (torch.ones_like(p[0]),), (start,), time_grid(4), manifold=EUCLIDEAN)
    assert torch.allclose(end, start + 1)


def test_errors_name_the_row_and_the_step():
    def rate(point, t, _):
        v = torch.zeros_like(point[0])
        if t > 0.5:
            v[2] = math.inf
        return (v,)

    with pytest.raises(ValueError, match=r"row 2 became non-finite in step 3"):
        integrate(rate, (noise.sample_uniform(4, 3),), time_grid(5), solver="euler")
    with pytest.raises(ValueError, match="solver must be one of"):
        integrate(rate, (noise.sample_uniform(4, 3),), time_grid(5), solver="heun")
    for bad, error in ((0, ValueError), (-3, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="n_steps"):
            time_grid(bad)
    with pytest.raises(ValueError, match="grid"):
        time_grid(3, kind="random")
