"""Distributions on the sphere integrate to one, keep their digits, and agree with their samples."""

from __future__ import annotations

import functools
import math

import mpmath
import pytest
import torch
from scipy import special
from scipy import stats as scipy_stats

from geoflow_fast.geometry import log_area
from geoflow_fast.spherical import (
    SHARPEST,
    log_bump,
    log_vmf,
    log_vmf_normalizer,
    sample_bump,
    sample_vmf,
)
from tests.samples import unit

uniform = functools.partial(unit, dtype=torch.float64)


@pytest.mark.parametrize("d", [3, 4, 8])
def test_bump_integrates_to_one(d):
    cosine = uniform(200_000, d)[:, 0]
    assert float((log_bump(cosine, 0.8, d) + log_area(d)).exp().mean()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("c", [-SHARPEST, -9.0, 0.0, 0.8, 9.0, SHARPEST])
def test_sharp_bumps_keep_their_digits(c, dtype):
    """The densities at the centre, beside it and opposite are compared with 60 digits."""
    cosine = torch.tensor([1.0, 0.999, 0.3, 0.0, -0.3, -0.999, -1.0], dtype=dtype)
    with mpmath.workdps(60):
        heights = [mpmath.log(mpmath.cosh(c) - mpmath.mpf(x) * mpmath.sinh(c)) for x in cosine.tolist()]
    expected = torch.tensor([-log_area(5) - 4 * float(x) for x in heights], dtype=dtype)
    torch.testing.assert_close(log_bump(cosine, c, 5), expected)


@pytest.mark.parametrize("c", [-SHARPEST, -3.0, 0.0, 1.0, 10.0, SHARPEST])
def test_samples_in_float32_are_on_the_sphere(c):
    """In two dimensions a few of them begin at the centre or opposite, up to rounding."""
    centre = torch.tensor([[0.6, 0.8]]).expand(400_000, -1)
    points = sample_bump(centre, c, torch.Generator().manual_seed(0))
    torch.testing.assert_close(points.norm(dim=1), torch.ones(len(points)), atol=1e-6, rtol=0)
    exact = sample_bump(centre.double(), c, torch.Generator().manual_seed(0))
    assert float((points * centre).sum(1).mean()) == pytest.approx(float((exact * centre).sum(1).mean()), abs=0.01)


@pytest.mark.parametrize("d", [2, 3, 24])
def test_samples_follow_the_bump(d):
    """The mean of log p over samples equals its expectation, computed by quadrature over the cosine."""
    centre = uniform(1, d).expand(50_000, -1)
    points = sample_bump(centre, 1.0, torch.Generator().manual_seed(1))
    torch.testing.assert_close(points.norm(dim=1), torch.ones(len(points), dtype=torch.float64))
    values = log_bump((points * centre).sum(1), 1.0, d)
    angle = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    log_p = log_bump(angle.cos(), 1.0, d)
    weight = (log_p + log_area(d - 1)).exp() * angle.sin() ** (d - 2)
    assert float(torch.trapezoid(weight, angle)) == pytest.approx(1, abs=1e-6)
    expected = float(torch.trapezoid(weight * log_p, angle))
    assert float(values.mean()) == pytest.approx(expected, abs=4 * float(values.std()) / len(values) ** 0.5)


@pytest.mark.parametrize("d", [3, 4, 7, 24, 65, 512, 1024, 2048])
def test_vmf_normaliser_against_mpmath(d):
    kappas = [1e-2, 0.3, 1.0, 17.0, 100.0, 1e3, 1e4, 1e5]
    order = mpmath.mpf(d) / 2 - 1
    with mpmath.workdps(40):
        truth = [
            order * mpmath.log(k)
            - mpmath.mpf(d) / 2 * mpmath.log(2 * mpmath.pi)
            - mpmath.log(mpmath.besseli(order, mpmath.mpf(k)))
            for k in kappas
        ]
    normalizer = log_vmf_normalizer(torch.tensor(kappas, dtype=torch.float64), d)
    expected = torch.tensor([float(x) for x in truth], dtype=torch.float64)
    torch.testing.assert_close(normalizer, expected, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("d", [3, 24, 1024])
def test_vmf_gradient_is_minus_the_mean_cosine(d):
    """d/dk log C_d = -I_{d/2}(k) / I_{d/2-1}(k), which scipy computes for large k; it is 0 at 0."""
    kappa = torch.tensor([0.0, 0.5, 3.0 * d, 1e5], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_vmf_normalizer(kappa, d).sum(), kappa)
    assert bool(torch.isfinite(slope).all())
    assert float(slope[0]) == 0
    k = kappa.detach()[2:].numpy()
    expected = -special.ive(d / 2, k) / special.ive(d / 2 - 1, k)
    torch.testing.assert_close(slope[2:], torch.from_numpy(expected), rtol=1e-8, atol=0)


@pytest.mark.parametrize("kappa", [300.0, 1e4, 1e5])
def test_vmf_density_at_the_width_of_clip_agrees_with_scipy(kappa):
    """The Bessel function of scipy is scaled by exp(-kappa), so that it neither overflows nor vanishes here."""
    d = 512
    cosine = torch.tensor([-1.0, 0.0, 0.9, 1.0], dtype=torch.float64)
    log_bessel = math.log(special.ive(d / 2 - 1, kappa))
    log_c = (d / 2 - 1) * math.log(kappa) - d / 2 * math.log(2 * math.pi) - log_bessel
    expected = log_c + kappa * (cosine - 1)
    torch.testing.assert_close(log_vmf(cosine, kappa, d), expected, rtol=1e-12, atol=1e-8)


@pytest.mark.parametrize(("d", "kappa"), [(2, 0.5), (3, 30.0), (24, 5.0), (512, 1e4)])
def test_samples_follow_the_von_mises_fisher_distribution(d, kappa):
    """The cosines with the mean are compared with scipy's samples, and the rest has no preferred direction."""
    mean = uniform(1, d).expand(4000, -1)
    points = sample_vmf(mean, kappa, torch.Generator().manual_seed(1))
    torch.testing.assert_close(points.norm(dim=1), torch.ones(4000, dtype=torch.float64))
    cosine = (points * mean).sum(1)
    reference = scipy_stats.vonmises_fisher(mean[0].numpy(), kappa).rvs(4000, random_state=2) @ mean[0].numpy()
    assert scipy_stats.ks_2samp(cosine.numpy(), reference).pvalue > 1e-3
    sideways = points - cosine[:, None] * mean
    size = float(sideways.square().sum(1).mean().sqrt())
    assert float(sideways.mean(0).norm()) < 4 * size / 4000**0.5


def test_few_proposals_of_the_sampler_are_rejected(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "geoflow_fast.spherical.sample_bump",
        lambda centre, *rest: drawn.append(len(centre)) or sample_bump(centre, *rest),
    )
    for d, kappa in ((2, 50.0), (3, 1e3), (24, 5.0), (512, 1e4)):
        drawn.clear()
        assert sample_vmf(uniform(3000, d), kappa, torch.Generator().manual_seed(1)).shape == (3000, d)
        assert 3000 / sum(drawn) > 0.6
    assert sample_vmf(uniform(0, 5), 3.0).shape == (0, 5)
