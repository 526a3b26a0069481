"""torch's compilers and function transforms see the operations and keep their kernels."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import geoflow_fast as gf
from geoflow_fast import ops
from geoflow_fast.ops import cross_residual, extension
from geoflow_fast.ops.adaln import adaln_rows
from geoflow_fast.ops.gate_residual import gate_residual_rows
from geoflow_fast.ops.swiglu import swiglu_rows
from tests.ops.counting import counted

ROWS, WIDTH = 6, 8
NETWORK = {"adaln": 5, "gate_residual": 3, "cross_residual": 2, "swiglu": 3}
"""Calls of the kernels in one velocity of the `flow` fixture, which has two blocks."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each compiled row kernel ran."""
    yield counted(monkeypatch)
    torch._dynamo.reset()


def unit(*shape: int) -> Tensor:
    return functional.normalize(torch.randn(*shape), dim=-1)


def inputs_of(name: str) -> tuple[object, ...]:
    """Arguments of `torch.ops.geoflow.<name>` without the backend."""
    x, y, z, w = (unit(ROWS, WIDTH) for _ in range(4))
    group, keep = torch.randn(2, WIDTH), torch.rand(ROWS, WIDTH) < 0.5
    products = torch.randn(4, ROWS // 2, WIDTH)  # of two heads
    direction, times = torch.arange(ROWS).to(torch.int8) % 3, torch.rand(ROWS)
    samples, gallery, bias, sample_bias = unit(2, 3, WIDTH), unit(9, WIDTH), torch.randn(9), torch.randn(2, 3)
    return {
        "adaln": (x, group, group + 1, 1e-5),
        "adaln_half": (x, group, group + 1, 1e-5),
        "adaln_backward": (y, x, group, 1e-5),
        "swiglu": (x, y),
        "swiglu_backward": (z, x, y),
        "gate_residual": (x, y, z, group, keep, 0.5),
        "gate_residual_backward": (x, y, z, group, keep, 0.5),
        "cross_residual": (x, products, group, keep, 0.5),
        "cross_residual_backward": (x, products, group, keep, 0.5),
        "counter_noise": (torch.arange(ROWS), WIDTH, 1, 2, 0, True),
        "unit_rows": (3 * x, torch.arange(ROWS).flip(0)),
        "product": (x, y.T),
        "flow_loss": (x, y, z, w, y.clone(), z.clone(), direction),
        "flow_loss_backward": (times, x, y, z, w, y.clone(), z.clone(), direction),
        "keep_mask": (keep, 0.3),
        "masked_interpolant": (x, y, z, w, times, direction, keep[:, 0].contiguous(), True),
        "tangent_step": (x, y, 0.3, z, 2.0, False),
        "tangent_stage": (x, y, z, 0.3, w, 2.0, x + y, 0.1),
        "tangent_ab2": (x, y, 0.3, z, 2.0, w, 0.5),
        "gallery_search": (x, gallery, 4),
        "gallery_posterior": (samples, gallery, 5.0, 4, bias, sample_bias, "float32"),
        "gallery_scores": (samples, gallery, 5.0, bias, sample_bias),
        "sinkhorn": (torch.rand(ROWS, 7), 0.1, 1e-3, 1000),
        "ot_solve": (x, y, z, w, 0.1, 1e-3, 1000, times.double()),
    }[name]


# Operations that no public name imports are registered by their modules.
assert cross_residual.cross_residual_rows
OPERATIONS = sorted(
    name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "geoflow::" in name
)
DIFFERENTIABLE = ("adaln", "swiglu", "gate_residual")
STEPS = ("tangent_step", "tangent_stage", "tangent_ab2")


def leaves(inputs: tuple[object, ...]) -> list[object]:
    """The same arguments; the floating-point tensors want a gradient."""
    return [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_registrations_are_right(name, backend):
    """Schema, shapes of the results, derivatives and their tracing, as torch checks them."""
    arguments = (*inputs_of(name), backend)
    operator = getattr(torch.ops.geoflow, name).default
    torch.library.opcheck(operator, arguments)
    if name in (*DIFFERENTIABLE, *STEPS, "cross_residual", "product", "masked_interpolant"):
        torch.library.opcheck(operator, tuple(leaves(arguments)))
    if name == "flow_loss":
        torch.library.opcheck(operator, (*leaves(arguments[:2]), *arguments[2:]))


@pytest.mark.parametrize("name", ["swiglu", "gate_residual"])
def test_registrations_are_right_without_optional_arguments(name):
    x, z, group = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(1, WIDTH)
    arguments = {"swiglu": (x, None), "gate_residual": (x, None, z, group, None, 0.0)}[name]
    torch.library.opcheck(getattr(torch.ops.geoflow, name).default, (*leaves(arguments), "auto"))


@pytest.mark.own_default("dtype", reason="torch.compile does not trace changes of the default dtype")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_velocity_keeps_the_kernels(flow, calls, backend):
    image, text = unit(5, 10), unit(5, 7)
    compiled = torch.compile(lambda i, t: flow.velocity(i, t, 0.3, "joint"), backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(image, text)
        calls.clear()
        result = compiled(image, text)
        assert calls == NETWORK
        for got, wanted in zip(result, flow.velocity(image, text, 0.3, "joint")):
            assert torch.equal(got, wanted)


@pytest.mark.own_default("dtype", reason="torch.compile does not trace changes of the default dtype")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_training_loss_keeps_the_kernels(flow, calls, backend):
    flow.train()
    points, targets, t = (unit(7, 10), unit(7, 7)), (torch.randn(7, 10), torch.randn(7, 7)), torch.rand(7)
    joint = torch.zeros(7, dtype=torch.int8)

    def mean_loss() -> Tensor:
        return ops.flow_loss(*flow.velocity(*points, t, "joint"), *targets, *points, joint)[0]

    def gradients(loss: Callable[[], Tensor]) -> list[Tensor]:
        torch.manual_seed(4)  # the dropout masks must be the same too
        flow.zero_grad()
        loss().backward()
        return [p.grad.clone() for p in flow.parameters() if p.grad is not None]

    expected, wanted_calls = gradients(mean_loss), Counter(calls)
    compiled = torch.compile(mean_loss, backend=backend)
    gradients(compiled)
    calls.clear()
    result = gradients(compiled)
    assert calls == wanted_calls
    assert {"adaln", "adaln_backward", "swiglu_backward", "gate_residual_backward", "flow_loss_backward"} <= set(calls)
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[object, ...]]]:
    """What each run of the compiled transport solver reported."""
    seen: list[tuple[object, ...]] = []
    built = extension.required()

    def counted(solve: Callable[..., tuple[object, ...]]) -> Callable[..., tuple[object, ...]]:
        def run(*arguments: object) -> tuple[object, ...]:
            results = solve(*arguments)
            seen.append(tuple(x.tolist() if isinstance(x, Tensor) else x for x in results))
            return results

        return run

    for name in ("ot_solve", "sinkhorn"):
        monkeypatch.setattr(built, name, counted(getattr(built, name)))
    yield seen
    torch._dynamo.reset()


def transport_calls(points: tuple[Tensor, ...]) -> dict[str, tuple[Callable[..., object], tuple[object, ...]]]:
    """Functions of tensors that solve a transport problem, with their arguments."""

    def plan(cost: Tensor) -> tuple[object, ...]:
        result = ops.sinkhorn(cost, 0.1)
        return result.f, result.g, result.iterations, result.marginal_error, result.converged

    return {
        "ot_assign": (lambda *x: (ops.ot_assign(*x, eps=0.1),), points),
        "couple": (lambda *x: (ops.couple(*x, eps=0.1),), points),
        "sinkhorn": (plan, (torch.rand(7, 9),)),
    }


@pytest.mark.own_default("dtype", reason="torch.compile does not trace changes of the default dtype")
@pytest.mark.skipif(extension.missing() is not None, reason="compiled extension is not built")
@pytest.mark.parametrize("name", ["ot_assign", "couple", "sinkhorn"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_coupling_is_one_node_and_keeps_the_solver(name, backend, solves):
    function, arguments = transport_calls((unit(9, 12), unit(9, 5), unit(9, 12), unit(9, 5)))[name]
    expected, wanted = function(*arguments), list(solves)
    graphs: list[torch.fx.GraphModule] = []

    def recorded(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(function, backend=recorded, fullgraph=True)
    compiled(*arguments)
    solves.clear()
    result = compiled(*arguments)
    assert solves == wanted
    for got, right in zip(result, expected, strict=True):
        assert torch.equal(got, torch.as_tensor(right, dtype=got.dtype))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("geoflow" in target for target in targets) == 1


def test_an_exported_coupling_has_the_operation():
    class Coupling(torch.nn.Module):
        def forward(self, *points: Tensor) -> Tensor:
            return ops.ot_assign(*points, eps=0.1)

    points = (unit(9, 12), unit(9, 5), unit(9, 12), unit(9, 5))
    program = torch.export.export(Coupling(), points)
    assert [str(n.target) for n in program.graph.nodes if "geoflow" in str(n.target)] == ["geoflow.ot_solve.default"]
    assert torch.equal(program.module()(*points), ops.ot_assign(*points, eps=0.1))


@pytest.mark.own_default("dtype", reason="torch.compile does not trace changes of the default dtype")
def test_a_compiled_solve_still_warns():
    cost = torch.rand(9, 9)
    compiled = torch.compile(lambda x: ops.sinkhorn(x, 0.01, max_iter=2).g, backend="eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="stopped after 2 iterations"):
        compiled(cost)
    with pytest.raises(ValueError, match="float32 holds their plan for eps of at least"):
        torch.compile(lambda x: ops.sinkhorn(x, eps=1e-20).g, backend="eager", fullgraph=True)(cost)
    torch._dynamo.reset()


def test_an_exported_velocity_has_the_operations(flow):
    class Velocity(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = flow

        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            return self.flow.velocity(image, text, 0.3, "t2i")

    image, text = unit(5, 10), unit(5, 7)
    program = torch.export.export(Velocity(), (image, text))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {f"geoflow.{name}.default" for name in NETWORK} <= targets
    with torch.no_grad():
        for got, wanted in zip(program.module()(image, text), flow.velocity(image, text, 0.3, "t2i")):
            torch.testing.assert_close(got, wanted)


def test_vmap_of_a_velocity_runs_each_row_kernel_once_on_all_rows(flow, calls):
    image, text = unit(4, 3, 10), unit(4, 3, 7)
    with torch.no_grad():
        result = torch.func.vmap(lambda i, t: flow.velocity(i, t, 0.3, "joint"))(image, text)
        assert calls == NETWORK | {"cross_residual": 4 * NETWORK["cross_residual"]}
        for example in range(4):
            wanted = flow.velocity(image[example], text[example], 0.3, "joint")
            for got, want in zip(result, wanted):
                torch.testing.assert_close(got[example], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", ["none", "groups", "rows"])
@pytest.mark.parametrize("name", ["adaln", "swiglu", "gate_residual", "cross_residual", "flow_loss", *STEPS])
def test_vmap_agrees_with_a_loop(name, shared, calls):
    """Values and gradients per example, with all tensors batched, or one of them shared by the examples."""
    examples = [inputs_of(name) for _ in range(3)]
    tensors = [k for k, x in enumerate(examples[0]) if isinstance(x, Tensor)]
    fixed = {"none": None, "groups": tensors[min(3, len(tensors) - 1)], "rows": tensors[0]}[shared]
    batched = [k for k in tensors if k != fixed]
    operator = getattr(torch.ops.geoflow, name).default

    def run(*parts: Tensor) -> Tensor:
        arguments = list(examples[0])
        for k, part in zip(batched, parts):
            arguments[k] = part
        return operator(*arguments, "auto")

    # The batch comes last, so that the rule has to move it.
    stacked = [torch.stack([example[k] for example in examples], dim=-1) for k in batched]
    calls.clear()
    result = torch.func.vmap(run, in_dims=-1)(*stacked)
    assert sum(calls.values()) == (len(examples) if name == "cross_residual" else 1)
    for number, example in enumerate(examples):
        one = run(*(example[k] for k in batched))
        alike = result[number] if isinstance(one, Tensor) else tuple(part[number] for part in result)
        torch.testing.assert_close(alike, one)
    if name in DIFFERENTIABLE:
        floats = tuple(i for i, k in enumerate(batched) if examples[0][k].is_floating_point())
        gradient = torch.func.grad(lambda *parts: run(*parts).square().sum(), argnums=floats)
        result = torch.func.vmap(gradient, in_dims=-1)(*stacked)
        for number, example in enumerate(examples):
            for got, wanted in zip(result, gradient(*(example[k] for k in batched))):
                torch.testing.assert_close(got[number], wanted, rtol=1e-4, atol=1e-5)


def test_torch_func_agrees_with_autograd(calls):
    """Each mode alone and over each other, against the tape of plain autograd."""
    x, shift, scale = (torch.randn(3, 5, dtype=torch.float64) for _ in range(3))

    def loss(x: Tensor) -> Tensor:
        y = ops.adaln(x, shift, scale)
        return ops.gate_residual(x, y, ops.swiglu(y, x), scale).square().sum()

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    torch.testing.assert_close(torch.func.grad(loss)(x), gradient)
    hessian = torch.autograd.functional.hessian(loss, x)
    torch.testing.assert_close(torch.func.hessian(loss)(x), hessian)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(loss))(x), hessian)
    direction = torch.randn_like(x)
    _, slope = torch.func.jvp(loss, (x,), (direction,))
    torch.testing.assert_close(slope, (gradient * direction).sum())
    torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(loss))(x), hessian)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(x), hessian)
    # The forward pass of a transformed function still runs in the kernels.
    torch.func.grad(lambda x: ops.swiglu(x).sum())(torch.randn(4, 6))
    assert calls == {"swiglu": 1}


def test_every_listed_operation_is_registered():
    passes = {name for name in OPERATIONS if name.endswith(("_backward", "_half"))} | {*STEPS[1:]}
    assert set(OPERATIONS) - passes == set(gf.backends())


def test_adaln_has_second_derivatives_in_every_mode():
    """torch's layer_norm differentiated twice in forward mode is wrong, so the operation must not be made of it."""
    generator = torch.Generator().manual_seed(0)
    x, u, v, w = torch.randn(4, 4, 8, dtype=torch.float64, generator=generator)
    shift, scale = torch.randn(2, 2, 8, dtype=torch.float64, generator=generator)

    def adaln(x):
        return ops.adaln(x, shift, scale, eps=1e-5)

    def along_u(x):
        return torch.func.jvp(adaln, (x,), (u,))[1]

    def gradient(x):
        return torch.func.grad(lambda y: (adaln(y) * w).sum())(x)

    def difference(function, at, direction):
        step = 1e-5 * direction
        return (function(at + step) - function(at - step)) / 2e-5

    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)
    close(along_u(x), difference(adaln, x, u))
    close(torch.func.jvp(along_u, (x,), (v,))[1], difference(along_u, x, v))
    close(torch.func.grad(lambda y: (along_u(y) * w).sum())(x).mul(v).sum(), (difference(along_u, x, v) * w).sum())
    close(torch.func.jvp(gradient, (x,), (v,))[1], difference(gradient, x, v))

    def gradient_along_u(x):
        return torch.func.jvp(gradient, (x,), (u,))[1]

    close(torch.func.jvp(gradient_along_u, (x,), (v,))[1], difference(gradient_along_u, x, v))


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_operations_on_no_rows_give_gradients_of_zero(groups):
    """A training batch may generate one of its streams in no row; the parameters still get their gradients."""
    rows, group = torch.empty(0, 6, requires_grad=True), torch.ones(groups, 6, requires_grad=True)
    y = adaln_rows(rows, group, group, 1e-5, "auto")
    y = gate_residual_rows(y, y, y, group, None, 0.0, "auto")
    y = swiglu_rows(y, None, "auto")
    assert y.shape == (0, 3)
    y.sum().backward()
    assert torch.equal(rows.grad, torch.zeros(0, 6))
    assert torch.equal(group.grad, torch.zeros(groups, 6))
