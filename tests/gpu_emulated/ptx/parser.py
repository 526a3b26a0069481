"""Reads PTX text, as Triton and nvcc write it, into kernels of typed instructions. Whatever it cannot read is an error
that names the line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


class PtxError(ValueError):
    """Something in the PTX that is not understood."""

    def __init__(self, line: int, what: str):
        super().__init__(f"PTX line {line}: {what}")


@dataclass(frozen=True)
class Register:
    name: str
    negated: bool = False  # of a predicate


@dataclass(frozen=True)
class Number:
    """An integer, or the bits of a float."""

    bits: int


@dataclass(frozen=True)
class Symbol:
    """A label, an array in shared memory, a parameter, or a special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Symbol | Number
    offset: int = 0


@dataclass(frozen=True)
class Group:
    """{a, b, ...}: the registers of a vector or of a fragment."""

    items: tuple[Register | Number | Symbol, ...]


Operand = Register | Number | Symbol | Address | Group


@dataclass(frozen=True)
class Instruction:
    line: int
    guard: Register | None
    opcode: str
    operands: tuple[Operand, ...]
    second: Register | None = None  # the predicate in `shfl d|p, ...`


@dataclass(frozen=True)
class Label:
    line: int
    name: str


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str  # of a scalar; b8 for a structure
    bytes: int
    align: int


@dataclass(frozen=True)
class SharedArray:
    name: str
    bytes: int  # 0: the dynamic one, whose size the launch gives


