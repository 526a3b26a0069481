"""Log-densities of a folder of pairs into one Parquet file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

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
from geoflow_fast.runtime.progress import Advance

BLOCK_PAIRS = 256
"""Pairs that are computed and saved at once. A kill loses at most the work on one block."""
FORMAT = 1
"""This number goes up when a release computes other results from the same settings, so that it does not continue the
blocks of an older one."""
COLUMNS = ("joint", "text_given_image", "image_given_text", "image", "text", "pmi", "score")


@dataclass(frozen=True)
class DensitySummary:
    """A summary of a file of densities."""

    pairs: int
    quantiles: dict[str, dict[str, float]]
    """Quantiles of each column in nats, by name ("5%", ...)."""


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
    """Computes the log-densities of the pairs of a folder under a saved flow, into the Parquet file `out`.

    Columns: `pair` (its number) and the fields of `Epistemic` in nats, with `stderr` if there are two probes or more.
    If the job is killed, the same call continues it: finished blocks of pairs are kept beside `out`, which appears
    whole. The ranks of a `world` share the blocks. The results of a pair depend on the settings, the seed and the
    number of the pair, but not on the blocks.
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
    facts = {
        "task": "density",
        "format": FORMAT,
        **settings.facts(),
        "seed": seed,
        "flow": flow_digest(flow),
        "image": opened.image.digest(world),
        "text": opened.text.digest(world),
        "pairing": hashing.digest([opened.image_row, opened.text_row]),
    }
    like = next(flow.parameters())

    def compute(rows: range, advance: Advance) -> Mapping[str, Tensor]:
        image, text = (x.to(like) for x in opened[np.arange(rows.start, rows.stop)])
        estimates = density_estimates(flow, image, text, DIRECTIONS, settings, seed, first_row=rows.start)
        epistemic = chain_rule(estimates)
        columns = {name: getattr(epistemic, name) for name in COLUMNS}
        if settings.n_probes > 1 and not settings.exact:
            columns["stderr"] = epistemic_stderr(estimates, settings, flow, image, text)
        advance(len(rows))
        return columns

    job = Job(out, len(opened), block, facts, numbered="pair")
    job.run(compute, overwrite=overwrite, unit="pairs", progress=progress, world=world)
    densities = parquet.read_columns(out, list(COLUMNS))
    return DensitySummary(len(opened), {name: quantiles(column) for name, column in densities.items()})
