"""The derivative of the network in forward mode: points and their tangents pass every layer together, without a tape.

A layer y = f(x) takes a tangent dx to dy = (grad f)(x) dx, for which the ops have kernels. Several solves, each of one
direction, share one pass: a solve of B pairs with K tangents has (1 + K) B rows in every activation, first the points
and then one tangent after the other. So each layer is one matrix product per stream over the rows of all solves, and
the tangents of a point share what depends on the point alone. What no output needs is not computed: the encoding of a
given stream, which never moves, its last feed-forward and its decoder, and those of tangents that move the other stream
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from geoflow_fast.directions import STREAMS, Direction
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.network import NORM_EPS, Block
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.settings import MEMORY, DensitySettings
from geoflow_fast.ops import dispatch

Dual = tuple[Tensor, Tensor]
"""Points [B, W] and their tangents [K, B, W]."""


ShiftsAndScales = Sequence[Sequence[tuple[Tensor, ...]]]
"""The modulation of one solve: (shift, scale), [1, H] each, by half-block and stream."""


class SolveInput:
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


class DualRows(NamedTuple):
    """The rows of several solves in one matrix [rows, W], and each solve's points and tangents as views of it."""

    matrix: Tensor
    solves: list[Dual]


class ForwardMode:
    """The network of `flow` for the given `directions` and `times`, all of whose shifts and scales are computed here.

    Activations are kept in buffers that every call uses again, so the tangents it returns are good until the next call.
    """

    def __init__(self, flow: GeoFlow, directions: Sequence[Direction], times: Sequence[float]) -> None:
        self.flow = flow
        self.time_number = {t: number for number, t in enumerate(times)}
        like = next(flow.parameters())
        # One fill per time: copying a list to a device would wait for it, which a graph cannot capture.
        moments = torch.stack([torch.full((), t, dtype=like.dtype, device=like.device) for t in times])
        self.modulations: dict[Direction, list[ShiftsAndScales]] = {}  # of every time
        for direction in directions:
            table = flow.modulations(moments, direction).unflatten(1, (-1, 2)).transpose(2, 3)
            # table: times, half-blocks, streams, shift and scale, 1, H
            self.modulations[direction] = [
                [[stream.unbind() for stream in half.unbind()] for half in at_time.unbind()]
                for at_time in table.unbind()
            ]
        self._buffers: dict[str, Tensor] = {}
        # Backends of the tangent passes, which take rows: points [B, W], tangents [K, B, W], shifts and scales [1, W].
        rows = like.new_empty(0, flow.config.hidden)
        self._adaln, self._gate_residual, self._swiglu = (
            dispatch.choose(f"{name}_jvp", like, inputs=(rows,)) for name in ("adaln", "gate_residual", "swiglu")
        )

    def rows_at_once(self, rows: int, settings: DensitySettings) -> int:
        """Number of rows in chunks of equal size whose buffers and probes fit into the memory of the settings."""
        config, like = self.flow.config, self.flow.example
        dims = config.flow_dims
        tangents = dims if settings.exact else (settings.n_probes, settings.n_probes)
        kept = min(Probes.FRAME, settings.n_steps) if settings.orthogonal_to == "steps" else 2
        numbers = kept * settings.n_probes * sum(dims)  # in the probes and buffers of one row
        for direction in self.modulations:
            own = [tangents[stream] for stream in direction.generated]
            count = max(own) if settings.paired_tangents else sum(own)
            numbers += (1 + count) * (9 * config.hidden + 3 * config.inner)
            numbers += sum((1 + tangents[s]) * (2 * dims[s] + config.hidden) for s in direction.generated)
        memory = settings.memory or MEMORY.get(like.device.type, MEMORY["cpu"])
        most = max(1, memory // (numbers * like.element_size()))
        chunks = max(1, -(-rows // most))
        return max(1, -(-rows // chunks))

    def __call__(self, t: float, solves: Sequence[SolveInput]) -> dict[tuple[int, int], Dual]:
        """Network outputs before the tangent projection, [B, d], and along the tangents that move the stream,
        [K, B, d], by number of the solve and stream, for the streams that are generated. Either all solves have pairs,
        or none has."""
        if not any(pairs for _, pairs in (solve.size for solve in solves)):  # the kernels take at least one row
            streams = [(number, stream) for number, solve in enumerate(solves) for stream in solve.direction.generated]
            return {(n, stream): (solves[n].points[stream], solves[n].tangents[stream]) for n, stream in streams}
        modulations = [self.modulations[solve.direction][self.time_number[t]] for solve in solves]
        h = [self._encode(solves, stream) for stream, _ in enumerate(STREAMS)]
        *blocks, last = cast(list[Block], list(self.flow.blocks))
        for number, block in enumerate(blocks):
            h = self._cross_gate(block, h, [modulation[2 * number] for modulation in modulations])
            for stream, rows in enumerate(h):
                parts = [modulation[2 * number + 1][stream] for modulation in modulations]
                h[stream] = self._feed_forward(block, stream, rows.solves, parts)
        h = self._cross_gate(last, h, [modulation[-2] for modulation in modulations])
        outputs: dict[tuple[int, int], Dual] = {}
        for stream, rows in enumerate(h):
            own = own_rows(rows, solves, stream)
            if own:
                parts = [modulations[number][-1][stream] for number in own]
                decoded = self._decode(stream, self._feed_forward(last, stream, list(own.values()), parts))
                outputs |= {(number, stream): dual for number, dual in zip(own, decoded)}
        return outputs

    def _encode(self, solves: Sequence[SolveInput], stream: int) -> DualRows:
        """The encoder of one stream. Tangents that move the other stream are zero here."""
        linear, norm = cast(Iterable[Any], self.flow.encoders[stream])
        h = self._buffer(f"state {stream}", [solve.size for solve in solves], linear.out_features)
        for solve, (points, tangents) in zip(solves, h.solves):
            if stream not in solve.direction.generated:
                points.copy_(solve.points[stream])
            if len(solve.tangents[stream]) < len(tangents):
                tangents.zero_()
        own = own_rows(h, solves, stream)
        sizes = [tangents.shape[:2] for _, tangents in own.values()]
        x = self._buffer("points", sizes, linear.in_features)
        encoded = self._buffer("encoded", sizes, linear.out_features)
        for number, (points, tangents) in zip(own, x.solves):
            points.copy_(solves[number].points[stream])
            tangents.copy_(solves[number].tangents[stream])
        torch.mm(x.matrix, linear.weight.T, out=encoded.matrix)
        scale = norm.weight.unsqueeze(0) - 1
        for (points, tangents), target in zip(encoded.solves, own.values()):
            points += linear.bias
            self._adaln(points, tangents, norm.bias.unsqueeze(0), scale, norm.eps, out=target)
        return h

    def _cross_gate(
        self, block: Block, h: list[DualRows], modulation: Sequence[Sequence[tuple[Tensor, ...]]]
    ) -> list[DualRows]:
        """First half of a block on both streams. `modulation`: (shift, scale) by solve and stream."""
        sizes = [tangents.shape[:2] for _, tangents in h[0].solves]
        width = h[0].matrix.shape[1]
        gates, values = (
            [self._buffer(f"{name} {stream}", sizes, width) for stream in range(2)] for name in ("gate", "value")
        )
        for stream, rows in enumerate(h):
            x = self._buffer("normed", sizes, width)
            for source, target, parts in zip(rows.solves, x.solves, modulation):
                self._adaln(*source, *parts[stream], NORM_EPS, out=target)
            heads = block.cross_weight.unbind()[stream].unbind()
            pieces = (y.matrix.chunk(len(heads), dim=1) for y in (x, gates[stream], values[stream]))
            for weight, x_head, gate_head, value_head in zip(heads, *pieces):
                to_gate, to_value = weight.chunk(2, dim=1)
                torch.mm(x_head, to_gate, out=gate_head)
                torch.mm(x_head, to_value, out=value_head)
        gated = [self._buffer(f"gated {stream}", sizes, width) for stream in range(2)]
        for stream, scale in enumerate(block.cross_scale.unbind()):
            parts_of = (h[stream].solves, gates[stream].solves, values[1 - stream].solves, gated[stream].solves)
            for residual, gate, value, target in zip(*parts_of):
                self._gate_residual(*residual, *gate, *value, scale, out=target)
        return gated

    def _feed_forward(
        self, block: Block, stream: int, h: Sequence[Dual], modulation: Sequence[tuple[Tensor, ...]]
    ) -> DualRows:
        """Second half of a block on one stream. `modulation`: (shift, scale) by solve."""
        sizes = [tangents.shape[:2] for _, tangents in h]
        expand, contract = (layer.weight.unbind()[stream] for layer in (block.expand, block.contract))
        x = self._buffer("normed", sizes, len(expand))
        for source, target, parts in zip(h, x.solves, modulation):
            self._adaln(*source, *parts, NORM_EPS, out=target)
        wide = self._buffer("wide", sizes, expand.shape[1])
        torch.mm(x.matrix, expand, out=wide.matrix)
        inner = self._buffer("inner", sizes, len(contract))
        for source, target in zip(wide.solves, inner.solves):
            self._swiglu(*source, None, None, out=target)
        torch.mm(inner.matrix, contract, out=x.matrix)
        state = self._buffer(f"state {stream}", sizes, len(expand))
        for residual, update, target in zip(h, x.solves, state.solves):
            self._gate_residual(*residual, None, None, *update, block.forward_scale.unbind()[stream], out=target)
        return state

    def _decode(self, stream: int, h: DualRows) -> list[Dual]:
        """The decoder of one stream. The outputs have memory of their own, their tangents are views of a buffer."""
        norm, linear = cast(Iterable[Any], self.flow.decoders[stream])
        sizes = [tangents.shape[:2] for _, tangents in h.solves]
        x, decoded = (
            self._buffer("normed", sizes, linear.in_features),
            self._buffer(f"output {stream}", sizes, linear.out_features),
        )
        scale = norm.weight.unsqueeze(0) - 1
        for source, target in zip(h.solves, x.solves):
            self._adaln(*source, norm.bias.unsqueeze(0), scale, norm.eps, out=target)
        torch.mm(x.matrix, linear.weight.T, out=decoded.matrix)
        return [(points + linear.bias, tangents) for points, tangents in decoded.solves]

    def _buffer(self, name: str, sizes: Sequence[Sequence[int]], width: int) -> DualRows:
        """Rows for the tangents and pairs of each solve, whose numbers are `sizes`, in the buffer `name`, which grows
        when it must."""
        rows = sum((1 + count) * pairs for count, pairs in sizes)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * width:
            like = next(self.flow.parameters())
            buffer = self._buffers[name] = torch.empty(rows * width, dtype=like.dtype, device=like.device)
        matrix = buffer.narrow(0, 0, rows * width).view(rows, width)
        parts = matrix.split([part for count, pairs in sizes for part in (pairs, count * pairs)])
        views = zip(parts[::2], parts[1::2], sizes)
        return DualRows(matrix, [(points, tangents.view(*size, width)) for points, tangents, size in views])


def own_rows(rows: DualRows, solves: Sequence[SolveInput], stream: int) -> dict[int, Dual]:
    """The points, and the tangents that move the stream, of the solves that generate it, by number of the solve."""
    return {
        number: (points, tangents.narrow(0, *solve.own[stream]))
        for number, (solve, (points, tangents)) in enumerate(zip(solves, rows.solves))
        if stream in solve.direction.generated
    }
