"""The end of a residual branch: sigmoid gate, dropout, LayerScale and the sum with the residual in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, native, network_cpu, reference, triton_kernels
from geoflow_fast.ops.rows import (
    Out,
    check_floating,
    check_shape,
    check_tangents,
    groups_of,
    out_rows,
    rows_of,
    with_derivatives,
    with_out,
)


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
    rows, gate_rows, value_rows, scale = _check(residual, gate, value, layer_scale)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if keep is not None:
        check_shape(residual.shape, "residual", keep=keep)
        if keep.dtype != torch.bool or keep.device != residual.device:
            raise TypeError(f"keep must be bool on {residual.device}, got {keep.dtype} on {keep.device}")
        keep = rows_of(keep)
    if rows.numel() == 0:
        return residual + 0 * (value + layer_scale.sum())
    out: Tensor = with_derivatives(_GateResidual)(rows, gate_rows, value_rows, scale, keep, dropout, backend)
    return out.view(residual.shape)


def gate_residual_jvp(
    residual: Tensor,
    d_residual: Tensor,
    gate: Tensor | None,
    d_gate: Tensor | None,
    value: Tensor,
    d_value: Tensor,
    layer_scale: Tensor,
    *,
    backend: str = "auto",
    out: Out | None = None,
) -> tuple[Tensor, Tensor]:
    """`gate_residual` without dropout, and its derivatives along K tangents [K, *residual.shape]; no autograd tape.

    `out`: two contiguous tensors, distinct from the inputs, to write the results to.
    """
    rows, gate_rows, value_rows, scale = _check(residual, gate, value, layer_scale)
    if (gate is None) != (d_gate is None):
        raise ValueError("gate and d_gate must be given together or not at all")
    tangents: list[Tensor | None] = []
    for name, tangent in (("d_residual", d_residual), ("d_gate", d_gate), ("d_value", d_value)):
        check_floating(("gate", "d_gate"), residual=residual, **{name: tangent})
        if tangent is not None:
            check_tangents(tangent, name, residual)
            check_shape(d_residual.shape, "d_residual", **{name: tangent})
        tangents.append(None if tangent is None else tangent.reshape(len(tangent), *rows.shape))
    if rows.numel() == 0:
        return gate_residual(residual, gate, value, layer_scale, backend=backend), d_residual.clone()
    passes = dispatch.choose("gate_residual", residual, backend)
    room = out_rows(out, residual.shape, d_residual.shape, residual)
    y, dy = passes.jvp(rows, tangents[0], gate_rows, tangents[1], value_rows, tangents[2], scale, room)
    return y.view(residual.shape), dy.view(d_residual.shape)


def _check(
    residual: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    check_floating(("gate", "d_gate"), residual=residual, gate=gate, value=value, layer_scale=layer_scale)
    if residual.dim() < 1 or residual.shape[-1] == 0:
        raise ValueError(f"residual must have at least one column, got {tuple(residual.shape)}")
    check_shape(residual.shape, "residual", gate=gate, value=value)
    rows = rows_of(residual)
    scale = groups_of(layer_scale, "layer_scale", rows)
    return rows, None if gate is None else rows_of(gate), rows_of(value), scale


class _GateResidual(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        residual: Tensor,
        gate: Tensor | None,
        value: Tensor,
        layer_scale: Tensor,
        keep: Tensor | None,
        dropout: float,
        backend: str,
    ) -> Tensor:
        passes = dispatch.choose("gate_residual", residual, backend)
        out: Tensor = passes.forward(residual, gate, value, layer_scale, keep, dropout)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        residual, gate, value, layer_scale, keep, ctx.dropout, ctx.backend = inputs
        ctx.save_for_backward(gate, value, layer_scale, keep)
        ctx.save_for_forward(residual, gate, value, layer_scale, keep)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, value, layer_scale, keep = ctx.saved_tensors
        # Second derivatives exist in the reference only.
        backend = "reference" if torch.is_grad_enabled() else ctx.backend
        passes = dispatch.choose("gate_residual", value, backend)
        return grad, *passes.backward(grad, gate, value, layer_scale, keep, ctx.dropout), None, None, None

    @staticmethod
    def jvp(
        ctx: Any, d_residual: Tensor, d_gate: Tensor | None, d_value: Tensor, d_layer_scale: Tensor, *_: None
    ) -> Tensor:
        residual, gate, value, layer_scale, keep = ctx.saved_tensors
        nothing = torch.zeros_like(residual)
        primal, tangent = (value, d_value) if keep is None else (value * keep, d_value * keep)
        factor = layer_scale / (1 - ctx.dropout) if keep is not None else layer_scale
        gate_tangent = None if d_gate is None else d_gate.unsqueeze(0)
        along = reference.gate_residual_jvp(
            nothing, d_residual.unsqueeze(0), gate, gate_tangent, primal, tangent.unsqueeze(0), factor
        )[1]
        return along[0] + reference.gate_residual(nothing, gate, value, d_layer_scale, keep, ctx.dropout)


@dispatch.register("gate_residual", "reference", devices=dispatch.EVERYWHERE)
class _Reference:
    forward = staticmethod(reference.gate_residual)
    backward = staticmethod(reference.gate_residual_backward)
    jvp = staticmethod(with_out(reference.gate_residual_jvp))


dispatch.register("gate_residual", "cpu", devices=("cpu",), missing=native.missing, dtypes=network_cpu.DTYPES)(
    network_cpu.GateResidual
)


@dispatch.register(
    "gate_residual",
    "triton",
    devices=triton_kernels.devices,
    missing=triton_kernels.missing,
    dtypes=triton_kernels.DTYPES,
)
class _Triton:
    forward = staticmethod(triton_kernels.kernel("network", "gate_residual"))
    backward = staticmethod(triton_kernels.kernel("network", "gate_residual_backward"))
    jvp = staticmethod(triton_kernels.kernel("network", "gate_residual_jvp"))
