"""How well an uncertainty tells right answers from wrong ones, and when to abstain.

One convention throughout: `uncertainty` [n] is higher where the answer is less certain, `correct` [n] says whether it
was right. Both may be tensors, arrays or lists. Only the order of the uncertainties matters, but to `r2_value`; NaN is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.runtime import checks

Values = Tensor | NDArray[Any] | Sequence[Any]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Counts = NDArray[np.int64]

COVERAGES = tuple(round(0.1 * k, 1) for k in range(10, 0, -1))
"""Coverages of the paper's selective accuracy: 100 % down to 10 %."""
BINS = 10
"""Number of bins of the uncertainty, as in the paper."""
RESAMPLES, MOST_RESAMPLES = 1000, 1_000_000
NUMBERS = ("spearman", "r2", "r2_value", "auroc", "aurc", "accuracy")
"""Fields of `RetrievalCalibration` for which a bootstrap interval is computed."""
CANDIDATES = 40
"""Largest number of thresholds that `abstention_threshold` tests if none are given."""


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval from `low` to `high` of a statistic; `value` is the statistic of the sample itself."""

    value: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class RetrievalCalibration:
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


@dataclass(frozen=True)
class SelectiveAccuracy:
    """Accuracy among the most certain answers."""

    coverage: Floats
    """[c], share of answers that are kept."""
    accuracy: Floats
    """[c], share of right answers among those kept."""
    ausac: float
    """Area under the curve of accuracy over coverage (trapezoidal rule), divided by the range of coverages."""


@dataclass(frozen=True)
class Reliability:
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


@dataclass(frozen=True)
class AbstentionThreshold:
    """A rule for abstaining: answer a query if its uncertainty is at most `threshold`."""

    threshold: float
    """-inf, which means always to abstain, if no candidate could be certified."""
    coverage: float
    """Share of the tested answers at or below the threshold."""
    risk: float
    """Share of wrong answers among those; NaN if there are none."""
    risk_bound: float
    """Clopper-Pearson upper bound of the risk at this threshold taken alone. It is at most `target_risk`, which is what
    is guaranteed, unless nothing is answered."""
    target_risk: float
    confidence: float
    tested: int
    """Number of answers used for the tests; the others served to choose the candidates."""

    @property
    def certified(self) -> bool:
        """Whether a threshold could be certified."""
        return self.threshold > -math.inf

    def answers(self, uncertainty: Values) -> Bools:
        """Which queries to answer, bool [n], given their uncertainties [n]."""
        return _floats(uncertainty, "uncertainty") <= self.threshold


def check_resamples(resamples: int) -> None:
    """ValueError unless it is 0, for none, or a number that intervals can be made of."""
    if checks.integer(resamples, "resamples", 0, MOST_RESAMPLES) == 1:
        raise ValueError("resamples must be 0 or at least 2, got 1")


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
    score, right = scored(uncertainty, correct)
    if not 2 <= bins <= len(score):
        raise ValueError(f"bins={bins} must be at least 2 and at most the number of queries, {len(score)}")
    check_resamples(resamples)
    answers = _Ordered(score, right, seed)
    rows = np.ones(len(score), np.int64)
    intervals: list[Interval] = []
    if resamples:
        draw = _Resampler(len(score), groups)
        intervals = _bootstrap(lambda count: answers.numbers(count, bins), draw, resamples, confidence, seed)
    return RetrievalCalibration(
        recall=answers.bin_means(answers.right, rows, bins),
        count=np.array([len(part) for part in answers.bins(answers.right, rows, bins)]),
        intervals=dict(zip(NUMBERS, intervals)),
        **dict(zip(NUMBERS, answers.numbers(rows, bins).tolist())),
    )


class _Ordered:
    """Answers from the most certain on, sorted once for all resamples; ties follow one another in random order.

    `count` [n] says how often each answer, in the order given, is there: once, or as a resample has it.
    """

    def __init__(self, score: Floats, right: Bools, seed: int = 0) -> None:
        chance = np.random.default_rng(checks.integer(seed, "seed")).permutation(len(score))
        self.order = np.lexsort((chance, score))
        self.right, self.score = right[self.order], score[self.order]
        self.tie = np.cumsum(np.concatenate(([0], self.score[1:] != self.score[:-1])))

    def numbers(self, count: Counts, bins: int) -> Floats:
        """Those of `NUMBERS`, in order; NaN if a resample has fewer answers than bins."""
        if count.sum() < bins:
            return np.full(len(NUMBERS), math.nan)
        recall, value = (self.bin_means(column, count, bins) for column in (self.right, self.score))
        place = np.arange(bins)
        # Of a line through points it is their squared correlation.
        r2, r2_value = (pearson(x, 1 - recall) ** 2 if np.isfinite(x).all() else math.nan for x in (place, value))
        accuracy = float((self.right * count[self.order]).sum() / count.sum())
        return np.array([spearman(place, recall), r2, r2_value, self.auroc(count), self.aurc(count), accuracy])

    def bin_means(self, column: NDArray[Any], count: Counts, bins: int) -> Floats:
        """[bins], of a column in this order, over equally filled bins."""
        return np.array([part.mean() for part in self.bins(column, count, bins)])

    def bins(self, column: NDArray[Any], count: Counts, bins: int) -> list[NDArray[Any]]:
        """The column, parted into equally filled bins."""
        return np.array_split(np.repeat(column, count[self.order]), bins)

    def by_tie(self, count: Counts) -> tuple[Floats, Counts]:
        """Right answers, and all answers, of every uncertainty that occurs."""
        found = count[self.order]
        right, every = (np.bincount(self.tie, part) for part in (self.right * found, found))
        return right.astype(np.float64), every.astype(np.int64)

    def auroc(self, count: Counts) -> float:
        """Chance that a wrong answer is less certain than a right one, ties counting half."""
        right, every = self.by_tie(count)
        wrong = every - right
        pairs = right.sum() * wrong.sum()
        before = np.cumsum(right) - right / 2
        return float((wrong * before).sum() / pairs) if pairs else math.nan

    def aurc(self, count: Counts) -> float:
        """Share of wrong answers among the k most certain, averaged over k."""
        hits = self.expected_hits(count)
        return float(1 - (hits / np.arange(1, len(hits) + 1)).mean())

    def expected_hits(self, count: Counts) -> Floats:
        """[n], right answers among the k most certain for k = 1..n, averaged over the orders of tied ones."""
        right, every = self.by_tie(count)
        return np.cumsum(np.repeat(right / np.maximum(every, 1), every))


def selective_accuracy(
    uncertainty: Values, correct: Values, coverage: Sequence[float] = COVERAGES
) -> SelectiveAccuracy:
    """Accuracy when only the most certain share of the answers is kept, for each share in `coverage`.

    At least one answer is kept. If the last answers kept are tied with others, the accuracy is the mean over all orders
    of the tied ones.
    """
    score, right = scored(uncertainty, correct)
    shares = _floats(coverage, "coverage")
    if not len(shares) or not ((shares > 0) & (shares <= 1)).all():
        raise ValueError(f"coverage must be shares above 0 and at most 1, got {list(coverage)}")
    kept = np.maximum(np.rint(shares * len(score)), 1).astype(np.int64)
    hits = _Ordered(score, right).expected_hits(np.ones(len(score), np.int64))
    accuracy = hits[kept - 1] / kept
    return SelectiveAccuracy(shares, accuracy, _mean_height(shares, accuracy))


def _mean_height(x: Floats, y: Floats) -> float:
    """Area under y over x by trapezoids, divided by the width of x; the mean of y if x has no width."""
    order = np.argsort(x, kind="stable")
    steps, heights = np.diff(x[order]), (y[order][1:] + y[order][:-1]) / 2
    return float((steps * heights).sum() / steps.sum()) if steps.sum() > 0 else float(y.mean())


def auroc(uncertainty: Values, correct: Values) -> float:
    """Probability that a wrong answer has a higher uncertainty than a right one; ties count half.

    NaN if all answers are right or all are wrong.
    """
    score, right = scored(uncertainty, correct)
    return _Ordered(score, right).auroc(np.ones(len(score), np.int64))


def aurc(uncertainty: Values, correct: Values) -> float:
    """Area under the risk-coverage curve: the share of wrong answers among the k most certain, averaged over k.

    0 if all answers are right, 1 if all are wrong. For tied answers it is the mean over all their orders.
    """
    score, right = scored(uncertainty, correct)
    return _Ordered(score, right).aurc(np.ones(len(score), np.int64))


def reliability(prob: Values, correct: Values, bins: int = 10, *, strategy: str = "uniform") -> Reliability:
    """Compares stated probabilities `prob` [n] of being right with the share of right answers, in bins.

    `strategy="uniform"`: bins of equal width over [0, 1]; "quantile": equally filled bins, of which there may be fewer
    if probabilities are tied. A probability on an edge belongs to the lower bin.
    """
    stated, right = scored(prob, correct, "prob")
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
    place = np.searchsorted(edges[1:-1], stated)
    count, total, hits = (np.bincount(place, w, len(edges) - 1) for w in (None, stated, right))
    with np.errstate(invalid="ignore"):
        confidence, accuracy = total / count, hits / count
    ece = float(np.abs(total - hits).sum() / len(stated))
    return Reliability(edges, confidence, accuracy, count, ece, float(((stated - right) ** 2).mean()))


def abstention_threshold(
    uncertainty: Values,
    correct: Values,
    target_risk: float,
    confidence: float = 0.95,
    *,
    candidates: Sequence[float] | None = None,
    share: float = 0.2,
    seed: int = 0,
) -> AbstentionThreshold:
    """The loosest certified threshold: answers whose uncertainty is at most this are wrong with probability at most
    `target_risk`.

    The guarantee holds for finite samples and any score: with probability at least `confidence` over the draw of these
    answers, a new answer from the same distribution whose uncertainty is at most the threshold is wrong with
    probability at most `target_risk`. The answers must be independent, so use one caption per image.

    The method is fixed-sequence testing of candidates that do not depend on the answers they are tested on. Given the
    number of answers that a fixed threshold accepts, the number of wrong ones is binomial, so the Clopper-Pearson
    bound, and with it the test of "the risk is above the target", is exact. Candidates are tested in a fixed order,
    each at the full level, up to the first that fails: for a false certificate the first candidate whose risk is above
    the target would have to pass its own test. The level therefore need not be divided among the candidates.

    By default a random `share` of the answers, drawn by `seed`, is set aside to choose the candidates: up to 40 of its
    uncertainties, beginning with the one that has the strongest evidence there and going on to looser ones. Your own
    `candidates`, fixed before these answers were seen, are tested in the given order on all answers. If the first
    candidate fails, the threshold is -inf.
    """
    score, right = scored(uncertainty, correct)
    for name, value in (("target_risk", target_risk), ("confidence", confidence), ("share", share)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")
    if candidates is None:
        if len(score) < 2:
            raise ValueError("one answer cannot be divided: give candidates, or more answers")
        apart = np.zeros(len(score), dtype=bool)
        apart[
            np.random.default_rng(checks.integer(seed, "seed")).permutation(len(score))[
                : max(1, round(share * len(score)))
            ]
        ] = True
        thresholds = _promising(score[apart], right[apart], target_risk)
        score, right = score[~apart], right[~apart]
    else:
        thresholds = _floats(candidates, "candidates")
    best, level = -math.inf, 1 - confidence
    for threshold in thresholds:
        accepted = score <= threshold
        if binomial_cdf(int((~right[accepted]).sum()), int(accepted.sum()), target_risk) > level:
            break
        best = max(best, float(threshold))
    accepted = score <= best
    wrong, given = int((~right[accepted]).sum()), int(accepted.sum())
    risk = wrong / given if given else math.nan
    bound = clopper_pearson_upper(wrong, given, confidence)
    return AbstentionThreshold(best, given / len(score), risk, bound, target_risk, confidence, len(score))


def _promising(score: Floats, right: Bools, target_risk: float) -> Floats:
    """Ascending thresholds at quantiles of the scores, from the one with the strongest evidence for a lower risk."""
    thresholds = np.unique(np.quantile(score, np.linspace(0, 1, CANDIDATES + 1)[1:], method="higher"))
    evidence = []
    for threshold in thresholds:
        accepted = score <= threshold
        evidence.append(binomial_cdf(int((~right[accepted]).sum()), int(accepted.sum()), target_risk))
    return thresholds[int(np.argmin(evidence)) :]


def binomial_cdf(count: int, n: int, p: float) -> float:
    """Probability of at most `count` successes in `n` trials of probability `p`, from exact terms."""
    if count >= n or p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    k = np.arange(count + 1)
    choose = np.concatenate(([0.0], np.cumsum(np.log((n - k[:-1]) / (k[:-1] + 1)))))
    terms = choose + k * math.log(p) + (n - k) * math.log1p(-p)
    return min(1.0, float(np.exp(terms - terms.max()).sum() * math.exp(terms.max())))


def clopper_pearson_upper(count: int, n: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson upper bound of a probability, from `count` events in `n` trials; 1 if they are
    equal."""
    if not 0 <= count <= n:
        raise ValueError(f"count must be between 0 and n={n}, got {count}")
    if count == n:
        return 1.0
    low, high = count / n, 1.0
    while high - low > 1e-12:  # the probability of so few events falls as p grows
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_cdf(count, n, middle) > 1 - confidence else (low, middle)
    return high


