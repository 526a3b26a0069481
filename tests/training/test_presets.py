"""Early stopping that never makes a flow worse, and the preset that chooses for itself, from 50 pairs on."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
from pathlib import Path

import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods.results import SHARED, shared_pairs
from geoflow_fast.cli.app import main
from geoflow_fast.flow.config import FEW_PAIRS, MANY_CORES
from geoflow_fast.noise import sample_uniform
from geoflow_fast.training.flow_matching import FlowMatching, preset_settings, train_from_preset
from geoflow_fast.training.loop import Run

SHAPE = gf.GeoFlowConfig(6, 6, hidden=16, depth=1, heads=2, layer_scale=0.1)
CONFIG = gf.TrainConfig(steps=24, batch_size=16, lr=3e-3, warmup_steps=4, val_every=8, checkpoint_every=5, log_every=8)


def unrelated_pairs(n: int, width: int = 6, seed: int = 0) -> gf.EmbeddingPairs:
    """Pairs from which nothing about other pairs can be learned."""
    generator = torch.Generator().manual_seed(seed)
    return gf.EmbeddingPairs.from_arrays(*(sample_uniform(n, width, generator=generator) for _ in range(2)))


def related_pairs(n: int, width: int = 24) -> gf.EmbeddingPairs:
    generator = torch.Generator().manual_seed(0)
    image, other = (sample_uniform(n, width, generator=generator) for _ in range(2))
    return gf.EmbeddingPairs.from_arrays(image, torch.nn.functional.normalize(image + 0.5 * other))


def new_flow(shape: gf.GeoFlowConfig = SHAPE) -> gf.GeoFlow:
    torch.manual_seed(1)
    return gf.GeoFlow(shape)


def validation_loss(flow: gf.GeoFlow, pairs: gf.EmbeddingPairs, config: gf.TrainConfig) -> float:
    """The loss of a flow as it is, on the pairs that a run holds out."""
    train, val = pairs.split(config.val_fraction, config.seed)
    return Run(FlowMatching(flow, train, val, config)).validate()["val_loss"]


def test_validations_are_frequent_at_the_start_and_regular_later():
    config = gf.TrainConfig(steps=1700, val_every=500)
    due = [step for step in range(config.steps + 1) if config.validates(step)]
    assert due == [0, 31, 62, 125, 250, 500, 1000, 1500, 1700]


def test_weights_that_training_made_worse_are_not_kept():
    """A learning rate far too high: the first regular validation is already worse than no training at all."""
    config = dataclasses.replace(CONFIG, lr=0.5, warmup_steps=1, val_fraction=0.2)
    pairs, flow = unrelated_pairs(100), new_flow()
    before = {name: x.clone() for name, x in flow.state_dict().items()}
    untrained = validation_loss(new_flow(), pairs, config)
    report = gf.train(flow, pairs, config)
    assert (report.best_step, report.best_val_loss) == (0, untrained)
    assert all(torch.equal(x, before[name]) for name, x in flow.state_dict().items())


def test_a_run_on_pairs_that_teach_nothing_stops_by_itself(caplog):
    pairs = unrelated_pairs(300)
    config = dataclasses.replace(gf.TrainConfig.auto(300), lr=1e-2, steps=2000)
    with caplog.at_level(logging.WARNING):
        report = gf.train(new_flow(), pairs, config)
    assert report.stopped_early
    assert report.steps < 500
    assert report.best_val_loss <= validation_loss(new_flow(), pairs, config)
    lines = [record.getMessage() for record in caplog.records if "validation loss rose" in record.getMessage()]
    assert lines
    assert f"the weights of step {report.best_step} are kept" in lines[-1]


def test_early_validations_do_not_use_up_the_patience():
    """A run that becomes worse in its warm-up goes on for `patience` regular validations."""
    config = dataclasses.replace(CONFIG, lr=0.5, warmup_steps=1, steps=200, patience=2)
    report = gf.train(new_flow(), unrelated_pairs(1000), config)
    assert (report.steps, report.stopped_early) == (2 * config.val_every, True)


def test_a_run_may_be_continued_with_more_patience(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        _fail_at(patch, 12)
        with pytest.raises(RuntimeError, match="power cut"):
            gf.train(new_flow(), unrelated_pairs(1000), CONFIG, out=tmp_path)
    report = gf.train(new_flow(), unrelated_pairs(1000), dataclasses.replace(CONFIG, patience=99), out=tmp_path)
    assert report.finished


def test_an_anchored_run_that_fails_is_continued_to_the_same_bits(tmp_path, monkeypatch):
    pairs = related_pairs(200)
    shape, config = preset_settings("auto", pairs, {"steps": 12, "checkpoint_every": 5, "val_every": 4})
    assert shape.anchored
    whole, parts = new_flow(shape), new_flow(shape)
    gf.train(whole, pairs, config, out=tmp_path / "whole")
    for step in (3, 8):  # before the first checkpoint, and after it
        with monkeypatch.context() as patch:
            _fail_at(patch, step)
            with pytest.raises(RuntimeError, match="power cut"):
                gf.train(new_flow(shape), pairs, config, out=tmp_path / "parts")
    assert gf.train(parts, pairs, config, out=tmp_path / "parts").finished
    for name in ("last.safetensors", "model.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert steps[0] == 0


def _fail_at(patch: pytest.MonkeyPatch, step: int) -> None:
    optimise = Run.optimise

    def failing(self, batch):
        if self.step == step:
            raise RuntimeError("power cut")
        return optimise(self, batch)

    patch.setattr(Run, "optimise", failing)


@pytest.mark.parametrize("pairs", [4, 50, 129, 1023, 10_455, FEW_PAIRS - 1, FEW_PAIRS, 10**6])
@pytest.mark.parametrize("cores", [1, 2, MANY_CORES])
def test_the_automatic_settings_fit_the_pairs(pairs, cores):
    config, shape = gf.TrainConfig.auto(pairs, cores), gf.GeoFlowConfig.auto(512, 256, pairs, cores)
    left = pairs - math.ceil(config.val_fraction * pairs)
    assert config.batch_size <= left
    assert config.patience * config.val_every < config.steps  # it can stop early
    assert shape.anchored
    assert shape.centre
    held_out = math.ceil(config.val_fraction * pairs)
    assert config.val_batches * min(config.batch_size, held_out) >= 500
    if pairs >= FEW_PAIRS:
        assert shape.hidden == (256 if cores >= MANY_CORES else 128)


def test_the_automatic_preset_learns_from_fifty_pairs():
    pairs = related_pairs(50)
    shape, config = preset_settings("auto", pairs, {"steps": 60})
    plain = validation_loss(new_flow(dataclasses.replace(shape, anchored=False, centre=False)), pairs, config)
    report = gf.train(new_flow(shape), pairs, config)
    assert report.finished
    assert report.best_val_loss < 0.9 * plain


def test_the_command_chooses_for_itself_and_says_what(tmp_path, capsys, monkeypatch):
    related_pairs(50).save(tmp_path / "pairs")
    arguments = [
        "train",
        "--pairs",
        str(tmp_path / "pairs"),
        "--out",
        str(tmp_path / "run"),
        "--no-head",
        "--no-calibrate",
    ]
    monkeypatch.setattr(sys, "argv", ["geoflow", *arguments, "--steps", "8", "--patience", "3"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    first, *_ = capsys.readouterr().out.splitlines()
    flow = gf.GeoFlow.from_pretrained(tmp_path / "run")
    assert flow.config == gf.GeoFlowConfig.auto(24, 24, 50)
    for words in ("50 pairs of widths 24 and 24", f"{flow.num_parameters() / 1e6:.2f} million", "preset auto"):
        assert words in first
    assert "at most 8 steps" in first


@pytest.mark.slow
@pytest.mark.parametrize("source", ["clip art", "Flickr8k"])
def test_default_training_on_real_pairs_never_keeps_worse_weights_and_ends(source, tmp_path):
    if source == "Flickr8k" and not (SHARED / "flickr8k").is_dir():
        pytest.skip("the embeddings of Flickr8k are not beside the repository")
    clip_art = Path(__file__).parents[2] / "examples/openclipart/data/flow"
    pairs = shared_pairs("flickr8k/train") if source == "Flickr8k" else gf.EmbeddingPairs.open(clip_art)
    report = train_from_preset(pairs, tmp_path, "auto", None, {}, centre=None, pca_dim=None, device="cpu")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validated = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert report.finished
    assert report.best_val_loss == min(validated.values())
    assert report.best_val_loss < validated[0]  # it learns something
    assert max(validated) <= 1000  # and does not go on for hours
    assert min(step for step in validated if step) <= 10  # validation begins early
