"""Tables of PostgreSQL with a column of pgvector as a vector store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks
from geoflow_fast.stores.metrics import metric_of
from geoflow_fast.stores.protocol import CheckedStore, Id, RawHits

OPERATORS = {"cosine": "<=>", "ip": "<#>", "l2": "<->"}
COLUMN = """
SELECT t.typname, a.atttypmod, array_remove(array_agg(o.opcname), NULL)
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indkey[0] = a.attnum AND i.indnatts = 1
LEFT JOIN pg_opclass o ON o.oid = i.indclass[0]
WHERE a.attrelid = %s::regclass AND a.attname = %s AND NOT a.attisdropped
GROUP BY t.typname, a.atttypmod
"""
"""The type of a column, its width, and what it is indexed for."""
SEARCH = """
WITH asked AS MATERIALIZED (
    SELECT words::{type} AS vector, number FROM unnest(%s::text[]) WITH ORDINALITY AS given(words, number)
)
SELECT asked.number, hit.key, hit.distance
FROM asked
CROSS JOIN LATERAL (
    SELECT {key} AS key, {column} {operator} asked.vector AS distance FROM {table} {where}
    ORDER BY {column} {operator} asked.vector LIMIT %s
) AS hit
ORDER BY asked.number, hit.distance
"""
FETCH = "SELECT {key}, {column}::real[] FROM {table} WHERE {key} = ANY(%s)"


class PgvectorStore(CheckedStore):
    """A table with a column of vectors (`vector` or `halfvec`) and one of ids.

    `connection`: of psycopg 3, whose `statement_timeout` holds; `table`: its name, `schema.table` where needed.
    `metric`: "cosine", "ip" or "l2"; by default that of an index of the column, and cosines without one. `where`: a
    condition in SQL, which is part of the query as it stands: never one from strangers. An approximate index finds at
    most `hnsw.ef_search` hits, 40 unless you set more.
    """

    def __init__(
        self,
        connection: Any,
        table: str,
        column: str = "embedding",
        key: str = "id",
        *,
        metric: str | None = None,
        where: str | None = None,
    ) -> None:
        if not all(hasattr(connection, name) for name in ("cursor", "transaction")):
            raise TypeError(f"connection must be one of psycopg 3, got {type(connection).__name__}")
        names = {"table": table, "column": column, "key": key}
        for what, word in names.items():
            if not checks.words(word, what):
                raise ValueError(f"{what} must be a name, got {word!r}")
        from psycopg import sql

        self.connection, self.name = connection, f"the table {table!r} of PostgreSQL"
        parts: dict[str, Any] = {"table": sql.Identifier(*table.split("."))}
        parts |= {what: sql.Identifier(names[what]) for what in ("column", "key")}
        kind, width, indexed = self._described(parts["table"].as_string(connection), column)
        if metric is None:
            metric = next((name for name in OPERATORS if any(f"_{name}_" in each for each in indexed)), None)
            metric = metric or ("L1" if any("_l1_" in each for each in indexed) else "cosine")
        self.metric = metric_of("pgvector", metric, self.name)
        condition = sql.SQL("") if where is None else sql.SQL("WHERE {}").format(sql.SQL(checks.words(where, "where")))
        parts |= {"operator": sql.SQL(OPERATORS[metric]), "type": sql.SQL(kind), "where": condition}
        self._search, self._fetch = sql.SQL(SEARCH).format(**parts), sql.SQL(FETCH).format(**parts)
        self.dim = width if width > 0 else self._first_width(parts)

    def _described(self, table: str, column: str) -> tuple[str, int, list[str]]:
        """Type and width of the column, and the operators that it is indexed for."""
        with self._asked("describe itself"):
            rows = self._rows(COLUMN, (table, column))
        if not rows:
            raise ValueError(f"{self.name} has no column {column!r}")
        kind, width, indexed = rows[0]
        if kind not in ("vector", "halfvec"):
            raise ValueError(f"the column {column!r} of {self.name} is of type {kind}, not vector or halfvec")
        return kind, width, indexed

    def _first_width(self, parts: dict[str, Any]) -> int:
        from psycopg import sql

        query = sql.SQL("SELECT vector_dims({column}) FROM {table} WHERE {column} IS NOT NULL LIMIT 1").format(**parts)
        with self._asked("describe itself"):
            rows = self._rows(query, ())
        if not rows:
            raise ValueError(f"{self.name} is empty, and its column does not say how wide vectors are")
        return int(rows[0][0])

    def _rows(self, query: Any, values: tuple[Any, ...]) -> list[Any]:
        # A failed statement is rolled back, so that the caller can go on with the connection.
        with self.connection.transaction(), self.connection.cursor() as cursor:
            return list(cursor.execute(query, values).fetchall())

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        texts = [f"[{','.join(map(repr, vector.tolist()))}]" for vector in vectors]
        answers: list[tuple[list[float], list[Any]]] = [([], []) for _ in texts]
        for number, key, distance in self._rows(self._search, (texts, k)):
            scores, keys = answers[number - 1]
            scores.append(distance)
            keys.append(key)
        return answers

    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        return list(self._rows(self._fetch, (ids,)))
