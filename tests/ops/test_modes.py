"""Whatever torch lets watch, transform or trace a call sees the operations, and none of it loses a gradient, a tangent,
a sign or a type: compiled code reads memory, which shows none of these."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from geoflow_fast import ops
from geoflow_fast.ops import dispatch, extension
from geoflow_fast.ops.adaln import adaln_elementary
from tests.ops.counting import counted

ROWS, WIDTH = 4, 6
BACKENDS = ["reference", "cpu"]


class Operation(NamedTuple):
    """A function of three tensors [4, 6], which runs the operation, and the same in plain torch."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    plain: Callable[[Tensor, Tensor, Tensor], Tensor]


OPERATIONS = [
    Operation("adaln", ops.adaln, lambda x, s, c: adaln_elementary(x, s, c, 1e-6)),
    Operation("swiglu", lambda x, s, c: ops.swiglu(x, s) + c, lambda x, s, c: x * torch.sigmoid(x) * s + c),
    Operation("gate_residual", lambda x, s, c: ops.gate_residual(x, s, c, c), lambda x, s, c: x + c * s.sigmoid() * c),
]
every = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
traced = pytest.mark.own_default("dtype", reason="torch does not trace changes of the default dtype")
"""On tests in which torch traces code."""


@pytest.fixture
def parts() -> tuple[Tensor, Tensor, Tensor]:
    x, s, c = torch.randn(3, ROWS, WIDTH)
    return x, s, c


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield counted(monkeypatch)
    torch._dynamo.reset()


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def leaves(parts: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in parts]


@every
def test_eager_calls_run_the_kernel(operation, parts, calls):
    close(operation.run(*parts), operation.plain(*parts))
    assert calls[operation.name] == (extension.missing() is None)


@every
def test_gradients(operation, parts):
    ours, plain, weight = leaves(parts), leaves(parts), torch.randn(ROWS, WIDTH)
    (operation.run(*ours) * weight).sum().backward()
    (operation.plain(*plain) * weight).sum().backward()
    for got, wanted in zip(ours, plain):
        close(got.grad, wanted.grad)


@every
def test_a_parameter_gets_its_gradient(operation, parts):
    x, s, c = parts
    parameter = torch.nn.Parameter(c.clone())
    operation.run(x, s, parameter).sum().backward()
    assert parameter.grad is not None
    with torch.no_grad():
        assert not operation.run(x, s, parameter).requires_grad


@every
def test_double_backward(operation, parts):
    def twice(function: Callable[..., Tensor]) -> Tensor:
        x, s, c = leaves(parts)
        (gradient,) = torch.autograd.grad(function(x, s, c).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), x)[0]

    close(twice(operation.run), twice(operation.plain))


@every
def test_inference_mode(operation, parts):
    with torch.inference_mode():
        result = operation.run(*parts)
        assert result.is_inference()
        assert operation.run(result, *parts[1:]).is_inference()


@every
def test_dual_tensors(operation, parts):
    x, s, c = parts
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(operation.run(forward_ad.make_dual(x, x.clone()), s, c)).tangent
    assert tangent is not None
    close(tangent, torch.func.jvp(lambda v: operation.plain(v, s, c), (x,), (x,))[1])


@every
@pytest.mark.parametrize("which", range(3))
def test_jvp_of_each_argument(operation, which, parts):
    def of(function: Callable[..., Tensor]) -> Tensor:
        rest = list(parts)

        def one(v: Tensor) -> Tensor:
            return function(*(v if k == which else rest[k] for k in range(3)))

        return torch.func.jvp(one, (parts[which],), (parts[0],))[1]

    close(of(operation.run), of(operation.plain))


