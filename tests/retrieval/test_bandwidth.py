"""Bandwidth and item marginals against their definitions and against distributions whose answer is known."""

from __future__ import annotations

import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry as g
from geoflow_fast import noise
from geoflow_fast.directions import Direction
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
@pytest.mark.parametrize("posterior", ["likelihood", "bayes"])
def test_table_follows_the_definition(flow, direction, posterior):
    image, text = noise.sample_uniform(20, 10), noise.sample_uniform(40, 7)
    pairs = gf.EmbeddingPairs.from_arrays(image, text, image_index=np.repeat(np.arange(20), 2))
    settings = {"n_samples": 4, "n_steps": 3, "posterior": posterior}
    kappas, guidances = (2.0, 8.0, 32.0), (0.0, 2.0)
    fitted = gf.fit_bandwidth(flow, pairs, direction, guidances=guidances, kappas=kappas, max_queries=20, **settings)
    assert (fitted.guidance, round(fitted.nll, 9)) == (
        guidances[int(fitted.table.min(1).values.argmin())],
        round(float(fitted.table.min()), 9),
    )
    asking, others = (part.text_row for part in pairs.split(0.5, seed=0))
    assert set(asking // 2).isdisjoint(others // 2)  # by image, so no other caption of a query's image is a reference
    if posterior == "likelihood":
        asking = np.arange(40)
    chosen = asking[np.sort(np.random.default_rng(0).permutation(len(asking))[:20])]
    own = chosen // 2 if direction == "t2i" else chosen
    queries, items = (text, image) if direction == "t2i" else (image.repeat_interleave(2, 0), text)
    for row, guidance in enumerate(guidances):
        changes = {"n_samples": 4, "n_steps": 3, "guidance": guidance}
        scorer = gf.RetrievalEntropy.fast(flow, items, direction, **changes)
        for column, kappa in enumerate(kappas):
            score = scores_of(scorer.draw(queries[chosen]), items, kappa)
            if posterior == "bayes":
                score = score - scores_of(scorer.draw(queries[others]), items, kappa).logsumexp(0)
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
        "single image": {"pairs": pairs.subset([0]), "posterior": "bayes"},
        "from the scores of other pairs": {"posterior": "bayes", "reference": "density"},
    }.items():
        with pytest.raises(ValueError, match=words):
            gf.fit_bandwidth(flow, **{"pairs": pairs, "n_steps": 2, "n_samples": 2, **arguments})
    with pytest.raises(TypeError, match="chooses kappa itself"):
        gf.fit_bandwidth(flow, pairs, kappa=3.0)


def test_bayes_posterior_follows_the_definition(flow, monkeypatch):
    monkeypatch.setitem(marginals.TILE_ITEMS, "cpu", 13)
    monkeypatch.setitem(marginals.TILE_ROWS, "cpu", 20)
    queries, reference, items = noise.sample_uniform(5, 7), noise.sample_uniform(23, 7), noise.sample_uniform(60, 10)
    scorer = RetrievalEntropy(
        flow, items, n_samples=6, n_steps=3, kappa=20.0, posterior="bayes", reference=reference, top_k=60
    )
    marginal = scores_of(scorer.draw(reference), items, 20.0).logsumexp(0) - math.log(23)
    torch.testing.assert_close(scorer.item_marginals().double(), marginal, atol=1e-4, rtol=0)
    pi = (scores_of(scorer.draw(queries), items, 20.0) - marginal).softmax(1)
    post = scorer(queries)
    torch.testing.assert_close(post.entropy.double(), torch.special.entr(pi).sum(1), atol=1e-4, rtol=0)
    posterior = torch.zeros(5, 60).scatter_(1, post.top_index, post.top_prob)
    torch.testing.assert_close(posterior.double(), pi, atol=1e-4, rtol=0)


def test_an_item_that_fits_everything_loses_its_advantage(flow):
    """The likelihood favours the item near the middle of all samples; dividing by the marginal removes the favour."""
    reference = noise.sample_uniform(64, 7)
    plain = RetrievalEntropy(flow, noise.sample_uniform(2, 10), n_samples=8, n_steps=3, guidance=0.0, kappa=30.0)
    hub = g.normalize(plain.draw(reference).mean((0, 1))).unsqueeze(0)
    items = torch.cat((hub, noise.sample_uniform(50, 10)))
    settings = {"n_samples": 8, "n_steps": 3, "guidance": 0.0, "kappa": 30.0, "top_k": 51, "reference": reference}
    queries = noise.sample_uniform(64, 7)
    mass = {}
    for posterior in ("likelihood", "bayes"):
        post = RetrievalEntropy(flow, items, posterior=posterior, **settings)(queries)
        mass[posterior] = float((post.top_prob * (post.top_index == 0)).sum(1).mean())
    assert mass["likelihood"] > 3 / 51
    assert mass["bayes"] == pytest.approx(1 / 51, rel=0.5)


