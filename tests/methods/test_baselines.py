"""Baselines: each is tested against an independent computation, and each finds uncertainty that was planted."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner

import geoflow_fast as gf
from benchmarks.methods import baselines
from benchmarks.methods.baselines import bayesvlm
from benchmarks.methods.baselines.asymvlm import log_power_spherical
from benchmarks.methods.baselines.bayesvlm import contrastive_curvature, cosine_moments
from benchmarks.methods.baselines.grove import ModalityProcess, expected_log_likelihood, gaussian_kl
from benchmarks.methods.baselines.hub import HubSoftmax
from benchmarks.methods.baselines.probvlm import LEAST_INVERSE_SCALE, LEAST_SHAPE, GeneralisedGaussian
from benchmarks.methods.baselines.result_list import ListLogistic
from benchmarks.methods.cli import app
from benchmarks.methods.registry import chosen
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.geometry import log_area, normalize, project_tangent
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.tensors import save_tensors
from geoflow_fast.spherical import log_bump, log_vmf_normalizer
from geoflow_fast.training.config import RunConfig
from geoflow_fast.training.loop import Run
from tests.evaluation.helpers import planted, planted_pairs

ROOT = Path(__file__).parents[2]
DIM, ITEMS = 12, 400
UNTRAINED = ("hub_softmax", "list_logistic")


def clusters(usual: int, rare: int, seed: int) -> gf.EmbeddingPairs:
    """Pairs of near texts and images around the first axis, then pairs around the second one."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.cat((torch.eye(DIM)[0].expand(usual, -1), torch.eye(DIM)[1].expand(rare, -1)))
    image = normalize(torch.randn(len(axis), DIM, generator=generator) + 6 * axis)
    text = normalize(image + 0.05 * torch.randn(image.shape, generator=generator))
    return gf.EmbeddingPairs.from_arrays(image, text)


def auroc(score: Tensor, positive: Tensor) -> float:
    above = score[positive].unsqueeze(1) - score[~positive]
    return float((above > 0).double().mean() + (above == 0).double().mean() / 2)


@pytest.fixture(scope="module")
def world() -> tuple[Tensor, Tensor, Tensor]:
    return planted(ITEMS, 2)


@pytest.fixture(scope="module")
def fitted() -> dict[str, baselines.Baseline]:
    methods = {name: baselines.find(name)(DIM, DIM) for name in UNTRAINED}
    for method in methods.values():
        assert method.fit(planted_pairs(2000, 0), planted_pairs(500, 1)) is None
    return methods


def sides(world: tuple[Tensor, Tensor, Tensor], direction: str) -> tuple[Tensor, Tensor]:
    """Queries and items of a direction."""
    direction = Direction.of(direction)
    return direction.queries(*world[:2]), direction.items(*world[:2])


class TestSaving:
    @pytest.mark.parametrize("name", UNTRAINED)
    def test_a_loaded_method_gives_the_same_scores(self, fitted, world, name, tmp_path):
        fitted[name].save(tmp_path)
        back = baselines.load(tmp_path)
        assert type(back) is type(fitted[name])
        expected = fitted[name].uncertainty(world[1], world[0], "t2i")
        assert torch.equal(back.uncertainty(world[1], world[0], "t2i"), expected)

    def test_a_folder_of_another_method_is_refused(self, fitted, tmp_path):
        fitted["hub_softmax"].save(tmp_path)
        with pytest.raises(ValueError, match="holds a 'hub_softmax', not a 'list_logistic'"):
            ListLogistic.load(tmp_path)

    def test_a_damaged_file_is_refused(self, fitted, tmp_path):
        fitted["hub_softmax"].save(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
            baselines.load(tmp_path)

    def test_an_unknown_method_is_refused(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"method": "oracle"}))
        with pytest.raises(ValueError, match="method must be one of hub_softmax, list_logistic"):
            baselines.load(tmp_path)

    def test_an_empty_folder_is_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="holds no baseline"):
            baselines.load(tmp_path)

    def test_a_method_that_is_not_fitted_is_not_saved(self, tmp_path):
        with pytest.raises(ValueError, match="nothing to save"):
            HubSoftmax(DIM, DIM).save(tmp_path)
        assert not list(tmp_path.iterdir())


