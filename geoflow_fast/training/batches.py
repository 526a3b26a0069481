"""Training batches of the flow: pairs in shuffled order, noise, coupling, interpolants, and their prefetching."""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Index
from geoflow_fast.directions import ROW_ORDER, Counts, Direction
from geoflow_fast.flow.curriculum import draw_batch_plan
from geoflow_fast.flow.fields import Streams
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.manifolds import manifold_of
from geoflow_fast.ops.ot_assign import assign_late, warn_if_unsolved
from geoflow_fast.runtime.late import LateValues
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.device_rows import DeviceRows, send
from geoflow_fast.training.objective import B

PLANS = ("paper", "sample")
"""Couplings that are read from a transport plan."""


def generator_for(seed: int, purpose: str, step: int) -> torch.Generator:
    """A generator on the CPU that depends on nothing but these arguments."""
    entropy = (seed, *purpose.encode(), step)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))


class ShuffledBatches:
    """Endless shuffled batches. A batch depends on its step alone, so that a run resumes in the middle of an epoch.

    Epochs follow each other without a gap: one batch may hold the end of an epoch and the beginning of the next.
    """

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        if not 1 <= batch_size <= count:
            raise ValueError(f"batch_size={batch_size} needs at least as many pairs, got {count}")
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._epochs: dict[int, Index] = {}

    def __getitem__(self, step: int) -> Index:
        """The numbers of the pairs [batch_size] of a step, counted from 0."""
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


def validation_index(pairs: Sized, batch_size: int, number: int) -> Index:
    """The numbers of the pairs of a validation batch. Batches follow each other and start again at the end."""
    rows = min(batch_size, len(pairs))
    return (np.arange(rows) + number * rows) % len(pairs)


def piece_edges(rows: int, count: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) row of at most `count` pieces, none of them empty, whose sizes differ by at most
    one."""
    count = min(count, rows)
    return itertools.pairwise([rows * k // count for k in range(count + 1)] if rows else [])


@dataclass(frozen=True)
class RowBatch:
    """The tensors that the loss of a batch takes, all with the same number of rows."""

    tensors: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def pieces(self, count: int) -> Iterator[RowBatch]:
        """Yields the batch in `count` pieces of nearly equal size, or in single rows if it has fewer."""
        for low, high in piece_edges(len(self), count):
            yield RowBatch(tuple(x[low:high] for x in self.tensors))


class Prefetcher(Generic[B]):
    """Makes the batch of the next step in a background thread while the current one is being used.

    Compiled operations release the interpreter lock, so the coupling is solved beside the network's work. On a GPU the
    work goes to a stream of its own, which the training stream waits for; the host waits for neither.
    """

    def __init__(self, make: Callable[[int], B], first: int, last: int, device: torch.device, *, enabled: bool) -> None:
        self.last = last
        self.own = OwnStream(make, device) if device.type == "cuda" else None
        self.make = make if self.own is None else self.own.make
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="geoflow-batches") if enabled else None
        self.waiting: Future[B] | None = self.pool.submit(self.make, first) if self.pool and first < last else None

    def get(self, step: int) -> B:
        """The batch of `step`, which must follow the step of the previous call."""
        if self.pool is None or self.waiting is None:
            batch = self.make(step)
        else:
            batch = self.waiting.result()
            self.waiting = self.pool.submit(self.make, step + 1) if step + 1 < self.last else None
        if self.own is not None:
            self.own.hand_over(batch)
        return batch

    def close(self) -> None:
        """Ends the thread once it has made the batch it is working on."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)


class OwnStream(Generic[B]):
    """Makes batches on a GPU stream of their own."""

    def __init__(self, make: Callable[[int], B], device: torch.device) -> None:
        self.stream, self.device = torch.cuda.Stream(device), device
        self._make = make
        # Pairs that were copied to the GPU, for one, are there by then.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._made: deque[Any] = deque()

    def make(self, step: int) -> B:
        """Starts to make the batch of a step."""
        with torch.cuda.stream(self.stream):
            batch = self._make(step)
            self._made.append(self.stream.record_event())
        return batch

    def hand_over(self, batch: B) -> None:
        """Makes the current stream wait for the batch that was made first, and keeps its memory from being used again
        before that stream is done with it."""
        user = torch.cuda.current_stream(self.device)
        user.wait_event(self._made.popleft())
        for x in tensors_of(batch):
            x.record_stream(user)


