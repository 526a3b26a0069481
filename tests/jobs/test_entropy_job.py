"""`geoflow entropy`: files of scores against the scorer, under kills, with bad input, and as a user runs it."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import geoflow_fast as gf
from geoflow_fast import noise
from geoflow_fast.flow.model import flow_digest
from geoflow_fast.jobs import entropy
from geoflow_fast.jobs.queries import model_digest
from geoflow_fast.runtime.parquet import read_columns
from tests.jobs.processes import run_geoflow, start_child

QUERIES, ITEMS = 37, 90
SETTINGS = {"samples": 4, "steps": 2, "kappa": 15.0}


@pytest.fixture
def world(tmp_path, flow) -> Path:
    """A folder with a saved flow, queries and a gallery in shards of float16."""
    flow.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "queries.npy", noise.sample_uniform(QUERIES, 7).numpy())
    (tmp_path / "gallery").mkdir()
    for number, part in enumerate(np.array_split(noise.sample_uniform(ITEMS, 10).numpy(), 4)):
        np.save(tmp_path / "gallery" / f"img_emb_{number}.npy", part.astype(np.float16))
    return tmp_path


def geoflow_entropy(world: Path, monkeypatch, *more: str, model: str = "model", **changes) -> int:
    monkeypatch.chdir(world)
    options = {"model": model, "queries": "queries.npy", "gallery": "gallery", "out": "scores.parquet"}
    settings = SETTINGS if model == "model" else {}
    return run_geoflow(monkeypatch, "entropy", *more, **{**options, **settings, **changes})


def test_the_file_holds_the_results_of_the_scorer(world, monkeypatch, capsys):
    assert geoflow_entropy(world, monkeypatch, "--top-k=3", "--plot=plots/h.png", block=10) == 0
    columns = read_columns(world / "scores.parquet")
    assert list(columns) == [
        "query",
        "entropy",
        "map_index",
        "map_prob",
        "risk_lower_bound",
        "top_index",
        "top_prob",
    ]
    scorer = gf.RetrievalEntropy(
        gf.GeoFlow.from_pretrained(world / "model"), world / "gallery", n_samples=4, n_steps=2, kappa=15.0, top_k=3
    )
    post = scorer(torch.from_numpy(np.load(world / "queries.npy")))
    assert np.array_equal(columns["query"], np.arange(QUERIES))
    np.testing.assert_allclose(columns["entropy"], post.entropy.numpy(), atol=1e-5)
    np.testing.assert_allclose(columns["risk_lower_bound"], post.risk_lower_bound.numpy(), atol=1e-5)
    assert np.array_equal(columns["map_index"], post.map_index.numpy())
    assert np.array_equal(np.stack(columns["top_index"]), post.top_index.numpy())
    np.testing.assert_allclose(np.stack(columns["top_prob"]), post.top_prob.numpy(), atol=1e-5)
    assert (world / "plots" / "h.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"{QUERIES} queries over {ITEMS} items" in shown
    assert f"{np.median(columns['entropy']):.3f}" in shown
    assert f"{(columns['map_prob'] >= 0.5).mean():.1%} of the queries" in shown
    assert (
        f"if the posterior is right, best guesses are wrong for at least {columns['risk_lower_bound'].mean():.1%}"
        in shown
    )


def test_default_columns_and_json(world, monkeypatch, capsys):
    assert geoflow_entropy(world, monkeypatch, "--json", "--fast") == 0
    assert list(read_columns(world / "scores.parquet")) == [
        "query",
        "entropy",
        "map_index",
        "map_prob",
        "risk_lower_bound",
    ]
    summary = json.loads(capsys.readouterr().out)
    assert summary["queries"] == QUERIES
    assert 0 <= summary["mean_risk_lower_bound"] <= 1


@pytest.fixture
def head_scorer(world) -> gf.RetrievalEntropy:
    """The scorer of a head, which is in the folder `head`."""
    head = gf.PosteriorHead(gf.HeadConfig(hidden=8, bank=5, points=2), 10, 7).eval()
    head.bank_text.copy_(noise.sample_uniform(5, 7))
    head.hub_weight.fill_(0.5)
    head.save_pretrained(world / "head")
    return gf.RetrievalEntropy(head, world / "gallery")


def test_a_head_scores_files_too(world, head_scorer, monkeypatch, capsys):
    assert geoflow_entropy(world, monkeypatch, block=10, model="head") == 0
    queries = torch.from_numpy(np.load(world / "queries.npy"))
    columns, expected = read_columns(world / "scores.parquet"), head_scorer(queries)
    np.testing.assert_allclose(columns["entropy"], expected.entropy.numpy(), atol=1e-5)
    assert np.array_equal(columns["map_index"], expected.map_index.numpy())
    # The same file again is the same job; other weights are another one.
    assert geoflow_entropy(world, monkeypatch, block=10, model="head") == 0
    assert geoflow_entropy(world, monkeypatch, block=10) == 2
    assert "not the result of this job" in capsys.readouterr().err


@pytest.mark.usefixtures("head_scorer")
@pytest.mark.parametrize("flag", ["--fast", "--samples=3", "--steps=3", "--guidance=1", "--seed=0", "--kappa=3"])
def test_a_flag_for_flows_with_a_head_is_named(world, monkeypatch, capsys, flag):
    assert geoflow_entropy(world, monkeypatch, flag, model="head") == 2
    message = f"{flag.partition('=')[0]} is a setting of flows, but --model holds a posterior head"
    assert message in capsys.readouterr().err
    assert not (world / "scores.parquet").exists()


def test_jobs_know_their_flow_by_its_digest(world):
    flow = gf.GeoFlow.from_pretrained(world / "model")
    assert model_digest(gf.RetrievalEntropy(flow, world / "gallery")) == {"flow": flow_digest(flow)}
    assert model_digest(gf.BayesReranker(gf.GeoFlow(gf.GeoFlowConfig(8, 8, hidden=8)), torch.eye(8))).keys() == {"flow"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block": 0}, "block must be at least 1"),
        ({"out": "model"}, "model is a folder"),
        ({"out": "foreign.parquet"}, "not the result of this job"),
    ],
)
def test_a_bad_output_is_reported_before_anything_is_written(world, monkeypatch, capsys, changes, words):
    parquet.write_table(pyarrow.table({"query": [0]}), world / "foreign.parquet")
    before = set(world.rglob("*"))
    assert geoflow_entropy(world, monkeypatch, **changes) == 2
    assert words in capsys.readouterr().err
    assert set(world.rglob("*")) == before


def score(world: Path, out: str) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    scorer = entropy.open_scorer(
        world / "model", world / "gallery", "t2i", fast=False, device="cpu", n_samples=4, n_steps=2
    )
    entropy.score_file(scorer, world / "queries.npy", world / out, block=2, progress=False)


def scored_under_kills(world: Path, out: str, chance: random.Random) -> int:
    """Starts the run and kills it at random moments until it ends by itself; returns the number of kills."""
    kills = 0
    while True:
        child = start_child(score, world, out)
        child.join(chance.uniform(0.0, 0.12 * (1 + kills / 20)))  # a busy machine is given longer
        if child.exitcode is not None:
            assert child.exitcode == 0
            return kills
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_killed_twenty_times(world):
    chance, kills, run = random.Random(0), 0, 0
    alone = multiprocessing.get_context("fork").Process(target=score, args=(world, "undisturbed.parquet"))
    alone.start()
    alone.join()
    while kills < 20:
        kills += scored_under_kills(world, f"{run}.parquet", chance)
        assert (world / f"{run}.parquet").read_bytes() == (world / "undisturbed.parquet").read_bytes()
        run += 1
    assert run <= 10  # so most kills hit a run at work
    assert {path.name for path in world.iterdir()} == {
        "model",
        "queries.npy",
        "gallery",
        "undisturbed.parquet",
        *(f"{number}.parquet" for number in range(run)),
    }


def test_an_interrupt_keeps_blocks_and_says_so(world, monkeypatch, capsys):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gf.RetrievalEntropy, "score", interrupted)
        assert geoflow_entropy(world, patch) == 130
    assert "run the same command to continue" in capsys.readouterr().err
    assert geoflow_entropy(world, monkeypatch, seed=1) == 2  # another job
    assert "differs in seed" in capsys.readouterr().err
    assert geoflow_entropy(world, monkeypatch) == 0
    assert geoflow_entropy(world, monkeypatch, seed=1) == 2
    assert "not the result of this job" in capsys.readouterr().err
    assert geoflow_entropy(world, monkeypatch, "--overwrite", seed=1) == 0


def spoil(world: Path, what: str) -> None:
    """Damages one part of the input."""
    shard = world / "gallery" / "img_emb_2.npy"
    if what == "empty gallery":
        for path in (world / "gallery").iterdir():
            np.save(path, np.empty((0, 10), np.float32))
    elif what == "width":
        np.save(world / "queries.npy", noise.sample_uniform(5, 10).numpy())
    elif what == "gallery width":
        np.save(shard, noise.sample_uniform(5, 9).numpy())
    elif what == "truncated":
        shard.write_bytes(shard.read_bytes()[:-30])
    elif what in ("nan", "unnormalised"):
        rows = np.load(world / "queries.npy")
        rows[7] *= np.nan if what == "nan" else 1.5
        np.save(world / "queries.npy", rows)
    elif what == "no queries":
        np.save(world / "queries.npy", np.empty((0, 7), np.float32))


@pytest.mark.parametrize(
    ("what", "changes", "words"),
    [
        ("empty gallery", {}, "the gallery is empty"),
        ("width", {}, "queries.npy have width 10, but the flow expects 7"),
        ("gallery width", {}, "part 2 has width 9, but part 0 has 10"),
        ("truncated", {}, "img_emb_2.npy is truncated"),
        ("nan", {}, "queries.npy row 7 is not finite"),
        ("unnormalised", {}, "queries.npy row 7 has norm 1.5"),
        ("no queries", {}, "queries.npy are empty"),
        ("", {"kappa": -1}, "kappa must be finite and not negative"),
        ("", {"samples": 0}, "--samples must be at least 1"),
        ("", {"steps": 0}, "--steps must be"),
        ("", {"block": 0}, "block must be at least 1"),
        ("", {"model": "nowhere"}, "nowhere/model.safetensors does not exist"),
        ("", {"queries": "nowhere"}, "queries nowhere is missing"),
        ("", {"device": "tpu"}, "device 'tpu' cannot be used here"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_no_file(world, monkeypatch, capsys, what, changes, words):
    spoil(world, what)
    (world / "scores.parquet").write_text("precious")
    assert geoflow_entropy(world, monkeypatch, "--overwrite", **changes) == 2
    message = capsys.readouterr().err
    assert message.startswith("geoflow: error:")
    assert words in message
    assert (world / "scores.parquet").read_text() == "precious"
    assert not (world / "scores.parquet.blocks").exists()
