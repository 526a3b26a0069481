"""The working folder of a user of the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """The working folder, with pairs as two files and as a folder, and an untrained flow."""
    image, text = (sample_uniform(64, 6, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    np.save(tmp_path / "images.npy", image.numpy())
    np.save(tmp_path / "texts.npy", text.numpy())
    gf.EmbeddingPairs.from_arrays(image, text).save(tmp_path / "pairs")
    torch.manual_seed(0)
    gf.GeoFlow(gf.GeoFlowConfig(6, 6, hidden=8, depth=1)).save_pretrained(tmp_path / "flow")
    monkeypatch.chdir(tmp_path)
    return tmp_path
