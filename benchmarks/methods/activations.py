"""The inputs of an encoder's last projections, which BayesVLM needs, written beside what `geoflow embed` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.methods.baselines.bayesvlm import (
    IMAGE_ACTIVATIONS,
    PROJECTIONS_FILE,
    PROJECTIONS_KIND,
    TEXT_ACTIVATIONS,
)
from geoflow_fast.encoders.open_clip import OpenClipEncoder
from geoflow_fast.encoders.sources import open_images, printable
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import write_npy
from geoflow_fast.runtime.tensors import save_tensors


def projections(encoder: OpenClipEncoder) -> dict[str, Tensor]:
    """The last projections: `image.weight` [dim, k_I], `text.weight` [dim, k_T], and `.bias` [dim] where there is one.

    A tower that does not end in a linear projection raises a ValueError.
    """
    weights: dict[str, Tensor] = {}
    for tower, projection in encoder.last.items():
        if projection is None:
            raise ValueError(
                f"the {tower} tower of {encoder.name or 'this model'} does not end in a linear projection, so there "
                "are no activations before it"
            )
        weights |= {f"{tower}.{name}": value.detach() for name, value in projection.linear.named_parameters()}
    return weights


def write_activations(encoder: OpenClipEncoder, images: str | Path, folder: Path, batch_size: int = 64) -> None:
    """Encodes the images and captions of a folder that `geoflow embed` made of `images`, and writes their activations
    into it, row by row as the embeddings, and the projections."""
    weights = projections(encoder)
    rows = table(folder / "img_metadata", "image_path")
    for name, items, activations in (
        (IMAGE_ACTIVATIONS, named_images(images, rows), encoder.image_activations),
        (TEXT_ACTIVATIONS, iter(table(folder / "metadata", "caption")), encoder.text_activations),
    ):
        (folder / name).mkdir(exist_ok=True)
        write_npy(folder / name / f"{name}_0.npy", np.concatenate([*encoded(activations, items, batch_size)]))
    save_tensors(folder / PROJECTIONS_FILE, weights, kind=PROJECTIONS_KIND, info=encoder.facts())


def table(folder: Path, column: str) -> list[str]:
    """A column of the tables in a folder, in the order of their numbers."""
    files = sorted(folder.glob("*.parquet"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if not files:
        raise FileNotFoundError(f"{folder} holds no tables: geoflow embed writes them for images with captions")
    return [str(value) for path in files for value in parquet.read_columns(path, [column])[column]]


def named_images(images: str | Path, rows: Sequence[str]) -> Iterator[Any]:
    """The images of these names, which must stand in the source in this order."""
    source = open_images(images)
    numbers = iter(range(len(source)))
    for name in rows:
        sample = next((each for number in numbers if printable((each := source.read(number)).name) == name), None)
        if sample is None or sample.image is None:
            raise ValueError(f"{images} has no image {name}, of which there is an embedding")
        yield sample.image


def encoded(activations: Callable[[list[Any]], Tensor], items: Iterator[Any], batch_size: int) -> Iterator[np.ndarray]:
    """The activations of the items, float32, batch by batch."""
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == batch_size:
            yield activations(batch).to(torch.float32).cpu().numpy()
            batch = []
    if batch:
        yield activations(batch).to(torch.float32).cpu().numpy()
