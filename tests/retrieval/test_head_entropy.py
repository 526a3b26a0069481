"""`RetrievalEntropy` of a head against its definition in float64, for any kind of gallery, reference, dtype and
thread."""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.sources import HeadSource
from tests.head.test_loss import naive_scores
from tests.head.test_model import random_head

THREADS = 8
WIDTHS = (10, 7)
CONFIG = gf.HeadConfig(points=3, hidden=8, bank=11, bias_hidden=4)


@pytest.fixture
def head() -> gf.PosteriorHead:
    """Images are 10 wide and texts 7; every part of the score counts."""
    torch.manual_seed(2)
    head = random_head(CONFIG, *WIDTHS)
    with torch.no_grad():
        for tower in head.towers.values():
            tower.base.normal_()
        for bias in head.biases.values():
            bias[-1].weight.normal_()
    return head


def whole_scores(
    head: gf.PosteriorHead, queries: Tensor, gallery: Tensor, direction: Direction, reference: Tensor | None = None
) -> Tensor:
    """Scores [Q, N] of the definition, in float64 and with all products at once."""
    twin = gf.PosteriorHead(head.config, head.image_dim, head.text_dim).double()
    twin.load_state_dict(head.state_dict())
    items, weight = gallery.double(), head.hub_weight_of(direction)

    def scores(rows: Tensor) -> Tensor:
        points = twin.points(rows.double(), direction)
        return naive_scores(points.points, points.log_weights, items) + twin.item_bias(items, direction)

    bank = scores(head.bank(direction) if reference is None else reference)
    hubs = bank.logsumexp(0) - math.log(len(bank))
    return (scores(queries) - weight * hubs).detach()


def entropy_of(scores: Tensor) -> Tensor:
    log_p = scores.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def problem(direction: Direction, queries: int = 7, items: int = 129) -> tuple[Tensor, Tensor]:
    return sample_uniform(queries, direction.queries(*WIDTHS)), sample_uniform(items, direction.items(*WIDTHS))


def assert_posterior(post: gf.RetrievalPosterior, scores: Tensor, atol: float = 2e-5) -> None:
    probability = scores.softmax(1)
    torch.testing.assert_close(post.entropy.double(), entropy_of(scores), atol=atol, rtol=0)
    torch.testing.assert_close(post.map_prob.double(), probability.amax(1), atol=atol, rtol=0)
    assert torch.equal(post.map_index, scores.argmax(1))
    torch.testing.assert_close(post.top_prob.double(), probability.gather(1, post.top_index), atol=atol, rtol=0)


# ---- the definition -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", CONDITIONAL)
@pytest.mark.parametrize(("queries", "items"), [(1, 1), (7, 129), (129, 7)])
def test_matches_its_definition(head, direction, queries, items):
    rows, gallery = problem(direction, queries, items)
    post = gf.RetrievalEntropy(head, gallery, direction)(rows)
    assert_posterior(post, whole_scores(head, rows, gallery, direction))
    assert not any(x.requires_grad for x in vars(post).values() if x is not None)


@pytest.mark.parametrize("kappa", [3.0, 20.0, 500.0])
def test_one_point_without_more_is_the_softmax_over_cosines(kappa):
    head = gf.PosteriorHead(gf.HeadConfig(points=1, bank=0), 12, 12)
    queries, gallery = sample_uniform(9, 12), sample_uniform(129, 12)
    for direction in CONDITIONAL:
        tower = head.towers[str(direction)]
        torch.nn.init.zeros_(tower.offsets.weight)
        torch.nn.init.constant_(tower.log_concentration, math.log(kappa))
        post = gf.RetrievalEntropy(head, gallery, direction)(queries)
        wanted = gf.ops.gallery_posterior(queries.unsqueeze(1), gallery, kappa)
        torch.testing.assert_close(post.entropy, wanted.entropy, atol=1e-4, rtol=1e-4)
        assert torch.equal(post.top_index, wanted.top_index)
        torch.testing.assert_close(post.top_prob, wanted.top_prob, atol=1e-4, rtol=0)
        assert_posterior(post, kappa * queries.double() @ gallery.double().T, atol=1e-4)


def test_equal_items_share_their_probability(head):
    queries, _ = problem(Direction.T2I)
    post = gf.RetrievalEntropy(head, sample_uniform(1, 10).repeat(64, 1))(queries)
    torch.testing.assert_close(post.entropy, torch.full((7,), math.log(64)))
    one = gf.RetrievalEntropy(head, sample_uniform(1, 10))(queries)
    assert one.entropy.tolist() == [0.0] * 7


