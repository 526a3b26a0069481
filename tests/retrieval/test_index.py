"""Pruned gallery posteriors are within their bounds of whole ones in every case; the index on disk."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import weakref

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry, ops
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import native, pruning
from geoflow_fast.ops.gallery_statistics import entropy_bound
from geoflow_fast.retrieval import index as index_module

OP = "gallery_posterior"
DTYPE = {"reference": torch.float64, "cpu": torch.float32}


def rounding(backend, kappa):
    """The rounding error of scores in nats, with and without pruning."""
    return 1e-9 if backend == "reference" else 5e-6 + 4e-7 * kappa


def world(items, width, queries, draws, cosine, *, power=1.0, dtype=torch.float32):
    """A gallery whose spectrum falls off as 1/k^power, and samples at the given cosine around items of it."""
    scale = torch.arange(1, width + 1, dtype=torch.float64).pow(-power / 2)

    def draw(*shape):
        return geometry.normalize(torch.randn(*shape, width, dtype=torch.float64) * scale)

    gallery = draw(items)
    centre = gallery[torch.randint(items, (queries,))].unsqueeze(1)
    noise = draw(queries, draws)
    noise = geometry.normalize(noise - (noise * centre).sum(-1, keepdim=True) * centre + 1e-9)
    samples = geometry.normalize(cosine * centre + math.sqrt(1 - cosine**2) * noise)
    return samples.to(dtype), gallery.to(dtype)


def whole_scores(samples, gallery, kappa, bias=None, sample_bias=None):
    logits = kappa * torch.einsum("qmd,nd->qmn", samples.double(), gallery.double())
    logits = logits if sample_bias is None else logits + sample_bias.double().unsqueeze(2)
    score = torch.logsumexp(logits, dim=1) - math.log(samples.shape[1])
    return score if bias is None else score + bias.double()


def entropy_of(score):
    log_pi = torch.log_softmax(score, dim=1)
    return -(log_pi.exp() * log_pi).sum(1)


def check_against_whole(samples, gallery, index, kappa, backend, bias=None, top_k=10, sample_bias=None):
    """Compares everything that `prune="always"` promises with a dense float64 softmax, and returns the posterior."""
    biases = {"item_bias": bias, "sample_bias": sample_bias}
    post = ops.gallery_posterior(samples, gallery, kappa, top_k, backend, index=index, prune="always", **biases)
    score = whole_scores(samples, gallery, kappa, bias, sample_bias)
    slack = rounding(backend, kappa * max(1.0, float(samples.norm(dim=-1).max())))
    assert ((post.entropy.double() - entropy_of(score)).abs() <= post.entropy_bound + slack).all()
    log_z = torch.logsumexp(score, dim=1)
    assert (post.log_z.double() <= log_z + slack).all()
    assert (post.log_z.double() - torch.log1p(-post.mass_bound) >= log_z - slack).all()
    pi = torch.softmax(score, dim=1)
    listed = pi.gather(1, post.top_index)
    assert (listed <= post.top_prob * math.exp(slack) + 1e-30).all()
    assert (listed >= post.top_prob * (1 - post.mass_bound.unsqueeze(1)) * math.exp(-slack) - 1e-30).all()
    missing = pi.scatter(1, post.top_index, 0.0).amax(dim=1)
    assert (missing <= torch.maximum(post.top_prob[:, -1].double() * math.exp(slack), post.mass_bound) + 1e-30).all()
    return post


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("left_mass", [1e-6, 0.2])
def test_random_cases_stay_within_their_bounds(seed, left_mass, backend, monkeypatch):
    """If a large share may be left out, the bounds matter: entropies are off by a tenth of a nat and more."""
    monkeypatch.setattr(pruning, "LEFT_MASS", left_mass)
    monkeypatch.setattr(pruning, "SEEDS", 4)
    torch.manual_seed(seed)
    pick = np.random.default_rng(seed)
    items, width = int(pick.choice([1, 2, 7, 129, 1023])), int(pick.choice([2, 3, 17, 64]))
    kappa, cosine = float(pick.choice([0.0, 3.0, 30.0, 100.0, 1e4])), float(pick.choice([0.3, 0.6, 0.9, 0.999]))
    samples, gallery = world(items, width, 3, int(pick.choice([1, 2, 9])), cosine, dtype=DTYPE[backend])
    bias = torch.randn(items, dtype=DTYPE[backend]) * 3 if seed % 2 else None
    index = gf.GalleryIndex.build(gallery.float(), width=int(pick.integers(2, width + 1)))
    check_against_whole(samples, gallery, index, kappa, backend, bias, top_k=int(pick.choice([1, 10, 2000])))


@pytest.mark.parametrize("left_mass", [1e-6, 0.2])
def test_weighted_points_of_any_norm_stay_within_their_bounds(left_mass, backend, monkeypatch):
    monkeypatch.setattr(pruning, "LEFT_MASS", left_mass)
    monkeypatch.setattr(pruning, "SEEDS", 4)
    left = 0
    for seed in range(12):
        torch.manual_seed(seed)
        points, gallery = world(1023, 33, 3, 5, 0.9, dtype=DTYPE[backend])
        norm = torch.rand(3, 5, 1, dtype=points.dtype) * 100
        norm[0, 0] = 0
        sample_bias = -80 * torch.rand(3, 5, dtype=points.dtype)
        sample_bias[1, 2:4] = -math.inf
        index = gf.GalleryIndex.build(gallery.float(), width=9)
        post = check_against_whole(points * norm, gallery, index, 1.0, backend, sample_bias=sample_bias)
        left += int((post.mass_bound > 0).sum())
    assert left > 18  # of 36 queries


@pytest.mark.parametrize("kappa", [10.0, 200.0])
def test_adversarial_galleries_stay_within_their_bounds(kappa, backend, monkeypatch):
    """The items are equal, opposite, orthogonal to each other, or all just below the threshold."""
    monkeypatch.setattr(pruning, "SEEDS", 2)
    dtype, width = DTYPE[backend], 16
    axes = torch.eye(width, dtype=dtype)
    point = axes[:1]
    for left_mass in (1e-6, 0.3):
        monkeypatch.setattr(pruning, "LEFT_MASS", left_mass)
        gap = (math.log(500 / left_mass) + 0.02) / kappa
        ring = torch.zeros(500, width, dtype=dtype)
        ring[:, 0] = 1 - min(gap, 1.9)
        ring[:, 1:] = sample_uniform(500, width - 1, dtype=torch.float64).to(dtype)
        ring[:, 1:] *= (1 - ring[:, :1] ** 2).clamp_min(0).sqrt()
        cases = [
            torch.cat((point, ring)),
            torch.cat((point.repeat(40, 1), -point.repeat(60, 1))),
            axes,
            torch.cat((axes, -axes, sample_uniform(300, width, dtype=torch.float64).to(dtype))),
        ]
        for gallery in cases:
            index = gf.GalleryIndex.build(gallery.float(), width=3)
            for samples in (point.repeat(5, 1), axes[:5], torch.cat((point, -point))):
                check_against_whole(samples.unsqueeze(0), gallery, index, kappa, backend)


def test_bounds_are_above_the_scores(backend):
    samples, gallery = world(700, 40, 4, 11, 0.7, dtype=DTYPE[backend])
    bias = torch.randn(700, dtype=DTYPE[backend])
    sample_bias = 3 * torch.randn(4, 11, dtype=DTYPE[backend])
    score = whole_scores(samples, gallery, 50.0, bias, sample_bias)
    kernel = ops.dispatch.choose("gallery_scores", samples, backend)

    def run(points, rows, kappa, item_bias):
        return kernel(points.samples, rows, kappa, item_bias, points.bias)

    gaps, points = [], pruning.WeightedSamples(samples, sample_bias)
    for width in (2, 5, 40):
        index = gf.GalleryIndex.build(gallery.float(), width=width)
        for codes in (index.codes, None):
            prefix = dataclasses.replace(index, codes=codes)
            pruner = pruning.Pruner(gallery, prefix, 50.0, 10, bias, run, *(4 * [lambda *_: None]))
            bound = pruner._upper_bounds(pruner._describe(points), slice(None)).double()
            assert (bound >= score).all()
        gaps.append(float((bound - score).mean()))
    assert gaps[0] > gaps[1] > 2 * gaps[2]


@pytest.mark.parametrize("of_items", [True, False])
def test_bounds_hold_for_large_biases(backend, of_items):
    """Of one sample the bound is the score but for its rounding, most of which is that of the bias."""
    samples, gallery = world(700, 40, 4, 1, 0.7, dtype=DTYPE[backend])
    bias = 1e6 * torch.randn(700, dtype=DTYPE[backend]) if of_items else None
    sample_bias = None if of_items else 1e6 * torch.randn(4, 1, dtype=DTYPE[backend])
    kernel = ops.dispatch.choose("gallery_scores", samples, backend)

    def run(points, rows, kappa, item_bias):
        return kernel(points.samples, rows, kappa, item_bias, points.bias)

    pruner = pruning.Pruner(
        gallery, gf.GalleryIndex.build(gallery.float()), 1.0, 10, bias, run, *(4 * [lambda *_: None])
    )
    points = pruning.WeightedSamples(samples, sample_bias)
    bound = pruner._upper_bounds(pruner._describe(points), slice(None)).double()
    score = whole_scores(samples, gallery, 1.0, bias, sample_bias)
    assert (bound >= score).all()
    assert float((bound - score).max()) < 100  # a ten-thousandth of the bias


def test_the_entropy_bound_is_attained():
    """One item is certain and those left out share the rest of the mass evenly: no tighter bound would hold."""
    mass, left = torch.tensor([1e-3, 0.3], dtype=torch.float64), torch.tensor([1000, 7])
    change = torch.special.entr(1 - mass) + left * torch.special.entr(mass / left)
    torch.testing.assert_close(entropy_bound(torch.zeros(2, dtype=torch.float64), mass, left), change)
    # With more mass than an even share for all, the bound is the largest entropy there is.
    full = entropy_bound(torch.zeros(1).double(), torch.tensor([0.99]).double(), torch.tensor([3]))
    torch.testing.assert_close(full, torch.tensor([math.log(4)]).double())
    # If a thousand equal items are scored and a likelier one is left out, the entropy is too large.
    mass, even = torch.tensor([0.3]).double(), torch.tensor([math.log(1000)]).double()
    too_large = mass * even - torch.special.entr(mass) - torch.special.entr(1 - mass)
    assert too_large > 1.4
    assert entropy_bound(even, mass, torch.tensor([1])) >= too_large
    assert entropy_bound(torch.ones(1).double(), torch.zeros(1).double(), torch.tensor([0])).item() == 0


def test_sharp_posteriors_are_pruned_and_flat_ones_are_not(monkeypatch):
    monkeypatch.setattr(pruning, "FEWEST_ITEMS", 4000)
    monkeypatch.setattr(pruning, "FEWEST_SAMPLES", 400)
    sharp, gallery = world(6000, 256, 4, 50, 0.9)
    flat = sample_uniform(4 * 50, 256).view(4, 50, 256)
    index = gf.GalleryIndex.build(gallery)
    samples = torch.cat((sharp, flat))[torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])]
    statistics = ops.gallery_statistics(samples, gallery, 100.0, index=index)
    assert (statistics.left[::2] > 4000).all()
    assert (statistics.left[1::2] == 0).all()
    post, whole = statistics.posterior(), ops.gallery_posterior(samples, gallery, 100.0)
    torch.testing.assert_close(post.entropy, whole.entropy, rtol=0, atol=1e-4)
    assert torch.equal(post.top_index[:, 0], whole.top_index[:, 0])
    assert (post.entropy_bound[::2] > 0).all()
    assert post.entropy_bound[1::2].tolist() == whole.entropy_bound[1::2].tolist() == [0.0] * 4
    never = ops.gallery_posterior(samples, gallery, 100.0, index=index, prune="never")
    assert torch.equal(never.entropy, whole.entropy)
    alone = ops.gallery_statistics(samples[:1], gallery, 100.0, index=index)
    assert alone.left.tolist() == [0]  # there is too little to save


def test_pruned_shards_merge(backend):
    samples, gallery = world(900, 48, 3, 12, 0.95, dtype=DTYPE[backend])
    parts = []
    for first, last in ((0, 400), (400, 900)):
        shard = gallery[first:last]
        index = gf.GalleryIndex.build(shard.float())
        parts.append(
            ops.gallery_statistics(samples, shard, 200.0, 5, backend, index=index, prune="always", first_index=first)
        )
    assert all((part.left > 0).all() for part in parts)
    post = parts[0].merge(parts[1]).posterior(torch.float64)
    score = whole_scores(samples, gallery, 200.0)
    assert ((post.entropy - entropy_of(score)).abs() <= post.entropy_bound + rounding(backend, 200.0)).all()
    assert torch.equal(post.top_index[:, 0], score.argmax(dim=1))


def test_a_value_that_is_not_finite_is_reported(backend):
    samples, gallery = world(300, 24, 2, 5, 0.9, dtype=DTYPE[backend])
    index = gf.GalleryIndex.build(gallery.float())
    for value in (math.nan, math.inf, -math.inf):
        broken = gallery.clone()
        broken[37, 3] = value
        with pytest.raises(ValueError, match="not finite"):
            ops.gallery_posterior(samples, broken, 50.0, backend=backend, index=index, prune="always")


@pytest.mark.parametrize("said", [math.nan, -math.inf])
def test_a_far_item_that_is_not_finite_is_reported(backend, said, monkeypatch):
    """Kernels say NaN or, on GPUs, -inf of a score that is infinitely low."""
    samples, gallery = world(300, 24, 1, 5, 0.9, dtype=DTYPE[backend])
    index = dataclasses.replace(gf.GalleryIndex.build(gallery.float()), codes=None)
    item = int(whole_scores(samples, gallery, 50.0).argmin())
    gallery[item, 3] = -math.inf * samples[0, :, 3].mean().sign()
    module = sys.modules[ops.gallery_posterior.__module__]
    scores = module.gallery_scores
    monkeypatch.setattr(module, "gallery_scores", lambda *inputs: scores(*inputs).nan_to_num(nan=said, neginf=said))
    with pytest.raises(ValueError, match="not finite"):
        ops.gallery_posterior(samples, gallery, 50.0, backend=backend, index=index, prune="always")


def test_picked_rows_are_scored_as_copies_would_be():
    samples, gallery = world(500, 30, 2, 20, 0.8)
    pick = torch.tensor([0, 3, 4, 77, 300, 499])
    bias = torch.randn(6)
    picked = native.gallery_posterior(samples, gallery, 20.0, 6, bias, pick)
    copied = native.gallery_posterior(samples, gallery[pick], 20.0, 6, bias)
    for mine, theirs in zip(picked, copied):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="pick"):
        native.gallery_posterior(samples, gallery, 20.0, 1, None, torch.tensor([500]))


@pytest.mark.parametrize(("queries", "draws", "items", "width"), [(1, 1, 1, 1), (3, 7, 129, 65), (50, 50, 1023, 17)])
def test_scores_agree_with_float64(queries, draws, items, width):
    samples, gallery = world(items, width, queries, draws, 0.5)
    bias = torch.randn(items)
    score = native.gallery_scores(samples, gallery, 30.0, bias)
    torch.testing.assert_close(score.double(), whole_scores(samples, gallery, 30.0, bias), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_pruned_in_float32(dtype):
    samples, gallery = (x.to(dtype) for x in world(500, 64, 4, 8, 0.9))
    index = gf.GalleryIndex.build(gallery)
    pruned = ops.gallery_posterior(samples, gallery, 100.0, index=index, prune="always")
    full = ops.gallery_posterior(samples.float(), gallery.float(), 100.0, index=index, prune="always")
    assert torch.equal(pruned.entropy, full.entropy)
    assert torch.equal(pruned.top_index, full.top_index)


def test_retrieval_entropy_takes_the_index():
    flow = gf.GeoFlow(gf.GeoFlowConfig(24, 7, hidden=32, depth=1, layer_scale=0.5)).eval()
    queries, (_, gallery) = sample_uniform(3, 7), world(600, 24, 1, 1, 0.9)
    settings = {"n_samples": 8, "kappa": 60.0, "n_steps": 3}
    index = gf.GalleryIndex.build(gallery)
    whole = gf.RetrievalEntropy(flow, gallery, **settings)(queries)
    assert whole.entropy_bound.tolist() == [0.0] * 3
    scorer = gf.RetrievalEntropy(flow, gf.Gallery(gallery, index, prune="always"), **settings)
    post = scorer(queries)
    assert ((post.entropy - whole.entropy).abs() <= post.entropy_bound + rounding("cpu", 60.0)).all()
    assert torch.equal(post.map_index, whole.map_index)
    assert (post.risk_lower_bound <= whole.risk_lower_bound + 1e-4).all()
    assert scorer.settings["prune"] == "always"
    with pytest.raises(ValueError, match="another gallery"):  # the digest of an array is another one
        gf.Gallery(gallery.numpy(), index)
    with pytest.raises(ValueError, match="another gallery"):
        gf.Gallery(gallery.flip(0), index)
    with pytest.raises(ValueError, match="prune must be"):
        gf.Gallery(gallery, index, prune="maybe")
    with pytest.raises(ValueError, match="needs the index="):
        gf.Gallery(gallery, prune="always")
    with pytest.raises(TypeError, match="index must be a GalleryIndex"):
        gf.Gallery(gallery, gallery)
    with pytest.raises(ValueError, match="divided among ranks is not pruned"):
        scorer.divide_among_ranks()


def test_index_comes_back_from_disk_as_it_was(tmp_path):
    samples, gallery = world(400, 32, 2, 9, 0.9)
    np.save(tmp_path / "gallery.npy", gallery.numpy())
    from_file = gf.GalleryIndex.build(gf.Gallery(tmp_path / "gallery.npy"))
    from_file.save(tmp_path / "index.safetensors")
    loaded = gf.GalleryIndex.load(tmp_path / "index.safetensors", gf.Gallery(tmp_path / "gallery.npy"))
    assert torch.equal(loaded.rows, from_file.rows)
    assert torch.equal(loaded.projection, from_file.projection)
    assert (loaded.largest_norm, loaded.digest) == (from_file.largest_norm, from_file.digest)
    in_memory = gf.GalleryIndex.build(gallery)
    assert torch.equal(in_memory.rows, from_file.rows)
    check_against_whole(samples, gallery, loaded, 80.0, "cpu")
    norm = (loaded.rows.double() ** 2).sum(dim=1).sqrt()
    torch.testing.assert_close(norm, gallery.double().norm(dim=1), rtol=0, atol=1e-6)


def test_damaged_and_foreign_indexes_are_refused(tmp_path):
    samples, gallery = world(400, 32, 2, 9, 0.9)
    path = tmp_path / "index.safetensors"
    index = gf.GalleryIndex.build(gallery)
    index.save(path)
    changed = gallery.clone()
    changed[123] = gallery[124]
    with pytest.raises(ValueError, match="another gallery"):
        gf.GalleryIndex.load(path, changed)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="truncated"):
        gf.GalleryIndex.load(path, gallery)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="corrupt"):
        gf.GalleryIndex.load(path, gallery)
    with pytest.raises(FileNotFoundError):
        gf.GalleryIndex.load(tmp_path / "none", gallery)
    with pytest.raises(ValueError, match="another gallery"):
        ops.gallery_posterior(samples, gallery.flip(0).contiguous(), 5.0, index=index)
    with pytest.raises(ValueError, match="399"):
        ops.gallery_posterior(samples, gallery[:399], 5.0, index=index)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"prune": "sometimes"}, "prune must be"), ({"prune": "always"}, "needs the index"), ({"width": 1}, "width")],
)
def test_errors_name_the_argument(change, words):
    samples, gallery = world(50, 32, 1, 3, 0.9)
    run = gf.GalleryIndex.build if "width" in change else functools.partial(ops.gallery_posterior, samples, kappa=5.0)
    with pytest.raises(ValueError, match=words):
        run(gallery=gallery, **change)


@pytest.mark.skipif(native.missing_bfloat16() is not None, reason=str(native.missing_bfloat16()))
def test_queries_that_are_not_pruned_are_scored_as_without_an_index(monkeypatch):
    """An index must not cost those queries the products in bfloat16 that they would have without it."""
    monkeypatch.setattr(pruning, "FEWEST_ITEMS", 4000)
    monkeypatch.setattr(pruning, "FEWEST_SAMPLES", 400)
    sharp, gallery = world(6000, 256, 4, 50, 0.9)
    flat = sample_uniform(4 * 50, 256).view(4, 50, 256)
    index = gf.GalleryIndex.build(gallery)
    samples = torch.cat((sharp, flat))[torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])]

    def run(some, **options):
        return ops.gallery_statistics(some, gallery, 80.0, **options)

    mixed, single = run(samples, index=index, precision="auto"), run(samples, index=index)
    assert (mixed.left[::2] > 3000).all()  # pruned, and in float32
    assert torch.equal(mixed.log_z[::2], single.log_z[::2])
    assert mixed.left[1::2].tolist() == [0] * 4
    assert torch.equal(mixed.log_z[1::2], run(samples[1::2], precision="auto").log_z)
    assert not torch.equal(mixed.log_z[1::2], single.log_z[1::2])
    few = samples[:1]  # too few for a pilot
    assert torch.equal(run(few, index=index, precision="auto").log_z, run(few, precision="auto").log_z)


def test_pruning_competes_with_what_scoring_all_items_costs():
    """Half of the items remain: less than all in float32, but more than all in bfloat16."""
    samples, gallery = world(2048, 64, 3, 9, 0.9)
    index = gf.GalleryIndex.build(gallery)
    rounded = torch.tensor([True, False, True])
    pruner = pruning.Pruner(gallery, index, 1.0, 10, None, *(4 * [lambda *_: None]), lambda _: rounded)
    bounds = torch.arange(2048.0).expand(3, -1)
    object.__setattr__(pruner, "_upper_bounds", lambda _queries, some: bounds[:, some])
    queries = pruner._describe(pruning.WeightedSamples(samples))
    floor = torch.tensor([1400.0, 1400.0, 2000.0], dtype=torch.float64)
    assert pruner._pays(queries, floor, 0.2).tolist() == [False, True, True]


def test_codes_are_written_to_their_place(monkeypatch, tmp_path):
    """Never more than one part of the codes is in memory beside the whole."""
    monkeypatch.setattr(index_module, "SAMPLE_ROWS", 100)
    gallery = world(1050, 70, 1, 1, 0.9)[1]
    for number, part in enumerate(gallery.split(430)):
        np.save(tmp_path / f"part_{number}.npy", part.numpy())
    parts: list[weakref.ref] = []
    alive: list[int] = []
    encode = ops.RowCodes.encode

    def watched(rows):
        alive.append(sum(part() is not None for part in parts))
        made = encode(rows)
        parts.append(weakref.ref(made))
        return made

    monkeypatch.setattr(ops.RowCodes, "encode", staticmethod(watched))
    codes = gf.GalleryIndex.build(gf.Gallery(tmp_path)).codes
    assert len(parts) >= 11
    assert max(alive) <= 1
    expected = encode(gallery)
    assert torch.equal(codes.code, expected.code)
    assert torch.equal(codes.scale, expected.scale)
    assert torch.equal(codes.error, expected.error)
    assert codes.largest_norm == expected.largest_norm


@pytest.mark.skipif(native.missing_int8() is not None, reason=str(native.missing_int8()))
@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_shortlists_of_a_re_ranker_are_found_by_codes(monkeypatch):
    rows = world(5000, 24, 1, 1, 0.9)[1]
    flow = gf.GeoFlow(gf.GeoFlowConfig(24, 24, hidden=16, depth=1)).eval()
    queries, calls = world(1, 24, 3, 1, 0.5)[0].squeeze(1), []
    original = native.search_codes
    monkeypatch.setattr(native, "search_codes", lambda *inputs: calls.append(1) or original(*inputs))
    settings = {"shortlist": 4, "n_steps": 2}
    plain = gf.BayesReranker(flow, gf.Gallery(rows), "t2i", **settings)(queries)
    assert not calls
    gallery = gf.Gallery(rows, gf.GalleryIndex.build(rows))
    coded = gf.BayesReranker(flow, gallery, "t2i", **settings)(queries)
    assert calls
    assert torch.equal(coded.index, plain.index)
    assert torch.equal(coded.prob, plain.prob)


@pytest.mark.parametrize(("width", "kept"), [(72, 9), (64, 8), (15, 2), (3, 2)])
def test_an_index_keeps_an_eighth_of_the_width(width, kept):
    index = gf.GalleryIndex.build(geometry.normalize(torch.randn(30, width)))
    assert index.rows.shape == (30, kept)
