"""The methods of a comparison by name."""

from __future__ import annotations

from collections.abc import Callable

from geoflow_fast import baselines
from geoflow_fast.baselines.bayesvlm import BayesVLM
from geoflow_fast.baselines.trained import SizedBaseline
from geoflow_fast.evaluation.baseline_methods import ActivationsMethod, BaselineMethod
from geoflow_fast.evaluation.flow_methods import FlowEntropy, FlowEpistemic, PaperEntropy
from geoflow_fast.evaluation.ladder_methods import FlowReranker, Ladder
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.retrieval.calibration import LEAST_QUERIES

FLOW_METHODS: dict[str, Callable[[Study], Method]] = {
    kind.name: kind for kind in (FlowReranker, FlowEntropy, PaperEntropy, FlowEpistemic)
}
EXTRA = ("entropy_paper",)
"""Methods that are not among the defaults: this one costs thirty times as much as the fast entropy for the same
ranking."""


def all_methods() -> list[str]:
    """The names that `create` knows."""
    return [*FLOW_METHODS, Ladder.name, *baselines.METHODS]


def default_methods(study: Study, *, dear: bool = False) -> list[str]:
    """All methods that can be made of what the study has, without `EXTRA`, baselines that need more than pairs and,
    unless `dear` ones are asked for, those whose training takes thousands of steps. The ladder is among them if there
    are enough held-out pairs to calibrate it on."""
    flow = [name for name in FLOW_METHODS if name not in EXTRA] if study.flow is not None else []
    ready = {name: kind for name, kind in baselines.METHODS.items() if kind.missing() is None}
    ready = {name: kind for name, kind in ready.items() if dear or not issubclass(kind, SizedBaseline)}
    fit = [name for name, kind in ready.items() if study.train is not None or not kind.NEEDS_TRAINING_PAIRS]
    ladder = [Ladder.name] if len(study.val) >= 2 * LEAST_QUERIES else []
    return [*flow, *ladder, *fit]


def create(name: str, study: Study) -> Method:
    """The method of that name; a ValueError is raised if there is none, or if the study lacks what it needs."""
    if name in FLOW_METHODS:
        return FLOW_METHODS[name](study)
    if name == Ladder.name:
        return Ladder(study)
    if name not in baselines.METHODS:
        raise ValueError(f"method must be one of {', '.join(all_methods())}, got {name!r}")
    if name == BayesVLM.method:
        return ActivationsMethod(study)
    return BaselineMethod(study, name)
