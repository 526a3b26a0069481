"""Judgements of relevance (qrels): which items are right for which queries, and how right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.data.rows import Index
from geoflow_fast.runtime import checks, parquet
from geoflow_fast.runtime.files import contents_of, need_file

TABLE = ("query", "item", "grade")
"""The columns of a file of judgements; without a column of grades all rows have grade 1."""


@dataclass(frozen=True)
class Qrels:
    """Judgements of pairs of a query and an item, one for each of m rows. Pairs without a row are not relevant.

    Arrays, tensors and sequences are taken and kept as arrays. A ValueError names the first row that is wrong.
    """

    query: Index
    """[m] int64, numbers of rows of the queries."""
    item: Index
    """[m] int64, numbers of rows of the gallery."""
    grade: NDArray[np.float64]
    """[m] float64, the larger the more relevant; an item is relevant if its grade is above 0."""

    def __post_init__(self) -> None:
        columns = {name: checks.array(getattr(self, name), name) for name in TABLE}
        rows = columns["query"].shape
        for name, column in columns.items():
            if column.ndim != 1 or column.shape != rows:
                raise ValueError(f"{name} must be one number for each row, {rows}, got shape {column.shape}")
            kinds = "iuf" if name == "grade" else "iu"
            if column.dtype.kind not in kinds and len(column):
                what = "numbers" if name == "grade" else "integers, numbers of rows"
                raise TypeError(f"{name} must be {what}, got {column.dtype}")
            kept = column.astype(np.float64 if name == "grade" else np.int64)
            wrong = ~np.isfinite(kept) if name == "grade" else kept < 0
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(f"{name} of row {row} is {column[row]}")
            object.__setattr__(self, name, kept)
        order = np.lexsort((self.item, self.query))
        again = (np.diff(self.query[order]) == 0) & (np.diff(self.item[order]) == 0)
        if again.any():
            row = int(order[1:][again].min())
            first = int(((self.query == self.query[row]) & (self.item == self.item[row])).argmax())
            raise ValueError(f"row {row} judges the query and the item of row {first} a second time")

    @classmethod
    def open(cls, path: str | Path) -> Qrels:
        """Reads a Parquet file, or a CSV file whose name ends in `.csv`, with the columns `query` and `item` and,
        unless all judged pairs are relevant, `grade`. Other columns are left alone."""
        path = checks.path(path, "path")
        columns = judged_columns(path)
        with contents_of(path, "no file of judgements"):
            return cls(**columns)

    def __len__(self) -> int:
        return len(self.query)

    def relevant(self, least: float | None = None) -> Qrels:
        """The judgements whose grade is above 0 or, if `least` is given, at least that, sorted by query and, within a
        query, best grades first."""
        enough = self.grade > 0 if least is None else self.grade >= checks.number(least, "least")
        order = np.lexsort((-self.grade, self.query))
        kept = order[enough[order]]
        return Qrels(self.query[kept], self.item[kept], self.grade[kept])


def judged_columns(path: Path) -> dict[str, NDArray[Any]]:
    """The columns `query`, `item` and `grade` of a Parquet or CSV file of judgements; the first two may hold ids."""
    need_file(path)
    is_csv = path.suffix.lower() == ".csv"
    names = parquet.csv_names(path) if is_csv else parquet.column_names(path)
    if missing := [name for name in TABLE[:2] if name not in names]:
        raise ValueError(f"{path} has no column {' and no column '.join(missing)}; its columns are {names}")
    wanted = [name for name in TABLE if name in names]
    columns = parquet.read_csv(path, wanted) if is_csv else parquet.read_columns(path, wanted)
    return {"grade": np.ones(len(columns["query"])), **columns}
