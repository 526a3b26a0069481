"""The layers of the velocity field. Both streams pass them side by side, as [2, B, H]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.directions import DIRECTIONS, Counts, Direction
from geoflow_fast.flow.config import GeoFlowConfig
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

    Every velocity runs its blocks through `__call__`, so hooks on a block fire; solvers do so too if there are hooks.
    Without any, and for densities by forward-mode derivatives, `flow/forward_mode.py` has layers of its own.
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
        self, h: Tensor, modulation: Sequence[Tensor], dropout: float = 0.0, counts: Counts | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the states [2, B, H] after both halves, given those before, h [2, B, H], and the block's four shifts
        and scales, each [2, 1 or B, H].

        The last block of a network is given `counts`, the rows of each direction in a sorted batch. It then computes
        and returns, as does a hook on it see, only the rows in which a stream is generated: image [B - n_i2t, H] and
        text [B - n_t2i, H].
        """
        h = self.cross_gate(h, modulation[0], modulation[1], dropout)
        if counts is None:
            return self.feed_forward(h, modulation[2], modulation[3], dropout)
        outputs = []
        for stream, rows in enumerate((slice(counts[0], None), slice(0, h.shape[1] - counts[2]))):
            shift, scale = (x[stream] if x.shape[1] == 1 else x[stream, rows] for x in modulation[2:])
            outputs.append(self.feed_forward(h[stream, rows], shift, scale, dropout, stream))
        return outputs[0], outputs[1]

    def cross_gate(self, h: Tensor, shift: Tensor, scale: Tensor, dropout: float) -> Tensor:
        """First half of the block on h [2, B, H]. Both streams read the states before either is updated."""
        heads, width = self.cross_weight.shape[1:3]
        rows, shifts, scales = h.flatten(0, 1), shift.flatten(0, 1), scale.flatten(0, 1)
        x = adaln_rows(rows, shifts, scales, NORM_EPS, "auto").view(*h.shape[:2], heads, width).transpose(1, 2)
        gate, value = torch.matmul(x, self.cross_weight).chunk(2, dim=-1)  # each [2, heads, B, width]
        gate, value = (y.transpose(1, 2).reshape(rows.shape) for y in (gate, value.flip(0)))
        keep = ops.keep_mask(rows.shape, dropout, h.device) if dropout else None
        gated: Tensor = gate_residual_rows(rows, gate, value, self.cross_scale.flatten(0, 1), keep, dropout, "auto")
        return gated.view(h.shape)

    def feed_forward(
        self, h: Tensor, shift: Tensor, scale: Tensor, dropout: float, stream: int | None = None
    ) -> Tensor:
        """Second half of the block on h [2, B, H], or on h [B, H] of one `stream`."""
        rows, shifts, scales = (x.flatten(0, -2) for x in (h, shift, scale))
        if rows.shape[0] == 0 and not dropout and not torch.is_grad_enabled():
            return h  # where gradients are wanted, the parameters get theirs, which are zero
        x = self.expand(adaln_rows(rows, shifts, scales, NORM_EPS, "auto").view(h.shape), stream)
        inner = swiglu_rows(x.flatten(0, -2), None, "auto").view(*h.shape[:-1], x.shape[-1] // 2)
        update = self.contract(inner, stream).flatten(0, -2)
        weight = self.forward_scale.flatten(0, 1) if stream is None else self.forward_scale.unbind()[stream]
        keep = ops.keep_mask(rows.shape, dropout, h.device) if dropout else None
        fed: Tensor = gate_residual_rows(rows, None, update, weight, keep, dropout, "auto")
        return fed.view(h.shape)


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

    def rows(self, image_c: Tensor, text_c: Tensor, counts: Counts) -> tuple[Tensor, ...]:
        """4 depth tensors [2, B, H] for the rows of a sorted batch; `RowModulation` describes the arguments.

        Training mode avoids copies of the conditioning. Eval mode is made of plain operations, which can also be
        differentiated in forward mode and compiled.
        """
        if not self.training or torch.compiler.is_compiling():
            n_i2t, _, n_t2i = counts
            image_rows = torch.cat((image_c[:1].expand(n_i2t, -1), image_c[1:]))
            text_rows = torch.cat((text_c[1:], text_c[:1].expand(n_t2i, -1)))
            c = torch.stack((image_rows, text_rows))
            return tuple(torch.baddbmm(bias, c, weight) for weight, bias in zip(self.weight, self.bias))
        parts: tuple[Tensor, ...] = (image_c, text_c, self.weight, self.bias)
        device = image_c.device.type
        if torch.is_autocast_enabled(device):
            parts = tuple(x.to(torch.get_autocast_dtype(device)) for x in parts)
        rows: tuple[Tensor, ...] = RowModulation.apply(*parts, counts)  # type: ignore[no-untyped-call]
        return rows


def shared_modulations(conditioning: Conditioning, modulation: Modulation, t: Tensor, direction: Direction) -> Tensor:
    """AdaLN shifts and scales of every half-block at the times `t` [S], shared by all rows: [S, 4 depth, 2, 1, H]."""
    codes = torch.full(t.shape, direction.code, device=t.device)
    times = (torch.zeros_like(t) if stream == direction.given else t for stream in range(2))
    c = torch.stack([conditioning(time, codes, stream) for stream, time in enumerate(times)])
    return modulation(c).unsqueeze(3).movedim(2, 0)


class RowModulation(torch.autograd.Function):
    """Shifts and scales of rows that each have a time of their own, without copies of the conditioning.

    `image_c` [1 + M_I, H]: row 0 serves the first B - M_I rows of the batch, those in which the image is given and
    which are therefore alike; each other row serves one. `text_c` [1 + M_T, H]: row 0 serves the last B - M_T rows.
    """

    @staticmethod
    def forward(
        ctx: Any, image_c: Tensor, text_c: Tensor, weight: Tensor, bias: Tensor, counts: Counts
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(image_c, text_c, weight)
        ctx.counts = counts
        outputs = []
        for part_weight, part_bias in zip(weight, bias):
            out = image_c.new_empty(2, sum(counts), image_c.shape[1])
            for stream, (c, own, given) in enumerate(_row_ranges(image_c, text_c, counts)):
                torch.addmm(part_bias[stream], c[1:], part_weight[stream], out=out[stream, own])
                out[stream, given] = torch.addmm(part_bias[stream], c[:1], part_weight[stream])
            outputs.append(out)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        image_c, text_c, weight = ctx.saved_tensors
        d_weight = torch.empty_like(weight)
        d_bias = weight.new_empty(len(weight), 2, 1, weight.shape[-1])
        d_c = (torch.zeros_like(image_c), torch.zeros_like(text_c))
        for part, grad in enumerate(grads):
            for stream, (c, own, given) in enumerate(_row_ranges(image_c, text_c, ctx.counts)):
                g, shared = grad[stream, own], grad[stream, given].sum(0, keepdim=True)
                torch.mm(c[1:].T, g, out=d_weight[part, stream]).addmm_(c[:1].T, shared)
                torch.add(g.sum(0, keepdim=True), shared, out=d_bias[part, stream])
                d_c[stream][1:].addmm_(g, weight[part, stream].T)
                d_c[stream][:1].addmm_(shared, weight[part, stream].T)
        return d_c[0], d_c[1], d_weight, d_bias, None


def _row_ranges(image_c: Tensor, text_c: Tensor, counts: Counts) -> tuple[tuple[Tensor, slice, slice], ...]:
    """Returns for each stream its conditioning, the rows in which it is generated and those in which it is given."""
    n_i2t, n_joint, n_t2i = counts
    end = n_i2t + n_joint
    return (image_c, slice(n_i2t, None), slice(0, n_i2t)), (text_c, slice(0, end), slice(end, end + n_t2i))
