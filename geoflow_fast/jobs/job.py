"""Long computations over many rows, block by block, into one Parquet file.

Finished blocks are kept in a folder beside the output, so that a killed job can be continued; the output appears whole
at the end. A job is identified by its `facts`, which hold everything that the results depend on. Blocks of equal facts
therefore fit together, and an output of equal facts is finished.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.ids import Ids
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.runtime.files import (
    LOCK_FILE,
    contents_of,
    locked,
    read_json,
    refuse_foreign,
    write_atomic,
    write_json,
)
from geoflow_fast.runtime.interrupt import stop_on_interrupt
from geoflow_fast.runtime.parquet import read_table, write_columns
from geoflow_fast.runtime.progress import Advance, progress_bar

FACTS_FILE = "job.json"
FACTS_KEY = b"geoflow_job"
"""The key under which the schema metadata of a finished file holds the facts of its job."""
BLOCK = r"\d{12}\.parquet"
OWN = rf"{re.escape(FACTS_FILE)}|{re.escape(LOCK_FILE)}|{BLOCK}"
"""What is in the folder of the blocks of a job, as patterns. Nothing else is ever removed."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

Compute = Callable[[range, Advance], Mapping[str, Any]]
"""Returns the columns of a block of rows, which are tensors or arrays, and moves the progress bar meanwhile."""


