"""Methods side by side on the same queries: one row of numbers and the curves of each, over one seed or several."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.evaluation import methods
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.metrics import (
    BINS,
    Reliability,
    SelectiveAccuracy,
    reliability,
    retrieval_calibration,
    selective_accuracy,
)
from geoflow_fast.evaluation.retrieval import RetrievalSet, plain_search
from geoflow_fast.evaluation.statistics import RESAMPLES, check_resamples
from geoflow_fast.jobs.job import Job
from geoflow_fast.runtime import checks, hashing, parquet
from geoflow_fast.runtime.files import read_json, write_json
from geoflow_fast.runtime.parquet import Columns
from geoflow_fast.runtime.progress import Advance

FORMAT = 1
"""Raised when equal settings come to give other scores, so that those of an older release are not taken over."""
BLOCK_QUERIES = 256
RESULTS_JSON, RESULTS_PARQUET = "results.json", "results.parquet"
SCORES_FOLDER, RUNS_FOLDER = "scores", "runs"

COLUMNS: dict[str, tuple[str, str | None]] = {
    "auroc": ("AUROC", "max"),
    "aurc": ("AURC", "min"),
    "ausac": ("AUSAC", "max"),
    "spearman": ("Spearman", "min"),
    "r2": ("R^2", "max"),
    "r2_value": ("R^2, value", "max"),
    "recall": ("Recall@1", "max"),
    "nll": ("NLL, nats", "min"),
    "ece": ("ECE", "min"),
    "fit_seconds": ("fit, s", None),
    "score_ms": ("score, ms/query", None),
}
"""Numbers of a result: as tables head them, and which is best."""


@dataclass(frozen=True)
class Result:
    """One method in one direction. Means over `runs` with standard deviations in `spread` if there are several."""

    method: str
    title: str
    direction: str
    queries: int
    items: int
    plain_recall: float
    """Recall@1 of plain search."""
    numbers: dict[str, float]
    """By the names of `COLUMNS`; NaN where the method states no probabilities. `recall` is that of the method's own
    ranking, or of plain search if it has none."""
    bin_recall: list[float]
    """Recall@1 of plain search in bins of the uncertainty, most certain first."""
    coverage: list[float]
    accuracy: list[float]
    """Of plain search at these coverages."""
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """[low, high] of some numbers, by bootstrap over images."""
    stated: dict[str, list[float]] | None = None
    """`confidence`, `accuracy` and `count` of the bins of a reliability diagram, if it states probabilities."""
    seeds: list[int] = field(default_factory=lambda: [0])
    spread: dict[str, float] = field(default_factory=dict)
    bin_recall_spread: list[float] = field(default_factory=list)
    accuracy_spread: list[float] = field(default_factory=list)

    @property
    def runs(self) -> int:
        """How many seeds this is the mean of."""
        return len(self.seeds)

    def row(self) -> dict[str, object]:
        """As a table shows it, without the direction."""
        found: dict[str, object] = {"method": self.title}
        for name, (heading, _) in COLUMNS.items():
            value = self.numbers[name]
            found[heading] = None if math.isnan(value) else value
            if name in ("auroc", "aurc"):
                found |= self._uncertain(name, heading)
        return found

    def _uncertain(self, name: str, heading: str) -> dict[str, object]:
        if self.runs > 1:
            return {f"{heading}, sd": self.spread[name]}
        if name in self.intervals:
            low, high = self.intervals[name]
            return {f"{heading}, 95 %": "–" if math.isnan(low) else f"{low:.3f} to {high:.3f}"}
        return {}


@dataclass(frozen=True)
class Comparison:
    """Results of all methods in all directions."""

    results: list[Result]
    facts: dict[str, Any] = field(default_factory=dict)
    """What they were made of."""

    def of(self, direction: str) -> list[Result]:
        """Of one direction, in the order of the methods."""
        return [result for result in self.results if result.direction == direction]

    @property
    def directions(self) -> list[str]:
        """Those that there are results of."""
        return list(dict.fromkeys(result.direction for result in self.results))

    def table(self, direction: str) -> list[dict[str, object]]:
        """One row per method."""
        return [result.row() for result in self.of(direction)]

    def best(self, direction: str) -> dict[str, str]:
        """Which of a column is best, for columns in which there is anything to compare."""
        rows = self.table(direction)
        return {
            heading: which
            for heading, which in COLUMNS.values()
            if which is not None and any(isinstance(row.get(heading), float) for row in rows)
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Writes `results.json` (everything) and `results.parquet` (the numbers), each whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"format": FORMAT, "facts": self.facts, "results": [dataclasses.asdict(r) for r in self.results]}
        columns = _flat(self.results)
        parquet.write_columns(folder / RESULTS_PARQUET, columns, len(self.results))
        write_json(folder / RESULTS_JSON, without_nan(facts))
        return [folder / RESULTS_JSON, folder / RESULTS_PARQUET]

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """What `save` wrote, by its folder or its JSON file."""
        path = checks.path(path, "path")
        path = path / RESULTS_JSON if path.is_dir() else path
        found = read_json(path, "the results of a comparison")
        try:
            if found["format"] != FORMAT:
                raise ValueError(f"{path} has format {found['format']}; this release reads {FORMAT}")
            return cls([Result(**_with_nan(result)) for result in found["results"]], found["facts"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged or not the results of a comparison: {error}") from error


def check_bins(queries: int, bins: int = BINS) -> None:
    """ValueError if `queries` are too few for the bins."""
    if queries < checks.integer(bins, "bins", 2):
        raise ValueError(f"{queries} queries cannot fill {bins} bins: give more test pairs or ask for fewer bins")


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
    say: Callable[[str], object] = lambda _: None,
) -> Comparison:
    """Every method of `names` (else all that the study allows) on the queries of `test`, in every direction. Methods
    that were made already, each of its own study, may stand among the names.

    With a `folder`, scores of single queries are kept in it as Parquet files, and what is there already is not computed
    again: a comparison that was stopped goes on. `resamples` of the images make the intervals; 0: none.
    """
    check_resamples(resamples)
    chosen = [
        name if isinstance(name, Method) else methods.create(name, study)
        for name in (names or methods.default_methods(study))
    ]
    tasks = [RetrievalSet.of(test, way, max_queries=max_queries, seed=study.seed) for way in directions]
    for task in tasks:
        check_bins(len(task), bins)
        for method in chosen:
            method.check(task)
    results = []
    for task in tasks:
        answers = plain_search(task)
        correct = answers.correct.numpy()
        say(f"{task.direction}: {len(task)} queries over {len(task.items)} items, plain Recall@1 {correct.mean():.3f}")
        for method in chosen:
            say(f"{task.direction}: {method.title}")
            scores = _scores(method, task, answers.index[:, 0], folder)
            results.append(_result(method, task, correct, scores, bins, resamples))
    return Comparison(results, _facts_of(study, test))


def _facts_of(study: Study, test: EmbeddingPairs) -> dict[str, Any]:
    sizes = {"test_pairs": len(test), "val_pairs": len(study.val)}
    return {**sizes, "train_pairs": None if study.train is None else len(study.train), "seed": study.seed}


def _scores(method: Method, task: RetrievalSet, answers: torch.Tensor, folder: Path | None) -> Columns:
    """Of every query, from the folder as far as they are there."""

    def compute(index: range, advance: Advance) -> Columns:
        rows = slice(index.start, index.stop)
        begin = time.perf_counter()
        found = method.score(rows, answers[rows])
        seconds = (time.perf_counter() - begin) / len(index)
        advance(len(index))
        return {
            "query": np.arange(index.start, index.stop),
            **{name.name: getattr(found, name.name).numpy() for name in dataclasses.fields(found)},
            "score_seconds": np.full(len(index), seconds),
            "fit_seconds": np.full(len(index), method.fit_seconds),
        }

    if folder is None:
        method.fit(task)
        blocks = range(0, len(task), BLOCK_QUERIES)
        parts = [compute(range(k, min(k + BLOCK_QUERIES, len(task))), lambda _: None) for k in blocks]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    facts = {
        "task": "evaluate",
        "format": FORMAT,
        "method": method.name,
        "direction": task.direction,
        "seed": method.study.seed,
        "val": method.study.val.fingerprint(),
        "test": hashing.digest([task.queries, task.items, task.query_image, task.item_image]),
        **method.facts(),
    }
    out = folder / SCORES_FOLDER / f"{method.name}_{task.direction}.parquet"
    job = Job(out, len(task), BLOCK_QUERIES, facts)
    job.check()
    if not job.finished():
        method.fit(task)
        job.run(compute, unit="queries", progress=method.study.progress)
    return parquet.read_columns(out)


def _result(
    method: Method, task: RetrievalSet, correct: NDArray[np.bool_], scores: Columns, bins: int, resamples: int
) -> Result:
    uncertainty = scores["uncertainty"]
    # Captions of one image stand or fall together.
    found = retrieval_calibration(uncertainty, correct, bins, resamples=resamples, groups=task.query_image.numpy())
    curve: SelectiveAccuracy = selective_accuracy(uncertainty, correct)
    stated: Reliability | None = None
    if not np.isnan(scores["p_answer"]).any():
        stated = reliability(scores["p_answer"], correct)
    recall = found.accuracy
    if (scores["top"] >= 0).all():
        recall = float(task.is_right(torch.from_numpy(np.array(scores["top"]))).double().mean())
    numbers = {
        "auroc": found.auroc,
        "aurc": found.aurc,
        "ausac": curve.ausac,
        "spearman": found.spearman,
        "r2": found.r2,
        "r2_value": found.r2_value,
        "recall": recall,
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
        plain_recall=found.accuracy,
        numbers=numbers,
        bin_recall=found.recall.tolist(),
        coverage=curve.coverage.tolist(),
        accuracy=curve.accuracy.tolist(),
        intervals={name: [x.low, x.high] for name, x in found.intervals.items() if name in numbers},
        stated=None if stated is None else _bins_of(stated),
        seeds=[method.study.seed],
    )


def _bins_of(stated: Reliability) -> dict[str, list[float]]:
    return {name: getattr(stated, name).tolist() for name in ("confidence", "accuracy", "count")}


def aggregate(comparisons: Iterable[Comparison]) -> Comparison:
    """Means and standard deviations over comparisons of the same methods, one per seed; intervals are dropped.

    A number that is missing in some seeds is the mean of the others.
    """
    runs = list(comparisons)
    if not runs:
        raise ValueError("there is nothing to aggregate")
    keys = [(result.method, result.direction) for result in runs[0].results]
    for number, run in enumerate(runs):
        if [(result.method, result.direction) for result in run.results] != keys:
            raise ValueError(f"comparison {number} has other methods or directions than the first")
    results = [_mean_of([run.results[place] for run in runs]) for place in range(len(keys))]
    return Comparison(results, {**runs[0].facts, "seed": None, "runs": len(runs)})


def _mean_of(results: Sequence[Result]) -> Result:
    """Of one method and direction over seeds."""
    if len(results) == 1:
        return results[0]
    names = results[0].numbers
    values = {name: np.array([result.numbers[name] for result in results]) for name in names}
    recall, accuracy = (np.array([getattr(r, name) for r in results]) for name in ("bin_recall", "accuracy"))
    return dataclasses.replace(
        results[0],
        plain_recall=float(np.mean([result.plain_recall for result in results])),
        numbers={name: _known(column, np.mean) for name, column in values.items()},
        spread={name: _known(column, _deviation) for name, column in values.items()},
        bin_recall=recall.mean(0).tolist(),
        bin_recall_spread=recall.std(0, ddof=1).tolist(),
        accuracy=accuracy.mean(0).tolist(),
        accuracy_spread=accuracy.std(0, ddof=1).tolist(),
        stated=_pooled([result.stated for result in results]),
        intervals={},
        seeds=[seed for result in results for seed in result.seeds],
    )


def _pooled(parts: Sequence[dict[str, list[float]] | None]) -> dict[str, list[float]] | None:
    """Bins of a reliability diagram over the queries of all parts."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    count = np.array([part["count"] for part in known])
    total = count.sum(0)
    pooled: dict[str, list[float]] = {"count": total.tolist()}
    for name in ("confidence", "accuracy"):
        sums = np.nansum(np.array([part[name] for part in known]) * count, axis=0)
        pooled[name] = np.where(total > 0, sums / np.maximum(total, 1), math.nan).tolist()
    return pooled


