"""Instructions one by one: what the translated code leaves in memory against what the PTX manual says."""

from __future__ import annotations

import math
import random
import re
import struct
import subprocess
from collections.abc import Callable

import pytest

from tests.gpu_emulated.cuda_emulation.workshop import SCHEDULES
from tests.gpu_emulated.ptx.machine import Builder
from tests.gpu_emulated.ptx.opcodes import TABLE, rule_for
from tests.gpu_emulated.ptx.parser import PtxError, parse
from tests.gpu_emulated.ptx.translate import translate

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
    .shared .align 16 .b8 pool[512];
    .shared .align 16 .b8 late[1024];
    ld.param.u64 %d0, [one_param_0];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d1, %r0, 4;
    mov.b64 %d7, %d0;
    add.s64 %d0, %d0, %d1;
    {body}
    ret;
}}
"""


GIVEN: list[list[int]] = []  # words, one a lane, that bodies read and change


def given(words: list[int]) -> str:
    """The offset of these words from the lane's address in %d0, or of all of them from the address in %d7."""
    GIVEN.append(words)
    return f"GIVEN{len(GIVEN) - 1}_"


def text_of(bodies: list[str]) -> str:
    """A program that stores what each body leaves in %r9."""
    text = "\n".join(f"{body} st.global.b32 [%d0+{128 * k}], %r9;" for k, body in enumerate(bodies))
    return PROGRAM.format(body=re.sub(r"GIVEN(\d+)_", lambda number: str(128 * (len(bodies) + int(number[1]))), text))


def lanes(builder: Builder, *bodies: str, schedule: str = "shuffled") -> list[list[int]]:
    """What each lane of a warp leaves in %r9, for each body."""
    program = builder.program(translate(parse(text_of(list(bodies)))), "plain")
    words = [word % 2**32 for part in GIVEN for word in part]
    contents = bytes(128 * len(bodies)) + struct.pack(f"<{len(words)}I", *words)
    memory = struct.pack("<QQ", len(contents), 0) + bytes([1]) * len(contents) + contents
    stdin = struct.pack("<Q", 8) + bytes(8) + struct.pack("<Q", 1) + memory + struct.pack("<QQQQ", 1, 0, 0, 0)
    settings = {"seed": 1, "grid_x": 1, "grid_y": 1, "grid_z": 1, "shared": 0, "together": 0}
    command = [str(program), *(f"{key}={value}" for key, value in settings.items())]
    outcome = subprocess.run([*command, f"schedule={SCHEDULES[schedule]}"], input=stdin, capture_output=True)
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

LONG_BODIES: dict[str, tuple[str, list[int]]] = {}

# ---- matrices: the places of entries are those of the PTX manual ----


def half(x: float) -> int:
    return int.from_bytes(struct.pack("<e", x), "little")


def bfloat(x: float) -> int:
    return single(x) >> 16


Matrix = list[list[float]]
# Of a kind of numbers: the shape, the encoding of a number, and how many are in a register.
PRODUCTS: dict[str, tuple[str, Callable[[float], int], int]] = {
    "tf32": ("m16n8k8", single, 1),
    "f16": ("m16n8k16", half, 2),
    "bf16": ("m16n8k16", bfloat, 2),
}


