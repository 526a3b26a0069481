"""The compiled code without AVX2: what runs on older x86 and on other processors passes the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run_without_avx2(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GEOFLOW_AVX2": "0"})
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_switch_turns_avx2_off():
    assert run_without_avx2("-c", "from geoflow_fast.ops import native; print(native.cpu_features())").strip() == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "test_masked_interpolant.py",
        "test_gallery_posterior.py",
        "test_network_cpu.py",
        pytest.param("test_ot.py", marks=pytest.mark.slow),
    ],
)
def test_baseline_passes_the_same_tests(module):
    out = run_without_avx2(
        "-m", "pytest", "-q", "-k", "cpu or network", "-m", "not slow and not gpu", str(TESTS / module)
    )
    assert " passed" in out
