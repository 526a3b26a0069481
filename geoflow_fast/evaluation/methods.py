"""The interface behind which everything that is compared on retrieval stands: what a method is made of, what it says.

Whatever is tuned (temperatures, kappa, guidance, calibrations) is tuned on held-out pairs, never on those it is judged
by.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.head.model import PosteriorHead
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask


@dataclass(frozen=True)
class Study:
    """What methods are made of and fitted on."""

    val: EmbeddingPairs
    """Pairs held out from all training, on which every method is tuned."""
    train: EmbeddingPairs | None = None
    """Pairs for methods that learn; the flow has seen them."""
    flow: GeoFlow | None = None
    flow_seconds: float = 0.0
    """Seconds that training the flow took. They count towards the fitting time of its methods."""
    seed: int = 0
    progress: bool | None = None
    head: PosteriorHead | None = None
    """Further evidence of the re-ranker."""
    head_seconds: float = 0.0

    def __post_init__(self) -> None:
        widths = [
            (name, part.image_dim, part.text_dim)
            for name, part in (("val", self.val), ("train", self.train))
            if part is not None
        ]
        if self.flow is not None:
            widths.append(("flow", self.flow.config.image_dim, self.flow.config.text_dim))
        if self.head is not None:
            widths.append(("head", self.head.image_dim, self.head.text_dim))
        if len({width for _, *both in widths for width in both}) > 1:
            raise ValueError(f"val, train, flow and head must have one width, got (name, image, text) {widths}")


@dataclass(frozen=True)
class Scores:
    """What a method says about Q queries; NaN, or -1, for what it does not say."""

    uncertainty: Tensor
    """[Q] float64, higher is less certain."""
    p_answer: Tensor
    """[Q] float64, stated probability that plain search's answer is right."""
    nll: Tensor
    """[Q] float64, minus the mean log-probability of the right items among the whole gallery, in nats."""
    top: Tensor
    """[Q] int64, the item that the method itself considers most probable."""

    @classmethod
    def without_probabilities(cls, uncertainty: Tensor) -> Scores:
        """The scores of a method that states no probabilities."""
        uncertainty = uncertainty.detach().double().cpu()
        unknown = torch.full_like(uncertainty, math.nan)
        return cls(uncertainty, unknown, unknown, torch.full(uncertainty.shape, -1, device="cpu"))


class Method(ABC):
    """One way to be uncertain. It is fitted for a task and then scores the queries of that task."""

    name: str
    title: str
    """The name that tables show."""
    training: str = "none"
    """What is trained for it: "none", "baseline" or "flow"."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.fit_seconds = 0.0

    def fit(self, task: RetrievalTask) -> None:
        """Makes the method ready for the queries of `task`, and notes how long that took."""
        begin = time.perf_counter()
        self._fit(task)
        self.fit_seconds = time.perf_counter() - begin

    def check(self, task: RetrievalTask) -> None:  # noqa: B027, most methods can serve any task
        """Raises a ValueError or OSError if the method cannot serve `task`. It is called before any computation."""

    def operations(self, queries: int) -> float:  # noqa: ARG002, most methods cost next to nothing
        """Roughly the floating-point operations of fitting it and scoring this many queries; 0 for next to none."""
        return 0.0

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Everything that its scores depend on besides the task, the held-out pairs and the seed."""

    @abstractmethod
    def _fit(self, task: RetrievalTask) -> None:
        """Does the work of `fit`, which takes the time."""

    @abstractmethod
    def score(self, rows: slice, answers: Tensor) -> Scores:
        """Scores the queries `rows` of the task it was fitted for; `answers` [Q] are the items that plain search
        returned."""


def right_per_query(pairs: EmbeddingPairs, direction: Direction) -> float:
    """Mean number of right items that a query of these pairs has."""
    if direction is Direction.T2I:
        return 1.0
    return len(pairs) / len(torch.unique(torch.from_numpy(pairs.group)))


def item_scores(samples: Tensor, gallery: Gallery, index: Tensor, kappa: float, bias: Tensor | None = None) -> Tensor:
    """log mean_m exp(kappa <item, sample m>), plus the item's `bias` [N], of the items `index` [Q, k] under samples
    [Q, M, d]: float64 [Q, k]."""
    cosine = torch.einsum("qmd,qkd->qkm", samples, gallery.take(index, samples.dtype)).double()
    score = (kappa * cosine).logsumexp(2) - math.log(samples.shape[1])
    return score if bias is None else score + bias[index].double()


def posterior_scores(
    samples: Tensor,
    gallery: Gallery,
    kappa: float,
    own: Tensor,
    answers: Tensor,
    right: float,
    bias: Tensor | None = None,
) -> Scores:
    """Scores of the softmax over the gallery of log mean_m exp(kappa cos(item, sample m)) (+ `bias` [N]).

    `samples` are [Q, M, d], the right items of each query `own` [Q, m] (-1 for no item), and `answers` [Q] are those of
    plain search. The probability of an answer is multiplied by `right`, the number of right items that share it.
    """
    posterior = gallery.statistics(samples, kappa, 1, bias).posterior(torch.float64)

    def log_prob(index: Tensor) -> Tensor:
        """Log-probabilities [Q, k] of the items `index` [Q, k]."""
        score = item_scores(samples, gallery, index.to(samples.device), kappa, bias)
        return (score - posterior.log_z.unsqueeze(1)).cpu()

    is_item = own >= 0
    nll = -torch.where(is_item, log_prob(own.clamp(min=0)), 0.0).sum(1) / is_item.sum(1)
    p_answer = (log_prob(answers.unsqueeze(1)).squeeze(1).exp() * right).clamp(max=1.0)
    return Scores(posterior.entropy.cpu(), p_answer, nll, posterior.top_index[:, 0].cpu())
