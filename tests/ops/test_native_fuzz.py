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
from geoflow_fast.ops import native, reference
from geoflow_fast.ops.network_cpu import AdaLN, GateResidual, SwiGLU

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="needs the compiled extension")
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


@few
@given(sizes, st.integers(1, 40), sizes, st.integers(1, 40), st.integers(1, 12), layouts, layouts, st.booleans(), seeds)
def test_gallery(queries, draws, items, dim, top_k, first, second, biased, seed):
    generator = torch.Generator().manual_seed(seed)
    samples = laid_out(unit(generator, queries % 9 + 1, draws, dim), first)
    gallery = laid_out(unit(generator, items, dim), second)
    bias = torch.randn(2 * items, generator=generator)[::2] if biased else None
    fast = ops.gallery_posterior(samples, gallery, 20.0, top_k, "cpu", item_bias=bias)
    wide = None if bias is None else bias.double()
    true = ops.gallery_posterior(samples.double(), gallery.double(), 20.0, top_k, "reference", item_bias=wide)
    close(fast.entropy, true.entropy, 1e-4)
    close(fast.log_z, true.log_z)
    close(fast.top_prob, true.top_prob, 1e-4)


@few
@given(sizes, st.integers(2, 60), st.integers(2, 60), layouts, layouts, st.booleans(), st.booleans(), seeds)
def test_interpolant(rows, image_dim, text_dim, first, second, double, drops, seed):
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
    true = reference.masked_interpolant(*(x.double() for x in points), t.double(), direction, drop)
    for got, wanted in zip(fast, true):
        close(got, wanted, 1e-9 if double else 2e-4)


@few
@given(sizes, sizes, st.integers(2, 40), st.sampled_from(["float32", "float16"]), layouts, seeds)
def test_transport(rows, cols, dim, storage, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = [laid_out(unit(generator, rows, dim), layout) for _ in range(2)]
    data = [unit(generator, cols, dim) for _ in range(2)]
    cost = ops.transport_cost(*noise, *data, backend="cpu")
    close(cost, ops.transport_cost(*(x.double() for x in (*noise, *data)), backend="reference"), 2e-3)
    found = ops.sinkhorn("arc", (*noise, *data), eps=0.2, storage=storage, max_iter=300, backend="cpu")
    plan = ((found.f[:, None] + found.g - cost.double()) / 0.2).exp()
    tolerance = 1e-2 if storage == "float16" else 3e-3
    assert float((plan.sum(1) - 1 / rows).abs().sum()) < tolerance
    assert float((plan.sum(0) - 1 / cols).abs().sum()) < tolerance
    assert torch.isfinite(found.f).all()
    assert torch.isfinite(found.g).all()


@few
@given(st.integers(1, 9), st.integers(1, 70), sizes, layouts, layouts, st.booleans(), seeds)
def test_network_rows(groups, per_group, width, first, second, gated, seed):
    """Forward, backward and tangent passes of all kernels, on rows of any stride, against float64."""
    generator, rows = torch.Generator().manual_seed(seed), groups * per_group
    x, value, grad = (laid_out(torch.randn(rows, width, generator=generator), first) for _ in range(3))
    dx, d_value, d_gate = (laid_out(torch.randn(2, rows, width, generator=generator), second) for _ in range(3))
    shift, scale = (laid_out(torch.randn(groups, width, generator=generator), second) for _ in range(2))
    gate, along = (value, d_gate) if gated else (None, None)
    keep = torch.rand(rows, width, generator=generator) < 0.5
    calls = [
        (AdaLN.forward, reference.adaln, (x, shift, scale, 1e-3)),
        (AdaLN.backward, reference.adaln_backward, (grad, x, scale, 1e-3)),
        (AdaLN.jvp, reference.adaln_jvp, (x, dx, shift, scale, 1e-3)),
        (SwiGLU.forward, reference.swiglu, (x, value)),
        (SwiGLU.backward, reference.swiglu_backward, (grad, x, value)),
        (SwiGLU.jvp, reference.swiglu_jvp, (x, dx, value, d_value)),
        (GateResidual.forward, reference.gate_residual, (x, gate, grad, scale, keep, 0.5)),
        (GateResidual.backward, reference.gate_residual_backward, (grad, gate, value, scale, keep, 0.5)),
        (GateResidual.jvp, reference.gate_residual_jvp, (x, dx, gate, along, value, d_value, scale)),
    ]
    for fast, true, inputs in calls:
        wide = [y.double() if isinstance(y, Tensor) and y.is_floating_point() else y for y in inputs]
        found, wanted = fast(*inputs), true(*wide)
        for got, expected in zip(*((y,) if isinstance(y, Tensor) else y for y in (found, wanted))):
            if expected is not None:
                close(got, expected.view(got.shape), 2e-3)


@few
@given(st.sampled_from(sorted(native._KERNELS)), st.integers(0, 12), st.integers(-1, 1), st.integers(-1, 1))
def test_extents_are_checked_before_a_pointer_crosses(name, which, more_rows, more_columns):
    """A matrix that is too small, or too large, for what the kernel was told is refused."""
    rows, width, per_group, tangents = 12, 5, 4, 2
    sizes = {"R": rows, "T": tangents * rows, "G": rows // per_group, "P": rows // per_group}
    arguments: list[Tensor | float | None] = []
    for place, role in enumerate(native._KERNELS[name]):
        off = (more_rows, more_columns) if place == which % len(native._KERNELS[name]) else (0, 0)
        if role in sizes:
            arguments.append(torch.zeros(sizes[role] + off[0], width + off[1]))
        elif role == "C":
            arguments.append(torch.zeros(rows + off[0], 1 + abs(off[1])))
        elif role in "Mm":
            shape = (rows + off[0], width + off[1]) if role == "M" else (rows + off[0] + off[1],)
            arguments.append(torch.zeros(shape, dtype=torch.bool))
        else:
            arguments.append(tangents if role == "K" else 1.0)
    shapes = [x.shape for x in arguments if isinstance(x, Tensor)]
    right = _all_right(name, shapes, rows, width, per_group, tangents)
    if right:
        native.network_kernel(name, (rows, width, per_group), *arguments)
    else:
        with pytest.raises(ValueError, match=name):
            native.network_kernel(name, (rows, width, per_group), *arguments)


def _all_right(name: str, shapes: list[torch.Size], rows: int, width: int, per_group: int, tangents: int) -> bool:
    wanted = {
        "R": (rows, width),
        "T": (tangents * rows, width),
        "G": (rows // per_group, width),
        "P": (rows // per_group, width),
        "C": (rows, 1),
        "M": (rows, width),
        "m": (rows,),
    }
    return [tuple(shape) for shape in shapes] == [wanted[role] for role in native._KERNELS[name] if role in wanted]