def test_marginals_are_computed_once_per_gallery(flow, tmp_path, monkeypatch):
    np.save(tmp_path / "img_emb_0.npy", noise.sample_uniform(30, 10).numpy())
    calls = []
    original = marginals.log_mean_scores
    monkeypatch.setattr(marginals, "log_mean_scores", lambda *a: calls.append(1) or original(*a))
    reference, queries = noise.sample_uniform(9, 7), noise.sample_uniform(2, 7)

    def entropy(**changes):
        settings = {"n_samples": 3, "n_steps": 2, "kappa": 9.0, "posterior": "bayes", "reference": reference}
        return RetrievalEntropy(flow, tmp_path, **{**settings, **changes})(queries).entropy

    first = entropy()
    assert torch.equal(entropy(), first)
    assert len(calls) == 1
    entropy(kappa=10.0)
    entropy(reference=reference[:5])
    assert len(calls) == 3
    made = list((tmp_path / "geoflow_index").glob("*.safetensors"))
    assert len(made) == 3
    made[0].write_bytes(made[0].read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"{made[0].name} is .*; remove the file, and it is computed again"):
        entropy(), entropy(kappa=10.0), entropy(reference=reference[:5])


def test_marginals_that_another_process_made_meanwhile_are_taken(tmp_path):
    """The second process to ask waits for the first and computes nothing."""
    started, calls = threading.Event(), []

    def slowly() -> torch.Tensor:
        calls.append(1)
        started.set()
        time.sleep(0.2)
        return torch.arange(3.0)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(marginals.computed_once, tmp_path, {}, slowly)
        started.wait()
        second = pool.submit(marginals.computed_once, tmp_path, {}, slowly)
    assert torch.equal(first.result(), second.result())
    assert len(calls) == 1


def test_files_of_marginals_name_what_they_depend_on(flow, tmp_path, monkeypatch):
    """Numbers of a release that computed them otherwise are not taken; folders are made where there are none."""
    source = RetrievalEntropy(flow, noise.sample_uniform(3, 10), reference="density", posterior="bayes").source
    folder, calls = tmp_path / "new" / "folder", itertools.count(1)

    def kept(reference):
        """The number of the call that has computed it."""
        facts = source.marginal_facts(reference)
        return int(marginals.computed_once(folder, facts, lambda: torch.tensor([next(calls)])))

    some = noise.sample_uniform(4, 7)
    assert [kept(each) for each in (None, some, some[:3], None, some)] == [1, 2, 3, 1, 2]
    monkeypatch.setattr(marginals, "FORMAT", marginals.FORMAT + 1)
    assert [kept(each) for each in (None, some, None, some)] == [4, 5, 4, 5]
    monkeypatch.setattr(marginals, "DENSITY_STEPS", marginals.DENSITY_STEPS + 1)
    assert [kept(None), kept(None)] == [6, 6]


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_the_density_of_an_item_comes_from_a_partner_that_the_flow_draws(flow, direction):
    """log p(item) = log p(item, partner) - log p(partner | item)."""
    direction = Direction(direction)
    items, seed = noise.sample_uniform(6, direction.items(10, 7)), torch.Generator().manual_seed
    given = {"image" if direction is Direction.T2I else "text": items}
    settings = {"n_samples": 1, "n_steps": 10, "guidance": 0.0, "solver": "ab2"}
    image, text = (x.flatten(0, -2) for x in gf.sample(flow, **given, **settings, generator=seed(3)))
    generator = seed(3)
    joint, conditional = (
        gf.log_density(flow, image, text, which, 10, generator=generator) for which in ("joint", direction.reverse)
    )
    ours = marginals.log_flow_density(flow, gf.Gallery(items), direction, seed=3)
    torch.testing.assert_close(ours.double(), (joint - conditional).double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_density_of_a_flow_that_stands_still_is_uniform(direction):
    flow, width = gf.GeoFlow(gf.GeoFlowConfig(10, 7, hidden=8, depth=1)), {"t2i": 10, "i2t": 7}[direction]
    scorer = RetrievalEntropy(flow, noise.sample_uniform(6, width), direction, posterior="bayes", reference="density")
    torch.testing.assert_close(scorer.item_marginals(), torch.full((6,), -g.log_area(width)))


def test_bad_references(flow):
    gallery = noise.sample_uniform(5, 10)
    for words, arguments in {
        "need reference": {},
        r"reference must be \[R, 7\]": {"reference": noise.sample_uniform(3, 10)},
        "reference row 1 has norm": {"reference": torch.stack((torch.eye(7)[0], torch.ones(7)))},
        'reference must be queries .* or "density"': {"reference": "guess"},
    }.items():
        with pytest.raises(ValueError, match=words):
            RetrievalEntropy(flow, gallery, posterior="bayes", **arguments)
    with pytest.warns(DeprecationWarning, match=r"RetrievalEntropy\(marginal=...\) is deprecated"):
        scorer = RetrievalEntropy(flow, gallery, posterior="bayes", marginal="density")
    assert scorer.settings["marginal"] == "density"
    with pytest.warns(DeprecationWarning, match="marginal"), pytest.raises(ValueError, match="marginal must be"):
        RetrievalEntropy(flow, gallery, posterior="bayes", marginal="guess")
    with pytest.raises(ValueError, match="posterior must be"):
        RetrievalEntropy(flow, gallery, posterior="prior")


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
