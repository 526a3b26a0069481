"""The network's fused operations: values against plain formulas, gradients against finite differences, tangents."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from geoflow_fast import ops

DOUBLE = {"dtype": torch.float64}


def leaf(*shape, **kwargs):
    return torch.randn(*shape, **{**DOUBLE, **kwargs}).requires_grad_()


def half_kept(*shape):
    return torch.rand(*shape) < 0.5


# Each case: (name, function of its differentiable inputs, the inputs). Rows and widths are odd on purpose.
def cases():
    torch.manual_seed(1)
    keep = half_kept(4, 7)
    direction = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int8)
    fixed = [torch.randn(5, d, **DOUBLE) for d in (6, 3, 6, 3)]
    fixed[2:] = [x / x.norm(dim=-1, keepdim=True) for x in fixed[2:]]
    return [
        ("adaln shared", ops.adaln, (leaf(4, 7), leaf(7), leaf(7))),
        ("adaln per row", ops.adaln, (leaf(2, 2, 7), leaf(2, 2, 7), leaf(2, 2, 7))),
        ("adaln per group", ops.adaln, (leaf(6, 7), leaf(3, 7), leaf(3, 7))),
        ("gate", ops.gate_residual, (leaf(4, 7), leaf(4, 7), leaf(4, 7), leaf(7))),
        ("gate per group", ops.gate_residual, (leaf(2, 3, 7), leaf(2, 3, 7), leaf(2, 3, 7), leaf(2, 7))),
        ("no gate", lambda h, v, s: ops.gate_residual(h, None, v, s), (leaf(4, 7), leaf(4, 7), leaf(7))),
        (
            "gate with dropout",
            lambda *a: ops.gate_residual(*a, keep=keep, dropout=0.5),
            (leaf(4, 7), leaf(4, 7), leaf(4, 7), leaf(7)),
        ),
        ("swiglu", ops.swiglu, (leaf(3, 5), leaf(3, 5))),
        ("swiglu packed", ops.swiglu, (leaf(3, 10),)),
        ("flow_loss mean", lambda a, b: ops.flow_loss(a, b, *fixed, direction)[0], (leaf(5, 6), leaf(5, 3))),
        ("flow_loss rows", lambda a, b: ops.flow_loss(a, b, *fixed, direction)[1], (leaf(5, 6), leaf(5, 3))),
    ]


CASES = cases()
by_name = pytest.mark.parametrize(("function", "inputs"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
with_forward_mode = [c for c in CASES if not c[0].startswith("flow_loss")]


@by_name
def test_gradients_agree_with_finite_differences(function, inputs):
    assert gradcheck(function, inputs)


@by_name
def test_second_derivatives_agree_with_finite_differences(function, inputs):
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(("name", "function", "inputs"), with_forward_mode, ids=[c[0] for c in with_forward_mode])
def test_forward_mode_agrees_with_finite_differences(name, function, inputs):
    assert gradcheck(function, inputs, check_forward_ad=True, check_backward_ad=False), name


@by_name
def test_forward_mode_of_gradients_agrees_with_differences(function, inputs):
    """Forward over reverse, as curvature is computed: every gradient moves as its inputs do."""
    points = [x.detach() for x in inputs]
    weight = torch.randn_like(function(*points))
    move = [torch.randn_like(x) for x in points]

    def gradients(*at):
        return torch.func.vjp(function, *at)[1](weight)

    _, tangents = torch.func.jvp(gradients, tuple(points), tuple(move))
    ahead, behind = (gradients(*(x + h * v for x, v in zip(points, move))) for h in (1e-5, -1e-5))
    for tangent, a, b in zip(tangents, ahead, behind):
        torch.testing.assert_close(tangent, (a - b) / 2e-5, rtol=1e-6, atol=1e-7)


@by_name
def test_forward_mode_of_gradients_that_were_prepared_outside_of_it(function, inputs):
    """A pullback is linear, so that its derivative along a direction is its value there."""
    points = [x.detach() for x in inputs]
    value, pullback = torch.func.vjp(function, *points)
    weight, move = torch.randn_like(value), torch.randn_like(value)
    _, tangents = torch.func.jvp(pullback, (weight,), (move,))
    for tangent, expected in zip(tangents, pullback(move)):
        torch.testing.assert_close(tangent, expected)


def test_values_are_the_plain_formulas():
    x, shift, scale = (torch.randn(6, 129, **DOUBLE) for _ in range(3))
    plain = torch.nn.functional.layer_norm(x, (129,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(ops.adaln(x, shift, scale), plain)

    residual, gate, value = (torch.randn(6, 129, **DOUBLE) for _ in range(3))
    layer_scale, keep = torch.rand(129, **DOUBLE), half_kept(6, 129)
    plain = residual + layer_scale * torch.where(keep, torch.sigmoid(gate) * value / 0.75, 0.0)
    torch.testing.assert_close(ops.gate_residual(residual, gate, value, layer_scale, keep=keep, dropout=0.25), plain)

    torch.testing.assert_close(ops.swiglu(gate, value), gate * torch.sigmoid(gate) * value)
    torch.testing.assert_close(ops.swiglu(torch.cat((gate, value), -1)), ops.swiglu(gate, value))


def test_adaln_can_be_a_layer_norm():
    norm = torch.nn.LayerNorm(33, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(5, 33, **DOUBLE)
    torch.testing.assert_close(ops.adaln(x, norm.bias, norm.weight - 1, eps=norm.eps), norm(x))


def test_flow_loss_counts_only_the_tangent_error_of_generated_streams():
    x = torch.eye(2, **DOUBLE)[:1].repeat(3, 1)  # the first axis: the second coordinate is tangent
    target = torch.zeros(3, 2, **DOUBLE)
    v_image, v_text = torch.tensor([[5.0, 2.0]] * 3, **DOUBLE), torch.tensor([[7.0, 3.0]] * 3, **DOUBLE)
    direction = torch.tensor([0, 1, 2], dtype=torch.int8)
    mean, rows = ops.flow_loss(v_image, v_text, target, target, x, x, direction)
    assert rows.tolist() == [4.0 + 9.0, 9.0, 4.0]
    assert mean.item() == pytest.approx(26 / 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype):
    x, shift, scale = (torch.randn(8, 129).to(dtype) for _ in range(3))
    y = ops.adaln(x, shift, scale)
    assert y.dtype == dtype
    assert torch.equal(y, ops.adaln(x.float(), shift.float(), scale.float()).to(dtype))
    out = ops.gate_residual(x.float(), shift, scale, torch.ones(129))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, ops.gate_residual(x.float(), shift.float(), scale.float(), torch.ones(129)))


def test_gradients_keep_the_dtype_of_their_inputs():
    residual = torch.randn(4, 8, requires_grad=True)
    gate, value = (torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    layer_scale = torch.ones(8, requires_grad=True)
    ops.gate_residual(residual, gate, value, layer_scale).sum().backward()
    for x in (residual, gate, value, layer_scale):
        assert x.grad is not None
        assert x.grad.dtype == x.dtype


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_batches_pass_through(rows):
    x = torch.randn(rows, 5, requires_grad=True)
    shift = torch.zeros(5, requires_grad=True)
    out = ops.gate_residual(ops.adaln(x, shift, shift), x, ops.swiglu(x, x), shift)
    out.sum().backward()
    assert out.shape == (rows, 5)
    assert shift.grad is not None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.adaln(x, torch.zeros(4), torch.zeros(4)), "shift has width 4"),
        (lambda x: ops.adaln(x, torch.zeros(4, 5), torch.zeros(4, 5)), "shift has 4 rows"),
        (lambda x: ops.adaln(x, torch.zeros(5), torch.zeros(1, 5)), "one shape"),
        (lambda x: ops.adaln(x.long(), torch.zeros(5), torch.zeros(5)), "floating point"),
        (lambda x: ops.adaln(x, x, x, backend="cuda"), "cuda"),
        (lambda x: ops.adaln(x, x, x, backend="fast"), "no such backend"),
        (lambda x: ops.gate_residual(x, x[:2], x, torch.ones(5)), "gate must have the shape"),
        (lambda x: ops.gate_residual(x, x, x, torch.ones(5), dropout=1.0), "dropout"),
        (lambda x: ops.gate_residual(x, x, x, torch.ones(5), keep=torch.ones(3, 5)), "keep must be bool"),
        (lambda x: ops.swiglu(x), "must be even"),
        (lambda x: ops.flow_loss(x, x, x, x, x, x, torch.zeros(3)), "direction must be int8"),
        (lambda x: ops.flow_loss(x, x, x[:, :2], x, x, x, torch.zeros(3, dtype=torch.int8)), "target_image"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call(torch.randn(3, 5))
