"""REPVLM: one Riemannian flow on one sphere serves both modalities, which a label tells apart; rare queries count as
uncertain."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.methods.baselines.trained import HIDDEN, PUBLISHED, TrainedBaseline
from geoflow_fast.directions import IMAGE, TEXT, Direction
from geoflow_fast.flow.fields import Streams
from geoflow_fast.flow.network import zero_linear
from geoflow_fast.geometry import interpolate, tangent_part
from geoflow_fast.likelihood.density import log_density
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.training.config import RunConfig

FREQUENCIES = 64
SCORE_ROWS = 1024


class AdaptiveBlock(nn.Module):
    """h + MLP(LayerNorm(h) scaled and shifted by the condition): [B, H] -> [B, H]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.modulation = zero_linear(hidden, 3 * hidden)
        self.first, self.second = (
            nn.Linear(hidden, hidden, dtype=torch.float32),
            nn.Linear(hidden, hidden, dtype=torch.float32),
        )

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        x = functional.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
        return h + (1 + gate) * self.second(functional.silu(self.first(x)))


class SphereField(nn.Module):
    """Tangent velocity on the sphere of R^d at points [B, d], times [B] and labels [B]; zero before training."""

    frequencies: Tensor

    def __init__(self, dim: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies", torch.exp(torch.linspace(0, math.log(1000), FREQUENCIES, dtype=torch.float32))
        )
        self.time = nn.Sequential(
            nn.Linear(2 * FREQUENCIES, hidden, dtype=torch.float32),
            nn.SiLU(),
            nn.Linear(hidden, hidden, dtype=torch.float32),
        )
        self.label = nn.Embedding(2, hidden, dtype=torch.float32)
        self.encode = nn.Linear(dim, hidden, dtype=torch.float32)
        self.blocks = nn.ModuleList(AdaptiveBlock(hidden) for _ in range(depth))
        self.decode = zero_linear(hidden, dim)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        phase = t.unsqueeze(-1) * self.frequencies
        condition = functional.silu(self.time(torch.cat((phase.sin(), phase.cos()), dim=-1)) + self.label(label))
        h = self.encode(x)
        for block in self.blocks:
            h = block(h, condition)
        return tangent_part(x, self.decode(functional.layer_norm(h, h.shape[-1:])))


@dataclass(frozen=True)
class OneModality:
    """Makes a field on one sphere a field on pairs: the image stream carries the points, the text stream rests."""

    field: SphereField
    label: int

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str) -> Streams:  # noqa: ARG002
        """The velocity of the points, and zero for the text stream."""
        times = torch.as_tensor(t, dtype=image.dtype, device=image.device).expand(len(image))
        label = torch.full((len(image),), self.label, device=image.device)
        return self.field(image, times, label), torch.zeros_like(text)


class REPVLM(TrainedBaseline):
    """REPVLM: -log p(query | its modality), from the reverse ODE with `n_probes` Hutchinson probes in `n_steps` steps.

    It measures how rare a query is, not how many answers it has; the gallery plays no part. `pair_score` is the
    published score of a pair. All rows share the same probes, so that scores do not depend on how queries are batched.
    """

    method: ClassVar[str] = "repvlm"
    title: ClassVar[str] = "REPVLM"
    ONE_WIDTH_FOR: ClassVar[str | None] = "one sphere for both modalities"
    RECIPE: ClassVar[RunConfig] = dataclasses.replace(PUBLISHED, weight_decay=1e-5)
    LEARNING_RATES: ClassVar[dict[str, float]] = {"paper": 1e-5, "small": 3e-4, "tiny": 1e-3}

    def __init__(
        self,
        image_dim: int,
        text_dim: int,
        size: str = "auto",
        depth: int = 6,
        n_steps: int = 10,
        n_probes: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(image_dim, text_dim, size, depth=depth, n_steps=n_steps, n_probes=n_probes, seed=seed)
        self.n_steps, self.n_probes, self.seed = n_steps, n_probes, seed
        self.field = SphereField(image_dim, HIDDEN[self.size], depth)

    def make_batch(self, image: Tensor, text: Tensor, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Points on geodesics from uniform noise to the images and texts of the pairs: 2B rows."""
        data = torch.cat((image, text))
        label = torch.tensor([IMAGE, TEXT], device=data.device).repeat_interleave(len(image))
        noise = sample_uniform(len(data), data.shape[1], generator=generator).to(data.device)
        t = torch.rand(len(data), generator=generator, dtype=torch.float32, device="cpu").to(data.device)
        return *interpolate(noise, data, t), t, label

    def losses(self, *tensors: Tensor) -> Tensor:
        """Squared error of the velocity, per row."""
        points, velocity, t, label = tensors
        return (self.field(points, t, label) - velocity).square().sum(1)

    @torch.no_grad()
    def log_prob(self, points: Tensor, label: int) -> Tensor:
        """log p(point | modality) of unit rows [B, d]: float64 [B], in nats. `label`: 0 for images, 1 for texts."""
        parts = []
        for rows in points.split(SCORE_ROWS):
            generator = torch.Generator().manual_seed(self.seed)
            settings = DensitySettings(self.n_steps, self.n_probes, shared=True)
            field = OneModality(self.field, label)
            parts.append(
                cast(Tensor, log_density(field, rows, rows, Direction.T2I, generator=generator, settings=settings))
            )
        return torch.cat(parts) if parts else points.new_zeros(0, dtype=torch.float64)

    def pair_score(self, image: Tensor, text: Tensor) -> Tensor:
        """-log p(image) - log p(text) of pairs of unit rows, [B, d] each: float64 [B], in nats."""
        return -self.log_prob(image, IMAGE) - self.log_prob(text, TEXT)

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:  # noqa: ARG002
        return -self.log_prob(queries, direction.queries(IMAGE, TEXT))
