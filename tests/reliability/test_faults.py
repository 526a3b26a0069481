"""After kills, disk errors and signals nothing is lost or repeated, and the same call ends with the same bytes."""

from __future__ import annotations

import collections
import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import geoflow_fast as gf
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.tensors import load_tensors
from tests.reliability import faults
from tests.reliability.faults import TASKS, WIDTH, End, Nursery, Plan, files_of, is_temporary
from tests.samples import unit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, audits and limits of Linux")

KILLS = 50
"""The number of kills of each task in the long test."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flow, pairs, queries, a gallery and pictures, one of them no picture, some with two captions."""
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    gf.GeoFlow(faults.SHAPE).save_pretrained(folder / "model")
    gf.EmbeddingPairs.from_arrays(unit(96, WIDTH, seed=1), unit(96, WIDTH, seed=2)).save(
        folder / "pairs", dtype=np.float32
    )
    np.save(folder / "queries.npy", unit(36, WIDTH, seed=3).numpy())
    np.save(folder / "gallery.npy", unit(40, WIDTH, seed=4).numpy())
    photos = folder / "photos"
    photos.mkdir()
    rng = np.random.default_rng(0)
    for number in range(31):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(photos / f"{number:02d}.png")
        (photos / f"{number:02d}.txt").write_text(f"picture {number}\n" + "again\n" * (number % 3 == 0))
    (photos / "17.png").write_bytes(b"no picture")
    write_lists(folder)
    return folder


def write_lists(folder: Path) -> None:
    """Judged lists, a rule that was certified on some of them, and a log."""
    rng = np.random.default_rng(0)
    scores = -np.sort(-rng.normal(size=(600, 5)), axis=1)
    right = scores[:, 0] - scores[:, 1] > rng.random(600)
    np.save(folder / "judged.npy", scores[:300])
    np.save(folder / "labels.npy", right[:300])
    trust = gf.Trust().fit(scores[:100], right[:100])
    trust.certify(scores[100:300], right[100:300], max_error=0.3).save(folder / "rule.json")
    log = {"index": rng.integers(31, size=(300, 5)), "scores": scores[300:]}
    parquet.write_columns(folder / "log.parquet", log, 300)


@pytest.fixture(scope="module")
def alone(nursery: Nursery, world: Path) -> dict[str, tuple[dict[str, bytes], End]]:
    """The files that each task writes when nothing disturbs it, and how it ended."""
    outputs = {}
    for name in TASKS:
        end = nursery.run(name, world, world / f"alone_{name}")
        assert end.status == 0, end
        outputs[name] = files_of(world / f"alone_{name}"), end
    return outputs


def finish(nursery: Nursery, name: str, world: Path, out: Path, wanted: dict[str, bytes]) -> None:
    """Continues a task to the end and compares its files with those of an undisturbed run."""
    end = nursery.run(name, world, out)
    assert end.status == 0, end
    assert_same(files_of(out), wanted)


