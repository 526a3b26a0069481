"""`geoflow train` holds pairs out, trains nothing on them, and calibrates at its end; the same command continues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.head import fitting
from geoflow_fast.jobs import calibration
from geoflow_fast.jobs.calibration import StoredCalibration
from geoflow_fast.noise import sample_uniform
from geoflow_fast.training import loop
from tests.jobs.processes import run_geoflow

IMAGES = 190


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """The working folder with 190 images of two captions each; calibrations are cheap."""
    monkeypatch.chdir(tmp_path)
    make = torch.Generator().manual_seed(0)
    image = sample_uniform(IMAGES, 5, generator=make)
    index = np.repeat(np.arange(IMAGES), 2)
    text = gf.geometry.normalize(image[index] + 0.2 * torch.randn(2 * IMAGES, 5, generator=make))
    gf.EmbeddingPairs.from_arrays(image, text, index).save("pairs", dtype=np.float32)
    monkeypatch.setattr(calibration, "BANDWIDTH_QUERIES", (6, 6))
    monkeypatch.setattr(calibration, "GUIDANCES", (0.0,))
    monkeypatch.setattr(calibration, "LADDER_QUERIES", (65, 65))
    return tmp_path


def train(monkeypatch, *more: object, **options: object) -> int:
    usual = {"pairs": "pairs", "out": "run", "steps": 2, "batch_size": 16, "device": "cpu"}
    return run_geoflow(monkeypatch, "train", *more, **{**usual, **options})


@pytest.mark.usefixtures("desk")
def test_nothing_is_trained_on_held_out_pairs(monkeypatch, capsys):
    """Neither the flow nor the head sees them, in training or in validation."""
    monkeypatch.setattr(fitting, "FEW", fitting.dataclasses.replace(fitting.FEW, steps=2))
    seen = []
    complete = loop.complete

    def note(run, *rest, **more):
        seen.extend((run.objective.pairs, run.objective.val))
        return complete(run, *rest, **more)

    monkeypatch.setattr("geoflow_fast.training.flow_matching.complete", note)
    monkeypatch.setattr("geoflow_fast.head.fitting.complete", note)
    monkeypatch.setattr(calibration, "calibrate_model", lambda *_, **__: None)
    assert train(monkeypatch, "--points=1", preset="tiny") == 0
    out = capsys.readouterr().out
    assert "63 held-out images with 126 texts of 190 for calibration, which nothing is trained on" in out
    stored = StoredCalibration.read(Path("run"))
    assert stored is not None
    kept = stored.pairs()
    held_out = kept[np.arange(len(kept))][0]
    assert len(seen) == 4
    for part in seen:
        assert float((part[np.arange(len(part))][0] @ held_out.T).max()) < 1 - 1e-6


@pytest.mark.usefixtures("desk")
def test_what_is_held_out_is_what_calibrates(monkeypatch):
    """So many images, those that `EmbeddingPairs.split` draws with the same seed, with all their texts."""
    bandwidth, ladder, seen = calibration.fitted_bandwidth, calibration.settle_ladder, []
    monkeypatch.setattr(
        calibration, "fitted_bandwidth", lambda flow, pairs, *more: seen.append(pairs) or bandwidth(flow, pairs, *more)
    )
    monkeypatch.setattr(
        calibration,
        "settle_ladder",
        lambda stored, reranker, pairs, **more: seen.append(pairs) or ladder(stored, reranker, pairs, **more),
    )
    assert train(monkeypatch, "--no-head", "--held-out=64", preset="tiny", seed=7) == 0
    _, expected = gf.EmbeddingPairs.open("pairs").split(64, seed=7)
    assert (len(np.unique(expected.group)), len(expected), len(seen)) == (64, 128, 4)
    for pairs in seen:
        for stored, drawn in zip(pairs[np.arange(128)], expected[np.arange(128)]):
            torch.testing.assert_close(stored, drawn, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("desk")
def test_a_head_alone_has_a_ladder_and_no_bandwidth(monkeypatch, capsys):
    assert train(monkeypatch, "--head", "--points=1") == 0
    assert "calibrated t2i: " in capsys.readouterr().out
    stored = StoredCalibration.read(Path("run"))
    assert stored is not None
    assert stored.bandwidth == {}
    assert set(stored.ladder) == {"t2i", "i2t"}


@pytest.mark.usefixtures("desk")
def test_ctrl_c_while_calibrating_is_continued(monkeypatch, capsys):
    fit, calls = calibration.fit_bandwidth, []

    def interrupted(*arguments, **settings):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(*arguments, **settings)

    monkeypatch.setattr(calibration, "fit_bandwidth", interrupted)
    flags = ["--no-head", "--preset=tiny"]
    assert train(monkeypatch, *flags) == 130
    assert capsys.readouterr().err == "stopped while calibrating; run the same command to continue\n"
    weights = Path("run/model.safetensors").read_bytes()
    assert train(monkeypatch, *flags) == 0
    out = capsys.readouterr().out
    assert "calibrated t2i: kappa" in out
    assert "in a gallery of 127 training items" in out
    assert len(calls) == 3  # the direction that was done is not done again
    assert Path("run/model.safetensors").read_bytes() == weights
    assert train(monkeypatch, *flags) == 0
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--held-out=1.5"], "--held-out must be a share between 0 and 1"),
        (["--held-out=0"], "--held-out must be a share between 0 and 1"),
        (["--held-out=190"], "--held-out must be at most 189, got 190"),
        (["--held-out=0.3", "--no-calibrate"], "--no-calibrate leaves out"),
        (["--held-out=nowhere"], "nowhere"),
        (["--held-out=pairs"], "190 of the 190 held-out images are training images"),
        (["--held-out=pairs", "--ids=ids.txt"], "--ids are written beside pairs that are held out"),
        (["--no-calibrate", "--ids=ids.txt"], "--no-calibrate holds none out"),
        (["--batch-size=0"], "--batch-size"),
    ],
)
def test_bad_flags_are_named_before_anything_is_written(desk, monkeypatch, capsys, flags, words):
    assert train(monkeypatch, "--no-head", *flags) == 2
    assert words in capsys.readouterr().err
    assert not (desk / "run").exists()


@pytest.mark.usefixtures("desk")
def test_shares_and_folders_are_held_out_and_none_with_no_calibrate(monkeypatch):
    monkeypatch.setattr(calibration, "calibrate_model", lambda *_, **__: None)
    flags = ["--no-head", "--preset=tiny"]
    assert train(monkeypatch, *flags, "--held-out=0.35", out="share") == 0
    make = torch.Generator().manual_seed(1)
    other = sample_uniform(70, 5, generator=make)
    gf.EmbeddingPairs.from_arrays(other, other).save("others")
    assert train(monkeypatch, *flags, "--held-out=others", out="folder") == 0
    assert train(monkeypatch, *flags, "--no-calibrate", out="none") == 0
    held_out = [StoredCalibration.read(Path(name)) for name in ("share", "folder", "none")]
    assert [None if x is None else x.held_out.images for x in held_out] == [66, 70, None]
    # A run that began without held-out pairs goes on without them, whatever the default is.
    assert train(monkeypatch, *flags, out="none") == 0
    assert StoredCalibration.read(Path("none")) is None


@pytest.mark.usefixtures("desk")
def test_overwrite_forgets_the_earlier_calibration(monkeypatch):
    """The next run trains on what the earlier one held out."""
    calibration.hold_out(gf.EmbeddingPairs.open("pairs"), Path("run"), None, 0, announce=lambda _: None)
    for name in ("rerank_t2i.json", "rerank_i2t.0123456789abcdef.bank.safetensors"):
        Path("run", name).touch()
    flags = ["--no-head", "--preset=tiny", "--no-calibrate"]
    assert train(monkeypatch, *flags) == 0
    assert StoredCalibration.read(Path("run")) is not None
    assert train(monkeypatch, *flags, "--overwrite") == 0
    assert not Path("run/calibration").exists()
    assert not list(Path("run").glob("rerank_*"))
