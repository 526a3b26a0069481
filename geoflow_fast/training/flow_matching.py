"""Training of the velocity field: the flow's batches, made ahead of the step, and its loss. `trainer` has the loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import BLOCK_ROWS
from geoflow_fast.directions import Counts, row_directions
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow, save_weights
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.training.batches import Batch, BatchMaker
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.loop import Run, TrainReport, complete
from geoflow_fast.training.objective import Objective

PREPROCESS_ROWS = 100_000


def row_losses(flow: GeoFlow, batch: Batch) -> Tensor:
    """Flow-matching loss of each row [B]: squared tangent error summed over the generated streams (paper, Eq. 1)."""
    n_i2t, _, n_t2i = batch.counts
    image_out, text_out = flow.generated(batch.image, batch.text, batch.t, batch.counts)
    # Given rows have no output; zeros take their place, and the loss passes over them.
    image_out, text_out = functional.pad(image_out, (0, 0, n_i2t, 0)), functional.pad(text_out, (0, 0, 0, n_t2i))
    if flow.config.geometry == "euclidean":
        return (image_out - batch.v_image).square().sum(-1) + (text_out - batch.v_text).square().sum(-1)
    points = (batch.v_image, batch.v_text, batch.image, batch.text)
    return ops.flow_loss(image_out, text_out, *points, row_directions(batch.counts, batch.t.device))[1]


def direction_means(losses: Tensor, counts: Counts, world: World = ALONE) -> dict[str, float]:
    """Mean loss of the rows of each direction that is present on some rank."""
    parts = losses.detach().split(counts)
    sums = torch.tensor([[float(part.double().sum()), len(part)] for part in parts], dtype=torch.float64)
    totals = zip(("i2t", "joint", "t2i"), world.all_reduce(sums).tolist())
    return {f"loss_{name}": total / rows for name, (total, rows) in totals if rows}


class FlowMatching(Objective[Batch]):
    """The flow-matching objective of a `GeoFlow`."""

    config: TrainConfig

    def __init__(
        self, flow: GeoFlow, pairs: EmbeddingPairs, val: EmbeddingPairs, config: TrainConfig, world: World = ALONE
    ) -> None:
        super().__init__(flow, pairs, val, config, flow.config.to_json(), world)
        self.flow = flow
        # Batches are made in a thread of their own.
        self.batches = BatchMaker(flow, pairs, config, world.twin())

    def prepare(self) -> None:
        """Fits centring and principal components."""
        if self.flow.preprocess is not None:
            fit_preprocess(self.flow, self.pairs, self.config.seed)

    def training(self, step: int) -> Batch:
        """The batch of a training step."""
        return self.batches.training(step)

    def validation(self, number: int) -> Batch:
        """Validation batch `number`."""
        return self.batches.validation(self.val, number)

    def losses(self, batch: Batch) -> Tensor:
        """Flow-matching loss of each row."""
        return row_losses(self.flow, batch)

    def metrics(self, batch: Batch, losses: Tensor, step: int, seconds: float) -> dict[str, float]:
        """Losses by direction, where the curriculum is, what the coupling cost."""
        return {
            **direction_means(losses, batch.counts, self.world),
            "p_joint": self.config.curriculum.joint_probability(step),
            "coupling_seconds": batch.coupling_seconds,
            "coupling_share": batch.coupling_seconds / seconds,
        }

    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes what `GeoFlow.from_pretrained` reads."""
        save_weights(folder, self.flow.config, weights)


class Trainer(Run[Batch]):
    """State of a flow's run. `train` is the way to use it."""

    def __init__(
        self, flow: GeoFlow, pairs: EmbeddingPairs, val: EmbeddingPairs, config: TrainConfig, world: World = ALONE
    ) -> None:
        objective = FlowMatching(flow, pairs, val, config, world)
        super().__init__(objective)
        self.batches = objective.batches


def train(
    flow: GeoFlow,
    pairs: EmbeddingPairs,
    config: TrainConfig,
    val: EmbeddingPairs | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    *,
    progress: bool | None = None,
    world: World = ALONE,
) -> TrainReport:
    """Trains `flow` on `pairs` and leaves it in eval mode with the weights (or, with `ema_decay`, the averaged weights)
    of the lowest validation loss.

    `val`: validation pairs; by default a share of the images (`config.val_fraction`) is held out with all their texts.
    `out`: folder for `model.safetensors` and `config.json` (the best weights so far), `last.safetensors` (the state of
    the run) and `metrics.jsonl`; it takes one run at a time. `resume`: continue from the state in `out` if there is
    one; False removes it. If the run there has finished, its best weights are loaded and the call returns at once. On a
    CPU a resumed run ends with bit for bit the same weights as an uninterrupted one. `progress`: live line on the
    terminal, by default if there is one. Ctrl-C stops after the current step and saves. A loss or gradient that is not
    finite raises `TrainingDiverged`.

    The ranks of a `world` (`gf.distributed.joined`) share the rows of each batch; the first one writes, to a folder
    that all of them can see.
    """
    _check_widths(flow, pairs, "pairs")
    if val is None:
        pairs, val = pairs.split(config.val_fraction, config.seed)
    _check_widths(flow, val, "val")
    return complete(Trainer(flow, pairs, val, config, world), out, resume=resume, progress=progress)


def train_preset(
    pairs: EmbeddingPairs,
    out: Path,
    preset: str,
    val: EmbeddingPairs | None,
    overrides: dict[str, Any],
    *,
    centre: bool,
    pca_dim: int | None,
    device: str,
    world: World = ALONE,
) -> TrainReport:
    """`geoflow train`: a preset of network and run, with `overrides` of the latter."""
    config = dataclasses.replace(getattr(TrainConfig, preset)(), **overrides)
    shape = getattr(GeoFlowConfig, preset)(pairs.image_dim, pairs.text_dim)
    where = usable_device(device)
    torch.manual_seed(config.seed)
    flow = GeoFlow(dataclasses.replace(shape, centre=centre, pca_dim=pca_dim)).to(where)
    return train(flow, pairs, config, val, out, world=world)


def _check_widths(flow: GeoFlow, pairs: EmbeddingPairs, name: str) -> None:
    widths, own = (pairs.image_dim, pairs.text_dim), (flow.config.image_dim, flow.config.text_dim)
    if widths != own:
        raise ValueError(f"{name} have widths {widths} (image, text), but the flow is made for {own}")
    if len(pairs) == 0:
        raise ValueError(f"{name} hold no pairs")


def fit_preprocess(flow: GeoFlow, pairs: EmbeddingPairs, seed: int) -> None:
    """Fits centring and principal components on the pairs, or on a seeded sample of a large set."""
    index = np.sort(np.random.default_rng(seed).permutation(len(pairs))[:PREPROCESS_ROWS])
    blocks = np.array_split(index, math.ceil(len(index) / BLOCK_ROWS))
    for stream, part in enumerate(flow.preprocess or ()):
        part.fit((pairs[rows][stream] for rows in blocks), centre=flow.config.centre)  # type: ignore[operator]
