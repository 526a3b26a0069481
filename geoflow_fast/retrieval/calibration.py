"""Probabilities over a shortlist and "none of these": three weights, fitted by maximum likelihood on held-out queries.

The logit of item j is alpha (log p(q | g_j) - l) + beta (cos(q, g_j) - c), and that of "outside the shortlist" is a
constant. The query's levels l and c cancel within the shortlist. They give the constant one meaning for all queries:
log p(q | .) is larger for all items if the query is a usual one, so it is measured from its level for items that are
not the one meant. The less similar half of the shortlist stands for these.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, read_json, write_json

KIND, VERSION = "geoflow rerank calibration", 1
LEAST_QUERIES = 50
"""Nothing is fitted with fewer queries whose item reaches the shortlist."""
FOLDS = 10
PRIOR_SD = 10.0
"""Standard deviation of a normal prior on the weights of standardised features. With it the optimum exists even if the
data are separable."""


@dataclass(frozen=True)
class Evidence:
    """What the logits of Q queries over K shortlisted items are made of."""

    log_density: Tensor
    """[Q, K] float64, log p(query | item)."""
    cosine: Tensor
    """[Q, K] float64."""
    valid: Tensor
    """[Q, K] bool, false where a shortlist is shorter than K."""

    def design(self) -> Tensor:
        """Features [Q, K + 1, 3] of all items and of "outside", which is last: logits are design @ weights."""
        rank = self.cosine.masked_fill(~self.valid, math.inf).argsort(1).argsort(1)  # 0 for the least similar
        count = (self.valid.sum(1, keepdim=True) // 2).clamp(min=1)
        far = rank < count  # the less similar half of the valid items
        level = self.log_density.masked_fill(~far, -math.inf).logsumexp(1, keepdim=True) - count.double().log()
        cosine = self.cosine.masked_fill(~far, 0.0).sum(1, keepdim=True) / count
        items = torch.stack((self.log_density - level, self.cosine - cosine, torch.zeros_like(self.cosine)), dim=-1)
        outside = items.new_tensor([0.0, 0.0, 1.0]).expand(len(items), 1, 3)
        return torch.cat((items.masked_fill(~self.valid.unsqueeze(-1), 0.0), outside), dim=1)

    def possible(self) -> Tensor:
        """[Q, K + 1] bool: which items are there; "outside", the last, always is."""
        return torch.cat((self.valid, self.valid.new_ones(len(self.valid), 1)), dim=1)


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
    """Standard errors of the three weights, from fits that each leave out a tenth of the queries."""
    nll: float
    """Cross-validated -log probability of the right answer, in nats per query."""
    nll_stderr: float
    queries: int
    reached: int
    """Queries with a right item in the shortlist."""
    right_per_query: float
    """Mean number of right items of a query."""
    made_for: dict[str, Any]
    """Facts of flow and shortlists that the weights are valid for. `load` checks them, and so does every call of the
    re-ranker, unless there are none, as in a calibration made by hand."""
    pairs: str = ""
    """Fingerprint of the pairs that the weights were fitted on."""

    @property
    def weights(self) -> tuple[float, float, float]:
        """(alpha, beta, outside)."""
        return self.alpha, self.beta, self.outside

    # unchecked: a reranker calls it with evidence of its own
    def probabilities(self, evidence: Evidence) -> Tensor:
        """Probabilities of the shortlisted items and, last, of "outside": float64 [Q, K + 1], rows sum to one."""
        inside = evidence.design()[:, :-1, :2] @ evidence.cosine.new_tensor((self.alpha, self.beta))
        inside = inside.masked_fill(~evidence.valid, -math.inf)
        return torch.cat((inside, inside.new_full((len(inside), 1), self.outside)), dim=1).softmax(1)

    def save(self, path: Path) -> None:
        """Writes the calibration to the JSON file `path`, atomically."""
        write_json(checks.path(path, "path"), {"kind": KIND, "version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path, made_for: dict[str, Any]) -> Calibration:
        """Reads a file that `save` wrote. A damaged file, or one made for other facts, raises a ValueError."""
        path = checks.path(path, "path")
        stored = read_json(path, "a calibration")
        if not isinstance(stored, dict) or (stored.pop("kind", None), stored.pop("version", None)) != (KIND, VERSION):
            raise ValueError(f"{path} is not a calibration of version {VERSION}")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(stored) != names:
            raise ValueError(f"{path} is damaged: its fields differ in {sorted(set(stored) ^ names)}")
        numbers = [stored["alpha"], stored["beta"], stored["outside"], stored["right_per_query"]]
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
            raise ValueError(f"{path} is damaged: its weights are {numbers}")
        if not isinstance(made_for, dict):
            raise TypeError(f"made_for must be the facts of a reranker, got {made_for!r}")
        with contents_of(path):
            facts, stored["stderr"] = {**stored["made_for"]}, tuple(map(float, stored["stderr"]))
        if changed := changed_facts(facts, made_for):
            raise ValueError(f"{path} was made for another {', '.join(changed)}; calibrate again")
        return cls(**stored)


def changed_facts(made_for: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the facts in which two descriptions of a re-ranker differ."""
    return sorted(key for key in {*made_for, *now} if made_for.get(key) != now.get(key))


