"""Gallery posterior and exact search: against torch and FAISS, for few queries, heads, mapped files, pruned.

Work: 2 d flops and one exponential per (item, sample). Peers in plain torch: all scores at once, and two chunked forms
(2048 items at a time; a logsumexp, and the exponential in place). FAISS's exact search stands beside: what retrieval
costs before anyone asks how sure it is. Products are in float32, for heads in bfloat16 too.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.common import exponent, gate, status_bytes, time_together
from benchmarks.limits import Limits, Work
from benchmarks.suite import FOR_COMPARISON, PEER, Case, Contender, Scaling, Table
from geoflow_fast.ops import native
from geoflow_fast.ops.gallery_posterior import ROUNDING_LIMIT

WIDTH, KAPPA, ITEMS, DRAWS = 1024, 100.0, 100_000, 50
MAPPED_ITEMS = 1_000_000
PRUNED_QUERIES = 16
ROUNDING = 2e-4
"""Nats that float32 may cost at this kappa."""


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

    @property
    def first(self) -> Tensor:
        """One vector per query [Q, d]."""
        return self.samples[:, 0].contiguous()


def posterior(samples: Tensor, gallery: Tensor, **options: Any) -> gf.ops.GalleryPosterior:
    return gf.ops.gallery_posterior(samples, gallery, KAPPA, backend="cpu", **options)


def exact_entropy(q: Queries) -> Tensor:
    """In float64, a query at a time."""
    items = q.gallery.double()
    return torch.cat([twins.chunked_entropy(one.double(), items, KAPPA) for one in q.samples.split(1)])


def same_entropy(result: Tensor, truth: Tensor) -> bool:
    return torch.allclose(result.double(), truth, rtol=0, atol=ROUNDING)


def same_search(result: Tensor, truth: Tensor) -> bool:
    """Whether the same items are found; a few ties may differ."""
    return float((result == truth).float().mean()) > 0.999


FAISS = Contender("FAISS", lambda q: peers.faiss_search(q.index, q.first, 10), PEER, needs="faiss")
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
SEARCH = (
    FAISS,
    Contender("torch, chunked top-k", lambda q: twins.chunked_search(q.first, q.gallery, 10), PEER),
    Contender("geoflow_fast", lambda q: gf.ops.gallery_search(q.first, q.gallery, 10)[1]),
)


def cases(quick: bool) -> list[Case]:
    width, items, counts = (512, 10_000, (8,)) if quick else (WIDTH, ITEMS, (8, 1))
    scored = [
        Case(
            f"Gallery posterior, {queries} x {DRAWS} samples, N = {items:,}, d = {width}",
            lambda queries=queries: Queries.draw(queries, DRAWS, items, width),
            exact_entropy,
            same_entropy,
            POSTERIOR,
            posterior_work(queries * DRAWS, items, width),
        )
        for queries in counts
    ]
    searched = 64
    search = Case(
        f"Exact search, {searched} queries, N = {items:,}, d = {width}",
        lambda: Queries.draw(searched, 1, items, width),
        lambda q: (q.first.double() @ q.gallery.double().T).topk(10).indices,
        same_search,
        SEARCH,
        posterior_work(searched, items, width),
    )
    return [*scored, search]


def posterior_work(rows: int, items: int, width: int) -> Work:
    return Work(flops=2 * rows * items * width, bytes=4 * items * width, exps=rows * items)


def scalings(quick: bool) -> list[Scaling]:
    sizes = {"items": 5_000 if quick else 20_000, "queries": 8, "draws": 32, "width": 256 if quick else 512}

    def over(name: str) -> Callable[[int], Callable[[], Any]]:
        def make(size: int) -> Callable[[], Any]:
            given = {**sizes, name: size}
            gallery = spectral_rows(given["items"], given["width"])
            samples = samples_around(gallery[: given["queries"]], given["draws"], 0.6)
            return lambda: posterior(samples, gallery)

        return make

    def threads(count: int) -> Callable[[], Any]:
        run = over("queries")(sizes["queries"])

        def call() -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(count)
            run()
            torch.set_num_threads(before)

        return call

    n, q, m, d = sizes["items"], sizes["queries"], sizes["draws"], sizes["width"]
    counts = sorted({1, torch.get_num_threads()})
    curves = [
        Scaling("Gallery posterior", "N", (n // 4, n // 2, n, 2 * n, 4 * n), over("items")),
        Scaling("Gallery posterior", "Q", (q // 2, q, 2 * q, 4 * q), over("queries")),
        Scaling("Gallery posterior", "M", (m // 2, m, 2 * m, 4 * m), over("draws")),
        Scaling("Gallery posterior", "d", (d // 2, d, 2 * d, 4 * d), over("width")),
    ]
    if len(counts) > 1:
        curves.append(Scaling("Gallery posterior", "threads", counts, threads, expected=-1.0, rounds=7))
    return curves


def tables() -> Iterator[Table]:
    torch.manual_seed(0)
    yield in_items()  # first: memory that later parts free could hide what this one takes
    gallery = spectral_rows(ITEMS, WIDTH)
    yield few_queries(gallery)
    yield heads(gallery)
    yield pruning(gallery)


def few_queries(gallery: Tensor) -> Table:
    limits, items = Limits.measure(), gallery[:40_000]
    timings: dict[int, dict[str, float]] = {}
    for draws in (16, 20, 40, 50):
        samples = samples_around(gallery[:1], draws, 0.6)
        truth = gf.ops.gallery_posterior(samples.double(), items.double(), KAPPA).entropy
        gate(f"1 x {draws}", same_entropy(posterior(samples, items).entropy, truth))
        flat = samples.flatten(0, 1)
        timings[draws] = time_together(
            {"ours": lambda s=samples: posterior(s, items), "mm": lambda f=flat: torch.mm(items, f.T)}
        )
        limits = limits.best(Limits.measure())
    works = {draws: posterior_work(draws, len(items), WIDTH) for draws in timings}
    rows = [
        {
            "queries x samples": f"1 x {draws}",
            "ms": 1e3 * seconds["ours"],
            "GFLOP/s": works[draws].flops / seconds["ours"] / 1e9,
            "times faster than torch.mm alone": seconds["mm"] / seconds["ours"],
            "share of the limit": f"{100 * limits.seconds(works[draws]) / seconds['ours']:.0f} %",
        }
        for draws, seconds in timings.items()
    ]
    return Table("few_queries", rows)


def head_points(centre: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Points [Q, K, d] of concentrations 20 to 60 around the centres [Q, d], and the biases [Q, K] of their weights."""
    concentration = 20 + 40 * torch.rand(len(centre), points, 1)
    log_weight = torch.randn(len(centre), points).log_softmax(dim=1)
    return samples_around(centre, points, 0.6) * concentration, log_weight + math.log(points)


