"""Columns of Parquet and CSV files, read within bounds on memory, and written to Parquet atomically.

pyarrow takes a while to import, so each function imports it when it is called.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import unpacked
from geoflow_fast.runtime.files import contents_of, need_file, write_atomic

PREFIXED_BYTES = 1 << 26
"""Bytes that a batch of strings which share prefixes may take; only then is their length known."""
BATCH_ROWS = 1 << 16
DAMAGED = "damaged or not Parquet"

Columns = Mapping[str, Any]
"""Arrays of equal length by name, in the order of the file's columns; [rows, k] becomes a column of lists. Arrays of
Arrow are written as they are."""


def column_names(path: Path) -> list[str]:
    """Returns the names of the columns of a Parquet file."""
    import pyarrow.parquet

    with contents_of(path, DAMAGED):
        return list(pyarrow.parquet.read_schema(path).names)


def column_types(path: Path) -> list[tuple[str, str]]:
    """Returns the names of the columns of a Parquet file, each with the name of its type."""
    import pyarrow.parquet

    need_file(path)
    with contents_of(path, DAMAGED):
        return [(field.name, str(field.type)) for field in pyarrow.parquet.read_schema(path)]


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


def read_table(path: Path, names: list[str] | None = None, *, as_stored: bool = False) -> Any:
    """Returns the named columns of a Parquet file, or all of them, as an Arrow table.

    All files of Parquet are read here or by `batches`, within the bounds of `unpacked`: a ValueError names a file, and
    the column, that would unpack to far more memory than a file of its size can honestly hold, and text that is not
    UTF-8. Strings stay in the dictionaries of the file unless `as_stored` is set, so that equal ones are stored once.
    """
    import pyarrow

    with _opened(path) as source, contents_of(path, DAMAGED):
        file, texts, budget = _within_bounds(source, names)
        if any(text.longest for text in texts.values()):
            parts = [pyarrow.Table.from_batches([batch]) for batch in _batches(file, names, texts, budget)]
        elif any(text.nested for text in texts.values()):  # pyarrow joins no lists of indices into several dictionaries
            parts = [file.read_row_group(group, columns=names) for group in range(file.num_row_groups)]
        else:
            parts = []
        table = pyarrow.concat_tables(parts) if parts else file.read(columns=names)
        for name, column in zip(table.column_names, table.columns):
            budget.take_text(name, unpacked.text_bytes(check_values(column, f"column {name!r}")))
        return as_text(table) if as_stored else table


def batches(path: Path, names: list[str]) -> Iterator[Any]:
    """Yields the named columns of a Parquet file in batches of rows, within the same bounds as `read_table`."""
    with _opened(path) as source, contents_of(path, DAMAGED):
        file, texts, budget = _within_bounds(source, names)
        text = dict.fromkeys(names, 0)
        first = 0
        for batch in _batches(file, names, texts, budget):
            for name, column in zip(batch.schema.names, batch.columns):
                text[name] += unpacked.text_bytes(check_values(column, f"column {name!r}", first))
                budget.take_text(name, text[name])
            first += len(batch)
            yield batch


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file. It is opened once, so that what is checked is what is read."""
    import pyarrow

    need_file(path)
    with contents_of(path, DAMAGED):
        source = pyarrow.OSFile(str(path))
    with source:
        yield source


