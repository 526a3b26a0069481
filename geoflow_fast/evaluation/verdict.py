"""What a comparison recommends, in one sentence: the cheapest method that the best one does not beat beyond chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from geoflow_fast.evaluation.results import TRUTH, Result

COST = {"none": 0, "baseline": 1, "flow": 2}
"""What has to be trained for a method, cheapest first; anything else is taken for a flow."""
CHEAPER = ("needs no training", "needs no flow")


def verdict(results: Sequence[Result]) -> str:
    """Names the method with the best AUROC among results of one direction, and the one to use.

    These differ if the best method's lead over a cheaper one is within chance, that is, if the paired bootstrap
    interval of the lead reaches down to zero.
    """
    known = _contenders(results)
    if not known:
        return "There is no AUROC, because plain search is right for all queries or for none of them."
    best = max(known, key=_auroc)
    head = f"{best.title} has the best AUROC, {_auroc(best):.3f}"
    if _auroc(best) <= 0.5:
        return f"{head}, which is no better than chance: use none of these."
    if not best.lead and len(known) > 1:
        return f"{head}; no intervals were computed, so this may be chance."
    cheaper, chosen = _cheaper(best, known), recommended(results)
    assert chosen is not None  # since there is a best one
    why = ""
    if chosen is not best:
        why = (
            f", but its lead over {chosen.title} ({_auroc(chosen):.3f}), which {CHEAPER[_cost(chosen)]}, is within "
            f"chance ({_shown_lead(best, chosen)})"
        )
    elif cheaper:
        second = max(cheaper, key=_auroc)
        why = (
            f", and leads every cheaper method beyond chance, the best of them, {second.title} "
            f"({_auroc(second):.3f}), by {_shown_lead(best, second)}"
        )
    behind = _flow_behind(best, known)
    if not why and not behind and len(known) > 1:
        second = max((result for result in known if result is not best), key=_auroc)
        why = f", ahead of {second.title} ({_auroc(second):.3f}) by {_shown_lead(best, second)}"
    return f"{head}{why}{behind}: use {chosen.title}."


def recommended(results: Sequence[Result]) -> Result | None:
    """The result of the method to use among those of one direction; None if none is better than chance."""
    known = _contenders(results)
    if not known or _auroc(best := max(known, key=_auroc)) <= 0.5:
        return None
    rivals = [result for result in _cheaper(best, known) if best.lead and not best.lead[result.method][1] > 0]
    return min(rivals, key=lambda result: (_cost(result), -_auroc(result))) if rivals else best


def _contenders(results: Sequence[Result]) -> list[Result]:
    """The results that have an AUROC, without the truth, which is no method."""
    return [result for result in results if result.training != TRUTH and not math.isnan(_auroc(result))]


def _cheaper(best: Result, results: Sequence[Result]) -> list[Result]:
    return [result for result in results if _cost(result) < _cost(best)]


def _flow_behind(best: Result, results: Sequence[Result]) -> str:
    """How far the best of the flow's methods is behind the best method, if that is none of them."""
    flows = [result for result in results if _cost(result) == COST["flow"]]
    if not flows or best in flows:
        return ""
    flow = max(flows, key=_auroc)
    return f"; the best of the flow's methods, {flow.title}, has {_auroc(flow):.3f} ({_shown_lead(best, flow)})"


def _auroc(result: Result) -> float:
    return result.numbers["auroc"]


def _cost(result: Result) -> int:
    return COST.get(result.training, COST["flow"])


def _shown_lead(best: Result, other: Result) -> str:
    """The lead of `best` over another result with its interval."""
    value, low, high = best.lead[other.method]
    which = "95 % interval" if best.runs == 1 else f"95 % intervals of {best.runs} seeds within"
    return f"{value:.3f}, {which} {low:.3f} to {high:.3f}"
