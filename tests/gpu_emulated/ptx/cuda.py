"""What nvcc makes of the CUDA kernels, run by the programs of the emulated device in place of their source."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu_emulated.cuda_emulation.workshop import Array, Workshop
from tests.gpu_emulated.ptx.machine import CAPABILITY, Builder
from tests.gpu_emulated.ptx.parser import Module, parse
from tests.gpu_emulated.ptx.translate import translate
from tools import cuda_build

ENTRY = re.compile(r"^(?:\.visible )?\.entry (\w+)\(.*?^\}$", re.MULTILINE | re.DOTALL)
# Those of emulate_launchers.cpp, which compares the addresses of more.
BY_LAUNCHERS = [
    *("score_kernel<float>", "score_kernel<Half>"),
    *(f"sinkhorn_kernel<{which}>" for which in ("1, float", "2, float", "4, float", "4, Half")),
    "sinkhorn_wide_kernel<Half>",
    *(f"sinkhorn_{name}_kernel<{entry}>" for name in ("result", "sample") for entry in ("float", "Half")),
]


@dataclass(frozen=True)
class PtxEdit:
    """A change of one kernel's PTX."""

    kernel: str
    apply: Callable[[str], str]


def compile_cuda(csrc: Path) -> dict[str, str]:
    """The PTX of each kernel by its readable name, with lines numbered as in the whole."""
    compiler = cuda_build.nvcc()
    if compiler is None:
        raise OSError("nvcc is not on PATH")
    source, flags = csrc / "cuda" / "sinkhorn.cu", ["-std=c++17", "-O3", f"-I{csrc}", f"-arch=sm_{CAPABILITY}"]
    command = [compiler, *flags, "-ptx", str(source), "-o", "/dev/stdout"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def blank(match: re.Match[str]) -> str:
        return "\n" * match.group().count("\n")

    def alone(name: str) -> str:
        return ENTRY.sub(lambda match: match.group() if match[1] == name else blank(match), text)

    return {cuda_build.readable_name(match[1]): alone(match[1]) for match in ENTRY.finditer(text)}


class CompiledWorkshop(Workshop):
    """The same programs with the same arguments, linked with the kernels' PTX."""

    def __init__(self, folder: Path, builder: Builder):
        super().__init__(folder)
        self._builder = builder
        self._texts = functools.cache(lambda edit: compile_cuda(self.sources(edit)))
        self._parsed: Callable[[str], Module] = functools.cache(parse)
        self.launched: dict[str, Launched] = {}  # the last launch of each kernel

    def start(
        self, name: str, build: str, edit: Any, arrays: list[Array], **arguments: float
    ) -> subprocess.CompletedProcess[bytes]:
        """A program that has ended well has run the PTX of all its kernels, and not what g++ makes of their source."""
        types = ("-DHALF_ENTRIES",) if arguments.get("-DHALF_ENTRIES") else ()
        expected = set(kernels_of(name, types, arguments))
        with launches_noted(self._folder / "launches") as launched:
            outcome = super().start(name, build, edit, arrays, **arguments)
        self.launched |= launched
        if outcome.returncode == 0 and launched.keys() != expected:
            raise RuntimeError(f"{name} ran the PTX of {sorted(launched)} instead of {sorted(expected)}")
        return outcome

    def _choose(self, name: str, build: str, edit: Any, types: tuple[str, ...], arguments: dict[str, float]) -> Path:
        headers = None if isinstance(edit, PtxEdit) else edit
        objects = tuple(self.kernel(each, build, edit) for each in kernels_of(name, types, arguments))
        return self.program(name, build, headers, types, objects)

    def names(self) -> list[str]:
        """All kernels."""
        return list(self._texts(None))

    def text(self, kernel: str, edit: Any = None) -> str:
        """The PTX of a kernel, of edited headers or edited itself."""
        if not isinstance(edit, PtxEdit):
            return self._texts(edit)[kernel]
        text = self._texts(None)[kernel]
        return edit.apply(text) if edit.kernel == kernel else text

    def kernel(self, kernel: str, build: str, edit: Any = None) -> Path:
        return self._builder.object(translate(self._parsed(self.text(kernel, edit)), hosted=True), build)


@dataclass(frozen=True)
class Launched:
    """What machine.h notes of a launch."""

    threads: int
    blocks: int
    shared: int
    parameters: bytes


@contextmanager
def launches_noted(path: Path) -> Iterator[dict[str, Launched]]:
    """Afterwards the dictionary holds the last launch of each kernel whose PTX ran in processes started inside."""
    launched: dict[str, Launched] = {}
    path.write_text("")
    with mock.patch.dict(os.environ, {"GEOFLOW_PTX_PARAMETERS": str(path)}):
        yield launched
    for line in path.read_text().splitlines():
        symbol, threads, blocks, shared, parameters = line.split()
        name = cuda_build.readable_name(symbol)
        launched[name] = Launched(int(threads), int(blocks), int(shared), bytes.fromhex(parameters))


def kernels_of(program: str, types: tuple[str, ...], arguments: dict[str, float]) -> list[str]:
    """The kernels that a program of tests/gpu_emulated/cuda_emulation will launch."""
    entry = "Half" if "-DHALF_ENTRIES" in types else "float"
    if program == "emulate_score":
        return [f"score_kernel<{entry}>"]
    if program == "emulate_launchers":
        return BY_LAUNCHERS
    narrow = [vectors for vectors in (1, 2, 4) if arguments["cols"] <= 2048 * vectors and not arguments["wide"]]
    solver = f"sinkhorn_kernel<{narrow[0]}, {entry}>" if narrow else f"sinkhorn_wide_kernel<{entry}>"
    return [solver, f"sinkhorn_result_kernel<{entry}>", f"sinkhorn_sample_kernel<{entry}>"]
