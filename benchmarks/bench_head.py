"""PosteriorHead: what its answers cost beside a search.

Hot path: the shortlists of a search, scored by a head of four points and corrected for hubs. Plain searches, ours and
FAISS's, stand beside; `bench_gallery` has the posteriors over a whole gallery.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers
from benchmarks.bench_gallery import FAISS
from benchmarks.common import gate, time_together
from benchmarks.suite import Table
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


def tables() -> Iterator[Table]:
    """The price of shortlists that a head scores."""
    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(ITEMS, WIDTH))
    queries = torch.nn.functional.normalize(
        rows[:SEARCHES] + 0.5 * torch.nn.functional.normalize(torch.randn(64, WIDTH))
    )
    gallery = gf.Gallery(rows)
    reranker, longer = (scored_shortlists(gallery, length) for length in (SHORTLIST, None))
    for scored in (reranker, longer):
        gate(f"shortlists of {scored.shortlist} scored by a head", same_as_float64(scored, queries[:4]))
    runs: dict[str, Any] = {
        "search, top 32": lambda: gallery.search(queries, 32),
        "search, shortlists scored by a head of 4 points": lambda: reranker.rerank(queries),
        f"the same with shortlists of {longer.shortlist}, the default": lambda: longer.rerank(queries),
    }
    if FAISS.present:
        index = peers.faiss_index(rows)
        runs["FAISS, top 32"] = lambda: peers.faiss_search(index, queries, 32)
    seconds = time_together(runs)
    fastest = min(value for name, value in seconds.items() if name.endswith("top 32"))
    prices = [{"64 queries": n, "ms": 1e3 * s, "times the faster search": s / fastest} for n, s in seconds.items()]
    yield Table("shortlists", prices)
