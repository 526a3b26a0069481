"""The training pairs that are nearest to new ones: partners for marginals, and distances to set beside densities.

log p(image) = log p(image, text) - log p(text | image) holds for any text if the densities are right. Where image and
text are both unlike the training pairs, the network has seen neither side, and the errors of the two terms do not
cancel. With the text of the nearest training image one side is always known to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import BLOCK_ROWS, Index, Rows
from geoflow_fast.directions import STREAMS
from geoflow_fast.flow.fields import Streams
from geoflow_fast.ops.gallery_statistics import GalleryStatistics
from geoflow_fast.runtime import checks

NEIGHBOURS = 10


@dataclass(frozen=True)
class Neighbours:
    """What is near to B rows of one modality among the training rows of that modality."""

    partner: Tensor
    """[B, d'], the other side of the pair of the nearest training row."""
    distance: Tensor
    """[B] float64, one minus the cosine with the k-th nearest training row."""


def check_reference(reference: EmbeddingPairs, neighbours: int, pair: Streams) -> None:
    """Raises an error unless the pairs have the widths of `pair` and enough rows of each modality."""
    if not isinstance(reference, EmbeddingPairs):
        raise TypeError(f"reference must be EmbeddingPairs, got {type(reference).__name__}")
    checks.integer(neighbours, "neighbours", 1)
    stored = (reference.image_dim, reference.image_row), (reference.text_dim, reference.text_row)
    for name, x, (width, row) in zip(STREAMS, pair, stored):
        if x.shape[1] != width:
            raise ValueError(f"{name} has width {x.shape[1]}, but the reference has {width}")
        if len(np.unique(row)) < neighbours:
            raise ValueError(f"the reference has {len(np.unique(row))} {name} rows, fewer than neighbours={neighbours}")


# unchecked: `epistemic` calls it with what it has checked
def nearest_pairs(reference: EmbeddingPairs, neighbours: int, pair: Streams) -> tuple[Neighbours, Neighbours]:
    """The neighbours of images and of texts. An image that several pairs share is one row, with its first text."""
    sides = (reference.image, reference.image_row), (reference.text, reference.text_row)
    found = []
    for x, (rows, row), (others, other) in zip(pair, sides, sides[::-1]):
        stored, first = np.unique(row, return_index=True)
        statistics = search(x, rows, stored, neighbours)
        partner = others[other[first[statistics.top_index[:, 0].cpu().numpy()]]]
        distance = (1 - statistics.top_score[:, -1]).clamp(min=0)
        found.append(Neighbours(torch.from_numpy(partner).to(x), distance.double()))
    return found[0], found[1]


# unchecked: `epistemic` calls it with what it has checked
def search(x: Tensor, rows: Rows, stored: Index, count: int) -> GalleryStatistics:
    """The `count` largest cosines of each of the rows `x` [B, d] with the rows numbered `stored`, which are read block
    by block, and their places in `stored`."""
    found: GalleryStatistics | None = None
    points = x.float().unsqueeze(1)
    for first in range(0, len(stored), BLOCK_ROWS):
        block = torch.from_numpy(rows[stored[first : first + BLOCK_ROWS]]).to(points)
        part = ops.gallery_statistics(points, block, 1.0, count, first_index=first)
        found = part if found is None else found.merge(part)
    assert found is not None
    return found
