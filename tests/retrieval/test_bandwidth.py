"""Bandwidth and mean scores of items against their definitions and against distributions whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry as g
from geoflow_fast import noise
from geoflow_fast.retrieval import marginals
from geoflow_fast.retrieval.bandwidth import refined
from geoflow_fast.retrieval.entropy import RetrievalEntropy


def scores_of(samples: torch.Tensor, items: torch.Tensor, kappa: float) -> torch.Tensor:
    """The scores [Q, N] by their definition, float64."""
    logits = kappa * torch.einsum("qmd,nd->qmn", samples.double(), items.double())
    return logits.logsumexp(1) - math.log(samples.shape[1])


def von_mises_fisher(centre: torch.Tensor, kappa: float) -> torch.Tensor:
    """Draws one point on S^2 around each centre [n, 3], by inverting the distribution of the cosine."""
    u = torch.rand(len(centre), 1, dtype=torch.float64)
    cosine = 1 + torch.log(u + (1 - u) * math.exp(-2 * kappa)) / kappa
    tangent = g.project_tangent(centre, torch.randn_like(centre))
    return cosine * centre + (1 - cosine**2).clamp_min(0).sqrt() * g.normalize(tangent)


@pytest.mark.parametrize("kappa", [8.0, 60.0])
def test_finds_the_concentration_that_made_the_data(kappa, monkeypatch):
    """Items are scattered around the points where their queries are: the best kernel is the one that scattered them."""
    centre = noise.sample_uniform(800, 3, dtype=torch.float64)
    items = von_mises_fisher(centre, kappa)
    pairs = gf.EmbeddingPairs.from_arrays(items.float(), centre.float())
    monkeypatch.setattr(RetrievalEntropy, "draw", lambda _self, queries: queries.unsqueeze(1))
    flow = gf.GeoFlow(gf.GeoFlowConfig(3, 3, hidden=8, depth=1))
    fitted = gf.fit_bandwidth(flow, pairs, "t2i", guidances=(0.0,), max_queries=800)
    assert fitted.kappa == pytest.approx(kappa, rel=0.1)
    assert fitted.nll <= float(fitted.table.min()) + 1e-9


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_table_follows_the_definition(flow, direction):
    image, text = noise.sample_uniform(20, 10), noise.sample_uniform(40, 7)
    pairs = gf.EmbeddingPairs.from_arrays(image, text, image_index=np.repeat(np.arange(20), 2))
    settings = {"n_samples": 4, "n_steps": 3}
    kappas, guidances = (2.0, 8.0, 32.0), (0.0, 2.0)
    fitted = gf.fit_bandwidth(flow, pairs, direction, guidances=guidances, kappas=kappas, max_queries=20, **settings)
    assert (fitted.guidance, round(fitted.nll, 9)) == (
        guidances[int(fitted.table.min(1).values.argmin())],
        round(float(fitted.table.min()), 9),
    )
    chosen = np.sort(np.random.default_rng(0).permutation(40)[:20])
    own = chosen // 2 if direction == "t2i" else chosen
    queries, items = (text, image) if direction == "t2i" else (image.repeat_interleave(2, 0), text)
    for row, guidance in enumerate(guidances):
        changes = {"n_samples": 4, "n_steps": 3, "guidance": guidance}
        scorer = gf.RetrievalEntropy.fast(flow, items, direction, **changes)
        for column, kappa in enumerate(kappas):
            score = scores_of(scorer.draw(queries[chosen]), items, kappa)
            expected = -score.log_softmax(1)[torch.arange(20), torch.from_numpy(own)].mean()
            assert float(fitted.table[row, column]) == pytest.approx(float(expected), abs=1e-4)


def test_bad_fits(flow):
    pairs = gf.EmbeddingPairs.from_arrays(noise.sample_uniform(4, 10), noise.sample_uniform(4, 7))
    for words, arguments in {
        "direction must be": {"direction": "joint"},
        "at least one guidance": {"kappas": ()},
        "no query to fit on": {"max_queries": 0},
        "guidance must be": {"guidances": (-1.0,)},
        "kappa must be at most 100000": {"kappas": (1.0, 1e38)},
        "kappas must be positive": {"kappas": (-1.0,)},
        "kappas must be positive, finite and strictly ascending": {"kappas": (2.0, 2.0, 3.0)},
    }.items():
        with pytest.raises(ValueError, match=words):
            gf.fit_bandwidth(flow, **{"pairs": pairs, "n_steps": 2, "n_samples": 2, **arguments})
    with pytest.raises(TypeError, match="chooses kappa itself"):
        gf.fit_bandwidth(flow, pairs, kappa=3.0)


def test_mean_scores_follow_the_definition(monkeypatch):
    """Tiles of items and of samples that divide neither number."""
    monkeypatch.setitem(marginals.TILE_ITEMS, "cpu", 13)
    monkeypatch.setitem(marginals.TILE_ROWS, "cpu", 20)
    samples, items = noise.sample_uniform(23 * 6, 10).view(23, 6, 10), noise.sample_uniform(60, 10)
    for bias in (None, torch.randn(23, 6)):
        logits = 20.0 * torch.einsum("rmd,nd->rmn", samples.double(), items.double())
        if bias is not None:
            logits = logits + bias.double().unsqueeze(2)
        expected = (logits.logsumexp(1) - math.log(6)).logsumexp(0) - math.log(23)
        ours = marginals.log_mean_scores(samples, gf.Gallery(items), 20.0, bias)
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("vertex", [14.0, 20.0, 33.0])
def test_the_refined_bandwidth_is_the_minimum_of_a_parabola(vertex):
    kappas = [5.0, 10.0, 20.0, 40.0, 80.0]
    loss = torch.tensor([3 * (math.log(kappa) - math.log(vertex)) ** 2 + 1 for kappa in kappas], dtype=torch.float64)
    assert refined(kappas, loss, int(loss.argmin())) == pytest.approx(vertex)


@pytest.mark.parametrize("losses", [[1.0, 2.0, 4.0, 8.0], [8.0, 4.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
def test_at_an_end_of_the_grid_the_best_bandwidth_is_the_end(losses):
    kappas, loss = [5.0, 10.0, 20.0, 40.0], torch.tensor(losses, dtype=torch.float64)
    best = int(loss.argmin())
    assert refined(kappas, loss, best) == kappas[best]
    assert refined(kappas[:1], loss[:1], 0) == 5.0
