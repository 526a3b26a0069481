"""Runs the public operations with backend="cuda" on an extension whose GPU is the emulation; status 0 if all is right.

usage: check_ops.py EXTENSION. Everything between the user's call and the kernels is the shipped code: operations,
dispatch, transport.py, bindings, launchers. Only the CUDA runtime and the device memory are the CPU's.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings

import pytest
import torch


def load_extension(path: str) -> None:
    """Puts the emulated extension where geoflow_fast looks for the real one; must come before its first import."""
    spec = importlib.util.spec_from_file_location("geoflow_fast._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


load_extension(sys.argv[1])

import geoflow_fast as gf  # noqa: E402
from geoflow_fast.noise import sample_uniform  # noqa: E402
from geoflow_fast.ops import extension  # noqa: E402
from geoflow_fast.ops.ot_assign import assign_late  # noqa: E402

extension.CUDA_MEMORY = "cpu"


def clouds(rows: int, cols: int, dims: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return tuple(sample_uniform(n, d) for n in (rows, cols) for d in dims)


def compare(cost: torch.Tensor, eps: float, tolerance: float = 2e-5, **settings: object) -> None:
    """`tolerance` of the potentials in units of eps."""
    solution = gf.ops.sinkhorn(cost, eps, backend="cuda", **settings)
    truth = gf.ops.sinkhorn(cost.double(), eps, backend="reference", **settings)
    assert solution.converged
    assert truth.converged
    assert solution.marginal_error <= settings.get("tol", 1e-3)
    shift = (solution.g - truth.g).mean()  # the plan fixes potentials up to a constant
    torch.testing.assert_close(solution.g - shift, truth.g, atol=tolerance * eps, rtol=0)
    torch.testing.assert_close(solution.f + shift, truth.f, atol=tolerance * eps, rtol=0)
    print("same solution:", settings, solution.iterations, "iterations", flush=True)


def check_error(matrix: torch.Tensor, eps: float) -> None:
    """The reported error is that of the plan that the potentials give in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        solution = gf.ops.sinkhorn(matrix, eps, max_iter=400, backend="cuda")
    plan = ((solution.f[:, None] + solution.g - matrix.double()) / eps).exp()
    error = float((plan.sum(1) - 1 / len(matrix)).abs().sum())
    assert error <= solution.marginal_error, f"eps={eps}: {error} > {solution.marginal_error}"
    assert solution.converged == (solution.marginal_error <= 1e-3)
    print("honest error:", eps, error, solution.iterations, "iterations", flush=True)


def compare_plans(points: tuple[torch.Tensor, ...], eps: float, tolerance: float, same: float) -> None:
    """Index and potentials of the plan between points, which the device rounds to float16."""
    limits = (eps, 1e-5, 4000, None)
    ours = torch.ops.geoflow.ot_solve(*points, *limits, "cuda")
    truth = torch.ops.geoflow.ot_solve(*(x.double() for x in points), *limits, "reference")
    assert ours[3][2] == truth[3][2] == 1
    shift = (ours[2] - truth[2]).mean()
    torch.testing.assert_close(ours[2] - shift, truth[2], atol=tolerance, rtol=0)
    torch.testing.assert_close(ours[1] + shift, truth[1], atol=tolerance, rtol=0)
    assert (ours[0] == truth[0]).double().mean() >= same


def main() -> None:
    torch.manual_seed(0)
    assert gf.backends()["sinkhorn"]["cuda"] == gf.backends()["ot_solve"]["cuda"] == "available"
    matrix = torch.rand(21, 30)
    compare(matrix, 0.05)
    compare((1000 + matrix).double(), 0.05)
    # From larger eps downwards it comes to within tol by another path than the reference.
    compare(matrix, 0.002, tolerance=20.0, tol=1e-2, max_iter=400)
    for cols in (2100, 4100, 8300):  # two and four vectors a thread, and rows that are read twice
        compare(torch.rand(3, cols), 0.2)
    for eps in (1e-3, 2e-4):
        check_error(matrix, eps)
    for eps, scale in ((1e-20, 1.0), (0.05, 1e30)):
        with pytest.raises(ValueError, match="float32 holds their plan for eps of at least"):
            gf.ops.sinkhorn(scale * matrix, eps, backend="cuda")

    compare_plans(clouds(30, 41, (12, 20)), 0.2, 4e-3, 0.9)  # a matrix in float16
    compare_plans(clouds(33, 17, (5, 7)), 0.03, 4e-3, 0.9)  # in float32
    for cols in (2100, 4100, 8300):
        compare_plans(clouds(3, cols, (8, 16)), 0.2, 1e-2, 0.0)
    batch = clouds(40, 40, (12, 20))
    assigned = gf.ops.ot_assign(*batch, eps=0.2, backend="cuda")
    truth = gf.ops.ot_assign(*(x.double() for x in batch), eps=0.2, backend="reference")
    assert (assigned == truth).double().mean() >= 0.95
    torch.set_default_dtype(torch.float64)  # the solver's memory does not follow the user's default
    assert torch.equal(gf.ops.ot_assign(*batch, eps=0.2, backend="cuda"), assigned)
    torch.set_default_dtype(torch.float32)
    draws = [
        gf.ops.ot_assign(
            *batch, eps=eps, assignment="sample", backend=backend, generator=torch.Generator().manual_seed(5)
        )
        for eps in (0.2, 0.03)
        for backend in ("reference", "cuda")
    ]
    assert (draws[0] == draws[1]).double().mean() >= 0.9
    assert (draws[2] == draws[3]).double().mean() >= 0.9

    large = clouds(256, 256, (1024, 512))
    for eps, same in ((0.05, 0.98), (0.02, 0.995), (0.005, 0.995)):
        assigned = gf.ops.ot_assign(*large, eps=eps, tol=1e-3, backend="cuda")
        truth = gf.ops.ot_assign(*(x.double() for x in large), eps=eps, tol=1e-3, backend="reference")
        assert (assigned == truth).double().mean() >= same, f"eps={eps}"
    late, report = assign_late(large, 0.05, backend="cuda")
    assert report[2] == 1
    assert torch.equal(late, gf.ops.ot_assign(*large, eps=0.05, backend="cuda"))
    with pytest.warns(RuntimeWarning, match="stopped after 1 iterations"):
        gf.ops.ot_assign(*batch, eps=0.05, max_iter=1, backend="cuda")
    with pytest.raises(ValueError, match="eps of at least"):
        gf.ops.ot_assign(*batch, eps=1e-4, backend="cuda")
    with pytest.raises(ValueError, match="do not fit"):
        torch.ops.geoflow.ot_solve(batch[0], batch[1][:3], *batch[2:], 0.1, 1e-3, 9, None, "cuda")


main()
