"""Images with their captions from a folder, a table (CSV, TSV, Parquet) or webdataset tar shards, read by number.

Some of a million images cannot be read. Such an image is skipped with a reason in words and never raises an exception.
Nothing is extracted to disk: a member of a tar is read as the bytes between two offsets.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import stat
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geoflow_fast.runtime import checks, parquet
from geoflow_fast.runtime.extras import needs

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
"""The formats of these suffixes. Pillow would also try formats for which it starts other programs, such as EPS."""
MAX_PIXELS = 89_478_485
"""Number of pixels of the largest image that is decoded."""
MAX_DECODING_BYTES = 1 << 30
"""Decoding one image takes at most this much memory besides its file."""
DECODING_BYTES_PER_PIXEL = {"WEBP": 24, "AVIF": 16}
"""Largest number of bytes that decoding takes for each pixel, by format; for formats that are not named it is 8. Pillow
keeps four bytes a pixel, and converting another mode to RGB makes a second image. Some decoders hold copies of their
own."""
MAX_ASPECT = 200
"""Largest ratio of the long side to the short side. Scaling the short side of a very long image to hundreds of pixels
would take gigabytes."""
MAX_IMAGE_BYTES = 1 << 28
MAX_CAPTION_BYTES = 1 << 20
UNREADABLE = (
    *(OSError, ValueError, TypeError, SyntaxError, EOFError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, AssertionError, MemoryError, struct.error, zlib.error),
)
"""Errors that decoders raise about bytes which do not hold what they claim to hold."""


@dataclass(frozen=True)
class Skipped:
    """Something that was left out, and the reason."""

    item: str
    part: str
    """Either "image" or "caption"."""
    reason: str


@dataclass(frozen=True)
class Sample:
    """One image with its captions; `image` is None if it could not be read."""

    name: str
    image: Image | None
    captions: tuple[str, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class _Piece:
    """A file, or the `size` bytes of it that start at `offset`."""

    file: Path
    offset: int = 0
    size: int | None = None

    def read(self, limit: int) -> bytes:
        about = os.stat(self.file)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("is not a regular file")
        size = about.st_size if self.size is None else self.size
        if size > limit:
            raise OSError(f"has {size} bytes, more than {limit}")
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            data = file.read(size)
        if len(data) != size:
            raise OSError(f"is cut short: {len(data)} of {size} bytes are there")
        return data

    def state(self) -> list[int | None]:
        """Returns numbers that change when the bytes change, without reading the bytes."""
        try:
            about = os.stat(self.file)
        except (OSError, ValueError):
            return [None]
        return [about.st_size, about.st_mtime_ns, self.offset, self.size]


@dataclass
class _Entry:
    """An image with its captions, or with the piece of a file that holds them and is read together with the image."""

    name: str
    image: _Piece
    captions: list[str | None] = field(default_factory=list)
    caption_piece: _Piece | None = None
    caption_form: str = ""
    """The form of that piece: "lines", "text" or "json"."""


class ImageSource:
    """A sequence of images with captions, as `open_images` returns it; `source.read(number)` works in any thread.

    `rejected` lists what turned out on opening not to be a sample.
    """

    def __init__(self, entries: list[_Entry], rejected: list[Skipped], *, has_captions: bool) -> None:
        self.entries, self.rejected, self.has_captions = entries, rejected, has_captions

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, number: int) -> Sample:
        """Returns sample `number`: the image in RGB, captions with single blanks, and what was left out."""
        entry = self.entries[number]
        skipped: list[Skipped] = []
        try:
            image = decode_image(entry.image.read(MAX_IMAGE_BYTES))
        except UNREADABLE as error:
            # Without the image its captions are useless, so only the image is listed as skipped.
            return Sample(entry.name, None, (), (Skipped(entry.name, "image", reason_of(error)),))
        captions = tuple(self._captions(entry, skipped)) if self.has_captions else ()
        return Sample(entry.name, image, captions, tuple(skipped))

    def _captions(self, entry: _Entry, skipped: list[Skipped]) -> Iterator[str]:
        captions: list[Any] = list(entry.captions)
        if entry.caption_piece is not None:
            try:
                captions = _parse_captions(entry.caption_piece.read(MAX_CAPTION_BYTES), entry.caption_form)
            except UNREADABLE as error:
                skipped.append(Skipped(entry.name, "caption", reason_of(error)))
                return
        if not captions:
            skipped.append(Skipped(entry.name, "caption", "there is none"))
        for caption in captions:
            try:
                yield _clean_caption(caption)
            except ValueError as error:
                skipped.append(Skipped(entry.name, "caption", reason_of(error)))

    def digest(self) -> str:
        """Returns a SHA-256 of names, captions, sizes and modification times; it is equal while no file changes."""
        sha = hashlib.sha256(json.dumps(self.has_captions).encode())
        for entry in self.entries:
            captions = entry.caption_piece.state() if entry.caption_piece is not None else entry.captions
            sha.update(json.dumps([entry.name, entry.image.state(), captions]).encode())
        for item in self.rejected:
            sha.update(json.dumps([item.item, item.part, item.reason]).encode())
        return sha.hexdigest()


def open_images(path: str | Path, *, path_column: str = "path", caption_column: str = "caption") -> ImageSource:
    """Opens images: a folder of images or of `.tar` shards, a table (`.csv`, `.tsv`, `.parquet`), or a `.tar` file.

    A folder is searched with its subfolders; the captions of `a.jpg` are the lines of `a.txt`. A table has a row per
    caption, or a Parquet column of lists; paths are relative to the table's folder, and rows of one path are one image.
    In a tar, files of one key (the name up to its first dot) are a sample: an image, and `.txt` (one caption) or
    `.json` (`caption` or `captions`). An empty `caption_column` leaves captions out. Only opening raises errors; an
    image that cannot be read later is skipped.
    """
    path = checks.path(path, "images")
    _pillow()
    if path.is_dir():
        shards = sorted(path.glob("*.tar"))
        loose = [file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]
        if shards and loose:
            raise ValueError(
                f"{path} holds images ({loose[0].name}) beside tar shards ({shards[0].name}); separate them"
            )
        source = _open_tars(shards, path) if shards else _open_folder(path)
    elif not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; images are a folder, a .csv, .tsv or .parquet, or a .tar")
    elif path.suffix.lower() == ".tar":
        source = _open_tars([path], path.parent)
    elif path.suffix.lower() in (".csv", ".tsv"):
        source = _open_table(path, _csv_rows(path, path_column, caption_column), bool(caption_column))
    elif path.suffix.lower() == ".parquet":
        source = _open_table(path, _parquet_rows(path, path_column, caption_column), bool(caption_column))
    else:
        hint = "; tar shards are read in place, so decompress it first" if ".gz" in path.suffixes[-1:] else ""
        raise ValueError(f"{path} is neither a folder, a .csv, .tsv or .parquet nor a .tar{hint}")
    if not source.entries:
        why = f"; {source.rejected[0].item}: {source.rejected[0].reason}" if source.rejected else ""
        raise ValueError(f"{path} holds no images{why}")
    return source


def decode_image(data: bytes, draft: tuple[int, int] | None = None) -> Image:
    """Returns the image, or the first one of an animation, in RGB. Bad bytes raise one of `UNREADABLE`. `draft`: a size
    from which on a smaller image will do, which some formats decode faster."""
    image_module = _pillow()
    formats = [name for name in FORMATS if name in image_module.OPEN]
    try:
        with image_module.open(io.BytesIO(data), formats=formats) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"has {width} x {height} pixels, more than {MAX_PIXELS}")
            if max(width, height) > MAX_ASPECT * min(width, height):
                raise ValueError(f"has {width} x {height} pixels: one side is over {MAX_ASPECT} times the other")
            if width * height * DECODING_BYTES_PER_PIXEL.get(image.format, 8) > MAX_DECODING_BYTES:
                raise ValueError(f"has {width} x {height} pixels, too many to decode {image.format} in a gigabyte")
            if draft is not None:
                image.draft("RGB", draft)
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
    except image_module.DecompressionBombError as error:
        raise ValueError(f"has more than {MAX_PIXELS} pixels") from error
    except image_module.UnidentifiedImageError as error:
        raise ValueError("is not an image of a known format" if data else "is empty") from error


def read_image(path: Path, draft: tuple[int, int] | None = None) -> Image:
    """Returns the image of a regular file: an OSError if it cannot be read, a ValueError if it is not an image. `draft`
    is that of `decode_image`."""
    try:
        data = _Piece(path).read(MAX_IMAGE_BYTES)
    except OSError as error:
        raise OSError(error.errno, f"image {path}: {reason_of(error)}") from error
    try:
        return decode_image(data, draft)
    except UNREADABLE as error:
        raise ValueError(f"image {path}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Returns the message of an error as one line."""
    text = " ".join((error.strerror or str(error) if isinstance(error, OSError) else str(error)).split())
    return text or type(error).__name__


