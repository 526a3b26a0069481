"""Exact search against FAISS and torch, and one request at a time as a service has them.

Search: the ten best of 1e5 and 1e6 items for 1, 16 and 64 queries, in float32, with bounds from bytes (the same
result), and from a mapped float16 file. FAISS runs with its own loops and with matrix products. Requests: the median
and 99th percentile of single calls.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.cases import PEER, Case, Contender, each
from benchmarks.inputs import (
    FAISS,
    Queries,
    as_near,
    head_points,
    random_flow,
    same_search,
    scratch,
    spectral_rows,
    write_gallery,
)
from benchmarks.limits import Work
from geoflow_fast.ops import extension

TOP = 10
REQUESTS = 200
LOOPS, PRODUCTS = 10**9, 1
"""Values of FAISS's threshold from which many queries on it uses matrix products."""


def search_work(queries: int, items: int, width: int) -> Work:
    return Work(flops=2 * queries * items * width, bytes=4 * items * width)


SEARCH = (
    FAISS,
    Contender("torch, chunked top-k", lambda q: twins.chunked_search(q.first, q.gallery, TOP), PEER),
    Contender("geoflow_fast", lambda q: gf.ops.gallery_search(q.first, q.gallery, TOP)[1]),
)
BYTES = Contender("geoflow_fast, bytes", lambda q: gf.ops.gallery_search(q.first, q.gallery, TOP, codes=q.codes)[1])


def case(items: int, width: int, contenders: Sequence[Contender], *, quick: bool = False) -> Case:
    return Case(
        f"Exact search, 64 queries, N = {items:,}, d = {width}",
        lambda: Queries.draw(64, 1, items, width),
        lambda q: (q.first.double() @ q.gallery.double().T).topk(TOP).indices,
        same_search,
        contenders,
        search_work(64, items, width),
        quick,
    )


HAS_BYTES = extension.missing_int8() is None
CASES = (
    case(10_000, 512, SEARCH, quick=True),
    case(100_000, 1024, (*SEARCH, BYTES) if HAS_BYTES else SEARCH),
)


