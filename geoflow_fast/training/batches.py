"""Training batches of the flow: pairs, noise, coupling and interpolants."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Index
from geoflow_fast.directions import DIRECTIONS, Counts
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.curriculum import BatchPlan, draw_batch_plan
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.noise import StructuredNoise, sample_uniform
from geoflow_fast.ops import native
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.objective import B, generator_for, validation_rows
from geoflow_fast.training.ranks import LANE_ROWS, Group, lane_count


class ShuffledBatches:
    """Endless shuffled batches as a function of the step alone, so that a run resumes mid-epoch exactly.

    Epochs follow each other without a gap: a batch may end one and begin the next.
    """

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        if not 1 <= batch_size <= count:
            raise ValueError(f"batch_size={batch_size} needs at least as many pairs, got {count}")
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._epochs: dict[int, Index] = {}

    def __getitem__(self, step: int) -> Index:
        """Pair indices [batch_size] of 0-based step `step`."""
        first = step * self.batch_size
        last = first + self.batch_size
        low, high = first // self.count, (last - 1) // self.count
        self._epochs = {e: self._epochs[e] if e in self._epochs else self._shuffle(e) for e in (low, high)}
        if low == high:
            return self._epochs[low][first - low * self.count : last - low * self.count]
        return np.concatenate(
            (self._epochs[low][first - low * self.count :], self._epochs[high][: last - high * self.count])
        )

    def _shuffle(self, epoch: int) -> Index:
        return np.random.default_rng((self.seed, epoch)).permutation(self.count)


class Ahead(Generic[B]):
    """Makes the batch of the next step in a background thread while the current one is being used.

    Compiled operations release the interpreter lock, so the plan is solved beside the network's work. On a GPU the work
    goes to a stream of its own, which the training stream waits for.
    """

    def __init__(self, make: Callable[[int], B], first: int, last: int, device: torch.device, *, enabled: bool) -> None:
        self.make, self.last, self.device = make, last, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="geoflow-batches") if enabled else None
        self.waiting: Future[B] | None = self.pool.submit(self._run, first) if self.pool and first < last else None

    def _run(self, step: int) -> B:
        if self.stream is None:
            return self.make(step)
        with torch.cuda.stream(self.stream):
            batch = self.make(step)
            self.stream.synchronize()
        return batch

    def get(self, step: int) -> B:
        """The batch of `step`, which must follow the one of the last call."""
        if self.pool is None or self.waiting is None:
            return self._run(step)
        batch = self.waiting.result()
        self.waiting = self.pool.submit(self._run, step + 1) if step + 1 < self.last else None
        return batch

    def close(self) -> None:
        """Stops the thread after the batch it is at."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)


Noise = Tensor | StructuredNoise


PANEL_RULES = ("paper", "sample")
"""Couplings whose plan the ranks can solve together, each its rows of it; every rank solves the whole of the others."""


