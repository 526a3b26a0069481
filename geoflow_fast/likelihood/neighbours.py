"""The training pairs that are nearest to new ones: partners for marginals, and distances to set beside densities.

log p(image) = log p(image, text) - log p(text | image) holds for any text if the densities are right. Where image and
text are both unlike the training pairs, the network has seen neither side, and the errors of the two terms do not
cancel. With the text of the nearest training image one side is always known to it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import BLOCK_ROWS, Index, Rows
from geoflow_fast.directions import Direction
from geoflow_fast.ops.gallery_statistics import GalleryStatistics

NEIGHBOURS = 10


def check_training_pairs(training: EmbeddingPairs, widths: tuple[int | None, int], name: str, given: Direction) -> None:
    """Raises a ValueError unless there are training pairs, with the `widths` of the rows that are generated, if they
    are known, and given in the direction `given`."""
    if not len(training):
        raise ValueError(f"{name} has no pairs")
    dims = training.image_dim, training.text_dim
    for expected, width in zip(widths, (given.items(*dims), given.queries(*dims))):
        if expected not in (None, width):
            raise ValueError(f"{name} has pairs of widths {dims}, but they must match rows of width {expected}")


def nearest_partners(training: EmbeddingPairs, queries: Tensor, given: Direction) -> tuple[tuple[Tensor, ...], Tensor]:
    """The other side [B, d'] of the pair of the training row nearest to each of the `queries` [B, d], images in the
    direction i2t and texts in t2i, and one minus the cosines with the nearest rows, float64 [B, k], nearest first.

    A row that several pairs share, such as an image with several texts, counts once, with the partner in its first
    pair.
    """
    sides = (training.image, training.image_row), (training.text, training.text_row)
    (rows, row), (others, other) = given.queries(*sides), given.items(*sides)
    stored, first = np.unique(row, return_index=True)
    statistics = search(queries, rows, stored)
    nearest = statistics.top_index[:, 0].cpu().numpy()
    partner = torch.from_numpy(others[other[first[nearest]]]).to(queries)
    return (partner,), (1 - statistics.top_score).clamp(min=0).double()


def search(queries: Tensor, rows: Rows, stored: Index) -> GalleryStatistics:
    """The largest cosines of each of the `queries` [B, d] with the rows numbered `stored`, which are read block by
    block, and their places in `stored`."""
    running: GalleryStatistics | None = None
    points = queries.float().unsqueeze(1)
    for first in range(0, len(stored), BLOCK_ROWS):
        block = torch.from_numpy(rows[stored[first : first + BLOCK_ROWS]]).to(points)
        part = ops.gallery_statistics(points, block, 1.0, NEIGHBOURS, first_index=first)
        running = part if running is None else running.merge(part)
    assert running is not None
    return running
