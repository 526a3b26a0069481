"""Names of rows: files of ids, one for each row of embeddings, and columns that show them instead of row numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.data.rows import Index, load_npy
from geoflow_fast.runtime import hashing, parquet
from geoflow_fast.runtime.files import contents_of

ID_COLUMN = "id"


@dataclass(frozen=True)
class Ids:
    """The ids of rows, in the order of the rows."""

    values: NDArray[Any]
    """[N], int64 or strings as objects."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_text(self) -> bool:
        """Whether the ids are strings."""
        return self.values.dtype == object

    def of(self, rows: Index) -> NDArray[Any]:
        """The ids of rows of any shape. Where there is no row (-1) an id is missing: None, or -1 among numbers."""
        ids = self.values[np.maximum(rows, 0)]
        ids[rows < 0] = None if self.is_text else -1
        return ids

    def rows(self, ids: NDArray[Any], name: str) -> Index:
        """The numbers of the rows that have these `ids` [m]; a ValueError names one that no row has, or several.
        Numbers and strings are compared as text."""
        as_text = self.is_text or ids.dtype.kind not in "iu"
        known, wanted = (x.astype(str).astype(object) if as_text else x for x in (self.values, ids))
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
        """A hash of all ids."""
        text = "\0".join(self.values).encode() if self.is_text else b""
        return hashing.digest([np.frombuffer(text, np.uint8) if self.is_text else self.values])


def open_ids(path: Path, count: int, what: str) -> Ids:
    """Reads the ids of `count` rows of `what`: a `.npy` file of integers or strings, a `.txt` file with an id on each
    line, or a Parquet file with a column `id`, or a single one; `file.parquet:column` names another."""
    values = _read(path)
    if values.ndim != 1 or len(values) != count:
        shape = f"{len(values)}" if values.ndim == 1 else f"an array {values.shape} of"
        raise ValueError(f"{path} holds {shape} ids, but there are {count} {what}")
    if values.dtype.kind in "iu":
        return Ids(values.astype(np.int64))
    if values.dtype.kind not in "UO" or not all(isinstance(value, str) for value in values.tolist()):
        raise ValueError(f"{path} must hold integers or strings, one for each of the {what}, got {values.dtype}")
    return Ids(values.astype(object))


def _read(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        return load_npy(path)
    if path.suffix == ".txt":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist or is not a file")
        with contents_of(path, "not a text file in UTF-8"):
            return np.array(path.read_text("utf-8").splitlines(), dtype=object)
    file, _, column = str(path).partition(".parquet")
    parquet_file = Path(f"{file}.parquet")
    if not parquet_file.is_file():
        raise FileNotFoundError(f"{path} is no file of ids: a .npy, .txt or .parquet file, or file.parquet:column")
    names = parquet.column_names(parquet_file)
    name = column.removeprefix(":") or (ID_COLUMN if ID_COLUMN in names or len(names) != 1 else names[0])
    if name not in names:
        raise ValueError(f"{parquet_file} has no column {name!r}; its columns are {', '.join(names)}")
    return parquet.read_columns(parquet_file, [name])[name]
