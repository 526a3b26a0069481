"""Log-densities by the reverse ODE against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torchdiffeq

import geoflow_fast as gf
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.geometry import log_area, project_tangent
from geoflow_fast.likelihood.forward_mode import ForwardMode
from geoflow_fast.likelihood.reverse_ode import _ReverseSolve, density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.noise import sample_uniform
from geoflow_fast.worlds import BumpField, PairField, sample_bump


def setting(d: int, rows: int = 16):
    generator = torch.Generator().manual_seed(d)
    image, text = (sample_uniform(rows, d, generator=generator, dtype=torch.float64) for _ in range(2))
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    return image, text, (PairField(rotation, 1.1), BumpField(image[0], text[0], 0.8))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_flow(dtype: torch.dtype = torch.float64, **changes) -> gf.GeoFlow:
    """A network whose every part matters."""
    torch.manual_seed(0)
    shape = {"hidden": 16, "depth": 2, "heads": 2, "layer_scale": 0.5} | changes
    flow = gf.GeoFlow(gf.GeoFlowConfig(6, 5, **shape)).to(dtype).eval()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.normal_(0, 0.25)
    return flow


def random_pairs(rows: int, dtype: torch.dtype = torch.float64):
    generator = seeded(1)
    return tuple(sample_uniform(rows, d, generator=generator, dtype=dtype) for d in (6, 5))


class Opaque:
    """A flow of which only `velocity` is seen, so that it takes the way of any field."""

    def __init__(self, flow: gf.GeoFlow) -> None:
        self.velocity = flow.velocity


# ---- against closed forms ----


@pytest.mark.parametrize("d", [3, 16, 128, 1024])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_closed_forms(d, direction):
    """Both oracles have isotropic Jacobians in the tangent space, on which one probe is exact."""
    image, text, fields = setting(d, rows=4)
    for field in fields:
        lp = gf.log_density(field, image, text, direction, n_steps=20, solver="rk4", generator=seeded())
        assert lp.dtype == torch.float64
        error = (lp - field.log_density(image, text, direction)).abs().max()
        assert float(error) < (1e-3 if d <= 16 else 1e-4 * d)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("grid", ["uniform", "late", "early"])
def test_exact_divergence(direction, grid):
    image, text, fields = setting(16)
    for field in fields:
        lp = gf.log_density(field, image, text, direction, 10, solver="rk4", divergence="exact", grid=grid)
        torch.testing.assert_close(lp, field.log_density(image, text, direction), atol=1e-3, rtol=0)


@pytest.mark.parametrize("d", [3, 16, 128])
def test_marginals_and_mutual_information(d):
    image, text, (field, _) = setting(d, rows=4)
    ep = gf.epistemic(field, image, text, n_steps=20, solver="rk4", generator=seeded())
    uniform = torch.full((4,), -log_area(d), dtype=torch.float64)
    for found, truth in (
        (ep.image, uniform),
        (ep.text, uniform),
        (ep.score, -2 * uniform),
        (ep.pmi, field.log_density(image, text, "i2t") - uniform),
    ):
        torch.testing.assert_close(found, truth, atol=1e-3 if d <= 16 else 1e-2, rtol=0)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("ab2", 2), ("rk4", 4)])
def test_order_of_the_solvers(solver, order):
    image, text, (field, _) = setting(16)
    truth = field.log_density(image, text, "joint")
    options = {"solver": solver, "divergence": "exact"}
    errors = [float((gf.log_density(field, image, text, n_steps=n, **options) - truth).abs().max()) for n in (10, 20)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.4)


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
    found = gf.log_density(flow, image, text, n_steps=24, solver="rk4", divergence="exact")
    torch.testing.assert_close(found, end[:, -1] - log_area(6) - log_area(5), atol=1e-4, rtol=0)


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


# ---- the estimator ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"probe": "rademacher"},
        {"tangents": "combined"},
        {"tangents": "alternating", "n_steps": 2},
        {"redraw": False, "n_steps": 2},
        {"probe": "rademacher", "tangents": "combined"},
        {"n_steps": 4},  # aligned with what the earlier ones found
        {"n_steps": 4, "tangents": "combined"},
        {"n_steps": 4, "probe": "gaussian"},  # most probes are orthogonal to earlier ones
    ],
)
def test_four_thousand_probes_find_the_exact_trace(options):
    flow = random_flow(torch.float32)
    image, text = random_pairs(4, torch.float32)
    options = {"n_steps": 1, "solver": "euler"} | options
    estimate, stderr = gf.log_density(
        flow, image, text, n_probes=4000, generator=seeded(), return_stderr=True, **options
    )
    steps = options["n_steps"]
    exact = gf.log_density(flow, image, text, n_steps=steps, solver="euler", divergence="exact")
    assert float(((estimate - exact) / stderr).abs().max()) < 4
    assert float(stderr.min()) > 1e-3  # there was something to estimate


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("orthogonal", [None, "none", "probes", "steps"])
def test_the_standard_error_is_the_spread_of_the_estimate(orthogonal, direction):
    flow = random_flow(torch.float32)
    image, text = (x.repeat(400, 1) for x in random_pairs(3, torch.float32))
    options = {"n_steps": 2, "n_probes": 3, "orthogonal": orthogonal, "generator": seeded(), "return_stderr": True}
    estimate, stderr = (x.view(400, 3) for x in gf.log_density(flow, image, text, direction, **options))
    claimed = stderr.square().mean(0).sqrt()
    ratio, four_sigma = estimate.std(0) / claimed, 4 / math.sqrt(2 * 400)
    # The larger stream's dimension stands for both of the joint solve: at widths 6 and 5 up to 15 % too careful.
    assert float(ratio.max()) < 1 + four_sigma
    assert float(ratio.min()) > (0.85 if (orthogonal, direction) == ("probes", "joint") else 1) - four_sigma


@pytest.mark.parametrize("opaque", [False, True])
def test_many_independent_solves_with_aligned_probes_find_the_exact_trace(opaque):
    """One probe each, so that a direction is learned from one draw at a time: 4,000 rows of the same pair."""
    flow = random_flow(torch.float32)
    image, text = random_pairs(1, torch.float32)
    exact = gf.epistemic(flow, image, text, n_steps=4, solver="ab2", divergence="exact")
    rows = image.repeat(4000, 1), text.repeat(4000, 1)
    found = gf.epistemic(Opaque(flow) if opaque else flow, *rows, n_steps=4, solver="ab2", generator=seeded())
    for name in ("joint", "text_given_image", "image_given_text", "score"):
        estimate = getattr(found, name)
        error = (estimate.mean() - getattr(exact, name)).abs() / (estimate.std() / math.sqrt(4000))
        assert float(error) < 4, name


def test_aligned_probes_are_exact_on_a_constant_dominant_direction_they_have_found():
    """v = P_x A x with A = a a^T: the symmetric Jacobian of rank one is most of it; half the noise at least is gone."""

    class Stretch:
        def velocity(self, image, text, *_):
            v = image * 3 * torch.eye(16, dtype=image.dtype)[0]
            return project_tangent(image, v), torch.zeros_like(text)

    image, text, _ = setting(16, rows=1)
    pair = image.repeat(400, 1), text.repeat(400, 1)
    options = {"direction": "t2i", "n_steps": 6, "solver": "ab2"}
    spread = {
        probe: float(
            gf.log_density(Stretch(), *pair, probe=probe, orthogonal="none", generator=seeded(), **options).std()
        )
        for probe in ("aligned", "gaussian")
    }
    assert spread["aligned"] < 0.5 * spread["gaussian"]


def test_a_basis_of_orthogonal_probes_is_exact():
    config = {"n_steps": 3, "generator": seeded(), "n_probes": 4, "orthogonal": "probes"}
    flow = random_flow()
    image, text = random_pairs(5)
    exact = gf.log_density(flow, image, text, "i2t", n_steps=3, divergence="exact")
    torch.testing.assert_close(gf.log_density(flow, image, text, "i2t", **config), exact, atol=1e-9, rtol=0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("solver", ["euler", "ab2", "rk4", "midpoint"])
@pytest.mark.parametrize("tangents", ["separate", "combined", "alternating"])
def test_the_network_and_any_field_give_one_answer(direction, solver, tangents):
    flow = random_flow(torch.float32)
    image, text = random_pairs(7, torch.float32)
    options = {"n_steps": 3, "n_probes": 2, "solver": solver, "tangents": tangents, "grid": "late", "probe": "gaussian"}
    fast, slow = (
        gf.log_density(field, image, text, direction, generator=seeded(), **options) for field in (flow, Opaque(flow))
    )
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


def test_the_euclidean_twin_takes_the_fast_path_too():
    flow = random_flow(geometry="euclidean")
    image, text = random_pairs(5)
    slow = Opaque(flow)
    slow.config = flow.config
    fast, slow = (gf.log_density(field, image, text, generator=seeded(), probe="gaussian") for field in (flow, slow))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"n_probes": 3, "orthogonal": "probes"}, {"divergence": "exact"}])
def test_chunks_do_not_change_the_result(options, monkeypatch):
    sizes = []
    run = _ReverseSolve.run
    monkeypatch.setattr(_ReverseSolve, "run", lambda self: sizes.append(len(self.points[0][0])) or run(self))
    flow = random_flow()
    image, text = random_pairs(50)
    whole, pieces = (
        gf.log_density(flow, image, text, generator=seeded(), memory=memory, **options) for memory in (2**30, 2**16)
    )
    assert sizes[0] == 50 == sum(sizes[1:])
    assert len(sizes) > 2  # one solve, then several chunks
    torch.testing.assert_close(whole, pieces, atol=1e-11, rtol=0)
    first = density_estimates(flow, image[30:], text[30:], ("joint",), DensitySettings(), 3, first_row=30)
    every = density_estimates(flow, image, text, ("joint",), DensitySettings(), 3)
    torch.testing.assert_close(first, every[..., 30:], atol=1e-11, rtol=0)


@pytest.mark.parametrize("geometry", ["sphere", "euclidean"])
def test_shared_probes_are_those_of_the_first_row(geometry):
    flow = random_flow(geometry=geometry)
    image, text = random_pairs(9)
    shared = gf.log_density(flow, image, text, "i2t", generator=seeded(), shared=True)
    options = {"direction": "i2t", "probe": "gaussian"}
    alone = [gf.log_density(flow, image[[row]], text[[row]], generator=seeded(), **options) for row in range(9)]
    torch.testing.assert_close(shared, torch.cat(alone))


# ---- the epistemic score ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_probes": 3, "return_stderr": True},
        {"n_probes": 3, "return_stderr": True, "probe": "gaussian"},
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
    alone = {name: value for name, value in options.items() if name != "return_stderr"}
    found_alone = list(zip(DIRECTIONS, (ep.joint, ep.text_given_image, ep.image_given_text)))
    used = options.get("settings", gf.DensitySettings(probe=options.get("probe")))
    if used.probe_kind == "aligned":  # such probes follow the joint solve, which a conditional one alone does not have
        del found_alone[1:]
    for direction, found in found_alone:
        one = gf.log_density(flow, image, text, direction, generator=seeded(4), **alone)
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
    assert (ep.stderr is None) == ("return_stderr" not in options)


def test_the_same_probes_serve_all_three_solves():
    """With common probes the noise of the conditionals cancels against that of the joint, most of all at t near 1."""
    flow = random_flow(torch.float32)
    image, text = (x.repeat(200, 1) for x in random_pairs(3, torch.float32))
    ep = gf.epistemic(flow, image, text, n_steps=1, solver="euler", generator=seeded())
    apart = [
        gf.log_density(flow, image, text, d, 1, solver="euler", generator=seeded(k)) for k, d in enumerate(DIRECTIONS)
    ]
    spread, loose = ((2 * j - a - b).view(200, 3).std(0) for j, a, b in (
        (ep.joint, ep.text_given_image, ep.image_given_text), apart))  # fmt: skip
    assert bool((spread < loose).all())


def test_absolute_typicality():
    flow = random_flow()
    image, text = random_pairs(9)
    plain = gf.epistemic(flow, image, text, generator=seeded())
    typical = plain.typical()
    assert typical[0] == pytest.approx(float(-plain.image.mean()))
    ep = gf.epistemic(flow, image, text, generator=seeded(), typicality="absolute", typical=typical)
    truth = (plain.image - plain.image.mean()).abs() + (plain.text - plain.text.mean()).abs()
    torch.testing.assert_close(ep.score, truth)
    with pytest.raises(ValueError, match="go together"):
        gf.epistemic(flow, image, text, typicality="absolute")


def test_marginals_averaged_over_partners():
    """The marginal is the mean over pairings of the image with each text, its own and the partners."""
    flow = random_flow()
    image, text = random_pairs(4)
    prompts = sample_uniform(3, 5, generator=seeded(), dtype=torch.float64)
    options = {"divergence": "exact", "n_steps": 4}
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
def test_a_partner_more_does_not_change_the_noise_of_the_others(name):
    """What M partners add up to, less what M - 1 do, is the last one's share, whatever the partners before it are."""
    flow = random_flow()
    image, text = random_pairs(4)
    side, width = ("image", 5) if name == "text_partners" else ("text", 6)
    first, second, last = sample_uniform(3, width, generator=seeded(), dtype=torch.float64)

    def total(*partners):
        given = {name: torch.stack(partners)} if partners else {}
        return (1 + len(partners)) * getattr(gf.epistemic(flow, image, text, generator=seeded(), **given), side)

    shares = [total(before, last) - total(before) for before in (first, second)]
    torch.testing.assert_close(shares[0], shares[1], atol=1e-10, rtol=0)
    assert float((total(last) - total() - shares[0]).abs().min()) > 1e-6  # a place has probes of its own


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
        (ValueError, r"text_partners is torch.float32", good.float()),
        (TypeError, r"text_partners must be a tensor, got list", good.tolist()),
    ):
        with pytest.raises(error, match=message):
            gf.epistemic(flow, image, text, text_partners=partners)