# ---- galleries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_any_gallery_in_any_order_gives_the_same_answer(head, tmp_path, monkeypatch, direction):
    monkeypatch.setattr("geoflow_fast.retrieval.gallery.BLOCK_ROWS", 37)
    queries, gallery = problem(direction, items=150)
    (tmp_path / "shards").mkdir()
    for number, part in enumerate(np.array_split(gallery.numpy(), 12)):
        np.save(tmp_path / "shards" / f"part_{number}.npy", part)
    np.save(tmp_path / "whole.npy", gallery.numpy())
    scores = whole_scores(head, queries, gallery, direction)
    for source in (gallery, gallery.numpy(), tmp_path / "whole.npy", tmp_path / "shards", gf.Gallery(gallery)):
        assert_posterior(gf.RetrievalEntropy(head, source, direction)(queries), scores)
    order = torch.randperm(150)
    assert_posterior(gf.RetrievalEntropy(head, gallery[order], direction)(queries), scores[:, order])


def test_queries_may_come_in_pieces_and_strided(head):
    queries, gallery = problem(Direction.T2I, queries=12)
    scorer = gf.RetrievalEntropy(head, gallery)
    post = scorer(queries)
    parts = [scorer(piece) for piece in queries.split(5)]
    torch.testing.assert_close(torch.cat([part.entropy for part in parts]), post.entropy, atol=2e-5, rtol=0)
    strided = queries.repeat_interleave(2, 1)[:, ::2]
    torch.testing.assert_close(scorer(strided).entropy, post.entropy, atol=2e-5, rtol=0)
    counted: list[int] = []
    scorer(queries, counted.append)
    assert sum(counted) == 12


# ---- the reference and the marginals ------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_a_reference_replaces_the_bank(head, direction):
    queries, gallery = problem(direction)
    reference = sample_uniform(23, direction.queries(*WIDTHS))
    for source in (reference, reference.numpy(), reference.double()):
        post = gf.RetrievalEntropy(head, gallery, direction, reference=source)(queries)
        assert_posterior(post, whole_scores(head, queries, gallery, direction, reference))
    own = gf.RetrievalEntropy(head, gallery, direction, reference=head.bank(direction))(queries)
    torch.testing.assert_close(own.entropy, gf.RetrievalEntropy(head, gallery, direction)(queries).entropy)
    assert not torch.allclose(own.entropy, post.entropy, atol=1e-3)


def test_marginals_are_zero_where_a_head_corrects_nothing():
    plain = random_head(dataclasses.replace(CONFIG, bias_hidden=0, bank=0), *WIDTHS)
    assert not gf.RetrievalEntropy(plain, sample_uniform(5, 10)).item_marginals().any()
    banked = random_head(dataclasses.replace(CONFIG, bias_hidden=0), *WIDTHS)
    scorer = gf.RetrievalEntropy(banked, sample_uniform(5, 10))
    assert scorer.item_marginals().any()
    banked.hub_weight.zero_()
    assert not scorer.item_marginals().any()


def test_marginals_are_computed_once_for_files_until_the_head_changes(head, tmp_path, monkeypatch):
    queries, gallery = problem(Direction.T2I)
    np.save(tmp_path / "gallery.npy", gallery.numpy())
    scorer = gf.RetrievalEntropy(head, tmp_path / "gallery.npy")
    first = scorer.item_marginals()
    with monkeypatch.context() as patch:
        patch.setattr(HeadSource, "item_marginals", lambda *_: pytest.fail("computed again"))
        assert scorer.item_marginals() is first
    assert_posterior(scorer(queries), whole_scores(head, queries, gallery, Direction.T2I))
    for change in ("scale", "hub_weight", "bank_text"):
        getattr(head, change).mul_(0.9 if change != "bank_text" else -1.0)
        assert_posterior(scorer(queries), whole_scores(head, queries, gallery, Direction.T2I))
    with torch.no_grad():
        head.towers["t2i"].log_concentration.add_(0.1)
    assert_posterior(scorer(queries), whole_scores(head, queries, gallery, Direction.T2I))


# ---- the module ---------------------------------------------------------------------------------------------------


FLOW_ONLY = {
    "n_samples": 4,
    "n_steps": 2,
    "guidance": 0.0,
    "kappa": 10.0,
    "settings": gf.SamplingSettings(),
    "seed": 0,
}


@pytest.mark.parametrize("name", FLOW_ONLY)
def test_settings_of_flows_are_refused(head, name):
    with pytest.raises(TypeError, match=f"{name}= is a setting of flows; a PosteriorHead has none"):
        gf.RetrievalEntropy(head, sample_uniform(5, 10), **{name: FLOW_ONLY[name]})


