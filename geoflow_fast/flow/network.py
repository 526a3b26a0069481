"""The layers of the velocity field. Both streams pass them side by side, as [2, B, H]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.directions import DIRECTIONS, Counts
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.modulation import DirectRows
from geoflow_fast.ops.adaln import adaln_rows
from geoflow_fast.ops.gate_residual import gate_residual_rows
from geoflow_fast.ops.swiglu import swiglu_rows

FREQUENCIES = 64


NORM_EPS = 1e-5


class StreamLinear(nn.Module):
    """One linear map per stream: [2, B, in] -> [2, B, out]. Weights are [2, in, out], the layout in which a batched
    product returns their gradients."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs, dtype=torch.float32).uniform_(-bound, bound))
        self.bias = (
            nn.Parameter(torch.empty(2, 1, outputs, dtype=torch.float32).uniform_(-bound, bound)) if bias else None
        )

    def forward(self, x: Tensor, stream: int | None = None) -> Tensor:
        """Maps both streams, or one `stream` alone: [B, in] -> [B, out]."""
        if stream is None:
            return torch.bmm(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)
        # The gradient of unbind is written once; that of indexing would be added into zeros.
        weight = self.weight.unbind()[stream]
        return x @ weight if self.bias is None else torch.addmm(self.bias.unbind()[stream], x, weight)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero."""
    layer = nn.Linear(inputs, outputs, dtype=torch.float32)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Conditioning(nn.Module):
    """Maps time and direction to the conditioning vectors c_I, c_T in R^H."""

    frequencies: Tensor

    def __init__(self, hidden: int, time_scale: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", time_scale * torch.randn(FREQUENCIES, dtype=torch.float32))
        self.time = nn.Linear(2 * FREQUENCIES, hidden, dtype=torch.float32)
        self.direction = nn.Embedding(len(DIRECTIONS), hidden, dtype=torch.float32)
        self.first = StreamLinear(hidden, hidden)
        self.second = StreamLinear(hidden, hidden)

    def forward(self, t: Tensor, direction: Tensor, stream: int) -> Tensor:
        """Conditioning of one stream for times [M] and direction codes [M]: [M, H]."""
        phase = 2 * math.pi * t.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies
        x = self.time(torch.cat((phase.sin(), phase.cos()), dim=-1)) + self.direction(direction)
        return self.second(functional.silu(self.first(x, stream)), stream)


class Block(nn.Module):
    """AdaLN-Zero and cross-gate, then AdaLN-Zero and SwiGLU, each a LayerScale-weighted residual, on both streams.

    The rate of dropout on the branches is an argument of each call, so that what a call computes does not depend on the
    mode of the module, which other threads may share.

    Every velocity runs its blocks through `__call__`, so hooks on a block fire. Densities by forward-mode derivatives
    (`likelihood/forward_mode.py`) have layers of their own and run no hooks.
    """

    def __init__(self, config: GeoFlowConfig) -> None:
        super().__init__()
        width = config.hidden // config.heads
        # Per stream and head: the first half gates this stream, the second is the value it sends to the other one.
        weight = torch.empty(2, config.heads, width, 2 * width, dtype=torch.float32).uniform_(
            -(width**-0.5), width**-0.5
        )
        weight[..., width:] = 0
        self.cross_weight = nn.Parameter(weight)
        self.cross_scale = nn.Parameter(torch.full((2, 1, config.hidden), config.layer_scale, dtype=torch.float32))
        self.expand = StreamLinear(config.hidden, 2 * config.inner, bias=False)
        self.contract = StreamLinear(config.inner, config.hidden, bias=False)
        self.forward_scale = nn.Parameter(torch.full((2, 1, config.hidden), config.layer_scale, dtype=torch.float32))

    def forward(
        self,
        h: Tensor,
        modulation: Sequence[Tensor],
        dropout: float = 0.0,
        counts: Counts | None = None,
        *,
        training: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the states [2, B, H] after both halves, given those before, h [2, B, H], and the block's four shifts
        and scales, each [2, 1 or B, H].

        The last block of a network is given `counts`, the rows of each direction in a sorted batch. It then computes
        and returns, as does a hook on it see, only the rows in which a stream is generated: image [B - n_i2t, H] and
        text [B - n_t2i, H]. A step of `training` has products of its own, which can be differentiated once.
        """
        h = self.cross_gate(h, modulation[0], modulation[1], dropout, training=training)
        if counts is None:
            return self.feed_forward(h, modulation[2], modulation[3], dropout)
        outputs = []
        for stream, rows in enumerate((slice(counts[0], None), slice(0, h.shape[1] - counts[2]))):
            shift, scale = (x[stream] if x.shape[1] == 1 else x[stream, rows] for x in modulation[2:])
            outputs.append(self.feed_forward(h[stream, rows], shift, scale, dropout, stream))
        return outputs[0], outputs[1]

    def cross_gate(self, h: Tensor, shift: Tensor, scale: Tensor, dropout: float, *, training: bool = False) -> Tensor:
        """First half of the block on h [2, B, H]. Both streams read the states before either is updated."""
        rows, shifts, scales = h.flatten(0, 1), shift.flatten(0, 1), scale.flatten(0, 1)
        x = adaln_rows(rows, shifts, scales, NORM_EPS, "auto")
        gate, value = self.gate_and_value(x.view(h.shape), training=training)
        keep = ops.keep_mask(rows.shape, dropout, h.device) if dropout else None
        gated: Tensor = gate_residual_rows(rows, gate, value, self.cross_scale.flatten(0, 1), keep, dropout, "auto")
        return gated.view(h.shape)

    def gate_and_value(self, x: Tensor, *, training: bool = False) -> tuple[Tensor, Tensor]:
        """The gate of each stream and the value that the other stream sends it, [2 B, H] each, from x [2, B, H].

        In `training`, products read and write heads where they stand. Else these are plain operations, which can also
        be differentiated in forward mode and compiled.
        """
        if training:
            parts: tuple[Tensor, ...] = (x, self.cross_weight)
            if torch.is_autocast_enabled(x.device.type):
                parts = tuple(y.to(torch.get_autocast_dtype(x.device.type)) for y in parts)
            gate, value = CrossProducts.apply(*parts)  # type: ignore[no-untyped-call]
            return wide(gate), wide(value)
        heads, width = self.cross_weight.shape[1:3]
        by_head = x.view(*x.shape[:2], heads, width).transpose(1, 2)
        gate, value = torch.matmul(by_head, self.cross_weight).chunk(2, dim=-1)  # each [2, heads, B, width]
        gate, value = (y.transpose(1, 2).reshape(-1, heads * width) for y in (gate, value.flip(0)))
        return gate, value

    def feed_forward(
        self, h: Tensor, shift: Tensor, scale: Tensor, dropout: float, stream: int | None = None
    ) -> Tensor:
        """Second half of the block on h [2, B, H], or on h [B, H] of one `stream`."""
        rows, shifts, scales = (x.flatten(0, -2) for x in (h, shift, scale))
        if rows.shape[0] == 0 and not dropout and not torch.is_grad_enabled():
            return h  # where gradients are wanted, the parameters get theirs, which are zero
        x = self.expand(adaln_rows(rows, shifts, scales, NORM_EPS, "auto").view(h.shape), stream)
        inner = swiglu_rows(wide(x.flatten(0, -2)), None, "auto").view(*h.shape[:-1], x.shape[-1] // 2)
        update = wide(self.contract(inner, stream).flatten(0, -2))
        weight = self.forward_scale.flatten(0, 1) if stream is None else self.forward_scale.unbind()[stream]
        keep = ops.keep_mask(rows.shape, dropout, h.device) if dropout else None
        fed: Tensor = gate_residual_rows(rows, None, update, weight, keep, dropout, "auto")
        return fed.view(h.shape)


def wide(x: Tensor) -> Tensor:
    """What a product of bfloat16 numbers returns, for an operation on its elements: the compiled ones for CPUs work in
    float32, those for GPUs in any dtype."""
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x


class CrossProducts(torch.autograd.Function):
    """Gates and values [2 B, H] of a cross-gate, from x [2, B, H] and its weights [2, heads, width, 2 width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        gate, value = torch.empty_like(x), torch.empty_like(x)
        heads, width = weight.shape[1:3]
        for stream in range(2):
            by_head = _by_head(x[stream], heads)
            torch.bmm(by_head, weight[stream, ..., :width], out=_by_head(gate[stream], heads))
            torch.bmm(by_head, weight[stream, ..., width:], out=_by_head(value[1 - stream], heads))
        return gate.flatten(0, 1), value.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gate: Tensor, d_value: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        heads, width = weight.shape[1:3]
        d_gate, d_value = d_gate.view(x.shape), d_value.view(x.shape)
        for stream in range(2):
            by_head, target = _by_head(x[stream], heads).mT, _by_head(d_x[stream], heads)
            to_gate, to_value = _by_head(d_gate[stream], heads), _by_head(d_value[1 - stream], heads)
            torch.bmm(to_gate, weight[stream, ..., :width].mT, out=target)
            target.baddbmm_(to_value, weight[stream, ..., width:].mT)
            torch.bmm(by_head, to_gate, out=d_weight[stream, ..., :width])
            torch.bmm(by_head, to_value, out=d_weight[stream, ..., width:])
        return d_x, d_weight


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Rows [B, H] as [heads, B, width], without a copy."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1)


class Modulation(nn.Module):
    """Computes shifts and scales of every half-block from the conditioning: 4 depth linear maps per stream, which start
    at zero.

    Their order in each block: shift and scale before the cross-gate, shift and scale before the feed-forward.
    """

    def __init__(self, hidden: int, depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4 * depth, 2, hidden, hidden, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(4 * depth, 2, 1, hidden, dtype=torch.float32))

    def forward(self, c: Tensor) -> Tensor:
        """[2, S, H] -> [4 depth, 2, S, H]."""
        return torch.matmul(c, self.weight) + self.bias

    def rows(self, image_c: Tensor, text_c: Tensor, counts: Counts, *, training: bool) -> tuple[Tensor, ...]:
        """4 depth tensors [2, B, H] for the rows of a sorted batch; `DirectRows` describes the arguments.

        A step of `training` has two products. Else these are plain operations, which can also be differentiated in
        forward mode and compiled.
        """
        if not training:
            n_i2t, _, n_t2i = counts
            image_rows = torch.cat((image_c[:1].expand(max(n_i2t - 1, 0), -1), image_c))
            text_rows = torch.cat((text_c, text_c[-1:].expand(max(n_t2i - 1, 0), -1)))
            c = torch.stack((image_rows, text_rows))
            return tuple(torch.baddbmm(bias, c, weight) for weight, bias in zip(self.weight, self.bias))
        parts: tuple[Tensor, ...] = (image_c, text_c, self.weight, self.bias)
        device = image_c.device.type
        if torch.is_autocast_enabled(device):
            parts = tuple(x.to(torch.get_autocast_dtype(device)) for x in parts)
        rows: tuple[Tensor, ...] = DirectRows.apply(*parts, counts)  # type: ignore[no-untyped-call]
        return rows
