"""Runs the public operations with backend="cuda" on an extension whose GPU is the emulation; status 0 if all is right.

usage: check_ops.py EXTENSION. Everything between the user's call and the kernels is the shipped code: operations,
dispatch, _native.py, bindings, launchers. Only the CUDA runtime and the device memory are the CPU's.
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
from geoflow_fast.distributed import ALONE  # noqa: E402
from geoflow_fast.noise import sample_uniform  # noqa: E402
from geoflow_fast.ops import native  # noqa: E402
from geoflow_fast.ops.ot_assign import assign_late  # noqa: E402

native.CUDA_MEMORY = "cpu"


def clouds(rows: int, cols: int, dims: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return tuple(sample_uniform(n, d) for n in (rows, cols) for d in dims)


def compare(
    cost: object, factors: object, tolerance: float = 2e-5, cost_tolerance: float = 1e-4, **settings: object
) -> None:
    """`tolerance` of the potentials in units of eps, `cost_tolerance` of the transport cost relative to it."""
    solution = gf.ops.sinkhorn(cost, factors, backend="cuda", **settings)
    truth = gf.ops.sinkhorn(
        cost.double() if isinstance(cost, torch.Tensor) else cost,
        None if factors is None else tuple(x.double() for x in factors),
        backend="reference",
        **settings,
    )
    eps = settings["eps"]
    assert solution.converged
    assert truth.converged
    assert solution.marginal_error <= settings.get("tol", 1e-3)
    shift = (solution.g - truth.g).mean()  # the plan fixes potentials up to a constant
    torch.testing.assert_close(solution.g - shift, truth.g, atol=tolerance * eps, rtol=0)
    torch.testing.assert_close(solution.f + shift, truth.f, atol=tolerance * eps, rtol=0)
    assert abs(solution.transport_cost - truth.transport_cost) <= cost_tolerance * (abs(truth.transport_cost) + eps)
    print("same solution:", settings, solution.iterations, "iterations", flush=True)


def check_error(cost: object, factors: object, matrix: torch.Tensor, eps: float) -> None:
    """The reported error is that of the plan that the potentials give in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        solution = gf.ops.sinkhorn(cost, factors, eps=eps, max_iter=400, backend="cuda")
    plan = ((solution.f[:, None] + solution.g - matrix.double()) / eps).exp()
    error = float((plan.sum(1) - 1 / len(matrix)).abs().sum())
    assert error <= solution.marginal_error, f"eps={eps}: {error} > {solution.marginal_error}"
    assert solution.converged == (solution.marginal_error <= 1e-3)
    print("honest error:", eps, error, solution.iterations, "iterations", flush=True)