@dataclass(frozen=True)
class Batch:
    """Network input and target for rows sorted as in `curriculum`, and how long the coupling took to solve."""

    image: Tensor
    text: Tensor
    v_image: Tensor
    v_text: Tensor
    t: Tensor
    counts: Counts
    coupling_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.t)

    def pieces(self, count: int) -> Iterator[Batch]:
        """The batch in `count` pieces of nearly equal size, or in single rows if there are fewer."""
        rows = len(self)
        count = min(count, rows)
        edges = [rows * k // count for k in range(count + 1)] if rows else []
        for low, high in itertools.pairwise(edges):
            names = ("image", "text", "v_image", "v_text", "t")
            parts = {name: getattr(self, name)[low:high] for name in names}
            yield Batch(**parts, counts=_counts_between(self.counts, low, high))


def _counts_between(counts: Counts, low: int, high: int) -> Counts:
    """Counts of rows [low, high) of a sorted batch."""
    edges = np.clip(np.cumsum((0, *counts)), low, high)
    i2t, joint, t2i = np.diff(edges).tolist()
    return i2t, joint, t2i


class BatchMaker:
    """Turns pairs into training batches; a pure function of the step.

    Each rank of a `world` makes its share of the rows of a batch, `own`, of the same batch that one process would make.
    """

    def __init__(self, flow: GeoFlow, pairs: EmbeddingPairs, config: TrainConfig, world: World = ALONE) -> None:
        lanes = lane_count(config.batch_size)
        if lanes < world.size:
            least = LANE_ROWS * world.size
            raise ValueError(f"batch_size={config.batch_size} is too small for {world.size} ranks: at least {least}")
        if config.noise == "structured" and flow.config.geometry == "euclidean":
            raise ValueError('noise="structured" lies on the sphere; the Euclidean twin needs noise="iid"')
        self.flow, self.pairs, self.config = flow, pairs, config
        self.device = next(flow.parameters()).device
        self.order = ShuffledBatches(len(pairs), config.batch_size, config.seed)
        self.world = world
        lane = np.arange(config.batch_size) % lanes
        # Row numbers of each rank, ascending.
        self.owners = [np.flatnonzero((lane >= share.start) & (lane < share.stop)) for share in world.shares(lanes)]
        self.own = self.owners[world.rank]
        # Of each lane of this rank: which of its rows are in it.
        self.lanes = {k: torch.from_numpy(np.flatnonzero(self.own % lanes == k)) for k in world.own(lanes)}

    def training(self, step: int) -> Batch:
        """The batch of a training step: shuffled pairs, the plan of the curriculum, coupled noise."""
        generator = generator_for(self.config.seed, "batch", step)
        plan = self.config.curriculum.draw(step, self.config.batch_size, generator)
        image1, text1 = self._load(self.pairs, self.order[step][self.own])
        image0, text0 = self._lane_noise(step) if self.config.noise == "iid" else (image1.clone(), text1.clone())
        seconds = 0.0
        for rows, direction, rule in coupling_groups(plan.counts, self.config):
            group = Group(rows, self.owners, self.world)
            mine = group.local
            noise: tuple[Noise, Noise] = image0[mine], text0[mine]
            if self.config.noise == "structured":
                noise = self._structured_noise(group, generator)
                image0[mine], text0[mine] = dense(noise[0]), dense(noise[1])
            if rule != "independent":
                start = time.perf_counter()
                data = image1[mine], text1[mine]
                image1[mine], text1[mine] = self._coupled(noise, data, group, direction, rule, generator)
                seconds += time.perf_counter() - start
        batch = self._interpolate((image0, text0), (image1, text1), plan.select(self.own))
        return dataclasses.replace(batch, coupling_seconds=seconds)

    def _coupled(
        self,
        noise: tuple[Noise, Noise],
        data: tuple[Tensor, Tensor],
        group: Group,
        direction: str,
        rule: str,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """The data pairs that go with this rank's noise."""
        if self.world.size == 1 or self.config.ot_scope == "local":
            if not len(data[0]):
                return data
            if self.world.size > 1:  # plans of their own, draws of their own
                generator = torch.Generator().manual_seed(generator.initial_seed() + 1 + self.world.rank)
            target = self._couple(noise, data, direction, rule, generator)
            return data[0][target], data[1][target]
        image, text = (group.gather(x) for x in data)
        if rule in PANEL_RULES and self.device.type == "cpu" and native.missing() is None:
            target = self._couple_panel(noise, (image, text), group, rule, generator)
        else:
            whole = tuple(group.gather(dense(x)) for x in noise)
            target = self._couple(whole, (image, text), direction, rule, generator)[group.numbers]  # type: ignore[arg-type]
        return image[target], text[target]

    def _couple_panel(
        self,
        noise: tuple[Noise, Noise],
        data: tuple[Tensor, Tensor],
        group: Group,
        rule: str,
        generator: torch.Generator,
    ) -> Tensor:
        """`_couple` of this rank's noise with the data of all ranks."""
        uniform = None
        if rule == "sample":
            uniform = torch.rand(len(data[0]), generator=generator, dtype=torch.float64)[group.numbers]
        own = self._on_sphere(noise)
        return ops.ot_assign_panel(*own, *data, self.world, eps=self.config.sinkhorn_eps, uniform=uniform)

    def _on_sphere(self, noise: tuple[Noise, Noise]) -> tuple[Tensor, Tensor]:
        """What the plan sees of the noise. Euclidean data have unit norm, so what tells targets apart is the direction
        of the Gaussian noise."""
        image, text = dense(noise[0]), dense(noise[1])
        if self.flow.config.geometry != "euclidean":
            return image, text
        return functional.normalize(image), functional.normalize(text)

    def _couple(
        self,
        noise: tuple[Noise, Noise],
        data: tuple[Tensor, Tensor],
        direction: str,
        rule: str,
        generator: torch.Generator,
    ) -> Tensor:
        """Data row for each noise row: int64 [B]."""
        if self.flow.config.geometry == "euclidean":
            noise = self._on_sphere(noise)
        return ops.couple(
            *noise, *data, coupling=rule, direction=direction, eps=self.config.sinkhorn_eps, generator=generator
        )

    def validation(self, pairs: EmbeddingPairs, number: int) -> Batch:
        """Validation batch `number`: the same pairs, independent noise, times and directions every time. A rank has
        every so manieth row, or none of a small batch."""
        index = validation_rows(pairs, self.config.batch_size, number)
        rows = len(index)
        generator = generator_for(self.config.seed, "validation", number)
        plan = draw_batch_plan(rows, self.config.p_joint, 0.0, generator)
        # Directions are sorted, so the rows must not be.
        index = index[torch.randperm(rows, generator=generator).numpy()]
        image0, text0 = (dense(x) for x in self._noise(rows, generator))
        own = np.arange(self.world.rank, rows, self.world.size)
        return self._interpolate((image0[own], text0[own]), self._load(pairs, index[own]), plan.select(own))

    def _load(self, pairs: EmbeddingPairs, index: np.ndarray) -> tuple[Tensor, Tensor]:
        image, text = (x.to(self.device, non_blocking=True) for x in pairs[index])
        return self.flow.to_flow(image, text)  # type: ignore[return-value]

    def _lane_noise(self, step: int) -> tuple[Tensor, Tensor]:
        """Base samples of this rank's rows, drawn on the CPU so that they do not depend on the device."""
        count = lane_count(self.config.batch_size)
        seeds = np.random.SeedSequence((self.config.seed, *b"noise", step)).generate_state(count, np.uint64) >> 1
        generator = torch.Generator()
        streams = tuple(torch.empty(len(self.own), d) for d in self.flow.config.flow_dims)
        for lane, rows in self.lanes.items():
            generator.manual_seed(int(seeds[lane]))
            for stream in streams:
                stream[rows] = torch.randn(len(rows), stream.shape[1], generator=generator)
        if self.flow.config.geometry == "sphere":
            streams = tuple(x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in streams)
        image, text = (x.to(self.device, non_blocking=True) for x in streams)
        return image, text

    def _structured_noise(self, group: Group, generator: torch.Generator) -> tuple[Noise, Noise]:
        """Hadamard blocks of a group of rows; of several ranks each keeps its own rows of them."""
        noise = self._noise(group.count, generator)
        if self.world.size == 1:
            return noise
        return dense(noise[0])[group.numbers], dense(noise[1])[group.numbers]

    def _noise(self, rows: int, generator: torch.Generator) -> tuple[Noise, Noise]:
        """Base samples of both streams, drawn on the CPU so that they do not depend on the device."""
        image, text = (self._noise_of_width(rows, d, generator) for d in self.flow.config.flow_dims)
        return image, text

    def _noise_of_width(self, rows: int, d: int, generator: torch.Generator) -> Noise:
        if self.flow.config.geometry == "euclidean":
            return torch.randn(rows, d, generator=generator).to(self.device, non_blocking=True)
        if self.config.noise == "structured":
            drawn = StructuredNoise.draw(rows, d, generator=generator)
            return dataclasses.replace(drawn, signs=drawn.signs.to(self.device, non_blocking=True))
        return sample_uniform(rows, d, generator=generator).to(self.device, non_blocking=True)

    def _interpolate(self, noise: tuple[Tensor, Tensor], data: tuple[Tensor, Tensor], plan: BatchPlan) -> Batch:
        t, direction, drop = (x.to(self.device) for x in (plan.t, plan.direction, plan.drop))
        make = masked_line if self.flow.config.geometry == "euclidean" else ops.masked_interpolant
        return Batch(*make(*noise, *data, t, direction, drop=drop), t, plan.counts)


def masked_line(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, t: Tensor, direction: Tensor, *, drop: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Euclidean twin of `ops.masked_interpolant`: straight lines instead of geodesics."""
    points, velocities = [], []
    for noise, data, given_name in ((image0, image1, "i2t"), (text0, text1, "t2i")):
        given = (direction == DIRECTIONS.index(given_name)).unsqueeze(-1)
        shown = torch.where(drop.unsqueeze(-1), noise, data)
        points.append(torch.where(given, shown, torch.lerp(noise, data, t.unsqueeze(-1))))
        velocities.append(torch.where(given, 0.0, data - noise))
    return points[0], points[1], velocities[0], velocities[1]


def coupling_groups(counts: Counts, config: TrainConfig) -> list[tuple[slice, str, str]]:
    """(rows, direction, rule) of the groups of a sorted batch within which noise is coupled to data.

    The paper solves one plan over the whole batch; otherwise each direction has its own rule and plan.
    """
    n_i2t, n_joint, n_t2i = counts
    edges = (0, n_i2t, n_i2t + n_joint, n_i2t + n_joint + n_t2i)
    if config.coupling == config.conditional_coupling == "paper":
        return [(slice(0, edges[-1]), "joint", "paper")]
    conditional = config.conditional_coupling
    rules = (("i2t", conditional), ("joint", config.coupling), ("t2i", conditional))
    return [(slice(low, high), *rule) for low, high, rule in zip(edges[:-1], edges[1:], rules) if high > low]


def dense(noise: Noise) -> Tensor:
    """Noise as a plain tensor [B, d]."""
    return noise if isinstance(noise, Tensor) else noise.dense()