def printable(name: str) -> str:
    """Returns a name in which bytes that are not UTF-8 are replaced by escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _open_folder(folder: Path) -> ImageSource:
    entries: list[_Entry] = []
    for at, folders, files in os.walk(folder):
        folders.sort()
        here = set(files)
        for name in files:
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in IMAGE_SUFFIXES:
                whole = Path(at, name)
                text = _Piece(whole.with_suffix(".txt")) if f"{stem}.txt" in here else None
                entries.append(_Entry(whole.relative_to(folder).as_posix(), _Piece(whole), [], text, "lines"))
    entries.sort(key=lambda entry: os.fsencode(entry.name))
    return ImageSource(entries, [], has_captions=any(entry.caption_piece is not None for entry in entries))


def _open_table(
    table: Path, rows: Iterable[tuple[int, Any, list[str | None]] | Skipped], has_captions: bool
) -> ImageSource:
    """Makes a source from rows (number, path, captions); a row that is wrong comes as `Skipped`."""
    entries: dict[str, _Entry] = {}
    rejected = []
    for row in rows:
        if isinstance(row, Skipped):
            rejected.append(row)
            continue
        number, path, captions = row
        if not path:
            rejected.append(Skipped(f"{table.name} row {number}", "image", "has no path"))
            continue
        whole = os.path.normpath(os.path.join(table.parent, path))
        entries.setdefault(whole, _Entry(path, _Piece(Path(whole)))).captions.extend(captions)
    return ImageSource(list(entries.values()), rejected, has_captions=has_captions)


def _csv_rows(
    table: Path, path_column: str, caption_column: str
) -> Iterator[tuple[int, str, list[str | None]] | Skipped]:
    with open(table, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if table.suffix.lower() == ".tsv" else ",")
        try:
            header = next(reader, [])
            _check_columns(table, header, path_column, caption_column)
            at = header.index(path_column)
            caption_at = header.index(caption_column) if caption_column else None
            for number, row in enumerate((row for row in reader if row), start=1):
                if len(row) != len(header):
                    wrong = f"has {len(row)} fields, but the header has {len(header)}"
                    yield Skipped(f"{table.name} row {number}", "image", wrong)
                else:
                    yield number, row[at], [] if caption_at is None else [row[caption_at]]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{table} line {reader.line_num + 1} is not CSV in UTF-8: {error}") from error


def _parquet_rows(table: Path, path_column: str, caption_column: str) -> Iterator[tuple[int, Any, list[str | None]]]:
    wanted = [name for name in (path_column, caption_column) if name]
    types = parquet.column_types(table)
    _check_columns(table, [name for name, _ in types], path_column, caption_column)
    for column, kind in types:
        lists = column == caption_column and kind.startswith(("list<", "large_list<"))
        plain = kind in ("string", "large_string", "string_view")
        if column in wanted and ("string" not in kind or not (lists or plain)):
            raise ValueError(f"{table}: column {column} holds {kind}, not strings")
    number = 0
    for batch in parquet.batches(table, wanted):
        paths = parquet.as_array(batch[path_column])
        captions = parquet.as_array(batch[caption_column]) if caption_column else [()] * len(paths)
        for path, known in zip(paths, captions):
            number += 1
            yield number, path, list(known) if isinstance(known, (tuple, np.ndarray)) else [known]


def _check_columns(table: Path, names: list[str], path_column: str, caption_column: str) -> None:
    flags = {"--path-column": path_column, "--caption-column": caption_column}
    for flag, column in flags.items():
        if column and column not in names:
            columns = ", ".join(map(str, names)) or "none"
            hint = "" if flag == "--path-column" else ' (use "" for images without captions)'
            raise ValueError(f"{table} has no column {column!r}; its columns are: {columns}; {flag} names it{hint}")
        if names.count(column) > 1:
            raise ValueError(f"{table} has {names.count(column)} columns {column!r}")


def _open_tars(shards: list[Path], root: Path) -> ImageSource:
    entries: list[_Entry] = []
    rejected: list[Skipped] = []
    for shard in shards:
        samples: dict[str, _TarSample] = {}
        try:
            _scan_tar(shard, samples, rejected)
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            reason = f"is damaged after {len(samples)} samples: {reason_of(error)}"
            rejected.append(Skipped(shard.name, "image", reason))
        for key, sample in samples.items():
            name = f"{shard.relative_to(root).as_posix()}/{sample.member or key}"
            if sample.image is None:
                rejected.append(Skipped(name, "image", "captions without an image"))
            else:
                text = sample.texts.get("text") or sample.texts.get("json")
                entries.append(_Entry(name, sample.image, [], text, "text" if "text" in sample.texts else "json"))
    return ImageSource(entries, rejected, has_captions=any(entry.caption_piece is not None for entry in entries))


@dataclass
class _TarSample:
    member: str = ""
    image: _Piece | None = None
    texts: dict[str, _Piece] = field(default_factory=dict)
    """The pieces that hold captions, by form: "text" or "json"."""


def _scan_tar(shard: Path, samples: dict[str, _TarSample], rejected: list[Skipped]) -> None:
    """Reads the headers of an uncompressed tar and adds its samples in the order of their first members."""
    with tarfile.open(shard, "r:") as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # the list would grow with the file
            key, suffix = _key_of(member.name)
            form = {".txt": "text", ".json": "json"}.get(suffix)
            if not key or (form is None and suffix not in IMAGE_SUFFIXES):
                continue
            name, part = f"{shard.name}/{member.name}", "image" if form is None else "caption"
            if not member.isreg() or member.issparse():
                rejected.append(Skipped(name, part, "is not a plain file"))
                continue
            sample = samples.setdefault(key, _TarSample())
            piece = _Piece(shard, member.offset_data, member.size)
            if form is None and sample.image is None:
                sample.member, sample.image = member.name, piece
            elif form is not None and form not in sample.texts:
                sample.texts[form] = piece
            else:
                rejected.append(Skipped(name, part, f"the key {key!r} appears again in this shard"))
        # tarfile takes a broken header for the end, whose mark is a block of zeros.
        with open(shard, "rb") as file:
            file.seek(archive.offset)
            block = file.read(tarfile.BLOCKSIZE)
        if block != bytes(tarfile.BLOCKSIZE):
            raise OSError("a broken header" if block else "it ends without an end mark")


def _key_of(member: str) -> tuple[str, str]:
    """Returns webdataset's key, the path up to the first dot of the file name (none if hidden), and the suffix."""
    folder, _, base = member.removeprefix("./").rpartition("/")
    stem, _, _ = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem) if stem else "", os.path.splitext(base)[1].lower()


def _parse_captions(data: bytes, form: str) -> list[Any]:
    text = data.decode("utf-8-sig")
    if form == "lines":
        return [line for line in text.splitlines() if line.strip()]
    if form == "text":
        return [text]
    value = json.loads(text)
    if not isinstance(value, dict) or not ({"caption", "captions"} & value.keys()):
        raise ValueError("its JSON has no caption or captions")
    captions = value.get("captions", value.get("caption"))
    return captions if isinstance(captions, list) else [captions]


def _clean_caption(caption: Any) -> str:
    """Returns the caption with single blanks; a ValueError says why there is nothing to encode."""
    if caption is None:
        raise ValueError("there is none")
    if not isinstance(caption, str):
        raise ValueError(f"is not text but {type(caption).__name__}")
    text = " ".join(caption.split())
    if not text:
        raise ValueError("is empty")
    text.encode()  # raises an error for a lone surrogate, which JSON can hold but which is not text
    return text


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise ValueError(needs("reading images", "Pillow", "encoders")) from error
    PIL.Image.init()
    return PIL.Image
