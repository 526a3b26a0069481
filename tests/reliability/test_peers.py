"""Laws that the field's libraries keep, restated for ours and checked against the packages themselves.

They run with `make test-slow`, so that later changes cannot drift from what users of geoopt, POT, scikit-learn and
FAISS expect. A package that is not installed skips its laws and says so.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import geometry as g
from geoflow_fast.evaluation import metrics
from geoflow_fast.noise import sample_uniform

pytestmark = pytest.mark.slow
WIDTHS = (2, 3, 7, 64, 1023)
ANGLES = (1e-6, 0.1, 1.0, math.pi / 2, 2.5, 3.1)


def tangents(x: Tensor, seed: int) -> Tensor:
    """Unit tangents at the points x."""
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return torch.nn.functional.normalize(g.project_tangent(x, v), dim=-1)


def points(rows: int, d: int, seed: int = 0) -> Tensor:
    return sample_uniform(rows, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestManifoldLaws:
    """The laws by which geoopt tests its manifolds, for its sphere and for our geometry."""

    @pytest.fixture
    def sphere(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            geoopt = pytest.importorskip("geoopt", reason="geoopt is not installed: make .venv/.peers")
        return geoopt.Sphere()

    @pytest.mark.parametrize("d", WIDTHS)
    def test_projections_are_those_of_geoopt_and_idempotent(self, sphere, d):
        x, v = torch.randn(5, d, dtype=torch.float64), torch.randn(5, d, dtype=torch.float64)
        on = g.normalize(x)
        torch.testing.assert_close(on, sphere.projx(x))
        torch.testing.assert_close(g.normalize(on), on)
        u = g.project_tangent(on, v)
        torch.testing.assert_close(u, sphere.proju(on, v))
        torch.testing.assert_close(g.project_tangent(on, u), u)
        assert sphere.check_vector_on_tangent(on, u)
        assert sphere.check_point_on_manifold(on)

    @pytest.mark.parametrize("d", WIDTHS)
    @pytest.mark.parametrize("angle", ANGLES)
    def test_exponential_logarithm_and_distance(self, sphere, d, angle):
        x = points(5, d)
        v = angle * tangents(x, 1)
        y = g.exp_map(x, v)
        torch.testing.assert_close(y, sphere.expmap(x, v), atol=1e-12, rtol=0)
        torch.testing.assert_close(g.log_map(x, y), v, atol=1e-7, rtol=0)
        torch.testing.assert_close(g.angle(x, y), torch.full((5,), angle, dtype=torch.float64), atol=1e-9, rtol=0)
        # geoopt's distance is an acos of a clamped product, so it has half of the digits near 0 and pi.
        torch.testing.assert_close(g.angle(x, y), sphere.dist(x, y), atol=2e-3 if angle < 1e-3 else 1e-6, rtol=0)
        torch.testing.assert_close(g.log_map(x, y), sphere.logmap(x, y), atol=2e-3 if angle < 1e-3 else 1e-6, rtol=0)
        torch.testing.assert_close(g.log_map(x, y).norm(dim=1), g.angle(x, y), atol=1e-9, rtol=0)
        assert bool((g.angle(x, y) == g.angle(y, x)).all())

    @pytest.mark.parametrize("d", WIDTHS)
    def test_the_triangle_inequality(self, d):
        x, y, z = (points(200, d, seed) for seed in range(3))
        assert bool((g.angle(x, z) <= g.angle(x, y) + g.angle(y, z) + 1e-12).all())

    @pytest.mark.parametrize("d", WIDTHS)
    @pytest.mark.parametrize("angle", ANGLES)
    def test_parallel_transport_is_geoopts_isometric_and_reversible(self, sphere, d, angle):
        x = points(5, d)
        along = angle * tangents(x, 1)
        y, u, v = g.exp_map(x, along), tangents(x, 2), tangents(x, 3)
        moved, other = (g.parallel_transport(x, y, each) for each in (u, v))
        assert float(g.dot(y, moved).abs().max()) < 1e-9
        torch.testing.assert_close(g.dot(moved, other), g.dot(u, v), atol=1e-9, rtol=0)
        torch.testing.assert_close(g.parallel_transport(y, x, moved), u, atol=1e-7, rtol=0)
        torch.testing.assert_close(g.parallel_transport(x, x, u), u)
        # What geoopt calls the transport of the sphere is the projection at the other end: the same across the path.
        across = torch.nn.functional.normalize(u - g.dot(u, along) / angle**2 * along, dim=-1) if d > 2 else None
        if across is not None:
            torch.testing.assert_close(
                g.parallel_transport(x, y, across), sphere.transp(x, y, across), atol=1e-7, rtol=0
            )

    @pytest.mark.parametrize("d", WIDTHS)
    def test_geodesics_are_geoopts(self, sphere, d):
        x, y = points(5, d, 1), points(5, d, 2)
        for t in (0.0, 0.3, 1.0):
            theirs = sphere.expmap(x, t * sphere.logmap(x, y))
            torch.testing.assert_close(g.geodesic(x, y, t), theirs, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("d", [3, 64])
    def test_a_gradient_step_descends_as_geoopts_does(self, sphere, d):
        """A step along the Riemannian gradient of -<x, m> by our exponential map is that of geoopt's."""
        x, mean = points(5, d, 1), points(5, d, 2)
        gradient = sphere.egrad2rgrad(x, -mean)
        torch.testing.assert_close(gradient, g.project_tangent(x, -mean))
        y = g.exp_map(x, -0.1 * gradient)
        torch.testing.assert_close(y, sphere.expmap(x, -0.1 * gradient))
        assert bool((g.dot(y, mean) >= g.dot(x, mean) - 1e-12).all())


