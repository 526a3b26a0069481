"""What a user pays: seconds per 1,000 queries and per 1,000 pairs, galleries of 1e4 to 1e7 items, beside plain search.

Sampling and re-ranking do not depend on the gallery and are timed once per network; scoring and search are timed at
every size that fits, from a memory-mapped float16 file, as `geoflow entropy` reads it. What does not fit is computed
from the largest size that did, in proportion to the items. GPUs are estimates by `tools.costs`, not measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers
from benchmarks.bench_entropy import PAPER
from benchmarks.bench_gallery import FAISS, spectral_rows
from benchmarks.common import cell, gate, scratch, seconds_of
from benchmarks.flows import random_flow
from benchmarks.suite import Table
from geoflow_fast.flow.sampling import FAST_SAMPLING as FAST
from geoflow_fast.jobs.queries import BLOCK_QUERIES
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.gallery import GPU_BLOCK_ROWS
from geoflow_fast.runtime.device import GPU_ROWS_AT_ONCE
from tools import costs

GALLERIES = (10_000, 100_000, 1_000_000, 10_000_000)
THOUSAND = 1000
SEARCHED, SCORED = 64, 16
"""Queries per pass over the gallery, of search and of scoring."""
KAPPA, TOP_K = 100.0, 10
BLOCK = 100_000
LINKS = {"a100": 25e9, "h100": 50e9}
"""Bytes per second from the machine's memory to the GPU."""


@dataclass(frozen=True)
class Model:
    """A network, the largest gallery that this machine's page cache and patience hold, and that FAISS's copy fits."""

    name: str
    config: gf.GeoFlowConfig
    most_items: int
    most_items_faiss: int = 1_000_000
    queries: int = 8


MODELS = (
    Model("small network, d = 512", gf.GeoFlowConfig.small(512, 512), 10_000_000),
    Model("paper's network, d = 1024", gf.GeoFlowConfig.paper(1024, 1024), 1_000_000, queries=2),
)


def best_of_two(run: Any) -> float:
    """The first call warms up; a long one is not repeated."""
    first = seconds_of(run)
    return first if first > 5 else min(seconds_of(run) for _ in range(2))


def write_items(path: Path, items: int, width: int) -> None:
    """Unit rows in float16: one random block, whose coordinates every next block turns by one more place."""
    block = spectral_rows(min(items, BLOCK), width).half().numpy()
    out = np.lib.format.open_memmap(path, "w+", np.float16, (items, width))
    for number, first in enumerate(range(0, items, BLOCK)):
        part = block[: items - first]
        out[first : first + BLOCK] = np.roll(part, number, axis=1)
    out.flush()


def per_query(model: Model, flow: gf.GeoFlow) -> dict[str, float]:
    """Seconds per query of what does not depend on the gallery."""
    queries = sample_uniform(model.queries, model.config.text_dim)
    reranker = gf.BayesReranker(flow, sample_uniform(1000, model.config.image_dim))
    shortlists = torch.arange(model.queries * reranker.flow_items).view(model.queries, -1) % 1000
    runs = {
        "fast": lambda: gf.sample(flow, text=queries, settings=FAST),
        "paper": lambda: gf.sample(flow, text=queries, settings=PAPER),
        "rerank": lambda: reranker.rerank(queries, shortlists),
    }
    return {name: best_of_two(run) / model.queries for name, run in runs.items()}


def per_pair(model: Model, flow: gf.GeoFlow, pairs: int = 32) -> dict[str, float]:
    """Seconds per 1,000 pairs of the epistemic score, by setting."""
    image, text = (sample_uniform(pairs, d) for d in model.config.flow_dims)
    settings = {
        "`FAST_DENSITY`": gf.FAST_DENSITY,
        "default": {},
        "the paper's settings": gf.PAPER_DENSITY,
    }
    runs = {name: lambda s=setting: gf.epistemic(flow, image, text, **s) for name, setting in settings.items()}
    return {name: THOUSAND / pairs * best_of_two(run) for name, run in runs.items()}


@dataclass
class Passes:
    """Seconds of one query's share of a pass over N items; sizes beyond what was measured are in proportion."""

    search: dict[int, float] = dataclasses.field(default_factory=dict)
    faiss: dict[int, float] = dataclasses.field(default_factory=dict)
    score: dict[int, float] = dataclasses.field(default_factory=dict)
    """One sample of a query, not all."""

    @staticmethod
    def at(measured: dict[int, float], items: int) -> float:
        most = max(measured)
        return measured[items] if items in measured else measured[most] * items / most


def passes(model: Model, mapped: np.ndarray) -> Passes:
    """Search and scoring at every size that fits."""
    measured, width = Passes(), model.config.image_dim
    queries = sample_uniform(SEARCHED, width)
    samples = sample_uniform(SCORED * FAST.n_samples, width).view(SCORED, FAST.n_samples, width)
    for items in (n for n in GALLERIES if n <= model.most_items):
        gallery = gf.Gallery(mapped[:items])
        searched = lambda g=gallery: g.search(queries, TOP_K)[1]  # noqa: E731
        measured.search[items] = best_of_two(searched) / SEARCHED
        scored = best_of_two(lambda g=gallery: g.statistics(samples, KAPPA, TOP_K))
        measured.score[items] = scored / samples[..., 0].numel()
        if FAISS.present and items <= model.most_items_faiss:
            index = peers.faiss_index(torch.from_numpy(np.asarray(mapped[:items], dtype=np.float32)))
            gate_as_near(mapped, queries, searched(), peers.faiss_search(index, queries, TOP_K))
            measured.faiss[items] = best_of_two(lambda i=index: peers.faiss_search(i, queries, TOP_K)) / SEARCHED
    return measured


