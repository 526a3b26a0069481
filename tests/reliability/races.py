"""Compiles csrc/cpu with ThreadSanitizer and runs `race_driver.cpp` on it; see openmp_on_threads.cpp for how."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STATUS = 66
"""With which the sanitizer ends a program that has a race."""


def units() -> list[tuple[str, Path, list[str]]]:
    """The objects of csrc/cpu on x86-64 as setup.py compiles them: (name, source, flags of its target)."""
    table = json.loads((ROOT / "csrc" / "cpu" / "targets.json").read_text())
    kernels = [
        (f"{source}_{name}", ROOT / "csrc" / "cpu" / f"{source}.cpp", [*target["flags"], f"-DGEOFLOW_TARGET={name}"])
        for name, target in table.items()
        for source in target["sources"]
    ]
    return [*kernels, ("dispatch", ROOT / "csrc" / "cpu" / "dispatch.cpp", [])]


def compile_driver(folder: Path) -> Path:
    """The program, compiled into `folder`; the sources of csrc/cpu see OpenMP, the link replaces its runtime."""
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-Wno-psabi", f"-I{ROOT / 'csrc'}"]
    own = [(name, HERE / f"{name}.cpp", []) for name in ("race_driver", "openmp_on_threads")]

    def compile_one(unit: tuple[str, Path, list[str]]) -> Path:
        name, source, extra = unit
        openmp = [] if name == "openmp_on_threads" else ["-fopenmp"]
        made = folder / f"{name}.o"
        subprocess.run(["g++", *flags, *extra, *openmp, "-c", str(source), "-o", str(made)], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = [str(made) for made in pool.map(compile_one, [*units(), *own])]
    program = folder / "race_driver"
    subprocess.run(["g++", "-fsanitize=thread", *objects, "-o", str(program)], check=True)
    return program


def run_driver(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it; the first race ends it with `STATUS`."""
    surroundings = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1:exitcode={STATUS}", **environment}
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, env=surroundings)
