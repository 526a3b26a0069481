"""Training of the velocity field: batches made ahead of the step, the step, validation, checkpoints, exact resume.

Everything random is a function of (seed, purpose, step), so a run that is killed and started again draws what it would
have drawn; the checkpoint holds the rest: weights, their average, the optimiser and the early-stopping state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast import dispatch, ops
from geoflow_fast.checkpoint import load_tensors, locked, save_tensors, truncate_jsonl
from geoflow_fast.curriculum import Counts, Curriculum, Questions, draw_questions, row_directions
from geoflow_fast.data import BLOCK_ROWS, EmbeddingPairs, ShuffledBatches
from geoflow_fast.geometry import DIRECTIONS, StructuredNoise, sample_uniform
from geoflow_fast.model import CONFIG_FILE, WEIGHTS_FILE, GeoFlow, GeoFlowConfig, save_weights
from geoflow_fast.ops.ot_assign import CONDITIONAL_COUPLINGS, COUPLINGS

NOISES = ("iid", "structured")
Noise = Tensor | StructuredNoise
PRECISIONS = ("auto", "float32", "bfloat16")
CHECKPOINT_FILE, METRICS_FILE, TENSORBOARD_FOLDER = "last.safetensors", "metrics.jsonl", "tensorboard"
PREPROCESS_ROWS = 100_000
# What may differ between a run and its continuation without changing the weights.
_COSMETIC = {"checkpoint_every", "log_every", "tensorboard", "prefetch"}


class TrainingDiverged(ValueError):
    """The loss or the gradient became non-finite; the message names the step and the last good checkpoint."""


@dataclass(frozen=True)
class RunConfig:
    """How any network here is trained on pairs: steps, schedule, validation, checkpoints.

    `accumulate`: pieces in which a batch goes through the network. `ema_decay`: average the weights, validate and keep
    the average. `val_fraction`: held out when no validation pairs are given. Training stops after `patience`
    validations in a row without an improvement: a loss lower than the last improvement's by more than `min_improvement`
    and by more than `min_relative_improvement` of it. `warmup_steps`: a tenth of the run instead where the run is not
    longer than they are. `precision`: "auto" is bfloat16 autocast where the device gains from it.
    """

    steps: int = 20_000
    batch_size: int = 1024
    lr: float = 6e-4
    warmup_steps: int = 500
    seed: int = 0
    weight_decay: float = 1e-3
    clip: float = 1.0
    accumulate: int = 1
    ema_decay: float | None = None
    precision: str = "auto"
    compile: bool = False
    val_every: int = 500
    val_batches: int = 5
    val_fraction: float = 0.02
    patience: int = 100
    min_improvement: float = 1e-6
    min_relative_improvement: float = 0.005
    checkpoint_every: int = 500
    log_every: int = 50
    tensorboard: bool = False
    prefetch: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type != "int":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{field.name} must be an integer, got {value!r}")
            least = 0 if field.name in ("warmup_steps", "seed") else 1
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")
        self._check_positive("lr", "clip")
        self._check_shares("val_fraction")
        self._check_choice("precision", PRECISIONS)
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), got {self.ema_decay}")
        if self.batch_size < self.accumulate:
            raise ValueError(f"batch_size={self.batch_size} cannot be split into accumulate={self.accumulate} pieces")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def _check_shares(self, *names: str) -> None:
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero at the end of the run."""
        warmup = self.warmup_steps if self.warmup_steps < self.steps else self.steps // 10
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / (self.steps - warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """How to train a flow. `paper()` is the paper to the letter; the defaults differ as the table in the documentation
    says.

    `coupling`: how noise meets data on joint rows: "paper" (row argmax of the entropic plan), "sample" (draw from its
    rows), "exact" (linear assignment), "independent". `conditional_coupling`: on i2t and t2i rows: "independent",
    "paper", or "c2ot". The plan is solved among the rows that use it. `sinkhorn_eps`: its regularisation. `noise`:
    "iid", or "structured" for Hadamard blocks, whose plan is much cheaper. `conditional_share`, `ramp_share`,
    `p_joint`, `p_drop`: see `Curriculum`. The rest is described in `RunConfig`.
    """

    coupling: str = "paper"
    conditional_coupling: str = "independent"
    sinkhorn_eps: float = 0.05
    noise: str = "iid"
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

    @classmethod
    def paper(cls) -> TrainConfig:
        """The paper to the letter, its coupling on every row included."""
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
        """For `GeoFlowConfig.small`."""
        return cls(lr=1e-3)

    @classmethod
    def tiny(cls) -> TrainConfig:
        """For `GeoFlowConfig.tiny`: a minute or two on two cores."""
        return cls(steps=1500, batch_size=256, lr=2e-3, warmup_steps=100, val_every=250, log_every=25)

    @property
    def curriculum(self) -> Curriculum:
        """Directions, times and guidance dropout over the run."""
        return Curriculum(self.steps, self.conditional_share, self.ramp_share, self.p_joint, self.p_drop)


@dataclass(frozen=True)
class TrainReport:
    """What a run did. `finished`: the last step or early stopping was reached (not interrupted)."""

    steps: int
    finished: bool
    stopped_early: bool
    best_step: int
    best_val_loss: float
    seconds: float
    out: Path | None


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

    def pieces(self, count: int) -> Iterator[Batch]:
        """The batch in `count` pieces of nearly equal size, or in single rows if there are fewer."""
        rows = len(self.t)
        count = min(count, rows)
        edges = [rows * k // count for k in range(count + 1)]
        for low, high in itertools.pairwise(edges):
            names = ("image", "text", "v_image", "v_text", "t")
            parts = {name: getattr(self, name)[low:high] for name in names}
            yield Batch(**parts, counts=_counts_between(self.counts, low, high))


def _counts_between(counts: Counts, low: int, high: int) -> Counts:
    """Counts of rows [low, high) of a sorted batch."""
    edges = np.clip(np.cumsum((0, *counts)), low, high)
    i2t, joint, t2i = np.diff(edges).tolist()
    return i2t, joint, t2i


def _generator(seed: int, purpose: str, step: int) -> torch.Generator:
    """A CPU generator that depends on its arguments alone."""
    entropy = (seed, *purpose.encode(), step)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))


