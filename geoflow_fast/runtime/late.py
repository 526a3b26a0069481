"""Numbers of a device that are looked at when they have arrived, so that nothing waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


class LateValues(Generic[K]):
    """Small tensors that are on their way from a device to the host, each with a note of what it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[tuple[K, Tensor, Any]] = deque()

    def put(self, note: K, x: Tensor) -> None:
        """Sends `x` to the host."""
        host = x.detach().to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        self._pending.append((note, host, event))

    def arrived(self, spared: int | None = None) -> Iterator[tuple[K, Tensor]]:
        """Yields the tensors that have arrived, in the order in which they were sent. All but the last `spared` of them
        are waited for; by default none is."""
        while self._pending:
            note, host, event = self._pending[0]
            if event is not None and not event.query():
                if spared is None or len(self._pending) <= spared:
                    return
                event.synchronize()
            self._pending.popleft()
            yield note, host
