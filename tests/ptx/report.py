"""What has been shown of each kernel's PTX, as two tables.

    python -m tests.ptx.report docs/gpu.md        writes the tables between their markers in that file

Every kernel is run at small sizes, which counts the instructions of each kind that ran, and is given to SentryWard, a
static verifier of PTX (`make .venv/.sentryward` installs it), as it is and without some of its barriers. `coverage` or
`verdicts` after the path writes that table alone.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.cuda_emulation.test_cuda_emulation import SCORES
from tests.ptx.checks import (
    EVERY_KERNEL,
    GALLERY,
    MORE_SCORES,
    ROW_KERNELS,
    STEPS,
    WIDTHS_IN_STEPS,
    Check,
    contiguous_rows,
)
from tests.ptx.cuda import CompiledWorkshop
from tests.ptx.machine import Builder, Code, Machine, run_time_arguments
from tests.ptx.parser import Address, Instruction, Kernel, Symbol
from tests.ptx.translate import executed, kind_of
from tools import aot

MARKERS = {
    name: (f"<!-- table: python -m tests.ptx.report docs/gpu.md {name} -->", f"<!-- end of ptx {name} -->")
    for name in ("coverage", "verdicts")
}
# Columns of the table, and the kinds of instructions that each counts.
COLUMNS = {
    "integer": ("integer", "select", "convert"),
    "float": ("float", "approximate"),
    "branch": ("branch",),
    "global": ("ld global", "st global", "ld parameter"),
    "shared": ("ld shared", "st shared"),
    "shuffle": ("shuffle",),
    "barrier": ("barrier",),
    "copy": ("copy",),
    "atomic": ("atomic",),
    "tensor": ("tensor",),
}
BARRIER = re.compile(r"\b(?:bar|barrier)\.sync[ \t]+0;")
SECONDS = 60  # for a verdict
DECIDED = {"race_free": "proved", "potential_race": "flagged", "not_wellsynced": "flagged"}


@dataclass
class Seen:
    """One kernel as compiled: a launch of it, and the instructions that ran in any."""

    name: str
    code: Code
    grid: tuple[int, ...]
    scalars: list[dict[str, Any]]  # of parameters, as SentryWard reads them
    ran: set[Instruction] = field(default_factory=set)

    @property
    def kernel(self) -> Kernel:
        return self.code.kernel


# ---- running ----


class Recorder(Machine):
    """Notes every launch before it runs it."""

    seen: dict[str, Seen]

    def run(self, code: Code, launch: aot.Launch) -> None:
        scalars = [
            {"parameter": number, "type": parameter.type, "value": value % 2 ** int(parameter.type[1:])}
            for number, (value, parameter) in enumerate(zip(run_time_arguments(launch), code.kernel.parameters))
            if isinstance(value, int)
        ]
        one = self.seen.setdefault(code.text, Seen(code.kernel.name, code, launch.grid, scalars))
        super().run(code, launch)
        assert self.coverage is not None
        one.ran |= self.coverage[code.kernel.name][code.text]


def recorded(builder: Builder, checks: Iterable[Callable[[], object]]) -> list[Seen]:
    """The forms of all kernels that the checks launch, in that order."""
    recorder = Recorder(builder, coverage={})
    recorder.seen = {}
    torch.use_deterministic_algorithms(True)
    with recorder.serving():
        for check in checks:
            torch.manual_seed(0)
            check()
    return list(recorder.seen.values())


def triton_kernels(builder: Builder) -> list[Seen]:
    """Ragged rows with gaps, the gallery, and contiguous rows of multiples of 16."""

    def contiguous(check: Check, width: int) -> None:
        with contiguous_rows():
            check(9, width)

    ragged = (functools.partial(check, 9, width) for width in (129, 1023) for check in ROW_KERNELS.values())
    whole = (functools.partial(contiguous, each, width) for width in WIDTHS_IN_STEPS for each in ROW_KERNELS.values())
    return recorded(builder, [*ragged, *GALLERY.values(), *whole])


def cuda_kernels(folder: Path) -> list[Seen]:
    """Each instantiation that ships, with the arguments that a program of tests/cuda_emulation gave it."""
    workshop, seen = CompiledWorkshop(folder, Builder(folder / "kernels")), {}
    os.environ["GEOFLOW_PTX_COVERAGE"] = report = str(folder / "ran")
    # Plans in one step and from larger eps downwards, and all scores: arcs and chords, in full tiles and ragged ones.
    for case in (*EVERY_KERNEL, *STEPS, *SCORES, *MORE_SCORES):
        outcome = case.run(workshop)
        assert outcome.returncode == 0, outcome.stderr.decode()
    for name in workshop.names():
        launched, text = workshop.launched[name], workshop.text(name)
        code = Code(text, launched.shared)
        assert launched.threads == code.kernel.threads
        scalars = _scalars(code.kernel, launched.parameters)
        seen[code.kernel.name] = Seen(name, code, (launched.blocks, 1, 1), scalars)
    for line in Path(report).read_text().splitlines():
        symbol, flags = line.split()
        seen[symbol].ran |= set(executed(seen[symbol].kernel, flags))
    return list(seen.values())


def _scalars(kernel: Kernel, given: bytes) -> list[dict[str, Any]]:
    """The fields of structures that a kernel reads and that are no pointers, whose values are far above 2^32."""
    offsets, places = kernel.parameter_offsets(), [parameter.name for parameter in kernel.parameters]
    scalars = {}
    for instruction in kernel.instructions():
        match = re.fullmatch(r"ld\.param(?:\.v(\d))?\.[a-z](\d+)", instruction.opcode)
        address = instruction.operands[-1] if instruction.operands else None
        if match is None or not isinstance(address, Address) or not isinstance(address.base, Symbol):
            continue
        name, size = address.base.name, int(match[2]) // 8
        for k in range(int(match[1] or 1)):
            offset = address.offset + k * size
            at = offsets[name] + offset
            value = int.from_bytes(given[at : at + size], "little")
            if value < 2**32:
                number = places.index(name)
                scalars[number, offset] = {
                    "parameter": number,
                    "offset": offset,
                    "type": f"u{8 * size}",
                    "value": value,
                }
    return list(scalars.values())


# ---- SentryWard ----


def verifier() -> str | None:
    """Its command, beside the running Python or on PATH."""
    return shutil.which("sentryward", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def verdict(one: Seen, text: str, folder: Path, seconds: int) -> str:
    """Its result for a kernel's text."""
    command = verifier()
    if command is None:
        raise OSError("the command sentryward is missing: `make .venv/.sentryward` installs it")
    ptx, settings = folder / "kernel.ptx", folder / "input.json"
    ptx.write_text(text)
    launch = {
        "grid_dim": [*one.grid, 1, 1][:3],
        "block_dim": [one.kernel.threads, 1, 1],
        "dynamic_shared_bytes": one.code.shared,
    }
    settings.write_text(json.dumps({"schema": "spverify.kernel-input/v1", "launch": launch, "arguments": one.scalars}))
    arguments = [command, str(ptx), "--input", str(settings), "--timeout", str(seconds)]
    # Its status is not 0 where it comes to no result, and the answer says why.
    return str(json.loads(subprocess.run(arguments, capture_output=True, text=True).stdout)["result"])


