"""A GPU for Triton kernels: launches are compiled for sm_80, their PTX is translated to C++ and run on the CPU.

Inside `Machine.serving()` the wrappers of `geoflow_fast.kernels` launch here. What a kernel is given is what Triton's
launcher would give it: the same specialisation on ones, on multiples of 16 and on aligned pointers. It runs in a
process of its own on copies of the tensors, which come back when it has ended without a complaint.
"""

from __future__ import annotations

import functools
import os
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from geoflow_fast.kernels import gallery, geodesic, network, probes
from geoflow_fast.kernels import launch as launching
from geoflow_fast.ops import triton_kernels
from tests.gpu_emulated.cuda_emulation.workshop import (
    BUILDS,
    EMULATION,
    ENVIRONMENT,
    SANITIZER_STATUS,
    SCHEDULES,
    without_address_randomisation,
)
from tests.gpu_emulated.ptx.parser import Kernel, Module, parse
from tests.gpu_emulated.ptx.translate import translate
from tools import aot

HERE = Path(__file__).parent
CAPABILITY = 80
COMPLAINT_STATUS = 3  # of machine.h and of the emulation
# Translated kernels are long and run briefly: more optimisation would take longer than it saves.
LEVELS = {"plain": ["-O1"]} | {name: ["-O0", *BUILDS[name][2:]] for name in ("address", "thread")}
FLAGS = ("-std=c++20", "-w", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", f"-I{EMULATION}", f"-I{HERE}")


class KernelError(AssertionError):
    """A kernel did what no GPU would let pass, or what a sanitizer objects to; or it crashed."""

    def __init__(self, kernel: str, status: int, report: str):
        super().__init__(f"{kernel}: status {status}\n{report}")
        self._status, self._report = status, report

    def explains(self, build: str) -> bool:
        """Whether it ended as a program of this build ends that has found something: a crash is no finding."""
        if build == "thread":
            return self._status == SANITIZER_STATUS and "data race" in self._report
        return self._status == COMPLAINT_STATUS


@dataclass(frozen=True)
class Code:
    """A kernel as the compiler left it."""

    text: str
    shared: int

    @functools.cached_property
    def module(self) -> Module:
        return parse(self.text)

    @property
    def kernel(self) -> Kernel:
        (kernel,) = self.module.kernels
        return kernel


def compile_triton(launch: aot.Launch) -> Code:
    source, options = aot.source(launch)
    built = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    return Code(built.asm["ptx"], built.metadata.shared)


def run_time_arguments(launch: aot.Launch) -> list[Any]:
    """Those that the kernel is not compiled for, in the order of its parameters."""
    source, _ = aot.source(launch)
    values = dict(zip(launch.kernel.arg_names, launch.arguments)) | launch.meta
    return [values[name] for name, kind in source.signature.items() if kind != "constexpr"]


class Builder:
    """Compiles C++ for the emulation, the same text at most once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.object = functools.cache(self._object)

    def _object(self, source: str, build: str) -> Path:
        """An object file; the vocabulary of machine.h is compiled ahead, once a build."""
        shelf = self._folder / build
        if not shelf.exists():
            shelf.mkdir(parents=True)
            command = ["g++", *FLAGS, *LEVELS[build], "-x", "c++-header", str(HERE / "machine.h")]
            subprocess.run([*command, "-o", str(shelf / "machine.h.gch")], check=True)
            for path in (EMULATION / "emulation.cpp", HERE / "run.cpp"):
                command = ["g++", *FLAGS, *LEVELS[build], "-c", str(path)]
                subprocess.run([*command, "-o", str(shelf / f"{path.stem}.o")], check=True)
        path = shelf / f"{zlib.crc32(source.encode()):08x}.cpp"
        path.write_text(source)
        command = ["g++", f"-I{shelf}", *FLAGS, *LEVELS[build], "-c", str(path)]
        subprocess.run([*command, "-o", str(path.with_suffix(".o"))], check=True)
        return path.with_suffix(".o")

    def program(self, source: str, build: str) -> Path:
        """Runs the one kernel in `source`; see run.cpp."""
        code = self.object(source, build)
        target, shelf = code.with_suffix(""), code.parent
        if not target.exists():
            parts = [str(code), str(shelf / "run.o"), str(shelf / "emulation.o")]
            subprocess.run(["g++", *LEVELS[build], *parts, "-o", str(target)], check=True)
        return target


@dataclass
class Memory:
    """The tensors of a launch, those that overlap in memory as one region."""

    tensors: list[Tensor]
    regions: list[tuple[int, int]] = field(default_factory=list)  # first and last address

    def __post_init__(self) -> None:
        spans = sorted(_span(x) for x in self.tensors if x.numel())
        for begin, end in spans:
            if self.regions and begin < self.regions[-1][1]:
                self.regions[-1] = (self.regions[-1][0], max(end, self.regions[-1][1]))
            else:
                self.regions.append((begin, end))

    def block_and_offset(self, x: Tensor) -> tuple[int, int]:
        """The number of a tensor's region, and its offset there."""
        at = x.data_ptr()
        number = next(k for k, (begin, end) in enumerate(self.regions) if begin <= at < end)
        return number, at - self.regions[number][0]

    def _bytes(self, x: Tensor) -> Tensor:
        """A tensor's elements as bytes [..., element size], sharing memory."""
        return x.unsqueeze(-1).view(torch.uint8)

    def _within(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Size, strides and offset of a tensor's bytes in its region."""
        size = x.element_size()
        return (*x.shape, size), (*(size * s for s in x.stride()), 1), self.block_and_offset(x)[1]

    def contents(self) -> Iterator[bytes]:
        """Of each region its size, its alignment, the bytes that belong to elements, and what they hold."""
        for number, (begin, end) in enumerate(self.regions):
            owned, held = (torch.zeros(end - begin, dtype=torch.uint8) for _ in range(2))
            for x in self._of(number):
                view = self._within(x)
                owned.as_strided(*view).fill_(1)
                held.as_strided(*view).copy_(self._bytes(x))
            yield struct.pack("<QQ", end - begin, begin % 16) + owned.numpy().tobytes() + held.numpy().tobytes()

    def restore(self, output: bytes) -> None:
        """Writes back what the kernel left."""
        at = 0
        for number, (begin, end) in enumerate(self.regions):
            held = torch.frombuffer(bytearray(output[at : at + end - begin]), dtype=torch.uint8)
            for x in self._of(number):
                self._bytes(x).copy_(held.as_strided(*self._within(x)))
            at += end - begin

    def digest(self) -> int:
        """A number for what all tensors hold."""
        parts = (self._bytes(x).contiguous().numpy().tobytes() for x in self.tensors if x.numel())
        return functools.reduce(lambda sum_so_far, part: zlib.crc32(part, sum_so_far), parts, 0)

    def _of(self, number: int) -> list[Tensor]:
        return [x for x in self.tensors if x.numel() and self.block_and_offset(x)[0] == number]


def _span(x: Tensor) -> tuple[int, int]:
    elements = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()


@dataclass
class Machine:
    """Runs launches in one build under one schedule, with PTX that `edit` may have changed."""

    builder: Builder
    build: str = "plain"
    schedule: str = "greedy"
    together: bool = False  # all blocks alive at once: races between them show
    edit: Callable[[str], str] = str
    outputs: list[int] = field(default_factory=list)  # a number for what each launch left in memory
    texts: set[str] = field(default_factory=set)  # the PTX of all launches

    @contextmanager
    def serving(self) -> Iterator[Machine]:
        """Inside, the wrappers' launches run here."""
        with ExitStack() as stack:
            for module in (launching, geodesic, gallery, network, probes):
                stack.enter_context(mock.patch.object(module, "launch", self.launch))
            stack.enter_context(mock.patch.object(gallery, "processor_count", return_value=132))
            stack.enter_context(mock.patch.object(gallery, "is_hopper", return_value=False))
            # Operations offer CPU tensors to Triton where they would be interpreted, and so here.
            stack.enter_context(mock.patch.object(triton_kernels, "interpreted", return_value=True))
            yield self

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        recorded = aot.Launch(kernel, grid, arguments, meta)
        code = compile_triton(recorded)
        self.run(Code(self.edit(code.text), code.shared), recorded)

    def run(self, code: Code, launch: aot.Launch) -> None:
        given = run_time_arguments(launch)
        memory = Memory([x for x in given if isinstance(x, Tensor)])
        x, y, z = (*launch.grid, 1, 1)[:3]
        arguments = {
            "schedule": SCHEDULES[self.schedule], "seed": 1, "grid_x": x, "grid_y": y, "grid_z": z,
            "shared": code.shared, "together": int(self.together),
        }  # fmt: skip
        output = self._start(code, arguments, _described(code.kernel, given, memory))
        memory.restore(output)
        self.outputs.append(memory.digest())
        self.texts.add(code.text)

    def _start(self, code: Code, arguments: dict[str, int], given: bytes) -> bytes:
        program = self.builder.program(translate(code.module), self.build)
        prefix = without_address_randomisation() if self.build == "thread" else []
        outcome = subprocess.run(
            [*prefix, str(program), *(f"{key}={value}" for key, value in arguments.items())],
            input=given,
            capture_output=True,
            env=os.environ | ENVIRONMENT,
            timeout=600,
        )
        if outcome.returncode != 0:
            raise KernelError(code.kernel.name, outcome.returncode, outcome.stderr.decode())
        return outcome.stdout


def _described(kernel: Kernel, given: list[Any], memory: Memory) -> bytes:
    """Parameters, memory and pointers, as run.cpp reads them."""
    formats = {"u64": "<q", "u32": "<i", "f32": "<f", "s32": "<i", "s64": "<q", "b64": "<q", "b32": "<i"}
    offsets, pointers = kernel.parameter_offsets(), []
    parameters = bytearray(offsets[""])
    # After the kernel's own come two for scratch memory and profiling, which are null.
    for parameter, value in zip(kernel.parameters, [*given, 0, 0], strict=True):
        at = offsets[parameter.name]
        if isinstance(value, Tensor):
            if value.numel():
                pointers.append((at, *memory.block_and_offset(value)))
            continue
        if formats[parameter.type] != "<f" and not isinstance(value, int):
            raise TypeError(f"{kernel.name}: {parameter.name} is an integer, the launch gives {value!r}")
        struct.pack_into(formats[parameter.type], parameters, at, value)
    parts = [struct.pack("<Q", len(parameters)), bytes(parameters), struct.pack("<Q", len(memory.regions))]
    parts += memory.contents()
    parts.append(struct.pack("<Q", len(pointers)))
    parts += (struct.pack("<QQQ", *pointer) for pointer in pointers)
    return b"".join(parts)
