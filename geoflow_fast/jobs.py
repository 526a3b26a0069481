"""Long computations over many rows, a block at a time, into one Parquet file: what a kill leaves behind is continued.

Finished blocks wait in a folder beside the output, which appears whole at the end. A job is known by its `facts`:
results are a function of them alone, so blocks of equal facts fit together and the output of equal facts is finished.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.checkpoint import LOCK_FILE, bytes_of, locked, read_json, write_atomic, write_json
from geoflow_fast.distributed import ALONE, World

FACTS_FILE = "job.json"
FACTS_KEY = b"geoflow_job"
"""Where a finished file keeps its facts: the metadata of its schema."""

PARQUET_BYTES, PARQUET_FACTOR = 1 << 28, 1000
"""A Parquet file is not read if its columns would take more memory than both of these, the latter times its size."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

Columns = Mapping[str, NDArray[Any]]
"""Arrays of equal length by name, in the order of the file's columns; [rows, k] becomes a column of lists."""

Advance = Callable[[int], object]
"""Tells the progress bar of rows done since the last call."""


@dataclass(frozen=True)
class Job:
    """A Parquet file `out` with one row per item of `rows`, made `block_rows` at a time.

    `facts` can be written as JSON and hold everything the result depends on: settings, and digests of the inputs.
    """

    out: Path
    rows: int
    block_rows: int
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.rows < 1 or self.block_rows < 1:
            raise ValueError(f"rows={self.rows} and block_rows={self.block_rows} must be at least 1")

    @property
    def folder(self) -> Path:
        """Where finished blocks wait."""
        return self.out.with_name(f"{self.out.name}.blocks")

    @property
    def identity(self) -> dict[str, Any]:
        """The facts as they come back from JSON, with what the blocks are cut by."""
        return as_json({**self.facts, "rows": self.rows, "block_rows": self.block_rows})

    def check(self, *, overwrite: bool = False) -> None:
        """Raises what `run` would raise before computing: no Parquet here, or something else is in the way."""
        parquet_module()
        if self.out.is_dir():
            raise IsADirectoryError(f"{self.out} is a folder; the output is a file")
        if overwrite:
            return
        if self.out.exists() and not self.finished():
            raise FileExistsError(f"{self.out} exists and is not the result of this job; move it, or ask to overwrite")
        left = self._facts_of_blocks()
        if left is not None and left != self.identity:
            refuse_other_job(self.folder, left, self.identity)

    def finished(self) -> bool:
        """Whether `out` is there already, made by a job with these facts."""
        if not self.out.is_file():
            return False
        try:
            metadata = parquet_module().read_schema(self.out).metadata or {}
            return FACTS_KEY in metadata and json.loads(metadata[FACTS_KEY]) == self.identity
        except (ValueError, RecursionError):  # not Parquet, or with facts that are none: some other file
            return False
        except OSError as error:
            if error.errno is not None:
                raise
            return False  # pyarrow's word for a damaged one

    def run(
        self,
        compute: Callable[[range, Advance], Columns],
        *,
        overwrite: bool = False,
        unit: str = "rows",
        progress: bool | None = None,
        world: World = ALONE,
        together: bool = False,
    ) -> None:
        """Makes the file: `compute(rows, advance)` returns the columns of a block of rows, and is not asked again for
        blocks that an earlier run with the same facts finished. A finished file is left as it is.

        `overwrite` replaces a file, and drops blocks, that other facts made. `progress`: show a bar; by default on a
        terminal. The ranks of a `world` take blocks in turn, whoever is free the next; with `together` all of them
        compute every block, and the main rank writes it. The folder of `out` is one that all of them see. Ctrl-C is
        heeded after the current block, a second one at once.
        """
        self.check(overwrite=overwrite)
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        shown = world.is_main and (sys.stderr.isatty() if progress is None else progress)
        with locked(self.folder) if world.is_main else contextlib.nullcontext():
            if not world.share(world.is_main and self.finished()):
                if world.is_main:
                    self._claim_folder()
                missing = world.share([rows.start for rows, path in self._blocks() if not path.is_file()])
                if self._facts_of_blocks() != self.identity:
                    raise OSError(errno.ENOENT, f"rank {world.rank} does not see {self.folder}; all ranks need to")
                self._compute_blocks(compute, set(missing), unit, world, shown=shown, together=together)
                world.barrier()
                if world.is_main:
                    write_atomic(self.out, self._join_blocks)
            if world.is_main:
                self._remove_folder()
        world.barrier()

    def _blocks(self) -> Iterator[tuple[range, Path]]:
        for first in range(0, self.rows, self.block_rows):
            rows = range(first, min(first + self.block_rows, self.rows))
            yield rows, self.folder / f"{first:012d}.parquet"

    def _facts_of_blocks(self) -> dict[str, Any] | None:
        """Of the job that left blocks behind, as `read_facts` finds them."""
        return read_facts(self.folder / FACTS_FILE)

    def _claim_folder(self) -> None:
        """Leaves only blocks of this job in the folder. The facts are written first and removed last."""
        if self._facts_of_blocks() != self.identity:
            self._remove_blocks()
            write_json(self.folder / FACTS_FILE, self.identity)

    def _compute_blocks(
        self,
        compute: Callable[[range, Advance], Columns],
        starts: set[int],
        unit: str,
        world: World,
        *,
        shown: bool,
        together: bool,
    ) -> None:
        """Computes and writes the blocks that begin at the rows `starts`."""
        missing = [(rows, path) for rows, path in self._blocks() if rows.start in starts]
        done = self.rows - sum(len(rows) for rows, _ in missing)
        with progress_bar(self.rows, done, unit, shown=shown) as advance, StopOnInterrupt("block") as stop:
            if together or world.size == 1:
                for rows, path in missing:
                    if world.any(stop.asked):
                        raise KeyboardInterrupt
                    columns = compute(rows, advance)
                    if world.is_main:
                        write_columns(path, columns, len(rows))
                return
            told = 0
            for number in world.claims(len(missing)):
                if stop.asked:
                    raise KeyboardInterrupt
                rows, path = missing[number]
                write_columns(path, compute(rows, lambda _: None), len(rows))
                made = world.add_up("rows", len(rows))  # by all ranks
                advance(made - told)
                told = made

    def _join_blocks(self, file: BinaryIO) -> None:
        """One row group per block, so that memory is that of a block."""
        parquet = parquet_module()
        with contextlib.ExitStack() as closed:
            writer = None
            for rows, path in self._blocks():
                with _named(path):
                    table = parquet.read_table(path)
                if table.num_rows != len(rows):
                    raise ValueError(f"{path} holds {table.num_rows} rows, not {len(rows)}; remove it and run again")
                if writer is None:
                    schema = table.schema.with_metadata({FACTS_KEY: json.dumps(self.identity).encode()})
                    writer = closed.enter_context(parquet.ParquetWriter(file, schema))
                writer.write_table(table.replace_schema_metadata(writer.schema.metadata))

    def _remove_blocks(self) -> None:
        for path in [*self.folder.glob("*.parquet"), *self.folder.glob(".*.tmp")]:
            path.unlink()

    def _remove_folder(self) -> None:
        self._remove_blocks()
        for name in (FACTS_FILE, LOCK_FILE):
            (self.folder / name).unlink(missing_ok=True)
        try:
            self.folder.rmdir()
        except OSError as error:
            # Between the lock and the folder another run may come in, find the job finished and remove both itself.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise


