"""A CUDA graph played on the CPU: what torch was asked to do is written down, and done again on the same memory.

As on a GPU, capturing changes nothing, no Python runs in a replay, inputs and results have one memory for all replays,
and whatever the host would wait for is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from geoflow_fast.ops import dispatch

WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "bincount", "equal", "is_nonzero"}
ASKING = (
    "flow.solvers", "likelihood.reverse_ode", "likelihood.evaluators", "ops.flow_loss", "ops.masked_interpolant",
    "geometry",
)  # fmt: skip
"""Modules that ask whether a graph is being captured."""


class Tape(TorchDispatchMode):
    """Writes down operations while it is active; `play` does them again."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self.host = host
        self.steps: list[tuple] = []
        self.own: set[int] = set()
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_host = bool(tensors) and all(any(x is y for y in self.host) for x in tensors)
        if func.overloadpacket.__name__ in WAITING and not on_host:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func._schema.is_mutable:
            self._remember(tree_leaves((args, kwargs)))
        out = func(*args, **kwargs)
        if on_host:
            self.host += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        given = {x.untyped_storage().data_ptr() for x in tensors}  # of which views are returned
        self.own |= {x.untyped_storage().data_ptr() for x in tree_leaves(out) if isinstance(x, Tensor)} - given
        self.steps.append((func, args, kwargs, out))
        return out

    def _remember(self, values: list) -> None:
        """Keeps what there was before in memory that is not the tape's own."""
        for x in values:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.own:
                self.own.add(x.untyped_storage().data_ptr())
                whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                self.before.append((whole, whole.clone()))

    @torch.no_grad()
    def undo(self) -> None:
        """Nothing has been done while a graph was captured."""
        for x, before in self.before:
            x.copy_(before)

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, out in self.steps:
            if "empty" in func.overloadpacket.__name__:  # memory is given once
                continue
            for to, x in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(to, Tensor) and to.data_ptr() != x.data_ptr():
                    to.copy_(x)


class Touched(TorchDispatchMode):
    """Weak references to the memory that operations read or write while it is active, but for what is born inside."""

    def __init__(self) -> None:
        super().__init__()
        self.born: set[int] = set()
        self.outside: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        self.outside += [StorageWeakRef(x) for x in given if x._cdata not in self.born]
        own = {x._cdata for x in given}
        self.born |= {x.untyped_storage()._cdata for x in tree_leaves(out) if isinstance(x, Tensor)} - own
        return out

    def freed(self) -> int:
        """How many of them are gone."""
        return sum(reference.expired() for reference in self.outside)


class StandIns:
    """Stands in for the streams and graphs of `torch.cuda`, so that `graphs.capture` itself runs on the CPU. What a
    solve touches while it is captured is written down in `touched`, one for each capture."""

    def __init__(self, monkeypatch) -> None:
        self.touched: list[Touched] = []

        @contextlib.contextmanager
        def graph(_, *, stream, capture_error_mode):
            assert (stream, capture_error_mode) == (None, "thread_local")
            self.touched.append(Touched())
            with self.touched[-1]:
                yield

        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


class GraphsOnCpu:
    """Lets CPU tensors pass for those of a GPU, if it is `on`, and plays the graphs; `events` says what happened."""

    def __init__(self, monkeypatch) -> None:
        self.on, self.capturing = True, False
        self.events: list[str] = []
        self.host: list[Tensor] = []
        """Tensors that are on the CPU in a run on a GPU, too: the host may look at them."""
        monkeypatch.setattr("geoflow_fast.runtime.graphs.capture", self.capture)
        monkeypatch.setattr("geoflow_fast.runtime.graphs.unsuitable", self.unsuitable)
        monkeypatch.setattr("geoflow_fast.training.loop.unsuitable", self.unsuitable)
        for module in ASKING:
            # Some modules have the name of a function of their package.
            monkeypatch.setattr(sys.modules[f"geoflow_fast.{module}"], "capturing", lambda _: self.capturing)
        # The host checks whether rows can be interpolated, on a CPU only.
        monkeypatch.setattr("geoflow_fast.flow.model.TimePoints.worthwhile", lambda *_: False)
        # Compiled code would do its work unseen.
        for name, backends in dispatch._OPERATIONS.items():
            plain = {"reference": dataclasses.replace(backends["reference"], missing=None)}
            monkeypatch.setitem(dispatch._OPERATIONS, name, plain)

    def unsuitable(self, _: Tensor) -> str | None:
        return None if self.on else "the tensors are not on a GPU"

    def capture(self, solve, inputs, stream, *, repeatable):  # noqa: ARG002
        held = [x.clone() for x in inputs]
        if repeatable:
            solve(*held)
        tape, state = Tape(self.host), torch.get_rng_state()
        self.capturing = True
        try:
            with tape:
                result = solve(*held)
        finally:
            self.capturing = False
            tape.undo()
            torch.set_rng_state(state)
        self.events.append("captured")

        def replay(*given: Tensor) -> Tensor:
            for to, x in zip(held, given):
                to.copy_(x)
            tape.play()
            self.events.append("replayed")
            return result.clone()

        return replay
