"""Baselines that are trained by gradient descent on shuffled pairs, with the loop of `training`."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.methods.baselines.base import Baseline, FitTask
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Index
from geoflow_fast.training.batches import RowBatch, ShuffledBatches, generator_for, validation_index
from geoflow_fast.training.config import RunConfig
from geoflow_fast.training.loop import Run, TrainReport, complete
from geoflow_fast.training.objective import Objective

BASELINE_SIZES = ("paper", "small", "tiny")
HIDDEN = {"paper": 2048, "small": 512, "tiny": 128}
"""Width of networks by size."""
TINY_WIDTH = 64
"""Embeddings up to this width get the tiny size unless another is asked for, wider ones the small size."""

PUBLISHED = RunConfig(steps=120_000, batch_size=2048, warmup_steps=1000, val_every=10_000, val_batches=20)
"""The settings that the published runs have in common."""


class SizedBaseline(Baseline):
    """A baseline whose network and run come in three sizes.

    `size`: "paper" for the published network and run, "small" for hours on a few cores, "tiny" for about a minute at
    small width; "auto" chooses tiny or small by the width of the embeddings.
    """

    def __init__(self, image_dim: int, text_dim: int, size: str = "auto", **settings: Any) -> None:
        if size == "auto":
            size = "tiny" if max(image_dim, text_dim) <= TINY_WIDTH else "small"
        if size not in BASELINE_SIZES:
            raise ValueError(f"size must be auto or one of {', '.join(BASELINE_SIZES)}, got {size!r}")
        super().__init__(image_dim, text_dim, size=size, **settings)
        self.size = size


class TrainedBaseline(SizedBaseline):
    """A baseline that is trained with a loss of its own. Subclasses have `RECIPE`, the published run, and
    `LEARNING_RATES` by size."""

    RECIPE: ClassVar[RunConfig]
    MOMENTUM: ClassVar[float | None] = None
    """That of SGD; None for AdamW."""
    LEARNING_RATES: ClassVar[Mapping[str, float]]
    CONTRASTIVE: ClassVar[bool] = False
    """True if the loss compares the rows of a batch with each other, so that a batch cannot be taken in pieces."""

    def default_config(self) -> RunConfig:
        """The published run; for smaller sizes a shorter run with smaller batches and a higher learning rate."""
        changes: dict[str, Any] = {
            "paper": {},
            "small": {"steps": 20_000, "warmup_steps": 500, "val_every": 500, "val_batches": 5},
            "tiny": {"steps": 1500, "warmup_steps": 100, "val_every": 250, "val_batches": 5, "log_every": 25},
        }[self.size]
        rows = {"paper": 2048, "small": 1024, "tiny": 256}[self.size]
        batch_size = min(self.RECIPE.batch_size, rows)
        return dataclasses.replace(self.RECIPE, batch_size=batch_size, lr=self.LEARNING_RATES[self.size], **changes)

    def make_batch(self, image: Tensor, text: Tensor, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:  # noqa: ARG002
        """What `losses` takes for the pairs numbered `index` [B], image [B, d_I] and text [B, d_T]. Random numbers come
        from `generator`, on the CPU."""
        return image, text

    @abstractmethod
    def losses(self, *tensors: Tensor) -> Tensor:
        """Loss of each row [B] of a batch of `make_batch`."""

    def _fit(self, task: FitTask) -> TrainReport:
        return complete(Run(PairObjective(self, self, task)), task.out, resume=task.resume, progress=task.progress)


class PairObjective(Objective[RowBatch]):
    """The objective of a `TrainedBaseline`. `module` is what is trained: the method, or a module that contains it."""

    pairs: EmbeddingPairs
    val: EmbeddingPairs

    def __init__(self, module: nn.Module, method: TrainedBaseline, task: FitTask) -> None:
        if method.CONTRASTIVE and task.config.accumulate > 1:
            raise ValueError(f"{method.method} compares the rows of a batch with each other: accumulate must be 1")
        super().__init__(module, task.pairs, task.val, task.config, method.facts)
        self.method = method
        self.device = method.device
        self.order = ShuffledBatches(len(task.pairs), task.config.batch_size, task.config.seed)

    def make_optimizer(self, rate: Tensor | None) -> torch.optim.Optimizer:
        """AdamW, or what the method's paper takes: SGD with a momentum."""
        momentum, config = self.method.MOMENTUM, self.config
        if momentum is None:
            return super().make_optimizer(rate)
        options = {"momentum": momentum, "weight_decay": config.weight_decay, "fused": True}
        return torch.optim.SGD(self.module.parameters(), config.lr, **options)

    def training_batch(self, step: int) -> RowBatch:
        """The batch of a training step, made of shuffled pairs."""
        return self._batch(self.pairs, self.order[step], generator_for(self.config.seed, "batch", step))

    def validation_batch(self, number: int) -> RowBatch:
        """Validation batch `number`: the same held-out pairs and random numbers every time."""
        index = validation_index(self.val, self.config.batch_size, number)
        return self._batch(self.val, index, generator_for(self.config.seed, "validation", number))

    def _batch(self, pairs: EmbeddingPairs, index: Index, generator: torch.Generator) -> RowBatch:
        image, text = (x.to(self.device, non_blocking=True) for x in pairs[index])
        return RowBatch(self.method.make_batch(image, text, torch.from_numpy(index).to(self.device), generator))

    def losses(self, batch: RowBatch) -> Tensor:
        """Loss of each row."""
        return self.method.losses(*batch.tensors)

    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes what `Baseline.load` reads."""
        self.method.write(folder, weights)