def _within_bounds(source: Any, names: list[str] | None) -> tuple[Any, dict[str, unpacked.Text], unpacked.Budget]:
    """The Parquet file in `source`, after its pages have been taken from a budget; how its strings are to be read."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(source)
    budget = unpacked.Budget(source.size())
    texts = unpacked.parquet_columns(source, file.metadata, file.schema_arrow, names, budget)
    kept = [name for name, text in texts.items() if text.in_dictionary]
    return pyarrow.parquet.ParquetFile(source, metadata=file.metadata, read_dictionary=kept), texts, budget


def _batches(
    file: Any, names: list[str] | None, texts: dict[str, unpacked.Text], budget: unpacked.Budget
) -> Iterator[Any]:
    """Batches of so many rows that none takes much, whatever its strings share."""
    largest = max([text.longest for text in texts.values()], default=0)
    long = [path for path, text in texts.items() if text.longest]
    rows = max(1, min(BATCH_ROWS, PREFIXED_BYTES // max(1, largest)))
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(rows, row_groups=[group], columns=names):
            for name, column in zip(batch.schema.names, batch.columns):
                if any(f"{path}.".startswith(f"{name}.") for path in long):
                    budget.take(name, column.nbytes)
            yield batch


def as_text(table: Any) -> Any:
    """The same table with strings in place of indices into dictionaries."""
    import pyarrow

    def plain(kind: Any) -> Any:
        if pyarrow.types.is_dictionary(kind):
            return kind.value_type
        if not _is_list(kind):
            return kind
        inner = kind.value_field.with_type(plain(kind.value_type))
        if pyarrow.types.is_fixed_size_list(kind):
            return pyarrow.list_(inner, kind.list_size)
        return pyarrow.large_list(inner) if pyarrow.types.is_large_list(kind) else pyarrow.list_(inner)

    fields = [field.with_type(plain(field.type)) for field in table.schema]
    return table.cast(pyarrow.schema(fields, table.schema.metadata))


def check_values(column: Any, name: str, first: int = 0) -> Any:
    """Returns a column of Arrow whose offsets, indices and text are valid; a ValueError names the row that is not text
    in UTF-8. `first`: the number of its first row."""
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        for row in range(len(column)):
            try:
                column.slice(row, 1).to_pylist()
            except UnicodeDecodeError:
                raise ValueError(f"{name}: row {first + row} is not text in UTF-8") from error
        raise ValueError(f"{name} is damaged: {error}") from error
    return column


def as_array(column: Any) -> NDArray[Any]:
    """The values of an Arrow column: an array, or objects where they are strings, UUIDs, lists or missing. Equal words
    of a dictionary are one object."""
    import pyarrow.compute

    if isinstance(column, pyarrow.ChunkedArray):
        if pyarrow.types.is_dictionary(column.type) or _holds_objects(column.type):
            parts = [as_array(chunk) for chunk in column.chunks]
            return np.concatenate(parts) if parts else np.empty(0, object)
        return np.asarray(column.to_numpy())
    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        words = np.empty(len(column.dictionary) + 1, object)  # the last one, None, is that of missing values
        words[:-1] = as_array(column.dictionary)
        found: NDArray[Any] = words[np.asarray(column.indices.cast("int64").fill_null(len(words) - 1))]
        return found
    if not _holds_objects(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if not _is_list(kind):
        return _objects([None if value is None else _plain(value) for value in column.to_pylist()])
    values = as_array(column.flatten())
    ends = np.cumsum(np.asarray(pyarrow.compute.list_value_length(column).fill_null(0), np.int64))
    missing = np.asarray(column.is_null())
    starts = [0, *ends[:-1].tolist()]
    return _objects([None if gone else values[low:high] for gone, low, high in zip(missing, starts, ends.tolist())])


def _objects(values: list[Any]) -> NDArray[Any]:
    """An array of these objects, which may be sequences themselves."""
    objects = np.empty(len(values), object)
    for row, value in enumerate(values):
        objects[row] = value
    return objects


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    )


def _holds_objects(kind: Any) -> bool:
    """Whether values are UUIDs or bytes, or lists of these or of words of a dictionary."""
    import pyarrow

    inner = kind.value_type if _is_list(kind) else kind
    if _is_list(kind) and pyarrow.types.is_dictionary(inner):
        return True
    return isinstance(inner, pyarrow.BaseExtensionType) or str(inner).startswith(("binary", "fixed_size_binary"))


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
