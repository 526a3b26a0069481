"""The flow-matching loss: squared tangent error of the velocity on the generated spheres."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, native, network_cpu, reference, triton_kernels
from geoflow_fast.ops.rows import check_directions, check_floating, check_shape, with_derivatives
from geoflow_fast.runtime import checks


def flow_loss(
    v_image: Tensor,
    v_text: Tensor,
    target_image: Tensor,
    target_text: Tensor,
    image: Tensor,
    text: Tensor,
    direction: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Flow-matching loss |tangent part of v - target|^2, summed over the generated streams: (mean, 0-d; rows, [B]).

    `v_image`, `target_image`, `image` are [B, d_I] and their text counterparts [B, d_T]: the network's output, the
    target velocity and the point it was evaluated at. `direction` is int8 [B] with the codes of `geometry.DIRECTIONS`;
    a given stream does not count. The network's output need not be tangent: only its tangent part enters the loss, and
    the gradient is tangent. Both results are differentiable in the two velocities, but not in targets and points.
    """
    check_floating(
        v_image=v_image, v_text=v_text, target_image=target_image, target_text=target_text, image=image, text=text
    )
    checks.dense(direction, "direction")
    rows = direction.shape[0] if direction.dim() == 1 else -1
    if direction.dtype != torch.int8 or v_image.dim() != 2 or v_text.dim() != 2 or rows != v_image.shape[0]:
        raise ValueError(
            f"direction must be int8 [B] beside v_image [B, d_I], "
            f"got {direction.dtype} {tuple(direction.shape)} and {tuple(v_image.shape)}"
        )
    if v_text.shape[0] != rows:
        raise ValueError(f"v_text has {v_text.shape[0]} rows, but v_image has {rows}")
    if direction.device != v_image.device:
        raise ValueError(f"direction is on {direction.device}, but v_image is on {v_image.device}")
    check_shape(v_image.shape, "v_image", target_image=target_image, image=image)
    check_shape(v_text.shape, "v_text", target_text=target_text, text=text)
    if rows == 0:
        raise ValueError("flow_loss needs at least one row")
    if direction.device.type == "cpu":  # on a GPU the check would wait for the device in every training step
        check_directions(direction)
    losses: Tensor = with_derivatives(_FlowLoss)(
        v_image, v_text, target_image.detach(), target_text.detach(), image.detach(), text.detach(), direction, backend
    )
    return losses.mean(), losses


class _FlowLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        v_image: Tensor,
        v_text: Tensor,
        target_image: Tensor,
        target_text: Tensor,
        image: Tensor,
        text: Tensor,
        direction: Tensor,
        backend: str,
    ) -> Tensor:
        passes = dispatch.choose("flow_loss", v_image, backend)
        out: Tensor = passes.forward((v_image, v_text), (target_image, target_text), (image, text), direction)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        *tensors, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v_image, v_text, target_image, target_text, image, text, direction = ctx.saved_tensors
        # Second derivatives exist in the reference only.
        backend = "reference" if torch.is_grad_enabled() else ctx.backend
        passes = dispatch.choose("flow_loss", v_image, backend)
        gradients = passes.backward(grad, (v_image, v_text), (target_image, target_text), (image, text), direction)
        return *gradients, None, None, None, None, None, None


@dispatch.register("flow_loss", "reference", devices=dispatch.EVERYWHERE)
class _Reference:
    forward = staticmethod(reference.flow_loss)
    backward = staticmethod(reference.flow_loss_backward)


dispatch.register("flow_loss", "cpu", devices=("cpu",), missing=native.missing, dtypes=network_cpu.DTYPES)(
    network_cpu.FlowLoss
)


@dispatch.register(
    "flow_loss", "triton", devices=triton_kernels.devices, missing=triton_kernels.missing, dtypes=triton_kernels.DTYPES
)
class _Triton:
    forward = staticmethod(triton_kernels.kernel("network", "flow_loss"))
    backward = staticmethod(triton_kernels.kernel("network", "flow_loss_backward"))
