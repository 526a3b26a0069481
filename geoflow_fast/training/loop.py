"""The loop that every network here is trained by: what is trained is an `Objective`, how is a `RunConfig`.

Everything random is a function of (seed, purpose, step), so a run that is killed and started again draws what it would
have drawn; the checkpoint holds the rest: weights, their average, the optimiser and the early-stopping state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor, nn

from geoflow_fast.flow.model import CONFIG_FILE, WEIGHTS_FILE
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, locked
from geoflow_fast.runtime.interrupt import StopOnInterrupt
from geoflow_fast.runtime.tensors import load_tensors, save_tensors
from geoflow_fast.training.batches import Ahead
from geoflow_fast.training.config import RunConfig
from geoflow_fast.training.logging import METRICS_FILE, Metrics, Pace, Progress
from geoflow_fast.training.objective import B, Objective, generator_for

MOMENTUM = 0.9


CHECKPOINT_FILE = "last.safetensors"


# What may differ between a run and its continuation without changing the weights.
_COSMETIC = {"checkpoint_every", "log_every", "tensorboard", "prefetch"}


class TrainingDiverged(ValueError):
    """Raised when the loss or the gradient is no longer finite. The message names the step and the last checkpoint."""


@dataclass(frozen=True)
class TrainReport:
    """Outcome of a training run.

    `steps`: steps done so far. `finished`: whether the run reached its last step or stopped early, rather than being
    interrupted; `stopped_early`: whether it was the latter. `best_step`, `best_val_loss`: step and validation loss of
    the weights that are kept. `seconds`: duration of this call. `out`: folder of the run, or None.
    """

    steps: int
    finished: bool
    stopped_early: bool
    best_step: int
    best_val_loss: float
    seconds: float
    out: Path | None


def make_optimizer(module: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The optimiser that `config` names, over all parameters."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), momentum=MOMENTUM, **options)
    return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.optimizer](module.parameters(), **options)


class Run(Generic[B]):
    """State of a run; `complete` takes it to its end."""

    def __init__(self, objective: Objective[B]) -> None:
        self.objective = objective
        self.module = objective.module
        self.config = config = objective.config
        self.world = objective.world
        self.device = next(self.module.parameters()).device
        self.optimizer = make_optimizer(self.module, config)
        self.ema = None if config.ema_decay is None else [p.detach().clone() for p in self.module.parameters()]
        self.losses = torch.compile(objective.losses, dynamic=True) if config.compile else objective.losses
        self.fingerprints = {"data": objective.pairs.fingerprint(), "val": objective.val.fingerprint()}
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

    def optimise(self, batch: B) -> tuple[Tensor, float]:
        """One step of the optimiser: (losses [B] of this rank's rows, gradient norm before clipping)."""
        self.module.train()
        purpose = "dropout" if self.world.is_main else f"dropout of rank {self.world.rank}"
        torch.manual_seed(generator_for(self.config.seed, purpose, self.step).initial_seed())
        rows = len(batch) if self.world.size == 1 else self.config.batch_size
        self.optimizer.zero_grad()
        losses = []
        for piece in batch.pieces(self.config.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
                piece_losses = self.losses(piece)
            (piece_losses.sum() / rows).backward()
            losses.append(piece_losses.detach())
        row_loss = torch.cat(losses)
        total = row_loss.sum()
        self._sum_gradients(total)
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip))
        # guard: a loss that is not finite stops a run
        if not (math.isfinite(norm) and math.isfinite(float(total))):
            raise TrainingDiverged(f"the loss is not finite at step {self.step} (gradient norm {norm})")
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.step)
        self.optimizer.step()
        if self.ema is not None:
            with torch.no_grad():
                for average, parameter in zip(self.ema, self.module.parameters()):
                    average.lerp_(parameter, 1 - self.config.ema_decay)  # type: ignore[operator]
        self.step += 1
        return row_loss, norm

    def _sum_gradients(self, total: Tensor) -> None:
        """Adds up the gradients of all ranks, and the 0-d `total`, in place: one call for all of them."""
        if self.world.size == 1:
            return
        trained = [p for p in self.module.parameters() if p.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        flat = self.world.all_reduce(torch.cat([*(part.reshape(-1) for part in parts), total.view(1).to(parts[0])]))
        *sums, last = flat.split([*(part.numel() for part in parts), 1])
        for parameter, reduced in zip(trained, sums):
            parameter.grad = reduced.view_as(parameter)
        total.copy_(last.squeeze(0))

    def validate(self) -> dict[str, float]:
        """Validation losses of the weights to keep (their average if there is one); updates best and early stopping."""
        with self._averaged(), torch.no_grad():
            self.module.eval()
            losses = [
                self.objective.losses(piece)
                for number in range(self.config.val_batches)
                for piece in self.objective.validation(number).pieces(self.config.accumulate)
            ]
            sums = torch.tensor([sum(float(x.double().sum()) for x in losses), sum(map(len, losses))]).double()
            loss = float(torch.div(*self.world.all_reduce(sums)))
            if not math.isfinite(loss):
                raise TrainingDiverged(f"the validation loss is not finite at step {self.step}")
            if loss < self.best_loss:
                self.best_loss, self.best_step = loss, self.step
                self.best = {name: x.clone() for name, x in self.module.state_dict().items()}
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
        own = [p.detach().clone() for p in self.module.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(list(self.module.parameters()), self.ema)
            try:
                yield
            finally:
                torch._foreach_copy_(list(self.module.parameters()), own)

    def save(self, folder: Path) -> None:
        """Writes the state of the run, and exports the best weights if they are new."""
        if self.best_step > self.exported_step:
            self.objective.export(folder, self.best)
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
            "model": self.objective.facts,
            **self.fingerprints,
        }
        tensors = {f"model.{name}": x for name, x in self.module.state_dict().items()}
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        names = [name for name, _ in self.module.named_parameters()]
        for name, parameter in self.module.named_parameters():
            tensors |= {f"optimizer.{key}.{name}": x for key, x in self.optimizer.state[parameter].items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": x for name, x in zip(names, self.ema)}
        save_tensors(folder / CHECKPOINT_FILE, tensors, kind="training state", info=info)

    def load(self, folder: Path) -> None:
        """Takes up the state that `save` wrote, after checking that it is of the same run."""
        path = folder / CHECKPOINT_FILE
        tensors, info = load_tensors(path, kind="training state", device=self.device)
        with contents_of(path):
            self._check_same_run(path, info)
            self._take_state(tensors, info)

    def _take_state(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "best": {}, "optimizer": {}, "ema": {}}
        for name, x in tensors.items():
            kind, _, rest = name.partition(".")
            parts[kind][rest] = x
        self.module.load_state_dict(parts["model"])
        self.best = parts["best"]
        parameters = dict(self.module.named_parameters())
        for name, x in parts["optimizer"].items():
            key, _, rest = name.partition(".")
            self.optimizer.state[parameters[rest]][key] = x
        if self.ema is not None:
            self.ema = [parts["ema"][name] for name, _ in self.module.named_parameters()]
        for key in ("step", "best_loss", "best_step", "reference_loss", "stale", "finished", "stopped_early"):
            setattr(self, key, info[key])

    def _check_same_run(self, path: Path, info: dict[str, Any]) -> None:
        own = {"model": self.objective.facts, "config": dataclasses.asdict(self.config)}
        for part, mine in own.items():
            differing = [key for key in mine if key not in _COSMETIC and info[part].get(key) != mine[key]]
            # guard: a run is continued only with its own settings
            if differing:
                changes = ", ".join(f"{key} {info[part].get(key)!r} -> {mine[key]!r}" for key in differing)
                raise ValueError(
                    f"{path} belongs to a run with another configuration ({changes}); use a new folder or resume=False"
                )
        for part, fingerprint in self.fingerprints.items():
            # guard: a run is continued only on its own pairs
            if info[part] != fingerprint:
                name = {"data": "pairs", "val": "validation pairs"}[part]
                raise ValueError(f"{path} belongs to a run on other {name}; use a new folder or resume=False")


def complete(
    run: Run[B], out: str | Path | None = None, *, resume: bool = True, progress: bool | None = None
) -> TrainReport:
    """Takes `run` to its end, continuing what is in the folder `out`; its module ends in eval mode with the best
    weights. The arguments are those of `train`."""
    began = time.perf_counter()
    folder = None if out is None else checks.path(out, "out")
    main = run.world.is_main
    if folder is not None and main:
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if folder is None or not main else locked(folder):
        _begin(run, folder, resume=resume)
        if not run.finished:
            devices = [run.device] if run.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                _take_steps(run, folder, shown=main and (sys.stderr.isatty() if progress is None else progress))
    run.module.load_state_dict(run.best or run.module.state_dict())
    run.module.eval()
    return TrainReport(
        steps=run.step,
        finished=run.finished,
        stopped_early=run.stopped_early,
        best_step=run.best_step,
        best_val_loss=run.best_loss,
        seconds=time.perf_counter() - began,
        out=folder,
    )


def _begin(run: Run[B], folder: Path | None, *, resume: bool) -> None:
    """Takes up the run in `folder`, or starts afresh."""
    if folder is not None and not resume and run.world.is_main:
        for name in (CHECKPOINT_FILE, WEIGHTS_FILE, CONFIG_FILE, METRICS_FILE):
            (folder / name).unlink(missing_ok=True)
    if run.world.share(folder is not None and (folder / CHECKPOINT_FILE).is_file()):
        assert folder is not None
        run.load(folder)
        return
    run.objective.prepare()
    for (
        x
    ) in run.module.state_dict().values():  # ranks may have begun with other weights, or rounded statistics otherwise
        run.world.broadcast(x)
    if run.ema is not None:
        run.ema = [p.detach().clone() for p in run.module.parameters()]


def _take_steps(run: Run[B], folder: Path | None, *, shown: bool) -> None:
    """Steps until the run is finished, interrupted or diverged."""
    config = run.config
    main = run.world.is_main
    metrics = Metrics(folder if main else None, run.step, tensorboard=config.tensorboard and main)
    bar = Progress(config.steps, run.step, shown=shown)
    # NCCL's calls of two threads may wait for each other on different ranks; gloo's do not.
    alone = run.world.size == 1 or run.device.type == "cpu"
    ahead = Ahead(run.objective.training, run.step, config.steps, run.device, enabled=config.prefetch and alone)
    pace = Pace(run.step)
    saved = run.step if folder is not None and run.step else None
    try:
        with StopOnInterrupt("step") as stop:
            stopped = False
            while not run.finished and not stopped:
                values = _one_step(run, ahead, pace)
                stopped = run.world.any(stop.asked)
                if values:
                    metrics.write(run.step, values)
                    bar.update(run.step, values)
                run.finished = run.step >= config.steps or run.stopped_early
                if folder is not None and (run.finished or stopped or run.step % config.checkpoint_every == 0):
                    if main:
                        # guard: log lines reach the disk before the checkpoint
                        metrics.sync()
                        run.save(folder)
                    saved = run.step
    except TrainingDiverged as error:
        kept = (
            "no checkpoint was written yet" if saved is None else f"the checkpoint of step {saved} is kept in {folder}"
        )
        raise TrainingDiverged(f"{error}; {kept}; try a smaller lr or a longer warm-up") from None
    finally:
        ahead.close()
        metrics.close()
        bar.close()


def _one_step(run: Run[B], ahead: Ahead[B], pace: Pace) -> dict[str, float]:
    """Trains one step, validates when due; returns what is to be logged, if anything."""
    config = run.config
    start = time.perf_counter()
    batch = ahead.get(run.step)
    waited = time.perf_counter() - start
    losses, norm = run.optimise(batch)
    seconds = time.perf_counter() - start
    values: dict[str, float] = {}
    last = run.step == config.steps
    if run.step % config.log_every == 0 or last:
        values = {
            "loss": run.world.mean(losses),
            "gradient_norm": norm,
            "lr": config.learning_rate(run.step - 1),
            "steps_per_second": pace(run.step),
            "batch_wait_share": waited / seconds,
            **run.objective.metrics(batch, losses, run.step - 1, seconds),
        }
    if run.step % config.val_every == 0 or last:
        values |= run.validate()
    return values
