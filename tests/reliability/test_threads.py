"""Threads that share one flow: everybody gets the numbers of a single thread, and the flow keeps its mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import geometry

THREADS, ROUNDS, DIM = 8, 4, 12


def unit(rows: int, seed: int) -> Tensor:
    return geometry.normalize(torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def training_flow() -> gf.GeoFlow:
    """A flow in training mode, one block of which is in eval mode, with so much dropout that a single mask shows."""
    torch.manual_seed(1)
    flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=32, depth=2, layer_scale=0.5, dropout=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    flow.train()
    flow.blocks[1].eval()
    return flow


def tensors_of(post: gf.RetrievalPosterior) -> tuple[Tensor, ...]:
    return tuple(x for x in vars(post).values() if isinstance(x, Tensor))


def scored(flow: gf.GeoFlow) -> Callable[[], tuple[Tensor, ...]]:
    scorer = gf.RetrievalEntropy.fast(flow, unit(200, 0), kappa=20.0)
    return lambda: tensors_of(scorer(unit(6, 1)))


def scored_by_bayes(flow: gf.GeoFlow) -> Callable[[], tuple[Tensor, ...]]:
    """The marginals are computed by whichever thread comes first."""
    scorer = gf.RetrievalEntropy.fast(flow, unit(200, 0), kappa=20.0, posterior="bayes", reference=unit(9, 2))
    return lambda: tensors_of(scorer(unit(6, 1)))


def reranked(flow: gf.GeoFlow) -> Callable[[], tuple[Tensor, ...]]:
    reranker = gf.BayesReranker(flow, unit(100, 0), shortlist=8, n_steps=3)
    image = unit(120, 3)
    reranker.calibrate(gf.EmbeddingPairs.from_arrays(image, geometry.normalize(image + 0.1 * unit(120, 4))))

    def call() -> tuple[Tensor, ...]:
        result = reranker(unit(6, 1))
        return result.index, result.prob, result.p_answer, result.p_outside, result.entropy

    return call


def densities(flow: gf.GeoFlow) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        generators = (torch.Generator().manual_seed(5) for _ in range(2))
        image, text = unit(6, 1), unit(6, 2)
        return tuple(
            gf.log_density(flow, image, text, direction, 4, generator=generator)
            for direction, generator in zip(("joint", "t2i"), generators)
        )

    return call


@pytest.mark.parametrize("make", [scored, scored_by_bayes, reranked, densities], ids=lambda make: make.__name__)
def test_threads_get_the_numbers_of_one_thread(training_flow, make):
    torch.set_num_threads(1)  # these threads are the only ones
    modes = [module.training for module in training_flow.modules()]
    expected = make(training_flow)()
    call, start = make(training_flow), threading.Barrier(THREADS)

    def work(_: int) -> list[tuple[Tensor, ...]]:
        start.wait()
        return [call() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = [result for results in pool.map(work, range(THREADS)) for result in results]
    assert [module.training for module in training_flow.modules()] == modes
    for result in results:
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))
