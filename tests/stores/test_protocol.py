"""Answers that cannot be right, over a store that gives them: clear errors, or what the page of stores says."""

from __future__ import annotations

import math
import socket
import threading
import time
import urllib.request
from typing import Any

import numpy as np
import pytest

import geoflow_fast as gf
from geoflow_fast import stores
from geoflow_fast.stores.metrics import ENGINES, metric_of
from tests.stores.engines import unit_rows

ROWS, DIM = 60, 8
QUERIES = unit_rows(4, DIM, seed=1)


class Fake:
    """An exact store whose answers can be spoiled before they are returned."""

    def __init__(self, metric: str = "cosine", rows: Any = None) -> None:
        self.rows, self.metric = unit_rows(ROWS, DIM) if rows is None else rows, metric
        self.spoil_hits: Any = lambda scores, ids: (scores, ids)
        self.spoil_vectors: Any = dict
        self.fetches = 0

    def search(self, vectors: Any, k: int) -> tuple[Any, Any]:
        cosines = vectors.astype(np.float64) @ self.rows.T
        order = np.argsort(-cosines, axis=1)[:, :k]
        scores = np.take_along_axis(cosines, order, 1)
        scores = np.sqrt((2 - 2 * scores).clip(0)) if self.metric == "l2" else scores
        return self.spoil_hits(scores.tolist(), [[f"i{number}" for number in row] for row in order.tolist()])

    def fetch(self, ids: list[Any]) -> Any:
        self.fetches += 1
        known = {f"i{number}": row for number, row in enumerate(self.rows)}
        return self.spoil_vectors({key: known[key] for key in ids if key in known})

    def store(self) -> stores.CustomStore:
        return stores.CustomStore(self.search, self.fetch, DIM, self.metric, name="the fake")


def spoiled(change: Any, query: int = 2) -> stores.CustomStore:
    """A store whose answer to one query is changed: change(scores, ids) -> scores, ids of that query."""
    fake = Fake()

    def spoil(scores: Any, ids: Any) -> Any:
        scores[query], ids[query] = change(scores[query], ids[query])
        return scores, ids

    fake.spoil_hits = spoil
    return fake.store()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s, i: ([math.nan, *s[1:]], i), "query 2 the score nan for the id .*no cosine similarity"),
        (lambda s, i: ([*s[:3], math.inf, *s[4:]], i), "query 2 the score inf"),
        (lambda s, i: ([37.5, *s[1:]], i), "query 2 the score 37.5"),
        (lambda s, i: ([None, *s[1:]], i), "query 2 the score nan"),
        (lambda s, i: (["high", *s[1:]], i), "no list of scores and ids for query 2"),
        (lambda s, i: (s[:-1], i), "query 2 9 scores for 10 ids"),
        (lambda s, i: (s, [*i[:4], None, *i[5:]]), "query 2 a hit without an id, number 4"),
        (lambda s, i: (s, [*i[:4], {}, *i[5:]]), "query 2 a hit without an id, number 4"),
        (lambda s, i: (s, [i[0], i[0], *i[2:]]), "query 2 the id 'i.*' twice"),
        (lambda s, i: (s[::-1], i), "best hit must come first"),
        (lambda s, i: ([1 - each for each in s], i), "best hit must come first"),
        (lambda s, i: ([*s, s[-1]], [*i, "extra"]), "query 2 11 hits, more than the 10 asked for"),
        (lambda _, i: (7, i), "no list of scores and ids for query 2"),
    ],
    ids=range(13),
)
def test_an_answer_that_cannot_be_right_is_an_error(change, error):
    with pytest.raises(ValueError, match=f"the fake gave .*{error}"):
        spoiled(change).search(QUERIES, 10)


def test_answers_for_another_number_of_queries():
    fake = Fake()
    fake.spoil_hits = lambda scores, ids: (scores[1:], ids[1:])
    with pytest.raises(ValueError, match="the fake answered 3 of 4 queries"):
        fake.store().search(QUERIES, 10)
    fake.spoil_hits = lambda scores, ids: (scores[1:], ids)
    with pytest.raises(stores.StoreError, match="3 lists of scores for 4 lists of ids"):
        fake.store().search(QUERIES, 10)
    fake.spoil_hits = lambda scores, ids: None  # noqa: ARG005
    with pytest.raises(stores.StoreError, match="the fake failed to search: TypeError"):
        fake.store().search(QUERIES, 10)