def tensors_of(batch: object) -> list[Tensor]:
    """The tensors among the fields of a batch."""
    fields = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in vars(batch).values())
    return [x for x in fields if isinstance(x, Tensor)]


def with_tensors(batch: B, tensors: Sequence[Tensor]) -> B:
    """The batch with other tensors in place of those of `tensors_of`."""
    others = iter(tensors)

    def replaced(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(replaced(x) for x in value)
        return next(others) if isinstance(value, Tensor) else value

    twin = copy.copy(batch)
    for name, value in vars(batch).items():
        object.__setattr__(twin, name, replaced(value))  # batches are frozen
    return twin


@dataclass(frozen=True)
class Batch:
    """Input and target of the network, rows sorted by direction: points [B, d] and velocities [B, d] of both streams,
    times [B], direction codes int8 [B] and how many rows each direction has."""

    image: Tensor
    text: Tensor
    v_image: Tensor
    v_text: Tensor
    t: Tensor
    codes: Tensor
    counts: Counts
    coupling_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.t)

    def pieces(self, count: int) -> Iterator[Batch]:
        """Yields the batch in `count` pieces of nearly equal size, or in single rows if it has fewer."""
        if count == 1 and len(self):
            yield self
            return
        names = ("image", "text", "v_image", "v_text", "t", "codes")
        for low, high in piece_edges(len(self), count):
            i2t, joint, t2i = np.diff(np.clip(np.cumsum((0, *self.counts)), low, high)).tolist()
            parts = {name: getattr(self, name)[low:high] for name in names}
            yield Batch(**parts, counts=(i2t, joint, t2i))


def coupling_groups(counts: Counts, config: TrainConfig) -> list[tuple[slice, Direction, str]]:
    """(rows, direction, rule) of the groups of rows within which noise is coupled with data, in a sorted batch.

    The paper solves one plan over the whole batch; otherwise each direction has its own rule and its own plan.
    """
    if config.coupling == config.conditional_coupling == "paper":
        return [(slice(0, sum(counts)), Direction.JOINT, "paper")]
    groups, low = [], 0
    for direction, count in zip(ROW_ORDER, counts):
        rule = config.coupling if direction is Direction.JOINT else config.conditional_coupling
        if count:
            groups.append((slice(low, low + count), direction, rule))
        low += count
    return groups


