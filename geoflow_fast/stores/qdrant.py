"""Qdrant collections as a vector store."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks
from geoflow_fast.stores.metrics import metric_of
from geoflow_fast.stores.protocol import CheckedStore, Id, RawHits


class QdrantStore(CheckedStore):
    """A collection of Qdrant, on a server or in the client's local mode.

    `client`: a `qdrant_client.QdrantClient`, whose time-out holds. `using`: the name of the vectors that are searched,
    if points have several. `where`: a `models.Filter`. `params`: `models.SearchParams`.
    """

    def __init__(
        self, client: Any, collection: str, *, using: str | None = None, where: Any = None, params: Any = None
    ) -> None:
        if not all(hasattr(client, name) for name in ("query_batch_points", "retrieve", "get_collection")):
            raise TypeError(f"client must be a qdrant_client.QdrantClient, got {type(client).__name__}")
        self.collection = checks.words(collection, "collection")
        self.name = f"the Qdrant collection {collection!r}"
        self.client, self._using, self._where, self._params = client, using, where, params
        with self._asked("describe itself"):
            vectors = client.get_collection(collection).config.params.vectors
        if isinstance(vectors, Mapping):
            if using not in vectors:
                named = ", ".join(sorted(vectors)) or "none"
                raise ValueError(f"using={using!r} names no vectors of {self.name}, which has {named}")
            vectors = vectors[using]
        elif using is not None:
            raise ValueError(f"using={using!r} names no vectors of {self.name}, whose vectors have no names")
        if vectors.multivector_config is not None:
            raise ValueError(f"{self.name} has several vectors for each point, whose scores are no cosines")
        self.metric = metric_of("Qdrant", vectors.distance.value, self.name)
        self.dim = int(vectors.size)

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        from qdrant_client import models

        requests = [
            models.QueryRequest(
                query=vector.tolist(), using=self._using, filter=self._where, params=self._params, limit=k
            )
            for vector in vectors
        ]
        for answer in self.client.query_batch_points(self.collection, requests=requests):
            yield [point.score for point in answer.points], [point.id for point in answer.points]

    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        given = {str(key) if isinstance(key, uuid.UUID) else key: key for key in ids}
        wanted = True if self._using is None else [self._using]
        for point in self.client.retrieve(self.collection, ids=list(given), with_payload=False, with_vectors=wanted):
            yield given[point.id], point.vector if self._using is None else point.vector[self._using]