class StopOnInterrupt:
    """While active, the first Ctrl-C asks for a stop (`asked`) after the current `unit` of work; the second interrupts
    at once."""

    SAME_SECONDS = 2.0
    """torchrun passes a Ctrl-C on that the terminal has sent to all: within this time it is the same one."""

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
        if sys.stderr.isatty():  # past its buffer, which the interrupted code may be writing to
            os.write(2, f"\nstopping after this {self._unit}; once more stops at once\n".encode())

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


def column_names(path: Path) -> list[str]:
    """Of a Parquet file."""
    with _named(path):
        return list(parquet_module().read_schema(path).names)


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as they come back from JSON, to be compared with those of a file."""
    found: dict[str, Any] = json.loads(json.dumps(dict(facts), allow_nan=False))
    return found


def read_facts(path: Path) -> dict[str, Any] | None:
    """Facts that a job left in a JSON file; None without one, empty if it cannot be read."""
    if not path.is_file():
        return None
    try:
        found = read_json(path)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def refuse_other_job(folder: Path, left: Mapping[str, Any], wanted: Mapping[str, Any]) -> NoReturn:
    """Says in what the job whose work lies in `folder` differs from the one wanted."""
    changed = sorted(key for key in {*left, *wanted} if left.get(key) != wanted.get(key))
    raise ValueError(
        f"{folder} holds blocks of another job, which differs in {', '.join(changed)}; "
        "finish that one, choose another output, or ask to overwrite"
    )


def read_columns(path: Path, names: list[str] | None = None) -> dict[str, NDArray[Any]]:
    """The named columns of a Parquet file, or all."""
    with _named(path):
        check_parquet_size(path, names)
        table = parquet_module().read_table(path, columns=names)
    return {name: table[name].to_numpy() for name in table.column_names}


def check_parquet_size(path: Path, names: list[str] | None) -> None:
    """ValueError if the file says that its columns take far more memory than a file of its size can honestly hold."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
    facts = parquet_module().read_metadata(path)
    columns = facts.num_columns if names is None else len(names)
    groups = [facts.row_group(k) for k in range(facts.num_row_groups)]
    unpacked = max(8 * facts.num_rows * columns, sum(group.total_byte_size for group in groups))
    if unpacked > max(PARQUET_BYTES, PARQUET_FACTOR * path.stat().st_size):
        raise ValueError(f"its {path.stat().st_size} bytes claim to unpack to {unpacked}")


