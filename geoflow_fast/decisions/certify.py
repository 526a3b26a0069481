"""How a rule is certified, on judged queries that no fit has seen.

Traffic without a right item is stood for by the twins of these queries, whose right items are taken out of their lists:
replacing each query by its twin with the probability of such traffic makes a sample of the traffic, in which the number
of wrong answers is binomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from geoflow_fast.decisions import lists
from geoflow_fast.decisions.bounds import (
    Bools,
    Floats,
    binomial_evidence,
    bounded_evidence,
    last_passed,
)
from geoflow_fast.decisions.model import Model, Pilot, combined, no_match_probability
from geoflow_fast.decisions.rules import ANSWERS, Certificate

CANDIDATES = 60
"""Largest number of thresholds that are tested."""
SHARE_STEP = 0.01
"""Distance of the shares of queries without a match by which an unknown one is represented."""
NEGLIGIBLE = 1e-6
"""Probability below which a share is left out."""
LEAST_SHARE = 0.1
"""The signal of a missing item is that for a share of at least this, and at most one less this."""
STATED = 30
"""The error that the probabilities state counts as much as this many answers of the fitted queries."""
STARTS, BEST_START = 8, 0.7
"""Thresholds at which tests begin besides the most promising one, and the part of the error probability that is kept
for the latter; the former divide the rest."""
SET_ASIDE = 0.2
"""Share of the queries that choose the candidates of a rule about items."""


@dataclass(frozen=True)
class Outcomes:
    """What happens to queries at each of T thresholds, from strict to loose."""

    given: Bools
    """[n, T], whether a query is answered or shown something."""
    loss: Floats
    """[n, T], 1 if that is wrong, or the share of wrong hits; 0 where nothing is given."""
    twin_given: Bools
    """[n, T], whether its twin without a right item is answered, which is always wrong."""

    def rates(self, share: float) -> tuple[Floats, Floats]:
        """The share of traffic that is answered, and the share answered wrongly, with a `share` without a match."""
        twins = share * self.twin_given.mean(0)
        return (1 - share) * self.given.mean(0) + twins, (1 - share) * self.loss.mean(0) + twins

    def counts(self, drawn: Floats, shares: Floats) -> tuple[Floats, Floats]:
        """Numbers [S, T] of answers and of wrong ones among them in samples of traffic, in which a query is replaced by
        its twin if its `drawn` number is below the share."""
        replaced = (drawn < shares[:, None]).astype(np.float64)
        given, twins = self.given.astype(np.float64), self.twin_given.astype(np.float64)
        return given.sum(0) + replaced @ (twins - given), self.loss.sum(0) + replaced @ (twins - self.loss)


def answer_outcomes(score: Floats, wrong: Bools, twin: Floats, thresholds: Floats) -> Outcomes:
    """Outcomes of answering where the score [n], or that of the twin, is at least a threshold."""
    given = score[:, None] >= thresholds
    return Outcomes(given, (given & wrong[:, None]).astype(np.float64), twin[:, None] >= thresholds)


def item_outcomes(shown: Floats, relevant: Bools, twin: Floats, thresholds: Floats) -> Outcomes:
    """Outcomes of showing the hits whose probability `shown` [n, k] is at least a threshold; `twin` [n] is the largest
    probability in the list without the relevant hits."""
    number = np.stack([(shown >= threshold).sum(1) for threshold in thresholds.tolist()], axis=1)
    wrong = np.stack([((shown >= threshold) & ~relevant).sum(1) for threshold in thresholds.tolist()], axis=1)
    return Outcomes(number > 0, wrong / np.maximum(number, 1), twin[:, None] >= thresholds)


def spaced(values: Floats, weights: Floats) -> Floats:
    """At most `CANDIDATES` of the values, descending; the share of the weights above them grows quadratically, since
    strict thresholds are close to each other in what they answer."""
    order = np.argsort(-values, kind="stable")
    counted = weights[order] if weights.any() else np.ones(len(values))
    reached = np.cumsum(counted) / counted.sum()
    position = np.searchsorted(reached, np.linspace(0, 1, CANDIDATES + 1)[1:] ** 2 - 1e-9)
    return np.unique(values[order][np.minimum(position, len(values) - 1)])[::-1]


def most_promising(pilot: Outcomes, stated: Floats, share: float, n: int, max_error: float) -> int:
    """The threshold at which the pilot promises the strongest evidence from `n` tested queries: where to begin.

    `stated` [T] is the error that the probabilities themselves state. It counts as much as some answers of the pilot,
    so that a few lucky ones do not promise much.
    """
    given, wrong = pilot.rates(share)
    m = len(pilot.given)
    risk = (m * wrong + STATED * stated) / (m * given + STATED)
    expected = np.round(n * given)
    return int(binomial_evidence(np.floor(risk * expected), expected, max_error).argmin())


def starting_levels(best: int, count: int) -> Floats:
    """The parts [count] of the error probability that belong to each threshold: much to the most promising one, `best`,
    and some to others around it, which count if the pilot was wrong about where to begin."""
    levels = np.zeros(count)
    starts = np.unique(np.round(np.linspace(0, min(2 * best, count - 1), STARTS)).astype(int))
    levels[starts] = (1 - BEST_START) / len(starts)
    levels[best] += BEST_START
    return levels


def stated_error(prob: Floats, weights: Floats, thresholds: Floats) -> Floats:
    """The mean of 1 - prob over the probabilities that are at least each threshold."""
    order = np.argsort(-prob, kind="stable")
    count = np.searchsorted(-prob[order], -thresholds, side="right")
    sums = [np.concatenate(([0.0], np.cumsum(each[order])))[count] for each in (weights * (1 - prob), weights)]
    return np.asarray(sums[0] / np.maximum(sums[1], np.finfo(np.float64).tiny))


def certified(
    outcomes: Outcomes,
    thresholds: Floats,
    levels: Floats,
    share: Share,
    max_error: float,
    confidence: float,
    *,
    unit: str,
    seed: int,
) -> Certificate:
    """Tests thresholds in their order, with these parts of the error probability, for a share of traffic without a
    match, and certifies the loosest that passes. The evidence is the mean of that for the shares it may be."""
    drawn = np.random.default_rng(seed).random(len(outcomes.given))
    given, loss = outcomes.counts(drawn, share.values)
    test = binomial_evidence if unit == ANSWERS else bounded_evidence
    passed = last_passed(share.prob @ test(loss, given, max_error), (1 - confidence) * levels)
    n = len(drawn)
    if not passed:
        return Certificate(math.inf, 0.0, math.nan, 1.0, n)
    at = share.position(confidence)
    count, wrong = float(given[at, passed - 1]), float(loss[at, passed - 1])
    bound = upper_bound(wrong, count, confidence, test)
    return Certificate(float(thresholds[passed - 1]), count / n, wrong / count, bound, n)


def upper_bound(loss: float, count: float, confidence: float, test: Callable[..., Floats]) -> float:
    """The largest mean loss that a test at this confidence does not reject."""
    from scipy import optimize

    def excess(mean: float) -> float:
        return float(test(np.array([loss]), np.array([count]), mean)[0]) - (1 - confidence)

    low, high = loss / count, 1 - 1e-12
    if low >= high or excess(high) >= 0:
        return 1.0
    return float(optimize.brentq(excess, low, high)) if excess(low) > 0 else low


@dataclass(frozen=True)
class Share:
    """The share of traffic without a match: one value that is known, or several with the probabilities of each."""

    values: Floats
    """[S], ascending."""
    prob: Floats
    """[S]."""

    @classmethod
    def known(cls, value: float) -> Share:
        """A share that is given."""
        return cls(np.array([value]), np.ones(1))

    @classmethod
    def estimated(cls, queries: Floats, twins: Floats, live: Floats, n: int | None = None) -> Share:
        """The share of live queries without a match, by its confidence distribution in large samples.

        The signals `live` [m] are a mixture of those of queries with a match, like `queries`, and of such without one,
        like their `twins` [n each]. The probability that the share is at most s is the confidence at which it would be
        excluded to be larger: because that would make the mean of the live signals larger than it is, measured by the
        standard error of the difference. `n`: how many judged queries to assume, if not these.
        """
        from scipy import special

        values = np.arange(0.0, 1.0 + SHARE_STEP / 2, SHARE_STEP)
        expected = queries.mean() + values * (twins.mean() - queries.mean())
        # Variances of q + s (t - q) over the judged queries, for all shares s.
        (of_query, mixed), (_, of_change) = np.cov(queries, twins - queries, bias=True)
        judged = of_query + 2 * values * mixed + values**2 * of_change
        error = np.sqrt(live.var() / len(live) + judged / (n or len(queries)))
        at_most = special.ndtr((expected - live.mean()) / np.maximum(error, np.finfo(np.float64).tiny))
        if twins.mean() <= queries.mean():  # they tell nothing about the share
            at_most = np.zeros(len(values))
        at_most[-1] = 1.0
        prob = np.diff(np.maximum.accumulate(at_most), prepend=0.0)
        possible = prob > NEGLIGIBLE
        return cls(values[possible], prob[possible] / prob[possible].sum())

    def position(self, confidence: float) -> int:
        """Which of the values is an upper bound at this confidence."""
        return int(np.searchsorted(np.cumsum(self.prob), confidence - 1e-12))

    def bound(self, confidence: float) -> float:
        """The upper bound at this confidence."""
        return float(self.values[self.position(confidence)])


def likely_share(pilot: Pilot, live: Floats) -> float:
    """The share of live queries without a match that explains their mean signal. It decides what probabilities are
    computed for, not what is guaranteed."""
    queries, twins, mixture = (float(signal(x, 0.5).mean()) for x in (pilot.no_match, pilot.twin_no_match, live))
    return float(np.clip((mixture - queries) / max(twins - queries, 1e-9), 0.0, 0.9))


def signal(no_match_logit: Floats, share: float) -> Floats:
    """The probability of a missing item if a `share` of the queries had none: the number between 0 and 1 whose mean
    tells most about shares near this one."""
    return no_match_probability(no_match_logit, min(max(share, LEAST_SHARE), 1 - LEAST_SHARE))


def pilot_outcomes(pilot: Pilot, share: float) -> tuple[Floats, Outcomes, Floats]:
    """Thresholds from the cross-fitted probabilities of the fitted queries, what happens there, and which errors the
    probabilities state."""
    score = combined(pilot.first, pilot.no_match, share)
    twin = combined(pilot.twin_first, pilot.twin_no_match, share)
    both, weights = np.concatenate((score, twin)), np.repeat((1 - share, share), len(score))
    thresholds = spaced(both, weights)
    outcomes = answer_outcomes(score, ~pilot.right, twin, thresholds)
    return thresholds, outcomes, stated_error(both, weights, thresholds)


Logits = tuple[Floats, Floats]
"""Log-odds that the first hit is right, and that the right item is missing."""


class Certifier:
    """Certifies the threshold of a rule."""

    def __init__(
        self,
        model: Model,
        pilot: Pilot,
        unit: str,
        max_error: float,
        confidence: float,
        *,
        share: float = 0.0,
        live: Floats | None = None,
        seed: int = 0,
    ) -> None:
        """`share` is that of traffic without a match; `live` [m] are log-odds of "no match" to estimate it from."""
        self.model, self.pilot, self.unit, self.live, self.seed = model, pilot, unit, live, seed
        self.max_error, self.confidence, self.share = max_error, confidence, share
        self.score_share = share if live is None else likely_share(pilot, live)

    def __call__(
        self, scores: Floats, features: Floats, first: Bools, relevant: Bools | None
    ) -> tuple[Certificate, float]:
        """The certificate of these queries, and the share of traffic without a match that it holds for."""

        def both(some: Floats) -> Logits:
            return self.model.right_logit(some, features), self.model.no_match_logit(some, features)

        variants = [both(twin) for twin in possible_twins(self.model, scores, first, relevant)]
        queries, twins = both(scores), (np.stack([v[0] for v in variants]), np.stack([v[1] for v in variants]))
        if self.unit == ANSWERS:
            return self.answers(queries, twins, first)
        assert relevant is not None
        shown = self.model.p_shown(scores, features, self.score_share)
        twin = self.model.p_shown(self.model.without(scores, relevant), features, self.score_share)[:, 0]
        return self.items(shown, relevant, twin, self._share(queries[1], twins[1].min(0)))

    def answers(self, queries: Logits, twins: Logits, first: Bools) -> tuple[Certificate, float]:
        """The same from log-odds: of the queries [n], and of the twins that each may have [variants, n]."""
        share = self._share(queries[1], twins[1].min(0))
        thresholds, pilot, stated = pilot_outcomes(self.pilot, self.score_share)
        levels = self._levels(pilot, stated, len(first))
        score, twin = combined(*queries, self.score_share), combined(*twins, self.score_share).max(0)
        return self._certified(answer_outcomes(score, ~first, twin, thresholds), thresholds, levels, share)

    def _share(self, queries: Floats, twins: Floats, n: int | None = None) -> Share:
        """The share of traffic without a match, from log-odds of "no match" of queries and twins [n each], computed
        with `n` of them."""
        if self.live is None:
            return Share.known(self.share)
        of_query, of_twin, of_live = (signal(each, self.score_share) for each in (queries, twins, self.live))
        return Share.estimated(of_query, of_twin, of_live, n)

    def _levels(self, pilot: Outcomes, stated: Floats, n: int) -> Floats:
        """Where to begin with `n` queries: mostly at the threshold that is most promising for the share that the tests
        will have to assume, estimated from the pilot."""
        share = self._share(self.pilot.no_match, self.pilot.twin_no_match, n).bound(self.confidence)
        return starting_levels(most_promising(pilot, stated, share, n, self.max_error), len(stated))

    def _certified(
        self, outcomes: Outcomes, thresholds: Floats, levels: Floats, share: Share
    ) -> tuple[Certificate, float]:
        certificate = certified(
            outcomes, thresholds, levels, share, self.max_error, self.confidence, unit=self.unit, seed=self.seed
        )
        return certificate, share.bound(self.confidence)

    def items(self, shown: Floats, relevant: Bools, twin: Floats, share: Share) -> tuple[Certificate, float]:
        """The certificate of showing hits, from the probabilities [n, k] that each is relevant, and the largest of them
        [n] without the relevant hits. A part of the queries chooses the thresholds, the others are tested."""
        order = np.random.default_rng(self.seed).permutation(len(shown))
        aside = order[: max(1, round(SET_ASIDE * len(shown)))]
        tested = order[len(aside) :]
        values = shown[aside].ravel()
        thresholds = spaced(values, values)  # a hit that is probably relevant counts for more
        pilot = item_outcomes(shown[aside], relevant[aside], twin[aside], thresholds)
        stated = stated_error(values, np.ones(len(values)), thresholds)
        levels = self._levels(pilot, stated, len(tested))
        outcomes = item_outcomes(shown[tested], relevant[tested], twin[tested], thresholds)
        return self._certified(outcomes, thresholds, levels, share)


def possible_twins(model: Model, scores: Floats, first: Bools, relevant: Bools | None) -> list[Floats]:
    """Lists with the right items taken out. If only the first hit was judged, and is wrong, the right item may be any
    other one that is looked at, or none of them: there is a list for each of these cases."""
    if relevant is not None:
        return [model.without(scores, relevant)]
    ranks = lists.distinct_ranks(scores)
    later = [np.where(first, 0, rank)[:, None] for rank in range(1, lists.depth_of(scores.shape[1]))]
    none = np.where(first, 0, -1)[:, None]
    return [model.without(scores, ranks == missing) for missing in (none, *later)]
