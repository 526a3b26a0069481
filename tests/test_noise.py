"""Noise on the sphere: each point is uniform, the same seed gives the same points, and kinds keep their promises."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

import geoflow_fast as gf
from geoflow_fast.noise import NOISE_KINDS, base_noise, sample_uniform
from geoflow_fast.ops.counter_noise import philox
from tests.samples import seeded


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
@pytest.mark.parametrize("n", [4, 6, 8])
def test_each_point_of_dependent_noise_is_uniform(kind, n):
    """Every coordinate of every row, over many draws, is distributed as that of a uniform point. A factorisation by
    reflections leaves the sign of some of them fixed."""
    d, draws, generator = 6, 1500, seeded(1)
    x = torch.stack([base_noise(n, d, kind, generator=generator, dtype=torch.float64) for _ in range(draws)])
    law = stats.beta((d - 1) / 2, (d - 1) / 2)
    least = min(stats.kstest((1 + x[:, row, k]) / 2, law.cdf).pvalue for row in range(n) for k in range(d))
    assert least > 0.01 / (n * d)


def test_unknown_noise_is_refused():
    with pytest.raises(ValueError, match=r"noise must be one of \('iid', 'orthogonal', 'antithetic'\), got 'pink'"):
        base_noise(3, 4, "pink")


# ---- noise by counters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        (0, 0, ("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8")),
        (2**32 - 1, 2**64 - 1, ("408f276d", "41c83b0e", "a20bc7c6", "6d5451fd")),
    ],
)
def test_philox_has_its_published_values(counter, seed, words):
    drawn = philox(tuple(torch.tensor([counter]) for _ in range(4)), seed)
    assert tuple(f"{int(word):08x}" for word in drawn) == words


def test_noise_by_counters_is_normal_and_each_row_is_its_own():
    """Moments within four standard errors, and no row depends on the others that are drawn with it."""
    rows, width = 4000, 33
    noise = gf.ops.counter_noise(torch.arange(rows), width, 7, 3, 0, unit=False).double()
    count = noise.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((noise**power).mean()) - moment) < 4 * (variance / count) ** 0.5
    covariance = noise.T @ noise / rows - torch.eye(width)
    assert float(covariance.fill_diagonal_(0).abs().max()) < 5 / rows**0.5
    some = torch.tensor([17, 3999, 17])
    torch.testing.assert_close(gf.ops.counter_noise(some, width, 7, 3, 0, unit=False).double(), noise[some])
    for other in ((8, 3, 0), (7, 4, 0), (7, 3, 1)):
        drawn = gf.ops.counter_noise(torch.arange(rows), width, *other, unit=False).double()
        assert abs(float((drawn * noise).mean())) < 4 / count**0.5
    unit = gf.ops.counter_noise(torch.arange(rows), width, 7, 3, 0).double()
    torch.testing.assert_close(unit, noise / noise.norm(dim=1, keepdim=True), atol=1e-6, rtol=0)


def test_unit_rows_are_gathered_and_scaled():
    table = torch.randn(9, 5).half()
    rows = gf.ops.unit_rows(table, torch.tensor([8, 0, 8]))
    expected = torch.nn.functional.normalize(table[[8, 0, 8]].double())
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), expected, atol=1e-6, rtol=0)
    assert gf.ops.unit_rows(table, torch.tensor([], dtype=torch.int64)).shape == (0, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gf.ops.counter_noise(torch.zeros(3), 4, 0, 0, 0), "numbers must be int64"),
        (lambda: gf.ops.counter_noise(torch.arange(3), 4, -1, 0, 0), "seed"),
        (lambda: gf.ops.unit_rows(torch.zeros(3), torch.arange(3)), "table"),
        (lambda: gf.ops.unit_rows(torch.zeros(3, 2), torch.zeros(3)), "index must be int64"),
    ],
)
def test_bad_arguments_of_rows_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
