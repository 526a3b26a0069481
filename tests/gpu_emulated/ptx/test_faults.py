"""Faults put into compiled PTX, and into sources that are compiled anew, must be caught, and nothing without them.

Of a missing barrier or wait and of a swapped fragment Triton's language has no word: these are faults of its PTX alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu_emulated.cuda_emulation.test_cuda_emulation import (
    SMALL_SCORE_HALF,
    SMALL_SOLVE_SHORT,
    ScoreCase,
    _caught_by_result,
    _caught_by_sanitizer,
)
from tests.gpu_emulated.interpreter import test_kernels
from tests.gpu_emulated.ptx.checks import EVERY_KERNEL, GALLERY, ROW_KERNELS
from tests.gpu_emulated.ptx.cuda import CompiledWorkshop, PtxEdit
from tests.gpu_emulated.ptx.machine import COMPLAINT_STATUS, Builder, KernelError, Machine, compile_triton
from tests.gpu_emulated.ptx.parser import PtxError, parse
from tests.gpu_emulated.ptx.translate import translate
from tools import aot

Edit = Callable[[str], str]
ALL = ("forward", "reversed", "shuffled", "greedy")


def replaced(pattern: str, by: str, which: int = 0) -> Edit:
    """Replaces one match of many."""

    def edit(text: str) -> str:
        match = list(re.finditer(pattern, text))[which]
        return text[: match.start()] + match.expand(by) + text[match.end() :]

    return edit


BARRIER, GRID_BARRIER = r"\bbar\.sync[ \t]+0;", r"\bbarrier\.sync[ \t]+0;"
WAIT = r"cp\.async\.wait_group[ \t]+\d+;"
FRAGMENT = r"(mma\.sync\S+ \{[^}]*\}, \{ ?)(%r\d+), (%r\d+), "
TAIL, LONG_TAIL = r"setp\.lt\.s32", "setp.le.s32"


@dataclass(frozen=True)
class Fault:
    what: str
    kernel: str
    check: Callable[[], object]
    edit: Edit
    build: str = "plain"
    schedules: tuple[str, ...] = ALL  # each must see it


def rows(name: str) -> Callable[[], object]:
    return lambda: ROW_KERNELS[name](7, 129)


FAULTS = [
    # The first eight comparisons are of rows, of which there are seven; the last is of the columns above 127.
    Fault("a tail one too long", "tangent_step_kernel", rows("tangent_step"), replaced(TAIL, LONG_TAIL, -1)),
    Fault("rows one too many", "tangent_step_kernel", rows("tangent_step"), replaced(TAIL, LONG_TAIL, 7)),
    Fault(
        "a load under the opposite predicate", "unit_rows_kernel", rows("unit_rows"),
        replaced(r"@(%p\d+) ld\.global", r"@!\1 ld.global"),
    ),
    Fault(
        "a store under the opposite predicate", "adaln_kernel", rows("adaln"),
        replaced(r"@(%p\d+) st\.global", r"@!\1 st.global"),
    ),
    Fault(
        "a sum over half of a warp", "tangent_step_kernel", rows("tangent_step"),
        replaced(r"(shfl\.sync\.bfly\.b32[^,]*,[^,]*), 16,", r"\1, 8,"),
    ),
    Fault(
        "lanes that do not all shuffle", "tangent_step_kernel", rows("tangent_step"),
        replaced(r"\tshfl\.sync\.bfly", "\t@%p2 shfl.sync.bfly"),
    ),
    Fault(
        "a sum of traces over half of a warp", "probe_traces_kernel", rows("probe_traces"),
        replaced(r"(shfl\.sync\.bfly\.b32[^,]*,[^,]*), 16,", r"\1, 8,"),
    ),
    Fault(
        "a segment stored under the opposite predicate", "segment_adaln_kernel", rows("segment_adaln"),
        replaced(r"@(%p\d+) st\.global", r"@!\1 st.global"),
    ),
    Fault(
        "a dropped barrier, as a race", "adaln_kernel", rows("adaln"), replaced(BARRIER, ""), "thread", ("forward",),
    ),
    Fault(
        "a dropped barrier, in the result", "adaln_kernel", rows("adaln"), replaced(BARRIER, ""), schedules=("greedy",),
    ),
    Fault(
        "an atomic on the wrong row", "masked_interpolant_kernel", rows("bad rows"),
        replaced(r"atom\.global\.gpu\.acq_rel\.min", "atom.global.gpu.acq_rel.max"),
    ),
    Fault(
        "a swapped fragment", "gallery_tile_kernel", GALLERY["few, bfloat16"], replaced(FRAGMENT, r"\1\3, \2, "),

    ),
    Fault(
        "copies not waited for", "gallery_tile_kernel", GALLERY["few, bfloat16"], replaced(WAIT, "", 1),
        schedules=("forward", "greedy"),
    ),
    Fault(
        "a dropped barrier after the copies", "gallery_tile_kernel", GALLERY["few, bfloat16"],
        replaced(rf"({WAIT}\s+){BARRIER}", r"\1", 1), "thread", ("forward",),
    ),
    Fault(
        "a copy of fewer bytes", "gallery_tile_kernel", GALLERY["few, bfloat16"],
        replaced(r"(cp\.async\.cg\S+ [^,]*,[^,]*,) 0x10,", r"\1 0x8,"),
    ),
]  # fmt: skip


def caught(builder: Builder, fault: Fault, schedule: str) -> bool:
    """Whether the check, or the machine itself, sees the fault; a race must be seen by ThreadSanitizer."""

    def edit(text: str) -> str:
        return fault.edit(text) if f".entry {fault.kernel}(" in text else text

    torch.manual_seed(0)
    try:
        with Machine(builder, fault.build, schedule, edit=edit).serving():
            fault.check()
    except KernelError as error:
        return error.explains(fault.build)
    except AssertionError:
        return fault.build == "plain"
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_in_triton_ptx_is_caught(builder: Builder, fault: Fault) -> None:
    for schedule in fault.schedules:
        assert caught(builder, fault, schedule), f"went unnoticed under {schedule}"


def test_wrong_claim_of_divisibility_is_caught(builder: Builder) -> None:
    """Code compiled for rows of 1024 entries reads 16 bytes at a time, which rows of 1023 do not begin at."""
    launches = {}
    for width in (1024, 1023):
        x, index = torch.randn(3, width), torch.tensor([2, 0])
        machine = Machine(builder)
        machine.run = lambda code, launch, width=width: launches.__setitem__(width, (code, launch))  # type: ignore[method-assign]
        with machine.serving():
            test_kernels.geodesic.unit_rows(x, index)
    wide, (_, narrow) = launches[1024][0], launches[1023]
    with pytest.raises(AssertionError, match="not aligned"):
        Machine(builder).run(wide, narrow)


def test_unknown_opcode_is_an_error_that_names_the_line() -> None:
    text = compile_triton(aot.Case("", aot.call_with_rows("tangent_step", 3, 16)).launches()[0]).text
    line = next(number for number, part in enumerate(text.splitlines(), 1) if "shfl.sync.bfly.b32" in part)
    with pytest.raises(PtxError, match=rf"line {line}: unknown opcode shfl\.sync\.bfly\.b64"):
        translate(parse(text.replace("shfl.sync.bfly.b32", "shfl.sync.bfly.b64", 1)))
    with pytest.raises(PtxError, match="line 5: unknown directive"):
        parse(text.replace(".version", ".versions"))


SOURCE_FAULTS = [
    name for name, (*_, check) in test_kernels.FAULTS.items() if check is not test_kernels.check_looks_at_lists
]
"""All but the one that costs time alone: its check counts operations of the interpreter."""
DISTINCT_CHECKS = {test_kernels.FAULTS[fault][-1]: fault for fault in reversed(SOURCE_FAULTS)}


@pytest.mark.parametrize("check", [pytest.param(check, id=fault) for check, fault in DISTINCT_CHECKS.items()])
def test_check_of_faults_passes_without_any(builder: Builder, check: Callable[[Any], object]) -> None:
    torch.manual_seed(0)
    with Machine(builder).serving():
        check(test_kernels.KERNELS)


@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_fault_in_triton_source_is_caught_in_its_ptx(builder: Builder, fault: str, tmp_path: Path) -> None:
    name, before, after, check = test_kernels.FAULTS[fault]
    torch.manual_seed(0)
    with Machine(builder).serving():
        faulty = test_kernels.with_fault(getattr(test_kernels.KERNELS, name), before, after, tmp_path)
        with pytest.raises(AssertionError) as raised:
            check(SimpleNamespace(**{**vars(test_kernels.KERNELS), name: faulty}))
    assert not isinstance(raised.value, KernelError) or raised.value.explains("plain"), raised.value


SPLIT = (
    "value = tl.load(x + row[:, None] * width + column[None, :], mask=inside & (column < width)[None, :], other=0.0)"
)
CLAIMED = """valid = tl.max_constancy(inside & (column < width)[None, :], [1, 4])
    value = tl.load(x + tl.multiple_of(row[:, None] * width, [1, 16]) + column[None, :], mask=valid, other=0.0)"""


def test_wrong_claim_of_divisibility_in_triton_source_is_caught(builder: Builder, tmp_path: Path) -> None:
    """The interpreter does not read such claims, so this is no fault of tests/gpu_emulated/interpreter."""
    with Machine(builder).serving():
        faulty = test_kernels.with_fault(test_kernels.gallery, SPLIT, CLAIMED, tmp_path)
        with pytest.raises(KernelError, match="not aligned"):
            faulty.split_rows(torch.randn(7, 129), False)


SOLVER, SCORES = "sinkhorn_kernel<1, float>", "score_kernel<Half>"
(SMALL_HALF,) = (case for case in EVERY_KERNEL if case.cols == 515 and case.half)
ARRIVE, LOOK = (
    r"atom\.add\.release\.gpu\.u32 (%r\d+),\[(%rd\d+)\],(%r\d+);",
    r"ld\.acquire\.gpu\.u32 (%r\d+),\[(%rd\d+)\];",
)


def in_solver(edit: Edit, build: str = "plain", *schedules: str) -> tuple[Any, ...]:
    return SMALL_SOLVE_SHORT, PtxEdit(SOLVER, edit), build, schedules or ALL


def in_scores(edit: Edit, build: str = "plain", *schedules: str) -> tuple[Any, ...]:
    return SMALL_SCORE_HALF, PtxEdit(SCORES, edit), build, schedules or ALL


CUDA_FAULTS = {
    # Of the four columns of a thread the last one, which the last thread has no more.
    "a tail one too long": in_solver(replaced(r"setp\.gt\.s32([ \t]+%p\d+, %r\d+, 3;)", r"setp.ge.s32\1")),
    "a load under the opposite predicate": in_solver(
        replaced(r"@(%p\d+) bra", r"@!\1 bra"), "address", "forward", "greedy"
    ),
    "a block that skips its rows": in_solver(replaced(r"@(%p\d+) bra", r"@!\1 bra", 6)),
    "copies of 16 bytes to places of 8": (
        SMALL_HALF,
        PtxEdit(
            "sinkhorn_kernel<1, Half>",
            replaced(
                r"cp\.async\.ca\.shared\.global (\[%r\d+\], \[%rd\d+\]), 8,", r"cp.async.cg.shared.global \1, 16,"
            ),
        ),
        "plain",
        ALL,
    ),
    "a swapped fragment": in_scores(replaced(FRAGMENT, r"\1\3, \2, ")),
    "copies not waited for": in_scores(replaced(WAIT, "", -1), "plain", "forward"),
    "a dropped barrier of a stage": in_scores(replaced(BARRIER, "", -1), "thread", "forward"),
    "rows not waited for": in_solver(replaced(WAIT, ""), "plain", "forward", "greedy"),
    "a dropped barrier of a block": in_solver(replaced(BARRIER, ""), "thread", "forward"),
    "nobody waits at the barrier of the grid": in_solver(replaced(LOOK, r"mov.u32 \1, -1;"), "thread"),
    "a barrier of the grid that not all reach": in_solver(replaced(ARRIVE, r"ld.acquire.gpu.u32 \1,[\2];")),
    "a barrier of the grid that releases nothing": in_solver(
        lambda text: text.replace("atom.add.release.gpu", "atom.add.relaxed.gpu"), "thread", "forward"
    ),
}


@pytest.mark.parametrize("fault", CUDA_FAULTS)
def test_fault_in_cuda_ptx_is_caught(workshop: CompiledWorkshop, fault: str) -> None:
    """By a sanitizer where there is one, else by the machine or in the result: a crash is no finding."""
    case, edit, build, schedules = CUDA_FAULTS[fault]
    caught = _caught_by_result if build == "plain" else _caught_by_sanitizer
    for schedule in schedules:
        outcome = case.run(workshop, build, schedule, edit)
        assert caught(case, outcome), f"went unnoticed under {schedule}: {outcome.returncode} {outcome.stderr.decode()}"


@pytest.mark.parametrize(
    ("case", "edit"),
    [
        (ScoreCase(131, 134, (36, 40), half=True), None),
        (SMALL_HALF, ("sinkhorn.cuh", "copy_async<4 * kBytes>(&stage", "copy_async<16>(&stage")),
    ],
    ids=["rows that are no multiples of 16 bytes", "in the source, compiled anew"],
)
def test_wrong_claim_of_divisibility_in_cuda_is_caught(workshop: CompiledWorkshop, case: Any, edit: Any) -> None:
    outcome = case.run(workshop, edit=edit)
    assert outcome.returncode == COMPLAINT_STATUS
    assert b"misaligned" in outcome.stderr
