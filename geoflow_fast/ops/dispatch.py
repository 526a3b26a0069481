"""Which backend serves an operation on a device, why another cannot, and what torch is told about operations.

`operation` declares an operation on tensors: its plain torch reference, whose signature is the operation's schema, and
its faster backends. It is registered with `torch.library` in the namespace `geoflow`, so that `torch.compile` and
`torch.export` keep it as one node and `torch.func` knows how to transform it. `choose` picks the backend: by name, or
the first available in the device's order. A backend asked for by name that cannot serve is an error with the reason;
the automatic choice passes over backends that are unavailable, never over one that failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
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
    off the inputs. Compiled code may have a function `bound` in the `extension` that takes the operation's arguments
    and raises its `NotServed` where they are not what it reads."""

    function: Callable[..., Any]
    devices: tuple[str, ...] | Callable[[], tuple[str, ...]] = EVERYWHERE
    missing: Callable[[], str | None] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    widest: int | None = None
    width: Callable[[Sequence[Any]], int] = widest_row
    bound: str = ""
    extension: Callable[[], Any] = lambda: None


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
    check: Callable[..., Any] | None = None,
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
) -> Callable[..., Any]:
    """Declares the operation `geoflow::name` and returns a function that calls it; the last argument is the name of a
    backend.

    The typed signature of `reference` is the schema. `check` gets the arguments without the backend and raises the
    errors that users see; the bound function of the backend "cpu" (`Backend.bound`) makes the same checks itself, and
    eager calls on CPU tensors go straight to it. Where a gradient is wanted, `derivatives` is applied; without it, and
    in forward mode, torch differentiates the reference, or the function `forward_mode` if it is given, unless the
    operation is not `differentiable`. `fake` computes the shapes of the results; the reference does unless it is given.
    `rowwise`: in all tensors the first dimension counts rows, or groups of as many consecutive rows each, so that
    `vmap` may stack the rows of all examples; it goes over the examples of any other operation. Where there are no rows
    the reference serves for every backend.
    `part_of` names the operation that this one is a pass of. Backends that `choose` hands to a caller may take
    a keyword `out`, a tuple of tensors to write the results to.
    """
    plain = _plain_backend(reference)
    register(name, reference=Backend(plain), cpu=cpu, cuda=cuda, triton=triton)
    if part_of is not None:
        _PASSES.add(name)
    schema = torch.library.infer_schema(reference, mutates_args=()).replace(") ->", ", str backend) ->")
    parameters = inspect.signature(reference).parameters.values()
    tensors = tuple(k for k, parameter in enumerate(parameters) if "Tensor" in str(parameter.annotation))
    compiled = cpu or Backend(plain)
    shapes = fake or reference

    def run(*inputs: Any) -> Any:
        if check is not None and inputs[0].is_cpu:  # `call` has checked others
            check(*inputs[:-1])
        backend = choose(name, inputs[0], inputs[-1], inputs)
        no_rows = (rowwise or derivatives is not None or part_of is not None) and inputs[0].shape[0] == 0
        return (plain if no_rows else backend)(*inputs[:-1])

    def run_on_cpu(*inputs: Any) -> Any:
        module = compiled.extension() if inputs[-1] == "auto" else None
        if module is None:
            return run(*inputs)
        try:
            return getattr(module, compiled.bound)(*inputs[:-1])
        except module.NotServed:  # another dtype, or rows with gaps
            return run(*inputs)

    def infer_shapes(*inputs: Any) -> Any:
        if check is not None:
            check(*inputs[:-1])
        return _contiguous(_without_values(choose(name, inputs[0], inputs[-1], inputs), shapes)(*inputs[:-1]))

    def declare(name: str) -> torch._ops.OpOverload[..., Any]:
        LIBRARY.define(name + schema, tags=tags)
        overload: torch._ops.OpOverload[..., Any] = getattr(torch.ops.geoflow, name).default
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        if compiled.bound:
            LIBRARY.impl(name, run_on_cpu, "CPU")
        torch.library.register_fake(f"geoflow::{name}", infer_shapes, lib=LIBRARY)
        rule = _over_stacked_rows(overload) if rowwise else _over_examples(overload)
        torch.library.register_vmap(f"geoflow::{name}", rule, lib=LIBRARY)
        return overload

    def twin(*inputs: Any) -> Any:
        if check is not None:
            check(*inputs[:-1])
        return (forward_mode or reference)(*inputs[:-1])

    overload = declare(name)
    if differentiable:
        values = None if _BELOW_AUTOGRAD is not None else declare(f"{name}_values")
        kernel = _differentiating(overload, values, tensors, twin, derivatives, part_of is None)
        LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)

    def call(*inputs: Any) -> Any:
        if differentiable and _in_forward_mode(inputs):  # a compiler sees it here alone
            return twin(*inputs)
        if check is not None and not getattr(inputs[0], "is_cpu", True):  # fake tensors hide their device below
            check(*inputs[:-1])
        try:
            return overload(*inputs)
        except RuntimeError:  # torch could not read an argument: which one is found here
            if not isinstance(inputs[-1], str):
                raise TypeError(f"backend must be a name, got {inputs[-1]!r}") from None
            if check is not None:
                check(*inputs[:-1])
            raise

    return call


