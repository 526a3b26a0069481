"""How far a long computation is: a live line on a terminal or in a notebook, elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[[int], object]
"""Moves a progress bar by the number of rows that were done since the last call."""
Announce = Callable[[str], object]
"""Tells the user in a sentence what is being done."""

LOG_SECONDS = 30.0
"""Seconds between plain lines, which go to a log or to a script's standard error."""
BAR_WIDTH = 8
"""Columns of the bar: the words beside it matter more, and both fit 80 columns."""


class ProgressLine:
    """The progress of `total` rows or steps, called `unit`, of which `done` are done already.

    `shown`: True for a live line, False for nothing. None for a live line where one can be seen, and elsewhere, in
    logs, a plain line now and then.
    """

    def __init__(self, total: int, done: int, unit: str, *, shown: bool | None = None, label: str = "") -> None:
        self.total, self.done, self.unit, self.label = total, done, unit, label
        self.start, self.began = done, time.monotonic()
        self.told = self.began
        self.logged = shown is None and not (sys.stderr.isatty() or in_notebook())
        self.bar: Progress | None = None
        if shown is not False and not self.logged:
            self.bar = self._live_bar()
            self.task = self.bar.add_task("", total=total, completed=done, words=unit)
            self.bar.start()

    def _live_bar(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        label = [TextColumn(self.label)] if self.label else []
        columns = (*label, BarColumn(BAR_WIDTH), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
        # A block or a step may take minutes, so the time left is estimated over the last hour.
        console = Console(stderr=True)
        return Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=3600)

    def update(self, done: int, words: str = "") -> None:
        """Shows that `done` rows are done, with `words` about them."""
        self.done = done
        words = f"{words} {self._rate()}".strip()
        if self.bar is not None:
            self.bar.update(self.task, completed=done, words=words)
        elif self.logged and time.monotonic() - self.told >= LOG_SECONDS:
            self.told = time.monotonic()
            left = clock_time((self.total - done) * self._seconds_each())
            sys.stderr.write(f"{self.label} {done:,} of {self.total:,}, {words}, {left} left\n".lstrip())
            sys.stderr.flush()

    def say(self, words: str) -> None:
        """Shows a line of its own: above a live line, or in the log."""
        if self.bar is not None:
            self.bar.console.print(words, highlight=False, soft_wrap=True)
        elif self.logged:
            sys.stderr.write(f"{words}\n")
            sys.stderr.flush()

    def _seconds_each(self) -> float:
        """Seconds per row since this line began; 0 before the first."""
        return (time.monotonic() - self.began) / (self.done - self.start) if self.done > self.start else 0.0

    def _rate(self) -> str:
        seconds = self._seconds_each()
        return f"{1 / seconds:.3g}{self.unit and ' '}{self.unit}/s" if seconds > 0 else self.unit

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()


@contextlib.contextmanager
def progress_bar(total: int, done: int, unit: str, *, shown: bool | None) -> Iterator[Advance]:
    """Shows the progress while a block of code runs, and yields the function that moves it."""
    line = ProgressLine(total, done, unit, shown=shown)
    try:
        yield lambda rows: line.update(line.done + rows)
    finally:
        line.close()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook that can show a live line although it has no terminal."""
    if "IPython" not in sys.modules or not importlib.util.find_spec("ipywidgets"):
        return False
    from rich.console import Console

    return Console().is_jupyter


def duration(seconds: float) -> str:
    """A time in words, rounded up."""
    if seconds < 60:
        return f"{max(10, 10 * math.ceil(seconds / 10))} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def clock_time(seconds: float) -> str:
    """A time as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
