"""Probabilities over a shortlist and "none of these": weights of the evidence, fitted by maximum likelihood on held-out
queries.

The logit of an item is a weighted sum of the features that the ladder of evidence kept, each measured from its level in
the shortlist, and that of "outside the shortlist" is a constant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.retrieval.evidence import (
    FEATURES,
    RUNGS,
    Evidence,
    Rung,
    climb,
    cross_fitted,
    fit_weights,
    folds_of,
    grouped_mean,
    kept_features,
    with_best_hub,
)
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, read_json, write_json

KIND, VERSION = "geoflow rerank calibration", 2
LEAST_QUERIES = 50
"""Nothing is fitted with fewer queries whose item reaches the shortlist."""
CLOSEST = 1e-9
"""Probabilities are kept this far from 0 and 1 before their logit is taken."""
SURELY = 1e-3
"""How far a stated probability is kept from 0 and 1 when it is judged: a wrong answer called certain would otherwise
decide alone."""
GAP_LEVELS = 101
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

    # unchecked: a reranker calls it with evidence of its own
    def probabilities(self, evidence: Evidence) -> Tensor:
        """Probabilities of the shortlisted items and, last, of "outside": float64 [Q, K + 1], rows sum to one."""
        weights = {name: value for name, value in self.weights.items() if name != "outside"}
        return weighted(evidence, weights, self.weights["outside"])


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
    """Fingerprint of the pairs that the weights were fitted on."""
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
        """Everything that probabilities depend on. Without further features it is what earlier releases wrote into the
        description of a job."""
        numbers: list[Any] = [*self.weights, self.right_per_query]
        if self.others or self.platt is not None or self.cheap is not None:
            cheap = None if self.cheap is None else dataclasses.asdict(self.cheap)
            numbers += [self.others, self.hub_scale, self.platt, cheap, self.bank]
        return numbers

    # unchecked: a reranker calls it with evidence of its own
    def probabilities(self, evidence: Evidence) -> Tensor:
        """Probabilities of the shortlisted items and, last, of "outside": float64 [Q, K + 1], rows sum to one."""
        return weighted(evidence, self.by_feature, self.outside)

    def save(self, path: Path) -> None:
        """Writes the calibration to the JSON file `path`, atomically."""
        write_json(checks.path(path, "path"), {"kind": KIND, "version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path, made_for: dict[str, Any]) -> Calibration:
        """Reads a file that `save` wrote, in this release or an earlier one. A damaged file, or one made for other
        facts, raises a ValueError."""
        path = checks.path(path, "path")
        stored = read_json(path, "a calibration")
        if not isinstance(stored, dict) or stored.pop("kind", None) != KIND:
            raise ValueError(f"{path} is not a calibration")
        version = stored.pop("version", None)
        if version not in (1, VERSION):
            raise ValueError(f"{path} is not a calibration of version 1 or {VERSION}")
        every = dataclasses.fields(cls)
        added = {entry.name for entry in every if version == 1 and entry.name in FIELDS_OF_VERSION_2}
        names = {entry.name for entry in every} - added
        if set(stored) != names:
            raise ValueError(f"{path} is damaged: its fields differ in {sorted(set(stored) ^ names)}")
        if not isinstance(made_for, dict):
            raise TypeError(f"made_for must be the facts of a reranker, got {made_for!r}")
        with contents_of(path):
            facts = {**stored["made_for"]}
            calibration = cls(**_rebuilt(stored))
            numbers = [*calibration.weights, calibration.right_per_query, *calibration.others.values()]
            numbers += [*(calibration.platt or ()), calibration.hub_scale]
            if calibration.cheap is not None:
                cheap = calibration.cheap
                numbers += [*cheap.weights.values(), *(cheap.platt or ()), *cheap.gaps]
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
            raise ValueError(f"{path} is damaged: its weights are {numbers}")
        if changed := changed_facts(facts, made_for):
            raise ValueError(f"{path} was made for another {', '.join(changed)}; calibrate again")
        return calibration


FIELDS_OF_VERSION_2 = ("others", "hub_scale", "platt", "rungs", "cheap", "bank")


def _rebuilt(stored: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a calibration from what JSON holds."""
    arguments = {**stored, "stderr": tuple(map(float, stored["stderr"]))}
    if "platt" in stored:
        if not isinstance(stored["bank"], str):
            raise TypeError("bank must be a digest")
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
            cheap = CheapFit({**cheap["weights"]}, _two_numbers(cheap["platt"]), tuple(cheap["gaps"]))
        platt = _two_numbers(stored["platt"])
        arguments |= {"others": {**stored["others"]}, "platt": platt, "rungs": rungs, "cheap": cheap}
    return arguments


def _two_numbers(values: Sequence[float] | None) -> tuple[float, float] | None:
    """A pair from what JSON holds; None if there is none."""
    if values is None:
        return None
    slope, shift = values
    return slope, shift


