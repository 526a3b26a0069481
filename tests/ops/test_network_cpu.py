"""The network's compiled CPU kernels against the float64 reference: values, gradients, tangents, strided rows."""

from __future__ import annotations

import pytest
import torch

from geoflow_fast import ops
from geoflow_fast.ops import extension

SIZES = [(1, 1), (7, 7), (129, 512), (130, 1023)]
sizes = pytest.mark.parametrize(("rows", "width"), SIZES)


def strided(rows: int, width: int) -> torch.Tensor:
    """A matrix whose rows are not adjacent in memory."""
    return torch.randn(rows, width + 3)[:, :width]


def agree(function, inputs, tolerance=2e-5, **options):
    """Values and gradients of float32 inputs on the compiled backend against float64 on the reference."""
    results = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves, backend=backend, **options)
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        used = [x for x in leaves if x is not None]
        results.append([out, *torch.autograd.grad((out * weight).sum(), used)])
    for fast, true in zip(*results):
        torch.testing.assert_close(
            fast.double(), true, rtol=tolerance, atol=tolerance * max(1.0, float(true.detach().abs().max()))
        )


@sizes
@pytest.mark.parametrize("groups", ["one", "some", "rows"])
def test_adaln(rows, width, groups):
    some = next((k for k in range(2, rows) if rows % k == 0), rows)  # groups of several rows, where rows can be cut
    count = {"one": 1, "some": some, "rows": rows}[groups]
    x = strided(rows, width) if groups != "rows" else torch.randn(rows, width) + 3
    agree(ops.adaln, (x, strided(count, width), strided(count, width)))


@sizes
def test_swiglu(rows, width):
    agree(ops.swiglu, (6 * strided(rows, width), strided(rows, width)))
    agree(ops.swiglu, (6 * strided(rows, 2 * width),))


@sizes
def test_flow_loss(rows, width):
    """Per-row losses and gradients; what a given stream holds is never read, not even when it is NaN."""
    direction = torch.arange(rows, dtype=torch.int8) % 3
    fixed = [strided(rows, width) for _ in range(4)]
    for x in fixed[2:]:
        torch.nn.functional.normalize(x, dim=1, out=x)

    def losses(v_image, v_text, *, backend):
        parts = [x.to(v_image.dtype) for x in fixed]
        if backend == "cpu":
            parts[0] = torch.where((direction == 1).unsqueeze(1), torch.nan, parts[0])
        return ops.flow_loss(v_image, v_text, *parts, direction, backend=backend)[1]

    agree(losses, (strided(rows, width), strided(rows, width)))


@sizes
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gate_residual(rows, width, gated, dropout):
    keep = torch.rand(rows, width) < 0.7 if dropout else None
    gate = strided(rows, width) if gated else None
    agree(
        ops.gate_residual,
        (strided(rows, width), gate, strided(rows, width), strided(1, width)),
        keep=keep,
        dropout=dropout,
    )


def test_layer_scale_gradient_sums_each_group():
    agree(
        ops.gate_residual,
        (torch.randn(2, 129, 33), torch.randn(2, 129, 33), torch.randn(2, 129, 33), torch.rand(2, 1, 33)),
    )


def test_extreme_gates_saturate():
    gate = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4]])
    value = torch.ones(1, 5)
    torch.testing.assert_close(ops.swiglu(gate, value, backend="cpu"), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


def test_results_do_not_depend_on_the_number_of_threads():
    residual, value, scale = torch.randn(513, 65), torch.randn(513, 65), torch.rand(65).requires_grad_()
    gradients = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            (gradient,) = torch.autograd.grad(
                ops.gate_residual(residual, None, value, scale, backend="cpu").sum(), scale
            )
            gradients.append(gradient)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_torch_defaults_do_not_matter():
    x = torch.randn(5, 8)
    expected = ops.adaln(x, x[:1], x[:1]), ops.swiglu(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(ops.adaln(x, x[:1], x[:1]), expected[0])
            assert torch.equal(ops.swiglu(x), expected[1])
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_dropped_at_a_share_of_zero_whatever_is_drawn():
    """With this seed the first entry draws the least of all numbers: it is the first to go at any share above zero."""
    for share, dropped in ((0.0, []), (1e-9, [0])):
        keep = extension.loaded().keep_mask((96,), share, 3080601008)
        assert (~keep).nonzero()[:, 0].tolist() == dropped


def test_keep_mask_has_its_rate_follows_the_seed_and_not_the_threads():
    def draw(seed: int, threads: int) -> torch.Tensor:
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        return ops.keep_mask((300, 401), 0.3, backend="cpu")

    before = torch.get_num_threads()
    try:
        one, two, other = draw(1, 1), draw(1, 2), draw(2, 1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)
    # 120,300 independent entries: five standard errors
    assert abs(float(one.float().mean()) - 0.7) < 5 * (0.21 / one.numel()) ** 0.5
    assert abs(float((one == other).float().mean()) - 0.58) < 5 * (0.58 * 0.42 / one.numel()) ** 0.5
    assert abs(float((one[:, 1:] == one[:, :-1]).float().mean()) - 0.58) < 5 * (0.58 * 0.42 / one.numel()) ** 0.5
    assert bool(ops.keep_mask((7,), 0.0).all())
