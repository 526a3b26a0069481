"""The layers of the velocity field. Both streams pass them side by side, as [2, B, H]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.directions import DIRECTIONS, Counts, Direction
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.modulation import DirectRows
from geoflow_fast.ops.adaln import adaln_half_rows, adaln_rows
from geoflow_fast.ops.cross_residual import cross_residual_rows
from geoflow_fast.ops.gate_residual import gate_residual_rows
from geoflow_fast.ops.product import add_product, product, product_into
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
        states, shifts, scales = (generated_rows(x, counts, training=training) for x in (h, *modulation[2:]))
        maps = zip(self.expand.streams(), self.contract.streams(), self.forward_scale.unbind())
        image, text = (
            self._feed(own, shift, scale, dropout, *parts, self.expand.weight.dtype)
            for own, shift, scale, parts in zip(states, shifts, scales, maps)
        )
        return image, text

    def cross_gate(self, h: Tensor, shift: Tensor, scale: Tensor, dropout: float, *, training: bool = False) -> Tensor:
        """First half of the block on h [2, B, H]. Both streams read the states before either is updated."""
        rows, shifts, scales = h.flatten(0, 1), shift.flatten(0, 1), scale.flatten(0, 1)
        x = normalised(rows, shifts, scales, self.cross_weight.dtype).view(h.shape)
        keep = ops.keep_mask(rows.shape, dropout, h.device) if dropout else None
        if training and h.is_cuda:
            parts = in_product_dtype(x, self.cross_weight)
            products = HeadProducts.apply(*parts).flatten(0, 1)  # type: ignore[no-untyped-call]
            scale, heads = self.cross_scale.flatten(0, 1), self.cross_weight.shape[1]
            return cross_residual_rows(rows, products, scale, keep, dropout, heads, "auto").view(h.shape)
        gate, value = self.gate_and_value(x, training=training)
        gated: Tensor = gate_residual_rows(rows, gate, value, self.cross_scale.flatten(0, 1), keep, dropout, "auto")
        return gated.view(h.shape)

    def gate_and_value(self, x: Tensor, *, training: bool = False) -> tuple[Tensor, Tensor]:
        """The gate of each stream and the value that the other stream sends it, [2 B, H] each, from x [2, B, H].

        In `training`, products read and write heads where they stand. Else these are plain operations, which can also
        be differentiated in forward mode and compiled.
        """
        if training:
            gate, value = CrossProducts.apply(*in_product_dtype(x, self.cross_weight))  # type: ignore[no-untyped-call]
            return wide(gate), wide(value)
        heads, width = self.cross_weight.shape[1:3]
        by_head = x.view(*x.shape[:2], heads, width).transpose(1, 2).to(self.cross_weight.dtype)
        gate, value = torch.matmul(by_head, self.cross_weight).chunk(2, dim=-1)  # each [2, heads, B, width]
        gate, value = (y.transpose(1, 2).reshape(-1, heads * width) for y in (gate, value.flip(0)))
        return gate, value

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


def generated_rows(x: Tensor, counts: Counts, *, training: bool) -> tuple[Tensor, Tensor]:
    """The rows of x [2, B, H] in which a stream is generated, image [B - n_i2t, H] and text [B - n_t2i, H]; or, of
    [2, 1, H], the row that serves all."""
    if x.shape[1] == 1 and sum(counts) != 1:
        image, text = x.unbind()
        return image, text
    if training:
        image, text = GeneratedRows.apply(x, counts)  # type: ignore[no-untyped-call]
        return image, text
    return x[0, counts[0] :], x[1, : x.shape[1] - counts[2]]


class GeneratedRows(torch.autograd.Function):
    """`generated_rows`, whose gradients are written into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
        ctx.counts = counts
        return x[0, counts[0] :], x[1, : x.shape[1] - counts[2]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, image: Tensor, text: Tensor) -> tuple[Tensor, None]:
        grad = image.new_zeros(2, sum(ctx.counts), image.shape[1])
        grad[0, ctx.counts[0] :], grad[1, : len(text)] = image, text
        return grad, None


def normalised(rows: Tensor, shifts: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Adaptive LayerNorm of rows [R, H]. For weights of bfloat16 a GPU writes it in their `dtype` at once."""
    if rows.is_cuda and rows.dtype == torch.float32 and dtype == torch.bfloat16:
        half: Tensor = adaln_half_rows(rows, shifts, scales, NORM_EPS, "auto")
        return half
    y: Tensor = adaln_rows(rows, shifts, scales, NORM_EPS, "auto")
    return y


def in_product_dtype(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of a product in the dtype of the weights or, under autocast, in that of autocast."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return x.to(dtype), weight.to(dtype)


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
            product_into(_by_head(gate[stream], heads), by_head, weight[stream, ..., :width])
            product_into(_by_head(value[1 - stream], heads), by_head, weight[stream, ..., width:])
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
            product_into(target, to_gate, weight[stream, ..., :width].mT)
            add_product(target, to_value, weight[stream, ..., width:].mT)
            product_into(d_weight[stream, ..., :width], by_head, to_gate)
            product_into(d_weight[stream, ..., width:], by_head, to_value)
        return d_x, d_weight


class HeadProducts(torch.autograd.Function):
    """The products [2, B, 2 H] of all heads of x [2, B, H] with weights [2, heads, width, 2 width]: one batched product
    per stream, whose result `cross_residual_rows` reads where it stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        products = x.new_empty(*x.shape[:2], 2 * x.shape[2])
        for stream, own in enumerate(weight):
            torch.bmm(_by_head(x[stream], len(own)), own, out=_by_head(products[stream], len(own)))
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        for stream, own in enumerate(weight):
            by_head = _by_head(grad[stream], len(own))
            torch.bmm(by_head, own.mT, out=_by_head(d_x[stream], len(own)))
            torch.bmm(_by_head(x[stream], len(own)).mT, by_head, out=d_weight[stream])
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


def shared_modulations(conditioning: Conditioning, modulation: Modulation, t: Tensor, direction: Direction) -> Tensor:
    """AdaLN shifts and scales of every half-block at the times `t` [S], shared by all rows: [S, 4 depth, 2, 1, H]."""
    codes = torch.full(t.shape, direction.code, device=t.device)
    times = (torch.zeros_like(t) if stream == direction.given else t for stream in range(2))
    c = torch.stack([conditioning(time, codes, stream) for stream, time in enumerate(times)])
    return modulation(c).unsqueeze(3).movedim(2, 0)