class BatchMaker:
    """Turns pairs into training batches; a pure function of the step."""

    def __init__(self, flow: GeoFlow, pairs: EmbeddingPairs, config: TrainConfig) -> None:
        if config.noise == "structured" and flow.config.geometry == "euclidean":
            raise ValueError('noise="structured" lies on the sphere; the Euclidean twin needs noise="iid"')
        self.flow, self.pairs, self.config = flow, pairs, config
        self.device = next(flow.parameters()).device
        self.order = ShuffledBatches(len(pairs), config.batch_size, config.seed)

    def training(self, step: int) -> Batch:
        """The batch of a training step: shuffled pairs, questions of the curriculum, coupled noise."""
        generator = _generator(self.config.seed, "batch", step)
        questions = self.config.curriculum.draw(step, self.config.batch_size, generator)
        image1, text1 = self._load(self.pairs, self.order[step])
        image0, text0 = torch.empty_like(image1), torch.empty_like(text1)
        seconds = 0.0
        for rows, direction, rule in coupling_groups(questions.counts, self.config):
            data = image1[rows], text1[rows]
            noise = self._noise(len(data[0]), generator)
            image0[rows], text0[rows] = dense(noise[0]), dense(noise[1])
            if rule != "independent":
                start = time.perf_counter()
                target = self._couple(noise, data, direction, rule, generator)
                seconds += time.perf_counter() - start
                image1[rows], text1[rows] = data[0][target], data[1][target]
        batch = self._interpolate((image0, text0), (image1, text1), questions)
        return dataclasses.replace(batch, coupling_seconds=seconds)

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
            # Data have unit norm, so what tells targets apart is the direction of the Gaussian noise.
            noise = tuple(torch.nn.functional.normalize(dense(x)) for x in noise)  # type: ignore[assignment]
        return ops.couple(
            *noise, *data, coupling=rule, direction=direction, eps=self.config.sinkhorn_eps, generator=generator
        )

    def validation(self, pairs: EmbeddingPairs, number: int) -> Batch:
        """Validation batch `number`: the same pairs, independent noise, times and directions every time."""
        rows = min(self.config.batch_size, len(pairs))
        generator = _generator(self.config.seed, "validation", number)
        questions = draw_questions(rows, self.config.p_joint, 0.0, generator)
        index = (np.arange(rows) + number * rows) % len(pairs)
        # Directions are sorted, so the rows must not be.
        index = index[torch.randperm(rows, generator=generator).numpy()]
        image0, text0 = self._noise(rows, generator)
        return self._interpolate((dense(image0), dense(text0)), self._load(pairs, index), questions)

    def _load(self, pairs: EmbeddingPairs, index: np.ndarray) -> tuple[Tensor, Tensor]:
        image, text = (x.to(self.device, non_blocking=True) for x in pairs[index])
        return self.flow.to_flow(image, text)  # type: ignore[return-value]

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


