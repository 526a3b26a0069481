"""Compares methods on the same queries: each is fitted, scores every query, and is judged by the metrics."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.evaluation import registry
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.metrics import (
    BINS,
    answered_share,
    auroc_leads,
    reliability,
    retrieval_calibration,
    selective_accuracy,
)
from geoflow_fast.evaluation.results import ERRORS, FORMAT, Comparison, Result
from geoflow_fast.evaluation.retrieval import Answers, plain_search
from geoflow_fast.evaluation.statistics import RESAMPLES, Floats, check_resamples
from geoflow_fast.jobs.job import Job
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import checks, hashing, parquet
from geoflow_fast.runtime.parquet import Columns
from geoflow_fast.runtime.progress import Advance, Announce

BLOCK_QUERIES = 256
SCORES_FOLDER = "scores"


def compare(
    study: Study,
    test: EmbeddingPairs | RetrievalTask,
    names: Sequence[str | Method] | None = None,
    *,
    directions: Sequence[str] | None = None,
    max_queries: int | None = None,
    bins: int = BINS,
    resamples: int = RESAMPLES,
    folder: Path | None = None,
    announce: Announce = lambda _: None,
    report: Callable[[Comparison], object] = lambda _: None,
) -> Comparison:
    """Compares every method of `names` on the queries of `test`, in every direction. By default these are all that the
    study allows. Instead of a name, a method that already exists may be given, with a study of its own. Instead of
    pairs, `test` may be a task, such as that of judgements (`RetrievalTask.from_qrels`), which has a direction and
    queries of its own.

    The cheapest methods come first. `report` is given what is known so far: once after those that cost next to nothing,
    and then after every other method but the last.

    With a `folder`, the scores of single queries are kept in it as Parquet files, and those that are there are not
    computed again, so that a comparison that was stopped can continue. The images are resampled `resamples` times for
    the intervals; 0 asks for no intervals.
    """
    check_resamples(resamples)
    chosen = registry.chosen(names, study)
    tasks = tasks_of(test, directions, max_queries, study.seed)
    for task in tasks:
        check_bins(len(task), bins)
        if task.queries.shape[1] != study.val.image_dim:
            raise ValueError(
                f"test has rows of width {task.queries.shape[1]}, but the held-out pairs have {study.val.image_dim}"
            )
        for method in chosen:
            method.check(task)
    operations = [method.operations(sum(map(len, tasks))) for method in chosen]
    plain = [plain_search(task) for task in tasks]
    for task, answers in zip(tasks, plain):
        sizes = f"{len(task)} queries over {len(task.items)} items"
        announce(f"{task.direction}: {sizes}, plain Recall@1 {answers.recall(1):.3f}")
    train_pairs = None if study.train is None else len(study.train)
    size = {"test_queries" if isinstance(test, RetrievalTask) else "test_pairs": len(test)}
    facts = {**size, "val_pairs": len(study.val), "train_pairs": train_pairs, "seed": study.seed}
    scored: dict[int, list[ScoredQueries]] = {}

    def known() -> Comparison:
        """The results of the methods that are done, direction by direction, in the order in which they were named."""
        sides = [[scored[k][side] for k in sorted(scored)] for side in range(len(tasks))]
        return Comparison([result for side in sides for result in judge(side, bins, resamples)], facts)

    for k in sorted(range(len(chosen)), key=lambda k: operations[k]):
        if scored and operations[k]:
            report(known())
        sides = []
        for task, answers in zip(tasks, plain):
            announce(f"{task.direction}: {chosen[k].title}")
            sides.append(score_queries(chosen[k], task, answers, folder))
        scored[k] = sides
    return known()


def tasks_of(
    test: EmbeddingPairs | RetrievalTask, directions: Sequence[str] | None, max_queries: int | None, seed: int
) -> list[RetrievalTask]:
    """The task itself, or those of pairs in these directions, by default both."""
    if not isinstance(test, RetrievalTask):
        chosen = CONDITIONAL[::-1] if directions is None else directions
        return [RetrievalTask.of(test, direction, max_queries=max_queries, seed=seed) for direction in chosen]
    if directions is not None or max_queries is not None:
        raise ValueError("directions and max_queries belong to pairs; a task has a direction and queries of its own")
    return [test]


def check_bins(queries: int, bins: int = BINS) -> None:
    """Raises a ValueError if there are too few `queries` for the bins."""
    if queries < checks.integer(bins, "bins", 2):
        raise ValueError(f"{queries} queries cannot fill {bins} bins: give more test pairs or ask for fewer bins")


@dataclass(frozen=True)
class ScoredQueries:
    """What one method said about the queries of one direction, and what was true of them."""

    method: str
    title: str
    training: str
    direction: str
    seed: int
    items: int
    """Size of the gallery; the largest one, if folds have their own."""
    columns: Columns
    """[Q] each: the fields of `Scores`, `fit_seconds` and `score_seconds`; `first_right`, the share of right items
    among those that tie for plain search's first place; `own_right`, the same for the method's own first item, NaN if
    it has no ranking; and `image`, the number of the query's image."""

    @classmethod
    def pooled(cls, folds: Sequence[ScoredQueries]) -> ScoredQueries:
        """The queries of all folds of one data set, whose images differ from fold to fold."""
        keys = {(fold.method, fold.direction) for fold in folds}
        if len(keys) != 1:
            raise ValueError(f"folds must be of one method and direction, got {sorted(keys)}")
        columns = {name: np.concatenate([fold.columns[name] for fold in folds]) for name in folds[0].columns}
        sizes = [0, *(int(fold.columns["image"].max()) + 1 for fold in folds[:-1])]
        shift = np.repeat(np.cumsum(sizes), [len(fold.columns["image"]) for fold in folds])
        columns["image"] = columns["image"] + shift
        return dataclasses.replace(folds[0], items=max(fold.items for fold in folds), columns=columns)


