"""Training of the velocity field: the flow's batches, made ahead of the step, and its loss. `trainer` has the loop."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast import _native, dispatch, ops
from geoflow_fast.curriculum import Counts, Curriculum, Questions, draw_questions, row_directions
from geoflow_fast.data import BLOCK_ROWS, EmbeddingPairs, Index, ShuffledBatches
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.geometry import DIRECTIONS, StructuredNoise, sample_uniform
from geoflow_fast.model import GeoFlow, GeoFlowConfig, save_weights
from geoflow_fast.ops.ot_assign import CONDITIONAL_COUPLINGS, COUPLINGS
from geoflow_fast.trainer import Objective, Run, RunConfig, TrainReport, complete, generator_for, validation_rows

NOISES = ("iid", "structured")
OT_SCOPES = ("global", "local")
LANE_ROWS = 8
"""Rows of a batch per lane. Row i is in lane i modulo the number of lanes, a lane's noise comes from a seed of its own,
and a rank has whole lanes: so it draws the noise of its own rows alone, and has its share of every direction."""
Noise = Tensor | StructuredNoise
PREPROCESS_ROWS = 100_000
PANEL_RULES = ("paper", "sample")
"""Couplings whose plan the ranks can solve together, each its rows of it; every rank solves the whole of the others."""


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Settings of a training run. `paper()` has exactly the paper's settings; docs/training.md lists where the defaults
    differ.

    `coupling` pairs noise with data in joint rows: "paper" (row argmax of the entropic transport plan), "sample" (a
    draw from each row of the plan), "exact" (linear assignment) or "independent". `conditional_coupling` does so in i2t
    and t2i rows: "independent", "paper" or "c2ot". A plan is solved among the rows that use it, with regularisation
    `sinkhorn_eps`. `noise`: "iid", or "structured" for Hadamard blocks, whose plan is much cheaper. `ot_scope`: with
    several ranks, one plan for the rows of all ("global") or one per rank ("local").

    Curriculum: the first `conditional_share` of the steps are conditional only; over the next `ramp_share` the
    probability of a joint row rises linearly to `p_joint`. `p_drop`: probability that a conditional row has its
    condition replaced by noise.

    Run: `steps`, `batch_size` and `seed`. `lr`: peak learning rate, reached after `warmup_steps` (a tenth of the run if
    the run is not longer than that), then a cosine to zero. `optimizer`: "adamw", "adam", or "sgd" with momentum 0.9.
    `clip`: largest norm of the gradient. `accumulate`: number of pieces in which a batch goes through the network.
    `ema_decay`: average the weights with this decay, and validate and keep the average. `precision`: "float32",
    "bfloat16" (autocast), or "auto" for bfloat16 where the device gains from it. Every `val_every` steps `val_batches`
    batches are validated; `val_fraction` of the images is held out if no validation pairs are given. Training stops
    after `patience` validations in a row whose loss is not lower than that of the last improvement by more than
    `min_improvement` and by more than `min_relative_improvement` of it. `prefetch`: prepare batches in a thread.
    `weight_decay`: of the optimizer. `compile`: trace the step with torch.compile. `checkpoint_every`, `log_every`:
    steps between checkpoints and between lines of `metrics.jsonl`. `tensorboard`: write TensorBoard events as well.
    """

    coupling: str = "paper"
    conditional_coupling: str = "independent"
    sinkhorn_eps: float = 0.05
    noise: str = "iid"
    ot_scope: str = "global"
    conditional_share: float = 0.15
    ramp_share: float = 0.15
    p_joint: float = 0.40
    p_drop: float = 0.10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("sinkhorn_eps")
        self._check_shares("conditional_share", "ramp_share", "p_joint", "p_drop")
        self._check_choice("coupling", COUPLINGS)
        self._check_choice("conditional_coupling", CONDITIONAL_COUPLINGS)
        self._check_choice("noise", NOISES)
        self._check_choice("ot_scope", OT_SCOPES)

    @classmethod
    def paper(cls) -> TrainConfig:
        """Exactly the paper's settings, including its coupling on conditional rows."""
        return cls(
            steps=120_000,
            batch_size=8192,
            warmup_steps=4000,
            conditional_coupling="paper",
            val_every=2000,
            checkpoint_every=2000,
        )

    @classmethod
    def small(cls) -> TrainConfig:
        """Settings for `GeoFlowConfig.small`."""
        return cls(lr=1e-3)

    @classmethod
    def tiny(cls) -> TrainConfig:
        """Settings for `GeoFlowConfig.tiny`: a minute or two on two cores."""
        return cls(steps=1500, batch_size=256, lr=2e-3, warmup_steps=100, val_every=250, log_every=25)

    @property
    def curriculum(self) -> Curriculum:
        """The schedule of directions and guidance dropout over the run."""
        return Curriculum(self.steps, self.conditional_share, self.ramp_share, self.p_joint, self.p_drop)


