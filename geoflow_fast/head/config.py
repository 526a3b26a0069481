"""Settings of a posterior head: the network, and the run that trains it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from geoflow_fast.runtime import checks
from geoflow_fast.training.config import RunConfig

LARGEST_WIDTH = 1 << 20
MOST_POINTS = 64
SIZES = {"points": (1, MOST_POINTS), "hidden": (1, 1 << 16), "bias_hidden": (0, 1 << 16), "bank": (0, 1 << 20)}
"""Least and largest sizes of a head: a file that claims more is refused before anything is made for it."""


@dataclass(frozen=True)
class HeadConfig(RunConfig):
    """Settings of a `PosteriorHead` and of its training; `TrainConfig` describes those that all runs have.

    `points`: number K of points that a query becomes. `hidden`: width of the network that moves the points away from
    the query. `dropout`: rate of dropout in it. `noise`: length of the random vector that is added to every query while
    training, before it is scaled back to the sphere. `bias_hidden`: width of the network that gives each item its
    number; 0 leaves it out, which is right where pairs are few. `bank`: number of training queries that the head keeps
    to correct for items that are near to everything; 0 keeps none.
    """

    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = (*RunConfig.MAY_BE_ZERO, "bias_hidden", "bank")

    steps: int = 2000
    batch_size: int = 1024
    lr: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    precision: str = "float32"
    val_every: int = 50
    val_batches: int = 1
    val_fraction: float = 0.1
    patience: int = 6
    min_relative_improvement: float = 0.0005
    checkpoint_every: int = 500
    dropout: float = 0.1
    points: int = 4
    hidden: int = 256
    noise: float = 0.0
    bias_hidden: int = 0
    bank: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= checks.number(self.dropout, "dropout") < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        for name, (least, most) in SIZES.items():
            object.__setattr__(self, name, checks.integer(getattr(self, name), name, least, most))
        checks.number(self.noise, "noise", 0.0, 100.0)

    def to_json(self) -> dict[str, Any]:
        """The settings as a dictionary that JSON can hold; `from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> HeadConfig:
        """Rebuilds settings from `to_json`. Unknown or missing fields raise a ValueError."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(value) != names:
            raise ValueError(f"settings differ from those of this release's HeadConfig: {sorted(set(value) ^ names)}")
        return cls(**value)
