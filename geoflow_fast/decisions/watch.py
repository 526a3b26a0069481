"""Does the guarantee of a rule still hold for a log of queries that grows? No label is needed.

At every look the latest queries are compared with those that the rule was certified on. A guarantee is about queries
like these: once the log differs from them beyond chance, it is gone, and the rest of the report says what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.decisions import certify, drift, inputs, lists
from geoflow_fast.decisions.bounds import Bools, Floats, check_open_interval
from geoflow_fast.decisions.drift import Drift
from geoflow_fast.decisions.encoders import check_encoder
from geoflow_fast.decisions.logistic import fit_logistic, logits
from geoflow_fast.decisions.reference import Reference
from geoflow_fast.decisions.rules import Rule
from geoflow_fast.decisions.tables import Table, read
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.words import words_of

WINDOW, EVERY, FALSE_ALARMS = 500, 100, 0.05
MISSING, SCORES, HITS, EMBEDDINGS = "missing items", "scores", "hits", "embeddings"
PARTS = {MISSING: 3.0, SCORES: 1.0, HITS: 1.0, EMBEDDINGS: 1.0}
"""What is compared, and in which proportion the probability of a false alarm is divided."""
EVEN_SHARE = 0.5
"""Signals of missing items are probabilities at even odds."""
FURTHEST = 4.0
"""Standardised scores further out count as this, before they are squared."""
TO_LABEL = 50
SHARE_STEP = 0.1
"""How far the shares of queries without a right item are apart, at most, that a log is compared with."""


@dataclass(frozen=True)
class Look:
    """What one look at the log found."""

    number: int
    """From 1."""
    start: int
    end: int
    """The rows of the log that were looked at, the last one not included."""
    expected: float
    """Expected share of right first hits: the mean probability, for the rule's share of queries without a right item
    or, if the log clearly exceeds it, for the share estimated from the log."""
    stderr: float
    """Its standard error: of the queries, of the probabilities on the judged ones, and of such a share."""
    answered: float
    """Share of the queries that the rule answers."""
    expected_error: float
    """Expected share of wrong answers among these; NaN if there are none."""
    judged_error: float
    """The same for the calibration queries, by the same probabilities."""
    no_match_share: float
    """Estimated share of live queries whose right item is missing, beyond what the judged ones hold of this."""
    no_match_stderr: float
    drifts: tuple[Drift, ...]
    """One for each view."""

    @property
    def p_value(self) -> float:
        """The smallest corrected p-value."""
        return min((each.corrected for each in self.drifts), default=1.0)


@dataclass(frozen=True)
class Health:
    """The state of a rule after the last look at a log."""

    rule: Rule
    looks: tuple[Look, ...]
    """The looks of this call."""
    alarm: Look | None
    """The first look that found a difference beyond chance, in this call."""
    false_alarms: float
    p_right: Floats
    """[w], the probability that the first hit is right, for the queries of the last look."""
    odds: Floats
    """[w], how much more frequent such queries are in the log than among the judged ones, by the classifier."""
    to_label: NDArray[np.int64]
    """Rows of the log that are most worth judging, best first."""

    @property
    def last(self) -> Look:
        """The last look."""
        return self.looks[-1]

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the guarantee."""
        return self.alarm is None

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        if self.alarm is None:
            return (
                f"The guarantee holds as far as can be told without labels: {self.last.end:,} queries do not differ "
                f"from the judged ones beyond chance (p {self.last.p_value:.2g} over all looks)."
            )
        return f"The guarantee no longer holds because {because(self.rule, self.alarm, self.false_alarms)}."


def because(rule: Rule, look: Look, false_alarms: float) -> str:
    """Why a look is an alarm, and what is expected of the answers now."""
    noticed = [each for each in look.drifts if each.corrected <= false_alarms]
    parts = ", ".join(f"{each.view} (AUROC {each.auroc:.2f}, p {each.corrected:.1g})" for each in noticed)
    words = f"queries {look.start:,} to {look.end:,} differ from the judged ones in {parts}"
    if look.no_match_share - 2 * look.no_match_stderr > rule.no_match_share:
        words += (
            f"; {look.no_match_share:.0%} +- {look.no_match_stderr:.0%} seem to have no right item, and the rule "
            f"assumes {rule.no_match_share:.0%}"
        )
    if not math.isnan(look.expected_error):
        words += (
            f"; {look.expected_error:.1%} of the answers are expected to be wrong "
            f"({look.judged_error:.1%} before, allowed {rule.max_error:.1%})"
        )
    return words


