"""The end of a residual branch: sigmoid gate, dropout, LayerScale and the sum with the residual in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, extension
from geoflow_fast.ops.arguments import (
    beside_groups,
    check_floating,
    check_shape,
    groups_of,
    rows_of,
    working_dtype,
)
from geoflow_fast.ops.triton_kernels import fused_operation


def gate_residual(
    residual: Tensor,
    gate: Tensor | None,
    value: Tensor,
    layer_scale: Tensor,
    *,
    keep: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Gated residual, residual + layer_scale * sigmoid(gate) * value, in the shape and dtype of `residual` [..., H].

    `gate` (logits) and `value` have the shape of `residual`; `gate=None` omits the sigmoid. `layer_scale` is [H], or
    [..., H] with G rows, where G divides the number of rows of `residual`. `keep`, a bool tensor of the same shape,
    drops the branch where it is false and scales the rest by 1 / (1 - dropout). Differentiable in the first four
    arguments, in reverse and forward mode.
    """
    rows, gate_rows, value_rows, scale = _check(residual, gate, value, layer_scale, keep, dropout)
    kept = None if keep is None else rows_of(keep)
    y: Tensor = gate_residual_rows(rows, gate_rows, value_rows, scale, kept, dropout, backend)
    return y.view(residual.shape)


def _check(
    residual: Tensor,
    gate: Tensor | None,
    value: Tensor,
    layer_scale: Tensor,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """`residual`, `gate` and `value` as rows [R, H], and `layer_scale` as groups [G, H]."""
    check_floating(("gate",), residual=residual, gate=gate, value=value, layer_scale=layer_scale)
    if residual.dim() < 1 or residual.shape[-1] == 0:
        raise ValueError(f"residual must have at least one column, got {tuple(residual.shape)}")
    check_shape(residual.shape, "residual", gate=gate, value=value)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if keep is not None:
        check_shape(residual.shape, "residual", keep=keep)
        if keep.dtype != torch.bool or keep.device != residual.device:
            raise TypeError(f"keep must be bool on {residual.device}, got {keep.dtype} on {keep.device}")
    rows = rows_of(residual)
    scale = groups_of(layer_scale, "layer_scale", rows)
    return rows, None if gate is None else rows_of(gate), rows_of(value), scale


# ---- plain torch ---------------------------------------------------------------------------------------------------


def gate_residual_reference(
    residual: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> Tensor:
    """residual + layer_scale * sigmoid(gate) * value, all [R, H]; `layer_scale` [G, H], G dividing R.

    Where `keep` is false the branch is dropped, elsewhere scaled by 1/(1-dropout); without `gate` its factor is one.
    """
    work = working_dtype(residual)
    branch, scale = beside_groups(layer_scale.to(work), _branch(gate, value.to(work), keep, dropout))
    out = torch.addcmul(residual.to(work).view(branch.shape), branch, scale)
    return out.reshape(residual.shape).to(residual.dtype)


def gate_residual_backward_reference(
    grad: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gate_residual` with respect to gate, value and layer_scale; that of residual is `grad` itself, and
    an empty tensor stands for that of an absent gate."""
    work = working_dtype(grad)
    full_value = value.to(work)
    grad_rows, scale = beside_groups(layer_scale.to(work), grad.to(work))
    branch = _branch(gate, full_value, keep, dropout)
    d_layer_scale = (grad_rows * branch.view(grad_rows.shape)).sum(1).to(layer_scale.dtype)
    d_branch = (grad_rows * scale).reshape(value.shape)
    if keep is not None:
        d_branch = d_branch * keep * (1 / (1 - dropout))
    if gate is None:
        return value.new_empty(0), d_branch.to(value.dtype), d_layer_scale
    sigmoid = torch.sigmoid(gate.to(work))
    d_value = d_branch * sigmoid
    d_gate = d_value * full_value * (1 - sigmoid)
    return d_gate.to(gate.dtype), d_value.to(value.dtype), d_layer_scale


def _branch(gate: Tensor | None, value: Tensor, keep: Tensor | None, dropout: float) -> Tensor:
    """sigmoid(gate) * value, dropped and rescaled."""
    branch = value if gate is None else torch.sigmoid(gate.to(value.dtype)) * value
    return branch if keep is None else branch * keep * (1 / (1 - dropout))


# ---- declarations --------------------------------------------------------------------------------------------------


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, gate, value, layer_scale, keep, ctx.dropout, ctx.backend = inputs
        ctx.save_for_backward(gate, value, layer_scale, keep)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, value, layer_scale, keep = ctx.saved_tensors
        d_gate, *others = _backward(grad, gate, value, layer_scale, keep, ctx.dropout, ctx.backend)
        return grad, None if gate is None else d_gate, *others, None, None, None


gate_residual_rows = fused_operation(
    "network",
    "gate_residual",
    gate_residual_reference,
    extension.bound("gate_residual"),
    check=_check,
    derivatives=_Derivatives,
    rowwise=True,
)
"""`gate_residual` of rows as the reference takes them; the last argument is the name of a backend."""
_backward = fused_operation(
    "network",
    "gate_residual_backward",
    gate_residual_backward_reference,
    extension.bound("gate_residual_backward", like=(1, 2, 3)),
    rowwise=True,
    part_of="gate_residual",
)
