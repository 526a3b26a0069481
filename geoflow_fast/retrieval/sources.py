"""Where the points around a query come from that score the items of a gallery: a flow or a head.

A source turns queries into points with weights, and knows what its results depend on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from geoflow_fast.data.fingerprint import Origin
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.flow.sampling import SamplingSettings, StartingPoints, sample_conditional
from geoflow_fast.head.loss import point_scores
from geoflow_fast.head.model import HeadPoints, PosteriorHead, head_digest
from geoflow_fast.retrieval import marginals
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime.progress import Advance


@dataclass(frozen=True)
class ScoringPoints:
    """Points around Q queries. An item g scores log mean_m exp(kappa <samples_m, g> + bias_m)."""

    samples: Tensor
    """[Q, M, d]."""
    kappa: float
    bias: Tensor | None = None
    """[Q, M], or None where all points weigh the same."""
    precision: str = "float32"
    """In which items are scored by them: one of `checks.PRECISIONS`."""


class Source(ABC):
    """Points around queries that search in one direction."""

    NAME: ClassVar[str]
    """What the model is called in a scorer and in messages."""

    def __init__(self, model: nn.Module, direction: Direction, widths: tuple[int, int]) -> None:
        self.model, self.direction = model, direction
        self.query_dim, self.item_dim = direction.queries(*widths), direction.items(*widths)
        self.precision = "float32"
        """In which points are multiplied by the items."""

    @property
    def example(self) -> Tensor:
        """Some tensor with the dtype and the device of the model."""
        return next(self.model.parameters())

    @property
    def origin(self) -> Origin:
        """What the model remembers of its training."""
        return getattr(self.model, "origin", None) or Origin()

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a score depends on besides the model, the gallery, the query and the solver of an ODE."""

    @property
    def solver_settings(self) -> dict[str, Any]:
        """What a score depends on if an ODE is solved for it."""
        return {}

    @property
    @abstractmethod
    def point_bytes(self) -> int:
        """Memory that the points of one query take."""

    @abstractmethod
    def draw(self, queries: Tensor, advance: Advance | None = None, total: int | None = None) -> ScoringPoints:
        """The points of queries [Q, d], which are unit rows. `advance(n)` is called when those of n more queries
        are there. `total`: the queries of the whole call, if these are a part of it."""

    @abstractmethod
    def digest(self) -> str:
        """Hash of the model, on which all results depend."""


class FlowSource(Source):
    """Samples of the conditional flow, all of one weight and concentration. Their noise depends on `seed` alone."""

    NAME = "flow"

    def __init__(
        self, flow: GeoFlow, direction: Direction, sampling: SamplingSettings, kappa: float, seed: int
    ) -> None:
        super().__init__(flow, direction, (flow.config.image_dim, flow.config.text_dim))
        self.flow, self.sampling, self.kappa, self.seed = flow, sampling, kappa, seed
        if sampling.precision in ("auto", "bfloat16"):
            self.precision = "auto"
        generator, config = torch.Generator().manual_seed(seed), flow.config
        self.start = StartingPoints.draw(sampling, config.flow_dims, direction, generator, config.manifold)

    @property
    def example(self) -> Tensor:
        return self.flow.example

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "direction": str(self.direction),
            "n_samples": self.sampling.n_samples,
            "kappa": self.kappa,
            "seed": self.seed,
            "noise": self.sampling.noise,
        }

    @property
    def solver_settings(self) -> dict[str, Any]:
        return {
            "n_steps": self.sampling.n_steps,
            "solver": self.sampling.solver,
            "grid": self.sampling.grid,
            "guidance": self.sampling.guidance,
            "precision": self.sampling.precision,
        }

    @property
    def point_bytes(self) -> int:
        return self.sampling.n_samples * self.item_dim * self.start.generated.element_size()

    def draw(self, queries: Tensor, advance: Advance | None = None, total: int | None = None) -> ScoringPoints:
        self.start = start = self.start.to(self.example)  # copied to a GPU once
        queries = queries.to(start.generated)
        samples = sample_conditional(self.flow, queries, self.direction, start, self.sampling, advance, total=total)
        return ScoringPoints(samples, self.kappa, precision=self.precision)

    def digest(self) -> str:
        return flow_digest(self.flow)


class HeadSource(Source):
    """The points of a head. From an item's score a share of the logarithm of its mean score for typical queries is
    subtracted, those passed as reference or the head's own bank, and what the head has learned about it is added."""

    NAME = "head"

    def __init__(self, head: PosteriorHead, direction: Direction) -> None:
        super().__init__(head, direction, (head.image_dim, head.text_dim))
        self.head, self.precision = head, "auto"

    @property
    def settings(self) -> dict[str, Any]:
        return {"direction": str(self.direction), "points": self.head.config.points, "precision": self.precision}

    @property
    def uses_reference(self) -> bool:
        """Whether the items' marginals depend on typical queries."""
        return self.head.hub_weight_of(self.direction) != 0

    @property
    def point_bytes(self) -> int:
        return self.head.config.points * self.item_dim * self.example.element_size()

    def draw(self, queries: Tensor, advance: Advance | None = None, total: int | None = None) -> ScoringPoints:  # noqa: ARG002
        points = self.head.points(queries, self.direction)
        if advance is not None:
            advance(len(queries))
        bias = points.log_weights + math.log(points.points.shape[1])
        return ScoringPoints(points.points, 1.0, bias, self.precision)

    def digest(self) -> str:
        return head_digest(self.head)

    @torch.no_grad()
    def item_marginals(self, gallery: Gallery, reference: Tensor | None) -> Tensor:
        """What is subtracted from the scores of the items [N], by typical queries or by the head's bank: an estimate of
        log p(item), up to a constant."""
        learned = self.learned(gallery)
        bank = self.head.bank(self.direction) if reference is None else reference
        weight = self.head.hub_weight_of(self.direction)
        if not len(bank) or weight == 0:
            return -learned
        drawn = self.draw(bank)
        hubs = marginals.log_mean_scores(drawn.samples, gallery, drawn.kappa, drawn.bias)
        return weight * hubs.to(learned) - (1 - weight) * learned

    def learned(self, gallery: Gallery) -> Tensor:
        """What the head has learned about each item of a gallery: [N]."""
        blocks = gallery.blocks(self.example.device, self.example.dtype)
        return torch.cat([self.head.item_bias(items, self.direction) for _, items in blocks])

    @torch.no_grad()
    def scores(self, points: HeadPoints, items: Tensor) -> Tensor:
        """The scores of items [Q, K, d], other ones for each query, without their numbers: [Q, K] float64. `points`
        are those that the head gives for the queries."""
        each = torch.einsum("qkd,qjd->qkj", points.points, items.to(self.example)).double()
        return (each + points.log_weights.unsqueeze(2)).logsumexp(1)

    @torch.no_grad()
    def all_scores(self, queries: Tensor, items: Tensor) -> Tensor:
        """The scores of the same items [n, d] for all queries [R, d], without their numbers: [R, n]."""
        points = self.head.points(queries, self.direction)
        return point_scores(points.points, points.log_weights, items.to(self.example))

    def learned_about(self, items: Tensor) -> Tensor:
        """What the head has learned about items [..., d]: [...] float64."""
        rows = items.flatten(0, -2).to(self.example)
        return self.head.item_bias(rows, self.direction).view(items.shape[:-1]).double()
