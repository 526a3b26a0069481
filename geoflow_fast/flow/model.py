"""The dual-stream velocity field: image and text stream refined side by side, each gated by the other.

Everything between encoder and decoder works on both streams at once, `[2, B, H]` with stream 0 the image and 1 the
text, and stream-specific weights are stacked the same way. The conditioning depends on time and direction only, so rows
that share both share their modulation: all rows of a solver step, and in training the rows in which a stream is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from geoflow_fast.directions import DIRECTIONS, Counts, Direction, row_directions, sort_rows
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.network import Block, Conditioning, Modulation, zero_linear
from geoflow_fast.flow.preprocess import Preprocess
from geoflow_fast.geometry import project_tangent
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.files import contents_of, write_json
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class GeoFlow(nn.Module):
    """The network: a velocity field on the product of the image and the text sphere. See `velocity`."""

    def __init__(self, config: GeoFlowConfig) -> None:
        super().__init__()
        if not isinstance(config, GeoFlowConfig):
            raise TypeError(f"config must be a GeoFlowConfig, got {type(config).__name__}")
        self.config = config
        hidden, dims = config.hidden, config.flow_dims
        self.encoders = nn.ModuleList(nn.Sequential(nn.Linear(d, hidden), nn.LayerNorm(hidden)) for d in dims)
        self.conditioning = Conditioning(hidden, config.time_scale)
        self.modulation = Modulation(hidden, config.depth)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.decoders = nn.ModuleList(nn.Sequential(nn.LayerNorm(hidden), zero_linear(hidden, d)) for d in dims)
        widths = zip((config.image_dim, config.text_dim), dims)
        self.preprocess = nn.ModuleList(Preprocess(*pair) for pair in widths) if config.preprocesses else None

    def extra_repr(self) -> str:
        """The one-line summary that `print(flow)` begins with."""
        return self.summary()

    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self.parameters())

    def summary(self) -> str:
        """Geometry, widths and number of parameters in one line."""
        c = self.config
        millions = self.num_parameters() / 1e6
        return (
            f"{c.geometry} flow, image {c.image_dim} x text {c.text_dim}, hidden {c.hidden}, depth {c.depth}, "
            f"heads {c.heads}: {millions:.2f} million parameters"
        )

    def velocity(
        self, image: Tensor, text: Tensor, t: float | Tensor, direction: str | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocities (v_image [B, d_I], v_text [B, d_T]) at time `t`; on the sphere they are tangent at the points.

        `image` [B, d_I], `text` [B, d_T]: unit rows in the flow's coordinates (`to_flow`). `t`: a number, or a tensor
        that is 0-d or [B]. `direction`: "joint", "i2t" (image given) or "t2i" (text given) for all rows, or int8 codes
        [B] of `geometry.DIRECTIONS`. The velocity of a given stream is exactly zero. Differentiable in both points. If
        all rows share one time and one direction, the modulations are computed only once.
        """
        self.check_points(image, text)
        rows = image.shape[0]
        time = torch.as_tensor(t, dtype=image.dtype, device=image.device)
        if time.shape not in ((), (rows,)):
            raise ValueError(f"t must be a number or have shape [{rows}], got {tuple(time.shape)}")
        if isinstance(direction, str):
            if time.dim() == 0:
                return self.modulated_velocity(image, text, self.modulations(time.reshape(1), direction)[0], direction)
            counts = Direction.of(direction).counts(rows)
            return self._tangent(image, text, self._row_network(image, text, time, counts), counts)
        order, counts = sort_rows(direction, rows)
        image, text = image[order], text[order]
        v_image, v_text = self._tangent(
            image, text, self._row_network(image, text, time.expand(rows)[order], counts), counts
        )
        undo = order.argsort()
        return v_image[undo], v_text[undo]

    # unchecked: velocity and the solvers call it with what they have checked
    def modulations(self, t: Tensor, direction: str) -> Tensor:
        """AdaLN shifts and scales of every half-block at the times `t` [S], shared by all rows: [S, 4 depth, 2, 1, H].

        `modulated_velocity` takes one of the S entries, so a solver can compute those of all its steps in one call.
        """
        given = {"joint": None, "i2t": 0, "t2i": 1}
        if direction not in given:
            raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
        codes = torch.full(t.shape, DIRECTIONS.index(direction), device=t.device)
        times = (torch.zeros_like(t) if stream == given[direction] else t for stream in range(2))
        c = torch.stack([self.conditioning(time, codes, stream) for stream, time in enumerate(times)])
        return self.modulation(c).unsqueeze(3).movedim(2, 0)

    # unchecked: velocity and the solvers call it with what they have checked
    def modulated_velocity(
        self, image: Tensor, text: Tensor, modulation: Tensor, direction: str
    ) -> tuple[Tensor, Tensor]:
        """`velocity` for a modulation computed beforehand: one entry of `modulations` for the same `direction`."""
        counts = Direction.of(direction).counts(image.shape[0])
        return self._tangent(image, text, self._network(image, text, modulation.unbind(), counts), counts)

    # unchecked: velocity and the solvers call it with what they have checked
    def generated(self, image: Tensor, text: Tensor, t: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
        """Network output before the tangent projection, for times `t` [B]. Used in training, whose loss projects it.

        Rows are sorted i2t, joint, t2i, with `counts` rows of each. Only the rows in which a stream is generated are
        returned: image rows after the i2t ones, text rows before the t2i ones.
        """
        return self._row_network(image, text, t, counts)

    def to_flow(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Maps embeddings [B, d] to the flow's coordinates: unchanged, or centred and reduced as `config` says."""
        self._check_given(image, text)
        if self.preprocess is None:
            return image, text
        for name, x, dim in zip(("image", "text"), (image, text), (self.config.image_dim, self.config.text_dim)):
            if x is not None:
                self._check_rows(name, x, dim)
        return tuple(x if x is None else part(x) for part, x in zip(self.preprocess, (image, text)))  # type: ignore[return-value]

    def from_flow(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Maps points in the flow's coordinates back to unit embeddings, as far as `to_flow` can be inverted."""
        self._check_given(image, text)
        if self.preprocess is None:
            return image, text
        pairs = zip(self.preprocess, (image, text))
        return tuple(x if x is None else part.restore(x) for part, x in pairs)  # type: ignore[return-value, operator]

    @staticmethod
    def _check_given(image: Tensor | None, text: Tensor | None) -> None:
        for name, x in (("image", image), ("text", text)):
            if x is not None:
                checks.floating(x, name)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` to `folder`. The latter is replaced atomically and is all that
        `from_pretrained` needs."""
        save_weights(checks.path(folder, "folder"), self.config, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> GeoFlow:
        """Loads a flow that `save_pretrained` wrote, with the stored dtype and in eval mode.

        A damaged file, or one that does not match its configuration, raises a ValueError.
        """
        path = checks.path(folder, "folder") / WEIGHTS_FILE
        tensors, info = load_tensors(path, kind="model", device=device)
        if "config" not in info:
            raise ValueError(f"{path} holds no configuration")
        # Without storage until the tensors are known to fit, and without drawing weights that would be replaced.
        with contents_of(path), torch.device("meta"):
            flow = cls(GeoFlowConfig.from_json(info["config"]))
        check_tensors(path, tensors, flow.state_dict())
        flow.load_state_dict(tensors, assign=True)
        return flow.eval()

    # unchecked: velocity and the solvers call it with what they have checked
    def check_points(self, image: Tensor, text: Tensor) -> None:
        """Raises a ValueError unless `image` and `text` are [B, d] in the flow's coordinates, dtype and device."""
        for name, x, dim in zip(("image", "text"), (image, text), self.config.flow_dims):
            self._check_rows(name, x, dim)
        if image.shape[0] != text.shape[0]:
            raise ValueError(f"image has {image.shape[0]} rows, but text has {text.shape[0]}")

    def _check_rows(self, name: str, x: Tensor, dim: int) -> None:
        if checks.dense(x, name).dim() != 2 or x.shape[1] != dim:
            raise ValueError(f"{name} must be [B, {dim}], got {tuple(x.shape)}")
        self.check_dtype(name, x)

    # unchecked: velocity and the solvers call it with what they have checked
    def check_dtype(self, name: str, x: Tensor) -> None:
        """Raises a ValueError unless `x` has the flow's dtype and device; the message calls it `name`."""
        own = next(self.parameters())
        if x.dtype != own.dtype or x.device != own.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but the flow is {own.dtype} on {own.device}")

    def _tangent(
        self, image: Tensor, text: Tensor, outputs: tuple[Tensor, Tensor], counts: Counts
    ) -> tuple[Tensor, Tensor]:
        """Outputs of generated rows, made tangent, with zeros in the given rows."""
        n_i2t, _, n_t2i = counts
        n_text = len(text) - n_t2i
        v_image, v_text = outputs
        if self.config.geometry == "sphere":
            v_image, v_text = project_tangent(image[n_i2t:], v_image), project_tangent(text[:n_text], v_text)
        v_image = torch.cat((torch.zeros_like(image[:n_i2t]), v_image)) if n_i2t else v_image
        v_text = torch.cat((v_text, torch.zeros_like(text[n_text:]))) if n_t2i else v_text
        return v_image, v_text

    def _row_network(self, image: Tensor, text: Tensor, t: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
        """`_network` for sorted rows of their own time [B]."""
        codes = row_directions(counts, t.device).long()
        n_i2t, n_joint, _ = counts
        own = (slice(n_i2t, None), slice(0, n_i2t + n_joint))
        given = (DIRECTIONS.index("i2t"), DIRECTIONS.index("t2i"))
        c = [
            self.conditioning(
                torch.cat((t.new_zeros(1), t[own[stream]])),
                torch.cat((codes.new_tensor([given[stream]]), codes[own[stream]])),
                stream,
            )
            for stream in range(2)
        ]
        return self._network(image, text, self.modulation.rows(c[0], c[1], counts), counts)

    def _network(
        self, image: Tensor, text: Tensor, modulation: Sequence[Tensor], counts: Counts
    ) -> tuple[Tensor, Tensor]:
        """Decoder outputs of generated rows. `modulation`: 4 depth shifts and scales, each [2, 1 or B, H]."""
        h = torch.stack([encoder(x) for encoder, x in zip(self.encoders, (image, text))])
        *blocks, last = cast(list[Block], list(self.blocks))
        for number, block in enumerate(blocks):
            first_shift, first_scale, second_shift, second_scale = modulation[4 * number : 4 * number + 4]
            h = block.feed_forward(block.cross_gate(h, first_shift, first_scale), second_shift, second_scale)
        h = last.cross_gate(h, *modulation[-4:-2])
        end = h.shape[1] - counts[2]
        shift, scale = modulation[-2:]
        return self._output(h, shift, scale, 0, slice(counts[0], None)), self._output(h, shift, scale, 1, slice(0, end))

    def _output(self, h: Tensor, shift: Tensor, scale: Tensor, stream: int, rows: slice) -> Tensor:
        """Last feed-forward and decoder of one stream, for the rows in which it is generated."""
        shift, scale = (x[stream] if x.shape[1] == 1 else x[stream, rows] for x in (shift, scale))
        last = cast(Block, self.blocks[-1])
        own = last.feed_forward_stream(h[stream, rows], shift, scale, stream)
        out: Tensor = self.decoders[stream](own)
        return out


def save_weights(folder: Path, config: GeoFlowConfig, weights: Mapping[str, Tensor]) -> None:
    """Writes a network's weights and configuration as `GeoFlow.from_pretrained` reads them."""
    save_tensors(folder / WEIGHTS_FILE, weights, kind="model", info={"config": config.to_json()})
    write_json(folder / CONFIG_FILE, config.to_json())


def flow_digest(flow: GeoFlow) -> str:
    """SHA-256 over configuration and weights: what a result depends on, for the facts of a `jobs.Job`. The weights
    alone would not do: geometry, for one, leaves no trace in them."""
    weights = hashing.digest(flow.state_dict().values())
    return hashing.fingerprint({"config": flow.config.to_json(), "weights": weights})


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Names, shapes and kinds of number as the configuration says, and one floating-point dtype."""
    for name in sorted(set(tensors) | set(expected)):
        found, wanted = (tuple(x[name].shape) if name in x else "nothing" for x in (tensors, expected))
        if found != wanted:
            raise ValueError(f"{path} holds {found} as {name}, but its configuration asks for {wanted}")
    dtypes = {tensors[name].dtype for name, x in expected.items() if x.is_floating_point()}
    for name, x in expected.items():
        if not x.is_floating_point() and tensors[name].dtype != x.dtype:
            raise ValueError(f"{path} holds {tensors[name].dtype} as {name}, but its configuration asks for {x.dtype}")
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"{path} must hold tensors of one floating-point dtype, got {sorted(map(str, dtypes))}")
