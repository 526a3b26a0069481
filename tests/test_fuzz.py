"""Every public function, every command and every file format with hostile input: a right answer or a clear typed error,
never a crash, a hang, a NaN or a changed file. 500 inputs here, 5,000 and more in `make test-slow`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import geoflow_fast as gf
from geoflow_fast import evaluation, jobs
from geoflow_fast.cli import main
from tests.reliability.figures import record
from tests.reliability.hostile import Target, in_time, judge, variants
from tests.reliability.targets import IMAGE, TARGETS, TEXT, small_flow, unit

# Beside its own answers a class is fuzzed through what makes it; these hold results or name others.
RESULTS = {"Bandwidth", "Epistemic", "Reranked", "RetrievalPosterior", "TrainReport", "Calibration", "TrainingDiverged"}
RESULTS |= {"BackendUnavailable", "GalleryPosterior", "GalleryStatistics", "SinkhornResult", "AbstentionThreshold"}
RESULTS |= {"Interval", "Reliability", "RetrievalCalibration", "SelectiveAccuracy", "Report", "backends", "World"}
NESTED = {"GeoFlow": "GeoFlow.velocity", "GalleryIndex": "GalleryIndex.build", "TrainConfig": "train"}
OTHERWISE = {"bootstrap_interval", "ops", "geometry", "evaluation", "baselines", "distributed"}
"""Takes a function, or is a module."""
UNCOVERED = {"ColourEncoder", "EmbedSummary", "Encoder", "OpenClipEncoder", "embed_images", "ot_assign_panel"}
"""Take images, or a share of a problem from a rank: not fuzzed here."""

tried: dict[str, int] = {"answers": 0, "errors": 0, "commands": 0, "damaged_files": 0}


def test_every_public_name_is_a_target():
    names = {target.name for target in TARGETS}
    public = [(name, getattr(gf, name)) for name in gf.__all__]
    public += [(f"ops.{name}", getattr(gf.ops, name)) for name in gf.ops.__all__]
    public += [(f"evaluation.{name}", getattr(evaluation, name)) for name in evaluation.__all__]
    for name, value in public:
        short = name.split(".")[-1]
        if callable(value) and short not in RESULTS | OTHERWISE | UNCOVERED:
            assert name in names or NESTED.get(short) in names, f"{name} is fuzzed by nothing"


def spoil(target: Target, data: st.DataObject) -> None:
    """One call with one or two arguments in the place of good ones."""
    arguments = dict(target.good())
    for name in data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)):
        label, make = data.draw(st.sampled_from(variants(arguments[name])), label=name)
        del label
        arguments[name] = make()
    tried["answers" if judge(target, arguments) == "answer" else "errors"] += 1


def fuzzed(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_functions(target):
    fuzzed(11)(given(st.data())(lambda data: spoil(target, data)))()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_functions_at_length(target):
    fuzzed(130)(given(st.data())(lambda data: spoil(target, data)))()


# ---- files and commands -------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """What the commands need, with a name that is not ASCII."""
    folder = tmp_path / "wörld 世界"
    folder.mkdir()
    small_flow().save_pretrained(folder / "model")
    np.save(folder / "queries.npy", unit(5, TEXT).numpy())
    np.save(folder / "gallery.npy", unit(8, IMAGE).numpy())
    gf.EmbeddingPairs.from_arrays(unit(12, IMAGE), unit(12, TEXT)).save(folder / "pairs")
    (folder / "run.toml").write_text("seed = 3\n")
    return folder


COMMANDS = {
    "entropy": {
        "model": "model",
        "queries": "queries.npy",
        "gallery": "gallery.npy",
        "out": "out.parquet",
        "samples": "2",
        "steps": "1",
        "kappa": "9",
        "guidance": "1",
        "seed": "0",
        "direction": "t2i",
    },
    "density": {"model": "model", "pairs": "pairs", "out": "out.parquet", "steps": "1", "seed": "0"},
    "train": {
        "pairs": "pairs",
        "out": "run",
        "preset": "tiny",
        "steps": "2",
        "batch-size": "4",
        "lr": "0.001",
        "seed": "0",
    },
}
FLAGS = (
    "",
    "-1",
    "0",
    "nan",
    "inf",
    "1e400",
    "x",
    "99999999999999999999",
    "🙂",
    "\x01",
    "../..",
    "/",
    "/proc/self/mem",
    "/dev/null/x",
    "no such",
    "a" * 300,
)
DAMAGE = {
    "empty": lambda _: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "cut by one": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"\0" * 64,
    "garbage": lambda raw: bytes((7 * k) % 256 for k in range(len(raw))),
    "head": lambda raw: b"\xff" * min(16, len(raw)) + raw[16:],
    "flipped": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 0x40]) + raw[len(raw) // 2 + 1 :],
    "zeros": lambda raw: bytes(len(raw)),
    "json": lambda _: b'{"a": [1, 2',
    "pickle": lambda _: b"\x80\x04\x95.",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run_command(world: Path, command: str, flags: dict[str, str], monkeypatch, capsys) -> None:
    """A command ends with 0 and its output, or with a status and a line on what is wrong and nothing but the input."""
    before = contents(world)
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "argv", ["geoflow", command, *(f"--{name}={value}" for name, value in flags.items())])
    with in_time(120), pytest.raises(SystemExit) as end:
        main()
    status = end.value.code or 0
    error = capsys.readouterr().err
    after = contents(world)
    assert status in (0, 2), f"status {status}: {error}"
    assert "Traceback" not in error
    assert {name: after.get(name) for name in before} == before, "an input was changed"
    if status == 0:
        for name in set(after) - set(before):
            if name.endswith(".parquet"):
                found = jobs.read_columns(world / name)
                assert all(np.isfinite(column).all() for column in found.values() if column.dtype.kind == "f")
    else:
        assert error.strip()
        left = {name for name in set(after) - set(before) if "index" not in name}
        assert not left, f"a failed command left {left}"
    tried["commands"] += 1


def spoil_command(world: Path, command: str, seed: int, monkeypatch, capsys) -> None:
    """One flag or one file spoiled, by a number."""
    flags = dict(COMMANDS[command])
    names = sorted(flags)
    chance = np.random.default_rng(seed)
    if chance.random() < 0.5:
        flags[names[chance.integers(len(names))]] = FLAGS[chance.integers(len(FLAGS))]
    else:
        files = sorted(contents(world))
        target = world / files[chance.integers(len(files))]
        damage = sorted(DAMAGE)[chance.integers(len(DAMAGE))]
        target.write_bytes(DAMAGE[damage](target.read_bytes()))
        tried["damaged_files"] += 1
    run_command(world, command, flags, monkeypatch, capsys)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(world, command, seed, monkeypatch, capsys):
    spoil_command(world, command, seed, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 108))
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_at_length(world, command, seed, monkeypatch, capsys):
    spoil_command(world, command, seed, monkeypatch, capsys)


@pytest.mark.parametrize("mode", ["read-only folder", "file in the way", "missing folder"])
def test_places_that_cannot_be_written(world, mode, monkeypatch, capsys):
    place = world / "place"
    if mode == "file in the way":
        place.write_text("mine")
    elif mode == "read-only folder":
        place = Path("/proc/self")
    flags = {**COMMANDS["entropy"], "out": str(place / "deep" / "out.parquet")}
    if mode == "missing folder":
        return run_command(world, "entropy", flags, monkeypatch, capsys)
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "argv", ["geoflow", "entropy", *(f"--{name}={value}" for name, value in flags.items())])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("geoflow: error:")
    return None


def test_files_that_may_not_be_read(world, monkeypatch, capsys):
    if os.geteuid() == 0:
        # Root reads everything: a file of the kernel that even root may not read stands for one.
        flags = {**COMMANDS["entropy"], "queries": "/proc/self/mem"}
    else:
        (world / "queries.npy").chmod(0)
        flags = dict(COMMANDS["entropy"])
    run_command(world, "entropy", flags, monkeypatch, capsys)


@pytest.mark.slow
def test_the_count():
    """Of all that was tried above; this one is the last."""
    inputs = tried["answers"] + tried["errors"] + tried["commands"]
    assert inputs >= 5000
    record("hostile_inputs", inputs=inputs, **tried)