def test_suggested_steps_reach_the_tolerance():
    image, text, (field, _) = setting(16)
    truth = field.log_density(image, text, "joint")
    counts = []
    for tolerance in (0.3, 0.03):
        steps = gf.suggest_steps(field, image, text, tolerance, solver="euler")
        found = gf.log_density(field, image, text, n_steps=steps, solver="euler", divergence="exact")
        # First order: what doubling the steps changes is half of the error.
        assert float((found - truth).abs().mean()) < 2.2 * tolerance
        counts.append(steps)
    assert counts[1] > counts[0] > gf.suggest_steps(field, image, text, 0.3, solver="rk4")
    for most in (4, 7):  # powers of two are tried
        with pytest.raises(ValueError, match="doubling 4 steps of euler still moves"):
            gf.suggest_steps(field, image, text, 1e-6, solver="euler", max_steps=most)


# ---- bad input ----


def test_bad_input():
    image, text, (field, _) = setting(4)
    cases = {
        "direction": {"direction": "up"},
        "divergence": {"divergence": "guess"},
        "n_steps": {"n_steps": 0},
        "solver": {"solver": "magic"},
        "return_stderr": {"return_stderr": True},
        "n_probes": {"n_probes": 0},
        "n_probes must be an integer, got True": {"n_probes": True},
        "n_steps must be an integer, got True": {"n_steps": True},
        "n_steps must be an integer, got 2.0": {"n_steps": 2.0},
        "memory must be at least 1, got 0": {"memory": 0},
        "memory must be an integer, got 1.5": {"memory": 1.5},
        "probe must be": {"probe": "uniform"},
        "tangents must be": {"tangents": "both"},
        "grid must be": {"grid": "log"},
        "needs probe='gaussian', got 'rademacher'": {"orthogonal": "steps", "probe": "rademacher"},
        "needs probe='gaussian', got 'aligned'": {"orthogonal": "steps", "probe": "aligned"},
        "needs redraw=True": {"redraw": False, "probe": "aligned"},
        "and shared=False": {"shared": True, "probe": "aligned"},
        "orthogonal must be": {"orthogonal": "all"},
        "do not fit into 3": {"orthogonal": "probes", "n_probes": 4},
    }
    for message, options in cases.items():
        with pytest.raises(TypeError if "integer" in message else ValueError, match=message):
            gf.log_density(field, image, text, **options)
    with pytest.raises(ValueError, match="text row 2"):
        gf.log_density(field, image, torch.cat((text[:2], 2 * text[2:])))
    with pytest.raises(ValueError, match="equal B"):
        gf.log_density(field, image, text[:3])
    flow = random_flow()
    for message, pair, options in (
        (r"image must be \[B, 6\]", (image, text), {}),
        ("image is torch.float32", random_pairs(3, torch.float32), {}),
    ):
        with pytest.raises(ValueError, match=message):
            gf.log_density(flow, *pair, **options)
    assert gf.epistemic(flow, *random_pairs(0)).score.shape == (0,)
    for name, pair in (("image", (image.numpy(), text)), ("text", (image, text.tolist()))):
        for call in (gf.log_density, gf.epistemic, gf.suggest_steps):
            with pytest.raises(TypeError, match=f"{name} must be a tensor"):
                call(field, *pair)
    for typical in ((1.0,), (1.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="typical must be two finite numbers"):
            gf.epistemic(field, image, text, typicality="absolute", typical=typical)


def test_integers_of_numpy_are_integers():
    image, text, (field, _) = setting(4)
    found = gf.log_density(field, image, text, n_steps=np.int64(3), n_probes=np.int32(2), generator=seeded())
    torch.testing.assert_close(found, gf.log_density(field, image, text, n_steps=3, n_probes=2, generator=seeded()))
    assert type(DensitySettings(np.int64(3)).n_steps) is int


def test_exact_traces_need_no_room_for_probes():
    image, text, (field, _) = setting(4)
    exact = gf.log_density(field, image, text, divergence="exact")
    found = gf.log_density(field, image, text, divergence="exact", orthogonal="probes", n_probes=9)
    torch.testing.assert_close(found, exact)


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


def test_a_field_without_gradients_is_refused_unless_it_stands_still():
    class Cut:
        def velocity(self, image, text, *arguments):
            return tuple(v.detach() for v in fields[0].velocity(image, text, *arguments))

    class Still:
        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)

    image, text, fields = setting(4)
    with pytest.raises(ValueError, match="the text velocity must be differentiable"):
        gf.log_density(Cut(), image, text, "i2t")
    uniform = torch.full((len(text),), -log_area(4), dtype=torch.float64)
    torch.testing.assert_close(gf.log_density(Still(), image, text, "i2t"), uniform)


