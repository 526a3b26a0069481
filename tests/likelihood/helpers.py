"""Fields, flows and pairs that the tests of the likelihood share."""

from __future__ import annotations

import torch

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform
from geoflow_fast.worlds import BumpField, PairField
from tests.samples import randomised, seeded


def oracles(d: int, rows: int = 16):
    """Pairs of width `d`, and two fields whose log-densities are known."""
    generator = seeded(d)
    image, text = (sample_uniform(rows, d, generator=generator, dtype=torch.float64) for _ in range(2))
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    return image, text, (PairField(rotation, 1.1), BumpField(image[0], text[0], 0.8))


def random_flow(
    dtype: torch.dtype = torch.float64, kind: type[gf.GeoFlowConfig] = gf.GeoFlowConfig, **changes
) -> gf.GeoFlow:
    """A network whose every part matters."""
    torch.manual_seed(0)
    shape = {"hidden": 16, "depth": 2, "heads": 2, "layer_scale": 0.5} | changes
    return randomised(gf.GeoFlow(kind(6, 5, **shape)).to(dtype), 0.25)


def random_pairs(rows: int, dtype: torch.dtype = torch.float64):
    generator = seeded(1)
    return tuple(sample_uniform(rows, d, generator=generator, dtype=dtype) for d in (6, 5))


def training_pairs(rows: int, dims: tuple[int, int] = (6, 5), dtype: torch.dtype = torch.float32) -> gf.EmbeddingPairs:
    generator = seeded(7)
    return gf.EmbeddingPairs.from_arrays(*(sample_uniform(rows, d, generator=generator).to(dtype) for d in dims))