def direction_means(losses: Tensor, counts: Counts) -> dict[str, float]:
    """Mean loss of the rows of each direction that is present."""
    parts = losses.detach().split(counts)
    return {f"loss_{name}": float(part.mean()) for name, part in zip(("i2t", "joint", "t2i"), parts) if len(part)}


class Trainer:
    """State of a run. `train` is the way to use it."""

    def __init__(self, flow: GeoFlow, pairs: EmbeddingPairs, val: EmbeddingPairs, config: TrainConfig) -> None:
        self.flow, self.val, self.config = flow, val, config
        self.batches = BatchMaker(flow, pairs, config)
        self.device = self.batches.device
        self.optimizer = torch.optim.AdamW(flow.parameters(), config.lr, weight_decay=config.weight_decay, fused=True)
        self.ema = None if config.ema_decay is None else [p.detach().clone() for p in flow.parameters()]
        self.losses = torch.compile(row_losses, dynamic=True) if config.compile else row_losses
        self.fingerprints = {"data": pairs.fingerprint(), "val": val.fingerprint()}
        self.step = 0
        self.best_loss, self.best_step = math.inf, -1
        self.reference_loss, self.stale = math.inf, 0  # early stopping counts from the last real improvement
        self.finished = self.stopped_early = False
        self.best: dict[str, Tensor] = {}
        self.exported_step = -1

    @property
    def bfloat16(self) -> bool:
        """Whether the network runs under bfloat16 autocast. CPUs without matrix units for it lose by it."""
        if self.config.precision == "auto":
            return self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.config.precision == "bfloat16"

    def optimise(self, batch: Batch) -> tuple[Tensor, float]:
        """One step of the optimiser: (row losses [B], gradient norm before clipping)."""
        self.flow.train()
        torch.manual_seed(_generator(self.config.seed, "dropout", self.step).initial_seed())
        rows = len(batch.t)
        self.optimizer.zero_grad()
        losses = []
        for piece in batch.pieces(self.config.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
                piece_losses = self.losses(self.flow, piece)
            (piece_losses.sum() / rows).backward()
            losses.append(piece_losses.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.flow.parameters(), self.config.clip))
        row_loss = torch.cat(losses)
        if not (math.isfinite(norm) and math.isfinite(float(row_loss.sum()))):
            raise TrainingDiverged(f"the loss is not finite at step {self.step} (gradient norm {norm})")
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.step)
        self.optimizer.step()
        if self.ema is not None:
            with torch.no_grad():
                for average, parameter in zip(self.ema, self.flow.parameters()):
                    average.lerp_(parameter, 1 - self.config.ema_decay)  # type: ignore[operator]
        self.step += 1
        return row_loss, norm

    def validate(self) -> dict[str, float]:
        """Validation losses of the weights to keep (their average if there is one); updates best and early stopping."""
        with self._averaged(), torch.no_grad():
            self.flow.eval()
            losses, counts = [], []
            for number in range(self.config.val_batches):
                for piece in self.batches.validation(self.val, number).pieces(self.config.accumulate):
                    losses.append(row_losses(self.flow, piece))
                    counts.append(piece.counts)
            loss = float(torch.cat(losses).double().mean())
            if not math.isfinite(loss):
                raise TrainingDiverged(f"the validation loss is not finite at step {self.step}")
            if loss < self.best_loss:
                self.best_loss, self.best_step = loss, self.step
                self.best = {name: x.clone() for name, x in self.flow.state_dict().items()}
        if self._improves(loss):
            self.reference_loss, self.stale = loss, 0
        else:
            self.stale += 1
        self.stopped_early = self.stale >= self.config.patience
        return {"val_loss": loss}

    def _improves(self, loss: float) -> bool:
        """Whether early stopping counts `loss` as an improvement; the first one is."""
        if math.isinf(self.reference_loss):
            return True
        least = max(self.config.min_improvement, self.config.min_relative_improvement * abs(self.reference_loss))
        return self.reference_loss - loss > least

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Puts the averaged weights into the network for a while."""
        if self.ema is None:
            yield
            return
        own = [p.detach().clone() for p in self.flow.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(list(self.flow.parameters()), self.ema)
            try:
                yield
            finally:
                torch._foreach_copy_(list(self.flow.parameters()), own)

    def save(self, folder: Path) -> None:
        """Writes the state of the run, and the best weights for `GeoFlow.from_pretrained` if they are new."""
        if self.best_step > self.exported_step:
            save_weights(folder, self.flow.config, self.best)
            self.exported_step = self.best_step
        info = {
            "step": self.step,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "reference_loss": self.reference_loss,
            "stale": self.stale,
            "finished": self.finished,
            "stopped_early": self.stopped_early,
            "config": dataclasses.asdict(self.config),
            "model": self.flow.config.to_json(),
            **self.fingerprints,
        }
        tensors = {f"model.{name}": x for name, x in self.flow.state_dict().items()}
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        names = [name for name, _ in self.flow.named_parameters()]
        for name, parameter in self.flow.named_parameters():
            tensors |= {f"adam.{key}.{name}": x for key, x in self.optimizer.state[parameter].items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": x for name, x in zip(names, self.ema)}
        save_tensors(folder / CHECKPOINT_FILE, tensors, kind="training state", info=info)

    def load(self, folder: Path) -> None:
        """Takes up the state that `save` wrote, after checking that it is of the same run."""
        path = folder / CHECKPOINT_FILE
        tensors, info = load_tensors(path, kind="training state", device=self.device)
        self._check_same_run(path, info)
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "best": {}, "adam": {}, "ema": {}}
        for name, x in tensors.items():
            kind, _, rest = name.partition(".")
            parts[kind][rest] = x
        self.flow.load_state_dict(parts["model"])
        self.best = parts["best"]
        for name, parameter in self.flow.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[parameter] = {key: parts["adam"][f"{key}.{name}"] for key in keys}
        if self.ema is not None:
            self.ema = [parts["ema"][name] for name, _ in self.flow.named_parameters()]
        for key in ("step", "best_loss", "best_step", "reference_loss", "stale", "finished", "stopped_early"):
            setattr(self, key, info[key])

    def _check_same_run(self, path: Path, info: dict[str, Any]) -> None:
        own = {"model": self.flow.config.to_json(), "config": dataclasses.asdict(self.config)}
        for part, mine in own.items():
            differing = [key for key in mine if key not in _COSMETIC and info[part].get(key) != mine[key]]
            if differing:
                changes = ", ".join(f"{key} {info[part].get(key)!r} -> {mine[key]!r}" for key in differing)
                raise ValueError(
                    f"{path} belongs to a run with another configuration ({changes}); use a new folder or resume=False"
                )
        for part, fingerprint in self.fingerprints.items():
            if info[part] != fingerprint:
                name = {"data": "pairs", "val": "validation pairs"}[part]
                raise ValueError(f"{path} belongs to a run on other {name}; use a new folder or resume=False")


class Ahead:
    """Makes the batch of the next step in a background thread while the current one is being used.

    Compiled operations release the interpreter lock, so the plan is solved beside the network's work. On a GPU the work
    goes to a stream of its own, which the training stream waits for.
    """

    def __init__(
        self, make: Callable[[int], Batch], first: int, last: int, device: torch.device, *, enabled: bool
    ) -> None:
        self.make, self.last, self.device = make, last, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="geoflow-batches") if enabled else None
        self.waiting: Future[Batch] | None = self.pool.submit(self._run, first) if self.pool and first < last else None

    def _run(self, step: int) -> Batch:
        if self.stream is None:
            return self.make(step)
        with torch.cuda.stream(self.stream):
            batch = self.make(step)
            self.stream.synchronize()
        return batch

    def get(self, step: int) -> Batch:
        """The batch of `step`, which must follow the one of the last call."""
        if self.pool is None or self.waiting is None:
            return self._run(step)
        batch = self.waiting.result()
        self.waiting = self.pool.submit(self._run, step + 1) if step + 1 < self.last else None
        return batch

    def close(self) -> None:
        """Stops the thread after the batch it is at."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)


