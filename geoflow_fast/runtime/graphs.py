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
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.runtime.device import multiplies_in_tf32

LOGGER = logging.getLogger(__name__)
VARIABLE = "GEOFLOW_GRAPHS"
KEPT = 4
"""Kinds of calls that a model keeps graphs of, each with the memory of its solve."""
FIRST = "this is the first call of its kind, and the second will be captured"

Compute = Callable[..., Tensor]


class Graphs:
    """The graphs of one model. Copies of a model, and files, have none of them. Threads may share it: they take turns,
    on the host and on the GPU, because a graph has one memory for its inputs and results."""

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self._seen: dict[Hashable, None] = {}
        self._graphs: dict[Hashable, Compute] = {}
        self._refused: dict[Hashable, str] = {}
        self._turn = threading.RLock()
        self._streams: dict[torch.device, Any] = {}  # on which graphs are captured, one for each device
        self._done: Any = None  # the event after which the memory of the graphs is free again
        self.reason: str | None = "nothing has been solved yet"
        """Why the last call was not a replay; None if it was one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(self.kept)

    def __reduce__(self) -> tuple[type[Graphs], tuple[int]]:
        return Graphs, (self.kept,)

    def replay(
        self, kind: Hashable, make: Callable[[], Compute], *inputs: Tensor, repeatable: bool = True
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

    def clear(self) -> None:
        """Forgets all graphs: what they depend on has changed."""
        with self._turn:
            for device in self._streams:
                wait_for_all(device)  # a replay may not have ended
            for entries in (self._graphs, self._seen, self._refused):
                entries.clear()

    def _capture(
        self, kind: Hashable, make: Callable[[], Compute], inputs: tuple[Tensor, ...], repeatable: bool
    ) -> str | None:
        """Captures a graph for this kind of calls, or returns why that cannot be done."""
        del self._seen[kind]
        while len(self._graphs) >= self.kept:
            wait_for_all(inputs[0].device)  # a replay of the graph that goes may not have ended
            del self._graphs[next(iter(self._graphs))]
        try:
            self._graphs[kind] = capture(make(), inputs, self._stream(inputs[0].device), repeatable=repeatable)
        except RuntimeError as error:  # torch raises this, and its subclass for a lack of memory
            reason = f"the capture failed: {str(error).splitlines()[0]}"
            LOGGER.warning("calls of this kind are started kernel by kernel, since %s", reason)
            _remember(self._refused, kind, reason, self.kept)
            return reason
        return None

    def _stream(self, device: torch.device) -> Any:
        """The stream of captures on this device: memory of one stream is not handed out to another."""
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)

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


class CapturedCall:
    """The solve that `prepare` makes, which a GPU replays for calls of one `key`. Those for which there is a reason
    `why_not` share one that is `prepared` when it is first needed. What `prepare` borrows for its stack is given back
    when the context of the call ends, but for what a graph uses, which stays with the graph."""

    def __init__(
        self,
        graphs: Graphs,
        key: Hashable,
        prepare: Callable[[contextlib.ExitStack], Compute],
        why_not: str | None = None,
    ) -> None:
        self.graphs, self.key, self.prepare, self.why_not = graphs, key, prepare, why_not
        self.replayed = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CapturedCall:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    @functools.cached_property
    def prepared(self) -> Compute:
        """A solve of this call's own."""
        return self.prepare(self._stack)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The result of the solve. One that a replay returns may not be finite where the solve itself raises an
        error."""
        reason = self.why_not or unsuitable(inputs[0])
        if reason is None:
            shapes = tuple((x.shape, x.dtype) for x in inputs)
            # What this solve borrows is never given back: the graph keeps the solve.
            make = functools.partial(self.prepare, contextlib.ExitStack())
            result = self.graphs.replay((self.key, surroundings(), shapes), make, *inputs)
            if result is not None:
                self.replayed = True
                return result
        else:
            self.graphs.reason = reason
        return self.prepared(*inputs)

    def over(self, compute: Callable[[Compute], Tensor]) -> Tensor:
        """What `compute` makes by means of the solve. If replays have left something that is not finite in it, it is
        computed without them, which names the row and the step."""
        result = compute(self)
        if self.replayed and not bool(torch.isfinite(result).all()):
            return compute(self.prepared)
        return result


def surroundings() -> Hashable:
    """What the caller's context says about products on a GPU, and about the tensors that are made."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled()
    return autocast, multiplies_in_tf32(), *modes


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


def wait_for_all(device: torch.device) -> None:
    """Waits for everything that a GPU was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(solve: Compute, inputs: tuple[Tensor, ...], stream: Any, *, repeatable: bool) -> Compute:
    """A function that replays `solve`, for inputs of the same shapes. It owns the solve: a graph reads and writes
    memory of everything that the solve holds, such as weights, shifts and scales, and buffers."""
    held = [x.clone() for x in inputs]
    if repeatable:  # kernels are compiled, and buffers and tables made, outside the graph
        solve(*held)
    graph = torch.cuda.CUDAGraph()
    # Other threads, as the one that makes batches, go on: what they ask of the GPU is none of the graph's business.
    captured = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.device(inputs[0].device), captured:
        result = solve(*held)
    owned = solve, result

    def replay(*inputs: Tensor) -> Tensor:
        for to, x in zip(held, inputs):
            to.copy_(x)
        graph.replay()
        return owned[1].clone()

    return replay
