"""Copies: items whose embeddings are the same up to rounding. Nothing tells them apart, so they count as one item."""

from __future__ import annotations

import torch
from torch import Tensor

SAME_ITEM = 1 - 1e-6
"""Cosine above which two embeddings are the same item; storage in float16 alone leaves about 1e-7."""
DISTANCE = (2 * (1 - SAME_ITEM)) ** 0.5
"""The distance of two unit rows with that cosine."""
DEVIATIONS = 6.0
"""Standard deviations of a random axis within which the difference of two copies lies along it."""
ROUNDING = 1e-6
AXES = 4
"""Random axes on which copies must agree before their cosine is computed."""


def first_numbers(items: Tensor, number: Tensor, valid: Tensor) -> Tensor:
    """The lowest `number` [Q, K] among the copies of each of the items [Q, K, d], of those that are `valid` [Q, K].

    Rows are sorted along one axis. Copies are near to each other there, so that only neighbours are compared.
    """
    generator = torch.Generator().manual_seed(0)
    axes = torch.randn(items.shape[2], AXES, generator=generator, dtype=torch.float64, device="cpu")
    # Norms may differ by more than copies do.
    length = torch.linalg.vector_norm(items, dim=2, keepdim=True)
    seen = (items @ torch.nn.functional.normalize(axes, dim=0).to(items) / length).movedim(2, 0)  # [AXES, Q, K]
    farthest = DISTANCE * min(1.0, DEVIATIONS / items.shape[2] ** 0.5) + ROUNDING
    order = seen[0].masked_fill(~valid, torch.inf).argsort(1)
    seen = seen.gather(2, order.expand(AXES, -1, -1))
    there, first = valid.gather(1, order), number.gather(1, order)
    pairs = []
    for step in range(1, items.shape[1]):
        near = (seen[0, :, step:] - seen[0, :, :-step] <= farthest) & there[:, step:]
        if not bool(near.any()):
            break  # the rows are sorted: those further apart are not nearer
        for axis in range(1, AXES):
            near &= (seen[axis, :, step:] - seen[axis, :, :-step]).abs() <= farthest
        row, low = near.nonzero().T
        one, other = items[row, order[row, low]], items[row, order[row, low + step]]
        same = torch.nn.functional.cosine_similarity(one, other) > SAME_ITEM
        pairs.append(torch.stack((row[same], low[same], low[same] + step)))
    if pairs:
        first = _joined(first, torch.cat(pairs, dim=1))
    return torch.empty_like(first).scatter_(1, order, first)


def are_copies(items: Tensor, others: Tensor) -> Tensor:
    """Which of the items [..., K, d] are copies of which of the others [..., M, d]: [..., K, M] bool. Rows that were
    stored in half precision need not have unit norm."""
    norms = (torch.linalg.vector_norm(x, dim=-1) for x in (items, others))
    return items @ others.transpose(-1, -2) > SAME_ITEM * torch.einsum("...k,...m->...km", *norms)


def _joined(first: Tensor, pairs: Tensor) -> Tensor:
    """The lowest of the numbers `first` [Q, K] in each group that the pairs (row, one, other) [3, P] connect."""
    width = first.shape[1]
    one, other = (pairs[0] * width + pairs[k] for k in (1, 2))
    first = first.flatten()
    while True:
        lowest = torch.minimum(first[one], first[other])
        lower = first.scatter_reduce(0, one, lowest, "amin").scatter_reduce(0, other, lowest, "amin")
        if torch.equal(lower, first):
            return first.view(-1, width)
        first = lower
