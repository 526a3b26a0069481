"""Instructions one by one: what the translated code leaves in memory against what the PTX manual says."""

from __future__ import annotations

import math
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ptx.machine import Builder
from tests.ptx.opcodes import TABLE, rule_for
from tests.ptx.parser import PtxError, parse
from tests.ptx.translate import executed, translate

PROGRAM = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry one(.param .u64 one_param_0)
.reqntid 32
{{
    .reg .pred %p<4>;
    .reg .b16 %h<8>;
    .reg .b32 %r<16>;
    .reg .b64 %d<8>;
    ld.param.u64 %d0, [one_param_0];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d1, %r0, 4;
    add.s64 %d0, %d0, %d1;
    {body}
    ret;
}}
"""


def text_of(bodies: list[str]) -> str:
    """A program that stores what each body leaves in %r9."""
    return PROGRAM.format(
        body="\n".join(f"{body} st.global.b32 [%d0+{128 * k}], %r9;" for k, body in enumerate(bodies))
    )


def lanes(builder: Builder, *bodies: str) -> list[list[int]]:
    """What each lane of a warp leaves in %r9, for each body."""
    program, size = builder.program(translate(parse(text_of(list(bodies)))), "plain"), 128 * len(bodies)
    memory = struct.pack("<QQ", size, 0) + bytes([1]) * size + bytes(size)
    given = struct.pack("<Q", 8) + bytes(8) + struct.pack("<Q", 1) + memory + struct.pack("<QQQQ", 1, 0, 0, 0)
    settings = {"schedule": 2, "seed": 1, "grid_x": 1, "grid_y": 1, "grid_z": 1, "shared": 0, "together": 0}
    command = [str(program), *(f"{key}={value}" for key, value in settings.items())]
    outcome = subprocess.run(command, input=given, capture_output=True)
    assert outcome.returncode == 0, outcome.stderr.decode()
    return [list(struct.unpack_from("<32I", outcome.stdout, 128 * k)) for k in range(len(bodies))]


def single(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


def shuffled(source: Callable[[int], int]) -> list[int]:
    return [source(lane) for lane in range(32)]


# A body that leaves a 32-bit answer in %r9, and the answers of all lanes.
BODIES: dict[str, tuple[str, list[int]]] = {
    "shifts by the width empty a register": (
        "mov.u32 %r1, -2; add.u32 %r2, %r0, 20; shl.b32 %r3, %r1, %r2; shr.s32 %r4, %r1, %r2; and.b32 %r9, %r3, %r4;",
        shuffled(lambda lane: (0xFFFFFFFE << (lane + 20)) & 0xFFFFFFFF if lane < 12 else 0),
    ),
    "bit fields carry their sign": ("bfe.s32 %r9, %r0, 0, 4;", shuffled(lambda n: ((n % 16 ^ 8) - 8) % 2**32)),
    "bytes are permuted": (
        "mov.u32 %r1, 0x44332211; mov.u32 %r2, 0x88776655; prmt.b32 %r9, %r1, %r2, 0xF640;", [0xFF775511] * 32,
    ),
    "high halves": ("mov.u32 %r1, -1; mul.hi.u32 %r9, %r1, %r0;", shuffled(lambda n: max(n - 1, 0))),
    "up": ("shfl.sync.up.b32 %r9, %r0, 3, 0, -1;", shuffled(lambda n: n - 3 if n >= 3 else n)),
    "down": ("shfl.sync.down.b32 %r9, %r0, 3, 31, -1;", shuffled(lambda n: n + 3 if n <= 28 else n)),
    "across": ("shfl.sync.bfly.b32 %r9, %r0, 5, 31, -1;", shuffled(lambda n: n ^ 5)),
    "in segments of 8": ("shfl.sync.idx.b32 %r9, %r0, 2, 0x181f, -1;", shuffled(lambda n: n // 8 * 8 + 2)),
    "whether a source was within reach": (
        "shfl.sync.up.b32 %r1|%p1, %r0, 3, 0, -1; selp.b32 %r9, 1, 0, %p1;", shuffled(lambda n: int(n >= 3)),
    ),
    "least of a warp": ("sub.s32 %r1, 5, %r0; redux.sync.min.s32 %r9, %r1, -1;", [(5 - 31) % 2**32] * 32),
    "ballot": ("setp.lt.u32 %p1, %r0, 5; vote.sync.ballot.b32 %r9, %p1, -1;", [0b11111] * 32),
    "guards": ("mov.u32 %r9, 7; setp.gt.s32 %p1, %r0, 3; @!%p1 mov.u32 %r9, 8;", shuffled(lambda n: 8 - (n > 3))),
    "comparisons with no number": (
        "setp.lt.f32 %p1, %r0, 0f7FC00000; setp.ltu.f32 %p2, %r0, 0f7FC00000; setp.neu.f32 %p3, %r0, 0f7FC00000;"
        "selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; selp.b32 %r3, 4, 0, %p3;"
        "or.b32 %r9, %r1, %r2; or.b32 %r9, %r9, %r3;", [6] * 32,
    ),
    "of a number and none the number": ("mov.b32 %r1, 0f7FC00000; max.f32 %r9, %r1, 0f3F800000;", [single(1.0)] * 32),
    "one rounding": (
        "mov.b32 %r1, 0f3F800001; fma.rn.f32 %r9, %r1, %r1, 0fBF800002;", [single(2.0**-46)] * 32,
    ),
    "denormals are flushed where it says so": ("mov.b32 %r1, 0f00000001; add.ftz.f32 %r9, %r1, %r1;", [0] * 32),
    "and kept elsewhere": ("mov.b32 %r1, 0f00000001; add.f32 %r9, %r1, %r1;", [2] * 32),
    "halves, the first in the upper part": (
        "mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0f40000000; cvt.rn.bf16x2.f32 %r9, %r1, %r2;", [0x3F804000] * 32,
    ),
    "ties of TF32 go away from zero": ("mov.b32 %r1, 0f3F801000; cvt.rna.tf32.f32 %r9, %r1;", [0x3F802000] * 32),
    "2^0 is 1": ("ex2.approx.ftz.f32 %r9, 0f00000000;", [single(1.0)] * 32),
    "packed and unpacked": (
        "mov.b64 %d2, {%r0, 7}; mov.b64 {%r1, %r2}, %d2; add.u32 %r9, %r1, %r2;", shuffled(lambda n: n + 7),
    ),
}  # fmt: skip


def test_single_instructions(builder: Builder) -> None:
    results = lanes(builder, *(body for body, _ in BODIES.values()))
    assert dict(zip(BODIES, results)) == {name: expected for name, (_, expected) in BODIES.items()}


def test_approximate_instructions_are_as_rough_as_they_may_be(builder: Builder) -> None:
    """2^x of 32 numbers: none is off by more than 2^-22, and most are off."""
    body = "cvt.rn.f32.u32 %r1, %r0; mul.f32 %r1, %r1, 0f3DCCCCCD; ex2.approx.f32 %r9, %r1;"
    results = [struct.unpack("<f", struct.pack("<I", each))[0] for each in lanes(builder, body)[0]]
    exact = [2.0 ** struct.unpack("<f", struct.pack("<f", lane * 0.10000000149011612))[0] for lane in range(32)]
    errors = [abs(a / b - 1) for a, b in zip(results, exact)]
    assert max(errors) < 2**-21
    assert sum(error > 2**-24 for error in errors) > 20
    assert math.isfinite(sum(results))


def test_coverage_knows_what_did_not_run(builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEOFLOW_PTX_COVERAGE", str(tmp_path / "ran"))
    body = "setp.gt.u32 %p1, %r0, 99; @%p1 mov.u32 %r9, 1; @%p1 bra DONE; mov.u32 %r9, 2; DONE:"
    assert lanes(builder, body) == [[2] * 32]
    (kernel,) = parse(text_of([body])).kernels
    ran = executed(kernel, (tmp_path / "ran").read_text().split()[-1])
    missed = [each for each in kernel.instructions() if each not in ran]
    assert [each.opcode for each in missed] == ["mov.u32"]


def test_nothing_is_guessed() -> None:
    """A word that is not in the table makes an opcode unknown, whatever stands around it."""
    for opcode in (
        "add.sat.s32",
        "ld.global.v8.b32",
        "ld.weird.b32",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    ):
        assert rule_for(opcode) is None, opcode
    assert len(TABLE) > 172
    with pytest.raises(PtxError, match=r"line 18: unknown opcode add\.sat\.s32"):
        translate(parse(PROGRAM.format(body="\n\n    add.sat.s32 %r1, %r0, %r0;")))
    with pytest.raises(PtxError, match="line 16: unknown register %x1"):
        parse(PROGRAM.format(body="mov.u32 %x1, 0;"))
    with pytest.raises(PtxError, match="with 3 operands instead of 2"):
        translate(parse(PROGRAM.format(body="add.s32 %r1, %r0, %r0, %r0;")))
