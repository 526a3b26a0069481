"""Two references that need no training, as parts of other baselines; `geoflow evaluate` has them as methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.methods.baselines.base import Baseline, FitTask, GallerySoftmax, resize_rows
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.retrieval import nearest
from geoflow_fast.evaluation.untrained import KNOWN_ROWS, NEIGHBOURS, tuned_scale
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import drawn_rows


class CosineBaseline(Baseline):
    """A method that needs no training and uses cosines between the modalities, which must have the same width."""

    TRAINED: ClassVar[bool] = False
    NEEDS_TRAINING_PAIRS: ClassVar[bool] = False
    USES_TRAINING_PAIRS: ClassVar[bool] = False
    ONE_WIDTH_FOR: ClassVar[str | None] = "a cosine"

    def __init__(self, image_dim: int, text_dim: int, **settings: Any) -> None:
        super().__init__(image_dim, text_dim, **settings)


class MaxSoftmax(CosineBaseline):
    """One minus the largest probability of the softmax of cosine / temperature over the gallery.

    The temperature of each direction minimises the -log probability of the true item for held-out pairs, whose items
    serve as the gallery; never on the pairs used for evaluation.
    """

    method: ClassVar[str] = "max_softmax"
    title: ClassVar[str] = "max softmax"
    scale: Tensor

    def __init__(self, image_dim: int, text_dim: int) -> None:
        super().__init__(image_dim, text_dim)
        self.register_buffer(
            "scale", torch.zeros(len(CONDITIONAL), dtype=torch.float32)
        )  # 1 / temperature, by direction

    def _fit(self, task: FitTask) -> None:
        scales = [tuned_scale(task.val, direction, task.config.seed) for direction in CONDITIONAL]
        self.scale.copy_(torch.tensor(scales, device=self.scale.device, dtype=torch.float32))

    def softmax(self, queries: Tensor, gallery: Gallery, direction: Direction) -> GallerySoftmax:
        """The softmax of cosine / temperature."""
        return GallerySoftmax(queries, gallery, float(self.scale[CONDITIONAL.index(direction)]))

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        return 1 - self.softmax(queries, gallery, direction).posterior().top_prob[:, 0]


class KNNDistance(Baseline):
    """One minus the cosine with the `neighbours`-th nearest training embedding of the query's modality.

    At most `max_rows` training pairs, drawn by the seed, are stored.
    """

    method: ClassVar[str] = "knn"
    title: ClassVar[str] = "kNN distance"
    TRAINED: ClassVar[bool] = False
    image: Tensor
    text: Tensor

    def __init__(self, image_dim: int, text_dim: int, neighbours: int = NEIGHBOURS, max_rows: int = KNOWN_ROWS) -> None:
        super().__init__(image_dim, text_dim, neighbours=neighbours, max_rows=max_rows)
        if not 1 <= neighbours <= max_rows:
            raise ValueError(f"neighbours={neighbours} must be between 1 and max_rows={max_rows}")
        self.neighbours, self.max_rows = neighbours, max_rows
        self.register_buffer("image", torch.empty(0, image_dim, dtype=torch.float32))
        self.register_buffer("text", torch.empty(0, text_dim, dtype=torch.float32))

    def _fit(self, task: FitTask) -> None:
        if len(task.pairs) < self.neighbours:
            raise ValueError(f"{len(task.pairs)} training pairs are fewer than neighbours={self.neighbours}")
        device = self.device
        self.image, self.text = (
            x.to(device) for x in task.pairs[drawn_rows(len(task.pairs), self.max_rows, task.config.seed)]
        )

    def _resize_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        resize_rows(self, tensors, "image", "text")

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:  # noqa: ARG002
        cosine, _ = nearest(queries, Gallery(direction.queries(self.image, self.text)), self.neighbours)
        return 1 - cosine[:, -1]
