"""All methods by name: those of `geoflow evaluate`, and the baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.methods import baselines
from benchmarks.methods.baseline_methods import ActivationsMethod, BaselineMethod, BaselineStudy
from benchmarks.methods.baselines.bayesvlm import BayesVLM
from benchmarks.methods.baselines.trained import SizedBaseline
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.evaluation import figures, registry
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.training.config import RunConfig

RUNS_FOLDER = "runs"
EVERY = "all"
"""In place of names: every method, also those whose training takes thousands of steps."""

figures.KNOWN.update({name: not kind.TRAINED for name, kind in baselines.METHODS.items()})


def all_methods() -> list[str]:
    """The names that `create` knows."""
    return [*registry.METHODS, *baselines.METHODS]


def default_methods(study: Study, *, every: bool = False) -> list[str]:
    """Those of `geoflow evaluate` and all baselines that can be made of what the study has, without those that need
    more than pairs and, unless `every` one is asked for, those whose training takes thousands of steps."""
    ready = {name: kind for name, kind in baselines.METHODS.items() if kind.missing() is None}
    ready = {name: kind for name, kind in ready.items() if every or not issubclass(kind, SizedBaseline)}
    fit = [name for name, kind in ready.items() if study.train is not None or not kind.NEEDS_TRAINING_PAIRS]
    return [*registry.default_methods(study), *fit]


def create(name: str, study: Study) -> Method:
    """The method of that name; a ValueError is raised if there is none, or if the study lacks what it needs."""
    if name in registry.METHODS:
        return registry.create(name, study)
    if name not in baselines.METHODS:
        raise ValueError(f"method must be one of {', '.join(all_methods())}, got {name!r}")
    if name == BayesVLM.method:
        return ActivationsMethod(study)
    return BaselineMethod(study, name)


def chosen(
    names: Sequence[str] | None,
    study: Study,
    configs: Mapping[str, RunConfig] | None = None,
    folder: Path | None = None,
) -> list[Method]:
    """The methods of these names. By default these are all that need no long training, and for `("all",)` all.
    Baselines train by `configs`, which `run_configs` makes, and keep their runs in `folder`."""
    if names is None or list(names) == [EVERY]:
        names = default_methods(study, every=names is not None)
    study = BaselineStudy.of(study, configs or {}, folder)
    return [create(name, study) for name in names]


def run_configs(pairs: EmbeddingPairs, changes: Mapping[str, Any]) -> dict[str, RunConfig]:
    """The training run of every baseline with these changes, by method; empty without changes.

    It draws from torch's global generator. Call it before that is seeded for the initial weights of baselines.
    """
    if not changes:
        return {}
    return {
        name: dataclasses.replace(kind(pairs.image_dim, pairs.text_dim).default_config(), **changes)
        for name, kind in baselines.METHODS.items()
    }
