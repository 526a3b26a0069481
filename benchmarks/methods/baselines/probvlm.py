"""ProbVLM: adapters that turn each embedding into a generalised Gaussian around it (Upadhyay et al., 2023).

A residual network per modality predicts mean, scale and shape of every coordinate; the loss is the likelihood of the
embedding itself and, with a small weight, of its partner.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.methods.baselines.trained import HIDDEN, PUBLISHED, TrainedBaseline
from geoflow_fast.directions import Direction
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import checks
from geoflow_fast.training.config import RunConfig

FORMS = ("true", "product")
UNCERTAINTIES = ("aleatoric", "epistemic", "total")
LEAST_INVERSE_SCALE, LEAST_SHAPE = 1e-3, 0.05
# From this exponent on, (|y - mu| / alpha)^beta continues linearly, so that it stays finite and its gradient points
# back.
_LARGEST_EXPONENT = 10.0


class GeneralisedGaussian(NamedTuple):
    """The mean, 1 / scale and shape of each coordinate, all [B, d]. Shape 2 is Gaussian, shape 1 is Laplace."""

    mean: Tensor
    inverse_scale: Tensor
    shape: Tensor

    def nll(self, target: Tensor, form: str = "true") -> Tensor:
        """-log density of `target` [B, d], by coordinate.

        `form="product"` has |y - mu| beta / alpha, at most 1000, in place of (|y - mu| / alpha)^beta, as published code
        does for stability; that is not a density.
        """
        distance = (target - self.mean).abs() * self.inverse_scale
        if form == "true":
            power = exp_then_linear(self.shape * distance.clamp(min=torch.finfo(distance.dtype).tiny).log())
        else:
            power = (distance * self.shape).clamp(max=1000)
        log_normalizer = torch.lgamma(1 / self.shape) - self.inverse_scale.log() - self.shape.log()
        return power + log_normalizer + (0.6931471805599453 if form == "true" else 0.0)

    def variance(self) -> Tensor:
        """alpha^2 Gamma(3 / beta) / Gamma(1 / beta), by coordinate."""
        log_ratio = torch.lgamma(3 / self.shape) - torch.lgamma(1 / self.shape)
        return torch.exp(log_ratio - 2 * self.inverse_scale.log())


def exp_then_linear(x: Tensor) -> Tensor:
    """exp(x) up to a large x, and its tangent from there on."""
    bounded = x.clamp(max=_LARGEST_EXPONENT)
    return bounded.exp() * (1 + x - bounded)


class Trunk(nn.Module):
    """Linear-ReLU, Linear-ReLU-dropout, Linear, added to its input: [B, d] -> [B, d]."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(dim, hidden, dtype=torch.float32),
            nn.Linear(hidden, hidden, dtype=torch.float32),
        )
        self.last = nn.Linear(hidden, dim, dtype=torch.float32)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` [hidden], if given, replaces random dropout: zero for dropped units, a scale for the others."""
        h = functional.relu(self.second(functional.relu(self.first(x))))
        h = functional.dropout(h, self.dropout, self.training) if mask is None else h * mask
        return x + self.last(h)

    def masks(self, count: int, seed: int) -> Tensor:
        """Masks [count, hidden] of `count` passes, drawn with the seed; all rows of a pass share one mask."""
        keep = torch.rand(
            count,
            self.second.out_features,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float32,
            device="cpu",
        )
        return ((keep >= self.dropout) / (1 - self.dropout)).to(self.last.weight)


class Adapter(nn.Module):
    """Trunk and three heads, each Linear-ReLU-Linear: a generalised Gaussian for every embedding."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.trunk = Trunk(dim, hidden, dropout)
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Linear(dim, hidden, dtype=torch.float32), nn.ReLU(), nn.Linear(hidden, dim, dtype=torch.float32)
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> GeneralisedGaussian:
        h = self.trunk(x, mask)
        mean, inverse_scale, shape = (head(h) for head in self.heads)
        return GeneralisedGaussian(
            mean, functional.softplus(inverse_scale) + LEAST_INVERSE_SCALE, functional.softplus(shape) + LEAST_SHAPE
        )


class ProbVLM(TrainedBaseline):
    """ProbVLM: variance of the generalised Gaussian that is predicted for a query, averaged over coordinates.

    `form`: "true" for the likelihood of that distribution, "product" for the variant in published code, which is not a
    density. `uncertainty_of`: "aleatoric", the variance of the predicted distribution; "epistemic", the variance of its
    mean over `passes` with dropout; or "total", their sum. `cross_weight`: weight of the partner's likelihood; the
    published value is so small that the distribution is effectively that of the reconstruction.
    """

    method: ClassVar[str] = "probvlm"
    title: ClassVar[str] = "ProbVLM"
    ONE_WIDTH_FOR: ClassVar[str | None] = "the partner's likelihood"
    RECIPE: ClassVar[RunConfig] = dataclasses.replace(PUBLISHED, weight_decay=5e-4)
    LEARNING_RATES: ClassVar[dict[str, float]] = {"paper": 1e-4, "small": 3e-4, "tiny": 1e-3}

    def __init__(
        self,
        image_dim: int,
        text_dim: int,
        size: str = "auto",
        form: str = "true",
        uncertainty_of: str = "aleatoric",
        dropout: float = 0.3,
        passes: int = 15,
        l1_weight: float = 1.0,
        nll_weight: float = 0.05,
        cross_weight: float = 1e-4,
        seed: int = 0,
    ) -> None:
        settings = {"form": form, "uncertainty_of": uncertainty_of, "dropout": dropout, "passes": passes}
        weights = {"l1_weight": l1_weight, "nll_weight": nll_weight, "cross_weight": cross_weight}
        super().__init__(image_dim, text_dim, size, **settings, **weights, seed=seed)
        checks.one_of(form, "form", FORMS)
        checks.one_of(uncertainty_of, "uncertainty_of", UNCERTAINTIES)
        check_passes(dropout, passes)
        self.form, self.uncertainty_of, self.passes, self.seed = form, uncertainty_of, passes, seed
        self.l1_weight, self.nll_weight, self.cross_weight = l1_weight, nll_weight, cross_weight
        hidden = HIDDEN[self.size]
        self.image, self.text = Adapter(image_dim, hidden, dropout), Adapter(text_dim, hidden, dropout)

    def losses(self, *tensors: Tensor) -> Tensor:
        """Loss [B]: absolute error and -log likelihood of both embeddings and, weakly, of their partners."""
        image, text = tensors
        of_image, of_text = self.image(image), self.text(text)
        own = self._loss(of_image, image) + self._loss(of_text, text)
        return own + self.cross_weight * (self._loss(of_image, text) + self._loss(of_text, image))

    def _loss(self, law: GeneralisedGaussian, target: Tensor) -> Tensor:
        # Powers and lgamma need float32, under autocast too.
        law = GeneralisedGaussian(*(x.float() for x in law))
        distance = (law.mean - target).abs().mean(1)
        return self.l1_weight * distance + self.nll_weight * law.nll(target, self.form).mean(1)

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:  # noqa: ARG002
        adapter = direction.queries(self.image, self.text)
        variance = torch.zeros(len(queries), dtype=torch.float64, device=queries.device)
        if self.uncertainty_of != "epistemic":
            variance += adapter(queries).variance().double().mean(1)
        if self.uncertainty_of != "aleatoric":
            masks = adapter.trunk.masks(self.passes, self.seed)
            means = torch.stack([adapter(queries, mask).mean for mask in masks])
            variance += means.double().var(0, correction=0).mean(1)
        return variance


def check_passes(dropout: float, passes: int) -> None:
    """Raises a ValueError unless passes with this dropout can differ."""
    if not 0 < dropout < 1:
        raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
    if passes < 2:
        raise ValueError(f"passes must be at least 2 to have a variance, got {passes}")
