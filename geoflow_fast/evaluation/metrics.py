"""How well an uncertainty tells right answers from wrong ones.

One convention throughout: `uncertainty` [n] is higher where the answer is less certain, and `correct` [n] says which
answers were right, or with which probability they are, such as the share of right items among those that tie for the
first place (`Answers.first_right`). Both may be tensors, arrays or lists. Only the order of the uncertainties matters,
except to `r2_value`. NaN is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.evaluation.statistics import (
    Floats,
    Interval,
    RowCounts,
    Values,
    bootstrap,
    check_resamples,
    correlation,
    floats,
    percentile_intervals,
    scored_shares,
)
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.summary import Summarised

COVERAGES = tuple(round(0.1 * k, 1) for k in range(10, 0, -1))
"""Coverages of the paper's selective accuracy: 100 % down to 10 %."""
BINS = 10
"""Number of bins of the uncertainty, as in the paper."""
NUMBERS = ("spearman", "r2", "r2_value", "auroc", "aurc", "accuracy")
"""Fields of `RetrievalCalibration` for which a bootstrap interval is computed."""


@dataclass(frozen=True, repr=False)
class RetrievalCalibration(Summarised):
    """How well an uncertainty predicts errors of retrieval. Numbers that cannot be computed are NaN."""

    spearman: float
    """Rank correlation of bin number and recall; -1 is ideal. NaN if all bins have the same recall."""
    r2: float
    """R^2 of a straight line through the error rates of the bins over their number: 1 if they grow evenly. A sharper
    uncertainty does not make them do so. NaN if all bins have the same recall."""
    r2_value: float
    """R^2 of a straight line through the error rates of the bins over their mean uncertainty: 1 if the error rate is a
    linear function of the uncertainty. NaN if all bins have the same recall or an uncertainty is infinite."""
    recall: Floats
    """[bins], share of right answers in each bin, most certain bin first."""
    count: NDArray[np.int64]
    """[bins], number of queries in each bin; the numbers differ by at most one."""
    auroc: float
    """Probability that a wrong answer is less certain than a right one. NaN if all are right or all are wrong."""
    aurc: float
    """Share of wrong answers among the k most certain, averaged over all k; 0 is ideal."""
    accuracy: float
    """Share of right answers: Recall@1 if `correct` is about the first item."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Bootstrap intervals by the name of a field above, if `resamples` was set."""


@dataclass(frozen=True, repr=False)
class SelectiveAccuracy(Summarised):
    """Accuracy among the most certain answers."""

    coverage: Floats
    """[c], share of answers that are kept."""
    accuracy: Floats
    """[c], share of right answers among those kept."""
    ausac: float
    """Area under the curve of accuracy over coverage (trapezoidal rule), divided by the range of coverages."""


@dataclass(frozen=True, repr=False)
class Reliability(Summarised):
    """Stated probabilities compared with observed frequencies. Bins without an answer are NaN."""

    edges: Floats
    """[bins + 1], edges of the bins; a bin includes its upper edge but not its lower one."""
    confidence: Floats
    """[bins], mean stated probability."""
    accuracy: Floats
    """[bins], share of right answers."""
    count: NDArray[np.int64]
    """[bins], number of answers."""
    ece: float
    """Expected calibration error: mean of |confidence - accuracy| over the bins, weighted by count."""
    brier: float
    """Brier score: mean squared difference between probability and outcome."""


def retrieval_calibration(
    uncertainty: Values,
    correct: Values,
    bins: int = BINS,
    seed: int = 0,
    *,
    resamples: int = 0,
    confidence: float = 0.95,
    groups: Values | None = None,
) -> RetrievalCalibration:
    """Compares `uncertainty` [n] with `correct` [n]: recall in `bins` equally filled bins, and AUROC and AURC.

    Ties at the edge of a bin are broken at random by `seed`; AUROC and AURC treat ties exactly. There must be at least
    as many queries as bins. With `resamples` (for example 1,000) each number gets a bootstrap interval, with `groups`
    as in `bootstrap_interval`. Numbers from ten bins saturate and are noisy: compare methods by AUROC and AURC.
    """
    score, right = scored_shares(uncertainty, correct)
    if not 2 <= bins <= len(score):
        raise ValueError(f"bins={bins} must be at least 2 and at most the number of queries, {len(score)}")
    check_resamples(resamples)
    answers = _SortedAnswers(score, right, seed)
    once = np.ones(len(score), np.int64)
    numbers = _numbers(answers.summary(once, bins), bins)
    intervals: list[Interval] = []
    if resamples:
        drawn = bootstrap(lambda count: answers.summary(count, bins), len(score), resamples, seed, groups)
        intervals = percentile_intervals(numbers, _numbers(drawn, bins), confidence)
    return RetrievalCalibration(
        recall=_bin_means(answers.right, bins),
        count=np.array([len(part) for part in np.array_split(answers.right, bins)]),
        intervals=dict(zip(NUMBERS, intervals)),
        **dict(zip(NUMBERS, numbers.tolist())),
    )


