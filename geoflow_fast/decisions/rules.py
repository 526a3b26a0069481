"""Rules with a guaranteed error: which queries to answer, and which hits to show.

A rule is certified on judged queries that no fit has seen. Traffic without a right item is stood for by the twins of
these queries, whose right items are taken out of their lists: replacing each query by its twin with the probability of
such traffic makes a sample of the traffic, in which the number of wrong answers is binomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.decisions import inputs
from geoflow_fast.decisions.bounds import (
    Bools,
    Floats,
    binomial_evidence,
    bounded_evidence,
    clopper_pearson_lower,
    clopper_pearson_upper,
    leading_passes,
)
from geoflow_fast.decisions.model import Model, Pilot, combined
from geoflow_fast.decisions.tables import Table
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, read_json, write_json

FORMAT = 1
ANSWERS, ITEMS = "answers", "items"
EVERYBODY = ""
"""The name of the only group of a rule without groups."""
CANDIDATES = 60
"""Largest number of thresholds that are tested."""
SHARE_STEP = 0.01
"""Estimated shares of queries without a match are rounded up to a multiple of this."""
SHARE_RISK = 0.2
"""The part of the error probability that goes to the estimated share."""
SET_ASIDE = 0.2
"""Share of the queries that choose the candidates of a rule about items."""


@dataclass(frozen=True)
class Certificate:
    """What was certified for one group of queries."""

    threshold: float
    """Answer, or show, where the probability is at least this; infinite if nothing could be certified."""
    answered: float
    """Share of the tested traffic that is answered, or that is shown something."""
    error: float
    """Share of wrong answers in it, or the mean share of wrong hits; NaN if there are none."""
    error_bound: float
    """Upper bound of the error at this threshold taken alone. What is guaranteed is the rule's `max_error`."""
    tested: int
    """Number of queries that were tested."""


