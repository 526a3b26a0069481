"""The end of a cross-gate on both streams, from the products of all heads where one batched product leaves them: each
head has its gates first and then the values that it sends to the other stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, extension
from geoflow_fast.ops.gate_residual import gate_residual_backward_reference, gate_residual_reference
from geoflow_fast.ops.triton_kernels import fused_operation


def cross_residual_reference(
    residual: Tensor,
    products: Tensor,
    layer_scale: Tensor,
    keep: Tensor | None,
    dropout: float,
) -> Tensor:
    """residual + layer_scale * sigmoid(own gates) * values of the other stream: [2 B, H], image rows first.

    `products` is [2 heads, B, 2 H / heads], the image's heads first; `layer_scale` is [2, H]; `keep` [2 B, H] and
    `dropout` are those of `gate_residual`.
    """
    gate, value = _split(products)
    return gate_residual_reference(residual, gate, value, layer_scale, keep, dropout)


def cross_residual_backward_reference(
    grad: Tensor,
    products: Tensor,
    layer_scale: Tensor,
    keep: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to products and layer_scale; that of residual is `grad` itself."""
    gate, value = _split(products)
    d_gate, d_value, d_layer_scale = gate_residual_backward_reference(grad, gate, value, layer_scale, keep, dropout)
    heads, rows, columns = len(products) // 2, *products.shape[1:]
    d_gates, d_values = (x.view(2, rows, heads, columns // 2).transpose(1, 2) for x in (d_gate, d_value))
    return torch.cat((d_gates, d_values.flip(0)), dim=-1).view(products.shape), d_layer_scale


def _split(products: Tensor) -> tuple[Tensor, Tensor]:
    """Gates of each stream, and values of the other one, [2 B, H] each."""
    gate, value = products.unflatten(0, (2, -1)).chunk(2, dim=-1)
    _, heads, rows, width = gate.shape
    shape = 2 * rows, heads * width
    return gate.transpose(1, 2).reshape(shape), value.flip(0).transpose(1, 2).reshape(shape)


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, products, layer_scale, keep, ctx.dropout, ctx.backend = inputs
        ctx.save_for_backward(products, layer_scale, keep)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        products, layer_scale, keep = ctx.saved_tensors
        gradients = _backward(grad, products, layer_scale, keep, ctx.dropout, ctx.backend)
        return grad, *gradients, None, None, None


cross_residual_rows = fused_operation(
    "network",
    "cross_residual",
    cross_residual_reference,
    extension.bound("cross_residual"),
    derivatives=_Derivatives,
)
"""The operation; the last argument is the name of a backend."""
_backward = fused_operation(
    "network",
    "cross_residual_backward",
    cross_residual_backward_reference,
    extension.bound("cross_residual_backward", like=(1, 2)),
    part_of="cross_residual",
)
