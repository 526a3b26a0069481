"""The device that a command or a call runs on: its choice, its clock, and how much it works on at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

GPU_ROWS_AT_ONCE = 32_768
"""Rows from which on the matrix products of a GPU are no faster."""
WORKING_SHARE = 0.5
"""Share of a GPU's spare memory that the rows of one call may take."""


def usable_device(name: str) -> torch.device:
    """Returns the device of that name, after using it once; "auto" is a GPU if there is one, otherwise the CPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def spare_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that nobody uses, with what torch holds in reserve for this process."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def rows_at_once(device: torch.device, row_bytes: float, on_cpu: int) -> int:
    """Rows of `row_bytes` each that are worked on together: `on_cpu` on a processor, whose caches they should fit into.
    On a GPU, up to 32,768, as many as half of its spare memory has room for; a power of two below that, so that calls
    have the same shapes, and a graph serves all of them, while the memory in use changes a little."""
    if device.type != "cuda":
        return on_cpu
    fitting = int(WORKING_SHARE * spare_memory(device) / row_bytes)
    return GPU_ROWS_AT_ONCE if fitting >= GPU_ROWS_AT_ONCE else 1 << max(0, fitting.bit_length() - 1)


def multiplies_in_tf32() -> bool:
    """Whether float32 products on GPUs may use TF32 inside."""
    return getattr(torch.backends.cuda.matmul, _tf32_setting()) in (True, "tf32")


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """Lets float32 products on GPUs use TF32 inside, in all threads. The setting is then what it was before."""
    matmul: Any = torch.backends.cuda.matmul
    name = _tf32_setting()
    before = getattr(matmul, name)
    if before in (True, "tf32"):
        yield
        return
    setattr(matmul, name, "tf32" if name == "fp32_precision" else True)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def _tf32_setting() -> str:
    """torch's name of the setting. From torch 2.9 on it is the first one, after whose use the second one raises."""
    return "fp32_precision" if hasattr(torch.backends.cuda.matmul, "fp32_precision") else "allow_tf32"


def clock(device: torch.device) -> float:
    """Seconds, as `time.perf_counter` counts them, once everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
