"""The page of stores and the program examples/store.py, against the real engines."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores.engines import METRICS, require

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/stores.md").read_text()
SECTIONS = {"faiss": "FAISS", "lancedb": "LanceDB", "qdrant": "Qdrant", "chroma": "Chroma", "milvus": "Milvus"}
SECTIONS |= {"pgvector": "pgvector"}
AFTERWARDS = ("More evidence: the vectors of the hits", "A store of your own")


def blocks(section: str) -> list[str]:
    """The Python of a section of the page; that of no section is what comes before the first."""
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)
    text = parts[0] if not section else parts[parts.index(section) + 1]
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def desk(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_address: Any) -> None:
    """An empty folder to work in, and a database where the engine needs one."""
    require(engine)
    monkeypatch.chdir(tmp_path)
    if engine == "pgvector":
        import psycopg

        words = dict(word.split("=") for word in postgres_address().split())
        for name, key in (("PGHOST", "host"), ("PGPORT", "port"), ("PGUSER", "user"), ("PGDATABASE", "dbname")):
            monkeypatch.setenv(name, words[key])
        with psycopg.connect(autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    if engine == "chroma":
        import chromadb

        client = chromadb.EphemeralClient()  # all clients in memory share their collections
        for collection in client.list_collections():
            client.delete_collection(collection.name)


@pytest.mark.parametrize("engine", METRICS)
@pytest.mark.usefixtures("desk")
def test_the_page_leads_from_hits_to_decisions(engine):
    names: dict[str, Any] = {}
    opening, six = blocks(SECTIONS[engine])
    assert len(six.splitlines()) == 6
    for code in (*blocks(""), opening, six):
        exec(compile(code, "docs/stores.md", "exec"), names)
    rule, answers, task = names["rule"], names["answers"], names["task"]
    assert rule.certified
    sure = answers != "nothing here"
    assert 0.05 < sure.mean() < 0.95
    right = np.array([names["ids"][row] for row in task.item[2500:].tolist()], dtype=object)
    assert (answers[sure] != right[sure]).mean() < 0.2  # a tenth is promised of all traffic, of which this is a sample
    if engine == "faiss":
        for section in AFTERWARDS:
            for code in blocks(section):
                exec(compile(code, "docs/stores.md", "exec"), names)
        assert names["hits_of_mine"].tolist() == names["found"].tolist()


@pytest.mark.parametrize("engine", METRICS)
@pytest.mark.usefixtures("desk")
def test_the_program(engine, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["store.py", engine])
    names = runpy.run_path(str(ROOT / "examples/store.py"), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    assert names["rule"].certified
    assert sum("nothing is right" in line for line in shown) == 20
    assert 0 < sum(line.startswith("nothing here") for line in shown) < 20


def test_there_is_an_opener_and_a_section_for_each_engine():
    assert set(runpy.run_path(str(ROOT / "examples/store.py"))["OPENERS"]) == set(METRICS)
    assert all(len(blocks(SECTIONS[engine])) == 2 for engine in METRICS)
