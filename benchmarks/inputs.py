"""Inputs that several benchmarks share: networks, pairs, galleries and samples."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.cases import PEER, Contender
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings, StartingPoints
from geoflow_fast.noise import sample_uniform

PAPER = SamplingSettings()
RESULTS = Path(__file__).parent / "results"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for gigabytes, beside the results, where git does not see it; taken away afterwards."""
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RESULTS) as name:
        yield Path(name)


@torch.no_grad()
def random_flow(config: gf.GeoFlowConfig) -> gf.GeoFlow:
    """Random weights, scaled so that a point goes a quarter turn from t=0 to t=1, as from noise to an embedding."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(config).eval().requires_grad_(False)
    for parameter in flow.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    image, text = (sample_uniform(64, d) for d in config.flow_dims)
    for decoder, velocity in zip(flow.decoders, flow.velocity(image, text, 0.5, "joint")):
        scale = math.pi / 2 / float(velocity.norm(dim=1).mean())
        for parameter in decoder[-1].parameters():
            parameter.mul_(scale)
    return flow


def row_flops(config: gf.GeoFlowConfig, direction: str) -> float:
    """Float operations of the matrix products of one velocity of one row, modulations and a given stream's encoding
    shared by all rows: two per weight. The last feed-forward and the decoder of a given stream are not needed."""
    h, (image, text) = config.hidden, config.flow_dims
    moving = {"joint": image + text, "i2t": text, "t2i": image}[direction]
    cross, feed_forward = 2 * h * h / config.heads, 3 * h * config.inner
    halves = 2 * config.depth - (direction != "joint")
    return 2.0 * (2 * moving * h + 2 * config.depth * cross + halves * feed_forward)


@dataclass(frozen=True)
class Rows:
    """A network, its plain twin, and pairs."""

    flow: gf.GeoFlow
    plain: twins.PlainFlow
    image: Tensor
    text: Tensor

    @classmethod
    def draw(cls, config: gf.GeoFlowConfig, rows: int) -> Rows:
        flow = random_flow(config)
        plain = twins.PlainFlow(flow).eval().requires_grad_(False)
        return cls(flow, plain, *(sample_uniform(rows, d) for d in config.flow_dims))


@dataclass(frozen=True)
class Scene:
    """Texts, images to retrieve, and the flow in both forms. `settings`: samples and steps of the paper's kind."""

    flow: gf.GeoFlow
    plain: twins.PlainFlow
    queries: Tensor
    gallery: Tensor
    settings: SamplingSettings

    @classmethod
    def draw(cls, config: gf.GeoFlowConfig, queries: int, items: int, **settings: Any) -> Scene:
        flow = random_flow(config)
        plain = twins.PlainFlow(flow).eval().requires_grad_(False)
        rows = sample_uniform(queries, config.text_dim), sample_uniform(items, config.image_dim)
        return cls(flow, plain, *rows, dataclasses.replace(PAPER, **settings))

    def paper(self, precision: str = "float32") -> Tensor:
        settings = dataclasses.replace(self.settings, precision=precision)
        return gf.RetrievalEntropy(self.flow, self.gallery, settings=settings)(self.queries).entropy

    def fast(self) -> Tensor:
        return gf.RetrievalEntropy.fast(self.flow, self.gallery)(self.queries).entropy

    def by(self, sampler: Callable[..., Tensor]) -> Tensor:
        """From the same noise, with another solver."""
        scorer = gf.RetrievalEntropy(self.flow, self.gallery, settings=self.settings)
        start = StartingPoints.draw(
            self.settings, self.flow.config.flow_dims, scorer.direction, torch.Generator().manual_seed(scorer.seed)
        )
        points = start.generated, start.condition
        samples = sampler(self.plain, self.queries, *points, self.settings.n_steps, self.settings.guidance)
        return twins.dense_entropy(samples, self.gallery, scorer.kappa)

    def truths(self) -> tuple[Tensor, Tensor]:
        """Of the paper's settings, and of the fast ones: a dense posterior in float64 from samples."""
        drawn = (
            gf.sample(self.flow, text=self.queries, settings=one, generator=torch.Generator().manual_seed(0))[0]
            for one in (self.settings, FAST_SAMPLING)
        )
        paper, fast = (twins.dense_entropy(x.double(), self.gallery.double(), 100.0) for x in drawn)
        return paper, fast


