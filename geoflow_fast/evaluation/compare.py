"""Compares methods on the same queries: each is fitted, scores every query, and is judged by the metrics."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.evaluation import registry
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.metrics import BINS, auroc_leads, reliability, retrieval_calibration, selective_accuracy
from geoflow_fast.evaluation.results import FORMAT, Comparison, Result
from geoflow_fast.evaluation.retrieval import Answers, plain_search
from geoflow_fast.evaluation.statistics import RESAMPLES, Floats, check_resamples
from geoflow_fast.jobs.job import Job
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import checks, hashing, parquet
from geoflow_fast.runtime.parquet import Columns
from geoflow_fast.runtime.progress import Advance, Announce

BLOCK_QUERIES = 256
SCORES_FOLDER, RUNS_FOLDER = "scores", "runs"


def compare(
    study: Study,
    test: EmbeddingPairs,
    names: Sequence[str | Method] | None = None,
    *,
    directions: Sequence[str] = CONDITIONAL[::-1],
    max_queries: int | None = None,
    bins: int = BINS,
    resamples: int = RESAMPLES,
    folder: Path | None = None,
    announce: Announce = lambda _: None,
) -> Comparison:
    """Compares every method of `names` (by default all that the study allows) on the queries of `test`, in every
    direction. Instead of a name, a method that already exists may be given, with a study of its own.

    With a `folder`, the scores of single queries are kept in it as Parquet files, and those that are there are not
    computed again, so that a comparison that was stopped can continue. The images are resampled `resamples` times for
    the intervals; 0 asks for no intervals.
    """
    check_resamples(resamples)
    chosen = [
        name if isinstance(name, Method) else registry.create(name, study)
        for name in (names or registry.default_methods(study))
    ]
    tasks = [RetrievalTask.of(test, direction, max_queries=max_queries, seed=study.seed) for direction in directions]
    for task in tasks:
        check_bins(len(task), bins)
        for method in chosen:
            method.check(task)
    results = []
    for task in tasks:
        answers = plain_search(task)
        sizes = f"{len(task)} queries over {len(task.items)} items"
        announce(f"{task.direction}: {sizes}, plain Recall@1 {answers.recall(1):.3f}")
        scored: dict[str, Columns] = {}
        judged = []
        for method in chosen:
            announce(f"{task.direction}: {method.title}")
            scored[method.name] = _scores(method, task, answers.index[:, 0], folder)
            judged.append(_result(method, task, answers, scored[method.name], bins, resamples))
        results += _with_leads(judged, scored, task, answers, resamples)
    train_pairs = None if study.train is None else len(study.train)
    facts = {"test_pairs": len(test), "val_pairs": len(study.val), "train_pairs": train_pairs, "seed": study.seed}
    return Comparison(results, facts)


def check_bins(queries: int, bins: int = BINS) -> None:
    """Raises a ValueError if there are too few `queries` for the bins."""
    if queries < checks.integer(bins, "bins", 2):
        raise ValueError(f"{queries} queries cannot fill {bins} bins: give more test pairs or ask for fewer bins")


def _scores(method: Method, task: RetrievalTask, answers: Tensor, folder: Path | None) -> Columns:
    """The method's scores of every query. Those that are in the folder are read, the others are computed."""

    def compute(index: range, advance: Advance) -> Columns:
        rows = slice(index.start, index.stop)
        begin = time.perf_counter()
        scores = method.score(rows, answers[rows])
        seconds = (time.perf_counter() - begin) / len(index)
        advance(len(index))
        return {
            "query": np.arange(index.start, index.stop),
            **{part.name: getattr(scores, part.name).numpy() for part in dataclasses.fields(scores)},
            "score_seconds": np.full(len(index), seconds),
            "fit_seconds": np.full(len(index), method.fit_seconds),
        }

    if folder is None:
        method.fit(task)
        blocks = range(0, len(task), BLOCK_QUERIES)
        parts = [compute(range(k, min(k + BLOCK_QUERIES, len(task))), lambda _: None) for k in blocks]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    out = folder / SCORES_FOLDER / f"{method.name}_{task.direction}.parquet"
    job = Job(out, len(task), BLOCK_QUERIES, _facts(method, task))
    job.check()
    if not job.finished():
        method.fit(task)
        job.run(compute, unit="queries", progress=method.study.progress)
    return parquet.read_columns(out)


