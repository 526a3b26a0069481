"""The interface of encoders of images and texts, and helpers that encoders share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union

import torch
from torch import Tensor, nn

from geoflow_fast import geometry
from geoflow_fast.encoders.sources import read_image, reason_of
from geoflow_fast.runtime import checks, hashing

if TYPE_CHECKING:
    from PIL.Image import Image


PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ERROR_LENGTH = 160
"""Number of characters that are shown of another library's error."""

ImageLike = Union["Image", str, Path, Tensor]
"""A Pillow image, the path of an image file, or a tensor that `Encoder.prepare` returned."""


class Encoder(Protocol):
    """Protocol of an encoder, which maps images and texts to unit vectors of one space.

    `embed_images` accepts any object with these members.
    """

    dim: int
    """Width of the embeddings."""

    def facts(self) -> dict[str, Any]:
        """Returns all that the embeddings depend on (name, digest of the weights, settings) as values for JSON."""

    def prepare(self, image: Image) -> Tensor:
        """Preprocesses an RGB image (resizing, scaling) in a loader thread, to the same shape for all images."""

    def encode_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Embeds B >= 0 images: float32 unit rows [B, dim] on the CPU; NaN where the output has no direction."""

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts, with the same kind of result as `encode_images`."""


def stack_images(prepare: Callable[[Image], Tensor], images: Sequence[ImageLike]) -> Tensor:
    """Returns a batch of images, which are prepared first unless they are tensors already."""
    batch = []
    for image in images:
        if isinstance(image, Tensor):
            batch.append(checks.dense(image, "a prepared image"))
        elif isinstance(image, (str, Path)):
            batch.append(prepare(read_image(checks.path(image, "image"))))
        else:
            batch.append(prepare(check_picture(image).convert("RGB")))
    if len({(image.shape, image.dtype, image.device) for image in batch}) > 1:
        raise ValueError(f"prepared images must be alike, got {sorted({str(list(image.shape)) for image in batch})}")
    return torch.stack(batch)


def check_picture(image: object) -> Image:
    """Returns `image` if it is a Pillow image."""
    from PIL.Image import Image as Picture

    if not isinstance(image, Picture):
        raise TypeError(f"an image must be one of Pillow's, got {type(image).__name__}")
    return image


def check_sequence(items: Any, name: str) -> Sequence[Any]:
    """Returns `items` if they are a sequence; a single text is not one."""
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TypeError(f"{name} must be a sequence of them, got {type(items).__name__}")
    return items


def clean_texts(texts: Any) -> list[str]:
    """Returns the texts with every character that UTF-8 cannot hold replaced."""
    known = [checks.words(text, f"text {row}") for row, text in enumerate(check_sequence(texts, "texts"))]
    return [text.encode("utf-8", "replace").decode() for text in known]


def chosen_precision(device: torch.device, precision: str) -> str:
    """The precision that is meant: with "auto" float16 on a GPU and float32 elsewhere."""
    if precision not in ("auto", *PRECISIONS):
        raise ValueError(f"precision must be auto, {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "auto":
        return "float16" if device.type == "cuda" else "float32"
    return precision


def mixed_precision(device: torch.device, precision: str) -> torch.autocast:
    """A context in which a network computes in this precision."""
    low = precision != "float32"
    return torch.autocast(device.type, PRECISIONS[precision] if low else None, enabled=low)


def weights_digest(model: nn.Module) -> str:
    """A digest of the names and values of a network's weights."""
    state = model.state_dict()
    return hashing.fingerprint({"names": list(state), "values": hashing.digest(state.values())})


def unit_rows(x: Tensor) -> Tensor:
    """Returns rows scaled to unit norm, in float32 on the CPU; a row without a direction becomes NaN."""
    return geometry.unit_rows(x).cpu()


def short_error(error: BaseException) -> str:
    """Returns the beginning of an error; those about state dicts and downloads fill pages."""
    text = f"{type(error).__name__}: {reason_of(error)}"
    return text if len(text) <= ERROR_LENGTH else f"{text[:ERROR_LENGTH].rsplit(' ', 1)[0]} ..."
