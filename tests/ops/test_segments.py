"""Row operations on the segments of several solves: compiled C++ against plain torch in float64."""

from __future__ import annotations

import math

import pytest
import torch

from geoflow_fast.ops import native
from geoflow_fast.ops.segments import Segment, Segments, adaln_segments, gate_adaln_segments, swiglu_segments

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="the extension is not built")


def both_streams(pairs: int, tangents: int) -> tuple[int, Segments]:
    rows = (1 + tangents) * pairs
    lines = []
    for stream in range(2):
        at, other = stream * rows, (1 - stream) * rows
        lines.append(Segment(pairs, tangents, at, at + pairs, other, other + pairs, at, at + pairs, stream, stream))
    return 2 * rows, Segments(tuple(lines))


@pytest.mark.parametrize(("pairs", "tangents", "width", "heads"), [(1, 0, 16, 2), (7, 2, 48, 3), (129, 1, 64, 4)])
def test_parity(pairs, tangents, width, heads):
    torch.manual_seed(0)
    rows, segments = both_streams(pairs, tangents)
    h, packed, wide = torch.randn(rows, width), torch.randn(rows, 2 * width), torch.randn(rows, 2 * width)
    layer_scale, shift, scale, bias = torch.randn(4, 2, width)

    def run(backend, kind):
        def to(x):
            return x.to(kind)

        def empty():
            return torch.full((rows, width), math.nan, dtype=kind)

        normed, out, y, inner = empty(), empty(), empty(), empty()
        adaln_segments(to(h), to(bias), to(shift), to(scale), normed, segments, 1e-5, True, backend=backend)
        parameters = to(layer_scale), to(shift), to(scale)
        gate_adaln_segments(to(h), to(packed), *parameters, out, y, segments, 1e-5, heads=heads, backend=backend)
        swiglu_segments(to(wide), inner, segments, backend=backend)
        return normed, out, y, inner

    for actual, expected in zip(run("cpu", torch.float32), run("reference", torch.float64)):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_gate_meets_the_values_of_the_other_stream():
    rows, segments = both_streams(3, 0)
    gate, value = torch.randn(rows, 8), torch.randn(rows, 8)
    packed = torch.stack((gate.view(rows, 2, 4), value.view(rows, 2, 4)), dim=2).flatten(1)  # of two heads
    ones, zeros = torch.ones(2, 8), torch.zeros(2, 8)
    out, y = torch.empty(rows, 8), torch.empty(rows, 8)
    gate_adaln_segments(torch.zeros(rows, 8), packed, ones, zeros, zeros, out, y, segments, 1e-5, heads=2)
    torch.testing.assert_close(out, torch.sigmoid(gate) * value.roll(3, 0))
