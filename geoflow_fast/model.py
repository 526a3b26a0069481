"""The dual-stream velocity field: image and text stream refined side by side, each gated by the other.

Everything between encoder and decoder works on both streams at once, `[2, B, H]` with stream 0 the image and 1 the
text, and stream-specific weights are stacked the same way. The conditioning depends on time and direction only, so rows
that share both share their modulation: all rows of a solver step, and in training the rows in which a stream is given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from geoflow_fast import checks, jobs, ops
from geoflow_fast.checkpoint import contents_of, load_tensors, save_tensors, write_json
from geoflow_fast.curriculum import ROW_ORDER, Counts, row_directions
from geoflow_fast.geometry import DIRECTIONS, project_tangent

FREQUENCIES = 64
NORM_EPS = 1e-5
GEOMETRIES = ("sphere", "euclidean")
SIZES = {
    "image_dim": (2, 1 << 20),
    "text_dim": (2, 1 << 20),
    "hidden": (1, 1 << 20),
    "depth": (1, 1 << 10),
    "heads": (1, 1 << 20),
    "pca_dim": (2, 1 << 20),
}
"""Least and largest sizes of a network: a file that claims more is refused before anything is made for it."""
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

Direction = str | Tensor
"""One of `DIRECTIONS` for all rows, or int8 codes [B]."""


@dataclass(frozen=True)
class GeoFlowConfig:
    """Architecture of a `GeoFlow`. The defaults are the paper's network.

    `image_dim`, `text_dim`: widths of the embeddings. `hidden`: width H of the network; `depth`: number of blocks;
    `heads`: heads of the cross-gate, which must divide `hidden`. `layer_scale`: initial weight of every residual branch
    (0.1 suits short runs of small networks). `time_scale`: standard deviation of the Fourier frequencies of time.
    `dropout`: rate of dropout on every residual branch while training.
    `geometry`: "sphere", or "euclidean" for a flow along straight lines with a Gaussian base distribution.
    `centre` subtracts the training mean from the embeddings of each modality, and `pca_dim` keeps that many principal
    components of each; both are useful when pairs are few.
    """

    image_dim: int = 1024
    text_dim: int = 1024
    hidden: int = 512
    depth: int = 8
    heads: int = 4
    dropout: float = 0.05
    layer_scale: float = 1e-4
    time_scale: float = 1.0
    geometry: str = "sphere"
    centre: bool = False
    pca_dim: int | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            value = getattr(self, name)
            if value is None and name == "pca_dim":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if not least <= value <= most:
                raise ValueError(f"{name} must be between {least} and {most}, got {value}")
        for name in ("dropout", "layer_scale", "time_scale"):
            number = getattr(self, name)
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise TypeError(f"{name} must be a number, got {number!r}")
        if not isinstance(self.centre, bool):
            raise TypeError(f"centre must be True or False, got {self.centre!r}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} must be a multiple of heads={self.heads}")
        if self.pca_dim is not None and self.pca_dim > min(self.image_dim, self.text_dim):
            raise ValueError(f"pca_dim={self.pca_dim} exceeds the width of the embeddings")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not (math.isfinite(self.layer_scale) and math.isfinite(self.time_scale) and self.time_scale > 0):
            raise ValueError(
                f"layer_scale={self.layer_scale} and time_scale={self.time_scale} must be finite, time_scale > 0"
            )
        if self.geometry not in GEOMETRIES:
            raise ValueError(f"geometry must be one of {GEOMETRIES}, got {self.geometry!r}")

    @classmethod
    def paper(cls, image_dim: int = 1024, text_dim: int = 1024) -> GeoFlowConfig:
        """The paper's network: about 56 million parameters at width 1024."""
        return cls(image_dim, text_dim)

    @classmethod
    def small(cls, image_dim: int = 1024, text_dim: int = 1024) -> GeoFlowConfig:
        """A network of about 8 million parameters at width 1024, which trains in an hour or so on a few cores."""
        return cls(image_dim, text_dim, hidden=256, depth=4, layer_scale=0.1)

    @classmethod
    def tiny(cls, image_dim: int = 24, text_dim: int = 24) -> GeoFlowConfig:
        """A network of about 1.4 million parameters at width 24, for demonstrations and tests; it trains in minutes."""
        return cls(image_dim, text_dim, hidden=128, depth=3, layer_scale=0.1)

    @property
    def inner(self) -> int:
        """Inner width of the feed-forward layers: 8/3 H, rounded up to a multiple of 64."""
        return 64 * math.ceil(self.hidden * 8 / 3 / 64)

    @property
    def flow_dims(self) -> tuple[int, int]:
        """Widths (image, text) of the points the flow works on: `pca_dim` if set, else those of the embeddings."""
        return self.pca_dim or self.image_dim, self.pca_dim or self.text_dim

    @property
    def preprocesses(self) -> bool:
        """Whether embeddings are centred or reduced before they enter the flow."""
        return self.centre or self.pca_dim is not None

    def to_json(self) -> dict[str, Any]:
        """The configuration as a dictionary that JSON can hold; `from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> GeoFlowConfig:
        """Rebuilds a configuration from `to_json`. Unknown or missing fields raise a ValueError."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(value) != names:
            raise ValueError(f"configuration fields differ from this release's: {sorted(set(value) ^ names)}")
        return cls(**value)


