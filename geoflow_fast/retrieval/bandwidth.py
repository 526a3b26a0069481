"""The choice of the kernel's concentration and of the guidance on held-out pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.sampling import FAST_SAMPLING
from geoflow_fast.ops.gallery_posterior import check_kappa
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import pair_task

GUIDANCES = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
KAPPAS = tuple(2.0 ** (k / 2) for k in range(25))
"""1 to 4096, a factor of sqrt(2) apart; the best is refined between its neighbours."""


@dataclass(frozen=True)
class Bandwidth:
    """`kappa` and `guidance` with the highest likelihood of the true items of held-out queries."""

    kappa: float
    guidance: float
    nll: float
    """Mean of -log pi(true item), in nats, at the best point of the grid, near which `kappa` lies; log N is chance."""
    table: Tensor
    """[guidances, kappas] float64, the mean for every setting that was tried."""


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
    """Fits kappa and guidance: minimises the mean of -log pi(true item) over held-out `pairs`, whose items serve as the
    gallery.

    Use pairs that the flow has not seen; samples of the flow cannot replace them, since guidance sharpens those.
    `settings` are the keywords of `RetrievalEntropy` that will be used with the result (`n_samples`, `n_steps`,
    `settings`, ...), by default those of `RetrievalEntropy.fast`: fewer samples need a wider kernel. At
    most `max_queries` pairs, drawn by the seed, serve as queries. `guidances`, `kappas`: the grid to search; the best
    kappa is refined between its neighbours.
    """
    direction = Direction.of(direction, conditional=True)
    if not guidances or not kappas:
        raise ValueError("fit_bandwidth needs at least one guidance and one kappa to choose from")
    if not all(low < high for low, high in itertools.pairwise((0.0, *kappas, math.inf))):
        raise ValueError(f"kappas must be positive, finite and strictly ascending, got {tuple(kappas)}")
    check_kappa(kappas[-1])
    fixed = {"kappa", "guidance"} & set(settings)
    if fixed:
        raise TypeError(f"fit_bandwidth chooses {', '.join(sorted(fixed))} itself")
    task = pair_task(pairs, direction, max_queries, int(settings.get("seed", 0)))
    device = next(flow.parameters()).device
    gallery, own, rows = Gallery(task.items.to(device)), task.own[:, 0].to(device), []
    for guidance in guidances:
        chosen = {"settings": FAST_SAMPLING, **settings, "guidance": float(guidance)}
        scorer = RetrievalEntropy(flow, gallery, direction, **chosen).to(device)
        samples = scorer.draw(task.queries)
        rows.append([mean_loss(samples, gallery, own, float(kappa)) for kappa in kappas])
    table = torch.tensor(rows, dtype=torch.float64, device="cpu")
    row, column = divmod(int(table.argmin()), len(kappas))
    return Bandwidth(refined(kappas, table[row], column), float(guidances[row]), float(table.min()), table)


def fit_cosine_scale(queries: Tensor, items: Tensor, own: Tensor) -> float:
    """The inverse temperature of the softmax over cosines with `items` [N, d] that gives the own items [Q] of the
    `queries` [Q, d] the largest likelihood."""
    samples, gallery, own = queries.unsqueeze(1), Gallery(items), own.to(queries.device)
    loss = torch.tensor(
        [mean_loss(samples, gallery, own, kappa) for kappa in KAPPAS], dtype=torch.float32, device="cpu"
    )
    return refined(KAPPAS, loss, int(loss.argmin()))


def mean_loss(samples: Tensor, gallery: Gallery, own: Tensor, kappa: float) -> float:
    """Mean of -log pi(own item [Q]) for samples [Q, M, d]."""
    ((_, items),) = gallery.blocks(samples.device, samples.dtype)
    statistics = ops.gallery_statistics(samples, items, kappa, 1)
    cosine = torch.einsum("qmd,qd->qm", samples, items[own])
    score = (kappa * cosine.double()).logsumexp(1) - math.log(samples.shape[1])
    return float((statistics.log_z - score).mean())


def refined(kappas: Sequence[float], loss: Tensor, best: int) -> float:
    """The minimum of the parabola in log kappa through the best point of the grid and its neighbours. At an end of the
    grid, and where the losses are not convex, it is the best point itself."""
    if best in (0, len(kappas) - 1):
        return float(kappas[best])
    x = [math.log(kappa) for kappa in kappas[best - 1 : best + 2]]
    y = loss[best - 1 : best + 2].tolist()
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curvature = (right - left) / (x[2] - x[0])
    if curvature <= 0:
        return float(kappas[best])
    return math.exp(min(max((x[0] + x[1]) / 2 - left / (2 * curvature), x[0]), x[2]))
