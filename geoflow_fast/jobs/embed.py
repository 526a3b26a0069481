"""Embedding of images and captions into a folder, shard by shard.

Finished shards are kept in a folder beside the output, so that a killed job can be continued; the output appears whole
at the end. After Ctrl-C, the batches of an unfinished shard are kept too. The facts of the job determine which images
are in which shard and batch, so a continued job ends with the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geoflow_fast.data.embeddings import IMAGE_FOLDER, TEXT_FOLDER
from geoflow_fast.data.pairs import INDEX_FILE, METADATA_FOLDER
from geoflow_fast.encoders.protocol import Encoder
from geoflow_fast.encoders.sources import ImageSource, Skipped, open_images, printable
from geoflow_fast.jobs.job import FACTS_FILE, read_facts, refuse_other_job
from geoflow_fast.jobs.shard import EmbedSettings, Shard, prepared_samples
from geoflow_fast.runtime import checks, parquet
from geoflow_fast.runtime.files import (
    LOCK_FILE,
    foreign_file,
    locked,
    remove_own,
    sync_folder,
    temporaries_of,
    write_atomic,
    write_json,
    write_npy,
)
from geoflow_fast.runtime.interrupt import stop_on_interrupt
from geoflow_fast.runtime.progress import progress_bar

FORMAT = 1
"""This number goes up when a release computes other embeddings from the same settings, so that it does not continue the
shards of an older one."""
SHARD_ROWS = 16384
"""Images per shard. A kill loses at most the work on one shard."""
IMAGE_METADATA = "img_metadata"
RESULT_FILE, SKIPPED_FILE = "embed.json", "skipped.csv"
DTYPES = ("float32", "float16")
OWN = "|".join(
    (
        rf"(?P<rows>{IMAGE_FOLDER}|{TEXT_FOLDER})/(?P=rows)_\d+\.npy",
        rf"(?P<table>{METADATA_FOLDER}|{IMAGE_METADATA})/(?P=table)_\d+\.parquet",
        r"shard_\d+\.(done|part)",
        *map(re.escape, (INDEX_FILE, RESULT_FILE, SKIPPED_FILE, FACTS_FILE, LOCK_FILE)),
    )
)
"""What a job makes in its folder, as a pattern. Nothing else is ever removed."""


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


def embed_images(
    images: str | Path | ImageSource,
    encoder: Encoder,
    out: str | Path,
    *,
    batch_size: int = 64,
    workers: int = 4,
    shard_rows: int = SHARD_ROWS,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: bool | None = None,
) -> EmbedSummary:
    """Embeds images and their captions with `encoder` into the folder `out`, in the layout `EmbeddingPairs.open` reads.

    `images`: a folder, a table or tar shards, as in docs/embedding.md. The layout is clip-retrieval's, plus
    `image_index.npy` unless every image has exactly one text. `metadata/` has a row per text and `img_metadata/` a row
    per image; without captions `metadata/` has a row per image. `skipped.csv` lists what could not be read.
    `batch_size`: images encoded at once. `workers`: threads that load images. `shard_rows`: images per shard. `dtype`:
    "float32" or "float16". `progress`: show a bar; by default on a terminal.

    If the job is killed, the same call continues it; output of another job is refused unless `overwrite` is set. On
    Ctrl-C the current batch is completed and all work so far is kept; a second Ctrl-C stops at once.
    """
    for name, count in (("batch_size", batch_size), ("workers", workers), ("shard_rows", shard_rows)):
        checks.integer(count, name, 1)
    folder = checks.path(out, "out")
    if not folder.name:
        raise ValueError(f"out must be a folder of its own, got {folder}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = images if isinstance(images, ImageSource) else open_images(images)
    if source.has_captions:
        encoder.encode_texts(["a picture"])  # reports a tokenizer that cannot be loaded before any image is encoded
    job = _EmbedJob(source, encoder, folder, EmbedSettings(batch_size, workers, shard_rows, dtype))
    return job.run(overwrite=overwrite, shown=progress)


class _EmbedJob:
    """The embedding of one source by one encoder. `folder` holds its shards until it becomes `out`."""

    def __init__(self, source: ImageSource, encoder: Encoder, out: Path, settings: EmbedSettings) -> None:
        self.source, self.encoder, self.out, self.settings = source, encoder, out, settings
        self.folder = out.with_name(f"{out.name}.shards")
        self.replaced = out.with_name(f".{out.name}.old")
        """Where the former contents of `out` are kept until the new ones have taken their place."""
        facts = {
            "task": "embed",
            "format": FORMAT,
            **encoder.facts(),
            "images": source.digest(),
            # Rows of one batch are summed together, so the last bits of the results depend on its size.
            "batch_size": settings.batch_size,
            "shard_rows": settings.shard_rows,
            "dtype": settings.dtype,
        }
        self.facts: dict[str, Any] = json.loads(json.dumps(facts, allow_nan=False))
        numbers = range(len(source))
        self.shards = [numbers[first : first + settings.shard_rows] for first in numbers[:: settings.shard_rows]]
        """The numbers of the images in each shard."""

    def run(self, *, overwrite: bool, shown: bool | None) -> EmbedSummary:
        self._check(overwrite=overwrite)
        finished = self._finished()
        if finished is not None:
            self._remove_traces()
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
        """Raises an error if something that is not part of this job is in the way."""
        if self.out.exists() and not self.out.is_dir():
            raise NotADirectoryError(f"{self.out} is a file; the output is a folder")
        taken = self.out.is_dir() and any(self.out.iterdir())
        if taken and self._finished() is None:
            if not _is_ours(self.out / RESULT_FILE):
                raise FileExistsError(f"{self.out} holds something that geoflow embed did not make; move it")
            if not overwrite:
                raise FileExistsError(f"{self.out} is not the result of this job; move it, or ask to overwrite")
            _refuse_foreign(self.out)
        if self._finished() is None and (self.replaced.exists() or self.replaced.is_symlink()):
            _refuse_foreign(self.replaced, RESULT_FILE)
        left = read_facts(self.folder / FACTS_FILE)
        if self.folder.exists():
            # A job that is killed at once may leave only these files.
            begun = {LOCK_FILE, *(path.name for path in temporaries_of(self.folder / FACTS_FILE))}
            _refuse_foreign(self.folder, *([FACTS_FILE] if {x.name for x in self.folder.iterdir()} - begun else []))
        # Without encoded rows nothing is lost, so that a batch which was too large may be made smaller.
        if not overwrite and left is not None and left != self.facts and _progress_files(self.folder):
            refuse_other_job(self.folder, left, self.facts)

    def _finished(self) -> EmbedSummary | None:
        """Returns the summary of `out` if a job with these facts made it."""
        result = read_facts(self.out / RESULT_FILE)
        return EmbedSummary(**result["summary"]) if result and result.get("facts") == self.facts else None

    def _done_file(self, number: int) -> Path:
        return self.folder / f"shard_{number}.done"

    def _part_file(self, number: int) -> Path:
        return self.folder / f"shard_{number}.part"

    def _encode_shards(self, *, shown: bool | None) -> None:
        unfinished: dict[int, Shard] = {}
        for number in range(len(self.shards)):
            if not self._done_file(number).is_file():
                unfinished[number] = Shard(self.settings, with_texts=self.source.has_captions)
                if self._part_file(number).is_file():
                    unfinished[number].load(self._part_file(number))
        missing = {number: self.shards[number][shard.rows :] for number, shard in unfinished.items()}
        done = len(self.source) - sum(map(len, missing.values()))
        first_image = 0
        with (
            prepared_samples(self.source, self.encoder, itertools.chain(*missing.values()), self.settings) as samples,
            progress_bar(len(self.source), done, "images", shown=shown) as advance,
            stop_on_interrupt("batch") as stop,
        ):
            for number in range(len(self.shards)):
                if number in unfinished:
                    shard = unfinished.pop(number)  # its memory is free once it is written
                    shard.first_image = first_image
                    for low in range(0, len(missing[number]), self.settings.batch_size):
                        if stop.asked:
                            if shard.rows:
                                shard.save(self._part_file(number))
                            raise KeyboardInterrupt
                        size = min(self.settings.batch_size, len(missing[number]) - low)
                        shard.add(self.encoder, list(itertools.islice(samples, size)))
                        advance(size)
                    self._write_shard(number, shard)
                first_image += json.loads(self._done_file(number).read_bytes())["images"]

    def _write_shard(self, number: int, shard: Shard) -> None:
        """Writes the files of a shard; the one that marks it as finished comes last."""
        arrays = {IMAGE_FOLDER: shard.images}
        tables = {METADATA_FOLDER: shard.image_columns}
        if self.source.has_captions:
            arrays[TEXT_FOLDER] = shard.texts
            tables = {IMAGE_METADATA: shard.image_columns, METADATA_FOLDER: shard.text_columns}
        for name in (*arrays, *tables):
            (self.folder / name).mkdir(exist_ok=True)
        for name, parts in arrays.items():
            write_npy(self.folder / name / f"{name}_{number}.npy", np.concatenate(parts).astype(self.settings.dtype))
        for name, columns in tables.items():
            _write_table(self.folder / name / f"{name}_{number}.parquet", columns)
        done = {
            "images": len(shard.image_columns["image_path"]),
            "texts": len(shard.text_columns["caption"]),
            "skipped": [dataclasses.astuple(item) for item in shard.skipped],
        }
        write_json(self._done_file(number), done)
        self._part_file(number).unlink(missing_ok=True)

    def _conclude(self) -> EmbedSummary:
        """Writes what is known once all shards are finished."""
        done = [json.loads(self._done_file(number).read_bytes()) for number in range(len(self.shards))]
        skipped = [*self.source.rejected, *(Skipped(*item) for shard in done for item in shard["skipped"])]
        images, texts = (sum(shard[kind] for shard in done) for kind in ("images", "texts"))
        if images == 0:
            remove_own(self.folder, OWN, FACTS_FILE)
            first = next(item for item in skipped if item.part == "image")
            raise ValueError(f"none of {len(self.source)} images could be embedded; {first.item}: {first.reason}")
        if self.source.has_captions:
            files = [self.folder / METADATA_FOLDER / f"{METADATA_FOLDER}_{k}.parquet" for k in range(len(self.shards))]
            index = np.concatenate([parquet.read_columns(path, ["image_index"])["image_index"] for path in files])
            if not np.array_equal(index, np.arange(images)):
                write_npy(self.folder / INDEX_FILE, index)
        _write_skipped(self.folder / SKIPPED_FILE, skipped)
        parts = collections.Counter(item.part for item in skipped)
        summary = EmbedSummary(images, texts, parts["image"], parts["caption"], self.encoder.dim, len(done))
        write_json(self.folder / RESULT_FILE, {"facts": self.facts, "summary": dataclasses.asdict(summary)})
        return summary

    def _publish(self) -> None:
        """Renames the finished folder to `out`; the former contents of `out` are removed last."""
        self._remove_replaced()
        if self.out.is_dir() and any(self.out.iterdir()):
            os.replace(self.out, self.replaced)
        os.replace(self.folder, self.out)
        sync_folder(self.out.parent)
        self._remove_traces()

    def _remove_traces(self) -> None:
        """Removes what only an unfinished job needs."""
        for path in [*_progress_files(self.out), self.out / FACTS_FILE, self.out / LOCK_FILE]:
            path.unlink(missing_ok=True)
        self._remove_replaced()

    def _remove_replaced(self) -> None:
        """Removes the former contents of `out`, and a folder of their name only if a job made it."""
        if _is_ours(self.replaced / RESULT_FILE) and foreign_file(self.replaced, OWN) is None:
            remove_own(self.replaced, OWN, RESULT_FILE)


def _progress_files(folder: Path) -> list[Path]:
    """Returns the files that mark shards as finished or hold part of one."""
    return [*folder.glob("shard_*.done"), *folder.glob("shard_*.part")]


def _is_ours(file: Path) -> bool:
    """Whether a job that embeds images wrote this file of facts or of a result."""
    known = read_facts(file) or {}
    facts = known.get("facts") if file.name == RESULT_FILE else known
    return isinstance(facts, dict) and facts.get("task") == "embed"


def _refuse_foreign(folder: Path, marker: str | None = None) -> None:
    """Raises a FileExistsError if a folder, which would be removed, holds something that no job made, or lacks the file
    that tells so."""
    foreign = foreign_file(folder, OWN)
    if foreign is None and marker is not None and not _is_ours(folder / marker):
        foreign = folder
    if foreign == folder:
        raise FileExistsError(f"{folder} holds something that geoflow embed did not make; move it")
    if foreign is not None:
        raise FileExistsError(f"{folder} holds something that geoflow embed did not make, {foreign.name}; move it")


def _empty(folder: Path) -> None:
    """Removes the work of another job. Its facts go last, because they tell whose work it is."""
    _refuse_foreign(folder)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        elif path not in (folder / LOCK_FILE, folder / FACTS_FILE):
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
    writer.writerows([printable(value) for value in dataclasses.astuple(item)] for item in skipped)
    write_atomic(path, lines.getvalue().encode())
