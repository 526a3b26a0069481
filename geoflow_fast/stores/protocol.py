"""What a vector store does, and how its answers are checked before anything is decided from them.

An adapter says how one engine searches and fetches. What is the same for all of them is here: queries and ids are
checked, scores become cosines, short lists are filled up, and an answer that cannot be right is an error.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks
from geoflow_fast.stores.metrics import Floats, Metric, metric_of

QUERIES_AT_ONCE, IDS_AT_ONCE = 128, 1000
"""Queries and ids of one request."""
MOST_HITS = 16_384
"""The longest list that can be asked for; it is the limit of Milvus, and others have none below it."""
ROUNDING = 1e-3
"""By how much a cosine may exceed 1 and a list may rise: what half precision does to either."""
NEAR_ENOUGH = 0.25
"""By how much norms may differ from 1, and scores from the cosines of their vectors, as those of compressed ones do."""
CHECKED_HITS = 8
"""Hits of the first answer whose vectors are fetched to see whether scores are what the metric says."""
Id = Hashable
RawHits = tuple[Sequence[Any], Sequence[Any]]
"""What an engine says about one query: (scores in its own metric, ids), best first, possibly fewer than k."""


class StoreError(OSError):
    """A store failed to answer."""


class Hits(NamedTuple):
    """The result lists of Q queries, k hits each."""

    scores: Floats
    """[Q, k] cosines, best first. A list with fewer than k hits repeats its last score, which `gf.Trust` counts as
    copies of one item; a query without any hit has -1, the least that a cosine can be."""
    ids: NDArray[np.object_]
    """[Q, k] ids as the store has them; None where there are fewer than k hits."""

    def labels(self, right: Iterable[Any]) -> NDArray[np.bool_]:
        """Which hits are right, [Q, k], for `gf.Trust`. `right` has for each query its right id, or a list, a tuple, an
        array or a set of right ids, which may be empty."""
        if isinstance(right, (str, bytes)) or not isinstance(right, Iterable):
            raise TypeError(f"right must have an entry for each query, got {right!r}")
        checks.unmasked(right, "right")
        known = [_as_set(each) for each in right]
        if len(known) != len(self.ids):
            raise ValueError(f"right has {len(known)} entries, but there are {len(self.ids)} queries")
        rows = [[hit is not None and hit in ids for hit in row] for row, ids in zip(self.ids.tolist(), known)]
        return np.array(rows, dtype=bool).reshape(self.ids.shape)


@runtime_checkable
class VectorStore(Protocol):
    """What the library asks of a store. Scores are cosines and vectors are unit rows, whatever the engine's metric."""

    def search(self, vectors: Any, k: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """(scores, ids), each [Q, k], best first, for the unit rows `vectors` [Q, d]."""

    def fetch(self, ids: Any, /) -> NDArray[np.float32]:
        """The unit rows [n, d] of the items with these `ids` [n], in their order."""


class CheckedStore(ABC):
    """A store whose answers are checked. An adapter sets `name`, `metric` and `dim`, and has `_hits` and `_vectors`."""

    name: str
    """What errors call the store."""
    metric: Metric
    dim: int
    """Width of the vectors."""
    _is_checked = False

    @abstractmethod
    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        """What the engine finds for each of the vectors [Q, d]."""

    @abstractmethod
    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        """(id, vector) of the ids that the engine knows, in any order."""

    @property
    def can_fetch(self) -> bool:
        """Whether vectors can be read back."""
        return True

    def search(self, vectors: Any, k: int) -> Hits:
        """The `k` items of largest cosine for each of the unit rows `vectors` [Q, d], an array or a tensor.

        Answers that cannot be right raise a ValueError that names the query: scores that are not finite or no cosines,
        ids that are missing or come twice, lists in the wrong order or longer than `k`. A store that fails raises a
        `StoreError`, and one that takes too long for its client a TimeoutError. Both are OSErrors. When a store answers
        for the first time, some of the vectors are fetched to see whether scores are what the metric says.
        """
        rows = self._unit_queries(vectors)
        k = checks.integer(k, "k", 1, MOST_HITS)
        scores, ids = np.empty((len(rows), k)), np.full((len(rows), k), None, dtype=object)
        for first in range(0, len(rows), QUERIES_AT_ONCE):
            part = rows[first : first + QUERIES_AT_ONCE]
            with self._asked("search"):
                answers = list(self._hits(part, k))
            if len(answers) != len(part):
                raise ValueError(f"{self.name} answered {len(answers)} of {len(part)} queries")
            for query, answer in enumerate(answers, start=first):
                cosines, keys = checked_list(self.name, self.metric, answer, query, k)
                scores[query] = filled(cosines, k)
                ids[query, : len(keys)] = keys
        hits = Hits(scores, ids)
        self._check_first_answer(rows, hits)
        return hits

    def fetch(self, ids: Any) -> NDArray[np.float32]:
        """The vectors [n, d] of the items with these `ids`, in their order, scaled to unit norm. A ValueError names an
        id that the store does not have, or whose vector is no direction."""
        wanted = listed_ids(ids)
        known = self._fetched(list(dict.fromkeys(wanted)))
        missing = [each for each in wanted if each not in known]
        if missing:
            raise ValueError(f"{self.name} has no vector with the id {missing[0]!r} ({len(missing)} of {len(wanted)})")
        return np.array([known[each] for each in wanted], dtype=np.float32).reshape(len(wanted), self.dim)

    def _fetched(self, ids: list[Any]) -> dict[Id, NDArray[np.float32]]:
        """The checked unit vectors by id, of those ids that the store knows."""
        known: dict[Id, NDArray[np.float32]] = {}
        for first in range(0, len(ids), IDS_AT_ONCE):
            with self._asked("fetch vectors"):
                answer = list(self._vectors(ids[first : first + IDS_AT_ONCE]))
            for key, vector in answer:
                known[key] = self.unit_vector(key, vector)
        return known

    def unit_vector(self, key: Id, vector: Any) -> NDArray[np.float32]:
        """The vector of one item, of norm one. Only cosines do not ask which norm it had."""
        try:
            row = np.asarray(vector, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name} has no vector of numbers at the id {key!r}: {vector!r}") from error
        if row.shape != (self.dim,):
            raise ValueError(f"{self.name} has a vector of shape {list(row.shape)} at {key!r}, not [{self.dim}]")
        norm = float(np.linalg.norm(row))
        if not np.isfinite(norm) or norm == 0:
            raise ValueError(f"the vector with the id {key!r} in {self.name} has norm {norm:g} and no direction")
        if self.metric.needs_unit_rows and abs(norm - 1) > NEAR_ENOUGH:
            raise ValueError(
                f"the vector with the id {key!r} in {self.name} has norm {norm:.4g}. Its metric, {self.metric.name}, "
                "gives cosines for unit rows only: store normalised vectors, or use a metric for cosines"
            )
        return (row / norm).astype(np.float32)

    def _unit_queries(self, vectors: Any) -> NDArray[np.float32]:
        """Queries [Q, d] of unit norm. Where the engine computes cosines their norm plays no part, but a norm far from
        one often means the wrong vectors, so that it is an error everywhere."""
        rows = checks.array(vectors, "vectors")
        if rows.dtype.kind != "f" or rows.ndim != 2:
            raise ValueError(f"vectors must be floating-point numbers [Q, d], got {rows.dtype} {list(rows.shape)}")
        if rows.shape[1] != self.dim:
            raise ValueError(f"vectors have width {rows.shape[1]}, but those of {self.name} have {self.dim}")
        rows = rows.astype(np.float64)
        norm = np.linalg.norm(rows, axis=1, keepdims=True)
        bad = ~(np.abs(norm - 1) <= 8 * ROUNDING)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"vectors row {row} has norm {norm[row, 0]:.6g}, not 1: divide it by its norm")
        return np.ascontiguousarray(rows / norm, dtype=np.float32)

    def _check_first_answer(self, rows: NDArray[np.float32], hits: Hits) -> None:
        """Raises a ValueError unless the scores of the first hits are about the cosines of their vectors."""
        if self._is_checked or not len(hits.ids):
            return
        if not self.can_fetch:
            self._is_checked = True
            return
        ids = [key for key in hits.ids[0, :CHECKED_HITS].tolist() if key is not None]
        if not ids:
            return
        cosines = self.fetch(ids).astype(np.float64) @ rows[0].astype(np.float64)
        off = np.abs(cosines - hits.scores[0, : len(ids)])
        middle = int(np.argsort(off)[len(off) // 2])  # a compressed index may be far off for one of them
        if off[middle] > NEAR_ENOUGH:
            raise ValueError(
                f"{self.name} gives the id {ids[middle]!r} the cosine {hits.scores[0, middle]:.3f} by its scores, but "
                f"{cosines[middle]:.3f} by its vector: its metric is not {self.metric.name}, or it searches coarsely"
            )
        self._is_checked = True

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        """Errors of the engine become a TimeoutError or a StoreError that names the store."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            if _is_timeout(error):
                raise TimeoutError(f"{self.name} took too long to {what}: {reason}") from error
            raise StoreError(f"{self.name} failed to {what}: {reason}") from error


class CustomStore(CheckedStore):
    """A store of your own, from two functions.

    `search(vectors, k)`: scores and ids, each a list for each of the unit rows `vectors` [Q, dim] float32, best first,
    possibly with fewer than `k` hits. `fetch(ids)`: a mapping from ids to vectors, or None if they cannot be read back;
    scores are then taken at their word, and a `StoreReranker` cannot use the store. `metric` says what the scores are:
    "cosine" or "ip", similarities, or "l2", Euclidean distances that are not squared.
    """

    def __init__(
        self,
        search: Callable[[NDArray[np.float32], int], tuple[Any, Any]],
        fetch: Callable[[list[Any]], Mapping[Any, Any]] | None,
        dim: int,
        metric: str = "cosine",
        *,
        name: str = "the store",
    ) -> None:
        for which, given in (("search", search), ("fetch", fetch)):
            if not callable(given) and not (which == "fetch" and given is None):
                raise TypeError(f"{which} must be a function, got {type(given).__name__}")
        self.name, self.dim = checks.words(name, "name"), checks.integer(dim, "dim", 1)
        self.metric = metric_of("custom", metric, self.name)
        self._search_function, self._fetch_function = search, fetch

    @property
    def can_fetch(self) -> bool:
        """Whether there is a function that reads vectors back."""
        return self._fetch_function is not None

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        scores, ids = self._search_function(vectors, k)
        if len(scores) != len(ids):
            raise ValueError(f"{len(scores)} lists of scores for {len(ids)} lists of ids")
        return list(zip(scores, ids))

    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        if self._fetch_function is None:
            raise ValueError("it was given no function that fetches vectors")
        return list(self._fetch_function(ids).items())


def _plain(key: Any) -> Any:
    """An id as a value of Python."""
    return key.item() if isinstance(key, np.generic) else key


def checked_list(name: str, metric: Metric, answer: RawHits, query: int, k: int) -> tuple[Floats, list[Any]]:
    """The cosines and ids that the store `name` found for one query, best first; an answer that cannot be right raises
    a ValueError."""
    try:
        raw, keys = checks.array(list(answer[0]), "scores").astype(np.float64), [_plain(each) for each in answer[1]]
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{name} gave no list of scores and ids for query {query}: {error}") from error
    where = f"{name} gave query {query}"
    if raw.shape != (len(keys),):
        raise ValueError(f"{where} {raw.size} scores for {len(keys)} ids")
    if len(keys) > k:
        raise ValueError(f"{where} {len(keys)} hits, more than the {k} asked for")
    _check_ids(keys, where)
    cosines = metric.to_cosine(raw)
    wrong = ~(np.abs(cosines) <= 1 + ROUNDING)
    if wrong.any():
        hit = int(wrong.argmax())
        rows = " of unit rows" if metric.needs_unit_rows else ""
        raise ValueError(f"{where} the score {raw[hit]:g} for the id {keys[hit]!r}, which is no {metric.name}{rows}")
    cosines = cosines.clip(-1, 1)
    rises = np.diff(cosines) > ROUNDING
    if rises.any():
        hit = int(rises.argmax())
        raise ValueError(
            f"{where} the cosine {cosines[hit + 1]:.4g} after {cosines[hit]:.4g}: the best hit must come first, so its "
            f"scores are no {metric.name}, or they are in another order"
        )
    order = np.argsort(-cosines, kind="stable")
    return cosines[order], [keys[hit] for hit in order]


def filled(scores: Floats, k: int) -> Floats:
    """A list of k scores, which repeats its last one."""
    last = scores[-1] if len(scores) else -1.0
    return np.concatenate((scores, np.full(k - len(scores), last)))


def listed_ids(ids: Any) -> list[Any]:
    """Ids [n] as a list of values of Python."""
    checks.unmasked(ids, "ids")
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, np.ndarray)):
        raise TypeError(f"ids must be a list or an array of ids, got {type(ids).__name__}")
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise ValueError(f"ids must be [n], got shape {ids.shape}")
    listed = [_plain(each) for each in ids]
    for row, key in enumerate(listed):
        if key is None or not isinstance(key, Hashable):
            raise ValueError(f"ids row {row} is no id: {key!r}")
    return listed


def _as_set(right: Any) -> set[Any]:
    """The right ids of one query."""
    if isinstance(right, (list, tuple, set, frozenset, np.ndarray)):
        return {_plain(each) for each in right}
    return {_plain(right)}


def _check_ids(keys: list[Any], where: str) -> None:
    """Raises a ValueError if an id is missing or comes twice."""
    seen: set[Id] = set()
    for rank, key in enumerate(keys):
        if key is None or not isinstance(key, Hashable):
            raise ValueError(f"{where} a hit without an id, number {rank}: {key!r}")
        if key in seen:
            raise ValueError(f"{where} the id {key!r} twice")
        seen.add(key)


def _is_timeout(error: BaseException | None) -> bool:
    """Whether an engine gave up waiting. Each client has an error of its own for that; all of them say so."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # pymilvus raises errors from themselves
        said = f"{type(error).__name__} {error}"
        if isinstance(error, TimeoutError) or re.search(r"time[d]?[ _-]?out|deadline", said, re.IGNORECASE):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False
