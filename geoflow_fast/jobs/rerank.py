"""Re-ranking of a file of queries into one Parquet file, with a calibration that is made once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.jobs.entropy import BLOCK_QUERIES, open_queries
from geoflow_fast.jobs.job import Job, quantiles
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.rerank import BayesReranker
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.parquet import Columns
from geoflow_fast.runtime.progress import Advance

FORMAT = 1
"""Raised when equal settings come to give other numbers, so that blocks of an older release are not continued."""


COLUMNS = ("index", "prob", "answer", "p_answer", "p_outside", "entropy", "risk_lower_bound")


@dataclass(frozen=True)
class RerankSummary:
    """What a file of re-ranked shortlists says as a whole."""

    queries: int
    items: int
    calibrated: bool
    p_answer: dict[str, float]
    """Quantiles of the probability that plain search's answer is right, by name ("5 %", ...)."""
    p_outside: dict[str, float]
    """Quantiles of the probability that the right item is not in the shortlist."""
    expected_recall: float
    """Mean of `p_answer`: the share of plain search's answers that are right, if the probabilities are."""
    changed: float
    """Share of queries whose most probable item is not plain search's answer."""


def open_reranker(
    model: Path, gallery: Path, direction: str, *, device: str, world: World = ALONE, **settings: Any
) -> BayesReranker:
    """The re-ranker, uncalibrated, of a saved flow and a gallery on disk."""
    reranker = BayesReranker(GeoFlow.from_pretrained(model), Gallery(gallery, world=world), direction, **settings)
    return reranker.to(usable_device(device))


def settle_calibration(
    reranker: BayesReranker, model: Path, kept: Path | None, held_out: Path | None, *, overwrite: bool = False
) -> None:
    """Gives the re-ranker the calibration in the file `kept`, else the one in the model's folder if there is one.

    A folder of `held_out` pairs makes it, if it is not there, and keeps it there. One that was made of other pairs is
    in the way, unless `overwrite`. Of several ranks one makes it.
    """
    world, file = reranker.gallery.world, reranker.calibration_file(kept or model)
    if held_out is None:
        if kept is not None or file.is_file():
            reranker.load_calibration(file)
        return
    pairs = EmbeddingPairs.open(held_out, world=world)
    if world.share(overwrite or not file.is_file()):
        if world.is_main:
            reranker.calibrate(pairs)
            reranker.save_calibration(file)
        world.barrier()
        reranker.load_calibration(file)
    elif reranker.load_calibration(file).pairs != pairs.fingerprint():
        raise FileExistsError(f"{file} was made of other pairs; move it, or ask to overwrite")


def rerank_file(
    reranker: BayesReranker,
    queries: Path,
    out: Path,
    *,
    block: int = BLOCK_QUERIES,
    overwrite: bool = False,
    progress: bool | None = None,
) -> RerankSummary:
    """Re-ranks the shortlists of the rows of `queries` into the Parquet file `out`, as `score_file` scores them.

    Columns: `query`, the lists `index` and `prob` in order of probability, and `answer`, `p_answer`, `p_outside`,
    `entropy` (nats) and `risk_lower_bound`. The ranks of the gallery's world share the queries.
    """
    world = reranker.gallery.world
    rows = open_queries(queries, reranker.query_dim, world)
    fitted = reranker.calibration
    facts = {
        "task": "rerank",
        "format": FORMAT,
        **reranker.settings,
        "calibration": None if fitted is None else [*fitted.weights, fitted.right_per_query],
        "flow": flow_digest(reranker.flow),
        "queries": rows.digest(world),
        "gallery": reranker.gallery.digest(),
    }

    def compute(index: range, advance: Advance) -> Columns:
        numbers = np.arange(index.start, index.stop)
        found = reranker.rerank(torch.from_numpy(rows[numbers]), advance=advance)
        return {"query": numbers, **{name: getattr(found, name).cpu().numpy() for name in COLUMNS}}

    job = Job(out, len(rows), block, facts)
    job.run(compute, overwrite=overwrite, unit="queries", progress=progress, world=world)
    return summarise_reranking(out, reranker)


def summarise_reranking(path: Path, reranker: BayesReranker) -> RerankSummary:
    """Summary of a file that `rerank_file` wrote."""
    found = parquet.read_columns(path, ["index", "answer", "p_answer", "p_outside"])
    return RerankSummary(
        queries=len(found["answer"]),
        items=len(reranker.gallery),
        calibrated=reranker.calibration is not None,
        p_answer=quantiles(found["p_answer"]),
        p_outside=quantiles(found["p_outside"]),
        expected_recall=float(found["p_answer"].mean()),
        changed=float(np.mean([best[0] for best in found["index"]] != found["answer"])),
    )
