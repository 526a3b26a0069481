"""What items and functions are, by their contents: work of equal identity is the same work.

Whatever is not known to be the same counts as different. `Unknown` is raised for an object whose contents cannot be
read completely, such as an instance of a class of somebody's own or a generator of random numbers.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import json
import os
import stat
import sys
import sysconfig
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from geoflow_fast.runtime import hashing

PATH_LENGTH = 1024
"""Length of the longest text that may be the name of a file."""
DEPTH = 50
"""How deep containers, and functions that call others, are followed."""
REACHING = (globals, vars, eval, exec, compile, __import__)
"""Builtins by which code reads what it does not name."""


class Unknown(Exception):
    """The identity of an object cannot be known; its message is the object's type."""


def of_items(items: Sequence[Any]) -> str:
    """A digest of the contents of items: numbers, texts, bytes, arrays, tensors, images of Pillow, and containers of
    these. A path, or a text that is one, counts with the size and the modification time of its file."""
    sha = hashlib.sha256(str(len(items)).encode())
    for item in items:
        sha.update(json.dumps(_of_value(item, 0)).encode())
    return sha.hexdigest()


def of_function(function: Any) -> str:
    """A digest of a function: its code, its defaults, what it encloses and what it names outside, of which functions
    count in the same way and modules of installed packages by the version of their package. A text in the code that
    is the name of a file counts with the file's size and modification time."""
    return hashlib.sha256(json.dumps(_of_callable(function, {}, 0)).encode()).hexdigest()


def _of_value(value: Any, depth: int) -> Any:
    if depth > DEPTH:
        raise Unknown("a deep container")
    kind = type(value)
    if value is None or kind in (bool, int, float, complex):
        return [kind.__name__, repr(value)]
    if kind is str:
        return ["str", value, _file_state(value)]
    if kind in (bytes, bytearray, memoryview):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, Path):
        return ["path", os.fspath(value), _file_state(value)]
    if isinstance(value, (np.ndarray, np.generic)) and not np.ma.isMaskedArray(value):
        array = np.asarray(value)
        if array.dtype.hasobject:
            return ["objects", array.shape, [_of_value(each, depth + 1) for each in array.reshape(-1).tolist()]]
        shown = np.ascontiguousarray(array)
        return ["array", str(array.dtype), array.shape, hashlib.sha256(shown.tobytes()).hexdigest()]
    if isinstance(value, Tensor):
        return ["tensor", hashing.digest([value])]
    if kind.__module__.split(".")[0] == "PIL" and hasattr(value, "tobytes"):
        colours = value.getpalette() if value.mode in ("P", "PA") else None
        return ["image", value.mode, value.size, colours, hashlib.sha256(value.tobytes()).hexdigest()]
    if kind in (list, tuple):
        return [kind.__name__, [_of_value(each, depth + 1) for each in value]]
    if kind is dict:
        return ["dict", [[_of_value(key, depth + 1), _of_value(each, depth + 1)] for key, each in value.items()]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted(json.dumps(_of_value(each, depth + 1)) for each in value)]
    raise Unknown(kind.__qualname__)


def _file_state(name: str | Path) -> list[int] | None:
    """Size and modification time of a file; None for what names no file."""
    if len(os.fspath(name)) > PATH_LENGTH:
        return None
    try:
        state = os.stat(name)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(state.st_mode) and isinstance(name, Path):
        raise Unknown("a folder")
    return [state.st_size, state.st_mtime_ns] if stat.S_ISREG(state.st_mode) else None


