"""The compiled code behind its binding, with shapes and strides drawn at random: equal to the reference, and no access
outside of the tensors (`make test-sanitize` runs these under AddressSanitizer). Wrong shapes never reach it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.ops import extension
from geoflow_fast.ops.adaln import adaln_backward_reference, adaln_reference
from geoflow_fast.ops.flow_loss import flow_loss_backward_reference, flow_loss_reference
from geoflow_fast.ops.gate_residual import (
    gate_residual_backward_reference,
    gate_residual_reference,
)
from geoflow_fast.ops.masked_interpolant import masked_interpolant_reference
from geoflow_fast.ops.swiglu import swiglu_backward_reference, swiglu_reference
from geoflow_fast.ops.tangent_step import tangent_ab2_reference, tangent_stage_reference, tangent_step_reference

pytestmark = pytest.mark.skipif(extension.missing() is not None, reason="needs the compiled extension")
few = settings(max_examples=60, deadline=None, derandomize=True)
sizes = st.integers(1, 70) | st.sampled_from([95, 96, 97, 127, 129, 255, 257])
seeds = st.integers(0, 2**31)
LAYOUTS = ("whole", "gap", "step", "turned", "expanded", "offset")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A tensor equal to `x` [..., R, W] in some arrangement of memory; "expanded" repeats its first row."""
    *lead, rows, width = x.shape
    if layout == "gap":
        return functional.pad(x, (0, 3), value=float("nan"))[..., :width]
    if layout == "step":
        return x.repeat_interleave(2, -2)[..., ::2, :]
    if layout == "turned":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        return x[..., :1, :].expand(*lead, rows, width)
    if layout == "offset":
        return torch.cat((torch.full((1,), float("nan"), dtype=x.dtype), x.reshape(-1)))[1:].view(x.shape)
    return x


layouts = st.sampled_from(LAYOUTS)


def unit(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1).to(dtype)


