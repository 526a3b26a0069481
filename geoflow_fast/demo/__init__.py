"""The demo behind `geoflow demo`: a flow learns a world whose law is known, and is then compared with the truth.

A thousand new pairs of the concept world are searched in both directions. The page shows the flow's uncertainties
beside those of the true posterior and those that need no training; temperatures and bandwidths are tuned on other,
held-out pairs. One chapter does the same for a search without a flow in a world as wide as CLIP, and the last one lets
that search go live: a certified rule, a log that changes, and a page to explore it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from geoflow_fast.demo import figures
from geoflow_fast.demo.clip_world import clip_pairs, examine_clip_world, learn_clip_head
from geoflow_fast.demo.flows import PAIRS, concept_pairs, learn, learn_spheres, sphere_paths
from geoflow_fast.demo.page import REPORT, summary, write_report
from geoflow_fast.demo.story import PAGE, tell
from geoflow_fast.demo.study import Outcome, examine
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.files import write_json
from geoflow_fast.runtime.progress import Announce
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.worlds import ClipWorld, ConceptWorld

__all__ = ["PAGE", "REPORT", "Outcome", "run", "summary"]


def run(out: Path, seed: int, steps: int | None, announce: Announce) -> Outcome | None:
    """Runs the whole demo and writes `report.html`, its figures, `explore.html` and `summary.json` into a folder `out`.

    Returns None if training was interrupted; the same call then continues it. `announce` is told what is being done.
    """
    plots.need_matplotlib()  # fails at once if matplotlib is missing, not after minutes of training
    out.mkdir(parents=True, exist_ok=True)
    world = ConceptWorld()
    pairs = concept_pairs(world, seed)
    config = dataclasses.replace(TrainConfig.tiny(), seed=seed)
    config = config if steps is None else dataclasses.replace(config, steps=steps)
    announce(f"training a flow on {PAIRS:,} pairs of the concept world, whose densities have a closed form")
    flow = learn(out / "concept_world", GeoFlowConfig.tiny(), pairs, config)
    if flow is None:
        return None
    announce("training a small flow on two spheres, to look at")
    small = learn_spheres(out / "spheres", seed, steps)
    if small is None:
        return None
    wide = ClipWorld()
    captioned = clip_pairs(wide, seed)
    announce(f"training a head on {len(captioned):,} pairs of a world as wide as CLIP")
    head = learn_clip_head(out / "clip_world", captioned, seed, steps)
    if head is None:
        return None
    clip = examine_clip_world(wide, head, captioned, seed)
    outcome = dataclasses.replace(examine(world, flow, pairs, seed, config.steps, announce), clip=clip)
    announce("certifying a rule, letting the search go live, and watching its log")
    outcome = dataclasses.replace(outcome, story=tell(wide, head, captioned, seed, out))
    announce("drawing")
    figures.draw_spheres(*sphere_paths(small, seed), out / figures.FILES["spheres"])
    figures.draw_all(outcome, world, out)
    write_report(outcome, out)
    write_json(out / "summary.json", summary(outcome))
    return outcome
