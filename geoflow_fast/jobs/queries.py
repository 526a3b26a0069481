"""What the jobs over a file of queries share: opening the queries, and running the job that answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.data.ids import Ids, open_ids
from geoflow_fast.data.rows import Rows
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import flow_digest
from geoflow_fast.head.model import head_digest
from geoflow_fast.jobs.job import Job
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.rerank import BayesReranker
from geoflow_fast.runtime.progress import Advance

ITEM_COLUMNS = {"map_index", "top_index", "index", "answer"}
"""Columns that hold numbers of items."""
BLOCK_QUERIES = 64
"""Queries per pass over the gallery. A kill loses at most the work on one block."""


@dataclass(frozen=True)
class Naming:
    """Files of the ids that results show instead of row numbers. Without them they show the ids that rows come with, or
    numbers."""

    queries: Path | None = None
    items: Path | None = None

    def of_queries(self, rows: Rows) -> Ids | None:
        """The ids of the queries."""
        return rows.ids if self.queries is None else open_ids(self.queries, len(rows), "queries")

    def of_items(self, items: Gallery | Rows) -> Ids | None:
        """The ids of the items."""
        return items.ids if self.items is None else open_ids(self.items, len(items), "items")


def open_queries(path: Path, dim: int, world: World = ALONE, model: str = "flow", *, normalize: bool = False) -> Rows:
    """Opens a `.npy` file or a folder of shards, and checks that it holds unit rows of width `dim`, which is what a
    `model` expects. With `normalize`, rows are scaled to unit norm."""
    rows = open_rows(path, "queries")
    if rows.dim != dim:
        raise ValueError(f"queries {path} have width {rows.dim}, but the {model} expects {dim}")
    if len(rows) == 0:
        raise ValueError(f"queries {path} are empty: there is nothing to score")
    rows.check(normalize=normalize, world=world)
    return rows


def model_digest(searcher: RetrievalEntropy | BayesReranker) -> dict[str, str]:
    """The digests of the models that answer, under the names of their kinds."""
    if isinstance(searcher, RetrievalEntropy):
        return {searcher.source.NAME: searcher.source.digest()}
    digests = {} if searcher.flow is None else {"flow": flow_digest(searcher.flow)}
    return digests if searcher.head is None else {**digests, "head": head_digest(searcher.head)}


def answer_queries(
    searcher: RetrievalEntropy | BayesReranker,
    queries: Rows,
    out: Path,
    facts: Mapping[str, Any],
    answer: Callable[..., object],
    columns: Sequence[str],
    *,
    block: int,
    together: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    naming: Naming | None = None,
) -> None:
    """Writes the Parquet file `out`, whose `columns` are attributes of what `answer(queries, advance=...)` returns. The
    ids of `naming` take the place of the numbers of queries and items.

    The job is identified by `facts`, the settings of `searcher` and digests of the model, the queries and the gallery.
    The ranks of the gallery's world share the blocks or, with `together`, compute each block together.
    """
    world, naming = searcher.gallery.world, naming or Naming()
    items, names = naming.of_items(searcher.gallery), naming.of_queries(queries)
    inputs = {
        **model_digest(searcher),
        "queries": queries.digest(world),
        "gallery": searcher.gallery.digest(),
    }
    if items is not None:
        inputs["item_ids"] = items.digest()

    def compute(rows: range, advance: Advance) -> Mapping[str, Any]:
        answers = answer(torch.from_numpy(queries[np.arange(rows.start, rows.stop)]), advance=advance)
        numbers: dict[str, Tensor] = {name: getattr(answers, name) for name in columns}
        if items is None:
            return numbers
        return {name: items.column(x.cpu().numpy()) if name in ITEM_COLUMNS else x for name, x in numbers.items()}

    job = Job(out, len(queries), block, {**facts, **searcher.settings, **inputs}, numbered="query", ids=names)
    job.run(compute, overwrite=overwrite, unit="queries", progress=progress, world=world, together=together)
