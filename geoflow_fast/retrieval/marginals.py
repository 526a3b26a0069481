"""Log-marginals of gallery items: what turns p(item | query) into the Bayes posterior of "which item is it"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.sampling import SamplingSettings, StartingPoints, sample_conditional
from geoflow_fast.likelihood.density import log_density
from geoflow_fast.ops.reference import gallery_scores
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.files import contents_of, locked
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

MARGINALS = ("scores", "density")


TILE_ROWS, TILE_ITEMS = 1024, 2048
"""Samples and items whose products are in memory at a time."""


DENSITY_ROWS, DENSITY_STEPS = 1024, 10


FORMAT = 1
"""Raised when equal facts come to give other marginals, so that files of an older release are not used."""


def log_mean_scores(samples: Tensor, gallery: Gallery, kappa: float) -> Tensor:
    """log of the mean over R queries of exp(s_rj), s_rj = log mean_m exp(kappa <g_j, x_rm>): [N] float32.

    `samples` [R, M, d] of reference queries. This is the item's marginal under the same kernel as the posterior's.
    """
    parts = []
    for _, items in gallery.blocks(samples.device, samples.dtype):
        for tile in items.split(TILE_ITEMS):
            total = torch.full((len(tile),), -math.inf, dtype=torch.float64, device=samples.device)
            for block in samples.split(max(1, TILE_ROWS // samples.shape[1])):
                total = torch.logaddexp(total, gallery_scores(block, tile, kappa, None).double().logsumexp(0))
            parts.append(total - math.log(len(samples)))
    return torch.cat(parts).float()


def log_flow_density(
    flow: GeoFlow, gallery: Gallery, direction: str, *, seed: int, n_steps: int = DENSITY_STEPS
) -> Tensor:
    """log p(item) under the flow, for the items that `direction` retrieves: [N] float32.

    By the chain rule with a partner drawn from the flow: log p(I) = log p(I, T) - log p(T | I), or with I and T
    exchanged. Two reverse solves per item, so thousands of times the cost of `log_mean_scores`.
    """
    partner, parameter = "i2t" if direction == "t2i" else "t2i", next(flow.parameters())
    settings = SamplingSettings(n_samples=1, n_steps=n_steps, guidance=0.0, solver="ab2")
    base, generator = (torch.Generator(device).manual_seed(seed) for device in ("cpu", parameter.device))
    start = StartingPoints.draw(settings, flow.config.flow_dims, partner, base, flow.config.manifold)
    parts = []
    for _, block in gallery.blocks(parameter.device, parameter.dtype):
        for items in block.split(DENSITY_ROWS):
            drawn = sample_conditional(flow, items, partner, start.to(items), settings)
            image, text = (items, drawn[:, 0]) if direction == "t2i" else (drawn[:, 0], items)
            joint, conditional = (
                cast(Tensor, log_density(flow, image, text, way, n_steps, generator=generator))
                for way in ("joint", partner)
            )
            parts.append(joint - conditional)
    return torch.cat(parts).float()


def computed_once(folder: Path | None, facts: Mapping[str, Any], compute: Callable[[], Tensor]) -> Tensor:
    """What `compute()` returns, kept in `folder` (None: not kept) under a name that belongs to the facts."""
    if folder is None:
        return compute()
    path = folder / f"marginals-{hashing.fingerprint(facts)[:16]}.safetensors"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written to is an error before the work
        with locked(folder, wait=True):
            if not path.is_file():  # another process may have made it while this one waited
                save_tensors(path, {"marginals": compute()}, kind="item marginals", info=facts)
    try:
        tensors, _ = load_tensors(path, kind="item marginals")
        with contents_of(path):
            return tensors["marginals"]
    except ValueError as error:
        raise ValueError(f"{error}; remove the file, and it is computed again") from error
