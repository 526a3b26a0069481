"""Centring and principal components on few real pairs: upper and lower halves of scanned handwritten digits.

1,797 scans of 8 x 8 pixels come with scikit-learn; the upper half plays the image, the lower half the text, both scaled
to unit norm. Pixels are not negative, so all rows lie in one corner of the sphere, as embeddings of one modality do.
Quality is the negative log-probability, in nats, of the right partner among 32 held-out ones, with probabilities
proportional to p(query | partner); it can be compared between coordinates, which log-densities cannot.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

import geoflow_fast as gf
from benchmarks.common import gate, report

TRAINING_PAIRS = (300, 1200)
CANDIDATES, QUERIES = 32, 128
SETTINGS: dict[str, dict[str, object]] = {
    "as they are": {},
    "centred": {"centre": True},
    "centred, 16 components": {"centre": True, "pca_dim": 16},
}


def digit_halves(seed: int) -> tuple[Tensor, Tensor]:
    """Unit rows [1797, 32] of both halves, shuffled; blank halves are left out."""
    pixels = load_digits().images.astype(np.float32)
    halves = [torch.from_numpy(part.reshape(len(pixels), 32)) for part in (pixels[:, :4], pixels[:, 4:])]
    inked = torch.stack([half.norm(dim=1) > 0 for half in halves]).all(0).nonzero().squeeze(1)
    order = inked[torch.randperm(len(inked), generator=torch.Generator().manual_seed(seed))]
    upper, lower = (torch.nn.functional.normalize(half[order]) for half in halves)
    return upper, lower


def surprise(flow: gf.GeoFlow, upper: Tensor, lower: Tensor, seed: int) -> float:
    """Mean of -log pi(right partner) of `QUERIES` upper halves among `CANDIDATES` lower halves each."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.rand(QUERIES, len(lower), generator=generator).scatter_(1, torch.arange(QUERIES)[:, None], 2.0)
    candidates = others.topk(CANDIDATES, dim=1).indices  # the right one first
    image = upper[:QUERIES].repeat_interleave(CANDIDATES, 0)
    logits = gf.log_density(flow, image, lower[candidates.flatten()], "t2i", generator=generator)
    assert isinstance(logits, Tensor)
    return float(-logits.view(QUERIES, CANDIDATES).log_softmax(1)[:, 0].mean())


def trained(upper: Tensor, lower: Tensor, seed: int, changes: dict[str, object]) -> gf.GeoFlow:
    torch.manual_seed(seed)
    flow = gf.GeoFlow(dataclasses.replace(gf.GeoFlowConfig.tiny(32, 32), **changes))
    config = dataclasses.replace(gf.TrainConfig.tiny(), steps=400, warmup_steps=40, batch_size=128, seed=seed)
    gf.train(flow, gf.EmbeddingPairs.from_arrays(upper, lower), config, progress=False)
    return flow


def run(seeds: int = 3) -> str:
    rows: list[dict[str, Any]] = []
    for pairs in TRAINING_PAIRS:
        for name, changes in SETTINGS.items():
            surprises = []
            for seed in range(seeds):
                upper, lower = digit_halves(seed)
                flow = trained(upper[:pairs], lower[:pairs], seed, changes)
                surprises.append(surprise(flow, upper[1200:], lower[1200:], seed))
            rows.append(
                {
                    "training pairs": pairs,
                    "embeddings": name,
                    "median surprise, nats": statistics.median(surprises),
                    "worst of seeds": max(surprises),
                }
            )
    gate("the best setting is better than guessing", rows[-1]["median surprise, nats"] < np.log(CANDIDATES))
    return report("few_pairs", rows, {"guessing": float(np.log(CANDIDATES)), "seeds": seeds})
