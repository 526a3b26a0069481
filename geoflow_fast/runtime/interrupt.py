"""A Ctrl-C that lets the current unit of work finish."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

SAME_SECONDS = 2.0
"""torchrun passes on a Ctrl-C that the terminal has already sent to every process. Within this time, a second signal is
taken for the same Ctrl-C."""


@dataclass
class Interrupt:
    """`asked` becomes true when the user asks to stop."""

    asked: bool = False


@contextlib.contextmanager
def stop_on_interrupt(unit: str) -> Iterator[Interrupt]:
    """While this context is active, the first Ctrl-C sets `asked`, so that the caller can stop after the current `unit`
    of work. A second one interrupts at once."""
    interrupt, since = Interrupt(), 0.0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal since
        if interrupt.asked:
            if time.monotonic() - since < SAME_SECONDS and "WORLD_SIZE" in os.environ:
                return
            raise KeyboardInterrupt
        interrupt.asked, since = True, time.monotonic()
        if sys.stderr.isatty():  # written around the buffer, which the interrupted code may be writing to
            os.write(2, f"\nstopping after this {unit}; press Ctrl-C again to stop at once\n".encode())

    in_main = threading.current_thread() is threading.main_thread()  # the only thread that may handle signals
    previous = signal.signal(signal.SIGINT, handle) if in_main else None
    try:
        yield interrupt
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
