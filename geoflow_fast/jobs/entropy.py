"""Retrieval entropy of a file of queries, for galleries of any size, into one Parquet file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.precision import settled_precision
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings
from geoflow_fast.head import model as head
from geoflow_fast.jobs.calibration import StoredCalibration
from geoflow_fast.jobs.job import quantiles
from geoflow_fast.jobs.queries import BLOCK_QUERIES, Naming, answer_queries, open_queries
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import checks, parquet, plots, processors
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.hub import WEIGHTS_FILE
from geoflow_fast.runtime.tensors import kind_of

FORMAT = 1
"""This number goes up when a release computes other results from the same settings, so that it does not continue the
blocks of an older one."""
COLUMNS = ("entropy", "map_index", "map_prob", "risk_lower_bound")
TOP_COLUMNS = ("top_index", "top_prob")
ITEM_BYTES = 4
"""Bytes of one coordinate of an item in memory."""
STEERED = ("kappa", "guidance")
LAYOUTS = ("auto", "gallery", "queries")
FLOW, HEAD = "flow", head.KIND
"""What a folder can hold for a scorer."""


@dataclass(frozen=True)
class ScoreSummary:
    """A summary of a file of scores."""

    queries: int
    items: int
    entropy: dict[str, float]
    """Quantiles of H in nats, by name ("5%", ...)."""
    risk_lower_bound: dict[str, float]
    """Quantiles of the bound on the risk."""
    half_or_more: float
    """Share of queries whose most probable item has probability 1/2 or more."""
    mean_risk_lower_bound: float
    """If the posteriors are right, no rule that picks one item per query errs less often than this."""


def open_scorer(
    model: Path,
    gallery: Path,
    direction: str,
    *,
    fast: bool,
    device: str,
    precision: str = "float32",
    world: World = ALONE,
    normalize: bool = False,
    **settings: Any,
) -> RetrievalEntropy:
    """Returns the scorer of a saved model and a gallery on disk. The model is a flow, for which `settings` change the
    paper's or the fast settings, or a head. kappa and guidance are those that `geoflow train` stored with a flow,
    unless they are given. `precision` is that of a flow's products."""
    kind, items, where = model_kind(model), Gallery(gallery, world=world, normalize=normalize), usable_device(device)
    if kind == FLOW:
        flow = GeoFlow.from_pretrained(model)
        preset = FAST_SAMPLING if fast else SamplingSettings()
        sampling = dataclasses.replace(preset, precision=settled_precision(precision, where))
        fitted = stored_bandwidth(model, flow, direction) or {}
        stored = {name: fitted[name] for name in STEERED if fitted}
        scorer = RetrievalEntropy(flow, items, direction, **{"settings": sampling, **stored, **settings})
    else:
        scorer = RetrievalEntropy(head.PosteriorHead.from_pretrained(model), items, direction, **settings)
    return scorer.to(where)


def stored_bandwidth(model: Path, flow: GeoFlow, direction: str) -> dict[str, Any] | None:
    """What `geoflow train` has stored about kappa and guidance with a flow; None if nothing, or for other weights."""
    stored = StoredCalibration.read(model)
    return None if stored is None else stored.bandwidth_of(flow, direction)