def assert_same(outputs: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    assert sorted(outputs) == sorted(wanted)
    assert [name for name in wanted if outputs[name] != wanted[name]] == []


# ---- kills --------------------------------------------------------------------------------------------------------


def moment_of(out: Path) -> str:
    """When a kill came, judged by what it left: "early" (nothing finished), "write" (a partial file) or "between"."""
    names = files_of(out)
    if any(map(is_temporary, names)):
        return "write"
    return "between" if any(Path(name).name != "job.json" for name in names) else "early"


def survive(
    nursery: Nursery, name: str, world: Path, folder: Path, alone: tuple[dict[str, bytes], End], least: int
) -> collections.Counter[str]:
    """Kills runs at random moments and restarts them until they finish, until there were enough kills; each run ends
    with the bytes of an undisturbed one. Returns when the kills came."""
    wanted, undisturbed = alone
    chance, moments, runs = random.Random(0), collections.Counter[str](), 0
    while moments.total() < least:
        out, kills = folder / str(runs), 0
        while True:
            # A busy machine is given longer from kill to kill, so that it comes to an end.
            patience = undisturbed.seconds * (1 + kills / 10)
            end = nursery.run(name, world, out, Plan(kill_after=chance.uniform(0, patience)))
            if end.status != -signal.SIGKILL:
                break
            kills += 1
            moments[moment_of(out)] += 1
        assert end.status == 0, end
        assert_same(files_of(out), wanted)
        shutil.rmtree(out)
        runs += 1
    return moments


@pytest.mark.parametrize("name", TASKS)
def test_a_few_kills(nursery, world, alone, tmp_path, name):
    survive(nursery, name, world, tmp_path, alone[name], 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_killed_at_random_moments(nursery, world, alone, tmp_path, name):
    moments = survive(nursery, name, world, tmp_path, alone[name], KILLS)
    assert moments["write"] > 0
    assert moments["between"] > 0


def kinds_of(operations: list[str]) -> list[int]:
    """Numbers, from 1, of the first and the last operation of each kind; numbers in file names do not matter."""
    kinds = [re.sub(r"\d+", "#", operation) for operation in operations]
    firsts = {kind: number for number, kind in reversed(list(enumerate(kinds, 1)))}
    lasts = {kind: number for number, kind in enumerate(kinds, 1)}
    return sorted({*firsts.values(), *lasts.values()})


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_killed_at_each_kind_of_operation_on_files(nursery, world, alone, tmp_path, name):
    """Kills before each kind of open, rename, removal and fsync, which random kills would rarely hit."""
    wanted, undisturbed = alone[name]
    struck = kinds_of(undisturbed.operations)
    for number in struck:
        out = tmp_path / str(number)
        end = nursery.run(name, world, out, Plan(strike_at=number))
        assert end.status == -signal.SIGKILL, (undisturbed.operations[number - 1], end)
        finish(nursery, name, world, out, wanted)
        shutil.rmtree(out)


@pytest.mark.parametrize("name", ["scoring", "density", "embed"])
def test_killed_before_it_has_said_what_it_is(nursery, world, alone, tmp_path, name):
    """The files that are left then belong to no job and do not prevent the next one."""
    wanted, undisturbed = alone[name]
    named = next(
        k for k, done in enumerate(undisturbed.operations, 1) if re.search(r"rename .*job\.json\.\d+\.tmp$", done)
    )
    assert nursery.run(name, world, tmp_path / "run", Plan(strike_at=named)).status == -signal.SIGKILL
    finish(nursery, name, world, tmp_path / "run", wanted)


def test_steps_after_the_checkpoint_are_logged_once(nursery, world, alone, tmp_path):
    """A run killed after the lines of some steps and before their checkpoint repeats the steps and their lines."""
    wanted, undisturbed = alone["training"]
    saved = places_of(undisturbed, "os.rename /.last.safetensors.#.tmp")
    assert nursery.run("training", world, tmp_path / "run", Plan(strike_at=saved[3])).status == -signal.SIGKILL
    finish(nursery, "training", world, tmp_path / "run", wanted)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(21))


def test_lines_are_on_disk_before_the_checkpoint(alone):
    """Then a power cut, which no test can simulate, loses none of them."""
    undisturbed = alone["training"][1]
    written, synced = (places_of(undisturbed, f"{what} /metrics.jsonl") for what in ("open", "fsync"))
    for saved in places_of(undisturbed, "os.rename /.last.safetensors.#.tmp"):
        last_line = max(event for event in written if event < saved)
        assert any(last_line < event < saved for event in synced)


def places_of(undisturbed: End, operation: str) -> list[int]:
    """The numbers, from 1, of an operation on files, whose names have # in place of a number."""
    return [number for number, done in enumerate(undisturbed.operations, 1) if re.sub(r"\d+", "#", done) == operation]


# ---- disks --------------------------------------------------------------------------------------------------------


def half_done(undisturbed: End) -> int:
    """The number of the operation at which half of the files are finished."""
    renamed = [
        number for number, operation in enumerate(undisturbed.operations, 1) if operation.startswith("os.rename")
    ]
    return renamed[len(renamed) // 2] + 1


@pytest.fixture(scope="module")
def halves(nursery: Nursery, world: Path, alone: dict[str, tuple[dict[str, bytes], End]]) -> dict[str, Path]:
    """The folder of each task, killed half-way."""
    for name, (wanted, undisturbed) in alone.items():
        end = nursery.run(name, world, world / f"half_{name}", Plan(strike_at=half_done(undisturbed)))
        assert end.status == -signal.SIGKILL, end
        assert files_of(world / f"half_{name}").keys() != wanted.keys() or name == "training"
    return {name: world / f"half_{name}" for name in alone}


DISKS = {
    "too large": (Plan(size=600), "File too large"),
    "full": (Plan(full=True), "No space left on device"),
    "no permission": (Plan(read_only=True), "Permission denied"),
    "broken": (Plan(strike_at=1, strike="EIO", lasting=True), "Input/output error"),
}


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("name", TASKS)
def test_what_was_there_survives_a_disk_that_refuses(nursery, world, alone, halves, tmp_path, name, disk):
    """The run reports which file it could not write, and the next run finishes."""
    plan, words = DISKS[disk]
    out = tmp_path / "run"
    shutil.copytree(halves[name], out)
    folders = [folder for folder, _, _ in os.walk(out)]
    if plan.read_only:
        for folder in folders:
            os.chmod(folder, 0o500)
    before = files_of(out)
    end = nursery.run(name, world, out, plan)
    for folder in folders:
        os.chmod(folder, 0o700)
    assert_refused(end, words, out)
    assert_kept(before, files_of(out))
    finish(nursery, name, world, out, alone[name][0])


def assert_refused(end: End, words: str, out: Path) -> None:
    """Checks that the run has ended with an OSError that names a file in `out`."""
    assert end.status == 2, end
    assert end.error in ("OSError", "PermissionError"), end
    assert words in end.words
    assert str(out) in end.words


def assert_kept(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Checks that files are unchanged, except for partial writes and lines added to the metrics."""
    for name, data in before.items():
        if not is_temporary(name):
            assert after[name].startswith(data) if name.endswith(".jsonl") else after[name] == data, name


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_each_kind_of_operation_fails_once(nursery, world, alone, tmp_path, name):
    """Each operation fails with one of four errors in turn: no partial file is left, and the next run finishes. A
    failed mkdir of an existing folder must not matter."""
    wanted, undisturbed = alone[name]
    errors = itertools.cycle(("EIO", "ENOSPC", "EACCES", "EROFS"))
    struck = kinds_of(undisturbed.operations)
    for number, error in zip(struck, errors):
        out = tmp_path / str(number)
        end = nursery.run(name, world, out, Plan(strike_at=number, strike=error))
        if makes_what_is_there(undisturbed.operations, number):
            assert end.status == 0, end
        else:
            assert_refused(end, os.strerror(getattr(errno, error)), out)
        assert [left for left in files_of(out) if is_temporary(left)] == []
        if (out / "last.safetensors").is_file():
            load_tensors(out / "last.safetensors", kind="training state")
        finish(nursery, name, world, out, wanted)
        shutil.rmtree(out)


def makes_what_is_there(operations: list[str], number: int) -> bool:
    """Whether operation `number`, from 1, creates a folder that exists already, such as the task's own."""
    done = operations[number - 1]
    return done.startswith("os.mkdir") and (done == "os.mkdir " or done in operations[: number - 1])


# ---- signals ------------------------------------------------------------------------------------------------------


SEARCH = "--model model --queries queries.npy --gallery gallery.npy --out {}/o.parquet --block 9 --device cpu"
COMMANDS = {
    "train": "--pairs pairs --out {}/run --preset tiny --batch-size 16 --steps 6 --checkpoint-every 100 --device cpu"
    " --no-head",
    "entropy": f"{SEARCH} --samples 4 --steps 4",
    "density": "--model model --pairs pairs --out {}/o.parquet --steps 2 --block 24 --device cpu",
    "rerank": f"{SEARCH} --shortlist 4 --steps 2",
    "embed": "--images photos --out {}/o --encoder colours --batch-size 3 --shard-rows 10 --workers 2 --device cpu",
    "train head": "--pairs pairs --out {}/run --head --points 2 --batch-size 16 --steps 6 --checkpoint-every 100"
    " --device cpu",
}
"""Commands that work in units: four blocks or shards, or six steps. A second word only tells two of them apart."""
JUDGED = "--scores judged.npy --labels labels.npy --overwrite"
WHOLE = {
    "trust": f"{JUDGED} --trust {{}}/trust.json --out {{}}/believed.parquet",
    "threshold": f"{JUDGED} --rule {{}}/rule.json --max-error 0.3 --out {{}}/answers.parquet",
    "watch": "--rule rule.json --queries log.parquet --out {}/health.parquet --page {}/changed.html",
    "explore": "log.parquet --rule rule.json --images photos --out {}/page.html",
}
"""Commands that write whatever they write at their end."""


def words_of(command: str, out: Path) -> list[str]:
    return [command.split()[0], *(COMMANDS | WHOLE)[command].replace("{}", str(out)).split()]


@pytest.fixture(scope="module")
def by_command(nursery: Nursery, world: Path) -> dict[str, dict[str, bytes]]:
    """The files that each command writes when nothing disturbs it."""
    outputs = {}
    for command in COMMANDS:
        out = world / f"by_{command.replace(' ', '_')}"
        out.mkdir()
        end = nursery.run(words_of(command, out), world, out)
        assert end.status == 0, end
        outputs[command] = files_of(out)
    return outputs


def units_kept(command: str, out: Path) -> int:
    """The number of steps, blocks or batches that a stopped command has kept."""
    left = files_of(out)
    assert [file for file in left if is_temporary(file)] == []
    if command.startswith("train"):
        return load_tensors(out / "run/last.safetensors", kind="training state")[1]["step"]
    if command == "embed":
        return load_tensors(out / "o.shards/shard_0.part", kind="part of a shard")[1]["rows"] // 3
    assert "o.parquet" not in left
    return sum(file.endswith(".parquet") for file in left)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_finishes_the_unit_saves_and_says_how_it_ended(nursery, world, by_command, tmp_path, command):
    """A SIGINT comes during the second step, block or batch, and a SIGTERM during the next one after the restart. The
    unit in which a signal comes is finished and kept, and no other is started."""
    words = words_of(command, tmp_path)
    for name, status, at, kept in (("SIGINT", 130, 2, 2), ("SIGTERM", 143, 1, 3)):
        end = nursery.run(words, world, tmp_path, Plan(signal=name, signal_at=at))
        assert end.status == status, end
        assert "run the same command to continue" in end.words
        assert units_kept(command, tmp_path) == kept
    end = nursery.run(words, world, tmp_path)
    assert end.status == 0, end
    assert_same(files_of(tmp_path), by_command[command])


@pytest.mark.parametrize("batch", [4, 11])
def test_embedding_is_continued_from_a_later_shard(nursery, world, by_command, tmp_path, batch):
    """The command is stopped at the end of the first shard and in the middle of the third."""
    words = words_of("embed", tmp_path)
    end = nursery.run(words, world, tmp_path, Plan(signal="SIGTERM", signal_at=batch))
    assert end.status == 143, end
    assert (tmp_path / "o.shards/shard_2.part").is_file() == (batch == 11)
    end = nursery.run(words, world, tmp_path)
    assert end.status == 0, end
    assert_same(files_of(tmp_path), by_command["embed"])


# ---- the real command line ----------------------------------------------------------------------------------------


def start(words: list[str], world: Path) -> subprocess.Popen[bytes]:
    """Starts `geoflow` as a separate process."""
    where = {**os.environ, "PYTHONPATH": str(faults.ROOT), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "geoflow_fast", *words], cwd=world, env=where, **quiet)


def outputs(out: Path) -> int:
    """The number of finished files."""
    return sum(not is_temporary(name) and Path(name).name != "job.json" for name in files_of(out))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_itself_is_killed(nursery, world, by_command, tmp_path, command):
    """Kills the command three times, each time after one more file is finished."""
    words, chance, kills = words_of(command, tmp_path), random.Random(0), 0
    for _ in range(3):
        process, before, deadline = start(words, world), outputs(tmp_path), time.monotonic() + 120
        while outputs(tmp_path) <= before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        assert process.wait() in (-signal.SIGKILL, 0), process.stderr.read()
        process.stderr.close()
        kills += process.returncode != 0
    end = nursery.run(words, world, tmp_path)
    assert end.status == 0, end
    assert_same(files_of(tmp_path), by_command[command])
    assert kills >= 1


@pytest.mark.slow
@pytest.mark.parametrize("command", WHOLE)
def test_a_command_that_writes_at_its_end_is_killed(nursery, world, tmp_path, command):
    """Kills it before each kind of operation on files, and as a process of its own at three random moments; the same
    command then ends with the files of an undisturbed one."""

    def finished(out: Path) -> dict[str, bytes]:
        out.mkdir(exist_ok=True)
        ended = nursery.run(words_of(command, out), world, out)
        assert ended.status == 0, ended
        return {name: data.replace(bytes(out), b"OUT") for name, data in files_of(out).items()}

    (tmp_path / "alone").mkdir()
    undisturbed = nursery.run(words_of(command, tmp_path / "alone"), world, tmp_path / "alone")
    wanted, struck = finished(tmp_path / "again"), kinds_of(undisturbed.operations)
    for number in struck:
        out = tmp_path / str(number)
        out.mkdir()
        end = nursery.run(words_of(command, out), world, out, Plan(strike_at=number))
        assert end.status == -signal.SIGKILL, (undisturbed.operations[number - 1], end)
        assert_same(finished(out), wanted)
    kills, chance = 0, random.Random(0)
    process, begin = start(words_of(command, tmp_path / "alone"), world), time.monotonic()
    assert process.wait(300) == 0, process.stderr.read()
    process.stderr.close()
    patience = time.monotonic() - begin
    for number in range(3):
        out = tmp_path / f"process_{number}"
        out.mkdir()
        process = start(words_of(command, out), world)
        time.sleep(chance.uniform(0.3, 0.9) * patience)
        process.kill()
        kills += process.wait() != 0
        process.stderr.close()
        assert_same(finished(out), wanted)
    assert kills >= 1
