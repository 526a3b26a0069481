"""Every threaded kernel under ThreadSanitizer, with results that do not depend on the number of threads."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from geoflow_fast.ops import extension
from tests.reliability.races import STATUS, compile_driver, run_driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the targets compile on x86-64 alone"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("races"))


def test_the_sanitizer_sees_a_race(program: Path):
    result = run_driver(program, "--race")
    assert result.returncode == STATUS
    assert "data race" in result.stderr


def test_no_races_and_one_result_for_any_number_of_threads(program: Path):
    calls = 0
    for isa in extension.supported_isas():
        result = run_driver(program, GEOFLOW_ISA=isa)
        assert result.returncode == 0, result.stderr
        calls += int(result.stdout)
    assert calls >= 200
