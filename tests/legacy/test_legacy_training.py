"""A training run that the previous release interrupted at step 20 is continued to the weights which that release itself
reached at step 40."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.runtime.tensors import load_tensors

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())["training"]

SHAPE = gf.GeoFlowConfig(6, 6, hidden=8, depth=1, heads=2, layer_scale=0.3, centre=True)
CONFIG = gf.TrainConfig(
    steps=40,
    batch_size=32,
    lr=3e-4,
    warmup_steps=5,
    val_every=10,
    checkpoint_every=10,
    log_every=10,
    ema_decay=0.9,
    val_fraction=0.2,
)


def test_an_interrupted_run_of_the_previous_release_is_continued(tmp_path):
    shutil.copytree(FILES / "run", tmp_path / "run")
    # The run was given these float32 arrays; the folder `pairs` holds them in float16 and would count as other pairs.
    pairs = gf.EmbeddingPairs.from_arrays(*(np.load(FILES / f"run_{name}.npy") for name in ("image", "text")))
    checkpoint = tmp_path / "run" / "last.safetensors"
    old_lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    old_tensors, old_info = load_tensors(checkpoint, kind="training state")
    assert old_info["step"] == 20

    flow = gf.GeoFlow(SHAPE)
    report = gf.train(flow, pairs, CONFIG, out=tmp_path / "run")

    assert report.finished
    assert (report.steps, report.best_step) == (EXPECTED["steps"], EXPECTED["best_step"])
    assert report.best_val_loss == pytest.approx(EXPECTED["best_val_loss"], rel=1e-6)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert lines.startswith(old_lines)
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [10, 20, 30, 40]

    tensors, info = load_tensors(checkpoint, kind="training state")
    assert info.keys() == old_info.keys()
    assert {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in old_tensors.items()}

    best = gf.GeoFlow.from_pretrained(FILES / "model")
    torch.testing.assert_close(flow.state_dict(), best.state_dict(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        gf.GeoFlow.from_pretrained(tmp_path / "run").state_dict(), flow.state_dict(), rtol=0, atol=0
    )
