"""Two tiers: the flow is asked about the most probable items of long shortlists, and cannot make them worse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.retrieval.calibration import FlowAsked, fit_calibration
from geoflow_fast.retrieval.evidence import Evidence, joined_tiers, most_probable, of_others
from geoflow_fast.retrieval.no_match import NoMatch
from tests.retrieval.test_evidence import drawn_choice
from tests.retrieval.test_rerank import ITEMS, Oracle, held_out

QUERIES, K, ASKED = 500, 40, 8


def asked_mask(rows: int, seed: int) -> Tensor:
    return torch.rand(rows, K, generator=torch.Generator().manual_seed(seed)).argsort(1) < ASKED


class TestJoined:
    def test_no_evidence_of_the_flow_changes_nothing(self):
        cheap = torch.randn(5, K + 1, dtype=torch.float64)
        asked = asked_mask(5, 0)
        joined = joined_tiers(cheap[:, :-1], asked, of_others(cheap, asked), cheap)
        torch.testing.assert_close(joined, cheap.log_softmax(1))

    def test_others_share_what_is_left_as_before(self):
        cheap, inside = (torch.randn(5, K + 1, dtype=torch.float64) for _ in range(2))
        asked = asked_mask(5, 1)
        asked[0] = False
        prob = joined_tiers(inside[:, :-1], asked, torch.randn(5, dtype=torch.float64), cheap).exp()
        torch.testing.assert_close(prob.sum(1), torch.ones(5, dtype=torch.float64))
        torch.testing.assert_close(prob[0], cheap[0].softmax(0))
        others = torch.nn.functional.pad(~asked, (0, 1), value=True)
        for row in range(5):
            kept = prob[row][others[row]]
            torch.testing.assert_close(kept / kept.sum(), cheap[row][others[row]].softmax(0))

    def test_the_most_probable_are_asked(self):
        logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
        valid = torch.tensor([[True, True, False, True], [False, False, False, True]])
        expected = [[True, True, False, False], [False, False, False, True]]
        assert most_probable(logits, valid, 2).tolist() == expected
        assert torch.equal(most_probable(logits, valid, 9), valid)


class TestFit:
    """Simulated queries, whose right items are drawn from known logits."""

    def fitted(self, alpha: float, seed: int, flow_seed: int = 1) -> tuple[gf.Calibration, Evidence, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        cosine = torch.randn(QUERIES, K, generator=generator).double()
        flow = torch.randn(QUERIES, K, generator=torch.Generator().manual_seed(flow_seed)).double()
        right = drawn_choice(2 * cosine + alpha * flow, seed)
        evidence = Evidence({"cosine": cosine}, cosine, torch.ones(QUERIES, K, dtype=torch.bool))
        counts = torch.ones(QUERIES), torch.arange(QUERIES)
        seen = FlowAsked(ASKED, lambda asked: flow.masked_fill(~asked, 0.0))
        return fit_calibration(evidence, right, *counts, {}, flow=seen), evidence, flow, right

    def test_a_useful_flow_is_kept_and_weighed(self):
        fitted, *_ = self.fitted(1.5, 0)
        assert [rung.name for rung in fitted.rungs] == ["cosine", "flow"]
        assert fitted.rungs[1].kept
        assert fitted.rungs[1].gain > 5 * fitted.rungs[1].stderr
        assert fitted.alpha == pytest.approx(1.5, abs=0.3)
        assert fitted.beta == pytest.approx(2.0, abs=0.4)
        assert fitted.rest is not None

    def test_noise_is_kept_as_rarely_as_chance_allows(self):
        kept = [self.fitted(0.0, seed, 100 + seed)[0] for seed in range(10)]
        assert sum(fitted.alpha != 0 for fitted in kept) <= 4
        assert all(fitted.rest is None and fitted.cheap is None for fitted in kept if not fitted.alpha)

    def test_cross_fitted_loss_is_that_of_new_queries(self):
        fitted, *_ = self.fitted(1.5, 0)
        _, evidence, flow, right = self.fitted(1.5, 7, 8)
        asked = most_probable(fitted.cheap.logits(evidence)[:, :-1], evidence.valid, ASKED)
        both = {**evidence.features, "flow": flow.masked_fill(~asked, 0.0)}
        prob = fitted.probabilities(dataclasses.replace(evidence, features=both, asked=asked))
        torch.testing.assert_close(prob.sum(1), torch.ones(QUERIES, dtype=torch.float64))
        target = torch.cat((right, ~right.any(1, keepdim=True)), dim=1)
        loss = -prob[target].log()
        spread = math.hypot(fitted.nll_stderr, float(loss.std()) / math.sqrt(QUERIES))
        assert abs(float(loss.mean()) - fitted.nll) < 4 * spread


class TestReranker:
    @pytest.fixture(scope="class")
    @classmethod
    def oracle(cls) -> Oracle:
        return Oracle()

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls, oracle) -> gf.BayesReranker:
        reranker = gf.BayesReranker(oracle, oracle.pairs(ITEMS, 0)[0], shortlist=(ITEMS, 16), n_steps=2)
        reranker.calibrate(held_out(oracle, 250))
        return reranker

    def test_the_flow_is_asked_about_the_most_probable_items_only(self, oracle, fitted, monkeypatch):
        assert fitted.calibration.rest is not None
        solved, plain = [], fitted.log_densities

        def counting(queries: Tensor, items: Tensor, number: Tensor, valid: Tensor, total: int) -> Tensor:
            solved.append(int(valid.sum()))
            return plain(queries, items, number, valid, total)

        monkeypatch.setattr(fitted, "log_densities", counting)
        result = fitted(oracle.pairs(ITEMS, 0)[1][:30])
        assert result.index.shape == (30, ITEMS)
        assert sum(solved) == 30 * 16
        torch.testing.assert_close(result.prob.sum(1) + result.p_outside, torch.ones(30))

    def test_it_is_better_than_without_the_flow_over_the_whole_gallery(self, oracle, fitted):
        image, text = oracle.pairs(ITEMS, 0)
        cheap = gf.BayesReranker(None, image, shortlist=ITEMS)
        cheap.calibrate(held_out(oracle, 250))
        own = torch.arange(ITEMS)
        with_flow, without = (
            float(-each(text).prob[each(text).index == own[:, None]].log().mean()) for each in (fitted, cheap)
        )
        assert with_flow < without - 0.3

    def test_queries_beyond_the_budget_have_the_probabilities_without_the_flow(self, oracle, fitted):
        text = oracle.pairs(ITEMS, 0)[1][:40]
        calibration = fitted.calibration
        cheap = gf.BayesReranker(None, fitted.gallery, shortlist=ITEMS)
        weights = {name: value for name, value in calibration.cheap.weights.items() if name != "outside"}
        cheap.item_bank = fitted.item_bank
        cheap.calibration = dataclasses.replace(
            calibration,
            alpha=0.0,
            beta=weights.pop("cosine"),
            others=weights,
            outside=calibration.cheap.weights["outside"],
            platt=calibration.cheap.platt,
            cheap=None,
            rest=None,
            relevance=None,
            no_match=None,
            made_for={},
        )
        if fitted.hubs is not None:
            cheap._use_bank(fitted.bank)
        fitted.budget = 0.25
        some = fitted(text)
        fitted.budget = None
        assert 0 < int(some.asked_flow.sum()) <= 10
        asked, plain = some.asked_flow, cheap(text)
        torch.testing.assert_close(some.prob[~asked], plain.prob[~asked])
        torch.testing.assert_close(some.p_answer[~asked], plain.p_answer[~asked])
        assert not torch.allclose(some.prob[asked], plain.prob[asked], atol=1e-3)

    def test_a_missing_item_is_told_without_the_flow_where_it_is_not_asked(self, oracle, fitted):
        text, calibration = oracle.pairs(ITEMS, 0)[1][:40], fitted.calibration
        # Weights that are wrong by far wherever the flow's level is not known.
        told = NoMatch({"flow level": 1.0, "constant": 50.0}, 0.6)
        fitted.calibration, fitted.budget = dataclasses.replace(calibration, no_match=told), 0.25
        some = fitted(text, no_match_share=0.3)
        fitted.calibration, fitted.budget = calibration, None
        assert 0 < int(some.asked_flow.sum()) <= 10
        assert float(some.p_no_match[~some.asked_flow].max()) < 0.9  # none of these items is missing

    @pytest.mark.parametrize("count", [1, 5, 16, 20])
    def test_any_number_of_candidates(self, oracle, fitted, count):
        image, text = oracle.pairs(ITEMS, 0)
        result = fitted(text[:9], (text[:9] @ image.T).topk(count).indices)
        torch.testing.assert_close(result.prob.sum(1) + result.p_outside, torch.ones(9))

    def test_round_trip(self, oracle, fitted, tmp_path):
        path = fitted.save_calibration(tmp_path)
        image, text = oracle.pairs(ITEMS, 0)
        other = gf.BayesReranker(oracle, image, n_steps=2)  # its own default asks about 32
        assert other.load_calibration(path) == fitted.calibration
        assert (other.shortlist, other.flow_items) == (ITEMS, 16)
        for name in ("prob", "p_answer", "relevance", "features"):
            assert torch.equal(getattr(other(text[:7]), name), getattr(fitted(text[:7]), name)), name
        with pytest.raises(ValueError, match="another flow_items"):
            gf.BayesReranker(oracle, image, shortlist=ITEMS, n_steps=2).load_calibration(path)

    def test_a_calibration_of_short_shortlists_is_used_as_it_is(self, oracle, tmp_path):
        """The flow is asked about whole shortlists of 32."""
        image, text = oracle.pairs(ITEMS, 0)
        short = gf.BayesReranker(oracle, image, shortlist=32, n_steps=2)
        short.calibrate(held_out(oracle, 150))
        assert short.calibration.rest is None
        path = short.save_calibration(tmp_path)
        other = gf.BayesReranker(oracle, image, n_steps=2)
        other.load_calibration(path)
        assert torch.equal(other(text[:7]).prob, short(text[:7]).prob)
        with pytest.raises(ValueError, match="another n_steps"):
            (fresh := gf.BayesReranker(oracle, image, n_steps=3)).load_calibration(path)
        assert (fresh.shortlist, fresh.flow_items) == (ITEMS, 32)
