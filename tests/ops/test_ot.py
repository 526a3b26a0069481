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
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import extension
from geoflow_fast.ops.ot_assign import condition_weight

ot = pytest.importorskip("ot")

OP = "ot_solve"
SIZES = [1, 2, 7, 129, 1000, 1023]
ITERATIONS = {"cpu": 3000, "reference": 200}  # plain torch is slow
compiled = pytest.mark.skipif(extension.missing() is not None, reason="compiled extension is not built")


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Uninitialised memory that the solver reads as data shows up as NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(extension.torch, "empty", poisoned)


def clouds(n: int, image: int = 48, text: int = 33, m: int | None = None, dtype: torch.dtype = torch.float32):
    widths = ((n, image), (n, text), (m or n, image), (m or n, text))
    return tuple(sample_uniform(rows, d, dtype=dtype) for rows, d in widths)


def wide_cost(points) -> torch.Tensor:
    """The cost in float64 from its definition."""
    total = 0
    for noise, data in zip(points[:2], points[2:]):
        distance = torch.cdist(noise.double(), data.double(), compute_mode="donot_use_mm_for_euclid_dist")
        total = total + 2 * torch.asin((distance / 2).clamp(max=1))
    return total


def plan_between(points, eps=0.05, tol=1e-3, max_iter=1000, uniform=None, backend="cpu"):
    """Index, f, g, and (iterations, column violation, converged) of the plan between points."""
    index, f, g, report = torch.ops.geoflow.ot_solve(*points, eps, tol, max_iter, uniform, backend)
    return index, f, g, report.tolist()


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


def row_error(result: gf.ops.SinkhornResult) -> float:
    """The L1 violation of the row sums of the plan that a user computes from a result, in float64."""
    plan = plan_of(result.f, result.g, result.cost.double(), result.eps)
    return float((plan.sum(1) - 1 / len(plan)).abs().sum())


def column_error(result: gf.ops.SinkhornResult) -> float:
    plan = plan_of(result.f, result.g, result.cost.double(), result.eps)
    return float((plan.sum(0) - 1 / plan.shape[1]).abs().sum())


def share_equal(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).double().mean())


# ---- truth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [5, 16, 255, 256, 257, 700])
def test_the_first_row_potential_is_that_of_the_costs(backend, width):
    """One iteration from zero potentials: f is -eps log mean exp(-C / eps) of each row; at ragged widths and strides,
    in the domain of scores and in that of exponentials."""
    points = tuple(sample_uniform(97 + 6 * (k > 1), width + 3)[:, :width] for k in range(4))
    points = tuple(gf.geometry.normalize(x).T.contiguous().T for x in points)
    assert not points[0].is_contiguous()
    cost = wide_cost(points)
    for eps in (0.5, 0.03):
        _, f, _, _ = plan_between(points, eps, tol=10.0, max_iter=1, backend=backend)
        truth = -eps * (torch.logsumexp(-cost / eps, 1) + math.log(97))
        assert torch.allclose(f, truth, atol=1e-5)


@pytest.mark.parametrize(("eps", "tol", "agreement"), [(0.05, 1e-5, 0.999), (0.005, 1e-3, 0.995)])
@pytest.mark.parametrize("width", [64, 1024])
def test_agrees_with_pot_in_float64(backend, eps, tol, agreement, width):
    points, cost, f, g = pot_case(200 if backend == "reference" or width == 64 else 500, width, eps)
    index, ours_f, ours_g, (_, violation, converged) = plan_between(points, eps, tol, backend=backend)
    assert converged
    assert violation <= tol
    if eps == 0.05:  # at 0.005 the plan is almost a permutation, and its potentials almost free
        shift = float((ours_g - g).mean())
        assert float((ours_g - g - shift).abs().max()) <= 0.01 * eps
        assert float((ours_f - f + shift).abs().max()) <= 0.01 * eps
    plan, truth = plan_of(ours_f, ours_g, cost, eps), plan_of(f, g, cost, eps)
    assert float((plan - truth).abs().sum()) <= (0.01 if eps == 0.05 else 0.05)
    assert index.dtype == torch.int64
    assert share_equal(index, (g - cost).argmax(1)) >= agreement
    result = gf.ops.sinkhorn(cost.float(), eps, backend=backend)
    assert float((result.plan - truth).abs().sum()) <= (0.01 if eps == 0.05 else 0.05)
    assert result.transport_cost == pytest.approx(float((truth * cost).sum()), rel=1e-3)


