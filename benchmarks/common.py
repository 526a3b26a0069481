"""Timing, memory, gates and tables that all benchmarks share."""

from __future__ import annotations

import ctypes
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geoflow_fast as gf
from geoflow_fast.ops import native
from geoflow_fast.runtime.files import write_json

RESULTS = Path(__file__).parent / "results"
STATUS = Path("/proc/self/status")
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
"""Real embeddings, where they are beside the repository."""


def shared_pairs(path: str) -> gf.EmbeddingPairs:
    """The pairs of a shared file, such as "flickr8k/train"."""
    with np.load(SHARED / f"{path}.npz", allow_pickle=False) as file:
        image, text = (file[name].astype(np.float32) for name in ("image_emb", "text_emb"))
        index = file["text_image_index"].astype(np.int64) if "text_image_index" in file else None
    return gf.EmbeddingPairs.from_arrays(image, text, index, normalize=True)


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each contender, run in turns so that a noisy moment of the machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            seconds[name].append(seconds_of(run))
    return seconds


def time_together(contenders: Mapping[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Median seconds of each contender, in turns, after one round that is not counted."""
    time_turns(contenders, 1)
    return {name: statistics.median(values) for name, values in time_turns(contenders, rounds).items()}


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / 2 / middle)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of log seconds over log size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def status_bytes(key: str) -> int:
    """A line of /proc/self/status, such as VmRSS, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{STATUS} has no {key}")


def watched(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `run` returns, its seconds, and how far the resident memory of this process rose above its start meanwhile,
    in bytes (NaN where there is no /proc)."""
    if STATUS.exists():
        # Pages that malloc keeps for itself would be used again unseen.
        ctypes.CDLL(None).malloc_trim(0)
        (STATUS.parent / "clear_refs").write_text("5")
    before = status_bytes("VmRSS") if STATUS.exists() else math.nan
    start = time.perf_counter()
    answer = run()
    seconds = time.perf_counter() - start
    return answer, seconds, max(0.0, status_bytes("VmHWM") - before) if STATUS.exists() else math.nan


def gate(name: str, holds: bool) -> None:
    """A benchmark whose answer is wrong has no time: stops the run."""
    if not holds:
        raise SystemExit(f"correctness gate failed: {name}; no times are reported")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = [line.split(":")[1] for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": (names or [platform.processor()])[0].strip(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.split("+")[0],
        "instructions": native.isa() if native.missing() is None else torch.backends.cpu.get_cpu_capability(),
        "day": time.strftime("%Y-%m-%d"),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for gigabytes, beside the results, where git does not see it; taken away afterwards."""
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RESULTS) as name:
        yield Path(name)


def report(name: str, rows: list[dict[str, Any]], notes: dict[str, Any]) -> str:
    """Writes rows and notes as JSON under benchmarks/results and returns the rows as a Markdown table."""
    save(name, {"rows": rows, "notes": notes, "threads": torch.get_num_threads()})
    return markdown(rows)


def save(name: str, value: dict[str, Any]) -> None:
    """benchmarks/results/<name>.json, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / f"{name}.json", value)


def load(name: str) -> dict[str, Any] | None:
    """What `save` wrote last under that name."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line per row; the first row names the columns."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Three digits of a number, without an exponent where that reads well."""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