def changed_facts(made_for: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the facts in which two descriptions of a re-ranker differ."""
    return sorted(key for key in {*made_for, *now} if made_for.get(key) != now.get(key))


def weighted(evidence: Evidence, weights: Mapping[str, float], outside: float) -> Tensor:
    """Probabilities [Q, K + 1] of the shortlisted items and, last, of "outside", with these weights of features."""
    names = list(weights)
    inside = evidence.design(names)[:, :-1, : len(names)] @ evidence.nearness.new_tensor([*weights.values()])
    inside = inside.masked_fill(~evidence.valid, -math.inf)
    return torch.cat((inside, inside.new_full((len(inside), 1), outside)), dim=1).softmax(1)


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

    @property
    def target(self) -> Tensor:
        """[Q, K + 1], the distribution of the choice that is right: each right item is taken to be meant with equal
        probability, which keeps the likelihood concave."""
        share = self.right.double() / self.right_count.unsqueeze(1)
        return torch.cat((share, 1 - share.sum(1, keepdim=True)), dim=1)


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
) -> Calibration:
    """Chooses the rungs of evidence and fits their weights to queries whose right items are known.

    The arguments are those of `KnownQueries`; `seed` assigns groups to folds. `hubs`: the feature "hub" [Q, K] for each
    of the scales to choose from. `costs`: seconds a query by rung.
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
    known, hub_scale = KnownQueries(evidence, right, right_count, group, folds_of(group, seed)), 0.0
    if hubs:
        hub_scale, evidence = with_best_hub(evidence, hubs, known.target, known.fold)
        known = dataclasses.replace(known, evidence=evidence)
    rungs = climb(evidence, known.target, group, known.fold, costs or {})
    names = kept_features(rungs)
    weights, stderr, loss, prob = _fit(known, names)
    per_query = float(right_count.double().mean())
    cheap = _fit_without_flow(known, names, per_query) if "flow" in names and len(names) > 1 else None
    return Calibration(
        alpha=weights.get("flow", 0.0),
        beta=weights.get("cosine", 0.0),
        outside=weights["outside"],
        stderr=(stderr.get("flow", 0.0), stderr.get("cosine", 0.0), stderr["outside"]),
        nll=float(loss.mean()),
        nll_stderr=float(loss.std() / math.sqrt(len(loss))),
        queries=len(right),
        reached=reached,
        right_per_query=per_query,
        made_for=made_for,
        others={name: weights[name] for name in names if name not in ("flow", "cosine")},
        hub_scale=hub_scale if "hub" in names else 0.0,
        platt=fit_platt(known, prob, per_query),
        rungs=tuple(rungs),
        cheap=cheap,
    )


def _fit(known: KnownQueries, names: Sequence[str]) -> tuple[dict[str, float], dict[str, float], Tensor, Tensor]:
    """Weights and their standard errors, a jackknife over folds, by feature; and each query's loss [Q] and
    probabilities [Q, K + 1] under a fit without its fold."""
    evidence, every = known.evidence, [*names, "outside"]
    design, answers = evidence.design(names), (evidence.possible(), known.target)
    weights = fit_weights(design, *answers)
    crossed = cross_fitted(evidence.designs(names), *answers, known.fold)
    # Weights beside hub corrections of different scales do not compare.
    by_fold = cross_fitted(repeat(design), *answers, known.fold).weights if evidence.by_fold else crossed.weights
    deviation = by_fold - by_fold.mean(0)
    stderr = (deviation.square().sum(0) * (len(by_fold) - 1) / len(by_fold)).sqrt()
    return dict(zip(every, weights.tolist())), dict(zip(every, stderr.tolist())), crossed.loss, crossed.prob


def _fit_without_flow(known: KnownQueries, names: Sequence[str], per_query: float) -> CheapFit:
    """The fit of what remains where the flow is not asked."""
    weights, _, _, prob = _fit(known, [name for name in names if name != "flow"])
    levels = torch.linspace(0, 1, GAP_LEVELS, dtype=torch.float64, device=prob.device)
    return CheapFit(
        weights, fit_platt(known, prob, per_query), tuple(torch.quantile(close_call(prob), levels).tolist())
    )


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
    logit = torch.stack((torch.logit(meant.clamp(CLOSEST, 1 - CLOSEST)), torch.ones_like(meant)), dim=1)
    design = torch.stack((logit, torch.zeros_like(logit)), dim=1)  # the choices are "right" and "wrong"
    target = torch.stack((is_right, 1 - is_right), dim=1)
    data = design, torch.ones_like(target, dtype=torch.bool), target
    stated = probability_right(meant, per_query, None).clamp(SURELY, 1 - SURELY)
    plain = -(is_right * stated.log() + (1 - is_right) * (1 - stated).log())
    crossed = cross_fitted(repeat(design), *data[1:], known.fold)
    gain, stderr = grouped_mean(plain - crossed.loss, known.group)
    slope, shift = fit_weights(*data).tolist()
    return (slope, shift) if gain > stderr and slope > 0 else None
