"""BayesReranker: its cost at the paper's network, and how good it is on the concept world, whose posterior is known.

Peer: the same log-densities of the same shortlists by autograd of the plain torch network, probes shared alike. The two
retrieval entropies stand beside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.bench_entropy import Scene
from benchmarks.flows import row_flops
from benchmarks.limits import Work
from benchmarks.suite import FOR_COMPARISON, PAPER_NAME, PEER, Case, Contender, in_bfloat16, renamed, with_mkl_alone
from geoflow_fast.likelihood.reverse_ode import density_estimates


def reranked(scene: Scene, precision: str = "float32") -> Tensor:
    """Entropies [Q] of the posterior over each shortlist."""
    reranker = gf.BayesReranker(scene.flow, scene.gallery)
    reranker.precision = precision
    return reranker.rerank(scene.queries).entropy


def reranked_by_autograd(scene: Scene) -> Tensor:
    """The same with a flow of which nothing is known but the velocity of its plain twin."""

    class Field:
        @staticmethod
        def velocity(image: Tensor, text: Tensor, t: float | Tensor, direction: str) -> tuple[Tensor, ...]:
            code = gf.geometry.DIRECTIONS.index(direction)
            times = torch.as_tensor(t, dtype=image.dtype).expand(len(image))
            return tuple(scene.plain(image, text, times, torch.full((len(image),), code, dtype=torch.int8)))

    reranker = gf.BayesReranker(scene.flow, scene.gallery)
    shortlist = (scene.queries @ scene.gallery.T).topk(reranker.flow_items).indices
    items = scene.gallery[shortlist].flatten(0, 1)
    queries = scene.queries.repeat_interleave(reranker.flow_items, 0)
    estimates = density_estimates(Field(), items, queries, (gf.Direction.I2T,), reranker.density, reranker.seed)[0, 0]
    return torch.special.entr(estimates.view(len(scene.queries), -1).softmax(1)).sum(1)


def within(nats: float) -> Callable[[Tensor, Tensor], bool]:
    """Whether entropies agree within some nats."""
    return lambda result, truth: torch.allclose(result.double(), truth.double(), rtol=0, atol=nats)


def is_entropy(result: Tensor, _: Tensor) -> bool:
    """Finite and not negative; `bench_entropy` has the real gate."""
    return bool((result.isfinite() & (result >= 0)).all())


OURS = Contender("geoflow_fast", reranked)
CONTENDERS = (
    Contender("torch, autograd", reranked_by_autograd, PEER),
    OURS,
    *with_mkl_alone(OURS),
    *in_bfloat16(Contender("geoflow_fast, bfloat16", lambda s: reranked(s, "bfloat16"), agrees=within(0.1))),
    Contender(f"`RetrievalEntropy`, {PAPER_NAME}", Scene.paper, FOR_COMPARISON, agrees=is_entropy),
    Contender("`RetrievalEntropy.fast`", Scene.fast, FOR_COMPARISON, agrees=is_entropy),
)


def cases(quick: bool) -> list[Case]:
    config, queries, items = (
        (gf.GeoFlowConfig.small(256, 256), 2, 1000) if quick else (gf.GeoFlowConfig.paper(), 2, 10_000)
    )
    settings = {"n_samples": 20, "n_steps": 10} if quick else {}
    solve = gf.BayesReranker(gf.GeoFlow(gf.GeoFlowConfig.tiny()), torch.eye(24)).density
    evaluations = 2 * solve.n_steps  # midpoint
    flops = 2 * evaluations * 32 * queries * row_flops(config, "i2t")
    return [
        Case(
            f"Re-ranking, {queries} queries, shortlists of 32, N = {items:,}, d = {config.image_dim}",
            lambda: Scene.draw(config, queries, items, **settings),
            reranked_by_autograd,
            within(2e-2),
            renamed(CONTENDERS, PAPER_NAME, "20 samples x 10 steps") if quick else CONTENDERS,
            Work(flops=flops, bytes=4 * items * config.image_dim),
            rounds=2,
        )
    ]
