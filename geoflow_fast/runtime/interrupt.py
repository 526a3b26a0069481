"""A Ctrl-C that lets the current unit of work finish."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any


class StopOnInterrupt:
    """While this context is active, the first Ctrl-C sets `asked`, so that the caller can stop after the current `unit`
    of work. A second one interrupts at once."""

    SAME_SECONDS = 2.0
    """torchrun passes on a Ctrl-C that the terminal has already sent to every process. Within this time, a second
    signal is taken for the same Ctrl-C."""

    def __init__(self, unit: str) -> None:
        self.asked = False
        self._since = 0.0
        self._unit = unit
        self._previous: Any = None

    def __enter__(self) -> StopOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            if time.monotonic() - self._since < self.SAME_SECONDS and "WORLD_SIZE" in os.environ:
                return
            raise KeyboardInterrupt
        self.asked, self._since = True, time.monotonic()
        if sys.stderr.isatty():  # written around the buffer, which the interrupted code may be writing to
            os.write(2, f"\nstopping after this {self._unit}; press Ctrl-C again to stop at once\n".encode())

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
