"""How the ranks of a training run share the rows of a batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.rows import Index
from geoflow_fast.distributed import World

LANE_ROWS = 8
"""Rows of a batch per lane. Row i is in lane i modulo the number of lanes, a lane's noise comes from a seed of its own,
and a rank has whole lanes: so it draws the noise of its own rows alone, and has its share of every direction."""


def lane_count(rows: int) -> int:
    """Lanes of a batch."""
    return max(1, rows // LANE_ROWS)


class Group:
    """Rows of a batch that are coupled with each other, as the ranks hold them.

    `rows`: of the whole batch. `local`: where they are among this rank's rows; `numbers`: which of the group these are.
    """

    def __init__(self, rows: slice, owners: list[Index], world: World) -> None:
        self.count, self.world = rows.stop - rows.start, world
        edges = [np.searchsorted(own, (rows.start, rows.stop)).tolist() for own in owners]
        self.local = slice(*edges[world.rank])
        self.members = [own[low:high] - rows.start for own, (low, high) in zip(owners, edges)]
        self.numbers = torch.from_numpy(self.members[world.rank])

    def gather(self, x: Tensor) -> Tensor:
        """Rows of the whole group in order, from those of each rank."""
        order = torch.from_numpy(np.concatenate(self.members)).to(x.device)
        gathered = self.world.gather_rows(x, [len(part) for part in self.members])
        return torch.empty_like(gathered).index_copy_(0, order, gathered)
