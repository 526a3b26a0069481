"""`geoflow density`: files of densities against the library, under kills, with bad input, and as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.jobs import density
from geoflow_fast.likelihood import reverse_ode
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.parquet import read_columns
from tests.jobs.processes import run_geoflow, start_child

PAIRS = 23
COLUMNS = ["pair", "joint", "text_given_image", "image_given_text", "image", "text", "pmi", "score"]


@pytest.fixture
def world(tmp_path) -> Path:
    """A folder with a saved flow (images 10 wide, texts 7) and pairs."""
    torch.manual_seed(1)
    flow = gf.GeoFlow(gf.GeoFlowConfig(10, 7, hidden=32, depth=2, layer_scale=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    flow.save_pretrained(tmp_path / "model")
    pairs = gf.EmbeddingPairs.from_arrays(sample_uniform(PAIRS, 10), sample_uniform(PAIRS, 7))
    pairs.save(tmp_path / "pairs", dtype=np.float32)
    return tmp_path


def geoflow_density(world: Path, monkeypatch, *more: str, **changes) -> int:
    monkeypatch.chdir(world)
    options = {"model": "model", "pairs": "pairs", "out": "densities.parquet", "steps": 2, **changes}
    return run_geoflow(monkeypatch, "density", *more, **options)


@pytest.mark.parametrize("more", [(), ("--fast",), ("--paper",)])
def test_file_holds_the_decomposition(world, monkeypatch, capsys, more):
    assert geoflow_density(world, monkeypatch, *more, block=7) == 0
    columns = read_columns(world / "densities.parquet")
    assert list(columns) == COLUMNS
    assert np.array_equal(columns["pair"], np.arange(PAIRS))
    preset = {"--fast": gf.FAST_DENSITY, "--paper": gf.PAPER_DENSITY}.get("".join(more), DensitySettings())
    flow, pairs = gf.GeoFlow.from_pretrained(world / "model"), gf.EmbeddingPairs.open(world / "pairs")
    image, text = pairs[np.arange(PAIRS)]
    settings = dataclasses.replace(preset, n_steps=2)
    estimates = reverse_ode.density_estimates(flow, image, text, DIRECTIONS, settings, 0)
    np.testing.assert_allclose(columns["joint"], estimates[0, 0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(columns["joint"], columns["image"] + columns["text"] + columns["pmi"], rtol=1e-12)
    np.testing.assert_allclose(columns["score"], -columns["image"] - columns["text"], rtol=1e-12)
    assert f"{np.median(columns['score']):.3f}" in capsys.readouterr().out


def test_blocks_do_not_change_a_pair(world, monkeypatch):
    for out, block in (("a.parquet", 5), ("b.parquet", 100)):
        assert geoflow_density(world, monkeypatch, out=out, block=block, probes=2) == 0
    a, b = (read_columns(world / name) for name in ("a.parquet", "b.parquet"))
    assert list(a) == [*COLUMNS, "stderr"]
    for name, column in a.items():
        np.testing.assert_allclose(column, b[name], rtol=1e-5, atol=1e-5)


def make(world: Path, out: str) -> None:
    settings = DensitySettings(n_steps=2)
    density.density_file(world / "model", world / "pairs", world / out, settings, device="cpu", block=2, progress=False)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_killed_job_is_continued(world):
    """The job is killed when some blocks exist. The next run keeps them and writes the file of an undisturbed run."""
    start_child(make, world, "whole.parquet").join()
    child = start_child(make, world, "out.parquet")
    folder, deadline = world / "out.parquet.blocks", time.monotonic() + 60
    while len(list(folder.glob("*.parquet"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert not (world / "out.parquet").exists()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
    assert len(kept) >= 3
    again = start_child(make, world, "out.parquet")
    again.join()
    assert again.exitcode == 0
    assert not folder.exists()
    whole, continued = (read_columns(world / name) for name in ("whole.parquet", "out.parquet"))
    for name, column in whole.items():
        assert np.array_equal(column, continued[name])


def test_another_configuration_is_another_job(world):
    """The weights of two flows do not differ, but their configurations do."""
    make(world, "out.parquet")
    flow = gf.GeoFlow.from_pretrained(world / "model")
    twin = gf.GeoFlow(dataclasses.replace(flow.config, dropout=0.1))
    twin.load_state_dict(flow.state_dict())
    twin.save_pretrained(world / "model")
    with pytest.raises(FileExistsError, match="not the result of this job"):
        make(world, "out.parquet")


def test_summary_as_json(world, monkeypatch, capsys):
    assert geoflow_density(world, monkeypatch, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["pairs"] == PAIRS
    assert set(summary["quantiles"]) == set(COLUMNS[1:])


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        (("--fast", "--paper"), {}, "exclude each other"),
        ((), {"solver": "magic"}, "solver must be one of"),
        ((), {"steps": 0}, "--steps must be"),
        ((), {"probes": 0}, "--probes must be"),
        ((), {"pairs": "nowhere"}, "nowhere is missing"),
        ((), {"model": "nowhere"}, "nowhere"),
        ((), {"out": "pairs"}, "is a folder"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_no_file(world, monkeypatch, capsys, more, changes, message):
    before = sorted(world.rglob("*"))
    assert geoflow_density(world, monkeypatch, *more, **changes) == 2
    assert message in capsys.readouterr().err
    assert sorted(world.rglob("*")) == before


def test_pairs_of_another_width_are_refused(world, monkeypatch, capsys):
    gf.EmbeddingPairs.from_arrays(sample_uniform(4, 9), sample_uniform(4, 7)).save(world / "narrow")
    assert geoflow_density(world, monkeypatch, pairs="narrow") == 2
    assert "holds widths 9 and 7" in capsys.readouterr().err