def _facts(method: Method, task: RetrievalTask) -> dict[str, Any]:
    """What stored scores are recognised by: everything that they depend on."""
    return {
        "task": "evaluate",
        "format": FORMAT,
        "method": method.name,
        "direction": str(task.direction),
        "seed": method.study.seed,
        "val": method.study.val.fingerprint(),
        "test": hashing.digest([task.queries, task.items, task.query_image, task.item_image]),
        **method.facts(),
    }


def _result(
    method: Method, task: RetrievalTask, answers: Answers, scores: Columns, bins: int, resamples: int
) -> Result:
    """Judges the scores of a method."""
    uncertainty, first_right = scores["uncertainty"], answers.first_right.numpy()
    # The captions of one image are not independent of each other, so the bootstrap draws them together.
    images = task.query_image.numpy()
    calibration = retrieval_calibration(uncertainty, first_right, bins, resamples=resamples, groups=images)
    curve = selective_accuracy(uncertainty, first_right)
    states_probabilities = not np.isnan(scores["p_answer"]).any()
    stated = reliability(scores["p_answer"], first_right) if states_probabilities else None
    names = ("confidence", "accuracy", "count")
    stated_bins = None if stated is None else {name: getattr(stated, name).tolist() for name in names}
    has_ranking = (scores["top"] >= 0).all()
    numbers = {
        "auroc": calibration.auroc,
        "aurc": calibration.aurc,
        "ausac": curve.ausac,
        "spearman": calibration.spearman,
        "r2": calibration.r2,
        "r2_value": calibration.r2_value,
        "recall": float(hits_of(task, scores["top"]).mean()) if has_ranking else answers.recall(1),
        "nll": float(np.mean(scores["nll"])),
        "ece": math.nan if stated is None else stated.ece,
        "fit_seconds": float(scores["fit_seconds"].max()),
        "score_ms": 1000 * float(scores["score_seconds"].mean()),
    }
    return Result(
        method=method.name,
        title=method.title,
        direction=str(task.direction),
        queries=len(task),
        items=len(task.items),
        plain_recall=answers.recall(1),
        numbers=numbers,
        bin_recall=calibration.recall.tolist(),
        coverage=curve.coverage.tolist(),
        accuracy=curve.accuracy.tolist(),
        intervals={name: [x.low, x.high] for name, x in calibration.intervals.items() if name in numbers},
        stated=stated_bins,
        training=method.training,
        seeds=[method.study.seed],
    )


def _with_leads(
    results: Sequence[Result], scored: Mapping[str, Columns], task: RetrievalTask, answers: Answers, resamples: int
) -> list[Result]:
    """The results of one direction with their leads over each other, if there are resamples."""
    if not resamples:
        return list(results)
    uncertainty = {name: scores["uncertainty"] for name, scores in scored.items()}
    right, images = answers.first_right.numpy(), task.query_image.numpy()
    leads = auroc_leads(uncertainty, right, resamples=resamples, groups=images)
    return [
        dataclasses.replace(result, lead={name: [x.value, x.low, x.high] for name, x in leads[result.method].items()})
        for result in results
    ]


def hits_of(task: RetrievalTask, top: NDArray[np.int64]) -> Floats:
    """[Q], 1 where the item `top` [Q] is right. No method can tell items with the very same embedding apart, so a query
    counts with the share of right ones among those that equal its `top`."""
    rows = task.items.contiguous().numpy()
    _, twins, count = np.unique(rows.view(f"V{rows[0].nbytes}").squeeze(1), return_inverse=True, return_counts=True)
    own, group = task.own.numpy(), twins[top]
    right = ((twins[own] == group[:, None]) & (own >= 0)).sum(1)
    return right / count[group]
