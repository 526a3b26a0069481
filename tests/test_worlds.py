"""Closed-form densities integrate to one and agree with samples and with each other."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from geoflow_fast.geometry import log_area
from geoflow_fast.noise import sample_uniform
from geoflow_fast.worlds import SHARPEST, BumpField, ConceptWorld, PairField, log_bump, sample_bump


@pytest.fixture(scope="module")
def world() -> ConceptWorld:
    return ConceptWorld()


def uniform(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return sample_uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


@pytest.mark.parametrize("d", [3, 24])
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


def test_text_marginal_is_the_integral_of_the_joint(world):
    """The integral is estimated by importance sampling around the point between text and concept, with standard errors
    below 0.005."""
    generator = torch.Generator().manual_seed(2)
    _, text, _ = world.sample(2, generator=generator)
    for row in text.double():
        parts = []
        for k in world.known:
            c = world.text_c[world.level[k]]
            back = row @ world.rotation
            middle = world.image_c * world.centres[k] + c * back
            middle = (middle / middle.norm()).expand(20_000, -1)
            x = sample_bump(middle, 1.2, generator)
            log_p = log_bump(x @ world.centres[k], world.image_c, 24) + log_bump(x @ back, c, 24)
            weight = log_p - log_bump((x * middle).sum(1), 1.2, 24)
            parts.append(weight.logsumexp(0) - math.log(len(x)))
        estimate = torch.stack(parts).logsumexp(0) - math.log(len(world.known))
        assert float(world.log_text(row[None])) == pytest.approx(float(estimate), abs=0.05)


def test_marginals_integrate_to_one():
    small = ConceptWorld(dim=4)
    points = uniform(100_000, 4)
    for log_p in (small.log_image(points), small.log_text(points)):
        assert float((log_p + log_area(4)).exp().mean()) == pytest.approx(1, abs=0.03)


def test_densities_obey_the_chain_rule_and_posteriors_sum_to_one(world):
    image, text, concept = world.sample(32, generator=torch.Generator().manual_seed(3))
    assert set(concept.tolist()) <= set(world.known.tolist())
    joint = world.log_joint(image, text)
    torch.testing.assert_close(joint, world.log_text_given_image(image, text) + world.log_image(image))
    torch.testing.assert_close(joint, world.log_image_given_text(image, text) + world.log_text(text))
    for direction, queries, gallery in (("t2i", text, image), ("i2t", image, text)):
        posterior = world.gallery_posterior(queries, gallery, direction)
        torch.testing.assert_close(posterior.sum(1), torch.ones(32, dtype=torch.float64))
        assert float(posterior.diagonal().mean()) > 0.3  # the true partner is the likeliest item on average
    assert world.gallery_posterior(text[:0], image, "t2i").shape == (0, 32)
    with pytest.raises(ValueError, match="direction"):
        world.gallery_posterior(text, image, "joint")


def test_held_out_concepts_are_disjoint_and_there_is_a_modality_gap(world):
    held_out = set(world.far.tolist()) | set(world.near.tolist())
    assert len(world.far) == 4
    assert len(world.near) == 3
    assert held_out.isdisjoint(world.known.tolist())
    assert len(world.known) == 25
    image, text, _ = world.sample(20_000, generator=torch.Generator().manual_seed(4))
    assert float((image.mean(0) - text.mean(0)).norm()) > 0.2


@pytest.mark.parametrize("d", [3, 16])
def test_fields_are_tangent_and_do_not_move_the_given_stream(d):
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]
    image, text = uniform(9, d), uniform(9, d, 1)
    for field in (PairField(rotation, 0.9), BumpField(image[0], text[0], 0.9)):
        for direction in ("joint", "i2t", "t2i"):
            velocities = field.velocity(image, text, 0.5, direction)
            for x, v, given in zip((image, text), velocities, (direction == "i2t", direction == "t2i")):
                assert float((x * v).sum(1).abs().max()) < 1e-12
                assert not given or not v.any()
