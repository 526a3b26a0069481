"""Triton's interpreter made strict: stray addresses are errors, fresh memory is NaN, and bfloat16 is bfloat16.

Run in a process of its own: `TRITON_INTERPRET=1 pytest tests/gpu_emulated/interpreter`, which is what `make test` does.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("set TRITON_INTERPRET=1 before python starts to run tests/gpu_emulated/interpreter")


class Memory:
    """The elements of the tensors that the running kernel was given: all that it may touch."""

    def __init__(self) -> None:
        self.tensors: list[tuple[int, int, np.ndarray]] = []

    def set(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = []
        for x in tensors:
            if x.numel() == 0:
                continue
            span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
            owned = torch.zeros(span, dtype=torch.bool)
            owned.as_strided(x.shape, x.stride()).fill_(True)
            self.tensors.append((x.data_ptr(), x.element_size(), owned.numpy()))

    def check(self, pointers: np.ndarray, mask: np.ndarray, what: str) -> None:
        touched = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
        allowed = np.zeros(touched.shape, dtype=bool)
        for base, size, owned in self.tensors:
            element, remainder = np.divmod(touched - base, size)
            within = (element >= 0) & (element < owned.size) & (remainder == 0)
            allowed[within] |= owned[element[within]]
        if not allowed.all():
            raise IndexError(f"{what} touches {int((~allowed).sum())} addresses outside the kernel's tensors")


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every active lane of every load, store and atomic must point at an element of a tensor argument."""
    memory, builder = Memory(), interpreter.InterpreterBuilder
    take_arguments = interpreter.GridExecutor._init_args_hst
    load, store, update = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def register(self, args, kwargs):
        host_args, host_kwargs = take_arguments(self, args, kwargs)
        memory.set([x for x in (*host_args, *host_kwargs.values()) if isinstance(x, torch.Tensor)])
        return host_args, host_kwargs

    def checked_load(self, pointers, mask, *rest):
        memory.check(pointers.data, mask.data, "a load")
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        memory.check(pointers.data, mask.data, "a store")
        return store(self, pointers, value, mask, *rest)

    def checked_update(self, op, pointers, value, mask, *rest):
        memory.check(pointers.data, mask.data, "an atomic")
        return update(self, op, pointers, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", register)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", checked_update)


@pytest.fixture(autouse=True)
def _poison() -> None:
    """torch.empty holds NaN (and the largest integers), so that an output that was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _bits_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float_to_bits(x: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(x.shape)


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 in dot and truncates in casts; a GPU does neither."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def exact_cast(self, src, dst_type, *_rounding):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return handle(_bits_to_float(src.data), target)
        if source == tl.float32 and target == tl.bfloat16:
            return handle(_float_to_bits(src.data), target)
        return cast(self, src, dst_type)

    def exact_dot(self, a, b, d, *rest):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (handle(_bits_to_float(x.data), tl.float32) for x in (a, b))
        return dot(self, a, b, d, *rest)

    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(builder, name, exact_cast)
    monkeypatch.setattr(builder, "create_dot", exact_dot)