def spectral_rows(*shape: int) -> Tensor:
    """Unit rows [..., width] whose principal variances fall off as 1/k, as those of image and text encoders roughly
    do; the last of `shape` is the width."""
    scale = torch.arange(1, shape[-1] + 1).float().rsqrt()
    return gf.geometry.normalize(torch.randn(*shape) * scale)


def samples_around(centre: Tensor, draws: int, cosine: float) -> Tensor:
    """[Q, draws, d] at the given cosine to the centres [Q, d], in directions as common as those of the gallery."""
    centre = centre.unsqueeze(1)
    noise = spectral_rows(len(centre), draws, centre.shape[-1])
    noise = gf.geometry.normalize(noise - (noise * centre).sum(-1, keepdim=True) * centre)
    return gf.geometry.normalize(cosine * centre + math.sqrt(1 - cosine**2) * noise)


def head_points(centre: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Points [Q, K, d] of concentrations 20 to 60 around the centres [Q, d], and the biases [Q, K] of their weights."""
    concentration = 20 + 40 * torch.rand(len(centre), points, 1)
    log_weight = torch.randn(len(centre), points).log_softmax(dim=1)
    return samples_around(centre, points, 0.6) * concentration, log_weight + math.log(points)


def write_gallery(path: Path, items: int, width: int, dtype: type[np.floating] = np.float32) -> None:
    """Random rows into a `.npy` file, a block at a time; after a million they repeat."""
    out = np.lib.format.open_memmap(path, "w+", dtype, (items, width))
    for first in range(0, items, 50_000):
        part = out[first : first + 50_000]
        part[:] = spectral_rows(*part.shape).numpy() if first < 1_000_000 else out[first - 1_000_000 :][: len(part)]
    out.flush()


@dataclass(frozen=True)
class Queries:
    """Samples of queries, a gallery, and FAISS's index of it if there is FAISS."""

    samples: Tensor
    gallery: Tensor
    index: Any

    @classmethod
    def draw(cls, queries: int, draws: int, items: int, width: int) -> Queries:
        gallery = spectral_rows(items, width)
        index = peers.faiss_index(gallery) if FAISS.present else None
        return cls(samples_around(gallery[:queries], draws, 0.6), gallery, index)

    @functools.cached_property
    def codes(self) -> gf.ops.RowCodes:
        return gf.ops.RowCodes.encode(self.gallery)

    @property
    def first(self) -> Tensor:
        """One vector per query [Q, d]."""
        return self.samples[:, 0].contiguous()


FAISS = Contender("FAISS", lambda q: peers.faiss_search(q.index, q.first, 10), PEER, needs="faiss")


def same_search(result: Tensor, truth: Tensor) -> bool:
    """Whether the same items are found; a few ties may differ."""
    return float((result == truth).float().mean()) > 0.999


def finds_itself(result: Tensor, _: Any) -> bool:
    """Whether the nearest items [Q, k] of queries that are the first items begin with themselves."""
    return same_search(result[:, 0], torch.arange(len(result)))


def as_near(rows: Tensor, queries: Tensor, found: Tensor, truth: Tensor) -> bool:
    """Whether the found items [Q, k] are rank by rank as near as the true ones; equally near items may trade places."""
    cosines = ((rows[index].double() @ queries.double().unsqueeze(-1)).squeeze(-1) for index in (found, truth))
    return torch.allclose(*cosines, rtol=0, atol=1e-6)
