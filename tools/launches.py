"""Counts what the GPU path asks of a GPU: kernels, synchronisations, bytes and floating-point operations.

    python -m tools.launches                 prints a table of the main paths
    python -m tools.launches --list PATH     also names the kernels of one path
    python -m tools.launches --json FILE     writes the counts to a file

No GPU is needed: tensors on "cuda" are fake ones without values, tensors on the CPU are real, and the library's own
code runs on them as it would on a card. Torch operations are counted as they reach the dispatcher, Triton launches and
the calls of the compiled CUDA code where they are made. While a CUDA graph is captured, whatever a GPU would refuse
raises an error here too; a replay counts the kernels of its graph, which the host starts at once. `counted` does this
for any function:

    with counted() as count:
        flow = on_gpu(gf.GeoFlow(gf.GeoFlowConfig.paper()))
        ...
    print(count.kernels.total(), count.synchronisations)

What one evaluation or step costs is what a run with one more of them counts in addition, so that what a whole call does
once is told apart from it.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import functools
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim.optimizer import Optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import geoflow_fast as gf
from geoflow_fast import kernels
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.ops import dispatch, extension, triton_kernels
from geoflow_fast.retrieval.sources import FlowSource
from geoflow_fast.training import loop
from geoflow_fast.training.batches import Prefetcher
from geoflow_fast.training.flow_matching import FlowMatching
from geoflow_fast.training.logging import StepRate
from tools import costs

DEVICE = "cuda"
CUDA, META = 1, 14
"""Numbers of device types in torch."""
RUN_BACKWARD = torch.autograd.graph._engine_run_backward
optimisers = sys.modules[Optimizer.__module__]
aten = torch.ops.aten
FREE = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "detach", "detach_",
    "lift_fresh", "resize_", "set_", "record_stream", "is_pinned", "_has_compatible_shallow_copy_type",
}  # fmt: skip
"""Operations that start no kernel, besides views."""
SEVERAL = {"sort": 4, "argsort": 4, "topk": 2, "nonzero": 4, "bincount": 2, "repeat_interleave": 2, "_unique2": 8}
"""Operations that start more than one kernel: about so many, at the sizes that occur here."""
WAITING = {"nonzero", "_unique2", "bincount"}
"""Operations whose result has a size that depends on values, for which the host waits."""
TENSORS_OF_DEPTH = (0, 110, 64, 48, 36, 30)
"""Most tensors in one launch of torch's kernels over lists, by the number of lists."""
BLOCKS, CHUNK = 320, 65536
"""Most blocks in such a launch, and the elements of each."""


@dataclass
class Count:
    """What was counted, by the names of kernels and of the operations that wait."""

    kernels: Counter[str] = field(default_factory=Counter)
    started: float = 0.0
    """What the host has to start: kernels one by one, or all those of a graph at once."""
    replays: int = 0
    """Graphs that were replayed."""
    synchronisations: Counter[str] = field(default_factory=Counter)
    bytes: float = 0.0
    """Bytes read and written by kernels, each argument counted once per kernel."""
    row_bytes: float = 0.0
    """Of these, the bytes of kernels that multiply no matrices."""
    flops: Counter[str] = field(default_factory=Counter)
    """Floating-point operations of matrix products, by the dtype of their factors."""
    copied: float = 0.0
    """Bytes copied between the memories of host and device."""

    def __sub__(self, other: Count) -> Count:
        """What was counted here and not there."""

        def less(a: Counter[str], b: Counter[str]) -> Counter[str]:
            return Counter({key: a[key] - b[key] for key in {*a, *b} if a[key] != b[key]})

        return Count(
            less(self.kernels, other.kernels),
            self.started - other.started,
            self.replays - other.replays,
            less(self.synchronisations, other.synchronisations),
            self.bytes - other.bytes,
            self.row_bytes - other.row_bytes,
            less(self.flops, other.flops),
            self.copied - other.copied,
        )

    def launch(self, kernel: str, number: int = 1) -> None:
        """Counts kernels that the host starts."""
        self.kernels[kernel] += number
        self.started += number

    def move(self, amount: float, *, multiplies: bool = False) -> None:
        """Counts bytes of a kernel, which `multiplies` matrices or does not."""
        self.bytes += amount
        self.row_bytes += 0.0 if multiplies else amount

    def become(self, other: Count) -> None:
        """Takes over what another has counted."""
        vars(self).update(vars(copy.deepcopy(other)))

    def replay(self, graph: Count) -> None:
        """Counts the kernels of a graph, which the host starts at once."""
        self.kernels += graph.kernels
        self.flops += graph.flops
        self.bytes += graph.bytes
        self.row_bytes += graph.row_bytes
        self.started += 1
        self.replays += 1

    def of(self, name: str) -> int:
        """How many kernels have this in their name."""
        return sum(count for kernel, count in self.kernels.items() if name in kernel)

    def to_json(self) -> dict[str, Any]:
        return {
            "kernels": self.kernels.total(),
            "started": self.started,
            "replays": self.replays,
            "triton": self.of("triton:"),
            "cuda": self.of("cuda:"),
            "synchronisations": self.synchronisations.total(),
            "bytes": self.bytes,
            "row_bytes": self.row_bytes,
            "flops": dict(self.flops),
            "copied": self.copied,
        }


