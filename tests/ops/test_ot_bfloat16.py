"""Transport from rows in bfloat16: the assignment and the potentials are those of float32."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.ops import extension

pytestmark = pytest.mark.skipif(extension.missing_bfloat16() is not None, reason=str(extension.missing_bfloat16()))

SOLVE = """
import sys, torch
import geoflow_fast.ops
points, eps, uniform = torch.load(sys.argv[1])
torch.save(torch.ops.geoflow.ot_solve(*points, eps, 1e-4, 1000, uniform, "cpu")[:3], sys.argv[2])
"""


def clouds(rows: int, image: int, text: int, huge: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    points = [torch.randn(rows, width) for width in (image, text, image, text)]
    for data in points[2:]:
        data[:, :huge] *= 8
    return tuple(gf.geometry.normalize(x) for x in points)


def solved(points, eps, uniform=None):
    """Index and potentials as this processor solves for them."""
    return torch.ops.geoflow.ot_solve(*points, eps, 1e-4, 1000, uniform, "cpu")[:3]


def in_float32(folder, points, eps, uniform=None):
    """The same without the unit for bfloat16, in a process of its own."""
    torch.save((points, eps, uniform), folder / "in.pt")
    environment = {**os.environ, "GEOFLOW_ISA": "avx512vnni"}
    files = [str(folder / "in.pt"), str(folder / "out.pt")]
    subprocess.run([sys.executable, "-c", SOLVE, *files], env=environment, check=True)
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("eps", [0.1, 0.2])
@pytest.mark.parametrize(("rows", "image", "text", "huge"), [(1100, 512, 512, 0), (1031, 300, 513, 3)])
def test_rounded_rows_change_nothing_that_matters(tmp_path, rows, image, text, huge, eps):
    points = clouds(rows, image, text, huge)
    ours, exact = solved(points, eps), in_float32(tmp_path, points, eps)
    assert float((ours[0] == exact[0]).double().mean()) >= 0.999
    rounded = 2**-8 * (image**-0.5 + text**-0.5) <= 0.01 * eps
    assert torch.equal(ours[2], exact[2]) != rounded
    for mine, theirs in zip(ours[1:], exact[1:]):
        gap = mine - theirs
        assert float((gap - gap.mean()).abs().max()) < 1e-3


def test_the_correction_of_near_ties_is_needed(tmp_path):
    """The largest scores of rounded rows alone would choose other columns in more than one row of a thousand."""
    points = clouds(1100, 512, 512)
    index, _, g = solved(points, 0.2)
    arcs = [(x.bfloat16().float() @ y.bfloat16().float().T).clamp(-1, 1).acos() for x, y in zip(points[:2], points[2:])]
    unmended = (g - arcs[0] - arcs[1]).argmax(1)
    exact = in_float32(tmp_path, points, 0.2)[0]
    assert float((unmended == exact).double().mean()) < 0.999 <= float((index == exact).double().mean())


@pytest.mark.parametrize("change", ["eps", "width", "size"])
def test_other_problems_are_solved_in_float32(tmp_path, change):
    width, rows = (64, 1100) if change == "width" else (256, 200) if change == "size" else (256, 1100)
    points, eps = clouds(rows, width, width), 0.03 if change == "eps" else 0.2
    for ours, exact in zip(solved(points, eps), in_float32(tmp_path, points, eps)):
        assert torch.equal(ours, exact)


def test_draws_are_those_of_the_rounded_plan(tmp_path):
    points, uniform = clouds(1100, 512, 512), torch.rand(1100, dtype=torch.float64)
    ours, exact = solved(points, 0.2, uniform)[0], in_float32(tmp_path, points, 0.2, uniform)[0]
    assert float((ours == exact).double().mean()) >= 0.9
