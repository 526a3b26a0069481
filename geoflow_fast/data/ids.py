"""Names of rows: strings, integers or UUIDs, one for each row of embeddings, which files and results show instead of
row numbers.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.data.rows import Index, load_npy
from geoflow_fast.runtime import checks, hashing, parquet
from geoflow_fast.runtime.files import contents_of
from geoflow_fast.runtime.words import words_of

ID_COLUMN = "id"
GIVEN = {b"geoflow_ids": b"given"}
"""Marks a file of ids that were given to rows, as opposed to the numbers that the rows had before."""
LARGEST_SIGNED = 2**63 - 1


@dataclass(frozen=True, eq=False, repr=False)
class Ids:
    """The ids of rows, in the order of the rows."""

    values: NDArray[Any]
    """[N]: int64 or, where an id needs it, uint64; or objects, all of which are strings or all UUIDs."""

    @classmethod
    def given(cls, values: object, count: int, what: str) -> Ids:
        """The ids of `count` rows from an array, a column of a frame or a sequence. A ValueError names the first that
        is neither a string nor an integer nor a UUID, or of another kind than the first."""
        checks.unmasked(values, what)
        listed = np.asarray(values, dtype=object) if isinstance(values, (list, tuple)) else checks.array(values, what)
        if listed.ndim != 1 or len(listed) != count:
            shape = f"{len(listed)}" if listed.ndim == 1 else f"an array {listed.shape} of"
            raise ValueError(f"{what}: {shape} ids, but there are {count} rows")
        if listed.dtype.kind in "iu":
            return cls(_as_integers(listed))
        if listed.dtype.kind == "U":
            return cls(listed.astype(object))
        if listed.dtype.kind not in "OT" or not len(listed):
            if not len(listed):
                return cls(listed.astype(np.int64))
            raise ValueError(f"{what}: ids must be strings, integers or UUIDs, got {listed.dtype}")
        return cls(_of_one_kind(listed.astype(object), what))

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        some = ", ".join(repr(value) for value in self.values[:3].tolist())
        return f"Ids({len(self)}: {some}{', ...' if len(self) > 3 else ''})"

    @property
    def is_integer(self) -> bool:
        """Whether the ids are integers."""
        return self.values.dtype.kind in "iu"

    @property
    def is_uuid(self) -> bool:
        """Whether the ids are UUIDs."""
        return self.values.dtype == object and bool(len(self)) and isinstance(self.values[0], uuid.UUID)

    def of(self, rows: Index) -> NDArray[Any]:
        """The ids of rows of any shape. Where there is no row (-1) the id is None."""
        missing = rows < 0
        if not missing.any():
            return self.values[rows]
        ids = self.values[np.maximum(rows, 0)].astype(object)
        ids[missing] = None
        return ids

    def column(self, rows: Index) -> Any:
        """The ids of `rows`, [n] or [n, k], as an Arrow array, or one of lists, whose type is the same for all rows."""
        import pyarrow

        ids = self.of(rows).reshape(-1)
        if self.is_integer:
            flat = pyarrow.array(ids, pyarrow.from_numpy_dtype(self.values.dtype))
        elif self.is_uuid and all(value is None for value in ids):
            flat = pyarrow.nulls(len(ids), pyarrow.uuid())
        else:
            flat = parquet.of_objects(ids)
        return flat if rows.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])

    def rows(self, ids: NDArray[Any], name: str) -> Index:
        """The numbers of the rows that have these `ids` [m]; a ValueError names one that no row has, or several.
        Ids of different kinds are compared as text."""
        as_text = not self.is_integer or ids.dtype.kind not in "iu"
        known, wanted = (words_of(x) if as_text else x for x in (self.values, ids))
        order = np.argsort(known, kind="stable")
        ranked = known[order]
        again = ranked[1:] == ranked[:-1]
        if again.any():
            raise ValueError(f"{name}: two rows have the id {ranked[1:][again].tolist()[0]!r}, so it names neither")
        position = np.searchsorted(ranked, wanted).clip(max=len(ranked) - 1)
        unknown = ranked[position] != wanted
        if unknown.any():
            raise ValueError(f"{name}: no row has the id {wanted[unknown].tolist()[0]!r}")
        return order[position].astype(np.int64)

    def digest(self) -> str:
        """A hash of all ids and their types."""
        return hashing.digest([self.values])

    def save(self, path: Path, rows: Index, *, are_given: bool) -> None:
        """Writes the ids of `rows` as a Parquet file with one column; `are_given` unless they are only row numbers."""
        metadata = GIVEN if are_given else None
        parquet.write_columns(path, {ID_COLUMN: self.column(rows)}, len(rows), metadata)


def row_numbers(count: int) -> Ids:
    """The ids of rows that have no others."""
    return Ids(np.arange(count))


def stored_ids(path: Path, count: int) -> Ids | None:
    """The ids in a file of `Ids.save`; None without one, or if it only holds row numbers."""
    if not path.is_file() or parquet.metadata_of(path).items() & GIVEN.items() != GIVEN.items():
        return None
    return open_ids(path, count, "rows")


def open_ids(path: Path, count: int, what: str) -> Ids:
    """Reads the ids of `count` rows of `what`: a `.npy` file of integers or strings, a `.txt` file with an id on each
    line, or a Parquet file with a column `id`, or a single one, which may hold UUIDs; `file.parquet:column` names
    another."""
    values = _read(path)
    if values.ndim != 1 or len(values) != count:
        shape = f"{len(values)}" if values.ndim == 1 else f"an array {values.shape} of"
        raise ValueError(f"{path} holds {shape} ids, but there are {count} {what}")
    if values.dtype.kind not in "iuUO":
        raise ValueError(f"{path} must hold integers, strings or UUIDs, one for each of the {what}, got {values.dtype}")
    return Ids.given(values, count, str(path))


def _as_integers(values: NDArray[Any]) -> NDArray[Any]:
    """int64, or uint64 for numbers beyond it, as hashes often are."""
    too_large = values.dtype.kind == "u" and len(values) and int(values.max()) > LARGEST_SIGNED
    return values.astype(np.uint64 if too_large else np.int64)


def _of_one_kind(values: NDArray[Any], what: str) -> NDArray[Any]:
    """Objects that are all strings, all UUIDs or all integers; the latter become an array of integers."""
    kind = next((kind for kind in (str, uuid.UUID, int) if isinstance(values[0], (kind, np.integer))), None)
    if isinstance(values[0], np.integer):
        kind = int
    for row, value in enumerate(values):
        right = isinstance(value, (int, np.integer)) if kind is int else kind is not None and isinstance(value, kind)
        if not right or isinstance(value, bool):
            raise ValueError(
                f"{what}: ids must be all strings, all integers or all UUIDs, but that of row {row} is {value!r}"
            )
        if kind is str:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{what}: the id of row {row} is {value!r}, which is not text") from None
    if kind is not int:
        return values
    try:
        dtype = np.uint64 if max(values) > LARGEST_SIGNED else np.int64
        return np.array([int(value) for value in values], dtype)
    except OverflowError:
        raise ValueError(f"{what}: integers must fit into 64 bits, all with a sign or all without") from None


def _read(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        return load_npy(path)
    if path.suffix == ".txt":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist or is not a file")
        with contents_of(path, "not a text file in UTF-8"):
            lines = path.read_bytes().decode("utf-8").split("\n")
            return np.array([line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])], dtype=object)
    file, _, column = str(path).partition(".parquet")
    parquet_file = Path(f"{file}.parquet")
    if not parquet_file.is_file():
        raise FileNotFoundError(f"{path} is no file of ids: a .npy, .txt or .parquet file, or file.parquet:column")
    names = parquet.column_names(parquet_file)
    name = column.removeprefix(":") or (ID_COLUMN if ID_COLUMN in names or len(names) != 1 else names[0])
    if name not in names:
        raise ValueError(f"{parquet_file} has no column {name!r}; its columns are {', '.join(names)}")
    return parquet.read_columns(parquet_file, [name])[name]