def model_kind(folder: Path) -> str:
    """What the folder of a model holds: "flow" or "posterior head". Any other file is called a flow, and to open it
    as one is an error that says what it is."""
    return HEAD if kind_of(folder / WEIGHTS_FILE) == HEAD else FLOW


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
    normalize: bool = False,
    naming: Naming | None = None,
    when_checked: Callable[[], object] = lambda: None,
) -> ScoreSummary:
    """Scores the rows of `queries` (a `.npy` file or a folder of shards) into the Parquet file `out`.

    Columns: `query` (row number), `entropy` (nats), `map_index`, `map_prob`, `risk_lower_bound`; `with_top` adds the
    lists `top_index` and `top_prob` of the scorer's `top_k` items. If the job is killed, the same call continues it:
    finished blocks of queries are kept beside `out`, which appears whole. All inputs are checked before anything is
    written; then `when_checked` is called. `normalize` scales queries to unit norm; `naming` has files of ids to write
    instead of row numbers.

    `layout` says what the ranks of the gallery's world divide among them. With "gallery", each rank scores all queries
    against its share of the items, and the results are merged. With "queries", each rank scores blocks of queries
    against all items. "auto" divides the queries if the gallery fits into memory and every rank gets a block.
    """
    checks.integer(block, "block", 1)
    rows = open_queries(queries, scorer.query_dim, scorer.gallery.world, scorer.source.NAME, normalize=normalize)
    when_checked()
    together = choose_layout(layout, scorer, math.ceil(len(rows) / block)) == "gallery"
    if together:
        scorer.divide_among_ranks()
    facts = {
        "task": "entropy",
        "format": FORMAT,
        "top_k": scorer.top_k if with_top else None,
    }
    names = (*COLUMNS, *TOP_COLUMNS) if with_top else COLUMNS
    answer_queries(
        scorer,
        rows,
        out,
        facts,
        scorer.score,
        names,
        block=block,
        together=together,
        overwrite=overwrite,
        progress=progress,
        naming=naming,
    )
    columns = parquet.read_columns(out, ["entropy", "map_prob", "risk_lower_bound"])
    return ScoreSummary(
        queries=len(rows),
        items=len(scorer.gallery),
        entropy=quantiles(columns["entropy"]),
        risk_lower_bound=quantiles(columns["risk_lower_bound"]),
        half_or_more=float((columns["map_prob"] >= 0.5).mean()),
        mean_risk_lower_bound=float(columns["risk_lower_bound"].mean()),
    )


def choose_layout(layout: str, scorer: RetrievalEntropy, blocks: int) -> str:
    """Returns what the ranks divide among them, "gallery" or "queries"; all ranks get the same answer.

    To divide the queries needs no communication, but then each rank reads all items for each block. That is fast if the
    gallery fits into memory, of which the ranks of one machine share the pages.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    world = scorer.gallery.world
    if world.size == 1:
        return "queries" if layout == "auto" else layout
    memory = processors.physical_memory()
    size = len(scorer.gallery) * scorer.gallery.dim * ITEM_BYTES
    chosen: str = world.share(preferred_layout(size, memory, blocks, world.size))
    return chosen if layout == "auto" else layout


def preferred_layout(gallery_bytes: float, machine_memory: float, blocks: int, ranks: int) -> str:
    """Returns "queries" if the items fit into half of a machine's memory and every rank gets a block of queries;
    otherwise "gallery"."""
    return "queries" if 2 * gallery_bytes <= machine_memory and blocks >= ranks else "gallery"


def draw_scores(scores: Path, summary: ScoreSummary, picture: Path) -> None:
    """Draws histograms of the entropy and of the bound on the risk as a PNG file."""
    columns = parquet.read_columns(scores, ["entropy", "risk_lower_bound"])
    figure, (left, right) = plots.subplots(1, 2, figsize=(10, 4), layout="constrained")
    bins = min(50, 5 + math.isqrt(summary.queries))
    left.hist(columns["entropy"], bins=bins, color="#3b6fb6")
    left.axvline(summary.entropy["50%"], color="#e07b28", label=f"median {summary.entropy['50%']:.2f}")
    left.axvline(
        math.log(summary.items), color="#777777", linestyle="--", label=f"log N = {math.log(summary.items):.2f}"
    )
    left.set(xlabel="entropy H, nats", ylabel="queries", title=f"{summary.queries} queries, {summary.items} items")
    right.hist(columns["risk_lower_bound"], bins=bins, range=(0, 1), color="#3b6fb6")
    mean = summary.mean_risk_lower_bound
    right.axvline(mean, color="#e07b28", label=f"mean {mean:.3f}")
    share = f"an item of probability 1/2 or more: {summary.half_or_more:.1%}"
    right.set(xlabel="lower bound on the risk of the best guess", title=share)
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    plots.save_figure(figure, picture)
