"""Which answers of a vector store to trust: `python examples/store.py` with faiss, lancedb, qdrant, chroma, milvus or
pgvector.

LanceDB and Milvus write into the working folder, Qdrant and Chroma into memory; pgvector takes PGHOST and the like.
"""

import sys
from collections.abc import Callable

from torch import Tensor

import geoflow_fast as gf


def faiss(items: Tensor) -> gf.stores.FaissStore:
    import faiss

    index = faiss.IndexFlatIP(items.shape[1])
    index.add(items.numpy())
    return gf.stores.FaissStore(index)


def lancedb(items: Tensor) -> gf.stores.LanceStore:
    import lancedb

    rows = [{"id": k, "vector": row} for k, row in enumerate(items.numpy())]
    return gf.stores.LanceStore(lancedb.connect("pictures.lance").create_table("pictures", rows, mode="overwrite"))


def qdrant(items: Tensor) -> gf.stores.QdrantStore:
    from qdrant_client import QdrantClient, models

    client = QdrantClient(":memory:")
    params = models.VectorParams(size=items.shape[1], distance=models.Distance.COSINE)
    client.create_collection("pictures", vectors_config=params)
    client.upload_collection("pictures", vectors=items.numpy(), ids=range(len(items)))
    return gf.stores.QdrantStore(client, "pictures")


def chroma(items: Tensor) -> gf.stores.ChromaStore:
    import chromadb

    collection = chromadb.EphemeralClient().create_collection("pictures", configuration={"hnsw": {"space": "cosine"}})
    collection.add(ids=[str(k) for k in range(len(items))], embeddings=items.numpy())
    return gf.stores.ChromaStore(collection)


def milvus(items: Tensor) -> gf.stores.MilvusStore:
    from pymilvus import MilvusClient

    client = MilvusClient("pictures.db")
    client.create_collection("pictures", dimension=items.shape[1], metric_type="COSINE")
    client.insert("pictures", [{"id": k, "vector": row} for k, row in enumerate(items.tolist())])
    return gf.stores.MilvusStore(client, "pictures")


def pgvector(items: Tensor) -> gf.stores.PgvectorStore:
    import psycopg

    connection = psycopg.connect(autocommit=True)
    connection.execute(f"CREATE TEMPORARY TABLE pictures (id int, embedding vector({items.shape[1]}))")
    connection.cursor().executemany("INSERT INTO pictures VALUES (%s, %s)", enumerate(map(str, items.tolist())))
    return gf.stores.PgvectorStore(connection, "pictures")


OPENERS: dict[str, Callable[[Tensor], gf.stores.VectorStore]] = {
    opener.__name__: opener for opener in (faiss, lancedb, qdrant, chroma, milvus, pgvector)
}

if __name__ == "__main__":
    task = gf.worlds.ConceptWorld().sample_search(3000, 3000, "t2i")  # yours: queries, and which item is right for some
    hits = OPENERS[sys.argv[1]](task.gallery).search(task.queries, 50)  # cosines and ids
    labels = hits.labels([{item, str(item)} for item in task.item.tolist()])  # the ids of Chroma are strings
    trust = gf.Trust().fit(hits.scores[:200], labels[:200])
    rule = trust.certify(hits.scores[200:2980], labels[200:2980], max_error=0.10, no_match_share=0.1)
    for key, sure, p in zip(hits.ids[2980:, 0], rule(hits.scores[2980:]), trust.p_no_match(hits.scores[2980:], 0.1)):
        print(key if sure else "nothing here", f"(the probability that nothing is right is {p:.2f})")
