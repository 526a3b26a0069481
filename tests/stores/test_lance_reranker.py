"""Probabilities as LanceDB's own re-ranker, in real searches of a table."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import stores
from tests.stores.engines import require

ITEMS, K = 900, 20


@pytest.fixture(scope="module")
def task():
    return gf.worlds.ConceptWorld().sample_search(ITEMS, ITEMS, "t2i", generator=torch.Generator().manual_seed(0))


@pytest.fixture
def table(tmp_path, task):
    require("lancedb")
    import lancedb
    import pyarrow as pa

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(task.gallery.numpy().ravel()), 24)
    columns = {"id": list(range(ITEMS)), "vector": vectors, "words": [f"picture {k % 7}" for k in range(ITEMS)]}
    return lancedb.connect(tmp_path).create_table("pictures", pa.table(columns))


@pytest.fixture
def judged(table, task):
    """The lists of the table, and which hits are right."""
    hits = stores.LanceStore(table).search(task.queries, K)
    return hits.scores, hits.labels(task.item.tolist())


@pytest.mark.parametrize("metric", [None, "l2", "cosine", "dot"])
def test_relevance_is_that_of_the_trust(table, task, judged, metric):
    scores, labels = judged
    trust = gf.Trust().fit(scores[:300], labels[:300])
    reranker = stores.LanceReranker(trust, metric or "l2", no_match_share=0.3, return_score="all")
    query = table.search(task.queries[500].numpy()).limit(K)
    query = query if metric is None else query.distance_type(metric)
    hits = query.rerank(reranker, query_string="a caption").to_arrow()
    relevance = np.sort(trust.relevance(scores[500:501])[0])[::-1]
    assert np.abs(hits["_relevance_score"].to_numpy() - relevance).max() < 1e-4
    assert hits["_p_no_match"].to_pylist() == pytest.approx([trust.p_no_match(scores[500:501], 0.3)[0]] * K, abs=1e-4)
    assert "_distance" in hits.column_names


def test_a_rule_shows_what_is_sure_and_nothing_else(table, task, judged):
    scores, labels = judged
    trust = gf.Trust().fit(scores[:300], labels[:300])
    rule = trust.certify(scores[300:], labels[300:], max_error=0.3)
    assert rule.certified
    shown = rule.show(scores)
    reranker = stores.LanceReranker(trust, rule=rule)
    for number in (*shown.any(1).nonzero()[0][:3], *(~shown.any(1)).nonzero()[0][:3]):
        hits = table.search(task.queries[number].numpy()).limit(K).rerank(reranker, query_string="").to_arrow()
        assert len(hits) == shown[number].sum()
        assert "_distance" not in hits.column_names


def test_lists_are_as_long_as_those_of_the_fit(table, task, judged):
    trust = gf.Trust().fit(judged[0][:300], judged[1][:300])
    search = table.search(task.queries[0].numpy())
    with pytest.raises(ValueError, match=r"found 5 hits, .* lists of 20: search with limit\(20\), or pass short_lists"):
        search.limit(5).rerank(stores.LanceReranker(trust), query_string="").to_arrow()
    with pytest.raises(ValueError, match="found 50 hits"):
        search.limit(50).rerank(stores.LanceReranker(trust, short_lists=True), query_string="").to_arrow()
    few = search.where("id < 3").limit(K).rerank(stores.LanceReranker(trust, short_lists=True), query_string="")
    assert len(few.to_arrow()) == 3
    none = table.search(task.queries[0].numpy()).where("id < 0").limit(K)
    assert none.rerank(stores.LanceReranker(trust), query_string="").to_arrow()["_relevance_score"].to_pylist() == []


def test_vectors_are_evidence_in_vector_text_and_hybrid_search(table, task, judged):
    from lancedb.index import FTS

    image, text, _ = gf.worlds.ConceptWorld().sample(300, generator=torch.Generator().manual_seed(5))
    model = stores.StoreReranker(stores.LanceStore(table), shortlist=K)
    model.calibrate(gf.EmbeddingPairs.from_arrays(image, text), max_queries=100)
    queries = {"picture 3": task.queries[7]}
    reranker = stores.LanceReranker(model, encode=queries.__getitem__, no_match_share=0.1)
    vector = task.queries[7].numpy()
    hits = table.search(vector).limit(K).rerank(reranker, query_string="picture 3").to_arrow()
    answers = model(task.queries[7:8], no_match_share=0.1)
    assert hits["id"].to_pylist() == answers.ids[0][np.argsort(-answers.relevance[0], kind="stable")].tolist()
    assert hits["_p_no_match"].to_pylist()[0] == pytest.approx(answers.p_no_match[0], abs=1e-5)
    table.create_index("words", config=FTS())
    by_words = table.search("picture 3", query_type="fts").limit(K).rerank(reranker).to_arrow()
    both = table.search(query_type="hybrid").vector(vector).text("picture 3").limit(K).rerank(reranker).to_arrow()
    for found_hits in (by_words, both):
        scores = found_hits["_relevance_score"].to_numpy()
        assert len(scores) == K
        assert (np.diff(scores) <= 0).all()
    assert hits["id"].to_pylist()[0] in both["id"].to_pylist()[:3]
    trust = gf.Trust().fit(judged[0][:300], judged[1][:300])
    with pytest.raises(ValueError, match="use a StoreReranker"):
        table.search("picture", query_type="fts").limit(K).rerank(stores.LanceReranker(trust)).to_arrow()


def test_what_it_is_made_of_is_checked(judged):
    trust = gf.Trust().fit(judged[0][:300], judged[1][:300])
    for arguments, kind, error in (
        ({"model": 3}, TypeError, "fitted Trust or a StoreReranker"),
        ({"model": trust, "metric": "hamming"}, ValueError, "the metric 'hamming'"),
        ({"model": trust, "rule": 3}, TypeError, "rule must be"),
        ({"model": trust, "no_match_share": 2.0}, ValueError, "no_match_share"),
    ):
        with pytest.raises(kind, match=error):
            stores.LanceReranker(**arguments)


def test_a_table_of_one_encoder_is_not_served_by_another(table, task, judged):
    scores, labels = judged
    trust = gf.Trust().fit(scores[:300], labels[:300], encoder="small")
    rule = trust.certify(scores[300:], labels[300:], max_error=0.3, encoder="small")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reranker = stores.LanceReranker(trust, rule=rule, no_match_share=0.1, encoder="small")
        table.search(task.queries[0].numpy()).limit(K).rerank(reranker, query_string="").to_arrow()
    for settings in ({}, {"rule": rule}):
        with pytest.raises(ValueError, match="was made with encoder 'small', not 'large'"):
            stores.LanceReranker(trust, **settings, encoder="large")
    with pytest.warns(UserWarning, match="encoder 'small' and is not told") as said:
        stores.LanceReranker(trust, rule=rule)
    assert [each.filename for each in said] == [__file__] * 2
    plain = gf.Trust().fit(scores[:300], labels[:300])
    with pytest.warns(UserWarning, match="the Trust was made without encoder="):
        stores.LanceReranker(plain, rule=rule, encoder="small")
    other = plain.certify(scores[300:], labels[300:], max_error=0.3, encoder="large")
    with pytest.raises(ValueError, match="the rule was made with encoder 'large', not 'small'"):
        stores.LanceReranker(trust, rule=other, encoder="small")
    model = stores.StoreReranker(stores.LanceStore(table), shortlist=K, encoder="small")
    with pytest.raises(ValueError, match="was made with encoder 'small', not 'large'"):
        stores.LanceReranker(model, encode=str, encoder="large")
    with pytest.warns(UserWarning, match="is not told which one made these queries") as said:
        stores.LanceReranker(model, encode=str)
    assert [each.filename for each in said] == [__file__]