def moved(values: Any) -> float:
    """Bytes of the elements that these tensors have in memory: those of expanded dimensions are read once."""
    total = 0.0
    for x in {id(x): x for x in tree_leaves(values)}.values():
        if isinstance(x, Tensor):
            total += x.element_size() * math.prod(n for n, step in zip(x.shape, x.stride()) if step or n == 0)
    return total


def list_launches(lists: Sequence[Sequence[Tensor]]) -> int:
    """Launches of a torch kernel over lists of tensors, which cuts them into chunks and fills one launch after the
    other."""
    most = TENSORS_OF_DEPTH[min(len(lists), len(TENSORS_OF_DEPTH) - 1)]
    launches = tensors = blocks = 0
    for x in lists[0]:
        tensors += 1
        chunks = max(1, math.ceil(x.numel() / CHUNK))
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == BLOCKS or (tensors == most and last):
                launches, blocks, tensors = launches + 1, 0, 0 if last else 1
    return launches + (blocks > 0)


class Counting(TorchDispatchMode):
    """Runs what concerns the device on fake tensors and counts it, and everything else as usual."""

    def __init__(self, count: Count, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.fake = count, fake
        self.pinned: set[int] = set()
        self.in_backward = False
        self.capturing = False

    def refuse_in_graphs(self, what: str) -> None:
        """What a GPU refuses, or would do once and never again, while a graph is captured."""
        if self.capturing:
            raise RuntimeError(f"a graph that is being captured cannot contain this: {what}")

    def synchronised(self, what: str) -> None:
        """The host waits for the device."""
        self.refuse_in_graphs(what)
        self.count.synchronisations[what] += 1

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capturing

    @contextmanager
    def capture(self, graph: FakeGraph, **_: Any) -> Iterator[None]:
        """Takes the place of `torch.cuda.graph`: what is started inside is not done, but belongs to the graph."""
        before = copy.deepcopy(self.count)
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
            graph.recorded = self.count - before
            self.count.become(before)

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        """Takes the place of autograd's call of its engine."""
        self.in_backward = True
        try:
            return RUN_BACKWARD(*arguments, **options)
        finally:
            self.in_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = any(x.device.type == DEVICE for x in tensors)
        target = kwargs.get("device")
        if _types(target) == {"meta"} and (self.in_backward or (func is aten._to_copy.default and not there)):
            target = kwargs["device"] = torch.device(DEVICE)  # which the stand-ins below call by their own name
        if func is torch.ops.prim.device.default:
            # C++ asks this, Python does not. The engine of autograd would look for the streams of a GPU.
            return torch.device("meta") if self.in_backward else args[0].fake_device
        if func is aten._pin_memory.default:
            return self._pin(args[0])
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        if not there and (target is None or torch.device(target).type != DEVICE):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "geoflow":
            with self:  # what a backend does besides its kernels counts too
                # Where there are no rows, plain torch serves.
                empty = args[0].dim() > 1 and len(args[0]) == 0
                backend = dispatch.choose(name, args[0], "reference" if empty else args[-1])
                return backend(*args[:-1])
        if name == "_local_scalar_dense":
            return self._wait(args[0])
        if name in ("_to_copy", "copy_") and len({x.device.type for x in tensors} | _types(target)) > 1:
            return self._transfer(func, args, kwargs)
        fakes_args, fake_kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        if name in WAITING:
            self.synchronised(name)
        out = self._result(func, fakes_args, fake_kwargs)
        if name in FREE or _is_view(func):
            return out
        self._launched(name, args, kwargs, out)
        if name in ("all", "any"):  # what checks of values hope for
            out.answer = name == "all"
        elif name == "full":
            out.answer = args[1]
        elif name == "sum" and args[0].dtype == torch.bool:  # of masks that select everything
            out.answer = args[0].numel() // max(1, out.numel())
        elif name == "max" and isinstance(out, Tensor) and hasattr(args[0], "answer"):
            out.answer = args[0].answer
        return out

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch says that the operation returns; where sizes depend on values, something of a possible size:
        masks select everything."""
        if not func._schema.returns:  # lists are written to, for which torch need not know shapes
            return None
        if func is aten.nonzero.default:
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func is aten._unique2.default:
            x = args[0].flatten()
            return torch.empty_like(x), x.new_empty(x.shape, dtype=torch.int64), x.new_empty(0, dtype=torch.int64)
        if func is aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1]):
            self.synchronised("index by a mask")
            chosen: list[Tensor | None] = []
            for x in args[1]:
                masked = x is not None and x.dtype == torch.bool
                chosen += [x.new_empty(x.numel(), dtype=torch.int64)] * x.dim() if masked else [x]
            args = args[0], chosen
        return func(*args, **kwargs)

    def _launched(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        number = SEVERAL.get(name, 1)
        if name.startswith(("_foreach", "_fused", "_amp_foreach")):
            lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
            number = list_launches(lists)
            if name == "_foreach_norm":  # one more kernel joins the chunks' sums
                number += math.ceil(len(lists[0]) / TENSORS_OF_DEPTH[1])
        elif name in ("addmm", "baddbmm") and args[0].dim() > 1 and kwargs.get("out") is not args[0]:
            number = 2  # the bias is copied to every row of the result first
        self.count.launch(f"torch:{name}", number)
        read = {key: value for key, value in kwargs.items() if key != "out"}
        factors = {"mm": args[:2], "bmm": args[:2], "addmm": args[1:3], "baddbmm": args[1:3]}.get(name.rstrip("_"))
        self.count.move(moved((args, read)) + moved(out), multiplies=factors is not None)
        if factors is not None:
            a, b = factors
            self.count.flops[str(a.dtype).split(".")[1]] += 2 * a.numel() * b.shape[-1]

    def _as_fake(self, x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else self.fake.from_tensor(x)

    def _wait(self, x: Tensor) -> float | int | bool:
        """The value of one element, for which the host would wait."""
        self.synchronised("item")
        return getattr(x, "answer", 1.0 if x.is_floating_point() else 0)

    def _pin(self, x: Tensor) -> Tensor:
        self.refuse_in_graphs("memory of the host")
        with unset_fake_temporarily():
            copy = x.clone()
        self.pinned.add(copy.untyped_storage()._cdata)
        return copy

    def _transfer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A copy between host and device. It waits unless it is asked not to and the host's memory is pinned, which
        torch sees to itself where the host receives."""
        source, to = (args[0], None) if func.overloadpacket is aten._to_copy else (args[1], args[0])
        to_device = source.device.type != DEVICE
        self.refuse_in_graphs("a copy between host and device")
        self.count.copied += moved(source)
        asked = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if not asked or (to_device and source.untyped_storage()._cdata not in self.pinned):
            self.synchronised("copy to the device" if to_device else "copy to the host")
        if to is not None:
            return to
        dtype = kwargs.get("dtype") or source.dtype
        if to_device:
            with self.fake:
                return torch.empty(source.shape, dtype=dtype, device=DEVICE)
        with unset_fake_temporarily():
            return torch.zeros(source.shape, dtype=dtype)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:  # noqa: ARG002
        """Takes the place of `kernels.launch.launch`."""
        name = getattr(kernel, "fn", kernel)
        while hasattr(name, "fn"):
            name = name.fn
        self.count.launch(f"triton:{name.__name__}")
        multiplies = name.__name__ == "gallery_tile_kernel"
        self.count.move(moved(arguments), multiplies=multiplies)
        if multiplies:
            samples, items = arguments[:2]
            # Three of each pair of parts, whose rows hold both; or three in TF32.
            products = 3 / 2 if meta.get("PARTS") == 2 else 3 if samples.dtype == torch.float32 else 1
            kind = "tf32" if samples.dtype == torch.float32 else str(samples.dtype).split(".")[1]
            self.count.flops[kind] += int(2 * products * samples.numel() * len(items))


def _types(device: Any) -> set[str]:
    return set() if device is None else {torch.device(device).type}


def _is_made_of_others(func: Any) -> bool:
    """Whether an operation has no kernel of its own: below autograd it arrives here before it is taken apart."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _is_view(func: Any) -> bool:
    """Whether an operation returns its arguments seen in another way."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class CompiledCuda:
    """Stands in for the transport solver of the extension: counts its launches."""

    def __init__(self, count: Count) -> None:
        self.count = count

    def transport_workspace(self, **_: Any) -> int:
        return 64

    def transport(
        self, *, rows: int, cols: int, half: bool, image_dim: int, text_dim: int, uniform: int | None, **_: Any
    ) -> None:
        matrix = (2.0 if half else 4.0) * rows * cols
        width = image_dim + text_dim
        if width:
            self.count.launch("cuda:score_kernel")
            self.count.move(matrix + 2.0 * (rows + cols) * width, multiplies=True)
            self.count.flops["float16"] += 2 * rows * cols * width
        for name in ("kernel", "result_kernel", *(("sample_kernel",) if uniform is not None else ())):
            self.count.launch(f"cuda:sinkhorn_{name}")
            self.count.move(matrix)


class HostStream:
    """Stands in for a stream of a device."""

    device_index = cuda_stream = 0

    def __init__(self, mode: Counting) -> None:
        self.mode = mode

    def synchronize(self, *_: Any) -> None:
        self.mode.synchronised("stream")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # waiting for other streams, which the host does not


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, count: Count) -> None:
        self.count, self.recorded = count, Count()

    def replay(self) -> None:
        self.count.replay(self.recorded)


