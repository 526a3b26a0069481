"""Products of a training step against the plain operations of eval mode: interpolated and direct shifts and scales, and
cross-gates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.flow import model, modulation
from geoflow_fast.flow.modulation import POINTS, chebyshev, interpolation_weights, is_resolved
from tests.samples import shaken

WIDE = gf.GeoFlowConfig(6, 5, hidden=192, depth=2, heads=3, dropout=0.0, layer_scale=0.3)
NARROW = dataclasses.replace(WIDE, hidden=24, heads=2)
COUNTS = [(120, 100, 80), (0, 150, 150), (150, 0, 149), (1, 298, 1), (300, 0, 0), (0, 300, 0), (0, 0, 300)]


def random_flow(config: gf.GeoFlowConfig) -> gf.GeoFlow:
    torch.manual_seed(0)
    return shaken(gf.GeoFlow(config), 0.05).train()


def outputs_and_gradients(flow: gf.GeoFlow, counts: tuple[int, int, int]) -> list[torch.Tensor]:
    """What a network returns for a batch, and gradients of a random linear function of it."""
    generator = torch.Generator().manual_seed(1)
    rows = sum(counts)
    image, text = (torch.nn.functional.normalize(torch.randn(rows, d, generator=generator)) for d in (6, 5))
    t = torch.rand(rows, generator=generator)
    t[0], t[-1] = 0.0, 1.0
    image, text, t = (x.to(flow.example.dtype) for x in (image, text, t))
    outputs = flow.generated(image, text, t, counts)
    along = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    sum((x * y).sum() for x, y in zip(outputs, along)).backward()
    return [*(x.detach() for x in outputs), *(p.grad for p in flow.parameters() if p.grad is not None)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("config", [WIDE, NARROW], ids=["interpolated", "direct"])
def test_a_training_step_computes_what_float64_does(monkeypatch, config, counts):
    used, interpolate = [], modulation.interpolated_rows
    monkeypatch.setattr(model, "interpolated_rows", lambda *a: used.append(config) or interpolate(*a))
    flow = random_flow(config)
    results = outputs_and_gradients(flow.train(), counts)
    assert used == ([WIDE] if config is WIDE else [])
    expected = outputs_and_gradients(random_flow(config).double().eval(), counts)
    assert len(results) == len(expected)
    for ours, truth in zip(results, expected):
        worst = float((ours.double() - truth).abs().amax()) if truth.numel() else 0.0
        assert worst <= 5e-6 * (float(truth.abs().amax()) if truth.numel() else 0.0) + 1e-12


def test_weights_interpolate_polynomials_and_waves():
    points, _ = chebyshev()
    t = torch.linspace(0, 1, 257)
    weights = interpolation_weights(t).double()
    torch.testing.assert_close(weights.sum(1), torch.ones(257, dtype=torch.float64), atol=1e-6, rtol=0)
    for function in (lambda x: x**5 - x, lambda x: torch.sin(2 * torch.pi * 8 * x)):
        torch.testing.assert_close(weights @ function(points.double()), function(t.double()), atol=3e-6, rtol=0)


@pytest.mark.parametrize(("waves", "resolved"), [(3, True), (8, True), (30, False)])
def test_functions_that_oscillate_too_fast_are_told(waves, resolved):
    points, _ = chebyshev()
    values = torch.sin(2 * torch.pi * waves * points.double()).float().view(1, POINTS, 1)
    assert is_resolved(values) == resolved


@pytest.mark.parametrize("value", [0.0, 1.0, -300.0])
def test_constants_are_resolved(value):
    assert is_resolved(torch.full((2, POINTS, 3), value))


def test_a_conditioning_that_is_not_resolved_is_computed_for_every_row(monkeypatch):
    monkeypatch.setattr(model, "interpolated_rows", None)
    config = dataclasses.replace(WIDE, time_scale=64.0)
    flow = random_flow(config)
    ours = outputs_and_gradients(flow.train(), (100, 100, 100))[:2]
    expected = outputs_and_gradients(random_flow(config).eval(), (100, 100, 100))[:2]
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [40, 300])
def test_bfloat16_products_keep_the_loss(rows):
    """Only products are rounded: the states between them, shifts and scales are those of float32."""
    flow, counts = random_flow(WIDE).train(), (rows // 2, rows // 4, rows - rows // 2 - rows // 4)
    exact = outputs_and_gradients(flow, counts)[:2]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = outputs_and_gradients(flow, counts)[:2]
    for a, b in zip(exact, rounded):
        assert 0 < float((a - b).norm() / a.norm()) < 0.02
