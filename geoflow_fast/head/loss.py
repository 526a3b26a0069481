"""The contrastive loss of the head: scores of all items of a batch for all its queries, and their likelihood."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.runtime.device import rows_at_once

TILE = 1 << 21
"""Products of points and items that are in a processor's memory at a time."""
NOWHERE = -1e30
"""Score of an item that does not count. It is finite, so that gradients are too."""


class PointScores(torch.autograd.Function):
    """The scores [Q, N] of `items` [N, d] for queries with `points` [Q, K, d] and `log_weights` [Q, K]:
    logsumexp_k (log_weights_qk + <points_qk, item_j>).

    All K scores of all pairs are never in memory at once: the backward pass computes them again, tile by tile. Items
    are embeddings and get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, points: Tensor, log_weights: Tensor, items: Tensor) -> Tensor:
        scores = points.new_empty(len(points), len(items))
        for rows in _tiles(points, items):
            torch.logsumexp(_logits(points[rows], log_weights[rows], items), dim=1, out=scores[rows])
        ctx.save_for_backward(points, log_weights, items, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        points, log_weights, items, scores = ctx.saved_tensors
        d_points, d_weights = points.new_empty(points.shape), log_weights.new_empty(log_weights.shape)
        for rows in _tiles(points, items):
            share = _logits(points[rows], log_weights[rows], items).sub_(scores[rows].unsqueeze(1)).exp_()
            share *= grad[rows].unsqueeze(1)
            torch.sum(share, dim=2, out=d_weights[rows])
            torch.matmul(share, items, out=d_points[rows])
        return d_points, d_weights, None


def point_scores(points: Tensor, log_weights: Tensor, items: Tensor) -> Tensor:
    """The scores [Q, N] of `PointScores`, differentiable in points and weights."""
    scores: Tensor = PointScores.apply(points, log_weights, items)  # type: ignore[no-untyped-call]
    return scores


def _tiles(points: Tensor, items: Tensor) -> list[slice]:
    """Rows of queries whose products with all items fit into a tile, or into a share of a GPU's memory."""
    products = points.shape[1] * max(1, len(items))
    step = rows_at_once(points.device, 2 * points.element_size() * products, max(1, TILE // products))
    return [slice(low, low + step) for low in range(0, len(points), step)]


def _logits(points: Tensor, log_weights: Tensor, items: Tensor) -> Tensor:
    """The scores of single points: [q, K, N]."""
    return torch.matmul(points.flatten(0, 1), items.T).unflatten(0, points.shape[:2]).add_(log_weights.unsqueeze(2))


def contrastive_losses(scores: Tensor, right: Tensor, copies: Tensor) -> Tensor:
    """Mean over a query's right items of -log p(item), where p is the softmax over that item and all wrong ones: [Q].

    `scores` [Q, N]; `right` [Q, N] bool says which items are right, at least one for each query. The other right items
    of a query are left out of its denominator. `copies` [N] counts how often an item occurs, so that each counts once.
    """
    wrong = (scores - copies.log()).masked_fill(right, NOWHERE).logsumexp(1)
    query, item = right.nonzero(as_tuple=True)
    weight = 1 / copies[item]
    loss = functional.softplus(wrong[query] - scores[query, item]) * weight
    total, norm = scores.new_zeros(2, len(scores)).unbind()
    return total.index_add(0, query, loss) / norm.index_add(0, query, weight)


def log_mean_exp(scores: Tensor) -> Tensor:
    """The logarithm of the mean of exp(scores) over the first dimension."""
    return scores.logsumexp(0) - math.log(len(scores))
