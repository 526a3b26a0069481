"""The tables of docs/gpu.md, and the static verifier where it is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from geoflow_fast.kernels import gallery
from tests.cuda_emulation.test_cuda_static import KERNELS
from tests.ptx import report
from tests.ptx.checks import GALLERY, ROW_KERNELS
from tests.ptx.machine import Builder

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def lines_of(table: str) -> dict[str, tuple[str, ...]]:
    """The cells of each kernel in a table of the page; `python -m tests.ptx.report docs/gpu.md` writes it."""
    begin, end = report.MARKERS[table]
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", PAGE[PAGE.index(begin) : PAGE.index(end)], re.MULTILINE)
    return {kernel: tuple(cell.strip() for cell in cells.split("|")) for kernel, cells in lines}


VERDICTS = lines_of("verdicts")
PROVED = [kernel for kernel, (verdict, _) in VERDICTS.items() if verdict == "proved"]


def test_the_page_holds_every_kernel() -> None:
    sources = Path(gallery.__file__).parent.glob("*.py")
    triton = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    for table in report.MARKERS:
        assert lines_of(table).keys() == {*triton, *KERNELS}


def test_nothing_is_flagged_and_every_deleted_barrier_is() -> None:
    assert len(PROVED) >= 14
    for verdict, deletions in VERDICTS.values():
        assert verdict == "proved" or verdict.startswith("undecided"), verdict
        assert deletions == "" or len(set(deletions.split(" of "))) == 1, deletions


@pytest.mark.slow
@pytest.mark.skipif(report.verifier() is None, reason="`make .venv/.sentryward` installs the verifier")
@pytest.mark.parametrize("kernel", PROVED)
def test_the_verifier_says_what_the_page_says(builder: Builder, kernel: str, tmp_path: Path) -> None:
    """Of every kernel that is proved, and of it without its barriers; on a busy machine a minute may be too short."""
    checks = [lambda name=name: ROW_KERNELS[name](9, 129) for name in ROW_KERNELS if kernel.startswith(name)]
    checks = checks or [GALLERY["few, bfloat16"], GALLERY["few, biased"]]
    form = next(one for one in report.recorded(builder, checks) if one.name == kernel)
    assert report.judged(form, tmp_path, seconds=10 * report.SECONDS) == VERDICTS[kernel]
