"""Columns of Parquet files, read within bounds on memory and written atomically."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from geoflow_fast.runtime.files import write_atomic

PARQUET_BYTES, PARQUET_FACTOR = 1 << 28, 1000
"""A Parquet file is not read if its columns would take more memory than both of these, the latter times its size."""


Columns = Mapping[str, NDArray[Any]]
"""Arrays of equal length by name, in the order of the file's columns; [rows, k] becomes a column of lists."""


def column_names(path: Path) -> list[str]:
    """Of a Parquet file."""
    with _named(path):
        return list(parquet_module().read_schema(path).names)


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
