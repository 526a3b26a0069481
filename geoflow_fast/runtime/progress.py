"""A progress bar with rate and time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Advance = Callable[[int], object]
"""Tells the progress bar of rows done since the last call."""


@contextlib.contextmanager
def progress_bar(total: int, done: int, unit: str, *, shown: bool) -> Iterator[Advance]:
    """A live line on the terminal with rate and time left; yields the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.3g} {unit}/s" if task.speed else f"{unit}")

    columns = (BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    # Blocks may take minutes: the estimate looks back an hour, and at most at the bar's last thousand moves.
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown, speed_estimate_period=3600)
    task = bar.add_task("", total=total, completed=done)
    with bar:
        yield lambda rows: bar.advance(task, rows)
