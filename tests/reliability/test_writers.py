"""Concurrent writers: whatever several threads or processes write under one name, every reader sees a whole file, and a
writer that fails or is killed leaves the old file and, at the latest when the next one is done, no other."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from geoflow_fast.data.ids import Ids
from geoflow_fast.data.rows import load_npy
from geoflow_fast.runtime import files, parquet
from geoflow_fast.runtime.files import read_json, truncate_jsonl, write_atomic, write_json, write_npy
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

SIZE = 50_000
WRITERS, SAVES = 3, 12

SAVERS: dict[str, tuple[Callable[[Path, int], object], Callable[[Path], Any]]] = {
    "bytes.bin": (
        lambda path, k: write_atomic(path, bytes([k]) * SIZE),
        lambda path: list(path.read_bytes()),
    ),
    "parts.bin": (
        lambda path, k: write_atomic(path, lambda file: [file.write(bytes([k]) * 100) for _ in range(SIZE // 100)]),
        lambda path: list(path.read_bytes()),
    ),
    "values.json": (lambda path, k: write_json(path, [k] * SIZE), read_json),
    "rows.npy": (lambda path, k: write_npy(path, np.full(SIZE, k)), lambda path: load_npy(path).tolist()),
    "model.safetensors": (
        lambda path, k: save_tensors(path, {"x": torch.full((SIZE,), k)}, kind="model", info={"k": k}),
        lambda path: load_tensors(path, kind="model")[0]["x"].tolist(),
    ),
    "columns.parquet": (
        lambda path, k: parquet.write_columns(path, {"x": np.full(SIZE, k)}, SIZE),
        lambda path: parquet.read_columns(path)["x"].tolist(),
    ),
    "ids.parquet": (
        lambda path, k: Ids(np.full(SIZE, k)).save(path, np.arange(SIZE), are_given=True),
        lambda path: parquet.read_columns(path)["id"].tolist(),
    ),
}
"""By the name of a file: what saves SIZE times the number of its writer, and what reads the numbers."""


def save_often(name: str, path: Path, writer: int) -> None:
    """What a writer does."""
    for _ in range(SAVES):
        SAVERS[name][0](path, writer)


@pytest.fixture(scope="module", params=["threads", "processes"])
def writers(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Runs WRITERS writers at once."""
    if request.param == "threads":
        pool: Executor = ThreadPoolExecutor(WRITERS)
    else:
        pool = ProcessPoolExecutor(WRITERS, multiprocessing.get_context("spawn"))
    with pool:
        yield pool


@pytest.mark.parametrize("name", SAVERS)
def test_every_reader_sees_a_whole_file(writers, tmp_path, name):
    save, read = SAVERS[name]
    save(tmp_path / name, 1)
    running = [writers.submit(save_often, name, tmp_path / name, k) for k in range(1, WRITERS + 1)]
    while True:
        ended = all(writer.done() for writer in running)
        values = read(tmp_path / name)
        assert len(values) == SIZE
        assert len(set(values)) == 1
        if ended:
            break
    for writer in running:
        writer.result()
    assert os.listdir(tmp_path) == [name]


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk:
    """An open file whose disk is full after `left` more bytes."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self.file, self.left = file, left

    def write(self, data: Any) -> int:
        if len(memoryview(data).cast("B")) > self.left:
            self.file.write(memoryview(data).cast("B")[: self.left])
            _full()
        self.left -= len(memoryview(data).cast("B"))
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "at the first byte": lambda patch: patch.setattr(os, "fdopen", _disk_of(0)),
    "in the middle": lambda patch: patch.setattr(os, "fdopen", _disk_of(100)),
    "when it is synced": lambda patch: patch.setattr(os, "fsync", _full),
    "when it is renamed": lambda patch: patch.setattr(os, "replace", _full),
    "when it is made": lambda patch: patch.setattr(os, "open", _full),
}


def _disk_of(size: int) -> Callable[..., FullDisk]:
    real = os.fdopen
    return lambda *arguments, **more: FullDisk(real(*arguments, **more), size)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", SAVERS)
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, name, failure):
    save, read = SAVERS[name]
    save(tmp_path / name, 1)
    before = (tmp_path / name).read_bytes()
    with monkeypatch.context() as patch:
        FAILURES[failure](patch)
        with pytest.raises(OSError, match=name) as caught:
            save(tmp_path / name, 2)
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / name).read_bytes() == before
    assert os.listdir(tmp_path) == [name]
    save(tmp_path / name, 3)
    assert set(read(tmp_path / name)) == {3}


def test_a_disk_that_the_system_calls_full(tmp_path):
    """A limit of the kernel on the size of files instead of an error that a test raises."""
    path = tmp_path / "rows.npy"
    write_npy(path, np.zeros(10))
    code = f"""
