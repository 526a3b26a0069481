"""Chroma collections as a vector store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.stores.metrics import metric_of
from geoflow_fast.stores.protocol import CheckedStore, Id, RawHits


class ChromaStore(CheckedStore):
    """A collection of Chroma, of any of its clients. `where` is a filter of metadata, as `collection.query` takes it.

    Chroma's own default is the Euclidean distance; it gives cosines as well, if vectors are stored as unit rows.
    """

    def __init__(self, collection: Any, *, where: Mapping[str, Any] | None = None) -> None:
        if not all(hasattr(collection, name) for name in ("query", "get", "count", "configuration")):
            raise TypeError(f"collection must be a chromadb Collection, got {type(collection).__name__}")
        self.name = f"the Chroma collection {collection.name!r}"
        self.collection, self._where = collection, where
        with self._asked("describe itself"):
            settings = collection.configuration
            first = collection.get(limit=1, include=["embeddings"])["embeddings"]
        index = settings.get("hnsw") or settings.get("spann") or {}
        self.metric = metric_of("Chroma", index.get("space"), self.name)
        if not len(first):
            raise ValueError(f"{self.name} is empty: add vectors first, whose width decides which queries fit")
        self.dim = len(first[0])

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        hits = min(k, max(1, self.collection.count()))
        answer = self.collection.query(
            query_embeddings=vectors, n_results=hits, where=self._where, include=["distances"]
        )
        return list(zip(answer["distances"], answer["ids"]))

    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        known = [key for key in ids if isinstance(key, str)]  # all that Chroma has
        if not known:
            return []
        answer = self.collection.get(ids=known, include=["embeddings"])
        return list(zip(answer["ids"], answer["embeddings"]))