def scalar(function: Callable[..., Tensor], s: Tensor, c: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: function(v, s, c).pow(3).sum()


@every
def test_grad_and_hessian(operation, parts):
    x, s, c = parts
    ours, plain = scalar(operation.run, s, c), scalar(operation.plain, s, c)
    close(torch.func.grad(ours)(x), torch.func.grad(plain)(x))
    close(torch.func.hessian(ours)(x), torch.func.hessian(plain)(x))


@every
def test_a_gradient_of_an_outer_level(operation, parts):
    """The argument comes from an outer transform and is of no interest to the inner one."""
    x, s, c = parts

    def outer(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda v: torch.func.grad(lambda w: (w * function(v * 1.0, s, c)).sum())(s).sum()

    close(torch.func.grad(outer(operation.run))(x), torch.func.grad(outer(operation.plain))(x))


@every
def test_vmap(operation):
    batches = torch.randn(3, 3, ROWS, WIDTH)
    close(torch.vmap(operation.run)(*batches), torch.vmap(operation.plain)(*batches))
    _, s, c = batches[:, 0]
    one = torch.vmap(lambda v: operation.run(v, s, c))(batches[0])
    close(one, torch.vmap(lambda v: operation.plain(v, s, c))(batches[0]))


@every
def test_vmap_of_grad(operation, parts):
    _, s, c = parts
    batch = torch.randn(3, ROWS, WIDTH)
    ours, plain = (torch.func.grad(scalar(function, s, c)) for function in (operation.run, operation.plain))
    close(torch.vmap(ours)(batch), torch.vmap(plain)(batch))


@every
def test_fake_tensors(operation, parts):
    with FakeTensorMode():
        fake = torch.empty(2, WIDTH)
        assert type(operation.run(fake, fake, fake)).__name__ == "FakeTensor"
    outside = operation.run(fake, fake, fake)
    assert type(outside).__name__ == "FakeTensor"
    assert outside.shape == (2, WIDTH)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(operation.run(*parts)).__name__ == "FakeTensor"


@every
@traced
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_has_the_operation_in_its_graph(operation, mode, parts):
    graph = make_fx(lambda x, s, c: operation.run(x, s, c), tracing_mode=mode)(*parts)
    assert f"geoflow.{operation.name}" in graph.code


@every
@traced
def test_jit_trace_records_no_constant(operation, parts):
    x, s, c = parts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jit is deprecated
        traced = torch.jit.trace(lambda v: operation.run(v, s, c), (x,))
    close(traced(x + s), operation.plain(x + s, s, c))


@every
def test_modes_see_the_operation(operation, parts):
    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            operation.run(*parts)
        assert any(operation.name in name for name in seen)


@every
def test_subclasses_keep_their_type(operation, parts):
    class Kind(torch.Tensor):
        pass

    x, s, c = parts
    assert type(operation.run(x.as_subclass(Kind), s, c)) is Kind


@every
def test_functionalize(operation, parts):
    x, s, c = parts
    close(torch.func.functionalize(lambda v: operation.run(v, s, c))(x), operation.plain(*parts))


@every
def test_negative_bits_are_values(operation, parts):
    x, s, c = parts
    dense, gaps = torch._neg_view(x), torch.complex(s, x).conj().imag
    assert dense.is_neg()
    assert gaps.is_neg()
    for v in (dense, gaps):
        close(operation.run(v, s, c), operation.plain(-x, s, c))
    narrow = gaps[:, :1]
    close(operation.run(s[:, :1], narrow, c[:, :1]), operation.plain(s[:, :1], -x[:, :1], c[:, :1]))


@every
def test_zero_tensors_are_zeros(operation, parts):
    x, s, c = parts
    zero = torch._efficientzerotensor((ROWS, WIDTH))
    close(operation.run(zero, s, c), operation.plain(torch.zeros(ROWS, WIDTH), s, c))
    close(operation.run(x, zero, c), operation.plain(x, torch.zeros(ROWS, WIDTH), c))


@every
def test_meta_tensors(operation, parts):
    result = operation.run(*(x.to("meta") for x in parts))
    assert result.is_meta
    assert result.shape == (ROWS, WIDTH)


@every
def test_what_compiled_code_does_not_read_is_computed_all_the_same(operation, parts):
    x, s, c = parts
    close(operation.run(x.double(), s.double(), c.double()), operation.plain(x.double(), s.double(), c.double()))
    for v in (
        x.T.contiguous().T,
        torch.stack((x, x), 2)[..., 0],
        x[:1].expand(ROWS, WIDTH),
        x.repeat_interleave(2, 0)[::2],
    ):
        close(operation.run(v, s, c), operation.plain(v, s, c))
    assert operation.run(x[:0], s[:0], c[:0]).shape == (0, WIDTH)


@every
@traced
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole(operation, backend, parts):
    x, s, c = parts
    compiled = torch.compile(lambda v: operation.run(v * 1.5, s, c) * 2, fullgraph=True, backend=backend)
    close(compiled(x), 2 * operation.plain(x * 1.5, s, c))
    torch._dynamo.reset()


@every
@traced
def test_compiled_with_gradients_and_transforms(operation, parts):
    x, s, c = parts
    compiled = torch.compile(lambda v: operation.run(v, s, c) * 2, fullgraph=True, backend="aot_eager")
    (ours,), (plain,) = leaves((x,)), leaves((x,))
    compiled(ours).pow(2).sum().backward()
    (2 * operation.plain(plain, s, c)).pow(2).sum().backward()
    close(ours.grad, plain.grad)
    for transform in (torch.func.grad, lambda f: lambda v: torch.func.jvp(f, (v,), (v,))[1]):
        torch._dynamo.reset()
        compiled = torch.compile(transform(scalar(operation.run, s, c)), fullgraph=True, backend="aot_eager")
        close(compiled(x), transform(scalar(operation.plain, s, c))(x))
    torch._dynamo.reset()


@every
@traced
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_have_the_operation(operation, strict, parts):
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, s: Tensor, c: Tensor) -> Tensor:
            return operation.run(x, s, c)

    program = torch.export.export(Module(), parts, strict=strict)
    assert f"geoflow.{operation.name}" in str(program.graph)
    close(program.module()(*parts), operation.plain(*parts))


@every
def test_checkpoint_counters_profiler_and_autocast(operation, parts):
    (leaf,) = leaves(parts[:1])
    checkpoint(operation.run, leaf, *parts[1:], use_reentrant=False).sum().backward()
    assert leaf.grad is not None
    with FlopCounterMode(display=False):
        operation.run(*parts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operation.run(*parts)
    assert any(operation.name in event.key for event in profile.key_averages())
    with torch.autocast("cpu"):
        assert operation.run(*parts).dtype == torch.float32


@every
def test_threads(operation, parts):
    wanted = operation.plain(*parts)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: operation.run(*parts), range(500)):
            close(result, wanted)


# ---- where torch has no longer what it keeps private -----------------------------------------------------------------


def doubled_reference(x: Tensor, factor: float) -> Tensor:
    """x * x * factor."""
    return x * x * factor


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return 2 * grad * x * ctx.factor, None, None


PRIVATE = ("_BELOW_AUTOGRAD", "_interpreters", "_single_level", "_single_level_allowed")


@pytest.mark.parametrize("hidden", [(), *((name,) for name in PRIVATE), PRIVATE, ("_current_level",)])
def test_without_private_functions_of_torch(hidden, monkeypatch):
    for name in hidden:
        if name == "_current_level":
            levels = {"_current_level": None}
            monkeypatch.setattr(dispatch, "forward_ad", type("Module", (), {**vars(forward_ad), **levels}))
        else:
            monkeypatch.setattr(dispatch, name, None)
    monkeypatch.setattr(dispatch, "_OPERATIONS", {})
    library = torch.library.Library("geoflow", "FRAGMENT")
    monkeypatch.setattr(dispatch, "LIBRARY", library)
    doubled_reference.__annotations__ = {"x": "Tensor", "factor": "float", "return": "Tensor"}
    name = "squares_" + "_".join(hidden)
    run = dispatch.operation(name, doubled_reference, derivatives=_Derivatives, rowwise=True)
    try:
        x = torch.randn(2, 3)
        (leaf,) = leaves((x,))
        total = run(leaf, 2.0, "auto").sum()
        total.backward()
        close(leaf.grad, 4 * x)
        close(torch.func.grad(lambda v: run(v, 2.0, "auto").sum())(x), 4 * x)
        close(torch.vmap(torch.func.grad(lambda v: run(v[None], 2.0, "auto").sum()))(x), 4 * x)
        close(torch.func.jvp(lambda v: run(v, 2.0, "auto"), (x,), (torch.ones(2, 3),))[1], 4 * x)
        (leaf,) = leaves((x,))
        (first,) = torch.autograd.grad(run(leaf, 2.0, "auto").sum(), leaf, create_graph=True)
        close(torch.autograd.grad(first.sum(), leaf)[0], torch.full((2, 3), 4.0))
        with torch.no_grad():
            assert not run(leaf, 2.0, "auto").requires_grad
    finally:
        library._destroy()