class TestBadInput:
    def test_a_method_that_is_not_fitted_gives_no_scores(self, world):
        with pytest.raises(ValueError, match="hub_softmax is not fitted"):
            HubSoftmax(DIM, DIM).uncertainty(world[1], world[0], "t2i")

    @pytest.mark.parametrize(
        ("queries", "items", "direction", "words"),
        [
            (torch.ones(3, DIM), torch.eye(DIM), "t2i", "queries row 0 has norm"),
            (torch.eye(DIM)[:, :-1], torch.eye(DIM), "t2i", r"queries must be \[Q, 12\]"),
            (torch.eye(DIM), torch.eye(DIM - 1), "t2i", "gallery has width 11"),
            (torch.eye(DIM), torch.eye(DIM), "joint", "direction must be one of"),
        ],
    )
    def test_an_error_names_what_is_wrong(self, fitted, queries, items, direction, words):
        with pytest.raises(ValueError, match=words):
            fitted["hub_softmax"].uncertainty(queries, items, direction)

    def test_widths_and_numbers_of_pairs_must_fit(self):
        with pytest.raises(ValueError, match="one width, got 4 and 5"):
            HubSoftmax(4, 5)
        with pytest.raises(ValueError, match="pairs have widths 12 and 12, not 5 and 5"):
            HubSoftmax(5, 5).fit(planted_pairs(10, 0))
        with pytest.raises(ValueError, match="fewer than neighbours=10"):
            ListLogistic(DIM, DIM).fit(planted_pairs(8, 0))


def quick(method: baselines.Baseline, **changes: object) -> RunConfig:
    """The default run of the method with fewer steps."""
    short: dict[str, object] = {"steps": 150, "batch_size": 128, "warmup_steps": 10, "val_every": 75, "val_batches": 1}
    return dataclasses.replace(method.default_config(), **{**short, **changes})


def made(name: str, **settings: object) -> baselines.Baseline:
    torch.manual_seed(0)
    return baselines.find(name)(DIM, DIM, **settings)


