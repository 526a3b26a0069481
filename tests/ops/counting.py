"""Counts of the calls of compiled kernels."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

from geoflow_fast.ops import native


class _Counting:
    """The extension, each of whose kernels counts its calls."""

    def __init__(self, module: ModuleType, counts: Counter[str]) -> None:
        self._module, self._counts = module, counts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not hasattr(torch.ops.geoflow, name):
            return value

        def call(*inputs: Any, **named: Any) -> Any:
            result = value(*inputs, **named)
            self._counts[name] += 1
            return result

        return call


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel of an operation has answered since this call, while the test runs."""
    counts: Counter[str] = Counter()
    module = native.extension()
    if module is not None:
        proxy = _Counting(module, counts)
        monkeypatch.setattr(native, "extension", lambda: proxy)
    return counts
