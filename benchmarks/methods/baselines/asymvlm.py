"""AsymVLM: texts become distributions on the sphere, images stay points (Ju et al., 2025).

A network maps a text embedding to eta in R^d. This is a von Mises-Fisher or a power-spherical distribution with mean
direction eta / |eta| and concentration kappa = |eta|; the log-likelihoods of images are contrasted over a batch.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.methods.baselines.trained import PUBLISHED, TrainedBaseline
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.retrieval import nearest
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.spherical import log_vmf_normalizer
from geoflow_fast.training.config import RunConfig


def log_power_spherical(cosine: Tensor, kappa: Tensor, d: int) -> Tensor:
    """Log-density, float64, at cosine <mu, x> of the distribution with (1 + <mu, x>)^kappa on the sphere of R^d."""
    kappa = kappa.double()
    b = (d - 1) / 2
    a = b + kappa
    log_normalizer = (a + b) * math.log(2) + torch.lgamma(a) - torch.lgamma(a + b) + b * math.log(math.pi)
    return kappa * torch.log1p(cosine.double().clamp(min=-1 + 1e-6)) - log_normalizer


def contrastive_losses(logits: Tensor) -> Tensor:
    """Cross-entropy of the diagonal of logits [B, B], as the mean of those over rows and over columns: [B]."""
    return -(logits.log_softmax(1).diagonal() + logits.log_softmax(0).diagonal()) / 2


class AsymVLM(TrainedBaseline):
    """AsymVLM: 1 / kappa of a text, where kappa is the concentration of its distribution over images.

    In t2i the text is the query, in i2t the caption that plain search finds first. A four-layer network of width
    `hidden` (default 2d) is trained with the symmetric cross-entropy over the log-likelihoods of a batch's images under
    its texts, times a learned scalar.
    """

    ONE_WIDTH_FOR: ClassVar[str | None] = "a distribution of texts over images"
    RECIPE: ClassVar[RunConfig] = dataclasses.replace(PUBLISHED, weight_decay=5e-4)
    MOMENTUM: ClassVar[float | None] = 0.9
    LEARNING_RATES: ClassVar[dict[str, float]] = {"paper": 1e-2, "small": 1e-2, "tiny": 0.3}
    CONTRASTIVE: ClassVar[bool] = True

    def __init__(self, image_dim: int, text_dim: int, size: str = "auto", hidden: int | None = None) -> None:
        super().__init__(image_dim, text_dim, size, hidden=hidden)
        if image_dim < 3:
            raise ValueError(f"the distributions need at least 3 dimensions, got {image_dim}")
        inner = 2 * text_dim if hidden is None else hidden
        widths = (text_dim, inner, inner, inner)
        hidden_layers = [
            layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b, dtype=torch.float32), nn.ReLU())
        ]
        self.network = nn.Sequential(*hidden_layers, nn.Linear(inner, image_dim, dtype=torch.float32))
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float32))

    @staticmethod
    @abstractmethod
    def log_likelihood(eta: Tensor, points: Tensor) -> Tensor:
        """Log-likelihood of points [N, d] under the distributions of `eta` [B, d]: float64 [B, N]."""

    def losses(self, *tensors: Tensor) -> Tensor:
        """Symmetric cross-entropy over the likelihoods of the batch."""
        image, text = tensors
        return contrastive_losses(self.log_scale.exp() * self.log_likelihood(self.network(text), image)).float()

    def concentration(self, text: Tensor) -> Tensor:
        """kappa [B] of texts [B, d]."""
        return torch.linalg.vector_norm(self.network(text).double(), dim=1)

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        text = queries if direction is Direction.T2I else gallery.take(nearest(queries, gallery)[1][:, 0])
        return 1 / self.concentration(text)


class AsymVLMvMF(AsymVLM):
    """AsymVLM with von Mises-Fisher distributions: the uncertainty is 1 / kappa of a text.

    In t2i the text is the query, in i2t the caption that plain search finds first.
    """

    method: ClassVar[str] = "asymvlm_vmf"
    title: ClassVar[str] = "AsymVLM-vMF"

    @staticmethod
    def log_likelihood(eta: Tensor, points: Tensor) -> Tensor:
        """Log-likelihood <eta, x> + log C_d(|eta|): float64 [B, N]."""
        eta = eta.double()
        normalizer = log_vmf_normalizer(torch.linalg.vector_norm(eta, dim=1), eta.shape[1])
        return eta @ points.double().T + normalizer.unsqueeze(1)


class AsymVLMPS(AsymVLM):
    """AsymVLM with power-spherical distributions: the uncertainty is 1 / kappa of a text.

    In t2i the text is the query, in i2t the caption that plain search finds first.
    """

    method: ClassVar[str] = "asymvlm_ps"
    title: ClassVar[str] = "AsymVLM-PS"

    @staticmethod
    def log_likelihood(eta: Tensor, points: Tensor) -> Tensor:
        """Log-likelihood kappa log(1 + <mu, x>) plus the log-normaliser: float64 [B, N]."""
        eta = eta.double()
        kappa = torch.linalg.vector_norm(eta, dim=1, keepdim=True)
        cosine = (eta / kappa.clamp(min=1e-12)) @ points.double().T
        return log_power_spherical(cosine, kappa, eta.shape[1])
