"""Log-marginals of gallery items: how near each is to typical queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.ops.gallery_posterior import gallery_scores
from geoflow_fast.retrieval.gallery import Gallery

TILE_ROWS, TILE_ITEMS = {"cpu": 1024, "cuda": 1 << 16}, {"cpu": 2048, "cuda": 1 << 15}
"""Samples and items whose scores are in memory at a time."""


def log_mean_scores(samples: Tensor, gallery: Gallery, kappa: float, bias: Tensor | None = None) -> Tensor:
    """log of the mean over R queries of exp(s_rj), s_rj = log mean_m exp(kappa <g_j, x_rm> + bias_rm): [N] float32.

    `samples` [R, M, d] of reference queries, and an optional `bias` [R, M]. This is the item's marginal under the same
    kernel as the posterior's.
    """
    parts = []
    on = "cuda" if samples.is_cuda else "cpu"
    for _, items in gallery.blocks(samples.device, samples.dtype):
        for tile in items.split(TILE_ITEMS[on]):
            total = torch.full((len(tile),), -math.inf, dtype=torch.float64, device=samples.device)
            at_once = max(1, TILE_ROWS[on] // samples.shape[1])
            weights = [None] * len(samples) if bias is None else bias.split(at_once)
            for some, weight in zip(samples.split(at_once), weights):
                scores: Tensor = gallery_scores(some, tile, kappa, None, weight, "auto")
                total = torch.logaddexp(total, scores.double().logsumexp(0))
            parts.append(total - math.log(len(samples)))
    return torch.cat(parts).float()
