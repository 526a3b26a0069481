"""How much of a network counts beside the anchor: what the share does, how it is chosen, and that files keep it."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import geoflow_fast as gf
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import flow_digest, save_weights
from geoflow_fast.linear import fit_choice
from geoflow_fast.noise import sample_uniform
from geoflow_fast.training import blending
from geoflow_fast.training.flow_matching import preset_settings
from tests.samples import Opaque, randomised

SHAPE = gf.GeoFlowConfig(6, 6, hidden=16, depth=1, heads=2, layer_scale=0.1, anchored=True, centre=True)
CONFIG = gf.TrainConfig(
    steps=6, batch_size=32, lr=1e-2, warmup_steps=1, val_every=3, checkpoint_every=2, val_fraction=0.2, blend=True
)


def aligned_pairs(n: int, seed: int = 0, text_dim: int = 6) -> gf.EmbeddingPairs:
    """Pairs whose text is the image, or a part of it, with something added."""
    generator = torch.Generator().manual_seed(seed)
    image, other = sample_uniform(n, 6, generator=generator), sample_uniform(n, text_dim, generator=generator)
    return gf.EmbeddingPairs.from_arrays(image, torch.nn.functional.normalize(image[:, :text_dim] + 0.5 * other))


def some_flow(seed: int = 0) -> gf.GeoFlow:
    torch.manual_seed(seed)
    flow = randomised(gf.GeoFlow(dataclasses.replace(SHAPE, centre=False)))
    flow.anchor.image_map.copy_(torch.eye(6))
    flow.anchor.text_map.copy_(torch.eye(6))
    return flow


def with_shares(flow: gf.GeoFlow, *shares: float) -> gf.GeoFlow:
    changed = copy.deepcopy(flow)
    changed.anchor.shares.copy_(torch.tensor(shares))
    return changed


@pytest.mark.parametrize(("direction", "stream"), [("t2i", 0), ("i2t", 1)])
def test_a_share_weighs_the_network_of_one_stream_in_its_conditional_direction(direction, stream):
    flow = some_flow()
    image, text = sample_uniform(4, 6), sample_uniform(4, 6)
    whole, none, some = (
        with_shares(flow, *shares).velocity(image, text, 0.3, direction)[stream]
        for shares in ((1.0, 1.0), (0.0, 0.0), ((0.3, 0.9), (0.9, 0.3))[stream])
    )
    torch.testing.assert_close(some, none + 0.3 * (whole - none))
    joint = [with_shares(flow, *shares).velocity(image, text, 0.3, "joint") for shares in ((1.0, 1.0), (0.2, 0.4))]
    assert all(torch.equal(a, b) for a, b in zip(*joint))


@pytest.mark.parametrize("direction", ["i2t", "t2i", "joint"])
def test_densities_of_a_shared_network_agree_with_those_by_autograd(direction):
    flow = with_shares(some_flow(), 0.3, 0.6).double()
    image, text = sample_uniform(5, 6, dtype=torch.float64), sample_uniform(5, 6, dtype=torch.float64)

    fitted, wanted = (
        gf.log_density(field, image, text, direction, n_steps=4, divergence="exact") for field in (flow, Opaque(flow))
    )
    torch.testing.assert_close(fitted, wanted, rtol=1e-8, atol=1e-8)


def test_shares_are_part_of_a_flow_and_of_its_digest(tmp_path):
    flow = some_flow()
    incomplete = {name: x for name, x in flow.state_dict().items() if name != "anchor.shares"}
    save_weights(tmp_path, flow.config, incomplete)
    with pytest.raises(ValueError, match=r"holds nothing as anchor\.shares"):
        gf.GeoFlow.from_pretrained(tmp_path)
    assert flow_digest(some_flow()) == flow_digest(flow)
    assert flow_digest(with_shares(some_flow(), 0.5, 1.0)) != flow_digest(flow)


def test_weights_of_a_choice_between_two_are_those_of_a_logistic_regression():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 2, 3))
    features[:, 0] += (0.5, 0.0, -0.2)
    difference = features[:, 0] - features[:, 1]
    sides = np.concatenate((difference, -difference)), np.repeat((1, 0), 200)
    # Each query counts twice in the regression, which the prior makes up for.
    known = LogisticRegression(fit_intercept=False, C=blending.PRIOR_SD**2 / 2, tol=1e-10).fit(*sides)
    first = np.tile((1.0, 0.0), (200, 1))
    np.testing.assert_allclose(fit_choice(features, first, blending.PRIOR_SD), known.coef_[0], rtol=1e-3, atol=1e-4)


def test_losses_are_held_out_and_those_of_a_useless_feature_are_near_guessing():
    rng = np.random.default_rng(1)
    useless, fold = rng.normal(size=(400, 8, 1)), np.arange(400) % 5
    useful = useless + 3.0 * (np.arange(8) == 0)[:, None]
    guessing = float(np.log(8))
    assert guessing - 0.01 < blending.crossed_losses(useless, fold).mean() < guessing + 0.02
    assert blending.crossed_losses(useful, fold).mean() < 0.5 * guessing
    np.testing.assert_allclose(blending.crossed_losses(useless[..., :0], fold), guessing)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_queries_choose_among_their_own_item_and_those_of_other_images(direction):
    rows = sample_uniform(40, 6, generator=torch.Generator().manual_seed(3))
    captions = sample_uniform(120, 6, generator=torch.Generator().manual_seed(4))
    val = gf.EmbeddingPairs.from_arrays(rows, captions, np.arange(120) // 3)
    choice = blending.Choice.of(aligned_pairs(50), val, Direction.of(direction), seed=0)
    queries, own = (rows, captions) if direction == "i2t" else (captions, rows)
    asked = torch.cdist(choice.queries, queries).argmin(1)
    listed = torch.cdist(choice.items, own).argmin(2)
    image_of = (lambda x: x // 3, lambda x: x) if direction == "t2i" else (lambda x: x, lambda x: x // 3)
    right = image_of[0](asked).unsqueeze(1) == image_of[1](listed)
    assert choice.items.shape == (120, blending.CANDIDATES, 6)
    assert bool(right[:, 0].all())
    assert not bool(right[:, 1:].any())
    assert all(len(set(row)) == len(row) for row in listed.tolist())


def test_a_network_that_does_harm_gets_no_share_and_the_first_gains_come_back():
    flow, first = some_flow(), [torch.zeros(4, 6) for _ in range(2)]
    with torch.no_grad():
        for gain in (*first, *flow.anchor.gains):
            gain.zero_()
            gain[0] = 2.0
        for gain in first:
            gain[0] = 1.9
        for _, linear in flow.decoders:
            linear.weight.normal_(0, 3.0)
    outcome = blending.blend(flow, first, aligned_pairs(50), aligned_pairs(150, seed=1), seed=0)
    assert [outcome[name]["share"] for name in ("t2i", "i2t")] == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(flow.anchor.gains, first))
    for entry in outcome.values():
        assert entry["nll"]["0"] < min(entry["nll"]["0.5"], entry["nll"]["1"])


def test_where_the_network_makes_no_difference_a_half_is_kept():
    flow = some_flow()
    with torch.no_grad():
        for _, linear in flow.decoders:
            linear.weight.zero_()
            linear.bias.zero_()
    gains = [gain.detach().clone() for gain in flow.anchor.gains]
    outcome = blending.blend(flow, gains, aligned_pairs(50), aligned_pairs(60, seed=1), seed=0)
    assert {entry["share"] for entry in outcome.values()} == {blending.HALF}


def test_a_finished_run_reports_the_shares_and_keeps_them(tmp_path):
    torch.manual_seed(0)
    flow, pairs = gf.GeoFlow(SHAPE), aligned_pairs(200)
    report = gf.train(flow, pairs, CONFIG, out=tmp_path)
    shares = {name: entry["share"] for name, entry in report.blend.items()}
    # A search by texts asks for p(text | image), whose stream is the text, and the other way round.
    assert flow.anchor.shares.tolist() == [shares["i2t"], shares["t2i"]]
    loaded = gf.GeoFlow.from_pretrained(tmp_path)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in flow.state_dict().items())
    again = gf.train(gf.GeoFlow(SHAPE), pairs, CONFIG, out=tmp_path)
    assert again.blend == report.blend
    with pytest.raises(ValueError, match=r"another configuration \(blend True -> False\)"):
        gf.train(gf.GeoFlow(SHAPE), pairs, dataclasses.replace(CONFIG, blend=False), out=tmp_path)


def test_widths_may_differ_and_few_held_out_pairs_choose_nothing():
    pairs = aligned_pairs(200, text_dim=5)
    flow = gf.GeoFlow(dataclasses.replace(SHAPE, text_dim=5))
    report = gf.train(flow, pairs, CONFIG)
    assert all("share" in entry for entry in report.blend.values())
    few = gf.GeoFlow(SHAPE)
    report = gf.train(few, aligned_pairs(60), CONFIG)
    assert report.blend == {"i2t": {}, "t2i": {}}
    assert torch.equal(few.anchor.shares, torch.ones(2))


def test_flows_without_an_anchor_have_nothing_to_weigh():
    report = gf.train(gf.GeoFlow(dataclasses.replace(SHAPE, anchored=False)), aligned_pairs(60), CONFIG)
    assert report.blend is None
    with pytest.raises(TypeError, match="blend must be True or False"):
        dataclasses.replace(CONFIG, blend=1)
    assert not gf.TrainConfig.paper().blend
    assert preset_settings("auto", aligned_pairs(60))[1].blend


def test_a_half_is_kept_unless_none_or_all_is_clearly_better():
    rows = np.arange(100)
    choice = blending.Choice(Direction.T2I, torch.zeros(100, 2), torch.zeros(100, 3, 2), np.zeros((100, 3, 0)), rows)
    noise = np.where(rows % 2, 1.0, -1.0)

    def kept(none: float, half: float, whole: float, spread: float = 0.0) -> float:
        losses = {0.0: np.full(100, none), 0.5: np.full(100, half), 1.0: whole + spread * noise}
        return blending.preferred_share(choice, losses)

    assert kept(1.0, 0.9, 0.95) == 0.5
    assert kept(1.0, 0.9, 0.85) == 1.0
    assert kept(1.0, 0.9, 0.85, spread=1.0) == 0.5  # the standard error is 0.1
    assert kept(0.8, 0.9, 0.85) == kept(0.8, 0.9, 0.95, spread=1.0) == 0.0


def test_queries_of_one_image_count_as_one_in_the_standard_error():
    values = np.random.default_rng(0).normal(size=50)
    alone = blending.Choice(
        Direction.T2I, torch.zeros(50, 2), torch.zeros(50, 3, 2), np.zeros((50, 3, 0)), np.arange(50)
    )
    four = dataclasses.replace(alone, image=np.repeat(np.arange(50), 4))
    assert alone.stderr(values) == pytest.approx(values.std() / np.sqrt(50))
    assert four.stderr(np.repeat(values, 4)) == pytest.approx(alone.stderr(values))


def test_the_scale_of_features_is_that_of_one_entry():
    """Features that stand for themselves many times over are as large as before: the prior sees the same weights."""
    features = np.random.default_rng(0).normal(size=(40, 5, 2))
    fold = np.arange(40) % 4
    scaled = []

    def kept(x, *_):
        scaled.append(np.sqrt(np.square(x).mean((0, 1))))
        return np.zeros(x.shape[2])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blending, "fit_choice", kept)
        losses = blending.crossed_losses(features, fold)
    np.testing.assert_allclose(losses, np.log(5))
    np.testing.assert_allclose(np.array(scaled), 1.0, atol=0.3)
