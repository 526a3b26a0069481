"""Locks on folders, files that appear whole, and errors that name the file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from geoflow_fast.runtime.files import (
    JSON_BYTES,
    LOCK_FILE,
    contents_of,
    locked,
    read_json,
    read_toml,
    truncate_jsonl,
    write_atomic,
    write_json,
)

forks = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def hold(folder: Path, seconds: float) -> None:
    with locked(folder):
        (folder / "held").touch()
        time.sleep(seconds)
        (folder / "released").touch()


def start_holder(folder: Path, seconds: float) -> multiprocessing.process.BaseProcess:
    """Starts a process that holds the lock for some seconds, and waits until it does."""
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(folder, seconds))
    holder.start()
    deadline = time.monotonic() + 60
    while not (folder / "held").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    return holder


@forks
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    holder = start_holder(tmp_path, 600)
    with pytest.raises(OSError, match=f"another run is writing to {tmp_path}"), locked(tmp_path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).is_file()


@forks
def test_waiting_for_a_lock(tmp_path):
    holder = start_holder(tmp_path, 0.5)
    with locked(tmp_path, wait=True):
        assert (tmp_path / "released").exists()
    holder.join()


def test_a_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="inside"), locked(tmp_path):
        raise RuntimeError("inside")
    with locked(tmp_path):
        pass


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"could not write .*a\.json \(No space left on device\)"):
        write_atomic(path, fail)
    assert read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        write_atomic(Path("/"), b"")


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad"), RecursionError("bad"), OSError("bad")])
def test_errors_about_contents_name_the_file(error):
    with pytest.raises(ValueError, match=r"x\.bin is not a cake: .*bad"), contents_of(Path("x.bin"), "not a cake"):
        raise error


@pytest.mark.parametrize("error", [OSError(5, "input/output error"), ValueError("x.bin is odd"), KeyboardInterrupt()])
def test_errors_of_the_system_and_our_own_pass_unchanged(error):
    with pytest.raises(type(error)) as raised, contents_of(Path("x.bin")):
        raise error
    assert raised.value is error


def test_small_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(FileNotFoundError, match="is missing"):
        read_json(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="a is damaged or not a plan"):
        read_json(path, "a plan")
    path.write_bytes(b"x = \xff")
    with pytest.raises(ValueError, match="a is not a TOML file"):
        read_toml(path)
    with open(path, "wb") as file:
        file.truncate(JSON_BYTES + 1)
    with pytest.raises(ValueError, match="a is larger than"):
        read_json(path)


def test_lines_that_are_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    truncate_jsonl(path, lambda _: True)
    assert not path.exists()
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    truncate_jsonl(path, lambda line: line["step"] < 3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
