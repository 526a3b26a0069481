"""Log-densities and the epistemic score against closed forms, other solvers and each other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torchdiffeq

import geoflow_fast as gf
from benchmarks.methods.euclidean import EuclideanConfig
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.geometry import log_area, normalize
from geoflow_fast.likelihood.density import epistemic_stderr
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.noise import sample_uniform
from geoflow_fast.spherical import sample_bump
from geoflow_fast.worlds import ConceptWorld, PairField
from tests.likelihood.helpers import oracles, random_flow, random_pairs, seeded


@pytest.mark.parametrize("d", [3, 16, 128, 1024])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_closed_forms(d, direction):
    """Both oracles have isotropic Jacobians in the tangent space, on which one probe is exact."""
    image, text, fields = oracles(d, rows=4)
    for field in fields:
        lp = gf.log_density(field, image, text, direction, n_steps=20, solver="rk4", generator=seeded())
        assert lp.dtype == torch.float64
        error = (lp - field.log_density(image, text, direction)).abs().max()
        assert float(error) < (1e-3 if d <= 16 else 1e-4 * d)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("grid", ["uniform", "late", "early"])
def test_exact_divergence(direction, grid):
    image, text, fields = oracles(16)
    settings = gf.DensitySettings(n_steps=10, solver="rk4", divergence="exact", grid=grid)
    for field in fields:
        lp = gf.log_density(field, image, text, direction, settings=settings)
        torch.testing.assert_close(lp, field.log_density(image, text, direction), atol=1e-3, rtol=0)


@pytest.mark.parametrize("d", [3, 16, 128])
def test_marginals_and_mutual_information(d):
    image, text, (field, _) = oracles(d, rows=4)
    ep = gf.epistemic(field, image, text, n_steps=20, solver="rk4", generator=seeded())
    uniform = torch.full((4,), -log_area(d), dtype=torch.float64)
    for value, truth in (
        (ep.image, uniform),
        (ep.text, uniform),
        (ep.score, -2 * uniform),
        (ep.pmi, field.log_density(image, text, "i2t") - uniform),
    ):
        torch.testing.assert_close(value, truth, atol=1e-3 if d <= 16 else 1e-2, rtol=0)


def test_dopri5_agrees():
    """torchdiffeq's adaptive solver on the augmented ODE, the divergence from the full Jacobian."""
    flow = random_flow(time_scale=0.3)
    image, text = random_pairs(2)

    def augmented(t, state):
        def velocity(z):
            v = flow.velocity(*(torch.nn.functional.normalize(x, dim=-1) for x in z.split((6, 5), 1)), t, "joint")
            return torch.cat(v, 1)

        z = state[:, :11]
        jacobian = torch.autograd.functional.jacobian(lambda y: velocity(y).sum(0), z)  # [11, B, 11]: dv_i / dz_bj
        return torch.cat((velocity(z), jacobian.diagonal(dim1=0, dim2=2).sum(1, keepdim=True)), 1).detach()

    state = torch.cat((image, text, torch.zeros(2, 1, dtype=torch.float64)), 1)
    times = torch.tensor([1.0, 0.0], dtype=torch.float64)
    end = torchdiffeq.odeint(augmented, state, times, rtol=1e-6, atol=1e-6, method="dopri5")[-1]
    lp = gf.log_density(flow, image, text, n_steps=24, solver="rk4", divergence="exact")
    torch.testing.assert_close(lp, end[:, -1] - log_area(6) - log_area(5), atol=1e-4, rtol=0)


def test_a_trained_flow_integrates_to_one():
    """log p(text | image) of a flow on S^2, over an even grid of its texts."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(3, 3, hidden=32, depth=2, layer_scale=0.1))
    image, field = sample_uniform(4000, 3), PairField(torch.eye(3), 1.0)
    text = sample_bump(image, field.c)
    config = gf.TrainConfig(steps=60, batch_size=256, lr=5e-3, warmup_steps=5, val_every=60)
    gf.train(flow, gf.EmbeddingPairs.from_arrays(image, text), config)
    points = 2000
    height = 1 - (2 * torch.arange(points, dtype=torch.float64) + 1) / points
    turn = math.pi * (3 - math.sqrt(5)) * torch.arange(points, dtype=torch.float64)
    ring = (1 - height**2).sqrt()
    grid = torch.stack((ring * turn.cos(), ring * turn.sin(), height), 1).float()
    given = image[:1].expand(points, -1)
    lp = gf.log_density(flow, given, grid, "i2t", n_steps=12, divergence="exact")
    assert float((lp - lp.mean()).abs().max()) > 0.5  # the flow has learned something
    assert float(lp.exp().mean() * 4 * math.pi) == pytest.approx(1, abs=0.01)


def circle(points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [n, 2] on the circle and their weights [n], which integrate smooth functions to rounding."""
    turn = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
    return torch.stack((turn.cos(), turn.sin()), 1), torch.full((points,), 2 * math.pi / points, dtype=torch.float64)


