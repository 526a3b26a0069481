"""Log-densities of a folder of pairs: blocks of pairs, continued after a kill, into one Parquet file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.jobs.job import Job, quantiles
from geoflow_fast.likelihood.density import chain_rule, epistemic_stderr
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.runtime import checks, hashing, parquet
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.parquet import Columns
from geoflow_fast.runtime.progress import Advance

BLOCK_PAIRS = 256
"""Pairs between two savings. A kill loses at most the work on one block."""


FORMAT = 1
"""Raised when equal settings come to give other numbers, so that blocks of an older release are not continued."""


COLUMNS = ("joint", "text_given_image", "image_given_text", "image", "text", "pmi", "score")


@dataclass(frozen=True)
class DensitySummary:
    """What a file of densities says as a whole."""

    pairs: int
    quantiles: dict[str, dict[str, float]]
    """Of each column in nats, by name ("5%", ...)."""


def density_file(
    model: Path,
    pairs: Path,
    out: Path,
    settings: DensitySettings,
    *,
    seed: int = 0,
    device: str = "auto",
    normalize: bool = False,
    block: int = BLOCK_PAIRS,
    overwrite: bool = False,
    progress: bool | None = None,
    world: World = ALONE,
) -> DensitySummary:
    """Log-densities of the pairs of a folder under a saved flow, into the Parquet file `out`.

    Columns: `pair` (its number) and the fields of `Epistemic` in nats, `stderr` among them with two probes or more.
    Killed, it is continued by the same call: blocks of finished pairs are kept beside `out`, which appears whole. A
    pair's numbers depend on the settings, the seed and its number alone, not on the blocks, which the ranks of a
    `world` share.
    """
    checks.integer(seed, "seed")
    flow = GeoFlow.from_pretrained(model).to(usable_device(device))
    opened = EmbeddingPairs.open(pairs, normalize=normalize, world=world)
    widths = flow.config.image_dim, flow.config.text_dim
    if (opened.image_dim, opened.text_dim) != widths:
        raise ValueError(
            f"{pairs} holds widths {opened.image_dim} and {opened.text_dim}, but the flow expects {widths}"
        )
    if len(opened) == 0:
        raise ValueError(f"{pairs} is empty: there is nothing to score")
    job = Job(out, len(opened), block, _facts(flow, opened, settings, seed, world))

    def compute(index: range, advance: Advance) -> Columns:
        columns = _block_columns(flow, opened, index, settings, seed)
        advance(len(index))
        return columns

    job.run(compute, overwrite=overwrite, unit="pairs", progress=progress, world=world)
    return summarise(out)


def _facts(flow: GeoFlow, pairs: EmbeddingPairs, settings: DensitySettings, seed: int, world: World) -> dict[str, Any]:
    return {
        "task": "density",
        "format": FORMAT,
        **settings.facts(),
        "seed": seed,
        "flow": flow_digest(flow),
        "image": pairs.image.digest(world),
        "text": pairs.text.digest(world),
        "pairing": hashing.digest([pairs.image_row, pairs.text_row]),
    }


def _block_columns(
    flow: GeoFlow, pairs: EmbeddingPairs, index: range, settings: DensitySettings, seed: int
) -> dict[str, Any]:
    numbers = np.arange(index.start, index.stop)
    like = next(flow.parameters())
    image, text = (x.to(like) for x in pairs[numbers])
    estimates = density_estimates(flow, image, text, DIRECTIONS, settings, seed, first_row=index.start)
    found = chain_rule(estimates)
    columns = {name: getattr(found, name) for name in COLUMNS}
    if settings.n_probes > 1 and not settings.exact:
        columns["stderr"] = epistemic_stderr(estimates, settings, flow, image, text)
    return {"pair": numbers, **{name: column.cpu().numpy() for name, column in columns.items()}}


def summarise(densities: Path) -> DensitySummary:
    """Summary of a file that `density_file` wrote."""
    found = parquet.read_columns(densities, list(COLUMNS))
    return DensitySummary(len(found["score"]), {name: quantiles(column) for name, column in found.items()})
