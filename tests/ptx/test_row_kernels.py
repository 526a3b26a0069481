"""The compiled PTX of the Triton row kernels, run on the CPU through the real wrappers, against float64.

Run in a process of its own, without Triton's interpreter: `pytest tests/ptx`, which is what `make test` does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cuda_emulation.workshop import SCHEDULES
from tests.ptx.checks import ROW_KERNELS

Outputs = Callable[..., list[int]]
SOON = ("tangent_step", "cross_residual")
SIZES = [(1, 1), (7, 129), (129, 7), (5, 1023)]


@pytest.mark.parametrize(
    ("name", "rows", "width"),
    [
        pytest.param(name, *size, marks=() if name in SOON and size == (7, 129) else pytest.mark.slow)
        for name in ROW_KERNELS
        for size in SIZES
    ],
)
def test_float64_agrees_and_every_schedule_gives_the_same_bits(
    outputs: Outputs, name: str, rows: int, width: int
) -> None:
    results = {each: outputs(lambda: ROW_KERNELS[name](rows, width), schedule=each) for each in SCHEDULES}
    assert len(set(map(tuple, results.values()))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tangent_step", "swiglu", "adaln", "masked_interpolant", "segment_adaln"])
def test_many_rows(outputs: Outputs, name: str) -> None:
    outputs(lambda: ROW_KERNELS[name](1023, 33), schedule="shuffled")


@pytest.mark.parametrize(
    ("name", "build", "schedule"),
    [
        pytest.param(name, build, schedule, marks=() if (name, build) == ("unit_rows", "address") else pytest.mark.slow)
        for name in ROW_KERNELS
        for build, schedule in (("address", "reversed"), ("thread", "forward"))
    ],
)
def test_clean_under_sanitizers(outputs: Outputs, name: str, build: str, schedule: str) -> None:
    """All blocks at once, so that ThreadSanitizer sees races between them, too."""
    outputs(lambda: ROW_KERNELS[name](5, 129), build=build, schedule=schedule, together=True)
