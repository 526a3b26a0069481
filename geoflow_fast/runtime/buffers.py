"""Large results without fresh memory: a fresh page costs several times as much as the write that fills it."""

from __future__ import annotations

import functools
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_BYTES = 1 << 20
"""Smaller tensors come from the allocator, which reuses memory of this size by itself."""
MOST_IDLE_BYTES = 1 << 28
"""Memory that waits for its next use at most."""
_ALIGNMENT = 64


class BufferPool:
    """Memory of tensors that nobody holds any more, by size. A tensor's memory returns when its storage dies, whichever
    views of it were made meanwhile."""

    def __init__(self) -> None:
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self._idle_bytes = 0
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

    @property
    def idle_bytes(self) -> int:
        """Memory that waits for its next use."""
        return self._idle_bytes

    def _take(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            blocks = self._idle.get(size + _ALIGNMENT)
            if blocks:
                self._idle_bytes -= size + _ALIGNMENT
                return blocks.pop()
        return np.empty(size + _ALIGNMENT, np.uint8)

    def _give(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._idle_bytes + block.nbytes <= MOST_IDLE_BYTES:
                self._idle.setdefault(block.nbytes, []).append(block)
                self._idle_bytes += block.nbytes


@functools.cache
def buffers() -> BufferPool:
    """The pool of this process."""
    return BufferPool()
