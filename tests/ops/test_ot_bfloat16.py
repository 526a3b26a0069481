"""Transport from rows in bfloat16: the assignment and the potentials are those of float32."""

from __future__ import annotations

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.ops import native, transport_solvers
from geoflow_fast.ops.transport import make_problem, make_settings
from geoflow_fast.ops.transport_solvers import CpuSolve, solve_cpu

pytestmark = pytest.mark.skipif(native.missing_bfloat16() is not None, reason=str(native.missing_bfloat16()))


def clouds(rows: int, image: int, text: int, huge: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    points = [torch.randn(rows, width) for width in (image, text, image, text)]
    for data in points[2:]:
        data[:, :huge] *= 8
    return tuple(gf.geometry.normalize(x) for x in points)


@pytest.mark.parametrize(("cost", "eps"), [("arc", 0.05), ("arc", 0.2), ("chord", 0.2)])
@pytest.mark.parametrize("storage", ["float32", "float16"])
@pytest.mark.parametrize(("rows", "image", "text", "huge"), [(1100, 512, 512, 0), (1031, 300, 513, 3)])
def test_rounded_rows_change_nothing_that_matters(cost, storage, rows, image, text, huge, eps):
    factors = clouds(rows, image, text, huge)
    problem, settings = make_problem(cost, factors), make_settings(eps, 1e-4, 1000, storage)
    exact = solve_cpu(problem, make_settings(eps, 1e-4, 1000, "float32"))
    rounded = solve_cpu(problem, settings, rounded=True)
    assert isinstance(rounded, CpuSolve)
    assert rounded._mended is not None
    same = (exact.assign(None) == rounded.assign(None)).double().mean()
    assert float(same) >= 0.999
    for ours, theirs in zip(rounded.plan()[:2], exact.plan()[:2]):
        gap = ours - theirs
        assert float((gap - gap.mean()).abs().max()) < 1e-3


def test_the_correction_of_near_ties_is_needed(monkeypatch):
    factors = clouds(1100, 512, 512)
    problem, settings = make_problem("arc", factors), make_settings(0.2, 1e-4, 1000, "float32")
    exact = solve_cpu(problem, settings).assign(None)
    monkeypatch.setattr(transport_solvers, "_ROUNDING_SPREAD", 0.0)
    assert float((solve_cpu(problem, settings, rounded=True).assign(None) == exact).double().mean()) < 0.999


@pytest.mark.parametrize("change", ["eps", "width", "size", "matrix", "double"])
def test_other_problems_are_solved_in_float32(change):
    width, rows = (64, 1100) if change == "width" else (256, 200) if change == "size" else (256, 1100)
    factors = clouds(rows, width, width)
    if change == "double":
        factors = tuple(x.double() for x in factors)
    cost = torch.rand(rows, rows) if change == "matrix" else "arc"
    problem = make_problem(cost, None if change == "matrix" else factors)
    settings = make_settings(1e-3 if change == "eps" else 0.2, 1e-3, 1000, "float32")
    assert not transport_solvers._may_be_rounded(problem, settings)


def test_ot_assign_uses_it(monkeypatch):
    factors = clouds(1100, 512, 512)
    seen = []
    original = native.TransportMatrix.resolve
    monkeypatch.setattr(native.TransportMatrix, "resolve", lambda *a, **k: seen.append(1) or original(*a, **k))
    index = gf.ops.ot_assign(*factors, eps=0.2)
    assert seen
    exact = solve_cpu(make_problem("arc", factors), make_settings(0.2, 1e-3, 1000, "float32")).assign(None)
    assert float((index == exact).double().mean()) >= 0.999


def test_a_processor_without_the_unit_solves_in_float32(monkeypatch):
    factors = clouds(1100, 256, 256)
    problem, settings = make_problem("arc", factors), make_settings(0.2, 1e-3, 1000, "float32")
    assert transport_solvers._may_be_rounded(problem, settings)
    monkeypatch.setattr(native, "missing_bfloat16", lambda: "the kernels have no bfloat16 unit")
    assert not transport_solvers._may_be_rounded(problem, settings)
    ours, exact = solve_cpu(problem, settings, rounded=True), solve_cpu(problem, settings)
    assert torch.equal(ours.assign(None), exact.assign(None))
    assert all(torch.equal(a, b) for a, b in zip(ours.plan()[:2], exact.plan()[:2], strict=True))
