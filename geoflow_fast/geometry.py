"""Geometry of the unit sphere in plain torch: the readable reference that every kernel is tested against.

Points are rows of unit norm, `[..., d]` with d >= 2; batch dimensions broadcast. Times are floats or tensors that
broadcast against the batch dimensions. Every function is defined for all finite input: at equal points a series is
used, and at antipodal points, where the geodesic is not unique, one deterministic great circle. Gradients are finite
everywhere and exact where the map is smooth.

Public functions check their points. `unit_rows`, `inner`, `tangent_part`, `follow` and `carry_along` are the same
formulas without the checks, for callers that have checked and for solvers, which call them at every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.runtime import checks

UNIT_TOLERANCE = 1e-3
"""Largest accepted difference between the norm of a row and one."""


# Below this a component orthogonal to a unit vector is rounding noise, not a direction.
EPS = {torch.float32: 16 * torch.finfo(torch.float32).eps, torch.float64: 16 * torch.finfo(torch.float64).eps}


# sin(x)/x and cos(x) by three terms of their series are exact to float64 rounding below this square.
_SERIES_BELOW = 1e-4


def eps(dtype: torch.dtype) -> float:
    """Length below which a direction is rounding noise in this dtype; a TypeError unless it is float32 or float64."""
    if dtype not in EPS:
        raise TypeError(f"geometry works in float32 and float64, not {dtype}; convert with .float()")
    return EPS[dtype]


def capturing(x: Tensor) -> bool:
    """Whether `x` is being traced or captured into a graph, so that checks of its values must be skipped."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_rows(
    x: Tensor,
    name: str,
    *,
    unit: bool = True,
    first: int = 0,
    remedy: str = "pass it through geoflow_fast.geometry.normalize first",
) -> None:
    """Raises a ValueError that names the first row of `x` [..., d] that is not finite, zero or, with `unit`, not of
    norm one, within 1e-3 or what the rounding of its type can do (8e-3 for bfloat16). `first` is the number of the
    first row, and `remedy` what to do about another norm."""
    checks.floating(x, name)
    if capturing(x):
        return
    x = checks.with_values(x, name).detach()
    if unit:
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        bad = ~((norm - 1).abs() <= max(UNIT_TOLERANCE, torch.finfo(x.dtype).eps))
    else:
        largest = _largest(x)  # a norm may overflow or vanish where this does not
        bad = ~(torch.isfinite(largest) & (largest > 0))
    if not bool(bad.any()):
        return
    place = [int(i) for i in bad.nonzero()[0]]
    row = x[tuple(place)].double()
    number = place[0] + first if len(place) == 1 else tuple(place)
    where = f"{name} row {number}" if place else name
    if not bool(torch.isfinite(row).all()):
        raise ValueError(f"{where} is not finite")
    if not bool(row.any()):
        raise ValueError(f"{where} is all zeros and has no direction")
    raise ValueError(f"{where} has norm {float(torch.linalg.vector_norm(row)):.6g}, not 1; {remedy}")


def normalize(x: Tensor) -> Tensor:
    """Scales the rows of `x` [..., d] to unit norm. A zero or non-finite row raises a ValueError that names it."""
    eps(checks.with_values(x, "x").dtype)
    if x.dim() == 0:
        raise ValueError("x must be rows [..., d], got a number")
    check_rows(x, "x", unit=False)
    return unit_rows(x)


def unit_rows(x: Tensor) -> Tensor:
    """`normalize` without its checks, for rows [..., d] of any floating-point type: those in half precision become
    float32. A row without a direction becomes NaN.

    A power of two that brings the largest entry near one comes first, so that no square overflows or vanishes. It
    changes no bit of rows of ordinary size.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = _largest(x.detach()).unsqueeze(-1).clamp(min=torch.finfo(x.dtype).tiny)
    scaled = x * (4 * torch.frexp(largest).mantissa / largest)  # the 4 keeps the power of two a normal number
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / norm if scaled.requires_grad else scaled.div_(norm)


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude in each row of `x` [..., d]; zero if d is."""
    # Without `abs`, which would write a copy.
    return torch.maximum(x.amax(dim=-1), -x.amin(dim=-1)) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last dimension, which is kept: [..., 1]."""
    return (a * b).sum(dim=-1, keepdim=True)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last dimension, which is kept: [..., 1]."""
    _check_points(a=a, b=b)
    return inner(a, b)


