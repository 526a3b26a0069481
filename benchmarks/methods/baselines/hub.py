"""The softmax over cosines with hubs corrected: an item that every query is near to says little when it is found.

The score of item g for query q is b <q, g> - w log mean_q' exp(b <q', g>), the mean being over a bank of typical
queries: an estimate of log p(g | q) / p(g)^w. With w = 1 this is the inverted softmax (Smith et al., 2017), which
querybank normalisation (QB-Norm; Bogolin et al., 2022) uses for retrieval; CSLS (Conneau et al., 2018) subtracts the
mean of an item's largest cosines instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.methods.baselines.base import FitTask, GallerySoftmax, answer_risk, resize_rows
from benchmarks.methods.baselines.untrained import CosineBaseline
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.retrieval import nearest
from geoflow_fast.retrieval.bandwidth import fit_cosine_scale
from geoflow_fast.retrieval.freshness import OncePerGallery, marks
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.marginals import log_mean_scores
from geoflow_fast.retrieval.task import drawn_rows, pair_task
from geoflow_fast.runtime import checks

QUERIES, ITEMS = 1000, 10_000
"""b and w are fitted on at most this many held-out queries and items."""
LARGEST_WEIGHT, RANGE = 1.5, 8.0
"""w is at most the first; b is within this factor of the inverse temperature that suits the plain softmax."""


class HubSoftmax(CosineBaseline):
    """One minus the probability of plain search's answer in the softmax over cosines whose hubs are corrected.

    `bank`: how many training queries, drawn by the seed, are kept to tell how near an item is to any query. For each
    direction b and w maximise the likelihood of the true items of held-out pairs, whose items serve as the gallery.
    If the same pairs are given for both, each half of their images has one part.
    """

    method: ClassVar[str] = "hub_softmax"
    title: ClassVar[str] = "hub-corrected softmax"
    USES_TRAINING_PAIRS: ClassVar[bool] = True
    weights: Tensor
    image: Tensor
    text: Tensor

    def __init__(self, image_dim: int, text_dim: int, bank: int = 2000) -> None:
        super().__init__(image_dim, text_dim, bank=checks.integer(bank, "bank", 1))
        self.bank = bank
        self.register_buffer("weights", torch.zeros(len(CONDITIONAL), 2, dtype=torch.float32))  # b and w, by direction
        self.register_buffer("image", torch.empty(0, image_dim, dtype=torch.float32))
        self.register_buffer("text", torch.empty(0, text_dim, dtype=torch.float32))
        self._bias: OncePerGallery[Tensor] = OncePerGallery()

    def _fit(self, task: FitTask) -> None:
        seed, device = task.config.seed, self.device
        pairs, val = task.pairs, task.val
        if pairs is val:
            # A query that is in the bank, by itself or by another caption, would be held against its own item.
            pairs, val = val.split(0.5, seed)
        self.image, self.text = (x.to(device) for x in pairs[drawn_rows(len(pairs), self.bank, seed)])
        for row, direction in enumerate(CONDITIONAL):
            among = val.subset(drawn_rows(len(val), ITEMS, seed))
            asked = pair_task(among, direction, QUERIES, seed)
            queries, items = asked.queries.to(device), asked.items.to(device)
            fitted = fit_hub_weights(queries, items, asked.own[:, 0].to(device), self._typical(direction))
            self.weights[row] = torch.tensor(fitted, dtype=torch.float32, device=device)

    def _resize_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        resize_rows(self, tensors, "image", "text")

    def _typical(self, direction: Direction) -> Tensor:
        """The bank's queries [R, d]."""
        return direction.queries(self.image, self.text)

    def softmax(self, queries: Tensor, gallery: Gallery, direction: Direction) -> GallerySoftmax:
        """The corrected softmax; the correction of a gallery's items is computed once."""
        b, w = self.weights[CONDITIONAL.index(direction)].tolist()
        typical = self._typical(direction)

        def item_bias() -> Tensor:
            return -w * log_mean_scores(typical.unsqueeze(1), gallery, b)

        bias = self._bias.of(gallery, (direction, marks((typical, self.weights))), item_bias)
        return GallerySoftmax(queries, gallery, b, bias)

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        return answer_risk(self.softmax(queries, gallery, direction), nearest(queries, gallery)[1][:, 0])


def fit_hub_weights(queries: Tensor, items: Tensor, own: Tensor, typical: Tensor) -> tuple[float, float]:
    """b and w under which the own items [Q] of the `queries` [Q, d] among `items` [N, d] are most likely, if hubs are
    corrected by the `typical` queries [R, d]."""
    from scipy import optimize

    gallery, cosine, asked = Gallery(items), queries @ items.T, own.unsqueeze(1)

    def best_weight(log_b: float) -> tuple[float, float]:
        """The least mean of -log probability with this b, and the w that has it."""
        b = math.exp(log_b)
        hub, scores = log_mean_scores(typical.unsqueeze(1), gallery, b), b * cosine

        def loss(w: float) -> float:
            logits = scores - w * hub
            return float((logits.logsumexp(1) - logits.gather(1, asked).squeeze(1)).double().mean())

        # In w the loss is convex.
        best = optimize.minimize_scalar(loss, bounds=(0, LARGEST_WEIGHT), method="bounded", options={"xatol": 1e-3})
        return float(best.fun), float(best.x)

    start = math.log(fit_cosine_scale(queries, items, own))
    bounds = start - math.log(RANGE), start + math.log(RANGE)
    best = optimize.minimize_scalar(
        lambda log_b: best_weight(log_b)[0], bounds=bounds, method="bounded", options={"xatol": 1e-2}
    )
    return math.exp(best.x), best_weight(best.x)[1]