def judged(one: Seen, folder: Path, seconds: int = SECONDS, deletions: int = 4) -> tuple[str, str]:
    """Proved, flagged or undecided; and of how many barriers the deletion was flagged, spread over the kernel."""
    result = verdict(one, one.code.text, folder, seconds)
    if DECIDED.get(result) != "proved":
        return DECIDED.get(result, f"undecided ({result.replace('_', ' ')})"), ""
    barriers = list(BARRIER.finditer(one.code.text))
    tried = barriers[:: -(-len(barriers) // deletions) or 1]
    deleted = (one.code.text[: each.start()] + one.code.text[each.end() :] for each in tried)
    flagged = sum(DECIDED.get(verdict(one, text, folder, seconds)) == "flagged" for text in deleted)
    return "proved", f"{flagged} of {len(tried)}" if tried else ""


# ---- the table ----


def counts(instructions: Iterable[Instruction]) -> Counter[str]:
    return Counter(str(kind_of(instruction.opcode)) for instruction in instructions)


def coverage_line(name: str, group: list[Seen], _folder: Path) -> list[str]:
    """Of a kernel: its compiled forms, and the instructions that ran of those there are."""
    there, ran = Counter[str](), Counter[str]()
    for one in group:
        there += counts(one.kernel.instructions())
        ran += counts(one.ran)
    cells = [f"`{name}`", str(len(group)), f"{100 * ran.total() / there.total():.0f} %"]
    for kinds in COLUMNS.values():
        total = sum(there[kind] for kind in kinds)
        cells.append(f"{sum(ran[kind] for kind in kinds)}/{total}" if total else "")
    return cells


def verdict_line(name: str, group: list[Seen], folder: Path) -> list[str]:
    """Of a kernel: the verdict on its first form."""
    return [f"`{name}`", *judged(group[0], folder)]


TABLES = {
    "coverage": (["kernel", "forms", "executed", *COLUMNS], coverage_line),
    "verdicts": (["kernel", "SentryWard", "deleted barriers flagged"], verdict_line),
}


def tables(names: Iterable[str]) -> dict[str, str]:
    """Markdown, by name."""
    made = {}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        groups: dict[str, list[Seen]] = {}
        for one in (*triton_kernels(Builder(folder / "triton")), *cuda_kernels(folder)):
            groups.setdefault(one.name, []).append(one)
        for name in names:
            titles, cells = TABLES[name]
            rows = (cells(kernel, group, folder) for kernel, group in groups.items())
            lines = [f"| {' | '.join(row)} |" for row in (titles, *rows)]
            made[name] = "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])
    return made


def main(path: str, *names: str) -> None:
    """Replaces what stands between the markers in the file at `path` by fresh tables."""
    wanted = names or tuple(MARKERS)
    text = Path(path).read_text()
    for marker in (marker for name in wanted for marker in MARKERS[name]):
        if text.count(marker) != 1:
            raise ValueError(f"{path} must hold the line {marker!r} once")
    for name, table in tables(wanted).items():
        begin, end = MARKERS[name]
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    Path(path).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
