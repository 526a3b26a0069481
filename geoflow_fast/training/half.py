"""Weights of products in bfloat16 beside the float32 weights that are trained: converted once a step, all at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from geoflow_fast.flow.network import Block, Modulation, StreamLinear

PRODUCTS = (nn.Linear, StreamLinear, Modulation)
"""Modules all of whose parameters are factors or summands of products."""


class HalfTwin:
    """A twin of a flow's `module` whose products are those of bfloat16 numbers, and which shares everything else with
    it: norms, LayerScales, buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = _shallow_copy(module)
        self._weights: list[nn.Parameter] = []
        self._halves: list[nn.Parameter] = []
        for part, twin in zip(module.modules(), self.module.modules()):
            for name, weight in _product_weights(part):
                half = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), weight.requires_grad)
                twin._parameters[name] = half
                self._weights.append(weight)
                self._halves.append(half)

    def refresh(self) -> None:
        """Takes over the weights."""
        torch._foreach_copy_([x.detach() for x in self._halves], [x.detach() for x in self._weights])

    def hand_over_gradients(self) -> None:
        """Adds the gradients of the twin to those of the weights, and forgets them."""
        pairs = [(x, half.grad) for x, half in zip(self._weights, self._halves) if half.grad is not None]
        first = [(x, grad) for x, grad in pairs if x.grad is None]
        later = [(x.grad, grad) for x, grad in pairs if x.grad is not None]
        if later:
            torch._foreach_add_([total for total, _ in later], [grad.float() for _, grad in later])
        for x, _ in first:
            x.grad = torch.empty_like(x)
        if first:
            torch._foreach_copy_([x.grad for x, _ in first if x.grad is not None], [grad for _, grad in first])
        for half in self._halves:
            half.grad = None


def _product_weights(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in part._parameters.items():
        chosen = isinstance(part, PRODUCTS) or (isinstance(part, Block) and name == "cross_weight")
        if chosen and parameter is not None:
            yield name, parameter


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module with submodules of its own and the same parameters and buffers."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._modules = {name: None if part is None else _shallow_copy(part) for name, part in module._modules.items()}
    return twin