def test_default_tolerance_assigns_as_the_converged_plan(backend):
    points, cost, _, g = pot_case(1000, 1024, 0.05)
    assert share_equal(gf.ops.ot_assign(*points, backend=backend), (g - cost).argmax(1)) >= 0.999


@pytest.mark.parametrize("eps", [10.0, 0.05, 0.005])
@pytest.mark.parametrize("n", SIZES)
def test_marginals_at_every_size(backend, n, eps):
    if backend == "reference" and eps < 0.05:
        eps = 0.02  # plain torch is slow
    points = clouds(n, 256, 256)
    _, f, g, (_, violation, converged) = plan_between(points, eps, backend=backend)
    plan = plan_of(f, g, wide_cost(points), eps)
    assert converged
    assert float((plan.sum(0) - 1 / n).abs().sum()) <= 2e-4
    assert float((plan.sum(1) - 1 / n).abs().sum()) <= violation + 2e-4


def test_both_backends_take_the_same_steps():
    """In the kernel domain an iteration is an iteration of the reference, to float32 rounding."""
    points = clouds(300)
    wide = tuple(x.double() for x in points)
    for iterations in (1, 2, 3):
        _, f, g, (done, _, converged) = plan_between(points, tol=1e-12, max_iter=iterations)
        _, true_f, true_g, _ = plan_between(wide, tol=1e-12, max_iter=iterations, backend="reference")
        assert (done, converged) == (iterations, False)
        assert torch.allclose(f, true_f, atol=1e-6)
        assert torch.allclose(g, true_g, atol=1e-6)


def test_permutation_equivariance(backend):
    points = clouds(300)
    rows, columns = torch.randperm(300), torch.randperm(300)
    index = gf.ops.ot_assign(*points, backend=backend)
    moved = gf.ops.ot_assign(points[0][rows], points[1][rows], points[2][columns], points[3][columns], backend=backend)
    assert share_equal(columns[moved], index[rows]) >= 0.997


@pytest.mark.parametrize("eps", [10.0, 0.05, 1e-3])
def test_identical_clouds_map_to_themselves(backend, eps):
    x, y = sample_uniform(129, 20), sample_uniform(129, 31)
    index = gf.ops.ot_assign(x, y, x, y, eps=eps, backend=backend)
    assert torch.equal(index, torch.arange(129))


@pytest.mark.parametrize("eps", [10.0, 0.05, 1e-3])
def test_antipodal_clouds(backend, eps):
    x, y = sample_uniform(129, 20), sample_uniform(129, 31)
    points = (x, y, -x, -y)
    index, f, g, (_, violation, converged) = plan_between(points, eps, max_iter=ITERATIONS[backend], backend=backend)
    plan = plan_of(f, g, wide_cost(points), eps)
    assert converged or (backend == "reference" and eps < 0.05)
    assert float((plan.sum(1) - 1 / 129).abs().sum()) <= violation + 1e-3
    if eps == 0.05:
        assert bool((index != torch.arange(129)).all())


def test_one_target_for_all(backend):
    """All data equal: every plan entry is 1/B^2 and the argmax is the first of equals."""
    x, y = sample_uniform(60, 20), sample_uniform(60, 20)
    points = (x, y, sample_uniform(1, 20).expand(60, 20), sample_uniform(1, 20).expand(60, 20))
    index, f, g, (iterations, _, _) = plan_between(points, backend=backend)
    assert iterations == 1
    assert torch.allclose(plan_of(f, g, wide_cost(points), 0.05), torch.tensor(1 / 3600.0).double(), rtol=1e-4)
    assert torch.equal(index, torch.zeros(60, dtype=torch.int64))