def quantiles(values: NDArray[Any]) -> dict[str, float]:
    """Of a column, by name ("5%", ...)."""
    return {f"{q:.0%}": float(np.quantile(values.astype(np.float64), q)) for q in QUANTILES}


def digest(parts: Iterable[Tensor | NDArray[Any]]) -> str:
    """SHA-256 over types, shapes and contents: equal only for equal arrays in equal order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype}{tuple(part.shape)}".encode())
        found.update(bytes_of(part) if isinstance(part, Tensor) else np.ascontiguousarray(part).data)
    return found.hexdigest()


def fingerprint(facts: Mapping[str, Any]) -> str:
    """SHA-256 of facts that can be written as JSON, whatever their order."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True, allow_nan=False).encode()).hexdigest()


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


def write_columns(path: Path, columns: Columns, rows: int) -> None:
    """Writes columns of so many `rows` as a Parquet file, atomically."""
    parquet = parquet_module()
    import pyarrow

    arrays = {}
    for name, column in columns.items():
        if column.ndim not in (1, 2) or len(column) != rows:
            raise ValueError(f"column {name} has shape {column.shape} in a block of {rows} rows")
        flat = pyarrow.array(column.reshape(-1))
        width = column.shape[1] if column.ndim == 2 else None
        arrays[name] = flat if width is None else pyarrow.FixedSizeListArray.from_arrays(flat, width)
    table = pyarrow.table(arrays)
    write_atomic(path, lambda file: parquet.write_table(table, file))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the name of the file to whatever is wrong with it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # of the system, not of the contents
            raise
        raise ValueError(f"{path} is damaged or not what its name says: {error}") from error
    except (ValueError, LookupError, NotImplementedError) as error:  # what pyarrow raises about contents
        raise ValueError(f"{path} is damaged or not what its name says: {error}") from error


def parquet_module() -> Any:
    """pyarrow.parquet, or a word on how to get it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet files need pyarrow: pip install 'geoflow_fast[eval]'") from error
    return pyarrow.parquet