class TestBregmanCases:
    """The cases of POT's tests of Bregman projections, for uniform marginals."""

    @pytest.fixture
    def ot(self):
        return pytest.importorskip("ot", reason="POT is not installed")

    def cost(self, n: int, m: int, seed: int = 0) -> Tensor:
        x, y = (
            torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)),
            torch.rand(m, 2, generator=torch.Generator().manual_seed(seed + 1)),
        )
        return torch.cdist(x.double(), y.double()).square()

    def plan(self, cost: Tensor, eps: float, backend: str, **options) -> Tensor:
        result = gf.ops.sinkhorn(cost, eps, backend=backend, max_iter=100_000, **options)
        assert result.converged
        return result.plan

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    @pytest.mark.parametrize(("n", "m"), [(50, 50), (100, 100), (7, 129), (129, 7), (1, 5), (5, 1), (1, 1)])
    @pytest.mark.parametrize("eps", [1.0, 0.1, 0.01])
    def test_plans_are_those_of_sinkhorn_log(self, ot, backend, n, m, eps):
        cost = self.cost(n, m)
        plan = self.plan(cost, eps, backend, tol=1e-7 if backend == "reference" else 5e-5)
        tol = 1e-5 / n if backend == "reference" else 1e-3 / n
        torch.testing.assert_close(plan.sum(1), torch.full((n,), 1 / n, dtype=torch.float64), atol=tol, rtol=0)
        torch.testing.assert_close(plan.sum(0), torch.full((m,), 1 / m, dtype=torch.float64), atol=tol, rtol=0)
        truth = ot.bregman.sinkhorn_log(
            ot.unif(n), ot.unif(m), cost.numpy(), eps, stopThr=1e-9, numItermax=100_000, warn=False
        )
        assert float((plan - torch.from_numpy(truth)).abs().sum()) < (1e-4 if backend == "reference" else 2e-3)

    @pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_stabilized", "sinkhorn_epsilon_scaling", "greenkhorn"])
    def test_variants_of_pot_agree_with_ours(self, ot, method):
        cost = self.cost(60, 60, 3)
        truth = ot.sinkhorn(
            ot.unif(60), ot.unif(60), cost.numpy(), 0.1, method=method, stopThr=1e-9, numItermax=100_000, warn=False
        )
        assert float((self.plan(cost, 0.1, "reference", tol=1e-8) - torch.from_numpy(truth)).abs().sum()) < 1e-3

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_little_entropy_gives_the_linear_programme(self, ot, backend):
        cost = self.cost(40, 40, 5)
        exact = float(ot.emd2(ot.unif(40), ot.unif(40), cost.numpy()))
        totals = [float((self.plan(cost, eps, backend, tol=1e-4) * cost).sum()) for eps in (0.1, 0.01, 0.001)]
        assert exact <= totals[2] + 1e-3 * exact
        assert totals[2] < totals[1] < totals[0]
        assert totals[2] == pytest.approx(exact, rel=0.02)

    def test_the_exact_assignment_is_that_of_the_linear_programme(self, ot):
        images, texts, other_images, other_texts = (points(40, 3, seed) for seed in (1, 2, 3, 4))
        cost = (images @ other_images.T).acos() + (texts @ other_texts.T).acos()
        exact = float(ot.emd2(ot.unif(40), ot.unif(40), cost.numpy()))
        assigned = gf.ops.ot_assign(images, texts, other_images, other_texts, assignment="exact")
        assert sorted(assigned.tolist()) == list(range(40))
        assert float(cost[torch.arange(40), assigned].mean()) == pytest.approx(exact, rel=1e-6)

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_much_entropy_gives_the_product_and_a_shift_of_the_cost_nothing(self, backend):
        cost = self.cost(30, 30, 7)
        assert float((self.plan(cost, 1e4, backend) - 1 / 900).abs().max()) < 1e-6
        plain, shifted = (self.plan(each, 0.1, backend, tol=2e-5) for each in (cost, cost + 3.0))
        assert float((plain - shifted).abs().sum()) < 1e-3

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_points_that_occur_twice_share_their_mass(self, backend):
        """A row that stands twice in the cost has two equal rows in the plan."""
        cost = self.cost(20, 31, 9)
        twice = torch.cat((cost, cost[:4]))
        plan = self.plan(twice, 0.05, backend, tol=2e-5)
        torch.testing.assert_close(plan[:4], plan[20:], atol=1e-6, rtol=0)


