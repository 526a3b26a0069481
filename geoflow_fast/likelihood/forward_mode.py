"""Forward mode of the network by hand: points and their tangents pass every layer together, without an autograd tape.

Several solves (rows of one direction each) share one pass. A solve of B pairs with K tangents owns (1 + K) B rows of
every activation: the points, then the tangents one after the other. So each layer is one matrix product per stream over
all rows of all solves, and the tangents of a point share what depends on the point alone. What no output needs is not
computed: the encoding of a given stream (it never moves, so once will do), the last feed-forward and the decoder of a
given stream, and those of the tangents that are not read from a stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from geoflow_fast import ops
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.network import NORM_EPS, Block

GENERATED = {"joint": (0, 1), "i2t": (1,), "t2i": (0,)}
"""Streams that move (0 image, 1 text), by direction."""


Modulation = Sequence[Sequence[Tensor]]
"""Shifts and scales of every half-block, by number and stream: [1, H] each."""


Dual = tuple[Tensor, Tensor]
"""Rows [B, W] and their tangents [K, B, W]."""


@dataclass(frozen=True)
class Solve:
    """Input of one direction. `image` and `text`: for a generated stream the points [B, d] and tangents [K, B, d], for
    a given one its encoding [B, H] (see `ForwardMode.encode`) and no tangents, [0, B, d].

    `paired`: tangent k moves both streams at once, with the k-th of either; otherwise each tangent moves its own stream
    and leaves the other alone, the image's first.
    """

    direction: str
    image: Dual
    text: Dual
    paired: bool = False

    @property
    def rows(self) -> int:
        """Pairs B."""
        return len(self.image[0])

    @property
    def tangents(self) -> int:
        """Tangents K of the solve."""
        return max(map(len, self.own)) if self.paired else sum(map(len, self.own))

    @property
    def own(self) -> tuple[range, range]:
        """Which of the solve's tangents move each stream, and are read from it."""
        image, text = len(self.image[1]), len(self.text[1])
        return range(image), range(0 if self.paired else image, text if self.paired else image + text)


@dataclass(frozen=True)
class Span:
    """Rows of one solve in a stacked matrix: its points from `primal` on, `count` tangents from `tangent` on."""

    solve: int
    rows: int
    primal: int
    tangent: int
    count: int

    def of(self, stacked: Tensor) -> Dual:
        """The rows as views: points [B, W] and tangents [K, B, W]."""
        tangents = stacked.narrow(0, self.tangent, self.count * self.rows)
        return stacked.narrow(0, self.primal, self.rows), tangents.view(self.count, self.rows, stacked.shape[1])


class Layout:
    """Where the rows of the solves are: in matrices of all rows, and in those of one stream's own rows alone."""

    def __init__(self, solves: Sequence[Solve]) -> None:
        self.all: list[Span] = []
        self.own_in_all: tuple[list[Span], list[Span]] = ([], [])
        self.own: tuple[list[Span], list[Span]] = ([], [])
        self.total, self.own_total = 0, [0, 0]
        for number, solve in enumerate(solves):
            rows = solve.rows
            span = Span(number, rows, self.total, self.total + rows, solve.tangents)
            self.all.append(span)
            self.total += (1 + span.count) * rows
            for stream in GENERATED[solve.direction]:
                own, start = solve.own[stream], self.own_total[stream]
                place = span.tangent + own.start * rows
                self.own_in_all[stream].append(Span(number, rows, span.primal, place, len(own)))
                self.own[stream].append(Span(number, rows, start, start + rows, len(own)))
                self.own_total[stream] += (1 + len(own)) * rows


