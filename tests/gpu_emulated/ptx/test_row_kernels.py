"""The compiled PTX of the Triton row kernels, run on the CPU through the real wrappers, against float64.

Run in a process of its own, without Triton's interpreter: `pytest tests/gpu_emulated/ptx`, a part of
`make test-slow`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from tests.gpu_emulated.cuda_emulation.workshop import SCHEDULES
from tests.gpu_emulated.ptx.checks import ROW_KERNELS, WIDTHS_IN_STEPS, contiguous_rows
from tests.gpu_emulated.ptx.machine import Machine

Served = Callable[..., Machine]
SIZES = [(1, 1), (7, 129), (129, 7), (5, 1023)]
SIXTEEN_BYTES = re.compile(r"(?:ld|st)\.global\S*\.(?:v4\.\w32|v2\.\w64)\b")
SIZED = [name for name in ROW_KERNELS if name != "bad rows"]  # which has a size of its own


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_float64_agrees_and_every_schedule_gives_the_same_bits(
    served: Served, name: str, rows: int, width: int
) -> None:
    results = {each: served(lambda: ROW_KERNELS[name](rows, width), schedule=each).outputs for each in SCHEDULES}
    assert len(set(map(tuple, results.values()))) == 1


@pytest.mark.parametrize("width", WIDTHS_IN_STEPS)
@pytest.mark.parametrize("name", SIZED)
def test_rows_of_multiples_of_16_are_taken_16_bytes_at_a_time(served: Served, name: str, width: int) -> None:
    """What is compiled for the paper's network, against float64 and in every schedule."""
    with contiguous_rows():
        machines = [served(lambda: ROW_KERNELS[name](5, width), schedule=each) for each in SCHEDULES]
    assert len({tuple(machine.outputs) for machine in machines}) == 1
    for text in machines[0].texts:
        assert SIXTEEN_BYTES.search(text), re.findall(r"\.entry (\w+)", text)


@pytest.mark.parametrize("name", SIZED)
def test_many_rows(served: Served, name: str) -> None:
    served(lambda: ROW_KERNELS[name](1023, 33), schedule="shuffled")


@pytest.mark.parametrize(("build", "schedule"), [("address", "reversed"), ("thread", "forward")])
@pytest.mark.parametrize("width", [129, *WIDTHS_IN_STEPS[:1]])
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_clean_under_sanitizers(served: Served, name: str, width: int, build: str, schedule: str) -> None:
    """All blocks at once, so that ThreadSanitizer sees races between them, too."""
    with contiguous_rows() if width in WIDTHS_IN_STEPS else nullcontext():
        served(lambda: ROW_KERNELS[name](5, width), build=build, schedule=schedule, together=True)
