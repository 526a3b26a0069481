"""Retrieval entropy of a file of queries: blocks of queries against a gallery of any size, into one Parquet file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.rows import Rows, open_rows
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.jobs.job import Job, quantiles
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import parquet, plots
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.parquet import Columns
from geoflow_fast.runtime.progress import Advance

BLOCK_QUERIES = 64
"""Queries per pass over the gallery. A kill loses at most the work on one block."""


REFERENCE_QUERIES = 256


ITEM_BYTES = 4
"""Of a coordinate in memory."""


LAYOUTS = ("auto", "gallery", "queries")


FORMAT = 1
"""Raised when equal settings come to give other numbers, so that blocks of an older release are not continued."""


@dataclass(frozen=True)
class ScoreSummary:
    """What a file of scores says as a whole."""

    queries: int
    items: int
    entropy: dict[str, float]
    """Quantiles of H in nats, by name ("5 %", ...)."""
    risk_lower_bound: dict[str, float]
    """Quantiles of the bound on the risk."""
    confident: float
    """Share of queries whose most probable item has probability 1/2 or more."""
    mean_risk_lower_bound: float
    """No way of picking one item per query errs less often than this, if the posteriors are right."""


def open_scorer(
    model: Path, gallery: Path, direction: str, *, fast: bool, device: str, world: World = ALONE, **settings: Any
) -> RetrievalEntropy:
    """The scorer of a saved flow and a gallery on disk: the paper's settings or the fast ones, with `settings`."""
    flow = GeoFlow.from_pretrained(model)
    make = RetrievalEntropy.fast if fast else RetrievalEntropy
    return make(flow, Gallery(gallery, world=world), direction, **settings).to(usable_device(device))


def reference_queries(path: Path, count: int = REFERENCE_QUERIES) -> Tensor:
    """At most `count` rows of a file or folder of queries, evenly spaced: [R, d]."""
    rows = open_rows(path, "reference queries")
    rows.check(normalize=False)
    if len(rows) == 0:
        raise ValueError(f"reference queries {path} are empty")
    return torch.from_numpy(rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)])


