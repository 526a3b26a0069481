"""Jobs that are killed, changed, repeated or given bad files."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from geoflow_fast.jobs.job import FACTS_FILE, Job
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.files import LOCK_FILE, write_json
from geoflow_fast.runtime.parquet import read_columns

ROWS, BLOCK = 103, 10


def columns(rows: range, pause: float = 0.0) -> dict[str, np.ndarray]:
    time.sleep(pause)
    index = np.arange(rows.start, rows.stop)
    return {"row": index, "value": np.sin(index).astype(np.float32)}


def make_job(out: Path, **facts) -> Job:
    return Job(out, ROWS, BLOCK, {"seed": 0, **facts})


def run(job: Job, pause: float = 0.0, **options) -> list[range]:
    """Runs the job and returns the blocks that it computed."""
    asked = []

    def compute(rows, advance):
        asked.append(rows)
        advance(len(rows))
        return columns(rows, pause)

    job.run(compute, progress=False, **options)
    return asked


def test_output_is_whole_and_nothing_else_is_left(tmp_path):
    job = make_job(tmp_path / "new" / "out.parquet")
    assert [rows.start for rows in run(job)] == list(range(0, ROWS, BLOCK))
    table = read_columns(job.out)
    assert list(table) == ["row", "value"]
    assert np.array_equal(table["row"], np.arange(ROWS))
    assert table["value"].dtype == np.float32
    assert [path.name for path in job.out.parent.iterdir()] == ["out.parquet"]
    assert job.finished()
    assert run(job) == []  # the job is finished


def test_a_job_continues_where_an_error_stopped_it(tmp_path):
    job = make_job(tmp_path / "out.parquet")

    def failing(rows, _advance):
        if rows.start >= 50:
            raise OSError("disk on fire")
        return columns(rows)

    with pytest.raises(OSError, match="disk on fire"):
        job.run(failing, progress=False)
    assert not job.out.exists()
    assert [rows.start for rows in run(job)] == list(range(50, ROWS, BLOCK))
    assert np.array_equal(read_columns(job.out)["row"], np.arange(ROWS))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_job_that_is_killed_at_random_moments(tmp_path):
    """However often the job is killed, finished blocks are kept and the file has the bytes of an undisturbed run."""
    undisturbed = make_job(tmp_path / "a.parquet")
    run(undisturbed)
    job, context, chance = make_job(tmp_path / "b.parquet"), multiprocessing.get_context("fork"), random.Random(0)
    kills, most = 0, 0
    while not job.finished():
        child = context.Process(target=run, args=(job, 0.004))
        child.start()
        child.join(chance.uniform(0.0, 0.03 * (1 + kills / 20)))  # a busy machine is given longer
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            kills += 1
        blocks = len(list(job.folder.glob("*.parquet"))) if not job.finished() else most
        assert blocks >= most
        most = blocks
        assert kills < 500
    assert kills >= 3
    run(job)  # a kill after the rename leaves the folder to the next run
    assert job.out.read_bytes() == undisturbed.out.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} <= {"a.parquet", "b.parquet"}


def test_another_job_is_refused_or_replaced(tmp_path):
    out = tmp_path / "out.parquet"

    def stop(rows, _advance):
        if rows.start:
            raise KeyboardInterrupt
        return columns(rows)

    with pytest.raises(KeyboardInterrupt):
        make_job(out).run(stop, progress=False)
    with pytest.raises(ValueError, match="another job, which differs in kappa, seed"):
        run(make_job(out, seed=1, kappa=3.0))
    assert len(run(make_job(out, seed=1), overwrite=True)) == 11
    before = out.read_bytes()
    with pytest.raises(FileExistsError, match="not the result of this job"):
        run(make_job(out))
    assert out.read_bytes() == before
    assert len(run(make_job(out), overwrite=True)) == 11
    assert make_job(out).finished()


def test_two_runs_at_once_are_refused(tmp_path):
    job = make_job(tmp_path / "out.parquet")

    def nested(rows, _advance):
        with pytest.raises(OSError, match="another run is writing"):
            run(job)
        return columns(rows)

    job.run(nested, progress=False)


def test_a_run_that_starts_while_another_ends(tmp_path, monkeypatch):
    """The new run creates its lock file before the other removes the folder. The other ends with its result."""
    job, rmdir = make_job(tmp_path / "out.parquet"), Path.rmdir

    def late(folder):
        (folder / LOCK_FILE).touch()
        rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", late)
    run(job)
    assert job.finished()
    monkeypatch.undo()
    assert run(job) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_file_that_was_removed_does_not_count(tmp_path, monkeypatch, replaced):
    job, flock = make_job(tmp_path / "out.parquet"), fcntl.flock

    def removed(file, how):
        flock(file, how)
        (job.folder / LOCK_FILE).unlink()
        if replaced:
            (job.folder / LOCK_FILE).touch()

    monkeypatch.setattr(fcntl, "flock", removed)
    with pytest.raises(OSError, match="another run is writing"):
        run(job)
    assert not job.out.exists()


def test_another_file_is_named_and_replaced_only_on_request(tmp_path):
    job = make_job(tmp_path / "out.parquet")
    job.out.mkdir()
    with pytest.raises(OSError, match="is a folder"):
        run(job, overwrite=True)
    job.out.rmdir()
    job.out.write_bytes(b"no parquet")
    with pytest.raises(FileExistsError, match=r"out\.parquet exists and is not the result of this job"):
        run(job)
    assert job.out.read_bytes() == b"no parquet"
    run(job, overwrite=True)
    assert job.finished()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("mine", "with_facts"),
    [("mine.parquet", False), ("mine.parquet", True), (".mine.tmp", False), ("000000000000.parquet", False)],
)
def test_a_folder_that_no_job_made_is_refused_and_kept(tmp_path, mine, with_facts, overwrite):
    job = make_job(tmp_path / "out.parquet")
    job.folder.mkdir()
    (job.folder / mine).write_bytes(b"precious")
    if with_facts:
        write_json(job.folder / FACTS_FILE, job.facts)
    before = sorted(job.folder.iterdir())
    with pytest.raises(FileExistsError, match=r"not made here; move it|no job made them; move it"):
        run(job, overwrite=overwrite)
    assert sorted(job.folder.iterdir()) == before
    assert (job.folder / mine).read_bytes() == b"precious"
    assert not job.out.exists()


def test_another_job_removes_what_a_killed_one_left(tmp_path):
    job = make_job(tmp_path / "out.parquet")
    job.folder.mkdir()
    write_json(job.folder / FACTS_FILE, make_job(job.out, seed=1).facts)
    for name in ("000000000000.parquet", ".000000000010.parquet.012345678901.tmp", f".{FACTS_FILE}.012345678901.tmp"):
        (job.folder / name).write_bytes(b"left")
    run(job, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_damaged_blocks_are_named(tmp_path):
    job = make_job(tmp_path / "out.parquet")
    job.folder.mkdir()
    (job.folder / FACTS_FILE).write_text("{")
    with pytest.raises(ValueError, match="holds blocks of another job"):
        run(job)
    write_json(job.folder / FACTS_FILE, job.facts)
    block = job.folder / "000000000020.parquet"
    block.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"000000000020\.parquet is damaged"):
        run(job)
    assert not job.out.exists()
    block.unlink()
    assert [rows.start for rows in run(job)] == [20]


def test_bad_columns_and_sizes(tmp_path):
    job = make_job(tmp_path / "out.parquet")
    with pytest.raises(ValueError, match="column x has shape"):
        job.run(lambda _rows, _advance: {"x": np.zeros(3)}, progress=False)
    with pytest.raises(ValueError, match="at least 1"):
        Job(tmp_path / "x", 0, 10, {})


def test_progress_bar_shows_rate_and_time_left(tmp_path, capsys):
    make_job(tmp_path / "out.parquet").run(
        lambda rows, advance: advance(len(rows)) or columns(rows), progress=True, unit="queries"
    )
    shown = capsys.readouterr().err
    assert f"{ROWS}/{ROWS}" in shown
    assert "queries" in shown


def test_digest_tells_arrays_apart():
    x = torch.arange(6.0)
    assert hashing.digest([x]) == hashing.digest([torch.arange(12.0)[:6]])
    assert hashing.digest([x.numpy()]) == hashing.digest([np.arange(6, dtype=np.float32)])
    others = [[x.bfloat16()], [x.view(2, 3)], [x[:3], x[3:]], [x.flip(0)], [x.numpy()[::-1]]]
    assert len({hashing.digest(parts) for parts in [[x], *others]}) == 6
