"""The re-ranker over a store against the one over all of its vectors, which it must equal."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import stores
from geoflow_fast.data.fingerprint import Fingerprint, Origin
from tests.stores.engines import METRICS, Engines
from tests.stores.test_protocol import Fake

ITEMS, K = 400, 30


@pytest.fixture(scope="module")
def world():
    """(gallery, queries, held-out pairs) of the concept world."""
    image, text, _ = gf.worlds.ConceptWorld().sample(900, generator=torch.Generator().manual_seed(0))
    held_out = gf.EmbeddingPairs.from_arrays(image[ITEMS : ITEMS + 300], text[ITEMS : ITEMS + 300])
    return image[:ITEMS], text[:60], held_out


@pytest.fixture(scope="module")
def whole(world):
    """The re-ranker over all vectors, calibrated."""
    gallery, _, held_out = world
    reranker = gf.BayesReranker(None, gallery, shortlist=(K, K))
    reranker.calibrate(held_out, max_queries=100)
    return reranker


def opened(engines, engine, rows):
    return engines.open(engine, METRICS[engine][0], rows.numpy())


@pytest.mark.parametrize("engine", METRICS)
def test_probabilities_are_those_of_the_whole_gallery(engines, engine, world, whole):
    gallery, queries, held_out = world
    ids = np.array([*Engines.ids(engine, ITEMS), None], dtype=object)
    reranker = stores.StoreReranker(opened(engines, engine, gallery), shortlist=(K, K))
    fitted = reranker.calibrate(held_out, max_queries=100)
    assert fitted.by_feature == pytest.approx(whole.calibration.by_feature, rel=1e-3)
    answers, truth = reranker(queries, no_match_share=0.2), whole(queries, no_match_share=0.2)
    assert answers.calibrated
    assert answers.answer.tolist() == ids[truth.answer].tolist()
    for name in ("p_answer", "p_outside", "p_no_match", "entropy"):
        assert np.abs(getattr(answers, name) - getattr(truth, name).numpy()).max() < 2e-3, name
    assert (answers.ids[:, 0] == ids[truth.index[:, 0]]).mean() > 0.95
    assert np.abs(answers.prob - truth.prob.numpy()).max() < 2e-3
    total = answers.prob.sum(1) + answers.p_outside + answers.p_no_match
    assert np.abs(total - 1).max() < 1e-5


def test_with_a_flow_and_a_head(world):
    gallery, queries, held_out = world
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(24, 24, hidden=16, depth=1, layer_scale=0.5)).eval()
    head = gf.PosteriorHead(gf.HeadConfig(points=2, hidden=8, bank=8), 24, 24).eval()
    fake = Fake(rows=gallery.double().numpy())
    store = stores.CustomStore(fake.search, fake.fetch, 24)
    settings = {"head": head, "n_steps": 1, "bank": held_out[range(100)][1]}
    whole = gf.BayesReranker(flow, gallery, "t2i", (K, 4), **settings)
    reranker = stores.StoreReranker(store, flow, "t2i", (K, 4), **settings)
    for each in (whole, reranker):
        each.calibrate(held_out, max_queries=100)
    truth, answers = whole(queries), reranker(queries)
    assert np.abs(answers.p_answer - truth.p_answer.numpy()).max() < 2e-3
    assert answers.answer.tolist() == [f"i{number}" for number in truth.answer.tolist()]


def test_answers_do_not_depend_on_the_other_queries(world, monkeypatch):
    gallery, queries, held_out = world
    fake = Fake(rows=gallery.double().numpy())
    reranker = stores.StoreReranker(stores.CustomStore(fake.search, fake.fetch, 24), shortlist=K)
    reranker.calibrate(held_out, max_queries=100)
    together = reranker(queries)
    monkeypatch.setattr("geoflow_fast.stores.rerank.QUERIES_AT_ONCE", 7)
    apart = reranker(queries)
    assert together.ids.tolist() == apart.ids.tolist()
    assert np.abs(together.prob - apart.prob).max() < 1e-6
    assert reranker(queries[:0]).ids.shape == (0, K)


def test_copies_make_room_for_others(world):
    """Every item three times: as many different ones as without copies, and the same probabilities."""
    gallery, queries, held_out = world
    plain, tripled = (Fake(rows=gallery.repeat(times, 1).double().numpy()) for times in (1, 3))
    answers = []
    for fake in (plain, tripled):
        reranker = stores.StoreReranker(stores.CustomStore(fake.search, fake.fetch, 24), shortlist=K)
        reranker.calibrate(held_out, max_queries=100)
        answers.append(reranker(queries))
    assert np.abs(answers[0].p_answer - answers[1].p_answer).max() < 2e-3
    for row in answers[1].ids.tolist():
        assert None not in row
        assert len({int(key[1:]) % ITEMS for key in row}) == K


def test_a_query_without_hits_has_no_match(world):
    gallery, queries, held_out = world
    fake = Fake(rows=gallery.double().numpy())
    reranker = stores.StoreReranker(stores.CustomStore(fake.search, fake.fetch, 24), shortlist=K)
    reranker.calibrate(held_out, max_queries=100)
    fake.spoil_hits = lambda scores, ids: ([*scores[:-2], [], scores[-1][:2]], [*ids[:-2], [], ids[-1][:2]])
    answers = reranker(queries[:5])
    assert answers.p_no_match.tolist() == [0, 0, 0, 1, 0]
    assert answers.answer[3] is None
    assert answers.p_answer[3] == answers.prob[3].sum() == 0
    assert [key is None for key in answers.ids[4]] == [False] * 2 + [True] * (K - 2)
    fake.spoil_hits = lambda scores, ids: ([[] for _ in scores], [[] for _ in ids])
    assert reranker(queries[:2]).p_no_match.tolist() == [1, 1]


def test_calibrations_are_saved_and_loaded(world, tmp_path):
    gallery, queries, held_out = world
    fake = Fake(rows=gallery.double().numpy())
    store = stores.CustomStore(fake.search, fake.fetch, 24)
    reranker = stores.StoreReranker(store, shortlist=K)
    with pytest.warns(UserWarning, match="StoreReranker is uncalibrated"):
        reranker(queries)
    reranker.calibrate(held_out, max_queries=100)
    file = reranker.save_calibration(tmp_path)
    again = stores.StoreReranker(store, shortlist=K)
    again.load_calibration(file)
    assert np.array_equal(again(queries).prob, reranker(queries).prob)
    with pytest.raises(ValueError, match="shortlist"):
        stores.StoreReranker(store, shortlist=K + 1).load_calibration(file)


def test_any_store_of_the_protocol_is_checked(world):
    gallery, queries, held_out = world
    fake = Fake(rows=gallery.double().numpy())
    inner = stores.CustomStore(fake.search, fake.fetch, 24)

    class Foreign:
        dim = 24

        def search(self, vectors, k, /):
            return inner.search(vectors, k)

        def fetch(self, ids, /):
            return inner.fetch(ids)

    reranker = stores.StoreReranker(Foreign(), shortlist=K)
    reranker.calibrate(held_out, max_queries=100)
    assert reranker(queries).answer.tolist() == inner.search(queries, 1).ids[:, 0].tolist()
    Foreign.fetch = lambda *_: np.zeros((K, 24))  # hostile
    with pytest.raises(ValueError, match="the Foreign has norm 0"):
        stores.StoreReranker(Foreign(), shortlist=K)(queries)
    del Foreign.dim
    with pytest.raises(TypeError, match="dim of the Foreign, the width of vectors"):
        stores.StoreReranker(Foreign())
    with pytest.raises(TypeError, match="must have search and fetch"):
        stores.StoreReranker(object())
    with pytest.raises(ValueError, match="leave out shortlist_by="):
        stores.StoreReranker(inner, shortlist_by="head")


def fingerprint(name):
    return Fingerprint.of({"encoder": name, "weights": name})


def with_encoder(pairs, encoder):
    """Pairs that know their encoder."""
    twin = gf.EmbeddingPairs.from_arrays(*pairs[np.arange(len(pairs))])
    twin.image.encoder = twin.text.encoder = encoder
    return twin


def over_store(world, **settings):
    fake = Fake(rows=world[0].double().numpy())
    return stores.StoreReranker(stores.CustomStore(fake.search, fake.fetch, 24), shortlist=K, **settings)


def told(queries, encoder):
    named = gf.Embeddings.from_arrays(queries)
    named.rows.encoder = encoder
    return named


@pytest.mark.parametrize("own", ["small", fingerprint("small")], ids=["by name", "by fingerprint"])
def test_a_store_of_one_encoder_is_not_served_by_another(world, tmp_path, own):
    """Neither held-out pairs nor calibrations nor queries of another encoder, and what is not known is said."""
    _, queries, held_out = world
    reranker = over_store(world, encoder=own)
    with pytest.raises(ValueError, match=r"this StoreReranker was made with encoder 'small.*, not 'large"):
        reranker.calibrate(with_encoder(held_out, fingerprint("large")), max_queries=100)
    with pytest.warns(UserWarning, match="is not told which one made these pairs: pass encoder="):
        reranker.calibrate(held_out, max_queries=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reranker.calibrate(
            with_encoder(held_out, fingerprint("small") if own == "small" else None), max_queries=100, encoder=own
        )
        file = reranker.save_calibration(tmp_path)
        for encoder in ("small", fingerprint("small")):
            again = over_store(world, encoder=encoder)
            again.load_calibration(file)
            expected = again(queries, encoder="small")
            np.testing.assert_allclose(again(told(queries, fingerprint("small"))).prob, expected.prob, atol=1e-5)
    with pytest.warns(UserWarning, match="is not told which one made these queries"):
        again(queries)
    for asked in ({"encoder": "large"}, {"encoder": fingerprint("large")}):
        with pytest.raises(ValueError, match=r"this StoreReranker was made with encoder 'small.*, not 'large"):
            again(queries, **asked)
    with pytest.raises(ValueError, match="not 'large"):
        again(told(queries, fingerprint("large")))
    with pytest.raises(ValueError, match="the calibration was made for those of small"):
        over_store(world, encoder="large").load_calibration(file)
    with pytest.warns(UserWarning, match="the calibration was made with encoder 'small.*the vectors of the store"):
        over_store(world).load_calibration(file)


def test_a_store_without_a_name_says_what_it_cannot_tell(world, tmp_path):
    _, queries, held_out = world
    plain = over_store(world)
    with pytest.warns(UserWarning, match="made without encoder= and cannot tell whether it is for 'small"):
        plain.calibrate(with_encoder(held_out, fingerprint("small")), max_queries=100)
    nameless = over_store(world)
    nameless.calibrate(held_out, max_queries=100)
    with pytest.warns(UserWarning, match="made without encoder= and cannot tell whether it is for 'small'"):
        nameless(queries, encoder="small")
    file = nameless.save_calibration(tmp_path)
    with pytest.warns(UserWarning, match="the calibration was made without encoder="):
        over_store(world, encoder="small").load_calibration(file)
    with pytest.raises(TypeError, match="encoder must be text"):
        over_store(world, encoder=3)


def test_each_side_may_have_an_encoder_of_its_own(world):
    _, queries, held_out = world
    pairs = with_encoder(held_out, fingerprint("images"))
    pairs.text.encoder = fingerprint("texts")
    reranker = over_store(world, encoder="images")
    reranker.calibrate(pairs, max_queries=100)
    reranker(queries, encoder="texts")
    with pytest.raises(ValueError, match=r"made with encoder 'texts.*, not 'images'"):
        reranker(queries, encoder="images")


def test_a_model_of_another_encoder_is_refused_over_a_store(world):
    head = gf.PosteriorHead(gf.HeadConfig(points=2, hidden=8, bank=8), 24, 24).eval()
    head.origin = Origin((fingerprint("small"), fingerprint("small")))
    over_store(world, head=head, encoder="small")
    with pytest.raises(
        ValueError, match="the gallery has embeddings of large, but the head was made for those of small"
    ):
        over_store(world, head=head, encoder="large")
    with pytest.warns(
        UserWarning, match="the model was made with encoder 'small.*which one made the vectors of the store"
    ):
        over_store(world, head=head)
