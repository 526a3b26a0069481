"""The linear part of a flow: what it predicts, how it is fitted, and that densities and samples know about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods.euclidean import EUCLIDEAN
from geoflow_fast.flow.anchor import POWERS, RIDGES, Anchor, shrunken_map
from geoflow_fast.manifolds import SPHERE
from geoflow_fast.noise import sample_uniform
from geoflow_fast.training.flow_matching import FlowMatching
from geoflow_fast.training.loop import Run
from tests.samples import Opaque, randomised

SHAPE = gf.GeoFlowConfig(image_dim=7, text_dim=5, hidden=16, depth=2, heads=2, layer_scale=0.1, anchored=True)


def some_flow(shape: gf.GeoFlowConfig = SHAPE) -> gf.GeoFlow:
    torch.manual_seed(0)
    flow = randomised(gf.GeoFlow(shape))
    with torch.no_grad():
        flow.anchor.image_map.normal_(0, 0.5)
        flow.anchor.text_map.normal_(0, 0.5)
    return flow


def aligned_pairs(n: int, width: int = 12, noise: float = 0.5, seed: int = 0) -> gf.EmbeddingPairs:
    """Pairs whose text is the image with something added."""
    generator = torch.Generator().manual_seed(seed)
    image, other = (sample_uniform(n, width, generator=generator) for _ in range(2))
    return gf.EmbeddingPairs.from_arrays(image, torch.nn.functional.normalize(image + noise * other))


@pytest.mark.parametrize("direction", ["i2t", "t2i", "joint"])
def test_the_anchor_is_added_where_a_stream_is_given(direction):
    flow = some_flow()
    bare = gf.GeoFlow(dataclasses.replace(SHAPE, anchored=False)).eval()
    bare.load_state_dict({name: x for name, x in flow.state_dict().items() if not name.startswith("anchor.")})
    image, text = sample_uniform(3, 7), sample_uniform(3, 5)
    difference = [
        a - b for a, b in zip(flow.velocity(image, text, 0.3, direction), bare.velocity(image, text, 0.3, direction))
    ]
    weights = [sum(gain[k] * 0.3**k for k in range(POWERS)) for gain in flow.anchor.gains]
    expected = [torch.zeros_like(image), torch.zeros_like(text)]
    if direction == "i2t":
        pull = weights[1] * (image @ flow.anchor.text_map)
        expected[1] = pull - (pull * text).sum(1, keepdim=True) * text
    if direction == "t2i":
        pull = weights[0] * (text @ flow.anchor.image_map)
        expected[0] = pull - (pull * image).sum(1, keepdim=True) * image
    for fitted, wanted in zip(difference, expected):
        torch.testing.assert_close(fitted, wanted, rtol=1e-4, atol=1e-5)


def test_rows_of_mixed_directions_and_times_agree_with_single_ones():
    flow = some_flow()
    image, text, t = sample_uniform(9, 7), sample_uniform(9, 5), torch.rand(9)
    codes = torch.tensor([0, 1, 2, 2, 1, 0, 1, 2, 0], dtype=torch.int8)
    together = flow.velocity(image, text, t, codes)
    for row, code in enumerate(codes.tolist()):
        direction = ("joint", "i2t", "t2i")[code]
        alone = flow.velocity(image[[row]], text[[row]], float(t[row]), direction)
        for a, b in zip(together, alone):
            torch.testing.assert_close(a[[row]], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["i2t", "t2i", "joint"])
def test_densities_in_forward_mode_agree_with_those_by_autograd(direction):
    flow = some_flow().double()
    image, text = sample_uniform(6, 7, dtype=torch.float64), sample_uniform(6, 5, dtype=torch.float64)
    fitted, wanted = (
        gf.log_density(field, image, text, direction, n_steps=4, divergence="exact") for field in (flow, Opaque(flow))
    )
    torch.testing.assert_close(fitted, wanted, rtol=1e-8, atol=1e-8)


def test_samples_follow_the_anchor():
    """A flow that is its anchor alone takes noise to where the given image points."""
    flow = gf.GeoFlow(dataclasses.replace(SHAPE, image_dim=5)).eval()
    with torch.no_grad():
        flow.anchor.text_map.copy_(torch.eye(5))
        flow.anchor.gains[1][0] = 4.0
    image = sample_uniform(4, 5)
    _, text = gf.sample(flow, image=image, n_samples=8, n_steps=30, guidance=0.0)
    assert float(torch.einsum("qd,qmd->qm", image, text).median()) > 0.95


def test_the_map_is_a_ridge_regression_towards_a_multiple_of_the_start():
    generator = torch.Generator().manual_seed(0)
    given, generated = (torch.randn(40, d, generator=generator, dtype=torch.float64) for d in (4, 3))
    towards = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    one_fold = torch.ones(40, dtype=torch.bool)  # nothing to choose the strength by
    fitted, predictions = shrunken_map(given, generated, towards, one_fold)
    scale = float(((given @ towards) * generated).sum() / (given @ towards).square().sum())
    gram = given.T @ given / 40
    strength = RIDGES[-1] * float(gram.trace()) / 4
    rest = given.T @ (generated - scale * given @ towards) / 40
    wanted = scale * towards + torch.linalg.solve(gram + strength * torch.eye(4, dtype=torch.float64), rest)
    torch.testing.assert_close(fitted, wanted)
    torch.testing.assert_close(predictions, given @ wanted)


def test_the_strength_follows_the_number_of_pairs():
    """Many pairs find a map that is far from the start; from few, the start is kept."""
    generator = torch.Generator().manual_seed(1)
    truth = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))[0]
    for pairs, near in ((5000, True), (12, False)):
        given = sample_uniform(pairs, 16, generator=generator, dtype=torch.float64)
        noise = 0.2 * torch.randn(pairs, 16, generator=generator, dtype=torch.float64)
        start, fold = torch.eye(16, dtype=torch.float64), torch.arange(pairs) % 2 == 0
        fitted, _ = shrunken_map(given, given @ truth + noise, start, fold)
        assert (float((fitted - truth).norm() / truth.norm()) < 0.1) == near


def test_a_half_is_predicted_from_the_other_one_alone():
    generator = torch.Generator().manual_seed(2)
    given, generated = (torch.randn(30, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    start, fold = torch.eye(5, dtype=torch.float64), torch.arange(30) < 15
    _, predictions = shrunken_map(given, generated, start, fold)
    assert float((predictions - generated).square().mean()) > 0.9 * float(generated.square().mean())  # nothing to learn


@pytest.mark.parametrize("manifold", [SPHERE, EUCLIDEAN])
def test_weights_are_those_of_least_squares(manifold):
    """A tenth more or less of them fits the velocities worse."""
    anchor, pairs = Anchor((6, 6)), aligned_pairs(2000, 6)
    streams = pairs[np.arange(2000)]
    anchor.shares.fill_(0.3)
    anchor.fit(streams, torch.arange(2000) % 2 == 0, torch.eye(6), manifold, seed=0)
    assert anchor.shares.tolist() == [1.0, 1.0]  # the whole network counts, until held-out queries say otherwise
    assert all(bool((gain == gain[:, :1]).all()) for gain in anchor.gains)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(2000, (20_000,), generator=generator)
    noise = manifold.from_normal(torch.randn(20_000, 6, generator=generator))
    t, joint = torch.rand(20_000, generator=generator), torch.zeros(20_000, dtype=torch.int8)
    image, text = streams[0][rows], streams[1][rows]
    points, _, velocity, _ = manifold.interpolant((noise, noise), (text, text), t, joint, joint.bool())

    def error(factor: float) -> float:
        pull = anchor.predict(image, 1) * anchor.weight(t.unsqueeze(1), 1) * factor
        return float((manifold.project(points, pull) - velocity).square().sum(1).mean().detach())

    assert error(1.0) < min(error(0.0), error(0.9), error(1.1))


def test_an_anchored_flow_is_fitted_before_the_first_step_and_saved(tmp_path):
    pairs = aligned_pairs(60)
    shape = gf.GeoFlowConfig(12, 12, hidden=16, depth=1, heads=2, layer_scale=0.1, anchored=True, centre=True)
    config = gf.TrainConfig(steps=4, batch_size=16, val_every=4, checkpoint_every=2)
    losses = {}
    for anchored in (False, True):
        flow = gf.GeoFlow(dataclasses.replace(shape, anchored=anchored))
        run = Run(FlowMatching(flow, pairs, aligned_pairs(40, seed=1), config))
        run.objective.prepare()
        losses[anchored] = run.validate()["val_loss"]
    assert losses[True] < 0.9 * losses[False]
    flow = gf.GeoFlow(shape)
    gf.train(flow, pairs, config, out=tmp_path)
    loaded = gf.GeoFlow.from_pretrained(tmp_path)
    assert loaded.config.anchored
    assert all(torch.equal(a, b) for a, b in zip(flow.state_dict().values(), loaded.state_dict().values()))


def test_a_stopped_anchored_run_is_continued_exactly_and_only_with_its_anchor(tmp_path, monkeypatch):
    pairs = aligned_pairs(60)
    shape = gf.GeoFlowConfig(12, 12, hidden=16, depth=1, heads=2, layer_scale=0.1, anchored=True)
    config = gf.TrainConfig(steps=6, batch_size=16, val_every=3, checkpoint_every=2)

    def trained(out: Path, shape: gf.GeoFlowConfig = shape) -> gf.GeoFlow:
        torch.manual_seed(0)
        flow = gf.GeoFlow(shape)
        gf.train(flow, pairs, config, out=out)
        return flow

    whole = trained(tmp_path / "whole").state_dict()
    optimise = Run.optimise

    def killed(run, batch):
        if run.step == 4:
            raise RuntimeError("killed")
        return optimise(run, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "optimise", killed)
        with pytest.raises(RuntimeError, match="killed"):
            trained(tmp_path / "run")
    with pytest.raises(ValueError, match=r"another configuration \(anchored True -> False\)"):
        trained(tmp_path / "run", dataclasses.replace(shape, anchored=False))
    assert all(torch.equal(x, whole[name]) for name, x in trained(tmp_path / "run").state_dict().items())


def test_anchored_is_a_field_of_every_configuration():
    for config in (dataclasses.replace(SHAPE, anchored=False), SHAPE):
        values = config.to_json()
        assert gf.GeoFlowConfig.from_json(values) == config
        del values["anchored"]
        with pytest.raises(ValueError, match=r"differ from this release's: \['anchored'\]"):
            gf.GeoFlowConfig.from_json(values)
    with pytest.raises(TypeError, match="anchored must be True or False"):
        dataclasses.replace(SHAPE, anchored=1)


def test_halves_of_one_pair_predict_each_other_too():
    """Only where all pairs are in one half there is nothing to choose the strength by."""
    given, generated = (noise_rows(6, seed) for seed in (1, 2))
    towards = torch.eye(4, dtype=torch.float64)
    for fold in ([True] + [False] * 5, [False] * 5 + [True]):
        _, predicted = shrunken_map(given, generated, towards, torch.tensor(fold))
        whole, _ = shrunken_map(given, generated, towards, torch.ones(6, dtype=torch.bool))
        assert not torch.allclose(predicted, given @ whole)
    for fold in (torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)):
        weight, predicted = shrunken_map(given, generated, towards, fold)
        torch.testing.assert_close(predicted, given @ weight)


def noise_rows(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
