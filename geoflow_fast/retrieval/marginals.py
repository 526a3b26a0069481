"""Log-marginals of gallery items: how near each is to typical queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops.gallery_posterior import gallery_scores
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.files import contents_of, locked
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

TILE_ROWS, TILE_ITEMS = {"cpu": 1024, "cuda": 1 << 16}, {"cpu": 2048, "cuda": 1 << 15}
"""Samples and items whose scores are in memory at a time."""
FORMAT = 1
"""Version of the numbers, part of the facts. It is raised whenever the same facts give different marginals, so that
files of an older release are not used."""


def log_mean_scores(samples: Tensor, gallery: Gallery, kappa: float, bias: Tensor | None = None) -> Tensor:
    """log of the mean over R queries of exp(s_rj), s_rj = log mean_m exp(kappa <g_j, x_rm> + bias_rm): [N] float32.

    `samples` [R, M, d] of reference queries, and an optional `bias` [R, M]. This is the item's marginal under the same
    kernel as the posterior's.
    """
    parts = []
    on = "cuda" if samples.is_cuda else "cpu"
    for _, items in gallery.blocks(samples.device, samples.dtype):
        for tile in items.split(TILE_ITEMS[on]):
            total = torch.full((len(tile),), -math.inf, dtype=torch.float64, device=samples.device)
            at_once = max(1, TILE_ROWS[on] // samples.shape[1])
            weights = [None] * len(samples) if bias is None else bias.split(at_once)
            for some, weight in zip(samples.split(at_once), weights):
                scores: Tensor = gallery_scores(some, tile, kappa, None, weight, "auto")
                total = torch.logaddexp(total, scores.double().logsumexp(0))
            parts.append(total - math.log(len(samples)))
    return torch.cat(parts).float()


class Remembered:
    """Numbers of the items of a gallery, which are computed again only if what they depend on has changed."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        self._marks: Hashable = None
        self._facts: dict[str, Any] = {}

    def numbers(
        self, gallery: Gallery, marks: Hashable, facts: Callable[[], dict[str, Any]], compute: Callable[[], Tensor]
    ) -> Tensor:
        """The numbers [N] that `compute` gives for `facts`, to which the gallery's digest is added. Facts are only
        looked at when the `marks` or those of the gallery differ from the last ones, and files keep the numbers of a
        gallery on disk."""
        current = marks, gallery.marks()
        if self._numbers is None or current != self._marks:
            known = {**facts(), "gallery": gallery.digest()}
            if self._numbers is None or known != self._facts:
                self._numbers = computed_once(gallery.index_folder, known, compute)
            self._marks, self._facts = current, known
        return self._numbers


def computed_once(folder: Path | None, facts: Mapping[str, Any], compute: Callable[[], Tensor]) -> Tensor:
    """Returns what `compute()` gives; a `folder` keeps it, under a name made from the facts, for the next time."""
    if folder is None:
        return compute()
    path = folder / f"marginals-{hashing.fingerprint(facts)[:16]}.safetensors"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written to is an error before the work
        with locked(folder, wait=True):
            if not path.is_file():  # another process may have made it while this one waited
                save_tensors(path, {"marginals": compute()}, kind="item marginals", info=facts)
    try:
        tensors, _ = load_tensors(path, kind="item marginals")
        with contents_of(path):
            return tensors["marginals"]
    except ValueError as error:
        raise ValueError(f"{error}; remove the file, and it is computed again") from error
