"""The methods of a comparison by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from geoflow_fast.evaluation.flow_methods import FlowEntropy, FlowEpistemic, PaperEntropy
from geoflow_fast.evaluation.ladder_methods import FlowReranker, Ladder
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.untrained import UNTRAINED, KNNDistance
from geoflow_fast.retrieval.calibration import LEAST_QUERIES

FLOW_METHODS: dict[str, Callable[[Study], Method]] = {
    kind.name: kind for kind in (FlowReranker, FlowEntropy, PaperEntropy, FlowEpistemic)
}
METHODS: dict[str, Callable[[Study], Method]] = {**FLOW_METHODS, Ladder.name: Ladder, **UNTRAINED}
"""All methods by name."""
EXTRA = ("entropy_paper",)
"""Methods that are not among the defaults: this one costs thirty times as much as the fast entropy for the same
ranking."""


def default_methods(study: Study) -> list[str]:
    """All methods that can be made of what the study has, without `EXTRA`. The ladder is among them if there are enough
    held-out pairs to calibrate it on."""
    flow = [name for name in FLOW_METHODS if name not in EXTRA] if study.flow is not None else []
    ladder = [Ladder.name] if len(study.val) >= 2 * LEAST_QUERIES else []
    return [*flow, *ladder, *(name for name in UNTRAINED if name != KNNDistance.name or study.train is not None)]


def create(name: str, study: Study) -> Method:
    """The method of that name; a ValueError is raised if there is none, or if the study lacks what it needs."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name](study)


def chosen(names: Sequence[str | Method] | None, study: Study) -> list[Method]:
    """The methods of these names, by default all that can be made; methods that already exist stay as they are."""
    names = default_methods(study) if names is None else names
    return [name if isinstance(name, Method) else create(name, study) for name in names]
