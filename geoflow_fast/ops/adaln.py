"""Adaptive LayerNorm: affine-free LayerNorm, then a shift and a scale per row or per group of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, extension, triton_kernels
from geoflow_fast.ops.arguments import (
    Pair,
    beside_groups,
    check_floating,
    groups_of,
    rows_of,
    working_dtype,
)
from geoflow_fast.ops.triton_kernels import WIDEST_ROW, fused_operation
from geoflow_fast.runtime import checks

EPS = 1e-6


def adaln(x: Tensor, shift: Tensor, scale: Tensor, *, eps: float = EPS, backend: str = "auto") -> Tensor:
    """Adaptive layer normalisation, (1 + scale) * LayerNorm(x) + shift, in the shape and dtype of `x` [..., H].

    `shift` and `scale` have the same shape: [H], shared by all rows; that of `x`, one per row; or [..., H] with G rows
    in total, where G divides the number R of rows of `x` and each serves R/G consecutive rows. An nn.LayerNorm is
    `adaln(x, bias, weight - 1)`. Differentiable in all three tensors, in reverse and forward mode.
    """
    if isinstance(x, Tensor) and isinstance(shift, Tensor) and x.dim() == shift.dim() == 2:
        y: Tensor = adaln_rows(x, shift, scale, eps, backend)
        return y
    rows, shifts, scales = _check(x, shift, scale)
    y = adaln_rows(rows, shifts, scales, eps, backend)
    return y.view(x.shape)


def _check(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`x` as rows [R, H], `shift` and `scale` as groups [G, H]."""
    check_floating(x=x, shift=shift, scale=scale)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"x must have at least one column, got {tuple(x.shape)}")
    if shift.shape != scale.shape or shift.dtype != scale.dtype:
        shapes = f"{shift.dtype} {tuple(shift.shape)} and {scale.dtype} {tuple(scale.shape)}"
        raise ValueError(f"shift and scale must have one shape and dtype, got {shapes}")
    rows = rows_of(x)
    return rows, groups_of(shift, "shift", rows), rows_of(scale)


# ---- plain torch ---------------------------------------------------------------------------------------------------


def adaln_reference(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`adaln` of rows `x` [R, H]; `shift` and `scale` are [G, H], where G divides R."""
    work = working_dtype(x)
    unit, scale = beside_groups(scale, torch.nn.functional.layer_norm(x.to(work), x.shape[-1:], eps=eps))
    return torch.addcmul(unit, unit, scale.to(work)).add(shift.unsqueeze(1).to(work)).reshape(x.shape).to(x.dtype)


def adaln_half_reference(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`adaln_reference` of float32 rows in bfloat16, for a product of such numbers."""
    return adaln_reference(x, shift, scale, eps).bfloat16()


def adaln_backward_reference(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `adaln` with respect to x [R, H], shift and scale [G, H]; the statistics of `x` are recomputed.

    Where every row has a shift of its own, the gradient of the shift is `grad` itself, and an empty tensor stands for
    it: an operation must not return its argument.
    """
    work = working_dtype(x)
    full = x.to(work)
    unit, mean, rstd = torch.native_layer_norm(full, x.shape[-1:], None, None, eps)
    grad, groups = beside_groups(scale.to(work), grad.to(work))
    d_shift = grad.new_empty(0) if len(x) == len(scale) else grad.sum(1)
    d_scale = (grad * unit.view(grad.shape)).sum(1)
    d_unit = torch.addcmul(grad, grad, groups).reshape(x.shape)
    d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
        d_unit, full, x.shape[-1:], mean, rstd, None, None, [True, False, False]
    )
    return d_x.to(x.dtype), d_shift.to(scale.dtype), d_scale.to(scale.dtype)


def adaln_elementary(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`adaln_reference` without torch's layer_norm, whose derivative in forward mode has wrong derivatives itself."""
    work = working_dtype(x)
    unit, _ = _normalise(x.to(work), eps)
    unit, scale = beside_groups(scale, unit)
    return torch.addcmul(unit, unit, scale.to(work)).add(shift.unsqueeze(1).to(work)).reshape(x.shape).to(x.dtype)


def adaln_backward_elementary(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`adaln_backward_reference` without torch's layer_norm, for the same reason."""
    work = working_dtype(x)
    unit, rstd = _normalise(x.to(work), eps)
    grad, groups = beside_groups(scale.to(work), grad.to(work))
    d_shift = grad.new_empty(0) if len(x) == len(scale) else grad.sum(1)
    d_scale = (grad * unit.view(grad.shape)).sum(1)
    d_unit = torch.addcmul(grad, grad, groups).reshape(x.shape)
    d_x = rstd * (d_unit - d_unit.mean(-1, keepdim=True) - unit * (unit * d_unit).mean(-1, keepdim=True))
    return d_x.to(x.dtype), d_shift.to(scale.dtype), d_scale.to(scale.dtype)


def _normalise(x: Tensor, eps: float) -> Pair:
    """The rows of `x` with mean 0 and variance 1, and the inverse of their standard deviation, [R, 1]."""
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd, rstd


# ---- declarations --------------------------------------------------------------------------------------------------


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        x, _, scale, ctx.eps, ctx.backend = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        d_x, d_shift, d_scale = _backward(grad, x, scale, ctx.eps, ctx.backend)
        return d_x, grad.to(scale.dtype) if len(x) == len(scale) else d_shift, d_scale, None, None


adaln_rows = fused_operation(
    "network",
    "adaln",
    adaln_reference,
    extension.bound("adaln"),
    check=lambda x, shift, scale, eps: _check(x, shift, scale) and checks.number(eps, "eps"),
    widest=WIDEST_ROW,
    derivatives=_Derivatives,
    forward_mode=adaln_elementary,
    rowwise=True,
)
"""`adaln` of rows as the reference takes them; the last argument is the name of a backend."""
_backward = fused_operation(
    "network",
    "adaln_backward",
    adaln_backward_reference,
    extension.bound("adaln_backward", like=(1, 2, 2)),
    widest=WIDEST_ROW,
    forward_mode=adaln_backward_elementary,
    rowwise=True,
    part_of="adaln",
)
adaln_half_rows = dispatch.operation(
    "adaln_half",
    adaln_half_reference,
    triton=triton_kernels.backend("network", "adaln_half", widest=WIDEST_ROW),
    derivatives=type("_HalfDerivatives", (_Derivatives,), {}),
    rowwise=True,
    part_of="adaln",
)
"""`adaln_rows` with a result in bfloat16."""
