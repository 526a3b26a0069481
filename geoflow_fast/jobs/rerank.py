"""Re-ranking of a file of queries into one Parquet file, with a calibration that is computed once and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.qrels import Qrels, judged_columns
from geoflow_fast.data.rows import Rows
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.precision import settled_precision
from geoflow_fast.head.model import HEAD_FOLDER, PosteriorHead
from geoflow_fast.jobs.calibration import (
    StoredCalibration,
    made_elsewhere,
    made_in_training,
    searched_facts,
    settle_ladder,
)
from geoflow_fast.jobs.entropy import HEAD, model_kind
from geoflow_fast.jobs.job import quantiles
from geoflow_fast.jobs.queries import BLOCK_QUERIES, Naming, answer_queries, open_queries
from geoflow_fast.retrieval.calibration import Calibration
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.hubs import MOST_ROWS
from geoflow_fast.retrieval.rerank import BayesReranker
from geoflow_fast.runtime import hashing, parquet
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.files import contents_of
from geoflow_fast.runtime.hub import WEIGHTS_FILE
from geoflow_fast.runtime.progress import Advance

FORMAT = 1
"""This number goes up when a release computes other results from the same settings, so that it does not continue the
blocks of an older one."""
MOST_QUERIES = 500
"""Held-out queries of the model, at most, on which the ladder is fitted to a gallery."""
EVIDENCE, EXPLAINED = "evidence_", 10
"""The beginning of the names of columns of evidence, and how many hits have it."""
COLUMNS = ("index", "prob", "answer", "p_answer", "p_outside", "entropy", "risk_lower_bound")


@dataclass(frozen=True)
class RerankSummary:
    """A summary of a file of re-ranked shortlists."""

    queries: int
    items: int
    calibrated: bool
    p_answer: dict[str, float]
    """Quantiles of the probability that plain search's answer is right, by name ("5%", ...)."""
    p_outside: dict[str, float]
    """Quantiles of the probability that the right item is not in the shortlist."""
    expected_recall: float
    """Mean of `p_answer`. It is the share of plain search's answers that are right if the probabilities are right."""
    changed: float
    """Share of queries whose most probable item is not plain search's answer."""


def open_reranker(
    model: Path | None,
    gallery: Path,
    direction: str,
    *,
    device: str,
    precision: str = "float32",
    head: Path | None = None,
    bank: Path | None = None,
    world: World = ALONE,
    normalize: bool = False,
    **settings: Any,
) -> BayesReranker:
    """Returns the re-ranker of saved models and a gallery on disk, uncalibrated. `model` holds a flow, beside which a
    head may stand that `geoflow train` wrote, or a head. `head` names another one, `bank` a file of queries. Without
    models the evidence is the cosine and its correction for hubs. `precision` is that of the flow's products."""
    flow, own_head = open_models(model, head)
    if flow is None and precision != "float32":
        raise ValueError(f"precision {precision} is a setting of flows, and there is none to re-rank by")
    typical = None if bank is None else bank_queries(bank, normalize=normalize)
    items = Gallery(gallery, world=world, normalize=normalize)
    reranker = BayesReranker(flow, items, direction, head=own_head, bank=typical, **settings)
    where = usable_device(device)
    reranker.precision = settled_precision(precision, where)
    return reranker.to(where)


def bank_queries(path: Path, *, normalize: bool) -> Tensor:
    """Returns at most `MOST_ROWS` rows of a file or folder of queries, evenly spaced: [R, d]."""
    rows = open_rows(path, "bank queries")
    rows.check(normalize=normalize)
    if len(rows) == 0:
        raise ValueError(f"bank queries {path} are empty")
    return torch.from_numpy(rows[np.linspace(0, len(rows) - 1, min(MOST_ROWS, len(rows))).astype(np.int64)])


