"""Small data sets that several tests of the evaluation use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.geometry import normalize
from geoflow_fast.noise import sample_uniform

DIM = 8


def captioned(images: int, captions: int, seed: int, noise: float = 0.5) -> gf.EmbeddingPairs:
    """Images with several captions each, in shuffled order, and one image without any."""
    generator = torch.Generator().manual_seed(seed)
    image = sample_uniform(images + 1, DIM, generator=generator)
    index = torch.arange(images).repeat(captions)[torch.randperm(images * captions, generator=generator)]
    vague = noise * torch.rand(images, 1, generator=generator)[index]
    text = normalize(image[index] + vague * torch.randn(len(index), DIM, generator=generator))
    return gf.EmbeddingPairs.from_arrays(image, text, index)


def noisy_pairs(count: int, seed: int) -> gf.EmbeddingPairs:
    """Images with one caption each, which lies near the image."""
    generator = torch.Generator().manual_seed(seed)
    image = sample_uniform(count, DIM, generator=generator)
    return gf.EmbeddingPairs.from_arrays(image, normalize(image + 0.3 * torch.randn(count, DIM, generator=generator)))


def labelled_images(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images around the prompts of six classes, some of them far from any, their labels, and the prompts."""
    generator = torch.Generator().manual_seed(seed)
    prompts = sample_uniform(6, DIM, generator=torch.Generator().manual_seed(5))
    label = torch.randint(6, (80,), generator=generator)
    spread = 0.9 * torch.rand(80, 1, generator=generator)
    return normalize(prompts[label] + spread * torch.randn(80, DIM, generator=generator)), label, prompts


def planted(count: int, seed: int, dim: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs whose text lies near its image or, for a vague half at one end of the first axis, far from it."""
    generator = torch.Generator().manual_seed(seed)
    image = sample_uniform(count, dim, generator=generator)
    vague = image[:, 0] > 0
    noise = torch.randn(count, dim, generator=generator) * torch.where(vague, 0.35, 0.05).unsqueeze(1)
    return image, normalize(image + noise), vague


def planted_pairs(count: int, seed: int) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(*planted(count, seed)[:2])


def drawn_answers(n: int, seed: int, levels: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Uncertainties, with ties if they have only a few `levels`, and which answers are right: fewer where the
    uncertainty is high."""
    rng = np.random.default_rng(seed)
    score = rng.random(n)
    right = rng.random(n) > 0.8 * score
    return (score if levels is None else np.floor(score * levels)), right


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")
