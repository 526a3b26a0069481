"""Processes (ranks) that torchrun starts and that work together: the number of this one, and sums and gathers that fail
when a rank is lost instead of waiting for it forever.

A rank that dies closes its connections, and every call that waits for it raises `RankLost`. A rank that no longer runs
(a stopped process, a machine without power) is noticed because its heartbeat ends, which a thread of each rank keeps
up. A rank that is merely slow keeps its heartbeat up, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from geoflow_fast.runtime import checks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["ALONE", "RankLost", "World", "joined"]

OPERATIONS = ("sum", "max", "min")
"""What `World.all_reduce` can compute over the ranks."""

BEAT_SECONDS = 2.0
LOST_SECONDS = 30.0
"""A rank counts as lost when its heartbeat has not been seen for this long."""
JOIN_SECONDS = 600.0
"""How long to wait for all ranks to arrive."""
WAIT_SECONDS = 6 * 3600.0
"""How long a call waits for a rank that is alive."""


class RankLost(OSError):
    """Raised when another rank has ended or no longer answers. Files on disk are complete, and running the same command
    again continues the work."""


class World:
    """The processes (ranks) of a job, of which this one is number `rank` of `size`. With a `size` of 1 nothing is
    communicated.

    All ranks must make the same calls in the same order. `traffic` counts the bytes of the tensors that this rank has
    passed to calls and received from them.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.size = checks.integer(size, "size", 1)
        self.rank = checks.integer(rank, "rank", 0, size - 1)
        self.traffic = 0
        self._store = store
        self._series = 0

    @property
    def is_main(self) -> bool:
        """True for rank 0, which prints and writes for all ranks."""
        return self.rank == 0

    def shares(self, count: int) -> list[range]:
        """The range of each rank when `count` items are divided in order; sizes differ by at most one."""
        checks.integer(count, "count")
        edges = [count * rank // self.size for rank in range(self.size + 1)]
        return [range(low, high) for low, high in itertools.pairwise(edges)]

    def own(self, count: int) -> range:
        """This rank's range of `count` items."""
        return self.shares(count)[self.rank]

    def barrier(self) -> None:
        """Waits until every rank has made this call."""
        self.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        """Replaces `x` by its "sum", "max" or "min" over the ranks and returns it; all ranks get identical bits."""
        checks.one_of(checks.words(operation, "operation"), "operation", OPERATIONS)
        checks.dense(x, "x")
        if self.size > 1:
            self._call(lambda: dist.all_reduce(x, getattr(dist.ReduceOp, operation.upper())), x, x)
        return x

    def any(self, condition: bool) -> bool:
        """True on every rank if the condition holds on at least one."""
        return (
            condition
            if self.size == 1
            else bool(self.all_reduce(torch.tensor(float(condition), dtype=torch.float32, device="cpu"), "max"))
        )

    def mean(self, x: Tensor) -> float:
        """Mean over the entries of `x` on all ranks; some ranks may have no entries."""
        checks.with_values(x, "x")
        if self.size == 1 and x.numel():
            return float(x.mean())
        own = torch.stack((x.double().sum(), torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device)))
        total, count = self.all_reduce(own).tolist()
        if count == 0:
            raise ValueError("x has no entries on any rank, so it has no mean")
        return float(total / count)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replaces `x` by the tensor of the main rank and returns it."""
        checks.dense(x, "x")
        if self.size > 1:
            self._call(lambda: dist.broadcast(x, 0), x)
        return x

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenates the rows of all ranks in order: [sum(counts), ...]. Rank r contributes `counts[r]` rows."""
        _check_rows(x)
        if not isinstance(counts, Sequence) or len(counts) != self.size:
            raise ValueError(f"counts must be a sequence of {self.size} numbers of rows, one per rank, got {counts!r}")
        for rank, count in enumerate(counts):
            checks.integer(count, f"counts[{rank}]")
        if len(x) != counts[self.rank]:
            raise ValueError(f"x has {len(x)} rows, but counts[{self.rank}], this rank's, is {counts[self.rank]}")
        if self.size == 1:
            return x
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        gathered = x.new_empty(self.size, max(counts), *x.shape[1:])
        self._call(lambda: dist.all_gather(list(gathered), padded), padded, gathered)
        return torch.cat([part[:count] for part, count in zip(gathered, counts)])

    def swap_rows(self, x: Tensor) -> Tensor:
        """Sends every rank its share of the rows of `x` [rows, ...] and returns what all ranks hold of this rank's
        share: [size, own rows, ...]."""
        _check_rows(x)
        if self.size == 1:
            return x.unsqueeze(0)
        sent = [len(share) for share in self.shares(len(x))]
        own = sent[self.rank]
        received = x.new_empty(self.size * own, *x.shape[1:])
        x = x.contiguous()
        own_of_each = [own] * self.size
        self._call(lambda: dist.all_to_all_single(received, x, own_of_each, sent), x, received)
        return received.view(self.size, own, *x.shape[1:])

    def share(self, value: Any) -> Any:
        """Returns the main rank's `value`, which JSON must be able to hold, on every rank."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.is_main else b""
        length = int(self.broadcast(torch.tensor([len(text)], device="cpu")))
        raw = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(length, dtype=torch.uint8, device="cpu")
        )
        return json.loads(self.broadcast(raw).numpy().tobytes())

    def claims(self, count: int) -> Iterator[int]:
        """Yields the numbers from 0 to count - 1, each on exactly one rank: the one that asks next."""
        checks.integer(count, "count")
        self._series += 1
        if self._store is None:
            yield from range(count)
            return
        while (number := self._store.add(f"claims/{self._series}", 1) - 1) < count:
            yield number

    def add_up(self, name: str, amount: int) -> int:
        """Adds `amount` to the shared number `name` and returns its new value; no rank waits for another."""
        checks.words(name, "name")
        checks.integer(amount, "amount", -checks.LARGEST_SEED)
        return amount if self._store is None else self._store.add(f"sums/{self._series}/{name}", amount)

    def _call(self, run: Callable[[], object], *tensors: Tensor) -> None:
        """Makes a call that sends or receives `tensors`, and turns a lost connection into `RankLost`."""
        self.traffic += sum(x.nbytes for x in tensors)
        try:
            run()
        except RuntimeError as error:  # torch.distributed raises this when a connection is lost
            first = str(error).strip().splitlines()[0]
            raise RankLost(
                f"rank {self.rank} of {self.size} on {socket.gethostname()} lost contact with another rank, which has "
                f"ended ({first}); what is finished is kept, the same command continues"
            ) from error


def _check_rows(x: Tensor) -> None:
    if not checks.dense(x, "x").dim():
        raise ValueError("x must be rows [n, ...], got a number")


ALONE = World()
"""The world of a single process."""


class Heartbeat:
    """A thread that shows the other ranks that this process is running, and ends it when one of them no longer is.

    Each rank watches its neighbour, so the work does not grow with the number of ranks; all ranks read what one of them
    has noticed.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.watched = store, rank, (rank + 1) % size
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="geoflow-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        beat, seen, since = 0, b"", time.monotonic()
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            try:
                self.store.set(f"beat/{self.rank}", str(beat))
                latest = self.store.get(f"beat/{self.watched}") if self.store.check([f"beat/{self.watched}"]) else b""
                lost = self.store.get("lost").decode() if self.store.check(["lost"]) else None
            except RuntimeError as error:
                _end_process(f"the first machine of the job no longer answers ({str(error).splitlines()[0]})")
            if latest != seen:
                seen, since = latest, time.monotonic()
            if lost is None and time.monotonic() - since > LOST_SECONDS:
                lost = f"rank {self.watched} has not shown itself for {LOST_SECONDS:.0f} seconds"
                self.store.set("lost", lost)
            if lost is not None:
                _end_process(lost)


