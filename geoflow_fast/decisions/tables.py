"""Tables of numbers as users have them, numpy, pandas, polars, torch, pyarrow or a Parquet file, in and out again.

No library is imported for this that the caller has not imported, except pyarrow for a Parquet file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks

Array = NDArray[Any]
Table = Any
"""A numpy array or a sequence, a frame or a series of pandas or polars, a tensor, a pyarrow table, or the path of a
Parquet file."""


def _untouched(values: Array, names: Sequence[str] | None) -> Array:  # noqa: ARG001
    return values


@dataclass(frozen=True)
class Read:
    """The values of a table, and how to give results back as the same kind of table."""

    values: Array
    columns: tuple[str, ...] | None
    """The names of a frame's columns."""
    back: Callable[[Array, Sequence[str] | None], Any]
    """Turns an array [n] or [n, m] into a table of the caller's kind, given names of its columns."""


def read(table: Table, name: str) -> Read:
    """Reads a table [n] or [n, m]. One column of lists is read as [n, length]."""
    if isinstance(table, (str, os.PathLike)):
        return _of_parquet(checks.path(table, name))
    for library, reader in (("pandas", _of_pandas), ("polars", _of_polars), ("pyarrow", _of_pyarrow)):
        module = sys.modules.get(library)
        if module is not None and (stored := reader(table, module, name)) is not None:
            return stored
    if checks.is_tensor(table):
        return _of_torch(table, name)
    if hasattr(table, "toarray"):  # a sparse matrix of scipy
        raise TypeError(f"{name} is a sparse matrix; lists are dense: pass {name}.toarray()")
    return Read(checks.array(table, name), None, _untouched)


def _of_torch(tensor: Any, name: str) -> Read:
    torch = sys.modules["torch"]

    def back(values: Array, names: Sequence[str] | None) -> Any:  # noqa: ARG001
        return torch.from_numpy(np.ascontiguousarray(values)).to(tensor.device)

    return Read(checks.array(tensor, name), None, back)


def _of_pandas(table: Any, pandas: Any, name: str) -> Read | None:
    if isinstance(table, pandas.Series):
        values, columns = _stacked(table.to_numpy(), name), None
    elif isinstance(table, pandas.DataFrame):
        listed = table.shape[1] == 1 and table.dtypes.iloc[0].kind == "O"
        values = _stacked(table.iloc[:, 0].to_numpy(), name) if listed else table.to_numpy()
        columns = None if listed else tuple(table.columns)
    else:
        return None

    def back(result: Array, names: Sequence[str] | None) -> Any:
        if result.ndim == 1:
            return pandas.Series(result, index=table.index, name=names[0] if names else None)
        return pandas.DataFrame(result, index=table.index, columns=list(names) if names else None)

    return Read(values, columns, back)


def _of_polars(table: Any, polars: Any, name: str) -> Read | None:
    if isinstance(table, polars.Series):
        values, columns = _stacked(table.to_numpy(), name), None
    elif isinstance(table, polars.DataFrame):
        listed = table.width == 1 and table.dtypes[0].is_nested()
        values = _stacked(table.to_series().to_numpy(), name) if listed else table.to_numpy()
        columns = None if listed else tuple(table.columns)
    else:
        return None

    def back(result: Array, names: Sequence[str] | None) -> Any:
        if result.ndim == 1:
            return polars.Series(names[0] if names else "value", result)
        return polars.DataFrame(result, schema=list(names) if names else None)

    return Read(values, columns, back)


def _of_pyarrow(table: Any, pyarrow: Any, name: str) -> Read | None:
    if not isinstance(table, pyarrow.Table):
        return None
    listed = table.num_columns == 1 and pyarrow.types.is_nested(table.schema.types[0])
    arrays = [column.to_numpy() for column in table.columns]
    values = _stacked(arrays[0], name) if listed else np.column_stack(arrays) if arrays else np.empty((0, 0))

    def back(result: Array, names: Sequence[str] | None) -> Any:
        columns = result[:, None] if result.ndim == 1 else result
        titles = names or [f"value_{number}" for number in range(columns.shape[1])]
        return pyarrow.table(dict(zip(titles, columns.T)))

    return Read(values, None if listed else tuple(table.column_names), back)


def _of_parquet(path: Path) -> Read:
    """The table of a Parquet file; results are tables of pyarrow."""
    import pyarrow

    from geoflow_fast.runtime.parquet import read_columns

    columns = {
        title: column.tolist() if column.dtype == object else column for title, column in read_columns(path).items()
    }
    stored = _of_pyarrow(pyarrow.table(columns), pyarrow, str(path))
    assert stored is not None
    return stored


def _stacked(column: Array, name: str) -> Array:
    """A column of numbers [n] as it is, one of lists as an array [n, length]."""
    if column.dtype != object or not len(column) or not isinstance(column[0], (list, tuple, np.ndarray)):
        return column
    lengths = {len(row) for row in column}
    if len(lengths) > 1:
        raise ValueError(f"{name} has lists of {min(lengths)} to {max(lengths)} scores; all must have the same length")
    return np.stack([np.asarray(row) for row in column])
