"""The kernels that serve several solves at once, and those of the probes, in the interpreter against float64."""

from __future__ import annotations

import math

import pytest
import torch

from geoflow_fast.kernels import probes
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.segments import RowTable, Segment, adaln_segments, gate_adaln_segments, swiglu_segments
from geoflow_fast.ops.tangent_probes import hashed_normals, probe_traces_reference, tangent_probes_reference
from tests.gpu_emulated.interpreter.test_kernels import FLOATS, assert_close

EPS = 1e-5


def two_solves(pairs: int):
    """RowTable of both streams of a solve with two tangents and of one without any, and those of a part of them."""
    rows = (3 + 1) * pairs
    whole, leaving, to = [], [], 0
    for stream in range(2):
        here, there = stream * rows, (1 - stream) * rows
        for start, tangents in ((0, 2), (3 * pairs, 0)):
            group = 2 * stream + (start > 0)
            at, other = (here + start, here + start + pairs), (there + start, there + start + pairs)
            whole.append(Segment(pairs, tangents, *at, *other, *at, group, stream))
        # Of the first solve, the second tangent of the image and the first of the text go on.
        first = 1 - stream
        at, other = (here, here + (1 + first) * pairs), (there, there + (1 + first) * pairs)
        leaving.append(Segment(pairs, 1, *at, *other, to, to + pairs, 2 * stream, stream))
        to += 2 * pairs
    table = lambda lines: RowTable(tuple(lines), torch.tensor(lines, dtype=torch.int32))  # noqa: E731
    return 2 * rows, table(whole), table(leaving), to


def both(run, shapes, dtype):
    """What Triton writes into fresh memory of these shapes, and what plain torch does in float64."""
    results = []
    for backend, kind in (("triton", dtype), ("reference", torch.float64)):
        out = [torch.full(shape, math.nan, dtype=kind) for shape in shapes]
        run(backend, kind, *out)
        results.append(out)
    return zip(*results)


@pytest.mark.parametrize(("pairs", "width"), [(1, 16), (7, 33), (9, 64)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [False, True])
def test_adaln_of_segments(pairs, width, dtype, biased):
    torch.manual_seed(0)
    rows, whole, leaving, fewer = two_solves(pairs)
    x, parameters = torch.randn(rows, width).to(dtype), torch.randn(3, 4, width)
    for segments, count in ((whole, rows), (leaving, fewer)):

        def run(backend, kind, y, segments=segments):
            shift, scale, bias = (p.to(kind if backend == "reference" else torch.float32) for p in parameters)
            bias = bias[:2] if biased else None
            adaln_segments(x.to(kind), bias, shift, scale, y, segments, EPS, biased, backend=backend)

        for actual, expected in both(run, [(count, width)], dtype):
            assert_close(actual, expected, dtype)


@pytest.mark.parametrize(("pairs", "width", "heads"), [(1, 16, 1), (7, 48, 3), (9, 64, 4), (5, 32, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_adaln_of_segments(pairs, width, heads, dtype):
    """States are float32 whatever the branch is, and a gate meets the values of the other stream."""
    torch.manual_seed(0)
    rows, whole, leaving, fewer = two_solves(pairs)
    h, branch = torch.randn(rows, width), torch.randn(rows, width * (2 if heads else 1)).to(dtype)
    parameters = torch.randn(3, 4, width)
    for segments, count in ((whole, rows), (leaving, fewer)):
        out, y = torch.full((count, width), math.nan), torch.full((count, width), math.nan, dtype=dtype)
        layer_scale, shift, scale = parameters
        gate_adaln_segments(
            h, branch, layer_scale[:2], shift, scale, out, y, segments, EPS, heads=heads, backend="triton"
        )
        expected = [torch.full((count, width), math.nan, dtype=torch.float64) for _ in range(2)]
        wide = [x.double() for x in (h, branch, layer_scale[:2], shift, scale)]
        gate_adaln_segments(*wide, *expected, segments, EPS, heads=heads, backend="reference")
        assert_close(out, expected[0])
        assert_close(y, expected[1], dtype)


@pytest.mark.parametrize(("pairs", "width"), [(1, 16), (7, 33), (9, 160)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu_of_segments(pairs, width, dtype):
    torch.manual_seed(0)
    rows, whole, _, _ = two_solves(pairs)
    wide = torch.randn(rows, 2 * width).to(dtype)

    def run(backend, kind, inner):
        swiglu_segments(wide.to(kind), inner, whole, backend=backend)

    for actual, expected in both(run, [(rows, width)], dtype):
        assert_close(actual, expected, dtype, scale=2.0)


@pytest.mark.parametrize(("rows", "width", "count"), [(1, 2, 1), (7, 33, 3), (5, 128, 2)])
@pytest.mark.parametrize("kind", ["plain", "aligned", "signs", "flat"])
def test_probes(rows, width, count, kind):
    """The hash gives the same numbers as on the host, whatever number a row has."""
    torch.manual_seed(0)
    x, numbers = sample_uniform(rows, width), torch.arange(rows) * 10**9 + 12345678901
    seen = torch.randn(rows, width) if kind in ("aligned", "flat") else None
    freedom = width if kind == "flat" else width - 1
    arguments = numbers, torch.tensor(2**61 + 12345), 7, 1, count, kind == "signs", seen, freedom
    actual = probes.tangent_probes(x, *arguments)
    expected = tangent_probes_reference(x, *arguments)
    assert_close(actual, expected, scale=50.0)  # float32 sines of torch and the kernel's polynomials
    if kind != "flat":
        assert (actual * x).sum(-1).abs().max() < 1e-4
    if kind == "plain" and width > 2:
        torch.testing.assert_close(actual.norm(dim=-1), torch.full((count, rows), math.sqrt(width - 1)))


def test_the_hash_is_that_of_the_host():
    normals = hashed_normals(torch.tensor([3, 2**40]), 99, 5, 0, 2, 64)
    flat = probes.tangent_probes(
        torch.zeros(2, 64), torch.tensor([3, 2**40]), torch.tensor(99), 5, 0, 2, False, None, 64
    )
    for actual, expected in zip(flat.unbind(), normals.unbind()):
        for a, b in zip(actual, expected):
            torch.testing.assert_close(a / a.norm(), b / b.norm(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("rows", "width", "count"), [(1, 2, 1), (7, 33, 3), (5, 128, 1)])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traces(rows, width, count, learns, before, dtype):
    torch.manual_seed(0)
    x, f = sample_uniform(rows, width), torch.randn(rows, width)
    e, product = torch.randn(count, rows, width), torch.randn(count, rows, width).to(dtype)
    seen = torch.randn(rows, width) if before and learns else None
    freedom, weight = width - 1, -0.1
    sums = [torch.randn(count, rows, dtype=torch.float64)]
    sums.append(sums[0].clone())
    learned = probes.probe_traces(x, f, e, product, sums[0], weight, 1.0 - width, freedom, learns, seen)
    truth = probe_traces_reference(
        x.double(), f.double(), e.double(), product.double(), sums[1], weight, 1.0 - width, freedom, learns,
        None if seen is None else seen.double(),
    )  # fmt: skip
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-12)  # the weight has all its digits
    if learns:
        assert_close(learned, truth, scale=10.0)
