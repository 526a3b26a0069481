"""Gallery posterior against torch: for several queries, for one, for heads, and streamed from a mapped file.

Work: 2 d flops and one exponential per (item, sample). Peers in plain torch: all scores at once, and two chunked forms
(2048 items at a time; a logsumexp, and the exponential in place). FAISS's exact search stands beside: what retrieval
costs before anyone asks how sure it is. Products are in float32, for heads in bfloat16 too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.cases import (
    FOR_COMPARISON,
    PEER,
    STATUS,
    Case,
    Contender,
    Scaling,
    each,
    each_size,
    growth,
    in_bfloat16,
    status_bytes,
)
from benchmarks.inputs import (
    FAISS,
    Queries,
    finds_itself,
    head_points,
    same_search,
    samples_around,
    scratch,
    spectral_rows,
    write_gallery,
)
from benchmarks.limits import Work
from geoflow_fast.ops.gallery_posterior import ROUNDING_LIMIT

WIDTH, KAPPA, ITEMS, DRAWS = 1024, 100.0, 100_000, 50
MAPPED_ITEMS, MOST_MEMORY = 1_000_000, 300e6
ROUNDING = 2e-4
"""Nats that float32 may cost at this kappa."""


def posterior(samples: Tensor, gallery: Tensor, **options: Any) -> gf.ops.GalleryPosterior:
    return gf.ops.gallery_posterior(samples, gallery, KAPPA, backend="cpu", **options)


def exact_entropy(q: Queries) -> Tensor:
    """In float64, a query at a time."""
    items = q.gallery.double()
    return torch.cat([twins.chunked_entropy(one.double(), items, KAPPA) for one in q.samples.split(1)])


def same_entropy(result: Tensor, truth: Tensor) -> bool:
    return torch.allclose(result.double(), truth, rtol=0, atol=ROUNDING)


POSTERIOR = (
    Contender("torch, all at once", lambda q: twins.dense_entropy(q.samples, q.gallery, KAPPA), PEER),
    Contender("torch, chunked", lambda q: twins.chunked_entropy(q.samples, q.gallery, KAPPA), PEER),
    Contender("torch, chunked, in place", lambda q: twins.chunked_entropy_in_place(q.samples, q.gallery, KAPPA), PEER),
    Contender("geoflow_fast", lambda q: posterior(q.samples, q.gallery).entropy),
    Contender(
        'geoflow_fast, `precision="auto"`',
        lambda q: posterior(q.samples, q.gallery, precision="auto").entropy,
        agrees=lambda result, truth: float((result.double() - truth).abs().max()) < ROUNDING_LIMIT,
    ),
    Contender(
        "FAISS exact search of the queries",
        FAISS.run,
        FOR_COMPARISON,
        needs="faiss",
        agrees=lambda result, _: bool((result >= 0).all()),
    ),
)


def posterior_work(rows: int, items: int, width: int) -> Work:
    return Work(flops=2 * rows * items * width, bytes=4 * items * width, exps=rows * items)


def case(queries: int, width: int = WIDTH, items: int = ITEMS, *, quick: bool = False) -> Case:
    return Case(
        f"Gallery posterior, {queries} x {DRAWS} samples, N = {items:,}, d = {width}",
        lambda: Queries.draw(queries, DRAWS, items, width),
        exact_entropy,
        same_entropy,
        POSTERIOR,
        posterior_work(queries * DRAWS, items, width),
        quick,
    )


def one_query(draws: int, items: int = 40_000) -> Case:
    """A single query beside the matrix product of its samples and the items alone."""
    product = Contender(
        "torch.mm alone", lambda q: torch.mm(q.gallery, q.samples[0].T), FOR_COMPARISON, agrees=lambda *_: True
    )
    return Case(
        f"1 x {draws} samples, N = {items:,}, d = {WIDTH}",
        lambda: Queries.draw(1, draws, items, WIDTH),
        exact_entropy,
        same_entropy,
        (product, Contender("geoflow_fast", lambda q: posterior(q.samples, q.gallery).entropy)),
        posterior_work(draws, items, WIDTH),
    )


@dataclass(frozen=True)
class Heads:
    """A gallery, queries, and the mixtures of K points that a head gives for each."""

    queries: Tensor
    gallery: Tensor
    items: gf.Gallery
    points: dict[int, tuple[Tensor, Tensor]]
    index: Any

    @classmethod
    def draw(cls, queries: int = 64) -> Heads:
        gallery = spectral_rows(ITEMS, WIDTH)
        first = gallery[:queries].contiguous()
        points = {count: head_points(first, count) for count in (4, 8)}
        return cls(first, gallery, gf.Gallery(gallery), points, peers.faiss_index(gallery) if FAISS.present else None)

    def statistics(self, count: int, **options: Any) -> Any:
        samples, bias = self.points[count]
        return self.items.statistics(samples, 1.0, 32, sample_bias=bias, **options)

    def truth(self, gated: int = 4) -> dict[int, Any]:
        """By number of points: the statistics of the first queries in float64."""
        items = self.gallery.double()
        return {
            count: gf.ops.gallery_statistics(s[:gated].double(), items, 1.0, 32, sample_bias=b[:gated].double())
            for count, (s, b) in self.points.items()
        }


def right_head(count: int, *, rounded: bool = False) -> Callable[[Any, Any], bool]:
    """The statistics of the first queries are those in float64; after products in bfloat16, their entropy and list."""

    def agrees(scored: Any, truths: Any) -> bool:
        truth = truths[count]
        scored = scored.select(torch.arange(len(truth.log_z)))
        entropy, exact = (one.posterior(torch.float64).entropy for one in (scored, truth))
        if rounded:
            near = float((entropy - exact).abs().max()) < ROUNDING_LIMIT
            return near and same_search(scored.top_index, truth.top_index)
        close = torch.allclose(scored.top_score.double(), truth.top_score, rtol=0, atol=ROUNDING)
        return close and same_entropy(entropy, exact) and same_entropy(scored.log_z, truth.log_z)

    return agrees


def heads() -> Case:
    """Posteriors of mixtures of K weighted points per query, beside a plain search with the queries."""
    ours = [Contender(f"K = {k}", lambda h, k=k: h.statistics(k), agrees=right_head(k)) for k in (4, 8)]
    half = in_bfloat16(
        *(
            Contender(
                f"K = {k}, bfloat16",
                lambda h, k=k: h.statistics(k, precision="bfloat16"),
                agrees=right_head(k, rounded=True),
            )
            for k in (4, 8)
        )
    )
    search = Contender("search", lambda h: h.items.search(h.queries, 32)[1], FOR_COMPARISON, agrees=finds_itself)
    faiss = Contender(
        "FAISS", lambda h: peers.faiss_search(h.index, h.queries, 32), FOR_COMPARISON, "faiss", finds_itself
    )
    name = f"Head posterior, 64 queries, N = {ITEMS:,}, d = {WIDTH}"
    return Case(name, Heads.draw, Heads.truth, lambda *_: False, (search, faiss, *ours, *half))


@pytest.fixture(scope="module")
def mapped() -> Iterator[np.ndarray]:
    """A million items in a mapped file."""
    torch.manual_seed(0)
    with scratch() as folder:
        write_gallery(folder / "gallery.npy", MAPPED_ITEMS, WIDTH)
        yield np.load(folder / "gallery.npy", mmap_mode="c")


@contextmanager
def peak_anonymous_memory(peaks: list[int]) -> Iterator[None]:
    """Appends the largest growth of memory that is not file pages inside the block, looked at every 5 ms."""
    before, stop, seen = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.005):
            seen.append(anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        peaks.append(max(seen))


def anonymous_bytes() -> int:
    return status_bytes("RssAnon") if STATUS.exists() else 0


CASES = (case(8, 512, 10_000, quick=True), case(8), case(1))


def over(name: str) -> Callable[[int], Callable[[], Any]]:
    def make(size: int) -> Callable[[], Any]:
        given = {"items": 20_000, "queries": 8, "draws": 32, "width": 512, name: size}
        gallery = spectral_rows(given["items"], given["width"])
        samples = samples_around(gallery[: given["queries"]], given["draws"], 0.6)
        return lambda: posterior(samples, gallery)

    return make


def over_threads(count: int) -> Callable[[], Any]:
    run = over("queries")(8)

    def call() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        run()
        torch.set_num_threads(before)

    return call


THREADS = sorted({1, torch.get_num_threads()})
SCALINGS = (
    Scaling("Gallery posterior", "N", (5000, 10_000, 20_000, 40_000, 80_000), over("items")),
    Scaling("Gallery posterior", "Q", (4, 8, 16, 32), over("queries")),
    Scaling("Gallery posterior", "M", (16, 32, 64, 128), over("draws")),
    Scaling("Gallery posterior", "d", (256, 512, 1024, 2048), over("width")),
    *([Scaling("Gallery posterior", "threads", THREADS, over_threads, expected=-1.0)] if len(THREADS) > 1 else []),
)


@each(CASES)
def test_gallery_posterior(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each([one_query(draws) for draws in (16, 20, 40, 50)])
def test_one_query(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each([heads()])
def test_head_posterior(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each_size(SCALINGS)
def test_growth(grow: Any, scaling: Scaling, size: int) -> None:
    grow(scaling, size)


@pytest.mark.parametrize("items", [10_000, 30_000, 100_000, 300_000, MAPPED_ITEMS])
def test_streamed(benchmark: Any, mapped: np.ndarray, items: int) -> None:
    """Two queries over the items of a mapped file, opening included: the time, and memory that is not file pages."""
    torch.manual_seed(0)
    samples = samples_around(spectral_rows(2, WIDTH), 20, 0.6)
    run = lambda: gf.Gallery(mapped[:items]).statistics(samples, KAPPA, 10)  # noqa: E731
    truth = twins.chunked_entropy(samples, torch.from_numpy(mapped[:items]), KAPPA)
    peaks: list[int] = []
    with peak_anonymous_memory(peaks):
        scored = run()
    assert same_entropy(scored.posterior().entropy, truth.double())
    assert peaks[0] < MOST_MEMORY
    benchmark.group = "Gallery posterior from a mapped file"
    benchmark.extra_info |= growth("Gallery posterior, mapped file", "N", items)
    benchmark.pedantic(run, rounds=3)
