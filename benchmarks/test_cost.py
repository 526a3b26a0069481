"""What a user pays: seconds per 1,000 queries and pairs with two networks, and of passes over 1e4 to 1e7 items.

Sampling, re-ranking and likelihoods do not depend on the gallery and are timed once per network; search and scoring are
timed at every size that fits, from a memory-mapped float16 file, as `geoflow entropy` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.cases import FOR_COMPARISON, OURS, PEER, Case, Contender, each
from benchmarks.inputs import FAISS, PAPER, as_near, random_flow, scratch, write_gallery
from geoflow_fast.flow.sampling import FAST_SAMPLING as FAST
from geoflow_fast.noise import sample_uniform

GALLERIES = (10_000, 100_000, 1_000_000, 10_000_000)
SEARCHED, SCORED = 64, 16
"""Queries per pass over the gallery, of search and of scoring."""
KAPPA, TOP, PAIRS = 100.0, 10, 32
FAST_SAMPLES, PAPER_SAMPLES = "samples of `RetrievalEntropy.fast`", "samples, the paper's settings"
RERANKED = "re-ranking 32 items"
FAISS_PASS, SEARCH_PASS, SCORING_PASS = "search, FAISS exact, float32 in memory", "search, geoflow_fast", "scoring"
MOST_FAISS = 1_000_000
"""Items whose copy in float32 FAISS is asked to hold."""


@dataclass(frozen=True)
class Network:
    """A network with random weights, queries, pairs, and shortlists to re-rank."""

    flow: gf.GeoFlow
    queries: Tensor
    pairs: tuple[Tensor, Tensor]
    reranker: gf.BayesReranker

    @classmethod
    def draw(cls, config: gf.GeoFlowConfig, queries: int) -> Network:
        flow = random_flow(config)
        pairs = sample_uniform(PAIRS, config.image_dim), sample_uniform(PAIRS, config.text_dim)
        reranker = gf.BayesReranker(flow, sample_uniform(1000, config.image_dim))
        return cls(flow, sample_uniform(queries, config.text_dim), pairs, reranker)

    def sample(self, settings: gf.SamplingSettings) -> Tensor:
        return gf.sample(self.flow, text=self.queries, settings=settings)[0]

    def rerank(self) -> Tensor:
        count = self.reranker.flow_items
        shortlists = torch.arange(len(self.queries) * count).view(-1, count) % 1000
        return self.reranker.rerank(self.queries, shortlists).prob

    def score(self, settings: gf.DensitySettings) -> Tensor:
        return gf.epistemic(self.flow, *self.pairs, settings=settings).score


def finite(answer: Tensor, _: Any) -> bool:
    """The suites of each operation have the real gates."""
    return bool(answer.isfinite().all())


def without_gallery(name: str, config: gf.GeoFlowConfig, queries: int) -> Case:
    runs = {
        FAST_SAMPLES: (lambda n: n.sample(FAST), queries),
        PAPER_SAMPLES: (lambda n: n.sample(PAPER), queries),
        RERANKED: (Network.rerank, queries),
        "epistemic score of a pair, `FAST_DENSITY`": (lambda n: n.score(gf.FAST_DENSITY), PAIRS),
        "epistemic score of a pair, default": (lambda n: n.score(gf.DensitySettings()), PAIRS),
        "epistemic score of a pair, the paper's settings": (lambda n: n.score(gf.PAPER_DENSITY), PAIRS),
    }
    contenders = [Contender(title, run, FOR_COMPARISON, queries=count) for title, (run, count) in runs.items()]
    return Case(name, lambda: Network.draw(config, queries), lambda _: None, finite, contenders)


CASES = (
    without_gallery("Small network, d = 512", gf.GeoFlowConfig.small(512, 512), 8),
    without_gallery("The paper's network, d = 1024", gf.GeoFlowConfig.paper(1024, 1024), 2),
)


@each(CASES)
def test_cost(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@pytest.fixture(scope="module", params=[(512, 10_000_000), (1024, 1_000_000)], ids=str)
def mapped(request: pytest.FixtureRequest) -> Iterator[np.ndarray]:
    width, items = request.param
    torch.manual_seed(0)
    with scratch() as folder:
        write_gallery(folder / "gallery.npy", items, width, np.float16)
        yield np.load(folder / "gallery.npy", mmap_mode="c")


@pytest.mark.parametrize("items", GALLERIES)
@pytest.mark.parametrize("way", [FAISS_PASS, SEARCH_PASS])
def test_search_pass(benchmark: Any, mapped: np.ndarray, items: int, way: str) -> None:
    faiss = way == FAISS_PASS
    if items > len(mapped):
        pytest.skip(f"rows of this width are stored {len(mapped):,} times")
    if faiss and (not FAISS.present or items > MOST_FAISS):
        pytest.skip("faiss is not installed" if not FAISS.present else "the copy of FAISS takes too much memory")
    rows = torch.from_numpy(mapped[:items])
    torch.manual_seed(1)
    queries = sample_uniform(SEARCHED, rows.shape[1])
    if faiss:
        index = peers.faiss_index(rows.float())
        run = lambda: peers.faiss_search(index, queries, TOP)  # noqa: E731
    else:
        gallery = gf.Gallery(mapped[:items])
        run = lambda: gallery.search(queries, TOP)[1]  # noqa: E731
    truth = twins.chunked_search(queries, rows, TOP)
    assert as_near(rows, queries, run(), truth)
    benchmark.group = f"d = {rows.shape[1]}, N = {items:,}"
    benchmark.extra_info |= {"contender": way, "kind": PEER if faiss else OURS, "queries": SEARCHED}
    benchmark.pedantic(run, rounds=3)


@pytest.mark.parametrize("items", GALLERIES)
def test_scoring_pass(benchmark: Any, mapped: np.ndarray, items: int) -> None:
    if items > len(mapped):
        pytest.skip(f"rows of this width are stored {len(mapped):,} times")
    torch.manual_seed(1)
    gallery, width = gf.Gallery(mapped[:items]), mapped.shape[1]
    samples = sample_uniform(SCORED * FAST.n_samples, width).view(SCORED, FAST.n_samples, width)
    scored = gallery.statistics(samples, KAPPA, TOP)
    truth = twins.chunked_entropy(samples[:1], torch.from_numpy(mapped[:items]), KAPPA)
    assert torch.allclose(scored.posterior().entropy[:1].double(), truth.double(), rtol=0, atol=1e-3)
    benchmark.group = f"d = {width}, N = {items:,}"
    benchmark.extra_info |= {"contender": SCORING_PASS, "kind": OURS, "queries": SCORED}
    rounds = 1 if items == GALLERIES[-1] else 3
    benchmark.pedantic(gallery.statistics, (samples, KAPPA, TOP), rounds=rounds)