@pytest.fixture(scope="module")
def one_thread():
    """Uses one thread: small networks gain nothing from more threads, and lose time while other tests run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestSphericalDistributions:
    @pytest.mark.parametrize("d", [3, 8, 64])
    @pytest.mark.parametrize("kappa", [0.0, 1.0, 30.0])
    def test_densities_integrate_to_one(self, d, kappa):
        """Gauss-Legendre quadrature in the angle, at which the sphere has area exp(log_area(d-1)) sin^(d-2)."""
        node, weight = np.polynomial.legendre.leggauss(400)
        angle = torch.from_numpy((node + 1) * math.pi / 2)
        area = log_area(d - 1) + (d - 2) * angle.sin().log() + torch.from_numpy(np.log(weight * math.pi / 2))
        k = torch.full_like(angle, kappa)
        power = log_power_spherical(angle.cos(), k, d)
        mises = kappa * angle.cos() + log_vmf_normalizer(k, d)
        for log_density in (power, mises):
            assert float((log_density + area).logsumexp(0)) == pytest.approx(0, abs=2e-6)

    @pytest.mark.parametrize("name", ["asymvlm_vmf", "asymvlm_ps"])
    @pytest.mark.parametrize("length", [0.0, 1e-6, 1e4])
    def test_gradients_are_finite(self, name, length):
        points = torch.eye(5)
        eta = (-length * points).requires_grad_()  # some are exactly opposite to the points
        likelihood = baselines.find(name).log_likelihood(eta, points)
        (slope,) = torch.autograd.grad(likelihood.sum(), eta)
        assert bool(torch.isfinite(likelihood).all())
        assert bool(torch.isfinite(slope).all())


class TestGeneralisedGaussian:
    @pytest.mark.parametrize("shape", [0.4, 1.0, 2.0, 5.0])
    @pytest.mark.parametrize("scale", [0.03, 1.0, 20.0])
    def test_against_scipy(self, shape, scale):
        y = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64) * scale
        full = torch.full_like(y, 0.0)
        law = GeneralisedGaussian(full, full + 1 / scale, full + shape)
        truth = stats.gennorm(shape, scale=scale)
        torch.testing.assert_close(law.nll(y), torch.from_numpy(-truth.logpdf(y.numpy())), rtol=1e-10, atol=1e-10)
        assert float(law.variance()[0]) == pytest.approx(truth.var(), rel=1e-9)

    def test_published_form_differs_by_its_power(self):
        y = torch.tensor([0.1, 0.7, 2.0], dtype=torch.float64)
        ones = torch.ones_like(y)
        law = GeneralisedGaussian(0 * y, 2 * ones, 1.5 * ones)
        difference = law.nll(y) - law.nll(y, "product")
        torch.testing.assert_close(difference, (2 * y) ** 1.5 - 2 * y * 1.5 + math.log(2))

    @pytest.mark.parametrize("form", ["true", "product"])
    @pytest.mark.parametrize("distance", [0.0, 1e-30, 1e10])
    def test_gradients_are_finite_at_extremes(self, form, distance):
        parts = [torch.tensor([x], requires_grad=True) for x in (0.0, LEAST_INVERSE_SCALE, LEAST_SHAPE)]
        extremes = [parts, [torch.tensor([x], requires_grad=True) for x in (0.0, 1e6, 50.0)]]
        for law in extremes:
            loss = GeneralisedGaussian(*law).nll(torch.tensor([distance]), form)
            slopes = torch.autograd.grad(loss.sum(), law)
            assert bool(torch.isfinite(loss).all())
            assert all(bool(torch.isfinite(slope).all()) for slope in slopes)


class TestGroVE:
    def test_kl_and_likelihood_against_torch(self):
        normal = torch.distributions.Normal
        a, b, y = (torch.randn(5, 7, dtype=torch.float64) for _ in range(3))
        s, r = (torch.rand(5, 7, dtype=torch.float64) + 0.1 for _ in range(2))
        truth = torch.distributions.kl_divergence(normal(a, s.sqrt()), normal(b, r.sqrt())).sum(-1)
        torch.testing.assert_close(gaussian_kl(a, s, b, r), truth)
        noise = torch.tensor(0.3, dtype=torch.float64)
        node, weight = np.polynomial.hermite_e.hermegauss(20)
        f = a.unsqueeze(-1) + s.sqrt().unsqueeze(-1) * torch.from_numpy(node)
        truth = normal(f, noise.sqrt()).log_prob(y.unsqueeze(-1)) @ torch.from_numpy(weight / weight.sum())
        torch.testing.assert_close(expected_log_likelihood(a, s, noise, y), truth.sum(-1))

    @pytest.mark.parametrize("pairs", [30, 90])
    def test_starts_from_the_best_sparse_process(self, pairs):
        """The mean is Titsias' K_nu (noise K_uu + K_uf K_fu)^-1 K_uf y, for 10 of 30 rows that stand for `pairs`."""
        generator = torch.Generator().manual_seed(0)
        latent, new = torch.randn(30, 3, generator=generator), torch.randn(11, 3, generator=generator)
        embedding = torch.randn(30, 5, generator=generator) + torch.arange(5)
        side = ModalityProcess(5, 10, 3)
        side.begin(latent, embedding, pairs)
        y = embedding.double().numpy()
        rest = y - y.mean(0)

        def kernel(a: Tensor, b: Tensor) -> np.ndarray:
            return rest.var() * np.exp(-(torch.cdist(a.double(), b.double()).numpy() ** 2) / (2 * 3))

        points = side.process.variational_strategy.inducing_points.detach()
        assert all((latent == point).all(1).any() for point in points)
        inner, cross = kernel(points, points) + 1e-4 * np.eye(10), kernel(points, latent)
        noise = 0.1 * rest.var() * 30 / pairs
        truth = y.mean(0) + kernel(new, points) @ np.linalg.solve(noise * inner + cross @ cross.T, cross @ rest)
        mean, variance = (x.detach().double() for x in side.predict(new))
        torch.testing.assert_close(mean, torch.from_numpy(truth), atol=1e-3, rtol=0)
        far_mean, far_variance = (x.detach().double() for x in side.predict(torch.full((1, 3), 50.0)))
        torch.testing.assert_close(far_mean, torch.from_numpy(y.mean(0, keepdims=True)), atol=1e-5, rtol=0)
        torch.testing.assert_close(far_variance, torch.full_like(far_variance, rest.var()), atol=2e-4, rtol=0)
        assert float(variance.max()) < rest.var()

    @pytest.mark.usefixtures("one_thread")
    @pytest.mark.parametrize(("rare", "least"), [(0, 0.85), (50, 0.95)])
    def test_is_uncertain_about_what_it_has_seldom_or_never_seen(self, rare, least):
        """The variance falls with the number of latents nearby. These seeds were not used to choose settings."""
        counts = (1000 - rare, rare), (200, 0), (150, 150)
        pairs, val, test = (clusters(*count, seed=seed) for seed, count in enumerate(counts, 20))
        method = made("grove")
        method.fit(pairs, val, quick(method, steps=60))
        image, text = test[np.arange(300)]
        for direction, queries in (("t2i", text), ("i2t", image)):
            uncertainty = method.uncertainty(queries, image, direction)
            assert auroc(uncertainty, torch.arange(300) >= 150) > least, direction

    def test_an_error_names_the_missing_package(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ValueError, match=r"gpytorch: pip install '.*\[test\]'"):
            made("grove")