def _end_process(reason: str) -> None:
    """Ends this process at once, because its main thread may be waiting for the lost rank in compiled code, for hours.
    Nothing on disk is half-written."""
    sys.stderr.write(f"geoflow: error: {reason}; what is finished is kept, the same command continues\n")
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Context manager that gives the `World` of the processes that torchrun started, or of this process alone if it was
    started without torchrun.

    CPU tensors are sent by gloo, GPU tensors by NCCL. Each process of a machine uses the GPU of its local rank.
    """
    if "WORLD_SIZE" not in os.environ or _setting("WORLD_SIZE", 1) == 1:
        yield World()
        return
    world, heartbeat = _join()
    # After an error nothing below runs: the process ends and closes its connections, because waiting for the other
    # ranks might take forever.
    yield world
    world.barrier()
    heartbeat.stop()
    world.barrier()  # the first rank may hold the store that the other heartbeats go to
    dist.destroy_process_group()


def _join() -> tuple[World, Heartbeat]:
    if not dist.is_available():
        raise OSError("this build of torch has no torch.distributed; run one process, without torchrun")
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    _setting("RANK", 0, _setting("WORLD_SIZE", 1) - 1)
    if not os.environ.get("MASTER_ADDR"):
        raise OSError("MASTER_ADDR, the first machine of the job, is not set; start the command with torchrun")
    _setting("MASTER_PORT", 1, 65535)
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        local = _setting("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else 0
        torch.cuda.set_device(local % torch.cuda.device_count())
    try:
        store, rank, size = next(rendezvous("env://", timeout=_seconds(JOIN_SECONDS)))
        # A restarted job may use the same store again.
        store = PrefixStore(f"geoflow/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_seconds(WAIT_SECONDS))
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise OSError(f"could not join the other ranks ({first}); start the command with torchrun") from error
    return World(rank, size, store), Heartbeat(store.clone(), rank, size)  # type: ignore[attr-defined]


def _setting(name: str, least: int, most: int = 2**31 - 1) -> int:
    """A number that torchrun puts into the environment. With a wrong one torch would wait for ranks that never come."""
    text = os.environ.get(name)
    if text is None:
        raise OSError(f"{name} is not set, but WORLD_SIZE is; start the command with torchrun, which sets both")
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise ValueError(
            f"the environment variable {name} must be an integer between {least} and {most}, got {text!r}; "
            "start the command with torchrun, which sets it, or unset WORLD_SIZE to run one process"
        )
    return int(text)


def _seconds(count: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=count)
