"""What several ranks add to a training run: the rows of a batch that each of them makes, the coupling of rows that
different ranks hold, and the sum of their gradients."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Index
from geoflow_fast.directions import Direction
from geoflow_fast.distributed import World
from geoflow_fast.flow.fields import Streams
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.training.batches import LANE_ROWS, PLANS, BatchMaker
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.device_rows import send


def batch_maker(flow: GeoFlow, pairs: EmbeddingPairs, config: TrainConfig, world: World) -> BatchMaker:
    """What makes this rank's rows of the batches that a single process would make."""
    if world.size == 1:
        return BatchMaker(flow, pairs, config)
    return RankBatchMaker(flow, pairs, config, world)


class RankBatchMaker(BatchMaker):
    """Makes the rows of one rank. A rank has whole lanes of a batch, so it draws the noise of its own rows alone and
    has its share of every direction."""

    def __init__(self, flow: GeoFlow, pairs: EmbeddingPairs, config: TrainConfig, world: World) -> None:
        super().__init__(flow, pairs, config)
        if self.lane_count < world.size:
            least = LANE_ROWS * world.size
            raise ValueError(f"batch_size={config.batch_size} is too small for {world.size} ranks: at least {least}")
        self.world = world
        # The row numbers of each rank, ascending.
        lane = np.arange(config.batch_size) % self.lane_count
        self.owners = [np.flatnonzero(np.isin(lane, share)) for share in world.shares(self.lane_count)]
        self.take_rows(self.owners[world.rank])
        self.validation_rows = slice(world.rank, None, world.size)

    def couple_group(
        self, noise: Streams, data: Streams, rows: slice, direction: Direction, rule: str, generator: torch.Generator
    ) -> float:
        """Couples the rows of all ranks, or only those of this rank if the configuration asks for local plans; returns
        how many seconds this took."""
        group = RankGroup(rows, self.owners, self.world)
        mine = group.local
        drawn = noise[0][mine], noise[1][mine]
        own = data[0][mine], data[1][mine]
        local = self.config.ot_scope == "local"
        if rule == "independent" or (local and not len(own[0])):
            return 0.0
        start = time.perf_counter()
        if local:
            # Each rank solves a plan of its own, so it also draws random numbers of its own.
            generator = torch.Generator().manual_seed(generator.initial_seed() + 1 + self.world.rank)
            source, target = own, self.couple(drawn, own, direction, rule, generator)
        else:
            source = self._data_of(group, rows, own)
            if rule in PLANS:  # the ranks solve it together, each its own rows; every other plan is solved by all
                target = self._couple_panel(drawn, source, group, rule, generator)
            else:
                whole = group.gather(drawn[0]), group.gather(drawn[1])
                target = self.couple(whole, source, direction, rule, generator)[group.numbers]
        data[0][mine], data[1][mine] = source[0][target], source[1][target]
        return time.perf_counter() - start

    def _data_of(self, group: RankGroup, rows: slice, own: Streams) -> Streams:
        """The data of a whole group. Where every rank has all pairs on its GPU, nothing is sent."""
        if self.rows is None or self.rows.tables is None:
            return group.gather(own[0]), group.gather(own[1])
        index = self.order[self.step][rows]
        return self._in_flow(self.rows.gather(send(self.rows.numbers(index), self.device), index))

    def _couple_panel(
        self, noise: Streams, data: Streams, group: RankGroup, rule: str, generator: torch.Generator
    ) -> Tensor:
        """Does the same as `couple` for this rank's noise and the data of all ranks, which solve the plan together."""
        uniform = None
        if rule == "sample":
            uniform = torch.rand(group.count, generator=generator, dtype=torch.float64, device="cpu")[group.numbers]
            uniform = uniform.to(self.device)
        return ops.ot_assign_panel(
            *self.unit_noise(noise), *data, self.world, eps=self.config.sinkhorn_eps, uniform=uniform
        )


class RankGroup:
    """Rows of a batch that are coupled with each other, as the ranks hold them.

    `rows` are those of the whole batch. `local` is where this rank's rows of the group stand among all its rows, and
    `numbers` says which rows of the group they are.
    """

    def __init__(self, rows: slice, owners: list[Index], world: World) -> None:
        self.count, self.world = rows.stop - rows.start, world
        edges = [np.searchsorted(own, (rows.start, rows.stop)).tolist() for own in owners]
        self.local = slice(*edges[world.rank])
        self.members = [own[low:high] - rows.start for own, (low, high) in zip(owners, edges)]
        self.numbers = torch.from_numpy(self.members[world.rank])

    def gather(self, x: Tensor) -> Tensor:
        """The rows of the whole group in order, from those of each rank."""
        order = torch.from_numpy(np.concatenate(self.members)).to(x.device)
        gathered = self.world.gather_rows(x, [len(part) for part in self.members])
        return torch.empty_like(gathered).index_copy_(0, order, gathered)


def sum_gradients(module: nn.Module, total: Tensor, world: World) -> None:
    """Replaces the gradients of `module`, and the 0-d `total`, by their sums over the ranks, in a single call."""
    trained = [p for p in module.parameters() if p.requires_grad]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = world.all_reduce(torch.cat([*(part.reshape(-1) for part in parts), total.view(1).to(parts[0])]))
    *sums, last = flat.split([*(part.numel() for part in parts), 1])
    for parameter, reduced in zip(trained, sums):
        parameter.grad = reduced.view_as(parameter)
    total.copy_(last.squeeze(0))