@dataclass
class Kernel:
    name: str
    parameters: tuple[Parameter, ...]
    threads: int = 0  # .reqntid or .maxntid
    registers: dict[str, str] = field(default_factory=dict)  # name: type
    body: list[Instruction | Label] = field(default_factory=list)

    def parameter_offsets(self) -> dict[str, int]:
        """Where each lies in the parameter space; under "" the size of that."""
        offsets, at = {}, 0
        for parameter in self.parameters:
            at = -(-at // parameter.align) * parameter.align
            offsets[parameter.name] = at
            at += parameter.bytes
        return offsets | {"": at}

    def instructions(self) -> Iterator[Instruction]:
        return (part for part in self.body if isinstance(part, Instruction))


@dataclass
class Module:
    target: str
    kernels: list[Kernel]
    shared: dict[str, SharedArray]


TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<string>"[^"]*")
    |(?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b)
    |(?P<integer>-?(?:0[xX][0-9a-fA-F]+|\d+)U?\b)
    |(?P<word>[.%$A-Za-z_][\w.$%]*(?:::[\w.]+)*)
    |(?P<mark>[][{}()<>@!,;:|+=])
    """,
    re.VERBOSE | re.DOTALL,
)
BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
BYTES |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8, "pred": 1}
# Those that machine.h knows.
SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]|%(laneid|envreg1|envreg2)")


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    tokens, at, line = [], 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise PtxError(line, f"unexpected character {text[at]!r}")
        kind = str(match.lastgroup)
        if kind != "skip":
            tokens.append(Token(kind, match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    return tokens


def parse(text: str) -> Module:
    return _Parser(tokens(text)).module()


class _Parser:
    """Recursive descent over the tokens; one method for each part of the grammar."""

    def __init__(self, tokens: list[Token]):
        self._tokens, self._at = tokens, 0
        self._module = Module("", [], {})
        self._kernel = Kernel("", ())
        self._scopes: list[dict[str, str]] = []  # names of registers as written: as they are known to the kernel

    # ---- tokens ----

    @property
    def _now(self) -> Token:
        return self._tokens[self._at]

    def _next(self) -> Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, text: str) -> bool:
        matches = self._now.text == text
        self._at += matches
        return matches

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise PtxError(self._now.line, f"expected {text!r}, found {self._now.text!r}")

    def _integer(self) -> int:
        token = self._next()
        if token.kind != "integer":
            raise PtxError(token.line, f"expected a number, found {token.text!r}")
        return int(token.text.rstrip("U"), 0)

    def _type(self) -> str:
        token = self._next()
        kind = token.text.removeprefix(".")
        if kind not in BYTES:
            raise PtxError(token.line, f"unknown type {token.text}")
        return kind

    def _until(self, end: str) -> list[Token]:
        """The tokens before the next `end`, which is taken, too."""
        first = self._at
        while self._next().text != end:
            pass
        return self._tokens[first : self._at - 1]

    # ---- the module ----

    def module(self) -> Module:
        parts: dict[str, Callable[[], object]] = {
            ".version": lambda: (self._next(), self._next()), ".target": self._target, ".address_size": self._next,
            ".file": self._file, ".extern": lambda: None, ".visible": lambda: None, ".weak": lambda: None,
            ".entry": self._entry, ".shared": self._shared, ".global": lambda: self._until(";"),
            ".section": lambda: self._until("}"),
        }  # fmt: skip
        while self._at < len(self._tokens):
            token = self._next()
            if token.text not in parts:
                raise PtxError(token.line, f"unknown directive {token.text}")
            parts[token.text]()
        return self._module

    def _target(self) -> None:
        self._module.target = self._next().text
        while self._accept(","):
            self._next()

    def _file(self) -> None:
        self._integer(), self._next()
        while self._accept(","):
            self._integer()

    def _array(self) -> tuple[str, int, int]:
        """`.align 16 .b8 name[bytes]`: name, bytes and alignment."""
        align = self._integer() if self._accept(".align") else 1
        size = BYTES[self._type()]
        name, count = self._next().text, 1
        while self._accept("["):
            count *= 0 if self._now.text == "]" else self._integer()
            self._expect("]")
        return name, size * count, align

    def _shared(self) -> None:
        name, size, _ = self._array()
        self._module.shared[name] = SharedArray(name, size)
        self._expect(";")

    # ---- a kernel ----

    def _entry(self) -> None:
        self._kernel = Kernel(self._next().text, ())
        self._expect("(")
        parameters = []
        while not self._accept(")"):
            parameters.append(self._parameter())
            self._accept(",")
        self._kernel.parameters = tuple(parameters)
        while not self._accept("{"):
            self._performance_hint()
        self._scopes = [{}]
        while self._scopes:
            self._statement()
        self._module.kernels.append(self._kernel)

    def _parameter(self) -> Parameter:
        self._expect(".param")
        align = self._integer() if self._accept(".align") else 0
        kind = self._type()
        if self._accept(".ptr"):  # what follows is about the memory that it points to
            while self._now.text.startswith((".global", ".align")):
                if self._next().text == ".align":
                    self._integer()
        name, size = self._next().text, BYTES[kind]
        if self._accept("["):
            size *= self._integer()
            self._expect("]")
        return Parameter(name, kind, size, max(align, BYTES[kind]))

    def _performance_hint(self) -> None:
        token = self._next()
        numbers = [self._integer()]
        while self._accept(","):
            numbers.append(self._integer())
        if token.text in (".reqntid", ".maxntid"):
            self._kernel.threads = numbers[0]
        elif token.text not in (".maxnreg", ".minnctapersm"):
            raise PtxError(token.line, f"unknown directive {token.text}")

    def _statement(self) -> None:
        token = self._now
        if self._accept("{"):
            self._scopes.append({})
        elif self._accept("}"):
            self._scopes.pop()
        elif self._accept(".reg"):
            self._declare_registers()
        elif self._accept(".shared"):
            self._shared()
        elif self._accept(".loc"):
            self._skip_location()
        elif self._accept(".pragma"):
            self._until(";")
        elif self._tokens[self._at + 1].text == ":":
            self._kernel.body.append(Label(token.line, self._next().text))
            self._expect(":")
        elif token.kind == "word" and token.text.startswith("."):
            raise PtxError(token.line, f"unknown directive {token.text}")
        else:
            self._kernel.body.append(self._instruction())

    def _skip_location(self) -> None:
        for _ in range(3):
            self._integer()
        while self._accept(","):  # inlined at
            self._next()
            while self._now.kind == "integer" or self._now.text.startswith(("$L__info", "+")):
                self._next()

    def _declare_registers(self) -> None:
        kind = self._type()
        while True:
            name = self._next().text
            names = [name]
            if self._accept("<"):
                names = [f"{name}{k}" for k in range(self._integer())]
                self._expect(">")
            depth = len(self._scopes)
            for each in names:
                known = each if depth == 1 else f"{each}.{depth}.{len(self._kernel.registers)}"
                self._scopes[-1][each] = known
                self._kernel.registers[known] = kind
            if not self._accept(","):
                break
        self._expect(";")

    # ---- instructions ----

    def _instruction(self) -> Instruction:
        line, guard = self._now.line, None
        if self._accept("@"):
            negated = self._accept("!")
            guard = Register(self._known(self._next()).name, negated)
        opcode = self._next().text
        operands: list[Operand] = []
        second = None
        while not self._accept(";"):
            operands.append(self._operand())
            if self._accept("|"):
                second = self._known(self._next())
            if self._now.text != ";":
                self._expect(",")
        return Instruction(line, guard, opcode, tuple(operands), second)

    def _known(self, token: Token) -> Register:
        for scope in reversed(self._scopes):
            if token.text in scope:
                return Register(scope[token.text])
        raise PtxError(token.line, f"unknown register {token.text}")

    def _operand(self) -> Operand:
        if self._accept("{"):
            items = [self._simple()]
            while self._accept(","):
                items.append(self._simple())
            self._expect("}")
            return Group(tuple(items)) if len(items) > 1 else items[0]
        if self._accept("["):
            base, offset = self._simple(), 0
            while not self._accept("]"):
                self._accept("+")
                offset += self._integer()
            return Address(base, offset)
        if self._accept("!"):
            return Register(self._known(self._next()).name, negated=True)
        return self._simple()

    def _simple(self) -> Register | Number | Symbol:
        token = self._next()
        if token.kind == "float":
            return Number(int(token.text[2:], 16))
        if token.kind == "integer":
            return Number(int(token.text.rstrip("U"), 0))
        if SPECIAL.fullmatch(token.text) or not token.text.startswith("%"):
            scoped = any(token.text in scope for scope in self._scopes)
            return self._known(token) if scoped else Symbol(token.text)
        return self._known(token)
