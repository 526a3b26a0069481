"""One solver step on the sphere: guidance, tangent projection and the move along the geodesic in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from geoflow_fast.geometry import eps
from geoflow_fast.ops import dispatch, reference, triton_kernels
from geoflow_fast.ops.rows import check_floating, check_shape
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
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x, v, v_free)):
        if backend not in ("auto", "reference"):
            raise ValueError(f"tangent_step: backend {backend!r} has no gradient; use 'reference' or detach the inputs")
        backend = "reference"
    if x.numel() == 0:
        return x.clone()
    step: Tensor = dispatch.choose("tangent_step", x, backend)(x, v, h, v_free, guidance, retraction == "renormalise")
    return step


dispatch.register("tangent_step", "reference", devices=dispatch.EVERYWHERE)(reference.tangent_step)
dispatch.register(
    "tangent_step", "triton", devices=triton_kernels.devices, missing=triton_kernels.missing, dtypes=(torch.float32,)
)(triton_kernels.kernel("geodesic", "tangent_step"))