def globe(rings: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [n, 3] on S^2 and their weights: Gauss's rule in height, even angles on each ring."""
    height, weight = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(rings))
    around, share = circle(2 * rings)
    ring = (1 - height**2).sqrt().view(-1, 1, 1) * around
    grid = torch.cat((ring, height.view(-1, 1, 1).expand(-1, len(around), 1)), 2)
    return grid.flatten(0, 1), (weight.unsqueeze(1) * share).flatten()


@pytest.fixture(scope="module")
def globe_flow() -> gf.GeoFlow:
    """A flow on S^2 x S^1, trained until its density has hills and valleys."""
    torch.manual_seed(0)
    image = sample_bump(sample_uniform(1, 3).expand(4000, -1), 0.9)
    text = torch.nn.functional.normalize(image[:, :2] + 0.4 * torch.randn(4000, 2), dim=1)
    flow = gf.GeoFlow(gf.GeoFlowConfig(3, 2, hidden=32, depth=2, layer_scale=0.1))
    config = gf.TrainConfig(steps=120, batch_size=256, lr=5e-3, warmup_steps=5, val_every=120)
    gf.train(flow, gf.EmbeddingPairs.from_arrays(image, text), config)
    return flow.double()


def joint_mass(flow: gf.GeoFlow, rings: int, turns: int, **settings) -> float:
    """The integral of the joint density over S^2 x S^1."""
    (x, wx), (y, wy) = globe(rings), circle(turns)
    image, text = x.repeat_interleave(len(y), 0), y.repeat(len(x), 1)
    lp = gf.log_density(flow, image, text, "joint", settings=gf.DensitySettings(divergence="exact", **settings))
    return float((lp.exp() * torch.outer(wx, wy).flatten()).sum())


def test_the_joint_density_on_a_globe_and_a_circle_integrates_to_one(globe_flow):
    """A rule that is exact for smooth functions leaves the error of the solver, which falls with its order."""
    coarse, fine = (joint_mass(globe_flow, 8, 16, n_steps=steps, solver="midpoint") for steps in (4, 8))
    assert abs(fine - 1) < 0.01
    assert abs(fine - 1) < 0.6 * abs(coarse - 1)
    (x, wx), (y, wy) = globe(12), circle(32)
    for direction, grid, weight in (("t2i", x, wx), ("i2t", y, wy)):
        given = y[:1] if direction == "t2i" else x[40:41]
        pair = (grid, given.expand(len(grid), -1)) if direction == "t2i" else (given.expand(len(grid), -1), grid)
        lp = gf.log_density(globe_flow, *pair, direction, n_steps=12, solver="rk4", divergence="exact")
        assert float(lp.max() - lp.min()) > 1  # the flow has learned something
        assert float((lp.exp() * weight).sum()) == pytest.approx(1, abs=2e-3)


@pytest.mark.slow
def test_the_integral_of_the_joint_density_is_refined_until_it_is_one(globe_flow):
    grids = {
        f"{rings} rings, {turns} turns": joint_mass(globe_flow, rings, turns, n_steps=16, solver="rk4")
        for rings, turns in ((4, 8), (8, 16), (16, 32), (24, 48))
    }
    steps = {n: joint_mass(globe_flow, 16, 32, n_steps=n, solver="midpoint") for n in (2, 4, 8, 16)}
    assert abs([*grids.values()][-1] - 1) < 1e-4
    errors = [abs(value - 1) for value in steps.values()]
    assert all(after < 0.5 * before for before, after in itertools.pairwise(errors))