def product_bodies(kind: str, a: Matrix, b: Matrix, c: Matrix) -> list[str]:
    """Bodies that leave one of a lane's four entries of a b + c each."""
    shape, encode, count = PRODUCTS[kind]

    def register(entries: list[float]) -> int:
        return sum(encode(x) << 16 * k for k, x in enumerate(entries))

    def of_each_lane(entries: Callable[[int, int], list[float]]) -> str:
        return given([register(entries(lane // 4, lane % 4)) for lane in range(32)])

    def columns(member: int, k: int) -> range:
        return range(count * (member + 4 * k), count * (member + 4 * k + 1))

    places = [
        of_each_lane(lambda group, member, k=k: [a[group + k % 2 * 8][i] for i in columns(member, k // 2)])
        for k in range(4)
    ]
    places += [of_each_lane(lambda group, member, k=k: [b[i][group] for i in columns(member, k)]) for k in range(2)]
    sums = [[single(c[lane // 4 + k // 2 * 8][lane % 4 * 2 + k % 2]) for lane in range(32)] for k in range(4)]
    loads = [f"ld.global.b32 %r{1 + k}, [%d0+{offset}];" for k, offset in enumerate(places)]
    loads += [f"ld.global.b32 %r{10 + k}, [%d0+{given(words)}];" for k, words in enumerate(sums)]
    multiply = (
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{%r10, %r11, %r12, %r13}}, "
        "{%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r10, %r11, %r12, %r13};"
    )
    return [f"{' '.join(loads)} {multiply} mov.b32 %r9, %r{10 + k};" for k in range(4)]


def product_answers(a: Matrix, b: Matrix, c: Matrix) -> list[list[int]]:
    """What the four bodies must leave, of sums that float32 holds exactly."""

    def entry(row: int, col: int) -> float:
        return c[row][col] + sum(x * y[col] for x, y in zip(a[row], b))

    return [[single(entry(lane // 4 + k // 2 * 8, lane % 4 * 2 + k % 2)) for lane in range(32)] for k in range(4)]


def whole_numbers(rows: int, cols: int, seed: int) -> Matrix:
    generator = random.Random(seed)
    return [[float(generator.randint(-99, 99)) for _ in range(cols)] for _ in range(rows)]


def add_products() -> None:
    for kind, (_, _, count) in PRODUCTS.items():
        depth = 8 * count
        a, b, c = whole_numbers(16, depth, 1), whole_numbers(depth, 8, 2), whole_numbers(16, 8, 3)
        for k, (body, answer) in enumerate(zip(product_bodies(kind, a, b, c), product_answers(a, b, c))):
            LONG_BODIES[f"entry {k} of a product of {kind}"] = body, answer
        # 1.5 times the last bit of half of 1, which rounding to the nearest would add as a whole bit.
        for sign in (1.0, -1.0):
            a, b = ([[0.0] * cols for _ in range(rows)] for rows, cols in ((16, depth), (depth, 8)))
            a[0][0], b[0][0] = sign * 1.5 * 2.0**-12, 2.0**-12
            body, *_ = product_bodies(kind, a, b, [[sign] * 8] * 16)
            LONG_BODIES[f"a product of {kind} that is too small for a sum of {sign}"] = body, [single(sign)] * 32


add_products()


def add_matrices() -> None:
    """Matrix k in `pool` holds 64 k + 8 row + column; lanes name its rows from the last to the first."""
    fill = "mov.u32 %r1, pool; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2; mad.lo.u32 %r3, %r0, 0x20002, 0x10000;"
    fill += "".join(f"add.u32 %r4, %r3, {k * 0x400040}; st.shared.b32 [%r2+{128 * k}], %r4;" for k in range(4))
    fill += "bar.warp.sync -1; xor.b32 %r5, %r0, 7; shl.b32 %r5, %r5, 4; add.u32 %r5, %r1, %r5;"
    for count in (1, 2, 4):
        group = ", ".join(f"%r{10 + k}" for k in range(count))
        for k in range(count):
            for turned in ("", ".trans"):
                load = f"ldmatrix.sync.aligned.m8n8.x{count}{turned}.shared.b16 {{{group}}}, [%r5];"

                def entry(row: int, column: int, k: int = k) -> int:
                    return 64 * k + 8 * (7 - row) + column

                def word(lane: int, turned: str = turned, entry: Callable[..., int] = entry) -> int:
                    row, first = lane // 4, lane % 4 * 2
                    pair = [entry(c, row) if turned else entry(row, c) for c in (first, first + 1)]
                    return pair[0] | pair[1] << 16

                name = f"matrix {k} of {count}{' turned' if turned else ''}"
                LONG_BODIES[name] = f"{fill} {load} mov.b32 %r9, %r{10 + k}; bar.warp.sync -1;", shuffled(word)


add_matrices()

# ---- copies and atomics ----

NUMBERS = list(range(100, 132))
TO_POOL = "mov.u32 %r1, pool; shl.b32 %r2, %r0, 4; add.u32 %r1, %r1, %r2;"
LONG_BODIES |= {
    f"word {k} of a copy with {valid} valid bytes": (
        f"{TO_POOL} cp.async.cg.shared.global [%r1], [%d7+{given(NUMBERS)}], 16, {valid}; cp.async.commit_group;"
        f"cp.async.wait_group 0; ld.shared.b32 %r9, [%r1+{4 * k}];",
        [100 + k if 4 * k < valid else 0] * 32,
    )
    for valid in (8, 16)
    for k in (0, 1, 3)
} | {
    "all copies are waited for": (
        f"{TO_POOL} cp.async.ca.shared.global [%r1], [%d7+{given(NUMBERS)}], 8; cp.async.wait_all;"
        "ld.shared.b32 %r9, [%r1+4];", [101] * 32,
    ),
    "sums of all lanes in one word, and what was there before": (
        f"atom.global.add.u32 %r1, [%d7+{(offset := given([5] * 32))}], 1; redux.sync.add.u32 %r2, %r1, -1;"
        f"ld.global.b32 %r3, [%d7+{offset}]; mad.lo.u32 %r9, %r3, 10000, %r2;", [37 * 10000 + 5 * 32 + 496] * 32,
    ),
    "sums that nobody asks for": (
        f"red.global.add.u32 [%d7+{(offset := given([5] * 32))}], %r0; bar.warp.sync -1;"
        f"ld.global.b32 %r9, [%d7+{offset}];", [5 + 496] * 32,
    ),
    "sums of floats": (
        f"red.global.add.f32 [%d0+{(offset := given([single(0.5)] * 32))}], 0f3F800000;"
        f"ld.global.b32 %r9, [%d0+{offset}];", [single(1.5)] * 32,
    ),
    "the smaller one stays": (
        f"atom.global.gpu.acq_rel.min.s32 %r1, [%d0+{(offset := given([-n for n in range(32)]))}], -5;"
        f"ld.global.b32 %r9, [%d0+{offset}];", shuffled(lambda n: min(-n, -5) % 2**32),
    ),
    "the larger one stays, and the old one is returned": (
        f"atom.global.max.u32 %r1, [%d0+{(offset := given(list(range(32))))}], 5; ld.global.b32 %r2, [%d0+{offset}];"
        "mad.lo.u32 %r9, %r2, 100, %r1;", shuffled(lambda n: max(n, 5) * 100 + n),
    ),
    "one word for another": (
        f"atom.global.exch.b32 %r1, [%d0+{(offset := given(NUMBERS))}], %r0; ld.global.b32 %r2, [%d0+{offset}];"
        "mad.lo.u32 %r9, %r2, 1000, %r1;", shuffled(lambda n: n * 1000 + n + 100),
    ),
    "counting up to a limit": (
        f"atom.global.inc.u32 %r1, [%d0+{(offset := given(list(range(32))))}], 20; ld.global.b32 %r9, [%d0+{offset}];",
        shuffled(lambda n: n + 1 if n < 20 else 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bodies", [BODIES, LONG_BODIES], ids=["short", "long"])
def test_single_instructions(builder: Builder, bodies: dict[str, tuple[str, list[int]]]) -> None:
    results = lanes(builder, *(body for body, _ in bodies.values()))
    assert dict(zip(bodies, results)) == {name: expected for name, (_, expected) in bodies.items()}


def test_approximate_instructions_are_as_rough_as_they_may_be(builder: Builder) -> None:
    """2^x of 32 numbers: none is off by more than 2^-22, and most are off."""
    body = "cvt.rn.f32.u32 %r1, %r0; mul.f32 %r1, %r1, 0f3DCCCCCD; ex2.approx.f32 %r9, %r1;"
    results = [struct.unpack("<f", struct.pack("<I", each))[0] for each in lanes(builder, body)[0]]
    exact = [2.0 ** struct.unpack("<f", struct.pack("<f", lane * 0.10000000149011612))[0] for lane in range(32)]
    errors = [abs(a / b - 1) for a, b in zip(results, exact)]
    assert max(errors) < 2**-21
    assert sum(error > 2**-24 for error in errors) > 20
    assert math.isfinite(sum(results))


def test_copies_arrive_with_their_group(builder: Builder) -> None:
    """As late as they may, or at once, as the schedule says."""
    first, second = (f"[%d7+{given([number] * 32)}]" for number in (1, 2))
    body = (
        "mov.u32 %r1, late; shl.b32 %r2, %r0, 4; add.u32 %r1, %r1, %r2;"
        f"cp.async.cg.shared.global [%r1], {first}, 16; cp.async.commit_group;"
        f"cp.async.cg.shared.global [%r1+512], {second}, 16; cp.async.commit_group;"
        "cp.async.wait_group 1; ld.shared.b32 %r3, [%r1]; ld.shared.b32 %r4, [%r1+512];"
        "cp.async.wait_group 0; ld.shared.b32 %r5, [%r1+512];"
    )
    bodies = [f"{body} mov.b32 %r9, %r{k};" for k in (3, 4, 5)]
    for schedule, second_seen in (("forward", 0xFFFFFFFF), ("reversed", 2)):
        seen = [lanes(builder, each, schedule=schedule)[0] for each in bodies]
        assert seen == [[1] * 32, [second_seen] * 32, [2] * 32]


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
    with pytest.raises(PtxError, match=r"line 21: unknown opcode add\.sat\.s32"):
        translate(parse(PROGRAM.format(body="\n\n    add.sat.s32 %r1, %r0, %r0;")))
    with pytest.raises(PtxError, match="line 19: unknown register %x1"):
        parse(PROGRAM.format(body="mov.u32 %x1, 0;"))
    with pytest.raises(PtxError, match="with 3 operands instead of 2"):
        translate(parse(PROGRAM.format(body="add.s32 %r1, %r0, %r0, %r0;")))
    for register in ("%clock64", "%warpid", "%envreg3"):
        with pytest.raises(PtxError, match=f"line 19: unknown register {register}"):
            parse(PROGRAM.format(body=f"mov.u32 %r1, {register};"))
    with pytest.raises(PtxError, match=r"line 19: unknown type \.b128"):
        parse(PROGRAM.format(body=".reg .b128 %q<2>;"))
    with pytest.raises(PtxError, match=r"line 19: ld\.global\.v2\.b32 with a group of 4 registers, not 2"):
        translate(parse(PROGRAM.format(body="ld.global.v2.b32 {%r1, %r2, %r3, %r4}, [%d0];")))
    with pytest.raises(PtxError, match=r"line 19: add\.s32 takes one register, not 2"):
        translate(parse(PROGRAM.format(body="add.s32 %r1, {%r2, %r3}, %r4;")))
