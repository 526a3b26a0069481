"""Noise on the sphere: each point is uniform, the same seed gives the same points, and kinds keep their promises."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from geoflow_fast import geometry
from geoflow_fast.noise import NOISE_KINDS, StructuredNoise, base_noise, hadamard, hadamard_transform, sample_uniform


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("d", [2, 3, 16, 1024])
def test_uniform_samples_have_the_moments_of_the_uniform_law(d):
    n = 20_000
    x = sample_uniform(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(x.norm(dim=-1), torch.ones(n, dtype=torch.float64))
    # each coordinate has mean 0 and variance 1/d; five standard errors over d coordinates
    assert x.mean(0).abs().max() < 5 / math.sqrt(n * d)
    fourth = 3 / (d * (d + 2))
    assert (x.square().mean(0) - 1 / d).abs().max() < 5 * math.sqrt((fourth - 1 / d**2) / n) + 1e-12


def test_uniform_samples_repeat_with_the_generator():
    one, two = (sample_uniform(3, 8, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", NOISE_KINDS)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 50])
def test_base_noise_has_unit_norm_and_repeats_with_the_generator(kind, n):
    x = base_noise(n, 12, kind, generator=seeded(2))
    assert x.shape == (n, 12)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(n))
    assert torch.equal(x, base_noise(n, 12, kind, generator=seeded(2)))


def test_orthogonal_and_antithetic_noise_are_what_their_names_say():
    x = base_noise(12, 12, "orthogonal", generator=seeded())
    torch.testing.assert_close(x @ x.T, torch.eye(12), atol=1e-5, rtol=0)
    y = base_noise(10, 12, "antithetic", generator=seeded())
    torch.testing.assert_close(y[1::2], -y[::2])
    torch.testing.assert_close(y[::2] @ y[::2].T, torch.eye(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["orthogonal", "antithetic"])
def test_each_point_of_dependent_noise_is_uniform(kind):
    """The first coordinate of one row, over many draws, is distributed as that of a uniform point."""
    d, generator = 6, seeded(1)
    first = torch.stack([base_noise(4, d, kind, generator=generator)[3, 0] for _ in range(3000)])
    assert stats.kstest(((1 + first) / 2).numpy(), stats.beta((d - 1) / 2, (d - 1) / 2).cdf).pvalue > 0.01


def test_unknown_noise_is_refused():
    with pytest.raises(ValueError, match=r"noise must be one of \('iid', 'orthogonal', 'antithetic'\), got 'pink'"):
        base_noise(3, 4, "pink")


@pytest.mark.parametrize("order", [1, 2, 8, 64])
def test_the_fast_transform_multiplies_by_the_hadamard_matrix(order):
    matrix = hadamard(order, torch.float64, "cpu")
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))
    x = torch.randn(5, order, dtype=torch.float64, generator=seeded())
    torch.testing.assert_close(hadamard_transform(x), x @ matrix)


def test_rows_of_a_whole_hadamard_block_are_orthonormal():
    x = StructuredNoise.draw(128, 128, generator=seeded()).dense(torch.float64)
    torch.testing.assert_close(x @ x.T, torch.eye(128, dtype=torch.float64))


def test_names_that_moved_here_are_still_in_geometry():
    assert geometry.sample_uniform is sample_uniform
    assert geometry.StructuredNoise is StructuredNoise
    assert geometry.hadamard is hadamard
    assert geometry.hadamard_transform is hadamard_transform
    assert geometry.DIRECTIONS == ("joint", "i2t", "t2i")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        geometry.nothing  # noqa: B018