@contextmanager
def device_guards() -> Iterator[None]:
    """Lets torch go to a "cuda" device inside. Builds without CUDA have nothing that would do so, not even for fake
    tensors, and that of "meta", which does nothing, stands in."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    own = registry[CUDA]
    registry[CUDA] = own or registry[META]
    try:
        yield
    finally:
        registry[CUDA] = own


@contextmanager
def counted(*, capability: tuple[int, int] = (9, 0)) -> Iterator[Count]:
    """Inside, "cuda" is a device of fake tensors, and what it is asked to do is counted."""
    count = Count()
    fake = FakeTensorMode()
    mode = Counting(count, fake)
    stream = HostStream(mode)

    def memory(*_: Any) -> tuple[int, int]:
        mode.refuse_in_graphs("a question for the free memory")
        return 70 * 10**9, 80 * 10**9

    properties = SimpleNamespace(
        multi_processor_count=132, total_memory=80 * 10**9, major=capability[0], minor=capability[1], name="fake"
    )
    patches: list[Any] = [mock.patch.object(module, "launch", mode.launch) for module in kernel_modules()]
    patches += [
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", mode.is_capturing),
        mock.patch.object(torch.cuda, "graph", mode.capture),
        mock.patch.object(torch.cuda, "CUDAGraph", functools.partial(FakeGraph, count)),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "mem_get_info", memory),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "Stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "synchronize", side_effect=stream.synchronize),
        mock.patch.object(torch.autograd, "_engine_run_backward", mode.run_backward),
        mock.patch.object(triton_kernels, "missing", return_value=None),
        mock.patch.object(extension, "missing_cuda", return_value=None),
        mock.patch.object(extension, "required", return_value=CompiledCuda(count)),
        mock.patch.object(FakeTensor, "data_ptr", return_value=0),
        # Copies of tensors belong together with the others.
        mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True),
        mock.patch.object(nn.Module, "float", in_float32),
        # torch leaves lists of tensors of unknown classes to its loops.
        *(
            mock.patch.object(module, "_foreach_supported_types", [Tensor, nn.Parameter, FakeTensor])
            for module in (_foreach_utils, optimisers)
        ),
    ]
    for backends in dispatch._OPERATIONS.values():
        present = {name: dataclasses.replace(entry, missing=None) for name, entry in backends.items()}
        patches.append(mock.patch.dict(backends, present))
    with ExitStack() as stack:
        stack.enter_context(device_guards())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # one thread of autograd for all devices
        stack.enter_context(fake)  # before the patches: it has to see that there is no CUDA
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(mode)
        yield count


def kernel_modules() -> list[ModuleType]:
    """The modules that launch Triton kernels."""
    folder = Path(kernels.__file__ or "").parent
    modules = [importlib.import_module(f"{kernels.__name__}.{file.stem}") for file in sorted(folder.glob("*.py"))]
    return [module for module in modules if hasattr(module, "launch") and not module.__name__.endswith(".launch")]


def on_gpu(module: nn.Module) -> nn.Module:
    """Gives a module's parameters and buffers fake memory on the device."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                part._parameters[name] = nn.Parameter(fake_rows(*x.shape, dtype=x.dtype), x.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake_rows(*buffer.shape, dtype=buffer.dtype)
    return module


