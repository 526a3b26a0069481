"""A two-tower adapter: a small residual network for each side, trained to find the partner among a batch (InfoNCE)."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.methods.baselines.asymvlm import contrastive_losses
from benchmarks.methods.baselines.base import FitTask, GallerySoftmax, answer_risk
from benchmarks.methods.baselines.trained import HIDDEN, PUBLISHED, PairObjective, TrainedBaseline
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Index
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.retrieval import nearest
from geoflow_fast.retrieval.bandwidth import fit_cosine_scale
from geoflow_fast.retrieval.freshness import OncePerGallery, marks
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import pair_task
from geoflow_fast.runtime import checks
from geoflow_fast.training.batches import RowBatch
from geoflow_fast.training.config import RunConfig
from geoflow_fast.training.loop import Run, TrainReport, complete

QUERIES = 1000
"""The temperatures are fitted on at most this many held-out queries."""
TILE_ITEMS = 16_384
START_SCALE, LARGEST_SCALE = 20.0, 1000.0


class ResidualTower(nn.Module):
    """Unit rows x + MLP(x), scaled to unit norm. At first the MLP is zero."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        last = nn.Linear(hidden, dim, dtype=torch.float32)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        first = nn.Linear(dim, hidden, dtype=torch.float32)
        self.network = nn.Sequential(nn.Dropout(dropout), first, nn.GELU(), nn.Dropout(dropout), last)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [B, d] to unit rows [B, d]."""
        return nn.functional.normalize(x + self.network(x), dim=-1)


class MappedGallery(Gallery):
    """A gallery whose rows are mapped by a network as they are read."""

    tower: ResidualTower

    @classmethod
    def by(cls, tower: ResidualTower, gallery: Gallery) -> MappedGallery:
        """The gallery with every row mapped by `tower`."""
        twin = cls.__new__(cls)
        twin.__dict__.update(copy.copy(gallery).__dict__, tower=tower, _codes=None)
        return twin

    def blocks(
        self, device: torch.device | str, dtype: torch.dtype = torch.float32, within: range | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields mapped rows as `Gallery.blocks` yields stored ones."""
        for first, block in super().blocks(device, torch.float32, within):
            for number, tile in enumerate(block.split(TILE_ITEMS)):
                yield first + number * TILE_ITEMS, self.tower(tile).to(dtype)

    def _scored_blocks(
        self,
        queries: Tensor,
        within: range | None = None,
        *,
        whole: bool = False,  # noqa: ARG002
    ) -> Iterator[tuple[int, Tensor]]:
        yield from self.blocks(queries.device, queries.dtype, within)

    def take(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The mapped rows with the given numbers."""
        return self.tower(super().take(index)).to(dtype)


class TwoTowerAdapter(TrainedBaseline):
    """Two-tower adapter: one minus the probability of plain search's answer in the softmax over adapted cosines.

    Each side has a residual network of one hidden layer, x + MLP(x) scaled to unit norm. The loss is the symmetric
    cross-entropy over a batch with a learned temperature; pairs of the same image are no negatives of each other. The
    temperature of each direction is then fitted on the held-out pairs, for galleries are not of the batch's size.
    """

    method: ClassVar[str] = "adapter"
    title: ClassVar[str] = "two-tower adapter"
    ONE_WIDTH_FOR: ClassVar[str | None] = "a cosine"
    RECIPE: ClassVar[RunConfig] = dataclasses.replace(PUBLISHED, weight_decay=1e-2)
    LEARNING_RATES: ClassVar[dict[str, float]] = {"paper": 1e-3, "small": 1e-3, "tiny": 2e-3}
    CONTRASTIVE: ClassVar[bool] = True
    scale: Tensor

    def __init__(self, image_dim: int, text_dim: int, size: str = "auto", dropout: float = 0.3) -> None:
        super().__init__(image_dim, text_dim, size, dropout=checks.number(dropout, "dropout", least=0.0))
        if dropout >= 1:
            raise ValueError(f"dropout={dropout} must be below 1")
        hidden = HIDDEN[self.size]
        self.image, self.text = ResidualTower(image_dim, hidden, dropout), ResidualTower(text_dim, hidden, dropout)
        self.log_scale = nn.Parameter(torch.tensor(math.log(START_SCALE), dtype=torch.float32))
        self.register_buffer("scale", torch.zeros(len(CONDITIONAL), dtype=torch.float32))  # by direction
        self._mapped: OncePerGallery[Gallery] = OncePerGallery()

    def losses(self, *tensors: Tensor) -> Tensor:
        """Symmetric cross-entropy [B] over the cosines of a batch, whose pairs are of the images `group` [B]."""
        image, text, group = tensors
        logits = self.log_scale.exp().clamp(max=LARGEST_SCALE) * (self.image(image) @ self.text(text).T).float()
        same_image = (group.unsqueeze(1) == group).fill_diagonal_(False)
        return contrastive_losses(logits.masked_fill(same_image, -torch.inf))

    def _fit(self, task: FitTask) -> TrainReport:
        report = complete(Run(GroupedPairs(self, self, task)), task.out, resume=task.resume, progress=task.progress)
        if report.finished:
            self.eval()
            for row, direction in enumerate(CONDITIONAL):
                self.scale[row] = self._fitted_scale(task.val, direction, task.config.seed)
            if task.out is not None:
                self.write(task.out, self.state_dict())
        return report

    @torch.no_grad()
    def _fitted_scale(self, val: EmbeddingPairs, direction: Direction, seed: int) -> float:
        asked = pair_task(val, direction, QUERIES, seed)
        towers = direction.queries(self.image, self.text), direction.items(self.image, self.text)
        queries, items = (tower(x.to(self.device)) for tower, x in zip(towers, (asked.queries, asked.items)))
        return fit_cosine_scale(queries, items, asked.own[:, 0])

    @torch.no_grad()
    def softmax(self, queries: Tensor, gallery: Gallery, direction: Direction) -> GallerySoftmax:
        """The softmax over adapted cosines. Items in memory are adapted once, those on disk whenever they are read."""
        tower = direction.items(self.image, self.text)
        mapped: Gallery = MappedGallery.by(tower, gallery)
        if isinstance(gallery.rows, Tensor):
            made_with = direction, queries.device, marks(tower.parameters())
            mapped = self._mapped.of(gallery, made_with, lambda: _in_memory(mapped, queries.device))
        adapted = direction.queries(self.image, self.text)(queries)
        return GallerySoftmax(adapted, mapped, float(self.scale[CONDITIONAL.index(direction)]))

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        return answer_risk(self.softmax(queries, gallery, direction), nearest(queries, gallery)[1][:, 0])


class GroupedPairs(PairObjective):
    """Batches that also say which image each pair is of."""

    def _batch(self, pairs: EmbeddingPairs, index: Index, generator: torch.Generator) -> RowBatch:
        image, text = super()._batch(pairs, index, generator).tensors
        return RowBatch((image, text, torch.from_numpy(pairs.group[index]).to(self.device)))


def _in_memory(gallery: Gallery, device: torch.device) -> Gallery:
    return Gallery(torch.cat([rows for _, rows in gallery.blocks(device)]))
