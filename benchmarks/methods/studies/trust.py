"""How far `gf.Trust` and its rules can be trusted: worlds with known truth, and Flickr8k in a small dual encoder.

Every set has a population of result lists that were scored once. `Trust` is fitted on a few hundred of them. Certifying
queries are drawn from the others again and again, with replacement, so that the population is the truth: the error of a
rule, and the share that the best threshold would answer, are known. Queries without a match are other draws of the
world; of Flickr8k they are the captions themselves with their image taken out of the gallery.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.results import RESULTS, SHARED, gate, report, shared_pairs
from geoflow_fast.decisions import lists
from geoflow_fast.decisions.bounds import binomial_evidence
from geoflow_fast.decisions.certify import Certifier, Share, answer_outcomes, pilot_outcomes
from geoflow_fast.decisions.logistic import fit_logistic, log_losses, logits
from geoflow_fast.decisions.model import TEMPERATURES, combined, typical_spread
from geoflow_fast.decisions.rules import ANSWERS
from geoflow_fast.decisions.rules import ITEMS as ITEMS_SHOWN
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.metrics import auroc
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.worlds import ClipWorld, ConceptWorld, PairWorld

Array = NDArray[Any]
K, ITEMS, SEARCHES = 50, 1000, 8
"""Hits in a list, items in a gallery, and searches of a world, half of whose queries have no match."""
FITTED, CERTIFIED, LIVE, DRAWS = 500, 2000, 10_000, 1000
FEW_DRAWS = 20
ANSWERED, MORE = 0.7, 4
"""Share of what the best threshold answers that rules aim at; where it is missed, so many times more queries are
judged."""
SHARES, CONFIDENCE, HOLDS = (0.0, 0.3, 0.5), 0.95, 0.936
LABELS, RESAMPLES, PRECISION = 100, 200, 0.5
HEADS = {"concept world": 40_000, "CLIP-like world": 20_000}
"""Pairs that a head is trained on, with four points; the other settings follow from their number."""
BANK, BANK_QUERIES = 16_384, 512
"""Training items and queries by which the level of a query's scores, and that of an item's, are known."""
WARMTHS = (0.5, 1.0)
"""Factors of the scores in the logarithms of their means over the bank of items, which are features."""


@dataclass(frozen=True)
class Population:
    """Lists of queries with a match and without one, scored once."""

    name: str
    scores: Array
    relevant: Array
    features: Array | None
    missing: Array
    missing_features: Array | None
    exact: float
    """AUROC with which the exact posterior tells one from the other; NaN if it is not known."""
    levels: tuple[float, ...]
    """Largest errors to certify."""

    captions: int = 1
    """How many queries in a row belong to one image."""

    def order(self, rng: np.random.Generator) -> Array:
        """All rows, shuffled so that the captions of an image stay together."""
        image = rng.permutation(len(self.scores) // self.captions)
        return (image[:, None] * self.captions + np.arange(self.captions)).ravel()

    def part(self, rows: Array) -> tuple[Array, Array, Array | None]:
        """Scores, labels and features of some of the queries with a match."""
        return self.scores[rows], self.relevant[rows], None if self.features is None else self.features[rows]


# ---- populations ----------------------------------------------------------------------------------------------------


def best_hits(scores: Tensor, own: Tensor) -> tuple[Array, Array]:
    """The `K` best of scores [Q, N], and which of them is the item `own` [Q]."""
    best = scores.topk(K, dim=1)
    return best.values.double().numpy(), (best.indices == own[:, None]).numpy()


def head_scores(head: gf.PosteriorHead, queries: Tensor, items: Tensor, hub: Tensor, direction: str) -> Tensor:
    """The head's scores [Q, N], from which the items' `hub_numbers` are subtracted."""
    return raw_scores(head, queries, items, direction) - hub


def hub_numbers(head: gf.PosteriorHead, items: Tensor, direction: str) -> Tensor:
    """The logarithm of the items' mean over the head's bank of queries [N], as far as the head asks for it."""
    bank = head.bank(direction)[:BANK_QUERIES]
    hub = raw_scores(head, bank, items, direction).logsumexp(0) - np.log(len(bank))
    return head.hub_weight_of(direction) * hub


def raw_scores(head: gf.PosteriorHead, queries: Tensor, items: Tensor, direction: str) -> Tensor:
    """Scores [Q, N] before that."""
    bias = head.item_bias(items, Direction.of(direction))
    blocks = [head.points(block, direction) for block in queries.split(250)]
    scores = [(each.points @ items.T + each.log_weights.unsqueeze(2)).logsumexp(1) for each in blocks]
    return torch.cat(scores) + bias


def trained_head(name: str, image: Tensor, text: Tensor) -> gf.PosteriorHead:
    """A head for a world; it is kept beside the results and not trained again."""
    folder = RESULTS / f"trust_head_{name.replace(' ', '_')}"
    return gf.PosteriorHead.fit(gf.EmbeddingPairs.from_arrays(image, text), out=folder, progress=False, k=4)


def levels(head: gf.PosteriorHead, queries: Tensor, bank: Tensor, hub: Tensor, direction: str) -> Array:
    """The logarithms of the means of exp(score), at several factors of the score, over a bank of items: [Q, 2]."""
    scores = [head_scores(head, part, bank, hub, direction) for part in queries.split(250)]
    means = [torch.stack([(factor * each).logsumexp(1) for factor in WARMTHS], dim=1) for each in scores]
    return (torch.cat(means) - np.log(len(bank))).double().numpy()


def searches(name: str, world: PairWorld, direction: str) -> dict[str, Array]:
    """Searches of a world, half of whose queries have no match, as arrays by name; kept beside the results."""
    file = RESULTS / f"trust_{name}_{direction}.npz".replace(" ", "_")
    if not file.is_file():
        image, text, _ = world.sample(HEADS[name], generator=torch.Generator().manual_seed(100))
        head, asked = trained_head(name, image, text), Direction.of(direction)
        bank, generator = asked.items(image, text)[:BANK], torch.Generator().manual_seed(1)
        hub = hub_numbers(head, bank, direction)
        parts = [search_once(world, head, (bank, hub), direction, generator) for _ in range(SEARCHES)]
        RESULTS.mkdir(exist_ok=True)
        np.savez(file, **{key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
    with np.load(file) as stored:
        return dict(stored)


def search_once(
    world: PairWorld,
    head: gf.PosteriorHead,
    bank: tuple[Tensor, Tensor],
    direction: str,
    generator: torch.Generator,
) -> dict[str, Array]:
    """One search: lists of the cosine and of the head, levels of queries, which have no match, and the truth."""
    drawn = world.sample_search(ITEMS, ITEMS, direction, share=0.5, generator=generator)
    cosine = best_hits(drawn.queries @ drawn.gallery.T, drawn.item)
    hub = hub_numbers(head, drawn.gallery, direction)
    by_head = best_hits(head_scores(head, drawn.queries, drawn.gallery, hub, direction), drawn.item)
    return {
        "cosine": cosine[0],
        "cosine_right": cosine[1],
        "head": by_head[0],
        "head_right": by_head[1],
        "level": levels(head, drawn.queries, *bank, direction),
        "missing": (drawn.item < 0).numpy(),
        "exact": world.missing_probability(drawn.queries, drawn.gallery, direction, 0.5).numpy(),
    }


def of_world(name: str, world: PairWorld, direction: str) -> list[Population]:
    """Populations of a world, whose lists are those of the cosine, and those of a head with the levels of its scores
    over a bank of training items as features."""
    lists_of = searches(name, world, direction)
    none = lists_of["missing"]
    truth = auroc(lists_of["exact"], ~none)
    populations = []
    for engine in ("cosine", "head"):
        scores, relevant, level = lists_of[engine], lists_of[f"{engine}_right"], lists_of["level"]
        both = (level[~none], level[none]) if engine == "head" else (None, None)
        title = f"{name} {direction}, {engine}"
        populations.append(
            Population(title, scores[~none], relevant[~none], both[0], scores[none], both[1], truth, levels_of(name))
        )
    return populations


def levels_of(name: str) -> tuple[float, ...]:
    """The errors to certify: a tenth, and where few queries can be answered so well, one at which some can."""
    return {"concept world": (0.1,), "CLIP-like world": (0.1, 0.5), "Flickr8k": (0.1, 0.6)}[name]


def flickr() -> Population:
    """Captions of the development images search these, by cosines."""
    task = RetrievalTask.of(shared_pairs("flickr8k/dev"), "t2i")
    index = task.own[:, 0]
    scores, relevant = best_hits(task.queries @ task.items.T, index)
    none = lists.taken_out(scores, relevant)
    gate("Flickr8k: captions stand together", bool((index == torch.arange(len(index)) // 5).all()))
    return Population("Flickr8k t2i, cosine", scores, relevant, None, none, None, np.nan, levels_of("Flickr8k"), 5)


# ---- what is certified ----------------------------------------------------------------------------------------------


class Simulation:
    """One population, one fit, and the log-odds of everything."""

    def __init__(self, population: Population, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        order = population.order(self.rng)
        fitted, rest = order[:FITTED], order[FITTED:]
        self.population = population
        self.trust = gf.Trust().fit(*population.part(fitted))
        self.scores, self.relevant, self.features = population.part(rest)
        self.right = self.relevant[:, 0]
        self.queries = self.log_odds(self.scores, self.features)
        self.twins = self.log_odds(lists.taken_out(self.scores, self.relevant), self.features)
        # Of Flickr8k the queries without a match are the twins, of the captions that were not fitted.
        if np.isnan(population.exact):
            self.none = self.twins
        else:
            self.none = self.log_odds(population.missing, population.missing_features)

    def log_odds(self, scores: Array, features: Array | None) -> tuple[Array, Array]:
        model, numbers = self.trust._model, np.empty((len(scores), 0)) if features is None else features
        return model.right_logit(scores, numbers), model.no_match_logit(scores, numbers)

    def certifier(self, max_error: float, share: float, live: Array | None) -> Certifier:
        known = 0.0 if live is not None else share
        return Certifier(
            self.trust._model, self.trust._pilot, ANSWERS, max_error, CONFIDENCE, share=known, live=live, seed=0
        )

    def live(self, share: float) -> Array:
        """Log-odds of "no match" of live traffic."""
        none = self.rng.choice(self.none[1], LIVE)
        return np.where(self.rng.random(LIVE) < share, none, self.rng.choice(self.queries[1], LIVE))

    def outcome(self, threshold: Array, score_share: float, share: float) -> tuple[Array, Array]:
        """The shares of all traffic that are answered, and answered wrongly, at each threshold: the truth."""
        score, none = combined(*self.queries, score_share), combined(*self.none, score_share)
        given = (1 - share) * tail(score, threshold) + share * tail(none, threshold)
        wrong = (1 - share) * tail(score[~self.right], threshold) * (~self.right).mean()
        return given, wrong + share * tail(none, threshold)

    def best(self, max_error: float, share: float) -> float:
        """What the best threshold answers whose true error is at most the largest allowed."""
        thresholds = np.unique(np.concatenate([combined(*each, share) for each in (self.queries, self.none)]))
        given, wrong = self.outcome(thresholds, share, share)
        return float(given[wrong <= max_error * given].max(initial=0.0))

    def check(self) -> None:
        """The short cut through log-odds gives what the public call gives."""
        rows = self.rng.integers(len(self.right), size=CERTIFIED)
        features = None if self.features is None else self.features[rows]
        rule = self.trust.certify(self.scores[rows], self.relevant[rows], 0.1, no_match_share=0.3, features=features)
        certificate, _ = self.certifier(0.1, 0.3, None).answers(*self.drawn(rows))
        gate(f"{self.population.name}: certify", rule.threshold == certificate.threshold)

    def drawn(self, rows: Array) -> tuple[tuple[Array, Array], tuple[Array, Array], Array]:
        queries, twins = (tuple(each[rows] for each in pair) for pair in (self.queries, self.twins))
        return queries, (twins[0][None], twins[1][None]), self.right[rows]  # type: ignore[return-value]

    def ceiling(self, max_error: float, share: float, tested: int) -> float:
        """What would be answered on average at the loosest threshold whose own bound, taken alone, is low enough. That
        is no valid certificate, because many bounds are looked at, and more than any of them can answer."""
        spaced = pilot_outcomes(self.trust._pilot, share)[0]
        thresholds = np.unique(np.concatenate((spaced, np.quantile(spaced, np.linspace(0, 1, 200)))))[::-1]
        score, twin = combined(*self.queries, share), combined(*self.twins, share)
        given, _ = self.outcome(thresholds, share, share)
        answered = []
        for _ in range(RESAMPLES):
            rows = self.rng.integers(len(self.right), size=tested)
            outcomes = answer_outcomes(score[rows], ~self.right[rows], twin[rows], thresholds)
            count, wrong = outcomes.counts(self.rng.random(tested), np.array([share]))
            low = np.flatnonzero(binomial_evidence(wrong, count, max_error)[0] <= 1 - CONFIDENCE)
            answered.append(float(given[low[-1]]) if len(low) else 0.0)
        return float(np.mean(answered))

    def row(self, max_error: float, share: float, *, estimated: bool, tested: int = CERTIFIED) -> dict[str, Any]:
        """How often a certificate holds, and how much it answers in comparison with the best threshold."""
        holds, answered, nothing, bounds = 0, [], 0, []
        best = self.best(max_error, share)
        # So few answers would not be enough for a certificate if all of them were right.
        out_of_reach = best * tested < np.log(1 - CONFIDENCE) / np.log(1 - max_error)
        draws = FEW_DRAWS if out_of_reach else DRAWS
        for _ in range(draws):
            certifier = self.certifier(max_error, share, self.live(share) if estimated else None)
            rows = self.rng.integers(len(self.right), size=tested)
            certificate, bound = certifier.answers(*self.drawn(rows))
            given, wrong = self.outcome(np.array([certificate.threshold]), certifier.score_share, share)
            holds += bool(wrong[0] <= max_error * given[0])
            answered.append(float(given[0]))
            nothing += not np.isfinite(certificate.threshold)
            bounds.append(bound)
        return {
            "set": self.population.name,
            "largest error": max_error,
            "no match": share,
            "share": "estimated" if estimated else "given",
            "tested": tested,
            "draws": draws,
            "holds": holds,
            "answered": float(np.mean(answered)),
            "best threshold": best,
            "ratio": float(np.mean(answered)) / best if best else float("nan"),
            "ceiling": float("nan") if estimated or out_of_reach else self.ceiling(max_error, share, tested) / best,
            "nothing certified": nothing,
            "mean bound of the share": float(np.mean(bounds)),
        }


def tail(values: Array, thresholds: Array) -> Array:
    """The shares of the values that are at least each threshold."""
    return 1 - np.searchsorted(np.sort(values), thresholds, side="left") / len(values)


class Display(Simulation):
    """The same for rules about the hits shown: the error is the mean share of wrong hits among them."""

    def row_of(self, precision: float, share: float) -> dict[str, Any]:
        """How often the promised precision holds, and how many queries are shown something."""
        model, empty = self.trust._model, np.empty((len(self.scores), 0))
        some = empty if self.features is None else self.features
        shown = model.p_shown(self.scores, some, share)
        twin = model.p_shown(lists.taken_out(self.scores, self.relevant), some, share)[:, 0]
        missing = self.population.missing
        more = np.empty((len(missing), 0)) if self.features is None else self.population.missing_features
        assert more is not None
        none = model.p_shown(missing, more, share)[:, 0]
        certifier = Certifier(model, self.trust._pilot, ITEMS_SHOWN, 1 - precision, CONFIDENCE, share=share, seed=0)
        holds, given = 0, []
        for _ in range(DRAWS):
            rows = self.rng.integers(len(shown), size=CERTIFIED)
            certificate, _ = certifier.items(shown[rows], self.relevant[rows], twin[rows], Share.known(share))
            accepted = shown >= certificate.threshold
            count, some_shown = accepted.sum(1), accepted.any(1)
            wrong = (accepted & ~self.relevant).sum(1)[some_shown] / count[some_shown]
            absent = share * float((none >= certificate.threshold).mean())
            total = (1 - share) * float(some_shown.mean()) + absent
            loss = (1 - share) * float(wrong.sum()) / len(shown) + absent
            holds += loss <= (1 - precision) * total
            given.append(total)
        facts = {"set": self.population.name, "precision": precision, "no match": share, "draws": DRAWS}
        return {**facts, "holds": int(holds), "shown something": float(np.mean(given))}


class OneGroup(Simulation):
    """The queries of one group alone: those whose scores over the bank are low, or those whose are high. The group is a
    property of the query: its list would change if the right item were missing."""

    def __init__(self, population: Population, *, high: bool) -> None:
        super().__init__(population)
        assert self.features is not None
        assert population.missing_features is not None
        middle = np.median(self.features[:, 0])
        own = (self.features[:, 0] >= middle) == high
        self.queries, self.twins = (tuple(x[own] for x in pair) for pair in (self.queries, self.twins))  # type: ignore
        self.right = self.right[own]
        absent = (population.missing_features[:, 0] >= middle) == high
        self.none = tuple(x[absent] for x in self.none)  # type: ignore


def other_rules(population: Population) -> list[dict[str, Any]]:
    """Rules about the hits shown, and rules per group."""
    display = Display(population)
    rows = [display.row_of(PRECISION, share) for share in SHARES[:2]]
    for high in (False, True) if population.features is not None else ():
        group = OneGroup(population, high=high)
        for share in SHARES[:2]:
            row = group.row(population.levels[-1], share, estimated=False)
            rows.append({**row, "set": f"{population.name}, group of {'high' if high else 'low'} levels"})
    for row in rows:
        print(row, flush=True)
        gate(f"{row['set']}: certificates hold", row["holds"] >= HOLDS * row["draws"])
    return rows


def certified_rows(populations: list[Population]) -> list[dict[str, Any]]:
    rows = []
    for population in populations:
        simulation = Simulation(population)
        simulation.check()
        for max_error in population.levels:
            for share in SHARES:
                for estimated in (False, True):
                    rows += rows_of(simulation, max_error, share, estimated=estimated)
    return rows


def rows_of(simulation: Simulation, max_error: float, share: float, *, estimated: bool) -> list[dict[str, Any]]:
    """The row of one case and, where too little is answered, that with more judged queries."""
    rows = [simulation.row(max_error, share, estimated=estimated)]
    if rows[0]["draws"] == DRAWS and rows[0]["ratio"] < ANSWERED:
        rows.append(simulation.row(max_error, share, estimated=estimated, tested=MORE * CERTIFIED))
    for row in rows:
        print(row, flush=True)
        gate(f"{row['set']}: certificates hold", row["holds"] >= HOLDS * row["draws"])
    return rows


# ---- missing items, copies, a hundred labels ------------------------------------------------------------------------


def missing_row(population: Population) -> dict[str, Any]:
    """How well missing items are told, in comparison with the exact posterior."""
    order = population.order(np.random.default_rng(0))
    trust = gf.Trust().fit(*population.part(order[:FITTED]))
    scores, _, features = population.part(order[FITTED:])
    prob = [
        trust.p_no_match(each, 0.5, given)
        for each, given in ((scores, features), (population.missing, population.missing_features))
    ]
    own = auroc(np.concatenate(prob), np.repeat([True, False], [len(each) for each in prob]))
    kept = [gain.name for gain in trust.report if gain.kept and gain.question == "no match"]
    most = limit_of(population)
    row = {
        "set": population.name,
        "AUROC": own,
        "trees on all lists": most,
        "exact posterior": population.exact,
        "share of the distance from .5": (own - 0.5) / (population.exact - 0.5),
        "share of trees": (most - 0.5) / (population.exact - 0.5),
        "kept": ", ".join(kept),
    }
    print(row, flush=True)
    return row


def limit_of(population: Population) -> float:
    """The AUROC that much more data, and no assumption about the form of the answer, get out of the same lists and
    features: boosted trees, fitted to one half of the population with labels of all of it, and judged on the other."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    lists_of = [(population.scores, population.features), (population.missing, population.missing_features)]
    columns = [np.column_stack([x for x in (scores[:, ::3], more) if x is not None]) for scores, more in lists_of]
    x, absent = np.concatenate(columns), np.repeat([False, True], [len(each) for each in columns])
    half, prob = np.random.default_rng(0).random(len(x)) < 0.5, np.empty(len(x))
    for out in (half, ~half):
        trees = HistGradientBoostingClassifier(max_depth=4, learning_rate=0.06, max_iter=100, random_state=0)
        prob[out] = trees.fit(x[~out], absent[~out]).predict_proba(x[out])[:, 1]
    return float(auroc(prob, ~absent))


