"""What `geoflow demo` does: a flow learns a world whose law is known; its uncertainties are held against the truth.

A thousand new pairs of the concept world are searched in both directions. The flow's uncertainties stand beside the
true posterior's and beside those that need no training; temperatures and bandwidths come from other, held-out pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from geoflow_fast.demo import figures
from geoflow_fast.demo.flows import PAIRS, carried, concept_pairs, learn, learn_spheres
from geoflow_fast.demo.page import REPORT, summary, write_report
from geoflow_fast.demo.study import Outcome, examine
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.files import write_json
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.worlds import ConceptWorld

__all__ = ["REPORT", "Outcome", "run", "summary"]


def run(out: Path, seed: int, steps: int | None, say: Callable[[str], object]) -> Outcome | None:
    """The whole demo into the folder `out`: `report.html`, figures, `summary.json`; None if training was interrupted.

    `say` is told what is being done. The same call continues a run that was interrupted.
    """
    plots.pyplot()  # its absence is said before minutes of training
    out.mkdir(parents=True, exist_ok=True)
    world = ConceptWorld()
    pairs = concept_pairs(world, seed)
    config = dataclasses.replace(TrainConfig.tiny(), seed=seed)
    config = config if steps is None else dataclasses.replace(config, steps=steps)
    say(f"training a flow on {PAIRS:,} pairs of the concept world, whose densities have a closed form")
    flow = learn(out / "concept_world", GeoFlowConfig.tiny(), pairs, config)
    if flow is None:
        return None
    say("training a small flow on two spheres, to look at")
    small = learn_spheres(out / "spheres", seed, steps)
    if small is None:
        return None
    outcome = examine(world, flow, pairs, seed, config.steps, say)
    say("drawing")
    figures.draw_spheres(*carried(small, seed), out / figures.SPHERES)
    figures.draw_all(outcome, world, out)
    write_report(outcome, out)
    write_json(out / "summary.json", summary(outcome))
    return outcome
