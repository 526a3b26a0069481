"""Laws of the sphere, by property tests in float32 and float64, and its edge cases at angles 0 and pi."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from geoflow_fast import geometry as g
from geoflow_fast import noise

DTYPES = (torch.float32, torch.float64)
EDGE_ANGLES = (0.0, 1e-8, 1e-4, 0.3, math.pi / 2, 3.0, math.pi - 1e-4, math.pi - 1e-8, math.pi)


def tolerance(dtype: torch.dtype) -> float:
    return 200 * torch.finfo(dtype).eps


def pair_at_angle(
    theta: float, d: int, dtype: torch.dtype, seed: int = 0, n: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows a, b at angle `theta`, built in float64 so that the angle is right before rounding to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    a = noise.sample_uniform(n, d, generator=generator, dtype=torch.float64)
    u = g.project_tangent(a, torch.randn(n, d, generator=generator, dtype=torch.float64))
    u = u / u.norm(dim=-1, keepdim=True)
    return [a.to(dtype), (math.cos(theta) * a + math.sin(theta) * u).to(dtype)]


PAIRS = {
    "seed": st.integers(0, 2**31),
    "d": st.sampled_from([2, 3, 7, 64, 129, 1023]),
    "theta": st.floats(0, math.pi),
    "dtype": st.sampled_from(DTYPES),
}
pairs, pairs_and_time = given(**PAIRS), given(**PAIRS, t=st.floats(0, 1))


@pairs_and_time
@settings(deadline=None, max_examples=150)
def test_interpolant_is_unit_tangent_and_of_constant_speed(seed, d, theta, t, dtype):
    a, b = pair_at_angle(theta, d, dtype, seed)
    x, v = g.interpolate(a, b, t)
    tol = tolerance(dtype)
    assert torch.allclose(x.norm(dim=-1), torch.ones(3, dtype=dtype), atol=tol)
    assert (x * v).sum(-1).abs().max() < 4 * tol
    assert torch.allclose(v.norm(dim=-1), g.angle(a, b), atol=4 * tol)


@pairs_and_time
@settings(deadline=None, max_examples=150)
def test_interpolant_leads_from_one_end_to_the_other(seed, d, theta, t, dtype):
    a, b = pair_at_angle(theta, d, dtype, seed)
    tol = tolerance(dtype)
    assert torch.allclose(g.geodesic(a, b, 0.0), a, atol=tol)
    assert torch.allclose(g.geodesic(a, b, 1.0), b, atol=tol)
    # arc length to the point is proportional to time
    assert torch.allclose(g.angle(a, g.geodesic(a, b, t)), t * g.angle(a, b), atol=4 * tol)


@pairs_and_time
@settings(deadline=None, max_examples=100)
def test_the_geodesic_back_is_the_geodesic_there_reversed(seed, d, theta, t, dtype):
    theta = min(theta, 3.1)  # at the antipode the two walks may take different great circles
    a, b = pair_at_angle(theta, d, dtype, seed)
    forth, back = g.interpolate(a, b, t), g.interpolate(b, a, 1 - t)
    amplified = tolerance(dtype) / max(math.sin(theta), 0.04)
    assert torch.allclose(forth[0], back[0], atol=4 * amplified)
    assert torch.allclose(forth[1], -back[1], atol=16 * amplified)


@pairs
@settings(deadline=None, max_examples=100)
def test_exp_inverts_log(seed, d, theta, dtype):
    a, b = pair_at_angle(theta, d, dtype, seed)
    v = g.log_map(a, b)
    assert torch.allclose(g.exp_map(a, v), b, atol=4 * tolerance(dtype))
    assert torch.allclose(v.norm(dim=-1), g.angle(a, b), atol=4 * tolerance(dtype))


@pairs
@settings(deadline=None, max_examples=100)
def test_log_inverts_exp(seed, d, theta, dtype):
    length = min(theta, math.pi - 0.05)
    a, b = pair_at_angle(math.pi / 2, d, dtype, seed)
    v = length * b
    amplified = tolerance(dtype) / max(math.sin(length), 0.05) if length > 1 else tolerance(dtype)
    assert torch.allclose(g.log_map(a, g.exp_map(a, v)), v, atol=8 * amplified)


@pairs
@settings(deadline=None, max_examples=100)
def test_parallel_transport_is_an_isometry_of_tangent_spaces(seed, d, theta, dtype):
    a, b = pair_at_angle(theta, d, dtype, seed)
    v, w = (g.project_tangent(a, torch.randn_like(a)) for _ in range(2))
    tv, tw = g.parallel_transport(a, b, v), g.parallel_transport(a, b, w)
    scale = float(v.norm(dim=-1).max() * w.norm(dim=-1).max()) + 1
    assert (b * tv).sum(-1).abs().max() < 16 * tolerance(dtype) * scale
    assert torch.allclose((tv * tw).sum(-1), (v * w).sum(-1), atol=32 * tolerance(dtype) * scale)
    # the geodesic's own velocity is carried along itself
    assert torch.allclose(
        g.parallel_transport(a, b, g.geodesic_velocity(a, b, 0.0)),
        g.geodesic_velocity(a, b, 1.0),
        atol=32 * tolerance(dtype),
    )


@pytest.mark.parametrize("theta", EDGE_ANGLES)
@pytest.mark.parametrize("t", [0.05, 0.5, 0.9])
def test_velocity_is_the_derivative_of_the_interpolant(theta, t):
    a, b = pair_at_angle(theta, 17, torch.float64)
    h = 1e-5
    difference = (g.geodesic(a, b, t + h) - g.geodesic(a, b, t - h)) / (2 * h)
    assert torch.allclose(difference, g.geodesic_velocity(a, b, t), atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", EDGE_ANGLES)
def test_angle_is_accurate_at_both_ends(theta, dtype):
    a, b = pair_at_angle(theta, 64, dtype)
    assert torch.allclose(g.angle(a, b), torch.full((3,), theta, dtype=dtype), atol=tolerance(dtype) / 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_antipodal_rows_follow_one_deterministic_great_circle(dtype):
    a = noise.sample_uniform(5, 9, dtype=dtype)
    half = g.geodesic(a, -a, 0.5)
    assert torch.equal(half, g.geodesic(a, -a, 0.5))
    assert (half * a).sum(-1).abs().max() < tolerance(dtype)
    assert torch.allclose(half.norm(dim=-1), torch.ones(5, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 3, 4, 16, 129])
def test_the_way_from_a_point_that_leans_on_all_axes_alike_to_its_antipode(d, dtype):
    """No coordinate is near zero, so that the axis of departure is far from tangent before it is made orthogonal."""
    signs = torch.where(torch.arange(d) % 3 == 1, -1.0, 1.0).to(dtype)
    a = (signs / math.sqrt(d)).unsqueeze(0)
    direction = g.orthogonal_direction(a)
    assert abs(float(direction.norm()) - 1) < tolerance(dtype)
    assert abs(float((direction * a).sum())) < tolerance(dtype)
    t = torch.linspace(0, 1, 7, dtype=dtype)
    point, velocity = g.interpolate(a, -a, t.unsqueeze(-1))
    assert torch.allclose(point.norm(dim=-1), torch.ones(7, 1, dtype=dtype), atol=tolerance(dtype))
    assert torch.allclose(velocity.norm(dim=-1), torch.full((7, 1), math.pi, dtype=dtype), atol=4 * tolerance(dtype))
    assert float((point * velocity).sum(-1).abs().max()) < 4 * tolerance(dtype)
    assert torch.allclose((point * a).sum(-1), torch.cos(math.pi * t).unsqueeze(-1), atol=4 * tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 3, 7])
def test_the_way_from_an_axis_to_its_antipode(d, dtype):
    """An axis has no part that is orthogonal to itself: another one must be chosen."""
    a = torch.cat((torch.eye(d, dtype=dtype), -torch.eye(d, dtype=dtype)))
    direction = g.orthogonal_direction(a)
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(2 * d, dtype=dtype))
    assert float((direction * a).sum(1).abs().max()) == 0
    torch.testing.assert_close(g.geodesic(a, -a, 0.5), direction, atol=tolerance(dtype), rtol=0)


@pytest.mark.parametrize("x", [1e-9, 1e-3, 0.009, 0.0099, 0.0101, 0.1, 0.5, 1.0, 3.1])
def test_cosine_and_sinc_are_exact_on_both_sides_of_their_series(x):
    cos, sinc = g._cos_sinc(torch.tensor([x], dtype=torch.float64).square())
    assert float(cos) == pytest.approx(float(mpmath.cos(x)), rel=0, abs=4e-16)
    assert float(sinc) == pytest.approx(float(mpmath.sin(x) / x), rel=0, abs=8e-16)


@pytest.mark.parametrize("scale", [1 - 9e-4, 1 + 9e-4])
@pytest.mark.parametrize("theta", [1.0, 2.0, 3.0, math.pi - 1e-3, math.pi])
@pytest.mark.parametrize("d", [2, 3, 64])
def test_the_departure_is_tangent_at_points_whose_norm_is_not_quite_one(scale, theta, d):
    """Rows within the tolerance of one are let through, so nothing may assume that their norm is one."""
    a, b = pair_at_angle(theta, d, torch.float64)
    a = scale * a
    if theta == math.pi:
        b = -a
    departure = g.log_map(a, b)
    assert float((a * departure).sum(-1).abs().max()) < 1e-10
    assert torch.allclose(departure.norm(dim=-1), g.angle(a, b), rtol=2e-3)
    middle = g.geodesic(a, b, 0.5)
    assert torch.allclose(middle.norm(dim=-1), torch.ones(3, dtype=torch.float64), atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", EDGE_ANGLES)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: g.geodesic(a, b, 0.3),
        lambda a, b: g.geodesic_velocity(a, b, 0.3),
        g.log_map,
        g.angle,
        lambda a, b: g.exp_map(a, b - a),
        lambda a, b: g.parallel_transport(a, b, torch.ones_like(a)),
    ],
    ids=["geodesic", "velocity", "log", "angle", "exp", "transport"],
)
def test_gradients_are_finite_everywhere(function, theta, dtype):
    a, b = (x.requires_grad_() for x in pair_at_angle(theta, 6, dtype))
    function(a, b).sum().backward()
    assert torch.isfinite(a.grad).all()
    assert torch.isfinite(b.grad).all()


def test_gradients_are_exact_where_smooth():
    a, b = (x.requires_grad_() for x in pair_at_angle(1.1, 5, torch.float64))
    t = torch.rand(3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda a, b, t: g.interpolate(g.normalize(a), g.normalize(b), t), (a, b, t))
    torch.autograd.gradcheck(lambda a, b: g.log_map(g.normalize(a), g.normalize(b)), (a, b))
    v = 0.3 * b.detach()
    v.requires_grad_()
    torch.autograd.gradcheck(lambda a, v: g.exp_map(g.normalize(a), g.project_tangent(g.normalize(a), v)), (a, v))


def test_gradients_are_exact_at_equal_points():
    """At b = a the velocity is the tangent part of b to first order, so its Jacobian in b is the projector."""
    a, _ = pair_at_angle(0.0, 5, torch.float64, n=1)
    jacobian = torch.autograd.functional.jacobian(lambda b: g.log_map(a, b), a.clone()).reshape(5, 5)
    assert torch.allclose(jacobian, torch.eye(5, dtype=torch.float64) - a.T @ a, atol=1e-12)


def test_batch_shapes_broadcast():
    a, b = noise.sample_uniform(4, 6).reshape(4, 1, 6), noise.sample_uniform(5, 6)
    t = torch.rand(4, 5)
    x, v = g.interpolate(a, b, t)
    assert x.shape == v.shape == (4, 5, 6)
    assert torch.allclose(x[2, 3], g.geodesic(a[2, 0], b[3], t[2, 3]), atol=1e-6)
    assert g.interpolate(a[:0], b[:0], 0.5)[0].shape == (0, 0, 6)


def test_strided_input_gives_the_same_answer():
    a = noise.sample_uniform(8, 10)[::2]
    b = g.normalize(torch.randn(10, 4).T)
    assert torch.equal(g.geodesic(a, b, 0.4), g.geodesic(a.contiguous(), b.contiguous(), 0.4))


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e30])
def test_normalize_works_at_any_scale(scale):
    x = torch.randn(6, 12) * scale
    assert torch.allclose(g.normalize(x).norm(dim=-1), torch.ones(6), atol=1e-5)


def test_normalize_names_the_bad_row():
    x = torch.randn(4, 3)
    x[2] = 0
    with pytest.raises(ValueError, match="row 2 is all zeros"):
        g.normalize(x)
    x[2, 1] = float("nan")
    with pytest.raises(ValueError, match="row 2 is not finite"):
        g.normalize(x)
    x[2, 1] = float("inf")
    with pytest.raises(ValueError, match="row 2 is not finite"):
        g.normalize(x)


def test_wrong_dtype_and_width_are_refused():
    with pytest.raises(TypeError, match="float16"):
        g.normalize(torch.randn(2, 3).half())
    with pytest.raises(ValueError, match="width 1"):
        g.geodesic(torch.ones(2, 1), torch.ones(2, 1), 0.5)
    with pytest.raises(ValueError, match="d=1"):
        noise.sample_uniform(3, 1)


def test_log_area_has_its_known_values():
    assert math.isclose(g.log_area(2), math.log(2 * math.pi))
    assert math.isclose(g.log_area(3), math.log(4 * math.pi))
    assert math.isclose(-g.log_area(1024), 2093.03, abs_tol=0.01)
    # area of S^{d-1} = area of S^{d-2} * integral of sin^{d-2}
    for d in (4, 7, 30):
        belt, _ = quad(lambda p, k=d: math.sin(p) ** (k - 2), 0, math.pi)
        assert math.isclose(g.log_area(d), g.log_area(d - 1) + math.log(belt))
