"""Do two samples of queries differ? Classifier two-sample tests whose p-values are exact, and stay so when one looks
again and again at a log that grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.decisions.bounds import Bools, Floats

FOLDS = 5
RIDGE = 0.1
"""Strength of the ridge, as a share of the number of rows, for columns of unit variance."""
WIDEST = 64
"""Wider rows are replaced by this many of their principal components."""
ENOUGH = 8
"""Drawing permutations ends when so many have reached the observed AUROC, and at the latest when this many would reach
an AUROC at the edge of an alarm."""
SPENDING, HEAD_START = 1.5, 4
"""The k-th look may raise a false alarm with a probability proportional to (k + HEAD_START) ** -SPENDING."""
BATCH = 256

OutOfFold = Callable[[Floats], Floats]
"""Turns labels [B, n] of n rows into scores [B, n], where no row is scored by a classifier that has seen it."""
Folds = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Drift:
    """What one classifier says about two samples."""

    view: str
    """What the classifier looks at."""
    auroc: float
    """Probability that it finds a live query more like live ones than a calibration query, out of fold."""
    p_value: float
    """Probability of such an AUROC or a larger one if the samples did not differ, by permutation."""
    corrected: float
    """The same for the whole log: corrected for the number of views and for all looks, past and future."""
    score: Floats
    """[n], out of fold: large for rows that look live."""


def spending(look: int) -> float:
    """The part of the probability of a false alarm that belongs to the `look`-th look, from 1. All parts, of endlessly
    many looks, sum to 1."""
    from scipy import special

    return float((look + HEAD_START) ** -SPENDING / special.zeta(SPENDING, 1 + HEAD_START))


def folds_of(n: int, rng: np.random.Generator) -> Folds:
    """The rows of each fold, in random order. Which row is where does not depend on the labels."""
    order = rng.permutation(n)
    return [order[number::FOLDS] for number in range(FOLDS)]


def drift_between(
    view: str,
    classifier: OutOfFold,
    live: Bools,
    folds: Folds,
    *,
    part: float,
    false_alarms: float,
    rng: np.random.Generator,
    enough: int = ENOUGH,
) -> Drift:
    """Tests whether `live` rows [n] differ from the others. `part` of the probability of a false alarm belongs to this
    test; the p-value is corrected by it."""

    def auroc_of(labels: Floats) -> Floats:
        if isinstance(classifier, GivenScore):
            return classifier.auroc(labels)
        return _auroc(classifier(labels), labels, folds)

    labels = live.astype(np.float64)
    observed = float(auroc_of(labels[None])[0])
    most = int(np.ceil(enough / (false_alarms * part)))
    p_value = _permutation_p_value(auroc_of, labels, observed, enough, most, rng)
    return Drift(view, observed, p_value, min(1.0, p_value / part), classifier(labels[None])[0])


def _permutation_p_value(
    auroc_of: Callable[[Floats], Floats],
    labels: Floats,
    observed: float,
    enough: int,
    most: int,
    rng: np.random.Generator,
) -> float:
    """The p-value of Besag and Clifford: permutations are drawn until `enough` of them have reached the observed AUROC,
    or `most` are drawn. It is exact: at most p with probability at most p."""
    drawn = reached = 0
    size = 4 * ENOUGH
    while drawn < most:
        size = min(2 * size, BATCH, most - drawn)
        above = np.flatnonzero(auroc_of(rng.permuted(np.tile(labels, (size, 1)), axis=1)) >= observed - 1e-12)
        if reached + len(above) >= enough:
            return enough / (drawn + int(above[enough - reached - 1]) + 1)
        reached, drawn = reached + len(above), drawn + size
    return (reached + 1) / (drawn + 1)


def _auroc(score: Floats, labels: Floats, folds: Folds) -> Floats:
    """The AUROC [B] of scores [B, n]: rows are compared within their folds, where one classifier has scored them. Ties
    are broken by the order of the rows, which is random."""
    won, pairs = np.zeros(len(score)), np.zeros(len(score))
    for rows in folds:
        order = np.argsort(score[:, rows].astype(np.float32), axis=1)
        label = np.take_along_axis(labels[:, rows], order, axis=1)
        positive = label.sum(1)
        won += label @ np.arange(len(rows)) - positive * (positive - 1) / 2
        pairs += positive * (len(rows) - positive)
    return np.where(pairs > 0, won / np.maximum(pairs, 1), 0.5)


def linear_classifier(columns: Floats, folds: Folds) -> OutOfFold:
    """Ridge regression of the labels on columns [n, d], in closed form: thousands of permutations cost as much as a
    few refits."""
    columns = _standardised(columns)
    penalty = RIDGE * len(columns) * np.eye(columns.shape[1])
    parts = []
    for rows in folds:
        seen = np.setdiff1d(np.arange(len(columns)), rows)
        known = columns[seen] - columns[seen].mean(0)
        parts.append((rows, seen, columns[rows], np.linalg.solve(known.T @ known + penalty, known.T)))

    def out_of_fold(labels: Floats) -> Floats:
        score = np.empty(labels.shape)
        for rows, seen, own, solved in parts:
            score[:, rows] = (labels[:, seen] @ solved.T) @ own.T
        return score

    return out_of_fold


class GivenScore:
    """A score [n] that was learned elsewhere, so that all rows can be compared with each other."""

    def __init__(self, score: Floats) -> None:
        from scipy import stats

        self.score, self.ranks = score, stats.rankdata(score)

    def __call__(self, labels: Floats) -> Floats:
        return np.tile(self.score, (len(labels), 1))

    def auroc(self, labels: Floats) -> Floats:
        """The AUROC [B] for labels [B, n]; a tie counts half."""
        positive = labels.sum(1)
        won = labels @ self.ranks - positive * (positive + 1) / 2
        return np.asarray(won / np.maximum(positive * (labels.shape[1] - positive), 1))


def item_classifier(items: NDArray[Any], folds: Folds) -> OutOfFold:
    """Which items come up: a query looks live if its hits [n, k] are hits of live queries. An item counts for the less
    the more queries it is a hit of. Negative numbers are no items."""
    from scipy import sparse

    n, k = items.shape
    there = items >= 0
    row = np.repeat(np.arange(n), k).reshape(n, k)[there]
    number = np.unique(items[there], return_inverse=True)[1].reshape(-1)
    listed = sparse.csr_matrix((np.ones(len(row)), (row, number)))
    listed.resize(n, int(number.max(initial=-1)) + 1)
    listed.data[:] = 1.0  # an item that is there twice counts once
    weighted = sparse.csr_matrix(listed @ sparse.diags(1 / np.maximum(np.asarray(listed.sum(0)).ravel(), 1)))
    parts = []
    for rows in folds:
        seen = np.setdiff1d(np.arange(n), rows)
        parts.append((rows, seen, listed[rows], sparse.csr_matrix(weighted[seen].T)))

    def out_of_fold(labels: Floats) -> Floats:
        score = np.empty(labels.shape)
        for rows, seen, own, items_of in parts:
            known = labels[:, seen]
            score[:, rows] = (own @ (items_of @ (known - known.mean(1, keepdims=True)).T)).T
        return score

    return out_of_fold


def _standardised(columns: Floats) -> Floats:
    """Columns of mean 0 and unit variance, constant ones 0; wide rows become principal components, whose common scale
    is kept. Nothing here knows which rows are live."""
    centred = columns - columns.mean(0)
    if columns.shape[1] > WIDEST:
        _, vectors = np.linalg.eigh(centred.T @ centred)
        centred = centred @ vectors[:, : -WIDEST - 1 : -1]
        return centred / max(float(np.sqrt((centred**2).mean())), np.finfo(np.float64).tiny)
    sd = centred.std(0)
    return np.where(sd > 1e-9 * np.maximum(np.abs(columns.mean(0)), 1.0), centred / np.maximum(sd, 1e-300), 0.0)
