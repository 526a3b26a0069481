"""Every engine against plain numpy: the same hits, cosines and vectors, whatever its metric and its ids."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch

from geoflow_fast import stores
from tests.stores.engines import METRICS, Engines, require, unit_rows

ROWS, DIM = 300, 8
CASES = [(engine, metric) for engine, metrics in METRICS.items() for metric in metrics]
WHERE: dict[str, Any] = {
    "lancedb": lambda: "kind = 'odd'",
    "qdrant": lambda: _qdrant_filter(),
    "chroma": lambda: {"kind": "odd"},
    "milvus": lambda: "kind == 'odd'",
    "pgvector": lambda: "kind = 'odd'",
}
"""The filter by which each engine keeps the odd rows."""


def _qdrant_filter() -> Any:
    from qdrant_client import models

    return models.Filter(must=[models.FieldCondition(key="kind", match=models.MatchValue(value="odd"))])


def exact(rows: Any, queries: Any, k: int) -> tuple[Any, Any]:
    """The k largest cosines of each query and the numbers of their rows."""
    cosines = queries.astype(np.float64) @ rows.astype(np.float64).T
    order = np.argsort(-cosines, axis=1)[:, :k]
    return np.take_along_axis(cosines, order, 1), order


@pytest.mark.parametrize(("engine", "metric"), CASES)
def test_hits_are_those_of_exact_search(engines, engine, metric):
    rows, queries = unit_rows(ROWS, DIM), unit_rows(7, DIM, seed=1)
    store, ids = engines.open(engine, metric, rows), np.array(Engines.ids(engine, ROWS), dtype=object)
    assert isinstance(store, stores.VectorStore)
    scores, order = exact(rows, queries, 20)
    hits = store.search(queries, 20)
    assert np.abs(hits.scores - scores).max() < 2e-6
    assert hits.ids.tolist() == ids[order].tolist()
    of_tensor, one = store.search(torch.from_numpy(queries).double(), 20), store.search(queries[2:3], 1)
    assert of_tensor.ids.tolist() == hits.ids.tolist()
    assert one.ids.tolist() == hits.ids[2:3, :1].tolist()
    assert store.search(queries[:0], 5).ids.shape == (0, 5)


@pytest.mark.parametrize(("engine", "metric"), CASES)
def test_vectors_come_back_in_the_order_of_the_ids(engines, engine, metric):
    rows = unit_rows(ROWS, DIM)
    store, ids = engines.open(engine, metric, rows), Engines.ids(engine, ROWS)
    wanted = np.random.default_rng(0).integers(0, ROWS, 129)  # some of them twice
    fetched = store.fetch([ids[number] for number in wanted])
    assert fetched.dtype == np.float32
    assert np.abs(fetched - rows[wanted]).max() < 1e-6
    assert store.fetch([]).shape == (0, DIM)
    unknown = "no such" if isinstance(ids[0], str) else 10**9
    with pytest.raises(ValueError, match=rf"no vector with the id {unknown!r} \(1 of 3\)"):
        store.fetch([ids[0], unknown, ids[1]])


@pytest.mark.parametrize("engine", METRICS)
def test_more_hits_than_items(engines, engine):
    rows, queries = unit_rows(7, DIM), unit_rows(3, DIM, seed=1)
    hits = engines.open(engine, METRICS[engine][-1], rows).search(queries, 50)
    assert hits.scores.shape == hits.ids.shape == (3, 50)
    assert (hits.scores[:, 7:] == hits.scores[:, 6:7]).all()
    assert all(len(set(row[:7])) == 7 and set(row[7:]) == {None} for row in hits.ids.tolist())


@pytest.mark.parametrize("engine", WHERE)
def test_a_filter_narrows_the_search(engines, engine):
    require(engine)
    rows, queries = unit_rows(40, DIM), unit_rows(3, DIM, seed=1)
    store, ids = engines.open(engine, "cosine", rows, where=WHERE[engine]()), Engines.ids(engine, 40)
    _, order = exact(rows[1::2], queries, 20)
    hits = store.search(queries, 30)
    assert hits.ids[:, :20].tolist() == np.array(ids, dtype=object)[1::2][order].tolist()
    assert all(each is None for each in hits.ids[:, 20:].ravel())


@pytest.mark.parametrize("engine", [engine for engine, metrics in METRICS.items() if "cosine" in metrics])
def test_cosines_do_not_ask_for_unit_rows(engines, engine):
    rows, queries = unit_rows(40, DIM), unit_rows(3, DIM, seed=1)
    store = engines.open(engine, "cosine", rows * np.linspace(0.2, 9, 40, dtype=np.float32)[:, None])
    scores, order = exact(rows, queries, 10)
    ids = np.array(Engines.ids(engine, 40), dtype=object)
    hits = store.search(queries, 10)
    assert hits.ids.tolist() == ids[order].tolist()
    assert np.abs(hits.scores - scores).max() < 2e-6
    assert np.abs(store.fetch(ids[order[0]]) - rows[order[0]]).max() < 1e-6


@pytest.mark.parametrize(("engine", "metric"), [case for case in CASES if case[1] != "cosine"])
@pytest.mark.parametrize("length", [0.6, 3.0])
def test_other_metrics_refuse_rows_that_are_no_unit_rows(engines, engine, metric, length):
    store = engines.open(engine, metric, length * unit_rows(40, DIM))
    with pytest.raises(ValueError, match="unit rows"):
        store.search(unit_rows(3, DIM, seed=1), 10)


@pytest.mark.parametrize("engine", METRICS)
def test_queries_of_another_width_are_refused(engines, engine):
    store = engines.open(engine, METRICS[engine][0], unit_rows(9, DIM))
    with pytest.raises(ValueError, match=f"width {DIM + 1}, but those of .* have {DIM}"):
        store.search(unit_rows(2, DIM + 1), 3)


def test_metrics_without_cosines_are_refused():
    import faiss

    with pytest.raises(ValueError, match="no cosine follows"):
        stores.FaissStore(faiss.IndexFlat(DIM, faiss.METRIC_L1))


def test_qdrant_collections_without_cosines():
    require("qdrant")
    from qdrant_client import QdrantClient, models

    client = QdrantClient(":memory:")
    client.create_collection("l1", vectors_config=models.VectorParams(size=DIM, distance=models.Distance.MANHATTAN))
    with pytest.raises(ValueError, match=r"'l1' has the metric 'Manhattan', .* one of Cosine, Dot, Euclid"):
        stores.QdrantStore(client, "l1")
    several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    plain = models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    late = models.VectorParams(size=DIM, distance=models.Distance.COSINE, multivector_config=several)
    client.create_collection("named", vectors_config={"image": plain, "words": late})
    with pytest.raises(ValueError, match=r"using=None names no vectors of .* image, words"):
        stores.QdrantStore(client, "named")
    with pytest.raises(ValueError, match="several vectors for each point"):
        stores.QdrantStore(client, "named", using="words")
    rows, keys = unit_rows(9, DIM), [uuid.UUID(int=number) for number in range(9)]
    points = [models.PointStruct(id=str(key), vector={"image": row.tolist()}) for key, row in zip(keys, rows)]
    client.upsert("named", points=points)
    store = stores.QdrantStore(client, "named", using="image")
    assert store.search(rows[4:5], 1).ids.tolist() == [[str(keys[4])]]
    assert np.abs(store.fetch([keys[5], keys[0]]) - rows[[5, 0]]).max() < 1e-6
    with pytest.raises(stores.StoreError, match="'absent' failed to describe itself"):
        stores.QdrantStore(client, "absent")


def test_faiss_indexes_that_compress_take_rows_and_ids():
    import faiss

    rows, names = unit_rows(600, DIM), [uuid.UUID(int=number) for number in range(600)]
    index = faiss.index_factory(DIM, "IVF4,PQ4x4", faiss.METRIC_INNER_PRODUCT)
    index.train(rows)
    index.add(rows)
    store = stores.FaissStore(index, params=faiss.SearchParametersIVF(nprobe=4))
    assert not store.can_fetch
    assert store.search(rows[:5], 10).scores[:, 0].min() > 0.7
    with pytest.raises(stores.StoreError, match=r"make_direct_map\(\) first, or pass rows="):
        store.fetch([0])
    with pytest.raises(ValueError, match="cannot be fetched"):
        stores.StoreReranker(store)
    named = stores.FaissStore(index, ids=names, rows=rows)
    assert np.abs(named.fetch(names[3:5]) - rows[3:5]).max() < 1e-6
    assert set(named.search(rows[:1], 3).ids[0]) <= set(names)
    for wrong, error in (({"ids": names[1:]}, "599 entries"), ({"rows": rows[1:]}, r"rows must be \[600, 8\]")):
        with pytest.raises(ValueError, match=error):
            stores.FaissStore(index, **wrong)
    with pytest.raises(ValueError, match="the same id for two rows"):
        stores.FaissStore(index, ids=[names[0]] * 600)


def test_lance_needs_ids_and_vectors_of_one_width(engines):
    store = engines.open("lancedb", "cosine", unit_rows(9, DIM))
    for settings, error in (
        ({"column": "absent"}, "no column 'absent'; it has id, vector, kind"),
        ({"column": "kind"}, "no list of fixed size"),
        ({"key": "vector"}, "no strings or integers"),
    ):
        with pytest.raises(ValueError, match=error):
            stores.LanceStore(store.table, **settings)


def test_two_rows_with_one_id_are_noticed(engines):
    store = engines.open("lancedb", "cosine", unit_rows(9, DIM))
    store.table.update(values={"id": "same"})
    with pytest.raises(ValueError, match="gave query 0 the id 'same' twice"):
        store.search(unit_rows(2, DIM), 3)


def test_chroma_collections_without_vectors_are_refused(tmp_path):
    require("chroma")
    import chromadb

    client = chromadb.PersistentClient(tmp_path, chromadb.Settings(anonymized_telemetry=False))
    with pytest.raises(ValueError, match="'empty' is empty"):
        stores.ChromaStore(client.create_collection("empty", embedding_function=None))


def test_milvus_collections_without_cosines(tmp_path):
    require("milvus")
    from pymilvus import DataType, MilvusClient

    client = MilvusClient(str(tmp_path / "milvus.db"))
    schema = client.create_schema()
    schema.add_field("name", DataType.VARCHAR, max_length=20, is_primary=True)
    for field in ("image", "words"):
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=DIM)
    indexes = client.prepare_index_params()
    indexes.add_index("image", metric_type="COSINE", index_type="AUTOINDEX")
    client.create_collection("named", schema=schema, index_params=indexes)
    rows = unit_rows(9, DIM)
    client.insert("named", [{"name": f"n{k}", "image": row, "words": row} for k, row in enumerate(rows.tolist())])
    with pytest.raises(ValueError, match=r"field=None names no float vectors of .* image, words"):
        stores.MilvusStore(client, "named")
    with pytest.raises(ValueError, match="no index of 'words'"):
        stores.MilvusStore(client, "named", field="words")
    with pytest.raises(stores.StoreError, match="'absent' failed to describe itself"):
        stores.MilvusStore(client, "absent")
    store = stores.MilvusStore(client, "named", field="image")
    client.load_collection("named")
    assert store.search(rows[4:5], 1).ids.tolist() == [["n4"]]
    assert np.abs(store.fetch(["n5", "n0"]) - rows[[5, 0]]).max() < 1e-6
    client.close()


def test_pgvector_takes_its_metric_from_the_index(engines):
    store = engines.open("pgvector", "cosine", unit_rows(50, DIM))
    for operators, metric in (("vector_l2_ops", "Euclidean distance"), ("vector_ip_ops", "negative inner product")):
        store.connection.execute(
            f"DROP INDEX IF EXISTS near; CREATE INDEX near ON items1 USING hnsw (embedding {operators})"
        )
        assert stores.PgvectorStore(store.connection, "items1").metric.name == metric
    store.connection.execute("DROP INDEX near; CREATE INDEX near ON items1 USING hnsw (embedding vector_l1_ops)")
    with pytest.raises(ValueError, match="'items1' of PostgreSQL has the metric 'L1'"):
        stores.PgvectorStore(store.connection, "items1")
    with pytest.raises(ValueError, match="no column 'absent'"):
        stores.PgvectorStore(store.connection, "items1", "absent")
    with pytest.raises(ValueError, match="of type text, not vector"):
        stores.PgvectorStore(store.connection, "items1", "kind")
    with pytest.raises(stores.StoreError, match="failed to describe itself"):
        stores.PgvectorStore(store.connection, 'absent"; DROP TABLE items1; --')
    assert (
        stores.PgvectorStore(store.connection, "public.items1", metric="cosine").search(unit_rows(1, DIM), 3).ids.all()
    )


def test_pgvector_uses_the_index_and_half_precision(engines):
    store = engines.open("pgvector", "cosine", unit_rows(2000, DIM))
    rows, run = unit_rows(2000, DIM), store.connection.execute
    run("CREATE TABLE half AS SELECT id, embedding::halfvec AS embedding, gen_random_uuid() AS code FROM items1")
    run("CREATE INDEX ON items1 USING hnsw (embedding vector_cosine_ops)")
    run("ANALYZE items1")
    run("SET enable_seqscan = off")
    plan = run("EXPLAIN " + store._search.as_string(store.connection), ([str(rows[0].tolist())], 5)).fetchall()
    assert any("Index Scan using items1_embedding_idx" in line for (line,) in plan), plan
    run("SET enable_seqscan = on")
    half = stores.PgvectorStore(store.connection, "half", key="code")  # its column has no width of its own
    hits = half.search(rows[:3], 5)
    assert np.abs(hits.scores - exact(rows, rows[:3], 5)[0]).max() < 2e-3
    assert all(isinstance(key, uuid.UUID) for key in hits.ids.ravel())
    assert np.abs(half.fetch(hits.ids[:, 0]) - rows[:3]).max() < 2e-3


def test_pgvector_time_limits_hold_and_leave_the_connection_usable(engines):
    store = engines.open("pgvector", "cosine", unit_rows(50, DIM), where="pg_sleep(0.1) IS NOT NULL")
    store.connection.execute("SET statement_timeout = 50")
    with pytest.raises(TimeoutError, match="'items1' of PostgreSQL took too long to search: QueryCanceled"):
        store.search(unit_rows(1, DIM), 3)
    assert len(store.fetch(Engines.ids("pgvector", 3))) == 3
    store.connection.close()
    with pytest.raises(stores.StoreError, match="failed to fetch vectors: OperationalError"):
        store.fetch(Engines.ids("pgvector", 3))