def test_a_field_off_the_sphere_is_refused():
    """Its trace would not be the divergence of the path that is followed."""

    class Tilted:
        def velocity(self, image, text, *arguments):
            v = fields[0].velocity(image, text, *arguments)
            lift = torch.zeros(len(text), 1, dtype=text.dtype)
            lift[5] = 1e-2
            return v[0], v[1] + lift * text

    class Narrow:
        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)[:, 1:]

    image, text, fields = setting(4)
    for solver in ("euler", "midpoint"):
        with pytest.raises(ValueError, match="joint: the text velocity is not tangent to the sphere in row 5 at t=1"):
            gf.log_density(Tilted(), image, text, solver=solver)
    with pytest.raises(ValueError, match=r"i2t: the text velocity has shape \(16, 3\) at points \(16, 4\)"):
        gf.log_density(Narrow(), image, text, "i2t")


def test_the_gaussian_base_of_a_flat_field_that_stands_still():
    class Still:
        config = gf.GeoFlowConfig(6, 5, geometry="euclidean")

        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)

    image, text = random_pairs(4)
    truth = [torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) for x in (image, text)]
    for direction, base in zip(DIRECTIONS, (truth[0] + truth[1], truth[1], truth[0])):
        torch.testing.assert_close(gf.log_density(Still(), image, text, direction), base)


