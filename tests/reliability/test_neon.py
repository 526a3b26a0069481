"""The kernels built for 64-bit ARM and run by qemu: NEON gives what this processor gives."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = next((name for name in ("qemu-aarch64-static", "qemu-aarch64") if shutil.which(name)), None)
TOLERANCE = 2e-5
"""Of numbers of order 1 to 10, relative to these: the roundings of float32 sums in another order."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER} (Debian: g++-aarch64-linux-gnu)"),
    pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64 (Debian: qemu-user-static)"),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor has NEON itself"),
]  # fmt: skip


def compile_driver(compiler: str, program: Path) -> Path:
    """The driver with the kernels of the baseline target, which is NEON on 64-bit ARM."""
    target = json.loads((ROOT / "csrc" / "cpu" / "targets.json").read_text())["baseline"]
    sources = [str(ROOT / "csrc" / "cpu" / f"{name}.cpp") for name in [*target["sources"], "dispatch"]]
    shipped = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fopenmp"]  # as in setup.py
    flags = ["-std=c++17", *shipped, "-static", f"-I{ROOT / 'csrc'}", "-DGEOFLOW_TARGET=baseline"]
    others = ["-DGEOFLOW_BASELINE_ONLY"]  # the tables of other targets are not linked
    driver = str(Path(__file__).parent / "target_driver.cpp")
    subprocess.run([compiler, *flags, *others, *sources, driver, "-o", str(program)], check=True)
    return program


def results(*command: str) -> dict[str, list[np.ndarray]]:
    by_call: dict[str, list[np.ndarray]] = {}
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        name, *numbers = line.split()
        by_call.setdefault(name, []).append(np.array(numbers) if name == "isa" else np.array(numbers, np.float64))
    return by_call


def test_neon_agrees(tmp_path):
    assert EMULATOR is not None
    theirs = results(EMULATOR, str(compile_driver(COMPILER, tmp_path / "arm")))
    ours = results(str(compile_driver("g++", tmp_path / "host")))
    assert theirs.pop("isa")[0] == ["neon"]
    assert ours.pop("isa")[0] == ["baseline"]
    assert theirs.keys() == ours.keys()
    assert len(ours) == 24
    for name, parts in ours.items():
        for one, other in zip(parts, theirs[name], strict=True):
            np.testing.assert_allclose(other, one, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
