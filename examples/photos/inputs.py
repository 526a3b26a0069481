"""What the study starts from: pictures with a file of captions, or embeddings that exist already."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import geoflow_fast as gf
from geoflow_fast.encoders.registry import open_encoder
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import write_atomic

Captioned = list[tuple[str, str]]
"""The file name of an image and one of its captions, in the order of the file."""
KNOWN_FORMATS = "Flickr8k's token.txt or captions.txt, a COCO captions_*.json, or a .csv or .tsv with image and caption"


@dataclass(frozen=True)
class Photos:
    """Paired embeddings and, where they are known, the captions and pictures behind them."""

    pairs: gf.EmbeddingPairs
    captions: Sequence[str] | None = None
    """By row of the stored texts."""
    pictures: Sequence[Path] | None = None
    """By row of the stored images."""


def read_captions(path: Path) -> Captioned:
    """Reads a file of captions in any of the `KNOWN_FORMATS`."""
    if not path.is_file():
        raise FileNotFoundError(f"--captions {path} does not exist; it is {KNOWN_FORMATS}")
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".json":
        captioned = _coco(path, text)
    elif "#" in (first := text.split("\n", 1)[0]).split("\t")[0] and "\t" in first:
        captioned = _flickr_tokens(path, text)
    else:
        captioned = _table(path, text)
    if not captioned:
        raise ValueError(f"{path} holds no captions")
    return captioned


def _coco(path: Path, text: str) -> Captioned:
    """COCO: a list of images with their names, and one of annotations with captions."""
    try:
        content = json.loads(text)
        names = {image["id"]: str(image["file_name"]) for image in content["images"]}
        return [(names[note["image_id"]], str(note["caption"])) for note in content["annotations"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a COCO file of captions (images, annotations): {error!r}") from error


def _flickr_tokens(path: Path, text: str) -> Captioned:
    """Flickr8k: lines `name.jpg#number<tab>caption`."""
    captioned = []
    for number, line in enumerate(text.splitlines(), start=1):
        image, tab, caption = line.partition("\t")
        if line.strip() and not (tab and "#" in image):
            raise ValueError(f"{path} line {number} is not image#number, a tab and a caption: {line[:60]!r}")
        if line.strip():
            captioned.append((image.rpartition("#")[0], caption))
    return captioned


def _table(path: Path, text: str) -> Captioned:
    """A table with a line of column names, separated by commas or tabs."""
    lines = text.splitlines()
    head = lines[0] if lines else ""
    rows = csv.reader(lines, delimiter="\t" if "\t" in head else ",")
    columns = [name.strip().lower() for name in next(rows, [])]
    if not {"image", "caption"} <= set(columns):
        raise ValueError(f"{path} has columns {columns}, but needs image and caption; it may be {KNOWN_FORMATS}")
    image, caption, captioned = columns.index("image"), columns.index("caption"), []
    for row in rows:
        if row and len(row) != len(columns):
            raise ValueError(f"{path} line {rows.line_num} has {len(row)} fields, not {len(columns)}: {row[:2]}")
        if row:
            captioned.append((row[image].strip(), row[caption]))
    return captioned


def existing(captioned: Captioned, folder: Path) -> Captioned:
    """The captions whose image is in the folder, with its whole path. Some may be missing, but not most of them."""
    if not folder.is_dir():
        raise NotADirectoryError(f"--images {folder} is not a folder")
    there = {name: folder / name for name, _ in captioned}
    missing = [name for name, path in there.items() if not path.is_file()]
    if 2 * len(missing) > len(there):
        raise ValueError(f"{folder} lacks {len(missing)} of {len(there)} captioned images, such as {missing[0]}")
    if missing:
        print(f"left out: {len(missing)} of {len(there)} images that are not in {folder}, such as {missing[0]}")
    lost = set(missing)
    return [(str(there[name].resolve()), caption) for name, caption in captioned if name not in lost]


def write_table(rows: Iterable[tuple[str, str]], path: Path) -> Path:
    """The table of paths and captions that `geoflow embed` reads."""
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(("path", "caption"))
    writer.writerows(rows)
    write_atomic(path, lines.getvalue().encode())
    return path


def embedded(
    table: Path, out: Path, *, encoder: str, model: str | None, pretrained: str | None, checkpoint: Path | None
) -> Photos:
    """Embeds the images and captions of the table into the folder `out`, or goes on with that."""
    chosen = open_encoder(encoder, model=model, pretrained=pretrained, checkpoint=checkpoint)
    summary = gf.embed_images(table, chosen, out)
    print(f"{summary.images} images and {summary.texts} captions, {summary.dim} wide: {out}")
    if summary.skipped_images or summary.skipped_captions:
        print(f"skipped {summary.skipped_images} images, {summary.skipped_captions} captions: {out / 'skipped.csv'}")
    return open_embeddings(out)


def open_embeddings(path: Path, images: Path | None = None) -> Photos:
    """Opens a folder of `geoflow embed` (or of clip-retrieval), or an `.npz` file with image_emb, text_emb and
    text_image_index, which may also hold captions and image_path. Paths are relative to the folder `images`."""
    if path.is_dir():
        return _open_folder(path, images)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; embeddings are a folder of geoflow embed or an .npz file")
    if path.suffix.lower() != ".npz":
        raise ValueError(f"{path} is neither a folder nor an .npz file")
    with np.load(path, allow_pickle=False) as file:
        if absent := {"image_emb", "text_emb"} - set(file.files):
            raise ValueError(f"{path} lacks {', '.join(sorted(absent))}; it has {', '.join(file.files)}")
        index = file["text_image_index"].astype(np.int64) if "text_image_index" in file.files else None
        # Stored in half precision, rows are of unit norm only roughly.
        image, text = (file[name].astype(np.float32) for name in ("image_emb", "text_emb"))
        captions, paths = (file[name] if name in file.files else None for name in ("captions", "image_path"))
    pairs = gf.EmbeddingPairs.from_arrays(image, text, index, normalize=True)
    return Photos(pairs, _words(captions, len(text), path), _located(_words(paths, len(image), path), images))


def _open_folder(path: Path, images: Path | None) -> Photos:
    pairs = gf.EmbeddingPairs.open(path, normalize=True)
    captions, paths = _column(path / "metadata", "caption"), _column(path / "img_metadata", "image_path")
    known = _words(captions, len(pairs.text), path), _words(paths, len(pairs.image), path)
    return Photos(pairs, known[0], _located(known[1], images))


def _column(folder: Path, name: str) -> NDArray[np.str_] | None:
    """A column of the Parquet files of a folder, in the order of their numbers; None if it is not there."""
    files = sorted(folder.glob("*.parquet"), key=lambda file: int("0" + "".join(filter(str.isdigit, file.stem))))
    if not files or any(name not in parquet.column_names(file) for file in files):
        return None
    return np.concatenate([parquet.read_columns(file, [name])[name] for file in files])


def _words(values: NDArray[np.str_] | None, count: int, path: Path) -> list[str] | None:
    if values is None:
        return None
    if len(values) != count:
        raise ValueError(f"{path} has {len(values)} captions or paths for {count} rows")
    return [str(value) for value in values.tolist()]


def _located(names: Sequence[str] | None, images: Path | None) -> list[Path] | None:
    """Where the pictures are: below `images`, or where the embeddings were made. None if the first is not there."""
    if names is None:
        return None
    paths = [Path(name) if images is None else images / name for name in names]
    return paths if paths[0].is_file() else None


def read_names(path: Path, photos: Photos) -> NDArray[np.bool_]:
    """Which stored images [N] a file names, one name per line, such as Flickr_8k.testImages.txt."""
    if photos.pictures is None:
        raise ValueError("--split names images, so it needs --images, or embeddings with the paths of their images")
    if not path.is_file():
        raise FileNotFoundError(f"--split {path} does not exist")
    names = {Path(line.strip()).name for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
    chosen = np.array([picture.name in names for picture in photos.pictures])
    if not chosen.any() or chosen.all():
        which = "none" if not chosen.any() else "all"
        raise ValueError(f"--split {path} names {which} of the {len(chosen)} images; it should name those to judge by")
    return chosen
