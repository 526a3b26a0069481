"""Probabilities over a shortlist and "none of these": weights of the evidence, fitted by maximum likelihood on held-out
queries.

The logit of an item is a weighted sum of the features that the ladder of evidence kept, each measured from its level in
the shortlist, and that of "outside the shortlist" is a constant. If the flow is asked about the most probable items
only, there are two tiers: the fit without the flow ranks all items, and a second one, among the items asked about and
all others together, moves probability between them. Its weights of no effect are those of the first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geoflow_fast.retrieval.evidence import (
    FEATURES,
    RUNGS,
    Evidence,
    Rung,
    climb,
    cross_fitted,
    fit_logistic,
    fit_weights,
    folds_of,
    grouped_mean,
    joined_tiers,
    kept_features,
    most_probable,
    of_others,
    second_tier,
    with_best_hub,
)
from geoflow_fast.retrieval.features import OF_BANK, BankLevel, query_feature_names, query_features
from geoflow_fast.retrieval.no_match import NoMatch, fit_no_match
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, read_json, write_json

ENCODERS = "encoders"
"""The fact that holds the encoders of "queries" and "items", as far as they are known."""
KIND, VERSION = "geoflow rerank calibration", 1
LEAST_QUERIES = 50
"""Nothing is fitted with fewer queries whose item reaches the shortlist."""
CLOSEST = 1e-9
"""Probabilities are kept this far from 0 and 1 before their logit is taken."""
SURELY = 1e-3
"""How far a stated probability is kept from 0 and 1 when it is judged: a wrong answer called certain would otherwise
decide alone."""
GAP_LEVELS = 101
JUDGED_ITEMS = 32
"""Items of a shortlist, the most probable ones, on which the relevance of items is fitted."""
TIE = 1e-6
"""Difference up to which two items are equally near."""


@dataclass(frozen=True)
class CheapFit:
    """What is used where the flow is not asked: the fit without it, and how often that leaves a close call."""

    weights: dict[str, float]
    """By feature, and "outside"."""
    platt: tuple[float, float] | None
    gaps: tuple[float, ...]
    """Quantiles, at evenly spaced levels from 0 to 1, of the difference between the two largest probabilities."""
    no_match: NoMatch | None = None
    """What tells queries for which nothing in the gallery is right."""

    def logits(self, evidence: Evidence) -> Tensor:
        """Logits of the shortlisted items and, last, of "outside": float64 [Q, K + 1]."""
        weights = {name: value for name, value in self.weights.items() if name != "outside"}
        return weighted(evidence, weights, self.weights["outside"])

    def probabilities(self, evidence: Evidence) -> Tensor:
        """Probabilities of the shortlisted items and, last, of "outside": float64 [Q, K + 1], rows sum to one."""
        return self.logits(evidence).softmax(1)


@dataclass(frozen=True)
class Calibration:
    """Fitted weights of the re-ranker's logits, with their standard errors and what they are valid for."""

    alpha: float
    """Weight of log p(query | item)."""
    beta: float
    """Weight of the cosine."""
    outside: float
    """Logit of "not in the shortlist"; minus infinity excludes it."""
    stderr: tuple[float, float, float]
    """Standard errors of these three weights, from fits that each leave out a tenth of the queries."""
    nll: float
    """Cross-validated -log probability of the right answer, in nats per query."""
    nll_stderr: float
    queries: int
    reached: int
    """Queries with a right item in the shortlist."""
    right_per_query: float
    """Mean number of right items of a query."""
    made_for: dict[str, Any]
    """Facts of flow, head and shortlists that the weights are valid for. `load` checks them, and so does every call of
    the re-ranker, unless there are none, as in a calibration made by hand."""
    pairs: str = ""
    """Fingerprint of the pairs that the weights were fitted on; where a command was given pairs or judgements, a digest
    of these, of the gallery and of a given bank."""
    others: dict[str, float] = field(default_factory=dict)
    """Weights of further features: "hub", "head" and "head_hub"."""
    hub_scale: float = 0.0
    """Factor of the cosines in the logarithm of the mean that is the feature "hub"."""
    platt: tuple[float, float] | None = None
    """Slope and shift that make `p_answer` from the logit of the answer's probability, where that is better."""
    rungs: tuple[Rung, ...] = ()
    """What each rung of evidence brought."""
    cheap: CheapFit | None = None
    """The fit without the flow, if it is part of the other one."""
    bank: str = ""
    """Digest of the bank of queries that the hub correction was fitted with, if it is part of the evidence."""
    rest: float | None = None
    """Weight of the logit, without the flow, of all that the flow was not asked about; None if it is asked about whole
    shortlists."""
    relevance: tuple[float, float, float] | None = None
    """Weights, in the logit that an item is right, of the logit of its probability and of its logarithm against
    "outside", and a constant, where they are better than the probability times `right_per_query`."""
    no_match: NoMatch | None = None
    """What tells queries for which nothing in the gallery is right."""
    items: str = ""
    """Digest of the bank of items by which the level of a query's scores is known, if it is one of the features."""

    @property
    def score_weights(self) -> dict[str, float]:
        """The weights of the fit without the flow, by feature."""
        fitted = self.by_feature if self.cheap is None else self.cheap.weights
        return {name: value for name, value in fitted.items() if name not in ("flow", "outside")}

    @property
    def weights(self) -> tuple[float, float, float]:
        """(alpha, beta, outside)."""
        return self.alpha, self.beta, self.outside

    @property
    def by_feature(self) -> dict[str, float]:
        """The weights that are not zero, by feature."""
        every = {"flow": self.alpha, "cosine": self.beta, **self.others}
        return {name: value for name, value in every.items() if value}

    @property
    def cheap_features(self) -> list[str]:
        """The features that have a weight, all but the flow's."""
        return [name for name in self.by_feature if name != "flow"]

    @property
    def identity(self) -> list[Any]:
        """Everything that the probabilities in the file of a job depend on."""
        cheap = None if self.cheap is None else dataclasses.asdict(dataclasses.replace(self.cheap, no_match=None))
        further = [self.others, self.hub_scale, self.platt, cheap, self.bank, self.rest]
        return [*self.weights, self.right_per_query, *further]

    def probabilities(self, evidence: Evidence) -> Tensor:
        """Probabilities of the shortlisted items and, last, of "outside": float64 [Q, K + 1], rows sum to one. Those of
        two tiers need evidence that says which items the flow was asked about."""
        logits = weighted(evidence, self.by_feature, self.outside)
        if self.rest is None or self.cheap is None or evidence.asked is None:
            return logits.softmax(1)
        cheap = self.cheap.logits(evidence)
        rest = self.rest * of_others(cheap, evidence.asked) + self.outside
        return joined_tiers(logits[:, :-1], evidence.asked, rest, cheap).exp()

    def item_relevance(self, prob: Tensor) -> Tensor:
        """The probability [Q, K] that each item is right, given the probabilities `prob` [Q, K + 1] of choices."""
        if self.relevance is None:
            return (prob[:, :-1] * self.right_per_query).clamp(max=1.0)
        *weights, constant = self.relevance
        return torch.sigmoid(_item_logits(prob) @ prob.new_tensor(weights) + constant).where(prob[:, :-1] > 0, 0.0)

    def save(self, path: Path) -> None:
        """Writes the calibration to the JSON file `path`, atomically."""
        write_json(checks.path(path, "path"), {"kind": KIND, "version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path, made_for: dict[str, Any]) -> Calibration:
        """Reads a file that `save` wrote. A damaged file, one of another version, or one made for other facts raises a
        ValueError."""
        path = checks.path(path, "path")
        stored = read_json(path, "a calibration")
        if not isinstance(stored, dict) or stored.pop("kind", None) != KIND:
            raise ValueError(f"{path} is not a calibration")
        version = stored.pop("version", None)
        if version != VERSION:
            raise ValueError(f"{path} is a calibration of version {version}; this release reads version {VERSION}")
        names = {entry.name for entry in dataclasses.fields(cls)}
        if set(stored) != names:
            raise ValueError(f"{path} is damaged: its fields differ in {sorted(set(stored) ^ names)}")
        if not isinstance(made_for, dict):
            raise TypeError(f"made_for must be the facts of a reranker, got {made_for!r}")
        with contents_of(path):
            facts = {**stored["made_for"]}
            calibration = cls(**_rebuilt(stored))
            numbers = [*calibration.weights, calibration.right_per_query, *calibration.others.values()]
            numbers += [*(calibration.platt or ()), calibration.hub_scale, *(calibration.relevance or ())]
            numbers += [] if calibration.rest is None else [calibration.rest]
            numbers += [] if calibration.no_match is None else [*calibration.no_match.weights.values()]
            if calibration.cheap is not None:
                cheap = calibration.cheap
                numbers += [*cheap.weights.values(), *(cheap.platt or ()), *cheap.gaps]
                numbers += [] if cheap.no_match is None else [*cheap.no_match.weights.values()]
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
            raise ValueError(f"{path} is damaged: its weights are {numbers}")
        if changed := changed_facts(facts, made_for):
            raise ValueError(f"{path} was made for another {', '.join(changed)}; calibrate again")
        return calibration


def _rebuilt(stored: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a calibration from what JSON holds."""
    if not all(isinstance(stored[name], str) for name in ("bank", "items")):
        raise TypeError("bank and items must be digests")
    known = set(FEATURES) - {"flow", "cosine"}
    if not set(stored["others"]) <= known:
        raise ValueError(f"others has unknown features {sorted(set(stored['others']) - known)}")
    rungs = tuple(Rung(**rung) for rung in stored["rungs"])
    if any(rung.name not in RUNGS for rung in rungs):
        raise ValueError(f"rungs has unknown names {[rung.name for rung in rungs]}")
    cheap = stored["cheap"]
    if cheap is not None:
        if not set(cheap["weights"]) <= {*FEATURES, "outside"} or len(cheap["gaps"]) < 2:
            raise ValueError("the fit without the flow is not one")
        told = _rebuilt_no_match(cheap["no_match"])
        cheap = CheapFit({**cheap["weights"]}, _two_numbers(cheap["platt"]), tuple(cheap["gaps"]), told)
    relevance = stored["relevance"]
    if relevance is not None:
        logit, against, constant = relevance
        relevance = logit, against, constant
    return {
        **stored,
        "stderr": tuple(map(float, stored["stderr"])),
        "others": {**stored["others"]},
        "platt": _two_numbers(stored["platt"]),
        "rungs": rungs,
        "cheap": cheap,
        "relevance": relevance,
        "no_match": _rebuilt_no_match(stored["no_match"]),
    }


def _rebuilt_no_match(stored: dict[str, Any] | None) -> NoMatch | None:
    """The weights of "nothing is right" from what JSON holds; None if there are none."""
    if stored is None:
        return None
    told = NoMatch(**stored)
    if not {"constant"} <= set(told.weights) <= {*query_feature_names(FEATURES, with_bank=True), "constant"}:
        raise ValueError(f"no_match has the features {sorted(told.weights)}")
    return told


def stored_lengths(path: Path) -> tuple[int, int] | None:
    """How long the shortlists are that a stored calibration was made for, and about how many of their items the flow is
    asked; None if that cannot be read."""
    stored = read_json(path, "a calibration")
    made_for = stored.get("made_for") if isinstance(stored, dict) else None
    if not isinstance(made_for, dict):
        return None
    length = made_for.get("shortlist")
    asked = made_for.get("flow_items", length)
    if not (isinstance(length, int) and isinstance(asked, int) and min(length, asked) > 0):
        return None
    return length, asked


def _two_numbers(values: Sequence[float] | None) -> tuple[float, float] | None:
    """A pair from what JSON holds; None if there is none."""
    if values is None:
        return None
    slope, shift = values
    return slope, shift


def changed_facts(made_for: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the facts in which two descriptions of a re-ranker differ, but for encoders, which need not be known."""
    return sorted(key for key in {*made_for, *now} - {ENCODERS} if made_for.get(key) != now.get(key))


def weighted(evidence: Evidence, weights: Mapping[str, float], outside: float) -> Tensor:
    """Logits [Q, K + 1] of the shortlisted items and, last, of "outside", with these weights of features."""
    names = list(weights)
    inside = evidence.design(names)[:, :-1, : len(names)] @ evidence.nearness.new_tensor([*weights.values()])
    inside = inside.masked_fill(~evidence.valid, -math.inf)
    return torch.nn.functional.pad(inside, (0, 1), value=outside)


def probability_right(prob: Tensor, right_per_query: float, platt: tuple[float, float] | None) -> Tensor:
    """The probability that an item is right, from the probability `prob` that it is the one meant: the latter times the
    mean number of right items, or what Platt scaling on held-out queries makes of its logit."""
    if platt is None:
        return (prob * right_per_query).clamp(max=1.0)
    slope, shift = platt
    return torch.sigmoid(slope * torch.logit(prob.clamp(CLOSEST, 1 - CLOSEST)) + shift)


UNCALIBRATED = Calibration(1.0, 0.0, -math.inf, (math.nan,) * 3, math.nan, math.nan, 0, 0, 1.0, {})
"""The weights of the flow's own posterior over the shortlist: alpha 1, beta 0, nothing outside."""
UNCALIBRATED_HEAD = dataclasses.replace(UNCALIBRATED, alpha=0.0, others={"head_posterior": 1.0})
"""The weights of the head's own posterior over the shortlist."""
UNCALIBRATED_COSINE = dataclasses.replace(UNCALIBRATED, alpha=0.0, beta=1.0)


@dataclass(frozen=True)
class KnownQueries:
    """Queries whose right items are known, to fit weights on."""

    evidence: Evidence
    right: Tensor
    """[Q, K] bool, the right items in the shortlist."""
    right_count: Tensor
    """[Q], the number of all right items of a query, those outside the shortlist included."""
    group: Tensor
    """[Q], number of the query's image: queries of one image are left out of a fold's fit together."""
    fold: Tensor
    """[Q], from `folds_of`."""
    absent: Tensor | None = None
    """[Q, K] bool, the shortlist in a gallery without the query's own items."""
    asked_without: Tensor | None = None
    """[Q, K] bool, about which of these the flow was asked; None if about all."""

    @property
    def any_variant(self) -> Tensor:
        """[Q, K] bool, the items of a shortlist with the own items or without them."""
        return self.evidence.valid if self.absent is None else self.evidence.valid | self.absent

    def with_flow(self, log_density: Tensor, asked: Tensor | None, asked_without: Tensor | None = None) -> KnownQueries:
        """The same with the flow's evidence [Q, K] about the items that it was asked about, or about all."""

        def added(evidence: Evidence) -> Evidence:
            return dataclasses.replace(evidence, features={**evidence.features, "flow": log_density}, asked=asked)

        evidence = added(self.evidence)
        evidence = dataclasses.replace(evidence, by_fold=tuple(added(each) for each in self.evidence.by_fold))
        return dataclasses.replace(self, evidence=evidence, asked_without=asked_without)

    @property
    def target(self) -> Tensor:
        """[Q, K + 1], the distribution of the choice that is right: each right item is taken to be meant with equal
        probability, which keeps the likelihood concave."""
        share = self.right.double() / self.right_count.unsqueeze(1)
        return torch.cat((share, 1 - share.sum(1, keepdim=True)), dim=1)


class FlowAsked(NamedTuple):
    """How the flow is asked while calibrating."""

    items: int
    """About how many items of a shortlist, the most probable ones without it; at least its length asks about all."""
    log_densities: Callable[[Tensor], Tensor]
    """log p(query | item) [Q, K] of the items that are asked about [Q, K], zero elsewhere."""


def fit_calibration(
    evidence: Evidence,
    right: Tensor,
    right_count: Tensor,
    group: Tensor,
    made_for: dict[str, Any],
    seed: int = 0,
    *,
    hubs: Mapping[float, Tensor] | None = None,
    costs: Mapping[str, float] | None = None,
    absent: Tensor | None = None,
    flow: FlowAsked | None = None,
    level: Callable[[Mapping[str, float], float], Tensor] | None = None,
) -> Calibration:
    """Chooses the rungs of evidence and fits their weights to queries whose right items are known.

    The first arguments are those of `KnownQueries`; `seed` assigns groups to folds. `hubs`: the feature "hub" [Q, K]
    for each of the scales to choose from. `costs`: seconds a query by rung. `absent`: which items [Q, K] make the
    shortlist of a gallery without the query's own items. `flow`: the last rung, unless the evidence has it already.
    `level`: the level [Q] of the queries' scores over a bank of items, given the weights of the evidence and the scale
    of the hub correction.
    """
    reached = int(right.any(1).sum())
    if reached < LEAST_QUERIES:
        raise ValueError(
            f"only {reached} of {len(right)} held-out queries have a right item in their shortlist, and a calibration "
            f"needs {LEAST_QUERIES}: give more pairs or longer shortlists"
        )
    right_count, group = right_count.to(right.device), group.to(right.device)
    if bool((group == group[0]).all()):
        raise ValueError("all held-out queries are of one image; a calibration needs several")
    known = KnownQueries(evidence, right, right_count, group, folds_of(group, seed), absent)
    hub_scale = 0.0
    if hubs:
        hub_scale, evidence = with_best_hub(evidence, hubs, known.target, known.fold)
        known = dataclasses.replace(known, evidence=evidence)
    is_whole = flow is not None and flow.items >= int(evidence.valid.sum(1).max())
    if flow is not None and is_whole:
        known = known.with_flow(flow.log_densities(known.any_variant), None)
    rungs = climb(known.evidence, known.target, group, known.fold, costs or {})
    names = kept_features(rungs)
    fitted, cheap_fit = _fit(known, names), None
    if flow is not None and not is_whole:
        cheap_fit = fitted
        asked = most_probable(fitted.logits[:, :-1], evidence.valid, flow.items)
        known = known.with_flow(*_ask(known, fitted, asked, flow))
        second = _fit_second(known, names, fitted)
        gain, stderr = grouped_mean(fitted.loss - second.loss, group)
        rungs.append(Rung("flow", gain, stderr, (costs or {}).get("flow", 0.0), gain > stderr))
        if gain > stderr:
            names, fitted = [*names, "flow"], second
    elif "flow" in names and len(names) > 1:
        cheap_fit = _fit(known, [name for name in names if name != "flow"])
    per_query = float(right_count.double().mean())
    weights, stderrs = fitted.weights, fitted.stderr
    calibration = Calibration(
        alpha=weights.get("flow", 0.0),
        beta=weights.get("cosine", 0.0),
        outside=weights["outside"],
        stderr=(stderrs.get("flow", 0.0), stderrs.get("cosine", 0.0), stderrs["outside"]),
        nll=float(fitted.loss.mean()),
        nll_stderr=float(fitted.loss.std() / math.sqrt(len(fitted.loss))),
        queries=len(right),
        reached=reached,
        right_per_query=per_query,
        made_for=made_for,
        others={name: weights[name] for name in names if name not in ("flow", "cosine")},
        hub_scale=hub_scale if "hub" in names else 0.0,
        platt=fit_platt(known, fitted.prob, per_query),
        rungs=tuple(rungs),
        cheap=_as_cheap(known, cheap_fit, per_query) if "flow" in names and cheap_fit is not None else None,
        rest=weights.get("rest"),
        relevance=_fit_relevance(known, fitted.prob, per_query),
    )
    cheap_names, cheap, scores = calibration.cheap_features, calibration.cheap, calibration.score_weights
    bank = BankLevel(scores, level(scores, calibration.hub_scale)) if level is not None and scores else None
    if cheap is not None:
        cheap = dataclasses.replace(cheap, no_match=_fit_no_match(known, cheap_names, cheap.probabilities, bank))
    all_names = [*cheap_names, *(["flow"] if calibration.alpha else [])]
    no_match = _fit_no_match(known, all_names, calibration.probabilities, bank)
    return dataclasses.replace(calibration, cheap=cheap, no_match=no_match)


def uses_bank(calibration: Calibration) -> bool:
    """Whether queries without a right item are told by the level of their scores over a bank of items."""
    fits = (calibration.no_match, calibration.cheap and calibration.cheap.no_match)
    return any(fit is not None and not set(OF_BANK).isdisjoint(fit.weights) for fit in fits)


class Fit(NamedTuple):
    """Weights of features, and what they say about the queries that they were fitted to."""

    weights: dict[str, float]
    """By feature, and "outside"."""
    stderr: dict[str, float]
    """Standard errors, a jackknife over folds."""
    loss: Tensor
    """[Q], under a fit without the query's fold."""
    logits: Tensor
    """[Q, K + 1], under that fit."""

    @property
    def prob(self) -> Tensor:
        """[Q, K + 1], probabilities of the choices under that fit."""
        return self.logits.softmax(1)


def _fit(known: KnownQueries, names: Sequence[str]) -> Fit:
    """The fit of these features to whole shortlists."""
    evidence, every = known.evidence, [*names, "outside"]
    design, answers = evidence.design(names), (evidence.possible(), known.target)
    weights = fit_weights(design, *answers)
    crossed = cross_fitted(evidence.designs(names), *answers, known.fold)
    # Weights beside hub corrections of different scales do not compare.
    by_fold = cross_fitted(repeat(design), *answers, known.fold).weights if evidence.by_fold else crossed.weights
    return Fit(dict(zip(every, weights.tolist())), _jackknife(every, by_fold), crossed.loss, crossed.logits)


def _jackknife(names: Sequence[str], by_fold: Tensor) -> dict[str, float]:
    """Standard errors of weights, from fits [folds, F] that each leave out one fold."""
    deviation = by_fold - by_fold.mean(0)
    stderr = (deviation.square().sum(0) * (len(by_fold) - 1) / len(by_fold)).sqrt()
    return dict(zip(names, stderr.tolist()))


def _ask(known: KnownQueries, cheap: Fit, asked: Tensor, flow: FlowAsked) -> tuple[Tensor, Tensor, Tensor | None]:
    """The flow's log-densities of the items `asked` about and of those to ask about in galleries without the queries'
    own items; the two sets of items [Q, K]."""
    if known.absent is None:
        return flow.log_densities(asked), asked, None
    without = dataclasses.replace(known.evidence, valid=known.absent)
    fitted = CheapFit(cheap.weights, None, ())
    asked_without = most_probable(fitted.logits(without)[:, :-1], known.absent, flow.items)
    return flow.log_densities(asked | asked_without), asked, asked_without


def _fit_second(known: KnownQueries, names: Sequence[str], cheap: Fit) -> Fit:
    """The fit of these features and the flow among the items that it was asked about and all others together."""
    evidence, every = known.evidence, [*names, "flow", "rest", "outside"]
    assert evidence.asked is not None
    rest = of_others(cheap.logits, evidence.asked)
    folds = evidence.by_fold or (evidence,) * (int(known.fold.max()) + 1)
    design, possible, column = second_tier(evidence, every[:-2], rest)
    right = known.target.gather(1, column) * possible[:, :-1]
    target = torch.cat((right, 1 - right.sum(1, keepdim=True)), dim=1)
    designs = repeat(design) if not evidence.by_fold else [second_tier(each, every[:-2], rest)[0] for each in folds]
    crossed = cross_fitted(designs, possible, target, known.fold)
    weights = fit_weights(design, possible, target)
    inside = torch.full_like(evidence.nearness, -math.inf).scatter(1, column, crossed.logits[:, :-1])
    log_prob = joined_tiers(inside, evidence.asked, crossed.logits[:, -1], cheap.logits)
    loss = -(log_prob.masked_fill(known.target == 0, 0.0) * known.target).sum(1)
    return Fit(dict(zip(every, weights.tolist())), _jackknife(every, crossed.weights), loss, log_prob)


def _as_cheap(known: KnownQueries, cheap: Fit, per_query: float) -> CheapFit:
    """What is used where the flow is not asked."""
    levels = torch.linspace(0, 1, GAP_LEVELS, dtype=torch.float64, device=cheap.logits.device)
    gaps = tuple(torch.quantile(close_call(cheap.prob), levels).tolist())
    return CheapFit(cheap.weights, fit_platt(known, cheap.prob, per_query), gaps)


def _fit_no_match(
    known: KnownQueries,
    names: Sequence[str],
    probabilities: Callable[[Evidence], Tensor],
    bank: BankLevel | None,
) -> NoMatch | None:
    """What tells searches with the own items from those without, by what these features of the evidence, and the
    probabilities made of them, say in both."""
    if known.absent is None:
        return None
    sides = []
    for valid, asked in ((known.evidence.valid, known.evidence.asked), (known.absent, known.asked_without)):
        features = {name: known.evidence.features[name] for name in names}
        evidence = Evidence(features, known.evidence.nearness, valid, asked)
        nearest = evidence.nearness.masked_fill(~valid, -math.inf).argmax(1)
        sides.append(query_features(evidence, probabilities(evidence), nearest, bank))
    present, absent = sides
    return fit_no_match(present, absent, known.group, known.fold)


def _item_logits(prob: Tensor) -> Tensor:
    """For each item the logit of its probability, and the logarithm of it against "outside": [Q, K, 2], given the
    probabilities `prob` [Q, K + 1] of choices."""
    inside, outside = prob[:, :-1].clamp(CLOSEST, 1 - CLOSEST), prob[:, -1:].clamp(min=CLOSEST)
    return torch.stack((torch.logit(inside), (inside / outside).log()), dim=2)


def _fit_relevance(known: KnownQueries, prob: Tensor, per_query: float) -> tuple[float, float, float] | None:
    """Weights of the relevance of items, fitted to whether the most probable ones are right, given probabilities that
    were fitted without each query. None unless they lower the cross-fitted loss by more than the standard error."""
    best = prob[:, :-1].topk(min(JUDGED_ITEMS, prob.shape[1] - 1), dim=1).indices
    there = known.evidence.valid.gather(1, best)
    query = torch.arange(len(best), device=best.device).unsqueeze(1).expand_as(best)[there]
    features = _item_logits(prob).take_along_dim(best.unsqueeze(2), dim=1)[there]
    is_right = known.right.gather(1, best)[there].double()
    stated = prob.gather(1, best)[there] * per_query
    weights, loss = fit_logistic(features, is_right, known.fold[query])
    gain, stderr = grouped_mean(_binary_loss(stated, is_right) - loss, known.group[query])
    logit, against, constant = weights.tolist()
    return (logit, against, constant) if gain > stderr and logit + against > 0 else None


def _binary_loss(stated: Tensor, is_right: Tensor) -> Tensor:
    """-log of the probability of what is right, if its probability is `stated`."""
    stated = stated.clamp(SURELY, 1 - SURELY)
    return -(is_right * stated.log() + (1 - is_right) * (1 - stated).log())


def close_call(prob: Tensor) -> Tensor:
    """The difference [Q] between the two largest probabilities of items, given those of all choices [Q, K + 1]."""
    best = prob[:, :-1].topk(min(2, prob.shape[1] - 1), dim=1).values
    return best[:, 0] - best[:, 1:].sum(1)


def fit_platt(known: KnownQueries, prob: Tensor, per_query: float) -> tuple[float, float] | None:
    """Slope and shift of the Platt scaling of `p_answer`, fitted to whether the nearest item is right, given
    probabilities [Q, K + 1] that were fitted without each query. None unless it lowers the cross-fitted loss by more
    than the standard error of that."""
    evidence = known.evidence
    nearness = evidence.nearness.masked_fill(~evidence.valid, -math.inf)
    # Of items that tie, one at random is the answer. Own items are scored apart, which may round differently.
    tied = torch.isclose(nearness, nearness.amax(1, keepdim=True), rtol=TIE, atol=TIE).double()
    tied /= tied.sum(1, keepdim=True)
    is_right, meant = (known.right * tied).sum(1), (prob[:, :-1] * tied).sum(1)
    plain = _binary_loss(probability_right(meant, per_query, None), is_right)
    weights, loss = fit_logistic(torch.logit(meant.clamp(CLOSEST, 1 - CLOSEST)).unsqueeze(1), is_right, known.fold)
    gain, stderr = grouped_mean(plain - loss, known.group)
    slope, shift = weights.tolist()
    return (slope, shift) if gain > stderr and slope > 0 else None
