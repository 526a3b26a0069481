"""The network without a tape, alone or with its derivative in forward mode: points and tangents pass every layer
together.

A layer y = f(x) takes a tangent dx to dy = (grad f)(x) dx, for which the ops have kernels. Several solves, each of one
direction, share one pass: a solve of B pairs with K tangents has (1 + K) B rows in every activation, first the points
and then one tangent after the other. So each layer is one matrix product over the rows of all solves and both streams,
and the tangents of a point share what depends on the point alone. What no output needs is not computed: the encoding
of a given stream, which never moves, its last feed-forward and its decoder, and those of tangents that move the other
stream only. Samples are drawn with the same pass, without tangents.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from geoflow_fast.directions import Direction
from geoflow_fast.flow.network import NORM_EPS, Block, shared_modulations
from geoflow_fast.flow.precision import HALVES, tf32_products
from geoflow_fast.ops.product import product_into
from geoflow_fast.ops.segments import (
    RowTable,
    Segment,
    adaln_segments,
    gate_adaln_segments,
    swiglu_segments,
)
from geoflow_fast.runtime.graphs import Graphs

if TYPE_CHECKING:
    from geoflow_fast.flow.model import GeoFlow

Dual = tuple[Tensor, Tensor]
"""Points [B, W] and their tangents [K, B, W]."""

LAYOUTS_KEPT, NETWORKS_KEPT = 4, 4


class Solve:
    """The rows of one direction: by stream, points [B, d] and tangents [K, B, d].

    A given stream has its encoding [B, H] as points and no tangents, [0, B, d]. If `paired`, tangent k moves both
    streams at once. Otherwise a tangent moves one stream and leaves the other alone; those of the image come first.
    """

    def __init__(
        self, direction: Direction, points: Sequence[Tensor], tangents: Sequence[Tensor], paired: bool = False
    ) -> None:
        self.direction, self.points, self.tangents, self.paired = direction, points, tangents, paired
        image, text = map(len, tangents)
        first = 0 if paired else image
        self.own = (0, image), (first, text)
        """The first of the solve's tangents that move each stream, and are read from it, and their number."""
        self.size = max(image, text) if paired else image + text, len(points[0])
        """Number of tangents and of pairs."""


@dataclass(frozen=True)
class Layout:
    """Where the rows of the solves stand. Matrices of all rows, [2 R, W], have those of all solves in both streams;
    matrices of moving rows, [R_I + R_T, W], have in each stream those of the solves that generate it, with the tangents
    that move it."""

    rows: int
    """R."""
    moving_count: tuple[int, int]
    """R_I and R_T."""
    moving_to_all: RowTable
    all_rows: RowTable
    all_to_moving: RowTable
    moving_rows: RowTable
    state: Tensor
    """[2 R, H], the states before the first block. Tangents that move the other stream are zero in it and stay so."""


