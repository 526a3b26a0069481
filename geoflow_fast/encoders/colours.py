"""An encoder that knows only colours and needs no weights, for demonstrations and tests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.encoders.protocol import (
    ImageLike,
    check_picture,
    check_sequence,
    clean_texts,
    stack_images,
    unit_rows,
)

if TYPE_CHECKING:
    from PIL.Image import Image


class ColourEncoder:
    """An encoder without weights, for trying out the pipeline. It knows only colours and their names.

    An image is described by its shares of eleven basic colours and a 4 x 4 grid of brightness, a text by the colours it
    names and a hash of its words. A fixed random map brings both into one space of width 64, in which "a red car" is
    near red images; nothing else about the content of an image is represented.
    """

    dim = 64
    # Berlin and Kay's basic colour terms, in sRGB.
    COLOURS = (
        ("black", (0, 0, 0)),
        ("white", (255, 255, 255)),
        ("grey", (128, 128, 128)),
        ("red", (210, 30, 30)),
        ("orange", (245, 140, 20)),
        ("yellow", (245, 225, 40)),
        ("green", (40, 150, 50)),
        ("blue", (40, 80, 200)),
        ("purple", (120, 40, 150)),
        ("pink", (245, 150, 185)),
        ("brown", (115, 70, 35)),
    )
    ALIASES = {"gray": "grey", "violet": "purple"}  # noqa: RUF012, a constant
    SOFTNESS = 40.0
    """Width, in RGB distance, of the kernel by which a pixel belongs to several colours at once."""
    GRID, WORDS, UNSHARED_WEIGHT = 4, 64, 0.5
    """Cells per side of the grid of brightness, buckets of words, and the weight of both: only colours are shared by
    images and texts."""

    def facts(self) -> dict[str, Any]:
        """The encoder's name and a version number that changes when its embeddings do."""
        return {"encoder": "colours", "version": 1}

    def prepare(self, image: Image) -> Tensor:
        """Returns the features [27] of an image: shares of the eleven colours, and the brightness of the 16 cells."""
        image = check_picture(image).convert("RGB")
        small = np.asarray(image.resize((64, 64)), np.float32).reshape(-1, 3)
        colours = np.array([rgb for _, rgb in self.COLOURS], np.float32)
        distance = ((small[:, None] - colours) ** 2).sum(-1) / (2 * self.SOFTNESS**2)
        share = np.exp(distance.min(1, keepdims=True) - distance)
        share = (share / share.sum(1, keepdims=True)).mean(0)
        light = np.asarray(image.convert("L").resize((self.GRID, self.GRID)), np.float32).reshape(-1)
        return torch.from_numpy(
            np.concatenate((_direction(share), self.UNSHARED_WEIGHT * _direction(light - light.mean())))
        )

    def encode_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Embeds images: float32 unit rows [B, 64]."""
        features = torch.zeros(len(check_sequence(images, "images")), self._width, dtype=torch.float32, device="cpu")
        if len(images):
            width = len(self.COLOURS) + self.GRID**2
            prepared = stack_images(self.prepare, images)
            if prepared.shape[1:] != (width,) or not prepared.is_floating_point():
                raise ValueError(f"prepared images must be floating-point [{width}], got {list(prepared.shape[1:])}")
            features[:, :width] = prepared
        return self._project(features)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts: float32 unit rows [B, 64]."""
        names = {name: number for number, (name, _) in enumerate(self.COLOURS)}
        known = clean_texts(texts)
        features = torch.zeros(len(known), self._width, dtype=torch.float32, device="cpu")
        for row, text in enumerate(known):
            colours, bag = np.zeros(len(names), np.float32), np.zeros(self.WORDS, np.float32)
            for word in re.findall(r"\w+", text.lower()):
                word = self.ALIASES.get(word, word)
                if word in names:
                    colours[names[word]] += 1
                code = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
                bag[code % self.WORDS] += 1 if code >> 63 else -1
            colours = colours if colours.any() else np.ones_like(colours)
            features[row, : len(names)] = torch.from_numpy(_direction(colours))
            features[row, -self.WORDS :] = self.UNSHARED_WEIGHT * torch.from_numpy(_direction(bag))
        return self._project(features)

    @property
    def _width(self) -> int:
        return len(self.COLOURS) + self.GRID**2 + self.WORDS

    def _project(self, features: Tensor) -> Tensor:
        random = np.random.default_rng(0).standard_normal((self._width, self.dim)).astype(np.float32)
        # The rows of the few colours are made orthonormal, so that what images and texts share is not distorted.
        random[: len(self.COLOURS)] = np.linalg.qr(random[: len(self.COLOURS)].T)[0].T
        random[len(self.COLOURS) :] /= self.dim**0.5
        return unit_rows(features @ torch.from_numpy(random))


def _direction(x: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns `x` scaled to unit norm; zero stays zero."""
    norm = np.linalg.norm(x)
    return x / norm if norm else x
