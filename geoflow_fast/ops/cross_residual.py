"""The end of a cross-gate on both streams, from the products of all heads as one matrix: each head has its gates first
and then the values that it sends to the other stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, triton_kernels
from geoflow_fast.ops.gate_residual import gate_residual_backward_reference, gate_residual_reference


def cross_residual_reference(
    residual: Tensor, products: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float, heads: int
) -> Tensor:
    """residual + layer_scale * sigmoid(own gates) * values of the other stream: [2 B, H], image rows first.

    `products` is [2 B, 2 H], `layer_scale` [2, H]; `keep` [2 B, H] and `dropout` are those of `gate_residual`.
    """
    gate, value = _split(products, heads)
    return gate_residual_reference(residual, gate, value, layer_scale, keep, dropout)


def cross_residual_backward_reference(
    grad: Tensor, products: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float, heads: int
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to products and layer_scale; that of residual is `grad` itself."""
    gate, value = _split(products, heads)
    d_gate, d_value, d_layer_scale = gate_residual_backward_reference(grad, gate, value, layer_scale, keep, dropout)
    shape = 2, len(grad) // 2, heads, -1
    joined = torch.stack((d_gate.view(shape), d_value.view(shape).flip(0)), dim=3)
    return joined.reshape(products.shape), d_layer_scale


def _split(products: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Gates of each stream, and values of the other one, [2 B, H] each."""
    by_head = products.view(2, len(products) // 2, heads, 2, -1)
    rows = len(products), products.shape[1] // 2
    return by_head[:, :, :, 0].reshape(rows), by_head[:, :, :, 1].flip(0).reshape(rows)


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, products, layer_scale, keep, ctx.dropout, ctx.heads, ctx.backend = inputs
        ctx.save_for_backward(products, layer_scale, keep)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        products, layer_scale, keep = ctx.saved_tensors
        gradients = _backward(grad, products, layer_scale, keep, ctx.dropout, ctx.heads, ctx.backend)
        return grad, *gradients, None, None, None, None


cross_residual_rows = dispatch.operation(
    "cross_residual",
    cross_residual_reference,
    triton=triton_kernels.backend("network", "cross_residual"),
    derivatives=_Derivatives,
)
"""The operation, unchecked; the last argument is the name of a backend."""
_backward = dispatch.operation(
    "cross_residual_backward",
    cross_residual_backward_reference,
    triton=triton_kernels.backend("network", "cross_residual_backward"),
    part_of="cross_residual",
)
