"""Runs tasks in child processes that are killed, interrupted or hit by a disk error at a chosen moment.

`Nursery` starts that process: it has imported everything, runs one thread and never computes, so a fork of it begins at
once and has no thread of OpenMP to miss. Each child does one task of `TASKS`, or one command line, under a `Plan`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import geoflow_fast as gf
from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.explore import sources
from geoflow_fast.explore.page import write_page
from geoflow_fast.jobs.density import density_file
from geoflow_fast.jobs.embed import embed_images
from geoflow_fast.jobs.entropy import score_file
from geoflow_fast.jobs.job import Job
from geoflow_fast.jobs.watch import WatchSettings, watch_file
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.retrieval import held_out
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import LOCK_FILE
from geoflow_fast.training.logging import METRICS_FILE
from geoflow_fast.training.loop import Run

ROOT = Path(__file__).parents[2]
WIDTH = 6
SHAPE = gf.GeoFlowConfig(WIDTH, WIDTH, hidden=16, depth=1, heads=2)
CLOCKS = {"steps_per_second", "batch_wait_share", "coupling_seconds", "coupling_share"}
"""Fields of the metrics that depend on the clock."""


# ---- tasks: what a child makes in `out` of what is in `world` -----------------------------------------------------


def train(world: Path, out: Path) -> None:
    """Trains for twenty steps, with a line of metrics for each and a checkpoint for every second one."""
    torch.manual_seed(0)
    config = gf.TrainConfig(
        steps=20,
        batch_size=16,
        val_every=5,
        val_batches=1,
        checkpoint_every=2,
        warmup_steps=2,
        log_every=1,
        ema_decay=0.5,
    )
    gf.train(gf.GeoFlow(SHAPE), gf.EmbeddingPairs.open(world / "pairs"), config, out=out, progress=False)


def score(world: Path, out: Path) -> None:
    """Scores twelve blocks of queries."""
    flow = gf.GeoFlow.from_pretrained(world / "model")
    scorer = gf.RetrievalEntropy(flow, world / "gallery.npy", "t2i", n_samples=4, n_steps=4)
    score_file(scorer, world / "queries.npy", out / "scores.parquet", block=3, progress=False)


def density(world: Path, out: Path) -> None:
    """Computes the densities of twelve blocks of pairs."""
    settings = DensitySettings(n_steps=2)
    density_file(world / "model", world / "pairs", out / "densities.parquet", settings, block=8, progress=False)


def embed(world: Path, out: Path) -> None:
    """Embeds eight shards of pictures and their captions."""
    embed_images(
        world / "photos", ColourEncoder(), out / "embeddings", batch_size=2, workers=2, shard_rows=4, progress=False
    )


def head(world: Path, out: Path) -> None:
    """Trains a head for twenty steps, with a checkpoint for every second one."""
    config = gf.HeadConfig(
        steps=20, batch_size=16, val_every=5, checkpoint_every=2, points=2, hidden=8, bank=16, warmup_steps=2
    )
    gf.PosteriorHead.fit(gf.EmbeddingPairs.open(world / "pairs"), config, out=out / "head", progress=False)


def decide(world: Path, out: Path) -> None:
    """Calibrates a ladder, fits a trust, certifies a rule, looks at a log that grows, going on after the last look, and
    writes the page of it."""
    pairs = gf.EmbeddingPairs.open(world / "pairs")
    held_out.clock = lambda _: 0.0  # a calibration remembers what its evidence cost
    reranker = gf.BayesReranker(None, torch.from_numpy(pairs.image[np.arange(96)]), shortlist=60)
    reranker.calibrate(pairs, progress=False)
    reranker.save_calibration(out / "rerank.json")
    generator = np.random.default_rng(0)
    scores = -np.sort(-generator.normal(size=(500, 5)), axis=1)
    right = scores[:, 0] - scores[:, 1] > generator.random(500)
    trust = gf.Trust().fit(scores[:100], right[:100])
    trust.save(out / "trust.json")
    rule = trust.certify(scores[100:300], right[100:300], max_error=0.3)
    rule.save(out / "rule.json")
    hits = generator.integers(40, size=scores.shape)
    for end in (400, 500):
        grow(out / "log.parquet", {"index": hits[300:end], "scores": scores[300:end]})
        watch_file(out / "rule.json", out / "log.parquet", out / "health.parquet", WatchSettings())
    run, nothing = sources.RunFiles.open(out / "log.parquet", out / "rule.json"), sources.Described()
    write_page(sources.explored(run, nothing, nothing), out / "page.html")


def grow(log: Path, columns: dict[str, Any]) -> None:
    """Writes a log unless it is as long already: a log never shrinks, whatever happens to those who read it."""
    rows = len(columns["scores"])
    if not log.exists() or len(parquet.read_columns(log)["scores"]) < rows:
        parquet.write_columns(log, columns, rows)


TASKS: dict[str, Callable[[Path, Path], None]] = {
    "training": train,
    "scoring": score,
    "density": density,
    "embed": embed,
    "head": head,
    "decisions": decide,
}


# ---- what is left of them -----------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder by name, without locks and without the times in the metrics."""
    return {
        path.relative_to(folder).as_posix(): _timeless(path) if path.name == METRICS_FILE else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK_FILE
    }


