"""What is learned from judged result lists: is the first hit right, which others are, and is the right item missing?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.decisions import lists
from geoflow_fast.decisions.inputs import LARGEST, LEAST_SPREAD
from geoflow_fast.decisions.logistic import (
    FOLDS,
    Bools,
    FeatureGain,
    Floats,
    fit_logistic,
    log_losses,
    logits,
    mean_and_error,
)
from geoflow_fast.runtime import checks

RIGHT, NO_MATCH = "right", "no match"
SOFTMAX, LEVEL, SHAPE, FEATURES = "softmax", "level", "shape", "features"
ORDER = {RIGHT: (SOFTMAX, LEVEL, SHAPE, FEATURES), NO_MATCH: (LEVEL, SOFTMAX, SHAPE, FEATURES)}
"""Groups of features in the order in which they are tried. The first is kept in any case."""
TEMPERATURES = np.geomspace(0.25, 32.0, 8)
"""Inverse temperatures that are tried, for scores measured in units of a typical list's spread."""


@dataclass(frozen=True)
class Answer:
    """The fitted answer to one question: log-odds that are linear in groups of features of a list."""

    temperature: float
    """The inverse temperature of the softmax."""
    groups: tuple[str, ...]
    weights: tuple[float, ...]

    def logit(self, heads: Floats, features: Floats, unit: float) -> Floats:
        """Log-odds [n] for the first distinct scores `heads` [n, L] and the caller's `features` [n, f]."""
        return logits(design(heads, features, unit, self.temperature, self.groups), np.array(self.weights))


