"""The layers of the velocity field. Both streams pass them side by side, as [2, B, H]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.directions import DIRECTIONS, Counts, Direction
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.ops.adaln import adaln_half_rows, adaln_rows
from geoflow_fast.ops.cross_residual import cross_residual_rows
from geoflow_fast.ops.gate_residual import gate_residual_rows
from geoflow_fast.ops.product import product
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
            x = x.to(self.weight.dtype)
            return product(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)
        return self.streams()[stream](x)

    def streams(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        """The maps of the two streams, each [B, in] -> [B, out]. Taken apart once, their gradients are joined once."""
        if self.bias is None:
            return tuple(partial(_product, weight) for weight in self.weight.unbind())
        parts = zip(self.weight.unbind(), self.bias.unbind())
        return tuple(partial(_affine, weight, bias) for weight, bias in parts)


def _product(weight: Tensor, x: Tensor) -> Tensor:
    return product(x.to(weight.dtype), weight)


def _affine(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.addmm(bias, x.to(weight.dtype), weight)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero."""
    layer = nn.Linear(inputs, outputs, dtype=torch.float32)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def encode(encoder: nn.Module, x: Tensor) -> Tensor:
    """What an encoder, a linear map and a norm, makes of points [B, d]. Each takes its own dtype."""
    linear, norm = cast(tuple[nn.Linear, nn.LayerNorm], encoder)
    if linear.weight.dtype == norm.weight.dtype:
        return cast(Tensor, encoder(x.to(linear.weight.dtype)))
    return cast(Tensor, norm(linear(x.to(linear.weight.dtype)).to(norm.weight.dtype)))


