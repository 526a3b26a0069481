"""Embeddings in columns: Parquet and Arrow files, folders of them, datasets of Hugging Face, and frames in memory.

A column of embeddings holds a list of floating-point numbers in every row, all of one length. A column of ids may stand
beside it. Arrow files are memory-mapped and their numbers are not copied; Parquet is unpacked into memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.data.ids import ID_COLUMN, Ids
from geoflow_fast.data.rows import in_shard_order
from geoflow_fast.runtime import parquet, unpacked
from geoflow_fast.runtime.files import contents_of, need_file, read_json

ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
SUFFIXES = (".parquet", *ARROW_SUFFIXES)
ARROW_MAGIC = b"ARROW1\0\0"
ENCODERS_KEY, SIDES_KEY = b"geoflow_encoders", b"geoflow_sides"
"""Under these keys the schema of a table has the encoders of its columns of embeddings, and the names of its sides."""
DATASET_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""What `datasets` writes beside the Arrow files of a dataset, and of a set of splits."""


def located(path: Path) -> tuple[Path, str | None]:
    """The file or folder that a path names and, for `file.parquet:column`, the column."""
    before, colon, column = path.name.rpartition(":")
    if path.exists() or not colon or not before:
        return path, None
    return path.with_name(before), column


def is_table(path: Path) -> bool:
    """Whether a path is that of a Parquet or Arrow file, or of a folder of such files or of a dataset."""
    if path.is_dir():
        names = {DATASET_FILE, SPLITS_FILE}
        return not any(path.glob("*.npy")) and any(x.name in names or x.suffix in SUFFIXES for x in path.iterdir())
    return path.suffix.lower() in SUFFIXES


def open_table(path: Path, columns: Iterable[str] | None = None) -> Any:
    """The Arrow table of a file or folder, with these `columns` or with all."""
    import pyarrow

    wanted = None if columns is None else list(columns)
    if not path.is_dir():
        return _open_file(path, wanted)
    if (path / SPLITS_FILE).is_file():
        splits = read_json(path / SPLITS_FILE, "a list of splits").get("splits", [])
        raise ValueError(
            f"{path} holds the splits {', '.join(map(str, splits))} of a dataset; name one of these folders"
        )
    parts = [_open_file(file, wanted) for file in _files_of(path)]
    for part in parts[1:]:
        if part.schema.names != parts[0].schema.names:
            raise ValueError(
                f"{path}: its files differ in their columns, {part.schema.names} and {parts[0].schema.names}"
            )
    if (
        len({part.schema.remove_metadata() for part in parts}) > 1
    ):  # one file may hold in a dictionary what others spell
        parts = [parquet.as_text(part) for part in parts]
    return pyarrow.concat_tables(parts, promote_options="permissive")


def columns_of(path: Path) -> dict[str, Any]:
    """The names of the columns of a file or folder, with their Arrow types."""
    import pyarrow.parquet

    file = path if not path.is_dir() or (path / SPLITS_FILE).is_file() else _files_of(path)[0]
    if file.suffix.lower() == ".parquet":
        need_file(file)
        with contents_of(file, parquet.DAMAGED):
            return {field.name: field.type for field in pyarrow.parquet.read_schema(file)}
    return {field.name: field.type for field in open_table(file).schema}


def _files_of(folder: Path) -> list[Path]:
    """The files of a folder in the order of their rows: as a dataset lists them, or by the numbers at their end."""
    if (folder / DATASET_FILE).is_file():
        state = read_json(folder / DATASET_FILE, "the state of a dataset")
        with contents_of(folder / DATASET_FILE, "not the state of a dataset"):
            names = [str(entry["filename"]) for entry in state["_data_files"]]
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{folder / DATASET_FILE} names files outside its folder")
        return [folder / name for name in names]
    files = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES]
    if not files:
        raise FileNotFoundError(f"{folder} holds no Parquet or Arrow file")
    if len({path.suffix for path in files}) > 1:
        raise ValueError(f"{folder} holds files of several kinds; keep one of them")
    numbered = [path for path in files if re.search(r"\d", path.stem)]
    if len(files) > 1 and len(numbered) != len(files):
        raise ValueError(f"{folder}: the order of {files[0].name} and the others is not known, as they have no numbers")
    return in_shard_order(files, from_one=True)


def _open_file(path: Path, columns: list[str] | None) -> Any:
    """The table of one file. A file of Arrow is mapped; a ValueError names one whose compressed buffers or empty rows
    would unpack to far more than it holds, before they are unpacked."""
    if path.suffix.lower() == ".parquet":
        return parquet.read_table(path, columns)
    import pyarrow

    need_file(path)
    with contents_of(path, "damaged or not Arrow"):
        source = pyarrow.memory_map(str(path))
        # A file of Arrow is a stream, as `datasets` writes it, between its magic words and a list of its parts.
        begin = len(ARROW_MAGIC) if source.read(len(ARROW_MAGIC)) == ARROW_MAGIC else 0
        budget = unpacked.Budget(source.size())
        source.seek(begin)
        unpacked.arrow_messages(source, budget)
        source.seek(begin)
        table = pyarrow.ipc.open_stream(source).read_all()
        table = table if columns is None else table.select(columns)
        for name, column in zip(table.column_names, table.columns):
            parquet.check_values(column, f"column {name!r}")
            budget.take_text(name, unpacked.text_bytes(column))
    return table


