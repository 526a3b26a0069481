"""The tables of docs/gpu.md, and the static verifier where it is installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from geoflow_fast.kernels import gallery
from tests.cuda_emulation.test_cuda_static import KERNELS
from tests.ptx import report
from tests.ptx.machine import compile_triton
from tools import aot


def test_the_page_holds_every_kernel() -> None:
    """`python -m tests.ptx.report docs/gpu.md` writes the tables."""
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    sources = Path(gallery.__file__).parent.glob("*.py")
    triton = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    for begin, end in report.MARKERS.values():
        table = page[page.index(begin) : page.index(end)]
        assert set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == {*triton, *KERNELS}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sentryward") is None, reason="the command sentryward is not on PATH")
def test_the_verifier_proves_a_kernel_and_misses_a_barrier(tmp_path: Path) -> None:
    (launch,) = aot.Case("", aot.call_with_rows("tangent_step", 3, 129)).launches()
    sizes = [{"parameter": number, "type": "u32", "value": 3 if number == 4 else 129} for number in range(4, 9)]
    kernel = report.Seen("tangent_step_kernel", compile_triton(launch), launch.grid, sizes)
    assert report.judged(kernel, tmp_path) == ("proved", "4 of 4")
