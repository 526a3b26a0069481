"""What each PTX instruction does, as one C++ expression over its operands `a`, `b`, `c`, `d` (see machine.h).

A row of the table stands for the same operation on several types. `T` is the type of the row; `U` is the unsigned
integer of its width, `W` its integer of twice the width and `X` the unsigned one. PTX integers wrap around, so sums and
products are taken of unsigned ones. An opcode that no row spells out is not known: there is no guessing by prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache


@dataclass(frozen=True)
class Rule:
    kind: str
    result: str  # type, or "" for none; "b32[4]" is a group of registers
    sources: tuple[str, ...]  # types
    expression: str


WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64", "s64": "s128", "u64": "u128"}
INTEGERS = "s16 u16 s32 u32 s64 u64"
BITS = "b16 b32 b64"
EVERY = f"{INTEGERS} {BITS} f32 f64 pred"
COMPARED = {"eq": "a == b", "ne": "a != b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b"}
# Of floats: false if one is no number, or, with a u, true.
ORDERED = COMPARED | {"ne": "a < b || a > b", "num": "a == a && b == b", "nan": "a != a || b != b"}
ORDERED |= {"equ": "!(a < b || a > b)", "neu": "a != b", "ltu": "!(a >= b)", "leu": "!(a > b)"}
ORDERED |= {"gtu": "!(a <= b)", "geu": "!(a < b)"}
UNSIGNED_NAMES = {"lo": "a < b", "ls": "a <= b", "hi": "a > b", "hs": "a >= b"}

# kind, opcodes, types, result, sources, expression
ROWS: list[tuple[str, str, str, str, str, str]] = [
    ("integer", "add.T", INTEGERS, "U", "U U", "a + b"),
    ("integer", "sub.T", INTEGERS, "U", "U U", "a - b"),
    ("integer", "mul.lo.T", INTEGERS, "U", "U U", "X(a) * b"),
    ("integer", "mul.hi.T", INTEGERS, "T", "T T", "(W(a) * W(b)) >> (8 * sizeof(T))"),
    ("integer", "mul.wide.T", "s16 u16 s32 u32", "W", "T T", "W(a) * W(b)"),
    ("integer", "mad.lo.T", "s32 u32 s64 u64", "U", "U U U", "a * b + c"),
    ("integer", "mad.wide.T", "s16 u16 s32 u32", "X", "T T X", "X(W(a) * W(b)) + c"),
    ("integer", "div.T", "s32 u32 s64 u64", "T", "T T", "a / b"),
    ("integer", "rem.T", "s32 u32 s64 u64", "T", "T T", "a % b"),
    ("integer", "neg.T", "s16 s32 s64", "U", "U", "0 - a"),
    ("integer", "abs.T", "s32 s64", "T", "T", "a < 0 ? -a : a"),
    ("integer", "min.T", INTEGERS, "T", "T T", "std::min(a, b)"),
    ("integer", "max.T", INTEGERS, "T", "T T", "std::max(a, b)"),
    ("integer", "and.T", f"{BITS} pred", "T", "T T", "a & b"),
    ("integer", "or.T", f"{BITS} pred", "T", "T T", "a | b"),
    ("integer", "xor.T", f"{BITS} pred", "T", "T T", "a ^ b"),
    ("integer", "not.T", BITS, "T", "T", "~a"),
    ("integer", "not.pred", "pred", "T", "T", "!a"),
    # Shifts by the width and more empty the register, which C++ leaves undefined.
    ("integer", "shl.T", BITS, "T", "T u32", "b < 8 * sizeof(T) ? X(a) << b : 0"),
    ("integer", "shr.T", f"u16 u32 u64 {BITS}", "U", "U u32", "b < 8 * sizeof(U) ? a >> b : 0"),
    ("integer", "shr.T", "s16 s32 s64", "T", "T u32", "a >> std::min<u32>(b, 8 * sizeof(T) - 1)"),
    ("integer", "bfe.u32", "u32", "T", "T u32 u32", "bit_field(a, b, c)"),
    ("integer", "bfe.s32", "s32", "T", "T u32 u32", "signed_bit_field(a, b, c)"),
    ("integer", "bfi.T", "b32 b64", "T", "T T u32 u32", "insert_bit_field(a, b, c, d)"),
    ("integer", "prmt.b32", "b32", "T", "T T u32", "permute_bytes(a, b, c)"),
    ("integer", "popc.T", "b32 b64", "u32", "T", "__builtin_popcountll(a)"),
    ("integer", "clz.b32", "b32", "u32", "T", "a == 0 ? 32 : __builtin_clz(a)"),
    ("integer", "shf.l.wrap.b32", "b32", "T", "T T u32", "(u64(b) << 32 | a) << (c % 32) >> 32"),
    ("integer", "shf.r.wrap.b32", "b32", "T", "T T u32", "(u64(b) << 32 | a) >> (c % 32)"),
    ("integer", "lop3.b32", "b32", "T", "T T T u32", "look_up(a, b, c, d)"),
    ("integer", "mov.T", f"{EVERY} f16", "T", "T", "a"),
    ("integer", "pack.b32", "b32", "T", "b16[2]", "a[0] | u32(a[1]) << 16"),
    ("integer", "pack.b64", "b64", "T", "b32[2]", "a[0] | u64(a[1]) << 32"),
    ("integer", "unpack.b32", "b32", "b16[2]", "T", "{u16(a), u16(a >> 16)}"),
    ("integer", "unpack.b64", "b64", "b32[2]", "T", "{u32(a), u32(a >> 32)}"),
    ("integer", "cvta.to.global.u64", "u64", "T", "T", "a"),
    ("integer", "cvta.shared.u64", "u64", "T", "T", "shared_window() + a"),
    ("integer", "cvta.to.shared.u64", "u64", "T", "T", "a - shared_window()"),
    ("select", "selp.T", EVERY, "T", "T T pred", "c ? a : b"),
    *(("select", f"setp.{name}.T", INTEGERS, "pred", "T T", code) for name, code in COMPARED.items()),
    *(("select", f"setp.{name}.T", BITS, "pred", "T T", COMPARED[name]) for name in ("eq", "ne")),
    *(("select", f"setp.{name}.T", "u16 u32 u64", "pred", "T T", code) for name, code in UNSIGNED_NAMES.items()),
    *(("select", f"setp.{name}.T", "f32 f64", "pred", "T T", code) for name, code in ORDERED.items()),
    *(
        ("select", f"setp.{name}.{also}.{t}", t, "pred", "T T pred", f"({code}) {sign} c")
        for also, sign in (("and", "&&"), ("or", "||"))
        for types, comparisons in (("s32 u32 s64 u64", COMPARED), ("f32 f64", ORDERED))
        for name, code in comparisons.items()
        for t in types.split()
    ),
    ("float", "add.T add.rn.T", "f32 f64", "T", "T T", "a + b"),
    ("float", "sub.T sub.rn.T", "f32 f64", "T", "T T", "a - b"),
    ("float", "mul.T mul.rn.T", "f32 f64", "T", "T T", "a * b"),
    ("float", "fma.rn.T mad.rn.T", "f32 f64", "T", "T T T", "std::fma(a, b, c)"),
    ("float", "div.rn.T", "f32 f64", "T", "T T", "a / b"),
    ("float", "rcp.rn.T", "f32 f64", "T", "T", "1 / a"),
    ("float", "sqrt.rn.T", "f32 f64", "T", "T", "std::sqrt(a)"),
    ("float", "neg.T", "f32 f64", "T", "T", "-a"),
    ("float", "abs.T", "f32 f64", "T", "T", "std::fabs(a)"),
    ("float", "copysign.T", "f32 f64", "T", "T T", "std::copysign(b, a)"),
    # Of a number and a NaN the number counts.
    ("float", "min.T", "f32 f64", "T", "T T", "std::fmin(a, b)"),
    ("float", "max.T", "f32 f64", "T", "T T", "std::fmax(a, b)"),
    ("float", "testp.finite.f32", "f32", "pred", "T", "std::isfinite(a)"),
    # Relative errors are those that the PTX manual allows; machine.h uses them up.
    ("approximate", "ex2.approx.f32", "f32", "T", "T", "approximate(std::exp2(f64(a)), a, 2e-7)"),
    ("approximate", "lg2.approx.f32", "f32", "T", "T", "approximate_log2(a)"),
    ("approximate", "rcp.approx.f32", "f32", "T", "T", "approximate(1 / f64(a), a, 6e-8)"),
    ("approximate", "rcp.approx.ftz.f64", "f64", "T", "T", "rough_reciprocal(a)"),
    ("approximate", "rsqrt.approx.f32", "f32", "T", "T", "approximate(1 / std::sqrt(f64(a)), a, 1.3e-7)"),
    ("approximate", "sqrt.approx.f32", "f32", "T", "T", "approximate(std::sqrt(f64(a)), a, 1.2e-7)"),
    ("approximate", "div.full.f32 div.approx.f32", "f32", "T", "T T", "approximate(f64(a) / b, a + b, 1.2e-7)"),
    *(
        ("convert", f"cvt.{to}.{source}", source, to, source, "a")
        for to in (*INTEGERS.split(), "s8", "u8")
        for source in (*INTEGERS.split(), "s8", "u8")
    ),
    *(("convert", f"cvt.rn.{to}.T", INTEGERS, to, "T", "a") for to in ("f32", "f64")),
    ("convert", "cvt.f64.f32", "f32", "f64", "T", "a"),
    ("convert", "cvt.rn.f32.f64", "f64", "f32", "T", "a"),
    *(("convert", f"cvt.rzi.{to}.T", "f32 f64", to, "T", f"to_integer<{to}>(a)") for to in INTEGERS.split()[2:]),
    *(
        ("convert", f"cvt.{mode}.T.T", "f32 f64", "T", "T", f"std::{function}(a)")
        for mode, function in (("rmi", "floor"), ("rpi", "ceil"), ("rzi", "trunc"), ("rni", "nearbyint"))
    ),
    ("convert", "cvt.f32.T", "f16 bf16", "f32", "T", "widen(a)"),
    ("convert", "cvt.rn.T.f32", "f16 bf16", "T", "f32", "narrow<T>(a)"),
    ("convert", "cvt.rn.Tx2.f32", "f16 bf16", "b32", "f32 f32", "u32(narrow<T>(a).bits) << 16 | narrow<T>(b).bits"),
    ("convert", "cvt.rna.tf32.f32", "f32", "b32", "b32", "round_to_tf32(a)"),
    *(
        (
            "shuffle", f"shfl.sync.{mode}.b32", "b32", "T pred", "T u32 u32 u32",
            f"shuffle<Shuffle::{mode}>(a, b, c, d, LINE)",
        )
        for mode in ("up", "down", "bfly", "idx")
    ),
    *(
        ("shuffle", f"redux.sync.{name}.T", types, "T", "T u32", f"reduce_warp<Reduction::{name}>(a, b, LINE)")
        for name, types in (("add", "s32 u32"), ("min", "s32 u32"), ("max", "s32 u32"))
    ),
    *(
        ("shuffle", f"vote.sync.{name}.pred", "pred", "T", "T u32", f"vote(a, b, LINE) {test}")
        for name, test in (("any", "!= 0"), ("all", "== ~0u"))
    ),
    ("shuffle", "vote.sync.ballot.b32", "b32", "T", "pred u32", "vote(a, b, LINE)"),
    ("barrier", "bar.sync barrier.sync bar.cta.sync", "b32", "", "u32", "block_barrier(a, LINE)"),
    ("barrier", "bar.warp.sync", "b32", "", "u32", "warp_barrier(a, LINE)"),
    ("barrier", "membar.gl fence.acq_rel.gpu fence.sc.gpu", "b32", "", "", "fence()"),
    ("copy", "cp.async.commit_group", "b32", "", "", "emulation::copy_commit()"),
    ("copy", "cp.async.wait_group", "b32", "", "u32", "emulation::copy_wait(a)"),
    ("copy", "cp.async.wait_all", "b32", "", "", "wait_for_all_copies()"),
    *(
        ("copy", f"cp.async.{cache}.shared.global", "b32", "", "shared global u32 u32", "copy_async(a, b, c, d, LINE)")
        for cache in ("ca", "cg")
    ),
    *(
        (
            "tensor", f"ldmatrix.sync.aligned.m8n8.x{count}{how}.shared.b16", "b32", f"T[{count}]", "shared",
            f"load_matrix<{count}, {turned}>(a, LINE)",
        )
        for count in (1, 2, 4)
        for how, turned in (("", "false"), (".trans", "true"))
    ),
    *(
        (
            "tensor", f"mma.sync.aligned.{shape}.row.col.f32.{number}.{number}.f32", "f32", "T[4]",
            "b32[4] b32[2] T[4]", f"multiply(emulation::Number::{name}, a, b, c, LINE)",
        )
        for shape, number, name in (
            ("m16n8k8", "tf32", "cut_tf32"), ("m16n8k16", "f16", "float16"), ("m16n8k16", "bf16", "bfloat16"),
        )
    ),
]  # fmt: skip


def _expanded() -> dict[str, Rule]:
    table = {}
    for kind, opcodes, types, result, sources, expression in ROWS:
        for t in types.split():
            unsigned = f"u{t[1:]}" if t[0] in "sub" and t != "bf16" else t
            names = {"T": t, "U": unsigned, "W": WIDER.get(t, t), "X": WIDER.get(unsigned, t)}

            def named(text: str, names: dict[str, str] = names) -> str:
                return re.sub(r"\b[TUWX]\b", lambda letter: names[letter.group()], text)

            rule = Rule(kind, named(result), tuple(map(named, sources.split())), named(expression))
            for opcode in opcodes.split():
                table[re.sub(r"(?<=\.)T(?=\.|x2|$)", t, opcode)] = rule
    return table


TABLE = _expanded()

# ---- memory: an opcode is a list of words, each of which must be known ----

SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "param": "parameter"}
# Which cache keeps the data, and how much of it, is nothing that a program can notice.
HINTS = {"nc", "ca", "cg", "cs", "L1::evict_last", "L1::evict_first", "L1::no_allocate", "L2::128B", "L2::256B"}
ORDERS = {"relaxed": "relaxed", "acquire": "acquire", "release": "release", "acq_rel": "acq_rel", "volatile": "seq_cst"}
SCOPES = {"gpu", "sys", "cta"}
MEMORY_TYPES = {*EVERY.split(), "b8", "u8", "s8"} - {"pred"}
UPDATES = {"add", "min", "max", "exch", "inc"}


def _memory(opcode: str) -> Rule | None:
    """The rule of a load, a store or an atomic update."""
    base, *words = opcode.split(".")
    kind, words = (words[-1] if words else ""), words[:-1]
    if base not in ("ld", "st", "atom", "red") or kind not in MEMORY_TYPES:
        return None
    space, order, count, update = "global", "", 1, ""
    for word in words:
        if word in SPACES:
            space = SPACES[word]
        elif word in ORDERS:
            order = ORDERS[word]
        elif word in ("v2", "v4"):
            count = int(word[1])
        elif word in UPDATES and base in ("atom", "red"):
            update = word
        elif word not in HINTS | SCOPES:
            return None
    values = kind if count == 1 else f"{kind}[{count}]"
    column = f"{base} {space}"
    if update:
        code = f"update<Update::{update}, Order::{order or 'relaxed'}>(a, b, LINE)"
        return Rule("atomic", kind if base == "atom" else "", (space, kind), code)
    if order:  # of one word
        if base == "ld":
            return Rule("atomic", kind, (space,), f"load_ordered<{kind}, Order::{order}>(a, LINE)")
        return Rule("atomic", "", (space, kind), f"store_ordered<Order::{order}>(a, b, LINE)")
    if base == "ld":
        return Rule(column, values, (space,), f"load<{kind}, {count}>(a, LINE)")
    return Rule(column, "", (space, values), f"store<{kind}, {count}>(a, b, LINE)")


@cache
def rule_for(opcode: str) -> Rule | None:
    """The rule of an opcode, if it is known. `.ftz` takes denormal operands and results of an operation for zero."""
    rule = TABLE.get(opcode) or _memory(opcode)
    if rule is not None or ".ftz" not in opcode:
        return rule
    plain = TABLE.get(opcode.replace(".ftz", ""))
    if plain is None or "f32" not in plain.sources:
        return None
    code = plain.expression
    for letter, kind in zip("abc", plain.sources):
        if kind == "f32":
            code = re.sub(rf"\b{letter}\b", f"flush({letter})", code)
    return replace(plain, expression=f"flush({code})" if plain.result == "f32" else code)
