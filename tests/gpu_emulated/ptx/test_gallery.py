"""The compiled PTX of the gallery kernels, with tensor cores that truncate when they accumulate, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu_emulated.cuda_emulation.workshop import SCHEDULES
from tests.gpu_emulated.ptx.checks import GALLERY
from tests.gpu_emulated.ptx.machine import Machine

Served = Callable[..., Machine]


@pytest.mark.parametrize("name", GALLERY)
def test_float64_agrees_and_every_schedule_gives_the_same_bits(served: Served, name: str) -> None:
    results = {each: served(GALLERY[name], schedule=each).outputs for each in SCHEDULES}
    assert len(set(map(tuple, results.values()))) == 1


@pytest.mark.parametrize("name", GALLERY)
@pytest.mark.parametrize(("build", "schedule"), [("address", "reversed"), ("thread", "forward")])
def test_clean_under_sanitizers(served: Served, name: str, build: str, schedule: str) -> None:
    served(GALLERY[name], build=build, schedule=schedule, together=True)