def _of_callable(function: Any, known: dict[int, int], depth: int) -> Any:
    """`known` has the numbers of the functions above this one, which may call each other."""
    if id(function) in known:
        return ["again", known[id(function)]]
    if depth > DEPTH:
        raise Unknown("functions that call many others")
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.items()]
        return ["partial", [_of_any(part, known, depth) for part in parts]]
    if any(function is each for each in REACHING):
        raise Unknown(f"code that calls {function.__name__}")
    if isinstance(function, (types.BuiltinFunctionType, np.ufunc)) and _is_of_module(function):
        return [
            "builtin",
            getattr(function, "__module__", None) or "numpy",
            function.__name__,
            sys.version,
            np.__version__,
        ]
    if not isinstance(function, types.FunctionType):
        raise Unknown(type(function).__qualname__)
    known = {**known, id(function): len(known)}
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            cells[name] = _of_any(cell.cell_contents, known, depth)
        except ValueError:  # a cell that is still empty
            cells[name] = None
    version = _version_of(sys.modules.get(str(function.__globals__.get("__name__"))))
    if version is None:
        outside = {name: _of_global(function, name, known, depth) for name in sorted(_outside(function.__code__))}
        own: Any = [_of_code(function.__code__), outside]
    else:
        own = [function.__globals__["__name__"], function.__qualname__, version]
    return [
        "function",
        own,
        [_of_any(each, known, depth) for each in function.__defaults__ or ()],
        [[name, _of_any(each, known, depth)] for name, each in sorted((function.__kwdefaults__ or {}).items())],
        cells,
        [[name, _of_any(each, known, depth)] for name, each in sorted(vars(function).items())],
    ]


def _of_any(value: Any, known: dict[int, int], depth: int) -> Any:
    if isinstance(value, types.ModuleType):
        return _of_module(value)
    if isinstance(value, type):
        version = _version_of(sys.modules.get(value.__module__))
        if version is None:
            raise Unknown(f"class {value.__qualname__}")
        return ["class", value.__module__, value.__qualname__, version]
    if isinstance(value, tuple):
        return ["tuple", [_of_any(each, known, depth + 1) for each in value]]
    if callable(value):
        return _of_callable(value, known, depth + 1)
    return _of_value(value, depth)


def _of_global(function: types.FunctionType, name: str, known: dict[int, int], depth: int) -> Any:
    """What a name outside a function stands for: `import NAME` in its code, a global or a builtin."""
    if name.startswith("import "):
        module = sys.modules.get(name.removeprefix("import "))
        if module is None:
            raise Unknown(name)
        return _of_module(module)
    if name in function.__globals__:
        return _of_any(function.__globals__[name], known, depth)
    if any(getattr(builtins, name, None) is each for each in REACHING):
        raise Unknown(f"code that calls {name}")
    return ["builtin", name]


def _of_module(module: types.ModuleType) -> Any:
    version = _version_of(module)
    if version is None:
        raise Unknown(f"module {module.__name__}, which is not of an installed package")
    return ["module", module.__name__, version]


def _is_of_module(function: Any) -> bool:
    """Whether a function of C is no method of an object."""
    bound = getattr(function, "__self__", None)
    return bound is None or isinstance(bound, types.ModuleType)


def _version_of(module: types.ModuleType | None) -> str | None:
    """The version of the installed package that a module belongs to, or of Python; None for other modules, which may be
    edited while they keep their name."""
    top = "__main__" if module is None else module.__name__.split(".")[0]
    if top == "__main__":
        return None
    if top in sys.stdlib_module_names:
        return sys.version
    installed = {os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("purelib", "platlib")}
    file = os.path.realpath(getattr(module, "__file__", None) or "")
    if not file.startswith(tuple(installed)):
        return None
    return str(getattr(sys.modules.get(top), "__version__", None) or _file_state(file))


def _of_code(code: types.CodeType) -> Any:
    """The instructions and constants of a code object, without its place in a file."""
    constants = [_of_code(each) if isinstance(each, types.CodeType) else _of_constant(each) for each in code.co_consts]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    handlers = getattr(code, "co_exceptiontable", b"").hex()
    return ["code", code.co_code.hex(), handlers, constants, names, counts, sys.version_info[:2]]


def _of_constant(value: Any) -> Any:
    if value is Ellipsis:
        return ["..."]
    if isinstance(value, tuple):
        return ["tuple", [_of_constant(each) for each in value]]
    return _of_value(value, 0)


def _outside(code: types.CodeType) -> set[str]:
    """The names of globals that code reads, and with `import ` before them the modules that it imports, also in the
    functions inside it."""
    names = set()
    before: list[Any] = [None, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(instruction.argval))
        elif instruction.opname == "IMPORT_NAME":
            relative = before[-2] != 0  # the modules of a package of somebody's own
            names.add(f"import {'.' if relative else ''}{instruction.argval}")
        before = [before[-1], instruction.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _outside(constant)
    return names
