"""Which backend serves an operation on a device, why another cannot, and what torch is told about operations.

`operation` declares an operation on tensors: its plain torch reference, whose signature is the operation's schema, and
its faster backends. It is registered with `torch.library` in the namespace `geoflow`, so that `torch.compile` and
`torch.export` keep it as one node and `torch.func` knows how to transform it. `choose` picks the backend: by name, or
the first available in the device's order. A backend asked for by name that cannot serve is an error with the reason;
the automatic choice passes over backends that are unavailable, never over one that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from geoflow_fast.runtime.warn import warn_user

AUTO_ORDER = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
BACKENDS = ("reference", "cpu", "cuda", "triton")
EVERYWHERE = ("cpu", "cuda", "meta")
"""Device types that plain torch serves."""

LIBRARY = torch.library.Library("geoflow", "DEF")


class BackendUnavailable(ValueError):
    """Raised when a backend requested by name cannot run this operation on this machine. The message says why."""


def widest_row(inputs: Sequence[Any]) -> int:
    """The width of the widest rows among the tensors of an operation."""
    return max((x.shape[-1] for x in inputs if isinstance(x, Tensor) and x.dim() > 1), default=0)


@dataclass(frozen=True)
class Backend:
    """One backend of one operation: its function, the device types and dtypes it serves (None: any), a function that
    says why it is missing, if it is, and the width of the widest rows it takes, with a function that reads the width
    off the inputs."""

    function: Callable[..., Any]
    devices: tuple[str, ...] | Callable[[], tuple[str, ...]] = EVERYWHERE
    missing: Callable[[], str | None] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    widest: int | None = None
    width: Callable[[Sequence[Any]], int] = widest_row


_OPERATIONS: dict[str, dict[str, Backend]] = {}
_PASSES: set[str] = set()
"""Backward and tangent passes: they have backends, but are not listed beside the operation that they belong to."""


def register(name: str, **backends: Backend | None) -> None:
    """Declares that the operation `name` has these backends."""
    _OPERATIONS[name] = {backend: entry for backend, entry in backends.items() if entry is not None}


def choose(name: str, tensor: Tensor, backend: str = "auto", inputs: Sequence[Any] = ()) -> Callable[..., Any]:
    """The function that serves the operation `name` for tensors like this one, and for the rows of `inputs`, where a
    backend cannot take rows of any width. A BackendUnavailable says why there is none.

    Where plain torch serves CUDA tensors because a faster backend is missing, one warning says what to do about it.
    """
    table = _OPERATIONS[name]
    candidates = AUTO_ORDER.get(tensor.device.type, ("reference",)) if backend == "auto" else (backend,)
    refusals = []
    remedies = []
    for candidate in candidates:
        entry = table.get(candidate)
        if entry is not None:
            reason = None if entry.missing is None else entry.missing()
            if reason is not None:
                remedies.append(reason)
            devices = entry.devices if isinstance(entry.devices, tuple) else entry.devices()
            if reason is None and tensor.device.type not in devices:
                reason = f"serves {' and '.join(devices)} tensors, and these are on {tensor.device.type}"
            if reason is None and entry.dtypes is not None and tensor.dtype not in entry.dtypes:
                reason = f"works in {', '.join(map(str, entry.dtypes))}, and these are {tensor.dtype}"
            if reason is None and entry.widest is not None and (width := entry.width(inputs)) > entry.widest:
                reason = f"takes rows of at most {entry.widest} entries, and these have {width}"
            if reason is None:
                if remedies and candidate == "reference" and tensor.device.type == "cuda":
                    _warn_of_plain_torch(name, remedies[0])
                return entry.function
        elif candidate in BACKENDS:
            reason = f"{name} has no {candidate} implementation"
        else:
            reason = f"no such backend; the backends are {', '.join(BACKENDS)}"
        refusals.append(f"{name}: backend {candidate!r}: {reason}")
    raise BackendUnavailable("; ".join(refusals))


_WARNED: set[tuple[str, str]] = set()


def _warn_of_plain_torch(name: str, remedy: str) -> None:
    """Warns once in a process that an operation on CUDA tensors goes without its kernels."""
    if (name, remedy) not in _WARNED:
        _WARNED.add((name, remedy))
        warn_user(
            f"{name} of CUDA tensors runs in plain torch, many times slower than its kernels: {remedy}", RuntimeWarning
        )


def operation(
    name: str,
    reference: Callable[..., Any],
    *,
    cpu: Backend | None = None,
    cuda: Backend | None = None,
    triton: Backend | None = None,
    derivatives: type[Derivatives] | None = None,
    forward_mode: Callable[..., Any] | None = None,
    differentiable: bool = True,
    fake: Callable[..., Any] | None = None,
    rowwise: bool = False,
    part_of: str | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> torch._ops.OpOverload[..., Any]:
    """Declares the operation `geoflow::name` and returns it; its last argument is the name of a backend.

    The typed signature of `reference` is the schema. Where a gradient is wanted, `derivatives` is applied, whose
    forward pass is written here; without it, and in forward mode, torch differentiates the reference, or the function
    `forward_mode` if it is given, unless the operation is not `differentiable`. `fake` computes the shapes of the
    results; the reference does unless it is given. `rowwise`: in all tensors the first dimension counts rows, or
    groups of as many consecutive rows each, so that `vmap` may stack the rows of all examples, and where there are no
    rows the reference serves for every backend. `part_of` names the operation that this one is a pass of. Backends that
    `choose` hands to a caller may take a keyword `out`, a tuple of tensors to write the results to.
    """
    plain = _plain_backend(reference)
    register(name, reference=Backend(plain), cpu=cpu, cuda=cuda, triton=triton)
    if part_of is not None:
        _PASSES.add(name)
    schema = torch.library.infer_schema(reference, mutates_args=())
    LIBRARY.define(name + schema.replace(") ->", ", str backend) ->"), tags=tags)
    overload: torch._ops.OpOverload[..., Any] = getattr(torch.ops.geoflow, name).default
    shapes = fake or reference

    def run(*inputs: Any) -> Any:
        backend = choose(name, inputs[0], inputs[-1], inputs)
        return (plain if rowwise and inputs[0].shape[0] == 0 else backend)(*inputs[:-1])

    def below_autograd(*inputs: Any) -> Any:
        # torch turns derivatives off around the forward pass, but other levels of `torch.func` may still want theirs.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            return overload(*inputs)

    def differentiate(*inputs: Any) -> Any:
        in_forward_mode = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
        wanted = in_forward_mode or (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs))
        if not wanted:
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*inputs)
        if in_forward_mode:
            return (forward_mode or reference)(*inputs[:-1])
        if derivatives is None:
            return reference(*inputs[:-1])
        if torch._C._functorch.peek_interpreter_stack() is None:
            return derivatives.apply(*inputs)
        with enable_single_level_autograd_function():
            return derivatives.apply(*inputs)

    def infer_shapes(*inputs: Any) -> Any:
        return _contiguous(_without_values(choose(name, inputs[0], inputs[-1], inputs), shapes)(*inputs[:-1]))

    if derivatives is not None:
        derivatives.forward = staticmethod(below_autograd)  # type: ignore[method-assign]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    if differentiable:
        LIBRARY.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"geoflow::{name}", infer_shapes, lib=LIBRARY)
    if rowwise:
        torch.library.register_vmap(f"geoflow::{name}", _over_stacked_rows(overload), lib=LIBRARY)
    return overload


def _contiguous(results: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Results of an operation are contiguous, whichever backend computes them: a compiler relies on their strides."""
    return results.contiguous() if isinstance(results, Tensor) else tuple(x.contiguous() for x in results)


