"""Probes: their distribution, what they depend on, and how well they estimate a trace."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy import stats

import geoflow_fast as gf
from benchmarks.methods.euclidean import EUCLIDEAN
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.geometry import dot, project_tangent
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.manifolds import SPHERE, Sphere
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.tangent_probes import hashed_normals, leading_part, probe_traces_reference
from tests.likelihood.helpers import oracles, random_flow, random_pairs, seeded
from tests.samples import Opaque

PROBE_KINDS = [
    {},
    {"n_probes": 3},
    {"redraw": False},
    {"shared": True, "n_probes": 2},
    {"shared": True, "redraw": False},
    {"probe": "rademacher"},
    {"probe": "rademacher", "redraw": False},
    {"probe": "rademacher", "shared": True},
]
"""Every kind of probes that the settings allow."""


def probes(rows: int = 200, count: int = 3, first: int = 0, manifold: Sphere = SPHERE, **changes) -> Probes:
    settings = gf.DensitySettings(n_probes=count, **changes)
    return Probes(5, torch.arange(first, first + rows), settings, manifold)


def learn(drawn: Probes, x: torch.Tensor, e: torch.Tensor, product: torch.Tensor) -> None:
    """Shows probes of the first stream what the Jacobian made of them."""
    integral = torch.zeros(e.shape[:2], dtype=torch.float64)
    drawn.read(0, x, torch.zeros_like(x), e, product, integral, 1.0, curved=True, leads=True)
    torch.testing.assert_close(integral, (e.double() * product.double()).sum(-1))


def test_normals_are_those_of_earlier_releases():
    """A seed means the same numbers in every release, so that files can be continued and numbers repeated."""
    drawn = hashed_normals(torch.arange(2), 5, 3, 1, 1, 3).flatten().tolist()
    assert drawn == pytest.approx([0.730992, 0.589308, -1.059346, -1.079865, -0.281162, 0.161326], abs=1e-5)


def test_normals_are_standard_and_independent():
    z = hashed_normals(torch.arange(1000), 5, 3, 1, 2, 41).double()
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-3
    for axis in range(3):  # neighbouring probes, rows and coordinates are uncorrelated, and so are their squares
        near, far = z.narrow(axis, 0, z.shape[axis] - 1), z.narrow(axis, 1, z.shape[axis] - 1)
        for a, b in ((near, far), (near.square() - 1, far.square() - 1)):
            assert abs(float((a * b).mean() / (a * b).std())) * math.sqrt(a.numel()) < 4


@pytest.mark.parametrize("kind", ["aligned", "rademacher"])
def test_probes_have_the_tangent_projection_as_second_moment(kind):
    d, rows = 5, 40_000
    x = sample_uniform(1, d).expand(rows, -1)
    e = probes(rows, 2, probe=kind).draw(0, 0, x)
    assert float(dot(x, e).abs().max()) < 1e-5
    moment = torch.einsum("kbi,kbj->ij", e, e) / (2 * rows)
    truth = torch.eye(d) - torch.outer(x[0], x[0])
    torch.testing.assert_close(moment, truth, atol=5 * math.sqrt(3 / rows), rtol=0)
    if kind == "aligned":
        torch.testing.assert_close(e.square().sum(-1), torch.full((2, rows), d - 1.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("manifold", [SPHERE, EUCLIDEAN])
def test_aligned_probes_have_size_one_along_what_was_learned(manifold):
    d, rows = 5, 40_000
    x, y, z = sample_uniform(3, d, generator=torch.Generator().manual_seed(0)).split(1)
    at, later = x.expand(rows, -1), y.expand(rows, -1)
    drawn = probes(rows, 2, manifold=manifold)
    first = drawn.draw(0, 0, at)
    assert torch.equal(first, probes(rows, 2, manifold=manifold, redraw=False).draw(7, 0, at))  # nothing is known yet
    learn(drawn, at, first, 3 * z * dot(z, first) + first)  # the Jacobian 3 z z^T + I
    e = drawn.draw(1, 0, later)
    tangent = torch.eye(d) - torch.outer(y[0], y[0]) * (manifold is SPHERE)
    moment = torch.einsum("kbi,kbj->ij", e, e) / (2 * rows)
    torch.testing.assert_close(moment, tangent, atol=5 * math.sqrt(3 / rows), rtol=0)
    torch.testing.assert_close(e.square().sum(-1), torch.full((2, rows), float(tangent.trace())), rtol=1e-5, atol=0)
    followed = torch.nn.functional.normalize(drawn._seen[0] @ tangent, dim=-1)
    torch.testing.assert_close(dot(e, followed).abs(), torch.ones(2, rows, 1), rtol=1e-4, atol=0)
    # From many probes of one row the direction of z at x is learned.
    many = probes(1, 4000, manifold=manifold)
    first = many.draw(0, 0, x)
    learn(many, x, first, 3 * z * dot(z, first) + first)
    lead = torch.nn.functional.normalize(manifold.project(x, z), dim=-1)
    assert float(dot(torch.nn.functional.normalize(many._seen[0], dim=-1), lead).abs()) > 0.97
    assert torch.equal(many.draw(1, 0, y), many.draw(1, 0, y))


@pytest.mark.parametrize("manifold", [SPHERE, EUCLIDEAN])
def test_aligned_probes_point_where_plain_ones_do(manifold):
    """They are plain ones of the same seed, stretched along what was learned and across it."""
    x, y, z = sample_uniform(3, 6, dtype=torch.float64).unsqueeze(1).expand(-1, 40, -1)
    aligned, plain = (probes(40, 3, manifold=manifold) for _ in range(2))  # the second one learns nothing
    first = aligned.draw(0, 0, x)
    learn(aligned, x, first, 3 * z * dot(z, first) + first)
    e, before = aligned.draw(1, 0, y), plain.draw(1, 0, y)
    normals = hashed_normals(torch.arange(40), 5, 1, 0, 3, 6).double()
    lead = torch.nn.functional.normalize(manifold.project(y, leading_part(aligned._seen[0], normals)), dim=-1)
    across = [torch.nn.functional.normalize(v - dot(v, lead) * lead, dim=-1) for v in (e, before)]
    torch.testing.assert_close(across[0], across[1], atol=1e-6, rtol=0)
    if manifold is EUCLIDEAN:
        assert torch.equal(dot(e, lead).sign(), dot(before, lead).sign())


def test_a_direction_that_vanishes_or_leaves_the_tangent_space_is_not_followed():
    x = sample_uniform(30, 7)
    for product in (torch.zeros(3, 30, 7), x.flip(0).expand(3, -1, -1)):
        drawn = probes(30, 3)
        e = drawn.draw(0, 0, x)
        learn(drawn, x, e, product)
        again = drawn.draw(1, 0, x.flip(0))
        torch.testing.assert_close(again.square().sum(-1), torch.full((3, 30), 6.0), rtol=1e-5, atol=0)
        assert float(dot(x.flip(0), again).abs().max()) < 1e-5


def test_probes_orthogonal_to_those_of_earlier_steps():
    """Directions are orthogonal before they are projected at their points, within a frame of draws; the probes of one
    draw are independent of each other."""
    drawn = probes(30, 2, shared=True)
    x = sample_uniform(30, 9, dtype=torch.float64)
    e = torch.stack([torch.nn.functional.normalize(drawn._normals(n, 0, x), dim=-1) for n in range(12)])
    for frame in (e[:9], e[9:]):
        gram = torch.einsum("mkbi,nkbi->kbmn", frame, frame)
        torch.testing.assert_close(gram, torch.eye(len(frame)).double().expand_as(gram), atol=1e-10, rtol=0)
    assert float((e[:, 0] * e[:, 1]).sum(-1).abs().mean()) > 0.1
    assert torch.equal(drawn.draw(11, 0, x), drawn.draw(11, 0, x))


def test_exact_probes_add_up_to_the_projection():
    x = sample_uniform(4, 6, dtype=torch.float64)
    for manifold, truth in (
        (SPHERE, torch.eye(6) - x.unsqueeze(2) * x.unsqueeze(1)),
        (EUCLIDEAN, torch.eye(6).expand(4, -1, -1).double()),
    ):
        e = probes(4, divergence="exact", manifold=manifold).draw(0, 0, x)
        torch.testing.assert_close(torch.einsum("kbi,kbj->bij", e, e), truth)


def test_a_probe_depends_on_row_draw_number_and_stream_alone():
    x = sample_uniform(20, 7)
    whole = probes(20, 3).draw(2, 1, x)
    assert torch.equal(probes(6, 3, first=9).draw(2, 1, x[9:15]), whole[:, 9:15])
    assert torch.equal(probes(20, 1).draw(2, 1, x), whole[:1])
    for other in (probes(20, 3).draw(3, 1, x), probes(20, 3).draw(2, 0, x), probes(20, 3, first=1).draw(2, 1, x)):
        assert float((other - whole).abs().amax(-1).min()) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"probe": "rademacher"},
        {"tangents": "combined"},
        {"redraw": False, "n_steps": 2},
        {"probe": "rademacher", "tangents": "combined"},
        {"n_steps": 4},  # aligned with what the earlier ones have seen
        {"n_steps": 4, "tangents": "combined"},
        {"n_steps": 4, "shared": True},  # most probes are orthogonal to earlier ones
    ],
)
def test_four_thousand_probes_find_the_exact_trace(options):
    flow = random_flow(torch.float32)
    image, text = random_pairs(4, torch.float32)
    settings = gf.DensitySettings(**{"n_steps": 1, "solver": "euler", "n_probes": 4000} | options)
    estimate, stderr = gf.log_density(flow, image, text, generator=seeded(), return_stderr=True, settings=settings)
    exact = gf.log_density(flow, image, text, n_steps=settings.n_steps, solver="euler", divergence="exact")
    assert float(((estimate - exact) / stderr).abs().max()) < 4
    assert float(stderr.min()) > 1e-3  # there was something to estimate


class Waves:
    """A random smooth field in which every block of the Jacobian is full and changes from place to place."""

    def __init__(self, seed: int, widths: tuple[int, int] = (6, 5)) -> None:
        generator, total = seeded(seed), sum(widths)
        self.frequency = 2 * torch.randn(total, 12, generator=generator, dtype=torch.float64)
        self.phase = 6 * torch.rand(12, generator=generator, dtype=torch.float64)
        self.size = torch.randn(12, total, generator=generator, dtype=torch.float64) / 3

    def velocity(self, image, text, t, direction):
        del direction
        both = torch.sin(torch.cat((image, text), 1) @ self.frequency + self.phase + 3 * t) @ self.size
        v_image, v_text = both.split((image.shape[1], text.shape[1]), 1)
        return project_tangent(image, v_image), project_tangent(text, v_text)


def independent_estimates(
    field: Waves, pair: list[torch.Tensor], direction: Direction, settings: gf.DensitySettings, seed: int, many: int
) -> torch.Tensor:
    """Estimates of one pair: of many rows or, if rows share their probes, of many probes."""
    if settings.shared:
        plenty = dataclasses.replace(settings, n_probes=many // 4)
        return density_estimates(field, *pair, (direction,), plenty, seed)[0][:, 0]
    rows = [x.repeat(many, 1) for x in pair]
    return density_estimates(field, *rows, (direction,), settings, seed)[0].mean(0)


def bias(options: dict[str, object], tangents: str, solver: str, seed: int, many: int) -> list[float]:
    """By how many standard errors the mean of many estimates differs from the exact value, in each direction."""
    pair = random_pairs(1)
    field, exact = Waves(seed), gf.DensitySettings(n_steps=3, solver=solver, divergence="exact")
    settings = gf.DensitySettings(n_steps=3, solver=solver, tangents=tangents, **options)
    deviations = []
    for direction in DIRECTIONS:
        truth = gf.log_density(field, *pair, direction, settings=exact)
        estimates = independent_estimates(field, pair, Direction.of(direction), settings, seed, many)
        error = estimates.std() / math.sqrt(len(estimates))
        assert float(error) > 1e-3, direction  # there was something to estimate
        deviations.append(abs(float((estimates.mean() - truth) / error)))
    return deviations


@pytest.mark.parametrize("options", PROBE_KINDS)
@pytest.mark.parametrize("tangents", ["separate", "combined"])
def test_every_kind_of_probes_is_unbiased_on_a_random_field(options, tangents):
    assert max(bias(options, tangents, "ab2", 0, 400)) < 4.5


@pytest.mark.slow
@pytest.mark.parametrize("options", PROBE_KINDS)
@pytest.mark.parametrize("tangents", ["separate", "combined"])
@pytest.mark.parametrize("solver", ["euler", "ab2", "midpoint", "rk4"])
def test_every_kind_of_probes_is_unbiased_on_random_fields(options, tangents, solver):
    """Of 36 comparisons, three directions of twelve fields, none is far off and they are not off together."""
    deviations = [each for seed in range(12) for each in bias(options, tangents, solver, seed, 1000)]
    assert max(deviations) < 4.5
    assert sum(each**2 for each in deviations) < stats.chi2(len(deviations)).ppf(1 - 1e-5)


@pytest.mark.parametrize("opaque", [False, True])
def test_many_independent_solves_with_aligned_probes_find_the_exact_trace(opaque):
    """One probe each, so that a direction is learned from one draw at a time: 4,000 rows of the same pair."""
    flow = random_flow(torch.float32)
    image, text = random_pairs(1, torch.float32)
    exact = gf.epistemic(flow, image, text, settings=gf.DensitySettings(n_steps=4, solver="ab2", divergence="exact"))
    rows = image.repeat(4000, 1), text.repeat(4000, 1)
    ep = gf.epistemic(Opaque(flow) if opaque else flow, *rows, n_steps=4, solver="ab2", generator=seeded())
    for name in ("joint", "text_given_image", "image_given_text", "score"):
        estimate = getattr(ep, name)
        error = (estimate.mean() - getattr(exact, name)).abs() / (estimate.std() / math.sqrt(4000))
        assert float(error) < 4, name


def test_aligned_probes_remove_the_noise_of_a_dominant_direction(monkeypatch):
    """For v = P_x A x with A = a a^T, most of the Jacobian has rank one, and at least half of the noise disappears."""

    class Stretch:
        def velocity(self, image, text, *_):
            v = image * 3 * torch.eye(16, dtype=image.dtype)[0]
            return project_tangent(image, v), torch.zeros_like(text)

    image, text, _ = oracles(16, rows=1)
    pair = image.repeat(400, 1), text.repeat(400, 1)
    settings, noise = gf.DensitySettings(n_steps=6, solver="ab2"), []
    for learns in (True, False):
        monkeypatch.setattr(gf.DensitySettings, "learns", learns)
        noise.append(float(gf.log_density(Stretch(), *pair, "t2i", generator=seeded(), settings=settings).std()))
    assert noise[0] < 0.5 * noise[1]


@pytest.mark.parametrize("solver", ["euler", "midpoint"])
def test_the_blocks_between_the_streams_cancel(solver, monkeypatch):
    """In this field each stream moves towards a mixture of the other one, so that all noise comes from the blocks of
    the Jacobian between the streams: its own ones are isotropic. With separate tangents there is none of it."""
    monkeypatch.setattr(gf.DensitySettings, "learns", False)
    mix = 0.01 * torch.randn(8, 8, generator=seeded(7), dtype=torch.float64)

    class Exchange:
        def velocity(self, image, text, *_):
            return project_tangent(image, text @ mix.T), project_tangent(text, image @ mix)

    def noise(tangents: str) -> float:
        settings = gf.DensitySettings(n_steps=2, solver=solver, tangents=tangents)
        return float(gf.log_density(Exchange(), *pair, "joint", generator=seeded(), settings=settings).std())

    image, text, _ = oracles(8, rows=1)
    pair = image.repeat(300, 1), text.repeat(300, 1)
    assert noise("separate") < 0.05 * noise("combined")


@pytest.mark.parametrize("options", PROBE_KINDS)
@pytest.mark.parametrize("tangents", ["separate", "combined"])
def test_streams_that_do_not_see_each_other_have_no_noise_in_their_information(options, tangents):
    """The joint solve is the two conditional ones side by side: with the same probes the difference is nothing but
    rounding, however large the noise of each is."""
    stretch = [4 * torch.randn(d, d, generator=seeded(d), dtype=torch.float64) for d in (6, 5)]

    class Apart:
        def velocity(self, image, text, *_):
            return project_tangent(image, image @ stretch[0]), project_tangent(text, text @ stretch[1])

    pair = [x.repeat(20, 1) for x in random_pairs(2)]
    settings = gf.DensitySettings(n_steps=5, solver="ab2", tangents=tangents, **options)
    ep = gf.epistemic(Apart(), *pair, generator=seeded(), settings=settings)
    assert settings.shared or float(ep.joint.view(20, 2).std(0).min()) > 0.1
    torch.testing.assert_close(ep.pmi, torch.zeros_like(ep.pmi), rtol=0, atol=1e-8)


def test_exact_traces_do_not_limit_the_number_of_probes():
    image, text, (field, _) = oracles(4)
    exact = gf.log_density(field, image, text, divergence="exact")
    settings = gf.DensitySettings(n_probes=9, divergence="exact")
    torch.testing.assert_close(gf.log_density(field, image, text, settings=settings), exact)


def test_traces_are_sums_over_coordinates():
    """What each probe adds to an integral: e^T J e, and the exact part of the curvature."""
    x, f = sample_uniform(5, 9), torch.randn(5, 9)
    e, image = torch.randn(3, 5, 9), torch.randn(3, 5, 9)
    integral = torch.randn(3, 5, dtype=torch.float64)
    expected = integral + 0.3 * (
        torch.einsum("kbd,kbd->kb", e.double(), image.double()) - 8 * torch.einsum("bd,bd->b", x.double(), f.double())
    )
    learned = probe_traces_reference(x, f, e, image, integral, 0.3, -8.0, 8, False, None)
    torch.testing.assert_close(integral, expected)
    assert learned.numel() == 0
