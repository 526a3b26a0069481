"""Every Triton kernel in the interpreter against float64, and every injected fault against the same checks."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from geoflow_fast import geometry, ops
from geoflow_fast.kernels import gallery, geodesic, network
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import triton_kernels
from geoflow_fast.ops.adaln import adaln_backward_reference, adaln_reference
from geoflow_fast.ops.counter_noise import counter_noise_reference
from geoflow_fast.ops.cross_residual import cross_residual_backward_reference, cross_residual_reference
from geoflow_fast.ops.flow_loss import flow_loss_backward_reference, flow_loss_reference
from geoflow_fast.ops.gallery_posterior import gallery_posterior_reference, gallery_scores_reference
from geoflow_fast.ops.gate_residual import (
    gate_residual_backward_reference,
    gate_residual_reference,
)
from geoflow_fast.ops.masked_interpolant import masked_interpolant_reference
from geoflow_fast.ops.swiglu import swiglu_backward_reference, swiglu_reference
from geoflow_fast.ops.tangent_step import tangent_ab2_reference, tangent_stage_reference, tangent_step_reference
from geoflow_fast.ops.unit_rows import unit_rows_reference

KERNELS = SimpleNamespace(geodesic=geodesic, gallery=gallery, network=network)
EPS = 1e-6
ROUNDING = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FLOATS = tuple(ROUNDING)


def assert_close(actual, expected, dtype=torch.float32, scale=1.0):
    """Equal up to rounding in `dtype`, in proportion to the largest expected value."""
    assert actual.shape == expected.shape
    bound = scale * ROUNDING[dtype] * max(1.0, expected.abs().max().item())
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= bound, f"error {error:.3g} above {bound:.3g}"  # a NaN fails too


def rows_with_gaps(rows, width, dtype):
    """[rows, width] in a wider buffer, so that rows are apart in memory."""
    return torch.randn(rows, width + 3)[:, :width].to(dtype)


# ---- rows of training batches ----


@pytest.mark.parametrize("width", [2, 7, 129, 1023])
@pytest.mark.parametrize("unit", [True, False])
def test_counter_noise_is_that_of_the_reference(width, unit):
    numbers = torch.tensor([0, 1, 5, 2**32 - 1, 77])
    for seed, step, stream in ((1, 1, 0), (2**63 - 25, 2**31 + 5, 1), (-(2**63), 16, 1)):
        noise = geodesic.counter_noise(numbers, width, seed, step, stream, unit)
        assert_close(noise, counter_noise_reference(numbers, width, seed, step, stream, unit))


@pytest.mark.parametrize("width", [2, 7, 129, 1023])
@pytest.mark.parametrize("dtype", FLOATS)
def test_unit_rows_are_those_of_the_reference(width, dtype):
    table, index = 3 * rows_with_gaps(9, width, dtype), torch.tensor([8, 0, 0, 3, 5])
    assert_close(geodesic.unit_rows(table, index), unit_rows_reference(table.double(), index))


def test_unit_rows_of_any_scale():
    """Rows whose squares would overflow or vanish; powers of two change no bit."""
    table, index = torch.randn(9, 100), torch.arange(9)
    expected = geodesic.unit_rows(table, index)
    for power in (-100, -60, 60, 100):
        assert torch.equal(geodesic.unit_rows(table * 2.0**power, index), expected), power
    edges = torch.zeros(3, 100)
    edges[0, 0], edges[1, :2], edges[2, 7] = 2.0**-149, 3.4e38, -1e38
    assert_close(geodesic.unit_rows(edges, index[:3]), unit_rows_reference(edges.double(), index[:3]))


def test_adaln_in_bfloat16_is_that_of_float32_rounded():
    x, shift, scale = (torch.randn(7, 129) for _ in range(3))
    half = network.adaln_half(x, shift, scale, EPS)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, network.adaln(x, shift, scale, EPS).bfloat16())


@pytest.mark.parametrize(("rows", "heads", "head_width"), [(1, 1, 2), (7, 3, 5), (33, 2, 64), (17, 4, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropped", [False, True])
def test_cross_residual_is_that_of_the_reference(rows, heads, head_width, dtype, dropped):
    torch.manual_seed(0)
    width = heads * head_width
    residual, grad = rows_with_gaps(2 * rows, width, torch.float32), rows_with_gaps(2 * rows, width, torch.float32)
    products, scale = torch.randn(2 * heads, rows, 2 * head_width).to(dtype), torch.randn(2, width)
    keep = torch.rand(2 * rows, width) < 0.7 if dropped else None
    y = network.cross_residual(residual, products, scale, keep, 0.3)
    exact = residual.double(), products.double(), scale.double(), keep, 0.3
    assert_close(y, cross_residual_reference(*exact))
    d_products, d_scale = network.cross_residual_backward(grad, products, scale, keep, 0.3)
    expected = cross_residual_backward_reference(grad.double(), *exact[1:])
    assert_close(d_products, expected[0], dtype)
    assert_close(d_scale, expected[1], scale=rows)


# ---- sphere ----


def pairs_on_sphere(rows, width):
    """Noise and data; among the first rows: equal, nearly equal, antipodal and nearly antipodal pairs."""
    noise, data = (sample_uniform(rows, width) for _ in range(2))
    noise[2:3] = torch.eye(1, width)  # its antipode leaves no trace of a direction
    tiny = 1e-4 * torch.randn(rows, width)
    for row, pair in enumerate((noise, noise + tiny, -noise, -noise + tiny)):
        if row < rows:
            data[row] = geometry.normalize(pair)[row]
    return noise, data


def check_interpolant(kernels, rows=33, widths=(129, 65), dropout=True):
    (image0, image1), (text0, text1) = (pairs_on_sphere(rows, width) for width in widths)
    t = torch.linspace(0, 1, rows)
    direction = torch.arange(rows, dtype=torch.int8) % 3
    direction[:4] = 0
    drop = torch.arange(rows) % 2 == 0 if dropout else None
    out = [torch.full((rows, width), math.nan) for width in (*widths, *widths)]
    bad = kernels.geodesic.masked_interpolant(
        (image0, text0), (image1, text1), t, direction, drop, (out[0], out[1]), (out[2], out[3]), 1e-3
    )
    assert bad == -1
    double = (x.double() for x in (image0, text0, image1, text1, t))
    expected = masked_interpolant_reference(*double, direction, drop)
    # Rows 2 and 3 are near the antipode, where rounding of the input turns the path: there only its laws are checked.
    usual = [row for row in range(rows) if row not in (2, 3)]
    for actual, truth in zip(out, expected):
        assert_close(actual[usual], truth[usual])
    for point, velocity, start, end in ((out[0], out[2], image0, image1), (out[1], out[3], text0, text1)):
        assert_close(point.norm(dim=1), torch.ones(rows))
        assert_close((point * velocity).sum(1), torch.zeros(rows))
        if rows > 3:
            assert_close(velocity[2:4].norm(dim=1), geometry.angle(start, end)[2:4])


def check_bad_row(kernels):
    for stream, poison in ((0, math.nan), (1, 2.0)):
        noise, data = ([sample_uniform(9, d) for d in (17, 5)] for _ in range(2))
        direction = torch.zeros(9, dtype=torch.int8)
        noise[stream][6, 0] = poison
        out = [[torch.empty(9, d) for d in (17, 5)] for _ in range(2)]
        arguments = (noise, data, torch.rand(9), direction, None, *out, 1e-3)
        assert kernels.geodesic.masked_interpolant(*arguments) == 6
        direction[6] = stream + 1  # given and not dropped: its noise is not read
        assert kernels.geodesic.masked_interpolant(*arguments) == -1


def check_given_noise(kernels):
    """A dropped row shows its noise: noise off the sphere is bad there too."""
    noise, data = ((sample_uniform(2, 3), sample_uniform(2, 3)) for _ in range(2))
    noise[0][1] *= 3
    direction, drop = torch.ones(2, dtype=torch.int8), torch.ones(2, dtype=torch.bool)
    out = [tuple(torch.empty(2, 3) for _ in range(2)) for _ in range(2)]
    assert kernels.geodesic.masked_interpolant(noise, data, torch.rand(2), direction, drop, *out, 1e-3) == 1


def check_tangent_step(kernels, rows=33, width=129):
    x = rows_with_gaps(rows, width, torch.float32)
    x /= x.norm(dim=1, keepdim=True)
    v, free = rows_with_gaps(rows, width, torch.float32), rows_with_gaps(rows, width, torch.float32)
    for h, guidance, unconditional, renormalise in (
        (0.05, 0.0, None, False),
        (-0.02, 3.0, free, False),
        (0.05, 3.0, free, True),
        (0.9, 0.0, None, False),  # more than a turn
        (0.0, 0.0, None, False),
    ):
        y = kernels.geodesic.tangent_step(x, v, h, unconditional, guidance, renormalise)
        truth = tangent_step_reference(
            x.double(), v.double(), h, None if unconditional is None else free.double(), guidance, renormalise
        )
        assert_close(y, truth)
        assert_close(y.norm(dim=1), torch.ones(rows), scale=0.1)


def check_tangent_stage(kernels, rows=33, width=129):
    at = sample_uniform(rows, width)
    x, v, free, total = (rows_with_gaps(rows, width, torch.float32) for _ in range(4))
    for unconditional, before in ((None, None), (free, None), (None, total), (free, total)):
        results = kernels.geodesic.tangent_stage(x, at, v, 0.3, unconditional, 3.0, before, 0.2)
        truths = tangent_stage_reference(*in_double(x, at, v, 0.3, unconditional, 3.0, before, 0.2))
        for result, truth in zip(results, truths, strict=True):
            assert_close(result, truth) if truth.numel() else len(result) == 0


def check_tangent_ab2(kernels, rows=33, width=129):
    x = sample_uniform(rows, width)
    v, free, old = (rows_with_gaps(rows, width, torch.float32) for _ in range(3))
    for h, unconditional, carried in (
        (0.05, None, None),
        (-0.02, free, old),
        (0.05, free, None),
        (0.4, None, old),  # more than a turn
    ):
        results = kernels.geodesic.tangent_ab2(x, v, h, unconditional, 3.0, carried, 0.7)
        truths = tangent_ab2_reference(*in_double(x, v, h, unconditional, 3.0, carried, 0.7))
        for result, truth in zip(results, truths, strict=True):
            assert_close(result, truth)


def in_double(*arguments):
    return [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]


@pytest.mark.parametrize(
    ("rows", "widths", "dropout"), [(1, (2, 3), True), (7, (1023, 7), False), (33, (129, 65), True)]
)
def test_interpolant(rows, widths, dropout):
    check_interpolant(KERNELS, rows, widths, dropout)


def test_interpolant_names_the_first_bad_row():
    check_bad_row(KERNELS)


def test_interpolant_checks_the_noise_that_a_dropped_row_shows():
    check_given_noise(KERNELS)


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 1023), (33, 129)])
def test_tangent_step(rows, width):
    check_tangent_step(KERNELS, rows, width)
    check_tangent_stage(KERNELS, rows, width)
    check_tangent_ab2(KERNELS, rows, width)


# ---- gallery ----


def world(queries, draws, items, width, dtype):
    """Samples around one point per query and a gallery with a few items near each: entropies of 0.3 to 3 nats."""
    centre = sample_uniform(queries, width, dtype=torch.float64)
    noise = sample_uniform(queries * draws, width, dtype=torch.float64).view(queries, draws, width)
    samples = geometry.normalize(centre.unsqueeze(1) + 0.5 * noise)
    gallery = sample_uniform(items, width, dtype=torch.float64)
    near = torch.arange(items) % max(1, items // (4 * queries)) == 0
    owners = torch.arange(int(near.sum())) % queries
    gallery[near] = geometry.normalize(gallery[near] + 1.5 * centre[owners])
    return samples.to(dtype), gallery.to(dtype)


def check_gallery(
    kernels,
    config="slim",
    queries=3,
    draws=11,
    items=280,  # 253 is near a query: shares that overlap by a few items show
    width=33,
    kappa=20.0,
    top_k=3,
    shares=2,
    bias=False,
    dtype=torch.float32,
):
    samples, rows = world(queries, draws, items, width, dtype)
    item_bias = torch.randn(items) if bias else None
    sample_bias = torch.randn(queries, draws) if bias else None
    if bias:
        sample_bias[:, 1::4] = -torch.inf
    scores = torch.full((queries, items), math.nan)
    statistics = kernels.gallery.gallery_statistics(
        samples, rows, kappa, top_k, item_bias, sample_bias, scores=scores, config=config, shares=shares
    )
    truth = gallery_posterior_reference(
        samples.double(), rows.double(), kappa, top_k, item_bias, sample_bias, "float32"
    )
    statistics = (*(x.double() for x in statistics[:4]), statistics[4].long())
    post, expected = (ops.GalleryStatistics(*s, top_k).posterior(torch.float64) for s in (statistics, truth))
    if 1 < kappa < 100 and items > 10:
        assert (expected.entropy > 0.3).all()
        assert (expected.entropy < 3.5).all()
    scale = max(1.0, kappa / 20)  # scores are kappa times a product rounded in float32
    if dtype == torch.float32 and not kernels.gallery.CONFIGS[config].exact:
        # Two bfloat16 parts of each factor: a product of coordinates is known to 2^-17, their sum over d to that by
        # the root of d.
        scale += kappa * 2**-16 / math.sqrt(width) / ROUNDING[torch.float32]
    truth_scores = gallery_scores_reference(samples.double(), rows.double(), kappa, item_bias, sample_bias)
    assert_close(scores, truth_scores, scale=scale)
    assert_close(post.entropy, expected.entropy, scale=scale)
    assert_close(post.log_z, expected.log_z, scale=scale)
    assert_close(post.top_prob, expected.top_prob, scale=scale)
    assert_close(statistics[3], truth[3], scale=scale)
    gap = truth[3][:, :-1] - truth[3][:, 1:]
    if (gap > 1e-3 * scale).all():  # the order is not decided by rounding
        assert torch.equal(post.top_index, expected.top_index)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(name, torch.float32) for name in gallery.CONFIGS] + [(name, torch.bfloat16) for name in ("few", "wide")],
)
def test_gallery_with_every_configuration(config, dtype):
    check_gallery(KERNELS, config, dtype=dtype)


def check_looks_at_lists(kernels):
    """The best come last, or first: lists are looked at in all three tiles, or in the first alone. Every look takes the
    best remaining item of a tile with its number, as nothing else in the kernel does."""
    samples = torch.eye(1, 16).view(1, 1, 16)
    cosine = torch.linspace(-0.9, 0.9, 300)
    ascending = torch.zeros(300, 16)
    ascending[:, 0], ascending[:, 1] = cosine, (1 - cosine**2).sqrt()
    looked = interpreter.ReduceOps.min_max
    for rows, best, looks in ((ascending, range(299, 289, -1), 30), (ascending.flip(0), range(10), 10)):
        with mock.patch.object(interpreter.ReduceOps, "min_max", autospec=True, side_effect=looked) as reductions:
            *_, index = kernels.gallery.gallery_statistics(samples, rows, 5.0, 10, None, None, config="few", shares=1)
        assert index.tolist() == [list(best)]
        assert sum(call.kwargs["idx_reduce_op"] is not None for call in reductions.call_args_list) == looks


def test_gallery_finds_better_items_in_every_tile():
    check_looks_at_lists(KERNELS)


def check_rounds_of_merging(kernels):
    """More lists than one program holds are merged in rounds: seven of five items each, two at a time."""
    with mock.patch.object(kernels.gallery, "MAX_LISTED", 12):
        check_gallery(kernels, "few", items=800, top_k=5, shares=7)


def test_gallery_merges_long_lists_in_rounds():
    check_rounds_of_merging(KERNELS)


@pytest.mark.parametrize("top_k", [1, 10, 64])
def test_gallery_fills_a_gpu_however_long_lists_are(top_k):
    """One query over 100,000 items, on a GPU with 132 multiprocessors."""
    launches = []
    with (
        mock.patch.object(gallery, "launch", lambda kernel, grid, *_, **__: launches.append((kernel, grid))),
        mock.patch.object(gallery, "processor_count", return_value=132),
    ):
        gallery.gallery_statistics(torch.empty(1, 8, 16), torch.empty(100_000, 16), 5.0, top_k, None, None)
    tiles = [grid for kernel, grid in launches if "tile" in kernel.fn.__name__]
    assert math.prod(tiles[0]) > 132
    assert launches[-1][1] == (1, 1)  # one list at the end


@pytest.mark.parametrize(("queries", "items", "width", "top_k"), [(1, 1, 2, 1), (3, 300, 33, 7), (20, 200, 16, 100)])
def test_gallery_search_is_that_of_plain_torch(queries, items, width, top_k):
    """Inner products of rows of any norm; of equal items the first comes first."""
    x, rows = torch.randn(queries, width), torch.randn(items, width)
    rows[items // 2] = rows[0]
    score, index = ops.gallery_search(x, rows, top_k, "triton")
    wanted = ops.gallery_search(x.double(), rows.double(), top_k, "reference")
    assert torch.equal(index, wanted[1])
    assert_close(score, wanted[0], scale=3.0)
    assert ops.gallery_search(x[:0], rows, top_k, "triton")[1].shape == (0, top_k)
    half = ops.gallery_search(x, rows.half(), 1, "triton")[0]
    assert_close(half, ops.gallery_search(x, rows.half(), 1, "reference")[0], scale=3.0)


@pytest.mark.parametrize("cost", [0, 10**9])
def test_gallery_of_the_allowed_items(cost, monkeypatch):
    """From copies of their rows, and from the scores of all items."""
    monkeypatch.setattr("geoflow_fast.ops.allowed.COPY_COST", cost)
    samples, rows = world(5, 3, 70, 24, torch.float32)
    each = torch.rand(5, 70, generator=torch.Generator().manual_seed(0)) < 0.3
    for mask in (each, each[0]):
        post, wanted = (
            ops.gallery_posterior(samples, rows, 12.0, top_k=30, backend=backend, allowed=mask)
            for backend in ("triton", "reference")
        )
        assert_close(post.entropy, wanted.entropy, scale=4.0)
        assert torch.equal(post.top_index, wanted.top_index)
        found = ops.gallery_search(samples[:, 0], rows, 30, "triton", allowed=mask)
        assert torch.equal(found[1], ops.gallery_search(samples[:, 0], rows, 30, "reference", allowed=mask)[1])


def test_gallery_lists_longer_than_the_kernel_keeps():
    samples, rows = world(3, 5, 200, 24, torch.float32)
    rows[150] = rows[3]  # equal items stay in order
    post, truth = (
        ops.gallery_posterior(samples, rows, 12.0, top_k=100, backend=backend) for backend in ("triton", "reference")
    )
    assert_close(post.entropy, truth.entropy, scale=20.0)
    assert_close(post.top_prob, truth.top_prob, scale=20.0)
    where = [index.index(3) for index in post.top_index.tolist() if 3 in index]
    assert all(index[at + 1] == 150 for at, index in zip(where, post.top_index.tolist()))


def test_gallery_in_bfloat16_scores_the_best_items_again():
    samples, rows = world(3, 5, 300, 160, torch.float32)
    post, truth = (
        ops.gallery_posterior(samples, rows, 20.0, top_k=3, backend=backend, precision="bfloat16")
        for backend in ("triton", "reference")
    )
    exact = ops.gallery_posterior(samples.double(), rows.double(), 20.0, top_k=3)
    assert torch.equal(post.top_index, exact.top_index)
    assert_close(post.entropy, truth.entropy, scale=20.0)
    assert_close(post.top_prob, exact.top_prob, scale=3000.0)  # 0.01, which is what the other items' rounding may do
    assert not torch.equal(post.entropy, exact.entropy.float())


def test_item_marginals_in_the_kernels():
    samples, rows = world(4, 5, 150, 24, torch.float32)
    scores = gallery.gallery_scores(samples, rows, 12.0, None, None)
    assert_close(scores, gallery_scores_reference(samples.double(), rows.double(), 12.0, None, None), scale=40.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kappa", [0.0, 1e4, 1e5])
def test_gallery_at_the_ends_of_kappa(kappa, bias):
    check_gallery(KERNELS, "exact" if kappa > gallery.EXACT_KAPPA else "few", kappa=kappa, items=70, bias=bias)


@pytest.mark.parametrize(
    ("queries", "draws", "items", "width", "top_k", "shares"),
    [(1, 1, 1, 2, 1, 1), (17, 9, 65, 16, 2, 1), (2, 8, 129, 17, 5, 3), (1, 50, 200, 7, 1, 2)],
)
def test_gallery_of_ragged_sizes(queries, draws, items, width, top_k, shares):
    check_gallery(KERNELS, "slim", queries, draws, items, width, 12.0, top_k, shares)


@pytest.mark.parametrize(("config", "queries", "dtype"), [("few", 3, torch.bfloat16), ("some", 17, torch.float32)])
def test_gallery_with_biases_of_items_and_samples(config, queries, dtype):
    check_gallery(KERNELS, config, queries, bias=True, dtype=dtype)


def test_gallery_keeps_equal_items_in_order():
    samples = sample_uniform(2, 5).view(1, 2, 5)
    rows = sample_uniform(2, 5).repeat(60, 1)
    *_, score, index = gallery.gallery_statistics(samples, rows, 3.0, 4, None, None, config="few", shares=2)
    best = int((rows[:2] @ samples[0].T).logsumexp(1).argmax())
    assert index.tolist() == [[best, best + 2, best + 4, best + 6]]
    assert (score == score[0, 0]).all()


@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (7, 129), (3, 1023), (2, 9001)])
def test_gallery_rows_are_split_into_two_parts_of_bfloat16(rows, width, low_first):
    """Rows wider than a tile too; what is past the end is zero."""
    x = torch.randn(rows, width)
    parts = gallery.split_rows(x, low_first)
    high = x.to(torch.bfloat16)
    low = (x - high.float()).to(torch.bfloat16)
    expected = (low, high) if low_first else (high, low)
    for part, values in zip(parts.unbind(1), expected):
        assert torch.equal(part[:, :width], values)
        assert not part[:, width:].any()


def check_ties(kernels):
    """Better items come later and push some of several tied ones out of the list: the last of them must go."""
    level = torch.tensor([0.1, 0.5, 0.5, 0.5, 0.2, 0.5, 0.7, 0.5, 0.7, 0.9]).repeat_interleave(13)
    rows = torch.zeros(len(level), 16)
    rows[:, 0], rows[:, 1] = level, (1 - level**2).sqrt()
    order = sorted(range(len(level)), key=lambda k: (-float(level[k]), k))
    for top_k in (1, 5, 16, 30):
        for shares in (1, 3):
            *_, index = kernels.gallery.gallery_statistics(
                torch.eye(1, 16).view(1, 1, 16), rows, 5.0, top_k, None, None, config="few", shares=shares
            )
            assert index.tolist() == [order[:top_k]]


def test_gallery_lists_lose_the_last_of_tied_items():
    check_ties(KERNELS)


def check_rows_of_norm_nearly_one(kernels):
    """Rows that lean on all axes alike, of norms within the tolerance, and their antipodes."""
    for width in (2, 3, 16):
        for scale in (1.0, 1 - 9e-4, 1 + 9e-4):
            start = scale * torch.where(torch.arange(width) % 2 == 1, -1.0, 1.0) / math.sqrt(width)
            noise = start.expand(5, -1).contiguous()
            t, out = torch.linspace(0, 1, 5), [torch.empty(5, width) for _ in range(4)]
            bad = kernels.geodesic.masked_interpolant(
                (noise, noise), (-noise, -noise), t, torch.zeros(5, dtype=torch.int8), None, out[:2], out[2:], 1e-3
            )
            assert bad == -1
            along = out[0] @ start / start.norm()
            assert_close(along, scale * torch.cos(math.pi * t))
            assert_close(out[2] @ start / start.norm(), -scale * math.pi * torch.sin(math.pi * t))


def test_interpolant_of_rows_of_norm_nearly_one():
    check_rows_of_norm_nearly_one(KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("config", gallery.CONFIGS)
@pytest.mark.parametrize(
    ("queries", "draws", "items", "width", "kappa"),
    [(5, 50, 1000, 65, 20.0), (4, 7, 1000, 129, 1e4), (20, 3, 7, 40, 5.0)],
)
def test_gallery_more_sizes(config, queries, draws, items, width, kappa):
    if kappa <= gallery.EXACT_KAPPA or gallery.CONFIGS[config].exact:
        check_gallery(KERNELS, config, queries, draws, items, width, kappa, top_k=5, shares=4)


# ---- network ----


def check_adaln(kernels, rows=12, width=129, groups=3, dtype=torch.float32):
    x, grad = rows_with_gaps(rows, width, dtype), rows_with_gaps(rows, width, dtype)
    shift, scale = (torch.randn(groups, width).to(dtype) for _ in range(2))
    full = [y.double() for y in (x, grad, shift, scale)]
    truth = (
        adaln_reference(full[0], full[2], full[3], EPS),
        *adaln_backward_reference(full[1], full[0], full[3], EPS),
    )
    actual = (
        kernels.network.adaln(x, shift, scale, EPS),
        *kernels.network.adaln_backward(grad, x, scale, EPS),
    )
    for a, b in zip(actual, truth):
        assert a.dtype == dtype
        assert a.shape == b.shape
        if b.numel():  # an empty tensor stands for the gradient of the shift where that is `grad`
            assert_close(a, b, dtype)


def check_gate_residual(kernels, rows=12, width=129, groups=3, dtype=torch.float32, gated=True, dropout=0.25):
    residual, value, grad = (rows_with_gaps(rows, width, dtype) for _ in range(3))
    gate = rows_with_gaps(rows, width, dtype) if gated else None
    keep = torch.rand(rows, width) >= dropout if dropout else None
    layer_scale = torch.randn(groups, width).to(dtype)

    def up(x):
        return None if x is None else x.double()

    forward = (residual, gate, value, layer_scale)
    backward = (grad, gate, value, layer_scale)
    actual = (
        kernels.network.gate_residual(*forward, keep, dropout),
        *kernels.network.gate_residual_backward(*backward, keep, dropout),
    )
    truth = (
        gate_residual_reference(*map(up, forward), keep, dropout),
        *gate_residual_backward_reference(*map(up, backward), keep, dropout),
    )
    for a, b in zip(actual, truth):
        assert a.shape == b.shape
        if b.numel():  # an empty tensor stands for the gradient of an absent gate
            assert_close(a, b, dtype)


def check_swiglu(kernels, rows=12, width=130, dtype=torch.float32):
    gate, value, packed = (torch.randn(rows, width).to(dtype) for _ in range(3))
    grad, half = rows_with_gaps(rows, width, dtype), rows_with_gaps(rows, width // 2, dtype)

    def outcomes(swiglu, swiglu_backward, to):
        return (
            swiglu(to(gate), to(value)),
            *swiglu_backward(to(grad), to(gate), to(value)),
            swiglu(to(packed), None),
            swiglu_backward(to(half), to(packed), None)[0],
        )

    mine = kernels.network
    actual = outcomes(mine.swiglu, mine.swiglu_backward, lambda x: x)
    truth = outcomes(swiglu_reference, swiglu_backward_reference, torch.Tensor.double)
    for a, b in zip(actual, truth):
        assert_close(a, b, dtype)


def check_flow_loss(kernels, rows=12, widths=(129, 33), dtype=torch.float32):
    velocity, target, point = (tuple(torch.randn(rows, d).to(dtype) for d in widths) for _ in range(3))
    point = tuple((x.float() / x.float().norm(dim=1, keepdim=True)).to(dtype) for x in point)
    direction, grad = torch.arange(rows, dtype=torch.int8) % 3, torch.randn(rows)
    streams = (*velocity, *target, *point)
    full = [x.double() for x in streams]
    truth = (
        flow_loss_reference(*full, direction),
        *flow_loss_backward_reference(grad.double(), *full, direction),
    )
    actual = (
        kernels.network.flow_loss(*streams, direction),
        *kernels.network.flow_loss_backward(grad, *streams, direction),
    )
    assert_close(actual[0], truth[0])
    for a, b in zip(actual[1:], truth[1:]):
        assert_close(a, b, dtype)


SIZES = [(1, 1, 1), (7, 1023, 1), (12, 129, 12), (12, 129, 3)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width", "groups"), SIZES)
def test_adaln(rows, width, groups, dtype):
    check_adaln(KERNELS, rows, width, groups, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width", "groups"), SIZES)
@pytest.mark.parametrize(("gated", "dropout"), [(True, 0.25), (False, 0.0)])
def test_gate_residual(rows, width, groups, dtype, gated, dropout):
    check_gate_residual(KERNELS, rows, width, groups, dtype, gated, dropout)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 1024), (33, 130)])
def test_swiglu(rows, width, dtype):
    check_swiglu(KERNELS, rows, width, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "widths"), [(1, (2, 3)), (7, (1023, 7)), (33, (65, 129))])
def test_flow_loss(rows, widths, dtype):
    check_flow_loss(KERNELS, rows, widths, dtype)


# ---- operations reach the kernels ----


def test_operations_serve_cpu_tensors_with_triton_by_name():
    x = torch.randn(6, 20, requires_grad=True)
    scale = torch.randn(20, requires_grad=True)
    leaves = (x, scale)

    def network_pass(backend):
        y = ops.adaln(x, scale, scale, backend=backend)
        y = ops.gate_residual(x, y, ops.swiglu(y, y, backend=backend), scale, backend=backend)
        loss, _ = ops.flow_loss(y, y, x, x, x, x, torch.zeros(6, dtype=torch.int8), backend=backend)
        return loss, *torch.autograd.grad(loss, leaves)

    for a, b in zip(network_pass("triton"), network_pass("reference")):
        assert_close(a, b)
    points = sample_uniform(6, 20)
    assert_close(
        ops.tangent_step(points, points.flip(0), 0.1, backend="triton"), ops.tangent_step(points, points.flip(0), 0.1)
    )
    post = ops.gallery_posterior(points.view(2, 3, 20), points, 5.0, top_k=2, backend="triton")
    assert_close(post.entropy, ops.gallery_posterior(points.view(2, 3, 20), points, 5.0, top_k=2).entropy)


def test_masked_interpolant_reports_bad_rows_as_the_other_backends_do():
    rows = [sample_uniform(4, 6) for _ in range(4)]
    rows[2][3] *= 2
    with pytest.raises(ValueError, match="image1 row 3 has norm 2"):
        ops.masked_interpolant(*rows, torch.rand(4), torch.zeros(4, dtype=torch.int8), backend="triton")


def test_automatic_choice_leaves_cpu_tensors_to_the_cpu():
    assert triton_kernels.devices() == ("cpu", "cuda")
    with pytest.raises(ValueError, match="float64"):
        ops.tangent_step(*[torch.eye(3, dtype=torch.float64)] * 2, 0.1, backend="triton")
    ops.tangent_step(*[torch.eye(3, dtype=torch.float64)] * 2, 0.1)


# ---- injected faults ----

FAULTS = {
    "gallery: draws past the last one count": (
        "gallery",
        'tl.where((sample < n_samples)[None, :], logit, float("-inf"))',
        "logit",
        check_gallery,
    ),
    "gallery: bias of samples not divided by kappa": (
        "gallery",
        "sample_bias.float() / kappa",
        "sample_bias.float()",
        lambda kernels: check_gallery(kernels, bias=True),
    ),
    "gallery: bias of another query's samples": (
        "gallery",
        "a_base + (row % QUERIES) * n_samples + sample, mask=live",
        "a_base + sample, mask=live",
        lambda kernels: check_gallery(kernels, bias=True),
    ),
    "gallery: no maximum subtracted": (
        "gallery",
        "tl.sum(tl.exp2(logit - above[:, None, :]), axis=1)",
        "tl.sum(tl.exp2(logit), axis=1)",
        check_gallery,
    ),
    "gallery: maximum not carried over chunks": (
        "gallery",
        "total = total * tl.exp2(best - above) +",
        "total = total +",
        check_gallery,
    ),
    "gallery: last item forgotten": (
        "gallery",
        "tl.minimum(first + items_per_share, n_items)",
        "tl.minimum(first + items_per_share, n_items - 1)",
        check_gallery,
    ),
    "gallery: one item too many": (
        "gallery",
        "tl.minimum(first + items_per_share, n_items)",
        "tl.minimum(first + items_per_share, n_items + 1)",
        check_gallery,
    ),
    "gallery: shares overlap": (
        "gallery",
        "first = tl.program_id(1) * items_per_share",
        "first = tl.program_id(1) * (items_per_share - 3)",
        check_gallery,
    ),
    "gallery: last columns of the product dropped": (
        "gallery",
        "for k in range(0, span, DEPTH):",
        "for k in range(0, span - DEPTH, DEPTH):",
        check_gallery,
    ),
    "gallery: high parts multiplied by low ones twice": (
        "gallery",
        "tl.where(k < turn, k, k - width)",
        "tl.where(k < turn, k, k - turn)",
        check_gallery,
    ),
    "gallery: nothing left for the low part": (
        "gallery",
        "low = (value - high.to(tl.float32)).to(tl.bfloat16)",
        "low = (value - value).to(tl.bfloat16)",
        check_gallery,
    ),
    "gallery: better items of some queries overlooked": (
        "gallery",
        "tl.minimum(tl.max(better, axis=0), TOP)",
        "tl.minimum(tl.min(better, axis=0), TOP)",
        check_gallery,
    ),
    "gallery: scores of the wrong query": (
        "gallery",
        "number.to(tl.int64)[:, None] * n_items",
        "(number + 1).to(tl.int64)[:, None] * n_items",
        check_gallery,
    ),
    "gallery: moment not moved to the new maximum": (
        "gallery",
        "(moment + (peak - peak_now) * weight)",
        "moment",
        check_gallery,
    ),
    "merge: moment not moved to the common maximum": (
        "gallery",
        "(moments + (peaks - peak) * weights)",
        "moments",
        check_gallery,
    ),
    "merge: weights not rescaled": (
        "gallery",
        "tl.sum(shrink * weights, axis=0)",
        "tl.sum(weights, axis=0)",
        check_gallery,
    ),
    "merge: last share forgotten": (
        "gallery",
        "there = share < last",
        "there = share < last - 1",
        check_gallery,
    ),
    "merge: last list entry forgotten": (
        "gallery",
        "listed = entry < (last - first) * TOP",
        "listed = entry < (last - first) * TOP - TOP",
        lambda kernels: check_gallery(kernels, top_k=6),
    ),
    "merge: programs take the same shares": (
        "gallery",
        "first = tl.program_id(1) * shares_per_program",
        "first = tl.program_id(1) * 0",
        check_rounds_of_merging,
    ),
    "gallery: biased draws past the last one count": (
        "gallery",
        'mask=live, other=float("-inf"))',
        "mask=live, other=0.0)",
        lambda kernels: check_gallery(kernels, bias=True),
    ),
    "gallery: lists looked at in every tile": (
        "gallery",
        "tl.minimum(tl.max(better, axis=0), TOP)",
        "TOP",
        check_looks_at_lists,
    ),
    "gallery: the first of tied items leaves the list": (
        "gallery",
        "going = tl.max(tl.where(top_score == low[:, None], top_index, -2147483648), axis=1)",
        "going = tl.min(tl.where(top_score == low[:, None], top_index, 2147483647), axis=1)",
        check_ties,
    ),
    "interpolant: the axis at the antipode half orthogonal": (
        "geodesic",
        "tl.where(on_axis, 1.0, 0.0) - (along * inverse)[:, None] * a",
        "tl.where(on_axis, 1.0, 0.0) - 0.5 * (along * inverse)[:, None] * a",
        check_rows_of_norm_nearly_one,
    ),
    "interpolant: norms taken for one": (
        "geodesic",
        "inverse = 1.0 / tl.maximum(aa, 1e-30)",
        "inverse = 1.0",
        check_rows_of_norm_nearly_one,
    ),
    "interpolant: streams swapped in the mask": (
        "geodesic",
        "code == 2, dropped",
        "code == 1, dropped",
        check_interpolant,
    ),
    "interpolant: dropout ignored": ("geodesic", "tl.where(dropped[:, None], a, b)", "b", check_interpolant),
    "interpolant: no way out at the antipode": (
        "geodesic",
        "lost = far & (length < lost_below)",
        "lost = far & (length < 0)",
        check_interpolant,
    ),
    "interpolant: column tail read": (
        "geodesic",
        "valid = inside[:, None] & (column < width)[None, :]\n    reads",
        "valid = inside[:, None] & (column <= width)[None, :]\n    reads",
        check_interpolant,
    ),
    "interpolant: row tail written": (
        "geodesic",
        "inside = row < rows\n    time",
        "inside = row <= rows\n    time",
        check_interpolant,
    ),
    "interpolant: dropped noise not checked": (
        "geodesic",
        "bad = (reads_noise & ",
        "bad = (reads_noise & reads_data & ",
        check_given_noise,
    ),
    "step: not projected": (
        "geodesic",
        "tl.sum(here * speed, axis=1)[:, None] * here",
        "0.0 * here",
        check_tangent_step,
    ),
    "step: whole turns kept": (
        "geodesic",
        "turns = tl.floor(turn * (0.5 / PI) + 0.5)",
        "turns = tl.floor(turn * 0.0)",
        check_tangent_step,
    ),
    "stage: projected at the wrong point": (
        "geodesic",
        "taken = _load_rows(at, row, column, at_stride, valid)",
        "taken = _load_rows(x, row, column, x_stride, valid)",
        check_tangent_stage,
    ),
    "ab2: velocity not turned": (
        "geodesic",
        "- (along * sinc)[:, None] * here",
        "",
        check_tangent_ab2,
    ),
    "adaln: padding enters the variance": (
        "network",
        "tl.where(valid, x - mean[:, None], 0.0)",
        "x - mean[:, None]",
        check_adaln,
    ),
    "adaln: one row too many per group": (
        "network",
        "local < group_size, group",
        "local <= group_size, group",
        check_adaln,
    ),
    "adaln: gradient of the mean dropped": (
        "network",
        "d_unit - mean[:, None] - unit * along[:, None]",
        "d_unit - unit * along[:, None]",
        check_adaln,
    ),
    "gate: dropout not rescaled": (
        "network",
        "tl.where(kept != 0, branch * kept_factor, 0.0)",
        "tl.where(kept != 0, branch, 0.0)",
        check_gate_residual,
    ),
    "gate: slope of the sigmoid": (
        "network",
        "tl.store(d_gate + at, scaled * content * (1.0 - open_by)",
        "tl.store(d_gate + at, scaled * content",
        check_gate_residual,
    ),
    "swiglu: slope of silu": (
        "network",
        "dy * y * (sigmoid + silu * (1.0 - sigmoid))",
        "dy * y * sigmoid",
        check_swiglu,
    ),
    "loss: given stream counted": (
        "network",
        "inside & (code != 2), text_width, TEXT_COLUMNS)\n    tl.store(loss",
        "inside, text_width, TEXT_COLUMNS)\n    tl.store(loss",
        check_flow_loss,
    ),
    "loss: error not tangent": (
        "network",
        "error - tl.sum(error * x, axis=1)[:, None] * x",
        "error - 0.0 * x",
        check_flow_loss,
    ),
}


def with_fault(module: ModuleType, before: str, after: str, folder) -> ModuleType:
    """A copy of the module with one piece of its source replaced."""
    text = Path(module.__file__).read_text()
    assert text.count(before) == 1, f"{before!r} occurs {text.count(before)} times in {module.__file__}"
    path = folder / f"faulty_{module.__name__.rsplit('.', 1)[-1]}.py"
    path.write_text(text.replace(before, after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    faulty = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = faulty
    spec.loader.exec_module(faulty)
    return faulty


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, tmp_path):
    name, before, after, check = FAULTS[fault]
    faulty = with_fault(getattr(KERNELS, name), before, after, tmp_path)
    with pytest.raises((AssertionError, InterpreterError)):
        check(SimpleNamespace(**{**vars(KERNELS), name: faulty}))
