"""The benchmarks of a source checkout, started from the command line: they are not part of the installed package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "bench_"


def checkout() -> Path:
    """The folder of the source checkout that this package runs from; FileNotFoundError if it is installed elsewhere."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / "benchmarks" / "__main__.py").is_file():
        raise FileNotFoundError(
            f"there is no benchmarks folder in {folder}: benchmarks are part of the source checkout, not of the "
            "installed package; run `make bench` there, or install it with `pip install --editable .`"
        )
    return folder


def names() -> list[str]:
    """The benchmarks that there are."""
    return sorted(path.stem.removeprefix(PREFIX) for path in (checkout() / "benchmarks").glob(f"{PREFIX}*.py"))


def run(wanted: Sequence[str], flags: Sequence[str] = ()) -> int:
    """Runs the named benchmarks, all suites of hot paths without a name, in a process of their own with `flags` of
    `python -m benchmarks`; returns its exit code."""
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        raise ValueError(f"no benchmark named {', '.join(unknown)}; there are {', '.join(names())}")
    return subprocess.run([sys.executable, "-m", "benchmarks", *wanted, *flags], cwd=checkout(), check=False).returncode
