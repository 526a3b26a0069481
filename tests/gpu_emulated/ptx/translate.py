"""From PTX to C++: one function a kernel, one statement an instruction, registers as local variables.

The function is that of a single GPU thread. It takes its parameters as the bytes of PTX's parameter space; for kernels
of nvcc there is another function around it, under the kernel's own symbol and with its own arguments, which the linker
prefers to the one that the host's compiler made of the CUDA source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.gpu_emulated.ptx.opcodes import Rule, rule_for
from tests.gpu_emulated.ptx.parser import (
    BYTES,
    Address,
    Group,
    Instruction,
    Kernel,
    Label,
    Module,
    Number,
    Operand,
    PtxError,
    Register,
    Symbol,
)

LEAVE = ("ret", "exit", "trap")
BRANCH = ("bra", "bra.uni")


def translate(module: Module, hosted: bool = False) -> str:
    """C++ for all kernels of a module. `hosted` gives each its own symbol and arguments, too."""
    parts = ['#include "machine.h"\n\nnamespace ptx {\nnamespace {\n']
    parts += [_Writer(module, kernel, number).function() for number, kernel in enumerate(module.kernels)]
    parts.append("\n}  // namespace\n")
    if not hosted:
        parts.append(_entry(module.kernels[0]))
    parts.append("\n}  // namespace ptx\n")
    if hosted:
        parts += [_host_symbol(kernel, number) for number, kernel in enumerate(module.kernels)]
    return "".join(parts)


def _entry(kernel: Kernel) -> str:
    """What run.cpp starts."""
    return f"""
