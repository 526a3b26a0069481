"""One solver step on the sphere: guidance, tangent projection and the move along the geodesic in one pass.

`tangent_step` is the step of Euler's method. Two variants serve the other solvers: `tangent_stage` moves from one point
with a velocity taken at another, and `tangent_ab2` combines the velocity with the last one and carries it along.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geoflow_fast.geometry import carry_along, eps, follow, tangent_part
from geoflow_fast.ops import extension
from geoflow_fast.ops.arguments import check_floating, check_shape
from geoflow_fast.ops.triton_kernels import WIDEST_ROW, fused_operation
from geoflow_fast.runtime import checks

RETRACTIONS = ("exp", "renormalise")


def tangent_step(
    x: Tensor,
    v: Tensor,
    h: float,
    *,
    v_free: Tensor | None = None,
    guidance: float = 0.0,
    retraction: str = "exp",
    backend: str = "auto",
) -> Tensor:
    """One solver step on the sphere: the unit rows `x` [B, d] moved for time `h` with velocity `v` [B, d].

    `h` is negative in the reverse ODE. `v` is projected to the tangent space at `x`. With `v_free`, the unconditional
    velocity, the step uses v + guidance * (v - v_free), combined before that projection. `retraction`: "exp" follows
    the geodesic; "renormalise" takes a straight step and rescales to unit norm, which agrees to first order in h. The
    result has unit rows, in float32 or float64. Differentiable in the tensors through the reference backend, which is
    used whenever a gradient is required.
    """
    if retraction not in RETRACTIONS:
        raise ValueError(f"retraction must be one of {', '.join(RETRACTIONS)}, got {retraction!r}")
    h, guidance = checks.number(h, "h"), checks.number(guidance, "guidance")
    end: Tensor = tangent_step_rows(x, v, h, v_free, guidance, retraction == "renormalise", backend)
    return end


def _check(x: Tensor, v: Tensor, h: float, v_free: Tensor | None, guidance: float, renormalise: bool) -> None:  # noqa: ARG001
    check_floating(("v_free",), x=x, v=v, v_free=v_free)
    eps(x.dtype)
    if x.dim() != 2:
        raise ValueError(f"x must be [B, d], got {tuple(x.shape)}")
    check_shape(x.shape, "x", v=v, v_free=v_free)
    for name, y in (("v", v), ("v_free", v_free)):
        if y is not None and y.dtype != x.dtype:
            raise TypeError(f"{name} is {y.dtype}, but x is {x.dtype}")


# ---- plain torch ---------------------------------------------------------------------------------------------------


def tangent_step_reference(
    x: Tensor, v: Tensor, h: float, v_free: Tensor | None, guidance: float, renormalise: bool
) -> Tensor:
    """One Euler step of size `h` from the unit rows `x` [B, d] along the tangent part of the velocity `v` [B, d].

    With `v_free` the velocity is v + guidance (v - v_free). The step follows the geodesic (exp map), or the straight
    line back to the sphere when `renormalise` is set.
    """
    step = h * tangent_part(x, _guided(v, v_free, guidance))
    return _to_sphere(x + step) if renormalise else follow(x, step)


def tangent_stage_reference(
    x: Tensor,
    at: Tensor,
    v: Tensor,
    h: float,
    v_free: Tensor | None,
    guidance: float,
    total: Tensor | None,
    weight: float,
) -> tuple[Tensor, Tensor]:
    """A stage of a Runge-Kutta method: x + h u scaled to unit norm, where u is the part tangent at the unit rows `at`
    [B, d] of the velocity `v`, guided as in `tangent_step`; and total + weight u, or nothing without `total`. `x` need
    not have unit rows."""
    u = tangent_part(at, _guided(v, v_free, guidance))
    return _to_sphere(x + h * u), x.new_empty(0) if total is None else total + weight * u


def tangent_ab2_reference(
    x: Tensor, v: Tensor, h: float, v_free: Tensor | None, guidance: float, carried: Tensor | None, share: float
) -> tuple[Tensor, Tensor]:
    """A step of the two-step Adams-Bashforth method: where the geodesic arrives that leaves the unit rows `x` [B, d]
    with velocity u + share (u - carried), and u transported along it, which is `carried` in the next step.

    u is the tangent part of `v`, guided as in `tangent_step`; without `carried` the step follows u itself.
    """
    u = tangent_part(x, _guided(v, v_free, guidance))
    step = h * (u if carried is None else u + share * (u - carried))
    return follow(x, step), carry_along(x, step, u)


def _guided(v: Tensor, v_free: Tensor | None, guidance: float) -> Tensor:
    return v if v_free is None else v + guidance * (v - v_free)


def _to_sphere(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


# ---- declarations --------------------------------------------------------------------------------------------------

tangent_step_rows = fused_operation(
    "geodesic",
    "tangent_step",
    tangent_step_reference,
    extension.bound("tangent_step"),
    check=_check,
    dtypes=(torch.float32,),
    widest=WIDEST_ROW,
    rowwise=True,
)
"""`tangent_step` as the reference takes it; the last argument is the name of a backend."""
tangent_stage_rows = fused_operation(
    "geodesic",
    "tangent_stage",
    tangent_stage_reference,
    extension.bound("tangent_stage"),
    dtypes=(torch.float32,),
    widest=WIDEST_ROW,
    rowwise=True,
    part_of="tangent_step",
)
tangent_ab2_rows = fused_operation(
    "geodesic",
    "tangent_ab2",
    tangent_ab2_reference,
    extension.bound("tangent_ab2"),
    dtypes=(torch.float32,),
    widest=WIDEST_ROW,
    rowwise=True,
    part_of="tangent_step",
)
