"""Images and captions into a folder of embeddings, a shard at a time; what a kill leaves behind is continued.

Finished shards wait in a folder beside the output, which appears whole at the end; one that Ctrl-C interrupts is kept
as far as it is. Which images are in a shard and in a batch follows from the job's facts alone, so a continued run ends
with the bytes of an undisturbed one.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.pairs import IMAGE_FOLDER, INDEX_FILE, METADATA_FOLDER, TEXT_FOLDER
from geoflow_fast.encoders.protocol import Encoder, ProjectingEncoder
from geoflow_fast.encoders.sources import ImageSource, Refused, Sample, Skipped, open_images, printable, reason_of
from geoflow_fast.jobs.job import FACTS_FILE, as_json, read_facts, refuse_other_job
from geoflow_fast.runtime import checks, interrupt, parquet
from geoflow_fast.runtime.files import (
    LOCK_FILE,
    TEMPORARY_NAME,
    contents_of,
    locked,
    sync_folder,
    write_atomic,
    write_json,
    write_npy,
)
from geoflow_fast.runtime.progress import progress_bar
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

FORMAT = 1
"""Raised when equal settings come to give other bytes, so that shards of an older release are not continued."""


SHARD_ROWS = 16384
"""Images between two savings. A kill loses at most the work on one shard."""


IMAGE_PRE, TEXT_PRE, IMAGE_METADATA = "img_pre", "text_pre", "img_metadata"


RESULT_FILE, SKIPPED_FILE, PROJECTIONS_FILE = "embed.json", "skipped.csv", "projections.safetensors"


PROJECTIONS_KIND = "projections"


DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class EmbedSummary:
    """Counts of what `embed_images` did.

    `images`, `texts`: embeddings written. `skipped_images`, `skipped_captions`: inputs that could not be used, listed
    in `skipped.csv`. `dim`: width of the embeddings. `shards`: files per kind of embedding.
    """

    images: int
    texts: int
    skipped_images: int
    skipped_captions: int
    dim: int
    shards: int


@dataclass(frozen=True)
class _Loaded:
    """A sample whose image, if it could be read, is ready for the network."""

    name: str
    image: Tensor | None
    captions: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def embed_images(
    images: str | Path | ImageSource,
    encoder: Encoder,
    out: str | Path,
    *,
    batch_size: int = 64,
    workers: int = 4,
    shard_rows: int = SHARD_ROWS,
    dtype: str = "float32",
    pre_projection: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
) -> EmbedSummary:
    """Embeds images and their captions with `encoder` into the folder `out`, in the layout `EmbeddingPairs.open` reads.

    `images`: a folder, a table or tar shards, as in docs/embedding.md. The layout is clip-retrieval's, plus
    `image_index.npy` unless every image has exactly one text. `metadata/` has a row per text and `img_metadata/` a row
    per image; without captions `metadata/` has a row per image. `skipped.csv` lists what could not be read.
    `pre_projection` adds `img_pre/`, `text_pre/` and `projections.safetensors`: the activations before the encoder's
    last projections, and the projections. `batch_size`: images encoded at once. `workers`: threads that load images.
    `shard_rows`: images per shard. `dtype`: "float32" or "float16". `progress`: show a bar; by default on a terminal.

    If the job is killed, the same call continues it; output of another job is refused unless `overwrite` is set. On
    Ctrl-C the current batch is completed and all work so far is kept; a second Ctrl-C stops at once.
    """
    for name, count in (("batch_size", batch_size), ("workers", workers), ("shard_rows", shard_rows)):
        checks.integer(count, name, 1)
    place = checks.path(out, "out")
    if not place.name:
        raise ValueError(f"out must be a folder of its own, got {place}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if pre_projection:
        _projections(encoder)  # what is missing is said before anything is read
    source = images if isinstance(images, ImageSource) else open_images(images)
    if source.has_captions:
        encoder.encode_texts(["a picture"])  # a tokenizer that cannot be had is said before hours of images
    settings = _Settings(batch_size, workers, shard_rows, dtype, pre_projection)
    job = _EmbedJob(source, encoder, place, settings)
    return job.run(overwrite=overwrite, shown=sys.stderr.isatty() if progress is None else progress)


def _projections(encoder: Encoder) -> dict[str, Tensor]:
    if not isinstance(encoder, ProjectingEncoder):
        raise ValueError(f"{type(encoder).__name__} does not show activations before a projection")
    return encoder.projections()


@dataclass(frozen=True)
class _Settings:
    batch_size: int
    workers: int
    shard_rows: int
    dtype: str
    pre_projection: bool


class _EmbedJob:
    """Shards of one source by one encoder, on their way to `out`."""

    def __init__(self, source: ImageSource, encoder: Encoder, out: Path, settings: _Settings) -> None:
        self.source, self.encoder, self.out, self.settings = source, encoder, out, settings
        self.folder = out.with_name(f"{out.name}.shards")
        self.facts = as_json(
            {
                "task": "embed",
                "format": FORMAT,
                **encoder.facts(),
                "images": source.digest(),
                # Sums over rows of one batch are made together: in their last bits, results depend on it.
                "batch_size": settings.batch_size,
                "shard_rows": settings.shard_rows,
                "dtype": settings.dtype,
                "pre_projection": settings.pre_projection,
            }
        )

    def run(self, *, overwrite: bool, shown: bool) -> EmbedSummary:
        self._check(overwrite=overwrite)
        finished = self._finished()
        if finished is not None:
            self._tidy()
            return finished
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            if read_facts(self.folder / FACTS_FILE) != self.facts:
                _empty(self.folder)
                write_json(self.folder / FACTS_FILE, self.facts)
            self._encode_shards(shown=shown)
            summary = self._conclude()
            self._publish()
        return summary

    def _check(self, *, overwrite: bool) -> None:
        """Raises if something else is in the way."""
        if self.out.exists() and not self.out.is_dir():
            raise NotADirectoryError(f"{self.out} is a file; the output is a folder")
        taken = self.out.is_dir() and any(self.out.iterdir())
        if taken and self._finished() is None:
            if not (self.out / RESULT_FILE).is_file():
                raise FileExistsError(f"{self.out} holds something that geoflow embed did not make; move it")
            if not overwrite:
                raise FileExistsError(f"{self.out} is not the result of this job; move it, or ask to overwrite")
        left = read_facts(self.folder / FACTS_FILE)
        # guard: a job that was killed at once can be started again
        begun = {LOCK_FILE, TEMPORARY_NAME.format(FACTS_FILE)}  # left by a job that was killed at once
        if left is None and self.folder.is_dir() and {path.name for path in self.folder.iterdir()} - begun:
            raise FileExistsError(f"{self.folder} holds something that geoflow embed did not make; move it")
        # Without encoded rows there is nothing to lose: a batch that was too large may be made smaller.
        if not overwrite and left is not None and left != self.facts and _progress_files(self.folder):
            refuse_other_job(self.folder, left, self.facts)

    def _finished(self) -> EmbedSummary | None:
        """The summary of `out` if a job with these facts made it."""
        found = read_facts(self.out / RESULT_FILE)
        return EmbedSummary(**found["summary"]) if found and found.get("facts") == self.facts else None

    def _shards(self) -> Iterator[tuple[int, range]]:
        step = self.settings.shard_rows
        for number, first in enumerate(range(0, len(self.source), step)):
            yield number, range(first, min(first + step, len(self.source)))

    def _encode_shards(self, *, shown: bool) -> None:
        begun = {number: self._begin(number) for number, _ in self._shards() if not self._is_done(number)}
        missing = {number: rows[begun[number].rows :] for number, rows in self._shards() if number in begun}
        done = len(self.source) - sum(map(len, missing.values()))
        first_image = 0
        with (
            _loaded(self.source, self.encoder, itertools.chain(*missing.values()), self.settings) as samples,
            progress_bar(len(self.source), done, "images", shown=shown) as advance,
            interrupt.StopOnInterrupt("batch") as stop,
        ):
            for number, _ in self._shards():
                if number in begun:
                    shard = begun.pop(number)
                    shard.first_image = first_image
                    for size in _batches(len(missing[number]), self.settings.batch_size):
                        self._heed(stop, number, shard)
                        shard.add(self.encoder, list(itertools.islice(samples, size)))
                        advance(size)
                    self._write_shard(number, shard)
                first_image += _read_done(self.folder, number)["images"]

    def _is_done(self, number: int) -> bool:
        return (self.folder / _done_file(number)).is_file()

    def _begin(self, number: int) -> _Shard:
        """The shard as far as an interrupted run came with it."""
        shard = _Shard(self.settings, with_texts=self.source.has_captions)
        path = self.folder / _part_file(number)
        if path.is_file():
            shard.load(path)
        return shard

    def _heed(self, stop: interrupt.StopOnInterrupt, number: int, shard: _Shard) -> None:
        """If asked to stop, keeps what the shard has and stops."""
        if stop.asked:
            if shard.rows:
                shard.save(self.folder / _part_file(number))
            raise KeyboardInterrupt

    def _write_shard(self, number: int, shard: _Shard) -> None:
        """The file that tells of a finished shard comes last."""
        arrays = {IMAGE_FOLDER: shard.images}
        tables = {IMAGE_METADATA: shard.image_columns} if self.source.has_captions else {}
        tables[METADATA_FOLDER] = shard.text_columns if self.source.has_captions else shard.image_columns
        if self.source.has_captions:
            arrays[TEXT_FOLDER] = shard.texts
        if self.settings.pre_projection:
            arrays |= {IMAGE_PRE: shard.image_pre} | ({TEXT_PRE: shard.text_pre} if self.source.has_captions else {})
        for name, parts in arrays.items():
            array = np.concatenate(parts).astype(self.settings.dtype if name in _EMBEDDINGS else np.float32)
            path = self._place(name, f"{name}_{number}.npy")
            write_npy(path, array)
        for name, columns in tables.items():
            _write_table(self._place(name, f"{name}_{number}.parquet"), columns)
        done = {
            "images": len(shard.image_columns["image_path"]),
            "texts": len(shard.text_columns["caption"]),
            "skipped": _as_tuples(shard.skipped),
        }
        write_json(self.folder / _done_file(number), done)
        (self.folder / _part_file(number)).unlink(missing_ok=True)

    def _place(self, folder: str, name: str) -> Path:
        (self.folder / folder).mkdir(exist_ok=True)
        return self.folder / folder / name

    def _conclude(self) -> EmbedSummary:
        """Writes what is known once all shards are there."""
        done = [_read_done(self.folder, number) for number, _ in self._shards()]
        skipped = [*self.source.rejected, *(Skipped(*item) for shard in done for item in shard["skipped"])]
        images, texts = (sum(shard[side] for shard in done) for side in ("images", "texts"))
        if images == 0:
            shutil.rmtree(self.folder)
            first = next(item for item in skipped if item.part == "image")
            raise ValueError(f"none of {len(self.source)} images could be embedded; {first.item}: {first.reason}")
        if self.source.has_captions:
            self._write_index(images)
        if self.settings.pre_projection:
            projections = _projections(self.encoder)
            save_tensors(self.folder / PROJECTIONS_FILE, projections, kind=PROJECTIONS_KIND, info=self.encoder.facts())
        _write_skipped(self.folder / SKIPPED_FILE, skipped)
        parts = collections.Counter(item.part for item in skipped)
        summary = EmbedSummary(images, texts, parts["image"], parts["caption"], self.encoder.dim, len(done))
        write_json(self.folder / RESULT_FILE, {"facts": self.facts, "summary": dataclasses.asdict(summary)})
        return summary

    def _write_index(self, images: int) -> None:
        """The image row of each text, unless texts and images go one by one."""
        files = [self.folder / METADATA_FOLDER / f"{METADATA_FOLDER}_{number}.parquet" for number, _ in self._shards()]
        index = np.concatenate([parquet.read_columns(path, ["image_index"])["image_index"] for path in files])
        if not np.array_equal(index, np.arange(images)):
            write_npy(self.folder / INDEX_FILE, index)

    def _publish(self) -> None:
        """Moves the finished folder to its place; what was there before goes last."""
        if self._old.is_dir():
            shutil.rmtree(self._old)
        if self.out.is_dir() and any(self.out.iterdir()):
            os.replace(self.out, self._old)
        os.replace(self.folder, self.out)
        sync_folder(self.out.parent)
        self._tidy()

    @property
    def _old(self) -> Path:
        """Where a result that is being replaced waits."""
        return self.out.with_name(f".{self.out.name}.old")

    def _tidy(self) -> None:
        """Removes what only an unfinished job needs."""
        for path in [*_progress_files(self.out), self.out / FACTS_FILE, self.out / LOCK_FILE]:
            path.unlink(missing_ok=True)
        if self._old.is_dir():
            shutil.rmtree(self._old)


_EMBEDDINGS = (IMAGE_FOLDER, TEXT_FOLDER)


class _Shard:
    """The rows of a shard, batch by batch. `first_image` is the row of its first image among all; `rows` is how many
    of the source's are in, read or not."""

    ARRAYS = ("images", "texts", "image_pre", "text_pre")
    KIND = "part of a shard"

    def __init__(self, settings: _Settings, *, with_texts: bool) -> None:
        self.settings, self.with_texts = settings, with_texts
        self.first_image = self.rows = 0
        self.images: list[NDArray[Any]] = []
        self.texts: list[NDArray[Any]] = []
        self.image_pre: list[NDArray[Any]] = []
        self.text_pre: list[NDArray[Any]] = []
        self.image_columns: dict[str, list[Any]] = {"image_path": []}
        self.text_columns: dict[str, list[Any]] = {"image_path": [], "caption": [], "image_index": []}
        self.skipped: list[Skipped] = []

    def save(self, path: Path) -> None:
        """Keeps the batches so far."""
        words = {"image": self.image_columns, "text": self.text_columns, "skipped": _as_tuples(self.skipped)}
        tensors = {
            name: torch.from_numpy(np.concatenate(parts)) for name in self.ARRAYS if (parts := getattr(self, name))
        }
        # Not among the facts of the file, whose length is limited.
        tensors["words"] = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
        save_tensors(path, tensors, kind=self.KIND, info={"rows": self.rows})

    def load(self, path: Path) -> None:
        """Takes up what `save` kept."""
        tensors, info = load_tensors(path, kind=self.KIND)
        with contents_of(path):
            words = json.loads(tensors.pop("words").numpy().tobytes())
            self.rows, self.image_columns, self.text_columns = info["rows"], words["image"], words["text"]
            self.skipped = [Skipped(*item) for item in words["skipped"]]
            for name, part in tensors.items():
                getattr(self, name).append(part.numpy())

    def add(self, encoder: Encoder, samples: Sequence[_Loaded]) -> None:
        """Encodes a batch: its images, and the captions of those that gave an embedding."""
        self.rows += len(samples)
        self.skipped += [item for sample in samples for item in sample.skipped]
        read = [(sample, sample.image) for sample in samples if sample.image is not None]
        with _room_for(len(read)):
            rows, pre = self._encode(encoder, "image", [image for _, image in read])
        kept = self._keep([sample.name for sample, _ in read], rows, "image")
        self.images.append(rows[kept])
        self.image_pre.append(pre[kept])
        good = [read[place][0] for place in kept]
        first = self.first_image + len(self.image_columns["image_path"])
        self.image_columns["image_path"] += [printable(sample.name) for sample in good]
        if self.with_texts:
            self._add_texts(encoder, [(first + k, s.name, text) for k, s in enumerate(good) for text in s.captions])

    def _add_texts(self, encoder: Encoder, texts: list[tuple[int, str, str]]) -> None:
        """Texts as (row of their image, its name, caption), as many at once as images; also none, which has a width."""
        for low in range(0, max(1, len(texts)), self.settings.batch_size):
            part = texts[low : low + self.settings.batch_size]
            with _room_for(len(part)):
                rows, pre = self._encode(encoder, "text", [caption for _, _, caption in part])
            kept = self._keep([name for _, name, _ in part], rows, "caption")
            self.texts.append(rows[kept])
            self.text_pre.append(pre[kept])
            for place in kept:
                index, name, caption = part[place]
                self.text_columns["image_path"].append(printable(name))
                self.text_columns["caption"].append(caption)
                self.text_columns["image_index"].append(index)

    def _encode(self, encoder: Encoder, side: str, items: list[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(embeddings [B, d], activations before the projection [B, k], else [B, 0])."""
        if not self.settings.pre_projection:
            rows = encoder.encode_images(items) if side == "image" else encoder.encode_texts(items)
            return rows.numpy(), np.empty((len(rows), 0), np.float32)
        assert isinstance(encoder, ProjectingEncoder)  # embed_images has asked for its projections
        if side == "image":
            pre = encoder.image_activations(items)
            return encoder.project_images(pre).numpy(), pre.cpu().numpy()
        pre = encoder.text_activations(items)
        return encoder.project_texts(pre).numpy(), pre.cpu().numpy()

    def _keep(self, names: list[str], rows: NDArray[Any], part: str) -> NDArray[np.int64]:
        """Rows that are numbers; the others are skipped."""
        good = np.isfinite(rows).all(axis=1)
        reason = "the encoder gave no direction for it (NaN or zero)"
        self.skipped += [Skipped(names[place], part, reason) for place in np.flatnonzero(~good)]
        return np.flatnonzero(good)


@contextlib.contextmanager
def _loaded(
    source: ImageSource, encoder: Encoder, numbers: Iterator[int], settings: _Settings
) -> Iterator[Iterator[_Loaded]]:
    """Samples in the order of `numbers`, read by threads: decoding and resizing leave Python's lock to others."""
    ahead = 2 * settings.batch_size + settings.workers
    pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="images")

    def samples() -> Iterator[_Loaded]:
        waiting: collections.deque[Future[_Loaded]] = collections.deque()
        for number in numbers:
            waiting.append(pool.submit(_load, source, encoder, number))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # on files that are read or refused anyway
            yield samples()
    finally:
        pool.shutdown(cancel_futures=True)


def _load(source: ImageSource, encoder: Encoder, number: int) -> _Loaded:
    sample: Sample = source.read(number)
    if sample.image is None:
        return _Loaded(sample.name, None, (), sample.skipped)
    try:
        return _Loaded(sample.name, encoder.prepare(sample.image), sample.captions, sample.skipped)
    except Refused as error:
        return _Loaded(sample.name, None, (), (Skipped(sample.name, "image", reason_of(error)),))


@contextlib.contextmanager
def _room_for(rows: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"a batch of {rows} does not fit into the device's memory; --batch-size less") from error


def _batches(rows: int, size: int) -> Iterator[int]:
    """Sizes of the batches that so many rows are cut into."""
    return (min(size, rows - first) for first in range(0, rows, size))


def _done_file(number: int) -> str:
    return f"shard_{number}.done"


def _part_file(number: int) -> str:
    return f"shard_{number}.part"


def _progress_files(folder: Path) -> list[Path]:
    """Files that tell of shards, finished or not."""
    return [*folder.glob("shard_*.done"), *folder.glob("shard_*.part")]


def _as_tuples(skipped: Sequence[Skipped]) -> list[tuple[str, ...]]:
    return [dataclasses.astuple(item) for item in skipped]


def _read_done(folder: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / _done_file(number)).read_bytes())
    return found


def _empty(folder: Path) -> None:
    """Removes the work of another job; its facts go last, for they say whose it is."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (LOCK_FILE, FACTS_FILE):
            path.unlink()
    (folder / FACTS_FILE).unlink(missing_ok=True)


def _write_table(path: Path, columns: Mapping[str, list[Any]]) -> None:
    import pyarrow.parquet

    types = {"image_index": pyarrow.int64()}
    arrays = {name: pyarrow.array(column, types.get(name, pyarrow.string())) for name, column in columns.items()}
    write_atomic(path, lambda file: pyarrow.parquet.write_table(pyarrow.table(arrays), file))


def _write_skipped(path: Path, skipped: Sequence[Skipped]) -> None:
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(("item", "part", "reason"))
    writer.writerows([printable(value) for value in item] for item in _as_tuples(skipped))
    write_atomic(path, lines.getvalue().encode())
