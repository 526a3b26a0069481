"""Paired embeddings in memory or on disk. Only the rows that are asked for are read.

On disk the layout is clip-retrieval's: `img_emb/img_emb_0.npy`, `text_emb/text_emb_0.npy`, ... with rows in shard
order, float16 or float32. Where an image is stored once for several texts, `image_index.npy` gives the image row of
each text. Where it is stored several times, a column `image_index` or `image_path` of `metadata/*.parquet` tells which
rows show the same image. `image_group.npy`, one number per text that all texts of one image share, overrides both.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data import tables
from geoflow_fast.data.embeddings import (
    IMAGE_FOLDER,
    IMAGE_IDS,
    TEXT_FOLDER,
    TEXT_IDS,
    open_rows,
    rows_of_table,
)
from geoflow_fast.data.fingerprint import Fingerprint, Origin, embedded_by
from geoflow_fast.data.ids import Ids, stored_ids
from geoflow_fast.data.rows import BLOCK_ROWS, Array, Index, Rows, in_shard_order, load_npy, open_shards
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.runtime import checks, parquet
from geoflow_fast.runtime.files import contents_of, read_json, write_atomic, write_json, write_npy
from geoflow_fast.runtime.words import words_of

METADATA_FOLDER = "metadata"
INDEX_FILE, GROUP_FILE, ABOUT_FILE = "image_index.npy", "image_group.npy", "pairs.json"
OWN_FILES = "|".join(
    [
        rf"(?:{IMAGE_FOLDER}/{IMAGE_FOLDER}|{TEXT_FOLDER}/{TEXT_FOLDER})_\d+\.npy",
        *map(re.escape, (INDEX_FILE, GROUP_FILE, ABOUT_FILE, IMAGE_IDS, TEXT_IDS)),
    ]
)
"""What `EmbeddingPairs.save` writes into a folder, as a pattern."""
SIDES = ("image", "text")
"""What the two sides of pairs are called unless they have other names."""
COLUMN_ENDINGS = ("_embedding", "_emb", "_vector", "")
"""Columns of tables of pairs are called after the sides, with one of these endings."""


class EmbeddingPairs:
    """Paired image and text embeddings; an image may have several texts, each of which makes a pair.

    Create it with `from_arrays`, `from_table`, `open` or `open_files`. `len(pairs)` is the number of pairs, and
    `pairs[index]` returns (image [B, d_I], text [B, d_T]) as float32 unit rows, for integers [B] or a boolean mask over
    all pairs. `folder` is the folder that `open` read; it is None for other pairs. `ids` and `image_ids` name texts and
    images, where they are named. The sides may be of any kind: `sides` has their names, which are "image" and "text"
    unless `geoflow embed` or `from_table` was told others.
    """

    folder: Path | None = None
    sides: tuple[str, str] = SIDES

    def __init__(self, image: Rows, text: Rows, image_row: Index, text_row: Index, group: Index) -> None:
        self.image, self.text = image, text
        self.image_row, self.text_row, self.group = image_row, text_row, group

    @classmethod
    def from_arrays(
        cls,
        image: Array | Tensor,
        text: Array | Tensor,
        image_index: Index | Tensor | Sequence[int] | None = None,
        *,
        ids: Any = None,
        image_ids: Any = None,
        normalize: bool = False,
    ) -> EmbeddingPairs:
        """Pairs from arrays `image` [N, d_I] and `text` [M, d_T].

        Text row k belongs to image row `image_index[k]`, or to image row k without an `image_index`. `ids` and
        `image_ids` name the rows of `text` and `image`: strings, integers or UUIDs. Rows must be finite and, unless
        `normalize` is set, of unit norm within 1e-3; otherwise a ValueError names the first bad row.
        """
        rows = [Rows([checks.array(x, name)], name) for x, name in ((image, "image"), (text, "text"))]
        for part, names, what in zip(rows, (image_ids, ids), ("image_ids", "ids")):
            part.check(normalize=normalize)
            part.ids = None if names is None else Ids.given(names, len(part), what)
        index = None if image_index is None else checks.array(image_index, "image_index")
        return cls._pair(rows[0], rows[1], index, index, "image_index")

    @classmethod
    def from_table(
        cls,
        table: Any,
        image: str | None = None,
        text: str | None = None,
        *,
        id_column: str | None = None,
        image_id_column: str | None = None,
        sides: tuple[str, str] = SIDES,
        normalize: bool = False,
    ) -> EmbeddingPairs:
        """Pairs from a table of Arrow, a `datasets.Dataset`, or a frame of pandas or polars, one in each row.

        `image`, `text`: the columns of embeddings, lists of floating-point numbers; by default those that are called
        after the `sides`, such as `image_embedding` or `image`. `id_column`: that of the texts, by default `id`. Rows
        with equal ids in `image_id_column` are pairs of one image.
        """
        known = tables.table_of(table, "table")
        sides = _checked_sides(sides)
        columns = _side_columns(known.column_names, (image, text), sides, "table")
        rows = [rows_of_table(known, column, id_column, "table") for column in columns]
        return cls._of_table(known, rows[0], rows[1], image_id_column, sides, "table", normalize=normalize)

    @classmethod
    def _of_table(
        cls,
        table: Any,
        image: Rows,
        text: Rows,
        image_ids: str | None,
        sides: tuple[str, str],
        name: str,
        *,
        normalize: bool,
    ) -> EmbeddingPairs:
        for part in (image, text):
            part.check(normalize=normalize)
        shown = None if image_ids is None else tables.ids_of(table, image_ids, name)
        group = None if shown is None else np.unique(words_of(shown.values), return_inverse=True)[1]
        image.ids = image.ids if shown is None else shown
        pairs = cls._pair(image, text, None, group, name)
        pairs.sides = sides
        return pairs

    @classmethod
    def open(cls, folder: str | Path, *, normalize: bool = False, world: World = ALONE) -> EmbeddingPairs:
        """Pairs from a folder in clip-retrieval's layout (`img_emb/*.npy`, `text_emb/*.npy`), memory-mapped; or from a
        Parquet or Arrow file, a folder of these, or a dataset that `save_to_disk` wrote, as in `from_table`.

        `image_index.npy`, if present, gives the image row of each text, and `text_ids.parquet` and `image_ids.parquet`
        the ids. All rows are checked as in `from_arrays`, in one pass over the files that the ranks of a `world` share.
        """
        folder = checks.path(folder, "folder")
        if tables.is_table(folder) and folder.exists() and not (folder / IMAGE_FOLDER).is_dir():
            table = tables.open_table(folder)
            sides = _checked_sides(tables.sides_of(table) or SIDES)
            columns = _side_columns(table.column_names, (None, None), sides, str(folder))
            rows = [rows_of_table(table, column, None, str(folder)) for column in columns]
            return cls._of_table(table, rows[0], rows[1], None, sides, str(folder), normalize=normalize)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is {'not a folder of embeddings' if folder.exists() else 'missing'}")
        image, text = (open_shards(folder / name, name) for name in (IMAGE_FOLDER, TEXT_FOLDER))
        for part in (image, text):
            part.check(normalize=normalize, world=world)
            part.expect_random_reads()
        index, group = (
            load_npy(path) if (path := folder / name).is_file() else None for name in (INDEX_FILE, GROUP_FILE)
        )
        if index is None:
            sizes = (map(len, rows.parts) for rows in (image, text))
            for number, (images, texts) in enumerate(itertools.zip_longest(*sizes, fillvalue=0)):
                if images != texts:  # rows were lost on one side, so those after them would be paired wrongly
                    raise ValueError(
                        f"shard {number} holds {images} images, but {texts} texts: "
                        f"{INDEX_FILE} must say which belong together"
                    )
        if group is None:
            group = index if index is not None else _metadata_groups(folder / METADATA_FOLDER)
        pairs = cls._pair(image, text, index, group, str(folder / INDEX_FILE))
        pairs.folder = folder
        image.ids, text.ids = (stored_ids(folder / file, len(x)) for file, x in ((IMAGE_IDS, image), (TEXT_IDS, text)))
        pairs.sides, known = _about(folder)
        image.encoder, text.encoder = (x or embedded_by(folder, side) for x, side in zip(known, SIDES))
        return pairs

    @classmethod
    def open_files(
        cls,
        images: str | Path,
        texts: str | Path,
        image_index: str | Path | None = None,
        *,
        normalize: bool = False,
        world: World = ALONE,
    ) -> EmbeddingPairs:
        """Pairs from two `.npy` files or folders of `.npy` shards, memory-mapped and checked as in `open`, or from
        columns of Parquet or Arrow files (`pairs.parquet:image_embedding`).

        `image_index`: a `.npy` file with the image row of each text, as in `from_arrays`.
        """
        image, text = (open_rows(checks.path(x, name), name) for x, name in ((images, "images"), (texts, "texts")))
        for part in (image, text):
            part.check(normalize=normalize, world=world)
            part.expect_random_reads()
        index = None if image_index is None else load_npy(checks.path(image_index, "image_index"))
        return cls._pair(image, text, index, index, str(image_index))

    @classmethod
    def _pair(cls, image: Rows, text: Rows, index: Index | None, group: Index | None, name: str) -> EmbeddingPairs:
        count = len(text)
        if index is None:
            if len(image) != count:
                raise ValueError(
                    f"{len(image)} images and {count} texts: image_index must say which image each text belongs to"
                )
            index = np.arange(count)
        if index.shape != (count,) or index.dtype.kind not in "iu":
            raise ValueError(f"{name} must hold {count} integers, one per text, got {index.dtype} {index.shape}")
        bad = (index < 0) | (index >= len(image))
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"{name} row {row} is {index[row]}, but there are {len(image)} images")
        if group is not None and group.shape != (count,):
            raise ValueError(f"metadata or {GROUP_FILE} have {len(group)} rows, but there are {count} texts")
        index = index.astype(np.int64)
        return cls(image, text, index, np.arange(count), index if group is None else group.astype(np.int64))

    def __len__(self) -> int:
        return len(self.text_row)

    def __repr__(self) -> str:
        first, second = self.sides
        return f"EmbeddingPairs({len(self)} pairs, {first} width {self.image_dim}, {second} width {self.text_dim})"

    @property
    def ids(self) -> NDArray[Any] | None:
        """The ids of the pairs, [len(pairs)], which are those of their texts; None if they have none."""
        return None if self.text.ids is None else self.text.ids.of(self.text_row)

    @property
    def image_ids(self) -> NDArray[Any] | None:
        """The ids of the images of the pairs, [len(pairs)]; None if they have none."""
        return None if self.image.ids is None else self.image.ids.of(self.image_row)

    def origin(self, settings: Mapping[str, Any]) -> Origin:
        """What a model that is trained on these pairs with these `settings` remembers."""
        about = {"pairs": len(self), "images": len(np.unique(self.group)), "fingerprint": self.fingerprint()}
        return Origin(self.encoders, self.sides, about, settings)

    @property
    def encoders(self) -> tuple[Fingerprint | None, Fingerprint | None]:
        """The encoders of images and texts, where they are known."""
        return self.image.encoder, self.text.encoder

    @property
    def image_dim(self) -> int:
        """Width of the image embeddings."""
        return self.image.dim

    @property
    def text_dim(self) -> int:
        """Width of the text embeddings."""
        return self.text.dim

    def __getitem__(self, index: Tensor | NDArray[Any] | Sequence[int]) -> tuple[Tensor, Tensor]:
        where = _as_index(index, len(self.text_row))
        return torch.from_numpy(self.image[self.image_row[where]]), torch.from_numpy(self.text[self.text_row[where]])

    def subset(self, index: Tensor | NDArray[Any] | Sequence[int]) -> EmbeddingPairs:
        """Returns the pairs that `index` selects (integers, or a mask). Embeddings are shared, not copied."""
        where = _as_index(index, len(self))
        pairs = EmbeddingPairs(self.image, self.text, self.image_row[where], self.text_row[where], self.group[where])
        pairs.folder, pairs.sides = self.folder, self.sides
        return pairs

    def split(self, held_out: float, seed: int) -> tuple[EmbeddingPairs, EmbeddingPairs]:
        """Holds images out with all their texts and returns (rest, held out), so that no image is on both sides.

        `held_out`: a share of the images between 0 and 1, rounded to at least one image, or an integer, the number of
        images. The images are drawn by `seed`. Split the rest again for more than two parts.
        """
        checks.integer(seed, "seed")
        images, member = np.unique(self.group, return_inverse=True)
        if len(images) < 2:
            raise ValueError("cannot hold out pairs of a set with a single image; pass val= to choose them yourself")
        if isinstance(held_out, (int, np.integer)):
            count = checks.integer(held_out, "held_out", 1, len(images) - 1)
        elif 0 < checks.number(held_out, "held_out") < 1:
            count = max(1, round(held_out * len(images)))
        else:
            raise ValueError(f"held_out must be a share between 0 and 1 or a number of images, got {held_out}")
        held = np.zeros(len(images), bool)
        held[np.random.default_rng(seed).permutation(len(images))[:count]] = True
        return self.subset(np.flatnonzero(~held[member])), self.subset(np.flatnonzero(held[member]))

    def fingerprint(self) -> str:
        """Returns a hash of the pairing and of up to 64 of the pairs, which is cheap and tells different sets apart."""
        digest = hashlib.sha256(json.dumps([len(self), self.image_dim, self.text_dim]).encode())
        digest.update(self.image_row.tobytes())
        digest.update(self.text_row.tobytes())
        for x in self[np.linspace(0, len(self) - 1, min(len(self), 64)).astype(np.int64)]:
            digest.update(x.numpy().tobytes())
        return digest.hexdigest()

    def save(
        self, folder: str | Path, *, rows_per_shard: int = 1_000_000, dtype: type[np.floating] = np.float16
    ) -> None:
        """Writes the pairs to a folder that `open` reads, with their ids, in shards of `rows_per_shard` rows.

        Rows are stored as `dtype`: float16 unless another is named, which rounds every number to about three digits and
        halves the size; `dtype=np.float32` keeps them as they are. A folder that already holds embeddings raises a
        FileExistsError.
        """
        folder = checks.path(folder, "folder")
        checks.integer(rows_per_shard, "rows_per_shard", 1)
        if (folder / IMAGE_FOLDER).exists() or (folder / TEXT_FOLDER).exists():
            raise FileExistsError(f"{folder} already holds embeddings")
        images, index = np.unique(self.image_row, return_inverse=True)
        _save_shards(folder / IMAGE_FOLDER, self.image, images, rows_per_shard, np.dtype(dtype))
        _save_shards(folder / TEXT_FOLDER, self.text, self.text_row, rows_per_shard, np.dtype(dtype))
        if len(images) != len(self) or not np.array_equal(index, np.arange(len(self))):
            write_npy(folder / INDEX_FILE, index.astype(np.int64))
        group = np.unique(self.group, return_inverse=True)[1]
        if not np.array_equal(group, index):
            write_npy(folder / GROUP_FILE, group.astype(np.int64))
        for file, rows, chosen in ((IMAGE_IDS, self.image, images), (TEXT_IDS, self.text, self.text_row)):
            if rows.ids is not None:
                rows.ids.save(folder / file, chosen, are_given=True)
        if self.sides != SIDES or any(self.encoders):
            encoders = [None if encoder is None else encoder.to_json() for encoder in self.encoders]
            write_json(folder / ABOUT_FILE, {"sides": list(self.sides), "encoders": encoders})


def _checked_sides(sides: Sequence[str]) -> tuple[str, str]:
    """The names of the two sides, which are different words."""
    if len(sides) != 2 or not all(isinstance(name, str) and name.strip() for name in sides) or sides[0] == sides[1]:
        raise ValueError(f"sides must be two different names, such as audio and text, got {sides!r}")
    return sides[0], sides[1]


def _side_columns(
    names: Sequence[str], chosen: tuple[str | None, str | None], sides: tuple[str, str], what: str
) -> list[str]:
    """The columns of a table of pairs that hold the two sides."""
    columns = []
    for side, wanted in zip(sides, chosen):
        possible = [f"{side}{ending}" for ending in COLUMN_ENDINGS] if wanted is None else [wanted]
        known = next((name for name in possible if name in names), None)
        if known is None:
            raise ValueError(f"{what} has no column {' or '.join(possible)}; its columns are {', '.join(names)}")
        columns.append(known)
    return columns


def _about(folder: Path) -> tuple[tuple[str, str], tuple[Fingerprint | None, Fingerprint | None]]:
    """The names of the sides of stored pairs, and their encoders."""
    file = folder / ABOUT_FILE
    if not file.is_file():
        return SIDES, (None, None)
    about = read_json(file, "the description of pairs")
    with contents_of(file):
        first, second = (Fingerprint.read(entry) for entry in about["encoders"])
        return _checked_sides(about["sides"]), (first, second)


def open_pairs(
    folder: Path | None,
    images: Path | None,
    texts: Path | None,
    image_index: Path | None,
    *,
    normalize: bool,
    world: World = ALONE,
) -> EmbeddingPairs:
    """Opens the pairs that the flags of a command name: a folder, or one file of images and one of texts."""
    files = {"--images": images, "--texts": texts, "--image-index": image_index}
    given = [flag for flag, path in files.items() if path is not None]
    if folder is not None:
        if given:
            raise ValueError(f"--pairs {folder} holds images and texts; leave out {', '.join(given)}")
        return EmbeddingPairs.open(folder, normalize=normalize, world=world)
    if images is None or texts is None:
        raise ValueError("give --pairs, a folder of paired embeddings, or --images and --texts, two .npy files")
    return EmbeddingPairs.open_files(images, texts, image_index, normalize=normalize, world=world)


def _as_index(index: Tensor | NDArray[Any] | Sequence[int], count: int) -> Index:
    """Returns integers [B] in [0, count) from such integers or from a mask over all `count` pairs."""
    where = checks.array(index, "index")
    if where.dtype == bool and where.shape == (count,):
        return np.flatnonzero(where)
    if where.ndim != 1 or (where.size and where.dtype.kind not in "iu"):
        raise ValueError(f"index must be 1-D integers or a mask of {count} entries, got {where.dtype} {where.shape}")
    bad = (where < 0) | (where >= count)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"index entry {row} is {where[row]}, but there are {count} pairs")
    return where.astype(np.int64)


def _metadata_groups(folder: Path) -> Index | None:
    """Returns the number of each row's image, from a column `image_index` or `image_path`; None if there is none."""
    files = in_shard_order(folder.glob("*.parquet"), from_one=True)
    if not files:
        return None
    for column in ("image_index", "image_path"):
        if all(column in parquet.column_names(path) for path in files):
            values = np.concatenate([parquet.read_columns(path, [column])[column] for path in files])
            return np.unique(values, return_inverse=True)[1]
    return None


def _save_shards(folder: Path, rows: Rows, index: Index, rows_per_shard: int, dtype: np.dtype[Any]) -> None:
    """Writes the rows `index` as `.npy` shards, without holding a whole shard in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, low in enumerate(range(0, len(index), rows_per_shard)):
        shard = index[low : low + rows_per_shard]
        shape = (len(shard), rows.dim)
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}

        def fill(file: BinaryIO, shard: Index = shard, header: dict[str, Any] = header) -> None:
            np.lib.format.write_array_header_1_0(file, header)
            for low in range(0, len(shard), BLOCK_ROWS):
                file.write(rows[shard[low : low + BLOCK_ROWS]].astype(dtype).tobytes())

        write_atomic(folder / f"{folder.name}_{number}.npy", fill)
