"""Choosing the kernel's concentration and the guidance on held-out pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast import ops
from geoflow_fast.data import EmbeddingPairs
from geoflow_fast.entropy import CONDITIONAL, FAST, RetrievalEntropy
from geoflow_fast.gallery import Gallery
from geoflow_fast.marginals import log_mean_scores
from geoflow_fast.model import GeoFlow

GUIDANCES = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
KAPPAS = tuple(2.0 ** (k / 2) for k in range(25))
"""1 to 4096, a factor of sqrt(2) apart; the best is refined between its neighbours."""


@dataclass(frozen=True)
class Bandwidth:
    """The setting that gave the true items of held-out queries the most probability."""

    kappa: float
    guidance: float
    nll: float
    """Mean of -log pi(true item) in nats at this setting; log N would be chance."""
    table: Tensor
    """[guidances, kappas] float64, the same for every setting tried."""


@torch.no_grad()
def fit_bandwidth(
    flow: GeoFlow,
    pairs: EmbeddingPairs,
    direction: str = "t2i",
    *,
    guidances: Sequence[float] = GUIDANCES,
    kappas: Sequence[float] = KAPPAS,
    max_queries: int = 256,
    **settings: Any,
) -> Bandwidth:
    """kappa and guidance that minimise the mean of -log pi(true item) over held-out `pairs`, whose items are the
    gallery.

    Use pairs that the flow has not seen; its own samples would not do, since guidance sharpens them. `settings` are
    those of `RetrievalEntropy` that the result is meant for (`n_samples`, `n_steps`, `solver`, `noise`, `posterior`,
    ...), else those of `RetrievalEntropy.fast`: fewer samples want a wider kernel. At most `max_queries` pairs, drawn
    by the seed, serve as queries.
    """
    if direction not in CONDITIONAL:
        raise ValueError(f"direction must be one of {CONDITIONAL}, got {direction!r}")
    if not guidances or not kappas:
        raise ValueError("fit_bandwidth needs at least one guidance and one kappa to choose from")
    fixed = {"kappa", "guidance", "reference"} & set(settings)
    if fixed:
        raise TypeError(f"fit_bandwidth chooses {', '.join(sorted(fixed))} itself")
    bayes = settings.get("posterior") == "bayes"
    task = _retrieval_task(pairs, direction, max_queries, int(settings.get("seed", 0)), bayes=bayes)
    device = next(flow.parameters()).device
    gallery, rows = Gallery(task.items.to(device)), []
    for guidance in guidances:
        chosen = {**FAST, **settings, "reference": task.reference, "guidance": float(guidance)}
        scorer = RetrievalEntropy(flow, gallery, direction, **chosen).to(device)
        samples, others = scorer.draw(task.queries), scorer.draw(task.reference) if bayes else None
        rows.append([_loss(samples, gallery, task.own.to(device), float(kappa), others) for kappa in kappas])
    table = torch.tensor(rows, dtype=torch.float64)
    row, column = divmod(int(table.argmin()), len(kappas))
    return Bandwidth(_refined(kappas, table[row], column), float(guidances[row]), float(table.min()), table)


@dataclass(frozen=True)
class RetrievalTask:
    """Queries [Q, d] whose own items are known, by number [Q], among items [N, d']; reference queries [R, d]."""

    queries: Tensor
    own: Tensor
    items: Tensor
    reference: Tensor


def _retrieval_task(
    pairs: EmbeddingPairs, direction: str, max_queries: int, seed: int, *, bayes: bool
) -> RetrievalTask:
    """All items of the pairs, each once. For `bayes` the reference queries are other pairs': a query that helped to
    estimate its own item's marginal would be held against it."""
    item_row, rows = (pairs.image_row, pairs.image) if direction == "t2i" else (pairs.text_row, pairs.text)
    kept, item = np.unique(item_row, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(pairs))
    count = min(max_queries, len(pairs) // 2 if bayes else len(pairs))
    if count < 1:
        raise ValueError(f"{len(pairs)} pairs and max_queries={max_queries} leave no query to fit on")
    side = 1 if direction == "t2i" else 0
    chosen, others = np.sort(order[:count]), np.sort(order[-count:])
    return RetrievalTask(
        pairs[chosen][side], torch.from_numpy(item[chosen]), torch.from_numpy(rows[kept]), pairs[others][side]
    )


def _loss(samples: Tensor, gallery: Gallery, own: Tensor, kappa: float, reference: Tensor | None) -> float:
    """Mean over queries of -log pi(own item), for samples [Q, M, d] and those of reference queries, if Bayes."""
    ((_, items),) = gallery.blocks(samples.device, samples.dtype)
    bias = None if reference is None else -log_mean_scores(reference, gallery, kappa)
    found = ops.gallery_statistics(samples, items, kappa, 1, item_bias=bias)
    cosine = torch.einsum("qmd,qd->qm", samples, items[own])
    score = (kappa * cosine.double()).logsumexp(1) - math.log(samples.shape[1])
    score = score if bias is None else score + bias[own]
    return float((found.peak + found.weight.log() - score).mean())


def _refined(kappas: Sequence[float], loss: Tensor, best: int) -> float:
    """Minimum of the parabola in log kappa through the best of the grid and its neighbours; at an end, the end."""
    if best in (0, len(kappas) - 1):
        return float(kappas[best])
    x = [math.log(kappa) for kappa in kappas[best - 1 : best + 2]]
    y = loss[best - 1 : best + 2].tolist()
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curvature = (right - left) / (x[2] - x[0])
    if curvature <= 0:
        return float(kappas[best])
    return math.exp(min(max((x[0] + x[1]) / 2 - left / (2 * curvature), x[0]), x[2]))
