"""Optimal-transport ops against POT in float64, closed forms, and their own laws, on every backend that runs here."""

from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from torch._subclasses.fake_tensor import FakeTensorMode

import geoflow_fast as gf
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import native, transport_solvers
from geoflow_fast.ops.ot_assign import condition_weight
from geoflow_fast.ops.transport import Span, make_problem, make_settings
from geoflow_fast.ops.transport_solvers import Panel, WideSolve, load_scores

ot = pytest.importorskip("ot")

OP = "ot_assign"
SIZES = [1, 2, 7, 129, 1000, 1023]
ITERATIONS = {"cpu": 3000, "reference": 200}  # plain torch is slow
compiled = pytest.mark.skipif(native.missing() is not None, reason="compiled extension is not built")


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Uninitialised memory that the solver reads as data shows up as NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(native.torch, "empty", poisoned)


def clouds(n: int, image: int = 48, text: int = 33, m: int | None = None, dtype: torch.dtype = torch.float32):
    widths = ((n, image), (n, text), (m or n, image), (m or n, text))
    return tuple(sample_uniform(rows, d, dtype=dtype) for rows, d in widths)


def wide_cost(points, cost: str = "arc") -> torch.Tensor:
    """The cost in float64 from its definition."""
    total = 0
    for noise, data in zip(points[:2], points[2:]):
        noise, data = noise.double(), data.double()
        if cost == "arc":
            distance = torch.cdist(noise, data, compute_mode="donot_use_mm_for_euclid_dist")
            total = total + 2 * torch.asin((distance / 2).clamp(max=1))
        else:
            total = total + torch.cdist(noise, data, compute_mode="donot_use_mm_for_euclid_dist").square()
    return total


def pot_potentials(cost: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(f, g) of POT's log-domain Sinkhorn in float64, solved beyond our tolerances (its error is an L2 norm)."""
    _, log = ot.bregman.sinkhorn_log([], [], cost.numpy(), eps, numItermax=800, stopThr=1e-7, log=True, warn=False)
    return eps * torch.from_numpy(log["log_u"]), eps * torch.from_numpy(log["log_v"])


@functools.cache
def pot_case(n: int, width: int, eps: float):
    """Points, their float64 cost and POT's potentials, shared by the tests of all backends."""
    torch.manual_seed(n + width)
    points = clouds(n, width, width)
    cost = wide_cost(points)
    return points, cost, *pot_potentials(cost, eps)


def plan_of(f: torch.Tensor, g: torch.Tensor, cost: torch.Tensor, eps: float) -> torch.Tensor:
    return ((f[:, None] + g - cost) / eps).exp()


def row_error(result: gf.ops.SinkhornResult, cost: torch.Tensor, eps: float) -> float:
    """The L1 violation of the row sums of the plan that a user computes from a result, in float64."""
    plan = plan_of(*result.potentials, cost.double(), eps)
    return float((plan.sum(1) - 1 / len(cost)).abs().sum())


def column_error(result: gf.ops.SinkhornResult, cost: torch.Tensor, eps: float) -> float:
    plan = plan_of(*result.potentials, cost.double(), eps)
    return float((plan.sum(0) - 1 / cost.shape[1]).abs().sum())


def share_equal(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).double().mean())


# ---- truth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", ["arc", "chord"])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 7), (7, 2), (129, 300), (1023, 1000)])
def test_cost_matrix_matches_float64(backend, n, m, cost):
    points = clouds(n, 48, 33, m)
    matrix = gf.ops.transport_cost(*points, cost=cost, weights=(1.0, 1.0), backend=backend)
    assert matrix.shape == (n, m)
    assert torch.allclose(matrix.double(), wide_cost(points, cost), atol=3e-6)


@pytest.mark.parametrize("width", [5, 16, 255, 256, 257, 700])
def test_cost_build_at_ragged_widths_and_strides(backend, width):
    points = tuple(sample_uniform(97, width + 3)[:, :width] for _ in range(4))
    points = tuple(gf.geometry.normalize(x).T.contiguous().T for x in points)
    assert not points[0].is_contiguous()
    matrix = gf.ops.transport_cost(*points, weights=(0.5, 2.0), backend=backend)
    image, text = (wide_cost((a, a, b, b)) / 2 for a, b in ((points[0], points[2]), (points[1], points[3])))
    assert torch.allclose(matrix.double(), 0.5 * image + 2.0 * text, atol=1e-5)


@pytest.mark.parametrize(("eps", "tol", "agreement"), [(0.05, 1e-5, 0.999), (0.005, 1e-3, 0.995)])
@pytest.mark.parametrize("width", [64, 1024])
def test_agrees_with_pot_in_float64(backend, eps, tol, agreement, width):
    points, cost, f, g = pot_case(200 if backend == "reference" or width == 64 else 500, width, eps)
    result = gf.ops.sinkhorn("arc", points, eps=eps, tol=tol, backend=backend)
    assert result.converged
    assert result.marginal_error <= tol
    if eps == 0.05:  # at 0.005 the plan is almost a permutation, and its potentials almost free
        shift = float((result.g - g).mean())
        assert float((result.g - g - shift).abs().max()) <= 0.01 * eps
        assert float((result.f - f + shift).abs().max()) <= 0.01 * eps
    plan, truth = plan_of(*result.potentials, cost, eps), plan_of(f, g, cost, eps)
    assert float((plan - truth).abs().sum()) <= (0.01 if eps == 0.05 else 0.05)
    assert result.transport_cost == pytest.approx(float((truth * cost).sum()), rel=1e-4)
    assigned = gf.ops.ot_assign(*points, eps=eps, tol=tol, backend=backend)
    assert assigned.dtype == torch.int64
    assert share_equal(assigned, (g - cost).argmax(1)) >= agreement