@each(CASES)
def test_gallery_search(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@dataclass(frozen=True)
class Stored:
    """Items in a file, mapped as float16 and in memory as float32, with their byte codes and FAISS's index."""

    mapped: gf.Gallery
    rows: Tensor
    codes: Any
    index: Any


@pytest.fixture(scope="module", params=[(w, n) for w in (512, 1024) for n in (100_000, 1_000_000)], ids=str)
def stored(request: pytest.FixtureRequest) -> Iterator[Stored]:
    width, items = request.param
    torch.manual_seed(0)
    with scratch() as folder:
        write_gallery(folder / "gallery.npy", items, width, np.float16)
        rows = torch.from_numpy(np.load(folder / "gallery.npy").astype(np.float32))
        codes = gf.ops.RowCodes.encode(rows) if HAS_BYTES else None
        index = peers.faiss_index(rows) if FAISS.present else None
        yield Stored(gf.Gallery(folder / "gallery.npy"), rows, codes, index)


def faiss_by(threshold: int) -> Callable[[Stored, Tensor], Tensor]:
    def search(s: Stored, queries: Tensor) -> Tensor:
        importlib.import_module("faiss").cvar.distance_compute_blas_threshold = threshold
        return peers.faiss_search(s.index, queries, TOP)

    return search


WAYS: dict[str, Callable[[Stored, Tensor], Tensor]] = {
    "FAISS, loops": faiss_by(LOOPS),
    "FAISS, products": faiss_by(PRODUCTS),
    "float32": lambda s, queries: gf.ops.gallery_search(queries, s.rows, TOP)[1],
    "bytes": lambda s, queries: gf.ops.gallery_search(queries, s.rows, TOP, codes=s.codes)[1],
    "mapped float16": lambda s, queries: s.mapped.search(queries, TOP)[1],
}
FEW = 16
"""Queries up to which FAISS's loops are timed: for 64 they take several times as long as its products."""


@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("way", WAYS)
def test_faiss(benchmark: Any, stored: Stored, count: int, way: str) -> None:
    peer = way.startswith("FAISS")
    if peer and stored.index is None:
        pytest.skip("faiss is not installed")
    if way == "FAISS, loops" and count > FEW:
        pytest.skip("the loops of FAISS are for few queries")
    if way == "bytes" and stored.codes is None:
        pytest.skip(f"no products of bytes: {extension.missing_int8()}")
    items, width = stored.rows.shape
    torch.manual_seed(count)
    queries = gf.geometry.normalize(stored.rows[:count] + 0.7 * spectral_rows(count, width))
    truth = twins.chunked_search(queries, stored.rows, TOP)
    found = WAYS[way](stored, queries)
    assert as_near(stored.rows, queries, found, truth)
    if way == "bytes":
        assert torch.equal(found, WAYS["float32"](stored, queries))
    benchmark.group = f"{count} x {items:,} x {width}"
    benchmark.extra_info |= {"contender": way, "kind": PEER if peer else "ours"}
    benchmark.pedantic(WAYS[way], args=(stored, queries), rounds=5)


class Requests:
    """Galleries, queries that come one after the other, and models that answer them; d = 1024."""

    def __init__(self, items: int = 100_000, width: int = 1024) -> None:
        rows = spectral_rows(items, width)
        self.queries = gf.geometry.normalize(rows[:REQUESTS] + 0.7 * spectral_rows(REQUESTS, width))
        self.plain = gf.Gallery(rows)
        self.coded = gf.Gallery(rows, codes=True)
        self.points, self.bias = head_points(self.queries, 8)
        self.exact = gf.ops.gallery_search(self.queries, rows, TOP)[1]
        self.flow = random_flow(gf.GeoFlowConfig(image_dim=width, text_dim=width, hidden=256, depth=4))
        self.reranker = gf.BayesReranker(self.flow, self.plain)
        listed = self.exact[:, :1] + torch.arange(self.reranker.flow_items)
        self.shortlists = listed % items
        self.turn = itertools.cycle(range(REQUESTS))

    def search(self, gallery: gf.Gallery) -> bool:
        """Whether the next query finds what it should."""
        k = next(self.turn)
        return torch.equal(gallery.search(self.queries[k : k + 1], TOP)[1], self.exact[k : k + 1])

    def search_and_posterior(self, gallery: gf.Gallery) -> bool:
        k = next(self.turn)
        one = slice(k, k + 1)
        found = gallery.search(self.queries[one], TOP)[1]
        gallery.statistics(self.points[one], 1.0, TOP, sample_bias=self.bias[one], precision="auto")
        return torch.equal(found, self.exact[one])

    def rerank(self) -> bool:
        k = next(self.turn)
        post = self.reranker.rerank(self.queries[k : k + 1], self.shortlists[k : k + 1])
        return bool(post.entropy.isfinite().all())

    def density(self) -> bool:
        k = next(self.turn)
        one = self.queries[k : k + 1]
        return bool(gf.log_density(self.flow, one, one).isfinite().all())


REQUEST = (
    Contender("search", lambda r: r.search(r.plain)),
    Contender("search by codes", lambda r: r.search(r.coded)),
    Contender("search and head posterior, K = 8", lambda r: r.search_and_posterior(r.plain)),
    Contender("search by codes and head posterior, K = 8", lambda r: r.search_and_posterior(r.coded)),
    Contender("re-ranking 32 items, a small network", Requests.rerank),
    Contender("one density, a small network", Requests.density),
)


@each([Case("One request", Requests, lambda _: None, lambda right, _: right, REQUEST[:4], rounds=REQUESTS)])
def test_request(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each([Case("One request of a flow", Requests, lambda _: None, lambda right, _: right, REQUEST[4:], rounds=40)])
def test_flow_request(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)