def copies_row(population: Population) -> dict[str, Any]:
    """The share answered if every item is stored five times: the same rule, a new one, and one with longer lists."""
    order = population.order(np.random.default_rng(0))
    parts = [population.part(rows) for rows in (order[:FITTED], order[FITTED : FITTED + CERTIFIED], order)]
    level = population.levels[-1]

    def copied(values: Array | None, k: int) -> Array | None:
        return None if values is None or values.shape[1] < K else values.repeat(5, 1)[:, :k]

    def answered(transform: Callable[[Array], Array | None]) -> tuple[gf.Rule, float]:
        (fit, labels, own), (tested, judged, more), (new, _, rest) = parts
        trust = gf.Trust().fit(transform(fit), transform(labels), own)
        rule = trust.certify(transform(tested), transform(judged), level, features=more)
        return rule, float(rule(transform(new), features=rest).mean())

    rule, plain = answered(lambda x: x)
    return {
        "set": population.name,
        "largest error": level,
        "answered": plain,
        "same rule": float(rule(copied(parts[2][0], K), features=parts[2][2]).mean()),
        "new rule, 50 hits": answered(lambda x: copied(x, K))[1],
        "new rule, 250 hits": answered(lambda x: copied(x, 5 * K))[1],
    }


def labels_row(population: Population) -> dict[str, Any]:
    """The mean AUROC of "the first hit is right" after a hundred labels, beside that of Platt scaling alone."""
    rng = np.random.default_rng(0)
    ours, platt, seconds = [], [], []
    for _ in range(RESAMPLES):
        order = population.order(rng)
        scores, relevant, features = population.part(order[:LABELS])
        new, truth, more = population.part(order[LABELS:])
        if relevant[:, 0].all() or not relevant[:, 0].any():
            continue
        start = time.process_time()
        trust = gf.Trust().fit(scores, relevant[:, 0], features)
        seconds.append(time.process_time() - start)
        ours.append(auroc(-trust.decision_function(new, more), truth[:, 0]))
        platt.append(auroc(-max_softmax(scores, relevant[:, 0], new), truth[:, 0]))
    return {
        "set": population.name,
        "Platt on max softmax": float(np.mean(platt)),
        "Trust": float(np.mean(ours)),
        "gain": float(np.mean(ours) - np.mean(platt)),
        "seconds of a fit": float(np.median(seconds)),
    }