def decode(decoder: nn.Module, h: Tensor) -> Tensor:
    """What a decoder, a norm and a linear map, makes of states [B, H]. Each takes its own dtype."""
    norm, linear = cast(tuple[nn.LayerNorm, nn.Linear], decoder)
    if linear.weight.dtype == norm.weight.dtype:
        return cast(Tensor, decoder(h.to(norm.weight.dtype)))
    return cast(Tensor, linear(norm(h).to(linear.weight.dtype)))


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
        return self.second(functional.silu(self.first(self._features(t, direction), stream)), stream)

    def both(self, times: tuple[Tensor, Tensor], codes: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Conditioning of both streams, [M, H] each, for times and direction codes of each."""
        features = self._features(torch.cat(times), torch.cat(codes)).split([len(t) for t in times])
        streams = zip(features, self.first.streams(), self.second.streams())
        return [second(functional.silu(first(x))) for x, first, second in streams]

    def _features(self, t: Tensor, direction: Tensor) -> Tensor:
        """What both streams know about times [M] and directions [M]: [M, H]."""
        phase = 2 * math.pi * t.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies
        waves = torch.cat((phase.sin(), phase.cos()), dim=-1)
        return self.time(waves.to(self.time.weight.dtype)) + self.direction(direction)


class Block(nn.Module):
    """AdaLN-Zero and cross-gate, then AdaLN-Zero and SwiGLU, each a LayerScale-weighted residual, on both streams.

    The rate of dropout on the branches is an argument of each call, so that what a call computes does not depend on the
    mode of the module, which other threads may share.

    `GeoFlow.velocity` and training run blocks through `__call__`, so hooks on a block fire. Samples and densities have
    layers of their own, in `flow/inference.py`.
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
        states, shifts, scales = (generated_rows(x, counts) for x in (h, *modulation[2:]))
        maps = zip(self.expand.streams(), self.contract.streams(), self.forward_scale.unbind())
        image, text = (
            self._feed(own, shift, scale, dropout, *parts, self.expand.weight.dtype)
            for own, shift, scale, parts in zip(states, shifts, scales, maps)
        )
        return image, text

    def cross_gate(self, h: Tensor, shift: Tensor, scale: Tensor, dropout: float) -> Tensor:
        """First half of the block on h [2, B, H]. Both streams read the states before either is updated."""
        rows, shifts, scales = h.flatten(0, 1), shift.flatten(0, 1), scale.flatten(0, 1)
        x = normalised(rows, shifts, scales, self.cross_weight.dtype).view(h.shape)
        products = wide(head_products(x, self.cross_weight))
        keep = ops.keep_mask(rows.shape, dropout, h.device) if dropout else None
        weight = self.cross_scale.flatten(0, 1)
        gated: Tensor = cross_residual_rows(rows, products, weight, keep, dropout, "auto")
        return gated.view(h.shape)

    def feed_forward(self, h: Tensor, shift: Tensor, scale: Tensor, dropout: float) -> Tensor:
        """Second half of the block on h [2, B, H]."""
        weight, dtype = self.forward_scale.flatten(0, 1), self.expand.weight.dtype
        return self._feed(h, shift, scale, dropout, self.expand, self.contract, weight, dtype)

    @staticmethod
    def _feed(
        h: Tensor,
        shift: Tensor,
        scale: Tensor,
        dropout: float,
        expand: Callable[[Tensor], Tensor],
        contract: Callable[[Tensor], Tensor],
        weight: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Second half of a block on h [2, B, H] of both streams, or [B, H] of one, by its maps, whose weights are of
        `dtype`, and LayerScale."""
        rows, shifts, scales = (x.flatten(0, -2) for x in (h, shift, scale))
        if rows.shape[0] == 0 and not dropout and not torch.is_grad_enabled():
            return h  # where gradients are wanted, the parameters get theirs, which are zero
        x = expand(normalised(rows, shifts, scales, dtype).view(h.shape))
        inner = swiglu_rows(wide(x.flatten(0, -2)), None, "auto").view(*h.shape[:-1], x.shape[-1] // 2)
        update = wide(contract(inner).flatten(0, -2))
        keep = ops.keep_mask(rows.shape, dropout, h.device) if dropout else None
        fed: Tensor = gate_residual_rows(rows, None, update, weight, keep, dropout, "auto")
        return fed.view(h.shape)


def generated_rows(x: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
    """The rows of x [2, B, H] in which a stream is generated, image [B - n_i2t, H] and text [B - n_t2i, H]; or, of
    [2, 1, H], the row that serves all."""
    image, text = x.unbind()
    if x.shape[1] == 1 and sum(counts) != 1:
        return image, text
    return image[counts[0] :], text[: len(text) - counts[2]]


def normalised(rows: Tensor, shifts: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Adaptive LayerNorm of rows [R, H]. For weights of bfloat16 a GPU writes it in their `dtype` at once."""
    if rows.is_cuda and rows.dtype == torch.float32 and dtype == torch.bfloat16:
        half: Tensor = adaln_half_rows(rows, shifts, scales, NORM_EPS, "auto")
        return half
    y: Tensor = adaln_rows(rows, shifts, scales, NORM_EPS, "auto")
    return y


def wide(x: Tensor) -> Tensor:
    """What a product of bfloat16 numbers returns, for an operation on its elements: the compiled ones for CPUs work in
    float32, those for GPUs in any dtype."""
    return x.float() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x


def head_products(x: Tensor, weight: Tensor) -> Tensor:
    """The products [2 heads, B, 2 width] of the heads of both streams, x [2, B, heads * width], with their `weight` [2,
    heads, width, 2 width]."""
    by_head = x.unflatten(2, (weight.shape[1], -1)).transpose(1, 2).to(weight.dtype)
    return product(by_head.flatten(0, 1), weight.flatten(0, 1))


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
        """4 depth tensors [2, B, H] for the rows of a sorted batch, from the conditioning of each stream. Of the
        image's, the i2t rows, in which it is given, share the first; of the text's, the t2i rows share the last."""
        n_i2t, n_joint, n_t2i = counts
        rows = []
        for stream, c in enumerate((image_c, text_c)):
            c = c.to(self.weight.dtype).expand(len(self.weight), -1, -1)
            rows.append(torch.baddbmm(self.bias[:, stream], c, self.weight[:, stream]))
        image, text = rows
        if n_i2t:
            shared, image = image.split((1, n_joint + n_t2i), dim=1)
            image = torch.cat((shared.expand(-1, n_i2t, -1), image), dim=1)
        if n_t2i:
            text, shared = text.split((n_i2t + n_joint, 1), dim=1)
            text = torch.cat((text, shared.expand(-1, n_t2i, -1)), dim=1)
        return torch.stack((image, text), dim=1).unbind()


def shared_modulations(conditioning: Conditioning, modulation: Modulation, t: Tensor, direction: Direction) -> Tensor:
    """AdaLN shifts and scales of every half-block at the times `t` [S], shared by all rows: [S, 4 depth, 2, 1, H]."""
    codes = torch.full(t.shape, direction.code, device=t.device)
    times = (torch.zeros_like(t) if stream == direction.given else t for stream in range(2))
    c = torch.stack([conditioning(time, codes, stream) for stream, time in enumerate(times)])
    return modulation(c).unsqueeze(3).movedim(2, 0)
