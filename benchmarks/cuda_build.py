"""Ahead-of-time view of the CUDA kernels: what the compiler made of them for each architecture, without a GPU."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "csrc" / "cuda" / "sinkhorn.cu"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

# What a launch adds to the static shared memory; csrc/cuda/score.cuh and sinkhorn.cuh, checked by the emulation's tests.
DYNAMIC_SHARED = {
    "score_kernel<1>": 98304,
    "score_kernel<3>": 98304,
    "sinkhorn_kernel<1>": 32768,
    "sinkhorn_kernel<2>": 65536,
    "sinkhorn_kernel<4>": 131072,
}


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture: what ptxas reports of it, and its instructions."""

    name: str
    registers: int
    stack_bytes: int
    spilled_bytes: int
    static_shared: int
    assembly: str

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.static_shared + DYNAMIC_SHARED.get(self.name, 0)

    def count(self, pattern: str) -> int:
        """How many instructions match."""
        return len(re.findall(pattern, self.assembly))


def nvcc() -> str | None:
    """The CUDA compiler, if there is one."""
    return shutil.which("nvcc")


def disassembler() -> str | None:
    """nvdisasm of the toolkit, else the one that comes with Triton."""
    found = shutil.which("nvdisasm")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        found = str(bundled) if bundled.exists() else None
    return found


def compile_all(folder: Path) -> dict[str, dict[str, CompiledKernel]]:
    """Architecture -> kernel name -> what it became; cubins are left in `folder`."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(ARCHITECTURES, pool.map(functools.partial(_compile, folder), ARCHITECTURES)))


def _compile(folder: Path, architecture: str) -> dict[str, CompiledKernel]:
    cubin = folder / f"{architecture}.cubin"
    compiler, listing = nvcc(), disassembler()
    if compiler is None or listing is None:
        raise OSError("compiling CUDA ahead of time needs nvcc on PATH, and nvdisasm there or from Triton")
    flags = ["-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", f"-arch={architecture}", "-Xptxas=-v"]
    built = subprocess.run(
        [compiler, *flags, "-cubin", str(SOURCE), "-o", str(cubin)], capture_output=True, text=True, check=True
    )
    assembly = subprocess.run([listing, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"^\.text\.(\w+):$", assembly, flags=re.MULTILINE)
    bodies = dict(zip(sections[1::2], sections[2::2]))
    kernels = (_report(block, bodies) for block in built.stderr.split("Compiling entry function")[1:])
    return {kernel.name: kernel for kernel in kernels}


def _report(block: str, bodies: dict[str, str]) -> CompiledKernel:
    """From ptxas' lines on one kernel."""

    def number(pattern: str) -> int:
        found = re.search(pattern, block)
        return int(found.group(1)) if found else 0

    symbol = re.search(r"'(\w+)'", block)
    if symbol is None:
        raise OSError(f"cannot read ptxas' report: {block[:200]}")
    return CompiledKernel(
        _readable(symbol.group(1)),
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        number(r"(\d+) bytes smem"),
        bodies[symbol.group(1)],
    )


def _readable(symbol: str) -> str:
    """`score_kernel<3>` for a mangled name."""
    found = re.search(r"\d+([a-z_]+_kernel)(?:I((?:Li\d+E)+)E)?", symbol)
    if found is None:
        raise OSError(f"unexpected kernel name {symbol}")
    arguments = re.findall(r"Li(\d+)E", found.group(2) or "")
    return found.group(1) + (f"<{', '.join(arguments)}>" if arguments else "")