class TestMetrics:
    """Our metrics of uncertainty against those of scikit-learn, with and without ties."""

    @pytest.fixture
    def sk(self):
        return pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")

    def answers(self, n: int, levels: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed)
        right = generator.random(n) < 0.6
        right[:2] = True, False
        score = generator.normal(size=n) - 0.8 * right
        return (np.round(score * levels) / levels if levels else score), right

    @pytest.mark.parametrize("n", [2, 7, 129, 1023])
    @pytest.mark.parametrize("levels", [0, 1, 3])
    def test_auroc_with_ties(self, sk, n, levels):
        for seed in range(20):
            score, right = self.answers(n, levels, seed)
            assert metrics.auroc(score, right) == pytest.approx(sk.roc_auc_score(~right, score), abs=1e-12)

    @pytest.mark.parametrize("n", [7, 129, 1023])
    def test_brier_and_calibration_curve(self, sk, n):
        from sklearn.calibration import calibration_curve

        for seed in range(20):
            score, right = self.answers(n, 0, seed)
            prob = 1 / (1 + np.exp(score))
            ours = metrics.reliability(prob, right)
            assert ours.brier == pytest.approx(sk.brier_score_loss(right, prob), abs=1e-12)
            share, mean = calibration_curve(right, prob, n_bins=10)
            there = ours.count > 0
            np.testing.assert_allclose(ours.accuracy[there], share, atol=1e-12)
            np.testing.assert_allclose(ours.confidence[there], mean, atol=1e-12)
            assert ours.ece == pytest.approx(float((ours.count[there] * np.abs(share - mean)).sum() / n), abs=1e-12)

    @pytest.mark.parametrize("n", [2, 7, 129])
    def test_the_area_under_risk_and_coverage_is_a_mean_of_error_rates(self, sk, n):
        for seed in range(5):
            score, right = self.answers(n, 0, seed)
            order = np.argsort(score)
            rates = [1 - sk.accuracy_score(right[order[:k]], np.ones(k, bool)) for k in range(1, n + 1)]
            assert metrics.aurc(score, right) == pytest.approx(float(np.mean(rates)), abs=1e-12)

    def test_rank_correlations_are_those_of_scipy(self):
        from scipy import stats

        from geoflow_fast.evaluation.statistics import pearson, spearman

        for seed in range(20):
            generator = np.random.default_rng(seed)
            x, y = generator.integers(0, 9, 50), generator.normal(size=50)
            assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
            assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)


class TestRecall:
    """Exact search against FAISS. Of items that tie each library may keep others, so that scores are compared."""

    @pytest.fixture
    def faiss(self):
        return pytest.importorskip("faiss", reason="FAISS is not installed")

    @pytest.mark.parametrize("d", [3, 64, 129])
    @pytest.mark.parametrize("copies", [1, 2, 5])
    @pytest.mark.parametrize("k", [1, 7, 100])
    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_recall_with_ties_and_duplicates(self, faiss, d, copies, k, backend):
        rows, queries = points(1023, d, 1).float(), points(33, d, 2).float()
        gallery = rows.repeat(copies, 1)[torch.randperm(1023 * copies, generator=torch.Generator().manual_seed(3))]
        queries[:8] = gallery[:8]  # some queries are items
        index = faiss.IndexFlatIP(d)
        index.add(gallery.numpy())
        theirs, their_ids = index.search(queries.numpy(), k)
        ours, ids = gf.ops.gallery_search(queries, gallery, k, backend)
        np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-6)
        exact = queries.double() @ gallery.double().T
        assert all(len(set(row)) == k for row in ids.tolist())
        worst = exact.sort(1, descending=True).values[:, k - 1 : k]
        assert bool((exact.gather(1, ids) >= worst - 2e-6).all())  # recall 1, ties counted as equal
        strictly = exact > worst + 2e-6
        listed = torch.zeros_like(strictly).scatter_(1, ids, True)
        assert bool((listed | ~strictly).all())
        known = np.array([[i in row for i in theirs_row] for row, theirs_row in zip(ids.numpy(), their_ids)])
        if copies == 1:
            assert known.mean() > 0.999

    @pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16])
    def test_half_precision_storage_loses_what_faiss_loses(self, faiss, storage):
        gallery, queries = points(2000, 64, 1).float(), points(40, 64, 2).float()
        stored = gallery.to(storage)
        index = faiss.IndexFlatIP(64)
        index.add(stored.float().numpy())
        theirs, _ = index.search(queries.numpy(), 10)
        np.testing.assert_allclose(gf.ops.gallery_search(queries, stored, 10)[0].numpy(), theirs, atol=2e-6)

    def test_a_gallery_of_copies_of_one_item(self, faiss):
        one = points(1, 16, 1).float()
        gallery = one.repeat(300, 1)
        index = faiss.IndexFlatIP(16)
        index.add(gallery.numpy())
        scores, ids = gf.ops.gallery_search(one, gallery, 300)
        np.testing.assert_allclose(scores.numpy(), index.search(one.numpy(), 300)[0], atol=1e-6)
        assert ids.tolist() == [list(range(300))]
