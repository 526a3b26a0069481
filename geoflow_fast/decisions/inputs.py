"""Checks of what users give: lists of scores, labels, features and groups. Errors say what is wrong, and where."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.decisions.lists import Bools, Floats
from geoflow_fast.decisions.tables import Array, Read, Table, read
from geoflow_fast.runtime import checks

FEWEST = 10
"""With fewer queries there is nothing to learn from; about a hundred make a useful fit."""
LARGEST, LEAST_SPREAD = 1e75, 1e-75
"""The largest size of scores and features, and the least spread of lists: with these, products and squares are finite
and no probability is NaN."""


@dataclass(frozen=True)
class Lists:
    """Result lists, best hit first."""

    table: Read
    scores: Floats
    order: NDArray[np.int64] | None
    """[n, k], the caller's columns in the order of `scores`; None if they were sorted."""

    def restored(self, values: Array) -> Array:
        """`values` [n, k] of the hits in the caller's order."""
        if self.order is None:
            return values
        result = np.empty_like(values)
        np.put_along_axis(result, self.order, values, axis=1)
        return result


def result_lists(table: Table, name: str, *, k: int | None = None, presorted: bool = True) -> Lists:
    """Reads lists [n, k] of scores, best first, or sorts them unless they must be `presorted`."""
    stored = read(table, name)
    scores = checks.reals(stored.values, name)
    if scores.ndim != 2:
        raise ValueError(
            f"{name} must hold one list of scores per query, [n, k], got shape {scores.shape}; one list alone is "
            "scores.reshape(1, -1)"
        )
    width = scores.shape[1]
    if k is not None and width != k:
        raise ValueError(
            f"{name} has lists of {width} hits, but this was fitted on lists of {k}: ask the search for {k} hits"
        )
    if width < 2:
        raise ValueError(f"{name} must have at least two hits for each query, got shape {scores.shape}")
    if k is not None and not len(scores):
        raise ValueError(f"{name} holds no query: its shape is {scores.shape}")
    _finite(scores, name)
    rises = np.diff(scores, axis=1) > 0
    if not rises.any():
        return Lists(stored, scores, None)
    if presorted:
        row, column = (int(each[0]) for each in rises.nonzero())
        raise ValueError(
            f"{name} must have the best hit first, but in row {row} column {column + 1} has "
            f"{scores[row, column + 1]:g} after {scores[row, column]:g}. Negate distances, or pass "
            "Trust(presorted=False) to have lists sorted"
        )
    order = np.argsort(-scores, axis=1, kind="stable")
    return Lists(stored, np.take_along_axis(scores, order, axis=1), order)


def row_digests(scores: Floats) -> list[str]:
    """A digest of each list of scores [n, k], equal for equal lists."""
    rows = np.ascontiguousarray(scores + 0.0, dtype="<f8")  # -0 becomes 0
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


@dataclass(frozen=True)
class Labels:
    """What is known about the hits of each query."""

    first: Bools
    """[n], whether the first hit is right."""
    relevant: Bools | None
    """[n, k], which hits are relevant; None if only the first was judged."""


def labels_of(table: Table, lists: Lists, name: str = "labels") -> Labels:
    """Reads labels [n], whether the first hit is right, or [n, k], the grade of each hit: above 0 is relevant."""
    if table is None:
        raise ValueError(f"{name} are missing: say which first hits are right, [n], or grade the hits, [n, k]")
    values = read(table, name).values
    n, k = lists.scores.shape
    if len(values.shape) not in (1, 2) or len(values) != n or (values.ndim == 2 and values.shape[1] not in (1, k)):
        raise ValueError(f"{name} must be [{n}] or [{n}, {k}] for these scores, got shape {values.shape}")
    if values.ndim == 2 and values.shape[1] == k:
        relevant = relevant_of(values, name)
        if lists.order is not None:
            relevant = np.take_along_axis(relevant, lists.order, axis=1)
        return Labels(relevant[:, 0], relevant)
    return Labels(right_of(values.reshape(n), name), None)


def right_of(values: Array, name: str) -> Bools:
    """Whether the first hits are right [n], from labels that are True and False, or 1 and 0. Others are refused: which
    of two words or numbers means "right" cannot be told."""
    if values.dtype.kind in "biuf":
        known = np.isin(values, (0, 1))
    else:
        known = np.array([isinstance(each, _KINDS) and each in (0, 1) for each in values.tolist()], bool)
    if not known.all():
        row = int(known.argmin())
        raise ValueError(
            f"{name} [n] must be True or 1 where the first hit is right and False or 0 where it is wrong, but row "
            f"{row} is {values.tolist()[row]!r}"
        )
    return values.astype(bool)


def relevant_of(values: Array, name: str) -> Bools:
    """Which hits are relevant, from booleans or grades [n, k], of which those above 0 are relevant."""
    grades = checks.reals(values, name)
    _finite(grades, name)
    if grades.size and grades.min() > 0 and grades.max() > 1:
        raise ValueError(
            f"{name} [n, k] must be grades of which those above 0 are relevant, but all are from {grades.min():g} to "
            f"{grades.max():g}, so that no hit would be wrong: give hits that are not relevant a grade of 0"
        )
    return grades > 0


_KINDS = (bool, int, float, np.bool_, np.integer, np.floating)


def features_of(table: Table | None, n: int, count: int | None, name: str = "features") -> Floats:
    """Reads the caller's features [n, f], or none: [n, 0]. `count` is how many there were in the fit."""
    if table is None:
        values = np.empty((n, 0))
    else:
        values = checks.reals(read(table, name).values, name)
        values = values[:, None] if values.ndim == 1 else values
        if values.ndim != 2 or len(values) != n:
            raise ValueError(f"{name} must be [{n}, f] for these scores, got shape {values.shape}")
        _finite(values, name)
    if count is not None and values.shape[1] != count:
        raise ValueError(f"{name} has {values.shape[1]} columns, but {count} were fitted")
    return values


def hits_of(table: Table, n: int, k: int, name: str = "hits") -> Array:
    """Reads the ids [n, k] of the hits of lists, numbers or text."""
    values = read(table, name).values
    if values.shape != (n, k):
        raise ValueError(f"{name} must be [{n}, {k}] as the scores are, got shape {values.shape}")
    return values.astype(np.int64) if values.dtype.kind in "iu" else values.astype(object)


def rows_of(table: Table, n: int, name: str = "rows") -> NDArray[np.int64]:
    """Reads the numbers [n] of rows."""
    values = read(table, name).values
    if values.shape != (n,) or values.dtype.kind not in "iu" or (values < 0).any():
        raise ValueError(f"{name} must be numbers of rows, [{n}], got {values.dtype} {values.shape}")
    return values.astype(np.int64)


def _finite(values: Floats, name: str) -> None:
    """Raises a ValueError that names the first row with a value that is not finite, or too large to compute with."""
    bad = ~(np.abs(values) <= LARGEST)
    if bad.any():
        where = tuple(int(axis[0]) for axis in bad.nonzero())
        wanted = "it must not contain NaN, infinity or gaps"
        if np.isfinite(values[where]):
            wanted = f"sizes up to {LARGEST:g} can be computed with"
        raise ValueError(f"{name} has {values[where]} in row {where[0]}: {wanted}")
