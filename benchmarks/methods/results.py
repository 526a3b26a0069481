"""Real embeddings, gates, and the tables of studies: JSON files, Markdown, and blocks of the documentation."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geoflow_fast as gf
from geoflow_fast.runtime.files import write_atomic, write_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
SHARED = ROOT.parent / "shared" / "data"
"""Real embeddings, if they are next to the repository."""
BLOCK = re.compile(r"(<!-- study: (?!end)(.+?) -->\n)(.*?)(<!-- study: end -->)", flags=re.DOTALL)
"""A block of a page: its first line, its key, its contents and its last line."""


def shared_pairs(path: str) -> gf.EmbeddingPairs:
    """The pairs of a shared file, such as "flickr8k/train"."""
    with np.load(SHARED / f"{path}.npz", allow_pickle=False) as file:
        image, text = (file[name].astype(np.float32) for name in ("image_emb", "text_emb"))
        index = file["text_image_index"].astype(np.int64) if "text_image_index" in file else None
    return gf.EmbeddingPairs.from_arrays(image, text, index, normalize=True)


def gate(claim: str, holds: bool) -> None:
    """Stops the study if a claim does not hold."""
    if not holds:
        raise SystemExit(f"this does not hold: {claim}")


def report(name: str, rows: list[dict[str, Any]], notes: dict[str, Any]) -> str:
    """Writes rows and notes to benchmarks/results/<name>.json and returns the rows as a Markdown table."""
    save(name, {"rows": rows, "notes": notes, "threads": torch.get_num_threads()})
    return markdown(rows)


def save(name: str, value: dict[str, Any]) -> None:
    """Writes benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / f"{name}.json", value)


def load(name: str) -> dict[str, Any] | None:
    """Reads what `save` last wrote under that name; None if there is nothing."""
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


def write_blocks(page: Path) -> None:
    """Writes tables into a page: between `<!-- study: A B -->` and `<!-- study: end -->` goes the table that `report`
    stored as "A_B". A block whose table was not measured stays as it is."""

    def filled(match: re.Match[str]) -> str:
        begin, key, old, end = match.groups()
        result = load(re.sub(r"[ /]", "_", key))
        return begin + (old if result is None else markdown(result["rows"]) + "\n") + end

    write_atomic(page, BLOCK.sub(filled, page.read_text()).encode())


def median_seconds(contenders: Mapping[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Median seconds of each call, taken in turns after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}