@pytest.mark.parametrize("eps", [10.0, 1.0, 0.1, 0.01, 1e-3])
def test_every_eps_gives_a_finite_plan_with_honest_report(backend, eps):
    points = clouds(100)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = gf.ops.sinkhorn(wide_cost(points), eps, max_iter=ITERATIONS[backend], backend=backend)
    assert bool(torch.isfinite(result.f).all() and torch.isfinite(result.g).all())
    assert result.converged == (result.marginal_error <= 1e-3)
    assert len(seen) == (not result.converged)
    _, f, g, (_, violation, _) = plan_between(points, eps, max_iter=ITERATIONS[backend], backend=backend)
    plan = plan_of(f, g, wide_cost(points), eps)
    assert float((plan.sum(1) - 1 / 100).abs().sum()) <= max(1.5 * violation, 2e-3 + 2e-6 / eps)


def quiet_sinkhorn(cost: torch.Tensor, eps: float, **settings: object) -> gf.ops.SinkhornResult:
    """A solve that may stop at its last iteration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return gf.ops.sinkhorn(cost, eps, **settings)


@pytest.mark.parametrize("eps", [0.05, 1e-3, 1.5e-4])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (129, 129), (7, 129), (129, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_is_that_of_the_plan_that_is_returned(backend, dtype, shape, eps):
    cost = torch.rand(shape, dtype=dtype)
    result = quiet_sinkhorn(cost, eps, max_iter=1000 if backend == "cpu" else 100, backend=backend)
    assert row_error(result) <= result.marginal_error
    assert column_error(result) <= 2e-3
    assert result.converged == (result.marginal_error <= 1e-3)
    assert result.converged or backend == "reference" or min(shape) < max(shape)
    plan = plan_of(result.f, result.g, cost.double(), eps)
    assert torch.equal(result.plan, plan.to(dtype))
    assert result.transport_cost == pytest.approx(float((plan * cost.double()).sum()), rel=1e-3)


@pytest.mark.parametrize("kind", ["integers", "line", "offset", "binade"])
@pytest.mark.parametrize("eps", [1e-2, 1e-3, 3e-4])
def test_the_error_bounds_rounding_that_is_not_random(backend, kind, eps):
    line = torch.linspace(0, 1, 65)
    cost = {
        "integers": torch.randint(0, 4, (65, 65)).float() / 3,
        "line": (line[:, None] - line.flip(0)).abs(),
        "offset": 1e4 + torch.rand(65, 65),
        "binade": 1 + torch.rand(65, 65) * (1 - 2.0**-20) * torch.linspace(0, 1, 65),
    }[kind]
    result = quiet_sinkhorn(cost, eps, max_iter=600 if backend == "cpu" else 60, backend=backend)
    assert row_error(result) <= result.marginal_error


@pytest.mark.parametrize(("eps", "scale"), [(1e-20, 1.0), (0.05, 1e30), (1e-300, 1e-20), (1e-3, 3e38)])
@pytest.mark.parametrize("n", [7, 129])
def test_an_eps_that_float32_does_not_resolve_is_refused_by_name(backend, eps, scale, n):
    cost = scale * torch.rand(n, n)
    with pytest.raises(ValueError, match=r"float32 holds their plan for eps of at least \S+") as refusal:
        gf.ops.sinkhorn(cost, eps, backend=backend)
    least = float(str(refusal.value).split()[-1])
    result = quiet_sinkhorn(cost, least, max_iter=1000 if backend == "cpu" else 100, backend=backend)
    assert row_error(result) <= result.marginal_error
    assert bool(torch.isfinite(result.f).all() and torch.isfinite(result.g).all())
    assert math.isfinite(result.transport_cost)
    assert result.converged or backend == "reference"


def test_a_cost_without_a_range_has_a_plan_at_any_eps(backend):
    for eps in (1e-11, 1.0):
        result = gf.ops.sinkhorn(torch.full((5, 7), 3.25), eps, backend=backend)
        assert (result.converged, result.iterations) == (True, 1)
        torch.testing.assert_close(result.plan, torch.full((5, 7), 1 / 35), rtol=1e-3, atol=0)


def test_an_eps_that_float32_does_not_resolve_between_points_is_refused_by_name(backend):
    points = clouds(40, 6, 5)
    with pytest.raises(ValueError, match=r"costs between 0 and 6.28319.* eps of at least \S+") as refusal:
        gf.ops.ot_assign(*points, eps=5e-4, backend=backend)
    least = float(str(refusal.value).split()[-1])
    assert 5e-4 < least < 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        index = gf.ops.ot_assign(*points, eps=least, backend=backend)
    _, columns = linear_sum_assignment(wide_cost(points).numpy())
    assert share_equal(index, torch.from_numpy(columns)) >= 0.9


def test_a_tolerance_that_float32_does_not_resolve_is_refused_by_name():
    cost = torch.rand(9, 9)
    with pytest.raises(ValueError, match=r"tol=1e-09 is too small: float32 resolves at least \S+") as refusal:
        gf.ops.sinkhorn(cost, tol=1e-9)
    assert gf.ops.sinkhorn(cost, 1.0, tol=float(str(refusal.value).split()[-1])).converged
    assert gf.ops.sinkhorn(cost.double(), tol=1e-9, backend="reference").converged


@pytest.mark.parametrize(("shape", "eps"), [((7, 7), 0.05), ((7, 7), 0.02), ((40, 31), 0.05), ((40, 31), 1e-2)])
def test_tight_tolerances_agree_with_pot_in_float64(shape, eps):
    """A plan near a permutation moves long after its marginals look settled: both must be solved far."""
    cost = torch.rand(shape, dtype=torch.float64)
    settings = {"numItermax": 10000, "stopThr": 1e-12, "warn": False}
    weights = (np.full(n, 1 / n) for n in shape)
    truth = torch.from_numpy(ot.sinkhorn(*weights, cost.numpy(), eps, method="sinkhorn_log", **settings))
    assert float((truth.sum(1) - 1 / shape[0]).abs().sum()) <= 1e-9
    for tol, backend, apart in ((1e-9, "reference", 1e-6), (2e-5, "cpu", 2e-2)):
        result = gf.ops.sinkhorn(cost, eps, tol=tol, max_iter=10000, backend=backend)
        assert result.converged
        assert float((result.plan - truth).abs().sum()) <= apart


def test_costs_beyond_the_range_of_float32_are_refused():
    with pytest.raises(ValueError, match="beyond the range of float32"):
        gf.ops.sinkhorn(torch.full((3, 3), 1e39, dtype=torch.float64))


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


@compiled
def test_columns_that_no_row_reaches_at_first():
    """At the start every row puts all its float32 mass on one column: the others are recovered by their own sum."""
    cost = torch.rand(40, 40) * 1e-3 + 300 * (1 - torch.eye(40)[0])
    result = gf.ops.sinkhorn(cost, 0.1)
    assert result.converged
    assert column_error(result) <= 2e-3


@compiled
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("column", [0, 7, 20])
def test_exponentials_give_way_to_scores_where_a_sum_leaves_their_range(column, sign):
    """One column is so near, or so far, that its potential leaves the range of the exponentials, which 155 nats of cost
    alone do not: the plan is that of the reference."""
    cost = torch.rand(9, 21)
    cost[:, column] += sign * 155
    result = gf.ops.sinkhorn(cost, 1.0, max_iter=3000)
    truth = gf.ops.sinkhorn(cost.double(), 1.0, backend="reference")
    assert result.converged
    assert float((result.plan - truth.plan).abs().sum()) <= 5e-3


@compiled
def test_kernel_domain_hands_over_to_scores():
    """Potentials that outgrow the exponentials' range: same answer as a solve that never entered the kernel domain."""
    n, eps = 30, 1.0
    position = torch.linspace(0, 1, n)
    cost = 155 * (position[:, None] - position.flip(0)[None]).abs() * torch.linspace(0.2, 1, n)
    result = gf.ops.sinkhorn(cost, eps, max_iter=3000)
    truth = gf.ops.sinkhorn(cost.double(), eps, max_iter=3000, backend="reference")
    assert result.converged
    assert float((result.plan - truth.plan).abs().sum()) <= 0.05


