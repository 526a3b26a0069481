"""Log-densities by the reverse ODE against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.geometry import DIRECTIONS, log_area, sample_uniform
from geoflow_fast.worlds import BumpField, PairField


def setting(d: int, rows: int = 16):
    generator = torch.Generator().manual_seed(d)
    image, text = (sample_uniform(rows, d, generator=generator, dtype=torch.float64) for _ in range(2))
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    return image, text, (PairField(rotation, 1.1), BumpField(image[0], text[0], 0.8))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("divergence", ["exact", "hutchinson"])
def test_closed_forms(direction, divergence):
    image, text, fields = setting(16)
    for field in fields:
        lp = gf.log_density(field, image, text, direction, n_steps=40, divergence=divergence)
        assert lp.dtype == torch.float64
        torch.testing.assert_close(lp, field.log_density(image, text, direction), atol=2e-3, rtol=0)


def test_order_of_the_solvers():
    """Halving the step halves the error of Euler and quarters that of the midpoint rule."""
    image, text, (field, _) = setting(16)
    truth = field.log_density(image, text, "joint")
    for solver, order in (("euler", 1), ("midpoint", 2)):
        errors = [
            float(
                (gf.log_density(field, image, text, n_steps=n, solver=solver, divergence="exact") - truth).abs().max()
            )
            for n in (20, 40)
        ]
        assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.2)


def test_hutchinson_is_unbiased_on_a_network():
    config = gf.GeoFlowConfig(6, 5, hidden=16, depth=2, heads=2, layer_scale=0.5)
    flow = gf.GeoFlow(config).eval()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.normal_(0, 0.25)
    image, text = sample_uniform(8, 6), sample_uniform(8, 5)
    exact = gf.log_density(flow, image, text, n_steps=2, divergence="exact")
    generator = torch.Generator().manual_seed(0)
    many = gf.log_density(flow, image.repeat(1000, 1), text.repeat(1000, 1), n_steps=2, generator=generator)
    many = many.view(1000, 8)
    spread = many.std(0)
    assert float(((many.mean(0) - exact) / spread).abs().max()) < 4 / 1000**0.5
    estimate, stderr = gf.log_density(
        flow, image, text, n_steps=2, n_probes=16, generator=generator, return_stderr=True
    )
    assert float(((estimate - exact) / spread).abs().max()) < 4 / 16**0.5
    assert float((stderr / (spread / 4)).log().abs().max()) < 1


def test_bad_input():
    image, text, (field, _) = setting(4)
    cases = {
        "direction": {"direction": "up"},
        "divergence": {"divergence": "guess"},
        "n_steps": {"n_steps": 0},
        "solver": {"solver": "magic"},
        "return_stderr": {"return_stderr": True},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            gf.log_density(field, image, text, **options)
    with pytest.raises(ValueError, match="text row 2"):
        gf.log_density(field, image, torch.cat((text[:2], 2 * text[2:])))
    with pytest.raises(ValueError, match="equal B"):
        gf.log_density(field, image, text[:3])


def test_a_field_without_gradients_is_refused_unless_it_stands_still():
    class Cut:
        def velocity(self, image, text, *arguments):
            return tuple(v.detach() for v in fields[0].velocity(image, text, *arguments))

    class Still:
        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)

    image, text, fields = setting(4)
    with pytest.raises(ValueError, match="the text velocity must be differentiable"):
        gf.log_density(Cut(), image, text, "i2t")
    uniform = torch.full((len(text),), -log_area(4), dtype=torch.float64)
    torch.testing.assert_close(gf.log_density(Still(), image, text, "i2t"), uniform)


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


def test_a_path_that_breaks_raises():
    class Broken:
        def velocity(self, image, text, *_):
            return image * math.nan, text

    image, text, _ = setting(4)
    with pytest.raises(ValueError, match="row 0 became non-finite in step 0"):
        gf.log_density(Broken(), image, text, "joint")