class StreamLinear(nn.Module):
    """One linear map per stream: [2, B, in] -> [2, B, out]. Weights are [2, in, out]: gradients come out as stored."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)

    def stream(self, x: Tensor, index: int) -> Tensor:
        """Stream `index` alone: [B, in] -> [B, out]."""
        # unbind, not indexing: its gradient is written once instead of added into zeros
        weight = self.weight.unbind()[index]
        return x @ weight if self.bias is None else torch.addmm(self.bias.unbind()[index], x, weight)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Preprocess(nn.Module):
    """Centring and principal components of one modality: x -> unit(B (x - mean)), and back.

    `basis` [k, d] has orthonormal rows. Normalising forgets how far from the mean a point was, so `restore` puts it at
    the root-mean-square distance `radius` of the training rows and returns to the unit sphere.
    """

    mean: Tensor
    basis: Tensor
    radius: Tensor

    def __init__(self, dim: int, kept: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("basis", torch.eye(kept, dim))
        self.register_buffer("radius", torch.ones(()))

    def fit(self, blocks: Iterable[Tensor], *, centre: bool) -> None:
        """Sets mean, leading components and radius from unit rows, given in blocks [n, d] that are read once."""
        kept, dim = self.basis.shape
        rows, total, moment = 0, torch.zeros(dim).double(), torch.zeros(dim, dim).double()
        for block in blocks:
            x = block.double()
            rows, total = rows + len(x), total + x.sum(0)
            moment.addmm_(x.T, x)
        if rows < kept:
            raise ValueError(f"{rows} rows cannot determine {kept} principal components")
        mean = total / rows if centre else torch.zeros_like(total)
        # Without centring the mean is zero, and the second moment is what is left.
        values, vectors = torch.linalg.eigh(moment / rows - torch.outer(mean, mean))
        basis = vectors.flip(1).T[:kept]
        # An eigenvector's sign is arbitrary: fixing it makes the result a function of the data alone.
        signs = basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
        self.mean.copy_(mean)
        self.basis.copy_(basis * signs)
        self.radius.copy_(values[-kept:].sum().clamp(min=0).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize((x - self.mean) @ self.basis.T, dim=-1)

    def restore(self, y: Tensor) -> Tensor:
        """Unit embedding [..., d] whose preprocessed form is close to `y` [..., k]."""
        return functional.normalize(self.mean + self.radius * (y @ self.basis), dim=-1)


class Conditioning(nn.Module):
    """Time and direction to the conditioning vectors c_I, c_T in R^H."""

    frequencies: Tensor

    def __init__(self, hidden: int, time_scale: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", time_scale * torch.randn(FREQUENCIES))
        self.time = nn.Linear(2 * FREQUENCIES, hidden)
        self.direction = nn.Embedding(len(DIRECTIONS), hidden)
        self.first = StreamLinear(hidden, hidden)
        self.second = StreamLinear(hidden, hidden)

    def forward(self, t: Tensor, direction: Tensor, stream: int) -> Tensor:
        """Conditioning of one stream for times [M] and direction codes [M]: [M, H]."""
        phase = 2 * math.pi * t.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies
        x = self.time(torch.cat((phase.sin(), phase.cos()), dim=-1)) + self.direction(direction)
        return self.second.stream(functional.silu(self.first.stream(x, stream)), stream)


class Block(nn.Module):
    """AdaLN-Zero and cross-gate, then AdaLN-Zero and SwiGLU, each a LayerScale-weighted residual, on both streams."""

    def __init__(self, config: GeoFlowConfig) -> None:
        super().__init__()
        width = config.hidden // config.heads
        # Per stream and head: the first half gates this stream, the second is the value it sends to the other one.
        weight = torch.empty(2, config.heads, width, 2 * width).uniform_(-(width**-0.5), width**-0.5)
        weight[..., width:] = 0
        self.cross_weight = nn.Parameter(weight)
        self.cross_scale = nn.Parameter(torch.full((2, 1, config.hidden), config.layer_scale))
        self.expand = StreamLinear(config.hidden, 2 * config.inner, bias=False)
        self.contract = StreamLinear(config.inner, config.hidden, bias=False)
        self.forward_scale = nn.Parameter(torch.full((2, 1, config.hidden), config.layer_scale))
        self.dropout = config.dropout

    def cross_gate(self, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """First half of the block on h [2, B, H]. Both streams read the states before either is updated."""
        heads, width = self.cross_weight.shape[1:3]
        x = ops.adaln(h, shift, scale, eps=NORM_EPS).view(*h.shape[:2], heads, width).transpose(1, 2)
        gate, value = torch.matmul(x, self.cross_weight).chunk(2, dim=-1)  # each [2, heads, B, width]
        gate, value = (y.transpose(1, 2).reshape(h.shape) for y in (gate, value.flip(0)))
        return ops.gate_residual(h, gate, value, self.cross_scale, **self._dropped(h))

    def feed_forward(self, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Second half of the block on h [2, B, H]."""
        x = self.expand(ops.adaln(h, shift, scale, eps=NORM_EPS))
        return ops.gate_residual(h, None, self.contract(ops.swiglu(x)), self.forward_scale, **self._dropped(h))

    def feed_forward_stream(self, h: Tensor, shift: Tensor, scale: Tensor, stream: int) -> Tensor:
        """Second half of the block for one stream, h [B, H]."""
        x = self.expand.stream(ops.adaln(h, shift, scale, eps=NORM_EPS), stream)
        update = self.contract.stream(ops.swiglu(x), stream)
        return ops.gate_residual(h, None, update, self.forward_scale.unbind()[stream], **self._dropped(h))

    def _dropped(self, h: Tensor) -> dict[str, Any]:
        """Dropout of a branch, in the terms of `ops.gate_residual`."""
        if not self.training or self.dropout == 0:
            return {}
        return {"keep": ops.keep_mask(h.shape, self.dropout, h.device), "dropout": self.dropout}