class Metrics:
    """Writes what happens to JSONL and, if asked, TensorBoard; nothing without a folder."""

    def __init__(self, folder: Path | None, step: int, *, tensorboard: bool) -> None:
        self.path = None if folder is None else folder / METRICS_FILE
        self.board = None
        if self.path is not None:
            # Lines after the checkpoint will be written again.
            truncate_jsonl(self.path, lambda line: line["step"] <= step)
        if tensorboard:
            if folder is None:
                raise ValueError("tensorboard=True needs out=, the folder to write to")
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("tensorboard=True needs the tensorboard package: pip install tensorboard") from error
            self.board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics."""
        if self.path is not None:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, **values}) + "\n")
            except OSError as error:
                raise OSError(error.errno, f"could not write {self.path} ({error.strerror})") from error
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes TensorBoard."""
        if self.board is not None:
            self.board.close()


class Progress:
    """Live line on the terminal: step, losses, rate, time left, and the coupling's time as a share of the step's."""

    def __init__(self, total: int, start: int, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self.bar = RichProgress(*columns, console=Console(stderr=True), disable=not shown)
        self.task = self.bar.add_task("training", total=total, completed=start, text="")
        self.bar.start()

    def update(self, step: int, values: dict[str, float]) -> None:
        """Shows the latest metrics."""
        losses = " ".join(
            f"{key.removeprefix('loss_')} {values[key]:.4g}" for key in sorted(values) if key.startswith("loss_")
        )
        val = f" val {values['val_loss']:.4g}" if "val_loss" in values else ""
        rate = f" {values.get('steps_per_second', 0):.2f}/s OT {values.get('coupling_share', 0):.0%}"
        self.bar.update(self.task, completed=step, text=losses + val + rate)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self.bar.stop()


class Pace:
    """Steps per second since it was last asked."""

    def __init__(self, step: int) -> None:
        self.step, self.time = step, time.perf_counter()

    def __call__(self, step: int) -> float:
        before = self.step, self.time
        self.step, self.time = step, time.perf_counter()
        return (self.step - before[0]) / (self.time - before[1])


class StopOnInterrupt:
    """While active, the first Ctrl-C asks for a clean stop (`asked`); the second interrupts at once."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def __enter__(self) -> StopOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


def train(
    flow: GeoFlow,
    pairs: EmbeddingPairs,
    config: TrainConfig,
    val: EmbeddingPairs | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    *,
    progress: bool | None = None,
) -> TrainReport:
    """Trains `flow` on `pairs`; it ends in eval mode with the best weights by validation (their average if EMA is on).

    `val`: validation pairs, else a seeded share of the images is held out with all their texts. `out`: folder for
    `model.safetensors` and `config.json` (the best weights so far), `last.safetensors` (the state of the run) and
    `metrics.jsonl`; one run at a time. `resume`: continue from the state in `out` if there is one; False removes it. A
    finished run loads its best weights and returns at once. On a CPU the continued run ends with the same bits as an
    undisturbed one. `progress`: live line on the terminal; by default if there is one. Ctrl-C stops after the current
    step and saves.
    """
    began = time.perf_counter()
    folder = None if out is None else Path(out)
    _check_widths(flow, pairs, "pairs")
    if val is None:
        pairs, val = pairs.split(config.val_fraction, config.seed)
    _check_widths(flow, val, "val")
    if len(pairs) < config.batch_size:
        raise ValueError(f"{len(pairs)} training pairs are too few for batch_size={config.batch_size}")
    trainer = Trainer(flow, pairs, val, config)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if folder is None else locked(folder):
        _begin(trainer, folder, resume=resume)
        if not trainer.finished:
            devices = [trainer.device] if trainer.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                _run(trainer, folder, shown=sys.stderr.isatty() if progress is None else progress)
    flow.load_state_dict(trainer.best or flow.state_dict())
    flow.eval()
    return TrainReport(
        steps=trainer.step,
        finished=trainer.finished,
        stopped_early=trainer.stopped_early,
        best_step=trainer.best_step,
        best_val_loss=trainer.best_loss,
        seconds=time.perf_counter() - began,
        out=folder,
    )


def train_folder(
    pairs: Path,
    out: Path,
    preset: str,
    val: Path | None,
    overrides: dict[str, Any],
    *,
    centre: bool,
    pca_dim: int | None,
    normalize: bool,
    device: str,
) -> TrainReport:
    """`geoflow train`: a preset of network and run, with `overrides` of the latter, on folders of embeddings."""
    config = dataclasses.replace(getattr(TrainConfig, preset)(), **overrides)
    data = EmbeddingPairs.open(pairs, normalize=normalize)
    held_out = None if val is None else EmbeddingPairs.open(val, normalize=normalize)
    shape = getattr(GeoFlowConfig, preset)(data.image_dim, data.text_dim)
    where = dispatch.usable_device(device)
    torch.manual_seed(config.seed)
    flow = GeoFlow(dataclasses.replace(shape, centre=centre, pca_dim=pca_dim)).to(where)
    return train(flow, data, config, held_out, out)


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


def _begin(trainer: Trainer, folder: Path | None, *, resume: bool) -> None:
    """Takes up the run in `folder`, or starts afresh."""
    if folder is not None and not resume:
        for name in (CHECKPOINT_FILE, WEIGHTS_FILE, CONFIG_FILE, METRICS_FILE):
            (folder / name).unlink(missing_ok=True)
    if folder is not None and (folder / CHECKPOINT_FILE).is_file():
        trainer.load(folder)
    elif trainer.flow.preprocess is not None:
        fit_preprocess(trainer.flow, trainer.batches.pairs, trainer.config.seed)


def _run(trainer: Trainer, folder: Path | None, *, shown: bool) -> None:
    """Steps until the run is finished, interrupted or diverged."""
    config = trainer.config
    metrics = Metrics(folder, trainer.step, tensorboard=config.tensorboard)
    bar = Progress(config.steps, trainer.step, shown=shown)
    ahead = Ahead(trainer.batches.training, trainer.step, config.steps, trainer.device, enabled=config.prefetch)
    pace = Pace(trainer.step)
    saved = trainer.step if folder is not None and trainer.step else None
    try:
        with StopOnInterrupt() as stop:
            while not trainer.finished and not stop.asked:
                values = _one_step(trainer, ahead, pace)
                if values:
                    metrics.write(trainer.step, values)
                    bar.update(trainer.step, values)
                trainer.finished = trainer.step >= config.steps or trainer.stopped_early
                if folder is not None and (
                    trainer.finished or stop.asked or trainer.step % config.checkpoint_every == 0
                ):
                    trainer.save(folder)
                    saved = trainer.step
    except TrainingDiverged as error:
        kept = (
            "no checkpoint was written yet" if saved is None else f"the checkpoint of step {saved} is kept in {folder}"
        )
        raise TrainingDiverged(f"{error}; {kept}; try a smaller lr or a longer warm-up") from None
    finally:
        ahead.close()
        metrics.close()
        bar.close()


def _one_step(trainer: Trainer, ahead: Ahead, pace: Pace) -> dict[str, float]:
    """Trains one step, validates when due; returns what is to be logged, if anything."""
    config = trainer.config
    start = time.perf_counter()
    batch = ahead.get(trainer.step)
    waited = time.perf_counter() - start
    losses, norm = trainer.optimise(batch)
    seconds = time.perf_counter() - start
    values: dict[str, float] = {}
    last = trainer.step == config.steps
    if trainer.step % config.log_every == 0 or last:
        values = {
            "loss": float(losses.mean()),
            **direction_means(losses, batch.counts),
            "gradient_norm": norm,
            "lr": config.learning_rate(trainer.step - 1),
            "p_joint": config.curriculum.joint_probability(trainer.step - 1),
            "steps_per_second": pace(trainer.step),
            "coupling_seconds": batch.coupling_seconds,
            "coupling_share": batch.coupling_seconds / seconds,
            "batch_wait_share": waited / seconds,
        }
    if trainer.step % config.val_every == 0 or last:
        values |= trainer.validate()
    return values
