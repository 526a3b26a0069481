"""The probability that nothing in a gallery is right for a query.

Every held-out query gives two examples: its search, and the same search in the gallery without its own items. Logistic
regression on what the evidence says about the query as a whole tells them apart. Both kinds are equally frequent there,
so that its logit is a log-likelihood ratio, to which a user adds the odds of the real share of such queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.retrieval.evidence import fit_logistic, grouped_mean
from geoflow_fast.retrieval.features import OF_BANK, OF_LISTS


@dataclass(frozen=True)
class NoMatch:
    """Weights of the features of a query in the log-likelihood ratio of "nothing is right" and "something is"."""

    weights: dict[str, float]
    """By name of the feature, and "constant"."""
    loss: float
    """Cross-fitted -log probability of which of the two it is, in nats, where both are equally frequent. Knowing
    nothing, it is .693."""

    def probability(self, features: Mapping[str, Tensor], share: float) -> Tensor:
        """The probability [Q] that nothing is right, if it is so for a `share` of all queries."""
        used = {name: weight for name, weight in self.weights.items() if name != "constant"}
        columns = torch.stack([features[name] for name in used], dim=1)
        ratio = columns @ columns.new_tensor([*used.values()]) + self.weights["constant"]
        odds = math.log(share / (1 - share)) if 0 < share < 1 else math.copysign(math.inf, share - 0.5)
        return torch.sigmoid(ratio + odds)


def fit_no_match(present: Mapping[str, Tensor], absent: Mapping[str, Tensor], group: Tensor, fold: Tensor) -> NoMatch:
    """Fits the weights to features [Q] by name of searches with the own items, `present`, and without, `absent`.

    First the probability of all items together is the only feature, then all that shortlists have, then the level of
    the scores over a bank of items, then those of each kind of evidence, too: more features are used only where they
    lower the cross-fitted loss by more than the standard error of that.
    """
    count = len(group)
    is_absent = torch.arange(2 * count, device=group.device) >= count
    groups, folds = group.repeat(2), fold.repeat(2)
    best: NoMatch | None = None
    loss = torch.full((2 * count,), math.log(2.0), dtype=torch.float64, device=group.device)
    of_bank = [name for name in OF_BANK if name in present]
    for names in (["inside"], [*OF_LISTS], [*OF_LISTS, *of_bank], [*present]):
        both = torch.cat([torch.stack([side[name] for name in names], dim=1) for side in (present, absent)])
        weights, after = fit_logistic(both, is_absent.double(), folds)
        gain, stderr = grouped_mean(loss - after, groups)
        if best is None or gain > stderr:
            best = NoMatch(dict(zip([*names, "constant"], weights.tolist())), float(after.mean()))
            loss = after
    assert best is not None
    return best