def _numbers(summary: Floats, bins: int) -> Floats:
    """The `NUMBERS` [..., 6] of summaries [..., 2 bins + 3] of answers, see `_SortedAnswers.summary`."""
    from scipy import stats

    recall, value, others = np.split(summary, (bins, 2 * bins), axis=-1)
    number = np.arange(bins)
    value = np.where(np.isfinite(value).all(-1, keepdims=True), value, math.nan)
    ranked = correlation(number, stats.rankdata(recall, axis=-1))
    # The R^2 of a line through points is their squared correlation.
    r2, r2_value = correlation(number, 1 - recall) ** 2, correlation(value, 1 - recall) ** 2
    return np.concatenate((np.stack((ranked, r2, r2_value), axis=-1), others), axis=-1)


def _bin_means(column: NDArray[Any], bins: int) -> Floats:
    """The means [bins] of equally filled bins of a column."""
    return np.array([part.mean() for part in np.array_split(column, bins)])


class _SortedAnswers:
    """Answers sorted once for all resamples, from the most certain on; ties follow one another in random order.

    The methods take `count` [n]: how often each answer, in the order it was given in, occurs.
    """

    def __init__(self, score: Floats, right: Floats, seed: int = 0) -> None:
        chance = np.random.default_rng(checks.integer(seed, "seed")).permutation(len(score))
        self.order = np.lexsort((chance, score))
        self.right, self.score = right[self.order], score[self.order]
        self.tie = np.cumsum(np.concatenate(([0], self.score[1:] != self.score[:-1])))

    def summary(self, count: RowCounts, bins: int) -> Floats:
        """What `_numbers` needs: recall by bin, mean uncertainty by bin, AUROC, AURC and accuracy. All are NaN if a
        resample has fewer answers than bins."""
        sorted_count = count[self.order]
        total = sorted_count.sum()
        if total < bins:
            return np.full(2 * bins + 3, math.nan)
        recall, value = (_bin_means(np.repeat(x, sorted_count), bins) for x in (self.right, self.score))
        accuracy = (self.right * sorted_count).sum() / total
        return np.concatenate((recall, value, [self.auroc(count), self.aurc(count), accuracy]))

    def by_tie(self, count: RowCounts) -> tuple[Floats, RowCounts]:
        """The number of right answers, and of all answers, with each uncertainty that occurs."""
        sorted_count = count[self.order]
        right, every = (np.bincount(self.tie, part) for part in (self.right * sorted_count, sorted_count))
        return right.astype(np.float64), every.astype(np.int64)

    def auroc(self, count: RowCounts) -> float:
        """Probability that a wrong answer is less certain than a right one, ties counting half."""
        right, every = self.by_tie(count)
        wrong = every - right
        # An answer that is right with some probability makes no pair with itself.
        itself = (self.right * (1 - self.right) * count[self.order] ** 2).sum()
        pairs = right.sum() * wrong.sum() - itself
        more_certain = np.cumsum(right) - right / 2
        return float(((wrong * more_certain).sum() - itself / 2) / pairs) if pairs > 0 else math.nan

    def aurc(self, count: RowCounts) -> float:
        """Share of wrong answers among the k most certain, averaged over k."""
        hits = self.expected_hits(count)
        return float(1 - (hits / np.arange(1, len(hits) + 1)).mean())

    def expected_hits(self, count: RowCounts) -> Floats:
        """Right answers among the k most certain for k = 1..n, averaged over the orders of tied ones."""
        right, every = self.by_tie(count)
        return np.cumsum(np.repeat(right / np.maximum(every, 1), every))


def selective_accuracy(
    uncertainty: Values, correct: Values, coverage: Sequence[float] = COVERAGES
) -> SelectiveAccuracy:
    """Accuracy when only the most certain share of the answers is kept, for each share in `coverage`.

    At least one answer is kept. If the last answers kept are tied with others, the accuracy is the mean over all orders
    of the tied ones.
    """
    score, right = scored_shares(uncertainty, correct)
    shares = floats(coverage, "coverage")
    if not len(shares) or not ((shares > 0) & (shares <= 1)).all():
        raise ValueError(f"coverage must be shares above 0 and at most 1, got {list(coverage)}")
    kept = np.maximum(np.rint(shares * len(score)), 1).astype(np.int64)
    hits = _SortedAnswers(score, right).expected_hits(np.ones(len(score), np.int64))
    accuracy = hits[kept - 1] / kept
    return SelectiveAccuracy(shares, accuracy, _mean_height(shares, accuracy))