def score_queries(method: Method, task: RetrievalTask, answers: Answers, folder: Path | None = None) -> ScoredQueries:
    """Fits the method and scores every query of the task, whose `answers` plain search gave.

    With a `folder`, the scores are kept in it, and those that are there are not computed again.
    """
    scores = _scores(method, task, answers.index[:, 0], folder)
    has_ranking = bool((scores["top"] >= 0).all())
    known = {
        "first_right": answers.first_right.numpy(),
        "own_right": hits_of(task, scores["top"]) if has_ranking else np.full(len(task), math.nan),
        "image": task.query_image.numpy(),
    }
    about = method.name, method.title, method.training, str(task.direction), method.study.seed, len(task.items)
    return ScoredQueries(*about, {**scores, **known})


def judge(scored: Sequence[ScoredQueries], bins: int = BINS, resamples: int = RESAMPLES) -> list[Result]:
    """The results of methods that scored the same queries, with their leads over each other if there are resamples."""
    results = [_result(method, bins, resamples) for method in scored]
    if not resamples or not scored:
        return results
    uncertainty = {method.method: method.columns["uncertainty"] for method in scored}
    right, images = (scored[0].columns[name] for name in ("first_right", "image"))
    leads = auroc_leads(uncertainty, right, resamples=resamples, groups=images)
    return [
        dataclasses.replace(result, lead={name: [x.value, x.low, x.high] for name, x in leads[result.method].items()})
        for result in results
    ]


def _scores(method: Method, task: RetrievalTask, answers: Tensor, folder: Path | None) -> Columns:
    """The method's scores of every query. Those that are in the folder are read, the others are computed."""

    def compute(index: range, advance: Advance) -> Columns:
        rows = slice(index.start, index.stop)
        begin = time.perf_counter()
        scores = method.score(rows, answers[rows])
        seconds = (time.perf_counter() - begin) / len(index)
        advance(len(index))
        return {
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
    job = Job(out, len(task), BLOCK_QUERIES, _facts(method, task), numbered="query", ids=task.query_ids)
    job.check()
    if not job.finished():
        method.fit(task)
        job.run(compute, unit="queries", progress=method.study.progress)
    return parquet.read_columns(out)


def _facts(method: Method, task: RetrievalTask) -> dict[str, Any]:
    """What stored scores are recognised by: everything that they depend on."""
    known = [task.query_image, task.item_image] if task.judged is None else [task.judged]
    return {
        "task": "evaluate",
        "format": FORMAT,
        "method": method.name,
        "direction": str(task.direction),
        "seed": method.study.seed,
        "val": method.study.val.fingerprint(),
        "test": hashing.digest([task.queries, task.items, *known]),
        **method.facts(),
    }


def _result(scored: ScoredQueries, bins: int, resamples: int) -> Result:
    """Judges the scores of a method."""
    columns = scored.columns
    uncertainty, first_right = columns["uncertainty"], columns["first_right"]
    # The captions of one image are not independent of each other, so the bootstrap draws them together.
    calibration = retrieval_calibration(uncertainty, first_right, bins, resamples=resamples, groups=columns["image"])
    curve = selective_accuracy(uncertainty, first_right)
    states_probabilities = not np.isnan(columns["p_answer"]).any()
    stated = reliability(columns["p_answer"], first_right) if states_probabilities else None
    names = ("confidence", "accuracy", "count")
    stated_bins = None if stated is None else {name: getattr(stated, name).tolist() for name in names}
    has_ranking = not np.isnan(columns["own_right"]).any()
    numbers = {
        "auroc": calibration.auroc,
        "aurc": calibration.aurc,
        "ausac": curve.ausac,
        "spearman": calibration.spearman,
        "r2": calibration.r2,
        "r2_value": calibration.r2_value,
        "recall": float(columns["own_right" if has_ranking else "first_right"].mean()),
        "nll": float(np.mean(columns["nll"])),
        "ece": math.nan if stated is None else stated.ece,
        "fit_seconds": float(columns["fit_seconds"].max()),
        "score_ms": 1000 * float(columns["score_seconds"].mean()),
    }
    return Result(
        method=scored.method,
        title=scored.title,
        direction=scored.direction,
        queries=len(uncertainty),
        items=scored.items,
        plain_recall=float(first_right.mean()),
        numbers=numbers,
        bin_recall=calibration.recall.tolist(),
        coverage=curve.coverage.tolist(),
        accuracy=curve.accuracy.tolist(),
        intervals={name: [x.low, x.high] for name, x in calibration.intervals.items() if name in numbers},
        stated=stated_bins,
        training=scored.training,
        answered=[answered_share(uncertainty, first_right, error) for error in ERRORS],
        seeds=[scored.seed],
    )


def hits_of(task: RetrievalTask, top: NDArray[np.int64]) -> Floats:
    """[Q], 1 where the item `top` [Q] is right. No method can tell items with the very same embedding apart, so a query
    counts with the share of right ones among those that equal its `top`."""
    rows = task.items.contiguous().numpy()
    _, twins, count = np.unique(rows.view(f"V{rows[0].nbytes}").squeeze(1), return_inverse=True, return_counts=True)
    own, group = task.own.numpy(), twins[top]
    right = ((twins[own] == group[:, None]) & (own >= 0)).sum(1)
    return right / count[group]