def test_default_tolerance_assigns_as_the_converged_plan(backend):
    points, cost, _, g = pot_case(1000, 1024, 0.05)
    assert share_equal(gf.ops.ot_assign(*points, backend=backend), (g - cost).argmax(1)) >= 0.999


@pytest.mark.parametrize("eps", [10.0, 0.05, 0.005])
@pytest.mark.parametrize("n", SIZES)
def test_marginals_at_every_size(backend, n, eps):
    if backend == "reference" and eps < 0.05:
        eps = 0.02  # plain torch is slow
    points = clouds(n, 256, 256)
    result = gf.ops.sinkhorn("arc", points, eps=eps, backend=backend)
    plan = plan_of(*result.potentials, wide_cost(points), eps)
    assert result.converged
    assert float((plan.sum(0) - 1 / n).abs().sum()) <= 2e-4
    assert float((plan.sum(1) - 1 / n).abs().sum()) <= result.marginal_error + 2e-4


def test_both_backends_take_the_same_steps():
    """In the kernel domain an iteration is an iteration of the reference, to float32 rounding."""
    points = clouds(300)
    wide = tuple(x.double() for x in points)
    for iterations in (1, 2, 3):
        with pytest.warns(RuntimeWarning, match=f"stopped after {iterations} iterations"):
            truth = gf.ops.sinkhorn("arc", wide, tol=1e-12, max_iter=iterations, backend="reference")
        with pytest.warns(RuntimeWarning, match=f"stopped after {iterations} iterations"):
            result = gf.ops.sinkhorn("arc", points, tol=1e-12, max_iter=iterations)
        assert torch.allclose(result.f, truth.f, atol=1e-6)
        assert torch.allclose(result.g, truth.g, atol=1e-6)


def test_permutation_equivariance(backend):
    points = clouds(300)
    rows, columns = torch.randperm(300), torch.randperm(300)
    index = gf.ops.ot_assign(*points, backend=backend)
    moved = gf.ops.ot_assign(points[0][rows], points[1][rows], points[2][columns], points[3][columns], backend=backend)
    assert share_equal(columns[moved], index[rows]) >= 0.997


@pytest.mark.parametrize("eps", [10.0, 0.05, 1e-3, 1e-4])
def test_identical_clouds_map_to_themselves(backend, eps):
    x, y = sample_uniform(129, 20), sample_uniform(129, 31)
    index = gf.ops.ot_assign(x, y, x, y, eps=eps, backend=backend)
    assert torch.equal(index, torch.arange(129))


