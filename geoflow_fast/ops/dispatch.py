"""Which backend serves an operation on a device, and why another cannot.

An implementation registers itself under the operation's name. `choose` picks one: by name, or the first available in
the device's order. A backend asked for by name that cannot serve is an error with the reason; the automatic choice
passes over backends that are unavailable, never over one that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

AUTO_ORDER = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}


BACKENDS = ("reference", "cpu", "cuda", "triton")


EVERYWHERE = ("cpu", "cuda", "meta")
"""Device types that plain torch serves."""


Function = TypeVar("Function", bound=Callable[..., Any])


class BackendUnavailable(ValueError):
    """Raised when a backend requested by name cannot run this operation on this machine. The message says why."""


@dataclass(frozen=True)
class Implementation:
    """One backend of one operation: the function (or a class that holds its passes: forward, backward, jvp), the
    device types and dtypes it serves (None: any), and why it is missing, if it is."""

    function: Callable[..., Any]
    devices: Callable[[], tuple[str, ...]]
    missing: Callable[[], str | None]
    dtypes: tuple[torch.dtype, ...] | None


_IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {}


def register(
    op: str,
    backend: str,
    *,
    devices: tuple[str, ...] | Callable[[], tuple[str, ...]],
    missing: Callable[[], str | None] = lambda: None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> Callable[[Function], Function]:
    """Decorator: the function serves `op` as `backend` for tensors on `devices`, unless `missing()` gives a reason."""

    def add(function: Function) -> Function:
        on = devices if callable(devices) else lambda: devices
        _IMPLEMENTATIONS.setdefault(op, {})[backend] = Implementation(function, on, missing, dtypes)
        return function

    return add


def _reason(op: str, backend: str, tensor: Tensor) -> str | None:
    """Why `backend` cannot serve `op` for tensors like this one; None if it can."""
    if backend not in BACKENDS:
        return f"no such backend; the backends are {', '.join(BACKENDS)}"
    implementation = _IMPLEMENTATIONS[op].get(backend)
    if implementation is None:
        return f"{op} has no {backend} implementation"
    absent = implementation.missing()
    if absent is not None:
        return absent
    if tensor.device.type not in implementation.devices():
        return f"serves {' and '.join(implementation.devices())} tensors, and these are on {tensor.device.type}"
    if implementation.dtypes is not None and tensor.dtype not in implementation.dtypes:
        return f"works in {', '.join(map(str, implementation.dtypes))}, and these are {tensor.dtype}"
    return None


def choose(op: str, tensor: Tensor, backend: str = "auto") -> Any:
    """The implementation of `op` for tensors like this one; raises BackendUnavailable, with the reason, without one."""
    names = AUTO_ORDER.get(tensor.device.type, ("reference",)) if backend == "auto" else (backend,)
    if backend == "auto" and torch.compiler.is_compiling():
        names = ("reference",)  # the compiler fuses plain torch itself, and cannot look into a kernel
    reasons = {}
    for name in names:
        reason = _reason(op, name, tensor)
        if reason is None:
            return _IMPLEMENTATIONS[op][name].function
        reasons[name] = reason
    raise BackendUnavailable("; ".join(f"{op}: backend {name!r}: {why}" for name, why in reasons.items()))


class BackendTable(dict[str, dict[str, str]]):
    """Operation -> backend -> "available" or the reason why not; prints as a table."""

    def __str__(self) -> str:
        width = max((len(op) for op in self), default=0)
        rows = [f"{op:<{width}}  {backend:<9}  {state}" for op, row in self.items() for backend, state in row.items()]
        return "\n".join(rows)

    __repr__ = __str__


def backends() -> BackendTable:
    """Table of all operations and backends: "available", or the reason why not. Prints as text."""
    table = BackendTable()
    for op in sorted(_IMPLEMENTATIONS):
        found = _IMPLEMENTATIONS[op]
        table[op] = {
            name: (found[name].missing() or "available") if name in found else "not implemented for this operation"
            for name in BACKENDS
        }
    return table