def in_float32(module: nn.Module) -> nn.Module:
    """Takes the place of `nn.Module.float`, which exchanges the memory of tensors; fake ones have none."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                part._parameters[name] = nn.Parameter(x.detach().float(), x.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.float()
    return module


def fake_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the device that has no values."""
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def paper_flow(dtype: torch.dtype = torch.float32) -> gf.GeoFlow:
    """The paper's network on the device."""
    with torch.device("meta"):
        flow = gf.GeoFlow(gf.GeoFlowConfig.paper()).eval()
    return on_gpu(flow.to(dtype))  # type: ignore[return-value]


QUERIES, SAMPLES, PAIRS, ITEMS, BATCH = 5, 50, 128, 100_000, 8192


def sampling(n_steps: int, precision: str | None = None, *, calls: int = 1) -> Count:
    """The last of so many sampling calls of `n_steps` steps, each of which evaluates one guided velocity."""
    with counted() as count:
        settings = gf.SamplingSettings(n_samples=SAMPLES, n_steps=n_steps, **_precision(precision))
        source = FlowSource(paper_flow(), Direction.T2I, settings, 100.0, 0)
        return _last(count, calls, lambda: source.draw(fake_rows(QUERIES, 1024)))


def likelihood(n_steps: int, precision: str | None = None, *, calls: int = 1, **options: Any) -> Count:
    """The last of so many calls for the three densities of pairs in `n_steps` Euler steps, each of which evaluates
    velocities and divergences."""
    with counted() as count:
        settings = gf.DensitySettings(**{"n_steps": n_steps, "solver": "euler", **_precision(precision), **options})
        flow, pair, seed = paper_flow(), (fake_rows(PAIRS, 1024), fake_rows(PAIRS, 1024)), fake_rows(dtype=torch.int64)
        return _last(count, calls, lambda: density_estimates(flow, *pair, DIRECTIONS, settings, seed))


