"""For a machine with a GPU: the CUDA transport solver against float64, in graphs, on streams, beside its estimates.

`make test-gpu` runs this, and fails without a CUDA device. `-s` shows the measured times.
"""

from __future__ import annotations

import pytest
import torch

from geoflow_fast import noise, ops
from geoflow_fast.ops import transport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is false"),
]
DEVICE = torch.device("cuda", 0)


def clouds(rows: int, cols: int, dims: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return tuple(noise.sample_uniform(n, d) for n in (rows, cols) for d in dims)


def on_device(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(DEVICE) for x in tensors)


def milliseconds(run, rounds: int = 10) -> float:
    """Of one call, after a warm-up."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / rounds


def copy_bandwidth() -> float:
    """Bytes a second that copying 1 GB reaches here."""
    source = torch.empty(2**28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * milliseconds(lambda: target.copy_(source)))


# ---- parity: what the emulation showed, on the real thing ----


@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (7, 129), (129, 7), (1023, 1000), (500, 2100), (300, 5001), (200, 8300), (2048, 2048)]
)
@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_parity_of_the_solver(rows, cols, eps):
    cost = torch.rand(rows, cols)
    solution = ops.sinkhorn(cost.to(DEVICE), eps, backend="cuda")
    truth = ops.sinkhorn(cost.double(), eps, backend="reference")
    assert solution.iterations == truth.iterations
    torch.testing.assert_close(solution.f.cpu(), truth.f, atol=1e-4 * eps, rtol=0)
    torch.testing.assert_close(solution.g.cpu(), truth.g, atol=1e-4 * eps, rtol=0)
    assert solution.marginal_error == pytest.approx(truth.marginal_error, rel=0.02, abs=1e-5)
    assert solution.transport_cost == pytest.approx(truth.transport_cost, rel=1e-4)


@pytest.mark.parametrize("span", [1e2, 1e3, 6e3])
def test_parity_at_huge_ranges(span):
    """Nothing overflows, and what converges is the optimum."""
    cost = span * torch.rand(96, 96)
    solution = ops.sinkhorn(cost.to(DEVICE), eps=1.0, tol=1e-2, max_iter=20000, backend="cuda")
    truth = ops.sinkhorn(cost.double(), eps=1.0, tol=1e-2, max_iter=20000, backend="reference")
    assert torch.isfinite(solution.f).all()
    assert torch.isfinite(solution.g).all()
    assert solution.transport_cost == pytest.approx(truth.transport_cost, rel=5e-2)


@pytest.mark.parametrize(("rows", "cols", "dims"), [(1, 1, (2, 2)), (130, 7, (5, 1023)), (300, 1000, (1024, 512))])
@pytest.mark.parametrize("eps", [0.05, 0.03])  # a matrix in float16, and one in float32
def test_parity_of_a_plan_between_points(rows, cols, dims, eps):
    points = clouds(rows, cols, dims)
    limits = (eps, 1e-4, 400, None)
    index, f, g, report = transport.ot_solve_cuda(*on_device(*points), *limits)
    truth = torch.ops.geoflow.ot_solve(*(x.double() for x in points), *limits, "reference")
    assert report[2] == truth[3][2] == 1
    shift = (g.cpu() - truth[2]).mean()
    torch.testing.assert_close(g.cpu() - shift, truth[2], atol=2e-3, rtol=0)
    torch.testing.assert_close(f.cpu() + shift, truth[1], atol=2e-3, rtol=0)
    assert (index.cpu() == truth[0]).double().mean() >= 0.95


@pytest.mark.parametrize(("eps", "agreement"), [(0.05, 0.999), (0.005, 0.995)])
def test_parity_of_the_assignment(eps, agreement):
    batch = clouds(2048, 2048, (1024, 1024))
    computed = ops.ot_assign(*on_device(*batch), eps=eps, backend="cuda")
    truth = ops.ot_assign(*(x.double() for x in batch), eps=eps, backend="reference")
    assert (computed.cpu() == truth).double().mean() >= agreement


def test_parity_of_draws():
    batch = clouds(500, 500, (64, 32))
    draws = [
        ops.ot_assign(
            *tensors, assignment="sample", generator=torch.Generator().manual_seed(1), eps=0.2, backend=backend
        ).cpu()
        for tensors, backend in ((on_device(*batch), "cuda"), ([x.double() for x in batch], "reference"))
    ]
    assert (draws[0] == draws[1]).double().mean() >= 0.99


@pytest.mark.parametrize("size", [500, 3000, 8192])
def test_parity_of_a_matrix_in_float16(size, monkeypatch):
    """8192 columns also need the kernel that just fits GPUs with 99 KB of shared memory."""
    batch = on_device(*clouds(size, size, (256, 128)))
    half = ops.ot_assign(*batch, backend="cuda")
    monkeypatch.setattr(transport, "_HALF_SPAN", 0.0)
    assert (half == ops.ot_assign(*batch, backend="cuda")).double().mean() >= 0.98


def test_the_current_device_is_left_alone():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    cost = torch.rand(64, 64, device="cuda:1")
    torch.cuda.set_device(0)
    assert ops.sinkhorn(cost, 0.1, backend="cuda").f.device.index == 1
    assert torch.cuda.current_device() == 0


# ---- graphs, streams, repetition ----


def solve(points, eps: float = 0.05):
    """Enqueues a whole coupling, as `ot_assign` does between its checks: (argmax, f, g, report)."""
    return transport.ot_solve_cuda(*points, eps, 1e-4, 200, None)


def pairs(rows: int):
    return on_device(*clouds(rows, rows, (256, 128)))


@pytest.mark.parametrize("rows", [1000, 3000])
def test_a_coupling_is_captured_as_a_graph(rows):
    points = pairs(rows)
    solve(points)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve(points)
    fresh = pairs(rows)
    for old, new in zip(points, fresh):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, solve(fresh)):
        assert torch.equal(a, b)


def test_two_streams_do_not_disturb_each_other():
    problems = [pairs(1500), pairs(2500)]
    expected = [solve(problem) for problem in problems]
    torch.cuda.synchronize()
    streams, concurrent = [torch.cuda.Stream() for _ in problems], []
    for stream, problem in zip(streams, problems):
        with torch.cuda.stream(stream):
            concurrent.append(solve(problem))
    torch.cuda.synchronize()
    for a, b in zip(concurrent, expected):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_results_repeat_bit_for_bit():
    problem = pairs(2100)
    first, second = solve(problem), solve(problem)
    assert all(torch.equal(x, y) for x, y in zip(first, second))


# ---- speed, beside the estimates of docs/gpu.md ----


@pytest.mark.parametrize("eps", [0.05, 0.03])  # a matrix in float16, and one in float32
@pytest.mark.parametrize(("size", "reads"), [(2048, 1), (4096, 1), (8192, 1), (12000, 2)])
def test_an_iteration_is_near_the_memory_bound(size, reads, eps):
    """tol = 1e-30 is never met: every launch does all its iterations."""
    points = on_device(*clouds(size, size, (64, 64)))
    iterations, entry_bytes = 40, 2 if eps == 0.05 else 4
    long, short = (
        milliseconds(lambda n=count: transport.ot_solve_cuda(*points, eps, 1e-30, n, None), 3)
        for count in (2 * iterations, iterations)
    )
    each = (long - short) / iterations
    reached, limit = reads * entry_bytes * size**2 / (1e-3 * each), copy_bandwidth()
    print(f"B={size} eps={eps}: {each:.3f} ms, {reached / 1e9:.0f} GB/s, {100 * reached / limit:.0f} % of a copy")
    # Up to 4096 the matrix stays in the second-level cache of the larger GPUs and barriers weigh more.
    assert reached > (0.6 if size > 4096 else 0.25) * limit


@pytest.mark.parametrize("eps", [0.05, 0.03])
def test_scores_are_near_the_tensor_bound(eps):
    """With one iteration and one readout, which read the matrix once each."""
    size = 8192
    points = tuple(x.half() for x in on_device(*clouds(size, size, (1024, 1024))))
    each = milliseconds(lambda: transport.ot_solve_cuda(*points, eps, 1e-30, 1, None), 5)
    product = milliseconds(lambda: points[0] @ points[2].T, 5)
    print(f"plan of one iteration at eps={eps}: {each:.2f} ms; two float16 products alone {2 * product:.2f} ms")
    assert 2 * product > 0.25 * each