class Job:
    """A computation whose result is the Parquet file `out` with `rows` rows, made `block_rows` at a time.

    `facts` are values that JSON can hold: settings, and digests of the inputs. If `numbered` is the name of a column,
    that column comes first and holds the numbers of the rows, or the `ids` that they have. `about` is what the file
    says about itself beside its facts.
    """

    def __init__(
        self,
        out: Path,
        rows: int,
        block_rows: int,
        facts: Mapping[str, Any],
        numbered: str | None = None,
        ids: Ids | None = None,
        about: Mapping[bytes, bytes] | None = None,
    ) -> None:
        if rows < 1 or block_rows < 1:
            raise ValueError(f"rows={rows} and block_rows={block_rows} must be at least 1")
        self.out, self.rows, self.block_rows, self.numbered, self.ids = out, rows, block_rows, numbered, ids
        # Facts are kept in the form in which JSON gives them back, to be compared with those of a file.
        whole = {**facts, "rows": rows, "block_rows": block_rows}
        if ids is not None:
            whole["ids"] = ids.digest()
        self.facts: dict[str, Any] = json.loads(json.dumps(whole, allow_nan=False))
        self.folder = out.with_name(f"{out.name}.blocks")
        self.about = dict(about or {})

    def check(self, *, overwrite: bool = False) -> None:
        """Raises an error if something that is not part of this job is in the way, as `run` does before it computes."""
        if self.out.is_dir():
            raise IsADirectoryError(f"{self.out} is a folder; the output is a file")
        self._refuse_foreign()
        if overwrite:
            return
        if self.out.exists() and not self.finished():
            raise FileExistsError(f"{self.out} exists and is not the result of this job; move it, or ask to overwrite")
        left = read_facts(self.folder / FACTS_FILE)
        if left is not None and left != self.facts:
            refuse_other_job(self.folder, left, self.facts)

    def finished(self) -> bool:
        """Tells whether `out` exists and was made by a job with these facts."""
        return self.left()[0] == self.facts

    def left(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The facts of the jobs that made `out` and the blocks beside it; None where there are none."""
        return self._facts_of_out(), read_facts(self.folder / FACTS_FILE)

    def _facts_of_out(self) -> dict[str, Any] | None:
        import pyarrow.parquet

        if not self.out.is_file():
            return None
        try:
            with contents_of(self.out):
                metadata = pyarrow.parquet.read_schema(self.out).metadata or {}
                facts = json.loads(metadata[FACTS_KEY]) if FACTS_KEY in metadata else None
        except ValueError:  # not Parquet, or without facts that can be read: the file is not ours
            return None
        return facts if isinstance(facts, dict) else None

    def run(
        self,
        compute: Compute,
        *,
        overwrite: bool = False,
        unit: str = "rows",
        progress: bool | None = None,
        world: World = ALONE,
        together: bool = False,
    ) -> None:
        """Makes the file by calling `compute(rows, advance)` for every block that no earlier run with the same facts
        has finished. A finished file is left as it is.

        `overwrite` replaces a file, and drops blocks, of other facts. `progress` shows a bar; the default is to show it
        on a terminal. The ranks of a `world` share a file system and the work: each takes the next block when it is
        free. With `together`, all ranks compute every block and the main rank writes it. After Ctrl-C the current block
        is completed; a second Ctrl-C stops at once.
        """
        self.check(overwrite=overwrite)
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder) if world.is_main else contextlib.nullcontext():
            if not world.share(world.is_main and self.finished()):
                # The facts are written before the first block and removed after the last one.
                if world.is_main and read_facts(self.folder / FACTS_FILE) != self.facts:
                    self._remove_blocks()
                    write_json(self.folder / FACTS_FILE, self.facts)
                missing = set(world.share([rows.start for rows, path in self._blocks() if not path.is_file()]))
                if read_facts(self.folder / FACTS_FILE) != self.facts:
                    raise OSError(errno.ENOENT, f"rank {world.rank} does not see {self.folder}; all ranks need to")
                shown = progress if world.is_main else False
                self._compute_blocks(compute, missing, unit, world, shown=shown, together=together or world.size == 1)
                world.barrier()
                if world.is_main:
                    write_atomic(self.out, self._join_blocks)
            if world.is_main:
                self._remove_blocks()
                for name in (FACTS_FILE, LOCK_FILE):
                    (self.folder / name).unlink(missing_ok=True)
                try:
                    self.folder.rmdir()
                except OSError as error:
                    # Once the lock file is gone, another run may enter the folder, see that the job is finished and
                    # remove the folder itself.
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                        raise
        world.barrier()

    def _blocks(self) -> Iterator[tuple[range, Path]]:
        for first in range(0, self.rows, self.block_rows):
            rows = range(first, min(first + self.block_rows, self.rows))
            yield rows, self.folder / f"{first:012d}.parquet"

    def _compute_blocks(
        self, compute: Compute, starts: set[int], unit: str, world: World, *, shown: bool | None, together: bool
    ) -> None:
        """Computes and writes the blocks that begin at the rows `starts`."""
        missing = [(rows, path) for rows, path in self._blocks() if rows.start in starts]
        done = self.rows - sum(len(rows) for rows, _ in missing)
        shown_rows = 0
        with progress_bar(self.rows, done, unit, shown=shown) as advance, stop_on_interrupt("block") as stop:
            for number in range(len(missing)) if together else world.claims(len(missing)):
                stopping = world.any(stop.asked) if together else stop.asked
                if stopping:
                    raise KeyboardInterrupt
                rows, path = missing[number]
                columns = compute(rows, advance if together else lambda _: None)
                if world.is_main or not together:
                    arrays: dict[str, Any] = {}
                    if self.numbered is not None:
                        numbers = np.arange(rows.start, rows.stop)
                        arrays[self.numbered] = numbers if self.ids is None else self.ids.column(numbers)
                    for name, column in columns.items():
                        arrays[name] = column.cpu().numpy() if isinstance(column, Tensor) else column
                    write_columns(path, arrays, len(rows))
                if not together:  # the bar shows the rows of all ranks
                    computed = world.add_up("rows", len(rows))
                    advance(computed - shown_rows)
                    shown_rows = computed

    def _join_blocks(self, file: BinaryIO) -> None:
        """Writes one row group per block, so that only one block is in memory."""
        import pyarrow.parquet

        with contextlib.ExitStack() as closed:
            writer = None
            for rows, path in self._blocks():
                table = read_table(path, as_stored=True)
                if table.num_rows != len(rows):
                    raise ValueError(f"{path} holds {table.num_rows} rows, not {len(rows)}; remove it and run again")
                if writer is None:
                    schema = table.schema.with_metadata({**self.about, FACTS_KEY: json.dumps(self.facts).encode()})
                    writer = closed.enter_context(pyarrow.parquet.ParquetWriter(file, schema))
                writer.write_table(table.replace_schema_metadata(writer.schema.metadata))

    def _refuse_foreign(self) -> None:
        """Raises a FileExistsError if the folder of the blocks holds files that no job made."""
        refuse_foreign(self.folder, OWN)
        file = self.folder / FACTS_FILE
        # A run that starts writes the facts before the blocks, and one that ends removes them after the blocks: another
        # rank or process may do either here.
        if not file.exists() and self._files(BLOCK) and not file.exists():
            raise FileExistsError(errno.EEXIST, f"{self.folder} holds blocks, but no job made them; move it")

    def _files(self, pattern: str) -> list[Path]:
        return [path for path in self.folder.glob("*") if re.fullmatch(pattern, path.name)]

    def _remove_blocks(self) -> None:
        for path in self._files(rf"{BLOCK}|\.(?:{BLOCK}|{re.escape(FACTS_FILE)})\.\d{{12}}\.tmp"):
            path.unlink()


def read_facts(path: Path) -> dict[str, Any] | None:
    """Returns the facts that a job left in a JSON file: None without a file, empty facts if it cannot be read."""
    if not path.is_file():
        return None
    try:
        facts = read_json(path)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def refuse_other_job(folder: Path, left: Mapping[str, Any], wanted: Mapping[str, Any]) -> NoReturn:
    """Raises a ValueError that says in which facts the job that left its work in `folder` differs from this one."""
    changed = sorted(key for key in {*left, *wanted} if left.get(key) != wanted.get(key))
    if changed == ["format"]:
        raise ValueError(
            f"{folder} holds blocks of another release, which computes other results; finish the job with that one, "
            "choose another output, or ask to overwrite"
        )
    raise ValueError(
        f"{folder} holds blocks of another job, which differs in {', '.join(changed)}; "
        "finish that one, choose another output, or ask to overwrite"
    )


def quantiles(values: NDArray[Any]) -> dict[str, float]:
    """Returns quantiles of a column by name: "5%", "25%", ..."""
    return {f"{q:.0%}": float(np.quantile(values.astype(np.float64), q)) for q in QUANTILES}
