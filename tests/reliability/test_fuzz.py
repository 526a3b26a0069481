"""Every public function, every command and every file format gets hostile input and must give a right answer or a
clear, typed error: never a crash, a hang, a NaN or a changed file. `make test` tries 500 inputs, `test-slow` 5,000."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import geoflow_fast as gf
from geoflow_fast.cli.app import app, main
from geoflow_fast.evaluation.retrieval import RetrievalSet
from geoflow_fast.geometry import normalize
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import LOCK_FILE
from geoflow_fast.training.logging import METRICS_FILE
from tests.reliability.commands import COMMANDS, copy_world
from tests.reliability.file_targets import BASELINES, ENCODERS, FILES
from tests.reliability.hostile import DAMAGE, Target, in_time, judge, variants
from tests.reliability.targets import BUMP, TARGETS, some_pairs

ROOT = Path(__file__).parents[2]
EVERY = [*TARGETS, *FILES, *ENCODERS, *BASELINES]


def test_every_command_is_fuzzed():
    def commands(group: Any, before: str = "") -> set[str]:
        names = {f"{before}{name}" for name in group.commands}
        for name, command in group.commands.items():
            names |= commands(command, f"{before}{name} ") if hasattr(command, "commands") else set()
        return names

    assert commands(typer.main.get_command(app)) == set(COMMANDS)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """The working folder, where calls write files whose names have no folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spoil(target: Target, data: st.DataObject) -> None:
    """Makes one call in which hostile values replace one or two good arguments."""
    arguments = dict(target.good())
    for name in data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)):
        more = [(repr(bad)[:40], lambda bad=bad: bad) for bad in target.extra.get(name, ())]
        _, make = data.draw(st.sampled_from(more + variants(arguments[name])), label=name)
        arguments[name] = make()
    judge(target, arguments)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("target", EVERY, ids=lambda target: target.name)
def test_good_arguments_are_answered(target):
    """Bad arguments below would otherwise be refused for the wrong reason."""
    assert judge(target, dict(target.good())) == "answer"


def fuzzed(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("target", EVERY, ids=lambda target: target.name)
def test_functions(target):
    fuzzed(2 if target.dear else 5)(given(st.data())(lambda data: spoil(target, data)))()


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("target", EVERY, ids=lambda target: target.name)
def test_functions_at_length(target):
    fuzzed(15 if target.dear else 60)(given(st.data())(lambda data: spoil(target, data)))()


# ---- files and commands -------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with what the commands need; its name is not ASCII."""
    folder = tmp_path / "wörld 世界"
    copy_world(folder)
    return folder


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
    "..",
    "/proc",
    "/proc/self/mem",
    "/dev/null/x",
    "no such",
    "a" * 300,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run_command(
    world: Path, command: str, flags: dict[str, str], monkeypatch, capsys, arguments: tuple[str, ...] = ()
) -> int:
    """Checks that a command either succeeds, or fails with a message and leaves nothing but its input."""
    before = contents(world)
    monkeypatch.chdir(world)
    given = [f"--{name}={value}" for name, value in flags.items()]
    monkeypatch.setattr(sys, "argv", ["geoflow", *command.split(), *given, *arguments])
    with in_time(120), pytest.raises(SystemExit) as end:
        main()
    status = end.value.code or 0
    error = capsys.readouterr().err
    after = contents(world)
    assert status in (0, 2), f"status {status}: {error}"
    assert "Traceback" not in error
    assert {name: after.get(name) for name in before} == before, "an input was changed"
    new = set(after) - set(before)
    keeps = {flags["out"]} if COMMANDS[command].keeps else set()
    if status == 0:
        for name in new:
            # A study's table has NaN where a measure is not defined.
            if name.endswith(".parquet") and Path(name).parts[0] not in keeps:
                columns = parquet.read_columns(world / name).values()
                assert all(np.isfinite(column).all() for column in columns if column.dtype.kind == "f")
    else:
        assert error.strip()
        # A run that diverges keeps the log of its steps, which is what tells why.
        kept = {LOCK_FILE} | ({METRICS_FILE} if "the loss is not finite" in error else set())
        new = {name for name in new if Path(name).name not in kept}
        left = {name for name in new if "index" not in name and Path(name).parts[0] not in keeps}
        assert not left, f"a failed command left {left}"
    return status


def spoil_command(world: Path, command: str, seed: int, monkeypatch, capsys) -> None:
    """Runs a command with one flag, argument or file spoiled; `seed` chooses which."""
    flags, arguments = dict(COMMANDS[command].flags), COMMANDS[command].arguments
    names = [*sorted(set(flags) - COMMANDS[command].fixed), *range(len(arguments))]
    chance = np.random.default_rng(seed)
    if chance.random() < 0.5:
        name, bad = names[chance.integers(len(names))], FLAGS[chance.integers(len(FLAGS))]
        if isinstance(name, str):
            flags[name] = bad
        else:
            arguments = (*arguments[:name], bad, *arguments[name + 1 :])
    else:
        target = world / spoilable(world, [*flags.values(), *arguments], chance)
        damage = sorted(DAMAGE)[chance.integers(len(DAMAGE))]
        target.write_bytes(DAMAGE[damage](target.read_bytes()))
    run_command(world, command, flags, monkeypatch, capsys, arguments)


def spoilable(world: Path, values: list[str], chance: np.random.Generator) -> str:
    """A file that the command is given, or any file if it is given none."""
    files = sorted(contents(world))
    own = [file for file in files if any(file == value or file.startswith(f"{value}/") for value in values)]
    return (own or files)[chance.integers(len(own or files))]


SUCCEEDING = [
    pytest.param(name, marks=pytest.mark.slow if name == "evaluate ablation" else ())  # it takes twenty seconds
    for name in COMMANDS
    if name != "demo"  # it trains a flow for minutes, so only bad input is tried
]


@pytest.mark.parametrize("command", SUCCEEDING)
def test_commands_succeed_with_good_input(world, command, monkeypatch, capsys):
    flags = {**COMMANDS[command].flags}
    before = contents(world)
    assert run_command(world, command, flags, monkeypatch, capsys, COMMANDS[command].arguments) == 0
    assert command in ("doctor", "plan") or set(contents(world)) > set(before)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(world, command, seed, monkeypatch, capsys):
    spoil_command(world, command, seed, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 23))
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_at_length(world, command, seed, monkeypatch, capsys):
    spoil_command(world, command, seed, monkeypatch, capsys)


