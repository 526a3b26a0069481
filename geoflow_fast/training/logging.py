"""What a training run tells about itself: records of metrics and a live line on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from geoflow_fast.runtime.files import truncate_jsonl
from geoflow_fast.runtime.progress import LOG_SECONDS, ProgressLine, duration

METRICS_FILE = "metrics.jsonl"
Log = Callable[[dict[str, float]], Any]
"""Gets every record of metrics: the number of the step, "step", and values by name."""
MEASURED_STEPS = 50
"""So many steps of a run tell how long the rest will take; the first of them, which warms up, does not count."""


class Metrics:
    """Writes metrics to a JSONL file, if there is a folder, and passes the same records to `log`, if there is one."""

    def __init__(self, folder: Path | None, step: int, log: Log | None = None) -> None:
        self.path = None if folder is None else folder / METRICS_FILE
        self.log = log
        if self.path is not None:
            # The steps after the checkpoint are taken again, and their lines written again.
            truncate_jsonl(self.path, lambda line: line["step"] <= step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one record of metrics."""
        record = {"step": step, **values}
        if self.path is not None:
            with self._name_file(), open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if self.log is not None:
            self.log(record)

    def sync(self) -> None:
        """Brings the lines to disk. After a power cut the file must hold all the steps that the checkpoint counts."""
        if self.path is not None and self.path.is_file():
            with self._name_file(), open(self.path, "rb") as file:
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def _name_file(self) -> Iterator[None]:
        """Adds the name of the file to an error of the disk."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"could not write {self.path} ({error.strerror})") from error


class TrainingLine:
    """The progress of a run: steps, the latest losses, rate, time left, and the coupling's share of a step's time.

    After the first steps, one line gives the expected time of a run that takes longer than a moment."""

    def __init__(self, total: int, start: int, *, shown: bool | None) -> None:
        self.line = ProgressLine(total, start, "", shown=shown, label="training")
        self.latest: dict[str, float] = {}
        self.steps, self.start, self.warm = total - start, start, 0.0

    def update(self, step: int, values: dict[str, float]) -> None:
        """Shows the step and the latest of all metrics so far."""
        self.latest |= values
        shown = (("loss", "loss", "{:.4g}"), ("val", "val_loss", "{:.4g}"), ("OT", "coupling_share", "{:.0%}"))
        words = [f"{name} {form.format(self.latest[key])}" for name, key, form in shown if key in self.latest]
        self.line.update(step, " ".join(words))
        taken = step - self.start
        if taken == 1:
            self.warm = time.monotonic()
        elif taken == MEASURED_STEPS:
            self._say_expected((time.monotonic() - self.warm) / (taken - 1))

    def _say_expected(self, seconds: float) -> None:
        """Validation may stop the run early, so the time for all its steps is the longest."""
        if self.steps * seconds >= LOG_SECONDS:
            expected, rate = duration(self.steps * seconds), f"{1 / seconds:.3g} steps/s"
            first = f"measured over the first {MEASURED_STEPS}"
            self.line.say(f"expected: at most {expected} for {self.steps:,} steps ({rate}, {first})")

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self.line.close()


def share_of_time(part: float, whole: float) -> float:
    """Returns `part` / `whole`, or 0 if the clock stood still: nothing can be said about a time that did not pass."""
    return part / whole if whole > 0 else 0.0


class StepRate:
    """Steps per second since the previous call, or 0 if the clock stood still."""

    def __init__(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def __call__(self, step: int) -> float:
        before = self.step, self.time
        self.step, self.time = step, time.perf_counter()
        return share_of_time(self.step - before[0], self.time - before[1])
