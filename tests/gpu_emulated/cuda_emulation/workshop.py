"""Compiles and runs the programs of the emulation."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[3]
EMULATION = ROOT / "tests" / "gpu_emulated" / "cuda_emulation"
SCHEDULES = {"forward": 0, "reversed": 1, "shuffled": 2, "greedy": 3}
BUILDS = {
    "plain": ["-O2"],
    "portable": ["-O1", "-DEMULATION_PORTABLE"],
    "address": ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
}
# A race, or a bad access, ends the program at once with this status; the emulation's own complaints end it with 3.
SANITIZER_STATUS = 66
ENVIRONMENT = {
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={SANITIZER_STATUS}",
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={SANITIZER_STATUS}",
    "UBSAN_OPTIONS": f"exitcode={SANITIZER_STATUS}",
}

Array = NDArray[Any]


HeaderEdit = tuple[str, str, str]  # a kernel header, a piece of its text, and what takes its place


class Workshop:
    """Compiles the emulated programs, each at most once, and runs them."""

    def __init__(self, folder: Path):
        compiler = shutil.which("g++")
        assert compiler is not None, "the emulation needs g++, as the package's own build does"
        self._compiler, self._folder = compiler, folder
        self.program = functools.cache(self._program)
        self.sources = functools.cache(self._sources)

    def _sources(self, edit: HeaderEdit | None) -> Path:
        """The folder csrc, or a copy of it with one piece replaced."""
        if edit is None:
            return ROOT / "csrc"
        header, old, new = edit
        csrc = self._folder / f"{zlib.crc32(repr(edit).encode()):08x}.csrc"
        shutil.copytree(ROOT / "csrc", csrc)
        text = (csrc / "cuda" / header).read_text()
        assert text.count(old) == 1, f"{header} must contain exactly once: {old}"
        (csrc / "cuda" / header).write_text(text.replace(old, new))
        return csrc

    def _program(
        self, name: str, build: str, edit: HeaderEdit | None, types: tuple[str, ...], kernels: tuple[Path, ...]
    ) -> Path:
        """`types` define those of the kernels' templates; objects in `kernels` take the place of kernels."""
        target = self._folder / f"{name}-{build}-{zlib.crc32(repr((edit, types, kernels)).encode()):08x}"
        folders = (f"-I{EMULATION}", f"-I{self.sources(edit)}")
        common = [self._compiler, "-std=c++17", "-Wno-unknown-pragmas", *BUILDS[build], *folders, *types]
        machinery = self._folder / f"emulation-{build}.o"
        if not machinery.exists():
            subprocess.run([*common, "-c", str(EMULATION / "emulation.cpp"), "-o", str(machinery)], check=True)
        parts = [str(EMULATION / f"{name}.cpp"), *map(str, kernels), str(machinery)]
        subprocess.run([*common, *parts, "-o", str(target)], check=True)
        return target

    def start(
        self, name: str, build: str, edit: Any, arrays: list[Array], **arguments: float
    ) -> subprocess.CompletedProcess[bytes]:
        types = ("-DHALF_ENTRIES",)
        wanted = tuple(flag for flag in types if arguments.pop(flag, False))
        program = self._choose(name, build, edit, wanted, arguments)
        launcher = without_address_randomisation() if build == "thread" else []
        return subprocess.run(
            [*launcher, str(program), *(f"{key}={value!r}" for key, value in arguments.items())],
            input=b"".join(np.ascontiguousarray(x).tobytes() for x in arrays),
            capture_output=True,
            env=os.environ | ENVIRONMENT,
            timeout=600,
        )

    def _choose(self, name: str, build: str, edit: Any, types: tuple[str, ...], _arguments: dict[str, float]) -> Path:
        """The program for a call."""
        return self.program(name, build, edit, types, ())


@functools.cache
def without_address_randomisation() -> list[str]:
    """A command prefix, where it is allowed: older ThreadSanitizers fail on kernels that randomise more bits."""
    setarch = shutil.which("setarch")
    allowed = setarch is not None and subprocess.run([setarch, "-R", "true"], capture_output=True).returncode == 0
    return [setarch, "-R"] if setarch is not None and allowed else []
