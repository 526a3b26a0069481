"""Ranks for tests: functions that run in several processes of one machine at once, as torchrun would start them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import geoflow_fast as gf
from geoflow_fast import distributed
from geoflow_fast.data.rows import Rows
from geoflow_fast.distributed import World, joined
from geoflow_fast.jobs import density, entropy, job
from geoflow_fast.jobs.rerank import open_reranker, rerank_file, settle_calibration
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import parquet
from geoflow_fast.training.batches import Batch, BatchMaker
from geoflow_fast.training.loop import Run

# The server imports what the ranks use once; each rank is a fork of it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ranks", "pyarrow.parquet", "rich.progress", "torch._dynamo"])

RankFunction = Callable[..., Any]


def run_ranks(size: int, task: RankFunction, *arguments: Any, raising: bool = True) -> list[Any]:
    """Returns what `task(world, *arguments)` returns on each of `size` ranks, and None for a rank that was killed. An
    error of a rank is raised here or, unless `raising` is set, takes the place of its result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        CONTEXT.Process(target=_rank, args=(rank, size, port, send, task, arguments), daemon=True)
        for rank, (_, send) in enumerate(pipes)
    ]
    for process, (_, send) in zip(processes, pipes):
        process.start()
        send.close()
    results = []
    for receive, _ in pipes:
        try:
            results.append(receive.recv())
        except EOFError:
            results.append(None)
    for process in processes:
        process.join()
    for result in results:
        if raising and isinstance(result, BaseException):
            raise result
    return results