@compiled
@pytest.mark.parametrize("rows", [6, 7, 16, 21])
@pytest.mark.parametrize("cols", [5, 16, 21, 97])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_points_that_are_all_near_or_all_far(rows, cols, sign):
    """Zero is not between their scores, and fills the ends of rows: it belongs to no column."""
    noise, data = (gf.geometry.normalize(torch.eye(1, 8) + 0.05 * torch.randn(n, 8)) for n in (rows, cols))
    points = noise, noise, sign * data, sign * data
    for eps in (0.1, 0.03):  # exponentials at once, and by way of scores
        index, f, g, _ = plan_between(points, eps, tol=1e-4)
        truth = plan_between(tuple(x.double() for x in points), eps, tol=1e-4, backend="reference")
        plans = [plan_of(*potentials, wide_cost(points), eps) for potentials in ((f, g), truth[1:3])]
        assert float((plans[0] - plans[1]).abs().sum()) <= 2e-2
        assert share_equal(index, truth[0]) >= 0.8


def test_rectangular_matrix(backend):
    cost = 3 * torch.rand(70, 131, dtype=torch.float64) + 1e3
    result = gf.ops.sinkhorn(cost, 0.1, tol=1e-5, max_iter=2000, backend=backend)
    f, g = pot_potentials(cost, 0.1)
    assert float((result.plan - plan_of(f, g, cost, 0.1)).abs().sum()) <= 1e-3


