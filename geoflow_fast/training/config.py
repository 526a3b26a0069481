"""Settings of training runs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from geoflow_fast.flow.config import FEW_PAIRS, many_cores
from geoflow_fast.flow.curriculum import Curriculum
from geoflow_fast.ops.ot_assign import CONDITIONAL_COUPLINGS, COUPLINGS, check_plan
from geoflow_fast.runtime import checks

EARLY_VALIDATIONS = 4
"""Validations between the start of a run and step `val_every`, at steps that double: few pairs are soon learned by
heart."""

AUTO_HELD_OUT, AUTO_VALIDATION_ROWS = 400, 512
"""Pairs that the preset `auto` would like to hold out, and rows that it validates."""


@dataclass(frozen=True)
class RunConfig:
    """Settings that all networks trained on pairs have in common: steps, schedule, validation, checkpoints.

    `TrainConfig`, which adds the settings of a flow, describes the fields.
    """

    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("warmup_steps", "seed")
    """Counts that need not be positive."""
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
    val_every: int = 500
    val_batches: int = 5
    val_fraction: float = 0.02
    patience: int = 100
    min_improvement: float = 1e-6
    min_relative_improvement: float = 0.005
    checkpoint_every: int = 500
    log_every: int = 50
    prefetch: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "bool":
                checks.boolean(getattr(self, field.name), field.name)
            if field.type != "int":
                continue
            least = 0 if field.name in self.MAY_BE_ZERO else 1
            most = checks.LARGEST_COUNT if field.name in ("steps", "val_batches") else checks.LARGEST_SEED
            # Integers of numpy are accepted, but JSON cannot hold them.
            object.__setattr__(self, field.name, checks.integer(getattr(self, field.name), field.name, least, most))
        self._check_positive("lr", "clip")
        self._check_shares("val_fraction")
        checks.precision(self.precision)
        for name in ("weight_decay", "min_improvement", "min_relative_improvement"):
            checks.number(getattr(self, name), name, least=0.0)
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

    def learning_rate(self, step: int) -> float:
        """Learning rate of a 0-based step: a linear warm-up, then a cosine that ends at zero."""
        checks.integer(step, "step")
        warmup = self.warmup_steps if self.warmup_steps < self.steps else self.steps // 10
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / (self.steps - warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def validates(self, step: int) -> bool:
        """Whether the weights are validated after `step` steps: before the first and after the last one, every
        `val_every` steps, and after a half, a quarter, an eighth and a sixteenth of the first `val_every`."""
        checks.integer(step, "step")
        if step % self.val_every == 0 or step == self.steps:
            return True
        return step in (self.val_every >> halvings for halvings in range(1, 1 + EARLY_VALIDATIONS))


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Settings of a training run. `paper()` has exactly the paper's settings; docs/training.md lists where the defaults
    differ.

    `coupling` pairs noise with data in joint rows: "paper" (row argmax of the entropic transport plan), "sample" (a
    draw from each row of the plan), "exact" (linear assignment) or "independent". `conditional_coupling` does the same
    in i2t and t2i rows: "independent", "paper" or "c2ot". A plan is solved among the rows that use it, with
    regularisation `sinkhorn_eps`.

    Curriculum: the first `conditional_share` of the steps are conditional only; over the next `ramp_share` the
    probability of a joint row rises linearly to `p_joint`. `p_drop`: probability that a conditional row has its
    condition replaced by noise. `fixed_directions`: give every batch the expected number of rows of each direction
    instead of drawing it, so that a GPU can capture a step as a CUDA graph and replay it.

    Run: `steps`, `batch_size` and `seed`. `lr`: peak learning rate, reached after `warmup_steps` (a tenth of the run if
    the run is not longer than that), then a cosine to zero. `weight_decay`: of AdamW.
    `clip`: largest norm of the gradient. `accumulate`: number of pieces in which a batch goes through the network.
    `ema_decay`: average the weights with this decay, and validate and keep the average. `precision`: "float32",
    "bfloat16" for the products of a step, or "auto" for bfloat16 where the device and the network gain from it. Before
    the first step, a few times until step `val_every`, and then every `val_every` steps `val_batches` batches are
    validated, and the best weights are kept; `val_fraction` of the images is held out if no validation pairs are given.
    Training stops after `patience` validations in a row, not counting those before step `val_every`, whose loss is not
    lower than that of the last improvement by more than `min_improvement` and by more than `min_relative_improvement`
    of it. `prefetch`: prepare batches in a thread.
    `blend`: after the last step, weigh the network of an anchored flow against its anchor, in each conditional
    direction, by the held-out likelihood of retrieval (`training/blending.py`).
    `checkpoint_every`, `log_every`: steps between checkpoints and between records of metrics.
    """

    patience: int = 10
    coupling: str = "paper"
    conditional_coupling: str = "independent"
    sinkhorn_eps: float = 0.05
    conditional_share: float = 0.15
    ramp_share: float = 0.15
    p_joint: float = 0.40
    p_drop: float = 0.10
    blend: bool = False
    fixed_directions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("sinkhorn_eps")
        self._check_shares("conditional_share", "ramp_share", "p_joint", "p_drop")
        checks.one_of(self.coupling, "coupling", COUPLINGS)
        checks.one_of(self.conditional_coupling, "conditional_coupling", CONDITIONAL_COUPLINGS)
        if {self.coupling, self.conditional_coupling} & {"paper", "sample"}:
            check_plan(self.sinkhorn_eps, "sinkhorn_eps")

    @classmethod
    def paper(cls) -> TrainConfig:
        """Exactly the paper's settings, including its coupling on conditional rows."""
        return cls(
            steps=120_000,
            batch_size=8192,
            warmup_steps=4000,
            conditional_coupling="paper",
            val_every=2000,
            patience=100,
            checkpoint_every=2000,
        )

    @classmethod
    def auto(cls, pairs: int, cores: int | None = None) -> TrainConfig:
        """Settings for `GeoFlowConfig.auto` with this number of pairs, from 4 on, and of cores (by default those of
        this machine): on few pairs a short run that is validated often."""
        if checks.integer(pairs, "pairs", 4) >= FEW_PAIRS:
            small = cls.small() if many_cores(cores) else dataclasses.replace(cls.tiny(), steps=3000, val_every=100)
            return dataclasses.replace(small, blend=True)
        share = min(0.2, max(0.1, AUTO_HELD_OUT / pairs))
        batch_size = min(256, pairs // 2)
        # A few held-out pairs are shown again with other noise and times.
        held_out = max(1, min(batch_size, round(share * pairs)))
        return cls(
            steps=400,
            batch_size=batch_size,
            lr=5e-4,
            warmup_steps=50,
            val_every=20,
            val_batches=math.ceil(AUTO_VALIDATION_ROWS / held_out),
            val_fraction=share,
            patience=5,
            checkpoint_every=200,
            log_every=20,
            blend=True,
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
        """The schedule of directions over the run."""
        return Curriculum(self.steps, self.conditional_share, self.ramp_share, self.p_joint)
