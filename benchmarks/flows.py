"""Networks to time: random weights will do, as long as points move as far as those of a trained flow do."""

from __future__ import annotations

import math

import torch

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform


@torch.no_grad()
def random_flow(config: gf.GeoFlowConfig) -> gf.GeoFlow:
    """Random weights, scaled so that a point goes a quarter turn from t=0 to t=1, as from noise to an embedding."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(config).eval().requires_grad_(False)
    for parameter in flow.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    image, text = (sample_uniform(64, d) for d in config.flow_dims)
    for decoder, velocity in zip(flow.decoders, flow.velocity(image, text, 0.5, "joint")):
        scale = math.pi / 2 / float(velocity.norm(dim=1).mean())
        for parameter in decoder[-1].parameters():
            parameter.mul_(scale)
    return flow


def row_flops(config: gf.GeoFlowConfig, direction: str) -> float:
    """Float operations of the matrix products of one velocity of one row, modulations and a given stream's encoding
    shared by all rows: two per weight. The last feed-forward and the decoder of a given stream are not needed."""
    h, (image, text) = config.hidden, config.flow_dims
    moving = {"joint": image + text, "i2t": text, "t2i": image}[direction]
    cross, feed_forward = 2 * h * h / config.heads, 3 * h * config.inner
    halves = 2 * config.depth - (direction != "joint")
    return 2.0 * (2 * moving * h + 2 * config.depth * cross + halves * feed_forward)
