"""The dual-stream velocity field: image and text stream refined side by side, each gated by the other.

Everything between encoder and decoder works on both streams at once, `[2, B, H]` with stream 0 the image and 1 the
text, and stream-specific weights are stacked the same way. The conditioning depends on time and direction only, so rows
that share both share their modulation: all rows of a solver step, and in training the rows in which a stream is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from geoflow_fast.data.cards import model_card
from geoflow_fast.data.fingerprint import Origin
from geoflow_fast.directions import STREAMS, Counts, Direction, row_directions, sort_rows
from geoflow_fast.flow.anchor import Anchor
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.fields import Streams, VelocityFunction
from geoflow_fast.flow.inference import InferenceNetwork, PreparedNetworks, PreparedVelocity
from geoflow_fast.flow.modulation import TimePoints, interpolated_rows
from geoflow_fast.flow.network import (
    Block,
    Conditioning,
    Modulation,
    decode,
    encode,
    shared_modulations,
    wide,
    zero_linear,
)
from geoflow_fast.flow.precision import HALVES, product_dtype
from geoflow_fast.flow.preprocess import Preprocess
from geoflow_fast.runtime import checks, hashing, hub
from geoflow_fast.runtime.files import write_json
from geoflow_fast.runtime.graphs import CapturedCall, Compute, Graphs
from geoflow_fast.runtime.hub import CONFIG_FILE, WEIGHTS_FILE
from geoflow_fast.runtime.pretrained import Pretrained
from geoflow_fast.runtime.tensors import save_tensors


class GeoFlow(Pretrained):
    """The network: a velocity field on the product of the image and the text sphere. See `velocity`.

    `manifold` is the space of each stream, and `flow_dims` are the widths (image, text) of points in the flow's
    coordinates. `origin` tells of the encoder, the pairs and the settings that it was trained with.
    """

    KIND = "model"

    def __init__(self, config: GeoFlowConfig) -> None:
        super().__init__()
        if not isinstance(config, GeoFlowConfig):
            raise TypeError(f"config must be a GeoFlowConfig, got {type(config).__name__}")
        self.config, self.origin = config, Origin()
        self.manifold, self.flow_dims = config.manifold, config.flow_dims
        hidden, dims = config.hidden, config.flow_dims
        self.encoders = nn.ModuleList(
            nn.Sequential(nn.Linear(d, hidden, dtype=torch.float32), nn.LayerNorm(hidden, dtype=torch.float32))
            for d in dims
        )
        self.conditioning = Conditioning(hidden, config.time_scale)
        self.modulation = Modulation(hidden, config.depth)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.decoders = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden, dtype=torch.float32), zero_linear(hidden, d)) for d in dims
        )
        self.anchor = Anchor(dims) if config.anchored else None
        self._prepared = PreparedNetworks()
        widths = zip((config.image_dim, config.text_dim), dims)
        self.preprocess = nn.ModuleList(Preprocess(*pair) for pair in widths) if config.preprocesses else None

    def extra_repr(self) -> str:
        """The one-line summary that `print(flow)` begins with."""
        return self.summary()

    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def summary(self) -> str:
        """Widths and number of parameters in one line."""
        c = self.config
        millions = self.num_parameters() / 1e6
        return (
            f"flow, image {c.image_dim} x text {c.text_dim}, hidden {c.hidden}, depth {c.depth}, "
            f"heads {c.heads}: {millions:.2f} million parameters"
        )

    @property
    def example(self) -> Tensor:
        """Some tensor with the device of the flow and the dtype of its points: that of the weights, or float32 if these
        have 16 bits, in which nothing can move on a sphere."""
        weight = next(self.parameters())
        return weight if weight.dtype not in HALVES else weight.new_empty(0, dtype=torch.float32)

    @property
    def network(self) -> GeoFlow:
        """The flow itself, whose derivatives can be computed layer by layer; other fields have None here."""
        return self

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str | Tensor) -> Streams:
        """Velocities (v_image [B, d_I], v_text [B, d_T]) at time `t`; on the sphere they are tangent at the points.

        `image` [B, d_I], `text` [B, d_T]: unit rows in the flow's coordinates (`to_flow`). `t`: a number, or a tensor
        that is 0-d or [B]. `direction`: "joint", "i2t" (image given) or "t2i" (text given) for all rows, or int8 codes
        [B] (`Direction.code`). The velocity of a given stream is exactly zero. Differentiable in both points. If all
        rows share one time and one direction, their shifts and scales are computed only once. In training mode dropout
        is on.
        """
        self.check_points(image, text)
        image, text = (x.to(next(self.parameters()).dtype) for x in (image, text))
        rows = image.shape[0]
        time = torch.as_tensor(t, dtype=image.dtype, device=image.device)
        if time.shape not in ((), (rows,)):
            raise ValueError(f"t must be a number or have shape [{rows}], got {tuple(time.shape)}")
        if isinstance(direction, Tensor):
            order, counts = sort_rows(direction, rows)
            image, text, time = image[order], text[order], time.expand(rows)[order]
            v_image, v_text = self.make_tangent(image, text, self.generated(image, text, time, counts), counts)
            undo = order.argsort()
            return v_image[undo], v_text[undo]
        direction = Direction.of(direction)
        counts = direction.counts(rows)
        if time.dim() == 0:
            modulation = self.modulations(time.reshape(1), direction)[0].unbind()
            outputs = self._network(image, text, modulation, counts, self.training)
            outputs = self._anchored(outputs, image, text, time, counts)
        else:
            outputs = self.generated(image, text, time, counts)
        return self.make_tangent(image, text, outputs, counts)

    def forward(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str | Tensor) -> Streams:
        """Returns `velocity`, so that `flow(image, text, t, direction)` works and hooks on the flow fire."""
        return self.velocity(image, text, t, direction)

    @contextlib.contextmanager
    def prepared(
        self,
        directions: Sequence[Direction],
        times: Sequence[float],
        precision: str = "float32",
        rows: int | None = None,
    ) -> Iterator[InferenceNetwork]:
        """Lends the network without a tape for these directions and times, in either mode without dropout. Its matrix
        products have the `precision`, which "auto" chooses for so many `rows` in all.

        A flow in eval mode keeps it for the next call, with shifts and scales of all times, weights in the type of the
        products, and buffers: the weights of a flow in eval mode are constant. `train`, `load_state_dict`, `to` and
        `refresh` drop what was prepared.
        """
        like = next(self.parameters())
        products, tf32 = product_dtype(precision, like, rows), precision == "tf32" and like.is_cuda
        arguments = tuple(directions), tuple(dict.fromkeys(times)), products, tf32
        kept = PreparedNetworks() if self.training else self._prepared
        # Tensors that are made in inference mode cannot be written to outside of it.
        key = arguments, torch.is_inference_mode_enabled()
        with kept.lent(key, lambda: InferenceNetwork(self, *arguments)) as network:
            yield network

    @contextlib.contextmanager
    def velocity_at(
        self, times: Sequence[float], direction: Direction, precision: str = "float32", rows: int | None = None
    ) -> Iterator[VelocityFunction]:
        """Lends velocity(image, text, t) for one direction and any of these times, by a network that is `prepared`:
        without gradients and dropout. Points are not checked. The generated streams are as the network computes them,
        for steps that project them, and a given stream has no rows."""
        with self.prepared((direction,), times, precision, rows) as network:
            yield PreparedVelocity(network, direction)

    def captured(
        self, key: Hashable, prepare: Callable[[contextlib.ExitStack], Compute], precision: str, rows: int
    ) -> CapturedCall:
        """The solve that `prepare` makes, of networks that it borrows for the stack. On a GPU those of one `key` are
        captured and replayed (`runtime/graphs.py`), with one graph for each shape of their inputs. A key names all that
        a solve depends on besides the flow, its inputs, and the products of `precision` that `rows` rows in all
        have."""
        products = product_dtype(precision, next(self.parameters()), rows)
        reason = "a flow in training mode may change its weights" if self.training else None
        return CapturedCall(self.graphs, (key, products), prepare, reason)

    @property
    def graphs(self) -> Graphs:
        """The CUDA graphs of the flow's solves."""
        return self._prepared.graphs

    def refresh(self) -> None:
        """Drops what calls in eval mode have prepared. Call it after you changed weights, buffers or the manifold of a
        flow in eval mode; `train`, `load_state_dict` and `to` do it themselves."""
        self._prepared.clear()

    def train(self, mode: bool = True) -> GeoFlow:
        """Sets the mode, as every module's `train` does."""
        if mode != self.training:
            self.refresh()
        return super().train(mode)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Loads weights, as every module's `load_state_dict` does."""
        try:
            return super().load_state_dict(*arguments, **options)
        finally:  # tensors that fit are loaded even if others do not
            self.refresh()

    def _apply(self, *arguments: Any, **options: Any) -> GeoFlow:
        try:
            return super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        finally:
            self.refresh()

    def modulations(self, t: Tensor, direction: Direction) -> Tensor:
        """AdaLN shifts and scales of every half-block at the times `t` [S], shared by all rows: [S, 4 depth, 2, 1, H].
        A solver can compute those of all its steps in one call."""
        return shared_modulations(self.conditioning, self.modulation, t, direction)

    def generated(self, image: Tensor, text: Tensor, t: Tensor, counts: Counts) -> Streams:
        """Network output before the tangent projection, for times `t` [B]. Training uses it, whose loss projects.

        Rows are sorted i2t, joint, t2i, with `counts` rows of each. Only the rows in which a stream is generated are
        returned: image rows after the i2t ones, text rows before the t2i ones.
        """
        outputs = self._network(image, text, self._row_modulation(t, counts), counts, self.training)
        return self._anchored(outputs, image, text, t, counts)

    def _row_modulation(self, t: Tensor, counts: Counts) -> tuple[Tensor, ...]:
        """4 depth shifts and scales [2, B, H] of rows sorted by direction, with times `t` [B]."""
        if self.training and not torch.compiler.is_compiling() and TimePoints.worthwhile(t, self.config.hidden):
            points = TimePoints(t, counts)
            with torch.autocast("cpu", enabled=False):  # rounding to bfloat16 would be all that the check sees
                c = torch.stack(self.conditioning.both((points.t, points.t), points.codes))
                if points.resolve(c):
                    return interpolated_rows(self.modulation(c), points)
        # The rows in which a stream is given are at time zero; one row of its conditioning serves all of them.
        n_i2t, n_joint, _ = counts
        codes, end = row_directions(counts, t.device).long(), n_i2t + n_joint
        first, last = max(n_i2t - 1, 0), min(end + 1, len(t))
        image_t = torch.cat((t.new_zeros(n_i2t - first), t[n_i2t:]))
        text_t = torch.cat((t[:end], t.new_zeros(last - end)))
        image_c, text_c = self.conditioning.both((image_t, text_t), (codes[first:], codes[:last]))
        return self.modulation.rows(image_c, text_c, counts)

    def to_flow(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Maps embeddings [B, d] to the flow's coordinates: unchanged, or centred and reduced as `config` says."""
        return self._map_streams(self.stream_to_flow, image, text)

    def from_flow(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Maps points in the flow's coordinates back to unit embeddings, as far as `to_flow` can be inverted."""
        return self._map_streams(self.stream_from_flow, image, text)

    @staticmethod
    def _map_streams(
        change: Callable[[Tensor, int], Tensor], image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Applies `change` to the streams that are given, which must be floating point."""
        given = [None if x is None else checks.floating(x, name) for name, x in zip(STREAMS, (image, text))]
        image, text = (x if x is None else change(x, stream) for stream, x in enumerate(given))
        return image, text

    def stream_to_flow(self, x: Tensor, stream: int) -> Tensor:
        """`to_flow` for one stream, 0 (image) or 1 (text); returns `x` itself if nothing is to be done."""
        if self.preprocess is None:
            return x
        self.check_embeddings(x, stream)
        return self.preprocess[stream](x)

    def stream_from_flow(self, x: Tensor, stream: int) -> Tensor:
        """`from_flow` for one stream, 0 (image) or 1 (text)."""
        return x if self.preprocess is None else cast(Preprocess, self.preprocess[stream]).restore(x)

    def card(self) -> str:
        """The text of the model card: encoder, pairs, settings and limits, as far as they are known."""
        sides = " and ".join(map(hub.escaped, self.origin.sides))
        what = f"A velocity field between {sides} embeddings: {self.summary()}."
        widths = self.config.image_dim, self.config.text_dim
        return model_card("GeoFlow", what, widths, self.origin, self.config.to_json())

    def write_files(self, folder: Path) -> None:
        """Writes `config.json` and `model.safetensors`."""
        save_weights(folder, self.config, self.state_dict(), self.origin)

    @classmethod
    def described(cls, info: Mapping[str, Any]) -> GeoFlow:
        flow = cls(GeoFlowConfig.from_json(info["config"]))
        flow.origin = Origin.read(info["origin"])
        return flow

    def check_points(self, image: Tensor, text: Tensor) -> None:
        """Raises a ValueError unless `image` and `text` are [B, d] in the flow's coordinates, dtype and device."""
        for name, x, dim in zip(STREAMS, (image, text), self.config.flow_dims):
            self._check_rows(name, x, dim)
        if image.shape[0] != text.shape[0]:
            raise ValueError(f"image has {image.shape[0]} rows, but text has {text.shape[0]}")

    def check_embeddings(self, x: Tensor, stream: int) -> None:
        """Raises a ValueError unless the embeddings `x` of one stream are [B, d] in the flow's dtype and device."""
        self._check_rows(STREAMS[stream], x, (self.config.image_dim, self.config.text_dim)[stream])

    def _check_rows(self, name: str, x: Tensor, dim: int) -> None:
        if checks.dense(x, name).dim() != 2 or x.shape[1] != dim:
            raise ValueError(f"{name} must be [B, {dim}], got {tuple(x.shape)}")
        own = self.example
        if x.dtype not in (own.dtype, next(self.parameters()).dtype) or x.device != own.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but the flow is {own.dtype} on {own.device}")

    def _network(
        self,
        image: Tensor,
        text: Tensor,
        modulation: Sequence[Tensor],
        counts: Counts,
        dropping: bool = False,
    ) -> Streams:
        """Decoder outputs of generated rows. `modulation`: 4 depth shifts and scales, each [2, 1 or B, H]. `dropping`:
        whether there is dropout."""
        dropout = self.config.dropout if dropping else 0.0
        h = wide(torch.stack([encode(encoder, x) for encoder, x in zip(self.encoders, (image, text))]))
        *blocks, last = self.blocks
        for number, block in enumerate(blocks):
            h = block(h, modulation[4 * number : 4 * number + 4], dropout)
        image, text = last(h, modulation[-4:], dropout, counts)
        return decode(self.decoders[0], image), decode(self.decoders[1], text)

    def _anchored(self, outputs: Streams, image: Tensor, text: Tensor, t: float | Tensor, counts: Counts) -> Streams:
        """Adds to the network's share of the generated rows, in the conditional directions, what the given stream
        predicts. `t`: one time, or those of the rows [B]."""
        if self.anchor is None:
            return outputs
        n_i2t, n_joint, n_t2i = counts
        for_image, for_text = outputs
        rows = t.unsqueeze(1) if isinstance(t, Tensor) and t.dim() else None
        if n_t2i:
            time = t if rows is None else rows[n_i2t + n_joint :]
            pull = self.anchor.predict(text[n_i2t + n_joint :], 0) * self.anchor.weight(time, 0)
            for_image = torch.cat((for_image[:n_joint], self.anchor.shares[0] * for_image[n_joint:] + pull))
        if n_i2t:
            time = t if rows is None else rows[:n_i2t]
            pull = self.anchor.predict(image[:n_i2t], 1) * self.anchor.weight(time, 1)
            for_text = torch.cat((self.anchor.shares[1] * for_text[:n_i2t] + pull, for_text[n_i2t:]))
        return for_image, for_text

    def make_tangent(self, image: Tensor, text: Tensor, outputs: Streams, counts: Counts) -> Streams:
        """Makes the outputs of generated rows tangent, and puts zeros into the given rows."""
        n_i2t, _, n_t2i = counts
        n_text = len(text) - n_t2i
        manifold = self.manifold
        v_image, v_text = manifold.project(image[n_i2t:], outputs[0]), manifold.project(text[:n_text], outputs[1])
        v_image = torch.cat((torch.zeros_like(image[:n_i2t]), v_image)) if n_i2t else v_image
        v_text = torch.cat((v_text, torch.zeros_like(text[n_text:]))) if n_t2i else v_text
        return v_image, v_text


def save_weights(
    folder: Path, config: GeoFlowConfig, weights: Mapping[str, Tensor], origin: Origin | None = None
) -> None:
    """Writes a network's weights, configuration and origin as `GeoFlow.from_pretrained` reads them."""
    info = {"config": config.to_json(), "origin": (origin or Origin()).to_json()}
    save_tensors(folder / WEIGHTS_FILE, weights, kind=GeoFlow.KIND, info=info)
    write_json(folder / CONFIG_FILE, config.to_json())


def flow_digest(flow: GeoFlow) -> str:
    """SHA-256 of configuration and weights, on which the results of a job depend. The weights alone would not do: the
    manifold, for one, leaves no trace in them."""
    weights = hashing.digest(flow.state_dict().values())
    return hashing.fingerprint({"config": flow.config.to_json(), "weights": weights})
