"""What an encoder of images and texts has to offer, and what encoders share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union, runtime_checkable

import torch
from torch import Tensor

from geoflow_fast.encoders.sources import read_image, reason_of
from geoflow_fast.runtime import checks

if TYPE_CHECKING:
    from PIL.Image import Image


PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


ERROR_LENGTH = 160
"""Characters of somebody else's error that are worth showing."""


ImageLike = Union["Image", str, Path, Tensor]
"""An image, a file of one, or what `Encoder.prepare` made of one."""


class Encoder(Protocol):
    """Protocol of an encoder, which maps images and texts to unit vectors of one space.

    `embed_images` accepts any object with these members.
    """

    dim: int
    """Width of the embeddings."""

    def facts(self) -> dict[str, Any]:
        """Everything the embeddings depend on, as values that JSON can hold: name, digest of the weights, settings."""

    def prepare(self, image: Image) -> Tensor:
        """Preprocesses an RGB image (resizing, scaling) in a loader thread, to the same shape for all images."""

    def encode_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Embeds B >= 0 images: float32 unit rows [B, dim] on the CPU; NaN where the output has no direction."""

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts, with the same kind of result as `encode_images`."""


@runtime_checkable
class ProjectingEncoder(Protocol):
    """An encoder whose towers end in a linear map, and which shows what goes into it."""

    def image_activations(self, images: Sequence[ImageLike]) -> Tensor:
        """Float32 [B, k_I]: the image tower before its last projection."""

    def text_activations(self, texts: Sequence[str]) -> Tensor:
        """Float32 [B, k_T]: the text tower before its last projection."""

    def project_images(self, activations: Tensor) -> Tensor:
        """The embeddings [B, dim] of activations: projected, scaled to unit norm."""

    def project_texts(self, activations: Tensor) -> Tensor:
        """As `project_images`, of the text tower."""

    def projections(self) -> dict[str, Tensor]:
        """`image.weight` [dim, k_I], `text.weight` [dim, k_T], and `.bias` [dim] where there is one.

        ValueError where a tower has no such map.
        """


def _stack(prepare: Callable[[Image], Tensor], images: Sequence[ImageLike]) -> Tensor:
    """Prepared images as one batch."""

    def prepared(image: ImageLike) -> Tensor:
        if isinstance(image, Tensor):
            return checks.dense(image, "a prepared image")
        if isinstance(image, (str, Path)):
            return prepare(read_image(checks.path(image, "image")))
        return prepare(_picture(image).convert("RGB"))

    batch = [prepared(image) for image in images]
    if len({(image.shape, image.dtype, image.device) for image in batch}) > 1:
        raise ValueError(f"prepared images must be alike, got {sorted({str(list(image.shape)) for image in batch})}")
    return torch.stack(batch)


def _picture(image: object) -> Image:
    from PIL.Image import Image as Picture

    if not isinstance(image, Picture):
        raise TypeError(f"an image must be one of Pillow's, got {type(image).__name__}")
    return image


def _sequence(items: Any, name: str) -> Sequence[Any]:
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TypeError(f"{name} must be a sequence of them, got {type(items).__name__}")
    return items


def _texts(texts: Any) -> list[str]:
    """Texts that UTF-8 can hold."""
    found = [checks.words(text, f"text {row}") for row, text in enumerate(_sequence(texts, "texts"))]
    return [text.encode("utf-8", "replace").decode() for text in found]


def _unit(x: Tensor) -> Tensor:
    """Rows scaled to unit norm, on the CPU; NaN where there is no direction."""
    return (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).cpu()


def _short(error: BaseException) -> str:
    """The beginning of an error: those of state dicts and hubs go on for pages."""
    text = f"{type(error).__name__}: {reason_of(error)}"
    return text if len(text) <= ERROR_LENGTH else f"{text[:ERROR_LENGTH].rsplit(' ', 1)[0]} ..."
