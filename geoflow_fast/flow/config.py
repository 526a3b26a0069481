"""The architecture of a flow."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from geoflow_fast.manifolds import SPHERE, Sphere
from geoflow_fast.runtime import checks, processors

SIZES = {
    "image_dim": (2, 1 << 20),
    "text_dim": (2, 1 << 20),
    "hidden": (1, 1 << 20),
    "depth": (1, 1 << 10),
    "heads": (1, 1 << 20),
    "pca_dim": (2, 1 << 20),
}
"""Least and largest sizes of a network: a file that claims more is refused before anything is made for it."""


FEW_PAIRS = 20_000
"""With fewer pairs than this, the preset `auto` takes a small network and a short run."""
MANY_CORES = 8
"""With at least as many cores, or with a GPU, `auto` takes the preset `small` for more pairs."""


def many_cores(cores: int | None = None) -> bool:
    """Whether `cores` are many; None stands for those that this process may use."""
    return (processors.granted() if cores is None else checks.integer(cores, "cores", 1)) >= MANY_CORES


@dataclass(frozen=True)
class GeoFlowConfig:
    """Architecture of a `GeoFlow`. The defaults are the paper's network.

    `image_dim`, `text_dim`: widths of the embeddings. `hidden`: width H of the network; `depth`: number of blocks;
    `heads`: heads of the cross-gate, which must divide `hidden`. `layer_scale`: initial weight of every residual branch
    (0.1 suits short runs of small networks). `time_scale`: standard deviation of the Fourier frequencies of time.
    `dropout`: rate of dropout on every residual branch while training.
    `centre` subtracts the training mean from the embeddings of each modality, and `pca_dim` keeps that many principal
    components of each; both are useful when pairs are few. `anchored`: the flow begins with a linear prediction of the
    generated stream from the given one, which is fitted before the first step (`flow/anchor.py`).
    """

    image_dim: int = 1024
    text_dim: int = 1024
    hidden: int = 512
    depth: int = 8
    heads: int = 4
    dropout: float = 0.05
    layer_scale: float = 1e-4
    time_scale: float = 1.0
    centre: bool = False
    pca_dim: int | None = None
    anchored: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            value = getattr(self, name)
            if value is None and name == "pca_dim":
                continue
            object.__setattr__(self, name, checks.integer(value, name, least, most))
        for name in ("dropout", "layer_scale", "time_scale"):
            number = getattr(self, name)
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise TypeError(f"{name} must be a number, got {number!r}")
        for name in ("centre", "anchored"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
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

    @classmethod
    def auto(cls, image_dim: int, text_dim: int, pairs: int, cores: int | None = None) -> GeoFlowConfig:
        """A network for this number of training pairs and of cores (by default those of this machine), to be trained
        with `TrainConfig.auto`. It is centred and anchored, and from 20,000 pairs on a larger one."""
        if checks.integer(pairs, "pairs", 1) < FEW_PAIRS:
            base = cls(image_dim, text_dim, hidden=128, depth=2, dropout=0.3, layer_scale=0.1)
        else:
            base = (cls.small if many_cores(cores) else cls.tiny)(image_dim, text_dim)
        return dataclasses.replace(base, centre=True, anchored=True)

    @functools.cached_property
    def inner(self) -> int:
        """Inner width of the feed-forward layers: 8/3 H, rounded up to a multiple of 64."""
        return 64 * math.ceil(self.hidden * 8 / 3 / 64)

    @property
    def manifold(self) -> Sphere:
        """The space of each stream."""
        return SPHERE

    @functools.cached_property
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