def test_short_lists_repeat_their_last_score_and_empty_ones_have_the_least():
    fake = Fake()

    def spoil(scores: Any, ids: Any) -> Any:
        return [scores[0], scores[1][:3], [], scores[3][:1]], [ids[0], ids[1][:3], [], ids[3][:1]]

    fake.spoil_hits = spoil
    hits = fake.store().search(QUERIES, 10)
    assert [sum(key is not None for key in row) for row in hits.ids.tolist()] == [10, 3, 0, 1]
    assert (hits.scores[1, 3:] == hits.scores[1, 2]).all()
    assert (hits.scores[2] == -1).all()
    assert (np.diff(hits.scores, axis=1) <= 0).all()
    labels = hits.labels([hits.ids[0, 1], [hits.ids[1, 0], "other"], "anything", set()])
    assert labels.nonzero()[0].tolist() == [0, 1]
    assert labels.nonzero()[1].tolist() == [1, 0]
    # Lists that were filled up are what the trust makes of lists without what is missing.
    rng = np.random.default_rng(0)
    judged = np.sort(rng.uniform(-1, 1, (40, 10)))[:, ::-1]
    trust = gf.Trust().fit(judged, judged[:, 0] > np.median(judged[:, 0]))
    assert np.isfinite(trust.predict_proba(hits.scores)).all()
    assert trust.predict_proba(hits.scores)[2, 1] == trust.predict_proba(hits.scores)[:, 1].min()


def test_rounding_is_no_error_and_puts_hits_in_order():
    hits = spoiled(lambda s, i: ([1.0004, s[0], s[0] + 5e-4, *s[3:]], i)).search(QUERIES, 10)
    assert hits.scores[2, 0] == 1
    assert (np.diff(hits.scores, axis=1) <= 0).all()


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("slow"),
        OSError("read timed out"),
        RuntimeError("Deadline Exceeded"),
        type("ReadTimeout", (Exception,), {})(),
    ],
)
def test_a_store_that_takes_too_long_is_a_timeout(error):
    def search(*_: Any) -> Any:
        raise error

    store = stores.CustomStore(search, None, DIM, name="the fake")
    with pytest.raises(TimeoutError, match="the fake took too long to search") as caught:
        store.search(QUERIES, 3)
    assert caught.value.__cause__ is error


def test_a_store_that_fails_is_an_os_error_that_says_how():
    fake = Fake()

    def fail(*_: Any) -> Any:
        error = ConnectionError("refused\nat length")
        raise error from error  # as pymilvus does

    fake.spoil_vectors = fail
    with pytest.raises(
        stores.StoreError, match=r"^the fake failed to fetch vectors: ConnectionError: refused$"
    ) as caught:
        fake.store().fetch(["i1"])
    assert isinstance(caught.value, OSError)
    fake.spoil_hits = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fake.store().search(QUERIES, 3)


@pytest.mark.parametrize(
    ("vector", "error"),
    [
        (np.zeros(DIM), "norm 0 and no direction"),
        (np.full(DIM, math.nan), "norm nan and no direction"),
        (np.ones(DIM + 1), r"shape \[9\] at 'i3', not \[8\]"),
        ("words", "no vector of numbers"),
        (None, r"shape \[\]"),
        ([[1.0] * DIM], r"shape \[1, 8\]"),
    ],
    ids=range(6),
)
def test_vectors_that_are_no_directions(vector, error):
    fake = Fake()
    fake.spoil_vectors = lambda known: {**known, "i3": vector}
    with pytest.raises(ValueError, match=f"{error}"):
        fake.store().fetch(["i2", "i3"])


def test_ids_that_are_missing_or_none():
    fake = Fake()
    store = fake.store()
    with pytest.raises(ValueError, match=r"the fake has no vector with the id 'x' \(2 of 3\)"):
        store.fetch(np.array(["x", "i1", "y"], dtype=object))
    for ids, kind in (("i1", TypeError), (None, TypeError), ([None], ValueError), ([[]], ValueError)):
        with pytest.raises(kind, match="ids"):
            store.fetch(ids)
    fake.spoil_vectors = lambda known: {**known, "never asked for": np.ones(3)}
    with pytest.raises(ValueError, match="never asked for"):
        store.fetch(["i1"])