class TestREPVLM:
    @pytest.mark.parametrize("label", [0, 1])
    def test_density_of_a_known_flow(self, monkeypatch, label):
        """With the field c (mu - <mu, x> x) in place of the network the density is known in closed form."""
        method = made("repvlm", n_steps=40, n_probes=8)
        centres = sample_uniform(2, DIM, generator=torch.Generator().manual_seed(3))

        def attract(x, t, labels):  # noqa: ARG001
            return 0.8 * project_tangent(x, centres[labels])

        monkeypatch.setattr(method.field, "forward", attract)
        points = sample_uniform(200, DIM, generator=torch.Generator().manual_seed(4))
        truth = log_bump(points.double() @ centres[label].double(), 0.8, DIM)
        torch.testing.assert_close(method.log_prob(points, label), truth, atol=0.02, rtol=0)

    def test_blocks_of_queries_change_nothing(self):
        method = made("repvlm", n_steps=3)
        with torch.no_grad():
            method.field.decode.weight.normal_(0, 0.1)
        points = sample_uniform(9, DIM)
        parts = torch.cat([method.log_prob(part, 0) for part in points.split(4)])
        torch.testing.assert_close(method.log_prob(points, 0), parts, atol=1e-5, rtol=0)
        pairs = method.pair_score(points, points)
        torch.testing.assert_close(pairs, -method.log_prob(points, 0) - method.log_prob(points, 1))

    @pytest.mark.usefixtures("one_thread")
    def test_is_uncertain_about_what_it_has_not_seen(self):
        pairs, val, test = (
            clusters(*counts, seed=seed) for seed, counts in enumerate(((1000, 0), (200, 0), (100, 100)))
        )
        method = made("repvlm")
        method.fit(pairs, val, quick(method, steps=40, batch_size=64))
        image, text = test[np.arange(200)]
        for direction, queries in (("t2i", text), ("i2t", image)):
            uncertainty = method.uncertainty(queries, image, direction)
            assert auroc(uncertainty, torch.arange(200) >= 100) > 0.95, direction


