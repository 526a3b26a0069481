"""Probes: their distribution, what they depend on, and how well they estimate a trace."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

import geoflow_fast as gf
from geoflow_fast.geometry import dot, project_tangent
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.manifolds import EUCLIDEAN, SPHERE, Manifold
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops.tangent_probes import hashed_normals
from tests.likelihood.helpers import Opaque, oracles, random_flow, random_pairs, seeded


def probes(rows: int = 200, count: int = 3, first: int = 0, manifold: Manifold = SPHERE, **changes) -> Probes:
    settings = gf.DensitySettings(n_probes=count, **{"probe": "gaussian", "orthogonal": "none"} | changes)
    return Probes(5, torch.arange(first, first + rows), settings, manifold)


def test_normals_are_standard_and_independent():
    z = hashed_normals(torch.arange(1000), 5, 3, 1, 2, 41).double()
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-3
    for axis in range(3):  # neighbouring probes, rows and coordinates are uncorrelated, and so are their squares
        near, far = z.narrow(axis, 0, z.shape[axis] - 1), z.narrow(axis, 1, z.shape[axis] - 1)
        for a, b in ((near, far), (near.square() - 1, far.square() - 1)):
            assert abs(float((a * b).mean() / (a * b).std())) * math.sqrt(a.numel()) < 4


@pytest.mark.parametrize(
    ("kind", "orthogonal"),
    [("gaussian", "none"), ("gaussian", "probes"), ("gaussian", "steps"), ("rademacher", "none")],
)
def test_probes_have_the_tangent_projection_as_second_moment(kind, orthogonal):
    d, rows = 5, 40_000
    x = sample_uniform(1, d).expand(rows, -1)
    e = probes(rows, 2, probe=kind, orthogonal=orthogonal).draw(0, 0, x)
    assert float(dot(x, e).abs().max()) < 1e-5
    moment = torch.einsum("kbi,kbj->ij", e, e) / (2 * rows)
    truth = torch.eye(d) - torch.outer(x[0], x[0])
    torch.testing.assert_close(moment, truth, atol=5 * math.sqrt(3 / rows), rtol=0)
    if kind == "gaussian":
        torch.testing.assert_close(e.square().sum(-1), torch.full((2, rows), d - 1.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("manifold", [SPHERE, EUCLIDEAN])
def test_aligned_probes_have_size_one_along_what_was_learned(manifold):
    d, rows = 5, 40_000
    x, y, z = sample_uniform(3, d, generator=torch.Generator().manual_seed(0)).split(1)
    at, later = x.expand(rows, -1), y.expand(rows, -1)
    drawn = probes(rows, 2, probe="aligned", manifold=manifold)
    first = drawn.draw(0, 0, at)
    assert torch.equal(first, probes(rows, 2, manifold=manifold).draw(0, 0, at))  # nothing is known yet
    drawn.learn(0, at, first, 3 * z * dot(z, first) + first)  # the Jacobian 3 z z^T + I
    e = drawn.draw(1, 0, later)
    tangent = torch.eye(d) - torch.outer(y[0], y[0]) * (manifold is SPHERE)
    moment = torch.einsum("kbi,kbj->ij", e, e) / (2 * rows)
    torch.testing.assert_close(moment, tangent, atol=5 * math.sqrt(3 / rows), rtol=0)
    torch.testing.assert_close(e.square().sum(-1), torch.full((2, rows), float(tangent.trace())), rtol=1e-5, atol=0)
    followed = torch.nn.functional.normalize(drawn._leads[0] @ tangent, dim=-1)
    torch.testing.assert_close(dot(e, followed), torch.ones(2, rows, 1), rtol=1e-4, atol=0)
    # From many probes of one row the direction of z at x is learned.
    many = probes(1, 4000, probe="aligned", manifold=manifold)
    first = many.draw(0, 0, x)
    many.learn(0, x, first, 3 * z * dot(z, first) + first)
    many.draw(1, 0, y)
    lead = torch.nn.functional.normalize(manifold.project(x, z), dim=-1)
    assert float(dot(many._leads[0][0], lead).abs()) > 0.97
    assert torch.equal(many.draw(1, 0, y), many.draw(1, 0, y))


def test_a_direction_that_vanishes_or_leaves_the_tangent_space_is_not_followed():
    x = sample_uniform(30, 7)
    for product in (torch.zeros(3, 30, 7), x.flip(0).expand(3, -1, -1)):
        drawn = probes(30, 3, probe="aligned")
        e = drawn.draw(0, 0, x)
        drawn.learn(0, x, e, product)
        again = drawn.draw(1, 0, x.flip(0))
        torch.testing.assert_close(again.square().sum(-1), torch.full((3, 30), 6.0), rtol=1e-5, atol=0)
        assert float(dot(x.flip(0), again).abs().max()) < 1e-5


def test_orthogonal_probes_are_orthogonal_up_to_a_whole_basis():
    x = sample_uniform(30, 9, dtype=torch.float64)
    e = probes(30, 8, orthogonal="probes").draw(0, 0, x)
    gram = torch.einsum("kbi,lbi->bkl", e, e)
    torch.testing.assert_close(gram, 8 * torch.eye(8, dtype=torch.float64).expand(30, -1, -1), atol=1e-10, rtol=0)


def test_probes_orthogonal_to_those_of_earlier_steps():
    """Directions are orthogonal before they are projected at their points, within a frame of draws; the probes of one
    draw are independent of each other."""
    drawn = probes(30, 2, orthogonal="steps")
    x = sample_uniform(30, 9, dtype=torch.float64)
    e = torch.stack([torch.nn.functional.normalize(drawn._directions(n, 0, x), dim=-1) for n in range(12)])
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
        {"tangents": "alternating", "n_steps": 2},
        {"redraw": False, "n_steps": 2},
        {"probe": "rademacher", "tangents": "combined"},
        {"n_steps": 4},  # aligned with what the earlier ones have seen
        {"n_steps": 4, "tangents": "combined"},
        {"n_steps": 4, "probe": "gaussian"},  # most probes are orthogonal to earlier ones
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


def test_aligned_probes_remove_the_noise_of_a_dominant_direction():
    """For v = P_x A x with A = a a^T, most of the Jacobian has rank one, and at least half of the noise disappears."""

    class Stretch:
        def velocity(self, image, text, *_):
            v = image * 3 * torch.eye(16, dtype=image.dtype)[0]
            return project_tangent(image, v), torch.zeros_like(text)

    image, text, _ = oracles(16, rows=1)
    pair = image.repeat(400, 1), text.repeat(400, 1)
    aligned, gaussian = (
        gf.DensitySettings(n_steps=6, solver="ab2", probe=probe, orthogonal="none") for probe in ("aligned", "gaussian")
    )
    noise = [
        float(gf.log_density(Stretch(), *pair, "t2i", generator=seeded(), settings=settings).std())
        for settings in (aligned, gaussian)
    ]
    assert noise[0] < 0.5 * noise[1]


def test_a_basis_of_orthogonal_probes_is_exact():
    settings = gf.DensitySettings(n_steps=3, n_probes=4, orthogonal="probes")
    flow = random_flow()
    image, text = random_pairs(5)
    exact = gf.log_density(flow, image, text, "i2t", n_steps=3, divergence="exact")
    basis = gf.log_density(flow, image, text, "i2t", generator=seeded(), settings=settings)
    torch.testing.assert_close(basis, exact, atol=1e-9, rtol=0)


def test_exact_traces_do_not_limit_the_number_of_probes():
    image, text, (field, _) = oracles(4)
    exact = gf.log_density(field, image, text, divergence="exact")
    settings = gf.DensitySettings(n_probes=9, divergence="exact", orthogonal="probes")
    torch.testing.assert_close(gf.log_density(field, image, text, settings=settings), exact)
