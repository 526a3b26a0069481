"""compute-sanitizer watches the parity tests of every kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is false"),
]
SELECTIONS = {
    "test_triton.py": "parity and not every_gallery and not 4096 and not 5000",
    "test_sinkhorn_gpu.py": "parity and not huge and not assignment and not 2048",
}


TOOLS = {
    "test_triton.py": ("memcheck", "initcheck", "racecheck"),
    "test_sinkhorn_gpu.py": ("memcheck", "initcheck", "racecheck", "synccheck"),
}


@pytest.mark.parametrize(("file", "tool"), [(file, tool) for file, tools in TOOLS.items() for tool in tools])
def test_compute_sanitizer_finds_nothing(file, tool):
    """compute-sanitizer --tool TOOL --error-exitcode 9 python -m pytest -k parity tests/gpu/test_triton.py"""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q"]
    command += ["-k", SELECTIONS[file], str(Path(__file__).with_name(file))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:]
