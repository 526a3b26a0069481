"""Metrics and progress of a training run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from geoflow_fast.runtime.files import truncate_jsonl

METRICS_FILE, TENSORBOARD_FOLDER = "metrics.jsonl", "tensorboard"


class Metrics:
    """Writes what happens to JSONL and, if asked, TensorBoard; nothing without a folder."""

    def __init__(self, folder: Path | None, step: int, *, tensorboard: bool) -> None:
        self.path = None if folder is None else folder / METRICS_FILE
        self.board = None
        if self.path is not None:
            # Lines after the checkpoint will be written again.
            # guard: repeated steps are logged once
            truncate_jsonl(self.path, lambda line: line["step"] <= step)
        if tensorboard:
            if folder is None:
                raise ValueError("tensorboard=True needs out=, the folder to write to")
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("tensorboard=True needs the tensorboard package: pip install tensorboard") from error
            self.board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics."""
        if self.path is not None:
            with self._named(), open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Brings the lines to disk: after a power cut the checkpoint must not know of steps that they do not."""
        if self.path is not None and self.path.is_file():
            with self._named(), open(self.path, "rb") as file:
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Adds the name of the file to what is wrong with the disk."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"could not write {self.path} ({error.strerror})") from error

    def close(self) -> None:
        """Flushes TensorBoard."""
        if self.board is not None:
            self.board.close()


class Progress:
    """Live line on the terminal: step, losses, rate, time left, and the coupling's time as a share of the step's."""

    def __init__(self, total: int, start: int, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self.bar = RichProgress(*columns, console=Console(stderr=True), disable=not shown)
        self.task = self.bar.add_task("training", total=total, completed=start, text="")
        self.bar.start()

    def update(self, step: int, values: dict[str, float]) -> None:
        """Shows the latest metrics."""
        losses = " ".join(
            f"{key.removeprefix('loss_')} {values[key]:.4g}" for key in sorted(values) if key.startswith("loss_")
        )
        val = f" val {values['val_loss']:.4g}" if "val_loss" in values else ""
        rate = f" {values.get('steps_per_second', 0):.2f}/s"
        share = f" OT {values['coupling_share']:.0%}" if "coupling_share" in values else ""
        self.bar.update(self.task, completed=step, text=losses + val + rate + share)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self.bar.stop()


class Pace:
    """Steps per second since it was last asked."""

    def __init__(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def __call__(self, step: int) -> float:
        before = self.step, self.time
        self.step, self.time = step, time.perf_counter()
        return (self.step - before[0]) / (self.time - before[1])
