"""Queries for which nothing, several items, or copies of one item are right, on worlds whose truth is known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.metrics import auroc, reliability
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.evidence import fit_logistic
from geoflow_fast.retrieval.hubs import Hubs
from geoflow_fast.retrieval.item_bank import ItemBank
from geoflow_fast.retrieval.no_match import NoMatch, fit_no_match
from geoflow_fast.retrieval.sources import HeadSource
from geoflow_fast.worlds import ConceptWorld
from tests.head.test_model import random_head
from tests.retrieval.test_evidence import hub_pairs, hub_world

ITEMS, QUERIES, SHARE = 300, 300, 0.4


@pytest.fixture(scope="module")
def world() -> ConceptWorld:
    return ConceptWorld()


def held_out(world: ConceptWorld, count: int, seed: int) -> gf.EmbeddingPairs:
    image, text, _ = world.sample(count, generator=torch.Generator().manual_seed(seed))
    return gf.EmbeddingPairs.from_arrays(image, text)


@pytest.fixture(scope="module")
def searched(world) -> tuple[gf.BayesReranker, Tensor, Tensor]:
    """A calibrated re-ranker, queries of which some have no item in the gallery, and whether each has one."""
    drawn = world.sample_search(QUERIES, ITEMS, "i2t", share=SHARE, generator=torch.Generator().manual_seed(3))
    reranker = gf.BayesReranker(None, drawn.gallery, "i2t")
    reranker.calibrate(held_out(world, 250, 4))
    return reranker, drawn.queries, drawn.item >= 0


class TestLogistic:
    def test_weights_are_those_of_scikit_learn(self):
        x = torch.randn(300, 3, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1]) + 2
        y = (torch.rand(300) < torch.sigmoid(x[:, 0] - 0.3 * x[:, 1])).double()
        weights, loss = fit_logistic(x, y, torch.arange(300) % 10)
        plain = LogisticRegression(C=1e6, max_iter=1000, tol=1e-10).fit(x.numpy(), y.numpy())
        assert weights[:-1].numpy() == pytest.approx(plain.coef_[0], rel=0.05, abs=0.02)
        assert float(weights[-1]) == pytest.approx(float(plain.intercept_[0]), abs=0.1)
        assert 0.2 < float(loss.mean()) < 0.69

    def test_features_without_a_gain_are_left_out(self):
        """Only "inside" tells the two kinds apart here."""
        generator = torch.Generator().manual_seed(0)
        names = ("answer", "inside", "best", "margin", "entropy", "cosine")
        present, absent = (
            {name: torch.randn(400, generator=generator).double() + shift * (name == "inside") for name in names}
            for shift in (0.5, -0.5)
        )
        fitted = fit_no_match(present, absent, torch.arange(400), torch.arange(400) % 10)
        assert set(fitted.weights) == {"inside", "constant"}
        assert fitted.weights["inside"] == pytest.approx(-1.0, abs=0.2)

    @pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5)])
    def test_the_share_is_the_prior(self, share, expected):
        told = NoMatch({"inside": math.log(3), "constant": 0.0}, 0.6)
        prob = told.probability({"inside": torch.ones(2, dtype=torch.float64)}, share)
        assert prob.tolist() == pytest.approx([expected] * 2)


class TestNoMatch:
    def test_a_share_of_zero_leaves_all_numbers(self, searched):
        reranker, queries, _ = searched
        plain, same = reranker(queries), reranker(queries, no_match_share=0)
        for name in ("prob", "p_answer", "p_outside", "entropy", "risk_lower_bound", "relevance"):
            assert torch.equal(getattr(plain, name), getattr(same, name)), name
        assert not plain.p_no_match.any()

    def test_probabilities_sum_to_one_and_shrink_together(self, searched):
        reranker, queries, _ = searched
        plain, result = reranker(queries), reranker(queries, no_match_share=SHARE)
        torch.testing.assert_close(result.prob.sum(1) + result.p_outside + result.p_no_match, torch.ones(QUERIES))
        matches = 1 - result.p_no_match
        for name in ("p_answer", "p_outside"):
            torch.testing.assert_close(getattr(result, name), getattr(plain, name) * matches)
        torch.testing.assert_close(result.relevance, plain.relevance * matches[:, None])
        assert torch.equal(result.index, plain.index)

    def test_missing_items_are_noticed_and_the_probability_is_calibrated(self, searched):
        reranker, queries, is_there = searched
        result = reranker(queries, no_match_share=SHARE)
        assert auroc(result.p_no_match, is_there) > max(0.6, auroc(result.p_outside, is_there) + 0.02)
        assert abs(float(result.p_no_match.mean()) - float((~is_there).double().mean())) < 0.08
        assert reliability(result.p_no_match, ~is_there).ece < 0.12

    def test_bad_shares(self, searched):
        reranker, queries, _ = searched
        for share, error in ((1.5, ValueError), (-0.1, ValueError), (math.nan, ValueError), ("0", TypeError)):
            with pytest.raises(error, match="no_match_share"):
                reranker(queries[:2], no_match_share=share)
        with pytest.raises(ValueError, match="no_match_share= needs a calibration"):
            gf.BayesReranker(None, reranker.gallery, "i2t")(queries[:2], no_match_share=0.1)

    def test_it_is_stored(self, searched, tmp_path):
        reranker, queries, _ = searched
        path = reranker.save_calibration(tmp_path / "ladder.json")
        other = gf.BayesReranker(None, reranker.gallery, "i2t")
        other.load_calibration(path)
        one, two = (each(queries[:9], no_match_share=0.3).p_no_match for each in (reranker, other))
        assert torch.equal(one, two)


class TestItemBank:
    def test_the_level_is_the_logarithm_of_the_mean(self):
        generator = torch.Generator().manual_seed(0)
        queries, items, typical = (
            torch.nn.functional.normalize(torch.randn(n, 5, generator=generator)) for n in (7, 129, 20)
        )
        bank = ItemBank(items, None, Hubs(typical, None))
        weights, scale = {"cosine": 9.0, "hub": -0.5}, 20.0
        hub = (scale * items @ typical.T).double().logsumexp(1) - math.log(20)
        scores = 9.0 * (queries @ items.T).double() - 0.5 * hub
        expected = scores.logsumexp(1) - math.log(129)
        torch.testing.assert_close(bank.level(queries, weights, scale), expected, atol=1e-4, rtol=1e-5)
        left_out = torch.zeros(7, 129, dtype=torch.bool)
        left_out[:, 5:] = True
        expected = scores[:, :5].logsumexp(1) - math.log(5)
        torch.testing.assert_close(bank.level(queries, weights, scale, left_out), expected, atol=1e-4, rtol=1e-5)
        assert bank.level(queries[:0], weights, scale).shape == (0,)

    def test_the_level_of_exact_scores_is_zero(self, world):
        """The mean of exp(PMI) over independent items is one for every query, and what a gallery has above it tells
        whether the item is there as well as the exact posterior does, up to the noise of the bank."""
        drawn = world.sample_search(200, 200, "i2t", share=0.5, generator=torch.Generator().manual_seed(8))
        items = world.sample(4000, generator=torch.Generator().manual_seed(9))[1]
        level = world.gallery_pmi(drawn.queries, items, "i2t").exp().mean(1)
        assert float(level.mean()) == pytest.approx(1, abs=0.25)

    def test_items_of_the_held_out_pairs_are_the_bank(self, searched, tmp_path):
        reranker, queries, _ = searched
        assert reranker.calibration.items == reranker.item_bank.digest
        assert len(reranker.item_bank.items) == 250
        assert {"mass", "bank"} <= set(reranker.feature_names)
        column = reranker(queries[:9]).features[:, reranker.feature_names.index("bank")]
        fitted = reranker.calibration
        level = reranker.item_bank.level(queries[:9], fitted.score_weights, fitted.hub_scale)
        torch.testing.assert_close(column, level)
        path = reranker.save_calibration(tmp_path / "ladder.json")
        next(tmp_path.glob("*.bank.safetensors")).unlink()
        with pytest.raises((OSError, ValueError), match="bank"):
            gf.BayesReranker(None, reranker.gallery, "i2t").load_calibration(path)

    def test_another_bank_is_refused(self, searched):
        reranker, queries, _ = searched
        other = gf.BayesReranker(None, reranker.gallery, "i2t")
        other._use_bank(reranker.bank)
        other.calibration = reranker.calibration
        with pytest.raises(ValueError, match="another bank of items"):
            other(queries[:2])

    @torch.no_grad()
    def test_what_a_head_has_learned_about_items_counts_by_its_weight(self):
        head = random_head()
        head.biases["t2i"][-1].weight.normal_()
        source, queries, items = HeadSource(head, Direction.T2I), sample_uniform(7, 6), sample_uniform(40, 6)
        learned = head.item_bias(items, Direction.T2I).double()
        assert float(learned.std()) > 1e-3
        scores = 3.0 * (source.all_scores(queries, items).double() + learned)
        level = ItemBank(items, source, None).level(queries, {"head": 3.0}, 0.0)
        torch.testing.assert_close(level, scores.logsumexp(1) - math.log(40))


class TestCopies:
    @pytest.mark.parametrize("direction", ["t2i", "i2t"])
    def test_storing_every_item_five_times_changes_no_decision(self, world, direction):
        items = 150
        drawn = world.sample_search(items, items, direction, generator=torch.Generator().manual_seed(5))
        shares = []
        for copies in (1, 5):
            reranker = gf.BayesReranker(None, drawn.gallery.repeat(copies, 1), direction)
            reranker.calibrate(held_out(world, 120, 6))
            result = reranker(drawn.queries)
            assert bool((result.index < items).all())
            shares.append([float((result.p_answer > limit).double().mean()) for limit in (0.3, 0.5, 0.8)])
        for once, often in zip(*shares):
            assert once > 0.02
            assert abs(often - once) < 0.1 * once

    def test_candidates_are_pooled(self, searched):
        """A copy among a caller's candidates changes nothing but the length of the list."""
        reranker, queries, _ = searched
        items = reranker.gallery.rows
        twin = gf.BayesReranker(None, torch.cat((items, items[:50])), "i2t")
        twin._use_bank(reranker.bank)
        twin.item_bank = reranker.item_bank
        twin.calibration = dataclasses.replace(reranker.calibration, made_for={})
        numbers = torch.arange(50).repeat(9, 1)
        plain = reranker(queries[:9], numbers)
        pooled = twin(queries[:9], torch.cat((numbers + ITEMS, numbers), dim=1))
        assert torch.equal(pooled.index[:, :50], plain.index)
        assert bool((pooled.index[:, 50:] == -1).all())
        for name in ("prob", "relevance"):
            torch.testing.assert_close(getattr(pooled, name)[:, :50], getattr(plain, name), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pooled.p_answer, plain.p_answer, atol=1e-5, rtol=1e-4)


