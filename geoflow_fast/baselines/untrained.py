"""Uncertainties that need no training: functions of the cosines of plain search.

Galleries are streamed through the kernels of `ops.gallery_posterior`: there is no matrix of all queries by all items.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from geoflow_fast.baselines.base import Baseline, FitTask, GallerySoftmax, nearest, resize_rows
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.ops.gallery_statistics import GalleryPosterior
from geoflow_fast.retrieval.bandwidth import fit_cosine_scale
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import drawn_rows, pair_task


class CosineBaseline(Baseline):
    """A method that needs no training and uses cosines between the modalities, which must have the same width."""

    TRAINED: ClassVar[bool] = False
    NEEDS_TRAINING_PAIRS: ClassVar[bool] = False
    USES_TRAINING_PAIRS: ClassVar[bool] = False
    ONE_WIDTH_FOR: ClassVar[str | None] = "a cosine"

    def __init__(self, image_dim: int, text_dim: int, **settings: Any) -> None:
        super().__init__(image_dim, text_dim, **settings)


class Margin(CosineBaseline):
    """Cosine margin: minus the difference between the largest and the second largest cosine."""

    method: ClassVar[str] = "margin"
    title: ClassVar[str] = "cosine margin"

    def _fit(self, task: FitTask) -> None:
        """There is nothing to learn."""

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:  # noqa: ARG002
        if len(gallery) < 2:
            return queries.new_zeros(len(queries))
        cosine, _ = nearest(queries, gallery, 2)
        return cosine[:, 1] - cosine[:, 0]


class CosineSoftmax(CosineBaseline):
    """A function of the softmax of cosine / temperature over the gallery.

    The temperature of each direction minimises the -log probability of the true item for at most `QUERIES` held-out
    pairs, whose items serve as the gallery; never on the pairs used for evaluation.
    """

    QUERIES = 1000
    scale: Tensor

    def __init__(self, image_dim: int, text_dim: int) -> None:
        super().__init__(image_dim, text_dim)
        self.register_buffer(
            "scale", torch.zeros(len(CONDITIONAL), dtype=torch.float32)
        )  # 1 / temperature, by direction

    def _fit(self, task: FitTask) -> None:
        scales = [tuned_scale(task.val, direction, self.QUERIES, task.config.seed) for direction in CONDITIONAL]
        self.scale.copy_(torch.tensor(scales, device=self.scale.device, dtype=torch.float32))

    def softmax(self, queries: Tensor, gallery: Gallery, direction: Direction) -> GallerySoftmax:
        """The softmax of cosine / temperature."""
        return GallerySoftmax(queries, gallery, float(self.scale[CONDITIONAL.index(direction)]))

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        return self._read_out(self.softmax(queries, gallery, direction).posterior())

    @staticmethod
    @abstractmethod
    def _read_out(posterior: GalleryPosterior) -> Tensor:
        """The uncertainty [Q]."""


class MaxSoftmax(CosineSoftmax):
    """One minus the largest probability of the softmax of cosine / temperature over the gallery.

    The temperature of each direction is fitted on held-out pairs.
    """

    method: ClassVar[str] = "max_softmax"
    title: ClassVar[str] = "max softmax"

    @staticmethod
    def _read_out(posterior: GalleryPosterior) -> Tensor:
        return 1 - posterior.top_prob[:, 0]


class SoftmaxEntropy(CosineSoftmax):
    """Entropy, in nats, of the softmax of cosine / temperature over the gallery.

    The temperature of each direction is fitted on held-out pairs.
    """

    method: ClassVar[str] = "softmax_entropy"
    title: ClassVar[str] = "cosine-softmax entropy"

    @staticmethod
    def _read_out(posterior: GalleryPosterior) -> Tensor:
        return posterior.entropy


class KNNDistance(Baseline):
    """One minus the cosine with the `neighbours`-th nearest training embedding of the query's modality.

    At most `max_rows` training pairs, drawn by the seed, are stored.
    """

    method: ClassVar[str] = "knn"
    title: ClassVar[str] = "kNN distance"
    TRAINED: ClassVar[bool] = False
    image: Tensor
    text: Tensor

    def __init__(self, image_dim: int, text_dim: int, neighbours: int = 10, max_rows: int = 100_000) -> None:
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


def tuned_scale(pairs: EmbeddingPairs, direction: Direction, max_queries: int, seed: int) -> float:
    """Inverse temperature of the cosine softmax with the least -log probability of the true items of these pairs."""
    task = pair_task(pairs, direction, max_queries, seed)
    return fit_cosine_scale(task.queries, task.items, task.own[:, 0])
