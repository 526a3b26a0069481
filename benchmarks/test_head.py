"""PosteriorHead: what its answers cost beside a search.

The shortlists of a search, scored by a head of four points and corrected for hubs. Plain searches, ours and FAISS's,
stand beside; `test_gallery_posterior` has the posteriors over a whole gallery.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers
from benchmarks.cases import FOR_COMPARISON, Case, Contender, each
from benchmarks.inputs import FAISS, finds_itself
from geoflow_fast.retrieval.calibration import UNCALIBRATED_HEAD
from geoflow_fast.retrieval.hubs import Hubs

ITEMS, WIDTH, SEARCHES = 100_000, 1024, 64
SHORTLIST = 32


def scored_shortlists(gallery: gf.Gallery, shortlist: int | None, points: int = 4) -> gf.BayesReranker:
    """A re-ranker whose evidence is the cosine and a head with random weights, both corrected for hubs."""
    torch.manual_seed(0)
    head = gf.PosteriorHead(gf.HeadConfig(points=points, bias_hidden=64), gallery.dim, gallery.dim).eval()
    reranker = gf.BayesReranker(None, gallery, shortlist=shortlist, head=head)
    weights = {"hub": -0.5, "head": 1.0, "head_hub": -0.5}
    bank = torch.nn.functional.normalize(torch.randn(500, gallery.dim))
    reranker.bank, reranker.hubs = bank, Hubs(bank, reranker.source)
    reranker.calibration = dataclasses.replace(UNCALIBRATED_HEAD, beta=20.0, others=weights, hub_scale=20.0)
    return reranker


def same_as_float64(reranker: gf.BayesReranker, queries: Tensor) -> bool:
    """Whether the probabilities are those of the formula, written out once more in float64."""
    post = reranker.rerank(queries)
    head, source, hubs = reranker.head, reranker.source, reranker.hubs
    assert head is not None
    assert source is not None
    assert hubs is not None
    rows = reranker.gallery.take(post.index).double()
    points = head.points(queries, reranker.direction)
    each = torch.einsum("qkd,qjd->qkj", points.points.double(), rows) + points.log_weights.double().unsqueeze(2)
    score = each.logsumexp(1)
    cosine = torch.einsum("qd,qkd->qk", queries.double(), rows)
    hub = (20 * torch.einsum("rd,qkd->rqk", hubs.bank.double(), rows)).logsumexp(0)
    head_hub = source.all_scores(hubs.bank, rows.flatten(0, 1).float()).double().logsumexp(0).view_as(hub)
    bias = source.learned_about(rows.float())
    logits = 20 * cosine - 0.5 * hub + score + bias - 0.5 * (head_hub + bias)
    return bool(torch.allclose(post.prob.double(), logits.softmax(1), rtol=0, atol=1e-4))


@dataclass(frozen=True)
class Scored:
    """Queries, and re-rankers with short and with default shortlists."""

    queries: Tensor
    gallery: gf.Gallery
    short: gf.BayesReranker
    default: gf.BayesReranker
    index: Any

    @classmethod
    def draw(cls) -> Scored:
        rows = torch.nn.functional.normalize(torch.randn(ITEMS, WIDTH))
        noise = torch.nn.functional.normalize(torch.randn(SEARCHES, WIDTH))
        queries = torch.nn.functional.normalize(rows[:SEARCHES] + 0.5 * noise)
        gallery = gf.Gallery(rows)
        rerankers = [scored_shortlists(gallery, length) for length in (SHORTLIST, None)]
        for reranker in rerankers:
            assert same_as_float64(reranker, queries[:4])
        return cls(queries, gallery, *rerankers, peers.faiss_index(rows) if FAISS.present else None)


def adds_up(post: gf.Reranked, _: Any) -> bool:
    """Probabilities of the items and of "outside" add up to one; `Scored.draw` has the real gate."""
    return torch.allclose(post.prob.sum(1) + post.p_outside, torch.ones(SEARCHES), atol=1e-4)


CONTENDERS = (
    Contender("FAISS, top 32", lambda s: peers.faiss_search(s.index, s.queries, 32), FOR_COMPARISON, "faiss"),
    Contender("search, top 32", lambda s: s.gallery.search(s.queries, 32)[1], FOR_COMPARISON),
    Contender("shortlists of 32 scored by a head of 4 points", lambda s: s.short.rerank(s.queries), agrees=adds_up),
    Contender("the same with the default shortlists", lambda s: s.default.rerank(s.queries), agrees=adds_up),
)
CASE = Case(
    f"Shortlists of {SEARCHES} queries, N = {ITEMS:,}, d = {WIDTH}",
    Scored.draw,
    lambda _: None,
    finds_itself,
    CONTENDERS,
)


@each([CASE])
def test_scored_shortlists(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)