def _precision(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"precision": name}


def _last(count: Count, calls: int, call: Callable[[], object]) -> Count:
    """What the last of so many calls adds to the count."""
    for _ in range(calls - 1):
        call()
    before = copy.deepcopy(count)
    call()
    return count - before


def training(steps: int, batch_size: int = BATCH, **changes: Any) -> Count:
    """The last of so many training steps of the paper's run, with these settings changed, as the loop takes them when
    nothing is logged."""
    rows = np.full((batch_size, 1024), 1 / 32, dtype=np.float32)
    pairs = gf.EmbeddingPairs.from_arrays(rows, rows)
    never = {"log_every": 10**6, "val_every": 10**6}
    config = dataclasses.replace(gf.TrainConfig.paper(), batch_size=batch_size, **never, **changes)
    with counted() as count:
        flow = paper_flow().train()
        run = loop.Run(FlowMatching(flow, pairs, pairs, config))
        batches = Prefetcher(run.objective.training_batch, 0, config.steps, run.device, enabled=False)
        rate = StepRate(0)
        return _last(count, steps, lambda: loop._take_step(run, batches, rate))


def entropy(n_queries: int) -> Count:
    """Retrieval entropies of so many queries, with the settings of `RetrievalEntropy.fast`."""
    return _call(n_queries, lambda: gf.RetrievalEntropy.fast(paper_flow(), fake_rows(ITEMS, 1024), direction="t2i"))


