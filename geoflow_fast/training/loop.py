"""The loop that trains every network: an `Objective` says what is trained, a `RunConfig` how.

Everything random depends on (seed, purpose, step), so a run that is killed and started again draws what it would have
drawn anyway. The checkpoint holds the rest: weights, their average, the optimiser and the state of early stopping.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, locked
from geoflow_fast.runtime.graphs import Graphs, unsuitable
from geoflow_fast.runtime.hub import CONFIG_FILE, WEIGHTS_FILE
from geoflow_fast.runtime.interrupt import stop_on_interrupt
from geoflow_fast.runtime.late import LateValues
from geoflow_fast.runtime.tensors import load_tensors, save_tensors
from geoflow_fast.training.batches import Prefetcher, generator_for, tensors_of, with_tensors
from geoflow_fast.training.half import HalfTwin
from geoflow_fast.training.logging import METRICS_FILE, Log, Metrics, StepRate, TrainingLine, share_of_time
from geoflow_fast.training.objective import B, Objective
from geoflow_fast.training.ranks import sum_gradients

LOGGER = logging.getLogger(__name__)
CHECKPOINT_FILE = "last.safetensors"
CHANGEABLE = {"checkpoint_every", "log_every", "prefetch", "patience"}
"""Settings that may differ when a run is continued, because they do not change the weights of a step."""


class TrainingDiverged(ValueError):
    """Raised when the loss or the gradient is no longer finite. The message names the step and the last checkpoint; the
    module then has the weights that were best in validation."""


@dataclass(frozen=True)
class TrainReport:
    """Outcome of a training run.

    `steps`: number of steps taken so far. `finished`: whether the run reached its last step or stopped early, rather
    than being interrupted. `stopped_early`: whether it stopped early. `best_step`, `best_val_loss`: step and validation
    loss of the weights that are kept. `seconds`: duration of this call. `out`: folder of the run, or None. `blend`: if
    `TrainConfig.blend` asks for it, at the end of the run and by direction of search, the share of the network that is
    kept and the held-out negative log-likelihoods by which it was chosen.
    """

    steps: int
    finished: bool
    stopped_early: bool
    best_step: int
    best_val_loss: float
    seconds: float
    out: Path | None
    blend: dict[str, Any] | None = None


class Run(Generic[B]):
    """The state of a run; `complete` takes it to its end."""

    def __init__(self, objective: Objective[B]) -> None:
        self.objective = objective
        self.module = objective.module
        self.config = config = objective.config
        self.world = objective.world
        self.device = next(self.module.parameters()).device
        self.why_not_captured = self._why_not_captured()
        # Each kind of batches follows the one before, and none comes again.
        self.graphs = Graphs(kept=1)
        self.learning_rate: Tensor | None = None
        if self.why_not_captured is None:
            self.learning_rate = torch.full((), config.lr, dtype=torch.float32, device=self.device)
        self.optimizer = objective.make_optimizer(self.learning_rate)
        self.averaged: AveragedModel | None = None
        if config.ema_decay is not None:
            with torch.device("cpu"):  # a counter besides the copy of the weights
                self.averaged = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay))
        automatic = "bfloat16" if objective.gains_from_bfloat16() else "float32"
        # Chosen once: a run that is continued keeps its precision.
        self.precision = automatic if config.precision == "auto" else config.precision
        self._made_twin: tuple[HalfTwin | None] | None = None
        # Loss and gradient norm of steps that a GPU may not have finished yet.
        self.outcomes: LateValues[int] = LateValues(self.device)
        self.dropout_purpose = "dropout" if self.world.is_main else f"dropout of rank {self.world.rank}"
        self.fingerprints = {"data": objective.pairs.fingerprint(), "val": objective.val.fingerprint()}
        self.step = 0
        self.best_loss, self.best_step = math.inf, -1
        self.best: dict[str, Tensor] = {}
        self.exported_step = -1
        # Early stopping: the loss of the last real improvement, and how many validations ago that was.
        self.improved_loss, self.stale = math.inf, 0
        self.rising = False
        self.finished = self.stopped_early = False
        self.outcome: dict[str, Any] | None = None

    @property
    def bfloat16(self) -> bool:
        """Whether products are those of bfloat16 numbers."""
        return self.precision == "bfloat16"

    def optimise(self, batch: B) -> tuple[Tensor, Tensor]:
        """Takes one step of the optimiser and returns (losses [B] of this rank's rows, gradient norm before clipping,
        0-d). Nothing waits for a GPU: `settle` looks at what it has finished."""
        self.module.train()
        torch.manual_seed(generator_for(self.config.seed, self.dropout_purpose, self.step).initial_seed())
        self._set_learning_rate(self.config.learning_rate(self.step))
        outcome = self._replayed(batch)
        if outcome is None:
            losses, norm, total = self._gradients(batch)
            self._look_at(norm, total)
            self._descend(norm)
        else:
            losses, norm, total = outcome
            self._look_at(norm, total)
        self.step += 1
        return losses, norm

    def _why_not_captured(self) -> str | None:
        """Why a GPU does not replay the steps of this run; None if it does, from the second of each kind on."""
        if self.world.size > 1:
            return "ranks add up their gradients in the middle of a step"
        return self.objective.why_not_captured() or unsuitable(next(self.module.parameters()))

    def _set_learning_rate(self, rate: float) -> None:
        if self.learning_rate is not None:
            self.learning_rate.fill_(rate)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _replayed(self, batch: B) -> tuple[Tensor, Tensor, Tensor] | None:
        """Takes a step by replaying the one before of its kind; None if there is a reason not to."""
        if self.why_not_captured is not None:
            self.graphs.reason = self.why_not_captured
            return None

        def step(*tensors: Tensor) -> Tensor:
            losses, norm, total = self._gradients(with_tensors(batch, tensors))
            self._descend(norm)
            return torch.cat((losses, norm.view(1), total.view(1)))

        tensors = tensors_of(batch)
        kind = self.objective.kind(batch), tuple(x.shape for x in tensors)
        outcome = self.graphs.replay(kind, lambda: step, *tensors, repeatable=False)
        return None if outcome is None else (outcome[:-2], outcome[-2], outcome[-1])

    def _gradients(self, batch: B) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [B], the norm of the gradient and the sum of the losses; parameters have their gradients then."""
        twin = self._twin()
        rows = len(batch) if self.world.size == 1 else self.config.batch_size
        self.optimizer.zero_grad()
        piece_losses = []
        for piece in batch.pieces(self.config.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16 and twin is None):
                losses = self._losses(piece, twin)
            (losses.sum() / rows).backward()
            if twin is not None:
                twin.hand_over_gradients()
            piece_losses.append(losses.detach())
        losses = torch.cat(piece_losses)
        total = losses.sum()
        if self.world.size > 1:
            sum_gradients(self.module, total, self.world)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        return losses, norm, total

    def _look_at(self, norm: Tensor, total: Tensor) -> None:
        """Sends the outcome of a step to the host, and looks at what has arrived there."""
        self.outcomes.put(self.step, torch.stack((norm, total)))
        # Ranks must agree on when they look: one step late, all of them.
        self.settle(None if self.world.size == 1 else 1)

    def _descend(self, norm: Tensor) -> None:
        """Clips the gradient, takes the optimiser's step, and averages the weights."""
        # A step that may be replayed asks for no number; elsewhere a gradient that is short enough is left as it is.
        if self.learning_rate is not None or self.device.type == "cuda" or float(norm) > self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.config.clip, norm)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.module)

    def _twin(self) -> HalfTwin | None:
        """The twin that a step in bfloat16 goes through, with the present weights; None if there is none."""
        if not self.bfloat16:
            return None
        if self._made_twin is None:
            self._made_twin = (self.objective.half_twin(),)
        (twin,) = self._made_twin
        if twin is not None:
            twin.module.train()
            twin.refresh()
        return twin

    def _losses(self, piece: Any, twin: HalfTwin | None) -> Tensor:
        """The losses of a piece, by way of the twin if there is one; validation uses the weights themselves."""
        self.objective.twin = twin
        try:
            return self.objective.losses(piece)
        finally:
            self.objective.twin = None

    def settle(self, spared: int | None = 0) -> None:
        """Raises `TrainingDiverged` if the loss of a step was not finite. All steps but the last `spared` are waited
        for; with None, only what the device has finished is looked at."""
        for step, outcome in self.outcomes.arrived(spared):
            norm, total = outcome.tolist()
            if not (math.isfinite(norm) and math.isfinite(total)):
                raise TrainingDiverged(f"the loss is not finite at step {step} (gradient norm {norm})")

    def validate(self) -> dict[str, float]:
        """The validation loss of the weights to keep (their average if there is one). Updates the best weights and the
        state of early stopping."""
        self.settle()
        with self._averaged_weights(), torch.no_grad():
            self.module.eval()
            losses = [
                self.objective.losses(piece)
                for number in range(self.config.val_batches)
                for piece in self.objective.validation_batch(number).pieces(self.config.accumulate)
            ]
            entries = [sum(float(x.double().sum()) for x in losses), sum(map(len, losses))]
            sums = torch.tensor(entries, dtype=torch.float64, device="cpu")
            loss = float(torch.div(*self.world.all_reduce(sums)))
            if not math.isfinite(loss):
                raise TrainingDiverged(f"the validation loss is not finite at step {self.step}")
            if loss < self.best_loss:
                self.best_loss, self.best_step = loss, self.step
                self.best = {name: x.clone() for name, x in self.module.state_dict().items()}
        if self.improves(loss):
            self.improved_loss, self.stale = loss, 0
        elif self.step >= self.config.val_every:  # the learning rate is still rising before that
            self.stale += 1
        self.stopped_early = self.stale >= self.config.patience
        self._tell_rise(loss)
        return {"val_loss": loss}

    def take_best(self) -> None:
        """Leaves the module in eval mode, with the best weights if there are any yet."""
        self.module.load_state_dict(self.best or self.module.state_dict())
        self.module.eval()

    def conclude(self) -> None:
        """Lets the objective finish the weights that are kept."""
        last = {name: x.clone() for name, x in self.module.state_dict().items()}
        self.module.load_state_dict(self.best)
        self.module.eval()
        self.outcome = self.objective.conclude()
        if self.outcome is not None:
            self.best = {name: x.clone() for name, x in self.module.state_dict().items()}
            self.exported_step = -1
        self.module.load_state_dict(last)

    def _tell_rise(self, loss: float) -> None:
        """Logs, once per rise, that validation has become worse than it was."""
        rises = loss > self.best_loss + self.config.min_relative_improvement * abs(self.best_loss)
        if rises and not self.rising and self.world.is_main and self.objective.TELLS_RISE:
            LOGGER.warning(
                "the validation loss rose from %.4g at step %d to %.4g at step %d; the weights of step %d are kept, "
                "and %d such validations in a row end the run",
                *(self.best_loss, self.best_step, loss, self.step, self.best_step, self.config.patience),
            )
        self.rising = rises

    def improves(self, loss: float) -> bool:
        """True if early stopping counts `loss` as an improvement, which it does for the first loss of all."""
        if math.isinf(self.improved_loss):
            return True
        least = max(self.config.min_improvement, self.config.min_relative_improvement * abs(self.improved_loss))
        return self.improved_loss - loss > least

    @contextlib.contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Puts the averaged weights, if there are any, into the network for a while."""
        if self.averaged is None:
            yield
            return
        parameters = [p.detach() for p in self.module.parameters()]
        own = [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, [p.detach() for p in self.averaged.module.parameters()])
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, own)

    def save(self, folder: Path) -> None:
        """Writes the state of the run, and exports the best weights if they are new."""
        if self.best_step > self.exported_step:
            self.objective.export(folder, self.best)
            self.exported_step = self.best_step
        info = {
            "step": self.step,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "reference_loss": self.improved_loss,
            "stale": self.stale,
            "finished": self.finished,
            "stopped_early": self.stopped_early,
            "config": dataclasses.asdict(self.config),
            "model": self.objective.facts,
            **self.fingerprints,
            **({} if self.outcome is None else {"outcome": self.outcome}),
            "precision": self.precision,
        }
        tensors = {f"model.{name}": x for name, x in self.module.state_dict().items()}
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        for name, parameter in self.module.named_parameters():
            tensors |= {f"optimizer.{key}.{name}": x for key, x in self.optimizer.state[parameter].items()}
        if self.averaged is not None:
            tensors |= {f"ema.{name}": x.detach() for name, x in self.averaged.module.named_parameters()}
        save_tensors(folder / CHECKPOINT_FILE, tensors, kind="training state", info=info)

    def load(self, folder: Path) -> None:
        """Takes up the state that `save` wrote, after checking that it belongs to the same run."""
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
        if self.averaged is not None:
            for name, parameter in self.averaged.module.named_parameters():
                parameter.detach().copy_(parts["ema"][name])
            self.averaged.n_averaged.fill_(1)  # with 0, the next update would overwrite the average
        for key in ("step", "best_loss", "best_step", "stale", "finished", "stopped_early"):
            setattr(self, key, info[key])
        self.improved_loss = info["reference_loss"]
        self.outcome = info.get("outcome")
        self.precision = info["precision"]

    def _check_same_run(self, path: Path, info: dict[str, Any]) -> None:
        own = {"model": self.objective.facts, "config": dataclasses.asdict(self.config)}
        for part, mine in own.items():
            stored = info[part]
            names = ({*mine} | {*stored}) - CHANGEABLE
            differing = sorted(key for key in names if stored.get(key) != mine.get(key))
            if differing:
                changes = ", ".join(f"{key} {stored.get(key)!r} -> {mine.get(key)!r}" for key in differing)
                raise ValueError(
                    f"{path} belongs to a run with another configuration ({changes}); use a new folder or resume=False"
                )
        for part, fingerprint in self.fingerprints.items():
            if info[part] != fingerprint:
                name = {"data": "", "val": "validation "}[part] + self.objective.ROWS
                raise ValueError(f"{path} belongs to a run on other {name}; use a new folder or resume=False")


def complete(
    run: Run[B],
    out: str | Path | None = None,
    *,
    resume: bool = True,
    progress: bool | None = None,
    log: Log | None = None,
) -> TrainReport:
    """Takes `run` to its end, continuing what is in the folder `out`. Its module ends in eval mode with the best
    weights. The arguments are those of `train`."""
    began = time.perf_counter()
    if log is not None and not callable(log):
        raise TypeError(f"log must be a function of a record, got {log!r}")
    folder = None if out is None else checks.path(out, "out")
    main = run.world.is_main
    if folder is not None and main:
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if folder is None or not main else locked(folder):
        _begin(run, folder, resume=resume)
        if not run.finished:
            devices = [run.device] if run.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                _take_steps(run, folder, shown=progress if main else False, log=log if main else None)
    run.take_best()
    return TrainReport(
        steps=run.step,
        finished=run.finished,
        stopped_early=run.stopped_early,
        best_step=run.best_step,
        best_val_loss=run.best_loss,
        seconds=time.perf_counter() - began,
        out=folder,
        blend=run.outcome,
    )


def _begin(run: Run[B], folder: Path | None, *, resume: bool) -> None:
    """Takes up the run in `folder`, or starts a new one."""
    if folder is not None and not resume and run.world.is_main:
        for name in (CHECKPOINT_FILE, WEIGHTS_FILE, CONFIG_FILE, METRICS_FILE):
            (folder / name).unlink(missing_ok=True)
    if run.world.share(folder is not None and (folder / CHECKPOINT_FILE).is_file()):
        assert folder is not None
        run.load(folder)
        return
    run.objective.prepare()
    # Ranks may have been given different weights, or have rounded the statistics of the data differently.
    for x in run.module.state_dict().values():
        run.world.broadcast(x)
    if run.averaged is not None:
        run.averaged.update_parameters(run.module)  # the first update copies


def _take_steps(run: Run[B], folder: Path | None, *, shown: bool | None, log: Log | None) -> None:
    """Takes steps until the run is finished or interrupted, or diverges."""
    config, world = run.config, run.world
    if run.why_not_captured is not None and run.device.type == "cuda":
        LOGGER.info("steps are started kernel by kernel, and not replayed: %s", run.why_not_captured)
    fresh = run.best_step < 0 and run.step == 0
    # A new run has no lines yet; those of one that was killed before its first checkpoint are written again.
    last_line = -1 if fresh else run.step
    metrics = Metrics(folder if world.is_main else None, last_line, log)
    line = TrainingLine(config.steps, run.step, shown=shown)
    make = run.objective.training_batch
    prefetcher = Prefetcher(make, run.step, config.steps, run.device, enabled=config.prefetch)
    rate = StepRate(run.step)
    saved = run.step if folder is not None and run.step else None
    try:
        with stop_on_interrupt("step") as stop:
            stopped = False
            if fresh:
                untrained = run.validate()
                metrics.write(0, untrained)
                line.update(0, untrained)
            while not run.finished and not stopped:
                values = _take_step(run, prefetcher, rate)
                stopped = stop.asked if world.size == 1 else world.any(stop.asked)
                if values:
                    metrics.write(run.step, values)
                line.update(run.step, values)
                run.finished = run.step >= config.steps or run.stopped_early
                if run.finished:
                    run.conclude()
                if folder is not None and (run.finished or stopped or run.step % config.checkpoint_every == 0):
                    run.settle()
                    if world.is_main:
                        metrics.sync()
                        run.save(folder)
                    saved = run.step
    except TrainingDiverged as error:
        run.take_best()  # a GPU has taken steps before the host knew of the loss
        kept = (
            "no checkpoint was written yet" if saved is None else f"the checkpoint of step {saved} is kept in {folder}"
        )
        raise TrainingDiverged(f"{error}; {kept}; try a smaller lr or a longer warm-up") from None
    finally:
        prefetcher.close()
        line.close()


def _take_step(run: Run[B], prefetcher: Prefetcher[B], rate: StepRate) -> dict[str, float]:
    """Trains one step and validates when it is due; returns what is to be logged, if anything."""
    config = run.config
    start = time.perf_counter()
    batch = prefetcher.get(run.step)
    waited = time.perf_counter() - start
    losses, norm = run.optimise(batch)
    seconds = time.perf_counter() - start
    values: dict[str, float] = {}
    last = run.step == config.steps
    if run.step % config.log_every == 0 or last:
        run.settle()
        values = {
            "loss": float(losses.mean()) if run.world.size == 1 else run.world.mean(losses),
            "gradient_norm": float(norm),
            "lr": config.learning_rate(run.step - 1),
            "steps_per_second": rate(run.step),
            "batch_wait_share": share_of_time(waited, seconds),
            **run.objective.metrics(batch, losses, run.step - 1, seconds),
        }
    if config.validates(run.step):
        values |= run.validate()
    return values
