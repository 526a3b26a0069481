"""The network's compiled CPU kernels against the float64 reference: values, gradients, tangents, strided rows."""

from __future__ import annotations

import pytest
import torch

from geoflow_fast import ops
from geoflow_fast.ops import dispatch, native

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


@sizes
def test_tangents(rows, width):
    def double(*tensors):
        return [None if x is None else x.double() for x in tensors]

    x, shift, scale, dx = (
        torch.randn(rows, width),
        torch.randn(1, width),
        torch.randn(1, width),
        torch.randn(2, rows, width),
    )
    gate, value, d_gate, d_value = torch.randn(rows, width), torch.randn(rows, width), torch.randn(2, rows, width), dx
    for function, arguments in (
        (ops.adaln_jvp, (x, dx, shift, scale)),
        (ops.swiglu_jvp, (gate, d_gate, value, d_value)),
        (ops.gate_residual_jvp, (x, dx, gate, d_gate, value, d_value, scale)),
        (ops.gate_residual_jvp, (x, dx, None, None, value, d_value, scale)),
    ):
        fast, true = function(*arguments, backend="cpu"), function(*double(*arguments), backend="reference")
        for a, b in zip(fast, true):
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))


def half_rows(*shape: int) -> torch.Tensor:
    """Rows in bfloat16 that are apart in memory."""
    return torch.randn(*shape[:-1], shape[-1] + 3).bfloat16()[..., : shape[-1]]


def assert_rounded(half: torch.Tensor, exact: torch.Tensor) -> None:
    """`half` is `exact` rounded to bfloat16: off by half of its last bit, and by what float32 loses before."""
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), exact, rtol=2**-8 + 1e-5, atol=1e-5)


@sizes
@pytest.mark.parametrize("tangents", [0, 2])
def test_rows_of_products_may_be_bfloat16(rows, width, tangents):
    """What enters and leaves a product, in the passes with tangents, against float64 on the same numbers."""
    x, dx = strided(rows, width), torch.randn(tangents, rows, width)
    shift, scale = strided(1, width), strided(1, width)
    y, dy = torch.empty(rows, width).bfloat16(), torch.empty(tangents, rows, width).bfloat16()
    dispatch.choose("adaln_jvp", x, "cpu")(x, dx, shift, scale, 1e-5, out=(y, dy))
    truth = ops.adaln_jvp(*(part.double() for part in (x, dx, shift, scale)), eps=1e-5, backend="reference")
    assert_rounded(y, truth[0])
    assert_rounded(dy, truth[1])

    wide, along = half_rows(rows, 2 * width), half_rows(tangents, rows, 2 * width)
    results = ops.swiglu_jvp(wide, along, backend="cpu")
    for half, exact in zip(results, ops.swiglu_jvp(wide.double(), along.double(), backend="reference")):
        assert_rounded(half, exact)

    branch = [half_rows(*shape, rows, width) for shape in ((), (tangents,), (), (tangents,))]
    for gated in (True, False):
        parts = branch if gated else [None, None, *branch[2:]]
        out = torch.empty(rows, width), torch.empty(tangents, rows, width)
        dispatch.choose("gate_residual_jvp", x, "cpu")(x, dx, *parts, scale, out=out)
        exact = ops.gate_residual_jvp(
            x.double(),
            dx.double(),
            *(None if p is None else p.double() for p in parts),
            scale.double(),
            backend="reference",
        )
        for single, true in zip(out, exact):
            torch.testing.assert_close(single.double(), true, rtol=2e-5, atol=2e-5)


def test_bfloat16_rows_keep_what_is_not_a_number():
    wide = torch.tensor([[9.0, torch.nan, 3e38, 1.0]] * 2).bfloat16()
    y, _ = ops.swiglu_jvp(wide, wide.new_empty(0, 2, 4), backend="cpu")
    assert y[:, 0].isinf().all()
    assert y[:, 1].isnan().all()


def test_rows_of_products_have_one_type():
    x, none = torch.ones(2, 2), torch.ones(0, 2, 2)
    run = dispatch.choose("gate_residual_jvp", x, "cpu")
    with pytest.raises(TypeError, match=r"value is torch\.float32, expected torch\.bfloat16"):
        run(x, none, x.bfloat16(), none.bfloat16(), x, none, torch.ones(1, 2))


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
    keep = torch.zeros(96, dtype=torch.bool)
    for share, dropped in ((0.0, []), (1e-9, [0])):
        native.extension().keep_mask(len(keep), share, 3080601008, keep.data_ptr(), 1)
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
