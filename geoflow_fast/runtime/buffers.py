"""Large tensors without fresh memory: a fresh page costs several times as much as the write that fills it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_BYTES = 1 << 20
"""Smaller tensors come from the allocator, which reuses memory of this size by itself."""
MOST_IDLE_BYTES = 1 << 28
"""Memory that waits for its next use at most."""
_ALIGNMENT = 64

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""What `mallopt` of the C library calls them: how much freed memory it keeps, and from which size on a block is none of
its own, but is asked of the system and given back each time."""
LARGE_BLOCK, ADAPTED_BLOCK = 1 << 30, 32 << 20
"""Values of the second: glibc before 2.35 takes no more than the latter, to which it adapts by itself once large blocks
have been freed."""
MOST_KEPT, ADAPTED_KEPT = 2**31 - 1, 64 << 20
"""The same of the first."""
USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


class BufferPool:
    """Memory of tensors that nobody holds any more, by size. A tensor's memory returns when its storage dies, whichever
    views of it were made meanwhile."""

    def __init__(self) -> None:
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self.idle_bytes = 0
        """Memory that waits for its next use."""
        self._lock = threading.RLock()  # a finalizer may run while the same thread is in here

    def empty_like(self, x: Tensor) -> Tensor:
        """A contiguous tensor of the shape and dtype of `x`, on the CPU, with any values."""
        size = x.numel() * x.element_size()
        if x.device.type != "cpu" or size < LEAST_BYTES or type(x) is not Tensor or x.is_meta:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        block = self._take(size)
        first = -block.ctypes.data % _ALIGNMENT
        loan = block[first : first + size]  # an object of its own, which the storage keeps alive
        weakref.finalize(loan, self._give, block).atexit = False
        return torch.from_numpy(loan).view(x.dtype).view(x.shape)

    def _take(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            blocks = self._idle.get(size + _ALIGNMENT)
            if blocks:
                self.idle_bytes -= size + _ALIGNMENT
                return blocks.pop()
        return np.empty(size + _ALIGNMENT, np.uint8)

    def _give(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            if self.idle_bytes + block.nbytes <= MOST_IDLE_BYTES:
                self._idle.setdefault(block.nbytes, []).append(block)
                self.idle_bytes += block.nbytes


@functools.cache
def buffers() -> BufferPool:
    """The pool of this process."""
    return BufferPool()


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, the C library keeps what is freed for the next allocation. Else each step of a training asks the system
    for the memory that the last one has given back. At the end it is given back at once.

    Only glibc can be told so. Nothing changes where the user has set one of its variables.
    """
    library = _glibc()
    if library is None or any(name in os.environ for name in USER_VARIABLES):
        yield
        return
    keepers = _keepers()
    keepers.begin(library)
    try:
        yield
    finally:
        keepers.end(library)


class _Keepers:
    """How many at once want freed memory to be kept. The last one gives it back."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def begin(self, library: ctypes.CDLL) -> None:
        with self._lock:
            self._count += 1
            self._tell(library, LARGE_BLOCK, MOST_KEPT)

    def end(self, library: ctypes.CDLL) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._tell(library, ADAPTED_BLOCK, ADAPTED_KEPT)
                library.malloc_trim(0)

    @staticmethod
    def _tell(library: ctypes.CDLL, block: int, kept: int) -> None:
        if not library.mallopt(M_MMAP_THRESHOLD, block):
            library.mallopt(M_MMAP_THRESHOLD, ADAPTED_BLOCK)
        library.mallopt(M_TRIM_THRESHOLD, kept)


@functools.cache
def _keepers() -> _Keepers:
    """Those of this process."""
    return _Keepers()


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    return (
        library if all(hasattr(library, name) for name in ("mallopt", "malloc_trim", "gnu_get_libc_version")) else None
    )
