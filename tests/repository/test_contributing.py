"""The worked example of CONTRIBUTING.md, followed to the letter in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def copy_of_the_repository(folder: Path) -> Path:
    wanted = ["csrc", "geoflow_fast", "kernels", "setup.py", "pyproject.toml", "README.md", "LICENSE", "tests/*.py"]
    listed = subprocess.check_output(["git", "ls-files", "-z", *wanted], cwd=ROOT, text=True).split("\0")
    for name in filter(None, listed):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    (folder / "geoflow_fast" / "kernels").symlink_to("../kernels")
    return folder


def test_the_example_has_five_files():
    operation, test = blocks("python")
    assert "dispatch.operation(" in operation
    assert "def test_" in test
    assert len(re.findall(r"^diff --git", blocks("diff")[0], flags=re.M)) == 3


@pytest.mark.slow
def test_the_example_works(tmp_path):
    tree = copy_of_the_repository(tmp_path / "copy")
    operation, test = blocks("python")
    (tree / "geoflow_fast/ops/softsign.py").write_text(operation)
    (tree / "tests/ops/test_softsign.py").write_text(test)
    subprocess.run(["git", "apply", "-"], input=blocks("diff")[0], text=True, cwd=tree, check=True)
    environment = {**os.environ, "GEOFLOW_CUDA": "0", "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, env=environment, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_softsign.py"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout
