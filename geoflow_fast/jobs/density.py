"""Log-densities of a folder of pairs into one Parquet file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.fingerprint import refuse_other_encoder
from geoflow_fast.data.ids import Ids, open_ids
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.jobs.calibration import StoredCalibration
from geoflow_fast.jobs.job import Job, quantiles
from geoflow_fast.likelihood.density import chain_rule, epistemic_stderr
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.retrieval.task import drawn_rows
from geoflow_fast.runtime import checks, hashing, parquet
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.progress import Advance

BLOCK_PAIRS = 256
"""Pairs that are computed and saved at once. A kill loses at most the work on one block."""
FORMAT = 1
"""This number goes up when a release computes other results from the same settings, so that it does not continue the
blocks of an older one."""
HELD_OUT_PAIRS = 500
"""Held-out pairs of the model, at most, whose scores are compared with."""
UNUSUAL = 0.05
COLUMNS = ("joint", "text_given_image", "image_given_text", "image", "text", "pmi", "score")


@dataclass(frozen=True)
class DensitySummary:
    """A summary of a file of densities."""

    pairs: int
    quantiles: dict[str, dict[str, float]]
    """Quantiles of each column in nats, by name ("5%", ...)."""
    held_out: int = 0
    """Number of the model's held-out pairs that the column `p_value` compares with; 0 if there is no such column."""
    unusual: float | None = None
    """Share of the pairs with a p-value of at most `UNUSUAL`, which would be about that if they were like the training
    data."""


class HeldOutScores:
    """The epistemic scores of a model's held-out pairs, which are computed when they are first needed."""

    def __init__(self, flow: GeoFlow, pairs: EmbeddingPairs, settings: DensitySettings, seed: int) -> None:
        self.flow, self.settings, self.seed = flow, settings, seed
        self.pairs = pairs.subset(drawn_rows(len(pairs), HELD_OUT_PAIRS, 0))

    def __len__(self) -> int:
        return len(self.pairs)

    @functools.cached_property
    def ranked(self) -> NDArray[np.float64]:
        """The scores in ascending order."""
        like = next(self.flow.parameters())
        image, text = (x.to(like) for x in self.pairs[np.arange(len(self))])
        estimates = density_estimates(self.flow, image, text, DIRECTIONS, self.settings, self.seed)
        return np.sort(chain_rule(estimates).score.cpu().numpy())

    def p_values(self, score: Tensor) -> NDArray[np.float64]:
        """The share of the held-out pairs, the pair itself included, that are as unlike the training data as each
        `score` [B] says or more so. Pairs that are like the held-out ones have any value with equal probability."""
        larger = len(self) - np.searchsorted(self.ranked, score.cpu().numpy(), side="left")
        return (larger + 1) / (len(self) + 1)


def density_file(
    model: Path,
    pairs: Path | EmbeddingPairs,
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
    ids: Path | None = None,
) -> DensitySummary:
    """Computes the log-densities of pairs, or of those of a folder, under a saved flow, into the Parquet file `out`.

    Columns: `pair` (its number, or its id in the file `ids`) and the fields of `Epistemic` in nats, with `stderr` if
    there are two probes or more, and `p_value` if the model's folder holds held-out pairs.
    If the job is killed, the same call continues it: finished blocks of pairs are kept beside `out`, which appears
    whole. The ranks of a `world` share the blocks. The results of a pair depend on the settings, the seed and the
    number of the pair, but not on the blocks.
    """
    checks.integer(seed, "seed")
    flow = GeoFlow.from_pretrained(model).to(usable_device(device))
    opened = EmbeddingPairs.open(pairs, normalize=normalize, world=world) if isinstance(pairs, Path) else pairs
    where = opened.folder or "the pairs"
    widths = flow.config.image_dim, flow.config.text_dim
    if (opened.image_dim, opened.text_dim) != widths:
        raise ValueError(
            f"{where} holds widths {opened.image_dim} and {opened.text_dim}, but the flow expects {widths}"
        )
    for trained_on, encoder in zip(flow.origin.encoders, opened.encoders):
        refuse_other_encoder({"the flow": trained_on, str(where): encoder})
    if len(opened) == 0:
        raise ValueError(f"{where} is empty: there is nothing to score")
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
    stored = StoredCalibration.read(model)
    known = None if stored is None else HeldOutScores(flow, stored.pairs(), settings, seed)
    if known is not None:
        facts["held_out"] = known.pairs.fingerprint()
    like = next(flow.parameters())

    def compute(rows: range, advance: Advance) -> Mapping[str, Tensor | NDArray[Any]]:
        image, text = (x.to(like) for x in opened[np.arange(rows.start, rows.stop)])
        estimates = density_estimates(flow, image, text, DIRECTIONS, settings, seed, first_row=rows.start)
        epistemic = chain_rule(estimates)
        columns: dict[str, Tensor | NDArray[Any]] = {name: getattr(epistemic, name) for name in COLUMNS}
        if settings.n_probes > 1 and not settings.exact:
            columns["stderr"] = epistemic_stderr(estimates)
        if known is not None:
            columns["p_value"] = known.p_values(epistemic.score)
        advance(len(rows))
        return columns

    own = None if opened.ids is None else Ids(opened.ids)
    names = own if ids is None else open_ids(ids, len(opened), "pairs")
    job = Job(out, len(opened), block, facts, numbered="pair", ids=names)
    job.run(compute, overwrite=overwrite, unit="pairs", progress=progress, world=world)
    densities = parquet.read_columns(out, list(COLUMNS))
    summary = DensitySummary(len(opened), {name: quantiles(column) for name, column in densities.items()})
    if known is None:
        return summary
    unusual = float((parquet.read_columns(out, ["p_value"])["p_value"] <= UNUSUAL).mean())
    return dataclasses.replace(summary, held_out=len(known), unusual=unusual)
