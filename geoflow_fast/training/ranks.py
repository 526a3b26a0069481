"""The sum of the gradients of several ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from geoflow_fast.distributed import World


def sum_gradients(module: nn.Module, total: Tensor, world: World) -> None:
    """Replaces the gradients of `module`, and the 0-d `total`, by their sums over the ranks, in a single call."""
    trained = [p for p in module.parameters() if p.requires_grad]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = world.all_reduce(torch.cat([*(part.reshape(-1) for part in parts), total.view(1).to(parts[0])]))
    *sums, last = flat.split([*(part.numel() for part in parts), 1])
    for parameter, reduced in zip(trained, sums):
        parameter.grad = reduced.view_as(parameter)
    total.copy_(last.squeeze(0))
