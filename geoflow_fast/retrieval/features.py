"""What the evidence about a shortlist says of its query as a whole: numbers that tell sure queries from others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from geoflow_fast.retrieval.evidence import Evidence

LEAST = 1e-9
"""Probabilities are kept this far from 0 and 1 before a logarithm is taken."""

OF_LISTS = ("answer", "inside", "best", "margin", "entropy")
OF_BANK = ("mass", "bank")


class BankLevel(NamedTuple):
    """How high a query's scores are for items that have nothing to do with it."""

    weights: Mapping[str, float]
    """The weights of the evidence in the score."""
    level: Tensor
    """[Q], the logarithm of the mean of exp(score) over a bank of items."""


def query_feature_names(evidence: Sequence[str], *, with_bank: bool = False) -> tuple[str, ...]:
    """The names of what `query_features` gives, if these are the features of the evidence."""
    of_bank = OF_BANK if with_bank else ()
    return (*OF_LISTS, *of_bank, *(name for feature in evidence for name in (feature, f"{feature} level")))


def query_features(
    evidence: Evidence, prob: Tensor, answer: Tensor, bank: BankLevel | None = None
) -> dict[str, Tensor]:
    """Numbers [Q] by name, finite float64, given the probabilities `prob` [Q, K + 1] of the items and, last, of
    "outside", and the position `answer` [Q] of plain search's answer.

    "answer" is the logit of the answer's probability; "inside" that of all items together, and "best" that of the most
    probable one against "outside"; "margin" is the lead of the most probable item over the next, in nats; "entropy" is
    that of all choices. With a bank of items, "mass" is the logarithm of the sum of exp(score) over the shortlist, and
    "bank" that of the mean over the bank. Each feature of the evidence gives its value for the most probable item,
    from its level, and its level.
    """
    log_prob = prob.clamp(min=LEAST).log()
    ranked = torch.nn.functional.pad(log_prob[:, :-1], (0, 1), value=math.log(LEAST)).topk(2, 1)
    first, second = ranked.values.unbind(1)
    of_answer = prob.gather(1, answer.unsqueeze(1)).squeeze(1)
    logit, inside = (torch.logit(x.clamp(LEAST, 1 - LEAST)) for x in (of_answer, 1 - prob[:, -1]))
    entropy = torch.special.entr(prob).sum(1)
    numbers = dict(zip(OF_LISTS, (logit, inside, first - log_prob[:, -1], first - second, entropy)))
    if bank is not None:
        scored = (weight * evidence.features[name] for name, weight in bank.weights.items())
        mass = sum(scored, torch.zeros_like(prob[:, :-1])).masked_fill(~evidence.valid, -math.inf).logsumexp(1)
        numbers |= zip(OF_BANK, (mass.clamp(min=math.log(LEAST)), bank.level))
    top = ranked.indices[:, :1].clamp(max=prob.shape[1] - 2)
    design = evidence.design([*evidence.features])
    for number, (name, level) in enumerate(evidence.levels([*evidence.features]).items()):
        numbers[name] = design[:, :-1, number].gather(1, top).squeeze(1)
        numbers[f"{name} level"] = level.squeeze(1)
    return numbers
