"""The fused operations in plain torch: slow, obvious, differentiable, and the truth for their faster twins."""

from __future__ import annotations

import torch
from torch import Tensor

from geoflow_fast.geometry import DIRECTIONS, interpolate

I2T, T2I = DIRECTIONS.index("i2t"), DIRECTIONS.index("t2i")


def masked_interpolant(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, t: Tensor, direction: Tensor, drop: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Point and target velocity on both spheres, [B, d_I] and [B, d_T], with the given stream pinned to its data.

    Each stream follows its geodesic from noise (t=0) to data (t=1) unless `direction` [B] says that it is given: then
    it is its data point, or its noise where `drop` [B] is set, at zero velocity.
    """
    image = _stream(image0, image1, t, direction == I2T, drop)
    text = _stream(text0, text1, t, direction == T2I, drop)
    return image[0], text[0], image[1], text[1]


def _stream(noise: Tensor, data: Tensor, t: Tensor, given: Tensor, drop: Tensor | None) -> tuple[Tensor, Tensor]:
    point, velocity = interpolate(noise, data, t)
    given = given.unsqueeze(-1)
    shown = data if drop is None else torch.where(drop.unsqueeze(-1), noise, data)
    return torch.where(given, shown, point), torch.where(given, torch.zeros_like(velocity), velocity)
