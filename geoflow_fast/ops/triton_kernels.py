"""When Triton kernels can serve, and how operations reach them without importing triton first."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from geoflow_fast.ops import dispatch, extension
from geoflow_fast.ops.dispatch import Backend
from geoflow_fast.runtime.extras import needs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST_ROW = 4096
"""Entries of the widest row that one program holds in registers; plain torch serves wider ones."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors and without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def devices() -> tuple[str, ...]:
    """Device types of the tensors that kernels take."""
    return ("cpu", "cuda") if interpreted() else ("cuda",)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def missing() -> str | None:
    """Why Triton kernels cannot run here; None if they can."""
    if not _installed():
        return needs("this backend", "triton, which is not installed", "gpu")
    if not interpreted() and not torch.cuda.is_available():
        return "no CUDA device; TRITON_INTERPRET=1 runs the kernels slowly on CPU tensors"
    return None


def backend(module: str, function: str, dtypes: tuple[torch.dtype, ...] = DTYPES, widest: int | None = None) -> Backend:
    """The backend "triton" of an operation: `function` of `geoflow_fast.kernels.<module>`, imported when it is first
    called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"geoflow_fast.kernels.{module}"), function)(*args, **kwargs)

    return Backend(call, devices, missing, dtypes, widest)


def fused_operation(
    module: str,
    name: str,
    reference: Callable[..., Any],
    cpu: Callable[..., Any] | Backend,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    widest: int | None = None,
    **declared: Any,
) -> Callable[..., Any]:
    """An operation with the C++ backend `cpu`, which takes float32 unless it says what it takes, and the Triton backend
    of its own name, which takes rows up to `widest`; `declared` is the rest of what `dispatch.operation` takes."""
    triton = backend(module, name, dtypes, widest)
    compiled = cpu if isinstance(cpu, Backend) else extension.backend(cpu)
    return dispatch.operation(name, reference, cpu=compiled, triton=triton, **declared)
