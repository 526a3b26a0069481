"""The product of a SwiGLU layer: silu(gate) * value."""

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
    out_rows,
    rows_of,
    with_derivatives,
    with_out,
)


def swiglu(gate: Tensor, value: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """SwiGLU activation, silu(gate) * value: [..., I].

    Without `value`, `gate` [..., 2 I] contains the gate in its first half and the value in its second, as the output of
    one linear layer; the gradient is then one tensor too. Differentiable in reverse and forward mode.
    """
    width = _check(gate, value)
    if gate.numel() == 0:
        return gate[..., :width] + (gate[..., width:] if value is None else value)
    out: Tensor = with_derivatives(_SwiGLU)(rows_of(gate), None if value is None else rows_of(value), backend)
    return out.view(*gate.shape[:-1], width)


def swiglu_jvp(
    gate: Tensor,
    d_gate: Tensor,
    value: Tensor | None = None,
    d_value: Tensor | None = None,
    *,
    backend: str = "auto",
    out: Out | None = None,
) -> tuple[Tensor, Tensor]:
    """`swiglu` and its derivatives along K tangents `d_gate` [K, *gate.shape] and `d_value`, without an autograd tape.

    `out`: two contiguous tensors, distinct from the inputs, to write the results to.
    """
    width = _check(gate, value)
    if (value is None) != (d_value is None):
        raise ValueError("value and d_value must be given together or not at all")
    check_floating(("value", "d_value"), gate=gate, d_gate=d_gate, d_value=d_value)
    check_tangents(d_gate, "d_gate", gate)
    check_shape(d_gate.shape, "d_gate", d_value=d_value)
    shape = torch.Size((*gate.shape[:-1], width))
    d_shape = torch.Size((d_gate.shape[0], *shape))
    if gate.numel() == 0:
        return swiglu(gate, value, backend=backend), d_gate.new_empty(d_shape)
    rows = rows_of(gate)
    d_rows = d_gate.reshape(len(d_gate), *rows.shape)
    d_value_rows = None if d_value is None else d_value.reshape(len(d_value), *rows.shape)
    passes = dispatch.choose("swiglu", gate, backend)
    value_rows = None if value is None else rows_of(value)
    y, dy = passes.jvp(rows, d_rows, value_rows, d_value_rows, out_rows(out, shape, d_shape, gate))
    return y.view(shape), dy.view(d_shape)


def _check(gate: Tensor, value: Tensor | None) -> int:
    """The width I of the result."""
    check_floating(("value", "d_value"), gate=gate, value=value)
    if value is not None:
        check_shape(gate.shape, "gate", value=value)
        if value.dtype != gate.dtype:
            raise TypeError(f"value is {value.dtype}, but gate is {gate.dtype}")
    elif gate.shape[-1] % 2:
        raise ValueError(f"gate holds both halves without value, so its width must be even, got {gate.shape[-1]}")
    return gate.shape[-1] if value is not None else gate.shape[-1] // 2


class _SwiGLU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, value: Tensor | None, backend: str) -> Tensor:
        out: Tensor = dispatch.choose("swiglu", gate, backend).forward(gate, value)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        gate, value, ctx.backend = inputs
        ctx.save_for_backward(gate, value)
        ctx.save_for_forward(gate, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, value = ctx.saved_tensors
        # Second derivatives exist in the reference only.
        backend = "reference" if torch.is_grad_enabled() else ctx.backend
        return *dispatch.choose("swiglu", gate, backend).backward(grad, gate, value), None

    @staticmethod
    def jvp(ctx: Any, d_gate: Tensor, d_value: Tensor | None, _: None) -> Tensor:
        gate, value = ctx.saved_tensors
        value_tangent = None if d_value is None else d_value.unsqueeze(0)
        return reference.swiglu_jvp(gate, d_gate.unsqueeze(0), value, value_tangent)[1][0]


@dispatch.register("swiglu", "reference", devices=dispatch.EVERYWHERE)
class _Reference:
    forward = staticmethod(reference.swiglu)
    backward = staticmethod(reference.swiglu_backward)
    jvp = staticmethod(with_out(reference.swiglu_jvp))


dispatch.register("swiglu", "cpu", devices=("cpu",), missing=native.missing, dtypes=network_cpu.DTYPES)(
    network_cpu.SwiGLU
)


@dispatch.register(
    "swiglu", "triton", devices=triton_kernels.devices, missing=triton_kernels.missing, dtypes=triton_kernels.DTYPES
)
class _Triton:
    forward = staticmethod(triton_kernels.kernel("network", "swiglu"))
    backward = staticmethod(triton_kernels.kernel("network", "swiglu_backward"))
    jvp = staticmethod(triton_kernels.kernel("network", "swiglu_jvp"))
