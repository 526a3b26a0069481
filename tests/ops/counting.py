"""What passes the border to compiled kernels while a test runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from geoflow_fast.ops import extension

Watch = Callable[[str, tuple[Any, ...], Any], object]
"""Gets the name of a function, its arguments and its result."""


class _Watched:
    """The extension, of whose functions every answer is told to `watch`."""

    def __init__(self, module: ModuleType, watch: Watch) -> None:
        self._module, self._watch = module, watch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not callable(value) or isinstance(value, type):
            return value

        def call(*inputs: Any, **named: Any) -> Any:
            result = value(*inputs, **named)
            self._watch(name, inputs, result)
            return result

        return call


def watch_border(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Tells `watch` what compiled functions answer."""
    module = extension.loaded()
    if module is not None:
        proxy = _Watched(module, watch)
        monkeypatch.setattr(extension, "loaded", lambda: proxy)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel of an operation has answered since this call."""
    counts: Counter[str] = Counter()

    def count(name: str, *_: Any) -> None:
        if hasattr(torch.ops.geoflow, name):
            counts[name] += 1

    watch_border(monkeypatch, count)
    return counts


def answers(monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[tuple[tuple[Any, ...], Any]]:
    """The arguments and results of the calls of one function since this call."""
    seen: list[tuple[tuple[Any, ...], Any]] = []
    watch_border(monkeypatch, lambda name, inputs, result: name == wanted and seen.append((inputs, result)))
    return seen
