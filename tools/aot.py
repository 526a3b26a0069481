"""Compiles every kernel for GPUs that are not here and reads what the compiler made of it.

    python -m tools.aot        prints a table of registers, spills, shared memory and estimated times

Launches are recorded from the real Python wrappers on fake CUDA tensors, so what is compiled is what a GPU would be
given: the same signature, constants, alignment and warps. Nothing here needs a driver.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from geoflow_fast.kernels import gallery, geodesic, network, probes
from geoflow_fast.ops import dispatch
from geoflow_fast.ops.gallery_lists import LONGEST_LIST
from tools import costs

NVIDIA = (80, 86, 89, 90, 100, 120)
# Of a block: desktop and workstation GPUs (3090, 4090, 5090, A10, L4, L40S) have 99 KB.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024} | dict.fromkeys((86, 89, 120), 99 * 1024)
TENSOR_CORE = {90: "wgmma", 100: "tcgen05.mma"} | dict.fromkeys((80, 86, 89, 120), "mma.sync")
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel under its decorators, the grid, positional arguments and keyword constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, tensors on "cuda" are fake and launches are listed instead of made."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        launches.append(Launch(kernel, grid, arguments, meta))

    with ExitStack() as stack:
        for module in (geodesic, gallery, network, probes):
            stack.enter_context(mock.patch.object(module, "launch", record))
        stack.enter_context(mock.patch.object(gallery, "processor_count", return_value=132))
        stack.enter_context(mock.patch.object(gallery, "is_hopper", return_value=True))
        # Without this, operations would answer for tensors without values by the shapes of their references.
        stack.enter_context(mock.patch.object(dispatch, "_without_values", lambda backend, _: backend))
        stack.enter_context(FakeTensorMode())
        yield launches


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of a launch."""

    registers: int
    stack: int
    spills: int  # local loads and stores in the machine code
    shared: int
    ptx: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def source(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """The compiler's input for a launch, specialised as Triton's own launcher would: ones, and multiples of 16."""
    names = list(launch.kernel.arg_names)
    options = {k: v for k, v in launch.meta.items() if k not in names}
    values = dict(zip(names, launch.arguments)) | {k: v for k, v in launch.meta.items() if k in names}
    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    general = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature, constexprs, attributes = {}, {}, {}
    for position, name in enumerate(names):
        value = values[name]
        if name in constants or (isinstance(value, int) and value == 1 and name not in general):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            if isinstance(value, FakeTensor) or value.data_ptr() % 16 == 0:  # allocations are aligned
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name not in general:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(launch.kernel, signature, constexprs, attributes), options


def compiler_key(launch: Launch) -> str:
    """What decides whether a launch needs a compilation of its own."""
    code, options = source(launch)
    return repr((code.signature, code.constants, code.attrs, options))


def compile_nvidia(launch: Launch, capability: int) -> Compiled:
    """Machine code for one NVIDIA architecture, disassembled."""
    code, options = source(launch)
    built = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        machine_code = _tool("nvdisasm", file.name)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:LDL|STL)\b", machine_code))
    return Compiled(used["REG"], used["STACK"], spills, built.metadata.shared, built.asm["ptx"])


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Case:
    """A call whose launches are compiled; with its traffic or work it has a line in the table."""

    name: str
    call: Callable[[], object]
    megabytes: float = 0.0
    teraflop: float = 0.0
    precision: str = "bfloat16"
    capabilities: tuple[int, ...] = NVIDIA
    """Architectures for which it is compiled; elsewhere it does not exist, and has no estimate."""

    def launches(self) -> list[Launch]:
        with recorded() as launches:
            self.call()
        return launches


def _cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _interpolant(rows: int, image: int, text: int, drop: bool = True) -> Callable[[], object]:
    def call() -> None:
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            geodesic.masked_interpolant(
                (_cuda(rows, image), _cuda(rows, text)),
                (_cuda(rows, image), _cuda(rows, text)),
                _cuda(rows),
                _cuda(rows, dtype=torch.int8),
                _cuda(rows, dtype=torch.int8).view(torch.bool) if drop else None,
                (_cuda(rows, image), _cuda(rows, text)),
                (_cuda(rows, image), _cuda(rows, text)),
                1e-3,
            )

    return call


