"""Ahead-of-time view of the CUDA kernels: what the compiler made of them for each architecture, without a GPU.

`python -m tools.cuda_build` prints a table.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools import costs

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "csrc" / "cuda" / "sinkhorn.cu"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# What a launch adds to the static shared memory: kScoreSharedBytes and kSinkhornSharedBytes, as a test checks.
DYNAMIC_SHARED = {
    "score_kernel<Half>": 98304,
    "score_kernel<float>": 98304,
    "sinkhorn_kernel<1, float>": 24576,
    "sinkhorn_kernel<2, float>": 49152,
    "sinkhorn_kernel<4, float>": 98304,
    "sinkhorn_kernel<1, Half>": 16384,
    "sinkhorn_kernel<2, Half>": 32768,
    "sinkhorn_kernel<4, Half>": 65536,
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


def binary_tool(name: str) -> str | None:
    """nvdisasm or cuobjdump of the toolkit, else the one that comes with Triton."""
    path = shutil.which(name)
    triton = importlib.util.find_spec("triton")
    if path is None and triton is not None and triton.origin is not None:
        bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name
        path = str(bundled) if bundled.exists() else None
    return path


def compile_all(folder: Path) -> dict[str, dict[str, CompiledKernel]]:
    """Architecture -> kernel name -> what it became; cubins are left in `folder`."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(ARCHITECTURES, pool.map(functools.partial(compile_for, folder), ARCHITECTURES)))


def compile_for(folder: Path, architecture: str) -> dict[str, CompiledKernel]:
    """The same for one architecture."""
    cubin = folder / f"{architecture}.cubin"
    compiler, listing = nvcc(), binary_tool("nvdisasm")
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
        match = re.search(pattern, block)
        return int(match.group(1)) if match else 0

    symbol = re.search(r"'(\w+)'", block)
    if symbol is None:
        raise OSError(f"cannot read ptxas' report: {block[:200]}")
    return CompiledKernel(
        readable_name(symbol.group(1)),
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        number(r"(\d+) bytes smem"),
        bodies[symbol.group(1)],
    )


# Template arguments in a mangled name: a number, float, Half, and Half once more.
ARGUMENT = r"Li(\d+)E|(f)|NS0_4HalfE|S2_"


def readable_name(symbol: str) -> str:
    """`sinkhorn_kernel<4, Half>` for a mangled name."""
    match = re.search(rf"\d+([a-z_]+_kernel)I((?:{ARGUMENT})+)E", symbol)
    if match is None:
        raise OSError(f"unexpected kernel name {symbol}")
    arguments = re.finditer(ARGUMENT, match[2])
    return f"{match[1]}<{', '.join(one[1] or ('float' if one[2] else 'Half') for one in arguments)}>"


# ---- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Vendor peaks, and the part of them that estimates count on."""

    name: str
    bandwidth: float  # bytes/s of memory
    cache: float  # bytes/s of L2
    tensor: float  # float16 FLOP/s through mma.sync

    def seconds(self, memory: float = 0.0, cache: float = 0.0, flops: float = 0.0, extra: float = 0.0) -> float:
        """The slowest of the three at the shares that all estimates count on, plus what nothing overlaps."""
        work = costs.Work(0, memory, flops)
        rates = costs.ProductRates(self.tensor, self.tensor, self.bandwidth)
        return max(costs.seconds(work, rates, "bfloat16"), cache / self.cache) + extra


# mma.sync reaches about 62 % of the H100's 989 TFLOP/s, which wgmma alone can use in full. The RTX 4090 stands for GPUs
# with 99 KB of shared memory: 165 TFLOP/s with float32 sums.
DEVICES = (
    Device("A100-40", 1.555e12, 4.0e12, 312e12),
    Device("H100", 3.35e12, 5.5e12, 0.62 * 989e12),
    Device("RTX 4090", 1.008e12, 4.0e12, 165e12),
)
MATRIX = 4.0 * 8192**2
SCORE_FLOPS = 2.0 * 8192**2 * 2048
SCORE_CACHE = (8192 / 128) ** 2 * 256 * 2048 * 2.0  # a tile reads 128 rows and 128 columns of both factors in float16
BARRIERS = 6e-6  # two barriers of the grid and the column update
SCORE_HALF = {"memory": MATRIX / 2, "cache": SCORE_CACHE, "flops": SCORE_FLOPS}
ROWS: list[tuple[str, str, dict[str, float]]] = [
    ("scores of float16 points, 8192 x 8192, d = 1024 + 1024", "score_kernel<Half>", SCORE_HALF),
    ("the same to a float32 matrix", "score_kernel<float>", SCORE_HALF | {"memory": MATRIX}),
    ("one iteration, B = 2048", "sinkhorn_kernel<1, Half>", {"memory": MATRIX / 32, "extra": BARRIERS}),
    ("one iteration, B = 4096", "sinkhorn_kernel<2, Half>", {"memory": MATRIX / 8, "extra": BARRIERS}),
    ("one iteration, B = 8192", "sinkhorn_kernel<4, Half>", {"memory": MATRIX / 2, "extra": BARRIERS}),
    ("one iteration, B = 16384", "sinkhorn_wide_kernel<Half>", {"memory": 4 * MATRIX, "extra": BARRIERS}),
    ("one iteration, B = 2048, float32", "sinkhorn_kernel<1, float>", {"memory": MATRIX / 16, "extra": BARRIERS}),
    ("one iteration, B = 4096, float32", "sinkhorn_kernel<2, float>", {"memory": MATRIX / 4, "extra": BARRIERS}),
    ("one iteration, B = 8192, float32", "sinkhorn_kernel<4, float>", {"memory": MATRIX, "extra": BARRIERS}),
    ("one iteration, B = 16384, float32", "sinkhorn_wide_kernel<float>", {"memory": 8 * MATRIX, "extra": BARRIERS}),
    ("argmax and potentials, B = 8192", "sinkhorn_result_kernel<Half>", {"memory": MATRIX / 2}),
    ("the same, float32", "sinkhorn_result_kernel<float>", {"memory": MATRIX}),
    ("draws, B = 8192", "sinkhorn_sample_kernel<Half>", {"memory": MATRIX / 4}),
    ("the same, float32", "sinkhorn_sample_kernel<float>", {"memory": MATRIX / 2}),
]


def table() -> str:
    """Registers, local memory, shared memory and estimated times of every kernel, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        built = compile_all(Path(folder))
    numbers = " / ".join(name.removeprefix("sm_") for name in ARCHITECTURES)
    titles = ["work", "kernel", f"registers sm_{numbers}", "stack", "spills", "shared KB"]
    lines = [[*titles, *(f"{device.name}, estimated" for device in DEVICES)], ["---"] * (len(titles) + len(DEVICES))]
    for work, name, load in ROWS:
        kernels = [built[architecture][name] for architecture in ARCHITECTURES]
        lines.append(
            [
                work,
                f"`{name}`",
                " / ".join(str(kernel.registers) for kernel in kernels),
                str(max(kernel.stack_bytes for kernel in kernels)),
                str(max(kernel.spilled_bytes for kernel in kernels)),
                f"{max(kernel.shared_bytes for kernel in kernels) / 1024:.1f}",
                *(f"{1e3 * device.seconds(**load):.2f} ms" for device in DEVICES),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
