"""The gallery posterior against a dense float64 softmax, hand-made galleries, extreme kappa, and any split."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry, ops
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.gallery_posterior import LARGEST_KAPPA, gallery_scores

OP = "gallery_posterior"
DTYPE = {"reference": torch.float64, "cpu": torch.float32}


def tolerance(backend, kappa=1.0):
    """Absolute error allowed in nats: in float32 a score is kappa times an inner product that is good to 2e-7."""
    return 1e-9 if backend == "reference" else 2e-6 + 4e-7 * kappa


def world(queries, draws, items, width, *, spread=0.5, dtype=torch.float64):
    """Samples scattered around one point per query, in a gallery that holds some of those points: entropy 0.3 to 3."""
    centre = sample_uniform(queries, width, dtype=torch.float64)
    noise = sample_uniform(queries * draws, width, dtype=torch.float64).view(queries, draws, width)
    samples = geometry.normalize(centre.unsqueeze(1) + spread * noise)
    gallery = sample_uniform(items, width, dtype=torch.float64)
    near = min(items, queries * 3)
    gallery[:near] = geometry.normalize(gallery[:near] + 1.5 * centre.repeat(3, 1)[:near])
    return samples.to(dtype), gallery.to(dtype)


def dense(samples, gallery, kappa, bias=None):
    """Entropy, log_z and probabilities [Q, N] from the whole [Q, M, N] in float64."""
    logits = kappa * torch.einsum("qmd,nd->qmn", samples.double(), gallery.double())
    score = torch.logsumexp(logits, dim=1) - math.log(samples.shape[1])
    score = score if bias is None else score + bias.double()
    log_pi = torch.log_softmax(score, dim=1)
    return -(log_pi.exp() * log_pi).sum(1), torch.logsumexp(score, dim=1), log_pi.exp()


def close(value, expected, atol):
    torch.testing.assert_close(value.double(), expected.double(), rtol=0, atol=atol)


# 45 x 50 samples make two query blocks of the compiled kernel, and 2100 draws are more than one block holds
@pytest.mark.parametrize(("queries", "draws"), [(1, 1), (1, 50), (7, 1), (7, 50), (45, 50), (2, 2100)])
@pytest.mark.parametrize(("items", "width"), [(1, 3), (7, 129), (1023, 24), (5000, 65)])
def test_agrees_with_the_dense_softmax(queries, draws, items, width, backend):
    samples, gallery = world(queries, draws, items, width, dtype=DTYPE[backend])
    kappa = 8.0
    entropy, log_z, pi = dense(samples, gallery, kappa)
    post = ops.gallery_posterior(samples, gallery, kappa, top_k=5, backend=backend)
    close(post.entropy, entropy, tolerance(backend, kappa))
    close(post.log_z, log_z, tolerance(backend, kappa))
    prob, index = pi.topk(min(5, items), dim=1)
    close(post.top_prob, prob, tolerance(backend, kappa))
    assert torch.equal(post.top_index, index)


def test_many_narrow_items(backend):
    samples, gallery = world(2, 5, 200_001, 3, dtype=DTYPE[backend])
    entropy, log_z, pi = dense(samples, gallery, 30.0)
    post = ops.gallery_posterior(samples, gallery, 30.0, backend=backend)
    close(post.entropy, entropy, tolerance(backend, 30.0))
    close(post.log_z, log_z, tolerance(backend, 30.0))
    close(post.top_prob, pi.topk(10).values, tolerance(backend))


@pytest.mark.parametrize("dim", [2, 16, 1024])
def test_the_largest_kappa_is_the_last_that_float32_resolves(dim):
    """At a hundred times as much, entropies in float32 are off by several nats."""
    samples, gallery = sample_uniform(8, dim).unsqueeze(1), sample_uniform(300, dim)
    gallery[:100] = geometry.normalize(samples[:1, 0] + 1e-3 * gallery[:100])  # many items that are almost as near
    entropy, _, _ = dense(samples, gallery, LARGEST_KAPPA)
    close(ops.gallery_posterior(samples, gallery, LARGEST_KAPPA).entropy, entropy, 0.02)
    for call in (ops.gallery_posterior, ops.gallery_statistics):
        with pytest.raises(ValueError, match=r"kappa must be at most 100000, got 1e\+38"):
            call(samples, gallery, 1e38)


@pytest.mark.parametrize("kappa", [0.0, 1e-3, 100.0, 1e4])
def test_any_kappa_is_exact(kappa, backend):
    samples, gallery = world(3, 9, 300, 17, dtype=DTYPE[backend])
    entropy, log_z, pi = dense(samples, gallery, kappa)
    post = ops.gallery_posterior(samples, gallery, kappa, backend=backend)
    close(post.entropy, entropy, tolerance(backend, kappa))
    close(post.log_z, log_z, tolerance(backend, kappa))
    close(post.top_prob, pi.topk(10).values, tolerance(backend, kappa))


def test_single_precision_is_close(backend):
    samples, gallery = world(4, 50, 2000, 512, dtype=torch.float32)
    entropy, log_z, _ = dense(samples, gallery, 20.0)
    assert 0.3 < entropy.min() < entropy.max() < 8
    post = ops.gallery_posterior(samples, gallery, 20.0, backend=backend)
    assert post.entropy.dtype == torch.float32
    torch.testing.assert_close(post.entropy.double(), entropy, rtol=0, atol=2e-5)
    torch.testing.assert_close(post.log_z.double(), log_z, rtol=0, atol=2e-5)


def test_galleries_with_a_known_answer(backend):
    dtype = DTYPE[backend]
    samples = sample_uniform(2 * 5, 6, dtype=dtype).view(2, 5, 6)
    one = ops.gallery_posterior(samples, samples[0, :1], 50.0, backend=backend)
    assert one.entropy.tolist() == [0.0, 0.0]
    assert one.top_prob.tolist() == [[1.0], [1.0]]
    equal = ops.gallery_posterior(samples, samples[0, :1].repeat(640, 1), 50.0, backend=backend)
    close(equal.entropy, torch.full((2,), math.log(640)).double(), 1e-6)
    # Half of the items at the query, half at its antipode: only the near half counts at high kappa.
    point = torch.eye(6, dtype=dtype)[:1]
    halves = torch.cat((point.repeat(32, 1), -point.repeat(32, 1)))
    post = ops.gallery_posterior(point.unsqueeze(0), halves, 500.0, backend=backend)
    close(post.entropy, torch.full((1,), math.log(32)).double(), 1e-6)


def test_bias_shifts_the_scores(backend):
    samples, gallery = world(3, 8, 129, 11, dtype=DTYPE[backend])
    bias = torch.randn(129, dtype=DTYPE[backend])
    entropy, log_z, pi = dense(samples, gallery, 6.0, bias)
    post = ops.gallery_posterior(samples, gallery, 6.0, item_bias=bias, backend=backend)
    close(post.entropy, entropy, tolerance(backend, 6.0))
    close(post.log_z, log_z, tolerance(backend, 6.0))
    assert torch.equal(post.top_index, pi.topk(10).indices)


def head(queries, points, items, width, dtype):
    """Points of norm 0 to 100 with log-weights down to -80, some of them -inf, and a gallery that holds items twice."""
    gallery = geometry.normalize(torch.randn(items, width, dtype=torch.float64))
    gallery[items // 2 :] = gallery[: items - items // 2].clone()
    norm = 100 * torch.rand(queries, points, 1, dtype=torch.float64)
    norm[::3, -1] = 0
    samples = norm * geometry.normalize(torch.randn(queries, points, width, dtype=torch.float64))
    weights = -80 * torch.rand(queries, points, dtype=torch.float64)
    weights[::2, 1::3] = -math.inf
    return samples.to(dtype), gallery.to(dtype), weights.to(dtype)


def head_scores(samples, gallery, weights):
    """[Q, N] in float64."""
    logits = torch.einsum("qmd,nd->qmn", samples.double(), gallery.double()) + weights.double().unsqueeze(2)
    return torch.logsumexp(logits, dim=1) - math.log(samples.shape[1])


# 17 queries are two interleaved groups and one more; 40 points of 17 queries are spread over three tiles
@pytest.mark.parametrize(("queries", "points"), list(itertools.product((1, 7, 17), (1, 3, 4, 8, 40))))
def test_weighted_points_agree_with_float64(queries, points, backend):
    for items, width in itertools.product((1, 7, 129, 1023), (1, 24, 129)):
        samples, gallery, weights = head(queries, points, items, width, DTYPE[backend])
        spaced = torch.empty(queries, 2 * points, 2 * width, dtype=samples.dtype)[:, ::2, ::2].copy_(samples)
        result = ops.gallery_statistics(
            spaced, gallery.T.contiguous().T, 1.0, 5, backend, sample_bias=weights.T.contiguous().T
        )
        score = head_scores(samples, gallery, weights)
        error = tolerance(backend, 100.0)
        close(result.log_z, torch.logsumexp(score, dim=1), error)
        log_pi = torch.log_softmax(score, dim=1)
        close(result.posterior(torch.float64).entropy, -(log_pi.exp() * log_pi).sum(1), 10 * error)
        close(result.top_score, score.topk(min(5, items)).values, error)
        close(score.gather(1, result.top_index), result.top_score, error)
        listed_later = result.top_index[:, :-1] > result.top_index[:, 1:]
        assert not (listed_later & (result.top_score[:, :-1] == result.top_score[:, 1:])).any()


def test_equal_biases_of_samples_shift_the_scores_alone(backend):
    samples, gallery = world(9, 6, 200, 20, dtype=DTYPE[backend])
    plain = ops.gallery_posterior(samples, gallery, 30.0, backend=backend)
    biased = torch.full((9, 6), -7.5, dtype=DTYPE[backend])
    post = ops.gallery_posterior(samples, gallery, 30.0, backend=backend, sample_bias=biased)
    close(post.entropy, plain.entropy, tolerance(backend, 30.0))
    close(post.log_z, plain.log_z - 7.5, tolerance(backend, 30.0))
    assert torch.equal(post.top_index, plain.top_index)


def test_a_sample_with_a_bias_of_minus_infinity_is_left_out(backend):
    samples, gallery = world(9, 6, 200, 20, dtype=DTYPE[backend])
    weights = torch.zeros(9, 6, dtype=DTYPE[backend])
    weights[:, ::2] = -math.inf
    post = ops.gallery_posterior(samples, gallery, 30.0, backend=backend, sample_bias=weights)
    kept = ops.gallery_posterior(samples[:, 1::2], gallery, 30.0, backend=backend)
    close(post.log_z, kept.log_z - math.log(2), tolerance(backend, 30.0))
    close(post.entropy, kept.entropy, tolerance(backend, 30.0))


def test_weighted_shards_and_mapped_galleries_give_the_whole(tmp_path, backend, monkeypatch):
    samples, gallery, weights = head(9, 4, 1023, 24, DTYPE[backend])
    parts = [
        ops.gallery_statistics(samples, gallery[a:b], 1.0, 5, backend, sample_bias=weights, first_index=a)
        for a, b in itertools.pairwise((0, 1, 300, 1023))
    ]
    merged = parts[2].merge(parts[0]).merge(parts[1])
    whole = ops.gallery_statistics(samples, gallery, 1.0, 5, backend, sample_bias=weights)
    close(merged.log_z, whole.log_z, tolerance(backend))
    assert torch.equal(merged.top_index, whole.top_index)
    np.save(tmp_path / "gallery.npy", gallery.numpy())
    monkeypatch.setattr("geoflow_fast.retrieval.gallery.BLOCK_ROWS", 100)
    mapped = gf.Gallery(tmp_path / "gallery.npy").statistics(samples, 1.0, 5, sample_bias=weights)
    close(mapped.log_z, whole.log_z, tolerance("cpu", 100.0))  # files are read in float32
    assert torch.equal(mapped.top_index, whole.top_index)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], [math.nan, -math.inf]])
def test_a_bias_that_is_no_weight_is_refused_by_query(row):
    samples, gallery = world(3, 2, 20, 5)
    weights = torch.zeros(3, 2)
    weights[1] = torch.tensor(row)
    for call in (ops.gallery_posterior, ops.gallery_statistics):
        with pytest.raises(ValueError, match="sample_bias of query 1"):
            call(samples, gallery, 1.0, sample_bias=weights)
    with pytest.raises(ValueError, match="sample_bias of query 1"):
        gf.Gallery(gallery).statistics(samples, 1.0, 5, sample_bias=weights)


@pytest.mark.parametrize("cuts", [(1,), (500,), (3, 4, 900), (2, 999)])
def test_statistics_of_any_split_merge_to_the_whole(cuts, backend):
    samples, gallery = world(5, 12, 1000, 33, dtype=DTYPE[backend])
    whole = ops.gallery_posterior(samples, gallery, 30.0, backend=backend)
    edges = [0, *cuts, 1000]
    parts = [
        ops.gallery_statistics(samples, gallery[a:b], 30.0, first_index=a, backend=backend)
        for a, b in itertools.pairwise(edges)
    ]
    for order in (parts, parts[::-1]):
        merged = order[0]
        for part in order[1:]:
            merged = merged.merge(part)
        post = merged.posterior(torch.float64)
        close(post.entropy, whole.entropy, tolerance(backend))
        close(post.log_z, whole.log_z, tolerance(backend))
        close(post.top_prob, whole.top_prob, tolerance(backend))
        assert torch.equal(post.top_index, whole.top_index)


def test_strided_and_empty_inputs(backend):
    samples, gallery = world(4, 6, 50, 10, dtype=DTYPE[backend])
    spaced = torch.zeros(4, 12, 20, dtype=DTYPE[backend])[:, ::2, ::2].copy_(samples)
    columns = gallery.T.contiguous().T
    expected = ops.gallery_posterior(samples, gallery, 5.0, backend=backend)
    torch.testing.assert_close(ops.gallery_posterior(spaced, columns, 5.0, backend=backend).entropy, expected.entropy)
    empty = ops.gallery_posterior(samples[:0], gallery, 5.0, backend=backend)
    assert empty.entropy.shape == (0,)
    assert empty.top_index.shape == (0, 10)


def test_result_does_not_depend_on_threads(backend):
    samples, gallery = world(3, 50, 3000, 40, dtype=DTYPE[backend])
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(ops.gallery_posterior(samples, gallery, 40.0, backend=backend))
    finally:
        torch.set_num_threads(before)
    one, two = results
    if backend == "cpu":
        assert torch.equal(one.entropy, two.entropy)
        assert torch.equal(one.log_z, two.log_z)
    close(one.entropy, two.entropy, tolerance(backend, 40.0))
    assert torch.equal(one.top_index, two.top_index)


def test_equal_scores_are_listed_by_index(backend):
    item = sample_uniform(1, 8, dtype=DTYPE[backend])
    post = ops.gallery_posterior(item.unsqueeze(0), item.repeat(1000, 1), 10.0, top_k=5, backend=backend)
    assert post.top_index.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["samples", "gallery", "item_bias"])
def test_a_value_that_is_not_finite_is_never_swallowed(where, value, backend):
    samples, gallery = world(3, 9, 200, 17, dtype=DTYPE[backend])
    arguments = {"samples": samples, "gallery": gallery, "item_bias": torch.zeros(200, dtype=DTYPE[backend])}
    arguments[where].view(-1)[-1] = value
    with pytest.raises(ValueError, match="not finite"):
        ops.gallery_posterior(**arguments, kappa=5.0, backend=backend)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": torch.ones(2, 3)}, r"samples must be \[Q, M, d\]"),
        ({"gallery": torch.ones(4, 6)}, r"gallery \[N, d\]"),
        ({"gallery": torch.ones(4, 5, dtype=torch.float64)}, "gallery is torch.float64"),
        ({"gallery": torch.ones(0, 5)}, "at least one"),
        ({"samples": torch.ones(2, 0, 5)}, "at least one"),
        ({"kappa": -1.0}, "kappa"),
        ({"kappa": math.nan}, "kappa"),
        ({"top_k": 0}, "top_k"),
        ({"item_bias": torch.zeros(3)}, "item_bias"),
        ({"sample_bias": torch.zeros(2, 4)}, r"sample_bias must be \[2, 3\]"),
        ({"sample_bias": torch.zeros(2, 3, dtype=torch.int64)}, "sample_bias"),
        ({"gallery": torch.full((4, 5), math.nan)}, "query 0"),
        ({"backend": "cuda"}, "cuda"),
    ],
)
def test_errors_name_the_argument(change, words):
    arguments = {"samples": torch.ones(2, 3, 5), "gallery": torch.ones(4, 5), "kappa": 1.0, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        ops.gallery_posterior(**arguments)


@pytest.mark.parametrize(("queries", "draws", "items", "width"), [(1, 1, 1, 2), (3, 7, 129, 65), (50, 50, 1023, 17)])
def test_scores_agree_with_float64(queries, draws, items, width, backend):
    samples, gallery = world(queries, draws, items, width, dtype=DTYPE[backend])
    bias, weights = torch.randn(items), torch.randn(queries, draws)
    weights[0, 1:] = -math.inf
    logits = 30.0 * torch.einsum("qmd,nd->qmn", samples.double(), gallery.double()) + weights.double().unsqueeze(2)
    expected = torch.logsumexp(logits, dim=1) - math.log(draws) + bias.double()
    close(gallery_scores(samples, gallery, 30.0, bias, weights, backend), expected, 2e-5)


def test_statistics_of_different_queries_do_not_merge():
    samples, gallery = world(4, 6, 50, 10)
    with pytest.raises(ValueError, match="cannot merge"):
        ops.gallery_statistics(samples, gallery, 1.0).merge(ops.gallery_statistics(samples[:2], gallery, 1.0))


@pytest.mark.parametrize("items", [3, 8])
def test_packed_statistics_are_unpacked_as_they_were(items):
    """Lists that are shorter than those of other ranks are filled up at their ends, with items that nobody wants."""
    samples, gallery = world(4, 5, items, 6)
    whole = ops.gallery_statistics(samples, gallery, 7.0, top_k=8)
    again = ops.GalleryStatistics.unpack(whole.pack(8), 8)
    assert torch.equal(again.top_index[:, :items], whole.top_index)
    assert torch.equal(again.top_score[:, :items], whole.top_score)
    assert bool((again.top_score[:, items:] == -math.inf).all())
    for name in ("peak", "weight", "moment"):
        assert torch.equal(getattr(again, name), getattr(whole, name)), name
