"""Result lists with a known law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

SHIFT = 7.0


@dataclass(frozen=True)
class Search:
    """Lists of scores, best first, and which hits are right."""

    scores: NDArray[np.float64]
    relevant: NDArray[np.bool_]
    missing: NDArray[np.bool_]
    """[n], whether there is no right item."""
    evidence: NDArray[np.float64]
    """[n], log p(all scores | a right item is there) - log p(all scores | there is none)."""

    @property
    def first(self) -> NDArray[np.bool_]:
        return self.relevant[:, 0]


def search(n: int, k: int = 50, *, items: int = 200, match: float = 1.0, seed: int = 0) -> Search:
    """The best `k` of `items` normal scores each; the right one, if there is one, is shifted by up to `SHIFT`."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, items))
    missing = rng.random(n) >= match
    scores[:, 0] += np.where(missing, 0.0, rng.uniform(0, SHIFT, n))
    shifted = (stats.norm.cdf(scores) - stats.norm.cdf(scores - SHIFT)) / SHIFT
    best = np.argpartition(-scores, k, axis=1)[:, :k] if k < items else np.tile(np.arange(items), (n, 1))
    order = np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1), axis=1), 1)
    right = (order == 0) & ~missing[:, None]
    evidence = np.log((shifted / stats.norm.pdf(scores)).mean(1))
    return Search(np.take_along_axis(scores, order, 1), right, missing, evidence)


def copied(lists: Search, copies: int, k: int) -> Search:
    """The lists of an index that stores every item several times."""
    scores, relevant = (each.repeat(copies, 1)[:, :k] for each in (lists.scores, lists.relevant))
    return Search(scores, relevant, lists.missing, lists.evidence)