def test_rotating_points_and_network_alike_changes_nothing():
    flow, turned = random_flow(), random_flow()
    image, text = random_pairs(5)
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    with torch.no_grad():
        turned.encoders[0][0].weight.copy_(flow.encoders[0][0].weight @ rotation.T)
        turned.decoders[0][1].weight.copy_(rotation @ flow.decoders[0][1].weight)
        turned.decoders[0][1].bias.copy_(rotation @ flow.decoders[0][1].bias)
    for direction in DIRECTIONS:
        before = gf.log_density(flow, image, text, direction, divergence="exact")
        after = gf.log_density(turned, image @ rotation.T, text, direction, divergence="exact")
        torch.testing.assert_close(before, after, atol=1e-10, rtol=0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("options", [{}, {"redraw": False}, {"probe": "rademacher"}])
def test_the_standard_error_is_the_standard_deviation_of_the_estimate(options, direction):
    flow = random_flow(torch.float32)
    image, text = (x.repeat(400, 1) for x in random_pairs(3, torch.float32))
    settings = gf.DensitySettings(n_steps=2, n_probes=3, **options)
    estimates = gf.log_density(flow, image, text, direction, generator=seeded(), return_stderr=True, settings=settings)
    estimate, stderr = (x.view(400, 3) for x in estimates)
    claimed = stderr.square().mean(0).sqrt()
    ratio, four_sigma = estimate.std(0) / claimed, 4 / math.sqrt(2 * 400)
    assert float((ratio - 1).abs().max()) < four_sigma


def test_the_gaussian_base_of_a_flat_field_that_stands_still():
    class Still:
        config = EuclideanConfig(6, 5)

        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)

    image, text = random_pairs(4)
    truth = [torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) for x in (image, text)]
    for direction, base in zip(DIRECTIONS, (truth[0] + truth[1], truth[1], truth[0])):
        torch.testing.assert_close(gf.log_density(Still(), image, text, direction), base)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_probes": 3},
        {"n_probes": 3, "settings": gf.DensitySettings(redraw=False)},
        {"settings": gf.PAPER_DENSITY},
        {"settings": gf.FAST_DENSITY},
    ],
)
def test_chain_rule(options):
    flow = random_flow(torch.float32)
    image, text = random_pairs(9, torch.float32)
    ep = gf.epistemic(flow, image, text, generator=seeded(4), **options)
    torch.testing.assert_close(ep.joint, ep.image + ep.text + ep.pmi, atol=1e-12, rtol=0)
    torch.testing.assert_close(ep.joint, ep.image + ep.text_given_image, atol=1e-12, rtol=0)
    torch.testing.assert_close(ep.joint, ep.text + ep.image_given_text, atol=1e-12, rtol=0)
    torch.testing.assert_close(ep.score, -ep.image - ep.text, atol=1e-12, rtol=0)
    terms = list(zip(DIRECTIONS, (ep.joint, ep.text_given_image, ep.image_given_text)))
    if options.get("settings", gf.DensitySettings()).learns:
        del terms[1:]  # the probes follow the joint solve, which a conditional one alone does not have
    for direction, term in terms:
        one = gf.log_density(flow, image, text, direction, generator=seeded(4), **options)
        torch.testing.assert_close(term, one, rtol=1e-5, atol=1e-5)
    assert (ep.stderr is None) == ("n_probes" not in options)


def test_the_same_probes_serve_all_three_solves():
    """With common probes the noise of the conditionals cancels against that of the joint, most of all at t near 1."""
    flow = random_flow(torch.float32)
    image, text = (x.repeat(200, 1) for x in random_pairs(3, torch.float32))
    ep = gf.epistemic(flow, image, text, n_steps=1, solver="euler", generator=seeded())
    apart = [
        gf.log_density(flow, image, text, d, 1, solver="euler", generator=seeded(k)) for k, d in enumerate(DIRECTIONS)
    ]
    common = ep.joint, ep.text_given_image, ep.image_given_text
    noise, noise_apart = ((2 * j - a - b).view(200, 3).std(0) for j, a, b in (common, apart))
    assert bool((noise < noise_apart).all())


def test_marginals_averaged_over_partners():
    """The marginal is the mean over pairings of the image with each text, its own and the partners."""
    flow = random_flow()
    image, text = random_pairs(4)
    prompts = sample_uniform(3, 5, generator=seeded(), dtype=torch.float64)
    options = {"settings": gf.DensitySettings(n_steps=4, divergence="exact")}
    ep = gf.epistemic(flow, image, text, text_partners=prompts, **options)
    each = [gf.epistemic(flow, image, t.expand_as(text), **options).image for t in prompts]
    own = gf.epistemic(flow, image, text, **options)
    torch.testing.assert_close(ep.image, torch.stack([own.image, *each]).mean(0))
    torch.testing.assert_close(ep.text, own.text)
    images = sample_uniform(8, 6, generator=seeded(), dtype=torch.float64).view(4, 2, 6)
    ep = gf.epistemic(flow, image, text, image_partners=images, **options)
    each = [gf.epistemic(flow, i, text, **options).text for i in images.unbind(1)]
    torch.testing.assert_close(ep.text, torch.stack([own.text, *each]).mean(0))
    torch.testing.assert_close(ep.joint, ep.image + ep.text + ep.pmi)


