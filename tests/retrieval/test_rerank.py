"""BayesReranker against known posteriors, on shortlists from every source, and with bad input."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geoflow_fast as gf
from benchmarks.methods.studies.rerank import RerankStudy
from geoflow_fast import noise
from geoflow_fast.directions import Direction
from geoflow_fast.flow.inference import InferenceNetwork
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.retrieval import rerank
from geoflow_fast.retrieval.calibration import LEAST_QUERIES, UNCALIBRATED
from geoflow_fast.retrieval.held_out import Shortlist
from geoflow_fast.retrieval.no_match import NoMatch
from geoflow_fast.spherical import sample_bump
from geoflow_fast.worlds import PairField
from tests.samples import shaken

DIM, ITEMS, QUERIES, K = 6, 300, 40, 12


class Oracle(nn.Module):
    """A field with known densities that stands in for a flow: texts are bumps around R image, and images around R^T
    text."""

    def __init__(self) -> None:
        super().__init__()
        self.config = gf.GeoFlowConfig(DIM, DIM)
        turn = torch.eye(DIM)
        turn[:2, :2] = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
        self.rotation = nn.Parameter(turn, requires_grad=False)

    @property
    def law(self) -> PairField:
        return PairField(self.rotation, 1.5)

    def velocity(self, image: Tensor, text: Tensor, t: float, direction: str) -> tuple[Tensor, Tensor]:
        return self.law.velocity(image, text, t, direction)

    def pairs(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        image = noise.sample_uniform(count, DIM, generator=generator)
        return image, sample_bump(image @ self.rotation.T, self.law.c, generator)


@pytest.fixture
def oracle() -> Oracle:
    return Oracle()


def by_cosine(queries: Tensor, items: Tensor, valid: Tensor, number: Tensor) -> Shortlist:
    """The shortlist of these items [Q, K, d], as a search by cosine finds it."""
    return Shortlist(items, torch.einsum("qd,qkd->qk", queries, items).double(), valid, number)


def make(flow: nn.Module, gallery: object, direction: str = "t2i", **changes) -> gf.BayesReranker:
    return gf.BayesReranker(flow, gallery, direction, **{"shortlist": K, **changes})


@pytest.fixture
def reranker(oracle) -> gf.BayesReranker:
    return make(oracle, oracle.pairs(ITEMS, 0)[0])


@pytest.fixture
def calibrated(reranker) -> gf.BayesReranker:
    """A re-ranker whose weights are set as if they had been fitted."""
    weights = {"alpha": 0.9, "beta": 2.0, "outside": 1.5, "stderr": (0.1, 0.2, 0.3), "nll": 1.0, "nll_stderr": 0.1}
    reranker.calibration = dataclasses.replace(UNCALIBRATED, **weights, made_for=reranker.made_for, pairs="some")
    return reranker


@pytest.fixture
def queries(oracle) -> Tensor:
    return oracle.pairs(ITEMS, 0)[1][:QUERIES]


def held_out(oracle: Oracle, count: int = 200) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(*oracle.pairs(count, 1))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_posterior_is_the_true_one_on_the_shortlist(oracle, direction):
    """Probes are exact for the field's divergence, which is isotropic. Only the solver's error is left."""
    direction = Direction(direction)
    pairs = oracle.pairs(ITEMS, 0)
    asks, searched = direction.queries(*pairs), direction.items(*pairs)
    reranker = make(oracle, searched, direction, n_steps=10, solver="rk4")
    with pytest.warns(UserWarning, match="uncalibrated: probabilities are the flow's own"):
        result = reranker(asks[:QUERIES])
    shortlist = (asks[:QUERIES] @ searched.T).topk(K).indices
    pair = direction.pair(asks[:QUERIES, None].expand(-1, K, -1), searched[shortlist])
    image, text = (side.reshape(-1, DIM) for side in pair)
    truth = oracle.law.log_density(image, text, "i2t").view(QUERIES, K).double().softmax(1)
    expected, order = truth.sort(dim=1, descending=True)
    assert torch.equal(result.index, shortlist.gather(1, order))
    torch.testing.assert_close(result.prob.double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(result.entropy.double(), torch.special.entr(expected).sum(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(result.p_answer.double(), truth[:, 0], atol=1e-4, rtol=0)
    assert torch.equal(result.answer, shortlist[:, 0])
    assert not result.p_outside.any()
    assert not result.calibrated
    torch.testing.assert_close(result.risk_lower_bound, gf.risk_lower_bound(result.entropy, K), atol=1e-6, rtol=0)


def test_probabilities_sum_to_one(calibrated, queries):
    result = calibrated(queries)
    assert result.calibrated
    assert result.p_outside.min() > 0
    torch.testing.assert_close(result.prob.sum(1) + result.p_outside, torch.ones(QUERIES))
    own = result.prob[result.index == result.answer[:, None]]
    torch.testing.assert_close(result.p_answer, own)
    assert bool((result.prob[:, 1:] <= result.prob[:, :-1]).all())
    bound = 1 - result.prob[:, 0]
    assert bool((result.risk_lower_bound <= bound + 1e-6).all())


def test_the_risk_bound_reckons_with_items_outside_and_with_none_at_all(calibrated, queries):
    """Both are choices besides the items that are listed."""
    told = NoMatch({"inside": -2.0, "constant": 1.0}, 0.6)
    calibrated.calibration = dataclasses.replace(calibrated.calibration, no_match=told)
    for share, more in ((0.0, 1), (0.3, 2)):
        result = calibrated(queries[:9], no_match_share=share)
        assert bool((result.p_no_match > 0).all()) == (share > 0)
        every = torch.cat((result.prob, result.p_outside[:, None], result.p_no_match[:, None]), dim=1).double()
        torch.testing.assert_close(result.entropy.double(), torch.special.entr(every).sum(1), atol=1e-5, rtol=1e-5)
        expected = gf.risk_lower_bound(result.entropy, K + more)
        torch.testing.assert_close(result.risk_lower_bound, expected, atol=1e-6, rtol=0)
        assert bool((result.risk_lower_bound <= 1 - every.amax(1) + 1e-6).all())


def test_permuting_the_gallery_permutes_the_answer(oracle, calibrated, queries):
    order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(3))
    other = make(oracle, oracle.pairs(ITEMS, 0)[0][order])
    other.calibration = calibrated.calibration
    one, two = calibrated(queries), other(queries)
    assert torch.equal(order[two.index], one.index)
    assert torch.equal(order[two.answer], one.answer)
    torch.testing.assert_close(one.prob, two.prob, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_batches_do_not_change_the_result(queries):
    """The divergence of a network is not isotropic: results are the same for any batch only if all pairs share the
    probes."""
    torch.manual_seed(1)
    flow = shaken(gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=32, depth=2, layer_scale=0.5)))
    gallery = noise.sample_uniform(ITEMS, DIM)
    reranker = make(flow, gallery)
    together = reranker(queries[:5])
    alone = [reranker(query[None]) for query in queries[:5]]
    torch.testing.assert_close(together.prob, torch.cat([one.prob for one in alone]), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(make(flow, gallery, seed=1)(queries[:5]).prob, together.prob, atol=1e-3)


@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_an_item_of_several_shortlists_is_encoded_once(direction, monkeypatch):
    """The result is the same as if every pair were encoded on its own."""
    wide = shaken(gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=32, depth=2, layer_scale=0.5)))
    asks = noise.sample_uniform(9, DIM)
    reranker = make(wide, noise.sample_uniform(20, DIM), direction)
    encoded, plain = [], InferenceNetwork.encode

    def counting(network: InferenceNetwork, given: Tensor, stream: int) -> Tensor:
        encoded.append((len(given), stream))
        return plain(network, given, stream)

    monkeypatch.setattr(InferenceNetwork, "encode", counting)
    result = reranker(asks)
    assert encoded == [(len(result.index.unique()), Direction(direction).generated[0])]
    monkeypatch.setattr("geoflow_fast.retrieval.rerank.density_estimates", without_numbers)
    torch.testing.assert_close(reranker(asks).prob, result.prob, atol=1e-5, rtol=1e-4)


def without_numbers(*arguments, given_number, **options):  # noqa: ARG001
    return density_estimates(*arguments, **options)


@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
class TestShortlists:
    def test_faiss_index_finds_the_same(self, oracle, reranker, queries):
        faiss = pytest.importorskip("faiss")
        index = faiss.IndexFlatIP(DIM)
        items = oracle.pairs(ITEMS, 0)[0]
        index.add(items.numpy())
        by_store, plain = make(oracle, gf.Gallery(items, store=index))(queries), reranker(queries)
        assert torch.equal(by_store.index, plain.index)
        torch.testing.assert_close(by_store.prob, plain.prob, atol=1e-5, rtol=0)

    def test_given_candidates_in_any_order_and_number(self, reranker, queries):
        plain = reranker(queries)
        candidates = plain.index.flip(1).clone()
        candidates[:, : K // 2] = -1  # the less probable half is not there
        result = reranker(queries, candidates)
        assert torch.equal(result.index[:, : K // 2], plain.index[:, : K // 2])
        assert bool((result.index[:, K // 2 :] == -1).all())
        kept = plain.prob[:, : K // 2]
        torch.testing.assert_close(result.prob[:, : K // 2], kept / kept.sum(1, keepdim=True), atol=1e-5, rtol=0)
        assert not result.prob[:, K // 2 :].any()

    def test_gallery_in_shards_on_disk(self, oracle, reranker, queries, tmp_path):
        for number, part in enumerate(oracle.pairs(ITEMS, 0)[0].split(70)):
            np.save(tmp_path / f"img_emb_{number}.npy", part.numpy())
        from_disk, plain = make(oracle, tmp_path)(queries), reranker(queries)
        assert torch.equal(from_disk.index, plain.index)
        torch.testing.assert_close(from_disk.prob, plain.prob, atol=1e-5, rtol=0)

    def test_gallery_smaller_than_the_shortlist(self, oracle, queries):
        result = make(oracle, oracle.pairs(5, 0)[0])(queries)
        assert result.index.shape == (QUERIES, 5)
        assert bool((result.index.sort(dim=1).values == torch.arange(5)).all())

    def test_shortlists_are_as_long_as_their_evidence_is_cheap(self, oracle, monkeypatch):
        """Most of a small gallery is looked at. A flow solves an ODE for each item, so it is asked about few."""
        small = torch.nn.functional.normalize(torch.randn(700, DIM), dim=1)

        def lengths(flow: nn.Module | None, items: Tensor = small, **given: object) -> tuple[int, int]:
            made = gf.BayesReranker(flow, items, **given)
            assert ("flow_items" in made.made_for) == (flow is not None and made.flow_items < made.shortlist)
            return made.shortlist, made.flow_items

        assert lengths(oracle) == lengths(None) == (512, 32)
        assert lengths(oracle, small[:100]) == (100, 32)
        assert lengths(oracle, small[:20]) == (20, 20)
        assert lengths(oracle, shortlist=32) == (32, 32)
        assert lengths(oracle, shortlist=(64, 5)) == (64, 5)
        monkeypatch.setattr(rerank, "SMALL_GALLERY", 699)
        assert lengths(oracle) == lengths(None) == (128, 32)

    @pytest.mark.parametrize("shortlist", [0, -1, 2.5, True, (3, 4), (3,), (3, 0), (3, 2, 1), ("3", 2)])
    def test_bad_shortlists_are_refused_before_the_gallery_is_opened(self, shortlist):
        with pytest.raises((TypeError, ValueError), match="shortlist"):
            gf.BayesReranker(None, "no such folder", shortlist=shortlist)

    def test_no_queries(self, reranker, queries):
        result = reranker(queries[:0])
        assert result.index.shape == (0, K)
        assert result.entropy.shape == (0,)

    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ([0] * K, "query 1 name one row twice"),
            ([ITEMS, *range(K - 1)], "query 1 name rows outside the gallery of 300"),
            ([-2, *range(K - 1)], "query 1 name rows outside"),
            ([-1] * K, "query 1 are all -1"),
        ],
    )
    def test_bad_candidates(self, reranker, queries, row, words):
        candidates = torch.arange(K).repeat(QUERIES, 1)
        candidates[1] = torch.tensor(row)
        with pytest.raises(ValueError, match=words):
            reranker(queries, candidates)

    @pytest.mark.parametrize("shape", [(QUERIES,), (QUERIES - 1, K), (QUERIES, 0), (QUERIES, 1, K)])
    def test_candidates_of_the_wrong_shape(self, reranker, queries, shape):
        with pytest.raises(ValueError, match=r"candidates must be integers \[40, K\], K at least 1, got torch.int64"):
            reranker(queries, torch.zeros(shape, dtype=torch.long))

    def test_any_number_of_candidates(self, oracle, calibrated, queries):
        """The posterior over K candidates is that of a re-ranker whose shortlists have K items, with the same weights.
        Those of its own length have the same bits."""
        for count in (1, 3, K, 2 * K, ITEMS):
            candidates = (queries @ oracle.pairs(ITEMS, 0)[0].T).topk(count).indices
            other = make(oracle, oracle.pairs(ITEMS, 0)[0], shortlist=count)
            other.calibration = dataclasses.replace(calibrated.calibration, made_for=other.made_for)
            result, expected = calibrated(queries, candidates), other(queries)
            assert result.index.shape == (QUERIES, count)
            assert torch.equal(result.index, expected.index)
            torch.testing.assert_close(result.prob, expected.prob, atol=1e-6, rtol=0)
            torch.testing.assert_close(result.risk_lower_bound, expected.risk_lower_bound, atol=1e-5, rtol=0)
        alone = calibrated(queries, candidates[:, :1]).prob
        torch.testing.assert_close(alone, alone[:1].expand_as(alone))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_queries_of_any_floating_type(self, reranker, queries, dtype):
        rounded = queries.to(dtype)
        result = reranker(rounded)
        assert result.prob.dtype == torch.float32
        rounded = nn.functional.normalize(rounded.float(), dim=1)
        torch.testing.assert_close(result.prob, reranker(rounded).prob, atol=1e-5, rtol=0)
        if dtype != torch.bfloat16:
            assert torch.equal(reranker(queries.to(dtype).numpy()).prob, result.prob)


class TestCalibration:
    def test_the_gallery_is_searched_with_the_querys_own_item(self, oracle):
        """The field's distribution is the true one, so calibration finds alpha = 1, beta = 0 and the share of queries
        whose item is outside."""
        gallery, texts = oracle.pairs(2000, 0)
        reranker = make(oracle, gallery, shortlist=32)
        fitted = reranker.calibrate(held_out(oracle, 1000))
        assert abs(fitted.alpha - 1) < 4 * fitted.stderr[0]
        assert abs(fitted.beta) < 4 * fitted.stderr[1]
        post = reranker(texts[:500])
        own = torch.arange(500)
        reached = (post.index == own[:, None]).any(1).float()
        stderr = float(reached.std()) / math.sqrt(500)
        assert abs(float(post.p_outside.mean()) - float(1 - reached.mean())) < 4 * stderr
        right = (post.answer == own).float()
        assert abs(float(post.p_answer.mean() - right.mean())) < 4 * float(right.std()) / math.sqrt(500)
        for count in (8, 128):  # lengths that the calibration was not made for
            candidates = (texts[:500] @ gallery.T).topk(count).indices
            outside = 1 - float((candidates == own[:, None]).any(1).float().mean())
            assert abs(float(reranker(texts[:500], candidates).p_outside.mean()) - outside) < 0.1

    def test_items_that_are_in_the_gallery_already_count_once(self, oracle):
        gallery, _ = oracle.pairs(ITEMS, 0)
        pairs = held_out(oracle)
        apart = make(oracle, gallery).calibrate(pairs)
        image = torch.from_numpy(pairs.image[np.arange(len(pairs))])
        # The same pairs in a gallery that holds one of their images in float16: that query sees no difference.
        inside = make(oracle, torch.cat((gallery, image[:1].half().float())))
        query, number = pairs[[0]][1], torch.tensor([[ITEMS, *range(K - 1)]])
        shortlist = by_cosine(query, inside.gallery.take(number), number >= 0, number)
        own = by_cosine(query, image[:1, None], torch.ones(1, 1, dtype=torch.bool), torch.tensor([[-2]]))
        both = shortlist.with_own(own)
        assert int(both.right.sum()) == int(both.right_count) == 1
        near = both.near.nearness[both.near.valid]
        assert int((near > own.nearness - 1e-5).sum()) - int((shortlist.nearness > own.nearness + 1e-5).sum()) == 1
        assert both.absent.tolist() == [[False, *[True] * (K - 1), False]]
        assert inside.calibrate(pairs).queries == apart.queries

    def test_all_texts_of_an_image_are_right(self, oracle):
        image, first = oracle.pairs(200, 1)
        second = sample_bump(image @ oracle.rotation.T, oracle.law.c, torch.Generator().manual_seed(9))
        index = torch.arange(200).repeat(2)
        pairs = gf.EmbeddingPairs.from_arrays(image, torch.cat((first, second)), index)
        assert make(oracle, image, "t2i").calibrate(pairs).queries == 400
        _, gallery = oracle.pairs(500, 0)
        reranker = make(oracle, gallery, "i2t")
        fitted = reranker.calibrate(pairs)
        assert fitted.queries == 200
        assert fitted.right_per_query == 2

    def test_the_answer_is_right_if_it_is_any_of_the_right_items(self, oracle):
        """Each image has two texts in the gallery: p_answer is as large as the share of answers that are right."""
        images, texts, index = [], [], torch.arange(400).repeat(2)
        for seed in (0, 1):
            image, first = oracle.pairs(400, seed)
            second = sample_bump(image @ oracle.rotation.T, oracle.law.c, torch.Generator().manual_seed(9 + seed))
            images.append(image)
            texts.append(torch.cat((first, second)))
        reranker = make(oracle, texts[0], "i2t", shortlist=32)
        reranker.calibrate(gf.EmbeddingPairs.from_arrays(images[1], texts[1], index))
        result = reranker(images[0])
        right = (index[result.answer] == torch.arange(400)).float()
        assert abs(float(result.p_answer.mean() - right.mean())) < 4 * float(right.std()) / math.sqrt(400)
        assert float(right.mean()) > 1.5 * float(result.prob[result.index == result.answer[:, None]].mean())

    def test_too_few_queries_are_refused(self, oracle, reranker):
        with pytest.raises(ValueError, match=rf"only \d+ of {LEAST_QUERIES - 1} held-out queries have a right item"):
            reranker.calibrate(held_out(oracle, LEAST_QUERIES - 1))
        assert reranker.calibration is None

    def test_no_pairs_are_refused(self, oracle, reranker):
        with pytest.raises(ValueError, match="max_queries must be at least 1"):
            reranker.calibrate(held_out(oracle), max_queries=0)

    def test_width_of_the_pairs(self, reranker):
        pairs = gf.EmbeddingPairs.from_arrays(noise.sample_uniform(60, 4), noise.sample_uniform(60, DIM))
        with pytest.raises(ValueError, match="held-out pairs have widths 4 and 6, but the flow expects 6"):
            reranker.calibrate(pairs)


class TestStoredCalibration:
    def test_round_trip_in_the_folder_of_the_flow(self, oracle, calibrated, queries, tmp_path):
        assert calibrated.save_calibration(tmp_path) == tmp_path / "rerank_t2i.json"
        other = make(oracle, oracle.pairs(ITEMS, 0)[0])
        assert other.load_calibration(tmp_path) == calibrated.calibration
        assert torch.equal(other(queries).prob, calibrated(queries).prob)
        assert "uncalibrated" not in repr(other)

    def test_it_belongs_to_a_flow_and_its_settings(self, oracle, calibrated, tmp_path):
        path = calibrated.save_calibration(tmp_path / "weights.json")
        images, texts = oracle.pairs(ITEMS, 0)
        with pytest.raises(ValueError, match=r"weights\.json was made for another n_steps; calibrate again"):
            make(oracle, images, n_steps=7).load_calibration(path)
        with pytest.raises(ValueError, match="another direction"):
            make(oracle, texts, "i2t").load_calibration(path)
        with torch.no_grad():
            oracle.rotation.neg_()
        with pytest.raises(ValueError, match="another flow"):
            make(oracle, images).load_calibration(path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"alpha": "1"}, "its weights are"),
            ({"kind": "other"}, "is not a calibration"),
            ({"version": 2}, "of version 2; this release reads version 1"),
            ({"more": 0}, r"fields differ in \['more'\]"),
            (None, "is damaged"),
        ],
    )
    def test_damaged_files(self, calibrated, tmp_path, change, words):
        path = calibrated.save_calibration(tmp_path)
        text = path.read_text()
        path.write_text(text[:100] if change is None else json.dumps({**json.loads(text), **change}))
        with pytest.raises(ValueError, match=words):
            calibrated.load_calibration(path)

    def test_nothing_to_save_or_load(self, reranker, tmp_path):
        with pytest.raises(ValueError, match="no calibration to save"):
            reranker.save_calibration(tmp_path)
        with pytest.raises(FileNotFoundError):
            reranker.load_calibration(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"direction": "joint"}, "direction must be one of"),
        ({"shortlist": 0}, "shortlist must be at least 1"),
        ({"gallery": torch.eye(5)}, "gallery has width 5, but the flow expects 6"),
        ({"flow": gf.GeoFlow(gf.GeoFlowConfig(6, 5, hidden=8, depth=1))}, "images and texts of one width"),
        ({"n_steps": 0}, "n_steps must be"),
        ({"n_probes": 0}, "n_probes must be"),
        ({"solver": "magic"}, "solver must be one of"),
    ],
)
def test_bad_settings(oracle, changes, words):
    settings = {"flow": oracle, "gallery": oracle.pairs(ITEMS, 0)[0], **changes}
    with pytest.raises(ValueError, match=words):
        make(**settings)


def test_an_index_of_other_rows_is_refused(oracle):
    @dataclasses.dataclass
    class Index:
        ntotal: int

    with pytest.raises(ValueError, match="store holds 299 items, not the 300 rows"):
        gf.Gallery(oracle.pairs(ITEMS, 0)[0], store=Index(299))


def test_bad_queries(reranker):
    with pytest.raises(ValueError, match=r"queries must be \[Q, 6\], got \(2, 5\)"):
        reranker(torch.eye(5)[:2])
    with pytest.raises(ValueError, match="queries row 1 has norm 2"):
        reranker(torch.eye(6)[:3] * torch.tensor([[1.0], [2.0], [1.0]]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_a_trained_flow_gives_the_true_posterior_calibrated(concept_flow, direction):
    """1,000 queries search 1,000 items of the concept world; 1,000 other pairs calibrate."""
    measured = RerankStudy(concept_flow, direction).reranked()
    assert measured["correlation of entropies"] >= 0.85, measured
    assert measured["ECE"] <= 0.05, measured
    assert measured["ECE outside"] <= 0.05, measured
    assert abs(measured["NLL"] - measured["NLL, cross-fitted"]) < 0.15, measured


class TestEqualItems:
    """Items with the very same embedding, which nothing tells apart."""

    @pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
    def test_the_order_of_candidates_does_not_matter(self, oracle, queries):
        """Of equal items the one with the lowest number is the answer, as in plain search, and comes first."""
        items = oracle.pairs(3, 0)[0].repeat(7, 1)
        reranker = make(oracle, items)
        numbers = torch.arange(21).repeat(QUERIES, 1)
        sorted_, shuffled = (
            reranker(queries, candidates)
            for candidates in (numbers, torch.stack([torch.randperm(21) for _ in range(QUERIES)]))
        )
        assert torch.equal(sorted_.answer, (queries @ items[:3].T).argmax(1))
        for name in ("index", "answer", "prob", "p_answer", "relevance"):
            assert torch.equal(getattr(shuffled, name), getattr(sorted_, name)), name
        assert torch.equal(sorted_.index[:, :3].sort(1).values, torch.arange(3).expand(QUERIES, 3))
        assert bool((sorted_.index[:, 3:] == -1).all())
        torch.testing.assert_close(sorted_.prob[:, :3].sum(1), torch.ones(QUERIES))

    @pytest.mark.parametrize(("own", "copies"), [(1, 1), (1, 3), (2, 1), (2, 3), (1, 0)])
    def test_copies_of_the_own_item_are_that_item(self, oracle, own, copies):
        image, text = oracle.pairs(9, 0)
        items = torch.cat((image[:1].expand(copies, -1), image[1:]))[None]
        valid = torch.ones(1, items.shape[1], dtype=torch.bool)
        gallery = by_cosine(text[:1], items, valid, torch.arange(items.shape[1])[None])
        numbers = torch.full((1, own), -2)
        both = gallery.with_own(by_cosine(text[:1], image[:1].expand(1, own, -1), numbers < 0, numbers))
        equal = (both.near.items == image[0]).all(2) & both.near.valid
        assert torch.equal(equal, both.right)
        assert (int(both.right.sum()), int(both.right_count)) == (1, 1)
        assert not (both.absent & (both.near.items == image[0]).all(2)).any()
        assert int(both.absent.sum()) == 8

    def test_calibration_states_the_probability_of_any_of_equal_items(self, oracle):
        """Each held-out item is in the gallery three times: the answer is right if any of them is."""
        pairs = held_out(oracle)
        image = torch.from_numpy(pairs.image[np.arange(200)])
        once, thrice = (make(oracle, image.repeat(copies, 1)) for copies in (1, 3))
        text = torch.from_numpy(pairs.text[np.arange(200)])
        stated = []
        for reranker in (once, thrice):
            reranker.calibrate(pairs, progress=False)
            stated.append(reranker(text))
        assert torch.equal(stated[0].index, stated[1].index)
        torch.testing.assert_close(stated[0].p_answer, stated[1].p_answer, atol=1e-5, rtol=0)
        hit = (image @ text.T).argmax(0) == torch.arange(200)
        assert float(stated[1].p_answer.mean()) == pytest.approx(float(hit.double().mean()), abs=0.09)

    def test_more_hits_are_fetched_where_copies_took_the_room(self, oracle, queries):
        """Nine copies are more than three further passes can make up for."""
        image = oracle.pairs(100, 0)[0]
        once = make(oracle, image)._shortlists(queries, K)
        assert torch.equal(make(oracle, image.repeat(5, 1))._shortlists(queries, K), once)
        few = make(oracle, image.repeat(9, 1))._shortlists(queries, K)
        assert bool(((few >= 0).sum(1) >= 8 * K // 9).all())
        assert torch.equal(few[:, :10], once[:, :10])


def test_evidence_explains_the_probabilities():
    """Within a shortlist, probabilities differ by what the kinds of evidence add up to."""
    image, text, _ = gf.worlds.ConceptWorld().sample(900, generator=torch.Generator().manual_seed(0))
    search = gf.BayesReranker(None, image[:200], direction="t2i", shortlist=20, bank=text[200:500])
    search.calibrate(gf.EmbeddingPairs.from_arrays(image[500:], text[500:]), progress=False)
    answers = search(text[:50])
    assert answers.evidence.shape == (50, 20, len(search.evidence_names))
    logit = answers.evidence.double().sum(2)
    expected = answers.prob.double().log()
    torch.testing.assert_close(logit - logit[:, :1], expected - expected[:, :1], atol=1e-4, rtol=1e-4)