def main() -> None:
    torch.manual_seed(0)
    assert gf.backends()["sinkhorn"]["cuda"] == "available"
    factors = clouds(30, 41, (12, 20))
    compare("arc", factors, eps=0.2)
    compare("chord", factors, eps=0.5, weights=(0.5, 2.0))
    compare("arc", clouds(33, 17, (5, 7)), eps=0.2)
    matrix = torch.rand(21, 30)
    compare(matrix, None, eps=0.05)
    compare((1000 + matrix).double(), None, eps=0.05)
    # From larger eps downwards it comes to within tol by another path than the reference.
    compare(matrix, None, tolerance=20.0, cost_tolerance=2e-2, eps=0.002, tol=1e-2, max_iter=400)
    for cols in (2100, 4100, 8300):  # two and four vectors a thread, and rows that are read twice
        wide = torch.rand(3, cols)
        compare(wide, None, eps=0.2)
        compare(wide, None, tolerance=2e-2, cost_tolerance=1e-3, eps=0.2, storage="float16")

    for eps in (1e-3, 1e-4, 1e-6, 1e-8):
        check_error(matrix, None, matrix, eps)
    check_error("arc", factors, gf.ops.transport_cost(*factors, backend="cuda"), 1e-4)
    for eps, scale in ((1e-20, 1.0), (0.05, 1e30)):
        with pytest.raises(ValueError, match="float64 holds their plan for eps of at least"):
            gf.ops.sinkhorn(scale * matrix, eps=eps, backend="cuda")

    image0, text0, image1, text1 = clouds(40, 40, (12, 20))
    batch = (image0, text0, image1, text1)
    for settings in ({}, {"cost": torch.rand(40, 40)}, {"cost": "chord"}):
        assigned = gf.ops.ot_assign(*batch, eps=0.2, backend="cuda", **settings)
        truth = gf.ops.ot_assign(*(x.double() for x in batch), eps=0.2, backend="reference", **settings)
        assert torch.equal(assigned, truth)
    torch.set_default_dtype(torch.float64)  # the solver's memory does not follow the user's default
    assert torch.equal(gf.ops.ot_assign(*batch, eps=0.2, cost="chord", backend="cuda"), assigned)
    torch.set_default_dtype(torch.float32)
    drawn = {"eps": 0.2, "assignment": "sample"}
    draws = [
        gf.ops.ot_assign(*batch, **drawn, **settings, generator=torch.Generator().manual_seed(5))
        for settings in ({"backend": "reference"}, {"backend": "cuda"}, {"backend": "cuda", "storage": "float16"})
    ]
    assert torch.equal(*draws[:2])
    assert (draws[2] == draws[0]).double().mean() >= 0.9

    large = clouds(256, 256, (1024, 512))
    for eps in (0.05, 0.005):
        assigned = gf.ops.ot_assign(*large, eps=eps, tol=1e-2, backend="cuda")
        truth = gf.ops.ot_assign(*(x.double() for x in large), eps=eps, tol=1e-2, backend="reference")
        assert (assigned == truth).double().mean() >= 0.995, f"eps={eps}"

    # What training does: points and matrix in float16, and one of all the ranks, whose rows are all rows.
    truth = gf.ops.ot_assign(*(x.double() for x in large), eps=0.05, backend="reference")
    late, status = assign_late(large[:2], large[2:], 0.05, None)
    assert native.CudaTransport.read_status(status)[1]
    assert (late == truth).double().mean() >= 0.95
    uniform = torch.rand(256, dtype=torch.float64)
    panels = [gf.ops.ot_assign_panel(*large, ALONE, eps=0.05, uniform=u, backend="cuda") for u in (None, uniform)]
    exact = gf.ops.ot_assign_panel(*large, ALONE, eps=0.05, uniform=uniform, backend="reference")
    assert (panels[0] == truth).double().mean() >= 0.995
    assert (panels[1] == exact).double().mean() >= 0.95

    cost = gf.ops.transport_cost(*batch, backend="cuda")
    torch.testing.assert_close(cost, gf.ops.transport_cost(*batch, backend="reference"), atol=2e-6, rtol=0)
    torch.set_float32_matmul_precision("high")
    coarse = gf.ops.transport_cost(*batch, backend="cuda")
    assert not torch.equal(coarse, cost)
    torch.testing.assert_close(coarse, cost, atol=2e-3, rtol=0)

    torch.set_float32_matmul_precision("highest")
    for settings in ({}, {"cost": torch.rand(40, 40)}, {"cost": 1000 + torch.rand(40, 40).double()}):
        assigned = gf.ops.ot_assign(*batch, eps=0.2, storage="float16", backend="cuda", **settings)
        truth = gf.ops.ot_assign(*(x.double() for x in batch), eps=0.2, backend="reference", **settings)
        assert (assigned == truth).double().mean() >= 0.95
        cost, factors = (settings["cost"], None) if settings else ("arc", batch)
        solution = gf.ops.sinkhorn(cost, factors, eps=0.2, storage="float16", backend="cuda")
        exact = gf.ops.sinkhorn(
            cost, None if factors is None else tuple(x.double() for x in factors), eps=0.2, backend="reference"
        )
        assert solution.converged
        shift = (solution.g - exact.g).mean()
        torch.testing.assert_close(solution.g - shift, exact.g, atol=2e-3, rtol=0)
        assert abs(solution.transport_cost - exact.transport_cost) <= 1e-3 * abs(exact.transport_cost)
    with pytest.raises(ValueError, match="float16"):
        gf.ops.ot_assign(*batch, eps=0.01, storage="float16", backend="cuda")

    dot_products = gf.ops.transport_cost(*(equal := clouds(6, 6, (1024, 1024)))[:2], *equal[:2], backend="cuda")
    assert float(dot_products.diagonal().max()) < 2e-3  # two arc lengths of 0, in float32


main()
