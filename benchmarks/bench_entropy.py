"""Retrieval entropy end to end, sampling included, 1024 wide with the paper's network.

Peers solve the ODE of the plain torch network with two passes for guidance and modulations per row: Euler steps along
great circles in torch, flow_matching's solver on the sphere, torchdiffeq in the space around it; then a dense
posterior. Gates: the same entropies from the paper's settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.flows import random_flow, row_flops
from benchmarks.limits import Work
from benchmarks.suite import PAPER_NAME, PEER, Case, Contender, Scaling, in_bfloat16, renamed, with_mkl_alone
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings, StartingPoints
from geoflow_fast.noise import sample_uniform

PAPER = SamplingSettings()


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


def within(nats: float, index: int = 0) -> Callable[[Tensor, Any], bool]:
    return lambda result, truth: torch.allclose(result.double(), truth[index], rtol=0, atol=nats)


OURS = Contender(f"geoflow_fast, {PAPER_NAME}", Scene.paper)
CONTENDERS = (
    Contender("torch", lambda s: s.by(twins.plain_samples), PEER),
    # Steps of the other two are not along great circles.
    Contender(
        "flow_matching", lambda s: s.by(peers.flow_matching_samples), PEER, needs="flow_matching", agrees=within(0.1)
    ),
    Contender("torchdiffeq", lambda s: s.by(peers.torchdiffeq_samples), PEER, needs="torchdiffeq", agrees=within(0.1)),
    OURS,
    *with_mkl_alone(OURS),
    *in_bfloat16(
        Contender(f"geoflow_fast, {PAPER_NAME}, bfloat16", lambda s: s.paper("bfloat16"), agrees=within(0.05))
    ),
    Contender("geoflow_fast, `RetrievalEntropy.fast`", Scene.fast, agrees=within(2e-3, index=1)),
)


def cases(quick: bool) -> list[Case]:
    config, queries, items, settings = gf.GeoFlowConfig.paper(), 2, 10_000, PAPER
    if quick:
        config, queries, items = gf.GeoFlowConfig.small(256, 256), 2, 1000
        settings = dataclasses.replace(PAPER, n_samples=20, n_steps=10)
    draws, steps = settings.n_samples, settings.n_steps
    rows = queries * draws
    flops = 2 * steps * rows * row_flops(config, "t2i") + 2 * rows * items * config.image_dim
    return [
        Case(
            f"Retrieval entropy, {queries} queries, {draws} samples x {steps} steps, N = {items:,}, "
            f"d = {config.image_dim}",
            lambda: Scene.draw(config, queries, items, n_samples=draws, n_steps=steps),
            Scene.truths,
            within(2e-3),
            renamed(CONTENDERS, PAPER_NAME, f"{draws} samples x {steps} steps") if quick else CONTENDERS,
            Work(flops=flops, bytes=4 * items * config.image_dim),
            rounds=1 if not quick else 3,
        )
    ]


def scalings(quick: bool) -> list[Scaling]:
    config, top = (gf.GeoFlowConfig.small(256, 256), 8) if quick else (gf.GeoFlowConfig.small(), 40)

    def over(name: str) -> Callable[[int], Callable[[], Any]]:
        def make(size: int) -> Callable[[], Any]:
            return Scene.draw(config, 2, 1000, **{"n_samples": 20, "n_steps": 10, name: size}).paper

        return make

    sizes = (top // 4, top // 2, top, 2 * top)
    return [
        Scaling("Retrieval entropy", "steps", sizes, over("n_steps")),
        Scaling("Retrieval entropy", "M", sizes, over("n_samples")),
    ]
