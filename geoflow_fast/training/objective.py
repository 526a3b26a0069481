"""What a training run trains: a module, its batches and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.training.config import RunConfig


def generator_for(seed: int, purpose: str, step: int) -> torch.Generator:
    """A CPU generator that depends on its arguments alone."""
    entropy = (seed, *purpose.encode(), step)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))


class Rows(Protocol):
    """What a step consumes: a number of rows that can be taken in pieces."""

    def __len__(self) -> int: ...

    def pieces(self, count: int) -> Iterator[Any]:
        """The same rows in at most `count` pieces, in order."""
        ...


B = TypeVar("B", bound=Rows)


class Objective(ABC, Generic[B]):
    """What a run trains: a module, its batches and its loss. Batches are pure functions of their number.

    `pairs`, `val`: what it learns from and is validated on. `facts`: plain values of JSON that make the module again;
    a run is only continued with the same ones. On each rank of a `world` batches are that rank's share of the rows; a
    training batch has `batch_size` rows on all of them together.
    """

    def __init__(
        self,
        module: nn.Module,
        pairs: EmbeddingPairs,
        val: EmbeddingPairs,
        config: RunConfig,
        facts: Mapping[str, Any],
        world: World = ALONE,
    ) -> None:
        if len(pairs) < config.batch_size:
            raise ValueError(f"{len(pairs)} training pairs are too few for batch_size={config.batch_size}")
        self.module, self.pairs, self.val, self.config, self.facts = module, pairs, val, config, facts
        self.world = world

    def prepare(self) -> None:
        """What comes before the first step of a new run, for instance statistics of the data."""

    @abstractmethod
    def training(self, step: int) -> B:
        """The batch of a training step; called from the thread that works ahead."""

    @abstractmethod
    def validation(self, number: int) -> B:
        """Validation batch `number`, the same every time."""

    @abstractmethod
    def losses(self, batch: B) -> Tensor:
        """Loss of each row [B]; the step descends their mean."""

    def metrics(self, batch: B, losses: Tensor, step: int, seconds: float) -> dict[str, float]:  # noqa: ARG002
        """What is logged of a step beside the loss; it took `seconds`. All ranks are asked at the same steps."""
        return {}

    @abstractmethod
    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes these weights of the module to `folder` for later use."""


def validation_rows(pairs: EmbeddingPairs, batch_size: int, number: int) -> np.ndarray:
    """Pairs of validation batch `number`: one batch after the other, from the start again at the end."""
    rows = min(batch_size, len(pairs))
    return (np.arange(rows) + number * rows) % len(pairs)