class ForwardMode:
    """The network of `flow` at the given `times` of the given `directions`: modulations of all of them are made here.

    Activations live in buffers that every call reuses; results are views of them, good until the next call.
    """

    def __init__(self, flow: GeoFlow, directions: Sequence[str], times: Sequence[float]) -> None:
        self.flow = flow
        self.number = {t: k for k, t in enumerate(times)}
        like = next(flow.parameters())
        # One fill per time: copying a list to a device would wait for it, which a graph cannot capture.
        moments = torch.stack([torch.full((), t, dtype=like.dtype, device=like.device) for t in times])
        # By direction, time, part and stream: [1, H].
        self.modulations = {
            direction: [[part.unbind() for part in entry.unbind()] for entry in flow.modulations(moments, direction)]
            for direction in directions
        }
        self._buffers: dict[str, Tensor] = {}

    @staticmethod
    def row_bytes(flow: GeoFlow, solves: Sequence[Solve]) -> int:
        """Bytes of buffers per pair, from solves of one pair each."""
        layout, config = Layout(solves), flow.config
        wide = 9 * config.hidden + 3 * config.inner
        ends = sum(rows * (2 * d + config.hidden) for rows, d in zip(layout.own_total, config.flow_dims))
        return (layout.total * wide + ends) * next(flow.parameters()).element_size()

    def encode(self, x: Tensor, stream: int) -> Tensor:
        """Encoding [B, H] of the points `x` [B, d] of a stream that stays where it is."""
        encoded: Tensor = self.flow.encoders[stream](x)
        return encoded

    def encode_once(self, x: Tensor, stream: int, number: Tensor) -> tuple[Tensor, Tensor]:
        """Encodings [U, H] of the distinct points among `x` [B, d], told apart by `number` [B], and which of them each
        row has [B]."""
        kept, place = number.to(x.device).unique(return_inverse=True)
        row = torch.empty_like(kept).scatter_(0, place, torch.arange(len(x), device=x.device))
        return self.encode(x[row], stream), place

    def __call__(self, t: float, solves: Sequence[Solve]) -> list[dict[int, Dual]]:
        """Network outputs before the tangent projection, per solve by generated stream: [B, d] and along the stream's
        own tangents [K, B, d]."""
        layout = Layout(solves)
        modulation = [self.modulations[solve.direction][self.number[t]] for solve in solves]
        h = [self._encode(solves, layout, stream) for stream in range(2)]
        *blocks, last = cast(list[Block], list(self.flow.blocks))
        for number, block in enumerate(blocks):
            self._cross_gate(block, h, modulation, 4 * number, layout)
            for stream in range(2):
                h[stream] = self._feed_forward(
                    block, stream, h[stream], modulation, 4 * number + 2, layout.all, layout.all
                )
        self._cross_gate(last, h, modulation, 4 * len(blocks), layout)
        outputs: list[dict[int, Dual]] = [{} for _ in solves]
        for stream in range(2):
            spans, source = layout.own[stream], layout.own_in_all[stream]
            if spans:
                own = self._feed_forward(last, stream, h[stream], modulation, 4 * len(blocks) + 2, source, spans)
                decoded = self._decode(own, stream, spans)
                for span in spans:
                    outputs[span.solve][stream] = span.of(decoded)
        return outputs

    def _room(self, name: str, rows: int, width: int) -> Tensor:
        """A matrix of the buffer `name`, which grows when it must."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * width:
            like = next(self.flow.parameters())
            buffer = self._buffers[name] = torch.empty(rows * width, dtype=like.dtype, device=like.device)
        return buffer.narrow(0, 0, rows * width).view(rows, width)

    def _encode(self, solves: Sequence[Solve], layout: Layout, stream: int) -> Tensor:
        """Encoded points and tangents [total, H] of one stream, whose tangents of the other stream are zero here."""
        linear, norm = cast(Iterable[Any], self.flow.encoders[stream])
        h = self._room(f"state {stream}", layout.total, linear.out_features)
        sides = [(solve.image, solve.text)[stream] for solve in solves]
        for span in layout.all:
            primal, tangents = span.of(h)
            if len(sides[span.solve][1]) < span.count:
                tangents.zero_()
            if stream not in GENERATED[solves[span.solve].direction]:
                primal.copy_(sides[span.solve][0])
        x = self._room("points", layout.own_total[stream], linear.in_features)
        for span in layout.own[stream]:
            for target, source in zip(span.of(x), sides[span.solve]):
                target.copy_(source)
        z = torch.mm(x, linear.weight.T, out=self._room("encoded", len(x), linear.out_features))
        scale = norm.weight - 1
        for span, place in zip(layout.own[stream], layout.own_in_all[stream]):
            point, tangent = span.of(z)
            point += linear.bias
            ops.adaln_jvp(point, tangent, norm.bias, scale, eps=norm.eps, out=place.of(h))
        return h

    def _cross_gate(
        self, block: Block, h: list[Tensor], modulation: Sequence[Modulation], part: int, layout: Layout
    ) -> None:
        """First half of a block on both streams; replaces the entries of `h`."""
        gates, values = [], []
        for stream in range(2):
            x = self._room("normed", *h[stream].shape)
            self._modulate(stream, h[stream], x, modulation, part, layout.all, layout.all)
            gate, value = (self._room(f"{name} {stream}", *x.shape) for name in ("gate", "value"))
            heads = block.cross_weight.unbind()[stream].unbind()
            pieces = (y.chunk(len(heads), dim=1) for y in (x, gate, value))
            for weight, x_head, gate_head, value_head in zip(heads, *pieces):
                to_gate, to_value = weight.chunk(2, dim=1)
                torch.mm(x_head, to_gate, out=gate_head)
                torch.mm(x_head, to_value, out=value_head)
            gates.append(gate)
            values.append(value)
        for stream in range(2):
            target = self._room(f"gated {stream}", *h[stream].shape)
            for span in layout.all:
                residual, d_residual = span.of(h[stream])
                parts = (residual, d_residual, *span.of(gates[stream]), *span.of(values[1 - stream]))
                ops.gate_residual_jvp(*parts, block.cross_scale.unbind()[stream], out=span.of(target))
            h[stream] = target

    def _feed_forward(
        self,
        block: Block,
        stream: int,
        h: Tensor,
        modulation: Sequence[Modulation],
        part: int,
        source: Sequence[Span],
        spans: Sequence[Span],
    ) -> Tensor:
        """Second half of a block on the rows `source` of one stream's `h`, which the result has at `spans`."""
        rows = sum((1 + span.count) * span.rows for span in spans)
        x = self._room("normed", rows, h.shape[1])
        self._modulate(stream, h, x, modulation, part, source, spans)
        expand, contract = (layer.weight.unbind()[stream] for layer in (block.expand, block.contract))
        wide = torch.mm(x, expand, out=self._room("wide", rows, expand.shape[1]))
        inner = self._room("inner", rows, contract.shape[0])
        for span in spans:
            ops.swiglu_jvp(*span.of(wide), out=span.of(inner))
        update = torch.mm(inner, contract, out=x)
        target = self._room(f"state {stream}", rows, h.shape[1])
        for before, after in zip(source, spans):
            value, d_value = after.of(update)
            ops.gate_residual_jvp(
                *before.of(h), None, None, value, d_value, block.forward_scale.unbind()[stream], out=after.of(target)
            )
        return target

    def _modulate(
        self,
        stream: int,
        h: Tensor,
        target: Tensor,
        modulation: Sequence[Modulation],
        part: int,
        source: Sequence[Span],
        spans: Sequence[Span],
    ) -> None:
        """AdaLN of the rows `source` of `h` by the modulations `part` (shift) and `part` + 1 (scale) of their solve."""
        for before, after in zip(source, spans):
            shift, scale = (modulation[before.solve][number][stream] for number in (part, part + 1))
            ops.adaln_jvp(*before.of(h), shift, scale, eps=NORM_EPS, out=after.of(target))

    def _decode(self, h: Tensor, stream: int, spans: Sequence[Span]) -> Tensor:
        """Network outputs and their tangents for one stream's own rows."""
        norm, linear = cast(Iterable[Any], self.flow.decoders[stream])
        x, scale = self._room("normed", *h.shape), norm.weight - 1
        for span in spans:
            ops.adaln_jvp(*span.of(h), norm.bias, scale, eps=norm.eps, out=span.of(x))
        decoded = torch.mm(x, linear.weight.T, out=self._room(f"output {stream}", len(h), linear.out_features))
        for span in spans:
            span.of(decoded)[0].add_(linear.bias)
        return decoded
