"""Embeddings of texts alone, or of two sides of any kind, as columns of one Parquet file.

A side is a sequence of items and what encodes them. Finished blocks are kept beside the output, so that a killed job
can be continued; the file appears whole at the end.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geoflow_fast.data import tables
from geoflow_fast.data.fingerprint import Fingerprint
from geoflow_fast.data.ids import Ids
from geoflow_fast.encoders.protocol import Encoder, check_sequence
from geoflow_fast.geometry import unit_rows
from geoflow_fast.jobs import identity
from geoflow_fast.jobs.embed import DTYPES
from geoflow_fast.jobs.job import Job
from geoflow_fast.runtime import checks, parquet
from geoflow_fast.runtime.files import contents_of, need_file
from geoflow_fast.runtime.progress import Advance

COLUMN = "embedding"
BLOCK_ROWS = 4096
"""Rows per block. A kill loses at most the work on one block."""
FORMAT = 1
IDENTITY, UNKNOWN = "identity", "not known:"
"""The fact that tells a function from others of its name; and what stands there, with a number that never returns, if
nothing tells."""
TEXT_COLUMNS = ("text", "caption", "query", "sentence")
"""Columns of texts that need not be named."""

Encode = Encoder | Callable[[list[Any]], Any]
"""An encoder of texts, or a function from a list of B items to their embeddings [B, d], a tensor or an array."""


@dataclass(frozen=True)
class TextTable:
    """Texts of a file, with their ids."""

    texts: list[str]
    ids: Ids | None


def embed_texts(
    texts: Sequence[str],
    encoder: Encoder,
    out: str | Path,
    *,
    ids: Any = None,
    batch_size: int = 64,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: bool | None = None,
) -> int:
    """Embeds texts with `encoder` into the Parquet file `out`, whose columns are `id` and `embedding`, and returns
    their number. `ids`: strings, integers or UUIDs; by default the numbers of the texts. The file can be a gallery, or
    queries (`gf.Embeddings.open`).

    `batch_size`: texts encoded at once. `dtype`: "float32" or "float16". `progress`: show a bar; by default on a
    terminal. If the job is killed, the same call continues it; output of another job is refused unless `overwrite` is
    set.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "overwrite": overwrite, "progress": progress}
    return _embed({COLUMN: (texts, encoder)}, None, out, ids, **options)


def embed_sides(
    sides: Mapping[str, tuple[Sequence[Any], Encode]],
    out: str | Path,
    *,
    ids: Any = None,
    batch_size: int = 64,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: bool | None = None,
) -> int:
    """Embeds pairs of two sides of any kind into the Parquet file `out` and returns their number.

    `sides` has the names of the two sides, such as "audio" and "text" or "question" and "answer", each with its items
    and what encodes them: an encoder, for texts, or a function from a list of items to their embeddings. Item k of one
    side belongs to item k of the other. The first side takes the place that images have elsewhere. The columns are
    `id` and, for each side, `NAME_embedding`; `gf.EmbeddingPairs.open` reads the file. Keywords are those of
    `embed_texts`.

    A finished file is returned, and a job that was killed continued, only if its items and encoders are the same: items
    by their contents, files by name, size and modification time, encoders by `facts()`, functions by their code and all
    that it refers to. Where that cannot be known now or was not known then, as of instances of other classes or of a
    function that imports a module which is not loaded yet, blocks that a killed job left are computed again, and a
    finished file is refused unless `overwrite` is set; a function may have a method `facts` that tells what it is.
    """
    if not isinstance(sides, Mapping) or len(sides) != 2:
        raise TypeError("sides must be two, by name: {'audio': (items, encode), 'text': (items, encode)}")
    columns = {}
    for name, side in sides.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"the name of a side must be a word, got {name!r}")
        if not isinstance(side, (tuple, list)) or len(side) != 2:
            raise TypeError(f"side {name} must be its items and what encodes them, got {type(side).__name__}")
        columns[f"{name}_{COLUMN}"] = (side[0], side[1])
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "overwrite": overwrite, "progress": progress}
    return _embed(columns, list(sides), out, ids, **options)


