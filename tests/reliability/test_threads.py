"""Threads that share one model: everybody gets the numbers of a single thread, and a flow keeps its mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import geometry, stores
from geoflow_fast.explore import sources
from geoflow_fast.explore.page import render
from geoflow_fast.runtime import parquet
from tests.decisions.helpers import search
from tests.samples import shaken, unit
from tests.stores.test_protocol import Fake

THREADS, ROUNDS, DIM = 8, 4, 12


@pytest.fixture(autouse=True)
def single() -> None:
    """The threads of a test are the only ones, also while it computes what they are to agree with."""
    torch.set_num_threads(1)


@pytest.fixture
def training_flow() -> gf.GeoFlow:
    """A flow in training mode, one block of which is in eval mode, with so much dropout that a single mask shows."""
    torch.manual_seed(1)
    flow = shaken(gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=32, depth=2, layer_scale=0.5, dropout=0.5))).train()
    flow.blocks[1].eval()
    return flow


def tensors_of(post: gf.RetrievalPosterior) -> tuple[Tensor, ...]:
    return tuple(x for x in vars(post).values() if isinstance(x, Tensor))


def scored(flow: gf.GeoFlow) -> Callable[[], tuple[Tensor, ...]]:
    scorer = gf.RetrievalEntropy.fast(flow, unit(200, DIM, seed=0), kappa=20.0)
    return lambda: tensors_of(scorer(unit(6, DIM, seed=1)))


def reranked(flow: gf.GeoFlow) -> Callable[[], tuple[Tensor, ...]]:
    reranker = gf.BayesReranker(flow, unit(100, DIM, seed=0), shortlist=8, n_steps=3)
    image = unit(120, DIM, seed=3)
    reranker.calibrate(gf.EmbeddingPairs.from_arrays(image, geometry.normalize(image + 0.1 * unit(120, DIM, seed=4))))

    def call() -> tuple[Tensor, ...]:
        result = reranker(unit(6, DIM, seed=1))
        return result.index, result.prob, result.p_answer, result.p_outside, result.entropy

    return call


def densities(flow: gf.GeoFlow) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        generators = (torch.Generator().manual_seed(5) for _ in range(2))
        image, text = unit(6, DIM, seed=1), unit(6, DIM, seed=2)
        return tuple(
            gf.log_density(flow, image, text, direction, 4, generator=generator)
            for direction, generator in zip(("joint", "t2i"), generators)
        )

    return call


@pytest.mark.parametrize("make", [scored, reranked, densities], ids=lambda make: make.__name__)
def test_threads_get_the_numbers_of_one_thread(training_flow, make):
    modes = [module.training for module in training_flow.modules()]
    expected = make(training_flow)()
    assert_same_in_threads(make(training_flow), expected)
    assert [module.training for module in training_flow.modules()] == modes


def assert_same_in_threads(call: Callable[[], tuple[Tensor, ...]], expected: tuple[Tensor, ...]) -> None:
    """Calls it in eight threads that start together, several times each."""
    start = threading.Barrier(THREADS)

    def work(_: int) -> list[tuple[Tensor, ...]]:
        start.wait()
        return [call() for _ in range(ROUNDS)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = [result for results in pool.map(work, range(THREADS)) for result in results]
    for result in results:
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def pairs_of(rows: int, seed: int) -> gf.EmbeddingPairs:
    image = unit(rows, DIM, seed=seed)
    return gf.EmbeddingPairs.from_arrays(image, geometry.normalize(image + 0.4 * unit(rows, DIM, seed=seed + 1)))


def new_head() -> gf.PosteriorHead:
    torch.manual_seed(2)
    head = gf.PosteriorHead(gf.HeadConfig(points=3, hidden=16, bank=16), DIM, DIM).train()
    head.bank_image.copy_(unit(16, DIM, seed=5))
    head.bank_text.copy_(unit(16, DIM, seed=6))
    return head


def entropy_of_a_head() -> Callable[[], tuple[Tensor, ...]]:
    """The items' numbers are computed by whichever thread comes first."""
    scorer = gf.RetrievalEntropy(new_head(), unit(200, DIM, seed=0))
    return lambda: tensors_of(scorer(unit(6, DIM, seed=1)))


def ladder_of_a_head() -> Callable[[], tuple[Tensor, ...]]:
    reranker = gf.BayesReranker(None, unit(150, DIM, seed=0), shortlist=20, head=new_head())
    reranker.calibrate(pairs_of(120, 3), progress=False)
    twin = reranker.with_gallery(unit(150, DIM, seed=0))  # which remembers nothing yet
    return lambda: tensors_of(twin(unit(6, DIM, seed=1), no_match_share=0.2))


def store_of_a_ladder() -> Callable[[], tuple[Tensor, ...]]:
    rows = unit(150, DIM, seed=0).numpy()
    store = stores.CustomStore(Fake(rows=rows).search, Fake(rows=rows).fetch, DIM)
    reranker = stores.StoreReranker(store, shortlist=(20, 20))
    reranker.calibrate(pairs_of(120, 3), progress=False)

    def call() -> tuple[Tensor, ...]:
        hits = reranker(unit(6, DIM, seed=1).numpy())
        return tuple(torch.from_numpy(getattr(hits, name)) for name in ("prob", "p_answer", "p_no_match", "entropy"))

    return call


def trust_and_rule() -> Callable[[], tuple[Tensor, ...]]:
    fitted, tested, new = (search(200, 10, seed=seed) for seed in range(3))
    trust = gf.Trust().fit(fitted.scores, fitted.relevant)
    rule = trust.certify(tested.scores, tested.relevant, max_error=0.3)

    def call() -> tuple[Tensor, ...]:
        health = gf.watch(rule, new.scores)
        answers = (trust.predict_proba(new.scores), trust.relevance(new.scores), rule(new.scores), health.p_right)
        return tuple(torch.from_numpy(np.ascontiguousarray(answer)) for answer in answers)

    return call


@pytest.mark.parametrize(
    "make", [entropy_of_a_head, ladder_of_a_head, store_of_a_ladder, trust_and_rule], ids=lambda make: make.__name__
)
def test_heads_ladders_stores_and_rules_in_threads(make):
    assert_same_in_threads(make(), make()())


def test_pages_in_threads(tmp_path):
    """Each thread reads the files, makes thumbnails and puts the page together."""
    image = pytest.importorskip("PIL.Image")
    fitted, tested, new = (search(60, 10, items=40, seed=seed) for seed in range(3))
    gf.Trust().fit(fitted.scores, fitted.first).certify(tested.scores, tested.first, 0.5).save(tmp_path / "rule.json")
    hits = np.random.default_rng(0).integers(40, size=(60, 10))
    parquet.write_columns(tmp_path / "log.parquet", {"index": hits, "scores": new.scores}, 60)
    for item in range(8):
        image.new("RGB", (60, 40), (30 * item, 0, 99)).save(tmp_path / f"{item}.png")

    def page() -> tuple[Tensor, ...]:
        run, nothing = sources.RunFiles.open(tmp_path), sources.Described()
        html = render(sources.explored(run, nothing, nothing, images=tmp_path, labels=new.relevant))
        return (torch.frombuffer(bytearray(html.encode()), dtype=torch.uint8),)

    (expected,) = page()
    assert bytes(expected.tolist()).count(b"data:image/jpeg") >= 8
    assert_same_in_threads(page, (expected,))