def heads(gallery: Tensor) -> Table:
    """Posteriors of mixtures of K weighted points per query, beside a plain search with the queries."""
    queries, top_k, gated = gallery[:64].contiguous(), 32, 4
    items = gf.Gallery(gallery)
    runs: dict[str, Callable[[], Any]] = {"search": lambda: items.search(queries, top_k)}
    if FAISS.present:
        index = peers.faiss_index(gallery)
        runs["FAISS"] = lambda: peers.faiss_search(index, queries, top_k)
    for points in (4, 8):
        samples, bias = head_points(queries, points)
        scored = items.statistics(samples, 1.0, top_k, sample_bias=bias).select(torch.arange(gated))
        truth = gf.ops.gallery_statistics(
            samples[:gated].double(), gallery.double(), 1.0, top_k, sample_bias=bias[:gated].double()
        )
        right = same_entropy(scored.posterior(torch.float64).entropy, truth.posterior(torch.float64).entropy)
        close = torch.allclose(scored.top_score, truth.top_score, rtol=0, atol=ROUNDING)
        gate(f"head posterior K={points}", right and close and same_entropy(scored.log_z, truth.log_z))
        runs[f"head posterior K={points}"] = lambda s=samples, b=bias: items.statistics(s, 1.0, top_k, sample_bias=b)
        if native.missing_bfloat16() is None:
            name = f"head posterior K={points}, bfloat16"
            run = partial(items.statistics, samples, 1.0, top_k, sample_bias=bias, precision="bfloat16")
            scored = run().select(torch.arange(gated))
            change = (scored.posterior(torch.float64).entropy - truth.posterior(torch.float64).entropy).abs()
            gate(name, float(change.max()) < ROUNDING_LIMIT and same_search(scored.top_index, truth.top_index))
            runs[name] = run
    seconds = time_together(runs)
    fastest = min(seconds[name] for name in ("search", "FAISS") if name in seconds)
    rows = [
        {"64 queries": name, "ms": 1e3 * value, "times the faster search": value / fastest}
        for name, value in seconds.items()
    ]
    return Table("heads", rows)


