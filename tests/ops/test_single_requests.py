"""Requests one at a time, as a service has them: no thread is started and no fresh memory is touched per call."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import geoflow_fast as gf
from tests.head.test_model import random_head

TASKS = Path("/proc/self/task")
CALLS, WARM_UP = 100, 30
MOST_FAULTS = 1.0
"""Fresh pages per call: a buffer of a panel of rows, if it came from the system every time, would take twenty."""

pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="only Linux lists the threads of a process")


def rows(count: int, width: int = 256) -> torch.Tensor:
    return gf.geometry.normalize(torch.randn(count, width))


def search() -> Callable[[torch.Tensor], object]:
    gallery = gf.Gallery(rows(5000))
    return lambda query: gallery.search(query, 10)


def search_by_codes() -> Callable[[torch.Tensor], object]:
    gallery = gf.Gallery(rows(5000), codes=True)
    return lambda query: gallery.search(query, 10)


def head_posterior() -> Callable[[torch.Tensor], object]:
    head = random_head(gf.HeadConfig(points=3, hidden=8, bank=11), 256, 256)
    return gf.RetrievalEntropy(head, gf.Gallery(rows(5000)), "t2i")


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def threads() -> int:
    return len(list(TASKS.iterdir()))


@pytest.mark.parametrize("request_of", [search, search_by_codes, head_posterior])
@pytest.mark.parametrize("queries", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_a_call_starts_no_thread_and_touches_no_fresh_memory(request_of, queries):
    torch.set_num_threads(2)
    answer, some = request_of(), [rows(queries) for _ in range(CALLS)]
    for query in some[:WARM_UP]:
        answer(query)
    before, pages = threads(), faults()
    for query in some:
        answer(query)
    assert threads() == before
    assert (faults() - pages) / CALLS < MOST_FAULTS
