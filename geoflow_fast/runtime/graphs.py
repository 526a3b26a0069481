"""CUDA graphs of solves: from the second call of one kind on, a GPU replays what it did, and the host starts all of it
at once.

A solve is hundreds of small kernels, each of which costs the host more time than a GPU needs for it. A graph is
captured when a call of one kind (same shapes, settings and weights) comes for the second time, so that single calls do
not pay for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

VARIABLE = "GEOFLOW_GRAPHS"
KEPT = 4
"""Kinds of calls that are remembered, each with the memory of its solve."""

Solve = Callable[..., Tensor]


class Graphs:
    """The graphs of one model. Copies of a model, and files, have none of them."""

    def __init__(self) -> None:
        self._solves: dict[Hashable, Solve] = {}
        self._graphs: dict[Hashable, Solve] = {}
        self.reason: str | None = "nothing has been solved yet"
        """Why the last solve was not a replay; None if it was one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs()

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        return Graphs, ()

    # unchecked: solvers call it
    def run(self, kind: Hashable, why_not: str | None, make: Callable[[], Solve], *inputs: Tensor) -> Tensor:
        """The result of the function that `make` returns for `inputs`, which has to depend on nothing else but what
        `kind` names. It is replayed unless there is a reason `why_not`."""
        self.reason = why_not or unsuitable(inputs[0])
        if self.reason is not None:
            return make()(*inputs)
        if kind in self._graphs:
            return self._graphs[kind](*inputs)
        if kind in self._solves:
            graph = self._graphs[kind] = capture(self._solves.pop(kind), inputs)
            return graph(*inputs)
        self.reason = "this is the first call of its kind, and the second will be captured"
        for kept in (self._solves, self._graphs):
            while len(kept) >= KEPT:
                del kept[next(iter(kept))]
        solve = self._solves[kind] = make()
        return solve(*inputs)


def unsuitable(like: Tensor) -> str | None:
    """Why solves of tensors like this one cannot be captured; None if they can."""
    if not like.is_cuda:
        return "the tensors are not on a GPU"
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0 is set"
    if torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph of its own"
    return None


# unchecked: called with the tensors of a module
def versions(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """What changes when one of these tensors is replaced or written to."""
    return tuple((x.data_ptr(), x._version) for x in tensors)


# unchecked: called with tensors on a GPU
def capture(solve: Solve, inputs: tuple[Tensor, ...]) -> Solve:
    """A function that replays `solve`, for inputs of the same shapes."""
    held = [x.clone() for x in inputs]
    device = inputs[0].device
    # Kernels are compiled and workspaces allocated outside the graph.
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        solve(*held)
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        result = solve(*held)

    def replay(*inputs: Tensor) -> Tensor:
        for to, x in zip(held, inputs):
            to.copy_(x)
        graph.replay()
        return result.clone()

    return replay