@dataclass(frozen=True)
class Model:
    """All that is needed to judge result lists of `k` hits."""

    k: int
    unit: float
    """The typical distance of the first score to the others, in which scores are measured."""
    features: int
    """How many features of the caller belong to each query."""
    right: Answer
    no_match: Answer
    hits: tuple[float, ...]
    """Weights of the features of hits after the first. If no labels of them were given, one right item a query is
    assumed, and what the first leaves is divided among the others by a softmax, whose inverse temperature this is."""
    log_prob: bool = False
    """Whether scores are logarithms of probabilities over a gallery, see `lists.taken_out`."""

    def heads(self, scores: Floats) -> Floats:
        """The first distinct scores of lists [n, k]."""
        return lists.first_distinct(scores, lists.depth_of(self.k))

    def without(self, scores: Floats, chosen: Bools) -> Floats:
        """What the search would return [n, k] if the `chosen` items of its lists were missing from the gallery."""
        return lists.taken_out(scores, chosen, log_prob=self.log_prob)

    def right_logit(self, scores: Floats, features: Floats) -> Floats:
        """Log-odds [n] that the first hit is right."""
        return self.right.logit(self.heads(scores), features, self.unit)

    def no_match_logit(self, scores: Floats, features: Floats) -> Floats:
        """Log-odds [n] that the right item is missing, if half of all queries had none."""
        return self.no_match.logit(self.heads(scores), features, self.unit)

    def p_answer(self, scores: Floats, features: Floats, share: float) -> Floats:
        """The probability [n] that there is a right item and the first hit is one, if a `share` of the traffic has
        none."""
        return self.p_answer_of(self.heads(scores), features, share)

    def p_answer_of(self, heads: Floats, features: Floats, share: float) -> Floats:
        """The same for the first distinct scores `heads` [n, L] of lists."""
        right, missing = (answer.logit(heads, features, self.unit) for answer in (self.right, self.no_match))
        return combined(right, missing, share)

    def relevance(self, scores: Floats, features: Floats) -> Floats:
        """The probability [n, k] that each hit is relevant: equal for copies, and never larger for a lower score."""
        from scipy import special

        first = self.right_logit(scores, features)
        ranks = lists.distinct_ranks(scores)
        if len(self.hits) == 1:
            slope = self.hits[0] / self.unit
            rest = special.logsumexp(slope * self.heads(scores)[:, 1:], axis=1, keepdims=True)
            others = special.expit(-first)[:, None] * np.exp(np.minimum(slope * scores - rest, 0.0))
        else:
            columns = hit_features(scores, self.heads(scores), first, self.right.temperature, self.unit)
            others = special.expit(columns @ np.array(self.hits[:-1]) + self.hits[-1])
        return np.minimum.accumulate(np.where(ranks == 0, special.expit(first)[:, None], others), axis=1)

    def p_shown(self, scores: Floats, features: Floats, share: float) -> Floats:
        """The relevance [n, k] of each hit in traffic of which a `share` has no right item."""
        present = 1 - no_match_probability(self.no_match_logit(scores, features), share)
        return self.relevance(scores, features) * present[:, None]

    def as_json(self) -> dict[str, Any]:
        """The model as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Model:
        """The model that `as_json` has written; a ValueError if the values are not one."""
        answers = {}
        for name in ("right", "no_match"):
            part = values[name]
            groups = tuple(str(group) for group in part["groups"])
            if not set(groups) <= set(ORDER[RIGHT]):
                raise ValueError(f"{name} has unknown groups of features: {', '.join(groups)}")
            answers[name] = Answer(_finite(part["temperature"]), groups, _all_finite(part["weights"]))
        k, features = int(values["k"]), int(values["features"])
        told = checks.boolean(values["log_prob"], "log_prob")
        model = cls(k, _finite(values["unit"]), features, hits=_all_finite(values["hits"]), log_prob=told, **answers)
        if k < 2 or features < 0 or model.unit < LEAST_SPREAD or len(model.hits) not in (1, HIT_FEATURES + 1):
            raise ValueError("the model's numbers are out of range")
        for answer in answers.values():
            width = design(np.zeros((1, 2)), np.zeros((1, features)), 1.0, 1.0, answer.groups).shape[1]
            if len(answer.weights) != width + 1:
                raise ValueError(f"{len(answer.weights)} weights for {width} features and a constant")
        return model


@dataclass(frozen=True)
class Pilot:
    """What the fitted queries say when each is judged by a fit without it: log-odds of the lists and of their twins
    without the right items. It is where a rule begins to look for its threshold."""

    right: Bools
    first: Floats
    twin_first: Floats
    no_match: Floats
    twin_no_match: Floats


def combined(right_logit: Floats, no_match_logit: Floats, share: float) -> Floats:
    """The probability that the first hit is right in traffic of which a `share` has no right item."""
    from scipy import special

    return special.expit(right_logit) * (1 - no_match_probability(no_match_logit, share))


def no_match_probability(logit: Floats, share: float) -> Floats:
    """The probability of a missing item, from log-odds at equal shares and the `share` of such queries."""
    from scipy import special

    return special.expit(logit + special.logit(share))


def design(heads: Floats, features: Floats, unit: float, temperature: float, groups: Sequence[str]) -> Floats:
    """The columns [n, F] of groups of features."""
    blocks: dict[str, Callable[[], Floats]] = {
        SOFTMAX: lambda: lists.softmax_logit(heads, temperature / unit)[:, None],
        LEVEL: lambda: heads[:, :1] / unit,
        SHAPE: lambda: lists.shape_of(heads, unit),
        FEATURES: lambda: features,
    }
    return np.column_stack([blocks[group]() for group in groups])


HIT_FEATURES = 4


def hit_features(scores: Floats, heads: Floats, first: Floats, temperature: float, unit: float) -> Floats:
    """Features [n, k, 4] of each hit: how far its log-odds under the softmax are behind those of the first, the
    log-odds of the first to be right, the logarithm of the rank among distinct items, and the score."""
    behind = temperature * (scores - scores[:, :1]) / unit
    odds = np.minimum(lists.softmax_logit(heads, temperature / unit), 30.0)[:, None]
    # With the first at log-odds o, a hit whose probability is e^-b of the first's is at -log(1 + e^-o - e^-b) - b.
    own = behind - np.log1p(np.exp(-odds) - np.exp(behind) + 1e-12)
    rank = np.log1p(lists.distinct_ranks(scores))
    return np.stack((own - odds, np.broadcast_to(first[:, None], scores.shape), rank, scores / unit), axis=2)


@dataclass(frozen=True)
class Judged:
    """Judged queries: lists, the same with the right items taken out, and what is known about them."""

    scores: Floats
    twins: Floats
    right: Bools
    """[n], whether the first hit is right."""
    relevant: Bools | None
    """[n, k], which hits are; None if only the first was judged."""
    features: Floats


def fit_model(judged: Judged, seed: int) -> tuple[Model, Pilot, tuple[FeatureGain, ...]]:
    """Learns from judged queries. Groups of features are kept where they lower the cross-fitted loss."""
    n, k = judged.scores.shape
    heads = lists.first_distinct(judged.scores, lists.depth_of(k))
    twins = lists.first_distinct(judged.twins, lists.depth_of(k))
    unit = typical_spread(heads)
    fold = folds_of(judged.right, seed)
    both = np.concatenate((heads, twins)), np.concatenate((judged.features, judged.features))
    missing, query = np.arange(2 * n) >= n, np.tile(np.arange(n), 2)
    original = ~missing
    right, right_rungs, firsts = _climb(RIGHT, *both, np.tile(judged.right, 2), original, unit, fold[query], query)
    absent, absent_rungs, misses = _climb(NO_MATCH, *both, missing, original | missing, unit, fold[query], query)
    pilot = Pilot(judged.right, firsts[:n], firsts[n:], misses[:n], misses[n:])
    model = Model(k, unit, judged.features.shape[1], right, absent, (1.0,))
    return dataclasses.replace(model, hits=_fit_hits(judged, model)), pilot, (*right_rungs, *absent_rungs)


def typical_spread(heads: Floats) -> float:
    """The mean distance of the first score to the others; 1 if there is none. A ValueError is raised if it is too small
    to divide by."""
    spread = float((heads[:, 0] - heads.mean(1)).mean()) if heads.shape[1] > 1 else float(heads[:, 0].std())
    if 0 < spread < LEAST_SPREAD:
        raise ValueError(
            f"scores differ within a list by {spread:g} on average, which is too little to compute with: multiply them "
            "by a constant"
        )
    return spread if spread > 0 else 1.0


def folds_of(right: Bools, seed: int) -> NDArray[np.int64]:
    """The fold [n] of each query, balanced within right and wrong ones."""
    order = np.random.default_rng(seed).permutation(len(right))
    order = order[np.argsort(right[order], kind="stable")]
    fold = np.empty(len(right), np.int64)
    fold[order] = np.arange(len(right)) % FOLDS
    return fold


def _climb(
    question: str,
    heads: Floats,
    features: Floats,
    positive: Bools,
    learned: Bools,
    unit: float,
    fold: NDArray[np.int64],
    query: NDArray[np.int64],
) -> tuple[Answer, list[FeatureGain], Floats]:
    """Fits the answer to a question, group by group, on the `learned` rows. Also returns the log-odds of all rows
    under the fits without their folds."""
    order = [group for group in ORDER[question] if group != FEATURES or features.shape[1]]
    tuned_with = sorted({order[0], SOFTMAX})
    everywhere = {t: design(heads, features, unit, t, tuned_with) for t in TEMPERATURES.tolist()}

    def best(rows: Bools) -> float:
        label = positive[rows]
        loss = {
            t: log_losses(logits(x[rows], fit_logistic(x[rows], label)), label).sum() for t, x in everywhere.items()
        }
        return min(loss, key=lambda t: loss[t])

    chosen = best(learned)
    by_fold = [best(learned & (fold != number)) for number in range(FOLDS)]

    def cross_fitted(groups: Sequence[str]) -> Floats:
        logit = np.empty(len(positive))
        for number, temperature in enumerate(by_fold):
            x, out = design(heads, features, unit, temperature, groups), fold == number
            rows = learned & ~out
            logit[out] = logits(x[out], fit_logistic(x[rows], positive[rows]))
        return logit

    kept = [order[0]]
    logit = cross_fitted(kept)
    constant = np.full(len(positive), fit_logistic(np.empty((int(learned.sum()), 0)), positive[learned])[0])
    rungs = [_rung(question, order[0], constant, logit, positive, learned, query, first=True)]
    for group in order[1:]:
        tried = cross_fitted([*kept, group])
        rungs.append(_rung(question, group, logit, tried, positive, learned, query))
        if rungs[-1].kept:
            kept, logit = [*kept, group], tried
    x = design(heads[learned], features[learned], unit, chosen, kept)
    weights = fit_logistic(x, positive[learned])
    return Answer(chosen, tuple(kept), tuple(weights.tolist())), rungs, logit


def _rung(
    question: str,
    group: str,
    before: Floats,
    after: Floats,
    positive: Bools,
    learned: Bools,
    query: NDArray[np.int64],
    *,
    first: bool = False,
) -> FeatureGain:
    """What a group gains over what was kept `before` it."""
    label = positive[learned]
    gained = log_losses(before[learned], label) - log_losses(after[learned], label)
    gain, stderr = mean_and_error(gained, query[learned])
    return FeatureGain(question, group, gain, stderr, first or gain > stderr)


def _fit_hits(judged: Judged, model: Model) -> tuple[float, ...]:
    """The weights of hits after the first."""
    if judged.relevant is None:
        return (_plain_temperature(judged, model),)
    first = model.right_logit(judged.scores, judged.features)
    heads = model.heads(judged.scores)
    columns = hit_features(judged.scores, heads, first, model.right.temperature, model.unit)
    ranks = lists.distinct_ranks(judged.scores)
    later = lists.begins(ranks)  # one hit of each distinct item
    relevant = lists.all_copies(judged.scores, judged.relevant)
    if not relevant[later].any():
        return (_plain_temperature(judged, model),)
    return tuple(fit_logistic(columns[later], relevant[later]).tolist())


def _plain_temperature(judged: Judged, model: Model) -> float:
    """The inverse temperature at which the softmax itself says best whether the first hit is right."""
    heads = model.heads(judged.scores)
    loss = [log_losses(lists.softmax_logit(heads, t / model.unit), judged.right).sum() for t in TEMPERATURES]
    return float(TEMPERATURES[int(np.argmin(loss))])


def _finite(value: Any) -> float:
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"{value} is not a number up to {LARGEST:g}")
    return number


def _all_finite(values: Any) -> tuple[float, ...]:
    return tuple(_finite(value) for value in values)
