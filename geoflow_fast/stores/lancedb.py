"""Tables of LanceDB as a vector store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks
from geoflow_fast.stores.metrics import metric_of
from geoflow_fast.stores.protocol import CheckedStore, Id, RawHits


class LanceStore(CheckedStore):
    """A table of LanceDB, embedded or remote.

    `column` holds the vectors and `key` the ids, strings or integers. The metric is that of the column's index;
    without one LanceDB compares all rows, by cosines. `where`: a condition in SQL. `refine`: how many times `k` hits of
    a compressed index are compared by their exact vectors.
    """

    def __init__(
        self,
        table: Any,
        column: str = "vector",
        key: str = "id",
        *,
        where: str | None = None,
        refine: int | None = None,
    ) -> None:
        if not all(hasattr(table, name) for name in ("search", "schema", "list_indices", "index_stats", "name")):
            raise TypeError(f"table must be a table of lancedb, got {type(table).__name__}")
        self.name = f"the LanceDB table {table.name!r}"
        self.table, self._column, self._key = table, checks.words(column, "column"), checks.words(key, "key")
        self._where = None if where is None else checks.words(where, "where")
        self._refine = None if refine is None else checks.integer(refine, "refine", 1)
        types = {field.name: field.type for field in table.schema}
        for name in (column, key):
            if name not in types:
                raise ValueError(f"{self.name} has no column {name!r}; it has {', '.join(types)}")
        self.dim = getattr(types[column], "list_size", 0)
        if not self.dim:
            raise ValueError(f"the column {column!r} of {self.name} is no list of fixed size, but {types[column]}")
        if not re.fullmatch(r"(large_)?string|u?int\d+", str(types[key])):
            raise ValueError(f"the column {key!r} of {self.name} holds no strings or integers, but {types[key]}")
        with self._asked("describe itself"):
            indexes = [each.name for each in table.list_indices() if list(each.columns) == [column]]
            self._distance = table.index_stats(indexes[0]).distance_type if indexes else "cosine"
        self.metric = metric_of("LanceDB", self._distance, self.name)

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        query = self.table.search(vectors, vector_column_name=self._column).distance_type(self._distance)
        query = query.select([self._key, "_distance"]).limit(k)
        if self._where is not None:
            query = query.where(self._where)
        if self._refine is not None:
            query = query.refine_factor(self._refine)
        answer = query.to_arrow().to_pydict()
        answers: list[tuple[list[float], list[Any]]] = [([], []) for _ in vectors]
        numbers = answer.get("query_index") or [0] * len(answer[self._key])  # a single query is not numbered
        for number, key, distance in zip(numbers, answer[self._key], answer["_distance"]):
            scores, keys = answers[number]
            scores.append(distance)
            keys.append(key)
        return answers

    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        words = [_literal(key) for key in ids if isinstance(key, (str, int))]
        if not words:
            return []
        query = self.table.search().where(f"`{self._key}` IN ({', '.join(words)})")
        answer = query.select([self._key, self._column]).limit(None).to_arrow().to_pydict()
        return list(zip(answer[self._key], answer[self._column]))


def _literal(key: str | int) -> str:
    """An id as SQL writes it."""
    return str(int(key)) if isinstance(key, int) else "'" + key.replace("'", "''") + "'"