def pruning(gallery: Tensor) -> Table:
    index = gf.GalleryIndex.build(gallery)
    rows = []
    for cosine in (0.95, 0.85, 0.75, 0.6, 0.4):
        samples = samples_around(gallery[:PRUNED_QUERIES], DRAWS, cosine)
        whole, pruned = posterior(samples, gallery), posterior(samples, gallery, index=index)
        change = (pruned.entropy - whole.entropy).abs().double()
        ulps = 4 * torch.finfo(torch.float32).eps * whole.entropy.double().clamp_min(1)
        gate(f"pruned at cosine {cosine}", bool((change <= pruned.entropy_bound + ulps).all()))
        left = gf.ops.gallery_statistics(samples, gallery, KAPPA, index=index).left
        seconds = time_together(
            {
                "dense": lambda s=samples: posterior(s, gallery),
                "auto": lambda s=samples: posterior(s, gallery, index=index),
            },
            rounds=3,
        )
        rows.append(
            {
                "cosine": cosine,
                "mean H": float(whole.entropy.mean()),
                "dense, ms": 1e3 * seconds["dense"],
                '`prune="auto"`, ms': 1e3 * seconds["auto"],
                "speed-up": seconds["dense"] / seconds["auto"],
                "queries pruned": f"{int((left > 0).sum())} of {PRUNED_QUERIES}",
                "items left out": f"{100 * float(left.double().mean() / ITEMS):.1f} %",
                "largest change of H": float(change.max()),
                "largest bound": float(pruned.entropy_bound.max()),
            }
        )
    return Table("pruning", rows, {"index bytes / gallery bytes": index.rows.nbytes / gallery.nbytes})


@contextmanager
def peak_anonymous_memory(peak: list[int]) -> Iterator[None]:
    """Appends the largest growth of memory that is not file pages inside the block, looked at every 5 ms."""
    before, stop, seen = status_bytes("RssAnon"), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.005):
            seen.append(status_bytes("RssAnon") - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        peak.append(max(seen))


def write_gallery(path: Path, items: int, width: int, dtype: type[np.floating] = np.float32) -> None:
    """Random rows into a `.npy` file, a block at a time."""
    out = np.lib.format.open_memmap(path, "w+", dtype, (items, width))
    for first in range(0, items, 50_000):
        out[first : first + 50_000] = spectral_rows(min(50_000, items - first), width).numpy()
    out.flush()


def in_items() -> Table:
    """Two queries streamed from a mapped file: time and memory over the number of items."""
    samples = samples_around(spectral_rows(2, WIDTH), 20, 0.6)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gallery.npy"
        write_gallery(path, MAPPED_ITEMS, WIDTH)
        mapped = np.load(path, mmap_mode="r")
        for items in (10_000, 30_000, 100_000, 300_000, MAPPED_ITEMS):
            memory: list[int] = []
            with peak_anonymous_memory(memory):
                gallery = gf.Gallery(mapped[:items])
                seconds = time_together({"": lambda g=gallery: g.statistics(samples, KAPPA, 10)}, rounds=3)[""]
            if items == 10_000:
                truth = gf.ops.gallery_posterior(samples.double(), torch.tensor(mapped[:items]).double(), KAPPA)
                streamed = gallery.statistics(samples, KAPPA, 10).posterior().entropy
                gate("streamed", same_entropy(streamed, truth.entropy))
            gate("under 300 MB beyond the page cache", memory[0] < 300e6)
            rows.append({"items": f"{items:,}", "ms": 1e3 * seconds, "MB beyond the page cache": memory[0] / 1e6})
    sizes = [int(row["items"].replace(",", "")) for row in rows]
    return Table("streamed", rows, {"exponent": exponent(sizes, [row["ms"] for row in rows])})