_BELOW_AUTOGRAD = getattr(torch._C, "_after_autograd_keyset", None)
"""What is left of the dispatcher's keys below those of autograd. torch says that kernels redispatch by it, but has no
public name for it. Without it, an operation has a second one beside it that has no derivatives."""
_interpreters = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
"""Says whether a transform of `torch.func` is at work, None if not. Without it, none of them meets a kernel's
derivative: torch differentiates the plain twin wherever a gradient is wanted inside of one."""
_single_level = getattr(torch.autograd.function, "_SingleLevelFunction", None)
_single_level_allowed = getattr(torch._functorch.utils, "enable_single_level_autograd_function", None)
"""By these a derivative is applied inside a transform of `torch.func`, of which the dispatcher has left one level; a
public `autograd.Function` is not allowed there. Without them, torch differentiates the plain twin."""


def _in_forward_mode(inputs: Sequence[Any]) -> bool:
    """Whether tangents may be on their way. Where torch does not tell the level, the tensors are asked."""
    level = getattr(forward_ad, "_current_level", None)
    if level is not None:
        return bool(level >= 0)
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs)


def _differentiating(
    overload: torch._ops.OpOverload[..., Any],
    values: torch._ops.OpOverload[..., Any] | None,
    tensors: tuple[int, ...],
    twin: Callable[..., Any],
    derivatives: type[Derivatives] | None,
    public: bool,
) -> Callable[..., Any]:
    """The kernel of an operation for the dispatcher's key "Autograd": it passes values on, and takes derivatives where
    they are wanted, those of `twin` in forward mode and where there are no others, unless another backend was named in
    a call of a `public` operation."""

    def below(keys: Any, inputs: tuple[Any, ...]) -> Any:
        return overload.redispatch(keys & _BELOW_AUTOGRAD, *inputs) if values is None else values(*inputs)

    def transformed() -> bool:
        return _interpreters is not None and _interpreters() is not None

    function = None if derivatives is None else _function(derivatives, below, transformed)

    def differentiate(keys: Any, *inputs: Any) -> Any:
        if _in_forward_mode(inputs):
            return twin(*inputs)
        if torch.is_grad_enabled():
            for k in tensors:
                x = inputs[k]
                if x is not None and x.requires_grad:
                    break
            else:
                return below(keys, inputs)
        else:
            return below(keys, inputs)
        if function is None:
            if public and inputs[-1] not in ("auto", "reference"):
                raise ValueError(
                    f"{overload._opname}: backend {inputs[-1]!r} has no gradient; use 'reference' or detach the inputs"
                )
            return twin(*inputs)
        if _interpreters is not None and not transformed():
            return function.apply(*inputs, keys)
        if _single_level is None or _single_level_allowed is None:
            return twin(*inputs)
        with _single_level_allowed():
            return function.apply(*inputs, keys)

    return differentiate


def _function(
    derivatives: type[Derivatives], below: Callable[..., Any], transformed: Callable[[], bool]
) -> type[torch.autograd.Function]:
    """The autograd function of an operation; it takes the dispatcher's keys after the operation's arguments."""

    def forward(*inputs: Any) -> Any:
        if not transformed():
            return below(inputs[-1], inputs[:-1])
        with torch.enable_grad():  # torch turns derivatives off here, but other levels may still want theirs
            return below(inputs[-1], inputs[:-1])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        derivatives.setup_context(ctx, inputs[:-1], output)

    def backward(ctx: Any, *gradients: Any) -> Any:
        return *derivatives.backward(ctx, *gradients), None

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward}
    base = _single_level or torch.autograd.Function
    return type(derivatives.__name__, (base,), {key: staticmethod(method) for key, method in methods.items()})


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


class Derivatives:
    """The derivatives of an operation: `setup_context` and `backward` as `torch.autograd.Function` has them, for the
    operation's arguments, of which the name of the backend is the last."""

    setup_context: ClassVar[Callable[..., None]]
    backward: ClassVar[Callable[..., tuple[Tensor | None, ...]]]


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


def _over_examples(overload: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """The rule by which `vmap` runs any other operation: example by example."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        def example(number: int) -> Any:
            return overload(*(x if dim is None else x.select(dim, number) for x, dim in zip(inputs, in_dims)))

        results = [example(number) for number in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        parts = tuple(torch.stack(part) for part in zip(*results))
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
