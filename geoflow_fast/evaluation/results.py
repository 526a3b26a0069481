"""Results of a comparison: the numbers and curves of every method, means over seeds, and their files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.evaluation.report import Unranked
from geoflow_fast.runtime import checks, parquet
from geoflow_fast.runtime.files import read_json, write_json
from geoflow_fast.runtime.summary import Summarised

FORMAT = 1
"""Version of the files. It is raised when the same settings begin to give other scores, so that a run does not continue
with scores of an older release."""
RESULTS_JSON, RESULTS_PARQUET = "results.json", "results.parquet"

ERRORS = (0.05, 0.10, 0.20)
"""Shares of wrong answers for which results say how many queries can be answered."""
SIGNED = {"spearman", "r2", "r2_value"}
"""Numbers that mean something only if recall falls with the uncertainty, that is, if Spearman is negative."""
TRUTH = "truth"
"""What `Result.training` says of a world's own distribution, which is shown beside methods but is none."""

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
"""The numbers of a result: the heading of each in tables, and which value is best."""


@dataclass(frozen=True, repr=False)
class Result(Summarised):
    """One method in one direction. Over several seeds the numbers are means, with standard deviations in `spread`."""

    method: str
    title: str
    direction: str
    queries: int
    items: int
    plain_recall: float
    """Recall@1 of plain search."""
    numbers: dict[str, float]
    """Numbers by the names of `COLUMNS`; NaN where the method states no probabilities. `recall` is that of the method's
    own ranking, or of plain search if it has none."""
    bin_recall: list[float]
    """Recall@1 of plain search in bins of the uncertainty, most certain first."""
    coverage: list[float]
    accuracy: list[float]
    """Accuracy of plain search at these coverages."""
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """[low, high] of some numbers, by bootstrap over images."""
    stated: dict[str, list[float]] | None = None
    """`confidence`, `accuracy` and `count` of the bins of a reliability diagram, if the method states probabilities."""
    training: str = ""
    """What is trained for the method: "none", "baseline" or "flow", or "truth"."""
    lead: dict[str, list[float]] = field(default_factory=dict)
    """[value, low, high] of the method's AUROC minus that of another method, by the other's name, with a paired
    bootstrap over images. Over several seeds it is the mean, the least low end and the greatest high end."""
    answered: list[float] = field(default_factory=list)
    """For each of `ERRORS`, the largest share of queries that can be answered with so few wrong answers, in
    hindsight."""
    seeds: list[int] = field(default_factory=lambda: [0])
    spread: dict[str, float] = field(default_factory=dict)
    bin_recall_spread: list[float] = field(default_factory=list)
    accuracy_spread: list[float] = field(default_factory=list)

    @property
    def runs(self) -> int:
        """Number of seeds that the numbers are means over."""
        return len(self.seeds)

    def ranks_in(self, name: str) -> bool:
        """Whether its number may be called the best: not that of the truth, nor one that is worse than chance."""
        if self.training == TRUTH:
            return False
        if name in SIGNED:
            return self.numbers["spearman"] < 0
        return name not in ("auroc", "aurc", "ausac") or self.numbers["auroc"] > 0.5

    def abstention_row(self) -> dict[str, object]:
        """The row of a table that says how many queries can be answered."""
        rank = Unranked if self.training == TRUTH else float
        cells = {f"at {100 * error:.0f} % error": rank(share) for error, share in zip(ERRORS, self.answered)}
        return {"method": self.title, **cells}

    def row(self) -> dict[str, object]:
        """The row of a table, without the direction."""
        row: dict[str, object] = {"method": self.title}
        for name, (heading, _) in COLUMNS.items():
            value = self.numbers[name]
            row[heading] = None if math.isnan(value) else value if self.ranks_in(name) else Unranked(value)
            if name not in ("auroc", "aurc"):
                continue
            if self.runs > 1:
                row[f"{heading}, sd"] = self.spread[name]
            elif name in self.intervals:
                low, high = self.intervals[name]
                row[f"{heading}, 95 %"] = "–" if math.isnan(low) else f"{low:.3f} to {high:.3f}"
        return row