@dataclass(frozen=True)
class Log:
    """Live queries, in the order in which they came."""

    heads: Floats
    features: Floats
    hits: NDArray[Any] | None
    embeddings: Floats | None

    def part(self, start: int, end: int) -> Log:
        """Some rows, with as many digits as a rule keeps of its queries: otherwise equal lists would differ."""
        rows = slice(start, end)
        return Log(
            lists.rounded(self.heads[rows]),
            lists.rounded(self.features[rows]),
            None if self.hits is None else self.hits[rows],
            None if self.embeddings is None else self.embeddings[rows],
        )


def watch(
    rule: Rule,
    scores: Table,
    *,
    encoder: str | None = None,
    features: Table | None = None,
    hits: Table | None = None,
    embeddings: Table | None = None,
    judged_embeddings: Table | None = None,
    window: int = WINDOW,
    every: int = EVERY,
    false_alarms: float = FALSE_ALARMS,
) -> Health:
    """Looks at a log of queries, whose result lists `scores` [n, k] stand in the order in which they came, after every
    `every` queries, and compares the last `window` with those that the rule was certified on.

    Classifiers try to tell live queries from judged ones: by the probability that their right item is missing, which
    the rule's model has learned; by their scores; by the items that they found, if both the rule and the log know the
    ids of their `hits` [n, k]; and by their `embeddings` [n, d], if `judged_embeddings` [m, d] are given for the rows
    that were certified on. Each has an AUROC out of fold and an exact permutation p-value. The p-values are corrected
    for all views and all looks, however long the log grows, such that a log without any change raises an alarm with a
    probability of at most `false_alarms`.

    `encoder` names the encoder that made the lists: a rule of another one is refused with a ValueError, and if only the
    rule or only the call names one, a warning is given.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be a Rule, got {type(rule).__name__}")
    check_encoder("this rule", rule.encoder, encoder)
    compared = {"hits": hits, "embeddings": embeddings, "judged_embeddings": judged_embeddings}
    return looked_at(rule, scores, Looks(window, every, false_alarms), features=features, **compared)


@dataclass(frozen=True)
class Looks:
    """When a log is looked at, and how."""

    window: int = WINDOW
    every: int = EVERY
    false_alarms: float = FALSE_ALARMS
    before: int = 0
    """How many looks there were already; the next one comes after them."""
    alarmed: bool = False
    """Whether one of these was an alarm; looks after it only show how the difference goes on."""

    def __post_init__(self) -> None:
        check_open_interval(self.false_alarms, "false_alarms")
        checks.integer(self.every, "every", 1)
        checks.integer(self.window, "window", self.every)
        checks.integer(self.before, "before", 0)


def looked_at(
    rule: Rule,
    scores: Table,
    looks: Looks,
    *,
    features: Table | None = None,
    hits: Table | None = None,
    embeddings: Table | None = None,
    judged_embeddings: Table | None = None,
) -> Health:
    """Does the looks that are due, as `watch` says, whichever encoder made the lists."""
    reference = watched_queries(rule)
    results = inputs.result_lists(scores, "scores", k=rule.model.k, presorted=rule.presorted)
    n = len(results.scores)
    judged, live_rows = _embeddings(judged_embeddings, embeddings, reference, n)
    log = Log(
        rule.model.heads(results.scores),
        inputs.features_of(features, n, rule.model.features),
        None if hits is None else inputs.hits_of(hits, n, rule.model.k),
        live_rows,
    )
    watcher = Watcher(rule, reference, judged, looks.false_alarms)
    every = looks.every
    numbers = range(looks.before + 1, n // every + 1)
    if not numbers:
        raise ValueError(
            f"scores has {n} queries, and the next look comes after {every * (looks.before + 1)}: nothing to look at"
        )
    done: list[Look] = []
    alarm = None
    for number in numbers:
        end = number * every
        known = looks.alarmed or alarm is not None
        done.append(watcher.look(number, log, max(0, end - looks.window), end, alarmed=known))
        if not known and done[-1].p_value <= looks.false_alarms:
            alarm = done[-1]
    return watcher.health(done, alarm, log)


def watched_queries(rule: Rule) -> Reference:
    """The queries that a rule was certified on; a ValueError if there is nothing to watch."""
    if not rule.certified:
        raise ValueError("rule answers no query, since nothing could be certified: there is no guarantee to watch")
    return rule.reference


def changed_search(rule: Rule, encoder: str | None, gallery_size: int | None) -> str | None:
    """In what the search is known to differ from the one that the rule was made for."""
    for name, own, given in (("encoder", rule.encoder, encoder), ("gallery size", rule.gallery_size, gallery_size)):
        if own is not None and given is not None and own != given:
            return f"the {name} is {given} and not {own}"
    return None


def _embeddings(
    judged: Table | None, live: Table | None, reference: Reference, n: int
) -> tuple[Floats | None, Floats | None]:
    """The embeddings of the certified queries and of the log, both or none."""
    if (judged is None) != (live is None):
        raise ValueError("embeddings and judged_embeddings go together: give both or none")
    if judged is None:
        return None, None
    rows = []
    for name, table in (("judged_embeddings", judged), ("embeddings", live)):
        values = read(table, name).values
        if values.ndim != 2 or values.dtype.kind not in "fiu":
            raise ValueError(f"{name} must be numbers [n, d], got {values.dtype} {values.shape}")
        rows.append(values)
    last = int(reference.row.max(initial=-1))
    if last >= len(rows[0]):
        raise ValueError(f"judged_embeddings has {len(rows[0])} rows, but the rule was certified on row {last}")
    if len(rows[1]) != n or rows[0].shape[1] != rows[1].shape[1]:
        raise ValueError(f"embeddings must be [{n}, {rows[0].shape[1]}], got {rows[1].shape}")
    chosen = rows[0][reference.row].astype(np.float64), rows[1].astype(np.float64)
    for name, values in zip(("judged_embeddings", "embeddings"), chosen):
        if not np.isfinite(values).all():
            raise ValueError(
                f"{name} has a number that is not finite in row {int((~np.isfinite(values)).argmax(0)[0])}"
            )
    return chosen


class Watcher:
    """Compares parts of a log with the queries of a certificate."""

    def __init__(
        self,
        rule: Rule,
        reference: Reference,
        embeddings: Floats | None,
        false_alarms: float,
        seed: int = 0,
    ) -> None:
        self.rule, self.reference, self.embeddings = rule, reference, embeddings
        self.false_alarms, self.seed = false_alarms, seed
        self.p_judged = self._p_answer(reference.heads, reference.features)

    def look(self, number: int, log: Log, start: int, end: int, *, alarmed: bool = False) -> Look:
        """The `number`-th look, at the rows from `start` to `end`; after an alarm it is the first for itself."""
        part, rng = log.part(start, end), np.random.default_rng((self.seed, number))
        drifts = self.drifts(number, part, rng, alarmed=alarmed)
        answered = self._p_answer(part.heads, part.features) >= self.rule.threshold
        share, share_error = self._no_match(part)
        p, stderr = self._expected(part, share, share_error)
        return Look(
            number,
            start,
            end,
            float(p.mean()),
            stderr,
            float(answered.mean()),
            _mean(1 - p[answered]),
            self._judged_error(),
            share,
            share_error,
            drifts,
        )

    def health(self, looks: Sequence[Look], alarm: Look | None, log: Log) -> Health:
        """The state after these looks, with the queries of the last one that are most worth judging: such as are
        frequent in the log and rare among the judged ones, and of which it is not known whether they are right."""
        last = looks[-1]
        part = log.part(last.start, last.end)
        p = self._p_answer(part.heads, part.features)
        odds = _odds(last.drifts, len(self.reference))[len(self.reference) :]
        order = np.argsort(-odds * np.sqrt(p * (1 - p)), kind="stable")
        _, first = np.unique(part.heads[order], axis=0, return_index=True)  # the same query is judged once
        to_label = last.start + order[np.sort(first)][:TO_LABEL]
        return Health(self.rule, tuple(looks), alarm, self.false_alarms, p, odds, to_label)

    def _p_answer(self, heads: Floats, features: Floats) -> Floats:
        return self.rule.model.p_answer_of(heads, features, self.rule.score_share)

    def _expected(self, part: Log, share: float, share_error: float) -> tuple[Floats, float]:
        """The probability [w] that each first hit is right, and the standard error of their mean."""

        def p_for(some: float) -> Floats:
            return self.rule.model.p_answer_of(part.heads, part.features, some)

        more = self._more_missing(share, share_error)
        p = p_for(share if more else self.rule.score_share)
        by_share = float(p.mean() - p_for(min(1.0, share + share_error)).mean()) if more else 0.0
        off = self.reference.right - self.p_judged
        return p, math.sqrt(float(p.var()) / len(p) + float(off.var()) / len(off) + by_share**2)

    def _more_missing(self, share: float, share_error: float) -> bool:
        """Whether the log surely holds more queries without a right item than the rule assumes."""
        return share - 2 * share_error > self.rule.no_match_share

    def _judged_error(self) -> float:
        """Expected share of wrong answers among the judged queries, and among their twins, in the share that
        the rule assumes."""
        share, reference = self.rule.no_match_share, self.reference
        p = np.concatenate((self.p_judged, self._p_answer(reference.twins, reference.features)))
        weight = np.repeat((1 - share, share), len(reference)) * (p >= self.rule.threshold)
        return float(weight @ (1 - p) / weight.sum()) if weight.any() else math.nan

    def drifts(self, number: int, part: Log, rng: np.random.Generator, *, alarmed: bool = False) -> tuple[Drift, ...]:
        """What the classifiers of the `number`-th look say; after an alarm a look is the first for itself, and fewer
        permutations will do.

        If the rule assumes that items of some queries are missing, the log may hold any share of these up to the
        rule's: it is compared with each of some shares, and the comparison counts in which it differs least."""
        most = self.rule.no_match_share
        pools = [self.reference]
        for share in np.linspace(0, most, math.ceil(most / SHARE_STEP) + 1).tolist()[1:]:
            pools.append(self.reference.with_missing(rng.random(len(self.reference)) < share))
        compared = [self._drifts_from(pool, number, part, rng, alarmed=alarmed) for pool in pools]
        return tuple(max(views, key=lambda each: each.p_value) for views in zip(*compared))

    def _drifts_from(
        self, pool: Reference, number: int, part: Log, rng: np.random.Generator, *, alarmed: bool
    ) -> tuple[Drift, ...]:
        live = np.arange(len(pool) + len(part.heads)) >= len(pool)
        folds = drift.folds_of(len(live), rng)
        views = self._views(pool, part, folds)
        own = drift.spending(1 if alarmed else number) / sum(PARTS[name] for name in views)
        settings: dict[str, Any] = {"false_alarms": self.false_alarms, "rng": rng}
        if alarmed:
            settings["enough"] = 1
        return tuple(
            drift.drift_between(name, classify, live, folds, part=own * PARTS[name], **settings)
            for name, classify in views.items()
        )

    def _views(self, pool: Reference, part: Log, folds: drift.Folds) -> dict[str, drift.OutOfFold]:
        heads = np.concatenate((pool.heads, part.heads))
        features = np.concatenate((pool.features, part.features))
        views: dict[str, drift.OutOfFold] = {
            MISSING: drift.GivenScore(self._signals(heads, features)),
            SCORES: drift.linear_classifier(self._columns(heads, features), folds),
        }
        if pool.hits is not None and part.hits is not None:
            items = np.concatenate((pool.hits[:, : lists.MOST_HITS], part.hits[:, : lists.MOST_HITS]))
            views[HITS] = drift.item_classifier(_numbered(items), folds)
        if self.embeddings is not None and part.embeddings is not None:
            columns = np.concatenate((self.embeddings, part.embeddings))
            views[EMBEDDINGS] = drift.linear_classifier(columns, folds)
        return views

    def _columns(self, heads: Floats, features: Floats) -> Floats:
        """What the scores say about a query: the log-odds of the rule's model, the level and the shape of the list, the
        caller's features, and all of these squared."""
        model = self.rule.model
        odds = [answer.logit(heads, features, model.unit) for answer in (model.right, model.no_match)]
        plain = np.column_stack((*odds, heads[:, 0] / model.unit, lists.shape_of(heads, model.unit), features))
        sd = plain.std(0)
        scaled = np.clip((plain - plain.mean(0)) / np.where(sd > 0, sd, 1.0), -FURTHEST, FURTHEST)
        return np.column_stack((scaled, scaled**2))

    def _signals(self, heads: Floats, features: Floats) -> Floats:
        return certify.signal(self.rule.model.no_match.logit(heads, features, self.rule.model.unit), EVEN_SHARE)

    def _no_match(self, part: Log) -> tuple[float, float]:
        """The share of live queries whose item is missing that explains their mean signal, and its standard error."""
        queries = self._signals(self.reference.heads, self.reference.features)
        twins = self._signals(self.reference.twins, self.reference.features)
        live = self._signals(part.heads, part.features)
        apart = float(twins.mean() - queries.mean())
        if apart <= 1e-6:
            return 0.0, 1.0
        share = float(np.clip((live.mean() - queries.mean()) / apart, 0.0, 1.0))
        off = queries + share * (twins - queries)
        return share, math.sqrt(float(live.var()) / len(live) + float(off.var()) / len(off)) / apart


def _likely(scores: Floats, live: Bools) -> Floats:
    """How much more frequent [n] queries are in the log than among the judged ones, by a logistic regression on scores
    out of fold [n, views]."""
    logit = logits(scores, fit_logistic(scores, live))
    return np.asarray(np.exp(np.clip(logit, -50, 50)) * float((~live).sum()) / float(live.sum()))


def _odds(drifts: Sequence[Drift], judged: int) -> Floats:
    scores = np.column_stack([each.score for each in drifts])
    return _likely(scores, np.arange(len(scores)) >= judged)


def _numbered(items: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers for the ids [n, k] of items; -1 where there is none."""
    if items.dtype.kind in "iu":
        return items.astype(np.int64)
    there = np.array([[item is not None and item != -1 for item in row] for row in items])
    numbers = np.full(items.shape, -1, np.int64)
    numbers[there] = np.unique(words_of(items[there]), return_inverse=True)[1]
    return numbers


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan
