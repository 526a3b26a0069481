"""The flow-matching loss: squared tangent error of the velocity on the generated spheres."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from geoflow_fast.directions import Direction, check_codes
from geoflow_fast.geometry import capturing, tangent_part
from geoflow_fast.ops import dispatch, extension
from geoflow_fast.ops.arguments import check_floating, check_shape, working_dtype
from geoflow_fast.ops.triton_kernels import WIDEST_ROW, fused_operation
from geoflow_fast.runtime import checks

GIVEN = (Direction.I2T.code, Direction.T2I.code)
"""The codes of the directions in which the image and the text are given."""


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
    target velocity and the point it was evaluated at. `direction` is int8 [B] with the codes of `DIRECTIONS`;
    a given stream does not count. The network's output need not be tangent: only its tangent part enters the loss, and
    the gradient is tangent. Both results are differentiable in the two velocities, but not in targets and points.
    """
    losses: Tensor = _forward(v_image, v_text, target_image, target_text, image, text, direction, backend)
    return losses.mean(), losses


def _check(
    v_image: Tensor,
    v_text: Tensor,
    target_image: Tensor,
    target_text: Tensor,
    image: Tensor,
    text: Tensor,
    direction: Tensor,
) -> None:
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
    # On a GPU the check would wait for the device in every training step.
    if direction.device.type == "cpu" and not (capturing(direction) or is_fake(direction)):
        check_codes(direction)


# ---- plain torch ---------------------------------------------------------------------------------------------------


def flow_loss_reference(
    v_image: Tensor,
    v_text: Tensor,
    target_image: Tensor,
    target_text: Tensor,
    image: Tensor,
    text: Tensor,
    direction: Tensor,
) -> Tensor:
    """Squared norm of the tangent part of velocity - target, summed over the generated spheres: one loss per row
    [B]."""
    total = torch.zeros(direction.shape, dtype=working_dtype(v_image), device=direction.device)
    streams = zip((v_image, v_text), (target_image, target_text), (image, text), GIVEN)
    for velocity, target, point, given in streams:
        squared = _tangent_error(velocity, target, point).square().sum(-1)
        total = total + torch.where(direction == given, torch.zeros_like(squared), squared)
    return total


def flow_loss_backward_reference(
    grad: Tensor,
    v_image: Tensor,
    v_text: Tensor,
    target_image: Tensor,
    target_text: Tensor,
    image: Tensor,
    text: Tensor,
    direction: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of `flow_loss` with respect to the two velocities, from that of the row losses [B]."""
    gradients = []
    streams = zip((v_image, v_text), (target_image, target_text), (image, text), GIVEN)
    for velocity, target, point, given in streams:
        weight = torch.where(direction == given, torch.zeros_like(grad), 2 * grad).unsqueeze(-1)
        zeros = torch.zeros_like(velocity, dtype=grad.dtype)
        error = torch.where(weight == 0, zeros, _tangent_error(velocity, target, point))
        gradients.append((weight * error).to(velocity.dtype))
    return gradients[0], gradients[1]


def _tangent_error(velocity: Tensor, target: Tensor, point: Tensor) -> Tensor:
    work = working_dtype(velocity)
    return tangent_part(point.detach().to(work), velocity.to(work) - target.detach().to(work))


# ---- declarations --------------------------------------------------------------------------------------------------


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        *tensors, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grad, *ctx.saved_tensors, ctx.backend), None, None, None, None, None, None


_forward = fused_operation(
    "network",
    "flow_loss",
    flow_loss_reference,
    extension.bound("flow_loss"),
    check=_check,
    widest=WIDEST_ROW,
    derivatives=_Derivatives,
    rowwise=True,
)
_backward = fused_operation(
    "network",
    "flow_loss_backward",
    flow_loss_backward_reference,
    extension.bound("flow_loss_backward", like=(1, 2)),
    widest=WIDEST_ROW,
    rowwise=True,
    part_of="flow_loss",
)