def close(fast: Tensor, true: Tensor, tolerance: float = 3e-5) -> None:
    size = max(1.0, float(true.abs().max())) if true.numel() else 1.0
    torch.testing.assert_close(fast.double(), true.double(), rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@few
@given(sizes, st.integers(1, 40), sizes, st.integers(1, 40), st.integers(1, 12), layouts, layouts, st.booleans(), seeds)
def test_gallery(precision, queries, draws, items, dim, top_k, first, second, biased, seed):
    if precision == "bfloat16" and extension.missing_bfloat16() is not None:
        pytest.skip(str(extension.missing_bfloat16()))
    check_gallery(precision, queries % 19 + 1, draws, items, dim, top_k, first, second, biased, seed)


def check_gallery(precision, queries, draws, items, dim, top_k, first, second, biased, seed, stored=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    samples = laid_out(unit(generator, queries, draws, dim), first)
    gallery = laid_out(unit(generator, items, dim).to(stored), second)
    bias = torch.randn(2 * items, generator=generator)[::2] if biased else None
    weights = torch.randn(draws, queries, generator=generator).T if biased else None
    biases = {"item_bias": bias, "sample_bias": weights}
    fast = ops.gallery_posterior(samples, gallery, 20.0, top_k, "cpu", **biases, precision=precision)
    wide = {name: None if x is None else x.double() for name, x in biases.items()}
    true = ops.gallery_posterior(samples.double(), gallery.double(), 20.0, top_k, "reference", **wide)
    rounding = 0.01 if precision == "bfloat16" else 0.0
    close(fast.entropy, true.entropy, 1e-4 + rounding)
    close(fast.log_z, true.log_z, 3e-5 + rounding)
    close(fast.top_prob, true.top_prob, 1e-4 + rounding)


@few
@given(sizes, st.integers(2, 60), st.integers(2, 60), layouts, layouts, st.booleans(), st.booleans(), seeds)
def test_interpolant(rows, image_dim, text_dim, first, second, double, drops, seed):
    check_interpolant(rows, image_dim, text_dim, first, second, double, drops, seed)


def check_interpolant(rows, image_dim, text_dim, first, second, double, drops, seed):
    generator, dtype = torch.Generator().manual_seed(seed), torch.float64 if double else torch.float32
    points = [
        laid_out(unit(generator, rows, width, dtype=dtype), layout)
        for layout in (first, second)
        for width in (image_dim, text_dim)
    ]
    t = torch.rand(2 * rows, generator=generator, dtype=dtype)[::2]
    direction = torch.randint(0, 3, (rows, 2), generator=generator).to(torch.int8)[:, 0]
    drop = torch.rand(rows, 3, generator=generator)[:, 1] < 0.3 if drops else None
    fast = ops.masked_interpolant(*points, t, direction, drop=drop, backend="cpu")
    true = masked_interpolant_reference(*(x.double() for x in points), t.double(), direction, drop)
    for got, wanted in zip(fast, true):
        close(got, wanted, 1e-9 if double else 2e-4)


@few
@given(sizes, sizes, st.integers(2, 40), layouts, seeds)
def test_transport(rows, cols, dim, layout, seed):
    check_transport(rows, cols, dim, layout, seed)


def check_transport(rows, cols, dim, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    points = [
        *(laid_out(unit(generator, rows, dim), layout) for _ in range(2)),
        *(unit(generator, cols, dim) for _ in range(2)),
    ]
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    _, f, g, _ = torch.ops.geoflow.ot_solve(*points, 0.2, 1e-3, 300, None, "cpu")
    cost = sum((x.double() @ y.double().T).clamp(-1, 1).acos() for x, y in zip(points[:2], points[2:]))
    plan = ((f[:, None] + g - cost) / 0.2).exp()
    drawn = torch.ops.geoflow.ot_solve(*points, 0.2, 1e-3, 300, uniform, "cpu")[0]
    assert bool(((drawn >= 0) & (drawn < cols)).all())
    tolerance = 1e-2  # of the costs of equal points, whose arc is steep
    assert float((plan.sum(1) - 1 / rows).abs().sum()) < tolerance
    assert float((plan.sum(0) - 1 / cols).abs().sum()) < tolerance
    assert torch.isfinite(f).all()
    assert torch.isfinite(g).all()


@few
@given(st.integers(1, 9), st.integers(1, 70), sizes, layouts, layouts, st.booleans(), seeds)
def test_network_rows(groups, per_group, width, first, second, gated, seed):
    check_network_rows(groups, per_group, width, first, second, gated, seed)


def check_network_rows(groups, per_group, width, first, second, gated, seed):
    """Forward and backward passes of all kernels, on rows of any stride, against float64."""
    generator, rows = torch.Generator().manual_seed(seed), groups * per_group
    x, value, grad = (laid_out(torch.randn(rows, width, generator=generator), first) for _ in range(3))
    shift, scale = (laid_out(torch.randn(groups, width, generator=generator), second) for _ in range(2))
    gate = value if gated else None
    keep = torch.rand(rows, width, generator=generator) < 0.5
    direction = torch.randint(0, 3, (rows,), generator=generator).to(torch.int8)
    losses = torch.randn(rows, generator=generator)
    streams = (x, grad, value, x, grad, value, direction)
    calls = [
        ("adaln", adaln_reference, (x, shift, scale, 1e-3)),
        ("adaln_backward", adaln_backward_reference, (grad, x, scale, 1e-3)),
        ("swiglu", swiglu_reference, (x, value)),
        ("swiglu_backward", swiglu_backward_reference, (grad, x, value)),
        ("gate_residual", gate_residual_reference, (x, gate, grad, scale, keep, 0.5)),
        ("gate_residual_backward", gate_residual_backward_reference, (grad, gate, value, scale, keep, 0.5)),
        ("flow_loss", flow_loss_reference, streams),
        ("flow_loss_backward", flow_loss_backward_reference, (losses, *streams)),
    ]
    for name, true, inputs in calls:
        wide = [y.double() if isinstance(y, Tensor) and y.is_floating_point() else y for y in inputs]
        fast = getattr(torch.ops.geoflow, name)(*inputs, "cpu")
        for got, expected in zip(*((y,) if isinstance(y, Tensor) else y for y in (fast, true(*wide)))):
            assert got.shape == expected.shape
            close(got, expected, 2e-3)


@few
@given(sizes, st.integers(2, 260), st.lists(layouts, min_size=5, max_size=5), st.booleans(), st.booleans(), seeds)
def test_solver_steps(rows, width, arrangements, guided, more, seed):
    check_solver_steps(rows, width, arrangements, guided, more, seed)


def check_solver_steps(rows, width, arrangements, guided, more, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = [unit(generator, rows, width), *torch.randn(4, rows, width, generator=generator)]
    x, v, free, old, total = (laid_out(part, layout) for part, layout in zip(drawn, arrangements))
    free = free if guided else None
    cases = {
        "tangent_step": (tangent_step_reference, (x, v, 0.1, free, 3.0, more)),
        "tangent_stage": (tangent_stage_reference, (total, x, v, 0.1, free, 3.0, old if more else None, 0.2)),
        "tangent_ab2": (tangent_ab2_reference, (x, v, 0.1, free, 3.0, old if more else None, 0.5)),
    }
    for name, (reference, arguments) in cases.items():
        fast = getattr(torch.ops.geoflow, name).default(*arguments, "cpu")
        true = reference(*(part.double() if isinstance(part, Tensor) else part for part in arguments))
        for a, b in [(fast, true)] if isinstance(fast, Tensor) else zip(fast, true, strict=True):
            close(a, b, 1e-6)
