"""Milvus collections as a vector store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks
from geoflow_fast.stores.metrics import metric_of
from geoflow_fast.stores.protocol import CheckedStore, Id, RawHits

FLOAT_VECTOR = "FLOAT_VECTOR"


class MilvusStore(CheckedStore):
    """A collection of Milvus, on a server or in a file of Milvus Lite.

    `client`: a `pymilvus.MilvusClient`, whose time-out holds. `field`: the field of vectors that is searched, if there
    are several. `where`: a filter in Milvus' own language. `params`: `search_params`, such as `{"params": {"ef": 64}}`.
    """

    def __init__(
        self, client: Any, collection: str, *, field: str | None = None, where: str = "", params: Any = None
    ) -> None:
        if not all(hasattr(client, name) for name in ("describe_collection", "describe_index", "search", "get")):
            raise TypeError(f"client must be a pymilvus.MilvusClient, got {type(client).__name__}")
        self.collection = checks.words(collection, "collection")
        self.name = f"the Milvus collection {collection!r}"
        self.client, self._params, self._where = client, params, checks.words(where, "where")
        with self._asked("describe itself"):
            fields = client.describe_collection(collection)["fields"]
            indexes = [client.describe_index(collection, name) for name in client.list_indexes(collection)]
        vectors = {each["name"]: each for each in fields if each["type"].name == FLOAT_VECTOR}
        if field is None and len(vectors) == 1:
            field = next(iter(vectors))
        if field not in vectors:
            named = ", ".join(sorted(vectors)) or "none"
            raise ValueError(f"field={field!r} names no float vectors of {self.name}, which has {named}")
        metric = next((index["metric_type"] for index in indexes if index and index["field_name"] == field), None)
        if metric is None:
            raise ValueError(f"{self.name} has no index of {field!r}, which would say what its metric is: create one")
        self.metric = metric_of("Milvus", metric, self.name)
        self.dim, self._field = int(vectors[field]["params"]["dim"]), field
        primary = next(each for each in fields if each.get("is_primary"))
        self._key, self._has_text_ids = primary["name"], primary["type"].name == "VARCHAR"

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        answers = self.client.search(
            self.collection,
            data=vectors.tolist(),
            anns_field=self._field,
            limit=k,
            filter=self._where,
            search_params=self._params,
            output_fields=[self._key],
        )
        for hits in answers:
            yield [hit["distance"] for hit in hits], [hit[self._key] for hit in hits]

    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        known = [key for key in ids if isinstance(key, str if self._has_text_ids else int)]
        if not known:
            return
        for entity in self.client.get(self.collection, ids=known, output_fields=[self._field]):
            yield entity[self._key], entity[self._field]
