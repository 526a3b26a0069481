"""For a machine with a GPU: the remaining kernels against float64, and whole paths, replayed and trained, against CPUs.

`make test-gpu` runs this, and fails without a CUDA device.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import ops
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.counter_noise import counter_noise_reference
from geoflow_fast.ops.cross_residual import cross_residual_backward_reference, cross_residual_reference
from geoflow_fast.ops.tangent_step import tangent_ab2_reference, tangent_stage_reference
from geoflow_fast.ops.unit_rows import unit_rows_reference
from tests.samples import shaken

pytest.importorskip("triton", reason="the Triton kernels need triton")
geodesic = pytest.importorskip("geoflow_fast.kernels.geodesic")
network = pytest.importorskip("geoflow_fast.kernels.network")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is false"),
]
DEVICE = "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def there(*arguments):
    return [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]


def in_double(*arguments):
    is_float = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731
    return [x.double() if is_float(x) else x for x in arguments]


def assert_close(actual, expected, tolerance=1e-5):
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=0, atol=tolerance * scale)


# ---- parity of kernels ----


@pytest.mark.parametrize("width", [2, 129, 1024])
def test_parity_of_noise(width):
    numbers = torch.tensor([0, 1, 5, 2**32 - 1, 77])
    noise = geodesic.counter_noise(numbers.to(DEVICE), width, 2**63 - 25, 2**31 + 5, 1, True)
    assert_close(noise, counter_noise_reference(numbers, width, 2**63 - 25, 2**31 + 5, 1, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parity_of_unit_rows(dtype):
    table, index = 3 * torch.randn(300, 1023).to(dtype), torch.randint(300, (500,))
    assert_close(geodesic.unit_rows(*there(table, index)), unit_rows_reference(table.double(), index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parity_of_cross_residuals(dtype):
    rows, heads, width = 257, 4, 512
    residual, grad = torch.randn(2 * rows, width), torch.randn(2 * rows, width)
    products, scale = torch.randn(2 * heads, rows, 2 * width // heads).to(dtype), torch.randn(2, width)
    rest = products, scale, torch.rand(2 * rows, width) < 0.7, 0.3
    y = network.cross_residual(*there(residual, *rest))
    assert_close(y, cross_residual_reference(*in_double(residual, *rest)))
    computed = network.cross_residual_backward(*there(grad, *rest))
    expected = cross_residual_backward_reference(*in_double(grad, *rest))
    assert_close(computed[0], expected[0], TOLERANCE[dtype])
    assert_close(computed[1], expected[1])


def test_parity_of_layer_norms_to_bfloat16():
    x, shift, scale = there(*(torch.randn(257, 512) for _ in range(3)))
    assert torch.equal(network.adaln_half(x, shift, scale, 1e-6), network.adaln(x, shift, scale, 1e-6).bfloat16())


@pytest.mark.parametrize("guided", [False, True])
def test_parity_of_stages_and_of_adams_bashforth(guided):
    x, at = sample_uniform(257, 1024), sample_uniform(257, 1024)
    v, free, before = (torch.randn(257, 1024) for _ in range(3))
    free, before = (free, before) if guided else (None, None)
    stage = (x, at, v, 0.3, free, 3.0, before, 0.2)
    ab2 = (x, v, 0.05, free, 3.0, before, 0.7)
    pairs = [
        *zip(geodesic.tangent_stage(*there(*stage)), tangent_stage_reference(*in_double(*stage)), strict=True),
        *zip(geodesic.tangent_ab2(*there(*ab2)), tangent_ab2_reference(*in_double(*ab2)), strict=True),
    ]
    for computed, truth in pairs:
        if truth.numel():
            assert_close(computed, truth)


@pytest.mark.parametrize(("queries", "top_k"), [(1, 10), (70, 10), (20, 100)])
def test_parity_of_search(queries, top_k):
    x, rows = sample_uniform(queries, 256), sample_uniform(3000, 256)
    score, _ = ops.gallery_search(*there(x, rows), top_k, "triton")
    assert_close(score, ops.gallery_search(x.double(), rows.double(), top_k)[0])


def test_parity_of_long_lists_of_one_query():
    """Of more shares than one program merges."""
    samples, rows = sample_uniform(8, 128).view(1, 8, 128), sample_uniform(50_000, 128)
    post = ops.gallery_posterior(*there(samples, rows), 10.0, top_k=64)
    truth = ops.gallery_posterior(samples.double(), rows.double(), 10.0, top_k=64)
    assert_close(post.entropy, truth.entropy, 1e-4)
    assert_close(post.top_prob, truth.top_prob, 1e-4)


# ---- whole paths ----


@pytest.fixture
def flow() -> gf.GeoFlow:
    """A network whose every part matters."""
    torch.manual_seed(0)
    return shaken(gf.GeoFlow(gf.GeoFlowConfig(96, 96, hidden=128, depth=2, layer_scale=0.1)), 0.05)


def test_densities_are_replayed_and_stay_the_same(flow):
    flow.to(DEVICE)
    pair = [sample_uniform(64, 96).to(DEVICE) for _ in range(2)]
    results = [gf.log_density(flow, *pair, n_steps=4, divergence="exact") for _ in range(4)]
    assert flow.graphs.reason is None
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("fixed", [False, True])
def test_training_learns(fixed):
    """Losses fall from the first steps to the last, with steps one by one and in a graph."""
    torch.manual_seed(0)
    image = sample_uniform(2048, 32)
    pairs = gf.EmbeddingPairs.from_arrays(image.numpy(), image.flip(1).contiguous().numpy())
    flow = gf.GeoFlow(gf.GeoFlowConfig(32, 32, hidden=64, depth=2)).to(DEVICE)
    config = dataclasses.replace(gf.TrainConfig.tiny(), steps=120, batch_size=256, fixed_directions=fixed)
    before = gf.GeoFlow(flow.config).to(DEVICE)
    before.load_state_dict(flow.state_dict())
    gf.train(flow, pairs, config)
    text = image.flip(1).contiguous()[:64].to(DEVICE)
    given = image[:64].to(DEVICE)
    densities = [gf.log_density(f.eval(), given, text, n_steps=8).mean() for f in (before, flow)]
    assert densities[1] > densities[0]
