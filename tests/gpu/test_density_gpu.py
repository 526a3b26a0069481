"""Log-densities on a GPU against those on the CPU, and the whole solve captured as one graph."""

from __future__ import annotations

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform
from tests.samples import shaken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is false"),
]


@pytest.fixture
def flow() -> gf.GeoFlow:
    """A network whose every part matters."""
    torch.manual_seed(0)
    return shaken(gf.GeoFlow(gf.GeoFlowConfig(96, 80, hidden=128, depth=3, layer_scale=0.1)), 0.05)


@pytest.mark.parametrize(
    "settings",
    [
        gf.DensitySettings(),
        gf.PAPER_DENSITY,
        gf.FAST_DENSITY,
        gf.DensitySettings(n_probes=3, shared=True),
    ],
)
def test_parity_with_the_cpu(flow, settings):
    """A generator on the CPU gives both devices the same probes."""
    image, text = sample_uniform(33, 96), sample_uniform(33, 80)
    here = gf.epistemic(flow, image, text, generator=torch.Generator().manual_seed(1), settings=settings)
    flow.cuda()
    generator = torch.Generator().manual_seed(1)
    there = gf.epistemic(flow, image.cuda(), text.cuda(), generator=generator, settings=settings)
    for name in ("joint", "text_given_image", "image_given_text", "score"):
        torch.testing.assert_close(getattr(there, name).cpu(), getattr(here, name), rtol=1e-4, atol=1e-2)


@torch.no_grad()
def test_the_solve_is_one_graph(flow):
    """A captured solve, replayed on other pairs, gives what a plain call gives, and draws new probes every time."""
    flow.cuda()
    pairs = [(sample_uniform(64, 96).cuda(), sample_uniform(64, 80).cuda()) for _ in range(2)]
    image, text = (x.clone() for x in pairs[0])
    settings = {"n_steps": 4, "divergence": "exact"}
    gf.log_density(flow, image, text, **settings)
    gf.log_density(flow, image, text, n_steps=4)
    graphs = []
    for options in (settings, {"n_steps": 4}):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, gf.log_density(flow, image, text, **options)))
    for pair in pairs:
        image.copy_(pair[0])
        text.copy_(pair[1])
        graphs[0][0].replay()
        torch.testing.assert_close(graphs[0][1], gf.log_density(flow, *pair, **settings), rtol=1e-5, atol=1e-3)
    draws = []
    for _ in range(2):
        graphs[1][0].replay()
        draws.append(graphs[1][1].clone())
    assert not torch.equal(*draws)