def table_of(source: Any, name: str) -> Any:
    """The Arrow table of something in memory: a table, a dataset of Hugging Face, or a frame of pandas or polars."""
    import pyarrow

    kind = type(source).__module__.split(".")[0]
    if isinstance(source, pyarrow.Table):
        return source
    if kind == "datasets" and hasattr(source, "with_format") and hasattr(source, "__len__"):
        whole = source.with_format("arrow")[:]  # in the order that it has after a selection or a shuffle
        return whole if isinstance(whole, pyarrow.Table) else table_of(whole, name)
    if kind == "polars" and hasattr(source, "to_arrow"):
        return source.to_arrow()
    if kind == "pandas" and hasattr(source, "columns"):
        return pyarrow.Table.from_pandas(source, preserve_index=False)
    raise TypeError(
        f"{name} must be a path, a table of Arrow, a dataset that is not a stream, or a frame of pandas or polars, got "
        f"{type(source).__name__}"
    )


def embedding_column(types: dict[str, Any], wanted: str | None, name: str) -> str:
    """The column that holds embeddings: the `wanted` one, or the only one that does."""
    known = [column for column, kind in types.items() if _width_and_kind(kind) is not None]
    if wanted is not None:
        if wanted not in types:
            raise ValueError(f"{name} has no column {wanted!r}; its columns are {', '.join(types)}")
        if wanted not in known:
            raise ValueError(f"{name}: column {wanted!r} holds {types[wanted]}, not lists of floating-point numbers")
        return wanted
    if len(known) != 1:
        held = f"several columns of embeddings, {', '.join(known)}" if known else "no column of lists of numbers"
        raise ValueError(f"{name} has {held}; name one of {', '.join(types)}, as in file.parquet:COLUMN")
    return known[0]


def _width_and_kind(kind: Any) -> tuple[int | None, Any] | None:
    """The length of the lists of a column, None if they may differ, and what they hold; None for other columns."""
    import pyarrow

    plain = getattr(kind, "storage_type", kind)
    is_fixed = pyarrow.types.is_fixed_size_list(plain)
    if not (is_fixed or pyarrow.types.is_list(plain) or pyarrow.types.is_large_list(plain)):
        return None
    if not pyarrow.types.is_floating(plain.value_type):
        return None
    return plain.list_size if is_fixed else None, plain.value_type


def matrices_of(table: Any, column: str, name: str) -> list[NDArray[Any]]:
    """The embeddings of a column, [n, d] for each of its chunks, which share the memory of the table."""
    parts: list[NDArray[Any]] = []
    first = 0
    for chunk in table[column].chunks:
        if len(chunk):
            parts.append(_matrix_of(getattr(chunk, "storage", chunk), f"{name}: column {column!r}", first))
        first += len(chunk)
    return parts or [np.empty((0, 0), np.float32)]


def _matrix_of(chunk: Any, name: str, first: int) -> NDArray[Any]:
    import pyarrow.compute

    if chunk.null_count:
        row = first + int(np.asarray(chunk.is_null()).argmax())
        raise ValueError(f"{name} has no embedding in row {row}")
    lengths = np.asarray(pyarrow.compute.list_value_length(chunk))
    odd = lengths != lengths[0]
    if odd.any():
        row = int(odd.argmax())
        raise ValueError(f"{name} has {lengths[row]} numbers in row {first + row}, but {lengths[0]} in row {first}")
    values = chunk.flatten()
    if values.null_count:
        row = first + int(np.asarray(values.is_null()).argmax()) // int(lengths[0])
        raise ValueError(f"{name} lacks a number in row {row}")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(chunk), int(lengths[0]))


def ids_of(table: Any, column: str | None, name: str) -> Ids | None:
    """The ids in a column of a table; of the column `id`, if there is one and none is named."""
    if column is None and ID_COLUMN not in table.column_names:
        return None
    column = ID_COLUMN if column is None else column
    if column not in table.column_names:
        raise ValueError(f"{name} has no column {column!r}; its columns are {', '.join(table.column_names)}")
    values = table[column]
    if values.null_count:
        row = int(np.asarray(values.is_null()).argmax())
        raise ValueError(f"{name}: column {column!r} has no id in row {row}")
    name = f"{name}: column {column!r}"
    return Ids.given(parquet.as_array(parquet.check_values(values, name)), len(values), name)


def encoder_of(table: Any, column: str) -> Any:
    """What a table says about the encoder of one of its columns; None if it says nothing."""
    words = (table.schema.metadata or {}).get(ENCODERS_KEY)
    known = json.loads(words) if words else {}
    return known.get(column) if isinstance(known, dict) else None


def sides_of(table: Any) -> list[str] | None:
    """The names of the two sides of a table of pairs, if it has some."""
    words = (table.schema.metadata or {}).get(SIDES_KEY)
    return None if words is None else [str(name) for name in json.loads(words)]