def test_a_reference_that_would_change_nothing_is_refused(head):
    """Held-out pairs may ask for a hub correction in one direction alone."""
    queries, gallery = problem(Direction.T2I)
    reference = sample_uniform(5, 7)
    head.hub_weight[CONDITIONAL.index(Direction.I2T)] = 0.0
    given = gf.RetrievalEntropy(head, gallery, reference=reference)(queries)
    assert_posterior(given, whole_scores(head, queries, gallery, Direction.T2I, reference))
    with pytest.raises(ValueError, match="reference= would change nothing: this head corrects no i2t scores"):
        gf.RetrievalEntropy(head, sample_uniform(5, 7), "i2t", reference=sample_uniform(5, 10))
    without = random_head(dataclasses.replace(CONFIG, bank=0), *WIDTHS)
    without.hub_weight.zero_()
    with pytest.raises(ValueError, match=r"corrects no t2i scores for hubs .* leave it out"):
        gf.RetrievalEntropy(without, gallery, reference=reference)
    without.hub_weight.fill_(0.5)  # the reference is the bank that the head has not
    given = gf.RetrievalEntropy(without, gallery, reference=reference)(queries)
    assert_posterior(given, whole_scores(without, queries, gallery, Direction.T2I, reference))


def test_what_a_flow_has_and_a_head_has_not(head):
    scorer = gf.RetrievalEntropy(head, sample_uniform(5, 10))
    for use in (lambda: scorer.kappa, lambda: scorer.sampling, lambda: scorer.draw(sample_uniform(2, 7))):
        with pytest.raises(TypeError, match="the points of a head are not drawn from a flow"):
            use()
    with pytest.raises(TypeError, match="settings= is a setting of flows"):
        gf.RetrievalEntropy.fast(head, sample_uniform(5, 10))
    assert scorer.settings["points"] == 3
    assert set(scorer.state_dict()) == {f"head.{name}" for name in head.state_dict()}


def test_bad_rows_are_named(head):
    gallery = sample_uniform(5, 10)
    scorer = gf.RetrievalEntropy(head, gallery)
    with pytest.raises(ValueError, match="width 7, but the head expects 10"):
        gf.RetrievalEntropy(head, sample_uniform(5, 7))
    with pytest.raises(TypeError, match=r"needs a GeoFlow or a PosteriorHead, got Linear"):
        gf.RetrievalEntropy(torch.nn.Linear(3, 3), gallery)
    with pytest.raises(ValueError, match="queries"):
        scorer(sample_uniform(3, 10))
    for bad in (2.0, math.nan, 0.0):
        queries = sample_uniform(3, 7)
        queries[1] *= bad
        with pytest.raises(ValueError, match=r"queries row 1"):
            scorer(queries)
        with pytest.raises(ValueError, match=r"reference row 1"):
            gf.RetrievalEntropy(head, gallery, reference=queries)
    with pytest.raises(ValueError, match=r"reference must be \[R, 7\], got \(0, 7\)"):
        gf.RetrievalEntropy(head, gallery, reference=torch.empty(0, 7))


def test_no_queries_have_no_posterior(head):
    post = gf.RetrievalEntropy(head, sample_uniform(5, 10), top_k=3)(torch.empty(0, 7))
    assert (post.entropy.shape, post.top_index.shape) == ((0,), (0, 3))


def test_the_dtype_is_that_of_the_head(head):
    queries, gallery = problem(Direction.T2I)
    scores = whole_scores(head, queries, gallery, Direction.T2I)
    scorer = gf.RetrievalEntropy(head, gallery).double()
    post = scorer(queries)
    assert post.entropy.dtype == torch.float64
    assert_posterior(post, scores, atol=1e-5)  # rows and marginals are float32
    half = gf.RetrievalEntropy(head.to(torch.bfloat16), gallery)(queries.half())
    assert half.entropy.dtype == torch.bfloat16
    torch.testing.assert_close(half.entropy.double(), entropy_of(scores), atol=0.5, rtol=0)


def test_threads_get_the_numbers_of_one_thread(head):
    torch.set_num_threads(1)  # these threads are the only ones
    queries, gallery = problem(Direction.T2I, queries=33)
    expected = gf.RetrievalEntropy(head, gallery)(queries)
    scorer, start = gf.RetrievalEntropy(head, gallery), threading.Barrier(THREADS)

    def work(_: int) -> list[gf.RetrievalPosterior]:
        start.wait()
        return [scorer(queries) for _ in range(3)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = [post for posts in pool.map(work, range(THREADS)) for post in posts]
    for post in results:
        assert tensors_of(post).keys() == tensors_of(expected).keys()
        assert all(torch.equal(x, tensors_of(expected)[name]) for name, x in tensors_of(post).items())


def tensors_of(post: gf.RetrievalPosterior) -> dict[str, Tensor]:
    return {name: value for name, value in vars(post).items() if isinstance(value, Tensor)}