# ---- the compiled solver --------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("eps", [0.05, 0.002, 1e-3])
def test_threads_do_not_change_a_bit(eps):
    points, threads = clouds(523, 64, 64), torch.get_num_threads()
    outcomes = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            outcomes.append(plan_between(points, eps, max_iter=4000))
    finally:
        torch.set_num_threads(threads)
    for result in outcomes[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result[:3], outcomes[0][:3]))
        assert result[3] == outcomes[0][3]


@compiled
@pytest.mark.parametrize("max_iter", [1, 2, 15, 16, 40])
def test_a_descent_of_eps_keeps_to_the_iterations_and_leaves_one_for_the_end(max_iter):
    """From the range of the costs down to eps; the plan that is returned is one of the eps that was asked for."""
    cost = torch.rand(30, 30)
    with pytest.warns(RuntimeWarning, match=f"stopped after {max_iter} iterations"):
        result = gf.ops.sinkhorn(cost, 3e-4, max_iter=max_iter)
    assert result.iterations == max_iter
    assert row_error(result) <= result.marginal_error
    assert column_error(result) <= 1e-3


@compiled
def test_a_descent_of_eps_saves_iterations():
    """The same plan takes the reference, which starts at eps, several times as many."""
    cost = torch.rand(60, 60)
    result = gf.ops.sinkhorn(cost, 2e-4, max_iter=20_000, tol=2e-2)
    truth = quiet_sinkhorn(cost.double(), 2e-4, max_iter=2 * result.iterations, tol=2e-2, backend="reference")
    assert result.converged
    assert not truth.converged


@compiled
def test_memory_is_one_matrix():
    """Peak resident memory of a solve, in a process of its own: one float32 matrix and a little."""
    script = """
import torch, geoflow_fast as gf
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
gf.ops.ot_assign(*points)
print((status("VmHWM") - before) / (4 * n * n))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout) <= 1.15


@compiled
@pytest.mark.parametrize("stage", ["iterations", "build"])
def test_interrupt_stops_a_long_solve(stage):
    # A shell that runs this in the background has its children ignore Ctrl-C.
    script = """
