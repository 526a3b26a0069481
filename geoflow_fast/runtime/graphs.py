"""CUDA graphs: from the second call of one kind on, a GPU replays what it did, and the host starts all of it at once.

A solve or a training step is hundreds of small kernels, each of which costs the host more time than a GPU needs for it.
A graph is captured when a call of one kind (same shapes, settings and weights) comes for the second time, so that
single calls do not pay for it, neither in time nor in memory. Whatever is not replayed has a reason, which `Graphs`
keeps and `geoflow_fast.runtime.graphs` logs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

LOGGER = logging.getLogger(__name__)
VARIABLE = "GEOFLOW_GRAPHS"
KEPT = 4
"""Kinds of calls that a model keeps graphs of, each with the memory of its solve."""
FIRST = "this is the first call of its kind, and the second will be captured"

Solve = Callable[..., Tensor]
S = TypeVar("S", bound=Solve)


class Graphs:
    """The graphs of one model. Copies of a model, and files, have none of them. Threads may share it: they take turns,
    on the host and on the GPU, because a graph has one memory for its inputs and results."""

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self._seen: dict[Hashable, None] = {}
        self._graphs: dict[Hashable, Solve] = {}
        self._refused: dict[Hashable, str] = {}
        self._turn = threading.RLock()
        self._done: Any = None  # the event after which the memory of the graphs is free again
        self.reason: str | None = "nothing has been solved yet"
        """Why the last call was not a replay; None if it was one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(self.kept)

    def __reduce__(self) -> tuple[type[Graphs], tuple[int]]:
        return Graphs, (self.kept,)

    def replay(
        self, kind: Hashable, make: Callable[[], Solve], *inputs: Tensor, repeatable: bool = True
    ) -> Tensor | None:
        """Replays, for `inputs`, the function that `make` returns, which has to depend on nothing else but what `kind`
        names. Returns None if that cannot be done now, for the `reason` that is kept. A function that is `repeatable`
        runs once before it is captured, to prepare what a graph must not contain; any other has done so in the call
        before, which was the first of its kind."""
        with self._turn:
            self.reason = self._refused.get(kind)
            if self.reason is None and kind not in self._graphs:
                if kind in self._seen:
                    self.reason = self._capture(kind, make, inputs, repeatable)
                else:
                    self.reason = FIRST
                    _remember(self._seen, kind, None, self.kept)
            if self.reason is not None:
                return None
            with self._after_others(inputs[0].device):
                return self._graphs[kind](*inputs)

    def _capture(
        self, kind: Hashable, make: Callable[[], Solve], inputs: tuple[Tensor, ...], repeatable: bool
    ) -> str | None:
        """Captures a graph for this kind of calls, or returns why that cannot be done."""
        del self._seen[kind]
        while len(self._graphs) >= self.kept:
            wait_for_all(inputs[0].device)  # a replay of the graph that goes may not have ended
            del self._graphs[next(iter(self._graphs))]
        try:
            self._graphs[kind] = capture(make(), inputs, repeatable=repeatable)
        except RuntimeError as error:  # torch raises this, and its subclass for a lack of memory
            reason = f"the capture failed: {str(error).splitlines()[0]}"
            LOGGER.warning("calls of this kind are started kernel by kernel, since %s", reason)
            _remember(self._refused, kind, reason, self.kept)
            return reason
        return None

    @contextlib.contextmanager
    def _after_others(self, device: torch.device) -> Iterator[None]:
        """Makes what is started inside wait for the last replay, which may be that of another stream."""
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(device)
        if self._done is not None:
            stream.wait_event(self._done)
        yield
        self._done = stream.record_event()


def _remember(entries: dict[Hashable, Any], key: Hashable, value: Any, most: int) -> None:
    """Adds an entry, and forgets the oldest ones beyond so many."""
    entries[key] = value
    while len(entries) > most:
        del entries[next(iter(entries))]


class Replayed(Generic[S]):
    """The solve that `prepare` returns, which a GPU replays for calls of one `kind`. Those for which there is a reason
    `why_not` share one that is `prepared` when it is first needed."""

    def __init__(
        self,
        graphs: Graphs,
        kind: Hashable,
        prepare: Callable[[], S],
        tensors: Callable[[], Iterable[Tensor]],
        why_not: str | None = None,
    ) -> None:
        self.graphs, self.kind, self.prepare, self.why_not = graphs, kind, prepare, why_not
        self.tensors = tensors
        """The weights that the solve depends on."""

    @functools.cached_property
    def prepared(self) -> S:
        """A solve of this call's own."""
        return self.prepare()

    def __call__(self, *inputs: Tensor) -> Tensor:
        reason = self.why_not or unsuitable(inputs[0])
        if reason is not None:
            self.graphs.reason = reason
            return self.prepared(*inputs)
        shapes = tuple((x.shape, x.dtype) for x in inputs)
        key = self.kind, surroundings(), shapes, versions(self.tensors())
        result = self.graphs.replay(key, self.prepare, *inputs)
        if result is None or not bool(torch.isfinite(result).all()):
            return self.prepared(*inputs)  # which names the row and the step that is not finite
        return result


def surroundings() -> Hashable:
    """What the caller's context says about products on a GPU."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return autocast, torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()


def unsuitable(like: Tensor) -> str | None:
    """Why calls with tensors like this one cannot be captured; None if they can."""
    if not like.is_cuda:
        return "the tensors are not on a GPU"
    if like.numel() == 0:
        return "there are no rows"
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0 is set"
    if torch.compiler.is_compiling():
        return "torch.compile traces the caller"
    if torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph of its own"
    return None


def versions(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """What changes when one of these tensors is replaced or written to."""
    return tuple((x.data_ptr(), x._version) for x in tensors)


def wait_for_all(device: torch.device) -> None:
    """Waits for everything that a GPU was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(solve: Solve, inputs: tuple[Tensor, ...], *, repeatable: bool) -> Solve:
    """A function that replays `solve`, for inputs of the same shapes."""
    held = [x.clone() for x in inputs]
    if repeatable:  # kernels are compiled, and buffers and tables made, outside the graph
        solve(*held)
    graph = torch.cuda.CUDAGraph()
    # Other threads, as the one that makes batches, go on: what they ask of the GPU is none of the graph's business.
    with torch.cuda.device(inputs[0].device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = solve(*held)

    def replay(*inputs: Tensor) -> Tensor:
        for to, x in zip(held, inputs):
            to.copy_(x)
        graph.replay()
        return result.clone()

    return replay
