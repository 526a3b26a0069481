"""The first commands of the README, without a flag that is not there: do the probabilities mean what they say?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.runtime.parquet import read_columns
from tests.jobs.processes import run_geoflow

WORLDS = {
    "concept": (gf.worlds.ConceptWorld, 6000),
    "clip": (gf.worlds.ClipWorld, 4000),
}
ASKED = 2000


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_probabilities_of_the_first_commands_are_calibrated(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, count = WORLDS[name]
    image, text, _ = make().sample(count + ASKED, generator=torch.Generator().manual_seed(0))
    for part, rows in (("", slice(0, count)), ("new_", slice(count, None))):
        np.save(f"{part}images.npy", image[rows].numpy())
        np.save(f"{part}texts.npy", text[rows].numpy())
    assert run_geoflow(monkeypatch, "train", images="images.npy", texts="texts.npy", out="runs/first") == 0
    for direction in ("t2i", "i2t"):
        files = {"images": "new_images.npy", "texts": "new_texts.npy", "out": f"{direction}.parquet"}
        assert run_geoflow(monkeypatch, "rerank", model="runs/first", direction=direction, **files) == 0
        ranked = read_columns(tmp_path / f"{direction}.parquet", ["query", "answer", "p_answer"])
        right = ranked["answer"] == ranked["query"]
        error = gf.evaluation.reliability(ranked["p_answer"], right).ece
        print(f"{name} {direction}: ECE {error:.4f}, right {right.mean():.3f}, stated {ranked['p_answer'].mean():.3f}")
        assert error <= 0.05