class Modulation(nn.Module):
    """Shifts and scales of every half-block from the conditioning: 4 depth linear maps per stream, zero at first.

    Their order in each block: shift and scale before the cross-gate, shift and scale before the feed-forward.
    """

    def __init__(self, hidden: int, depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4 * depth, 2, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * depth, 2, 1, hidden))

    def forward(self, c: Tensor) -> Tensor:
        """[2, S, H] -> [4 depth, 2, S, H]."""
        return torch.matmul(c, self.weight) + self.bias

    def rows(self, image_c: Tensor, text_c: Tensor, counts: Counts) -> tuple[Tensor, ...]:
        """4 depth tensors [2, B, H] for the rows of a sorted batch; `RowModulation` says what the arguments are.

        Training saves the copies; in eval mode plain operations take part in forward-mode differentiation too, and a
        compiler can look into them.
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


class RowModulation(torch.autograd.Function):
    """Shifts and scales for rows of their own time, without a copy.

    `image_c` [1 + M_I, H]: row 0 serves the first B - M_I rows, those in which the image is given and which are hence
    alike; the others follow one by one. `text_c` [1 + M_T, H]: row 0 serves the last B - M_T rows.
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
    """Per stream: its conditioning, the rows in which it is generated, the rows in which it is given."""
    n_i2t, n_joint, n_t2i = counts
    end = n_i2t + n_joint
    return (image_c, slice(n_i2t, None), slice(0, n_i2t)), (text_c, slice(0, end), slice(end, end + n_t2i))


class GeoFlow(nn.Module):
    """The network: a velocity field on the product of the image and the text sphere. See `velocity`."""

    def __init__(self, config: GeoFlowConfig) -> None:
        super().__init__()
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

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
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
            counts = single_direction(direction, rows)
            return self._tangent(image, text, self._row_network(image, text, time, counts), counts)
        order, counts = sort_rows(direction, rows)
        image, text = image[order], text[order]
        v_image, v_text = self._tangent(
            image, text, self._row_network(image, text, time.expand(rows)[order], counts), counts
        )
        undo = order.argsort()
        return v_image[undo], v_text[undo]

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

    def modulated_velocity(
        self, image: Tensor, text: Tensor, modulation: Tensor, direction: str
    ) -> tuple[Tensor, Tensor]:
        """`velocity` for a modulation computed beforehand: one entry of `modulations` for the same `direction`."""
        counts = single_direction(direction, image.shape[0])
        return self._tangent(image, text, self._network(image, text, modulation.unbind(), counts), counts)

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
    weights = jobs.digest(flow.state_dict().values())
    return jobs.fingerprint({"config": flow.config.to_json(), "weights": weights})


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


def single_direction(direction: str, rows: int) -> Counts:
    """Counts of a batch whose `rows` rows all have this direction."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    i2t, joint, t2i = (rows if DIRECTIONS[code] == direction else 0 for code in ROW_ORDER)
    return i2t, joint, t2i


def sort_rows(direction: Tensor, rows: int) -> tuple[Tensor, Counts]:
    """Order [B] that sorts rows by their direction codes as in `curriculum`, and the counts of each direction."""
    if checks.dense(direction, "direction").dtype != torch.int8 or direction.shape != (rows,):
        raise ValueError(
            f"direction must be a name or int8 codes [{rows}], got {direction.dtype} {tuple(direction.shape)}"
        )
    unknown = (direction < 0) | (direction >= len(DIRECTIONS))
    if bool(unknown.any()):
        row = int(unknown.nonzero()[0])
        raise ValueError(f"direction row {row} is {int(direction[row])}; codes are 0 joint, 1 i2t, 2 t2i")
    place = torch.empty(len(DIRECTIONS), dtype=torch.long, device=direction.device)
    place[torch.tensor(ROW_ORDER, device=direction.device)] = torch.arange(len(DIRECTIONS), device=direction.device)
    rank = place[direction.long()]
    i2t, joint, t2i = torch.bincount(rank, minlength=len(DIRECTIONS)).tolist()
    return rank.argsort(stable=True), (i2t, joint, t2i)