def max_softmax(scores: Array, right: Array, new: Array) -> Array:
    """Log-odds of the first hit under a softmax of the whole list, at the temperature whose Platt scaling fits best."""
    unit = typical_spread(scores)
    columns = {t: lists.softmax_logit(scores, t / unit)[:, None] for t in TEMPERATURES.tolist()}
    loss = {t: log_losses(logits(x, fit_logistic(x, right)), right).sum() for t, x in columns.items()}
    return lists.softmax_logit(new, min(loss, key=lambda t: loss[t]) / unit)


def run() -> str:
    """The study."""
    concepts, clip = ConceptWorld(), ClipWorld()
    populations = [
        population
        for name, world in (("concept world", concepts), ("CLIP-like world", clip))
        for direction in CONDITIONAL
        for population in of_world(name, world, direction)
    ]
    worlds = list(populations)
    if (SHARED / "flickr8k").is_dir():
        populations.append(flickr())
    notes = {"fitted": FITTED, "certified": CERTIFIED, "live": LIVE, "draws": DRAWS, "hits": K, "items": ITEMS}
    tables = {
        "trust_missing": [missing_row(each) for each in worlds],
        "trust_certified": certified_rows(populations),
        "trust_other_rules": [row for each in worlds[:2] for row in other_rules(each)],
        "trust_copies": [copies_row(each) for each in populations],
        "trust_labels": [labels_row(each) for each in populations if each.features is None],
    }
    for row in tables["trust_labels"]:
        gate(f"{row['set']}: a hundred labels do not hurt", row["gain"] >= -0.01)
    return "\n\n".join(report(name, rows, notes) for name, rows in tables.items())