class TestRelevance:
    @pytest.fixture(scope="class")
    @classmethod
    def captions(cls) -> tuple[gf.BayesReranker, Tensor, Tensor]:
        """Images that search captions, three of each image, and the image of each caption."""
        image, text = hub_world(500, 1)
        generator = torch.Generator().manual_seed(2)
        texts = [torch.nn.functional.normalize(text + 0.15 * torch.randn(500, 8, generator=generator)) for _ in "abc"]
        of_image = torch.arange(500).repeat(3)
        pairs = gf.EmbeddingPairs.from_arrays(image, torch.cat(texts), of_image)
        held, test = pairs.subset(of_image.numpy() < 250), of_image >= 250
        reranker = gf.BayesReranker(None, torch.cat(texts)[test], "i2t")
        reranker.calibrate(held)
        return reranker, image[250:], of_image[test] - 250

    def test_it_does_not_sum_to_one_and_is_calibrated(self, captions):
        reranker, queries, of_image = captions
        result = reranker(queries)
        right = (of_image[result.index[:, :20]] == torch.arange(250)[:, None]).flatten()
        stated = result.relevance[:, :20].flatten()
        assert reliability(stated, right).ece < 0.05
        assert 2 < float(result.relevance.sum(1).mean()) < 4
        assert float(result.relevance.max()) > 1.5 * float(result.prob.max())
        assert bool(((result.relevance >= 0) & (result.relevance <= 1)).all())

    def test_judgements_serve_as_well_as_pairs(self, captions):
        """The gallery holds the captions that the judgements name; grades below the least do not count."""
        reranker, queries, of_image = captions
        item = np.arange(len(of_image))
        query, grade = of_image.numpy(), 1.0 + (item < 500)
        wrong = (query + 1) % 250
        qrels = gf.Qrels(
            np.concatenate((query, wrong)), np.concatenate((item, item)), np.concatenate((grade, 0 * grade))
        )
        judged = gf.BayesReranker(None, reranker.gallery, "i2t")
        fitted = judged.calibrate(qrels, queries=queries)
        assert (fitted.queries, fitted.right_per_query) == (250, 3.0)
        assert fitted.by_feature["cosine"] == pytest.approx(reranker.calibration.by_feature["cosine"], rel=0.5)
        right = of_image[judged(queries).answer] == torch.arange(250)
        assert abs(float(judged(queries).p_answer.mean() - right.double().mean())) < 0.1
        best = judged.calibrate(qrels, queries=queries.numpy(), least_grade=2, max_queries=200)
        assert (best.queries, best.right_per_query) == (200, 2.0)

    @pytest.mark.parametrize(
        ("qrels", "more", "words"),
        [
            (([0], [0], [1.0]), {}, "judgements need queries="),
            (([9], [0], [1.0]), {"queries": "some"}, "name query 9, but there are 5 rows"),
            (([0], [750], [1.0]), {"queries": "some"}, "name item 750, but there are 750 rows"),
            (([0], [0], [0.0]), {"queries": "some"}, "no judgement has a grade above 0"),
            (([0], [0], [1.0]), {"queries": "some"}, "only . of 1 held-out queries"),
        ],
    )
    def test_bad_judgements(self, captions, qrels, more, words):
        reranker, queries, _ = captions
        other = gf.BayesReranker(None, reranker.gallery, "i2t")
        with pytest.raises(ValueError, match=words):
            other.calibrate(gf.Qrels(*qrels), **({"queries": queries[:5]} if more else {}))

    def test_pairs_have_queries_of_their_own(self):
        with pytest.raises(ValueError, match="queries= belongs to judgements"):
            gf.BayesReranker(None, hub_world(90, 1)[0]).calibrate(hub_pairs(60, 2), queries=hub_world(5, 1)[1])