@pytest.mark.parametrize("name", ["text_partners", "image_partners"])
def test_another_partner_does_not_change_the_noise_of_the_others(name):
    """The last of M partners adds the same to their sum, whatever the partners before it are."""
    flow = random_flow()
    image, text = random_pairs(4)
    side, width = ("image", 5) if name == "text_partners" else ("text", 6)
    first, second, last = sample_uniform(3, width, generator=seeded(), dtype=torch.float64)

    def total(*partners):
        given = {name: torch.stack(partners)} if partners else {}
        return (1 + len(partners)) * getattr(gf.epistemic(flow, image, text, generator=seeded(), **given), side)

    shares = [total(before, last) - total(before) for before in (first, second)]
    torch.testing.assert_close(shares[0], shares[1], atol=1e-10, rtol=0)
    assert (
        float((total(last) - total() - shares[0]).abs().min()) > 1e-6
    )  # the first partner has other probes than the second


def test_bad_partners_are_named():
    flow, (image, text) = random_flow(), random_pairs(4)
    good = sample_uniform(8, 5, dtype=torch.float64).view(4, 2, 5)
    long = good.clone()
    long[3, 1] *= 2
    for error, message, partners in (
        (ValueError, r"text_partners row \(3, 1\) has norm 2", long),
        (ValueError, r"text_partners row 1 has norm 2", long[3]),
        (ValueError, r"text_partners must be \[M, 5\] or \[4, M, 5\]", good[:3]),
        (ValueError, r"text_partners must be", good[0, 0]),
        (ValueError, r"text_partners must be", good[0, :0]),
        (TypeError, r"text_partners must be a tensor, an array or EmbeddingPairs, got list", good.tolist()),
    ):
        with pytest.raises(error, match=message):
            gf.epistemic(flow, image, text, text_partners=partners)


def test_doubling_the_steps_with_kept_probes_shows_the_error_of_the_solver():
    image, text, (field, _) = oracles(16)
    truth = field.log_density(image, text, "joint")
    settings = gf.DensitySettings(solver="euler", redraw=False)
    for steps in (5, 20):
        one, two = (
            gf.log_density(field, image, text, n_steps=n, generator=seeded(), settings=settings)
            for n in (steps, 2 * steps)
        )
        exact = gf.log_density(field, image, text, n_steps=steps, solver="euler", divergence="exact")
        # First order: what doubling the steps changes is half of the error.
        assert float((one - two).abs().mean()) == pytest.approx(0.5 * float((exact - truth).abs().mean()), rel=0.3)


