"""Rows of embeddings from where people hold them, with the ids and the encoder that come with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data import tables
from geoflow_fast.data.fingerprint import Fingerprint, embedded_by, refuse_other_encoder
from geoflow_fast.data.ids import ID_COLUMN, Ids, stored_ids
from geoflow_fast.data.rows import Array, Rows, in_shard_order, load_npy
from geoflow_fast.runtime import checks

IMAGE_FOLDER, TEXT_FOLDER = "img_emb", "text_emb"
IMAGE_IDS, TEXT_IDS = "image_ids.parquet", "text_ids.parquet"
"""Files of ids beside the folders of a set of pairs."""


class Embeddings:
    """Embeddings of one kind, unit rows [N, d], with their ids.

    Create them with `open`, `from_table` or `from_arrays`. Scorers and re-rankers take them as queries, and
    `gf.Gallery` as items: results then name rows by their ids. `ids` holds strings, integers or UUIDs, or is None.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @classmethod
    def from_arrays(cls, rows: Array | Tensor, ids: Any = None, *, normalize: bool = False) -> Embeddings:
        """Embeddings from an array or a tensor [N, d] and a sequence of N `ids`. Rows must be finite and, unless
        `normalize` is set, of unit norm within 1e-3."""
        return cls._checked(Rows([checks.array(rows, "rows")], "rows", normalize=normalize), ids)

    @classmethod
    def from_table(
        cls, table: Any, column: str | None = None, id_column: str | None = None, *, normalize: bool = False
    ) -> Embeddings:
        """Embeddings from a table of Arrow, a `datasets.Dataset`, or a frame of pandas or polars.

        `column` holds a list of floating-point numbers in every row; by default it is the only such column.
        `id_column`: by default `id`, if there is one.
        """
        rows = _rows_of(tables.table_of(table, "table"), column, id_column, "table", normalize=normalize)
        return cls._checked(rows, None)

    @classmethod
    def open(cls, path: str | Path, ids: Any = None, *, normalize: bool = False) -> Embeddings:
        """Embeddings from a `.npy` file, a Parquet or Arrow file, a folder of such files, or a dataset that
        `save_to_disk` wrote. `file.parquet:column` names the column. A column `id` beside it has the ids, and `ids`
        replaces them."""
        return cls._checked(open_rows(checks.path(path, "path"), "embeddings", normalize=normalize), ids)

    @classmethod
    def _checked(cls, rows: Rows, ids: Any) -> Embeddings:
        rows.check(normalize=rows.normalize)
        if ids is not None:
            rows.ids = Ids.given(ids, len(rows), "ids")
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        named = "" if self.rows.ids is None else f", {self.rows.ids!r}"
        return f"Embeddings({len(self)} rows of width {self.dim}{named})"

    @property
    def dim(self) -> int:
        """Width of the rows."""
        return self.rows.dim

    @property
    def ids(self) -> Any:
        """The ids as an array [N], or None."""
        return None if self.rows.ids is None else self.rows.ids.values

    @property
    def encoder(self) -> Fingerprint | None:
        """The encoder that made them, if that is known."""
        return self.rows.encoder

    def tensor(self) -> Tensor:
        """All rows as a float32 tensor [N, d] of unit norm."""
        return torch.from_numpy(self.rows[np.arange(len(self))])


def named_rows(queries: Any, made_for: dict[str, Fingerprint | None]) -> tuple[Any, Ids | None]:
    """Queries as rows, and their ids if they are `Embeddings`. A ValueError says that they come from another encoder
    than `made_for` names, which has the model's."""
    if not isinstance(queries, Embeddings):
        return queries, None
    refuse_other_encoder({**made_for, "the set of queries": queries.encoder})
    return queries.tensor(), queries.rows.ids


def open_rows(path: Path, name: str, *, normalize: bool = False) -> Rows:
    """Opens a `.npy` file, or all `.npy` files of a folder in the order of the numbers in their names, memory-mapped;
    or the embeddings of a Parquet or Arrow file, of a folder of these, or of a dataset.

    The names of all files of a folder differ only in the number at their end, which counts from 0 or 1 without a gap,
    or end in ranges of rows that touch. Ids come from the column `id` of a table, or from the files of ids in a
    folder of pairs.
    """
    source, column = tables.located(path)
    if tables.is_table(source) and (source.exists() or column is not None or not path.exists()):
        if not source.exists():
            raise FileNotFoundError(f"{name} {path} is missing")
        wanted = tables.embedding_column(tables.columns_of(source), column, f"{name} {source}")
        kept = [wanted, *({ID_COLUMN} & set(tables.columns_of(source)))]
        return _rows_of(tables.open_table(source, kept), wanted, None, f"{name} {path}", normalize=normalize)
    if path.is_file():
        return Rows([load_npy(path, mapped=True)], f"{name} {path}", normalize=normalize)
    if not path.is_dir():
        why = "neither a .npy file nor a folder" if path.exists() else "missing"
        raise FileNotFoundError(f"{name} {path} is {why}")
    files = in_shard_order(path.glob("*.npy"), from_one=True)
    if not files:
        raise FileNotFoundError(f"{name} folder {path} holds no .npy file")
    rows = Rows([load_npy(file, mapped=True) for file in files], f"{name} {path}", normalize=normalize)
    if path.name in (IMAGE_FOLDER, TEXT_FOLDER):
        side = "image" if path.name == IMAGE_FOLDER else "text"
        rows.ids = stored_ids(path.parent / (IMAGE_IDS if side == "image" else TEXT_IDS), len(rows))
        rows.encoder = embedded_by(path.parent, side)
    return rows


def _rows_of(table: Any, column: str | None, id_column: str | None, name: str, *, normalize: bool) -> Rows:
    chosen = tables.embedding_column({field.name: field.type for field in table.schema}, column, name)
    rows = Rows(tables.matrices_of(table, chosen, name), name, normalize=normalize)
    rows.ids = tables.ids_of(table, id_column, name)
    rows.encoder = Fingerprint.read(tables.encoder_of(table, chosen))
    return rows


def rows_of_table(table: Any, column: str, id_column: str | None, name: str) -> Rows:
    """The rows of one column of a table of Arrow, a dataset or a frame, with their ids."""
    return _rows_of(tables.table_of(table, name), column, id_column, name, normalize=False)
