"""RetrievalEntropy against its definition, the Fano bound against brute force, galleries of every kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

import geoflow_fast as gf
from geoflow_fast import geometry as g
from geoflow_fast import noise
from geoflow_fast.retrieval.sources import ScoringPoints


def direct_scores(flow, queries, gallery, seed, kappa, draws):
    """Posterior [Q, N] from `gf.sample` and a dense softmax."""
    generator = torch.Generator().manual_seed(seed)
    samples, _ = gf.sample(flow, text=queries, n_samples=draws, n_steps=4, guidance=2.0, generator=generator)
    logits = kappa * torch.einsum("qmd,nd->qmn", samples.double(), gallery.double())
    return torch.softmax(torch.logsumexp(logits, 1), dim=1)


def test_matches_its_definition(flow):
    queries, gallery = noise.sample_uniform(5, 7), noise.sample_uniform(200, 10)
    scorer = gf.RetrievalEntropy(flow, gallery, n_samples=8, kappa=15.0, guidance=2.0, n_steps=4, seed=3)
    post = scorer(queries)
    pi = direct_scores(flow, queries, gallery, 3, 15.0, 8)
    entropy = -(pi * pi.log()).sum(1)
    torch.testing.assert_close(post.entropy.double(), entropy, atol=2e-5, rtol=0)
    assert torch.equal(post.map_index, pi.argmax(1))
    torch.testing.assert_close(post.map_prob.double(), pi.amax(1), atol=2e-5, rtol=0)
    assert torch.equal(post.top_index, pi.topk(10).indices)
    assert (post.risk_lower_bound <= 1 - post.map_prob.double() + 1e-6).all()
    assert not any(x.requires_grad for x in vars(post).values() if x is not None)


def test_any_gallery_gives_the_same_answer(flow, tmp_path, monkeypatch):
    monkeypatch.setattr("geoflow_fast.retrieval.gallery.BLOCK_ROWS", 37)
    queries, gallery = noise.sample_uniform(3, 7), noise.sample_uniform(150, 10).numpy()
    (tmp_path / "shards").mkdir()
    for number, part in enumerate(np.array_split(gallery, 12)):
        np.save(tmp_path / "shards" / f"img_emb_{number}.npy", part)
    np.save(tmp_path / "whole.npy", gallery)
    settings = {"n_samples": 6, "kappa": 20.0, "n_steps": 3}
    expected = gf.RetrievalEntropy(flow, torch.from_numpy(gallery), **settings)(queries)
    for source in (gallery, tmp_path / "whole.npy", str(tmp_path / "shards"), gf.Gallery(gallery)):
        post = gf.RetrievalEntropy(flow, source, **settings)(queries)
        torch.testing.assert_close(post.entropy, expected.entropy, atol=1e-5, rtol=0)
        assert torch.equal(post.top_index, expected.top_index)


def test_known_answers(flow):
    queries = noise.sample_uniform(2, 10)
    one = gf.RetrievalEntropy(flow, noise.sample_uniform(1, 7), "i2t", n_samples=2, n_steps=2)(queries)
    assert one.entropy.tolist() == [0.0, 0.0]
    assert one.risk_lower_bound.tolist() == [0.0, 0.0]
    equal = gf.RetrievalEntropy(flow, noise.sample_uniform(1, 7).repeat(64, 1), "i2t", n_samples=2, n_steps=2)(queries)
    torch.testing.assert_close(equal.entropy, torch.full((2,), math.log(64)))
    torch.testing.assert_close(equal.risk_lower_bound, torch.full((2,), 63 / 64).double(), atol=1e-3, rtol=0)


def test_module_behaviour(flow):
    settings = gf.SamplingSettings(n_samples=6, n_steps=3, solver="ab2", noise="antithetic")
    scorer = gf.RetrievalEntropy(flow, noise.sample_uniform(50, 10), kappa=10.0, settings=settings)
    assert scorer(noise.sample_uniform(4, 7)).entropy.shape == (4,)
    assert set(scorer.state_dict()) == {f"flow.{name}" for name in flow.state_dict()}
    moved = scorer.to(torch.float64)
    assert moved(noise.sample_uniform(4, 7)).entropy.dtype == torch.float64
    assert scorer(torch.empty(0, 7)).entropy.shape == (0,)


def test_moving_a_scorer_leaves_the_gallery_of_its_caller_where_it_is(flow):
    gallery = gf.Gallery(noise.sample_uniform(5, 10))
    scorers = [gf.RetrievalEntropy(flow, gallery, n_samples=2, n_steps=2) for _ in range(2)]
    scorers[0].to("meta")
    assert [scorer.gallery.rows.device.type for scorer in scorers] == ["meta", "cpu"]
    assert scorers[1].gallery is gallery


def test_keywords_override_settings(flow):
    gallery, settings = noise.sample_uniform(20, 10), gf.SamplingSettings(n_steps=3, solver="ab2")
    sampling = gf.RetrievalEntropy(flow, gallery, n_steps=5, settings=settings).sampling
    assert (sampling.n_steps, sampling.solver) == (5, "ab2")
    for unknown in ("solver", "index", "sover"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            gf.RetrievalEntropy(flow, gallery, **{unknown: "ab2"})


@pytest.mark.parametrize("late", [False, True])
def test_follows_the_dtype_of_its_flow(flow, late):
    settings = {"n_samples": 6, "n_steps": 3, "kappa": 10.0}
    queries, gallery = noise.sample_uniform(4, 7), noise.sample_uniform(50, 10)
    expected = gf.RetrievalEntropy(flow, gallery, **settings)(queries).entropy
    if not late:
        flow.double()
    scorer = gf.RetrievalEntropy(flow, gallery, **settings)
    if late:
        scorer(queries)
        flow.double()
    entropy = scorer(queries).entropy
    assert entropy.dtype == torch.float64
    torch.testing.assert_close(entropy, expected.double(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("sampled", "scored"), [("float32", "float32"), ("tf32", "float32"), ("bfloat16", "auto"), ("auto", "auto")]
)
def test_items_are_scored_in_half_precision_if_samples_are_drawn_in_it(flow, sampled, scored):
    settings = gf.SamplingSettings(5, 2, precision=sampled)
    scorer = gf.RetrievalEntropy(flow, noise.sample_uniform(20, 10), "t2i", settings=settings)
    assert scorer.precision == scored
    assert scorer.source.draw(noise.sample_uniform(2, 7)).precision == scored


def test_risk_bound_is_taken_before_rounding(flow):
    """Near log N the bound has an infinite slope: log 7 rounded to float32 would lower it by 1e-4."""
    scorer = gf.RetrievalEntropy(flow, noise.sample_uniform(1, 10).repeat(7, 1), n_samples=2, n_steps=2)
    torch.testing.assert_close(
        scorer(noise.sample_uniform(4, 7)).risk_lower_bound, torch.full((4,), 6 / 7, dtype=torch.float64)
    )


def test_whole_numbers_and_floats(flow):
    gallery = noise.sample_uniform(5, 10)
    assert type(gf.RetrievalEntropy(flow, gallery, kappa=10).kappa) is float
    for name in ("n_samples", "top_k"):
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            gf.RetrievalEntropy(flow, gallery, **{name: 8.0})


@pytest.mark.parametrize("n", [2, 3, 10, 1000])
def test_fano_bound_holds_and_is_tight(n):
    generator = torch.Generator().manual_seed(n)
    sharpness = 10 ** (4 * torch.rand(500, 1, generator=generator) - 2)
    pi = torch.softmax(sharpness.double() * torch.randn(500, n, generator=generator), dim=1)
    entropy = torch.special.entr(pi).sum(1)
    assert (gf.risk_lower_bound(entropy, n) <= 1 - pi.amax(1) + 1e-9).all()
    # The bound is attained when the rest of the mass is shared evenly.
    risk = torch.linspace(0, (n - 1) / n, 50, dtype=torch.float64)
    worst = torch.cat(((1 - risk).unsqueeze(1), (risk / (n - 1)).unsqueeze(1).expand(-1, n - 1)), dim=1)
    bound = gf.risk_lower_bound(torch.special.entr(worst).sum(1), n)
    # Near the top f is flat, so a rounding of the entropy moves r by its square root.
    torch.testing.assert_close(bound[:-1], risk[:-1], atol=1e-9, rtol=0)
    torch.testing.assert_close(bound[-1], risk[-1], atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gallery": torch.empty(0, 10)}, "empty"),
        ({"gallery": noise.sample_uniform(5, 9)}, "width 9"),
        ({"gallery": torch.full((5, 10), math.nan)}, "gallery row 0 is not finite"),
        ({"gallery": torch.ones(5, 10)}, "gallery row 0 has norm"),
        ({"gallery": np.ones((5, 10), np.float32)}, "gallery row 0 has norm"),
        ({"gallery": "no/such/folder"}, "no/such/folder is missing"),
        ({"kappa": -1.0}, "kappa"),
        ({"kappa": 1e38}, "kappa must be at most 100000"),
        ({"n_samples": 0}, "n_samples"),
        ({"direction": "joint"}, "direction"),
        ({"n_steps": 0}, "n_steps"),
    ],
)
def test_bad_input(flow, change, words):
    arguments = {"gallery": noise.sample_uniform(5, 10), **change}
    with pytest.raises((ValueError, OSError), match=words):
        gf.RetrievalEntropy(flow, **arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_queries_of_any_floating_type(flow, dtype):
    queries, gallery = noise.sample_uniform(4, 7), noise.sample_uniform(50, 10)
    settings = {"n_samples": 6, "n_steps": 3, "kappa": 10.0}
    post = gf.RetrievalEntropy(flow, gallery.to(dtype), **settings)(queries.to(dtype))
    assert post.entropy.dtype == torch.float32
    expected = gf.RetrievalEntropy(flow, gallery, **settings)(queries)
    atol = 10 * torch.finfo(dtype).eps + 1e-6
    torch.testing.assert_close(post.entropy, expected.entropy, atol=atol, rtol=0)
    if dtype != torch.bfloat16:  # which numpy does not have
        gallery, queries = (x.to(dtype).numpy() for x in (gallery, queries))
        post = gf.RetrievalEntropy(flow, gallery, **settings)(queries)
        torch.testing.assert_close(post.entropy, expected.entropy, atol=atol, rtol=0)


def test_bad_queries(flow):
    scorer = gf.RetrievalEntropy(flow, noise.sample_uniform(5, 10), n_samples=2, n_steps=2)
    with pytest.raises(ValueError, match=r"queries must be \[Q, 7\]"):
        scorer(noise.sample_uniform(3, 10))
    with pytest.raises(ValueError, match="queries row 1 has norm"):
        scorer(torch.stack([torch.eye(7)[0], torch.ones(7)]))


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4", "<f8", np.longdouble])
def test_rows_of_any_floating_type_are_read_a_block_at_a_time(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("geoflow_fast.retrieval.gallery.BLOCK_ROWS", 4)
    rows = noise.sample_uniform(11, 8, generator=torch.Generator().manual_seed(0)).numpy().astype(dtype)
    np.save(tmp_path / "gallery.npy", rows)
    gallery = gf.Gallery(tmp_path / "gallery.npy")
    blocks = [(first, block.clone()) for first, block in gallery.blocks("cpu")]
    assert [first for first, _ in blocks] == [0, 4, 8]
    assert torch.equal(torch.cat([block for _, block in blocks]), torch.from_numpy(rows.astype(np.float32)))


def test_a_truncated_shard_is_named(flow, tmp_path):
    np.save(tmp_path / "a_0.npy", noise.sample_uniform(50, 10).numpy())
    whole = (tmp_path / "a_0.npy").read_bytes()
    (tmp_path / "a_0.npy").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"a_0\.npy is truncated"):
        gf.RetrievalEntropy(flow, tmp_path)


def test_shards_may_be_counted_from_one(flow, tmp_path):
    for number in (1, 2, 10, 3, 4, 5, 6, 7, 8, 9):
        np.save(tmp_path / f"part_{number}.npy", noise.sample_uniform(number, 10).numpy())
    sizes = [len(part) for part in gf.RetrievalEntropy(flow, tmp_path).gallery.rows.parts]
    assert sizes == list(range(1, 11))


def test_a_lost_or_doubled_shard_is_named(flow, tmp_path):
    for name in ("a_0", "a_1", "a_3"):
        np.save(tmp_path / f"{name}.npy", noise.sample_uniform(5, 10).numpy())
    with pytest.raises(FileNotFoundError, match=r"a_2\.npy is missing between other shards"):
        gf.RetrievalEntropy(flow, tmp_path)
    (tmp_path / "a_3.npy").rename(tmp_path / "a_2.npy")
    assert len(gf.RetrievalEntropy(flow, tmp_path).gallery) == 15
    np.save(tmp_path / "a_01.npy", noise.sample_uniform(5, 10).numpy())
    with pytest.raises(ValueError, match="are both shard 1"):
        gf.RetrievalEntropy(flow, tmp_path)


class Searchlight:
    """A field with a known answer: images lie around the text itself, more closely the larger its first coordinate."""

    def concentration(self, text: torch.Tensor) -> torch.Tensor:
        return 1.0 + 0.8 * text[:, :1]

    def velocity(self, image, text, t, direction):  # noqa: ARG002
        pull = self.concentration(text) * g.project_tangent(image, text)
        return pull, torch.zeros_like(text)

    def log_density(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """log p(image_j | text_q) up to a constant: [Q, N]."""
        c = self.concentration(text)
        return (1 - text.shape[1]) * torch.log(c.cosh() - (text @ image.T) * c.sinh())


def test_entropy_is_that_of_the_true_posterior_and_orders_queries_by_their_ambiguity():
    """On S^2, many samples and a narrow kernel give the true density, normalised over the gallery."""
    field, gallery = Searchlight(), noise.sample_uniform(1000, 3, dtype=torch.float64)
    queries = noise.sample_uniform(24, 3, dtype=torch.float64)
    settings = gf.SamplingSettings(n_samples=2000, n_steps=12, solver="rk4", guidance=0.0, noise="antithetic")
    samples, _ = gf.sample(field, text=queries, dims=(3, 3), settings=settings)
    entropy = gf.ops.gallery_posterior(samples, gallery, 300.0).entropy
    log_pi = field.log_density(gallery, queries).log_softmax(1)
    truth = -(log_pi.exp() * log_pi).sum(1)
    torch.testing.assert_close(entropy, truth, atol=0.1, rtol=0)
    assert stats.spearmanr(entropy, truth).statistic > 0.99
    assert stats.spearmanr(entropy, field.concentration(queries)[:, 0]).statistic < -0.98
    # Few samples and a wide kernel, as in use, still order them.
    cheap = gf.ops.gallery_posterior(samples[:, :16], gallery, 20.0).entropy
    assert stats.spearmanr(cheap, truth).statistic > 0.9


@pytest.mark.parametrize("kappa", [0.0, 3.0, 1e4])
def test_two_clusters(flow, kappa):
    """There are a items where all samples are, and b items at a right angle: their scores are e^kappa and 1."""
    a, b = 5, 30
    scorer = gf.RetrievalEntropy(flow, torch.eye(10)[[0] * a + [1] * b], n_samples=4, kappa=kappa)
    scorer.source.draw = lambda queries, *_: ScoringPoints(torch.eye(10)[:1].expand(len(queries), 4, 10), kappa)
    post = scorer(noise.sample_uniform(2, 7))
    log_z = float(torch.logsumexp(torch.tensor([kappa] * a + [0.0] * b, dtype=torch.float64), 0))
    entropy = log_z - a * kappa * math.exp(kappa - log_z)
    torch.testing.assert_close(post.entropy.double(), torch.full((2,), entropy).double(), atol=1e-4, rtol=0)
    assert post.map_index.tolist() == [0, 0]
    torch.testing.assert_close(post.map_prob.double(), torch.full((2,), math.exp(kappa - log_z)).double())
    assert set(post.top_index[0, :a].tolist()) == set(range(a))


def test_result_does_not_depend_on_chunks_or_threads(flow, monkeypatch):
    """They agree to rounding: the library behind matrix products orders its sums by sizes and number of threads."""
    queries, gallery = noise.sample_uniform(12, 7), noise.sample_uniform(300, 10)
    scorer = gf.RetrievalEntropy.fast(flow, gallery, kappa=20.0)
    whole = scorer(queries)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = scorer(queries)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(alone.entropy, whole.entropy, atol=2e-5, rtol=0)
    monkeypatch.setattr("geoflow_fast.flow.sampling.ROWS_AT_ONCE", 70)
    monkeypatch.setattr("geoflow_fast.retrieval.gallery.BLOCK_ROWS", 41)
    for pieces in (queries.split(1), queries.split(5), [queries]):
        parts = [scorer(piece) for piece in pieces]
        torch.testing.assert_close(torch.cat([p.entropy for p in parts]), whole.entropy, atol=2e-5, rtol=0)
        assert torch.equal(torch.cat([p.top_index for p in parts]), whole.top_index)