@dataclass(frozen=True)
class Rule:
    """When to answer, or what to show, with a guaranteed error. `Trust.certify` makes it."""

    model: Model
    unit: str
    """"answers", if the error is about first hits, or "items", if it is about the hits shown."""
    max_error: float
    confidence: float
    no_match_share: float
    """The largest share of queries without a right item for which the guarantee holds."""
    score_share: float
    """The share that the probabilities are computed for."""
    certificates: Mapping[str, Certificate]
    """By group; a rule without groups has one whose name is empty."""
    encoder: str | None = None
    gallery_size: int | None = None
    presorted: bool = True

    @property
    def certified(self) -> bool:
        """True if at least one threshold could be certified."""
        return any(math.isfinite(each.threshold) for each in self.certificates.values())

    @property
    def threshold(self) -> float:
        """The threshold of a rule without groups."""
        if list(self.certificates) != [EVERYBODY]:
            raise ValueError(f"this rule has a threshold for each of the groups {', '.join(self.certificates)}")
        return self.certificates[EVERYBODY].threshold

    def __call__(
        self,
        scores: Table,
        encoder: str | None = None,
        gallery_size: int | None = None,
        *,
        features: Table | None = None,
        groups: Table | None = None,
    ) -> Any:
        """Which queries to answer: bool [n], as the kind of table that `scores` [n, k] are.

        A ValueError is raised if lists have another length than those the rule was made from, and if `encoder` or
        `gallery_size` are given and differ from what the rule was made with.
        """
        results, shown = self._shown(scores, encoder, gallery_size, features, groups)
        return results.table.back(np.asarray(shown.any(1)), ["answer"])

    def show(
        self,
        scores: Table,
        encoder: str | None = None,
        gallery_size: int | None = None,
        *,
        features: Table | None = None,
        groups: Table | None = None,
    ) -> Any:
        """Which hits to show: bool [n, k], possibly none. Of a rule about answers it is the first hit alone."""
        results, shown = self._shown(scores, encoder, gallery_size, features, groups)
        return results.table.back(results.restored(shown), results.table.columns)

    def _shown(
        self, scores: Table, encoder: str | None, gallery_size: int | None, features: Table | None, groups: Table | None
    ) -> tuple[inputs.Lists, Bools]:
        for name, own, given in (
            ("encoder", self.encoder, encoder),
            ("gallery_size", self.gallery_size, gallery_size),
        ):
            if own is not None and given is not None and own != given:
                raise ValueError(f"this rule was made with {name} {own!r}, not {given!r}: certify one for it")
        results = inputs.result_lists(scores, "scores", k=self.model.k, presorted=self.presorted)
        n = len(results.scores)
        numbers = inputs.features_of(features, n, self.model.features)
        threshold = self._thresholds(groups, n)[:, None]
        if self.unit == ITEMS:
            return results, self.model.p_shown(results.scores, numbers, self.score_share) >= threshold
        shown = np.zeros(results.scores.shape, bool)
        shown[:, 0] = self.model.p_answer(results.scores, numbers, self.score_share) >= threshold[:, 0]
        return results, shown

    def _thresholds(self, groups: Table | None, n: int) -> Floats:
        if list(self.certificates) == [EVERYBODY]:
            if groups is not None:
                raise ValueError("this rule was certified without groups: call it without them")
            return np.full(n, self.threshold)
        if groups is None:
            raise ValueError(f"this rule needs groups=, each one of {', '.join(self.certificates)}")
        names = inputs.groups_of(groups, n)
        unknown = sorted(set(names.tolist()) - set(self.certificates))
        if unknown:
            raise ValueError(f"groups has {unknown[0]!r}, but there are only {', '.join(self.certificates)}")
        return np.array([self.certificates[name].threshold for name in names.tolist()])

    def save(self, path: str | Path) -> None:
        """Writes the rule as a JSON file, whole or not at all."""
        plain = {name: _plain(each) for name, each in self.certificates.items()}
        write_json(
            checks.path(path, "path"),
            {
                "format": FORMAT,
                "what": "geoflow_fast rule",
                "unit": self.unit,
                "max_error": self.max_error,
                "confidence": self.confidence,
                "no_match_share": self.no_match_share,
                "score_share": self.score_share,
                "encoder": self.encoder,
                "gallery_size": self.gallery_size,
                "presorted": self.presorted,
                "certificates": plain,
                "model": self.model.as_json(),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> Rule:
        """Reads a rule that `save` has written."""
        file = checks.path(path, "path")
        values = read_json(file, "a rule")
        with contents_of(file, "damaged or not a rule"):
            if values["format"] != FORMAT or values["what"] != "geoflow_fast rule":
                raise ValueError(
                    f"format {values['format']} of {values['what']!r}; this version reads rules of {FORMAT}"
                )
            checks.one_of(values["unit"], "unit", (ANSWERS, ITEMS))
            rule = cls(
                Model.from_json(values["model"]),
                values["unit"],
                **{name: checks.number(values[name], name, 0, 1) for name in _SHARES},
                certificates={str(name): _restored(each) for name, each in values["certificates"].items()},
                encoder=_text(values["encoder"]),
                gallery_size=_count(values["gallery_size"]),
                presorted=bool(values["presorted"]),
            )
            if not rule.certificates:
                raise ValueError("it has no certificate")
        return rule

    def __repr__(self) -> str:
        """The rule in plain words."""
        what = (
            "wrong among the answers" if self.unit == ANSWERS else "wrong among the hits shown to a query, on average"
        )
        lines = [f"Rule for lists of {self.model.k} hits: at most {self.max_error:.0%} {what},"]
        lines.append(f"with {self.confidence:.0%} confidence" + (" for each group" if self._has_groups else ""))
        for name, each in self.certificates.items():
            start = f"  {name}: " if self._has_groups else "  "
            lines.append(start + _in_words(each, self.unit))
        tested = sum(each.tested for each in self.certificates.values())
        lines.append(
            f"  assumes: queries like the {tested:,} it was tested on, at most {self.no_match_share:.0%} "
            "more without a right item, the same gallery and encoder"
        )
        return "\n".join(lines)

    @property
    def _has_groups(self) -> bool:
        return list(self.certificates) != [EVERYBODY]


_SHARES = ("max_error", "confidence", "no_match_share", "score_share")


def _in_words(each: Certificate, unit: str) -> str:
    if not math.isfinite(each.threshold):
        return f"nothing could be certified with {each.tested:,} queries: no query is answered"
    verb = "answers" if unit == ANSWERS else "shows"
    return (
        f"{verb} where the probability is at least {each.threshold:.3f}: {each.answered:.1%} of the queries, "
        f"{each.error:.1%} wrong in the test (bound {each.error_bound:.1%})"
    )


def _plain(each: Certificate) -> dict[str, float | int | None]:
    return {name: None if not math.isfinite(value) else value for name, value in vars(each).items()}


def _restored(values: Mapping[str, Any]) -> Certificate:
    missing = {"threshold": math.inf, "error": math.nan}
    numbers = {
        name: missing[name] if values[name] is None and name in missing else checks.number(values[name], name)
        for name in ("threshold", "answered", "error", "error_bound")
    }
    return Certificate(**numbers, tested=checks.integer(values["tested"], "tested"))


def _text(value: Any) -> str | None:
    return None if value is None else checks.words(value, "encoder")


def _count(value: Any) -> int | None:
    return None if value is None else checks.integer(value, "gallery_size", 1)


# ---- how a threshold is certified ---------------------------------------------------------------------------------


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
        order = np.argsort(drawn)
        replaced = np.searchsorted(drawn[order], shares, side="left")
        given, loss, twins = (_sums(each[order]) for each in (self.given, self.loss, self.twin_given))
        twin = twins[replaced]
        return given[-1] - given[replaced] + twin, loss[-1] - loss[replaced] + twin


def _sums(rows: NDArray[Any]) -> Floats:
    """Sums [n + 1, T] of the first 0 to n rows."""
    return np.concatenate((np.zeros((1, rows.shape[1])), np.cumsum(rows, axis=0, dtype=np.float64)))


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
    """At most `CANDIDATES` of the values, descending, between which lie equal weights."""
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    position = np.searchsorted(reached, np.linspace(0, 1, CANDIDATES + 1)[1:] - 1e-9)
    return np.unique(values[order][np.minimum(position, len(values) - 1)])[::-1]


def most_promising(pilot: Outcomes, share: float, n: int, max_error: float) -> int:
    """The threshold at which the pilot promises the strongest evidence from `n` tested queries: where to begin."""
    given, wrong = pilot.rates(share)
    m = len(pilot.given)
    # One wrong answer in two is added, so that a few lucky answers of the pilot do not promise much.
    risk = (m * wrong + 1) / (m * given + 2)
    expected = np.round(n * given)
    return int(binomial_evidence(np.floor(risk * expected), expected, max_error).argmin())


def certified(
    outcomes: Outcomes, thresholds: Floats, shares: Floats, max_error: float, confidence: float, *, unit: str, seed: int
) -> Certificate:
    """Tests thresholds in their order, for each of the `shares` of traffic without a match, and certifies the last up
    to which all tests pass for all shares."""
    drawn = np.random.default_rng(seed).random(len(outcomes.given))
    given, loss = outcomes.counts(drawn, shares)
    test = binomial_evidence if unit == ANSWERS else bounded_evidence
    evidence = test(loss, given, max_error).max(0)
    passed = leading_passes(evidence, 1 - confidence)
    n = len(drawn)
    if not passed:
        return Certificate(math.inf, 0.0, math.nan, 1.0, n)
    count, wrong = float(given[-1, passed - 1]), float(loss[-1, passed - 1])
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


def best_cut(pilot: Pilot) -> float:
    """The log-odds of "no match" above which twins are found most often in comparison with queries that have one."""
    cuts = np.unique(np.concatenate((pilot.no_match, pilot.twin_no_match)))
    queries, twins = ((values >= cuts[:, None]).mean(1) for values in (pilot.no_match, pilot.twin_no_match))
    return float(cuts[int((twins - queries).argmax())])


def share_estimate(pilot: Pilot, live: Floats, cut: float) -> float:
    """The share of live queries without a match that explains how many of them, with log-odds `live` [m], are above
    the cut. It decides what probabilities are computed for, not what is guaranteed."""
    queries, twins, above = (float((each >= cut).mean()) for each in (pilot.no_match, pilot.twin_no_match, live))
    return float(np.clip((above - queries) / max(twins - queries, 1e-9), 0.0, 0.9))


def share_bound(queries: Floats, twins: Floats, live: Floats, cut: float, risk: float) -> float:
    """An upper bound of the share of live queries without a match, false with probability `risk` at most.

    Of queries with a match, of their twins, and of live queries, whose law is a mixture of the two, a share each is
    above the cut; three exact binomial bounds of these shares give one of the mixture.
    """
    confidence = 1 - risk / 3
    match, none = (clopper_pearson_lower(int((each >= cut).sum()), len(each), confidence) for each in (queries, twins))
    above = clopper_pearson_upper(int((live >= cut).sum()), len(live), confidence)
    return float(np.clip((above - match) / (none - match), 0.0, 1.0)) if none > match else 1.0


def shares_up_to(bound: float) -> Floats:
    """The shares, from 0 in small steps, that cover everything up to the bound.

    The bound depends on the tested queries. Because each share is tested, also the first that is not below the true
    one is, at the full level; at the last alone chance could make the test easier than there.
    """
    steps = math.ceil(bound / SHARE_STEP - 1e-9)
    return np.minimum(np.arange(steps + 1) * SHARE_STEP, 1.0)


def pilot_outcomes(pilot: Pilot, share: float) -> tuple[Floats, Outcomes]:
    """Thresholds from the cross-fitted probabilities of the fitted queries, and what happens there."""
    score = combined(pilot.first, pilot.no_match, share)
    twin = combined(pilot.twin_first, pilot.twin_no_match, share)
    thresholds = spaced(np.concatenate((score, twin)), np.repeat((1 - share, share), len(score)))
    return thresholds, answer_outcomes(score, ~pilot.right, twin, thresholds)