class BatchMaker:
    """Turns pairs into batches of the flow. A batch depends on its number alone.

    Of `size` ranks, number `rank` makes every `size`-th row of a batch, so it has its share of every direction. A group
    of rows that a plan couples is drawn, read and solved whole by each rank, which sends nothing.
    """

    def __init__(self, flow: GeoFlow, pairs: EmbeddingPairs, config: TrainConfig, rank: int = 0, size: int = 1) -> None:
        if config.batch_size < size:
            raise ValueError(f"batch_size={config.batch_size} is too small for {size} ranks")
        self.manifold = manifold_of(flow)
        self.device = next(flow.parameters()).device
        self.flow, self.pairs, self.config = flow, pairs, config
        self.rows = DeviceRows(pairs, self.device) if self.device.type == "cuda" else None
        self.solved: LateValues[float] = LateValues(self.device)
        self.widths = flow.config.flow_dims
        self.curriculum = config.curriculum
        self.order = ShuffledBatches(len(pairs), config.batch_size, config.seed)
        self.share = slice(rank, None, size)

    def training(self, step: int) -> Batch:
        """The batch of a training step: shuffled pairs, coupled noise, and the directions and times of the
        curriculum."""
        config = self.config
        generator = generator_for(config.seed, "batch", step)
        plan = draw_batch_plan(
            config.batch_size, self.joint_share(step), config.p_drop, generator, fixed=config.fixed_directions
        )
        every = np.arange(config.batch_size, dtype=np.int64)
        own = every[self.share]
        groups = [group for group in coupling_groups(plan.counts, config) if group[2] != "independent"]
        made = np.unique(np.concatenate([own, *(every[rows] for rows, _, _ in groups)]))
        mine = plan.select(own)
        index, kept = self.order[step][made], np.searchsorted(made, own)
        carried = [*map(torch.from_numpy, (made, kept)), mine.t, mine.direction, mine.drop]
        if self.rows is None:
            carried = [x.to(self.device) for x in carried]
            data = self._load(self.pairs, index)
        else:
            image, text, *carried = send((*self.rows.numbers(index), *carried), self.device)
            data = self._in_flow(self.rows.gather((image, text), index))
        numbers, places, t, codes, drop = carried
        noise = self._noise("noise", step, numbers)
        seconds = 0.0
        for rows, direction, rule in groups:
            group = slice(*np.searchsorted(made, (rows.start, rows.stop)).tolist())
            seconds += self.couple_group(noise, data, group, direction, rule, generator)
        if len(own) < len(made):
            noise, data = (noise[0][places], noise[1][places]), (data[0][places], data[1][places])
        points = self.manifold.interpolant(noise, data, t, codes, drop, check=self.rows is None)
        return Batch(*points, t, codes, mine.counts, seconds)

    def joint_share(self, step: int) -> float:
        """The share of joint rows in the batch of a step: the expected one, or the one that it has."""
        curriculum = self.curriculum
        return curriculum.joint_share(step) if self.config.fixed_directions else curriculum.joint_probability(step)

    def couple_group(
        self, noise: Streams, data: Streams, rows: slice, direction: Direction, rule: str, generator: torch.Generator
    ) -> float:
        """Reorders the data of a group of rows, in place, so that each row stands beside the noise it is coupled with.
        Returns how many seconds the coupling took."""
        start = time.perf_counter()
        own = data[0][rows], data[1][rows]
        target = self.couple((noise[0][rows], noise[1][rows]), own, direction, rule, generator)
        data[0][rows], data[1][rows] = own[0][target], own[1][target]
        return time.perf_counter() - start

    def couple(
        self,
        noise: Streams,
        data: Streams,
        direction: Direction,
        rule: str,
        generator: torch.Generator,
    ) -> Tensor:
        """The data row that belongs to each noise row: int64 [B]. Nothing waits for a plan on a GPU: whether it was
        solved is looked at later."""
        noise, eps = self.unit_noise(noise), self.config.sinkhorn_eps
        if rule not in PLANS:
            return ops.couple(*noise, *data, coupling=rule, direction=direction, eps=eps, generator=generator)
        uniform = None
        if rule == "sample":
            uniform = torch.rand(len(data[0]), generator=generator, dtype=torch.float64, device="cpu")
            uniform = uniform if self.rows is None else send([uniform], self.device)[0]
        target, report = assign_late((*noise, *data), eps, uniform)
        self.solved.put(eps, report)
        for solved_eps, known in self.solved.arrived():
            warn_if_unsolved(known, solved_eps)
        return target

    def unit_noise(self, noise: Streams) -> Streams:
        """Noise scaled to unit norm. Data have unit norm, so what tells targets apart is the direction of the noise,
        where its manifold leaves it another norm."""
        image, text = noise
        return (image, text) if self.manifold.unit_norm else (functional.normalize(image), functional.normalize(text))

    def validation(self, pairs: EmbeddingPairs, number: int) -> Batch:
        """Validation batch `number`: the same pairs, independent noise, times and directions every time."""
        index = validation_index(pairs, self.config.batch_size, number)
        rows = len(index)
        generator = generator_for(self.config.seed, "validation", number)
        plan = draw_batch_plan(rows, self.config.p_joint, 0.0, generator)
        # Directions are sorted, so the pairs must be shuffled.
        index = index[torch.randperm(rows, generator=generator, device="cpu").numpy()]
        own = np.arange(rows, dtype=np.int64)[self.share]
        mine = plan.select(own)
        noise = self._noise("validation noise", number, torch.from_numpy(own).to(self.device))
        t, codes, drop = (x.to(self.device) for x in (mine.t, mine.direction, mine.drop))
        points = self.manifold.interpolant(noise, self._load(pairs, index[own]), t, codes, drop)
        return Batch(*points, t, codes, mine.counts)

    def _load(self, pairs: EmbeddingPairs, index: Index) -> Streams:
        """The pairs `index` [B] on the device, in the flow's coordinates."""
        image, text = (x.to(self.device, non_blocking=True) for x in pairs[index])
        return self._in_flow((image, text))

    def _in_flow(self, embeddings: Streams) -> Streams:
        image, text = (self.flow.stream_to_flow(x, stream) for stream, x in enumerate(embeddings))
        return image, text

    def _noise(self, purpose: str, step: int, numbers: Tensor) -> Streams:
        """Points of the base distribution for the rows `numbers` of a batch."""
        seed = int(np.random.SeedSequence((self.config.seed, *purpose.encode())).generate_state(1, np.uint64)[0])
        unit = self.manifold.unit_norm
        image, text = (
            ops.counter_noise(numbers, d, seed, step, stream, unit=unit) for stream, d in enumerate(self.widths)
        )
        return image, text
