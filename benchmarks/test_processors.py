"""Instruction sets side by side: a process for each that this processor has from AVX2 on.

In each process this library's kernels and torch's products keep to an instruction set. A processor with AVX2 alone has
other clocks and caches, so its column says which paths are chosen there and how they compare, not how fast such a
machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import Worker, rows_of
from geoflow_fast.ops import extension

TORCH_NAMES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""By the name of an instruction set here, the variables that keep torch and its libraries to it."""
OLDEST = "avx2"
KNOWN = extension.supported_isas()
TARGETS = KNOWN[KNOWN.index(OLDEST) :] if OLDEST in KNOWN else KNOWN[-1:]
ROWS = (
    "Exact search, 64 queries, N = 100,000, d = 1024: geoflow_fast",
    "Exact search, 64 queries, N = 100,000, d = 1024: geoflow_fast, bytes",
    "Gallery posterior, 8 x 50 samples, N = 100,000, d = 1024: geoflow_fast",
    'Gallery posterior, 8 x 50 samples, N = 100,000, d = 1024: geoflow_fast, `precision="auto"`',
    "Coupling, B = 2048, d = 1024: geoflow_fast",
    "Interpolant, B = 8192, d = 1024: geoflow_fast",
    "Velocity, B = 512, d = 1024, hidden = 512: geoflow_fast",
)
"""Without `bytes` where the processor has no products of bytes."""


@pytest.fixture(scope="module", params=TARGETS)
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[str, Worker]]:
    environment = {"GEOFLOW_ISA": request.param, **TORCH_NAMES.get(request.param, {})}
    worker = Worker(Path(__file__).parents[1], ["full"], environment)
    yield request.param, worker
    worker.close()


@pytest.mark.parametrize("row", ROWS)
def test_target(benchmark: Any, worker: tuple[str, Worker], row: str) -> None:
    isa, process = worker
    rows = rows_of(process.ask("list"))
    if row not in rows:
        pytest.skip(f"{isa} has no instructions for this path")
    number, call = rows[row]
    process.ask("load", number)
    seconds = process.ask("check", call)  # ends the process if the answer is wrong
    benchmark.group = row
    benchmark.extra_info |= {"contender": isa, "kind": "ours"}
    benchmark.pedantic(process.ask, ("time", call, 1), rounds=max(3, min(30, int(2 / seconds))))
