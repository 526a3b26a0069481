"""The work behind `geoflow evaluate`: reads folders, and writes a folder with results, figures and one HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.data.ids import Ids
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.evaluation import figures, registry
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.metrics import BINS
from geoflow_fast.evaluation.opening import comparison_tiles, show_comparison
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.results import Comparison
from geoflow_fast.evaluation.statistics import RESAMPLES
from geoflow_fast.evaluation.verdict import recommended, verdict
from geoflow_fast.jobs.calibration import StoredCalibration
from geoflow_fast.jobs.queries import Naming
from geoflow_fast.jobs.rerank import open_judgements, open_models
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.progress import Announce

PAGE = "report.html"

ABSTENTION_EXPLAINED = (
    "share of the queries that can be answered if the least certain are turned away and at most this share of the "
    "answers may be wrong, in hindsight; a rule with a guarantee answers a little fewer (`geoflow threshold`)."
)
NUMBERS_EXPLAINED = (
    "AUROC is the probability that a query answered wrongly is less certain than one answered rightly. AURC is the "
    "share of wrong answers among the most certain, averaged over how many are kept (lower is better). AUSAC is the "
    "accuracy averaged over coverages from 100 to 10 %. Spearman and R^2 compare Recall@1 with the number of the bin, "
    "in ten bins of the uncertainty (-1 and 1 are ideal); they are noisy and do not reward a sharper uncertainty, so "
    "decide by AUROC and AURC. R^2, value, belongs to the line over the bins' mean uncertainty.",
    "NLL is the mean of -log probability of the right item among the whole gallery. ECE is the expected calibration "
    "error of the stated probability that plain search is right. Only methods that state probabilities have these two. "
    "Recall@1 is that of a method's own ranking, or of plain search where it has none. Whatever is tuned was tuned on "
    "held-out pairs.",
)


@dataclass(frozen=True)
class EvaluationSettings:
    """How `evaluate_folders` evaluates."""

    names: Sequence[str] | None = None
    directions: Sequence[str] = CONDITIONAL[::-1]
    max_queries: int | None = None
    bins: int = BINS
    resamples: int = RESAMPLES
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True)
class JudgedFiles:
    """Files to evaluate on instead of pairs: rows of queries and of a gallery, and judgements of them."""

    queries: Path
    gallery: Path
    qrels: Path
    """Parquet or CSV file with columns `query`, `item` and, unless all judged items are right, `grade`."""
    naming: Naming = dataclasses.field(default_factory=Naming)
    """Files of the ids that the judgements hold instead of row numbers."""

    def task(self, settings: EvaluationSettings, *, normalize: bool, announce: Announce) -> RetrievalTask:
        """The task of these files; `announce` is told how many queries have no right item and are left out."""
        if len(settings.directions) != 1:
            raise ValueError("judgements are of one direction: --direction says which, t2i or i2t")
        queries, gallery = open_rows(self.queries, "queries"), open_rows(self.gallery, "gallery")
        if queries.dim != gallery.dim:
            raise ValueError(f"{queries.name} has width {queries.dim}, but {gallery.name} has {gallery.dim}")
        qrels = open_judgements(self.qrels, self.naming, queries, gallery)
        for rows in (queries, gallery):
            rows.check(normalize=normalize)
        task = RetrievalTask.from_qrels(
            queries[np.arange(len(queries))],
            gallery[np.arange(len(gallery))],
            qrels,
            settings.directions[0],
            max_queries=settings.max_queries,
            seed=settings.seed,
        )
        if unknown := len(queries) - len(np.unique(qrels.relevant().query)):
            announce(f"left out: {unknown} of {len(queries)} queries, for which no item is judged right")
        ids = self.naming.of_queries(queries)
        return task if ids is None else dataclasses.replace(task, query_ids=Ids(ids.of(task.query_row)))


def evaluate_folders(
    model: Path | None,
    test: Path | EmbeddingPairs | JudgedFiles,
    held_out: Path | None,
    train: Path | None,
    out: Path,
    settings: EvaluationSettings | None = None,
    *,
    normalize: bool = False,
    announce: Announce = lambda _: None,
    choose: Callable[[Sequence[str] | None, Study], Sequence[Method]] = registry.chosen,
) -> Comparison:
    """Compares methods on the pairs `test`, on those of a folder, or on judgements, and writes results, figures and a
    page into `out`. `model` holds a flow, with the head that `geoflow train` wrote beside it, or a head. Without a
    folder `held_out` the methods are tuned on the pairs that training held out. `normalize` scales the rows of files to
    unit norm. `choose` makes the methods of the names that the settings have.

    If it is stopped, the same call continues it, because finished scores are kept in `out`.
    """
    settings = settings or EvaluationSettings()
    plots.need_matplotlib()  # fails at once if matplotlib is missing, not after the work
    flow, head = (None, None) if model is None else open_models(model, None)
    device = usable_device(settings.device)
    tested: EmbeddingPairs | RetrievalTask
    asked: dict[str, Any] = {}
    if isinstance(test, JudgedFiles):
        tested, title = test.task(settings, normalize=normalize, announce=announce), test.qrels.stem
    else:
        tested = EmbeddingPairs.open(test, normalize=normalize) if isinstance(test, Path) else test
        title = "your pairs" if tested.folder is None else tested.folder.name
        asked = {"directions": settings.directions, "max_queries": settings.max_queries}
    val = held_out_pairs(model, held_out, normalize=normalize)
    if isinstance(tested, EmbeddingPairs) and val.fingerprint() == tested.fingerprint():
        raise ValueError(f"methods would be tuned on {title} and tested on it; give other pairs, or --held-out ones")
    study = Study(
        val=val,
        train=None if train is None else EmbeddingPairs.open(train, normalize=normalize),
        flow=None if flow is None else flow.to(device),
        head=None if head is None else head.to(device),
        seed=settings.seed,
    )

    def write(known: Comparison) -> None:
        known.save(out)
        write_report({title: known}, out, f"Retrieval uncertainty on {title}")
        announce(f"Wrote {out / PAGE} with {len(known.of(known.directions[0]))} methods")

    comparison = compare(
        study,
        tested,
        choose(settings.names, study),
        **asked,
        bins=settings.bins,
        resamples=settings.resamples,
        folder=out,
        announce=announce,
        report=write,
    )
    write(comparison)
    return comparison


def held_out_pairs(model: Path | None, folder: Path | None, *, normalize: bool) -> EmbeddingPairs:
    """The pairs of a folder or, without one, those that training held out and stored with the model."""
    if folder is not None:
        return EmbeddingPairs.open(folder, normalize=normalize)
    stored = None if model is None else StoredCalibration.read(model)
    if stored is None:
        without = "without --model" if model is None else f"{model} holds none from training"
        raise ValueError(f"--held-out pairs are needed to tune methods on, since {without}")
    return stored.pairs()


def write_report(datasets: Mapping[str, Comparison], out: Path, title: str) -> Path:
    """Writes figures and the page of comparisons, by data set, into the folder `out`; returns the page."""
    results = [result for comparison in datasets.values() for result in comparison.results]
    runs = max(result.runs for result in results)
    several = f" Numbers are means over {runs} seeds; shaded areas and bars show one standard deviation."
    page = Report(title, f"Which method knows when plain cosine search is wrong?{several if runs > 1 else ''}")
    page.section("Which to use")
    page.answer(recommendation(datasets))
    page.cards(comparison_tiles(datasets))
    for name, comparison in datasets.items():
        for direction in comparison.directions:
            show_comparison(page, f"{name}, {figures.DIRECTION_TITLES[direction]}", comparison.of(direction))
    with page.folded("Why, and how many queries can be answered"):
        page.text(*_verdicts(datasets))
        for name, comparison in datasets.items():
            for direction in comparison.directions:
                rows = [result.abstention_row() for result in comparison.of(direction) if result.answered]
                if rows:
                    best = dict.fromkeys(list(rows[0])[1:], "max")
                    page.table(rows, f"{name}, {figures.DIRECTION_TITLES[direction]}: {ABSTENTION_EXPLAINED}", best)
    page.section("The numbers")
    with page.folded("All numbers of all methods, and what they mean"):
        page.text(*NUMBERS_EXPLAINED)
        for name, comparison in datasets.items():
            for direction in comparison.directions:
                one = comparison.of(direction)[0]
                sizes = f"{one.queries:,} queries over {one.items:,} items"
                caption = (
                    f"{name}, {figures.DIRECTION_TITLES[direction]}: {sizes}, plain search has Recall@1 "
                    f"{one.plain_recall:.3f}."
                )
                page.table(comparison.table(direction), caption, comparison.best(direction))
    stacked = len(datasets) == 1  # readable on a phone too
    page.section("Telling wrong answers from right ones")
    bars = "one standard deviation over seeds" if runs > 1 else "95 % bootstrap intervals over images"
    caption = f"AUROC, best on top; bars are {bars}."
    page.figure(figures.draw_auroc(datasets, out / "auroc.png", stacked=stacked), caption)
    page.section("Recall by uncertainty")
    caption = "Recall@1 of plain search in bins of equally many queries; a good score falls from left to right."
    page.figure(figures.draw_calibration(datasets, out / "calibration.png", stacked=stacked), caption)
    page.section("Turning queries away")
    caption = "Accuracy on the remaining queries when the least certain are turned away."
    page.figure(figures.draw_selective(datasets, out / "selective.png", stacked=stacked), caption)
    if any(result.stated is not None for result in results):
        page.section("Can the probabilities be believed?")
        caption = (
            "Stated probability that plain search is right against the share that was: on the diagonal they agree."
        )
        page.figure(figures.draw_reliability(datasets, out / "reliability.png", stacked=stacked), caption)
    return page.write(out / PAGE)


def recommendation(datasets: Mapping[str, Comparison]) -> str:
    """The method to use, in a sentence: one for all data sets and directions, or one for each."""
    chosen = {
        f"{name}, {figures.DIRECTION_TITLES[direction]}": recommended(comparison.of(direction))
        for name, comparison in datasets.items()
        for direction in comparison.directions
    }
    titles = {words: "none of these" if result is None else result.title for words, result in chosen.items()}
    if len(set(titles.values())) == 1:
        return f"Recommendation: use {next(iter(titles.values()))}."
    return f"Recommendation: {'; '.join(f'for {words}, use {title}' for words, title in titles.items())}."


def _verdicts(datasets: Mapping[str, Comparison]) -> list[str]:
    """A sentence for every data set and direction that names the best method and recommends one."""
    return [
        f"{name}, {figures.DIRECTION_TITLES[direction]}: {verdict(comparison.of(direction))}"
        for name, comparison in datasets.items()
        for direction in comparison.directions
    ]