def bootstrap_interval(
    statistic: Callable[..., float],
    *values: Values,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
    groups: Values | None = None,
) -> Interval:
    """Bootstrap percentile interval of `statistic(*values)`; the rows of all `values` [n] are resampled together.

    `groups` [n]: rows of the same group, such as the captions of an image, are not independent and are drawn together.
    Resamples in which the statistic is NaN are ignored; if it is NaN in all of them, so are both ends.
    """
    arrays = [checks.array(x, f"values[{k}]") for k, x in enumerate(values)]
    if not arrays or any(x.shape[:1] != arrays[0].shape[:1] or not len(x) for x in arrays):
        raise ValueError(f"values must have one common, positive length, got {[x.shape for x in arrays]}")
    rows = np.arange(len(arrays[0]))

    def of_resample(count: Counts) -> Floats:
        drawn = np.repeat(rows, count)
        return np.array([statistic(*(x[drawn] for x in arrays))])

    (found,) = _bootstrap(of_resample, _Resampler(len(rows), groups), resamples, confidence, seed)
    return found


def _bootstrap(
    statistic: Callable[[Counts], Floats], draw: _Resampler, resamples: int, confidence: float, seed: int
) -> list[Interval]:
    """Intervals of a statistic with several values, a function of how often each row is there."""
    checks.integer(resamples, "resamples", 2, MOST_RESAMPLES)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    generator = np.random.default_rng(checks.integer(seed, "seed"))
    drawn = np.array([statistic(draw(generator)) for _ in range(resamples)])
    tail = (1 - confidence) / 2
    return [
        Interval(float(value), *_quantiles(column, (tail, 1 - tail)), confidence)
        for value, column in zip(statistic(np.ones(len(draw.group), np.int64)), drawn.T)
    ]


