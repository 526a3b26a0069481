"""The product of a SwiGLU layer: silu(gate) * value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, extension
from geoflow_fast.ops.arguments import (
    check_floating,
    check_shape,
    rows_of,
    working_dtype,
)
from geoflow_fast.ops.triton_kernels import fused_operation


def swiglu(gate: Tensor, value: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """SwiGLU activation, silu(gate) * value: [..., I].

    Without `value`, `gate` [..., 2 I] contains the gate in its first half and the value in its second, as the output of
    one linear layer; the gradient is then one tensor too. Differentiable in reverse and forward mode.
    """
    if isinstance(gate, Tensor) and gate.dim() == 2:
        y: Tensor = swiglu_rows(gate, value, backend)
        return y
    width = _check(gate, value)
    y = swiglu_rows(rows_of(gate), None if value is None else rows_of(value), backend)
    return y.view(*gate.shape[:-1], width)


def _check(gate: Tensor, value: Tensor | None) -> int:
    """The width I of the result."""
    check_floating(("value",), gate=gate, value=value)
    if value is not None:
        check_shape(gate.shape, "gate", value=value)
        if value.dtype != gate.dtype:
            raise TypeError(f"value is {value.dtype}, but gate is {gate.dtype}")
        return gate.shape[-1]
    if gate.shape[-1] % 2:
        raise ValueError(f"gate holds both halves without value, so its width must be even, got {gate.shape[-1]}")
    return gate.shape[-1] // 2


# ---- plain torch ---------------------------------------------------------------------------------------------------


def swiglu_reference(gate: Tensor, value: Tensor | None) -> Tensor:
    """silu(gate) * value, [R, I]; without `value`, of the two halves of `gate` [R, 2 I]."""
    first, second = _halves(gate.to(working_dtype(gate)), value)
    return (torch.nn.functional.silu(first) * second).to(gate.dtype)


def swiglu_backward_reference(grad: Tensor, gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` in the form of its arguments; an empty tensor stands for that of an absent `value`."""
    first, second = _halves(gate.to(working_dtype(gate)), value)
    silu, slope = _silu_and_slope(first)
    grad = grad.to(first.dtype)
    d_first, d_second = grad * second * slope, grad * silu
    if value is None:
        return torch.cat((d_first, d_second), dim=-1).to(gate.dtype), gate.new_empty(0)
    return d_first.to(gate.dtype), d_second.to(value.dtype)


def _halves(gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and value in the dtype of `gate`; without `value`, the two halves of `gate`."""
    if value is not None:
        return gate, value.to(gate.dtype)
    first, second = gate.chunk(2, dim=-1)
    return first, second


def _silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(x) = x sigmoid(x) and its derivative sigmoid + silu (1 - sigmoid)."""
    sigmoid = torch.sigmoid(x)
    silu = x * sigmoid
    return silu, torch.addcmul(sigmoid, silu, 1 - sigmoid)


# ---- declarations --------------------------------------------------------------------------------------------------


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        gate, value, ctx.backend = inputs
        ctx.save_for_backward(gate, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, value = ctx.saved_tensors
        d_gate, d_value = _backward(grad, gate, value, ctx.backend)
        return d_gate, None if value is None else d_value, None


swiglu_rows = fused_operation(
    "network",
    "swiglu",
    swiglu_reference,
    extension.bound("swiglu"),
    check=_check,
    derivatives=_Derivatives,
    rowwise=True,
)
"""`swiglu` of rows as the reference takes them; the last argument is the name of a backend."""
_backward = fused_operation(
    "network",
    "swiglu_backward",
    swiglu_backward_reference,
    extension.bound("swiglu_backward", like=(1, 1)),
    rowwise=True,
    part_of="swiglu",
)
