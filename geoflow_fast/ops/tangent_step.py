"""One solver step on the sphere: guidance, tangent projection and the move along the geodesic in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from geoflow_fast.geometry import eps, follow, tangent_part
from geoflow_fast.ops import dispatch, triton_kernels
from geoflow_fast.ops.arguments import check_floating, check_shape
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
    check_floating(("v_free",), x=x, v=v, v_free=v_free)
    eps(x.dtype)
    if x.dim() != 2:
        raise ValueError(f"x must be [B, d], got {tuple(x.shape)}")
    check_shape(x.shape, "x", v=v, v_free=v_free)
    for name, y in (("v", v), ("v_free", v_free)):
        if y is not None and y.dtype != x.dtype:
            raise TypeError(f"{name} is {y.dtype}, but x is {x.dtype}")
    h, guidance = checks.number(h, "h"), checks.number(guidance, "guidance")
    if retraction not in RETRACTIONS:
        raise ValueError(f"retraction must be one of {', '.join(RETRACTIONS)}, got {retraction!r}")
    wants_gradient = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x, v, v_free))
    if wants_gradient and backend not in ("auto", "reference"):
        raise ValueError(f"tangent_step: backend {backend!r} has no gradient; use 'reference' or detach the inputs")
    if x.numel() == 0:
        return x.clone()
    end: Tensor = _forward(x, v, h, v_free, guidance, retraction == "renormalise", str(backend))
    return end


def tangent_step_reference(
    x: Tensor, v: Tensor, h: float, v_free: Tensor | None, guidance: float, renormalise: bool
) -> Tensor:
    """One Euler step of size `h` from the unit rows `x` [B, d] along the tangent part of the velocity `v` [B, d].

    With `v_free` the velocity is v + guidance (v - v_free). The step follows the geodesic (exp map), or the straight
    line back to the sphere when `renormalise` is set.
    """
    guided = v if v_free is None else v + guidance * (v - v_free)
    step = h * tangent_part(x, guided)
    if not renormalise:
        return follow(x, step)
    y = x + step
    return y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)


_forward = dispatch.operation(
    "tangent_step",
    tangent_step_reference,
    triton=triton_kernels.backend("geodesic", "tangent_step", (torch.float32,)),
    rowwise=True,
)