@dataclass(frozen=True)
class Batch:
    """Network input and target for rows sorted as in `curriculum`, and how long the coupling took to solve."""

    image: Tensor
    text: Tensor
    v_image: Tensor
    v_text: Tensor
    t: Tensor
    counts: Counts
    coupling_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.t)

    def pieces(self, count: int) -> Iterator[Batch]:
        """The batch in `count` pieces of nearly equal size, or in single rows if there are fewer."""
        rows = len(self)
        count = min(count, rows)
        edges = [rows * k // count for k in range(count + 1)] if rows else []
        for low, high in itertools.pairwise(edges):
            names = ("image", "text", "v_image", "v_text", "t")
            parts = {name: getattr(self, name)[low:high] for name in names}
            yield Batch(**parts, counts=_counts_between(self.counts, low, high))


def _counts_between(counts: Counts, low: int, high: int) -> Counts:
    """Counts of rows [low, high) of a sorted batch."""
    edges = np.clip(np.cumsum((0, *counts)), low, high)
    i2t, joint, t2i = np.diff(edges).tolist()
    return i2t, joint, t2i


def lane_count(rows: int) -> int:
    """Lanes of a batch."""
    return max(1, rows // LANE_ROWS)


class BatchMaker:
    """Turns pairs into training batches; a pure function of the step.

    Each rank of a `world` makes its share of the rows of a batch, `own`, of the same batch that one process would make.
    """

    def __init__(self, flow: GeoFlow, pairs: EmbeddingPairs, config: TrainConfig, world: World = ALONE) -> None:
        lanes = lane_count(config.batch_size)
        if lanes < world.size:
            least = LANE_ROWS * world.size
            raise ValueError(f"batch_size={config.batch_size} is too small for {world.size} ranks: at least {least}")
        if config.noise == "structured" and flow.config.geometry == "euclidean":
            raise ValueError('noise="structured" lies on the sphere; the Euclidean twin needs noise="iid"')
        self.flow, self.pairs, self.config = flow, pairs, config
        self.device = next(flow.parameters()).device
        self.order = ShuffledBatches(len(pairs), config.batch_size, config.seed)
        self.world = world
        lane = np.arange(config.batch_size) % lanes
        # Row numbers of each rank, ascending.
        self.owners = [np.flatnonzero((lane >= share.start) & (lane < share.stop)) for share in world.shares(lanes)]
        self.own = self.owners[world.rank]
        # Of each lane of this rank: which of its rows are in it.
        self.lanes = {k: torch.from_numpy(np.flatnonzero(self.own % lanes == k)) for k in world.own(lanes)}

    def training(self, step: int) -> Batch:
        """The batch of a training step: shuffled pairs, questions of the curriculum, coupled noise."""
        generator = generator_for(self.config.seed, "batch", step)
        questions = self.config.curriculum.draw(step, self.config.batch_size, generator)
        image1, text1 = self._load(self.pairs, self.order[step][self.own])
        image0, text0 = self._lane_noise(step) if self.config.noise == "iid" else (image1.clone(), text1.clone())
        seconds = 0.0
        for rows, direction, rule in coupling_groups(questions.counts, self.config):
            group = Group(rows, self.owners, self.world)
            mine = group.local
            noise: tuple[Noise, Noise] = image0[mine], text0[mine]
            if self.config.noise == "structured":
                noise = self._structured_noise(group, generator)
                image0[mine], text0[mine] = dense(noise[0]), dense(noise[1])
            if rule != "independent":
                start = time.perf_counter()
                data = image1[mine], text1[mine]
                image1[mine], text1[mine] = self._coupled(noise, data, group, direction, rule, generator)
                seconds += time.perf_counter() - start
        batch = self._interpolate((image0, text0), (image1, text1), questions.select(self.own))
        return dataclasses.replace(batch, coupling_seconds=seconds)

    def _coupled(
        self,
        noise: tuple[Noise, Noise],
        data: tuple[Tensor, Tensor],
        group: Group,
        direction: str,
        rule: str,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """The data pairs that go with this rank's noise."""
        if self.world.size == 1 or self.config.ot_scope == "local":
            if not len(data[0]):
                return data
            if self.world.size > 1:  # plans of their own, draws of their own
                generator = torch.Generator().manual_seed(generator.initial_seed() + 1 + self.world.rank)
            target = self._couple(noise, data, direction, rule, generator)
            return data[0][target], data[1][target]
        image, text = (group.gather(x) for x in data)
        if rule in PANEL_RULES and self.device.type == "cpu" and _native.missing() is None:
            target = self._couple_panel(noise, (image, text), group, rule, generator)
        else:
            whole = tuple(group.gather(dense(x)) for x in noise)
            target = self._couple(whole, (image, text), direction, rule, generator)[group.numbers]  # type: ignore[arg-type]
        return image[target], text[target]

    def _couple_panel(
        self,
        noise: tuple[Noise, Noise],
        data: tuple[Tensor, Tensor],
        group: Group,
        rule: str,
        generator: torch.Generator,
    ) -> Tensor:
        """`_couple` of this rank's noise with the data of all ranks."""
        uniform = None
        if rule == "sample":
            uniform = torch.rand(len(data[0]), generator=generator, dtype=torch.float64)[group.numbers]
        own = self._on_sphere(noise)
        return ops.ot_assign_panel(*own, *data, self.world, eps=self.config.sinkhorn_eps, uniform=uniform)

    def _on_sphere(self, noise: tuple[Noise, Noise]) -> tuple[Tensor, Tensor]:
        """What the plan sees of the noise. Euclidean data have unit norm, so what tells targets apart is the direction
        of the Gaussian noise."""
        image, text = dense(noise[0]), dense(noise[1])
        if self.flow.config.geometry != "euclidean":
            return image, text
        return functional.normalize(image), functional.normalize(text)

    def _couple(
        self,
        noise: tuple[Noise, Noise],
        data: tuple[Tensor, Tensor],
        direction: str,
        rule: str,
        generator: torch.Generator,
    ) -> Tensor:
        """Data row for each noise row: int64 [B]."""
        if self.flow.config.geometry == "euclidean":
            noise = self._on_sphere(noise)
        return ops.couple(
            *noise, *data, coupling=rule, direction=direction, eps=self.config.sinkhorn_eps, generator=generator
        )

    def validation(self, pairs: EmbeddingPairs, number: int) -> Batch:
        """Validation batch `number`: the same pairs, independent noise, times and directions every time. A rank has
        every so manieth row, or none of a small batch."""
        index = validation_rows(pairs, self.config.batch_size, number)
        rows = len(index)
        generator = generator_for(self.config.seed, "validation", number)
        questions = draw_questions(rows, self.config.p_joint, 0.0, generator)
        # Directions are sorted, so the rows must not be.
        index = index[torch.randperm(rows, generator=generator).numpy()]
        image0, text0 = (dense(x) for x in self._noise(rows, generator))
        own = np.arange(self.world.rank, rows, self.world.size)
        return self._interpolate((image0[own], text0[own]), self._load(pairs, index[own]), questions.select(own))

    def _load(self, pairs: EmbeddingPairs, index: np.ndarray) -> tuple[Tensor, Tensor]:
        image, text = (x.to(self.device, non_blocking=True) for x in pairs[index])
        return self.flow.to_flow(image, text)  # type: ignore[return-value]

    def _lane_noise(self, step: int) -> tuple[Tensor, Tensor]:
        """Base samples of this rank's rows, drawn on the CPU so that they do not depend on the device."""
        count = lane_count(self.config.batch_size)
        seeds = np.random.SeedSequence((self.config.seed, *b"noise", step)).generate_state(count, np.uint64) >> 1
        generator = torch.Generator()
        streams = tuple(torch.empty(len(self.own), d) for d in self.flow.config.flow_dims)
        for lane, rows in self.lanes.items():
            generator.manual_seed(int(seeds[lane]))
            for stream in streams:
                stream[rows] = torch.randn(len(rows), stream.shape[1], generator=generator)
        if self.flow.config.geometry == "sphere":
            streams = tuple(x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in streams)
        image, text = (x.to(self.device, non_blocking=True) for x in streams)
        return image, text

    def _structured_noise(self, group: Group, generator: torch.Generator) -> tuple[Noise, Noise]:
        """Hadamard blocks of a group of rows; of several ranks each keeps its own rows of them."""
        noise = self._noise(group.count, generator)
        if self.world.size == 1:
            return noise
        return dense(noise[0])[group.numbers], dense(noise[1])[group.numbers]

    def _noise(self, rows: int, generator: torch.Generator) -> tuple[Noise, Noise]:
        """Base samples of both streams, drawn on the CPU so that they do not depend on the device."""
        image, text = (self._noise_of_width(rows, d, generator) for d in self.flow.config.flow_dims)
        return image, text

    def _noise_of_width(self, rows: int, d: int, generator: torch.Generator) -> Noise:
        if self.flow.config.geometry == "euclidean":
            return torch.randn(rows, d, generator=generator).to(self.device, non_blocking=True)
        if self.config.noise == "structured":
            drawn = StructuredNoise.draw(rows, d, generator=generator)
            return dataclasses.replace(drawn, signs=drawn.signs.to(self.device, non_blocking=True))
        return sample_uniform(rows, d, generator=generator).to(self.device, non_blocking=True)

    def _interpolate(self, noise: tuple[Tensor, Tensor], data: tuple[Tensor, Tensor], questions: Questions) -> Batch:
        t, direction, drop = (x.to(self.device) for x in (questions.t, questions.direction, questions.drop))
        make = masked_line if self.flow.config.geometry == "euclidean" else ops.masked_interpolant
        return Batch(*make(*noise, *data, t, direction, drop=drop), t, questions.counts)


class Group:
    """Rows of a batch that are coupled with each other, as the ranks hold them.

    `rows`: of the whole batch. `local`: where they are among this rank's rows; `numbers`: which of the group these are.
    """

    def __init__(self, rows: slice, owners: list[Index], world: World) -> None:
        self.count, self.world = rows.stop - rows.start, world
        edges = [np.searchsorted(own, (rows.start, rows.stop)).tolist() for own in owners]
        self.local = slice(*edges[world.rank])
        self.members = [own[low:high] - rows.start for own, (low, high) in zip(owners, edges)]
        self.numbers = torch.from_numpy(self.members[world.rank])

    def gather(self, x: Tensor) -> Tensor:
        """Rows of the whole group in order, from those of each rank."""
        order = torch.from_numpy(np.concatenate(self.members)).to(x.device)
        gathered = self.world.gather_rows(x, [len(part) for part in self.members])
        return torch.empty_like(gathered).index_copy_(0, order, gathered)


def masked_line(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, t: Tensor, direction: Tensor, *, drop: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Euclidean twin of `ops.masked_interpolant`: straight lines instead of geodesics."""
    points, velocities = [], []
    for noise, data, given_name in ((image0, image1, "i2t"), (text0, text1, "t2i")):
        given = (direction == DIRECTIONS.index(given_name)).unsqueeze(-1)
        shown = torch.where(drop.unsqueeze(-1), noise, data)
        points.append(torch.where(given, shown, torch.lerp(noise, data, t.unsqueeze(-1))))
        velocities.append(torch.where(given, 0.0, data - noise))
    return points[0], points[1], velocities[0], velocities[1]


def coupling_groups(counts: Counts, config: TrainConfig) -> list[tuple[slice, str, str]]:
    """(rows, direction, rule) of the groups of a sorted batch within which noise is coupled to data.

    The paper solves one plan over the whole batch; otherwise each direction has its own rule and plan.
    """
    n_i2t, n_joint, n_t2i = counts
    edges = (0, n_i2t, n_i2t + n_joint, n_i2t + n_joint + n_t2i)
    if config.coupling == config.conditional_coupling == "paper":
        return [(slice(0, edges[-1]), "joint", "paper")]
    conditional = config.conditional_coupling
    rules = (("i2t", conditional), ("joint", config.coupling), ("t2i", conditional))
    return [(slice(low, high), *rule) for low, high, rule in zip(edges[:-1], edges[1:], rules) if high > low]


def dense(noise: Noise) -> Tensor:
    """Noise as a plain tensor [B, d]."""
    return noise if isinstance(noise, Tensor) else noise.dense()


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
    where = dispatch.usable_device(device)
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
