"""For a machine with a GPU: parity with float64, memory checking, graphs, streams, and bandwidth against the estimates.

`make test-gpu` runs this, and fails without a CUDA device. `-s` shows the measured bandwidths.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from geoflow_fast import geometry, ops
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.gallery_posterior import gallery_posterior_reference

triton = pytest.importorskip("triton", reason="the Triton kernels need triton")
gallery = pytest.importorskip("geoflow_fast.kernels.gallery")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is false"),
]
DEVICE = "cuda"
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(actual, expected, dtype=torch.float32, scale=1.0):
    """Equal up to rounding in `dtype`, in proportion to the largest expected value."""
    bound = scale * ROUNDING[dtype] * max(1.0, expected.abs().max().item())
    error = (actual.double().cpu() - expected.double().cpu()).abs().max().item()
    assert error <= bound, f"error {error:.3g} above {bound:.3g}"


def on_device(*tensors):
    return tuple(None if x is None else x.to(DEVICE) for x in tensors)


def double(*tensors):
    return tuple(x.double() if x is not None and x.is_floating_point() else x for x in tensors)


# ---- parity: what the interpreter showed, on the real thing ----


@pytest.mark.parametrize(("rows", "image", "text"), [(1, 2, 3), (129, 1023, 7), (4096, 1024, 512)])
def test_parity_of_the_interpolant(rows, image, text):
    noise = [sample_uniform(rows, d) for d in (image, text)]
    data = [sample_uniform(rows, d) for d in (image, text)]
    data[0][0] = noise[0][0]
    rest = (torch.rand(rows), torch.arange(rows).remainder(3).to(torch.int8))
    drop = torch.rand(rows) < 0.5
    expected = ops.masked_interpolant(*double(*noise, *data, *rest), drop=drop, backend="reference")
    actual = ops.masked_interpolant(*on_device(*noise, *data, *rest), drop=drop.to(DEVICE), backend="triton")
    for a, b in zip(actual, expected):
        assert_close(a, b)


def test_parity_of_bad_rows():
    rows = [sample_uniform(100, 24) for _ in range(4)]
    rows[1][57] *= 1.5
    rows[1][80] = float("nan")
    with pytest.raises(ValueError, match="text0 row 57"):
        ops.masked_interpolant(*on_device(*rows, torch.rand(100), torch.zeros(100, dtype=torch.int8)), backend="triton")


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (129, 1023), (5000, 1024)])
@pytest.mark.parametrize("retraction", ["exp", "renormalise"])
def test_parity_of_the_step(rows, width, retraction):
    x, v, free = sample_uniform(rows, width), torch.randn(rows, width), torch.randn(rows, width)
    expected = ops.tangent_step(*double(x, v), 0.05, v_free=free.double(), guidance=3.0, retraction=retraction)
    x, v, free = on_device(x, v, free)
    actual = ops.tangent_step(x, v, 0.05, v_free=free, guidance=3.0, retraction=retraction, backend="triton")
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width", "groups"), [(1, 7, 1), (129, 1023, 129), (4096, 512, 2)])
def test_parity_of_the_network_pieces(rows, width, groups, dtype):
    a, b, c = (torch.randn(rows, width).to(dtype) for _ in range(3))
    shift, scale = (torch.randn(groups, width).to(dtype) for _ in range(2))
    keep = torch.rand(rows, width) < 0.9
    cases = [
        (ops.adaln, (a, shift, scale), {}),
        (ops.gate_residual, (a, b, c, scale), {"keep": keep, "dropout": 0.1}),
        (ops.swiglu, (a, b), {}),
        (ops.swiglu, (torch.cat((a, b), 1),), {}),
    ]
    for op, inputs, options in cases:
        grad = None
        results = []
        for backend in ("reference", "triton"):
            there = double(*inputs) if backend == "reference" else on_device(*inputs)
            leaves = [x.detach().requires_grad_() for x in there]
            moved = {k: v.to(leaves[0].device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            out = op(*leaves, **moved, backend=backend)
            grad = torch.randn(out.shape, dtype=torch.float64) if grad is None else grad
            gradients = torch.autograd.grad(out, leaves, grad.to(out))
            results.append((out.detach(), *gradients))
        for x, y in zip(results[1], results[0]):
            assert_close(x, y, dtype, scale=4.0)


def test_parity_of_the_loss():
    widths = (1024, 768)
    velocity, target = ([torch.randn(513, d) for d in widths] for _ in range(2))
    point = [sample_uniform(513, d) for d in widths]
    direction = torch.arange(513).remainder(3).to(torch.int8)
    results = []
    for backend in ("reference", "triton"):
        move = double if backend == "reference" else on_device
        leaves = [x.detach().requires_grad_() for x in move(*velocity)]
        loss, rows = ops.flow_loss(*leaves, *move(*target, *point, direction), backend=backend)
        results.append((loss.detach(), rows.detach(), *torch.autograd.grad(loss, leaves)))
    for a, b in zip(results[1], results[0]):
        assert_close(a, b)


def gallery_world(queries, draws, items, width):
    centre = sample_uniform(queries, width).unsqueeze(1)
    noise = sample_uniform(queries * draws, width).view(queries, draws, width)
    rows = sample_uniform(items, width)
    near = torch.arange(items) % max(1, items // (4 * queries)) == 0
    rows[near] += 1.5 * centre.squeeze(1)[torch.arange(int(near.sum())) % queries]
    return geometry.normalize(centre + 0.5 * noise), geometry.normalize(rows)


def gallery_scale(kappa, width, split):
    """In units of the rounding of float32: kappa times that of a product, which is larger for rows in two parts."""
    parts = kappa * 2**-16 / width**0.5 / ROUNDING[torch.float32] if split else 0.0
    return max(1.0, kappa / 10) + parts


@pytest.mark.parametrize("name", gallery.CONFIGS)
@pytest.mark.parametrize(("kappa", "items", "width"), [(30.0, 5000, 1024), (0.0, 129, 33), (1e4, 3001, 512)])
def test_parity_of_every_gallery_configuration(name, kappa, items, width):
    config = gallery.CONFIGS[name]
    if config.hopper and not gallery.is_hopper(torch.device(DEVICE)):
        pytest.skip("for sm_90 alone")
    for dtype in (torch.float32,) if config.exact else (torch.bfloat16, torch.float16, torch.float32):
        samples, rows = (x.to(dtype) for x in gallery_world(5, 50, items, width))
        inputs = (*double(samples, rows), kappa, 10, None, None, "float32")
        expected = gallery_posterior_reference(*inputs)
        statistics = gallery.gallery_statistics(*on_device(samples, rows), kappa, 10, None, None, config=name, shares=3)
        posts = [ops.GalleryStatistics(*double(*s[:4]), s[4].long(), 10).posterior() for s in (statistics, expected)]
        scale = gallery_scale(kappa, width, dtype == torch.float32 and not config.exact)
        assert_close(posts[0].entropy, posts[1].entropy, scale=scale)
        assert_close(posts[0].log_z, posts[1].log_z, scale=scale)
        assert_close(posts[0].top_prob, posts[1].top_prob, scale=scale)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parity_of_long_lists(precision):
    samples, rows = gallery_world(7, 20, 3000, 256)
    expected = ops.gallery_posterior(samples.double(), rows.double(), 30.0, top_k=200)
    post = ops.gallery_posterior(*on_device(samples, rows), 30.0, top_k=200, precision=precision)
    scale = gallery_scale(30.0, 256, True) if precision == "float32" else 1000.0
    assert_close(post.entropy, expected.entropy, scale=scale)
    assert_close(post.top_prob, expected.top_prob, scale=scale)


def test_parity_of_the_tuned_gallery():
    samples, rows = gallery_world(40, 50, 20_000, 256)
    expected = ops.gallery_posterior(samples.double(), rows.double(), 30.0)
    post = ops.gallery_posterior(*on_device(samples, rows), 30.0)
    assert_close(post.entropy, expected.entropy, scale=gallery_scale(30.0, 256, True))
    assert_close(post.top_prob, expected.top_prob, scale=gallery_scale(30.0, 256, True))


# ---- graphs and streams ----


def solver_loop(x, v, row):
    for _ in range(4):
        x = ops.tangent_step(x, ops.adaln(v, row, row), 0.05, v_free=v, guidance=1.0)
    return x


def test_a_solver_loop_is_captured_as_a_graph():
    x = sample_uniform(256, 512).to(DEVICE)
    v, row = torch.randn(256, 512, device=DEVICE), torch.randn(512, device=DEVICE)
    expected = solver_loop(x, v, row)  # also compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solver_loop(x, v, row)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


def test_the_gallery_is_captured_as_a_graph():
    samples, rows = on_device(*gallery_world(8, 50, 4000, 256))
    expected = ops.gallery_posterior(samples, rows, 30.0)  # also tunes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.gallery_posterior(samples, rows, 30.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.entropy, expected.entropy)


def test_two_streams_do_not_disturb_each_other():
    states = [
        (
            sample_uniform(2048, 512).to(DEVICE),
            torch.randn(2048, 512, device=DEVICE),
            torch.randn(512, device=DEVICE),
        )
        for _ in range(2)
    ]
    expected = [solver_loop(*state) for state in states]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in states], []
    for stream, state in zip(streams, states):
        with torch.cuda.stream(stream):
            results.append(solver_loop(*state))
    torch.cuda.synchronize()
    for a, b in zip(results, expected):
        assert torch.equal(a, b)


def test_results_repeat_bit_for_bit():
    x, scale, grad = (torch.randn(shape, device=DEVICE) for shape in ((3000, 512), (2, 512), (3000, 512)))
    x.requires_grad_()
    scale.requires_grad_()
    runs = [torch.autograd.grad(ops.adaln(x, scale, scale), (x, scale), grad) for _ in range(5)]
    for first, second in itertools.pairwise(runs):
        assert all(torch.equal(a, b) for a, b in zip(first, second))


# ---- bandwidth ----


def peak_bandwidth():
    """Bytes a second that copying 1 GB reaches on this device: the yardstick for the kernels that wait for memory."""
    source = torch.empty(2**28, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * triton.testing.do_bench(lambda: target.copy_(source)))


@pytest.mark.parametrize(
    "name", ["masked_interpolant", "tangent_step", "adaln", "gate_residual", "swiglu", "flow_loss"]
)
def test_bandwidth_is_near_that_of_a_copy(name):
    rows, width = 16384, 1024
    a, b, c, d = (torch.randn(rows, width, device=DEVICE) for _ in range(4))
    a, b, c, d = (x / x.norm(dim=1, keepdim=True) for x in (a, b, c, d))
    row, joint = torch.randn(width, device=DEVICE), torch.zeros(rows, dtype=torch.int8, device=DEVICE)
    t = torch.rand(rows, device=DEVICE)
    calls = {
        "masked_interpolant": (lambda: ops.masked_interpolant(a, b, c, d, t, joint), 8),
        "tangent_step": (lambda: ops.tangent_step(a, b, 0.1), 3),
        "adaln": (lambda: ops.adaln(a, row, row), 2),
        "gate_residual": (lambda: ops.gate_residual(a, b, c, row), 4),
        "swiglu": (lambda: ops.swiglu(a, b), 3),
        "flow_loss": (lambda: ops.flow_loss(a, b, b, a, c, d, joint), 6),
    }
    call, arrays = calls[name]
    reached = arrays * a.nbytes / (1e-3 * triton.testing.do_bench(call))
    peak = peak_bandwidth()
    print(f"{name}: {reached / 1e9:.0f} GB/s, {100 * reached / peak:.0f} % of a copy")
    assert reached > 0.5 * peak