@pytest.mark.parametrize("eps", [10.0, 0.05, 1e-3])
def test_antipodal_clouds(backend, eps):
    x, y = sample_uniform(129, 20), sample_uniform(129, 31)
    points = (x, y, -x, -y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        result = gf.ops.sinkhorn("arc", points, eps=eps, max_iter=ITERATIONS[backend], backend=backend)
    plan = plan_of(*result.potentials, wide_cost(points), eps)
    assert result.converged or (backend == "reference" and eps < 0.05)
    assert float((plan.sum(1) - 1 / 129).abs().sum()) <= result.marginal_error + 1e-3
    if eps == 0.05:
        assert bool((gf.ops.ot_assign(*points, eps=eps, backend=backend) != torch.arange(129)).all())


def test_one_target_for_all(backend):
    """All data equal: every plan entry is 1/B^2 and the argmax is the first of equals."""
    x, y = sample_uniform(60, 20), sample_uniform(60, 20)
    points = (x, y, sample_uniform(1, 20).expand(60, 20), sample_uniform(1, 20).expand(60, 20))
    result = gf.ops.sinkhorn("arc", points, backend=backend)
    assert result.iterations == 1
    assert torch.allclose(
        plan_of(*result.potentials, wide_cost(points), 0.05), torch.tensor(1 / 3600.0).double(), rtol=1e-4
    )
    assert torch.equal(gf.ops.ot_assign(*points, backend=backend), torch.zeros(60, dtype=torch.int64))


@pytest.mark.parametrize("eps", [10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4])
def test_every_eps_gives_a_finite_plan_with_honest_report(backend, eps):
    points = clouds(100)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = gf.ops.sinkhorn("arc", points, eps=eps, max_iter=ITERATIONS[backend], backend=backend)
    assert bool(torch.isfinite(result.f).all() and torch.isfinite(result.g).all())
    assert result.converged == (result.marginal_error <= 1e-3)
    assert len(seen) == (not result.converged)
    plan = plan_of(*result.potentials, wide_cost(points), eps)
    assert float((plan.sum(1) - 1 / 100).abs().sum()) <= max(1.5 * result.marginal_error, 2e-3 + 2e-6 / eps)


def quiet_sinkhorn(*problem: object, **settings: object) -> gf.ops.SinkhornResult:
    """A solve that may stop at its last iteration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return gf.ops.sinkhorn(*problem, **settings)


@pytest.mark.parametrize("eps", [0.05, 1e-3, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (129, 129), (7, 129), (129, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_is_that_of_the_plan_that_is_returned(backend, dtype, shape, eps):
    """float32 says 5e-8 at eps=1e-6 where the rows of its plan are off by 7e-3."""
    cost = torch.rand(shape, dtype=dtype)
    result = quiet_sinkhorn(cost, eps=eps, max_iter=1000 if backend == "cpu" else 100, backend=backend)
    assert row_error(result, cost, eps) <= result.marginal_error
    assert column_error(result, cost, eps) <= 2e-4
    assert result.converged == (result.marginal_error <= 1e-3)
    assert result.converged or backend == "reference" or min(shape) < max(shape)
    plan = plan_of(*result.potentials, cost.double(), eps)
    assert result.transport_cost == pytest.approx(float((plan * cost.double()).sum()), rel=1e-3)


@pytest.mark.parametrize("eps", [1e-3, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("kind", ["arc", "chord"])
def test_the_error_of_a_plan_between_points(backend, kind, eps):
    points = clouds(129, 5, 9)
    cost = gf.ops.transport_cost(*points, cost=kind, backend=backend)
    settings = {"eps": eps, "max_iter": 1000 if backend == "cpu" else 100, "backend": backend}
    result = quiet_sinkhorn(kind, points, **settings)
    assert row_error(result, cost, eps) <= result.marginal_error
    assert column_error(result, cost, eps) <= 5e-4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        index = gf.ops.ot_assign(*points, cost=kind, **settings)
    assert torch.equal(index, (result.g - cost.double()).argmax(1))


@pytest.mark.parametrize("kind", ["integers", "line", "offset", "binade"])
@pytest.mark.parametrize("eps", [1e-2, 1e-3, 3e-4, 1e-5])
def test_the_error_bounds_rounding_that_is_not_random(backend, kind, eps):
    line = torch.linspace(0, 1, 65)
    cost = {
        "integers": torch.randint(0, 4, (65, 65)).float() / 3,
        "line": (line[:, None] - line.flip(0)).abs(),
        "offset": 1e4 + torch.rand(65, 65),
        "binade": 1 + torch.rand(65, 65) * (1 - 2.0**-20) * torch.linspace(0, 1, 65),
    }[kind]
    result = quiet_sinkhorn(cost, eps=eps, max_iter=600 if backend == "cpu" else 60, backend=backend)
    assert row_error(result, cost, eps) <= result.marginal_error


@pytest.mark.parametrize("tol", [1e-5, 1e-9, 1e-12])
def test_a_tolerance_that_float32_does_not_resolve_is_met(backend, tol):
    points = clouds(60, 16, 16)
    result = gf.ops.sinkhorn("arc", points, eps=0.2, tol=tol, backend=backend)
    cost = gf.ops.transport_cost(*points, backend=backend)
    assert result.converged
    assert row_error(result, cost, 0.2) <= result.marginal_error <= tol


@pytest.mark.parametrize(("eps", "scale"), [(1e-20, 1.0), (0.05, 1e30), (1e-300, 1e-20), (1e-3, 3e38)])
@pytest.mark.parametrize("n", [1, 7, 129])
def test_an_eps_that_no_float_resolves_is_refused_by_name(backend, eps, scale, n):
    cost = scale * torch.rand(n, n)
    with pytest.raises(ValueError, match=r"float64 holds their plan for eps of at least \S+") as refusal:
        gf.ops.sinkhorn(cost, eps=eps, backend=backend)
    with pytest.raises(ValueError, match="eps of at least"):
        gf.ops.ot_assign(*clouds(n, 4, 4), cost=cost, eps=eps, backend=backend)
    least = float(str(refusal.value).split()[-1])
    result = quiet_sinkhorn(cost, eps=least, max_iter=1000 if backend == "cpu" else 100, backend=backend)
    assert row_error(result, cost, least) <= result.marginal_error
    assert bool(torch.isfinite(result.f).all() and torch.isfinite(result.g).all())
    assert math.isfinite(result.transport_cost)
    assert result.converged or backend == "reference"


@pytest.mark.parametrize(("shape", "eps"), [((7, 7), 0.05), ((7, 7), 0.02), ((40, 31), 0.05), ((40, 31), 1e-2)])
def test_tight_tolerances_agree_with_pot_in_float64(shape, eps):
    """A plan near a permutation moves long after its marginals look settled: both must be solved far."""
    cost = torch.rand(shape, dtype=torch.float64)
    settings = {"numItermax": 10000, "stopThr": 1e-12, "warn": False}
    weights = (np.full(n, 1 / n) for n in shape)
    truth = torch.from_numpy(ot.sinkhorn(*weights, cost.numpy(), eps, method="sinkhorn_log", **settings))
    assert float((truth.sum(1) - 1 / shape[0]).abs().sum()) <= 1e-9
    result = gf.ops.sinkhorn(cost, eps=eps, tol=1e-9, max_iter=10000)
    assert result.converged
    assert float((plan_of(*result.potentials, cost, eps) - truth).abs().sum()) <= 1e-6


@compiled
def test_at_tiny_eps_the_plan_is_the_exact_assignment():
    cost = torch.rand(129, 129)
    _, columns = linear_sum_assignment(cost.double().numpy())
    for eps in (1e-6, 1e-8):
        result = gf.ops.sinkhorn(cost, eps=eps)
        assert result.converged
        # mass in the wrong row moves by no more than the largest cost, and an entropic plan costs eps log n more
        best, slack = float(cost.double()[range(129), columns].mean()), result.marginal_error + eps * math.log(129)
        assert result.transport_cost == pytest.approx(best, abs=slack)
        assert torch.equal(gf.ops.ot_assign(*clouds(129, 4, 4), cost=cost, eps=eps), torch.from_numpy(columns))


@compiled
def test_usual_settings_stay_in_float32(monkeypatch):
    """float64 is for what float32 cannot hold; the coupling of a training batch must not pay for it."""
    monkeypatch.setattr(transport_solvers, "WideSolve", None)
    points = clouds(129, 64, 64)
    for eps in (0.5, 0.05, 5e-3):
        gf.ops.ot_assign(*points, eps=eps)
        gf.ops.ot_assign(*points, cost=torch.rand(129, 129), eps=eps)
    with pytest.raises(TypeError, match="not callable"):
        gf.ops.ot_assign(*points, eps=1e-5)


@pytest.mark.parametrize("max_iter", [1, 2, 15, 40])
def test_float64_keeps_to_the_iterations(backend, max_iter):
    cost = torch.rand(30, 30)
    with pytest.warns(RuntimeWarning, match=f"stopped after {max_iter} iterations"):
        result = gf.ops.sinkhorn(cost, eps=1e-6, max_iter=max_iter, backend=backend)
    assert result.iterations == max_iter
    assert row_error(result, cost, 1e-6) <= result.marginal_error


def test_costs_beyond_the_range_of_float32_are_refused():
    with pytest.raises(ValueError, match="beyond the range of float32"):
        gf.ops.sinkhorn(torch.full((3, 3), 1e39, dtype=torch.float64))


@compiled
def test_half_storage_refuses_an_eps_that_it_rounds_away():
    cost = torch.rand(60, 60)
    with pytest.raises(ValueError, match=r"too small for storage='float16'.* at least 0\.006") as refusal:
        gf.ops.sinkhorn(cost, eps=1e-4, storage="float16")
    least = float(str(refusal.value).split()[-1])
    quiet_sinkhorn(cost, eps=least, storage="float16")


@pytest.mark.own_default("device", reason="the option's own frame stands between the user and the library")
@pytest.mark.own_default("dtype", reason="the option's own frame stands between the user and the library")
def test_an_unfinished_solve_warns_at_the_users_line():
    for call in (
        lambda: gf.ops.sinkhorn(torch.rand(9, 9), max_iter=1, eps=0.01),
        lambda: gf.ops.ot_assign(*clouds(9), max_iter=1, eps=0.01),
        lambda: gf.ops.couple(*clouds(9), max_iter=1, eps=0.01),
    ):
        with pytest.warns(RuntimeWarning, match="stopped after 1 iterations") as seen:
            call()
        assert seen[0].filename == __file__


@pytest.mark.parametrize("spread", [1e2, 1e4, 1e6])
def test_huge_cost_ranges(backend, spread):
    cost = spread * torch.rand(60, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        result = gf.ops.sinkhorn(cost, eps=1.0, max_iter=ITERATIONS[backend], backend=backend)
        index = gf.ops.ot_assign(*clouds(60), cost=cost, eps=1.0, max_iter=ITERATIONS[backend], backend=backend)
    assert bool(torch.isfinite(result.f).all() and torch.isfinite(result.g).all())
    assert math.isfinite(result.transport_cost)
    best = float(cost[linear_sum_assignment(cost.numpy())].mean())
    if result.converged:  # an entropic plan costs at most eps times the entropy of the plan more than the best
        assert best - 1e-3 * spread <= result.transport_cost <= best + math.log(60) + 2e-3 * spread
    assert float(cost[torch.arange(60), index].mean()) <= 2 * best + math.log(60)


@compiled
def test_columns_that_no_row_reaches_at_first():
    """At the start every row puts all its float32 mass on one column: the others are recovered by their own sum."""
    cost = torch.rand(40, 40) * 1e-3 + 1e4 * (1 - torch.eye(40)[0])
    result = gf.ops.sinkhorn(cost, eps=0.1)
    assert result.converged
    assert float((plan_of(*result.potentials, cost.double(), 0.1).sum(0) - 1 / 40).abs().sum()) <= 0.05


@compiled
def test_kernel_domain_hands_over_to_scores():
    """Potentials that outgrow the exponentials' range: same answer as a solve that never entered the kernel domain."""
    n, eps = 30, 1.0
    position = torch.linspace(0, 1, n)
    cost = 155 * (position[:, None] - position.flip(0)[None]).abs() * torch.linspace(0.2, 1, n)
    result = gf.ops.sinkhorn(cost, eps=eps, max_iter=3000)
    truth = gf.ops.sinkhorn(cost.double(), eps=eps, max_iter=3000, backend="reference")
    assert result.converged
    plans = [plan_of(*r.potentials, cost.double(), eps) for r in (result, truth)]
    assert float((plans[0] - plans[1]).abs().sum()) <= 0.05


@compiled
@pytest.mark.parametrize("row", [0, 3, 5])
def test_sums_that_exponentials_cannot_hold_are_not_given(row):
    """One row or column whose sum leaves the range of float32 is enough; other rows are summed as in float64."""
    eps, cost, g = 1.0, torch.rand(6, 21), torch.zeros(21, dtype=torch.float64)
    g[4] = 20.0
    beyond, lost = cost.clone(), cost.clone()
    beyond[row, 4] -= 79  # the exponential of 79 + 20 / 2 overflows
    lost[:, 7] += 79  # a column that is exp(-79 - 65) times another one vanishes
    lost[:, 8] -= 65
    f = torch.zeros(6, dtype=torch.float64)
    for costs, held in ((cost, True), (beyond, False), (lost, False)):
        matrix = native.TransportMatrix(6, 21, torch.float32)
        matrix.load(costs, 0.0)
        matrix.enter_kernel(0.0, eps)
        sums = matrix.panel_pass(f, g, eps, 6)
        assert (sums is not None) == held
        if held:
            torch.testing.assert_close(sums, ((g - costs) / eps).softmax(1).mean(0), rtol=1e-5, atol=0)


@compiled
@pytest.mark.parametrize("arc", [True, False])
@pytest.mark.parametrize("kernel_eps", [None, 0.5])
@pytest.mark.parametrize("cols", [5, 16, 21])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_extremes_of_costs_between_points_are_those_of_their_columns(arc, kernel_eps, cols, sign):
    """Where all points are near each other, or all far, zero is not between them, which fills the ends of rows."""
    noise, data = (gf.geometry.normalize(torch.eye(1, 8) + 0.05 * torch.randn(n, 8)) for n in (7, cols))
    matrix = native.TransportMatrix(7, cols, torch.float32)
    low, high = matrix.build((noise, sign * data), (noise, sign * data), (1.0, 0.5), arc, kernel_eps)
    product = sign * noise.double() @ data.double().T
    scores = 1.5 * (torch.asin(product) if arc else 2 * product)
    assert (low, high) == pytest.approx((float(scores.min()), float(scores.max())), abs=1e-5)


def test_rectangular_matrix(backend):
    cost = 3 * torch.rand(70, 131, dtype=torch.float64) + 1e3
    result = gf.ops.sinkhorn(cost, eps=0.1, tol=1e-5, max_iter=2000, backend=backend)
    f, g = pot_potentials(cost, 0.1)
    assert float((plan_of(*result.potentials, cost, 0.1) - plan_of(f, g, cost, 0.1)).abs().sum()) <= 1e-3


# ---- the compiled solver --------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("eps", [0.05, 0.002, 1e-4])
def test_threads_do_not_change_a_bit(eps):
    points, threads = clouds(523, 64, 64), torch.get_num_threads()
    outcomes = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            outcomes.append(gf.ops.sinkhorn("arc", points, eps=eps, max_iter=4000))
    finally:
        torch.set_num_threads(threads)
    for result in outcomes[1:]:
        assert torch.equal(result.f, outcomes[0].f)
        assert torch.equal(result.g, outcomes[0].g)
        assert result.transport_cost == outcomes[0].transport_cost


@compiled
@pytest.mark.parametrize("eps", [0.05, 0.005])
def test_half_storage(eps):
    points = clouds(600, 512, 512)
    cost = wide_cost(points)
    result = gf.ops.sinkhorn("arc", points, eps=eps, storage="float16", max_iter=3000)
    truth = gf.ops.sinkhorn("arc", points, eps=eps, max_iter=3000)
    assert result.converged
    plans = [plan_of(*r.potentials, cost, eps) for r in (result, truth)]
    assert float((plans[0] - plans[1]).abs().sum()) <= 2e-4 / eps
    assigned = [gf.ops.ot_assign(*points, eps=eps, max_iter=3000, storage=s) for s in ("float16", "float32")]
    assert share_equal(*assigned) >= 0.985


@compiled
@pytest.mark.filterwarnings("ignore:sinkhorn stopped")
@pytest.mark.parametrize(("n", "m"), [(2, 3), (7, 7), (129, 300)])
@pytest.mark.parametrize("spread", [0.1, 2.0, 16.0, 40.0, 160.0])
def test_error_of_half_storage_by_spread(spread, n, m):
    """The plan's error is below 1e-4 (4 + spread of C / eps), as documented."""
    random, points = torch.rand(n, m, dtype=torch.float64), clouds(n, 16, 16, m, torch.float64)
    first = torch.arange(n)[:, None] + torch.arange(m) == 0
    for cost in (random, random / 20 + (random * 1e3 % 1 < 0.5), random / 10 + first, wide_cost(points)):
        cost = (cost - cost.min()) / (cost.max() - cost.min())
        eps = 1 / (0.999 * spread)
        half = gf.ops.sinkhorn(cost, eps=eps, tol=1e-6, max_iter=2000, storage="float16")
        truth = gf.ops.sinkhorn(cost, eps=eps, tol=1e-7, max_iter=2000, backend="reference")
        plans = [plan_of(*result.potentials, cost, eps) for result in (half, truth)]
        assert float((plans[0] - plans[1]).abs().sum()) <= 1e-4 * (4 + spread)


@compiled
def test_half_storage_refuses_a_spread_that_it_does_not_resolve():
    points = clouds(33, 48, 33)
    cost = wide_cost(points)
    eps = float(cost.max() - cost.min()) / 161
    for call in (
        lambda: gf.ops.sinkhorn(cost, eps=eps, storage="float16"),
        lambda: gf.ops.sinkhorn("arc", points, eps=eps, storage="float16"),
        lambda: gf.ops.ot_assign(*points, eps=eps, storage="float16"),
    ):
        with pytest.raises(ValueError, match="is too small for storage='float16'"):
            call()
    with pytest.warns(RuntimeWarning, match="stopped after 5 iterations"):
        gf.ops.sinkhorn(cost, eps=eps, max_iter=5, tol=1e-6)


@compiled
def test_memory_is_one_matrix():
    """Peak resident memory of a solve, in a process of its own: one float32 matrix and a little; half in float16."""
    script = """
import sys, torch, geoflow_fast as gf
from pathlib import Path
from geoflow_fast.noise import sample_uniform
n = 6000
points = [sample_uniform(n, 64) for _ in range(4)]
gf.ops.ot_assign(*(x[:64] for x in points))
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
gf.ops.ot_assign(*points, storage=sys.argv[1])
print((status("VmHWM") - before) / (4 * n * n))
"""
    for storage, limit in (("float32", 1.15), ("float16", 0.65)):
        run = subprocess.run([sys.executable, "-c", script, storage], capture_output=True, text=True, check=True)
        assert float(run.stdout) <= limit


@compiled
@pytest.mark.parametrize("stage", ["iterations", "build"])
def test_interrupt_stops_a_long_solve(stage):
    # A shell that runs this in the background has its children ignore Ctrl-C.
    script = """
import signal, sys, torch, geoflow_fast as gf
from geoflow_fast.noise import sample_uniform
signal.signal(signal.SIGINT, signal.default_int_handler)
points = [sample_uniform(*((3000, 8) if sys.argv[1] == "iterations" else (12000, 512))) for _ in range(4)]
print("ready", flush=True)
try:
    gf.ops.sinkhorn("arc", tuple(points), eps=1e-3, tol=1e-12, max_iter=10**9)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script, stage], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert out == "stopped\n"


# ---- assignments ----------------------------------------------------------------------------------------------------


def test_sample_follows_the_rows_of_the_plan(backend):
    cost = 0.2 * torch.rand(40, 40)
    result = gf.ops.sinkhorn(cost, tol=1e-5, backend=backend)
    plan = plan_of(*result.potentials, cost.double(), 0.05) * 40
    counts = torch.zeros(40, 40, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    draws, points = 200, clouds(40, 4, 4)
    for _ in range(draws):
        index = gf.ops.ot_assign(
            *points, cost=cost, tol=1e-5, assignment="sample", generator=generator, backend=backend
        )
        counts[torch.arange(40), index] += 1
    expected = draws * plan / plan.sum(1, keepdim=True)
    chi2 = float(((counts - expected).square() / expected).sum())
    assert stats.chi2.sf(chi2, 40 * 39) > 1e-4


def test_backends_draw_alike():
    points = clouds(257)
    draws = [
        gf.ops.ot_assign(*points, assignment="sample", generator=torch.Generator().manual_seed(5), backend=backend)
        for backend in ("cpu", "reference")
    ]
    assert share_equal(*draws) >= 0.99


def test_draws_without_a_generator_are_those_of_torch(backend):
    points = clouds(60)
    wanted = gf.ops.ot_assign(*points, assignment="sample", generator=torch.Generator().manual_seed(5), backend=backend)
    torch.manual_seed(5)
    assert torch.equal(gf.ops.ot_assign(*points, assignment="sample", backend=backend), wanted)


def test_exact_is_the_linear_assignment(backend):
    points = clouds(129)
    index = gf.ops.ot_assign(*points, assignment="exact", backend=backend)
    cost = wide_cost(points)
    _, columns = linear_sum_assignment(cost.numpy())
    assert len(index.unique()) == 129
    rows = torch.arange(129)
    assert float(cost[rows, index].sum()) == pytest.approx(float(cost[rows, torch.from_numpy(columns)].sum()), abs=1e-4)


def test_couple_by_name():
    points = clouds(64)
    assert torch.equal(gf.ops.couple(*points, coupling="independent"), torch.arange(64))
    assert torch.equal(gf.ops.couple(*points, coupling="paper"), gf.ops.ot_assign(*points))
    assert torch.equal(gf.ops.couple(*points, coupling="paper", direction="i2t"), gf.ops.ot_assign(*points))
    assert torch.equal(gf.ops.couple(*points, coupling="exact"), gf.ops.ot_assign(*points, assignment="exact"))
    drawn = [gf.ops.couple(*points, coupling="sample", generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_c2ot_weight_meets_its_ratio_and_limits(direction):
    points = clouds(300, 16, 16)
    noise, data, condition = (points[1], points[3], points[2]) if direction == "i2t" else (points[0], *points[2:])
    weight = condition_weight(noise, data, condition, 0.05)
    moved, between = wide_cost((noise, noise, data, data)) / 2, wide_cost((condition,) * 4) / 2
    share = float((moved + weight * between <= moved.diagonal()[:, None] + 1e-9).double().mean())
    assert share == pytest.approx(0.05, abs=0.002)
    coupled = gf.ops.couple(*points, coupling="c2ot", direction=direction, target_ratio=0.05)
    assert len(coupled.unique()) == 300
    rows = torch.arange(300)
    free = gf.ops.couple(*points, coupling="c2ot", direction=direction, target_ratio=1.0)
    assert torch.equal(gf.ops.couple(*points, coupling="c2ot", direction=direction, target_ratio=1 / 300), rows)
    costs = [float(moved[rows, index].mean()) for index in (free, coupled, rows)]
    shifts = [float(between[rows, index].mean()) for index in (free, coupled, rows)]
    assert costs == sorted(costs)
    assert shifts == sorted(shifts, reverse=True)


# ---- bad input ------------------------------------------------------------------------------------------------------


def bad_rows(points, which: int, row: int, value: float):
    points = [x.clone() for x in points]
    points[which][row] = value
    return points


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: bad_rows(p, 0, 3, math.nan), ValueError, "image0 row 3 is not finite"),
        (lambda p: bad_rows(p, 3, 5, 0.0), ValueError, "text1 row 5 is all zeros"),
        (lambda p: bad_rows(p, 2, 1, 7.0), ValueError, "image1 row 1 has norm"),
        (lambda p: (p[0], p[1][:5], p[2], p[3]), ValueError, "text0 has 5 rows, but image0 has 9"),
        (lambda p: (p[0][:5], p[1][:5], p[2], p[3]), ValueError, "image1 has 9 rows, but image0 has 5"),
        (lambda p: (p[0][:, :4], *p[1:]), ValueError, "image0 has width 4, but its twin has 48"),
        (lambda p: (p[0][0], *p[1:]), ValueError, "image0 must be"),
        (lambda p: tuple(x[:0] for x in p), ValueError, "at least one row"),
        (lambda p: (p[0].double(), *p[1:]), TypeError, "image0 is torch.float64, but image1 is torch.float32"),
        (lambda p: tuple(x.half() for x in p), TypeError, "float32 and float64"),
        (lambda p: (p[0].numpy(), *p[1:]), TypeError, "image0 must be a tensor"),
        (lambda p: (*p[:2], p[2].numpy(), p[3]), TypeError, "image1 must be a tensor"),
    ],
)
def test_bad_points(backend, change, error, message):
    with pytest.raises(error, match=message):
        gf.ops.ot_assign(*change(clouds(9)), backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps must be positive"),
        ({"eps": -1.0}, "eps must be positive"),
        ({"eps": math.nan}, "eps must be positive"),
        ({"tol": 0.0}, "tol must be positive"),
        ({"max_iter": 0}, "max_iter"),
        ({"storage": "int8"}, "storage must be one of"),
        ({"assignment": "nearest"}, "assignment must be one of"),
        ({"cost": "euclid"}, "cost must be a matrix or one of"),
        ({"cost": torch.zeros(3, 3)}, r"cost must be \[9, 9\]"),
        ({"cost": torch.full((9, 9), math.inf)}, r"cost is not finite at \(0, 0\)"),
        ({"backend": "cuda"}, "cuda"),
        ({"backend": "abacus"}, "no such backend"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        gf.ops.ot_assign(*clouds(9), **options)


def test_a_count_that_is_no_integer_is_a_type_error():
    with pytest.raises(TypeError, match="max_iter must be an integer"):
        gf.ops.ot_assign(*clouds(9), max_iter=1.5)


def test_bad_problems_and_couplings():
    points = clouds(9)
    for call, message in (
        (lambda: gf.ops.sinkhorn("arc"), "needs factors"),
        (lambda: gf.ops.sinkhorn(torch.zeros(3, 3), points), "not both"),
        (lambda: gf.ops.sinkhorn(torch.zeros(0, 3)), "at least one row"),
        (lambda: gf.ops.transport_cost(*points, weights=(-1.0, 1.0)), "weights must be"),
        (lambda: gf.ops.transport_cost(*points, weights=(0.0, 0.0)), "weights must be"),
        (lambda: gf.ops.couple(*points, coupling="c2ot"), "coupling of joint rows"),
        (lambda: gf.ops.couple(*points, coupling="exact", direction="i2t"), "coupling of i2t rows"),
        (lambda: gf.ops.couple(*points, direction="both"), "direction must be"),
        (lambda: gf.ops.couple(*points, coupling="c2ot", direction="i2t", target_ratio=0.0), "target_ratio"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("eps", [1e-2, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_potentials_of_a_given_matrix_belong_to_that_matrix(eps, dtype):
    """A large common cost must not leave its rounding in the potentials: the marginals are recomputed from them."""
    cost = (1000 + 0.37 * torch.rand(64, 64, dtype=torch.float64)).to(dtype)
    solution = gf.ops.sinkhorn(cost, eps=eps, tol=1e-3, backend="cpu")
    plan = torch.exp((solution.f.unsqueeze(1) + solution.g.unsqueeze(0) - cost.double()) / eps)
    assert solution.converged
    assert float((plan.sum(1) - 1 / 64).abs().sum()) < 2e-3


@pytest.mark.parametrize("far", [0.0, 5.0])
def test_the_rows_of_a_rank_are_iterated_as_a_whole_problem_is(far):
    """A column that is far from every row gets no mass that a float can hold at first, and is solved by logarithms."""
    cost = torch.rand(20, 20, dtype=torch.float64)
    cost[:, 3] += far
    problem, eps = make_problem(cost, None, (1.0, 1.0)), 0.05
    solved = []
    for matrix in (native.TransportMatrix(20, 20, torch.float32), Panel(20, 20, torch.float32, ALONE)):
        load_scores(matrix, problem, eps)
        f, g = (torch.zeros(20, dtype=torch.float64) for _ in range(2))
        outcome, _, error = matrix.iterate(f, g, eps, 1e-5, 5000)
        assert (outcome, error <= 1e-5) == (matrix.CONVERGED, True)
        solved.append((f, g))
    nothing = Panel(0, 20, torch.float32, ALONE)  # a rank without rows takes part with sums of zero
    assert torch.equal(nothing._column_sums(solved[0][0][:0], solved[0][1], eps), torch.zeros(20, dtype=torch.float64))
    for whole, of_rank in zip(*solved):
        torch.testing.assert_close(of_rank - of_rank.mean(), whole - whole.mean(), atol=1e-4, rtol=0)


def test_an_iteration_of_a_rank_gives_a_far_column_its_whole_mass():
    cost = torch.rand(20, 20, dtype=torch.float64)
    cost[:, 3] += 5.0
    matrix, eps = Panel(20, 20, torch.float32, ALONE), 0.05
    load_scores(matrix, make_problem(cost, None, (1.0, 1.0)), eps)
    f, g = (torch.zeros(20, dtype=torch.float64) for _ in range(2))
    assert matrix.iterate(f, g, eps, math.inf, 10)[:2] == (matrix.CONVERGED, 1)
    masses = torch.exp((f.unsqueeze(1) + g - cost) / eps).sum(0)
    torch.testing.assert_close(masses / masses.sum(), torch.full((20,), 1 / 20, dtype=torch.float64), rtol=1e-4, atol=0)


@compiled
def test_the_extremes_of_a_ranks_scores_are_those_of_its_costs():
    """Scores are pi - C for the sum of two arcs. In one orthant costs are below pi, and the extremes not opposite."""
    image0, text0, image1, text1 = points = tuple(x.abs() for x in clouds(20, 7, 5, 31))
    matrix, cost = Panel(20, 31, torch.float32, ALONE), wide_cost(points)
    extremes = matrix.build((image0, image1), (text0, text1), (1.0, 1.0), True, None)
    assert extremes == pytest.approx((math.pi - float(cost.max()), math.pi - float(cost.min())), abs=1e-5)


@pytest.mark.parametrize("uniform", [None, torch.zeros(0)])
def test_a_rank_without_rows_has_no_targets(uniform):
    class BesideAnother(World):
        """The other rank has all rows of a plan whose columns are right."""

        def all_reduce(self, x, operation="sum"):
            assert operation == "sum"
            return x + 1

    x, y = sample_uniform(4, 5), sample_uniform(4, 3)
    world = BesideAnother(1, 2)
    target = gf.ops.ot_assign_panel(x[:0], y[:0], x, y, world, uniform=uniform, backend="reference")
    assert (target.shape, target.dtype) == ((0,), torch.int64)


@pytest.mark.parametrize("start", [0.5, 1.0, 2.0, 5.0, 16.0, 100.0])
@pytest.mark.parametrize("budget", [(7, 1000), (7, 20), (7, 7), (0, 100)])
def test_eps_falls_by_halves_until_the_end_is_near(start, budget):
    """Each stage takes what it is given here, and the solve at eps 1 that follows starts from at most four times it."""
    seen = []

    class Recorded:
        def iterate(self, _f, _g, eps, tol, max_iter):
            seen.append((eps, max_iter))
            return 0, max_iter, tol

    done = transport_solvers.anneal(Recorded(), torch.zeros(2), torch.zeros(2), (start, 1.0), 1e-3, budget)
    stage, total = budget
    assert [eps for eps, _ in seen] == [start / 2**k for k in range(len(seen))]
    assert done == sum(taken for _, taken in seen) <= total
    assert all(eps > 1 and 0 < taken <= stage for eps, taken in seen)
    if stage and done < total:
        assert min((eps for eps, _ in seen), default=start) <= 4


def test_results_of_a_traced_problem_have_its_shape():
    settings = make_settings(0.1, 1e-3, 1000, "float32").flat()
    given, points = make_problem(torch.rand(5, 7), None), make_problem("arc", clouds(5, 4, 3, 7))
    for operation, problem, *rest in (
        (torch.ops.geoflow.sinkhorn, given, *settings),
        (torch.ops.geoflow.sinkhorn, points, *settings),
        (torch.ops.geoflow.ot_assign, given, *settings, None),
        (torch.ops.geoflow.ot_assign, points, *settings, None),
        (torch.ops.geoflow.transport_cost, points),
    ):
        results = [operation(*problem.flat(), *rest, "auto")]
        with FakeTensorMode() as mode:
            flat = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in problem.flat()]
            results.append(operation(*flat, *rest, "auto"))
        real, traced = ([x] if isinstance(x, torch.Tensor) else x for x in results)
        assert [(x.shape, x.dtype) for x in traced] == [(x.shape, x.dtype) for x in real]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cell", [(0, 0), (0, 16), (3, 7), (8, 20)])
def test_a_cost_that_is_not_finite_is_refused_wherever_it_stands(backend, value, cell):
    """Neither the entries after it nor those before it hide it."""
    cost = torch.rand(9, 21)
    cost[cell] = value
    with pytest.raises(ValueError, match="finite"):
        gf.ops.sinkhorn(cost, backend=backend)


@pytest.mark.parametrize("before", [0, 7])
def test_iterations_in_float64_are_counted(before):
    """Where all costs are equal the first one finds the plan."""
    settings = make_settings(0.1, 1e-9, 50, "float32")
    solve = WideSolve(torch.full((3, 4), 0.5), Span(0.5, 0.5, False), settings, torch.zeros(4), 0.1, before)
    assert (solve.converged, solve.iterations) == (True, before + 1)


def on_the_circle(*degrees: float) -> torch.Tensor:
    """Points whose norm exceeds one by as much as rounding may."""
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return (1 + 1e-9) * torch.stack((angle.cos(), angle.sin()), 1)


@pytest.mark.parametrize(
    ("noise", "condition", "weight"),
    [
        ((180, 90), (0, 90), 1.0),  # noise 0 is the antipode of its own data
        ((90, 135), (0, 90), 1.0),  # noise 0 is the data of row 1
        ((90, 135), (0, 180), 0.5),  # antipodal conditions
        ((90, 135), (0, 0), 2.0**20),  # a repeated condition: no weight is enough
    ],
)
def test_c2ot_weights_of_points_whose_products_exceed_one(noise, condition, weight):
    """Of four pairs the two (i, i) always count, and (0, 1) up to the weight."""
    chosen = condition_weight(on_the_circle(*noise), on_the_circle(0, 90), on_the_circle(*condition), 0.5)
    assert chosen == pytest.approx(weight, rel=1e-6)


@compiled
def test_a_signal_stops_the_build_of_costs_half_way():
    """The matrix is NaN at first (`_poison`), and its last columns stay so."""
    rows, width = 6000, 512
    image, text = ((sample_uniform(rows, width), sample_uniform(rows, width)) for _ in range(2))
    matrix = native.TransportMatrix(rows, rows, torch.float32)
    torch.set_num_threads(1)

    def build() -> None:
        matrix.build(image, text, (1.0, 1.0), True, None)
        time.sleep(1)

    def stop(*_: object) -> None:
        raise InterruptedError("stopped")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)  # writing 144 MB takes longer than that
        with pytest.raises(InterruptedError):
            build()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert bool(matrix.scores()[:, -1].isnan().any())


def test_c2ot_needs_no_weight_where_the_share_is_met_without_one():
    """Each noise lies at its own data, so that of four pairs the two (i, i) count, which is the half asked for."""
    points = on_the_circle(0, 90)
    assert condition_weight(points, points, points, 0.5) == 0.0


@compiled
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cell", [(0, 0), (3, 7), (8, 20)])
def test_the_extremes_of_costs_are_infinite_if_one_of_them_is_bad(value, cell):
    cost, matrix = torch.rand(9, 21), native.TransportMatrix(9, 21, torch.float32)
    assert matrix.load(cost, 1.0) == (1 - float(cost.max()), 1 - float(cost.min()))
    cost[cell] = value
    assert matrix.load(cost, 1.0) == (-math.inf, math.inf)
