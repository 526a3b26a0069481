"""One and two ranks of one thread each: retrieval entropy with the gallery or the queries spread, and log-densities.

torchrun starts two ranks. Each job is run by the first alone, as a process without torchrun runs it, while the other
waits, then by both, in turns; timed is from the opening of the inputs until the file is there. The gate compares the
files. Two processes are not always twice one: what the machine allows is measured in the same turns, by matrix products
and by reads of memory that the ranks share without a word to each other.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geoflow_fast as gf
from benchmarks.methods.results import gate, report
from geoflow_fast import noise
from geoflow_fast.distributed import ALONE, World, joined
from geoflow_fast.jobs.density import density_file
from geoflow_fast.jobs.entropy import open_scorer, score_file
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.retrieval.gallery import BLOCK_ROWS
from geoflow_fast.runtime.parquet import read_columns

DIM, ITEMS, QUERIES, QUERY_BLOCK, PAIRS, PAIR_BLOCK = 256, 200_000, 128, 16, 768, 16
PRODUCTS, READS = 200, 200
ROUNDS = 5
LIMIT = "matrix products"

Task = Callable[[Path, Path, World], object]


def prepare(folder: Path) -> None:
    """A flow with random weights, a gallery in shards, queries and pairs."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=128, depth=2, layer_scale=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    flow.save_pretrained(folder / "model")
    (folder / "gallery").mkdir()
    for number, part in enumerate(noise.sample_uniform(ITEMS, DIM).numpy().reshape(4, -1, DIM)):
        np.save(folder / "gallery" / f"img_emb_{number}.npy", part)
    np.save(folder / "queries.npy", noise.sample_uniform(QUERIES, DIM).numpy())
    pairs = [noise.sample_uniform(PAIRS, DIM) for _ in range(2)]
    gf.EmbeddingPairs.from_arrays(*pairs).save(folder / "pairs", dtype=np.float32)


@functools.cache
def _factors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    samples, items = torch.ones(40 * QUERY_BLOCK, DIM), torch.ones(BLOCK_ROWS, DIM)
    return samples, items.T, samples @ items.T


@functools.cache
def _long_array() -> torch.Tensor:
    return torch.ones(2**25)


def multiply(_folder: Path, _out: Path, world: World) -> None:
    """Samples of a block of queries against a block of items, PRODUCTS times."""
    samples, items, out = _factors()
    for _ in world.own(PRODUCTS):
        torch.mm(samples, items, out=out)
    world.barrier()


def read(_folder: Path, _out: Path, world: World) -> None:
    """An array that no cache holds, READS times."""
    for _ in world.own(READS):
        _long_array().sum()
    world.barrier()


def entropy(layout: str, folder: Path, out: Path, world: World) -> None:
    """`geoflow entropy --fast`."""
    where = folder / "model", folder / "gallery"
    scorer = open_scorer(*where, "t2i", fast=True, device="cpu", world=world, kappa=20.0)
    score_file(scorer, folder / "queries.npy", out, block=QUERY_BLOCK, layout=layout, progress=False)


def density(folder: Path, out: Path, world: World) -> None:
    """`geoflow density`."""
    where, settings = (folder / "model", folder / "pairs", out), DensitySettings(n_steps=4)
    density_file(*where, settings, device="cpu", block=PAIR_BLOCK, progress=False, world=world)


TASKS: dict[str, Task] = {
    LIMIT: multiply,
    "reads of memory": read,
    "entropy, gallery spread": functools.partial(entropy, "gallery"),
    "entropy, queries spread": functools.partial(entropy, "queries"),
    "density": density,
}


def output(folder: Path, task: str, number: int, ranks: int) -> Path:
    """The file that a job writes in a round."""
    return folder / f"{list(TASKS).index(task)}_{number}_{ranks}.parquet"


def rank_main(folder: Path, rounds: int) -> None:
    """What torchrun starts: seconds and bytes of each job, by task and number of ranks, into `timings.json`."""
    torch.set_num_threads(1)
    timings: dict[str, dict[str, list[float]]] = {}
    with joined() as world:
        for number in range(rounds + 1):
            for name, task in TASKS.items():
                lines = timings.setdefault(name, {"1": [], "2": [], "bytes": []})
                if world.is_main:
                    lines["1"].append(_seconds(task, folder, output(folder, name, number, 1), ALONE))
                world.barrier()
                before = world.traffic
                lines["2"].append(_seconds(task, folder, output(folder, name, number, 2), world))
                lines["bytes"].append(world.traffic - before)
        if world.is_main:
            (folder / "timings.json").write_text(json.dumps(timings))


def _seconds(task: Task, folder: Path, out: Path, world: World) -> float:
    start = time.perf_counter()
    task(folder, out, world)
    return time.perf_counter() - start


def launch(folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """What the ranks timings. The first round, in which things are imported and mapped, is left out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "benchmarks.methods.studies.distributed", str(folder), str(rounds)]
    done = subprocess.run(
        [*command, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"the ranks failed with {done.returncode}; no times are reported\n{done.stderr}")
    timings = json.loads((folder / "timings.json").read_text())
    return {task: {key: values[1:] for key, values in lines.items()} for task, lines in timings.items()}


def same(first: Path, second: Path) -> bool:
    """Whether two files hold the same numbers to 1e-5."""
    a, b = read_columns(first), read_columns(second)
    return list(a) == list(b) and all(np.allclose(a[name], b[name], rtol=1e-5, atol=1e-5) for name in a)


def run(rounds: int = ROUNDS) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        timings = launch(folder, rounds)
        for task in TASKS:
            files = [[output(folder, task, number, ranks) for ranks in (1, 2)] for number in range(rounds + 1)]
            if files[0][0].exists():
                gate(f"{task}: two ranks write what one writes", all(same(*pair) for pair in files))
    rows: list[dict[str, Any]] = []
    for task, lines in timings.items():
        one, two = statistics.median(lines["1"]), statistics.median(lines["2"])
        rows.append({"job": task, "1 rank, s": one, "2 ranks, s": two, "ratio": one / two})
        rows[-1] |= {"of the machine's": f"{one / two / rows[0]['ratio']:.0%}", "MB per rank": lines["bytes"][0] / 1e6}
    sizes = {"dim": DIM, "items": ITEMS, "queries": QUERIES, "pairs": PAIRS}
    return report("distributed", rows, {**sizes, "rounds": rounds, "threads per rank": 1})


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]))
