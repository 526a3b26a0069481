"""Every public name, every command and every file format gets hostile input and must give a right answer or a clear,
typed error: never a crash, a hang, a NaN or a changed file. `make test` tries some values, `make test-slow` all."""

from __future__ import annotations

import enum
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

import geoflow_fast as gf
from geoflow_fast.cli.app import app, main
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import LOCK_FILE
from geoflow_fast.training.logging import METRICS_FILE
from tests.reliability.arguments import TARGETS, some_pairs
from tests.reliability.commands import COMMANDS, copy_world
from tests.reliability.hostile import DAMAGE, Target, in_time, judge, spread, substitutions

ELSEWHERE = {
    "SentenceEncoder": "tests/encoders/test_hugging_face.py",
    "TransformersEncoder": "tests/encoders/test_hugging_face.py",
    "push_to_hub": "tests/jobs/test_hub.py",
}
"""Public names whose bad input is tried in files of their own."""


def takes_arguments(value: Any) -> bool:
    """Whether a public name is called with arguments that it checks; results are dataclasses that check nothing."""
    if inspect.isclass(value):
        passive = issubclass(value, (BaseException, enum.Enum)) or getattr(value, "_is_protocol", False)
        unchecked = hasattr(value, "__dataclass_fields__") and not hasattr(value, "__post_init__")
        return not passive and not unchecked
    return callable(value) and bool(inspect.signature(value).parameters)


def test_the_list_is_complete():
    """Every public name and every operation has good arguments; of a public module some name does."""
    public = {name: getattr(gf, name) for name in gf.__all__}
    public |= {f"ops.{name}": getattr(gf.ops, name) for name in gf.ops.__all__}
    wanted = {name for name, value in public.items() if isinstance(value, types.ModuleType) or takes_arguments(value)}
    listed = {target.name for target in TARGETS}
    assert len(listed) == len(TARGETS)
    missing = {name for name in wanted if not any(f"{target}.".startswith(f"{name}.") for target in listed)}
    assert missing == set(ELSEWHERE)
    assert all((Path(__file__).parents[2] / file).is_file() for file in ELSEWHERE.values())


def test_every_command_is_listed():
    def commands(group: Any, before: str = "") -> set[str]:
        names = {f"{before}{name}" for name in group.commands}
        for name, command in group.commands.items():
            names |= commands(command, f"{before}{name} ") if hasattr(command, "commands") else set()
        return names

    assert commands(typer.main.get_command(app)) == set(COMMANDS)


# ---- public names --------------------------------------------------------------------------------------------------

every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.fixture
def _elsewhere(tmp_path, monkeypatch) -> None:
    """The working folder, where calls write files whose names have no folder, is empty."""
    monkeypatch.chdir(tmp_path)


def substitute(target: Target, name: str, make: Callable[[], Any]) -> None:
    """A call with one hostile argument."""
    judge(target, {**target.good(), name: make()})


@pytest.mark.usefixtures("_elsewhere")
@every_target
def test_good_arguments_are_answered(target):
    """Bad arguments below would otherwise be refused for the wrong reason."""
    assert judge(target, dict(target.good())) == "answer"


@pytest.mark.usefixtures("_elsewhere")
@every_target
def test_hostile_values(target):
    for name, _, make in spread(substitutions(target), 6 if target.costly else 24):
        substitute(target, name, make)


@pytest.mark.slow
@pytest.mark.usefixtures("_elsewhere")
@every_target
def test_all_hostile_values(target):
    for name, _, make in substitutions(target):
        substitute(target, name, make)


def test_counts_are_integers():
    """A seed that is not an integer is an error that names it; it is not rounded."""
    with pytest.raises(TypeError, match="seed must be an integer"):
        some_pairs().split(0.5, seed=1.5)


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
)
FLAGS += ("/dev/null/x", "no such", "a" * 300)


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


def spoilable(world: Path, command: str) -> list[tuple[str | int, str]]:
    """What may be spoiled of a command: (flag or number of an argument, value), and (file, damage)."""
    flags, arguments = COMMANDS[command].flags, COMMANDS[command].arguments
    values = [*flags.values(), *arguments]
    names = [*sorted(set(flags) - COMMANDS[command].fixed), *range(len(arguments))]
    files = [file for file in contents(world) if any(file == value or file.startswith(f"{value}/") for value in values)]
    return [*((name, bad) for name in names for bad in FLAGS), *((file, damage) for file in files for damage in DAMAGE)]


def spoil(world: Path, command: str, what: str | int, how: str, monkeypatch, capsys) -> None:
    """Runs a command with one flag, argument or file spoiled."""
    flags, arguments = dict(COMMANDS[command].flags), COMMANDS[command].arguments
    if isinstance(what, int):
        arguments = (*arguments[:what], how, *arguments[what + 1 :])
    elif what in flags:
        flags[what] = how
    else:
        (world / what).write_bytes(DAMAGE[how]((world / what).read_bytes()))
    run_command(world, command, flags, monkeypatch, capsys, arguments)


def spoil_some(tmp_path: Path, command: str, most: int, monkeypatch, capsys) -> None:
    """Does so with each of at most so many, in a new folder each time."""
    copy_world(tmp_path / "first")
    for number, (what, how) in enumerate(spread(spoilable(tmp_path / "first", command), most)):
        folder = tmp_path / f"wörld 世界 {number}"
        copy_world(folder)
        spoil(folder, command, what, how, monkeypatch, capsys)


SUCCEEDING = [name for name in COMMANDS if name != "demo"]  # it trains for minutes, so only bad input is tried


@pytest.mark.parametrize("command", SUCCEEDING)
def test_commands_succeed_with_good_input(world, command, monkeypatch, capsys):
    before = contents(world)
    assert (
        run_command(world, command, {**COMMANDS[command].flags}, monkeypatch, capsys, COMMANDS[command].arguments) == 0
    )
    assert command == "doctor" or set(contents(world)) > set(before)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(tmp_path, command, monkeypatch, capsys):
    spoil_some(tmp_path, command, 4, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_at_length(tmp_path, command, monkeypatch, capsys):
    spoil_some(tmp_path, command, 40, monkeypatch, capsys)


@pytest.mark.parametrize("mode", ["read-only folder", "file in the way", "missing folder"])
def test_folders_that_cannot_be_written(world, mode, monkeypatch, capsys):
    folder = Path("/proc/self") if mode == "read-only folder" else world / "folder"
    if mode == "file in the way":
        folder.write_text("mine")
    flags = {**COMMANDS["entropy"].flags, "out": str(folder / "deep" / "out.parquet")}
    assert run_command(world, "entropy", flags, monkeypatch, capsys) == (0 if mode == "missing folder" else 2)


def test_files_that_may_not_be_read(world, monkeypatch, capsys):
    if os.geteuid() == 0:
        # Root may read every file, so the test uses a file of the kernel that not even root may read.
        flags = {**COMMANDS["entropy"].flags, "queries": "/proc/self/mem"}
    else:
        (world / "queries.npy").chmod(0)
        flags = dict(COMMANDS["entropy"].flags)
    run_command(world, "entropy", flags, monkeypatch, capsys)