def _check_points(**points: Tensor) -> None:
    """Raises an error unless the points are floating-point tensors on one device whose shapes broadcast."""
    shapes = [checks.floating(x, name).shape for name, x in points.items()]
    if len({x.device for x in points.values() if x.dim()}) > 1:
        devices = ", ".join(f"{name} on {x.device}" for name, x in points.items())
        raise ValueError(f"points must be on one device, got {devices}")
    if all(shape == shapes[0] for shape in shapes):
        return
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        listed = ", ".join(f"{name} {tuple(x.shape)}" for name, x in points.items())
        raise ValueError(f"shapes do not fit each other: {listed}") from None


def _check_ends(a: Tensor, b: Tensor) -> None:
    """Raises an error unless there is a geodesic from `a` to `b`: points of at least two coordinates in a dtype whose
    rounding is known."""
    _check_points(a=a, b=b)
    eps(a.dtype)
    shape = torch.broadcast_shapes(a.shape, b.shape)
    if not shape or shape[-1] < 2:
        raise ValueError(f"points need at least 2 coordinates, got width {shape[-1] if shape else 0}")


def tangent_part(x: Tensor, v: Tensor) -> Tensor:
    """The part of `v` [..., d] that is tangent at the unit rows `x`: (I - x x^T) v."""
    return v - inner(x, v) * x


def project_tangent(x: Tensor, v: Tensor) -> Tensor:
    """Projects `v` [..., d] to the tangent space at the unit rows `x`: (I - x x^T) v."""
    _check_points(x=x, v=v)
    return tangent_part(x, v)


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Angle [...] between unit rows, in [0, pi]; unlike the acos of a dot product it is accurate near 0 and pi."""
    _check_points(a=a, b=b)
    return _angle(a, b)


def _angle(a: Tensor, b: Tensor) -> Tensor:
    return 2 * torch.atan2(torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1))


def _cos_sinc(square: Tensor) -> tuple[Tensor, Tensor]:
    """cos(x) and sin(x)/x as smooth functions of x^2, so that gradients at x = 0 are finite."""
    small = square < _SERIES_BELOW
    x = torch.sqrt(torch.where(small, torch.ones_like(square), square))
    cos_series = 1 - square / 2 * (1 - square / 12 * (1 - square / 30))
    sinc_series = 1 - square / 6 * (1 - square / 20 * (1 - square / 42))
    return torch.where(small, cos_series, torch.cos(x)), torch.where(small, sinc_series, torch.sin(x) / x)


def orthogonal_direction(a: Tensor) -> Tensor:
    """A unit tangent at each row of `a`: the axis of its smallest coordinate in absolute value, made orthogonal to
    it."""
    if checks.floating(a, "a").dim() == 0 or a.shape[-1] < 2:
        raise ValueError(f"a must be rows [..., d] with d >= 2, got {tuple(a.shape)}")
    return _orthogonal_direction(a)


def _orthogonal_direction(a: Tensor) -> Tensor:
    axis = torch.nn.functional.one_hot(a.detach().abs().argmin(dim=-1), a.shape[-1]).to(a.dtype)
    tangent = axis - inner(a, axis) / inner(a, a) * a  # rows within the tolerance of unit norm are let through
    return tangent / torch.linalg.vector_norm(tangent, dim=-1, keepdim=True)


def _departure(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Angle w [..., 1] and the velocity w u [..., d] with which the geodesic from `a` leaves for `b`.

    With p the part of `b` orthogonal to `a`, |p| = sin(w): w u = w/sin(w) p from the series below pi/2, w/|p| p beyond.
    """
    a, b = torch.broadcast_tensors(a, b)
    w = _angle(a, b).unsqueeze(-1)
    squared_norm = inner(a, a)
    p = b - inner(a, b) / squared_norm * a
    # Near pi the first subtraction cancels; a second one removes what is left of a.
    p = p - inner(a, p) / squared_norm * a
    length = torch.linalg.vector_norm(p, dim=-1, keepdim=True)
    one = torch.ones_like(length)
    far = w > math.pi / 2
    lost = far & (length < EPS[a.dtype])
    p = torch.where(lost, _orthogonal_direction(a), p)
    length = torch.where(far & ~lost, length, one)
    _, sinc = _cos_sinc(torch.where(far, one, w).square())
    return w, torch.where(far, w / length, 1 / sinc) * p


