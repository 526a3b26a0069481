"""What methods say about queries, against dense computations and against the classes behind them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation import registry
from geoflow_fast.evaluation.flow_methods import FlowEntropy, FlowEpistemic
from geoflow_fast.evaluation.methods import Method, Scores, Study, posterior_scores
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.geometry import normalize
from geoflow_fast.retrieval import rerank
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask
from tests.evaluation.helpers import DIM


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 40)])
def test_scores_of_a_posterior_are_those_of_the_dense_softmax(pairs, bias):
    task = RetrievalTask.of(pairs, "t2i")
    samples = normalize(task.queries.unsqueeze(1) + 0.3 * torch.randn(120, 4, DIM))
    score = (9 * (samples.double() @ task.items.double().T)).logsumexp(1) - math.log(4)
    pi = (score if bias is None else score + bias).softmax(1)
    answers = plain_search(task).index[:, 0]
    scores = posterior_scores(samples, Gallery(task.items), 9.0, task.own, answers, 1.5, bias)
    own = pi.gather(1, task.own).squeeze(1)
    torch.testing.assert_close(scores.uncertainty, torch.special.entr(pi).sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.nll, -own.log(), atol=1e-5, rtol=1e-5)
    expected = (1.5 * pi.gather(1, answers[:, None]).squeeze(1)).clamp(max=1)
    torch.testing.assert_close(scores.p_answer, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(scores.top, pi.argmax(1))


def test_several_right_items_share_the_likelihood(pairs):
    task = RetrievalTask.of(pairs, "i2t")
    pi = (5 * task.queries.double() @ task.items.double().T).log_softmax(1)
    scores = posterior_scores(task.queries.unsqueeze(1), Gallery(task.items), 5.0, task.own, task.own[:, 0], 3.0)
    torch.testing.assert_close(scores.nll, -pi.gather(1, task.own).mean(1), atol=1e-5, rtol=1e-5)


def test_what_a_study_lacks_is_named(pairs, held_out, small_flow):
    training_free = ["max_softmax", "margin", "softmax_entropy"]
    assert registry.default_methods(Study(held_out)) == ["ladder", *training_free]
    assert registry.default_methods(Study(held_out.subset(range(99)))) == training_free
    assert set(registry.default_methods(Study(held_out, pairs, small_flow))) >= {"rerank", "entropy", "knn"}
    for name, message in (("rerank", "needs a trained flow"), ("knn", "training pairs"), ("none", "must be one of")):
        with pytest.raises(ValueError, match=message):
            registry.create(name, Study(held_out))
    with pytest.raises(ValueError, match="one width"):
        Study(held_out, flow=gf.GeoFlow(gf.GeoFlowConfig(10, 10, hidden=16, depth=1)))
    with pytest.raises(ValueError, match="one width"):
        Study(held_out, head=gf.PosteriorHead(gf.HeadConfig(), 10, 10))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
class TestFlowMethods:
    def scores(self, name: str, study: Study, task: RetrievalTask) -> tuple[Method, Scores]:
        method = registry.create(name, study)
        method.fit(task)
        return method, method.score(slice(None), plain_search(task).index[:, 0])

    def test_entropy_is_that_of_the_scorer(self, small_flow, pairs, held_out, direction, monkeypatch):
        sampling = dataclasses.replace(gf.FAST_SAMPLING, n_samples=4, n_steps=2)
        monkeypatch.setattr(FlowEntropy, "sampling", sampling)
        task = RetrievalTask.of(pairs, direction)
        method, scores = self.scores("entropy", Study(held_out, flow=small_flow), task)
        post = method.scorer(task.queries)
        torch.testing.assert_close(scores.uncertainty.float(), post.entropy, atol=1e-4, rtol=1e-4)
        assert torch.equal(scores.top, post.map_index)
        fitted = gf.fit_bandwidth(small_flow, held_out, direction, n_samples=4, n_steps=2)
        assert (method.scorer.kappa, method.scorer.sampling.guidance) == (fitted.kappa, fitted.guidance)

    def test_rerankers_likelihood_sums_to_one_over_the_gallery(
        self, small_flow, pairs, held_out, direction, monkeypatch
    ):
        monkeypatch.setattr(rerank, "WHOLE_SHORTLIST", 32)
        monkeypatch.setattr(rerank, "FLOW_ITEMS", 8)
        task = RetrievalTask.of(pairs, direction)
        method, scores = self.scores("rerank", Study(held_out, flow=small_flow), task)
        post = method.reranker(task.queries)
        torch.testing.assert_close(scores.uncertainty, 1 - post.p_answer.double(), atol=1e-6, rtol=0)
        every = (post.p_outside.double() / (len(task.items) - 32)).unsqueeze(1).repeat(1, len(task.items))
        every.scatter_(1, post.index, post.prob.double())
        assert bool(((every.sum(1) - 1).abs() < 1e-5).all())
        expected = torch.stack([-row[own[own >= 0]].log().mean() for row, own in zip(every, task.own)])
        torch.testing.assert_close(scores.nll, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("flow", [False, True])
    def test_a_head_is_evidence_of_ladder_and_reranker(self, small_flow, pairs, held_out, direction, flow):
        torch.manual_seed(0)
        head = gf.PosteriorHead(gf.HeadConfig(points=2), DIM, DIM).eval()
        task = RetrievalTask.of(pairs, direction)
        study = Study(held_out, flow=small_flow if flow else None, head=head, head_seconds=1e6)
        method, scores = self.scores("rerank" if flow else "ladder", study, task)
        assert method.reranker.head is head
        assert method.fit_seconds > 1e6
        assert method.training == ("flow" if flow else "baseline")
        assert "head" in method.facts()
        assert "head" not in type(method)(dataclasses.replace(study, head=None)).facts()
        expected = 1 - method.reranker(task.queries).p_answer.double()
        torch.testing.assert_close(scores.uncertainty, expected, atol=1e-6, rtol=0)

    def test_epistemic_score_is_that_of_the_query_with_its_answer(
        self, small_flow, pairs, held_out, direction, monkeypatch
    ):
        exact = gf.DensitySettings(divergence="exact", n_steps=2)
        monkeypatch.setattr(FlowEpistemic, "settings", exact)
        task = RetrievalTask.of(pairs, direction, max_queries=9)
        _, scores = self.scores("epistemic", Study(held_out, flow=small_flow), task)
        items = task.items[plain_search(task).index[:, 0]]
        expected = gf.epistemic(small_flow, *Direction.of(direction).pair(task.queries, items), settings=exact).score
        torch.testing.assert_close(scores.uncertainty, expected, atol=1e-4, rtol=1e-4)


def test_scores_are_recognised_by_their_settings(held_out, small_flow):
    """These facts decide whether stored scores are used again."""
    study = Study(held_out, flow=small_flow)
    facts = {name: registry.create(name, study).facts() for name in ("entropy", "entropy_paper")}
    fast = {"n_samples": 40, "n_steps": 8, "solver": "ab2", "grid": "late", "noise": "antithetic"}
    paper = {"n_samples": 50, "n_steps": 50, "solver": "euler", "grid": "uniform", "noise": "iid"}
    digest = {"flow": facts["entropy"].pop("flow")}
    assert facts["entropy"] == fast
    assert facts["entropy_paper"] == {**digest, **paper}


def test_the_probability_of_an_answer_is_at_most_one():
    """It is the probability of the one meant times the number of right items, five captions for one."""
    items = torch.eye(4, 6)
    samples = torch.stack((items[0], torch.nn.functional.normalize(items.sum(0), dim=0))).unsqueeze(1)
    own, answers = torch.tensor([[0, 1], [2, -1]]), torch.tensor([0, 3])
    scores = posterior_scores(samples, gf.Gallery(items), 4.0, own, answers, 5.0)
    first = math.exp(4) / (math.exp(4) + 3)
    assert scores.p_answer.tolist() == pytest.approx([1.0, 1.0])
    assert posterior_scores(samples, gf.Gallery(items), 4.0, own, answers, 1.0).p_answer.tolist() == pytest.approx(
        [first, 0.25]
    )
    # The padding of the second query's own items is no item.
    expected = [-(math.log(first) + math.log((1 - first) / 3)) / 2, math.log(4)]
    assert scores.nll.tolist() == pytest.approx(expected)
