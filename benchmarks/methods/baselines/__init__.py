"""Other measures of how uncertain retrieval with frozen embeddings is, behind one interface: `Baseline`.

`METHODS` holds the methods by name; `find` gives the class of one, and `load` reads back what `save` wrote.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from benchmarks.methods.baselines.adapter import TwoTowerAdapter
from benchmarks.methods.baselines.asymvlm import AsymVLMPS, AsymVLMvMF
from benchmarks.methods.baselines.base import Baseline, method_of
from benchmarks.methods.baselines.bayesvlm import Activations, BayesVLM
from benchmarks.methods.baselines.euclidean_flow import EuclideanFlow
from benchmarks.methods.baselines.grove import GroVE
from benchmarks.methods.baselines.hub import HubSoftmax
from benchmarks.methods.baselines.mc_dropout import MCDropout
from benchmarks.methods.baselines.probvlm import ProbVLM
from benchmarks.methods.baselines.repvlm import REPVLM
from benchmarks.methods.baselines.result_list import ListBoosting, ListLogistic
from benchmarks.methods.baselines.trained import SizedBaseline
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.training.loop import TrainReport

METHODS: dict[str, type[Baseline]] = {
    kind.method: kind
    for kind in (
        HubSoftmax,
        ListLogistic,
        ListBoosting,
        TwoTowerAdapter,
        ProbVLM,
        AsymVLMvMF,
        AsymVLMPS,
        GroVE,
        REPVLM,
        BayesVLM,
        MCDropout,
        EuclideanFlow,
    )
}
"""All methods by name; those that need no training come first."""


def find(name: str) -> type[Baseline]:
    """The class of the method `name`; an unknown name raises a ValueError."""
    checks.one_of(name, "method", tuple(METHODS))
    return METHODS[name]


def load(folder: str | Path) -> Baseline:
    """Loads a fitted baseline of any method from `folder`."""
    return find(method_of(folder)).load(folder)


def train_preset(
    method: str,
    pairs: EmbeddingPairs,
    out: Path,
    size: str,
    val: EmbeddingPairs | None,
    overrides: dict[str, Any],
    *,
    folder: Path | None,
    device: str,
    resume: bool = True,
) -> TrainReport | None:
    """Fits a baseline on `pairs` and saves it to `out`, as `python -m benchmarks.methods train` does.

    `size`: "paper", "small", "tiny" or "auto", for methods that have sizes. `overrides`: fields of the run to change.
    `folder`: the folder of the pairs, from which BayesVLM takes its activations. `resume`: as in `gf.train`. Returns
    None for methods that are not trained by gradient descent.
    """
    kind = find(method)
    torch.manual_seed(overrides.get("seed", 0))
    sized: dict[str, Any] = {"size": size} if issubclass(kind, SizedBaseline) else {}
    baseline = kind(pairs.image_dim, pairs.text_dim, **sized)
    if isinstance(baseline, BayesVLM) and folder is not None:
        baseline.set_activations(folder)
    default = baseline.default_config()
    unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(default)})
    if unknown:
        raise ValueError(f"{method} has no setting {', '.join(unknown)}")
    config = dataclasses.replace(default, **overrides)
    report = baseline.to(usable_device(device)).fit(pairs, val, config, out, resume=resume)
    if report is None:
        baseline.save(out)
    return report


__all__ = [
    "METHODS",
    "REPVLM",
    "Activations",
    "AsymVLMPS",
    "AsymVLMvMF",
    "Baseline",
    "BayesVLM",
    "EuclideanFlow",
    "GroVE",
    "HubSoftmax",
    "ListBoosting",
    "ListLogistic",
    "MCDropout",
    "ProbVLM",
    "TwoTowerAdapter",
    "find",
    "load",
    "train_preset",
]
