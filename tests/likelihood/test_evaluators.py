"""Evaluators: the network in forward mode against any field by autograd, and what is asked of a field."""

from __future__ import annotations

import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods.euclidean import EuclideanConfig
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.geometry import log_area, project_tangent
from geoflow_fast.noise import sample_uniform
from tests.likelihood.helpers import oracles, random_flow, random_pairs, seeded
from tests.samples import Opaque


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("solver", ["euler", "ab2", "rk4", "midpoint"])
@pytest.mark.parametrize("tangents", ["separate", "combined"])
def test_the_network_and_any_field_give_the_same_answer(direction, solver, tangents):
    flow = random_flow(torch.float32)
    image, text = random_pairs(7, torch.float32)
    settings = gf.DensitySettings(3, 2, solver, tangents=tangents, grid="late", redraw=False)
    fast, slow = (
        gf.log_density(field, image, text, direction, generator=seeded(), settings=settings)
        for field in (flow, Opaque(flow))
    )
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


def test_the_euclidean_twin_gives_the_same_answer_as_any_flat_field():
    flow = random_flow(kind=EuclideanConfig)
    image, text = random_pairs(5)
    slow = Opaque(flow)
    slow.config = flow.config
    settings = gf.DensitySettings(redraw=False)
    fast, slow = (gf.log_density(field, image, text, generator=seeded(), settings=settings) for field in (flow, slow))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_exact_divergences_of_any_field_with_two_widths(direction):
    flow = random_flow()
    image, text = random_pairs(5)
    fast, slow = (
        gf.log_density(field, image, text, direction, 3, divergence="exact") for field in (flow, Opaque(flow))
    )
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


def test_a_field_without_gradients_is_refused_unless_it_stands_still():
    class Cut:
        def velocity(self, image, text, *arguments):
            return tuple(v.detach() for v in fields[0].velocity(image, text, *arguments))

    class Still:
        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)

    image, text, fields = oracles(4)
    with pytest.raises(ValueError, match="the text velocity must be differentiable"):
        gf.log_density(Cut(), image, text, "i2t")
    uniform = torch.full((len(text),), -log_area(4), dtype=torch.float64)
    torch.testing.assert_close(gf.log_density(Still(), image, text, "i2t"), uniform)


def test_a_field_off_the_sphere_is_refused():
    """Its trace would not be the divergence of the path that is followed."""

    class Tilted:
        def velocity(self, image, text, *arguments):
            v = fields[0].velocity(image, text, *arguments)
            lift = torch.zeros(len(text), 1, dtype=text.dtype)
            lift[5] = 1e-2
            return v[0], v[1] + lift * text

    class Narrow:
        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)[:, 1:]

    image, text, fields = oracles(4)
    for solver in ("euler", "midpoint"):
        with pytest.raises(ValueError, match="joint: the text velocity is not tangent to the sphere in row 5 at t=1"):
            gf.log_density(Tilted(), image, text, solver=solver)
    with pytest.raises(ValueError, match=r"i2t: the text velocity has shape \(16, 3\) at points \(16, 4\)"):
        gf.log_density(Narrow(), image, text, "i2t")


def test_a_field_that_is_a_module_is_evaluated_without_dropout():
    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def velocity(self, image, text, *arguments):
            velocities = fields[0].velocity(image, text, *arguments)
            return tuple(project_tangent(x, self.drop(v)) for x, v in zip((image, text), velocities))

    image, text, fields = oracles(4)
    dropped = Dropped().train()
    lp = gf.log_density(dropped, image, text, generator=seeded())
    torch.testing.assert_close(lp, gf.log_density(fields[0], image, text, generator=seeded()))
    assert dropped.drop.training


def test_dropout_is_off_and_the_mode_is_restored():
    flow = gf.GeoFlow(gf.GeoFlowConfig(6, 5, hidden=16, depth=2, heads=2, layer_scale=0.5, dropout=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.normal_(0, 0.25)
    flow.blocks[0].eval()
    image, text = sample_uniform(8, 6), sample_uniform(8, 5)
    noisy = gf.log_density(flow, image, text, n_steps=2, divergence="exact")
    assert flow.training
    assert not flow.blocks[0].training
    torch.testing.assert_close(gf.log_density(flow.eval(), image, text, n_steps=2, divergence="exact"), noisy)
    assert not flow.training
