"""BayesReranker: its cost at the paper's network.

Peer: the same log-densities of the same shortlists by autograd of the plain torch network, probes shared alike. The two
retrieval entropies stand beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.cases import (
    FOR_COMPARISON,
    PAPER_NAME,
    PEER,
    Case,
    Contender,
    each,
    in_bfloat16,
    renamed,
    with_mkl_alone,
)
from benchmarks.inputs import Scene, row_flops
from benchmarks.limits import Work
from geoflow_fast.directions import DIRECTIONS
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
            code = DIRECTIONS.index(direction)
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
    """Finite and not negative; `test_entropy` has the real gate."""
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


def case(
    config: gf.GeoFlowConfig, items: int, contenders: Sequence[Contender], *, quick: bool = False, **settings: int
) -> Case:
    queries = 2
    solve = gf.BayesReranker(gf.GeoFlow(gf.GeoFlowConfig.tiny()), torch.eye(24)).density
    evaluations = 2 * solve.n_steps  # midpoint
    flops = 2 * evaluations * 32 * queries * row_flops(config, "i2t")
    return Case(
        f"Re-ranking, {queries} queries, shortlists of 32, N = {items:,}, d = {config.image_dim}",
        lambda: Scene.draw(config, queries, items, **settings),
        reranked_by_autograd,
        within(2e-2),
        contenders,
        Work(flops=flops, bytes=4 * items * config.image_dim),
        quick,
    )


SMALL = renamed(CONTENDERS, PAPER_NAME, "20 samples x 10 steps")
CASES = (
    case(gf.GeoFlowConfig.small(256, 256), 1000, SMALL, quick=True, n_samples=20, n_steps=10),
    case(gf.GeoFlowConfig.paper(), 10_000, CONTENDERS),
)


@each(CASES)
def test_rerank(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)