def test_counts_are_integers():
    """A seed that is not an integer is an error that names it; it is not rounded."""
    with pytest.raises(TypeError, match="seed must be an integer"):
        some_pairs().split(0.5, seed=1.5)


@pytest.mark.parametrize("mode", ["read-only folder", "file in the way", "missing folder"])
def test_folders_that_cannot_be_written(world, mode, monkeypatch, capsys):
    folder = world / "folder"
    if mode == "file in the way":
        folder.write_text("mine")
    elif mode == "read-only folder":
        folder = Path("/proc/self")
    flags = {**COMMANDS["entropy"].flags, "out": str(folder / "deep" / "out.parquet")}
    if mode == "missing folder":
        assert run_command(world, "entropy", flags, monkeypatch, capsys) == 0
        return
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "argv", ["geoflow", "entropy", *(f"--{name}={value}" for name, value in flags.items())])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("geoflow: error:")


def test_files_that_may_not_be_read(world, monkeypatch, capsys):
    if os.geteuid() == 0:
        # Root may read every file, so the test uses a file of the kernel that not even root may read.
        flags = {**COMMANDS["entropy"].flags, "queries": "/proc/self/mem"}
    else:
        (world / "queries.npy").chmod(0)
        flags = dict(COMMANDS["entropy"].flags)
    run_command(world, "entropy", flags, monkeypatch, capsys)


TASK = ("t2i", normalize(torch.ones(2, 3)), normalize(torch.ones(2, 3)), torch.arange(2), torch.arange(2))
ROWS = (np.arange(2), np.arange(2))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: gf.TrainConfig(tensorboard=math.nan), "tensorboard must be True or False"),
        (lambda: gf.HeadConfig(prefetch="no"), "prefetch must be True or False"),
        (lambda: gf.DensitySettings(redraw=math.nan), "redraw must be True or False"),
        (lambda: gf.suggest_steps(BUMP, *TASK[1:3], settings=3), "settings must be DensitySettings"),
        (lambda: gf.ops.counter_noise(torch.arange(3), 4, 0, 0, 0, unit="3"), "unit must be True or False"),
        (lambda: gf.ops.unit_rows(torch.ones(0, 3), torch.tensor([0])), "index must be rows of a table of 0"),
        (lambda: gf.ops.unit_rows(torch.ones(2, 3), torch.tensor([2])), "index must be rows of a table of 2"),
        (lambda: gf.ops.unit_rows(torch.ones(1, 2, 3), [0]), "index must be a tensor"),
        (lambda: RetrievalSet(*TASK[:3], TASK[3] * math.nan, TASK[4], *ROWS), "their images int64"),
        (lambda: RetrievalSet(*TASK[:2], TASK[2] * math.nan, *TASK[3:], *ROWS), "items row 0 is not finite"),
        (lambda: RetrievalSet(*TASK, ROWS[0], math.nan), "the rows of items must be numbers"),
        (lambda: RetrievalSet(*TASK, *ROWS, math.nan), "folder must be a path"),
    ],
    ids=range(12),
)
def test_what_was_found_at_length_stays_mended(call, error):
    with pytest.raises((ValueError, TypeError), match=error):
        call()
