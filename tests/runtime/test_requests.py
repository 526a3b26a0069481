"""One request after another, as a service has them: no fresh memory and no new thread once a few have been served."""

from __future__ import annotations

import functools
import json
import mmap
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import geoflow_fast as gf

ITEMS, WIDTH, TOP, POINTS = 40_000, 256, 10, 8
FIRST, REQUESTS, TURNS = 10, 20, 12
FAULTS = 4
"""Fresh pages of one request at most. The scratch memory of the smallest of them is some fifty pages."""

Request = Callable[[int], object]


def requests() -> dict[str, Request]:
    """By name, a call that serves the request of a number."""
    torch.manual_seed(0)
    rows = gf.geometry.normalize(torch.randn(ITEMS, WIDTH))
    plain = gf.Gallery(rows)
    coded = gf.Gallery(rows, codes=True)
    queries = gf.geometry.normalize(rows[:64] + 0.05 * torch.randn(64, WIDTH)).unsqueeze(1)  # [64, 1, d]
    points = 20 * queries.unsqueeze(2).expand(-1, 1, POINTS, -1)
    weights = torch.zeros(1, POINTS)

    def posterior(gallery: gf.Gallery) -> Request:
        return lambda k: gallery.statistics(points[k], 1.0, TOP, sample_bias=weights, precision="auto")

    flow = gf.GeoFlow(gf.GeoFlowConfig(64, 64, hidden=64, depth=2)).eval()
    few = gf.geometry.normalize(rows[:2000, :64]).unsqueeze(1)
    reranker = gf.BayesReranker(flow, gf.Gallery(few.squeeze(1)), "t2i", shortlist=32)
    density = gf.DensitySettings(n_steps=4)
    return {
        "search": lambda k: plain.search(queries[k], TOP),
        "search by codes": lambda k: coded.search(queries[k], TOP),
        "posterior": posterior(plain),
        "re-ranking": lambda k: reranker(few[k]),
        "density": lambda k: gf.log_density(flow, few[k], few[k + 1], settings=density),
    }


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def turn(serve: Request) -> int:
    """Fresh pages of a few requests."""
    before = faults()
    for number in range(FIRST, FIRST + REQUESTS):
        serve(number)
    return faults() - before


def served(serve: Request) -> tuple[int, int]:
    """New threads of all turns, and fresh pages of the turn that took fewest: a request that needs fresh memory needs
    it in every turn, whatever else the process or the kernel does meanwhile. A turn within the bound is the last."""
    for number in range(FIRST):
        serve(number)
    before = threads()
    pages = turn(serve)
    for _ in range(TURNS - 1):
        if pages <= FAULTS * REQUESTS:
            break
        pages = min(pages, turn(serve))
    return pages, threads() - before


def serve_all() -> None:
    """Prints what each kind of request takes."""
    torch.set_num_threads(2)
    warnings.filterwarnings("ignore", "BayesReranker is uncalibrated")
    print(json.dumps({name: served(serve) for name, serve in requests().items()}))


@functools.cache
def taken() -> dict[str, tuple[int, int]]:
    """The same from a process of its own, as a service is one: its memory is not what other tests have left."""
    run = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts threads in /proc")
@pytest.mark.parametrize(
    "name",
    ["search", "search by codes", "posterior", "re-ranking", "density"],
)
def test_a_request_takes_no_fresh_memory_and_starts_no_thread(name: str) -> None:
    pages, new_threads = taken()[name]
    assert new_threads == 0
    assert pages <= FAULTS * REQUESTS


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts threads in /proc")
def test_fresh_memory_is_noticed() -> None:
    least = 50 * mmap.PAGESIZE  # the scratch memory of the smallest request
    pages, _ = served(lambda _: mmap.mmap(-1, least).write(bytes(least)))
    assert pages > FAULTS * REQUESTS


if __name__ == "__main__":
    serve_all()
