"""The ladder of evidence about shortlisted items: cosine, hub correction, head, flow, cheapest first.

A rung adds features to the logits of the items. Held-out queries decide which rungs are kept: each must lower the
cross-fitted negative log-likelihood by more than the standard error of what it gains.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from geoflow_fast.linear import fit_choice

RUNGS = {"cosine": ("cosine",), "hub": ("hub",), "head": ("head", "head_hub"), "flow": ("flow",)}
"""The rungs in the order in which they are tried, and the features that each of them adds."""
FEATURES = tuple(name for names in RUNGS.values() for name in names)
FOLDS = 10
PRIOR_SD = 10.0
"""Standard deviation of a normal prior on the weights of standardised features. With it the optimum exists even if the
data are separable."""


@dataclass(frozen=True)
class Evidence:
    """What the logits of Q queries over K shortlisted items are made of."""

    features: Mapping[str, Tensor]
    """[Q, K] float64 by name: "cosine"; "hub", the logarithm of the item's mean score for typical queries, and
    "head_hub", the same under the head; "head", the head's score; "flow", log p(query | item)."""
    nearness: Tensor
    """[Q, K] float64, by which the shortlists were chosen: the cosine, or the head's score."""
    valid: Tensor
    """[Q, K] bool, false where a shortlist is shorter than K."""
    asked: Tensor | None = None
    """[Q, K] bool, about which items the flow was asked; None if about all."""
    by_fold: tuple[Evidence, ...] = ()
    """The evidence that a fit without each of the folds sees, where the other folds may have chosen other features."""

    def designs(self, names: Sequence[str]) -> Iterable[Tensor]:
        """The design of these features that the fit without each of the folds sees."""
        if not self.by_fold:
            return itertools.repeat(self.design(names))
        different = {id(each): each for each in self.by_fold}
        made = {key: each.design(names) for key, each in different.items()}
        return [made[id(each)] for each in self.by_fold]

    def design(self, names: Sequence[str]) -> Tensor:
        """Features [Q, K + 1, F + 1] of all items and of "outside", which is last: logits are design @ weights, of
        which the last is the constant of "outside".

        Each feature is measured from its level in the less near half of the shortlist, which stands for items that are
        not the one meant. Levels cancel within a shortlist, and they give the constant one meaning for all queries:
        log p(query | .), for one, is larger for all items if the query is a usual one.
        """
        columns = [self._column(name, level) for name, level in self.levels(names).items()]
        items = torch.stack((*columns, torch.zeros_like(self.nearness)), dim=-1)
        outside = items.new_tensor([*(0.0 for _ in names), 1.0]).expand(len(items), 1, len(names) + 1)
        return torch.cat((items.masked_fill(~self.valid.unsqueeze(-1), 0.0), outside), dim=1)

    def levels(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The level [Q, 1] of each of these features: the mean over the less near half of the items, or of a
        log-density the logarithm of the mean density, over the less near half of those that were asked about."""
        half = {False: self._less_near_half(self.valid)}
        half[True] = half[False] if self.asked is None else self._less_near_half(self.asked)
        levels = {}
        for name in names:
            far, count = half[name == "flow"]
            values = self.features[name]
            if name == "flow":
                levels[name] = values.masked_fill(~far, -math.inf).logsumexp(1, keepdim=True) - count.double().log()
            else:
                levels[name] = values.masked_fill(~far, 0.0).sum(1, keepdim=True) / count
        return levels

    def _less_near_half(self, among: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the items `among` [Q, K] are in their less near half, [Q, K] bool, and how many, [Q, 1]."""
        rank = self.nearness.masked_fill(~among, math.inf).argsort(1).argsort(1)  # 0 for the least near
        count = (among.sum(1, keepdim=True) // 2).clamp(min=1)
        return rank < count, count

    def _column(self, name: str, level: Tensor) -> Tensor:
        """A feature [Q, K] measured from its level; the flow's is zero for items that it was not asked about."""
        values = self.features[name] - level
        return values.masked_fill(~self.asked, 0.0) if name == "flow" and self.asked is not None else values

    def possible(self) -> Tensor:
        """[Q, K + 1] bool: which items are there; "outside", the last, always is."""
        return torch.cat((self.valid, self.valid.new_ones(len(self.valid), 1)), dim=1)

    def rows(self, which: Tensor) -> Evidence:
        """The evidence of the queries that `which` selects."""
        features = {name: values[which] for name, values in self.features.items()}
        asked = None if self.asked is None else self.asked[which]
        return Evidence(features, self.nearness[which], self.valid[which], asked)


@dataclass(frozen=True)
class Rung:
    """What one rung brought on held-out queries."""

    name: str
    gain: float
    """By how much it lowered the cross-fitted negative log-likelihood of the rungs kept before it, in nats a query."""
    stderr: float
    """Standard error of the gain over images."""
    cost: float
    """Seconds a query that its evidence took while calibrating. The hub correction looks up numbers that are computed
    once per gallery, so it costs nothing here."""
    kept: bool


def most_probable(logits: Tensor, valid: Tensor, count: int) -> Tensor:
    """The `count` items of each query with the largest logits [Q, K], of those that are valid: [Q, K] bool."""
    best = logits.masked_fill(~valid, -math.inf).topk(min(count, logits.shape[1]), dim=1).indices
    return torch.zeros_like(valid).scatter_(1, best, True) & valid


def second_tier(evidence: Evidence, names: Sequence[str], rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Among the items that the flow was asked about and, last, all other choices together: the design [Q, A + 1, F + 2]
    of the features `names`, which choices are possible [Q, A + 1], and the columns [Q, A] of the items.

    The last two weights are those of `rest` [Q], the logit of all other choices without the flow, and a constant.
    """
    assert evidence.asked is not None
    most = int(evidence.asked.sum(1).max())
    column = evidence.asked.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    items = evidence.design(names)[:, :-1].take_along_dim(column.unsqueeze(2), dim=1)
    items = torch.cat((items, torch.zeros_like(items[..., :1])), dim=2)
    others = torch.zeros_like(items[:, :1])
    others[:, 0, -2], others[:, 0, -1] = rest, 1.0
    possible = torch.nn.functional.pad(evidence.asked.gather(1, column), (0, 1), value=True)
    return torch.cat((items, others), dim=1), possible, column


def joined_tiers(inside: Tensor, asked: Tensor, rest: Tensor, cheap: Tensor) -> Tensor:
    """Log-probabilities [Q, K + 1] of all choices: the logits `inside` [Q, K] of the items that were `asked` [Q, K]
    about and the logit `rest` [Q] of all other choices, which share its probability as their `cheap` logits [Q, K + 1]
    say."""
    others = cheap.masked_fill(torch.nn.functional.pad(asked, (0, 1)), -math.inf).log_softmax(1)
    every = torch.nn.functional.pad(inside.masked_fill(~asked, -math.inf), (0, 1), value=-math.inf)
    return torch.maximum(every, others + rest.unsqueeze(1)).log_softmax(1)


def of_others(cheap: Tensor, asked: Tensor) -> Tensor:
    """The logit [Q] of all choices together, given their logits `cheap` [Q, K + 1], but for the items `asked` [Q, K]
    about."""
    return cheap.masked_fill(torch.nn.functional.pad(asked, (0, 1)), -math.inf).logsumexp(1)


def climb(evidence: Evidence, target: Tensor, group: Tensor, fold: Tensor, costs: Mapping[str, float]) -> list[Rung]:
    """Tries the rungs that the evidence has, cheapest first, and keeps those whose gain exceeds its standard error.

    `target` [Q, K + 1] is the distribution of the right choice. Queries of one `group` [Q] are in one `fold` [Q].
    """
    kept: list[str] = []
    rungs: list[Rung] = []
    possible = evidence.possible()
    before = cross_fitted(evidence.designs(kept), possible, target, fold).loss
    for name, added in RUNGS.items():
        if not all(feature in evidence.features for feature in added):
            continue
        after = cross_fitted(evidence.designs([*kept, *added]), possible, target, fold).loss
        gain, stderr = grouped_mean(before - after, group)
        # The first rung is kept in any case: without it there would be nothing to rank by.
        keep = not kept or gain > stderr
        rungs.append(Rung(name, gain, stderr, costs.get(name, 0.0), keep))
        if keep:
            kept, before = [*kept, *added], after
    return rungs


def kept_features(rungs: Sequence[Rung]) -> list[str]:
    """The features of the rungs that are kept."""
    return [feature for rung in rungs if rung.kept for feature in RUNGS[rung.name]]


def grouped_mean(values: Tensor, group: Tensor) -> tuple[float, float]:
    """The mean of `values` [Q] and its standard error, where values of one `group` [Q] may depend on each other."""
    mean = values.mean()
    member = torch.unique(group, return_inverse=True)[1]
    sums = torch.zeros(int(member.max()) + 1, dtype=values.dtype, device=values.device)
    sums.index_add_(0, member, values - mean)
    return float(mean), float(sums.square().sum().sqrt() / len(values))


def with_best_hub(
    evidence: Evidence, hubs: Mapping[float, Tensor], target: Tensor, fold: Tensor
) -> tuple[float, Evidence]:
    """That of the scales whose hub correction [Q, K] has the lowest loss beside the cosine, and the evidence with it.

    Fits without a fold see the correction that the other folds choose. If the fold had a say, it would not be held out,
    and the gain of the rung would seem larger than it is.
    """
    tried = {scale: dataclasses.replace(evidence, features={**evidence.features, "hub": hubs[scale]}) for scale in hubs}
    designs = {scale: each.design(("cosine", "hub")) for scale, each in tried.items()}
    possible = evidence.possible()

    fitted: dict[float, Tensor] = {}

    def best(rows: Tensor) -> float:
        loss = {}
        for scale, design in designs.items():
            data = design[rows], possible[rows], target[rows]
            fitted[scale] = fit_weights(*data, fitted.get(scale))
            loss[scale] = float(losses(*data, fitted[scale]).mean())
        return min(loss, key=lambda scale: loss[scale])

    chosen = best(fold >= 0)
    others = [best(fold != number) for number in range(int(fold.max()) + 1)]
    by_fold = () if set(others) == {chosen} else tuple(tried[scale] for scale in others)
    return chosen, dataclasses.replace(tried[chosen], by_fold=by_fold)


class CrossFit(NamedTuple):
    """Fits that each leave out one fold of the queries."""

    weights: Tensor
    """[folds, F]."""
    loss: Tensor
    """[Q], under the fit without the query's fold."""
    logits: Tensor
    """[Q, C], logits of the choices under that fit, minus infinity where one is not possible."""


def cross_fitted(designs: Iterable[Tensor], possible: Tensor, target: Tensor, fold: Tensor) -> CrossFit:
    """Leaves out one fold after the other. The arguments are those of `fit_weights`, but with a design for each of the
    folds that is left out, and the `fold` [Q] of each query."""
    weights: list[Tensor] = []
    logits = torch.empty_like(target)
    loss = torch.empty(len(target), dtype=torch.float64, device=target.device)
    for number, design in zip(range(int(fold.max()) + 1), designs):
        left_out = fold == number
        start = weights[-1] if weights else None  # folds have most queries in common
        fitted = fit_weights(design[~left_out], possible[~left_out], target[~left_out], start)
        data = design[left_out], possible[left_out]
        loss[left_out] = losses(*data, target[left_out], fitted)
        logits[left_out] = _logits(*data, fitted)
        weights.append(fitted)
    return CrossFit(torch.stack(weights), loss, logits)


def fit_weights(design: Tensor, possible: Tensor, target: Tensor, start: Tensor | None = None) -> Tensor:
    """Weights [F] under which `target` [Q, C] is likeliest, float64, as `linear.fit_choice` fits them, with the prior
    on the weights of standardised features."""
    rows, kept = design.reshape(-1, design.shape[-1]), possible.reshape(-1).to(design.dtype)
    # Root mean square [F] of each feature over possible choices; 1 for the last, and for one that is always zero.
    scale = torch.mv(rows.square().T, kept).div(kept.sum()).sqrt()
    scale[-1] = 1.0
    prior_sd = PRIOR_SD / torch.where(scale > 0, scale, 1.0)
    x, wanted, sd, may = (each.cpu().numpy() for each in (design, target, prior_sd, possible))
    weights = fit_choice(x, wanted, sd, may, None if start is None else start.cpu().numpy())
    return torch.from_numpy(weights).to(design.device)


def fit_logistic(features: Tensor, target: Tensor, fold: Tensor) -> tuple[Tensor, Tensor]:
    """Logistic regression of `target` [n], between 0 and 1, on `features` [n, F]: the weights [F + 1], the constant
    last, and the loss [n] of each row under a fit without its `fold` [n]."""
    centre = features.mean(0)
    one = torch.cat((features - centre, torch.ones_like(features[:, :1])), dim=1)
    design = torch.stack((one, torch.zeros_like(one)), dim=1)  # the choices are "yes" and "no"
    answers = torch.ones(len(one), 2, dtype=torch.bool, device=one.device), torch.stack((target, 1 - target), dim=1)
    weights = fit_weights(design, *answers)
    weights[-1] -= weights[:-1] @ centre
    return weights, cross_fitted(itertools.repeat(design), *answers, fold).loss


def losses(design: Tensor, possible: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """-sum_c target_c log softmax(design @ weights)_c per query: [Q]."""
    logits = _logits(design, possible, weights)
    return logits.logsumexp(1) - (logits.masked_fill(~possible, 0.0) * target).sum(1)


def _logits(design: Tensor, possible: Tensor, weights: Tensor) -> Tensor:
    return (design @ weights).masked_fill(~possible, -math.inf)


def folds_of(group: Tensor, seed: int) -> Tensor:
    """The fold [Q] of every query, which is that of its group. There are `FOLDS`, or one for each of fewer groups."""
    names, member = torch.unique(group, return_inverse=True)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed), device="cpu").to(group.device)
    return order[member] % FOLDS


def cosines(queries: Tensor, items: Tensor) -> Tensor:
    """Cosines of queries [Q, d] with items [Q, K, d], other ones for each query: [Q, K] float64."""
    return torch.einsum("qd,qkd->qk", queries, items).double()