def answered_share(uncertainty: Values, correct: Values, error: float) -> float:
    """The largest share of the answers, the most certain ones, of which at most the share `error` is wrong; 0 if there
    is none. Answers that tie are given together or not at all."""
    score, right = scored_shares(uncertainty, correct)
    hits, every = _SortedAnswers(score, right).by_tie(np.ones(len(score), np.int64))
    given = np.cumsum(every)
    # Sums of shares are rounded; a limit that is met exactly counts as met.
    within = given - np.cumsum(hits) <= error * given + 1e-9
    return float(given[within].max() / len(score)) if within.any() else 0.0


def _mean_height(x: Floats, y: Floats) -> float:
    """Area under y over x by trapezoids, divided by the width of x; the mean of y if x has no width."""
    order = np.argsort(x, kind="stable")
    steps, heights = np.diff(x[order]), (y[order][1:] + y[order][:-1]) / 2
    return float((steps * heights).sum() / steps.sum()) if steps.sum() > 0 else float(y.mean())


def auroc(uncertainty: Values, correct: Values) -> float:
    """Probability that a wrong answer has a higher uncertainty than a right one; ties count half.

    NaN if all answers are right or all are wrong.
    """
    score, right = scored_shares(uncertainty, correct)
    return _SortedAnswers(score, right).auroc(np.ones(len(score), np.int64))


def auroc_leads(
    uncertainties: Mapping[str, Values],
    correct: Values,
    *,
    resamples: int,
    confidence: float = 0.95,
    seed: int = 0,
    groups: Values | None = None,
) -> dict[str, dict[str, Interval]]:
    """The AUROC of every uncertainty minus that of every other, with bootstrap intervals: `leads[name][other]`.

    The bootstrap is paired: all are judged on the same resampled answers. `groups` are as in `bootstrap_interval`.
    """
    names, sorted_answers = list(uncertainties), []
    for name in names:
        score, right = scored_shares(uncertainties[name], correct)
        sorted_answers.append(_SortedAnswers(score, right))
    if not names:
        return {}

    def of_rows(count: RowCounts) -> Floats:
        return np.array([answers.auroc(count) for answers in sorted_answers])

    rows = len(sorted_answers[0].right)
    values, drawn = of_rows(np.ones(rows, np.int64)), bootstrap(of_rows, rows, resamples, seed, groups)
    leads = {}
    for k, name in enumerate(names):
        intervals = percentile_intervals(values[k] - values, drawn[:, k : k + 1] - drawn, confidence)
        leads[name] = {other: interval for other, interval in zip(names, intervals) if other != name}
    return leads


def aurc(uncertainty: Values, correct: Values) -> float:
    """Area under the risk-coverage curve: the share of wrong answers among the k most certain, averaged over k.

    0 if all answers are right, 1 if all are wrong. For tied answers it is the mean over all their orders.
    """
    score, right = scored_shares(uncertainty, correct)
    return _SortedAnswers(score, right).aurc(np.ones(len(score), np.int64))


def reliability(prob: Values, correct: Values, bins: int = 10, *, strategy: str = "uniform") -> Reliability:
    """Compares stated probabilities `prob` [n] of being right with the share of right answers, in bins.

    `strategy="uniform"`: bins of equal width over [0, 1]; "quantile": equally filled bins, of which there may be fewer
    if probabilities are tied. A probability on an edge belongs to the lower bin.
    """
    stated, right = scored_shares(prob, correct, "prob")
    outside = ~((stated >= 0) & (stated <= 1))
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(f"prob must be in [0, 1], but row {row} is {stated[row]}")
    bins = checks.integer(bins, "bins", least=1)
    if strategy == "uniform":
        edges = np.linspace(0, 1, bins + 1)
    elif strategy == "quantile":
        edges = np.unique(np.quantile(stated, np.linspace(0, 1, bins + 1)))
        edges = edges if len(edges) > 1 else np.repeat(edges, 2)
    else:
        raise ValueError(f"strategy must be 'uniform' or 'quantile', got {strategy!r}")
    bin_of = np.searchsorted(edges[1:-1], stated)
    count, total, hits = (np.bincount(bin_of, w, len(edges) - 1) for w in (None, stated, right))
    with np.errstate(invalid="ignore"):
        confidence, accuracy = total / count, hits / count
    ece = float(np.abs(total - hits).sum() / len(stated))
    # The expectation over outcomes: (p - 1)^2 with probability `right`, else p^2.
    brier = float((right * (stated - 1) ** 2 + (1 - right) * stated**2).mean())
    return Reliability(edges, confidence, accuracy, count, ece, brier)