@dataclass(frozen=True, repr=False)
class Comparison(Summarised):
    """Results of all methods in all directions."""

    results: list[Result]
    facts: dict[str, Any] = field(default_factory=dict)
    """The sizes and the seed behind the results."""

    def of(self, direction: str) -> list[Result]:
        """Results of one direction, in the order of the methods."""
        return [result for result in self.results if result.direction == direction]

    @property
    def directions(self) -> list[str]:
        """The directions that have results."""
        return list(dict.fromkeys(result.direction for result in self.results))

    def table(self, direction: str) -> list[dict[str, object]]:
        """A table with one row per method."""
        return [result.row() for result in self.of(direction)]

    def best(self, direction: str) -> dict[str, str]:
        """For each column that has numbers, "max" or "min": which of them is best."""
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
        content = {"format": FORMAT, "facts": self.facts, "results": [dataclasses.asdict(r) for r in self.results]}
        parquet.write_columns(folder / RESULTS_PARQUET, _columns(self.results), len(self.results))
        write_json(folder / RESULTS_JSON, without_nan(content))
        return [folder / RESULTS_JSON, folder / RESULTS_PARQUET]

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Reads what `save` wrote, given its folder or its JSON file."""
        path = checks.path(path, "path")
        path = path / RESULTS_JSON if path.is_dir() else path
        content = read_json(path, "the results of a comparison")
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"{path} has format {content['format']}; this release reads {FORMAT}")
            return cls([Result(**_with_nan(result)) for result in content["results"]], content["facts"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged or not the results of a comparison: {error}") from error


def aggregate(comparisons: Iterable[Comparison]) -> Comparison:
    """Means and standard deviations over comparisons of the same methods, one per seed, without intervals.

    A number that is missing in some seeds is the mean over the others.
    """
    runs = list(comparisons)
    if not runs:
        raise ValueError("there is nothing to aggregate")
    keys = [(result.method, result.direction) for result in runs[0].results]
    for number, run in enumerate(runs):
        if [(result.method, result.direction) for result in run.results] != keys:
            raise ValueError(f"comparison {number} has other methods or directions than the first")
    results = [_mean_of(same) for same in zip(*(run.results for run in runs))]
    return Comparison(results, {**runs[0].facts, "seed": None, "runs": len(runs)})


def _mean_of(results: Sequence[Result]) -> Result:
    """The mean of results of the same method and direction over seeds."""
    if len(results) == 1:
        return results[0]
    values = {name: np.array([result.numbers[name] for result in results]) for name in results[0].numbers}
    recall, accuracy = (np.array([getattr(r, name) for r in results]) for name in ("bin_recall", "accuracy"))
    return dataclasses.replace(
        results[0],
        plain_recall=float(np.mean([result.plain_recall for result in results])),
        numbers={name: _of_known(column, np.mean) for name, column in values.items()},
        spread={name: _of_known(column, standard_deviation) for name, column in values.items()},
        bin_recall=recall.mean(0).tolist(),
        bin_recall_spread=recall.std(0, ddof=1).tolist(),
        accuracy=accuracy.mean(0).tolist(),
        accuracy_spread=accuracy.std(0, ddof=1).tolist(),
        answered=np.mean([result.answered for result in results], axis=0).tolist(),
        stated=_pooled([result.stated for result in results]),
        intervals={},
        lead=_mean_leads([result.lead for result in results]),
        seeds=[seed for result in results for seed in result.seeds],
    )


def _mean_leads(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The leads over methods that all parts know: mean values, within the ends of all intervals."""
    leads = {}
    for name in parts[0]:
        if all(name in part for part in parts):
            value, low, high = zip(*(part[name] for part in parts))
            leads[name] = [float(np.mean(value)), min(low), max(high)]
    return leads


def _pooled(parts: Sequence[dict[str, list[float]] | None]) -> dict[str, list[float]] | None:
    """The bins of a reliability diagram over the queries of all parts; None if a part has no bins."""
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


def _of_known(values: NDArray[np.float64], statistic: Callable[[Any], Any]) -> float:
    """A statistic of the values that are not NaN; NaN if all are."""
    known = values[~np.isnan(values)]
    return float(statistic(known)) if len(known) else math.nan


def standard_deviation(values: NDArray[np.float64] | Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _columns(results: Sequence[Result]) -> dict[str, NDArray[Any]]:
    """The numbers of all results as columns of a table."""
    intervals = sorted({name for result in results for name in result.intervals})
    rows = []
    for result in results:
        row: dict[str, Any] = {name: getattr(result, name) for name in ("method", "title", "direction")}
        row |= {"runs": result.runs, "queries": result.queries, "items": result.items}
        row |= {"plain_recall": result.plain_recall, **result.numbers}
        row |= {f"{name}_sd": result.spread.get(name, math.nan) for name in COLUMNS}
        for name in intervals:
            row[f"{name}_low"], row[f"{name}_high"] = result.intervals.get(name, [math.nan, math.nan])
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def without_nan(value: Any) -> Any:
    """The value with None, which JSON can express, in place of every NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {key: without_nan(part) for key, part in value.items()}
    return [without_nan(part) for part in value] if isinstance(value, (list, tuple)) else value


def _with_nan(result: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result in which numbers that were None are NaN again."""

    def restored(value: Any) -> Any:
        if value is None:
            return math.nan
        if isinstance(value, dict):
            return {key: restored(part) for key, part in value.items()}
        return [restored(part) for part in value] if isinstance(value, list) else value

    return {key: None if key == "stated" and value is None else restored(value) for key, value in result.items()}