def activations(count: int, seed: int, k: tuple[int, int] = (9, 7)) -> tuple[baselines.Activations, gf.EmbeddingPairs]:
    """Activations of two towers that see the same few factors, and pairs of their projections."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(99)
    maps = [torch.randn(5, width, generator=shared) for width in k]
    weights = {f"{name}.weight": torch.linalg.pinv(m).T.contiguous() for name, m in zip(("image", "text"), maps)}
    factors = torch.randn(count, 5, generator=generator)
    phi = [factors @ m + 0.05 * torch.randn(count, m.shape[1], generator=generator) for m in maps]
    embedded = [normalize(x @ w.T) for x, w in zip(phi, weights.values())]
    return baselines.Activations.from_arrays(*phi, weights), gf.EmbeddingPairs.from_arrays(*embedded)


def write_activations(folder: Path, source: baselines.Activations) -> None:
    """Writes what `python -m benchmarks.methods activations` writes."""
    for name, rows in (("img_pre", source.image), ("text_pre", source.text)):
        (folder / name).mkdir()
        np.save(folder / name / f"{name}_0.npy", rows.parts[0])
    save_tensors(folder / "projections.safetensors", source.projections, kind="projections", info={})


class TestBayesVLM:
    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls) -> baselines.BayesVLM:
        source, pairs = activations(600, 0)
        method = baselines.BayesVLM(5, 5, logit_scale=20.0, batch_size=100).set_activations(source)
        method.fit(pairs)
        return method

    def test_curvature_against_autograd(self):
        g, h = torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        truth = torch.zeros(4, 4, dtype=torch.float64)
        for row in g:

            def logits(x):
                return 7.0 * torch.nn.functional.normalize(h) @ (x / x.norm())

            jacobian = torch.func.jacrev(logits)(row)
            pi = logits(row).softmax(0)
            truth += jacobian.T @ (pi.diag() - torch.outer(pi, pi)) @ jacobian
        torch.testing.assert_close(contrastive_curvature(g, h, 7.0), truth)

    def test_variance_against_sampled_projections(self, fitted):
        """With weights drawn as W + B^-1/2 Z A^-1/2, the variance of W phi over draws is the predicted one."""
        source, pairs = activations(600, 0)
        kept, _ = pairs.split(0.02, 0)
        phi = torch.from_numpy(source.image.parts[0]).double()[kept.image_row]
        text = torch.from_numpy(source.text.parts[0]).double()[kept.text_row]
        order = np.random.default_rng(0).permutation(len(kept))
        curvature = sum(
            contrastive_curvature(fitted.project("image", phi[rows]), fitted.project("text", text[rows]), 20.0)
            for rows in np.array_split(order, range(100, len(order), 100))
        )
        factors = [x / math.sqrt(len(kept)) + torch.eye(len(x)).double() for x in (phi.T @ phi, curvature)]
        a, b = (torch.linalg.cholesky(torch.linalg.inv(x)) for x in factors)
        generator = torch.Generator().manual_seed(1)
        z = torch.randn(40_000, 5, 9, generator=generator, dtype=torch.float64)
        probe = 3 * torch.randn(4, 9, generator=generator, dtype=torch.float64)
        drawn = torch.einsum("ij,njk,lk,bl->nbi", b, z, a, probe)
        mean, variance = fitted.moments("image", probe)
        torch.testing.assert_close(variance, drawn.var(0), rtol=0.04, atol=0)
        torch.testing.assert_close(mean, fitted.project("image", probe))

    def test_activations_leave_the_method_on_its_device(self):
        source, _ = activations(600, 0)
        method = baselines.BayesVLM(5, 5)
        with torch.device("meta"):
            method.set_activations(source)
        assert {x.device.type for x in method.buffers()} == {"cpu"}
        assert bool(method.image_weight.any())

    def test_cosine_moments_against_sampling(self):
        generator = torch.Generator().manual_seed(0)
        mean, other = (torch.randn(2, 64, generator=generator, dtype=torch.float64) for _ in range(2))
        variance, other_variance = (
            0.05 * torch.rand(2, 64, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        z = torch.randn(2, 20_000, 2, 64, generator=generator, dtype=torch.float64)
        g, h = mean + variance.sqrt() * z[0], other + other_variance.sqrt() * z[1]
        cosine = torch.einsum("nqd,nkd->nqk", *(torch.nn.functional.normalize(x, dim=-1) for x in (g, h)))
        cosine_mean, cosine_variance = cosine_moments(mean, variance, other, other_variance)
        torch.testing.assert_close(cosine_mean, cosine.mean(0), atol=0.005, rtol=0)
        torch.testing.assert_close(cosine_variance.sqrt(), cosine.std(0), rtol=0.1, atol=0)

    def test_entropy_over_blocks_is_that_over_the_whole_gallery(self, fitted, monkeypatch):
        source, _ = activations(50, 3)
        queries, items = (torch.from_numpy(rows.parts[0]) for rows in (source.text, source.image))
        cosine, variance = cosine_moments(*fitted.moments("text", queries), *fitted.moments("image", items))
        pi = (20 * cosine / (1 + math.pi / 8 * 400 * variance).sqrt()).softmax(1)
        monkeypatch.setattr(bayesvlm, "GALLERY_ROWS", 7)
        torch.testing.assert_close(fitted.uncertainty(queries, items, "t2i"), torch.special.entr(pi).sum(1))

    def test_unusual_activations_are_uncertain(self, fitted):
        """Queries along directions that training has hardly seen have a larger variance."""
        source, _ = activations(200, 4)
        usual = torch.from_numpy(source.image.parts[0])
        strange = usual + 3 * torch.randn(usual.shape, generator=torch.Generator().manual_seed(0))
        items = torch.from_numpy(source.text.parts[0])
        uncertainty = fitted.uncertainty(torch.cat((usual, strange)), items, "i2t")
        assert auroc(uncertainty, torch.arange(400) >= 200) > 0.7

    def test_a_loaded_method_gives_the_same_scores(self, fitted, tmp_path):
        fitted.save(tmp_path)
        source, _ = activations(20, 5)
        queries, items = (torch.from_numpy(rows.parts[0]) for rows in (source.text, source.image))
        uncertainty = baselines.load(tmp_path).uncertainty(queries, items, "t2i")
        assert torch.equal(uncertainty, fitted.uncertainty(queries, items, "t2i"))

    def test_opens_what_the_command_writes(self, tmp_path):
        source, pairs = activations(30, 6)
        pairs.save(tmp_path, dtype=np.float32)
        with pytest.raises(FileNotFoundError, match=r"img_pre does not exist: .*methods activations"):
            baselines.Activations.open(tmp_path)
        write_activations(tmp_path, source)
        options = {"folder": tmp_path, "device": "cpu"}
        assert baselines.train_preset("bayesvlm", pairs, tmp_path / "out", "tiny", None, {}, **options) is None
        assert baselines.load(tmp_path / "out").fitted

    def test_evaluate_searches_the_activations_of_its_folders(self, tmp_path):
        """Each image has two texts; the scores are those of the method called directly."""
        parts = {}
        for name, count, seed in (("train", 300, 8), ("test", 60, 9)):
            source, pairs = activations(count, seed)
            every = np.repeat(np.arange(count // 2), 2)  # the first half of the images, each with two texts
            image, text = pairs[np.arange(count)]
            gf.EmbeddingPairs.from_arrays(image[: count // 2], text, every).save(tmp_path / name, dtype=np.float32)
            half = torch.from_numpy(source.image.parts[0])[: count // 2]
            parts[name] = half, torch.from_numpy(source.text.parts[0])
            write_activations(tmp_path / name, baselines.Activations.from_arrays(*parts[name], source.projections))
        words = ["score", "bayesvlm,margin", "--pairs", tmp_path / "test", "--out", tmp_path / "out"]
        words += ["--held-out", tmp_path / "train", "--train", tmp_path / "train", "--resamples", "0"]
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
        method = baselines.BayesVLM(5, 5).set_activations(tmp_path / "train")
        train = gf.EmbeddingPairs.open(tmp_path / "train")
        method.fit(train, train)
        for direction, queries, items in (("t2i", *parts["test"][::-1]), ("i2t", *parts["test"])):
            path = tmp_path / "out" / "scores" / f"bayesvlm_{direction}.parquet"
            scores = torch.tensor(parquet.read_columns(path)["uncertainty"])
            torch.testing.assert_close(scores, method.uncertainty(queries, items, direction))

    def test_evaluate_names_what_is_missing_before_it_starts_to_work(self, tmp_path):
        folders = {name: activations(40, seed) for seed, name in enumerate(("train", "test", "other"), 11)}
        for name, (_, pairs) in folders.items():
            pairs.save(tmp_path / name, dtype=np.float32)
        opened = {name: gf.EmbeddingPairs.open(tmp_path / name) for name in folders}

        def evaluated(train: gf.EmbeddingPairs, test: gf.EmbeddingPairs) -> None:
            methods = chosen(("margin", "bayesvlm"), Study(test, train))
            compare(Study(test, train), test, methods, folder=tmp_path / "out")

        with pytest.raises(FileNotFoundError, match=r"train.img_pre does not exist: .*methods activations"):
            evaluated(opened["train"], opened["test"])
        with pytest.raises(ValueError, match=r"the training pairs do not come from a folder: .*methods activations"):
            evaluated(folders["train"][1], opened["test"])
        write_activations(tmp_path / "train", folders["train"][0])
        with pytest.raises(FileNotFoundError, match=r"test.img_pre does not exist: .*methods activations"):
            evaluated(opened["train"], opened["test"])
        write_activations(tmp_path / "test", folders["other"][0])
        with pytest.raises(ValueError, match="not the pairs' embeddings"):
            evaluated(opened["train"], opened["test"])
        assert not (tmp_path / "out").exists()

    def test_bad_input(self, fitted):
        source, pairs = activations(30, 7)
        with pytest.raises(ValueError, match=r"benchmarks\.methods activations"):
            baselines.BayesVLM(5, 5).fit(pairs)
        with pytest.raises(ValueError, match="not the pairs' embeddings"):
            baselines.BayesVLM(5, 5).set_activations(source).fit(activations(30, 8)[1])
        with pytest.raises(ValueError, match=r"image\.weight must be \[6, 9\], got \(5, 9\)"):
            baselines.BayesVLM(6, 6).set_activations(source)
        with pytest.raises(ValueError, match="queries must be text activations of width 7"):
            fitted.uncertainty(torch.eye(5), torch.ones(3, 9), "t2i")


TRAINED = ("adapter", "probvlm", "asymvlm_vmf", "asymvlm_ps", "grove", "repvlm", "mc_dropout", "euclidean_flow")


@pytest.mark.usefixtures("one_thread")
class TestTraining:
    @pytest.mark.parametrize("name", [*TRAINED[:-1], pytest.param(TRAINED[-1], marks=pytest.mark.slow)])
    def test_interrupted_runs_end_with_the_same_weights_and_can_be_loaded(self, name, world, tmp_path, monkeypatch):
        pairs, val = planted_pairs(80, 0), planted_pairs(30, 1)
        changes = {"steps": 6, "batch_size": 16, "val_every": 2, "checkpoint_every": 2}
        whole = made(name)
        assert whole.fit(pairs, val, quick(whole, **changes), tmp_path / "whole").finished
        take_step, taken = Run.optimise, []

        def stumbling(self, batch):
            taken.append(self.step)
            if len(taken) == 4:
                raise KeyboardInterrupt
            return take_step(self, batch)

        first = made(name)
        with monkeypatch.context() as patch:
            patch.setattr(Run, "optimise", stumbling)
            with pytest.raises(KeyboardInterrupt):
                first.fit(pairs, val, quick(first, **changes), tmp_path / "part")
        again = made(name)
        assert again.fit(pairs, val, quick(again, **changes), tmp_path / "part").finished
        queries, items = world[1][:9], world[0][:11]
        expected = whole.uncertainty(queries, items, "t2i")
        assert bool(torch.isfinite(expected).all())
        assert all(torch.equal(x, again.state_dict()[key]) for key, x in whole.state_dict().items())
        for method in (again, baselines.load(tmp_path / "whole")):
            assert torch.equal(method.uncertainty(queries, items, "t2i"), expected)

    @pytest.mark.parametrize(
        ("name", "settings", "changes"),
        [
            ("probvlm", {}, {"steps": 300}),
            ("probvlm", {"form": "product", "cross_weight": 1.0}, {}),
            ("mc_dropout", {}, {}),
            pytest.param("asymvlm_vmf", {}, {"steps": 600}, marks=pytest.mark.slow),
            pytest.param("asymvlm_ps", {}, {"steps": 600}, marks=pytest.mark.slow),
            pytest.param("euclidean_flow", {}, {}, marks=pytest.mark.slow),
        ],
    )
    def test_finds_planted_uncertainty(self, name, settings, changes):
        """The seeds of this world were not used to choose settings."""
        method = made(name, **settings)
        method.fit(planted_pairs(2000, 40), planted_pairs(100, 41), quick(method, **changes))
        world = planted(ITEMS, 42)
        for direction in ("t2i", "i2t"):
            queries, items = sides(world, direction)
            assert auroc(method.uncertainty(queries, items, direction), world[2]) > 0.57, direction

    def test_scores_do_not_depend_on_their_batch(self, world):
        method = made("mc_dropout")
        method.fitted = True
        method.eval()
        whole = method.uncertainty(world[1], world[0], "t2i")
        parts = torch.cat([method.uncertainty(part, world[0], "t2i") for part in world[1].split(7)])
        torch.testing.assert_close(whole, parts)
        assert float(whole.min()) > 0

    def test_contrastive_batches_cannot_be_divided(self):
        method = made("asymvlm_ps")
        with pytest.raises(ValueError, match="asymvlm_ps compares the rows of a batch"):
            method.fit(planted_pairs(80, 0), config=quick(method, batch_size=16, accumulate=2))

    def test_command_line(self, tmp_path):
        pairs = planted_pairs(120, 0)
        pairs.save(tmp_path / "pairs")
        command = [sys.executable, "-m", "benchmarks.methods", "train", "probvlm", "--preset", "tiny"]
        command += ["--pairs", str(tmp_path / "pairs"), "--out", str(tmp_path / "run")]
        command += ["--steps", "3", "--batch-size", "16"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "finished at step 3" in done.stdout
        assert baselines.load(tmp_path / "run").method == "probvlm"
        with pytest.raises(ValueError, match="probvlm has no setting coupling"):
            baselines.train_preset(
                "probvlm", pairs, tmp_path / "other", "tiny", None, {"coupling": "paper"}, folder=None, device="cpu"
            )


@pytest.mark.parametrize(
    ("name", "lr", "momentum", "batch_size"),
    [
        ("probvlm", 1e-4, None, 2048),
        ("asymvlm_vmf", 1e-2, 0.9, 2048),
        ("grove", 1e-5, None, 128),
        ("repvlm", 1e-5, None, 2048),
    ],
)
def test_runs_of_the_paper(name, lr, momentum, batch_size):
    method = made(name, size="paper")
    config = method.default_config()
    assert (config.steps, config.warmup_steps, config.val_every, config.val_batches) == (120_000, 1000, 10_000, 20)
    assert (config.lr, method.MOMENTUM, config.batch_size) == (lr, momentum, batch_size)


def test_an_error_names_the_wrong_setting():
    for name, settings, words in (
        ("probvlm", {"form": "sum"}, "form must be one of true, product"),
        ("probvlm", {"uncertainty_of": "all"}, "uncertainty_of must be one of"),
        ("mc_dropout", {"passes": 1}, "passes must be at least 2"),
        ("repvlm", {"size": "vast"}, "size must be auto or one of paper, small, tiny"),
        ("grove", {"latent": 13}, "latent=13"),
        ("grove", {"latent_start": "random"}, "latent_start must be one of regression, zero"),
    ):
        with pytest.raises(ValueError, match=words):
            made(name, **settings)
    for name in TRAINED[:-1]:
        with pytest.raises(ValueError, match="one width"):
            baselines.find(name)(4, 5)
