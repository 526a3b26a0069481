"""What a training run trains: a module, its batches and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from geoflow_fast.distributed import ALONE, World
from geoflow_fast.training.config import RunConfig
from geoflow_fast.training.half import HalfTwin


class TrainingRows(Protocol):
    """What a run learns from: a number of rows, and what tells them from others."""

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """A hash that only equal rows share."""
        ...


class BatchRows(Protocol):
    """What a step consumes: a number of rows that can be taken in pieces."""

    def __len__(self) -> int: ...

    def pieces(self, count: int) -> Iterator[Any]:
        """Yields the same rows, in order, in at most `count` pieces."""
        ...


B = TypeVar("B", bound=BatchRows)


class Objective(ABC, Generic[B]):
    """What a run trains: a module, its batches and its loss. A batch depends on nothing but its number.

    The module learns from `pairs` and is validated on `val`. `facts` are plain JSON values that describe the module; a
    run is only continued if they are the same. Each rank of a `world` makes its own share of the rows of a batch, and a
    training batch has `batch_size` rows on all ranks together.
    """

    ROWS: ClassVar[str] = "pairs"
    """What messages call the rows of `pairs`."""
    TELLS_RISE: ClassVar[bool] = True
    """False for runs that are one trial of several, in which a rise of the validation loss is no news."""

    def __init__(
        self,
        module: nn.Module,
        pairs: TrainingRows,
        val: TrainingRows,
        config: RunConfig,
        facts: Mapping[str, Any],
        world: World = ALONE,
    ) -> None:
        if len(pairs) < config.batch_size:
            raise ValueError(
                f"{len(pairs)} training {self.ROWS} are too few for batch_size={config.batch_size}; "
                f"choose a batch_size of at most {len(pairs)}, or gather more"
            )
        self.module, self.pairs, self.val, self.config, self.facts = module, pairs, val, config, facts
        self.world = world
        self.twin: HalfTwin | None = None

    def prepare(self) -> None:
        """Does what comes before the first step of a new run, for instance fits statistics of the data."""

    def make_optimizer(self, rate: Tensor | None) -> torch.optim.Optimizer:
        """The optimiser of all parameters. One whose steps are captured reads its learning rate from the tensor
        `rate`."""
        options: dict[str, Any] = {"weight_decay": self.config.weight_decay, "fused": True}
        chosen = torch.optim.AdamW(self.module.parameters(), self.config.lr, capturable=rate is not None, **options)
        for group in chosen.param_groups if rate is not None else ():
            group["lr"] = rate
        return chosen

    @abstractmethod
    def training_batch(self, step: int) -> B:
        """The batch of a training step. The thread that prefetches batches calls this."""

    @abstractmethod
    def validation_batch(self, number: int) -> B:
        """Validation batch `number`, which is the same every time."""

    @abstractmethod
    def losses(self, batch: B) -> Tensor:
        """The loss of each row [B]; a step descends their mean."""

    def gains_from_bfloat16(self) -> bool:
        """Whether products of bfloat16 numbers make a step faster. Processors without units for them, and GPUs that
        emulate them, are slower."""
        device = next(self.module.parameters()).device
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)

    def half_twin(self) -> HalfTwin | None:
        """A twin of the module for steps in bfloat16, which `losses` uses while it is `self.twin`; None where autocast
        does the same."""
        return None

    def why_not_captured(self) -> str | None:
        """Why a GPU cannot capture a step and replay it; None if steps do the same work on tensors of the same shapes,
        but for what `kind` names."""
        return "its batches do not have the same shapes in all steps"

    def kind(self, batch: B) -> Hashable:  # noqa: ARG002
        """What the work of a step depends on besides the shapes of the batch's tensors."""
        return None

    def metrics(self, batch: B, losses: Tensor, step: int, seconds: float) -> dict[str, float]:  # noqa: ARG002
        """What is logged about a step besides the loss; the step took `seconds`. All ranks make this call at the same
        steps."""
        return {}

    def conclude(self) -> dict[str, Any] | None:
        """Does what comes after the last step to the weights that are kept, which the module has by then. Returns what
        there is to report about it, in plain JSON values, or None if nothing was done. All ranks make this call."""
        return None

    @abstractmethod
    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes these weights of the module to `folder` for later use."""
