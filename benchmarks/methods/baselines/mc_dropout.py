"""Monte-Carlo dropout: an adapter keeps its dropout at test time; what varies from pass to pass is uncertain."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.methods.baselines.probvlm import ProbVLM, Trunk, check_passes
from benchmarks.methods.baselines.trained import HIDDEN, TrainedBaseline
from geoflow_fast.directions import Direction
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.training.config import RunConfig


class MCDropout(TrainedBaseline):
    """MC dropout: variance, over `passes` with dropout, of the predicted partner embedding, averaged over coordinates.

    One residual adapter per modality (the trunk of ProbVLM) is trained by squared error to predict the partner's
    embedding; the variance is that of predictions scaled to unit norm. A pass uses the same dropout mask for all
    queries, so that scores do not depend on how queries are batched.
    """

    method: ClassVar[str] = "mc_dropout"
    title: ClassVar[str] = "MC dropout"
    ONE_WIDTH_FOR: ClassVar[str | None] = "the adapter's residual"
    RECIPE: ClassVar[RunConfig] = ProbVLM.RECIPE
    LEARNING_RATES: ClassVar[dict[str, float]] = ProbVLM.LEARNING_RATES

    def __init__(
        self, image_dim: int, text_dim: int, size: str = "auto", dropout: float = 0.3, passes: int = 15, seed: int = 0
    ) -> None:
        super().__init__(image_dim, text_dim, size, dropout=dropout, passes=passes, seed=seed)
        check_passes(dropout, passes)
        self.passes, self.seed = passes, seed
        hidden = HIDDEN[self.size]
        self.image, self.text = Trunk(image_dim, hidden, dropout), Trunk(text_dim, hidden, dropout)

    def losses(self, *tensors: Tensor) -> Tensor:
        """Squared error [B] of both predictions."""
        image, text = tensors
        return (self.image(image) - text).square().sum(1) + (self.text(text) - image).square().sum(1)

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:  # noqa: ARG002
        trunk = direction.queries(self.image, self.text)
        drawn = torch.stack([functional.normalize(trunk(queries, m)) for m in trunk.masks(self.passes, self.seed)])
        return drawn.double().var(0, correction=0).mean(1)
