"""Passes of the network's operations in compiled C++, float32 on the CPU: outputs are made here, rows handed over."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.ops.native import network_kernel, reduction_rows
from geoflow_fast.ops.reference import I2T, T2I, Pair

DTYPES = (torch.float32,)


NO_MASK = 0


def _rows(x: Tensor) -> Tensor:
    """`x` as float32 rows of unit stride, without a copy if it is that already."""
    x = x.detach().to(torch.float32)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _empty(shape: tuple[int, ...]) -> Tensor:
    """Room for an output: float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _shape(x: Tensor, group: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], x.shape[0] // group.shape[0]


def _per_group(x: Tensor, groups: int) -> Tensor:
    """Sums the rows [R, H] of each group: [G, H]."""
    return x if len(x) == groups else x.view(groups, -1, x.shape[1]).sum(1)


class AdaLN:
    """Passes of `ops.adaln`."""

    @staticmethod
    def forward(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
        y = _empty(x.shape)
        network_kernel("adaln", _shape(x, scale), eps, _rows(x), _rows(shift), _rows(scale), y)
        return y

    @staticmethod
    def backward(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        d_x, d_scale = _empty(x.shape), _empty(x.shape)
        network_kernel("adaln_backward", _shape(x, scale), eps, _rows(grad), _rows(x), _rows(scale), d_x, d_scale)
        return d_x, _per_group(grad, len(scale)), _per_group(d_scale, len(scale))

    @staticmethod
    def jvp(x: Tensor, dx: Tensor, shift: Tensor, scale: Tensor, eps: float, out: Pair | None = None) -> Pair:
        y, dy = out or (_empty(x.shape), _empty(dx.shape))
        tangents = _rows(dx.reshape(-1, x.shape[1]))
        parts = (_rows(x), tangents, _rows(shift), _rows(scale), y, dy.view(tangents.shape))
        network_kernel("adaln_jvp", _shape(x, scale), eps, len(dx), *parts)
        return y, dy


class SwiGLU:
    """Passes of `ops.swiglu`."""

    @staticmethod
    def _halves(gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        first, second = gate.chunk(2, dim=-1) if value is None else (gate, value)
        return _rows(first), _rows(second)

    @staticmethod
    def forward(gate: Tensor, value: Tensor | None) -> Tensor:
        first, second = SwiGLU._halves(gate, value)
        y = _empty(first.shape)
        network_kernel("swiglu", (*first.shape, 1), first, second, y)
        return y

    @staticmethod
    def backward(grad: Tensor, gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor | None]:
        d_gate = _empty(gate.shape)
        d_value = None if value is None else _empty(value.shape)
        halves = (*SwiGLU._halves(gate, value), *SwiGLU._halves(d_gate, d_value))
        network_kernel("swiglu_backward", (*halves[0].shape, 1), _rows(grad), *halves)
        return d_gate, d_value

    @staticmethod
    def jvp(
        gate: Tensor, d_gate: Tensor, value: Tensor | None, d_value: Tensor | None, out: Pair | None = None
    ) -> Pair:
        first, second = SwiGLU._halves(gate, value)
        flat_value = None if d_value is None else d_value.reshape(-1, d_value.shape[-1])
        d_first, d_second = SwiGLU._halves(d_gate.reshape(-1, d_gate.shape[-1]), flat_value)
        y, dy = out or (_empty(first.shape), _empty((len(d_gate), *first.shape)))
        parts = (first, d_first, second, d_second, y, dy.view(d_first.shape))
        network_kernel("swiglu_jvp", (*first.shape, 1), len(d_gate), *parts)
        return y, dy


class GateResidual:
    """Passes of `ops.gate_residual`."""

    @staticmethod
    def forward(
        residual: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
    ) -> Tensor:
        y = _empty(residual.shape)
        mask = NO_MASK if keep is None else keep.contiguous()
        parts = (_rows(residual), None if gate is None else _rows(gate), _rows(value), _rows(layer_scale), mask, y)
        network_kernel("gate_residual", _shape(residual, layer_scale), 1 / (1 - dropout), *parts)
        return y

    @staticmethod
    def backward(
        grad: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        shape = _shape(value, layer_scale)
        groups, blocks = len(layer_scale), math.ceil(shape[2] / reduction_rows())
        d_gate = None if gate is None else _empty(value.shape)
        d_value, partial = _empty(value.shape), _empty((groups * blocks, value.shape[1]))
        mask = NO_MASK if keep is None else keep.contiguous()
        inputs = (_rows(grad), None if gate is None else _rows(gate), _rows(value), _rows(layer_scale), mask)
        network_kernel("gate_residual_backward", shape, 1 / (1 - dropout), *inputs, d_gate, d_value, partial)
        return d_gate, d_value, _per_group(partial, groups)

    @staticmethod
    def jvp(
        residual: Tensor,
        d_residual: Tensor,
        gate: Tensor | None,
        d_gate: Tensor | None,
        value: Tensor,
        d_value: Tensor,
        layer_scale: Tensor,
        out: Pair | None = None,
    ) -> Pair:
        def flat(x: Tensor | None) -> Tensor | None:
            return None if x is None else _rows(x.reshape(-1, x.shape[-1]))

        y, dy = out or (_empty(residual.shape), _empty(d_residual.shape))
        parts = (residual, d_residual, gate, d_gate, value, d_value, layer_scale, y, dy)
        network_kernel("gate_residual_jvp", _shape(residual, layer_scale), len(d_residual), *map(flat, parts))
        return y, dy


class FlowLoss:
    """Passes of `ops.flow_loss`."""

    @staticmethod
    def forward(velocity: Pair, target: Pair, point: Pair, direction: Tensor) -> Tensor:
        loss = _empty((len(direction), 1)).zero_()
        for v, u, x, given in zip(velocity, target, point, (I2T, T2I)):
            network_kernel("flow_loss", (*v.shape, 1), direction != given, _rows(v), _rows(u), _rows(x), loss)
        return loss.squeeze(1)

    @staticmethod
    def backward(grad: Tensor, velocity: Pair, target: Pair, point: Pair, direction: Tensor) -> Pair:
        gradients = _empty(velocity[0].shape), _empty(velocity[1].shape)
        column = _rows(grad.unsqueeze(1))
        for v, u, x, d_v, given in zip(velocity, target, point, gradients, (I2T, T2I)):
            parts = (column, _rows(v), _rows(u), _rows(x), d_v)
            network_kernel("flow_loss_backward", (*v.shape, 1), direction != given, *parts)
        return gradients
