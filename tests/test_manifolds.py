"""Laws of the sphere and of its Euclidean twin as manifolds: projection, steps, transport, base distribution."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.euclidean import EUCLIDEAN, twin_of
from geoflow_fast import geometry
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.manifolds import SPHERE, GuidedVelocity, Sphere, manifold_of
from geoflow_fast.noise import NOISE_KINDS
from tests.samples import seeded

BOTH = pytest.mark.parametrize("manifold", [SPHERE, EUCLIDEAN], ids=["sphere", "euclidean"])
ROWS, WIDTH = 7, 6


def points(manifold: Sphere, seed: int = 0) -> Tensor:
    x = manifold.base_sample(ROWS, WIDTH, generator=seeded(seed)).double()
    return x / x.norm(dim=1, keepdim=True) if manifold is SPHERE else x


def tangents(manifold: Sphere, x: Tensor, seed: int = 1) -> Tensor:
    return manifold.project(x, torch.randn(x.shape, dtype=x.dtype, generator=seeded(seed)))


def distance(manifold: Sphere, a: Tensor, b: Tensor) -> Tensor:
    return geometry.angle(a, b) if manifold is SPHERE else (b - a).norm(dim=1)


def test_a_field_lives_on_the_manifold_of_its_configuration():
    assert manifold_of(object()) is SPHERE
    config = gf.GeoFlowConfig(4, 3, hidden=8, depth=1, heads=2)
    for shape, manifold in ((config, SPHERE), (twin_of(config), EUCLIDEAN)):
        assert shape.manifold is manifold_of(gf.GeoFlow(shape)) is manifold


@BOTH
def test_projecting_twice_is_projecting_once(manifold):
    x = points(manifold)
    v = tangents(manifold, x)
    torch.testing.assert_close(manifold.project(x, v), v)
    several = torch.randn(3, ROWS, WIDTH, dtype=torch.float64, generator=seeded(2))
    projected = manifold.project(x, several)
    for k in range(3):
        torch.testing.assert_close(projected[k], manifold.project(x, several[k]))


def test_projections_are_orthogonal_to_the_point_on_the_sphere_and_change_nothing_in_flat_space():
    x = points(SPHERE)
    assert float((x * tangents(SPHERE, x)).sum(1).abs().max()) < 1e-14
    v = torch.randn(ROWS, WIDTH)
    assert torch.equal(EUCLIDEAN.project(x, v), v)


@pytest.mark.parametrize("move", ["step", "step_and_normalise"])
@pytest.mark.parametrize("h", [0.3, -0.3, 0.0, 2.0])
def test_steps_stay_on_the_manifold(move, h):
    x = points(SPHERE)
    y = getattr(SPHERE, move)(x, tangents(SPHERE, x), h)
    torch.testing.assert_close(y.norm(dim=1), torch.ones(ROWS, dtype=torch.float64))
    x = points(EUCLIDEAN)
    v = tangents(EUCLIDEAN, x)
    torch.testing.assert_close(getattr(EUCLIDEAN, move)(x, v, h), x + h * v)


@BOTH
def test_a_step_covers_the_distance_that_its_velocity_says(manifold):
    x = points(manifold)
    v = tangents(manifold, x)
    v = v / v.norm(dim=1, keepdim=True)
    for h in (0.0, 0.01, 1.2):
        expected = torch.full((ROWS,), h, dtype=torch.float64)
        y = manifold.step(x, v, h)
        torch.testing.assert_close(distance(manifold, x, y), expected)


@BOTH
def test_a_retraction_agrees_with_the_step_to_second_order(manifold):
    x = points(manifold)
    v = tangents(manifold, x)
    gaps = [float((manifold.step(x, v, h) - manifold.step_and_normalise(x, v, h)).norm()) for h in (1e-2, 5e-3)]
    assert gaps[0] < 1e-4
    assert gaps[1] <= gaps[0] / 4 + 1e-12


def carry(manifold: Sphere, x: Tensor, along: Tensor, v: Tensor, h: float) -> tuple[Tensor, Tensor]:
    """Where the geodesic that leaves `x` with velocity `along` is after `h`, and `v` carried there."""
    return manifold.adams_bashforth_step(x, v, h, 2 * v - along, 1.0)


@BOTH
@pytest.mark.parametrize("h", [0.6, -0.6, 0.0, 9.0])
def test_carrying_keeps_norms_and_inner_products_and_stays_tangent(manifold, h):
    x = points(manifold)
    along, v, w = (tangents(manifold, x, seed) for seed in (1, 2, 3))
    (y, moved_v), (_, moved_w), (_, back) = (carry(manifold, x, along, u, h) for u in (v, w, along))
    torch.testing.assert_close(y, manifold.step(x, along, h))
    torch.testing.assert_close(moved_v.norm(dim=1), v.norm(dim=1))
    torch.testing.assert_close((moved_v * moved_w).sum(1), (v * w).sum(1))
    torch.testing.assert_close(manifold.project(y, moved_v), moved_v)
    torch.testing.assert_close(carry(manifold, y, back, moved_v, -h), (x, v))


@BOTH
def test_carrying_along_a_geodesic_keeps_its_velocity_pointing_along_it(manifold):
    x = points(manifold)
    v = tangents(manifold, x)
    v = v / v.norm(dim=1, keepdim=True)
    halfway, carried = manifold.adams_bashforth_step(x, v, 0.5, None, 0.0)
    torch.testing.assert_close(manifold.step(halfway, carried, 0.5), manifold.step(x, v, 1.0))


@BOTH
def test_guided_motions_are_combined_then_projected(manifold):
    """By every move, as the velocity they stand for; a stage takes the part tangent where the velocity was taken."""
    x, at = points(manifold), points(manifold, 3)
    v, free, total = (torch.randn(x.shape, dtype=x.dtype, generator=seeded(seed)) for seed in (4, 5, 6))
    whole, guided = v + 1.5 * (v - free), GuidedVelocity(v, free, 1.5)
    old = tangents(manifold, x, 7)
    for move in (
        lambda u: manifold.step(x, u, 0.4),
        lambda u: manifold.step_and_normalise(x, u, 0.4),
        lambda u: manifold.step_and_normalise(x, u, 0.4, at),
        lambda u: manifold.runge_kutta_stage(x, u, 0.4, at, total, 0.3),
        lambda u: manifold.adams_bashforth_step(x, u, 0.4, old, 0.6),
    ):
        torch.testing.assert_close(move(guided), move(whole))
    torch.testing.assert_close(
        manifold.runge_kutta_stage(x, whole, 0.4, at, total, 0.3)[1], total + 0.3 * manifold.project(at, whole)
    )


def test_freedom_is_the_dimension_of_the_tangent_space():
    for manifold, expected in ((SPHERE, WIDTH - 1), (EUCLIDEAN, WIDTH)):
        x = points(manifold)[:1]
        basis = manifold.project(x, torch.eye(WIDTH, dtype=torch.float64))
        assert manifold.tangent_dim(WIDTH) == int(torch.linalg.matrix_rank(basis)) == expected


@pytest.mark.parametrize("kind", NOISE_KINDS)
def test_base_samples_of_the_sphere_have_unit_norm_and_are_uniform(kind):
    x = SPHERE.base_sample(4000, WIDTH, kind, seeded(7))
    torch.testing.assert_close(x.norm(dim=1), torch.ones(4000))
    # Every other row, as rows of antithetic noise come in opposite pairs.
    first = (1 + x[::2, 0].double()) / 2
    assert stats.kstest(first.numpy(), stats.beta((WIDTH - 1) / 2, (WIDTH - 1) / 2).cdf).pvalue > 0.01
    assert torch.equal(x, SPHERE.base_sample(4000, WIDTH, kind, seeded(7)))


@pytest.mark.parametrize("kind", NOISE_KINDS)
def test_base_samples_of_flat_space_are_standard_normal(kind):
    x = EUCLIDEAN.base_sample(4000, WIDTH, kind, seeded(8))[::2].double()
    assert stats.kstest(x[:, 0].numpy(), stats.norm.cdf).pvalue > 0.01
    assert stats.kstest(x.square().sum(1).numpy(), stats.chi2(WIDTH).cdf).pvalue > 0.01


@BOTH
def test_log_base_is_the_log_density_of_the_base_distribution(manifold):
    x = points(manifold).float()
    log_base = manifold.log_base(x)
    assert log_base.dtype == torch.float64
    if manifold is SPHERE:
        area = 2 * math.pi ** (WIDTH / 2) / math.gamma(WIDTH / 2)
        expected = torch.full((ROWS,), -math.log(area), dtype=torch.float64)
    else:
        expected = torch.distributions.Normal(0.0, 1.0).log_prob(x.double()).sum(1)
    torch.testing.assert_close(log_base, expected)


@BOTH
@pytest.mark.parametrize("dropped", [True, False])
def test_the_interpolant_leads_from_noise_to_data_and_leaves_the_given_stream_alone(manifold, dropped):
    noise = tuple(points(manifold, seed).float() for seed in (1, 2))
    data = tuple(points(SPHERE, seed).float() for seed in (3, 4))
    drop = torch.full((ROWS,), dropped)
    for direction in DIRECTIONS:
        codes = torch.full((ROWS,), direction.code, dtype=torch.int8)
        for t, ends in ((0.0, noise), (1.0, data)):
            results = manifold.interpolant(noise, data, torch.full((ROWS,), t), codes, drop)
            for stream in range(2):
                point, velocity = results[stream], results[2 + stream]
                if stream == direction.given:
                    assert torch.equal(point, noise[stream] if dropped else data[stream])
                    assert not velocity.any()
                else:
                    torch.testing.assert_close(point, ends[stream], atol=1e-5, rtol=0)
                    length = distance(manifold, noise[stream], data[stream])
                    torch.testing.assert_close(velocity.norm(dim=1), length, atol=1e-4, rtol=1e-4)


@BOTH
def test_losses_are_squared_tangent_errors_of_the_generated_streams(manifold):
    x = tuple(points(manifold, seed).float() for seed in (1, 2))
    target = tuple(tangents(manifold, y, 3 + k).float() for k, y in enumerate(x))
    outputs = tuple(torch.randn(ROWS, WIDTH, generator=seeded(5 + k)) for k in range(2))
    codes = torch.full((ROWS,), Direction.JOINT.code, dtype=torch.int8)
    errors = [manifold.project(y, a - b).square().sum(1) for y, a, b in zip(x, outputs, target)]
    torch.testing.assert_close(manifold.velocity_losses(outputs, target, x, codes), errors[0] + errors[1])
