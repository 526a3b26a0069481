"""Compiles csrc/cpu with ThreadSanitizer and runs `race_driver.cpp` on it; see openmp_on_threads.cpp for how."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STATUS = 66
"""With which the sanitizer ends a program that has a race."""


def isa_flags(source: Path) -> list[str]:
    """The flags that setup.py compiles a source of csrc/cpu with on x86-64, by the end of its name."""
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    avx512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"]
    return {"avx2": avx2, "avx512bf16": avx2 + avx512}.get(source.stem.rpartition("_")[2], [])


def compile_driver(folder: Path) -> Path:
    """The program, compiled into `folder`; the sources of csrc/cpu see OpenMP, the link replaces its runtime."""
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-Wno-psabi", f"-I{ROOT / 'csrc'}"]
    sources = [*sorted((ROOT / "csrc" / "cpu").glob("*.cpp")), HERE / "race_driver.cpp", HERE / "openmp_on_threads.cpp"]

    def compile_one(source: Path) -> Path:
        openmp = [] if source.stem == "openmp_on_threads" else ["-fopenmp"]
        made = folder / f"{source.stem}.o"
        subprocess.run(["g++", *flags, *isa_flags(source), *openmp, "-c", str(source), "-o", str(made)], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = [str(made) for made in pool.map(compile_one, sources)]
    program = folder / "race_driver"
    subprocess.run(["g++", "-fsanitize=thread", *objects, "-o", str(program)], check=True)
    return program


def run_driver(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it; the first race ends it with `STATUS`."""
    surroundings = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1:exitcode={STATUS}", **environment}
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, env=surroundings)
