"""Result lists: their distinct items, what they look like with the right items taken out, and their features.

Items of equal score are copies of one item, so that nothing here changes if an index stores every item several times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ranks = NDArray[np.int64]
TIE = 1e-6
"""Scores that differ by no more than this share of the list's largest are equal up to rounding."""
SHORTEST, LONGEST, COPIES = 5, 20, 5
"""At least and at most so many distinct items are looked at, and a list may hold each of them so many times."""
SHAPE = 3
ROUNDING, MOST_ROUNDING = 1e-6, 2e-3
"""What the probabilities of a list lack of one is rounding if it is no more than this, and their sum may exceed one by
the latter, since half precision rounds so much."""
MOST_HITS = 20
"""Hits of each list whose items a log is compared by."""
KEPT_HITS = MOST_HITS + 1
"""Hits of each list that a rule keeps: where the first one is taken out, the next one moves up."""
DIGITS = 7
"""Significant digits of scores that are kept, so that lists can be compared with stored ones."""


def depth_of(k: int) -> int:
    """How many distinct items of a list of `k` hits are looked at. A fifth of the list leaves room for five copies of
    each item, and one item less for the right one, which may be missing."""
    return min(k - 1, LONGEST, max(SHORTEST, k // COPIES - 1))


def distinct_ranks(scores: Floats) -> Ranks:
    """The number [n, k], from 0, of the distinct item that each hit is a copy of; `scores` descend."""
    tolerance = TIE * np.abs(scores).max(1, keepdims=True, initial=0.0)
    new = scores[:, :-1] - scores[:, 1:] > tolerance
    return np.concatenate((np.zeros((len(scores), 1), np.int64), np.cumsum(new, axis=1)), axis=1)


def begins(ranks: Ranks) -> Bools:
    """[n, k], whether a hit is the first copy of a distinct item other than the first."""
    return np.concatenate((np.zeros((len(ranks), 1), bool), ranks[:, 1:] > ranks[:, :-1]), axis=1)


def first_distinct(scores: Floats, depth: int) -> Floats:
    """The scores [n, depth] of the first distinct items. A list of fewer repeats its last score: what it does not show
    is at most as near."""
    ranks = distinct_ranks(scores)
    position = np.stack([(ranks < number).sum(1) for number in range(depth)], axis=1)
    return np.take_along_axis(scores, np.minimum(position, scores.shape[1] - 1), axis=1)


def all_copies(scores: Floats, chosen: Bools) -> Bools:
    """`chosen` [n, k] and all copies of the chosen hits."""
    n, k = scores.shape
    item = np.arange(n)[:, None] * k + distinct_ranks(scores)
    return (np.bincount(item.ravel(), chosen.ravel(), minlength=n * k) > 0)[item]


def taken_out(scores: Floats, chosen: Bools, *, log_prob: bool = False) -> Floats:
    """The lists [n, k] without the `chosen` hits and their copies. What follows moves up; the last score fills up.

    With `log_prob`, scores are logarithms of probabilities that sum to one over a gallery: what the chosen hits had is
    divided among all others, as if they had never been there."""
    out = all_copies(scores, chosen)
    order = np.argsort(out, axis=1, kind="stable")
    moved = np.take_along_axis(scores, order, axis=1)
    left = scores.shape[1] - out.sum(1, keepdims=True)
    last = np.where(left > 0, np.take_along_axis(moved, np.maximum(left - 1, 0), axis=1), scores[:, -1:])
    lists = np.where(np.arange(scores.shape[1]) < left, moved, last)
    return np.minimum(lists - _log_mass(scores, out)[:, None], 0.0) if log_prob else lists


def _log_mass(log_prob: Floats, out: Bools) -> Floats:
    """The logarithm [n] of the probability of all items that are not `out` [n, k], those beyond the list included."""
    prob = np.exp(log_prob)
    beyond = 1 - prob.sum(1)
    mass = np.where(out, 0.0, prob).sum(1) + np.where(beyond > ROUNDING, beyond, 0.0)
    return np.where(out.any(1) & (mass > 0), np.log(np.where(mass > 0, mass, 1.0)), 0.0)


def prob_sums(log_prob: Floats) -> Floats:
    """What the probabilities of each list [n, k] sum to; more than one if a score is no logarithm of a probability."""
    return np.asarray(np.exp(np.minimum(log_prob, 1.0)).sum(1))


def look_like_log_prob(scores: Floats) -> bool:
    """Whether lists [n, k] are probably logarithms of probabilities: those of each sum to at most one, and mostly to
    about that."""
    sums = prob_sums(scores)
    return bool(len(sums)) and bool((sums <= 1 + MOST_ROUNDING).all()) and float(np.median(sums)) >= 0.5


def rounded(values: Floats) -> Floats:
    """The values with `DIGITS` significant digits."""
    size = np.abs(values)
    digits = DIGITS - 1 - np.floor(np.log10(np.clip(size, 1e-280, 1e280)))
    up, down = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    return np.asarray(np.round(values * up / down) / up * down)


def softmax_logit(heads: Floats, inverse_temperature: float) -> Floats:
    """log-odds [n] of the first of `heads` [n, L] under a softmax of all of them; 0 if there is only one."""
    from scipy import special

    if heads.shape[1] < 2:
        return np.zeros(len(heads))
    return -special.logsumexp(inverse_temperature * (heads[:, 1:] - heads[:, :1]), axis=1)


def shape_of(heads: Floats, unit: float) -> Floats:
    """Features [n, 3] of the shape of `heads` [n, L]: how far the first is ahead of the second, how far it stands out
    among the others, and their entropy, with scores measured in `unit`s."""
    from scipy import special

    if heads.shape[1] < 2:
        return np.zeros((len(heads), SHAPE))
    others = heads[:, 1:] / unit
    ahead = heads[:, 0] / unit - others[:, 0]
    stands_out = (heads[:, 0] / unit - others.mean(1)) / (others.std(1) + 0.1)
    log_prob = special.log_softmax(heads / unit, axis=1)
    return np.column_stack((ahead, stands_out, -(np.exp(log_prob) * log_prob).sum(1)))