import signal, sys, torch, geoflow_fast.ops
from geoflow_fast.noise import sample_uniform
signal.signal(signal.SIGINT, signal.default_int_handler)
points = [sample_uniform(*((3000, 8) if sys.argv[1] == "iterations" else (12000, 512))) for _ in range(4)]
print("ready", flush=True)
try:
    torch.ops.geoflow.ot_solve(*points, 1e-3, 0.0, 2**31 - 1, None, "cpu")
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
    points = tuple(gf.geometry.normalize(torch.eye(1, 6) + 0.05 * torch.randn(40, 6)) for _ in range(4))
    _, f, g, _ = plan_between(points, tol=1e-4, backend=backend)
    plan = plan_of(f, g, wide_cost(points), 0.05) * 40
    counts = torch.zeros(40, 40, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    draws = 200
    for _ in range(draws):
        uniform = torch.rand(40, generator=generator, dtype=torch.float64)
        index, *_ = plan_between(points, tol=1e-4, uniform=uniform, backend=backend)
        counts[torch.arange(40), index] += 1
    expected = draws * plan / plan.sum(1, keepdim=True)
    likely = expected > 1
    chi2 = float(((counts - expected).square() / expected)[likely].sum())
    assert stats.chi2.sf(chi2, int(likely.sum()) - 40) > 1e-4


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
        ({"assignment": "nearest"}, "assignment must be one of"),
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
        (lambda: gf.ops.sinkhorn(torch.zeros(0, 3)), "at least one row"),
        (lambda: gf.ops.sinkhorn(torch.zeros(3)), "cost must be a matrix"),
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
    solution = gf.ops.sinkhorn(cost, eps, tol=1e-3, backend="cpu")
    assert solution.converged
    assert row_error(solution) < 2e-3


def test_results_of_a_traced_problem_have_its_shape():
    points, limits = clouds(5, 4, 3, 7), (0.1, 1e-3, 1000)
    for operation, tensors, *rest in (
        (torch.ops.geoflow.sinkhorn, (torch.rand(5, 7),), *limits),
        (torch.ops.geoflow.ot_solve, points, *limits, None),
        (torch.ops.geoflow.ot_solve, points, *limits, torch.rand(5, dtype=torch.float64)),
    ):
        real = operation(*tensors, *rest, "auto")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            traced = operation(*map(mode.from_tensor, tensors), *rest, "auto")
        assert [(x.shape, x.dtype) for x in traced] == [(x.shape, x.dtype) for x in real]


@compiled
def test_memory_is_guarded_below_the_public_calls():
    """The operation itself refuses shapes that do not fit, and draws that are not one a row."""
    x, y, z, w = clouds(5, 4, 3, 7)
    for points, uniform, message in (
        ((x, y[:4], z, w), None, "do not fit"),
        ((x, y, z[:, :3], w), None, "do not fit"),
        ((x, y, z, w[:6]), None, "do not fit"),
        ((x, y, z, w), torch.rand(4, dtype=torch.float64), "uniform"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.geoflow.ot_solve(*points, 0.1, 1e-3, 10, uniform, "cpu")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cell", [(0, 0), (0, 16), (3, 7), (8, 20)])
def test_a_cost_that_is_not_finite_is_refused_wherever_it_stands(backend, value, cell):
    """Neither the entries after it nor those before it hide it."""
    cost = torch.rand(9, 21)
    cost[cell] = value
    with pytest.raises(ValueError, match="finite"):
        gf.ops.sinkhorn(cost, backend=backend)


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


def test_c2ot_needs_no_weight_where_the_share_is_met_without_one():
    """Each noise lies at its own data, so that of four pairs the two (i, i) count, which is the half asked for."""
    points = on_the_circle(0, 90)
    assert condition_weight(points, points, points, 0.5) == 0.0
