"""Training of the velocity field: the flow-matching objective, and `train`, which runs it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.data.fingerprint import refuse_other_encoder
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import BLOCK_ROWS, Index
from geoflow_fast.directions import ROW_ORDER
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.anchor import Anchor
from geoflow_fast.flow.config import MANY_CORES, GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow, save_weights
from geoflow_fast.flow.precision import bfloat16_pays
from geoflow_fast.flow.preprocess import Preprocess
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.training.batches import Batch, BatchMaker
from geoflow_fast.training.blending import blend
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.half import HalfTwin
from geoflow_fast.training.logging import Log, share_of_time
from geoflow_fast.training.loop import Run, TrainReport, complete
from geoflow_fast.training.objective import Objective

PREPROCESS_ROWS, ANCHOR_ROWS = 100_000, 50_000
WIDE_ENOUGH = 256
"""Width from which on bfloat16 pays on a CPU: a step takes 0.70 to 0.85 of its time at 256, and as long at 128."""
LOSS_NAMES = tuple(f"loss_{direction}" for direction in ROW_ORDER)


class FlowMatching(Objective[Batch]):
    """The flow-matching objective of a `GeoFlow`."""

    pairs: EmbeddingPairs
    val: EmbeddingPairs
    config: TrainConfig

    def __init__(
        self, flow: GeoFlow, pairs: EmbeddingPairs, val: EmbeddingPairs, config: TrainConfig, world: World = ALONE
    ) -> None:
        super().__init__(flow, pairs, val, config, flow.config.to_json(), world)
        self.flow = flow
        self.batches = BatchMaker(flow, pairs, config, world.rank, world.size)

    def prepare(self) -> None:
        """Fits centring and principal components, then the anchor, on the pairs or on a seeded sample of a large
        set."""
        index = self._sample(PREPROCESS_ROWS)
        blocks = np.array_split(index, math.ceil(len(index) / BLOCK_ROWS))
        for stream, part in enumerate(self.flow.preprocess or ()):
            part.fit((self.pairs[rows][stream] for rows in blocks), centre=self.flow.config.centre)  # type: ignore[operator]
        if self.flow.anchor is not None:
            self._fit_anchor(self.flow.anchor)

    def _sample(self, rows: int) -> Index:
        """At most so many of the pairs, in order."""
        return np.sort(np.random.default_rng(self.config.seed).permutation(len(self.pairs))[:rows])

    def _fit_anchor(self, anchor: Anchor) -> None:
        """Fits an anchor on the pairs. Images and texts of one width are taken to share a space."""
        flow, config, index = self.flow, self.flow.config, self._sample(ANCHOR_ROWS)
        like = flow.example
        image, text = (flow.stream_to_flow(x.to(like), k) for k, x in enumerate(self.pairs[index]))
        fold = torch.from_numpy(np.unique(self.pairs.group[index], return_inverse=True)[1] % 2 == 0)
        start = None
        if config.image_dim == config.text_dim:
            start = torch.eye(*config.flow_dims, dtype=torch.float32, device="cpu")
            if flow.preprocess is not None:
                image_basis, text_basis = (cast(Preprocess, part).basis for part in flow.preprocess)
                start = image_basis @ text_basis.T
        anchor.fit((image, text), fold, start, flow.manifold, self.config.seed)

    def conclude(self) -> dict[str, Any] | None:
        """Weighs the network against the anchor, if there is one and `config.blend` is set."""
        if self.flow.anchor is None or not self.config.blend:
            return None
        outcome = None
        if self.world.is_main:
            outcome = blend(self.flow, self.first_gains(), self.pairs, self.val, self.config.seed)
        for x in (self.flow.anchor.shares, *self.flow.anchor.gains):
            self.world.broadcast(x.detach())
        return cast(dict[str, Any], self.world.share(outcome))

    def first_gains(self) -> list[Tensor]:
        """The gains of the anchor before the first step, which do not depend on what came after it."""
        untrained = copy.deepcopy(self.flow.anchor)
        assert untrained is not None
        self._fit_anchor(untrained)
        return [gain.detach() for gain in untrained.gains]

    def training_batch(self, step: int) -> Batch:
        return self.batches.training(step)

    def validation_batch(self, number: int) -> Batch:
        return self.batches.validation(self.val, number)

    def losses(self, batch: Batch) -> Tensor:
        """Loss of each row [B]: squared tangent error, summed over the generated streams (paper, Eq. 1)."""
        n_i2t, _, n_t2i = batch.counts
        flow = self.flow if self.twin is None else cast(GeoFlow, self.twin.module)
        image, text = flow.generated(batch.image, batch.text, batch.t, batch.counts)
        # Given rows have no output; zeros take their place, and the loss does not count them.
        outputs = functional.pad(image, (0, 0, n_i2t, 0)), functional.pad(text, (0, 0, 0, n_t2i))
        target, points = (batch.v_image, batch.v_text), (batch.image, batch.text)
        return self.batches.manifold.velocity_losses(outputs, target, points, batch.codes)

    def gains_from_bfloat16(self) -> bool:
        """On a CPU with units for bfloat16 wide networks gain from it; in narrow ones its conversions cost as much."""
        if self.batches.device.type != "cpu":
            return super().gains_from_bfloat16()
        return self.flow.config.hidden >= WIDE_ENOUGH and bfloat16_pays(self.batches.device)

    def half_twin(self) -> HalfTwin | None:
        # Autocast starts a GPU for every conversion. A CPU hardly notices.
        return HalfTwin(self.flow) if self.batches.device.type == "cuda" else None

    def why_not_captured(self) -> str | None:
        if self.config.fixed_directions:
            return None
        return "the number of rows of each direction is drawn in every step; fixed_directions=True fixes it"

    def kind(self, batch: Batch) -> Hashable:
        return batch.counts

    def metrics(self, batch: Batch, losses: Tensor, step: int, seconds: float) -> dict[str, float]:
        """Mean losses by direction, the probability of joint rows, and how long the coupling took."""
        parts = losses.detach().split(batch.counts)
        sums = torch.tensor(
            [[float(part.double().sum()), len(part)] for part in parts], dtype=torch.float64, device="cpu"
        )
        if self.world.size > 1:
            self.world.all_reduce(sums)
        return {
            **{name: total / rows for name, (total, rows) in zip(LOSS_NAMES, sums.tolist()) if rows},
            "p_joint": self.batches.joint_share(step),
            "coupling_seconds": batch.coupling_seconds,
            "coupling_share": share_of_time(batch.coupling_seconds, seconds),
        }

    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes what `GeoFlow.from_pretrained` reads."""
        save_weights(folder, self.flow.config, weights, self.flow.origin)


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
    log: Log | None = None,
) -> TrainReport:
    """Trains `flow` on `pairs` and leaves it in eval mode with the weights (or, with `ema_decay`, the averaged weights)
    of the lowest validation loss.

    `val`: validation pairs; by default a share of the images (`config.val_fraction`) is held out with all their texts.
    `out`: folder for `model.safetensors` and `config.json` (the best weights so far), `last.safetensors` (the state of
    the run) and `metrics.jsonl`; only one run at a time can use it. `resume`: whether to continue from the state in
    `out` if there is one; False removes it. If the run there has finished, its best weights are loaded and the call
    returns at once. On a CPU a resumed run ends with bit for bit the same weights as an uninterrupted one. `progress`:
    whether to show a live line on the terminal, by default if there is one. Ctrl-C stops after the current step and
    saves. A loss or gradient that is not finite raises `TrainingDiverged`, and `flow` then has the best weights so far.

    `log` is called with every record of metrics, {"step": ..., "loss": ..., ...}, beside what `metrics.jsonl` gets;
    docs/training.md has the lines for TensorBoard and Weights & Biases.

    The ranks of a `world` (`gf.distributed.joined`) share the rows of each batch; the first one writes, to a folder
    that all of them can see.
    """
    _check_pairs(flow, pairs, "pairs")
    if val is None:
        pairs, val = pairs.split(config.val_fraction, config.seed)
    _check_pairs(flow, val, "val")
    flow.origin = pairs.origin(dataclasses.asdict(config))
    return complete(Run(FlowMatching(flow, pairs, val, config, world)), out, resume=resume, progress=progress, log=log)