def _noise(rows: int, width: int, unit: bool = True) -> Callable[[], object]:
    return lambda: geodesic.counter_noise(_cuda(rows, dtype=torch.int64), width, 2**62 + 1, 7, 1, unit)


def _unit_rows(rows: int, width: int, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: geodesic.unit_rows(_cuda(2 * rows, width, dtype=dtype), _cuda(rows, dtype=torch.int64))


def _cross_residual(
    rows: int, width: int, dtype: torch.dtype = torch.bfloat16, keep: bool = True, *, backward: bool = False
) -> Callable[[], object]:
    """The end of a cross-gate with four heads, and its gradients."""

    def call() -> None:
        kept = _cuda(rows, width, dtype=torch.int8).view(torch.bool) if keep else None
        function = network.cross_residual_backward if backward else network.cross_residual
        function(_cuda(rows, width), _cuda(8, rows // 2, width // 2, dtype=dtype), _cuda(2, width), kept, 0.05)

    return call


def _step(rows: int, width: int, guided: bool = True, renormalise: bool = False) -> Callable[[], object]:
    return lambda: geodesic.tangent_step(
        _cuda(rows, width), _cuda(rows, width), 0.02, _cuda(rows, width) if guided else None, 3.0, renormalise
    )


def _stage(rows: int, width: int, guided: bool = True, total: bool = True) -> Callable[[], object]:
    def call() -> None:
        x, at, v, free, before = (_cuda(rows, width) for _ in range(5))
        geodesic.tangent_stage(x, at, v, 0.02, free if guided else None, 3.0, before if total else None, 0.01)

    return call


def _ab2(rows: int, width: int, guided: bool = True, carried: bool = True) -> Callable[[], object]:
    def call() -> None:
        x, v, free, before = (_cuda(rows, width) for _ in range(4))
        geodesic.tangent_ab2(x, v, 0.02, free if guided else None, 3.0, before if carried else None, 0.5)

    return call


def gallery_call(
    config: str | None,
    dtype: torch.dtype,
    queries: int,
    draws: int,
    items: int,
    width: int,
    bias: bool = False,
    top: int = 10,
    scores: bool = False,
    sample_bias: bool | None = None,
) -> Callable[[], object]:
    """A call of the gallery's kernels, in a configuration or in that which it chooses; samples have biases, too, where
    items do, unless `sample_bias` says otherwise."""
    return lambda: gallery.gallery_statistics(
        _cuda(queries, draws, width, dtype=dtype),
        _cuda(items, width, dtype=dtype),
        100.0,
        top,
        _cuda(items) if bias else None,
        _cuda(queries, draws) if (bias if sample_bias is None else sample_bias) else None,
        scores=_cuda(queries, items) if scores else None,
        config=config,
    )


def _network(
    kernel: str,
    rows: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    groups: int = 1,
    gate: bool = True,
    keep: bool = True,
) -> Callable[[], object]:
    """A call of one function of `network` with [rows, width] activations and parameters in `groups` rows."""

    def call() -> None:
        def x(*lead: int) -> Tensor:
            return _cuda(*lead, rows, width, dtype=dtype)

        parameter = _cuda(groups, width, dtype=dtype)
        logits, kept = x() if gate else None, _cuda(rows, width, dtype=torch.int8).view(torch.bool) if keep else None
        arguments: dict[str, tuple[Any, ...]] = {
            "adaln": (x(), parameter, parameter, 1e-6),
            "adaln_backward": (x(), x(), parameter, 1e-6),
            "gate_residual": (x(), logits, x(), parameter, kept, 0.05),
            "gate_residual_backward": (x(), logits, x(), parameter, kept, 0.05),
            "swiglu": (x(), x()),
            "swiglu_backward": (x(), x(), x()),
            "flow_loss": (x(), x(), x(), x(), x(), x(), _cuda(rows, dtype=torch.int8)),
            "flow_loss_backward": (_cuda(rows), x(), x(), x(), x(), x(), x(), _cuda(rows, dtype=torch.int8)),
        }  # fmt: skip
        getattr(network, kernel)(*arguments[kernel])

    return call


def call_with_rows(name: str, rows: int, width: int) -> Callable[[], object]:
    """A call of a row kernel by name."""
    sphere = {"tangent_step": _step, "tangent_stage": _stage, "tangent_ab2": _ab2}
    if name == "masked_interpolant":
        return _interpolant(rows, width, width)
    return sphere[name](rows, width) if name in sphere else _network(name, rows, width)


def _segments(
    kernel: str, pairs: int, width: int, dtype: torch.dtype = torch.float32, gated: bool = True
) -> Callable[[], object]:
    """A call that serves both streams of three solves with one tangent a stream each, 7 rows a pair and stream."""

    def call() -> None:
        rows, table = 14 * pairs, _cuda(6, 10, dtype=torch.int32)
        h, y, parameter = _cuda(rows, width), _cuda(rows, width, dtype=dtype), _cuda(6, width)
        if kernel == "segment_adaln":
            network.segment_adaln(h, parameter, parameter, parameter, y, table, pairs, 1e-5, False)
        elif kernel == "segment_swiglu":
            network.segment_swiglu(_cuda(rows, 2 * width, dtype=dtype), y, table, pairs)
        else:
            branch, heads = _cuda(rows, 2 * width if gated else width, dtype=dtype), 4 if gated else 0
            network.segment_gate_adaln(
                h, branch, heads, parameter, parameter, parameter, h, y, table, pairs, 1e-5, False
            )

    return call


def _probes(kernel: str, rows: int, width: int, seen: bool = True) -> Callable[[], object]:
    def call() -> None:
        x, before = _cuda(rows, width), _cuda(rows, width) if seen else None
        if kernel == "tangent_probes":
            numbers, seed = _cuda(rows, dtype=torch.int64), _cuda(dtype=torch.int64)
            probes.tangent_probes(x, numbers, seed, 3, 1, 2, not seen, before, width - 1)
        else:
            e, sums = _cuda(2, rows, width), _cuda(2, rows, dtype=torch.float64)
            probes.probe_traces(x, x, e, e, sums, 0.1, 1.0 - width, width - 1, seen, before)

    return call


SEGMENTS = {"segment_adaln": (512, 2), "segment_gate_adaln": (512, 5), "segment_swiglu": (1408, 3)}
"""Of each function: columns of the paper's network, and [R, H] arrays read and written."""
PROBES = {"tangent_probes": 4, "probe_traces": 8}
"""Of each function: [B, d] arrays read and written with two probes."""


NETWORK = {
    # function: (columns of the paper's network, [R, H] arrays read and written in float32)
    "adaln": (512, 4),
    "adaln_backward": (512, 5),
    "gate_residual": (512, 4.25),
    "gate_residual_backward": (512, 5.25),
    "swiglu": (1408, 3),
    "swiglu_backward": (1408, 5),
    "flow_loss": (1024, 6),
    "flow_loss_backward": (1024, 8),
}


def _gallery_case(name: str, config: str, dtype: torch.dtype, queries: int, items: int, *, draws: int = 50) -> Case:
    """Samples of a query are padded to whole chunks; d = 1024."""
    sizes = gallery.CONFIGS[config]
    precision = "tf32" if sizes.exact else "float32" if dtype == torch.float32 else "bfloat16"
    padded = -(-draws // sizes.chunk) * sizes.chunk
    work = costs.scoring_work(queries, padded, items, 1024, precision)
    return Case(
        name,
        gallery_call(config, dtype, queries, draws, items, 1024),
        work.bytes / 1e6,
        work.operations / 1e12,
        "tf32" if sizes.exact else "bfloat16",
        (90,) if sizes.hopper else NVIDIA,
    )


def table_cases() -> list[Case]:
    """One call per kernel at the paper's sizes: batch 8192 and two streams, d=1024, 50 samples a query."""
    half, single = torch.bfloat16, torch.float32
    cases = [
        Case("masked_interpolant 8192 x (1024 + 1024)", _interpolant(8192, 1024, 1024), 268.0),
        Case("counter_noise 8192 x 1024", _noise(8192, 1024), 33.6),
        Case("unit_rows fp16 8192 x 1024", _unit_rows(8192, 1024, torch.float16), 50.3),
        Case("cross_residual 16384 x 512", _cross_residual(16384, 512), 109.0),
        Case("cross_residual_backward 16384 x 512", _cross_residual(16384, 512, backward=True), 109.0),
        Case("tangent_step with guidance 40000 x 1024", _step(40000, 1024), 655.0),
        Case("tangent_stage with guidance 40000 x 1024", _stage(40000, 1024), 1147.0),
        Case("tangent_ab2 with guidance 40000 x 1024", _ab2(40000, 1024), 983.0),
        _gallery_case("gallery bf16 25000 x 50 x 5000", "slim", half, 25000, 5000),
        _gallery_case("the same, wide tiles", "wide", half, 25000, 5000),
        _gallery_case("gallery fp32 25000 x 50 x 5000", "slim", single, 25000, 5000),
        _gallery_case("gallery bf16 16 x 50 x 1000000", "some", half, 16, 1_000_000),
        _gallery_case("gallery bf16 4 x 50 x 1000000", "few", half, 4, 1_000_000),
        _gallery_case("gallery fp32, kappa above 1e4, 25000 x 50 x 5000", "exact", single, 25000, 5000),
        _gallery_case("gallery search fp32 64 x 1000000", "search", single, 64, 1_000_000, draws=1),
    ]
    for name, (width, arrays) in NETWORK.items():
        rows = 8192 if name.startswith("flow_loss") else 16384
        groups = rows if name.startswith("adaln") else 1
        call = _network(name, rows, width, groups=groups)
        cases.append(Case(f"{name} {rows} x {width}", call, megabytes=arrays * rows * width * 4 / 1e6))
    for name, (width, arrays) in SEGMENTS.items():
        megabytes = arrays * 14 * 1024 * width * 4 / 1e6
        cases.append(Case(f"{name} 14 x 1024 x {width}", _segments(name, 1024, width), megabytes=megabytes))
    for name, arrays in PROBES.items():
        megabytes = arrays * 8192 * 1024 * 4 / 1e6
        cases.append(Case(f"{name} 2 x 8192 x 1024", _probes(name, 8192, 1024), megabytes=megabytes))
    return cases


def configuration_cases() -> list[Case]:
    """Every configuration that a call can choose: dtypes, flags, groups, and widths from narrow to the widest."""
    cases = []
    for name, config in gallery.CONFIGS.items():
        where = (90,) if config.hopper else NVIDIA
        for dtype in (torch.float32,) if config.exact else (torch.float16, torch.bfloat16, torch.float32):
            queries = 2 if config.most <= 4 else 64
            for width, bias in ((1024, False), (144, True)):
                # Calls with biases of samples, scores to write or long lists choose no tile for sm_90 alone.
                call = gallery_call(name, dtype, queries, 50, 5000, width, bias, sample_bias=bias and not config.hopper)
                cases.append(Case(f"{name} {TYPES[dtype]} d={width} bias={bias}", call, capabilities=where))
            top = gallery.SHORT_LIST if config.hopper else LONGEST_LIST
            call = gallery_call(name, dtype, 1, 1, 77, 7, top=top)
            cases.append(Case(f"{name} {TYPES[dtype]} one sample, top {top}", call, capabilities=where))
            if not config.hopper:
                call = gallery_call(name, dtype, queries, 50, 5000, 1024, top=1, scores=True)
                cases.append(Case(f"{name} {TYPES[dtype]} scores", call))
    call = gallery_call("few", torch.bfloat16, 1, 50, 1_000_000, 1024, top=LONGEST_LIST)
    cases.append(Case("few bf16 one query, top 64 of a million", call))
    for width in (24, 1408, 4096):
        cases.append(Case(f"masked_interpolant d={width}", _interpolant(64, width, width, drop=width == 24)))
        cases.append(Case(f"counter_noise d={width}", _noise(64, width, unit=width != 24)))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            cases.append(Case(f"unit_rows {TYPES[dtype]} d={width}", _unit_rows(64, width, dtype)))
            for backward in (False, True):
                call = _cross_residual(64, width, dtype, keep=width == 24, backward=backward)
                cases.append(Case(f"cross_residual {TYPES[dtype]} H={width} backward={backward}", call))
        for guided, renormalise in ((True, True), (False, False)):
            call = _step(64, width, guided, renormalise)
            cases.append(Case(f"tangent_step d={width} guided={guided} renormalise={renormalise}", call))
            cases.append(Case(f"tangent_stage d={width} guided={guided}", _stage(64, width, guided, renormalise)))
            cases.append(Case(f"tangent_ab2 d={width} guided={guided}", _ab2(64, width, guided, renormalise)))
        for name in NETWORK:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                cases.append(Case(f"{name} {TYPES[dtype]} H={width}", _network(name, 64, width, dtype)))
    for width in (24, 1408, 4096):
        for seen in (False, True):
            cases += [Case(f"{name} d={width} seen={seen}", _probes(name, 64, width, seen)) for name in PROBES]
        for name in SEGMENTS:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                for gated in (True, False):
                    label = f"{name} {TYPES[dtype]} H={width} gated={gated}"
                    cases.append(Case(label, _segments(name, 8, width, dtype, gated)))
    for name in ("adaln", "gate_residual"):
        for kernel in (name, f"{name}_backward"):
            for groups in (1, 4, 64):
                for gate, keep in ((True, False), (False, True)) if name == "gate_residual" else ((True, True),):
                    label = f"{kernel} groups={groups} gate={gate} keep={keep}"
                    cases.append(Case(label, _network(kernel, 64, 512, groups=groups, gate=gate, keep=keep)))
    return cases


CARDS = {
    "A100-40": (80, costs.ProductRates(312e12, 19.5e12, 1.555e12)),
    "H100": (90, costs.ProductRates(989e12, 67e12, 3.35e12)),
    "RTX 4090": (89, costs.ProductRates(165e12, 82.6e12, 1.008e12)),
}
"""Architecture and vendor's peaks of the cards of the table."""


def estimated(case: Case, card: str) -> str:
    """Estimated time of the kernels of a call alone, without what it takes to start them."""
    capability, rates = CARDS[card]
    if capability not in case.capabilities:
        return "-"
    work = costs.Work(0, 1e6 * case.megabytes, 1e12 * case.teraflop)
    return f"{1e3 * costs.seconds(work, rates, case.precision):.2f} ms"


def table() -> str:
    """Markdown: registers, stack, spills and shared memory per architecture, and estimated times."""
    numbers = " / ".join(map(str, NVIDIA))
    titles = ["call", "kernel", f"registers sm_{numbers}", "stack", "spills", f"shared KB sm_{numbers}"]
    titles += [f"{card}, estimated" for card in CARDS]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for case in table_cases():
        for number, launch in enumerate(case.launches()):
            compiled = {c: compile_nvidia(launch, c) for c in case.capabilities}
            registers = " / ".join(str(compiled[c].registers) if c in compiled else "-" for c in NVIDIA)
            shared = " / ".join(f"{compiled[c].shared / 1024:.1f}" if c in compiled else "-" for c in NVIDIA)
            times = [estimated(case, card) if number == 0 else "" for card in CARDS]
            built = compiled.values()
            cells = [
                case.name if number == 0 else "", f"`{launch.name}`", registers, str(max(b.stack for b in built)),
                str(max(b.spills for b in built)), shared, *times,
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