def open_models(model: Path | None, head: Path | None) -> tuple[GeoFlow | None, PosteriorHead | None]:
    """The flow and the head that the folder of a model holds, or the head of the folder `head`."""
    if model is None:
        return None, None if head is None else PosteriorHead.from_pretrained(head)
    if model_kind(model) == HEAD:
        if head is not None:
            raise ValueError(f"{model} holds a head, so --head {head} would be a second one")
        return None, PosteriorHead.from_pretrained(model)
    beside = model / HEAD_FOLDER
    chosen = head if head is not None else beside if (beside / WEIGHTS_FILE).is_file() else None
    return GeoFlow.from_pretrained(model), None if chosen is None else PosteriorHead.from_pretrained(chosen)


def settle_calibration(
    reranker: BayesReranker,
    model: Path | None,
    kept: Path | None,
    held_out: Path | None,
    *,
    normalize: bool = False,
    overwrite: bool = False,
) -> str:
    """Gives the re-ranker the calibration in the file `kept` or, without `kept`, the one that belongs to the model, and
    returns where it comes from, or why there is none, in words. One of them is needed.

    With a folder of `held_out` pairs, a calibration that does not exist yet is computed by the main rank and written to
    that file; `normalize` scales them to unit norm. One that was computed from other pairs, for another gallery or with
    another bank is a FileExistsError, unless `overwrite` is set or it was fitted on what training held out, which can
    be done again.
    """
    where = kept or model
    if where is None:
        raise ValueError("without --model, give --held-out pairs to calibrate on, or a --calibration")
    world, file = reranker.gallery.world, reranker.calibration_file(where)
    if held_out is None:
        if kept is not None or model is None:
            reranker.load_calibration(file)
            return f"calibrated by {file}"
        return _calibration_of_model(reranker, model)
    pairs = EmbeddingPairs.open(held_out, normalize=normalize, world=world)
    source = hashing.fingerprint({"pairs": pairs.fingerprint(), **searched_facts(reranker)})
    _use_or_fit(reranker, file, source, lambda: reranker.calibrate(pairs), overwrite=overwrite)
    return f"calibrated on {held_out}"


def calibrate_on_judgements(
    reranker: BayesReranker,
    file: Path,
    qrels: Path,
    queries: Path,
    *,
    normalize: bool,
    naming: Naming,
    overwrite: bool,
) -> str:
    """Calibrates on a file of judgements of the gallery's rows for the rows of `queries`, saves that, and returns where
    it comes from in words. The ids of `naming`, if given, are those of the gallery and of these queries.

    A calibration on the same judgements and queries, for the same gallery and bank, is used again. Any other is a
    FileExistsError, unless `overwrite` is set or it was fitted on what training held out.
    """
    world, file = reranker.gallery.world, reranker.calibration_file(file)
    rows = open_queries(queries, reranker.query_dim, world, normalize=normalize)
    known = open_judgements(qrels, naming, rows, reranker.gallery)
    asked = rows[np.arange(len(rows))]
    judged = hashing.digest([known.query, known.item, known.grade, asked])
    source = hashing.fingerprint({"judgements": judged, **searched_facts(reranker)})

    def fit() -> Calibration:
        return reranker.calibrate(known, queries=torch.from_numpy(asked))

    _use_or_fit(reranker, file, source, fit, overwrite=overwrite)
    return f"calibrated in this gallery on the judgements of {qrels}, kept in {file}"


def _use_or_fit(
    reranker: BayesReranker, file: Path, source: str, fit: Callable[[], Calibration], *, overwrite: bool
) -> None:
    """Loads the calibration in `file` if it was fitted on the data of the digest `source`. Without one, with
    `overwrite`, and if it was fitted on what training held out, the main rank fits it and writes it to that file; any
    other one is a FileExistsError."""
    world = reranker.gallery.world
    if world.share(overwrite or not file.is_file() or made_in_training(file)):
        if world.is_main:
            reranker.calibration = dataclasses.replace(fit(), pairs=source)
            reranker.save_calibration(file)
        world.barrier()
        reranker.load_calibration(file)
    elif reranker.load_calibration(file).pairs != source:
        raise FileExistsError(
            f"{file} was computed from other pairs or judgements, for another gallery or with another bank; move it, "
            "name another --calibration, or ask to overwrite"
        )