extern const unsigned kernel_threads = {kernel.threads};
void kernel_entry(const u8* parameters) {{ kernel_0(parameters); }}
"""


def _host_symbol(kernel: Kernel, number: int) -> str:
    """Structures of more than 16 bytes go to C++ functions through memory, whatever is in them."""
    types, arguments, copies = [], [], []
    offsets = kernel.parameter_offsets()
    for order, parameter in enumerate(kernel.parameters):
        kind = f"ptx::{parameter.type}"
        if parameter.type == "b8":
            if parameter.bytes <= 16:
                raise PtxError(0, f"{kernel.name}: a structure of at most 16 bytes as argument")
            kind = f"P{number}_{order}"
            types.append(f"struct alignas({parameter.align}) {kind} {{ unsigned char bytes[{parameter.bytes}]; }};\n")
        arguments.append(f"{kind} p{order}")
        at = offsets[parameter.name]
        copies.append(f"    std::memcpy(parameters + {at}, &p{order}, {parameter.bytes});\n")
    return f"""
{"".join(types)}
extern "C" void {kernel.name}({", ".join(arguments)}) {{
    alignas(16) unsigned char parameters[{offsets[""]}];
{"".join(copies)}    ptx::note_launch("{kernel.name}", parameters, {offsets[""]});
    ptx::kernel_{number}(parameters);
}}
"""


@dataclass
class _Writer:
    """The C++ of one kernel."""

    module: Module
    kernel: Kernel
    number: int

    def function(self) -> str:
        used = self._registers_in_use()
        names = list(self.kernel.registers)
        self._variables = {name: f"r{names.index(name)}" for name in used}
        self._offsets = self.kernel.parameter_offsets()
        lines = [f"\nvoid kernel_{self.number}(const u8* parameters) {{\n"]
        lines += (f"    {line}\n" for line in self._shared_symbols())
        # All bits set, which no calculation leaves unnoticed: NaN, or -1.
        for name in used:
            kind = self.kernel.registers[name]
            lines.append(f"    {_storage(kind)} {self._variables[name]} = {'false' if kind == 'pred' else '-1'};\n")
        lines += (f"    {line}\n" for line in self._statements())
        lines.append("}\n")
        return "".join(lines)

    # ---- what the kernel declares ----

    def _registers_in_use(self) -> list[str]:
        names: dict[str, None] = {}
        for instruction in self.kernel.instructions():
            for operand in (instruction.guard, instruction.second, *instruction.operands):
                for part in _flat(operand):
                    if isinstance(part, Register):
                        names[part.name] = None
        return list(names)

    def _shared_symbols(self) -> Iterator[str]:
        """Each array in use, with a place of its own, so that AddressSanitizer sees its ends."""
        self._symbols: dict[str, str] = {}
        parts = (part for i in self.kernel.instructions() for operand in i.operands for part in _flat(operand))
        names = dict.fromkeys(part.name for part in parts if isinstance(part, Symbol))
        for order, name in enumerate(name for name in names if name in self.module.shared):
            array, self._symbols[name] = self.module.shared[name], f"array{order}"
            memory = "emulation::dynamic_shared()"
            if array.bytes:
                yield f"static const char site{order} = 0;"
                memory = f"emulation::shared_array(&site{order}, {array.bytes})"
            yield f"const u32 array{order} = shared_address({memory});"

    # ---- statements ----

    def _statements(self) -> Iterator[str]:
        labels = {part.name: f"L{order}" for order, part in enumerate(self.kernel.body) if isinstance(part, Label)}
        targets = {i.operands[0] for i in self.kernel.instructions() if i.opcode in BRANCH}
        for part in self.kernel.body:
            if isinstance(part, Label):
                if Symbol(part.name) in targets:
                    yield f"{labels[part.name]}:;"
                continue
            statement = self._jump(part, labels) or self._operation(part)
            if part.guard is not None:
                statement = f"if ({self._read(part.guard, 'pred', part)}) {{ {statement} }}"
            yield f"{statement}  // {part.line}: {part.opcode}"

    def _jump(self, instruction: Instruction, labels: dict[str, str]) -> str:
        if instruction.opcode == "trap":
            return f'fail({instruction.line}, "trap");'
        if instruction.opcode in LEAVE:
            return "return;"
        if instruction.opcode not in BRANCH:
            return ""
        (target,) = instruction.operands
        if not isinstance(target, Symbol) or target.name not in labels:
            raise PtxError(instruction.line, f"{instruction.opcode} to an unknown label")
        return f"goto {labels[target.name]};"

    def _operation(self, instruction: Instruction) -> str:
        opcode, operands = _packed(instruction.opcode, instruction.operands), instruction.operands
        rule = rule_for(opcode)
        if rule is None:
            raise PtxError(instruction.line, f"unknown opcode {instruction.opcode}")
        results, sources = (operands[:1], operands[1:]) if rule.result else ((), operands)
        if opcode.startswith("cp.async.c") and len(sources) == 3:
            sources = (*sources, sources[2])  # all bytes are valid where nothing is said
        if len(sources) != len(rule.sources):
            raise PtxError(instruction.line, f"{opcode} with {len(sources)} operands instead of {len(rule.sources)}")
        reads = [
            f"const {_cpp(kind)} {letter} = {self._read(operand, kind, instruction)};"
            for letter, operand, kind in zip("abcd", sources, rule.sources)
        ]
        code = rule.expression.replace("LINE", str(instruction.line))
        return f"{{ {' '.join([*reads, self._write(rule, results, code, instruction)])} }}"

    def _write(self, rule: Rule, results: tuple[Operand, ...], code: str, instruction: Instruction) -> str:
        if not rule.result:
            return f"{code};"
        (target,) = results
        kind, *also = rule.result.split()
        if also:  # a shuffle, which tells whether its source was within reach
            second = f" {self._variables[instruction.second.name]} = v.inside;" if instruction.second else ""
            return f"const auto v = {code}; {self._assign(target, kind, 'v.value', instruction)}{second}"
        if kind.endswith("]"):
            each, items = _each(kind, target, instruction)
            writes = (self._assign(item, each, f"v[{k}]", instruction) for k, item in enumerate(items))
            return f"const {_cpp(kind)} v = {code}; {' '.join(writes)}"
        return self._assign(target, kind, code, instruction)

    def _assign(self, target: Operand, kind: str, code: str, instruction: Instruction) -> str:
        if target == Symbol("_"):
            return ""
        if not isinstance(target, Register):
            raise PtxError(instruction.line, f"{instruction.opcode} must write to a register")
        storage = _storage(self.kernel.registers[target.name])
        return f"{self._variables[target.name]} = bits<{storage}, {kind}>({code});"

    # ---- operands ----

    def _read(self, operand: Operand, kind: str, instruction: Instruction) -> str:
        if kind.endswith("]"):
            each, items = _each(kind, operand, instruction)
            return f"{{{', '.join(self._read(item, each, instruction) for item in items)}}}"
        if isinstance(operand, Group):
            raise PtxError(instruction.line, f"{instruction.opcode} takes one register, not {len(operand.items)}")
        if isinstance(operand, Address):
            return self._address(operand, kind, instruction)
        if isinstance(operand, Register):
            return f"{'!' if operand.negated else ''}as<{kind}>({self._variables[operand.name]})"
        if isinstance(operand, Number):
            return f"as<{kind}>({operand.bits}{'ull' if operand.bits >= 0 else 'll'})"
        return f"as<{kind}>({self._symbol(operand, instruction)})"

    def _address(self, address: Address, kind: str, instruction: Instruction) -> str:
        base, offset = address.base, address.offset
        if kind == "parameter":
            if not isinstance(base, Symbol) or base.name not in self._offsets:
                raise PtxError(instruction.line, "parameters are read by name")
            return f"{{parameters + {self._offsets[base.name] + offset}}}"
        width = "u64" if kind == "global" else "u32"
        return f"{{{self._read(base, width, instruction)} + {width}({offset})}}"

    def _symbol(self, symbol: Symbol, instruction: Instruction) -> str:
        if symbol.name.startswith("%"):
            return symbol.name[1:].replace(".", "_") + "()"
        if symbol.name not in self._symbols:
            raise PtxError(instruction.line, f"unknown name {symbol.name}")
        return self._symbols[symbol.name]


def _each(kind: str, operand: Operand, instruction: Instruction) -> tuple[str, tuple[Operand, ...]]:
    """The type and the registers of a group such as b32[4]; a group of one may stand without its braces."""
    each, count = kind.rstrip("]").split("[")
    items = operand.items if isinstance(operand, Group) else (operand,)
    if len(items) != int(count):
        raise PtxError(instruction.line, f"{instruction.opcode} with a group of {len(items)} registers, not {count}")
    return each, items


def _packed(opcode: str, operands: tuple[Operand, ...]) -> str:
    """A mov from or to a group of registers is another operation than one from register to register."""
    if opcode.startswith("mov.b") and isinstance(operands[1], Group):
        return opcode.replace("mov", "pack")
    if opcode.startswith("mov.b") and isinstance(operands[0], Group):
        return opcode.replace("mov", "unpack")
    return opcode


def _flat(operand: Operand | None) -> tuple[Operand, ...]:
    if isinstance(operand, Group):
        return operand.items
    if isinstance(operand, Address):
        return (operand.base,)
    return () if operand is None else (operand,)


def _storage(kind: str) -> str:
    """The C++ type of a register."""
    return "bool" if kind == "pred" else f"u{8 * BYTES[kind]}"


def _cpp(kind: str) -> str:
    """The C++ type of an operand."""
    if kind.endswith("]"):
        each, count = kind[:-1].split("[")
        return f"std::array<{each}, {count}>"
    return kind
