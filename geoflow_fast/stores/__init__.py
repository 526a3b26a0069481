"""Vector stores behind one protocol: `search(vectors, k)` gives cosines and ids, `fetch(ids)` gives unit rows.

No engine is imported with this module, and torch only by the re-ranker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from geoflow_fast.stores.chroma import ChromaStore
from geoflow_fast.stores.faiss import FaissStore
from geoflow_fast.stores.lancedb import LanceStore
from geoflow_fast.stores.milvus import MilvusStore
from geoflow_fast.stores.pgvector import PgvectorStore
from geoflow_fast.stores.protocol import CustomStore, Hits, StoreError, VectorStore
from geoflow_fast.stores.qdrant import QdrantStore

if TYPE_CHECKING:
    from geoflow_fast.stores.lance_reranker import LanceReranker
    from geoflow_fast.stores.rerank import RerankedHits, StoreReranker

_LATER = {"LanceReranker": "lance_reranker", "RerankedHits": "rerank", "StoreReranker": "rerank"}
"""The modules of names that need torch or an engine, which are imported when they are first used."""

__all__ = [
    "ChromaStore",
    "CustomStore",
    "FaissStore",
    "Hits",
    "LanceReranker",
    "LanceStore",
    "MilvusStore",
    "PgvectorStore",
    "QdrantStore",
    "RerankedHits",
    "StoreError",
    "StoreReranker",
    "VectorStore",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