def _check_pairs(flow: GeoFlow, pairs: EmbeddingPairs, name: str) -> None:
    """Raises a ValueError unless the flow can be trained on these pairs."""
    widths, own = (pairs.image_dim, pairs.text_dim), (flow.config.image_dim, flow.config.text_dim)
    if widths != own:
        raise ValueError(f"{name} have widths {widths} (image, text), but the flow is made for {own}")
    if len(pairs) == 0:
        raise ValueError(f"{name} hold no pairs")
    for known, encoder in zip(flow.origin.encoders, pairs.encoders):
        refuse_other_encoder({"the flow": known, name: encoder})


def train_from_preset(
    pairs: EmbeddingPairs,
    out: Path,
    preset: str,
    val: EmbeddingPairs | None,
    overrides: dict[str, Any],
    *,
    centre: bool | None,
    pca_dim: int | None,
    device: str,
    resume: bool = True,
    world: World = ALONE,
) -> TrainReport:
    """Trains a flow as `geoflow train` does: with the network and the run of a preset, some of whose settings
    `overrides` may change."""
    chosen_device = usable_device(device)
    shape, config = preset_settings(
        preset, pairs, overrides, centre=centre, pca_dim=pca_dim, cores=cores_of(chosen_device)
    )
    torch.manual_seed(config.seed)
    return train(GeoFlow(shape).to(chosen_device), pairs, config, val, out, resume=resume, world=world)


def cores_of(device: torch.device) -> int | None:
    """The cores for which the preset `auto` chooses: those of this machine, or many in place of a GPU."""
    return None if device.type == "cpu" else MANY_CORES


def preset_settings(
    preset: str,
    pairs: EmbeddingPairs,
    overrides: Mapping[str, Any] | None = None,
    *,
    centre: bool | None = None,
    pca_dim: int | None = None,
    cores: int | None = None,
) -> tuple[GeoFlowConfig, TrainConfig]:
    """The network and the run of a preset for these pairs. `overrides`: settings of the run to change; `centre` and
    `pca_dim`, if they are given, change the network. `cores`: as in `GeoFlowConfig.auto`."""
    dims = pairs.image_dim, pairs.text_dim
    shape: GeoFlowConfig
    config: TrainConfig
    if preset == "auto":
        shape, config = GeoFlowConfig.auto(*dims, len(pairs), cores), TrainConfig.auto(len(pairs), cores)
    else:
        shape, config = getattr(GeoFlowConfig, preset)(*dims), getattr(TrainConfig, preset)()
    changes: dict[str, Any] = {
        name: value for name, value in (("centre", centre), ("pca_dim", pca_dim)) if value is not None
    }
    return dataclasses.replace(shape, **changes), dataclasses.replace(config, **(overrides or {}))
