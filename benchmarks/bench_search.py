"""Exact search against FAISS, and one request at a time as a service has them.

Search: the ten best of 1e5 and 1e6 items for 1, 16 and 64 queries, in float32, with bounds from bytes (the same
result), and from a mapped float16 file. FAISS runs in its best setting: its own loops, or matrix products. Requests:
median and 99th percentile of single calls.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers
from benchmarks.bench_gallery import FAISS, head_points, same_search, spectral_rows, write_gallery
from benchmarks.common import gate, scratch, time_together
from benchmarks.flows import random_flow
from benchmarks.suite import Table
from geoflow_fast.ops import native

TOP = 10
SIZES = [(width, items) for width in (512, 1024) for items in (100_000, 1_000_000)]
QUERIES = (1, 16, 64)
REQUESTS = 200
LOOPS, PRODUCTS = 10**9, 1
"""Values of FAISS's threshold from which many queries on it uses matrix products."""


def tables() -> Iterator[Table]:
    torch.manual_seed(0)
    yield requests()  # before other libraries have started threads of their own
    yield searches()


def faiss_calls(index: Any, queries: Tensor) -> dict[str, Callable[[], Tensor]]:
    """FAISS with its own loops and with matrix products."""
    faiss = importlib.import_module("faiss")

    def call(threshold: int) -> Tensor:
        faiss.cvar.distance_compute_blas_threshold = threshold
        return peers.faiss_search(index, queries, TOP)

    named = {"FAISS, loops": LOOPS, "FAISS, products": PRODUCTS}
    # From 64 queries on the loops take several times as long, and would take most of the run.
    return {name: lambda t=t: call(t) for name, t in named.items() if t == PRODUCTS or len(queries) < 64}


def searches() -> Table:
    """Milliseconds of each way, and times faster than FAISS."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = {"float32": [], "bytes": [], "mapped float16": []}
    for width, items in SIZES:
        with scratch() as folder:
            rows += searches_of(width, items, folder, ratios)
    means = {f"geometric mean, {name}": math.exp(np.log(times).mean()) for name, times in ratios.items() if times}
    return Table("faiss", rows, {**means, **{f"least, {name}": min(times) for name, times in ratios.items() if times}})


def searches_of(width: int, items: int, folder: Path, ratios: dict[str, list[float]]) -> list[dict[str, Any]]:
    write_gallery(folder / "gallery.npy", items, width, np.float16)
    mapped = gf.Gallery(folder / "gallery.npy")
    gallery = torch.from_numpy(np.load(folder / "gallery.npy").astype(np.float32))
    codes = gf.ops.RowCodes.encode(gallery) if native.missing_int8() is None else None
    index = peers.faiss_index(gallery) if FAISS.present else None
    rows = []
    for count in QUERIES:
        queries = gf.geometry.normalize(gallery[:count] + 0.7 * spectral_rows(count, width))
        truth = (queries.double() @ gallery[:100_000].double().T).topk(TOP).indices
        runs: dict[str, Callable[[], Tensor]] = {} if index is None else faiss_calls(index, queries)
        runs["float32"] = lambda q=queries: gf.ops.gallery_search(q, gallery, TOP)[1]
        if codes is not None:
            runs["bytes"] = lambda q=queries: gf.ops.gallery_search(q, gallery, TOP, codes=codes)[1]
        runs["mapped float16"] = lambda q=queries: mapped.search(q, TOP)[1]
        answers = {name: run() for name, run in runs.items()}
        if items == 100_000:
            gate(f"search of {count} x {items} x {width}", same_search(answers["float32"], truth))
        for name, answer in answers.items():
            same = torch.equal(answer, answers["float32"]) if name == "bytes" else None
            gate(
                f"{name}, {count} x {items} x {width}",
                same_search(answer, answers["float32"]) if same is None else same,
            )
        seconds = time_together(runs, rounds=5)
        peer = min((value for name, value in seconds.items() if name.startswith("FAISS")), default=math.nan)
        row: dict[str, Any] = {"queries": count, "items": f"{items:,}", "d": width, "FAISS, ms": 1e3 * peer}
        for name, times in ratios.items():
            row[f"{name}, ms"] = 1e3 * seconds[name] if name in seconds else math.nan
            if name in seconds and not math.isnan(peer):
                times.append(peer / seconds[name])
        row |= {f"{name}, x": peer / seconds.get(name, math.nan) for name in ratios}
        rows.append(row)
    return rows


def percentiles(run: Callable[[int], Any], requests: int) -> dict[str, float]:
    """Median and 99th percentile of single calls in milliseconds, after a few that are not counted."""
    for number in range(5):
        run(number)
    times = []
    for number in range(requests):
        start = time.perf_counter()
        run(number)
        times.append(1e3 * (time.perf_counter() - start))
    return {"p50, ms": float(np.percentile(times, 50)), "p99, ms": float(np.percentile(times, 99))}


def requests() -> Table:
    """One query at a time, d = 1024: search and head posterior over 1e5 items, re-ranking, a density."""
    gallery, width = spectral_rows(100_000, 1024), 1024
    queries = gf.geometry.normalize(gallery[:REQUESTS] + 0.7 * spectral_rows(REQUESTS, width))
    plain = gf.Gallery(gallery)
    indexed = plain.with_index(gf.GalleryIndex.build(plain))
    points, bias = head_points(queries, 8)
    exact = gf.ops.gallery_search(queries, gallery, TOP)[1]
    gate("indexed search", torch.equal(indexed.search(queries, TOP)[1], exact))

    def search_and_posterior(items: gf.Gallery) -> Callable[[int], Any]:
        def call(number: int) -> None:
            one = slice(number % REQUESTS, number % REQUESTS + 1)
            items.search(queries[one], TOP)
            items.statistics(points[one], 1.0, TOP, sample_bias=bias[one], precision="auto")

        return call

    flow = random_flow(gf.GeoFlowConfig(image_dim=width, text_dim=width, hidden=256, depth=4))
    reranker = gf.BayesReranker(flow, plain)
    shortlist = exact[:, :1].expand(-1, reranker.flow_items) + torch.arange(reranker.flow_items)
    shortlist = shortlist % len(gallery)
    calls: dict[str, tuple[Callable[[int], Any], int]] = {
        "search": (lambda k: plain.search(queries[k % REQUESTS : k % REQUESTS + 1], TOP), REQUESTS),
        "search with an index": (lambda k: indexed.search(queries[k % REQUESTS : k % REQUESTS + 1], TOP), REQUESTS),
        "search and head posterior, K = 8": (search_and_posterior(plain), REQUESTS),
        "search with an index and head posterior, K = 8": (search_and_posterior(indexed), REQUESTS),
        f"re-ranking {reranker.flow_items} items, a small network": (
            lambda k: reranker.rerank(queries[k % REQUESTS].unsqueeze(0), shortlist[k % REQUESTS].unsqueeze(0)),
            40,
        ),
        "one density, a small network": (
            lambda k: gf.log_density(flow, queries[k % REQUESTS].unsqueeze(0), queries[k % REQUESTS].unsqueeze(0)),
            40,
        ),
    }
    rows = [{"one request": name, **percentiles(run, count)} for name, (run, count) in calls.items()]
    return Table("requests", rows)