def open_judgements(path: Path, naming: Naming, queries: Rows, items: Rows | Gallery) -> Qrels:
    """The judgements of a file, by row numbers; ids that it holds are looked up in the files of `naming`, or among
    those that the rows come with."""
    columns = judged_columns(path)
    for name, ids, what in (
        ("query", naming.of_queries(queries), "queries"),
        ("item", naming.of_items(items), "items"),
    ):
        if ids is not None:
            columns[name] = ids.rows(columns[name], str(path))
        elif columns[name].dtype.kind not in "iu" and len(columns[name]):
            raise ValueError(f"{path} names {what} by ids such as {columns[name][0]!r}: give the file of their ids")
    with contents_of(path, "no file of judgements"):
        return Qrels(**columns)


def _calibration_of_model(reranker: BayesReranker, model: Path) -> str:
    """Uses the held-out pairs that `geoflow train` stored, unless the user has calibrated the model on other pairs."""
    world, file, stored = reranker.gallery.world, reranker.calibration_file(model), StoredCalibration.read(model)
    pairs = None if stored is None else stored.pairs(world)
    if pairs is None or world.share(made_elsewhere(file, pairs)):
        if not file.is_file():
            return f"{model} holds no held-out pairs from training"
        reranker.load_calibration(file)
        return f"calibrated by {file}"
    assert stored is not None
    entry = settle_ladder(stored, reranker, pairs, max_queries=MOST_QUERIES).ladder[str(reranker.direction)]
    if "reason" in entry:
        return f"its {stored.held_out} do not suffice: {entry['reason']}"
    kept = f"; not kept, as {model} cannot be written to" if "not_kept" in entry else ""
    return f"calibrated in this gallery on {stored.held_out} of {model}{kept}"


def rerank_file(
    reranker: BayesReranker,
    queries: Path,
    out: Path,
    *,
    block: int = BLOCK_QUERIES,
    overwrite: bool = False,
    progress: bool | None = None,
    normalize: bool = False,
    naming: Naming | None = None,
) -> RerankSummary:
    """Re-ranks the shortlists of the rows of `queries` into the Parquet file `out`, as `score_file` scores them.

    Columns: `query`, the lists `index` and `prob` in order of probability, and `answer`, `p_answer`, `p_outside`,
    `entropy` (nats) and `risk_lower_bound`; and, for the first hits, the lists `evidence_cosine` and so on, what each
    kind of evidence added to their logits. The ranks of the gallery's world share the queries.
    """
    rows = open_queries(queries, reranker.query_dim, reranker.gallery.world, normalize=normalize)
    fitted = reranker.calibration
    facts = {
        "task": "rerank",
        "format": FORMAT,
        "calibration": None if fitted is None else fitted.identity,
    }
    names = COLUMNS if reranker.budget is None else (*COLUMNS, "asked_flow")
    kinds = [f"{EVIDENCE}{name}" for name in reranker.evidence_names]

    def answer(block: Tensor, advance: Advance) -> SimpleNamespace:
        reranked = reranker.rerank(block, advance=advance)
        told = reranked.evidence[:, :EXPLAINED].unbind(2)
        return SimpleNamespace(**{name: getattr(reranked, name) for name in names}, **dict(zip(kinds, told)))

    answer_queries(
        reranker,
        rows,
        out,
        facts,
        answer,
        (*names, *kinds),
        block=block,
        overwrite=overwrite,
        progress=progress,
        naming=naming,
    )
    columns = parquet.read_columns(out, ["index", "answer", "p_answer", "p_outside"])
    return RerankSummary(
        queries=len(rows),
        items=len(reranker.gallery),
        calibrated=fitted is not None,
        p_answer=quantiles(columns["p_answer"]),
        p_outside=quantiles(columns["p_outside"]),
        expected_recall=float(columns["p_answer"].mean()),
        changed=float(np.mean([best[0] for best in columns["index"]] != columns["answer"])),
    )