import resource, numpy as np
from pathlib import Path
from geoflow_fast.runtime.files import write_npy
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_npy(Path({str(path)!r}), np.zeros(10_000))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "could not write" in run.stderr
    assert load_npy(path).tolist() == [0.0] * 10
    assert os.listdir(tmp_path) == ["rows.npy"]


@pytest.fixture
def stuck(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of writing `tmp_path/a.bin`."""
    code = f"""
import sys
from pathlib import Path
from geoflow_fast.runtime.files import write_atomic
def content(file):
    file.write(b"late")
    print("begun", flush=True)
    sys.stdin.read()
write_atomic(Path({str(tmp_path / "a.bin")!r}), content)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path, stuck):
    stuck.send_signal(signal.SIGKILL)
    stuck.wait()
    assert len(files.temporaries_of(tmp_path / "a.bin")) == 1
    write_atomic(tmp_path / "b.bin", b"of another file")
    assert len(files.temporaries_of(tmp_path / "a.bin")) == 1
    write_atomic(tmp_path / "a.bin", b"next")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "b.bin"]


def test_what_a_slow_writer_writes_is_kept(tmp_path, stuck):
    write_atomic(tmp_path / "a.bin", b"fast")
    assert len(files.temporaries_of(tmp_path / "a.bin")) == 1
    stuck.communicate()
    assert stuck.returncode == 0
    assert (tmp_path / "a.bin").read_bytes() == b"late"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_what_several_killed_writers_left_is_removed(tmp_path):
    for number in (0, 2, 5):
        (tmp_path / f".a.bin.{number:012d}.tmp").write_bytes(b"half")
    write_atomic(tmp_path / "a.bin", b"whole")
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_file_that_took_the_name_of_a_finished_one_is_kept(tmp_path, monkeypatch):
    """A writer finishes, and another begins, between the look at its temporary file and the lock on it."""
    temporary, real = tmp_path / f".a.bin.{0:012d}.tmp", files.fcntl.flock
    temporary.write_bytes(b"finished")

    def flock(handle: int, how: int) -> None:
        if not (tmp_path / "a.bin").exists():
            temporary.rename(tmp_path / "a.bin")
            temporary.write_bytes(b"begun")
        real(handle, how)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    write_atomic(tmp_path / "a.bin", b"whole")
    assert temporary.read_bytes() == b"begun"
    assert (tmp_path / "a.bin").read_bytes() == b"whole"


def test_a_writer_that_fails_removes_its_file_while_it_holds_the_lock(tmp_path, monkeypatch):
    """Afterwards the name may be that of another writer's file."""
    real, locked = Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        with open(path, "rb") as file:
            try:
                files.fcntl.flock(file, files.fcntl.LOCK_EX | files.fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(path.name)
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match="could not write"):
        write_atomic(tmp_path / "a.bin", _full)
    assert locked == [f".a.bin.{0:012d}.tmp"]
    assert os.listdir(tmp_path) == []


def test_a_write_does_not_list_its_folder(tmp_path, monkeypatch):
    """A job writes one file for each block into one folder; the cost of each must not grow with their number."""
    listed: list[Any] = []
    for name in ("scandir", "listdir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *path, real=real: [listed.append(path), real(*path)][1])
    assert list(tmp_path.glob("*")) == []
    assert listed, "a search of a folder is seen"
    listed.clear()
    write_atomic(tmp_path / "a.bin", b"whole")
    assert listed == []


def test_a_writer_whose_file_was_taken_for_left_behind_makes_another(tmp_path, monkeypatch):
    """Between its creation and its lock another writer may remove a temporary file."""
    real, removed = files.fcntl.flock, []

    def flock(handle: int, how: int) -> None:
        if not removed:
            removed.extend(files.temporaries_of(tmp_path / "a.bin"))
            removed[0].unlink()
        real(handle, how)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    write_atomic(tmp_path / "a.bin", b"whole")
    assert (tmp_path / "a.bin").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Nothing is removed there, since nobody knows whose it is."""
    monkeypatch.setattr(files.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    (tmp_path / ".a.bin.000000000000.tmp").write_bytes(b"of somebody")
    write_atomic(tmp_path / "a.bin", b"whole")
    assert (tmp_path / "a.bin").read_bytes() == b"whole"
    assert (tmp_path / ".a.bin.000000000000.tmp").read_bytes() == b"of somebody"


def test_lines_are_cut_for_readers_at_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    truncate_jsonl(tmp_path / "metrics.jsonl", lambda line: line["step"] < 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
