"""Columns of Parquet and CSV files, read within bounds on memory, and written to Parquet atomically.

pyarrow takes a while to import, so each function imports it when it is called.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime.files import contents_of, need_file, write_atomic

PARQUET_BYTES, PARQUET_FACTOR = 1 << 28, 1000
"""A Parquet file is not read if its columns would take more memory than `PARQUET_BYTES` and more than `PARQUET_FACTOR`
times its size."""
DAMAGED = "damaged or not Parquet"

Columns = Mapping[str, Any]
"""Arrays of equal length by name, in the order of the file's columns; [rows, k] becomes a column of lists. Arrays of
Arrow are written as they are."""


def column_names(path: Path) -> list[str]:
    """Returns the names of the columns of a Parquet file."""
    import pyarrow.parquet

    with contents_of(path, DAMAGED):
        return list(pyarrow.parquet.read_schema(path).names)


def metadata_of(path: Path) -> dict[bytes, bytes]:
    """Returns what a Parquet file says about itself beside its columns."""
    import pyarrow.parquet

    with contents_of(path, DAMAGED):
        return dict(pyarrow.parquet.read_schema(path).metadata or {})


def read_columns(path: Path, names: list[str] | None = None) -> dict[str, NDArray[Any]]:
    """Returns the named columns of a Parquet file, or all of them, as arrays."""
    table = read_table(path, names)
    with contents_of(path, DAMAGED):
        return {name: as_array(table[name]) for name in table.column_names}


def read_table(path: Path, names: list[str] | None = None) -> Any:
    """Returns the named columns of a Parquet file, or all of them, as an Arrow table.

    A file that claims to unpack to far more memory than a file of its size can honestly hold is a ValueError.
    """
    import pyarrow.parquet

    need_file(path)
    with contents_of(path, DAMAGED):
        metadata = pyarrow.parquet.read_metadata(path)
        columns = metadata.num_columns if names is None else len(names)
        group_bytes = sum(metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
        unpacked, size = max(8 * metadata.num_rows * columns, group_bytes), path.stat().st_size
        if unpacked > max(PARQUET_BYTES, PARQUET_FACTOR * size):
            raise ValueError(f"its {size} bytes claim to unpack to {unpacked}")
        return pyarrow.parquet.ParquetFile(path).read(columns=names)


def as_array(column: Any) -> NDArray[Any]:
    """The values of an Arrow column: an array, or objects where they are strings, UUIDs, lists or missing."""
    import pyarrow

    kind = column.type
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    inner = kind.value_type if is_list else kind
    holds_uuids = isinstance(inner, pyarrow.BaseExtensionType) or str(inner).startswith(("binary", "fixed_size_binary"))
    if not holds_uuids and not pyarrow.types.is_dictionary(kind):
        return np.asarray(column.to_numpy())
    values = [
        None if value is None else [_plain(x) for x in value] if is_list else _plain(value)
        for value in column.to_pylist()
    ]
    objects = np.empty(len(values), object)
    for row, value in enumerate(values):
        objects[row] = np.array(value, object) if is_list and value is not None else value
    return objects


def _plain(value: Any) -> Any:
    """Sixteen bytes as the UUID that they are; any other value as it is."""
    return uuid.UUID(bytes=value) if isinstance(value, bytes) and len(value) == 16 else value


def csv_names(path: Path) -> list[str]:
    """Returns the names of the columns of a CSV file, which its first line gives."""
    import pyarrow.csv

    with contents_of(path, "damaged or not CSV"), pyarrow.csv.open_csv(path) as reader:
        return list(reader.schema.names)


def read_csv(path: Path, names: list[str]) -> dict[str, NDArray[Any]]:
    """Returns the named columns of a CSV file."""
    import pyarrow.csv

    with contents_of(path, "damaged or not CSV"):
        table = pyarrow.csv.read_csv(path, convert_options=pyarrow.csv.ConvertOptions(include_columns=names))
    return {name: table[name].to_numpy() for name in table.column_names}


def of_objects(values: NDArray[Any]) -> Any:
    """UUIDs, integers or strings, some of which may be None, as an array of Arrow. Without a single value its type is
    that of strings, which a block of a file shares with the rest."""
    import pyarrow

    first = next((value for value in values if value is not None), "")
    if isinstance(first, uuid.UUID):
        stored = pyarrow.array([None if value is None else value.bytes for value in values], pyarrow.binary(16))
        return pyarrow.ExtensionArray.from_storage(pyarrow.uuid(), stored)
    if isinstance(first, int):
        return pyarrow.array(values)
    return pyarrow.array(values, pyarrow.string())


def write_columns(path: Path, columns: Columns, rows: int, metadata: Mapping[bytes, bytes] | None = None) -> None:
    """Writes columns of `rows` rows as a Parquet file, atomically. `metadata` is what it says about itself."""
    import pyarrow.parquet

    arrays = {}
    for name, column in columns.items():
        if isinstance(column, pyarrow.Array):
            arrays[name] = column
            continue
        if column.ndim not in (1, 2) or len(column) != rows:
            raise ValueError(f"column {name} has shape {column.shape} in a block of {rows} rows")
        flat = of_objects(column.reshape(-1)) if column.dtype == object else pyarrow.array(column.reshape(-1))
        arrays[name] = flat if column.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, column.shape[1])
    table = pyarrow.table(arrays, metadata=metadata)
    write_atomic(path, functools.partial(pyarrow.parquet.write_table, table))