UNCALIBRATED = Calibration(1.0, 0.0, -math.inf, (math.nan,) * 3, math.nan, math.nan, 0, 0, 1.0, {})
"""The weights of the flow's own posterior over the shortlist: alpha 1, beta 0, nothing outside."""


def fit_calibration(
    evidence: Evidence, right: Tensor, right_count: Tensor, group: Tensor, made_for: dict[str, Any], seed: int = 0
) -> Calibration:
    """Fits the weights to queries whose right items are known.

    `right` [Q, K] bool marks right items in the shortlist, `right_count` [Q] counts all right items of a query, those
    outside the shortlist included. Each of them is taken to be meant with equal probability, which keeps the likelihood
    concave. Queries of one `group` [Q] are left out of a fold's fit together. `seed` assigns groups to folds.
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
    share = right.double() / right_count.unsqueeze(1)
    target = torch.cat((share, 1 - share.sum(1, keepdim=True)), dim=1)
    data = evidence.design(), evidence.possible(), target
    alpha, beta, outside = fit_weights(*data).tolist()
    stderr, loss = _cross_fitted(*data, _folds(group, seed))
    return Calibration(
        alpha=alpha,
        beta=beta,
        outside=outside,
        stderr=(float(stderr[0]), float(stderr[1]), float(stderr[2])),
        nll=float(loss.mean()),
        nll_stderr=float(loss.std() / math.sqrt(len(loss))),
        queries=len(right),
        reached=reached,
        right_per_query=float(right_count.double().mean()),
        made_for=made_for,
    )


def _cross_fitted(design: Tensor, possible: Tensor, target: Tensor, fold: Tensor) -> tuple[Tensor, Tensor]:
    """Standard errors [F] of the weights, a jackknife over folds, and each query's loss [Q] under a fit without it."""
    folds = int(fold.max()) + 1
    weights, loss = [], torch.empty(len(design), dtype=torch.float64, device=design.device)
    for number in range(folds):
        left_out = fold == number
        weights.append(fit_weights(design[~left_out], possible[~left_out], target[~left_out]))
        loss[left_out] = _loss(design[left_out], possible[left_out], target[left_out], weights[-1])
    deviation = torch.stack(weights) - torch.stack(weights).mean(0)
    return (deviation.square().sum(0) * (folds - 1) / folds).sqrt(), loss


def fit_weights(design: Tensor, possible: Tensor, target: Tensor, *, max_steps: int = 100) -> Tensor:
    """Weights [F] that maximise the likelihood of `target` [Q, C] under softmax(design [Q, C, F] @ weights) over the
    `possible` [Q, C] choices, with the prior: Newton's method on a strictly convex loss, float64."""
    # Root mean square [F] of each feature over possible choices; 1 for the last, and for one that is always zero.
    scale = (design.square() * possible.unsqueeze(-1)).sum((0, 1)).div(possible.sum()).sqrt()
    scale[-1] = 1.0
    scale = torch.where(scale > 0, scale, 1.0)
    x = design / scale
    weights = x.new_zeros(x.shape[-1])
    precision = PRIOR_SD**-2 * torch.eye(len(weights), dtype=x.dtype, device=x.device)

    def total(w: Tensor) -> Tensor:
        return _loss(x, possible, target, w).sum() + w @ precision @ w / 2

    loss = total(weights)
    for _ in range(max_steps):
        prob = (x @ weights).masked_fill(~possible, -math.inf).softmax(1)
        mean = torch.einsum("qc,qcf->qf", prob, x)
        gradient = (mean - torch.einsum("qc,qcf->qf", target, x)).sum(0) + precision @ weights
        hessian = torch.einsum("qc,qcf,qcg->fg", prob, x, x) - mean.T @ mean + precision
        step = torch.linalg.solve(hessian, gradient)
        decrease = float(gradient @ step)
        if decrease < 1e-10 * max(1.0, float(loss)):  # about twice the excess loss, which this last step squares
            return (weights - step) / scale
        size = 1.0
        while float(after := total(weights - size * step)) > float(loss) - 1e-4 * size * decrease:
            size /= 2
        weights, loss = weights - size * step, after
    raise ValueError(f"the calibration did not converge in {max_steps} steps; are densities or cosines extreme?")


def _loss(design: Tensor, possible: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """-sum_c target_c log softmax(design @ weights)_c per query: [Q]."""
    logits = (design @ weights).masked_fill(~possible, -math.inf)
    return logits.logsumexp(1) - (logits.masked_fill(~possible, 0.0) * target).sum(1)


def _folds(group: Tensor, seed: int) -> Tensor:
    """The fold [Q] of every query, which is that of its group. There are `FOLDS`, or one for each of fewer groups."""
    names, member = torch.unique(group, return_inverse=True)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed), device="cpu").to(group.device)
    return order[member] % FOLDS