def _rank(rank: int, size: int, port: int, send: Any, task: RankFunction, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.BEAT_SECONDS = 0.5
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with joined() as world:
            send.send(task(world, *arguments))
    except Exception as error:  # noqa: BLE001, the test gets it and raises it
        send.send(error)


def torchrun(size: int, *words: str | Path, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Starts `torchrun --nproc-per-node size options -m geoflow_fast words` in a process group of its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [*launch, "-m", "geoflow_fast", *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that a shell runs in the background ignore Ctrl-C, and the processes they start would ignore it too.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def ended(job: subprocess.Popen[str], seconds: float = 600) -> tuple[int, str, str]:
    """Waits for a job of torchrun and returns its exit code and what it printed. Nothing of it is left running."""
    try:
        shown, errors = job.communicate(timeout=seconds)
        return job.returncode, shown, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


# ---- tasks --------------------------------------------------------------------------------------------------------


def use_every_call(world: World) -> dict[str, Any]:
    """Makes each call once, with counts that the number of ranks does not divide."""
    results: dict[str, Any] = {
        "shared": world.share({"from": world.rank, "none": None}),
        "claimed": list(world.claims(9)),
    }
    for operation in ("sum", "max", "min"):
        results[operation] = world.all_reduce(torch.tensor([world.rank, -world.rank]), operation).tolist()
    results["broadcast"] = world.broadcast(torch.tensor([world.rank + 5])).item()
    for count in (0, 1, 7):
        own = world.own(count)
        rows = torch.arange(count, dtype=torch.float64).unsqueeze(1)
        if count:
            counts = [len(share) for share in world.shares(count)]
            results[f"gathered {count}"] = world.gather_rows(rows[own.start : own.stop], counts).squeeze(1).tolist()
        results[f"swapped {count}"] = world.swap_rows(rows + 100 * world.rank).squeeze(2).tolist()
    world.add_up("things", world.rank + 1)
    world.barrier()
    results["added"] = world.add_up("things", 0)
    # The first rank has more entries than the dtype can count, the others have none.
    results["mean"] = world.mean(torch.ones(1001 if world.is_main else 0, dtype=torch.bfloat16))
    return results


def divided_statistics(world: World, queries: int, items: int, top_k: int) -> tuple[list[np.ndarray], int]:
    """Returns the statistics of a gallery that is divided among the ranks, and how many bytes were sent."""
    gallery = Gallery(gallery_rows(items), world=world).divided_among_ranks()
    before = world.traffic
    statistics = gallery.statistics(
        sample_rows(queries), 20.0, top_k, bias_of(items), sample_bias=sample_bias_of(queries)
    )
    names = ("peak", "weight", "moment", "top_score", "top_index")
    return [getattr(statistics, name).numpy() for name in names], world.traffic - before


def gallery_rows(items: int) -> torch.Tensor:
    return sample_uniform(items, 6, generator=torch.Generator().manual_seed(items))


def sample_bias_of(queries: int) -> torch.Tensor:
    return torch.randn(queries, 3, generator=torch.Generator().manual_seed(8))


def sample_rows(queries: int) -> torch.Tensor:
    return sample_uniform(3 * queries, 6, generator=torch.Generator().manual_seed(9)).view(queries, 3, 6)


def bias_of(items: int) -> torch.Tensor:
    return torch.linspace(-1, 1, items)


def score(
    world: World, folder: Path, out: str, layout: str, block: int = 5, fatal: tuple[int, int] | None = None
) -> int:
    """Scores the queries of `folder` and returns how many bytes were sent. `fatal`: the rank that is killed, and before
    which block."""
    if fatal is not None and world.rank == fatal[0]:
        _die_at_block(fatal[1])
    settings = {"n_samples": 4, "n_steps": 2, "kappa": 15.0, "top_k": 3}
    scorer = entropy.open_scorer(
        folder / "model", folder / "gallery", "t2i", fast=False, device="cpu", world=world, **settings
    )
    write = parquet.write_columns

    def write_slowly(path: Path, columns: parquet.Columns, rows: int) -> None:
        time.sleep(0.3)  # so that the rank that is killed gets as far as that, whichever began first
        write(path, columns, rows)

    others = fatal is not None and world.rank != fatal[0]
    with mock.patch.object(job, "write_columns", write_slowly if others else job.write_columns):
        entropy.score_file(
            scorer, folder / "queries.npy", folder / out, with_top=True, block=block, layout=layout, progress=False
        )
    return world.traffic


def densities(world: World, folder: Path, out: str, slow: int | None = None) -> list[int]:
    """Computes the log-densities of the pairs of `folder` and returns the first row of each block that this rank made.
    `slow`: a rank that takes longer than the others."""
    made: list[int] = []
    write = parquet.write_columns

    def write_and_tell(path: Path, columns: parquet.Columns, rows: int) -> None:
        made.append(int(path.stem))
        if world.rank == slow:
            time.sleep(3)
        write(path, columns, rows)

    settings = DensitySettings(n_steps=2)
    paths = folder / "model", folder / "pairs", folder / out
    with mock.patch.object(job, "write_columns", write_and_tell):  # a world of one runs in the caller's process
        density.density_file(*paths, settings, block=4, device="cpu", progress=False, world=world)
    return made


def rerank(world: World, folder: Path, out: str) -> None:
    """Re-ranks the queries of `folder`, after calibration on its held-out pairs."""
    settings = {"shortlist": 5, "n_steps": 2}
    reranker = open_reranker(folder / "model", folder / "gallery", "t2i", device="cpu", world=world, **settings)
    settle_calibration(reranker, folder / "model", folder / f"{out}.json", folder / "held_out")
    rerank_file(reranker, folder / "queries.npy", folder / out, block=4, progress=False)


def _die_at_block(number: int) -> None:
    """Makes this process kill itself when its scorer is asked for block `number` of the queries, counted from 0."""
    score, asked = gf.RetrievalEntropy.score, iter(range(10**9))

    def score_or_die(*arguments: Any, **options: Any) -> Any:
        if next(asked) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return score(*arguments, **options)

    gf.RetrievalEntropy.score = score_or_die


def digest_of(world: World, parts: list[np.ndarray]) -> str:
    return Rows(parts, "rows").digest(world)


def check_rows(world: World, rows: np.ndarray) -> str | None:
    """Returns the error about this rank's share of the rows, if there is one."""
    try:
        Rows([rows], "rows").check(normalize=False, world=world)
    except ValueError as error:
        return str(error)
    return None


def batch_of(rank: int, size: int, changes: dict[str, Any], step: int) -> Batch:
    """The rows of one of `size` ranks of a training batch."""
    maker = BatchMaker(small_flow(), small_pairs(), gf.TrainConfig(**{**SHORT, **changes}), rank, size)
    return maker.training(step)


def train_small(world: World, out: Path | None, changes: dict[str, Any], fatal: tuple[int, int] | None = None) -> dict:
    """Trains a small flow and returns its final weights and facts of the report. `fatal`: the rank that is killed, and
    at which step."""
    if fatal is not None and world.rank == fatal[0]:
        optimise = Run.optimise

        def optimise_or_die(run: Run[Any], batch: Any) -> Any:
            if run.step == fatal[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            return optimise(run, batch)

        Run.optimise = optimise_or_die  # type: ignore[method-assign]
    flow = small_flow(seed=world.rank)  # all ranks start with the weights of the first
    config = gf.TrainConfig(**{**SHORT, **changes})
    report = gf.train(flow, small_pairs(), config, out=out, progress=False, world=world)
    weights = torch.cat([p.detach().flatten() for p in flow.parameters()]).numpy()
    return {"weights": weights, "best": report.best_val_loss, "steps": report.steps, "finished": report.finished}


def train_slowly(world: World, out: Path, changes: dict[str, Any], slow: int) -> dict:
    """Runs `train_small` with a rank `slow` whose step takes twice as long as the others wait for a lost rank."""
    optimise = Run.optimise

    def wait(run: Run[Any], batch: Any) -> Any:
        if run.step == 2 and world.rank == slow:
            time.sleep(2 * distributed.LOST_SECONDS)
        return optimise(run, batch)

    with mock.patch.object(distributed, "LOST_SECONDS", 3.0), mock.patch.object(Run, "optimise", wait):
        return train_small(world, out, changes)


def fit_head(world: World, out: Path) -> dict[str, Any]:
    """Trains a small head, without the dropout and the noise that ranks draw for themselves; returns its weights and
    its report."""
    config = gf.HeadConfig(
        steps=30, batch_size=63, lr=5e-3, warmup_steps=5, val_every=10, hidden=8, dropout=0.0, bias_hidden=4, bank=9
    )
    head = gf.PosteriorHead.fit(small_pairs(), config, k=2, out=out, progress=False, world=world)
    return {"weights": torch.cat([p.detach().flatten() for p in head.parameters()]).numpy(), "report": head.report}


SHORT: dict[str, Any] = {
    "steps": 50,
    "batch_size": 64,
    "lr": 2e-3,
    "warmup_steps": 5,
    "val_every": 25,
    "checkpoint_every": 10,
    "log_every": 1,
    "conditional_share": 0.1,
    "ramp_share": 0.1,
}


def small_flow(seed: int = 0) -> gf.GeoFlow:
    torch.manual_seed(seed)
    return gf.GeoFlow(gf.GeoFlowConfig(6, 5, hidden=16, depth=1, heads=2, dropout=0.0, layer_scale=0.1))


def small_pairs() -> gf.EmbeddingPairs:
    generator = torch.Generator().manual_seed(3)
    return gf.EmbeddingPairs.from_arrays(*(sample_uniform(300, d, generator=generator) for d in (6, 5)))