def test_bad_input():
    image, text, (field, _) = oracles(4)
    for message, options in (
        ("direction must be one of", {"direction": "up"}),
        ("divergence must be one of", {"divergence": "guess"}),
        ("n_steps must be at least 1, got 0", {"n_steps": 0}),
        ("solver must be one of", {"solver": "magic"}),
        ("return_stderr needs", {"return_stderr": True}),
        ("n_probes must be at least 1, got 0", {"n_probes": 0}),
    ):
        with pytest.raises(ValueError, match=message):
            gf.log_density(field, image, text, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        gf.log_density(field, image, text, steps=3)
    with pytest.raises(ValueError, match="text row 2"):
        gf.log_density(field, image, torch.cat((text[:2], 2 * text[2:])))
    with pytest.raises(ValueError, match="equal B"):
        gf.log_density(field, image, text[:3])
    flow = random_flow()
    with pytest.raises(ValueError, match=r"image must be \[B, 6\]"):
        gf.log_density(flow, image, text)
    assert gf.epistemic(flow, *random_pairs(0)).score.shape == (0,)
    for name, pair in (("image", (image.tolist(), text)), ("text", (image[0], text.tolist()))):
        for call in (gf.log_density, gf.epistemic):
            with pytest.raises(TypeError, match=f"{name} must be a tensor"):
                call(field, *pair)


@pytest.mark.parametrize("kind", ["array", torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("call", [gf.log_density, gf.epistemic])
def test_pairs_of_any_floating_type(call, kind):
    """The result is that of the same values in the flow's precision; those in half precision are made unit rows."""
    flow, pair = random_flow(), random_pairs(5)
    rounded = pair if kind == "array" else [x.to(kind) for x in pair]
    given = [x.numpy() for x in pair] if kind == "array" else rounded
    expected = [x.double() if kind in ("array", torch.float32) else normalize(x.double()) for x in rounded]
    one, two = (call(flow, *rows, generator=seeded()) for rows in (given, expected))
    one, two = (x.score if call is gf.epistemic else x for x in (one, two))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_partners_of_any_floating_type():
    flow, (image, text) = random_flow(), random_pairs(4)
    other = sample_uniform(2, 5, dtype=torch.float32)
    scores = [
        gf.epistemic(flow, image, text, text_partners=partners, generator=seeded()).score
        for partners in (other.double(), other, other.numpy(), other.expand(4, 2, 5).numpy())
    ]
    assert all(torch.equal(score, scores[0]) for score in scores)


def test_integers_of_numpy_are_integers():
    image, text, (field, _) = oracles(4)
    lp = gf.log_density(field, image, text, n_steps=np.int64(3), n_probes=np.int32(2), generator=seeded())
    torch.testing.assert_close(lp, gf.log_density(field, image, text, n_steps=3, n_probes=2, generator=seeded()))
    assert type(gf.DensitySettings(np.int64(3)).n_steps) is int


def test_a_row_that_vanishes_in_the_components_is_an_error():
    """Three coordinates are kept; row 2 lies in the others."""
    flow = random_flow(pca_dim=3)
    image, text = random_pairs(4)
    assert gf.log_density(flow, image, text).isfinite().all()
    image[2] = torch.eye(6, dtype=torch.float64)[5]
    with pytest.raises(ValueError, match="image in the flow's coordinates row 2 is all zeros"):
        gf.log_density(flow, image, text)
    with pytest.raises(ValueError, match="image_partners in the flow's coordinates row 1 is all zeros"):
        gf.epistemic(flow, image[:2], text[:2], image_partners=image[1:])


def test_the_standard_error_of_the_score_is_that_of_its_estimates():
    flow, (image, text) = random_flow(), random_pairs(7)
    settings = gf.DensitySettings(n_steps=2, n_probes=5)
    estimates = density_estimates(flow, image, text, [Direction.of(each) for each in DIRECTIONS], settings, 3)
    score = estimates[1] + estimates[2] - 2 * estimates[0]
    expected = score.std(0) / math.sqrt(5)
    torch.testing.assert_close(epistemic_stderr(estimates), expected)


def marginals_by_partner(flow: gf.GeoFlow, image: torch.Tensor, text: torch.Tensor, **settings) -> torch.Tensor:
    """log p(image) [images, partners] as the joint minus the conditional, with every one of the partners [partners, d]
    or [images, partners, d]."""
    partners = text.expand(len(image), *text.shape[-2:])
    pairs = image.unsqueeze(1).expand(-1, partners.shape[1], -1).flatten(0, 1), partners.flatten(0, 1)
    chosen = gf.DensitySettings(divergence="exact", **settings)
    joint, conditional = (gf.log_density(flow, *pairs, direction, settings=chosen) for direction in ("joint", "i2t"))
    return (joint - conditional).view(len(image), -1)


def test_the_marginal_of_an_oracle_does_not_depend_on_the_partner():
    """The chain rule: where joint and conditional fit each other, nothing is left of the partner but the solver's
    error."""
    image, text, fields = oracles(8, rows=6)
    for field in fields:
        marginal = marginals_by_partner(field, image, text, n_steps=12, solver="rk4")
        assert float(marginal.std(1).max()) < 1e-4


@pytest.mark.slow
def test_how_far_the_marginal_of_a_trained_flow_depends_on_the_partner(concept_flow):
    """Joint and conditional are learned side by side, so that the chain rule holds as well as the flow has learned."""
    world = ConceptWorld()
    image, text, concept = world.sample(12 * 48, generator=seeded(5))
    own = text.view(48, 12, -1)[:, :1]
    same = torch.stack([text[(concept == concept[12 * k]).nonzero()[:, 0][:12]] for k in range(48)])
    image = image.view(48, 12, -1)[:, 0]
    own_kind = marginals_by_partner(concept_flow, image, same, n_steps=16, solver="rk4")
    steps = marginals_by_partner(concept_flow, image, same, n_steps=32, solver="rk4")
    any_kind = marginals_by_partner(concept_flow, image, own[:12, 0], n_steps=16, solver="rk4")
    truth = world.log_image(image)
    spread = float(own_kind.std(1).mean())
    figures = {
        "spread_over_texts_of_the_same_concept": round(spread, 3),
        "spread_over_any_texts": round(float(any_kind.std(1).mean()), 3),
        "spread_over_images": round(float(own_kind.mean(1).std()), 3),
        "error_of_the_mean_over_partners": round(float((own_kind.mean(1) - truth).std()), 3),
        "effect_of_twice_the_steps": round(float((steps - own_kind).abs().max()), 5),
    }
    assert figures["effect_of_twice_the_steps"] < 0.05 * spread, figures  # it is not the solver
    assert spread < 0.5 * figures["spread_over_images"], figures