def score_file(
    scorer: RetrievalEntropy,
    queries: Path,
    out: Path,
    *,
    with_top: bool = False,
    block: int = BLOCK_QUERIES,
    overwrite: bool = False,
    progress: bool | None = None,
    layout: str = "auto",
) -> ScoreSummary:
    """Scores the rows of `queries` (a `.npy` file or a folder of shards) into the Parquet file `out`.

    Columns: `query` (row number), `entropy` (nats), `map_index`, `map_prob`, `risk_lower_bound`; `with_top` adds the
    lists `top_index` and `top_prob` of the scorer's `top_k` items. Killed, it is continued by the same call: blocks of
    finished queries are kept beside `out`, which appears whole. Everything is checked before anything is written.

    The ranks of the gallery's world share the work as `layout` says: "gallery", each rank scores all queries against
    its share of the items, and their statistics are merged; "queries", each rank scores blocks of queries against all
    items; "auto" the latter if the gallery fits into memory and there are blocks for all.
    """
    world = scorer.gallery.world
    rows = open_queries(queries, scorer.query_dim, world)
    job = Job(out, len(rows), block, _facts(scorer, rows, with_top=with_top))
    together = choose_layout(layout, scorer, -(-len(rows) // block)) == "gallery"
    if together:
        scorer.divide_among_ranks()

    def compute(index: range, advance: Advance) -> Columns:
        return _score_rows(scorer, rows, index, advance, with_top=with_top)

    job.run(compute, overwrite=overwrite, unit="queries", progress=progress, world=world, together=together)
    return summarise(out, len(scorer.gallery))


def choose_layout(layout: str, scorer: RetrievalEntropy, blocks: int) -> str:
    """ "gallery" or "queries": what the ranks share, by name or ("auto") by size; the same on all of them.

    Sharing queries needs no communication, but each rank reads all items for each block: from memory, if they fit
    there. The ranks of a machine map the same pages.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    world = scorer.gallery.world
    if world.size == 1 or scorer.gallery.index is not None:
        return "queries" if layout == "auto" else layout
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = len(scorer.gallery) * scorer.gallery.dim * ITEM_BYTES
    chosen: str = world.share(preferred_layout(size, memory, blocks, world.size))
    return chosen if layout == "auto" else layout


def preferred_layout(gallery_bytes: float, machine_memory: float, blocks: int, ranks: int) -> str:
    """What the ranks had better share: queries, if the items fit into half of a machine's memory and no rank is left
    without a block of queries; else the items."""
    return "queries" if 2 * gallery_bytes <= machine_memory and blocks >= ranks else "gallery"


def open_queries(path: Path, dim: int, world: World = ALONE) -> Rows:
    """Rows of width `dim` to score, checked."""
    rows = open_rows(path, "queries")
    if rows.dim != dim:
        raise ValueError(f"queries {path} have width {rows.dim}, but the flow expects {dim}")
    if len(rows) == 0:
        raise ValueError(f"queries {path} are empty: there is nothing to score")
    rows.check(normalize=False, world=world)
    return rows


def _facts(scorer: RetrievalEntropy, queries: Rows, *, with_top: bool) -> dict[str, Any]:
    return {
        "task": "entropy",
        "format": FORMAT,
        **scorer.settings,
        "top_k": scorer.top_k if with_top else None,
        "flow": flow_digest(scorer.flow),
        "queries": queries.digest(scorer.gallery.world),
        "gallery": scorer.gallery.digest(),
        "marginals": scorer.marginal_settings if scorer.posterior == "bayes" else None,
    }


def _score_rows(
    scorer: RetrievalEntropy, queries: Rows, index: range, advance: Advance, *, with_top: bool
) -> dict[str, Any]:
    numbers = np.arange(index.start, index.stop)
    post = scorer.score(torch.from_numpy(queries[numbers]), advance)
    columns = {
        "entropy": post.entropy,
        "map_index": post.map_index,
        "map_prob": post.map_prob,
        "risk_lower_bound": post.risk_lower_bound,
    }
    if with_top:
        columns |= {"top_index": post.top_index, "top_prob": post.top_prob}
    return {"query": numbers, **{name: column.cpu().numpy() for name, column in columns.items()}}


def summarise(scores: Path, items: int) -> ScoreSummary:
    """Summary of a file that `score_file` wrote for a gallery of that many items."""
    found = parquet.read_columns(scores, ["entropy", "map_prob", "risk_lower_bound"])
    return ScoreSummary(
        queries=len(found["entropy"]),
        items=items,
        entropy=quantiles(found["entropy"]),
        risk_lower_bound=quantiles(found["risk_lower_bound"]),
        confident=float((found["map_prob"] >= 0.5).mean()),
        mean_risk_lower_bound=float(found["risk_lower_bound"].mean()),
    )


def draw_scores(scores: Path, summary: ScoreSummary, picture: Path) -> None:
    """Histograms of the entropy and of the bound on the risk, as a PNG."""
    found = parquet.read_columns(scores, ["entropy", "risk_lower_bound"])
    figure, (left, right) = plots.pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    bins = min(50, 5 + math.isqrt(summary.queries))
    left.hist(found["entropy"], bins=bins, color="#3b6fb6")
    left.axvline(summary.entropy["50%"], color="#e07b28", label=f"median {summary.entropy['50%']:.2f}")
    left.axvline(
        math.log(summary.items), color="#777777", linestyle="--", label=f"log N = {math.log(summary.items):.2f}"
    )
    left.set(xlabel="entropy H, nats", ylabel="queries", title=f"{summary.queries} queries, {summary.items} items")
    right.hist(found["risk_lower_bound"], bins=bins, range=(0, 1), color="#3b6fb6")
    mean = summary.mean_risk_lower_bound
    right.axvline(mean, color="#e07b28", label=f"mean {mean:.3f}")
    right.set(xlabel="lower bound on the risk of the best guess", title=f"confident: {summary.confident:.1%}")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    plots.save_figure(figure, picture)
