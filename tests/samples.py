"""Random rows, pairs and networks, which tests of many modules use."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform

Network = TypeVar("Network", bound=nn.Module)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unit rows, uniform on the sphere."""
    rows = torch.randn(*shape, generator=seeded(seed), dtype=dtype, device="cpu")
    return nn.functional.normalize(rows, dim=-1)


def unit_array(rows: int, width: int = 8, seed: int = 0) -> np.ndarray:
    """Unit rows, uniform on the sphere, of float32."""
    return unit(rows, width, seed=seed).numpy()


def dyadic(x: Tensor) -> Tensor:
    """The nearest multiples of 1/64. Sums of their products are exact in every order, so that equal rows have equal
    products where a matrix product takes the rows of a tile and those at its edge in different orders."""
    return (64 * x).round() / 64


def random_pairs(rows: int, dims: tuple[int, int] = (6, 5), seed: int = 0) -> gf.EmbeddingPairs:
    """Pairs of independent points."""
    generator = seeded(seed)
    return gf.EmbeddingPairs.from_arrays(*(sample_uniform(rows, d, generator=generator) for d in dims))


def shaken(network: Network, spread: float = 0.2) -> Network:
    """The network with noise on every weight, in eval mode: no part of it is without effect."""
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(spread * torch.randn_like(weight))
    return network.eval()


def randomised(network: Network, spread: float = 0.3) -> Network:
    """The network with normal weights, in eval mode: no part of it is without effect."""
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(0, spread)
    return network.eval()


class Opaque:
    """A flow of which only `velocity` can be seen, so that it is treated like any other field."""

    def __init__(self, flow: gf.GeoFlow) -> None:
        self.velocity = flow.velocity
