"""One shard of a folder of embeddings: images are loaded by threads, encoded batch by batch, and collected here."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.encoders.protocol import Encoder
from geoflow_fast.encoders.sources import UNREADABLE, ImageSource, Skipped, printable, reason_of
from geoflow_fast.runtime.files import contents_of
from geoflow_fast.runtime.tensors import load_tensors, save_tensors


@dataclass(frozen=True)
class EmbedSettings:
    """How images are encoded and stored; `embed_images` describes the fields."""

    batch_size: int
    workers: int
    shard_rows: int
    dtype: str


@dataclass(frozen=True)
class PreparedSample:
    """A sample whose image is ready for the network, or None if it could not be read."""

    name: str
    image: Tensor | None
    captions: tuple[str, ...]
    skipped: tuple[Skipped, ...]


class Shard:
    """The rows of a shard, batch by batch.

    `first_image` is the number of its first image among all images that were embedded. `rows` counts the images of the
    source that were seen, including those that could not be read.
    """

    ARRAYS = ("images", "texts")
    KIND = "part of a shard"

    def __init__(self, settings: EmbedSettings, *, with_texts: bool) -> None:
        self.settings, self.with_texts = settings, with_texts
        self.first_image = self.rows = 0
        self.images: list[NDArray[Any]] = []
        self.texts: list[NDArray[Any]] = []
        self.image_columns: dict[str, list[Any]] = {"image_path": []}
        self.text_columns: dict[str, list[Any]] = {"image_path": [], "caption": [], "image_index": []}
        self.skipped: list[Skipped] = []

    def save(self, path: Path) -> None:
        """Writes the batches so far to a file, so that `load` can continue the shard."""
        words = {
            "image": self.image_columns,
            "text": self.text_columns,
            "skipped": [dataclasses.astuple(item) for item in self.skipped],
        }
        tensors = {
            name: torch.from_numpy(np.concatenate(parts)) for name in self.ARRAYS if (parts := getattr(self, name))
        }
        # The words are a tensor of bytes because the length of a file's header, and so of its info, is limited.
        tensors["words"] = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
        save_tensors(path, tensors, kind=self.KIND, info={"rows": self.rows})

    def load(self, path: Path) -> None:
        """Continues with the batches that `save` wrote."""
        tensors, info = load_tensors(path, kind=self.KIND)
        with contents_of(path):
            words = json.loads(tensors.pop("words").numpy().tobytes())
            self.rows, self.image_columns, self.text_columns = info["rows"], words["image"], words["text"]
            self.skipped = [Skipped(*item) for item in words["skipped"]]
            for name, part in tensors.items():
                getattr(self, name).append(part.numpy())

    def add(self, encoder: Encoder, samples: Sequence[PreparedSample]) -> None:
        """Encodes a batch: its images, and the captions of those images that gave an embedding."""
        self.rows += len(samples)
        self.skipped += [item for sample in samples for item in sample.skipped]
        readable = [sample for sample in samples if sample.image is not None]
        names = [sample.name for sample in readable]
        rows, good = self._encode(encoder, "image", [sample.image for sample in readable], names)
        self.images.append(rows)
        first = self.first_image + len(self.image_columns["image_path"])
        embedded = [readable[number] for number in good]
        self.image_columns["image_path"] += [printable(sample.name) for sample in embedded]
        if not self.with_texts:
            return
        texts = [(first + k, sample.name, text) for k, sample in enumerate(embedded) for text in sample.captions]
        # Without texts, an empty batch is encoded all the same: its result has the width of the embeddings.
        for low in range(0, max(1, len(texts)), self.settings.batch_size):
            batch = texts[low : low + self.settings.batch_size]
            names = [name for _, name, _ in batch]
            rows, good = self._encode(encoder, "caption", [caption for _, _, caption in batch], names)
            self.texts.append(rows)
            for index, name, caption in (batch[number] for number in good):
                self.text_columns["image_path"].append(printable(name))
                self.text_columns["caption"].append(caption)
                self.text_columns["image_index"].append(index)

    def _encode(
        self, encoder: Encoder, part: str, items: list[Any], names: list[str]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Encodes images or captions, and notes those without a finite embedding as skipped.

        Returns the embeddings [B, d] of the others, and their positions among `items`.
        """
        try:
            rows = (encoder.encode_images(items) if part == "image" else encoder.encode_texts(items)).numpy()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a batch of {len(items)} does not fit into the device's memory; choose a smaller --batch-size"
            ) from error
        finite = np.isfinite(rows).all(axis=1)
        reason = "the encoder gave no direction for it (NaN or zero)"
        self.skipped += [Skipped(names[number], part, reason) for number in np.flatnonzero(~finite)]
        return rows[finite], np.flatnonzero(finite)


@contextlib.contextmanager
def prepared_samples(
    source: ImageSource, encoder: Encoder, numbers: Iterable[int], settings: EmbedSettings
) -> Iterator[Iterator[PreparedSample]]:
    """Yields an iterator over the samples of these numbers, which threads read and prepare in advance; decoding and
    resizing release Python's lock."""
    pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="images")

    def prepare(number: int) -> PreparedSample:
        sample = source.read(number)
        if sample.image is None:
            return PreparedSample(sample.name, None, (), sample.skipped)
        try:
            return PreparedSample(sample.name, encoder.prepare(sample.image), sample.captions, sample.skipped)
        except UNREADABLE as error:
            return PreparedSample(sample.name, None, (), (Skipped(sample.name, "image", reason_of(error)),))

    def samples() -> Iterator[PreparedSample]:
        waiting: collections.deque[Future[PreparedSample]] = collections.deque()
        for number in numbers:
            waiting.append(pool.submit(prepare, number))
            if len(waiting) > 2 * settings.batch_size + settings.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # it warns about files that are read or skipped anyway
            yield samples()
    finally:
        pool.shutdown(cancel_futures=True)