def _quantiles(values: Floats, levels: tuple[float, float]) -> tuple[float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, levels)
    return float(low), float(high)


class _Resampler:
    """Draws as many groups of rows as there are, with replacement: how often each row is there, [n]."""

    def __init__(self, count: int, groups: Values | None) -> None:
        names = np.arange(count) if groups is None else checks.array(groups, "groups")
        if names.shape != (count,):
            raise ValueError(f"groups must have one entry per row, [{count}], got {names.shape}")
        self.group = np.unique(names, return_inverse=True)[1]
        self.groups = int(self.group.max()) + 1

    def __call__(self, generator: np.random.Generator) -> Counts:
        drawn = generator.integers(self.groups, size=self.groups)
        return np.bincount(drawn, minlength=self.groups)[self.group]


def ranks(values: Values) -> Floats:
    """Ranks [n] of the `values`, starting at 1; tied values get the mean of their ranks."""
    _, tie, count = np.unique(_floats(values, "values"), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[tie]


def pearson(x: Values, y: Values) -> float:
    """Pearson's linear correlation of `x` [n] and `y` [n]; NaN if one of them is constant."""
    a, b = _floats(x, "x"), _floats(y, "y")
    if len(a) != len(b):
        raise ValueError(f"x has {len(a)} values, y has {len(b)}")
    if not len(a) or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float(np.clip((a / np.linalg.norm(a)) @ (b / np.linalg.norm(b)), -1, 1))


def spearman(x: Values, y: Values) -> float:
    """Spearman's rank correlation of `x` [n] and `y` [n], with mean ranks for ties; NaN if one of them is constant."""
    return pearson(ranks(x), ranks(y))


def scored(values: Values, correct: Values, name: str = "uncertainty") -> tuple[Floats, Bools]:
    """Both as arrays of one length, at least 1."""
    score, right = _floats(values, name), _floats(correct, "correct")
    if len(score) != len(right):
        raise ValueError(f"{name} has {len(score)} entries, but correct has {len(right)}")
    if not len(score):
        raise ValueError(f"{name} is empty")
    other = ~np.isin(right, (0, 1))
    if other.any():
        row = int(other.argmax())
        raise ValueError(f"correct must be true or false, but row {row} is {right[row]}")
    return score, right.astype(bool)


def _floats(values: Values, name: str) -> Floats:
    """[n] float64 without NaN."""
    array = checks.array(values.double() if isinstance(values, Tensor) else values, name).astype(np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one value per query, [n], got shape {array.shape}")
    missing = np.isnan(array)
    if missing.any():
        raise ValueError(f"{name} has NaN at row {int(missing.argmax())}")
    return array
