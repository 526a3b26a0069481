"""Row operations on the segments of several solves: compiled C++ against plain torch in float64, and that against the
derivatives of torch."""

from __future__ import annotations

import math

import pytest
import torch

from geoflow_fast import ops
from geoflow_fast.ops import extension
from geoflow_fast.ops.segments import RowTable, Segment, adaln_segments, gate_adaln_segments, swiglu_segments

CPU = torch.device("cpu")
EPS = 1e-5


def two_solves(pairs: int, tangents: int) -> tuple[int, int, RowTable, RowTable]:
    """RowTable of both streams of a solve with tangents and of one without any, and of a part of the first solve: rows
    that are read, rows that the part writes, all segments, and the part."""
    rows, whole, leaving, to = (2 + tangents) * pairs, [], [], 0
    for stream in range(2):
        here, there = stream * rows, (1 - stream) * rows
        for start, count in ((0, tangents), ((1 + tangents) * pairs, 0)):
            at, other = (here + start, here + start + pairs), (there + start, there + start + pairs)
            whole.append(Segment(pairs, count, *at, *other, *at, 2 * stream + (start > 0), stream))
        last = min(tangents, 1)
        at, other = (here, here + tangents * pairs), (there, there + tangents * pairs)
        leaving.append(Segment(pairs, last, *at, *other, to, to + pairs, 2 * stream, stream))
        to += (1 + last) * pairs
    return 2 * rows, to, RowTable.of(whole, CPU), RowTable.of(leaving, CPU)


@pytest.mark.skipif(extension.missing() is not None, reason="the extension is not built")
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pairs", "tangents", "width", "heads"), [(1, 0, 16, 2), (7, 2, 51, 3), (129, 1, 64, 4), (5, 3, 1, 0)]
)
def test_compiled_code_agrees_with_float64(pairs, tangents, width, heads, products):
    """States are float32 whatever the products are; what is rounded to bfloat16 is off by half of its last bit."""
    torch.manual_seed(0)
    rows, fewer, whole, leaving = two_solves(pairs, tangents)
    h, parameters = torch.randn(rows, width), torch.randn(4, 4, width)
    encoded = torch.randn(rows, width).to(products)
    branch, wide = (torch.randn(rows, n * width).to(products) for n in (2 if heads else 1, 2))

    def run(backend, to, narrow):
        layer_scale, shift, scale, bias = (to(x) for x in parameters)
        results = []
        for segments, count in ((whole, rows), (leaving, fewer)):
            states, normed, out, y, inner = (
                torch.full((count, width), math.nan, dtype=kind)
                for kind in (to(h).dtype, narrow, to(h).dtype, narrow, narrow)
            )
            adaln_segments(to(encoded), bias[:2], shift, scale, states, segments, EPS, True, backend=backend)
            adaln_segments(to(h), None, shift, scale, normed, segments, EPS, backend=backend)
            gate_adaln_segments(
                to(h), to(branch), layer_scale[:2], shift, scale, out, y, segments, EPS, heads=heads, backend=backend
            )
            swiglu_segments(to(wide), inner, segments, backend=backend)
            results += [states, normed, out, y, inner]
        return results

    fast = run("cpu", lambda x: x, products)
    for actual, expected in zip(fast, run("reference", torch.Tensor.double, torch.float64)):
        rounding = 2**-8 if actual.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5 + rounding, atol=2e-5)


@pytest.mark.parametrize("heads", [0, 2])
def test_tangents_are_derivatives(heads):
    """Plain torch against `torch.func.jvp` of the operations on points."""
    torch.manual_seed(0)
    pairs, tangents, width = 3, 2, 6
    rows, _, segments, _ = two_solves(pairs, tangents)

    def points(x):
        return torch.stack([x.narrow(0, line.point, pairs) for line in segments.lines[::2]])

    def along(x, k):
        return torch.stack([x.narrow(0, line.tangent + k * pairs, pairs) for line in segments.lines[::2]])

    h, wide = torch.randn(rows, width).double(), torch.randn(rows, 2 * width).double()
    branch = torch.randn(rows, 2 * width if heads else width).double()
    layer_scale, shift, scale = torch.randn(3, 4, width).double()
    out, y, inner = (torch.full((rows, width), math.nan).double() for _ in range(3))
    gate_adaln_segments(
        h, branch, layer_scale[:2], shift, scale, out, y, segments, EPS, heads=heads, backend="reference"
    )
    swiglu_segments(wide, inner, segments, backend="reference")

    def plain(h, branch, wide):
        gate, value = None, branch
        if heads:
            gate, value = branch.unflatten(-1, (heads, 2, -1)).unbind(-2)
            gate, value = gate.flatten(-2), value.flatten(-2).flip(0)
        after = ops.gate_residual(h, gate, value, layer_scale[:2].unsqueeze(1))
        normed = ops.adaln(after, shift[::2].unsqueeze(1), scale[::2].unsqueeze(1), eps=EPS)
        return after, normed, ops.swiglu(wide)

    inputs, outputs = (h, branch, wide), (out, y, inner)
    for k in range(tangents):
        expected, slopes = torch.func.jvp(plain, tuple(map(points, inputs)), tuple(along(x, k) for x in inputs))
        for actual, point, slope in zip(outputs, expected, slopes):
            torch.testing.assert_close(points(actual), point)
            torch.testing.assert_close(along(actual, k), slope)


def test_bfloat16_rows_keep_what_is_not_a_number():
    wide = torch.tensor([[9.0, torch.nan, 3e38, 1.0]] * 2).bfloat16()
    inner = torch.empty(2, 2).bfloat16()
    swiglu_segments(wide, inner, RowTable.of([Segment(2, 0, 0, 2, 0, 2, 0, 2, 0, 0)], CPU), backend="cpu")
    assert inner[:, 0].isinf().all()
    assert inner[:, 1].isnan().all()
