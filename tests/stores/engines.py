"""The real engines, filled with unit rows: one function for each opens a store, or says why it cannot."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from geoflow_fast import stores

Rows = NDArray[np.float32]
METRICS = {
    "faiss": ("ip", "l2"),
    "lancedb": ("cosine", "ip", "l2"),
    "qdrant": ("cosine", "ip", "l2"),
    "chroma": ("cosine", "ip", "l2"),
    "milvus": ("cosine", "ip", "l2"),
    "pgvector": ("cosine", "ip", "l2"),
}
"""The metrics from which cosines follow, by engine."""
MODULES = {"faiss": "faiss", "lancedb": "lancedb", "qdrant": "qdrant_client", "chroma": "chromadb"}
MODULES |= {"milvus": "milvus_lite", "pgvector": "psycopg"}


def require(engine: str) -> None:
    """Skips the test if the engine is not installed."""
    if not importlib.util.find_spec(MODULES[engine]):
        pytest.skip(f"{MODULES[engine]} is not installed: make test-stores, or pip install '.[{engine}]'")


def unit_rows(count: int, dim: int = 8, seed: int = 0) -> Rows:
    rows = np.random.default_rng(seed).normal(size=(count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


class Engines:
    """Opens stores of all engines below one folder. `rows` [N, d] get the ids of `ids(engine, N)`."""

    def __init__(self, folder: Path, postgres: Callable[[], Any]) -> None:
        self.folder, self._postgres, self._count = folder, postgres, 0

    @staticmethod
    def ids(engine: str, count: int) -> list[Any]:
        """Ids that the engine takes, not the numbers of the rows where it has others."""
        if engine in ("lancedb", "chroma", "pgvector"):
            return [f"item-{number}'s" for number in range(count)]
        return [7 * number + 3 for number in range(count)]

    def open(self, engine: str, metric: str, rows: Rows, **settings: Any) -> Any:
        """The store of an engine that holds `rows`."""
        require(engine)
        self._count += 1
        return getattr(self, f"_{engine}")(f"items{self._count}", metric, rows, settings)

    def _faiss(self, name: str, metric: str, rows: Rows, settings: dict[str, Any]) -> Any:  # noqa: ARG002
        import faiss

        flat = faiss.IndexFlatIP(rows.shape[1]) if metric == "ip" else faiss.IndexFlatL2(rows.shape[1])
        index = faiss.IndexIDMap2(flat)
        index.add_with_ids(rows, np.array(self.ids("faiss", len(rows)), dtype=np.int64))
        return stores.FaissStore(index, **settings)

    def _lancedb(self, name: str, metric: str, rows: Rows, settings: dict[str, Any]) -> Any:
        import lancedb
        import pyarrow as pa
        from lancedb.index import IvfFlat

        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
        kind = ["odd" if number % 2 else "even" for number in range(len(rows))]
        columns = {"id": self.ids("lancedb", len(rows)), "vector": vectors, "kind": kind}
        table = lancedb.connect(self.folder / "lance").create_table(name, pa.table(columns))
        if metric != "cosine":
            distance = {"ip": "dot", "l2": "l2"}[metric]
            table.create_index("vector", config=IvfFlat(distance_type=distance, num_partitions=1))
        return stores.LanceStore(table, **settings)

    def _qdrant(self, name: str, metric: str, rows: Rows, settings: dict[str, Any]) -> Any:
        from qdrant_client import QdrantClient, models

        distance = {"cosine": models.Distance.COSINE, "ip": models.Distance.DOT, "l2": models.Distance.EUCLID}[metric]
        client = QdrantClient(":memory:")
        client.create_collection(name, vectors_config=models.VectorParams(size=rows.shape[1], distance=distance))
        kinds = [{"kind": "odd" if number % 2 else "even"} for number in range(len(rows))]
        client.upload_collection(name, vectors=rows, ids=self.ids("qdrant", len(rows)), payload=kinds)
        return stores.QdrantStore(client, name, **settings)

    def _chroma(self, name: str, metric: str, rows: Rows, settings: dict[str, Any]) -> Any:
        import chromadb

        client = chromadb.PersistentClient(self.folder / "chroma", chromadb.Settings(anonymized_telemetry=False))
        exact = {"space": metric, "ef_search": len(rows), "ef_construction": len(rows)}
        collection = client.create_collection(name, configuration={"hnsw": exact}, embedding_function=None)
        kinds = [{"kind": "odd" if number % 2 else "even"} for number in range(len(rows))]
        collection.add(ids=self.ids("chroma", len(rows)), embeddings=rows, metadatas=kinds)
        return stores.ChromaStore(collection, **settings)

    def _milvus(self, name: str, metric: str, rows: Rows, settings: dict[str, Any]) -> Any:
        from pymilvus import MilvusClient

        client = MilvusClient(str(self.folder / "milvus.db"))
        client.create_collection(
            name,
            dimension=rows.shape[1],
            metric_type=metric.upper(),
            primary_field_name="key",
            vector_field_name="place_of_item",
        )
        kinds = ["odd" if number % 2 else "even" for number in range(len(rows))]
        columns = zip(self.ids("milvus", len(rows)), rows.tolist(), kinds)
        client.insert(name, [{"key": key, "place_of_item": row, "kind": kind} for key, row, kind in columns])
        return stores.MilvusStore(client, name, **settings)

    def _pgvector(self, name: str, metric: str, rows: Rows, settings: dict[str, Any]) -> Any:
        connection = self._postgres()
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE TABLE {name} (id text PRIMARY KEY, embedding vector({rows.shape[1]}), kind text)")
            kinds = ["odd" if number % 2 else "even" for number in range(len(rows))]
            texts = [str(row.tolist()) for row in rows]
            columns = list(zip(self.ids("pgvector", len(rows)), texts, kinds))
            cursor.executemany(f"INSERT INTO {name} VALUES (%s, %s, %s)", columns)
        return stores.PgvectorStore(connection, name, **{"metric": metric, **settings})


def folder_of_postgres() -> Path:
    """Where the programs of PostgreSQL are; skips the test if there are none, or no pgvector."""
    there = [Path(path).parent for path in sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))]
    in_path = shutil.which("initdb")
    programs = Path(in_path).resolve().parent if in_path else there[-1] if there else None
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    share = subprocess.run([programs / "pg_config", "--sharedir"], capture_output=True, text=True)
    known = share.returncode == 0 and (Path(share.stdout.strip()) / "extension/vector.control").is_file()
    if not known:
        pytest.skip("PostgreSQL has no pgvector: apt-get install postgresql-NN-pgvector, or build it from its source")
    return programs


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Starts a server of its own on loopback with a fresh database, and yields how to connect to it."""
    require("pgvector")
    programs = folder_of_postgres()
    # The server refuses to run as root, and pytest's folders are closed to the user that it runs as.
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    folder = Path(tempfile.mkdtemp(prefix="geoflow_postgres_"))
    shutil.chown(folder, user)
    as_user: dict[str, Any] = {"user": user} if os.geteuid() == 0 else {}
    data, log = folder / "data", (folder / "log").open("wb")
    setup = [programs / "initdb", "-D", data, "--username=tester", "--auth=trust", "--no-sync", "--encoding=UTF8"]
    subprocess.run(setup, check=True, stdout=log, stderr=log, cwd=folder, **as_user)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-F"],
        stdout=log,
        stderr=log,
        cwd=folder,
        **as_user,
    )
    address = f"host=127.0.0.1 port={port} user=tester dbname=postgres"
    try:
        _wait_for(server, address, folder / "log")
        yield address
    finally:
        server.terminate()
        server.wait(30)
        log.close()
        shutil.rmtree(folder)


def _wait_for(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    import psycopg

    for _ in range(200):
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(address).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"PostgreSQL did not start: {log.read_text()}")
