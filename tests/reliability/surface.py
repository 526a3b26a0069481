"""The public surface, found by walking it: every documented function, class and method, with arguments guessed from the
names and annotations of its parameters.

A function or method that only the library calls, with values that it has checked, says so above its definition:
`# unchecked: WHY`.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.reliability.hostile import Target

ROOT = Path(__file__).parents[2]
KEPT = ("flow", "field")
"""Parameters that always get a good value: any object with a `velocity` is a field."""


def documented() -> dict[str, Any]:
    """What docs/api.md lists, by name without `geoflow_fast.`; a module stands for the public names defined in it."""
    listed = re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    values = {}
    for name in listed:
        value, short = public(name), name.removeprefix("geoflow_fast.")
        if isinstance(value, types.ModuleType):
            own = {part: kind for part, kind in vars(value).items() if getattr(kind, "__module__", "") == name}
            values |= {f"{short}.{part}": kind for part, kind in own.items() if not part.startswith("_")}
        else:
            values[short] = value
    return values


def public(name: str) -> Any:
    """The value of a dotted name, as an attribute if there is one: an operation may have the name of its module."""
    parent, _, last = name.rpartition(".")
    owner = public(parent) if parent else None
    return getattr(owner, last) if hasattr(owner, last) else importlib.import_module(name)


def surface() -> dict[str, Callable[..., Any]]:
    """The public functions, classes and methods that take an argument and check it, by name."""
    named = documented()
    classes = {value for value in named.values() if inspect.isclass(value)}
    callables = {}
    for name, value in named.items():
        if inspect.isclass(value):
            if issubclass(value, (BaseException, enum.Enum)) or getattr(value, "_is_protocol", False):
                continue
            if is_unchecked(value):
                continue
            if checks_its_fields(value):
                callables[name] = value
            callables |= {f"{name}.{method}": getattr(value, method) for method in methods_of(value, classes)}
        elif inspect.isroutine(value):
            callables[name] = value
    return {name: value for name, value in callables.items() if parameters_of(value) and not is_unchecked(value)}


def checks_its_fields(kind: type) -> bool:
    """Whether a class looks at what it is made of. A dataclass without `__post_init__` does not: results are such."""
    return not dataclasses.is_dataclass(kind) or hasattr(kind, "__post_init__")


def methods_of(kind: type, classes: set[type]) -> Iterator[str]:
    """Names of the public methods of a class that no other public class has given to it."""
    for name in dir(kind):
        definer = next(base for base in kind.__mro__ if name in vars(base))
        inherited = definer is not kind and definer in classes
        if name.startswith("_") or inherited or not definer.__module__.startswith("geoflow_fast."):
            continue
        if inspect.isfunction(getattr(kind, name)) or inspect.ismethod(getattr(kind, name)):
            yield name


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a caller gives: without `self` and without `*` and `**`."""
    parameters = list(inspect.signature(function, eval_str=False).parameters.values())
    if inspect.isfunction(function) and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def is_unchecked(function: Callable[..., Any]) -> bool:
    """Whether a comment above the definition says that only the library calls it."""
    return "# unchecked: " in (inspect.getcomments(inspect.unwrap(function)) or "")


def guessed(
    name: str,
    function: Callable[..., Any],
    examples: dict[str, Callable[[], Any]],
    instance: Callable[[], Any] | None,
    **settings: Any,
) -> Target:
    """A target with arguments that the names, annotations and defaults of the parameters suggest."""
    makers = {}
    for parameter in parameters_of(function):
        default = parameter.default
        annotated = f"{parameter.name}: {parameter.annotation}"
        known = examples.get(annotated, examples.get(parameter.name))
        if known is not None and not isinstance(default, str):
            makers[parameter.name] = known
        elif isinstance(default, (bool, int, float, str)):
            makers[parameter.name] = lambda default=default: default
        elif default is parameter.empty:
            makers[parameter.name] = by_annotation(str(parameter.annotation), examples)
    method = name.rpartition(".")[2]

    def call(**arguments: Any) -> Any:
        fields = {name: makers[name]() for name in KEPT if name in makers}
        result = (function if instance is None else getattr(instance(), method))(**fields, **arguments)
        return list(result) if isinstance(result, Iterator) else result

    return Target(name, call, lambda: {key: make() for key, make in makers.items() if key not in KEPT}, **settings)


def by_annotation(annotation: str, examples: dict[str, Callable[[], Any]]) -> Callable[[], Any]:
    """Makes a plain value of an annotated type, for a parameter of a name that is not in the table."""
    return next((examples[word] for word in re.findall(r"\w+", annotation) if word in examples), lambda: None)