def _timeless(metrics: Path) -> bytes:
    """The lines of metrics without what depends on the clock; an incomplete line stays as it is."""
    lines = []
    for line in metrics.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            line = json.dumps({key: value for key, value in json.loads(line).items() if key not in CLOCKS}) + "\n"
        lines.append(line)
    return "".join(lines).encode()


def is_temporary(name: str) -> bool:
    """Whether a file is an incomplete write."""
    return name.endswith(".tmp")


# ---- faults -------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What happens to a child.

    `kill_after`: SIGKILL after so many seconds. `strike_at`: the number, from 1, of the operation on files below `out`
    at which it is struck, before the operation is done; `strike`: "kill", or the name of the system's error that this
    operation ends with, and with `lasting` every later one. `size`: no file may grow beyond so many bytes. `full`: what
    is written goes to a full disk. `read_only`: what lies in `out` may not be changed. `signal` (its name) is sent in
    the middle of the step, block or batch `signal_at`, from 1.
    """

    kill_after: float | None = None
    strike_at: int | None = None
    strike: str = "kill"
    lasting: bool = False
    size: int | None = None
    full: bool = False
    read_only: bool = False
    signal: str | None = None
    signal_at: int = 1

    def prepare(self, out: Path, log: list[str]) -> None:
        """Prepares the child before its task, so that it writes its operations on files to `log`."""
        _watch(out, self, log)
        if self.size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))  # Python ignores SIGXFSZ: EFBIG
        if self.full:
            _write_to_a_full_disk()
        if self.read_only:
            _obey_permissions()
        if self.signal is not None:
            _signal_amid_work(getattr(signal, self.signal), self.signal_at)


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def _watch(out: Path, plan: Plan, log: list[str]) -> None:
    """Counts the operations on files below `out` and fails or kills at the planned one."""
    struck = os.fspath(out)

    def note(what: str, path: str) -> None:
        if not path.startswith(struck):
            return
        log.append(f"{what} {path[len(struck) :]}")
        due = plan.strike_at is not None and len(log) >= plan.strike_at
        if due and (plan.lasting or len(log) == plan.strike_at):
            if plan.strike == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, plan.strike)
            # As the system does it: an error of fsync has no file's name.
            raise OSError(number, os.strerror(number), *([] if what == "fsync" else [path]))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(arguments[0], (str, Path)) and arguments[2] & WRITING):
            note(event, os.fspath(arguments[0]))

    def fsync(handle: int) -> None:
        note("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    real, os.fsync = os.fsync, fsync
    sys.addaudithook(hook)


def _write_to_a_full_disk() -> None:
    """Replaces files that are opened from now on by /dev/full, which accepts no byte, except locks, which need none."""
    real = os.open

    def full(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_EXCL and Path(path).name != LOCK_FILE:
            return real("/dev/full", os.O_WRONLY)
        return real(path, flags, *rest, **more)

    os.open = full


def _obey_permissions() -> None:
    """Drops the privilege of root to write where permissions forbid it."""
    version, header = 0x20080522, (ctypes.c_uint32 * 2)()
    header[0] = version
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    sets[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _signal_amid_work(number: int, at: int) -> None:
    """Makes the child send itself the signal when the unit of work `at` begins."""
    begun = 0

    def begin() -> None:
        nonlocal begun
        begun += 1
        if begun == at:
            os.kill(os.getpid(), number)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            begin()
            return function(*arguments, **more)

        return call

    blocks = Job._compute_blocks

    def compute_blocks(job: Job, compute: Callable[..., Any], *rest: Any, **more: Any) -> None:
        blocks(job, before(compute), *rest, **more)

    Job._compute_blocks = compute_blocks
    Run.optimise = before(Run.optimise)
    ColourEncoder.encode_images = before(ColourEncoder.encode_images)


# ---- children -----------------------------------------------------------------------------------------------------


@dataclass
class End:
    """How a child ended: the exit status of its process, negative for a signal that killed it, and the seconds it ran.

    Unless it was killed: `operations` on files below `out`, the `error` that ended it, and the `words` of it or of the
    command.
    """

    status: int
    seconds: float
    operations: list[str] = field(default_factory=list)
    error: str | None = None
    words: str = ""


class Nursery:
    """The process from which children are forked."""

    def __init__(self) -> None:
        where = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__], env=where, text=True, **pipes)

    def run(self, task: str | list[str], world: Path, out: Path, plan: Plan | None = None) -> End:
        """Runs a task of `TASKS`, or a command line, in a child whose working folder is `world`."""
        asked = [task, str(world), str(out), dataclasses.asdict(plan or Plan())]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return End(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


def _live(task: str | list[str], world: Path, out: Path, plan: Plan, answer: int) -> None:
    """Runs a child from start to end; it never returns."""
    log: list[str] = []
    told: dict[str, Any] = {}
    status = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
        os.chdir(world)
        if isinstance(task, str):
            out.mkdir(exist_ok=True)
            plan.prepare(out, log)
            TASKS[task](world, out)
        else:
            plan.prepare(out, log)
            status, told["words"] = _command(task)
    except OSError as error:
        told = {"error": type(error).__name__, "words": str(error)}
        status = 2
    except BaseException as error:  # noqa: BLE001, told to the test
        told = {"error": type(error).__name__, "words": str(error)}
        status = 1
    finally:
        with os.fdopen(answer, "w") as file:
            json.dump({"operations": log, **told}, file)
        os._exit(status)


def _command(words: list[str]) -> tuple[int, str]:
    """Runs a command line in this process; returns its exit status and what it prints."""
    from geoflow_fast.cli.app import main

    said = os.memfd_create("said")
    for shown in (1, 2):
        os.dup2(said, shown)
    sys.argv = ["geoflow", *words]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        os.lseek(said, 0, os.SEEK_SET)
        return int(end.code or 0), os.fdopen(said).read()


def _raise_one(task: str | list[str], world: Path, out: Path, plan: Plan) -> End:
    """Forks a child, kills it when its time is up, and returns how it ended."""
    told, answer = os.pipe()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(told)
        _live(task, world, out, plan, answer)
    os.close(answer)
    ended = os.pidfd_open(child)
    if plan.kill_after is not None and not select.select([ended], [], [], plan.kill_after)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(told) as file:
        words = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ended)
    return End(status, time.monotonic() - begin, **json.loads(words or "{}"))


def _serve() -> None:
    """Starts children until no more are asked for."""
    torch.set_num_threads(1)
    for late in ("torch._dynamo", "pyarrow.dataset", "rich.progress", "geoflow_fast.cli"):
        importlib.import_module(late)  # once, instead of in every child
    Image.init()
    for line in sys.stdin:
        task, world, out, plan = json.loads(line)
        end = _raise_one(task, Path(world), Path(out), Plan(**plan))
        print(json.dumps(dataclasses.asdict(end)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _serve()