class InferenceNetwork:
    """The network of `flow` for the given `directions` and `times`, all of whose shifts and scales are computed here.

    `products` is the type of matrix products and of what enters and leaves them, by default that of the weights; `tf32`
    lets float32 products on a GPU use TF32. Activations are kept in buffers that every call uses again, so the tangents
    it returns are good until the next call."""

    def __init__(
        self,
        flow: GeoFlow,
        directions: Sequence[Direction],
        times: Sequence[float],
        products: torch.dtype | None = None,
        tf32: bool = False,
    ) -> None:
        self.flow = flow
        like = next(flow.parameters())
        self.device = like.device
        self.products, self.tf32 = products or like.dtype, tf32
        self.work = torch.float32 if like.dtype in HALVES else like.dtype
        """The type of states, and of all that is not a product."""
        self.number_of = {direction: number for number, direction in enumerate(dict.fromkeys(directions))}
        self.time_number = {t: number for number, t in enumerate(times)}
        with torch.no_grad(), self._plain_products():
            self.modulations = self._all_modulations(list(self.number_of), times)
        self.blocks = cast(list[Block], list(flow.blocks))
        self.weights = [
            [self._product_weight(w) for w in (block.cross_weight, block.expand.weight, block.contract.weight)]
            for block in self.blocks
        ]
        # Per half-block, the weight of its branch by stream, [2, H].
        self.scales = [[self._as_rows(x) for x in (block.cross_scale, block.forward_scale)] for block in self.blocks]
        encoders, decoders = ([cast(Iterable[Any], part) for part in parts] for parts in (flow.encoders, flow.decoders))
        self.encoders = [self._product_weight(linear.weight.T) for linear, _ in encoders]
        self.decoders = [self._product_weight(linear.weight.T) for _, linear in decoders]
        self.encoder_bias = torch.stack([linear.bias for linear, _ in encoders]).to(self.work)
        self.decoder_bias = [linear.bias.to(self.work) for _, linear in decoders]
        self.encoder_norm = self._norm([norm for _, norm in encoders])
        self.decoder_norm = self._norm([norm for norm, _ in decoders])
        self._layouts: dict[Any, Layout] = {}
        self._buffers: dict[str, Tensor] = {}

    def _all_modulations(self, directions: Sequence[Direction], times: Sequence[float]) -> Tensor:
        """Shifts and scales [times, 4 depth, 2 D, H] of D directions, stream by stream."""
        conditioning, modulation = self.flow.conditioning, self.flow.modulation
        if conditioning.frequencies.dtype in HALVES:  # which could not tell times from each other
            conditioning, modulation = copy.deepcopy(conditioning).float(), copy.deepcopy(modulation).float()
        # One fill per time: copying a list to a device would wait for it, which a graph cannot capture.
        moments = torch.stack([torch.full((), t, dtype=self.work, device=self.device) for t in times])
        tables = [shared_modulations(conditioning, modulation, moments, d).squeeze(3) for d in directions]
        return torch.stack(tables, dim=3).flatten(2, 3).to(self.work)

    def _product_weight(self, weight: Tensor) -> Tensor:
        return weight.detach() if weight.dtype == self.products else weight.detach().to(self.products)

    def _as_rows(self, scale: Tensor) -> Tensor:
        return scale.detach().flatten(0, 1).to(self.work)

    def _norm(self, norms: Sequence[Any]) -> tuple[Tensor, Tensor, float]:
        """Shift and scale [2, H] and eps of two LayerNorms."""
        shift, scale = (torch.stack([getattr(norm, name) for norm in norms]) for name in ("bias", "weight"))
        return shift.to(self.work), scale.to(self.work) - 1, norms[0].eps

    def _plain_products(self) -> contextlib.AbstractContextManager[Any]:
        """Products of the weights' own type: what is kept must not depend on the context of the call that made it."""
        return torch.autocast(self.device.type, enabled=False)

    @torch.no_grad()
    def encode(self, given: Tensor, stream: int) -> Tensor:
        """The encoding [B, H] of the points [B, d] of a stream that does not move."""
        linear, _ = cast(Iterable[Any], self.flow.encoders[stream])
        with self._plain_products():
            rows = torch.nn.functional.linear(given.to(linear.weight.dtype), linear.weight, linear.bias).to(self.work)
        shift, scale, eps = self.encoder_norm
        return torch.nn.functional.layer_norm(rows, rows.shape[-1:], scale[stream] + 1, shift[stream], eps)

    @torch.no_grad()
    def __call__(self, t: float, solves: Sequence[Solve]) -> dict[tuple[int, int], Dual]:
        """Network outputs before the tangent projection, [B, d], and along the tangents that move the stream,
        [K, B, d], by number of the solve and stream, for the streams that are generated. Either all solves have pairs,
        or none has."""
        if not any(pairs for _, pairs in (solve.size for solve in solves)):  # the kernels take at least one row
            streams = [(number, stream) for number, solve in enumerate(solves) for stream in solve.direction.generated]
            return {(n, stream): (solves[n].points[stream], solves[n].tangents[stream]) for n, stream in streams}
        with self._plain_products(), tf32_products(self.tf32, self.device):
            return self._evaluate(self.modulations[self.time_number[t]], solves)

    def _evaluate(self, modulation: Tensor, solves: Sequence[Solve]) -> dict[tuple[int, int], Dual]:
        """`modulation` [4 depth, 2 D, H]."""
        layout = self._layout(solves)
        hidden, depth = self.flow.config.hidden, len(self.blocks)
        self._encode(layout, solves)
        h, normed = layout.state, self._buffer("normed", 2 * layout.rows, hidden, self.products)
        adaln_segments(h, None, modulation[0], modulation[1], normed, layout.all_rows, NORM_EPS)
        for number in range(depth):
            last = number == depth - 1
            cross_scale, forward_scale = self.scales[number]
            shift, scale = modulation[4 * number + 2], modulation[4 * number + 3]
            branch = self._cross_products(normed, self.weights[number][0], layout)
            heads = self.flow.config.heads
            after, rows = (
                (layout.all_to_moving, sum(layout.moving_count)) if last else (layout.all_rows, 2 * layout.rows)
            )
            crossed, normed = (
                self._buffer("crossed", rows, hidden, self.work),
                self._buffer("normed own" if last else "normed", rows, hidden, self.products),
            )
            gate_adaln_segments(h, branch, cross_scale, shift, scale, crossed, normed, after, NORM_EPS, heads=heads)
            update = self._feed_forward(normed, self.weights[number], layout, own=last)
            h = self._buffer("state", rows, hidden, self.work)
            if last:
                norm = self.decoder_norm
                gate_adaln_segments(
                    crossed, update, forward_scale, norm[0], norm[1], h, normed, layout.moving_rows, norm[2], True
                )
            else:
                shift, scale = modulation[4 * number + 4], modulation[4 * number + 5]
                gate_adaln_segments(crossed, update, forward_scale, shift, scale, h, normed, layout.all_rows, NORM_EPS)
        return self._decode(normed, layout, solves)

    def _encode(self, layout: Layout, solves: Sequence[Solve]) -> None:
        """Writes the encodings of both streams to the layout's state."""
        hidden = self.flow.config.hidden
        encoded = self._buffer("encoded", sum(layout.moving_count), hidden, self.products)
        for stream, target in enumerate(encoded.split(layout.moving_count)):
            weight, parts = self.encoders[stream], []
            for number, solve in enumerate(solves):
                if stream in solve.direction.generated:
                    parts += [solve.points[stream], solve.tangents[stream].flatten(0, 1)]
                else:
                    line = layout.all_rows.lines[stream * len(solves) + number]
                    layout.state.narrow(0, line.point, line.pairs).copy_(solve.points[stream])
            if parts:
                x = self._buffer(f"points {stream}", len(target), len(weight), self.products)
                torch.cat(parts, out=x)
                product_into(target, x, weight)
        shift, scale, eps = self.encoder_norm
        adaln_segments(encoded, self.encoder_bias, shift, scale, layout.state, layout.moving_to_all, eps, True)

    def _cross_products(self, normed: Tensor, weight: Tensor, layout: Layout) -> Tensor:
        """Gates and values [2 R, 2 H] of both streams; each head has its gates first."""
        _, heads, width, _ = weight.shape
        packed = self._buffer("packed", len(normed), 2 * normed.shape[1], self.products)
        streams = normed.view(2, layout.rows, heads, width).transpose(1, 2)  # [2, heads, R, width]
        targets = packed.view(2, layout.rows, heads, 2 * width).transpose(1, 2)
        for x, w, target in zip(streams, weight, targets):
            product_into(target, x, w)
        return packed

    def _feed_forward(self, normed: Tensor, weights: Sequence[Tensor], layout: Layout, *, own: bool) -> Tensor:
        """What the feed-forward of a block adds, before its weight."""
        _, expand, contract = weights
        inner_width, segments = contract.shape[1], layout.moving_rows if own else layout.all_rows
        counts = layout.moving_count if own else (layout.rows, layout.rows)
        wide = self._buffer("wide", len(normed), 2 * inner_width, self.products)
        inner = self._buffer("inner", len(normed), inner_width, self.products)
        self._multiply_streams(normed, expand, wide, counts)
        swiglu_segments(wide, inner, segments)
        update = self._buffer("update", len(normed), normed.shape[1], self.products)
        self._multiply_streams(inner, contract, update, counts)
        return update

    def _decode(self, normed: Tensor, layout: Layout, solves: Sequence[Solve]) -> dict[tuple[int, int], Dual]:
        """Outputs of the solves that generate a stream. The points have memory of their own, the tangents are views of
        a buffer."""
        outputs: dict[tuple[int, int], Dual] = {}
        lines = iter(layout.moving_rows.lines)
        for stream, rows in enumerate(normed.split(layout.moving_count)):
            if not len(rows):
                continue
            weight = self.decoders[stream]
            decoded = self._buffer(f"output {stream}", len(rows), weight.shape[1], self.products)
            product_into(decoded, rows, weight)
            before = stream * layout.moving_count[0]
            for number, solve in enumerate(solves):
                if stream in solve.direction.generated:
                    line = next(lines)
                    line = line._replace(point=line.point - before, tangent=line.tangent - before)
                    points, tangents = line.rows(decoded)
                    outputs[number, stream] = points + self.decoder_bias[stream], tangents
        return outputs

    # ---- products ----

    def _multiply_streams(self, x: Tensor, weight: Tensor, out: Tensor, counts: tuple[int, int]) -> None:
        """Products of the rows of each stream, of which there are `counts`, with its own weights."""
        if counts[0] == counts[1]:
            product_into(out.view(2, counts[0], -1), x.view(2, counts[0], -1), weight)
            return
        for rows, w, target in zip(x.split(counts), weight, out.split(counts)):
            if len(rows):
                product_into(target, rows, w)

    # ---- memory ----

    def _buffer(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Rows [rows, width] in the buffer `name`, which grows when it must."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * width:
            buffer = self._buffers[name] = torch.empty(rows * width, dtype=dtype, device=self.device)
        return buffer.narrow(0, 0, rows * width).view(rows, width)

    def _layout(self, solves: Sequence[Solve]) -> Layout:
        key = tuple((solve.direction, solve.paired, solve.size, solve.own) for solve in solves)
        layout = self._layouts.get(key)
        if layout is None:
            while len(self._layouts) >= LAYOUTS_KEPT:
                del self._layouts[next(iter(self._layouts))]
            layout = self._layouts[key] = self._new_layout(solves)
        return layout

    def _new_layout(self, solves: Sequence[Solve]) -> Layout:
        sizes = [solve.size for solve in solves]
        starts = [sum((1 + k) * pairs for k, pairs in sizes[:number]) for number in range(len(sizes) + 1)]
        rows, directions = starts[-1], len(self.number_of)
        all_rows, moving_to_all, all_to_moving, moving_rows, count = [], [], [], [], [0, 0]
        for stream in range(2):
            for solve, start, (tangents, pairs) in zip(solves, starts, sizes):
                point, other = stream * rows + start, (1 - stream) * rows + start
                group = stream * directions + self.number_of[solve.direction]
                at = (point, point + pairs)
                all_rows.append(Segment(pairs, tangents, *at, other, other + pairs, *at, group, stream))
                if stream in solve.direction.generated:
                    first, moving = solve.own[stream]
                    mine = (sum(count), sum(count) + pairs)
                    moved = (point, point + (1 + first) * pairs)
                    beside = (other, other + (1 + first) * pairs)
                    moving_to_all.append(Segment(pairs, moving, *mine, *mine, *moved, group, stream))
                    all_to_moving.append(Segment(pairs, moving, *moved, *beside, *mine, group, stream))
                    moving_rows.append(Segment(pairs, moving, *mine, *mine, *mine, group, stream))
                    count[stream] += (1 + moving) * pairs
        state = torch.zeros(2 * rows, self.flow.config.hidden, dtype=self.work, device=self.device)
        tables = [RowTable.of(lines, self.device) for lines in (moving_to_all, all_rows, all_to_moving, moving_rows)]
        return Layout(rows, (count[0], count[1]), tables[0], tables[1], tables[2], tables[3], state)


class PreparedVelocity:
    """The velocity of a flow in one direction at times that are known, without gradients and dropout. The generated
    streams are as the network returns them, not yet tangent, and a given stream has no rows.

    What a given stream contributes is kept for as long as the same tensor is given.
    """

    def __init__(self, network: InferenceNetwork, direction: Direction) -> None:
        self.network, self.direction = network, direction
        self._given: Tensor | None = None
        self._encoding = self._prediction = torch.empty(0, dtype=network.work, device=network.device)

    @torch.no_grad()
    def __call__(self, image: Tensor, text: Tensor, t: float) -> tuple[Tensor, Tensor]:
        anchor, direction = self.network.flow.anchor, self.direction
        points, given = [image, text], direction.given
        none = [x.new_empty(0, *x.shape) for x in points]
        if given is not None:
            if points[given] is not self._given:
                self._take_given(points[given], given)
            points[given] = self._encoding
        outputs = self.network(t, [Solve(direction, points, none)])
        v = [outputs[0, stream][0] if stream in direction.generated else none[stream][:, 0] for stream in range(2)]
        if anchor is not None and given is not None:
            stream = direction.generated[0]
            v[stream] = anchor.shares[stream] * v[stream] + self._prediction * anchor.weight(t, stream)
        return v[0], v[1]

    def _take_given(self, points: Tensor, stream: int) -> None:
        self._given, self._encoding = points, self.network.encode(points, stream)
        if self.network.flow.anchor is not None:
            self._prediction = self.network.flow.anchor.predict(points, 1 - stream)


class PreparedNetworks:
    """What a flow in eval mode keeps between calls: inference networks that nobody uses at the moment, the one that was
    used last at the end, and the CUDA graphs of its solves. Copies of a flow have none of them. Threads may share
    it."""

    def __init__(self) -> None:
        self.graphs = Graphs()
        self._idle: list[tuple[Hashable, InferenceNetwork]] = []
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedNetworks:
        return PreparedNetworks()

    def __reduce__(self) -> tuple[type[PreparedNetworks], tuple[()]]:
        return PreparedNetworks, ()

    @contextlib.contextmanager
    def lent(self, key: Hashable, make: Callable[[], InferenceNetwork]) -> Iterator[InferenceNetwork]:
        """An idle network of this key, or else a new one, which nobody else uses until the context ends."""
        with self._lock:
            idle = self._idle
            known = [number for number, entry in enumerate(idle) if entry[0] == key]
            network = idle.pop(known[-1])[1] if known else None
        network = network or make()
        yield network  # one whose solve failed is not used again
        with self._lock:
            if self._idle is idle:  # otherwise the weights have changed meanwhile
                idle.append((key, network))
                del idle[:-NETWORKS_KEPT]

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._idle = []
        self.graphs.clear()
