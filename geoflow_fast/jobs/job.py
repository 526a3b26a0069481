"""Long computations over many rows, a block at a time, into one Parquet file: what a kill leaves behind is continued.

Finished blocks wait in a folder beside the output, which appears whole at the end. A job is known by its `facts`:
results are a function of them alone, so blocks of equal facts fit together and the output of equal facts is finished.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.distributed import ALONE, World
from geoflow_fast.runtime.files import LOCK_FILE, contents_of, locked, read_json, write_atomic, write_json
from geoflow_fast.runtime.interrupt import StopOnInterrupt
from geoflow_fast.runtime.parquet import DAMAGED, Columns, write_columns
from geoflow_fast.runtime.progress import Advance, progress_bar

FACTS_FILE = "job.json"


FACTS_KEY = b"geoflow_job"
"""Where a finished file keeps its facts: the metadata of its schema."""


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


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
        """Raises what `run` would raise before computing if something else is in the way."""
        if self.out.is_dir():
            raise IsADirectoryError(f"{self.out} is a folder; the output is a file")
        if overwrite:
            return
        if self.out.exists() and not self.finished():
            raise FileExistsError(f"{self.out} exists and is not the result of this job; move it, or ask to overwrite")
        left = self._facts_of_blocks()
        # guard: a job continues only its own blocks
        if left is not None and left != self.identity:
            refuse_other_job(self.folder, left, self.identity)

    def finished(self) -> bool:
        """Whether `out` is there already, made by a job with these facts."""
        import pyarrow.parquet

        if not self.out.is_file():
            return False
        try:
            with contents_of(self.out):
                metadata = pyarrow.parquet.read_schema(self.out).metadata or {}
                return FACTS_KEY in metadata and json.loads(metadata[FACTS_KEY]) == self.identity
        except ValueError:  # not Parquet, or without facts that can be read: the file is not ours
            return False

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
                    # guard: a signal ends a job after its block
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
        import pyarrow.parquet

        with contextlib.ExitStack() as closed:
            writer = None
            for rows, path in self._blocks():
                with contents_of(path, DAMAGED):
                    table = pyarrow.parquet.read_table(path)
                if table.num_rows != len(rows):
                    raise ValueError(f"{path} holds {table.num_rows} rows, not {len(rows)}; remove it and run again")
                if writer is None:
                    schema = table.schema.with_metadata({FACTS_KEY: json.dumps(self.identity).encode()})
                    writer = closed.enter_context(pyarrow.parquet.ParquetWriter(file, schema))
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


def quantiles(values: NDArray[Any]) -> dict[str, float]:
    """Of a column, by name ("5%", ...)."""
    return {f"{q:.0%}": float(np.quantile(values.astype(np.float64), q)) for q in QUANTILES}