def _plain_backend(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The backend of a plain torch function, whose results are contiguous, or are copied to the tensors `out`."""

    def run(*inputs: Any, out: tuple[Tensor, ...] | None = None) -> Any:
        results = reference(*inputs)
        if out is None:
            return _contiguous(results)
        return tuple(to.copy_(result) for to, result in zip(out, results))

    return run


def _without_values(backend: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ARG001
    """Whichever of the two tells the shapes of results for tensors without values; a recorder of kernel launches
    replaces this function by one that returns the backend."""
    return shapes


class Derivatives(torch.autograd.function._SingleLevelFunction):
    """The base of an operation's derivatives, with the methods of a `torch.autograd.Function`; `operation` adds
    `forward`. The dispatcher takes the transforms of `torch.func` apart before it comes here, so that one level of
    differentiation is left."""

    apply: ClassVar[Callable[..., Any]]


def _over_stacked_rows(overload: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """The rule by which `vmap` runs a rowwise operation: once, on the rows of all examples below each other."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        examples = info.batch_size
        stacked = []
        for x, dim in zip(inputs, in_dims):
            if isinstance(x, Tensor):
                x = x.expand(examples, *x.shape) if dim is None else x.movedim(dim, 0)
                x = x.flatten(0, 1)
            stacked.append(x)
        results = overload(*stacked)
        if isinstance(results, Tensor):
            return results.view(examples, len(results) // examples, *results.shape[1:]), 0
        parts = tuple(x.view(examples, len(x) // examples, *x.shape[1:]) for x in results)
        return parts, (0,) * len(parts)

    return rule


class BackendTable(dict[str, dict[str, str]]):
    """Operation -> backend -> "available" or the reason why not; prints as a table."""

    def __str__(self) -> str:
        width = max((len(op) for op in self), default=0)
        rows = [f"{op:<{width}}  {backend:<9}  {state}" for op, row in self.items() for backend, state in row.items()]
        return "\n".join(rows)

    __repr__ = __str__


def backends() -> BackendTable:
    """Table of all operations and backends: "available", or the reason why not. Prints as text."""

    def state(entry: Backend | None) -> str:
        if entry is None:
            return "not implemented for this operation"
        return (entry.missing() if entry.missing is not None else None) or "available"

    listed = sorted(_OPERATIONS.keys() - _PASSES)
    return BackendTable({name: {b: state(_OPERATIONS[name].get(b)) for b in BACKENDS} for name in listed})