def gate_as_near(mapped: np.ndarray, queries: Tensor, nearest: Tensor, expected: Tensor) -> None:
    """What this library's search finds is rank by rank as near as what FAISS finds; equally near items may trade."""
    cosines = [
        (torch.from_numpy(mapped[index.numpy()]).double() @ queries.double().unsqueeze(-1)).squeeze(-1)
        for index in (nearest.cpu(), expected.cpu())
    ]
    gate("search as FAISS does", torch.allclose(*cosines, rtol=0, atol=1e-6))


def tables() -> Iterator[Table]:
    for number, model in enumerate(MODELS):
        torch.manual_seed(0)
        flow = random_flow(model.config)
        fixed, pairs = per_query(model, flow), per_pair(model, flow)
        with scratch() as folder:
            path = folder / "gallery.npy"
            write_items(path, model.most_items, model.config.image_dim)
            measured = passes(model, np.load(path, mmap_mode="r"))
        yield query_table(f"queries_{number}", model, fixed, measured)
        yield Table(f"pairs_{number}", [{"setting": k, "s per 1,000 pairs": v} for k, v in pairs.items()])
    yield estimates(gf.GeoFlowConfig.paper(1024, 1024))


def by_items(values: dict[int, str]) -> dict[str, str]:
    """Columns of a table, one per size of the gallery."""
    return {f"N = 1e{len(str(items)) - 1}": value for items, value in values.items()}


def query_table(name: str, model: Model, fixed: dict[str, float], measured: Passes) -> Table:
    """Seconds per 1,000 queries; cells computed in proportion are in italics."""

    def row(title: str, once: float, over: dict[int, float], samples: int = 1) -> dict[str, str]:
        values = {n: cell(THOUSAND * (once + samples * Passes.at(over, n))) for n in GALLERIES}
        return {"s per 1,000 queries": title, **by_items({n: v if n in over else f"*{v}*" for n, v in values.items()})}

    rows = [
        row("plain search, geoflow_fast", 0.0, measured.search),
        row("plain search and `BayesReranker`", fixed["rerank"], measured.search),
        row("`RetrievalEntropy.fast`", fixed["fast"], measured.score, FAST.n_samples),
        row("`RetrievalEntropy`, the paper's settings", fixed["paper"], measured.score, PAPER.n_samples),
    ]
    if measured.faiss:
        rows.insert(0, row("plain search, FAISS exact, float32 in memory", 0.0, measured.faiss))
    return Table(name, rows, {"model": model.name, "per query": fixed, "passes": dataclasses.asdict(measured)})


def estimates(config: gf.GeoFlowConfig) -> Table:
    """One GPU, arithmetic alone: seconds per 1,000 queries or pairs once the gallery is in the machine's memory."""
    rows = []
    for device in LINKS:
        hours = {items: estimate(config, items, device) for items in GALLERIES}
        for title in hours[GALLERIES[0]]:
            values = by_items({items: f"{hours[items][title]:.2g}" for items in GALLERIES})
            rows.append({"estimated s per 1,000": f"{device.upper()}: {title}", **values})
    return Table("gpu", rows)


def estimate(config: gf.GeoFlowConfig, items: int, device: str) -> dict[str, float]:
    """By method. Searching is bound by bringing the items to the device once per block of queries."""
    rates, passes = costs.PEAKS[device], math.ceil(THOUSAND / BLOCK_QUERIES)
    bringing = passes * 4.0 * items * config.image_dim / (costs.BANDWIDTH_SHARE * LINKS[device])

    def entropy(samples: int, velocities: int) -> float:
        rows = 2 * samples * THOUSAND  # with and without the condition
        batch = min(rows, GPU_ROWS_AT_ONCE)
        sampling = velocities * rows / batch * costs.seconds(costs.velocity_work(config, batch), rates, "float32")
        blocks = math.ceil(items / GPU_BLOCK_ROWS)
        one = costs.scoring_work(BLOCK_QUERIES, samples, items / blocks, config.image_dim)
        work = dataclasses.replace(one, kernels=one.kernels + costs.BLOCK_KERNELS) * blocks
        return max(sampling + passes * costs.seconds(work, rates, "bfloat16", replayed=False), bringing)

    # Midpoint takes two evaluations a step. A re-ranked item has a point and a tangent in one solve, a pair 7 rows.
    pairs = costs.likelihood_work(config, THOUSAND)
    density = 20 * costs.seconds(pairs, rates, "float32")
    rerank = 12 * 2 / 7 * 32 * costs.seconds(pairs, rates, "float32")
    return {
        "plain search": bringing,
        "plain search and `BayesReranker`": bringing + rerank,
        "`RetrievalEntropy.fast`": entropy(FAST["n_samples"], FAST["n_steps"]),
        "`RetrievalEntropy`, the paper's settings": entropy(PAPER["n_samples"], PAPER["n_steps"]),
        "epistemic score of 1,000 pairs": density,
    }