@pytest.mark.parametrize(
    ("vectors", "k", "error"),
    [
        (QUERIES[0], 3, r"\[Q, d\]"),
        (QUERIES.astype(int), 3, "floating-point"),
        (QUERIES[:, :-1], 3, "width 7"),
        (2 * QUERIES, 3, "row 0 has norm 2"),
        (QUERIES * np.nan, 3, "row 0 has norm nan"),
        (QUERIES, 0, "k must be at least 1"),
        (QUERIES, 20_000, "k must be at most 16384"),
    ],
    ids=range(7),
)
def test_questions_that_make_no_sense(vectors, k, error):
    fake = Fake()
    with pytest.raises(ValueError, match=error):
        fake.store().search(vectors, k)


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_the_first_answer_is_compared_with_the_vectors(metric):
    fake = Fake(metric)
    store = fake.store()
    hits = store.search(QUERIES, 10)
    assert np.abs(hits.scores - Fake().store().search(QUERIES, 10).scores).max() < 1e-9
    store.search(QUERIES, 10)
    assert fake.fetches == 1
    fake.spoil_vectors = lambda known: {key: -row for key, row in known.items()}
    with pytest.raises(ValueError, match=r"gives the id 'i\d+' the cosine .* by its vector"):
        fake.store().search(QUERIES, 10)
    if metric != "cosine":
        fake.spoil_vectors = lambda known: {key: 2 * row for key, row in known.items()}
        with pytest.raises(ValueError, match=r"has norm 2\. Its metric, .* unit rows only"):
            fake.store().search(QUERIES, 10)


def test_scores_become_cosines_by_each_metric():
    """Every reading of every engine, from the two vectors that its score is about."""
    query, row = (each / np.linalg.norm(each) for each in unit_rows(2, DIM, seed=3).astype(np.float64))
    cosine = float(query @ row)
    raw = {
        "cosine similarity": cosine,
        "cosine distance": 1 - cosine,
        "inner product": cosine,
        "negative inner product": -cosine,
        "one minus the inner product": 1 - cosine,
        "squared Euclidean distance": float(((query - row) ** 2).sum()),
        "Euclidean distance": float(np.linalg.norm(query - row)),
    }
    read = {metric.name for metrics in ENGINES.values() for metric in metrics.values()}
    assert read == set(raw)
    for metrics in ENGINES.values():
        for metric in metrics.values():
            assert metric.to_cosine(np.array([raw[metric.name]]))[0] == pytest.approx(cosine, abs=1e-12)
            assert metric.needs_unit_rows == ("cosine" not in metric.name)
    for name in ("hamming", None, 3):
        with pytest.raises(ValueError, match=r"x has the metric .* must be one of cosine, ip, l2"):
            metric_of("custom", name, "x")


def test_a_store_is_made_of_functions():
    for search, fetch, dim, kind in ((None, None, 8, TypeError), (len, 3, 8, TypeError), (len, None, 0, ValueError)):
        with pytest.raises(kind):
            stores.CustomStore(search, fetch, dim)
    for kind in ("FaissStore", "LanceStore", "ChromaStore"):
        with pytest.raises(TypeError, match="must be a"):
            getattr(stores, kind)(object())
    for kind in ("QdrantStore", "MilvusStore", "PgvectorStore"):
        with pytest.raises(TypeError, match="must be"):
            getattr(stores, kind)(object(), "items")


def test_labels_ask_for_an_entry_for_each_query():
    hits = Fake().store().search(QUERIES, 3)
    for right, kind in ((["i1"], ValueError), ("i1", TypeError), (3, TypeError)):
        with pytest.raises(kind, match="right"):
            hits.labels(right)


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_store_that_never_answers_is_a_timeout_under_the_limit_of_its_client(answers):
    """A server accepts what is asked and says nothing; before that it may have answered, or answered a part."""
    fake = Fake(rows=unit_rows(ROWS, DIM))
    whole, part = (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{}" % length for length in (2, 9))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for number in range(min(answers + 1, 2)):
                connection, _ = server.accept()
                connections.append(connection)
                connection.recv(4096)
                if number < answers:
                    connection.sendall((whole, part)[number])

        def asked(function: Any) -> Any:
            def ask(*arguments: Any) -> Any:
                url = f"http://127.0.0.1:{server.getsockname()[1]}/"
                with urllib.request.urlopen(url, timeout=0.3) as answer:
                    answer.read()
                return function(*arguments)

            return ask

        connections: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        store = stores.CustomStore(asked(fake.search), asked(fake.fetch), DIM, name="the fake")
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"^the fake took too long to (search|fetch vectors): "):
            store.search(QUERIES, 3)
        assert time.monotonic() - begin < 20
        for connection in connections:
            connection.close()