def interpolate(a: Tensor, b: Tensor, t: Tensor | float) -> tuple[Tensor, Tensor]:
    """Point at time `t` on the geodesic from `a` (t=0) to `b` (t=1) and its velocity d/dt, both [..., d].

    The speed is constant, w = angle(a, b). With u the unit tangent at `a` towards `b`,
    x_t = cos(t w) a + sin(t w) u and v_t = w (cos(t w) u - sin(t w) a): the paper's interpolant and target velocity.
    """
    time = torch.as_tensor(t, dtype=checks.floating(a, "a").dtype, device=a.device).unsqueeze(-1)
    _check_points(t=time, a=a)
    _check_ends(a, b)
    w, departure = _departure(a, b)
    cos, sinc = _cos_sinc((time * w).square())
    return cos * a + time * sinc * departure, cos * departure - time * w.square() * sinc * a


def geodesic(a: Tensor, b: Tensor, t: Tensor | float) -> Tensor:
    """Point at time `t` on the geodesic from `a` (t=0) to `b` (t=1): [..., d]."""
    return interpolate(a, b, t)[0]


def geodesic_velocity(a: Tensor, b: Tensor, t: Tensor | float) -> Tensor:
    """Velocity at time `t` on the geodesic from `a` to `b`: [..., d], tangent at `geodesic(a, b, t)`, of norm
    angle(a, b)."""
    return interpolate(a, b, t)[1]


def follow(x: Tensor, v: Tensor) -> Tensor:
    """Where the geodesic that leaves `x` with tangent velocity `v` is after unit time: [..., d]."""
    cos, sinc = _cos_sinc(inner(v, v))
    y = cos * x + sinc * v
    return y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)


def exp_map(x: Tensor, v: Tensor) -> Tensor:
    """Exponential map: follows the geodesic from `x` with tangent velocity `v` for unit time.

    The result is cos|v| x + sin|v| v/|v|, renormalised: [..., d].
    """
    _check_points(x=x, v=v)
    return follow(x, v)


def log_map(x: Tensor, y: Tensor) -> Tensor:
    """Logarithmic map: the tangent velocity at `x` whose geodesic reaches `y` in unit time; its norm is angle(x, y)."""
    _check_ends(x, y)
    return _departure(x, y)[1]


def carry_along(x: Tensor, velocity: Tensor, v: Tensor) -> Tensor:
    """Parallel transport of `v`, tangent at `x`, along the geodesic that leaves `x` with the tangent `velocity`, for a
    time of one: [..., d]."""
    square = inner(velocity, velocity)
    _, sinc = _cos_sinc(square)
    _, half_sinc = _cos_sinc(square / 4)
    along = inner(velocity, v)
    # v + <u, v> ((cos w - 1) u - sin w x) with u = velocity / w; (1 - cos w) / w^2 = sinc(w/2)^2 / 2
    return v - along * (half_sinc.square() / 2 * velocity + sinc * x)


def parallel_transport(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Parallel transport of `v`, tangent at `x`, along the geodesic to `y`: an isometry between the tangent spaces."""
    _check_points(x=x, y=y, v=v)
    _check_ends(x, y)
    return carry_along(x, _departure(x, y)[1], v)


def log_area(d: int) -> float:
    """Logarithm of the area of the unit sphere in R^d. The uniform log-density is minus this."""
    checks.integer(d, "d", least=1)
    return math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