def reranking(n_queries: int) -> Count:
    """So many queries, of each of which 32 items that a search has found are re-ranked with the flow."""

    def make() -> Callable[[Tensor], object]:
        reranker = gf.BayesReranker(paper_flow(), fake_rows(ITEMS, 1024), direction="t2i", shortlist=32, n_steps=6)
        candidates = torch.arange(n_queries * 32, device="cpu").view(n_queries, 32)
        return lambda queries: reranker(queries, candidates=candidates)

    return _call(n_queries, make)


def head(n_queries: int) -> Count:
    """Posteriors of so many queries by a head."""

    def make() -> gf.RetrievalEntropy:
        with torch.device("meta"):
            model = gf.PosteriorHead(gf.HeadConfig(points=8), 1024, 1024).eval()
        return gf.RetrievalEntropy(on_gpu(model), fake_rows(ITEMS, 1024), direction="t2i")  # type: ignore[arg-type]

    return _call(n_queries, make)


def _call(n_queries: int, make: Callable[[], Callable[[Tensor], object]]) -> Count:
    """What the third call of a scorer asks for: the first prepares what all calls share, the second captures."""
    with counted() as count:
        scorer = make()
        return _last(count, CALLS, lambda: scorer(fake_rows(n_queries, 1024)))


CALLS = 3
"""From so many calls on, a model replays what it does."""
PATHS: dict[str, Callable[[], Count]] = {
    "one guided velocity": lambda: sampling(4) - sampling(3),
    "one likelihood evaluation": lambda: likelihood(4) - likelihood(3),
    "one training step": lambda: training(CALLS),
    "sampling, 5 queries, 8 steps": lambda: sampling(8, calls=CALLS),
    "likelihood, 128 pairs, 8 steps": lambda: likelihood(8, calls=CALLS),
    "entropies of 5 queries": lambda: entropy(QUERIES),
    "5 re-ranked queries": lambda: reranking(QUERIES),
    "head posteriors of 64 queries": lambda: head(64),
    "one training step, fixed directions": lambda: training(CALLS, fixed_directions=True),
}
"""What is counted, by name."""


def table(counts: dict[str, Count]) -> str:
    """Markdown: what each path asks of the device."""
    lines = [
        "| path | kernels | of these Triton and CUDA | started by the host | synchronisations | GB moved | GFLOP |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, count in counts.items():
        cells = (
            name,
            f"{count.kernels.total():,}",
            f"{count.of('triton:') + count.of('cuda:'):,}",
            f"{count.started:,.0f}",
            str(count.synchronisations.total()),
            f"{count.bytes / 1e9:.3g}",
            f"{count.flops.total() / 1e9:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def estimated_ms(numbers: Mapping[str, Any], gpu: str) -> float:
    """Milliseconds of what was counted, by the rates of `tools.costs`."""
    rates, flops = costs.PEAKS[gpu], numbers["flops"]
    # Products of any type take the time of so many in float32.
    peak = rates.products("float32")
    same = {"float16": "bfloat16", "float64": "float32"}  # the few in float64 are not worth a rate
    operations = sum(n * peak / rates.products(same.get(kind, kind)) for kind, n in flops.items())
    one_by_one = numbers["started"] - numbers["replays"]
    work = costs.Work(numbers["kernels"] - one_by_one, numbers["bytes"], operations, numbers["row_bytes"])
    return 1e3 * (costs.seconds(work, rates, "float32") + one_by_one * costs.STARTED_SECONDS)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", help=f"which paths to count; by default all of {', '.join(PATHS)}")
    parser.add_argument("--list", action="store_true", help="also name the kernels")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    chosen = parser.parse_args()
    counts = {name: run() for name, run in PATHS.items() if not chosen.paths or any(p in name for p in chosen.paths)}
    print(table(counts))
    if chosen.list:
        for name, count in counts.items():
            print(f"\n{name}")
            for kernel, number in count.kernels.most_common():
                print(f"  {number:5}  {kernel}")
            for where, number in count.synchronisations.most_common():
                print(f"  {number:5}  waits: {where}")
    if chosen.json:
        write_json(chosen.json, {name: count.to_json() for name, count in counts.items()})


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes values with a line for each."""
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
