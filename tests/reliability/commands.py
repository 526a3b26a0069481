"""Good flags and files for every command of `geoflow`, which `tests/reliability/test_hostile.py` spoils."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import geoflow_fast as gf
from geoflow_fast.runtime import parquet
from tests.reliability.arguments import IMAGE, pictures, square_flow, unit


@dataclass(frozen=True)
class Command:
    """The flags and arguments of a command that succeeds."""

    flags: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    keeps: bool = False
    """Whether the command, when it fails, may leave files in the folder `out` from which another run continues."""
    fixed: frozenset[str] = frozenset()
    """Flags that are not spoiled."""


LISTS = {"scores": "scores.npy", "labels": "first_right.npy", "seed": "0"}
SEARCH = {"model": "model", "queries": "queries.npy", "gallery": "gallery.npy", "out": "out.parquet"}

COMMANDS: dict[str, Command] = {
    "doctor": Command({"config": "run.toml"}),
    "demo": Command({"out": "demo", "seed": "0", "steps": "no such"}, keeps=True, fixed=frozenset({"steps"})),
    "embed": Command(
        {
            "images": "pictures",
            "out": "embedded",
            "encoder": "colours",
            "batch-size": "2",
            "workers": "1",
            "shard-rows": "2",
            "dtype": "float32",
            "device": "cpu",
            "config": "run.toml",
        }
    ),
    "train": Command(
        {
            "pairs": "pairs",
            "out": "run",
            "preset": "tiny",
            "steps": "2",
            "batch-size": "4",
            "lr": "0.001",
            "seed": "0",
            "pca": "3",
            "config": "run.toml",
        },
        ("--no-head",),
    ),
    "entropy": Command(
        {
            **SEARCH,
            "samples": "2",
            "steps": "1",
            "kappa": "9",
            "guidance": "1",
            "seed": "0",
            "direction": "t2i",
            "top-k": "2",
            "block": "3",
            "config": "run.toml",
        }
    ),
    "density": Command(
        {
            "model": "model",
            "pairs": "pairs",
            "out": "out.parquet",
            "steps": "1",
            "probes": "2",
            "seed": "0",
            "block": "5",
        }
    ),
    "rerank": Command(
        {**SEARCH, "calibration": "calibration.json", "shortlist": "4", "steps": "1", "probes": "1", "seed": "0"}
    ),
    "trust": Command(
        {**LISTS, "trust": "trust.json", "out": "out.parquet", "no-match-share": "0.3", "encoder": "some"}
    ),
    "threshold": Command(
        {
            **LISTS,
            "rule": "rule.json",
            "out": "out.parquet",
            "max-error": "0.3",
            "confidence": "0.9",
            "no-match-share": "0.2",
            "encoder": "some",
            "gallery-size": "8",
        }
    ),
    "watch": Command(
        {
            "rule": "certified.json",
            "queries": "log.parquet",
            "out": "health.parquet",
            "window": "40",
            "every": "20",
            "false-alarms": "0.01",
            "page": "changed.html",
            "captions": "captions.txt",
        },
        keeps=True,
    ),
    "explore": Command(
        {
            "rule": "named.json",
            "encoder": "some",
            "queries": "captions.txt",
            "gallery": "gallery.npy",
            "images": "pictures",
            "hits": "3",
            "title": "some",
            "out": "page.html",
        },
        ("log.parquet",),
    ),
    "evaluate": Command(
        {
            "model": "model",
            "pairs": "split/test",
            "held-out": "split/val",
            "train": "split/train",
            "out": "study",
            "methods": "knn,max_softmax",
            "direction": "t2i",
            "max-queries": "4",
            "resamples": "2",
            "bins": "2",
            "seed": "0",
        },
        keeps=True,
    ),
}


def make_world(folder: Path) -> None:
    """Makes a folder with the files that the commands above need."""
    folder.mkdir()
    square_flow().save_pretrained(folder / "model")
    np.save(folder / "queries.npy", unit(5, IMAGE).numpy())
    np.save(folder / "gallery.npy", unit(8, IMAGE).numpy())
    rng = np.random.default_rng(0)
    scores = -np.sort(-rng.random((60, 5)), axis=1)
    np.save(folder / "scores.npy", scores)
    np.save(folder / "first_right.npy", rng.random(60) < scores[:, 0] - scores[:, 1] + 0.3)
    right = np.load(folder / "first_right.npy")
    certified = gf.Trust().fit(scores[:30], right[:30]).certify(scores[30:], right[30:], 0.9)
    certified.save(folder / "certified.json")
    dataclasses.replace(certified, encoder="some").save(folder / "named.json")
    log = {"index": rng.integers(8, size=(40, 5)), "scores": -np.sort(-rng.random((40, 5)), axis=1)}
    parquet.write_columns(folder / "log.parquet", log, 40)
    (folder / "captions.txt").write_text("".join(f"caption {row}\n" for row in range(40)))
    gf.EmbeddingPairs.from_arrays(unit(12, IMAGE), unit(12, IMAGE)).save(folder / "pairs")
    for seed, (name, rows) in enumerate({"train": 40, "val": 60, "test": 12}.items()):
        pairs = gf.EmbeddingPairs.from_arrays(unit(rows, IMAGE, seed=seed), unit(rows, IMAGE, seed=seed + 9))
        pairs.save(folder / "split" / name)
    reranker = gf.BayesReranker(square_flow(), folder / "gallery.npy", shortlist=4, n_steps=1)
    reranker.calibration = gf.Calibration(
        1.0, 0.5, -1.0, (0.1, 0.1, 0.1), 1.0, 0.1, 60, 55, 1.0, dict(reranker.made_for)
    )
    reranker.save_calibration(folder / "calibration.json")
    (folder / "pictures").mkdir()
    for number, picture in enumerate(pictures()):
        picture.save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(f"picture {number}")
    commands = [name for name in COMMANDS if "seed" in COMMANDS[name].flags]
    (folder / "run.toml").write_text("".join(f"[{name}]\nseed = 3\n" for name in commands))


@functools.cache
def _made() -> tempfile.TemporaryDirectory[str]:
    made: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory()
    make_world(Path(made.name) / "world")
    return made


def copy_world(folder: Path) -> None:
    """Copies the files that the commands need to `folder`."""
    shutil.copytree(Path(_made().name) / "world", folder)