def test_a_field_that_is_a_module_is_evaluated_without_dropout():
    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def velocity(self, image, text, *arguments):
            return tuple(project_tangent(x, self.drop(v)) for x, v in zip(
                (image, text), fields[0].velocity(image, text, *arguments)))  # fmt: skip

    image, text, fields = setting(4)
    dropped = Dropped().train()
    found = gf.log_density(dropped, image, text, generator=seeded())
    torch.testing.assert_close(found, gf.log_density(fields[0], image, text, generator=seeded()))
    assert dropped.drop.training


def test_dropout_is_off_and_the_mode_is_restored():
    flow = gf.GeoFlow(gf.GeoFlowConfig(6, 5, hidden=16, depth=2, heads=2, layer_scale=0.5, dropout=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.normal_(0, 0.25)
    flow.blocks[0].eval()
    image, text = sample_uniform(8, 6), sample_uniform(8, 5)
    noisy = gf.log_density(flow, image, text, n_steps=2, divergence="exact")
    assert flow.training
    assert not flow.blocks[0].training
    torch.testing.assert_close(gf.log_density(flow.eval(), image, text, n_steps=2, divergence="exact"), noisy)
    assert not flow.training


def test_a_path_that_breaks_raises():
    class Broken:
        def velocity(self, image, text, *_):
            return image * math.nan, torch.zeros_like(text)

    image, text, _ = setting(4)
    with pytest.raises(ValueError, match="row 0 became non-finite in step 0"):
        gf.log_density(Broken(), image, text, "joint")


@pytest.mark.parametrize(("solve", "stream", "name"), [(0, 1, "joint"), (2, 0, "t2i")])
def test_a_solve_that_breaks_on_the_way_names_row_and_step(monkeypatch, solve, stream, name):
    """In whatever chunk it is: the network's output for one pair turns NaN in the fourth step."""
    flow = random_flow()
    image, text = random_pairs(8)
    call = ForwardMode.__call__

    def breaking(self, t, solves):
        outputs = call(self, t, solves)
        if t < 0.75:
            outputs[solve][stream][0][(solves[0].text[0] - text[6]).norm(dim=1) < 0.5] = math.nan
        return outputs

    monkeypatch.setattr(ForwardMode, "__call__", breaking)
    with pytest.raises(ValueError, match=rf"{name}: divergence row 6 became non-finite in step 3 \(t=0.7\) of euler"):
        gf.epistemic(flow, image, text, n_steps=10, solver="euler", memory=2**17)