def _embed(
    columns: Mapping[str, tuple[Sequence[Any], Encode]],
    sides: list[str] | None,
    out: str | Path,
    ids: Any,
    *,
    batch_size: int,
    dtype: str,
    overwrite: bool,
    progress: bool | None,
) -> int:
    checks.integer(batch_size, "batch_size", 1)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    path = checks.path(out, "out")
    if not path.name:
        raise IsADirectoryError(f"out {path} is a folder; the output is a Parquet file")
    counts = [len(check_sequence(items, "texts" if sides is None else name)) for name, (items, _) in columns.items()]
    count = counts[0]
    if len(set(counts)) > 1:
        raise ValueError(f"the sides have {counts[0]} and {counts[1]} items, but each belongs to one of the other")
    if count == 0:
        raise ValueError("there is nothing to embed")
    names = None if ids is None else Ids.given(ids, count, "ids")
    encoders = {name: facts_of(encode) for name, (_, encode) in columns.items()}
    for name, (items, encode) in columns.items():
        _refuse_empty_texts(name, items, encode)
    facts = {"task": "embed columns", "format": FORMAT, "dtype": dtype, "batch_size": batch_size, "encoders": encoders}
    facts["items"] = {name: _or_unknown(identity.of_items, items) for name, (items, _) in columns.items()}
    prints = {name: Fingerprint.of(known).to_json() for name, known in encoders.items()}
    about = {tables.ENCODERS_KEY: json.dumps(prints).encode()}
    if sides is not None:
        about[tables.SIDES_KEY] = json.dumps(sides).encode()

    def compute(rows: range, advance: Advance) -> Mapping[str, NDArray[Any]]:
        rows_of = {}
        for name, (items, encode) in columns.items():
            parts = [
                _unit(_encode(encode, list(items[low : min(low + batch_size, rows.stop)])), name, low)
                for low in range(rows.start, rows.stop, batch_size)
            ]
            rows_of[name] = np.concatenate(parts).astype(dtype)
        advance(len(rows))
        return rows_of

    # Blocks hold whole batches, whose sums depend on their size in the last bits.
    block = max(1, BLOCK_ROWS // batch_size) * batch_size
    path.parent.mkdir(parents=True, exist_ok=True)
    job = Job(path, count, block, facts, numbered="id", ids=names, about=about)
    made, blocks = job.left()
    if not overwrite and _may_be_same(made, job.facts):
        raise FileExistsError(
            f"{path} exists, and whether it is the result of this job cannot be known: {_unknown_of(made, job.facts)} "
            "cannot be identified; give a function a method `facts`, use items of known kinds, or ask to overwrite"
        )
    # Blocks that may be of other work are computed again.
    again = _may_be_same(blocks, job.facts) and (job.finished() or not path.exists())
    job.run(compute, overwrite=overwrite or again, unit="rows", progress=progress)
    return count


def facts_of(encode: Encode) -> dict[str, Any]:
    """What is known of an encoder, which its method `facts` tells; of a function its name and a digest of all that it
    consists of, or UNKNOWN."""
    known = getattr(encode, "facts", None)
    if callable(known):
        return dict(known())
    if not callable(encode):
        raise TypeError(f"an encoder or a function is needed, got {type(encode).__name__}")
    name = f"{encode.__module__}.{getattr(encode, '__qualname__', type(encode).__name__)}"
    return {"encoder": name, IDENTITY: _or_unknown(identity.of_function, encode)}


def _or_unknown(digest: Callable[[Any], str], value: Any) -> str:
    try:
        return digest(value)
    except identity.Unknown:
        return f"{UNKNOWN} {secrets.token_hex(16)}"


def _may_be_same(left: Any, wanted: Any) -> bool:
    """Whether two facts that differ may be of the same work, because something in them is not known."""
    return left != wanted and _could_be(left, wanted)


def _could_be(left: Any, wanted: Any) -> bool:
    if isinstance(left, Mapping) and isinstance(wanted, Mapping):
        return left.keys() == wanted.keys() and all(_could_be(left[key], wanted[key]) for key in left)
    return left == wanted or _is_unknown(left) or _is_unknown(wanted)


def _is_unknown(fact: Any) -> bool:
    return isinstance(fact, str) and fact.startswith(UNKNOWN)


def _unknown_of(*jobs: Any) -> str:
    """The items and functions that are not known in the facts of these jobs, in words."""
    unknown = set()
    for facts in jobs:
        unknown |= {f"the items of {name}" for name, fact in facts["items"].items() if _is_unknown(fact)}
        encoders = facts["encoders"].items()
        unknown |= {f"the function of {name}" for name, known in encoders if _is_unknown(known.get(IDENTITY))}
    return " and ".join(sorted(unknown))


def _encode(encode: Encode, items: list[Any]) -> Any:
    own: Any = encode
    return own.encode_texts(items) if hasattr(own, "encode_texts") else own(items)


def _refuse_empty_texts(name: str, items: Sequence[Any], encode: Encode) -> None:
    for row, item in enumerate(items if hasattr(encode, "encode_texts") else ()):
        if not isinstance(item, str) or not item.strip():
            what = "is empty" if isinstance(item, str) else f"is {type(item).__name__}, not text"
            raise ValueError(f"{name}: row {row} {what}")


def _unit(rows: Any, name: str, first: int) -> NDArray[np.float32]:
    """Embeddings as float32 unit rows; a ValueError names one without a direction."""
    array = checks.array(rows, name)
    if array.ndim != 2 or array.dtype.kind != "f":
        raise ValueError(f"{name}: the encoder gave {array.dtype} {array.shape}, not rows of floating-point numbers")
    unit: NDArray[np.float32] = unit_rows(torch.from_numpy(array.astype(np.float64))).float().numpy()
    wrong = ~np.isfinite(unit).all(axis=1)
    if wrong.any():
        raise ValueError(f"{name}: the encoder gave no direction for row {first + int(wrong.argmax())} (NaN or zero)")
    return unit


def read_texts(path: Path, columns: Sequence[str | None], id_column: str | None = None) -> list[TextTable]:
    """Texts of a file: a `.txt` file with one on each line, or one column for each of these of a CSV, TSV, Parquet or
    Arrow file or a dataset. A column that is None is the one called text, caption, query or sentence, or the only one
    of strings. Ids are those of `id_column`, by default `id`."""
    if path.suffix.lower() == ".txt":
        need_file(path)
        if any(columns) or id_column is not None or len(columns) != 1:
            raise ValueError(f"{path} has no columns, but one text on each line")
        return [TextTable(path.read_text("utf-8").splitlines(), None)]
    table = _table(path)
    ids = tables.ids_of(table, id_column, str(path))
    return [TextTable(_strings(table, column or _text_column(table, path), path), ids) for column in columns]


def _table(path: Path) -> Any:
    if path.suffix.lower() in (".csv", ".tsv"):
        import pyarrow.csv

        need_file(path)
        options = pyarrow.csv.ParseOptions(
            delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True
        )
        with contents_of(path, "damaged or not CSV"):
            return pyarrow.csv.read_csv(path, parse_options=options)
    if tables.is_table(path):
        return tables.open_table(path)
    why = "is neither .txt, .csv, .tsv, .parquet nor Arrow" if path.exists() else "is missing"
    raise FileNotFoundError(f"texts {path} {why}")


def _text_column(table: Any, path: Path) -> str:
    strings = [field.name for field in table.schema if "string" in str(field.type) and field.name != "id"]
    known = next((name for name in TEXT_COLUMNS if name in strings), None)
    if known is None and len(strings) != 1:
        raise ValueError(f"{path}: --text-column must name the texts; its columns are {', '.join(table.column_names)}")
    return known or strings[0]


def _strings(table: Any, column: str, path: Path) -> list[str]:
    if column not in table.column_names:
        raise ValueError(f"{path} has no column {column!r}; its columns are {', '.join(table.column_names)}")
    values = parquet.as_array(table[column])
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"{path}: column {column!r} holds {value!r} in row {row}, not text")
    return list(values)