def _known(values: NDArray[np.float64], of: Callable[[Any], Any]) -> float:
    """A statistic of the values that are not NaN; NaN without any."""
    known = values[~np.isnan(values)]
    return float(of(known)) if len(known) else math.nan


def _deviation(values: NDArray[np.float64]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _flat(results: Sequence[Result]) -> dict[str, NDArray[Any]]:
    """The numbers of all results as columns."""
    columns: dict[str, list[Any]] = {}
    ends = sorted({name for result in results for name in result.intervals})
    for result in results:
        row: dict[str, Any] = {name: getattr(result, name) for name in ("method", "title", "direction")}
        row |= {"runs": result.runs, "queries": result.queries, "items": result.items}
        row |= {"plain_recall": result.plain_recall, **result.numbers}
        for name in COLUMNS:
            row[f"{name}_sd"] = result.spread.get(name, math.nan)
        for name in ends:
            row[f"{name}_low"], row[f"{name}_high"] = result.intervals.get(name, [math.nan, math.nan])
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: np.array(column) for name, column in columns.items()}


def without_nan(value: Any) -> Any:
    """As JSON has it: null for NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    return [without_nan(part) for part in value] if isinstance(value, (list, tuple)) else value


def _with_nan(result: dict[str, Any]) -> dict[str, Any]:
    """Numbers that were null are NaN again."""

    def restored(value: Any) -> Any:
        if value is None:
            return math.nan
        if isinstance(value, dict):
            return {key: restored(part) for key, part in value.items()}
        return [restored(part) for part in value] if isinstance(value, list) else value

    return {key: None if key == "stated" and value is None else restored(value) for key, value in result.items()}
