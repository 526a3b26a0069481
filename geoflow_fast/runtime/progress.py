"""A progress bar with a rate and the time left."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

Advance = Callable[[int], object]
"""Moves a progress bar by the number of rows that were done since the last call."""
Announce = Callable[[str], object]
"""Tells the user in a sentence what is being done."""


@contextlib.contextmanager
def progress_bar(total: int, done: int, unit: str, *, shown: bool) -> Iterator[Advance]:
    """Shows a live line on the terminal with a rate and the time left, and yields the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.3g} {unit}/s" if task.speed else unit)

    columns = (BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    # A block may take minutes, so the rate is estimated over the last hour (or the last thousand moves of the bar).
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown, speed_estimate_period=3600)
    task = bar.add_task("", total=total, completed=done)
    with bar:
        yield functools.partial(bar.advance, task)
