"""Timing, machine limits and tables shared by all benchmarks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def time_together(contenders: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Median seconds of each contender, run in turns so that a noisy moment of the machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def copy_bandwidth(megabytes: int = 256, rounds: int = 7) -> float:
    """Bytes read plus bytes written per second by a large memory copy: the limit of streaming operations."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(rounds))
    return 2 * source.nbytes / best


def read_bandwidth(megabytes: int = 256, rounds: int = 7) -> float:
    """Bytes per second of one streaming read of a large array (a sum)."""
    source = torch.ones(megabytes * 2**18)
    return source.nbytes / min(_seconds(source.sum) for _ in range(rounds))


def gemm_peak(size: int = 4096, inner: int = 1024, rounds: int = 5) -> float:
    """Floating-point operations per second of torch's own float32 matrix product, the best of `rounds`."""
    a, b, out = torch.randn(size, inner), torch.randn(inner, size), torch.empty(size, size)
    return 2 * size * size * inner / min(_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(rounds))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def gate(name: str, holds: bool) -> None:
    """A benchmark whose answer is wrong has no time: stops the run."""
    if not holds:
        raise SystemExit(f"correctness gate failed: {name}; no times are reported")


def report(name: str, rows: list[dict[str, Any]], notes: dict[str, Any]) -> str:
    """Writes rows and notes as JSON under benchmarks/results and returns the rows as a Markdown table."""
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{name}.json"
    unfinished = target.with_suffix(".part")
    unfinished.write_text(json.dumps({"rows": rows, "notes": notes, "threads": torch.get_num_threads()}, indent=2))
    unfinished.replace(target)
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
