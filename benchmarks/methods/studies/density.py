"""Variance, bias and ranks of log-densities, on a flow trained on the concept world.

The flow is kept with the results for the next run. The default and FAST_DENSITY, with one probe, are asked for ranks at
width 128: on the narrow world, where the score spreads by few nats, it takes three probes.
"""

from __future__ import annotations

import dataclasses

import torch
from scipy.stats import spearmanr
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.results import RESULTS, gate, report
from geoflow_fast.worlds import ConceptWorld

ROWS = 256
REPEATS = 4
NARROW = 24
WIDTHS = (NARROW, 128)
EULER = {"n_steps": 50, "solver": "euler"}
RANKING = dataclasses.replace(gf.FAST_DENSITY, n_probes=3)


def concept_flow(dim: int = NARROW) -> gf.GeoFlow:
    """A small flow of the concept world of this width, trained once (about two minutes) and kept."""
    folder = RESULTS / f"concept_flow_{dim}"
    if not folder.exists():
        image, text, _ = ConceptWorld(dim).sample(60_000, generator=torch.Generator().manual_seed(100))
        torch.manual_seed(0)
        flow = gf.GeoFlow(gf.GeoFlowConfig.tiny(dim, dim))
        config = dataclasses.replace(gf.TrainConfig.tiny(), seed=0)
        gf.train(flow, gf.EmbeddingPairs.from_arrays(image, text), config)
        flow.save_pretrained(folder)
    return gf.GeoFlow.from_pretrained(folder)


def concept_pairs(dim: int) -> tuple[Tensor, Tensor]:
    """Half of known concepts, a quarter near them, a quarter far: what an epistemic score is asked about."""
    world, generator = ConceptWorld(dim), torch.Generator().manual_seed(7)
    parts = [
        world.sample(rows, generator=generator, concepts=concepts)[:2]
        for rows, concepts in ((ROWS // 2, None), (ROWS // 4, world.near), (ROWS // 4, world.far))
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@dataclasses.dataclass(frozen=True)
class Quality:
    """Repeats of a setting against the reference: nats, and mean rank correlation of the score over all pairs and over
    those of known concepts alone."""

    joint_sd: float
    score_sd: float
    joint_bias: float
    score_bias: float
    spearman: float
    known: float


def measure(flow: gf.GeoFlow, reference: gf.Epistemic, settings: gf.DensitySettings) -> Quality:
    image, text = concept_pairs(flow.config.image_dim)
    estimates = [
        gf.epistemic(flow, image, text, generator=torch.Generator().manual_seed(100 + k), settings=settings)
        for k in range(REPEATS)
    ]
    joint, score = torch.stack([ep.joint for ep in estimates]), torch.stack([ep.score for ep in estimates])
    known = slice(0, ROWS // 2)
    return Quality(
        float(joint.var(0).mean().sqrt()),
        float(score.var(0).mean().sqrt()),
        float((joint.mean(0) - reference.joint).mean()),
        float((score.mean(0) - reference.score).mean()),
        sum(float(spearmanr(x, reference.score)[0]) for x in score) / REPEATS,
        sum(float(spearmanr(x[known], reference.score[known])[0]) for x in score) / REPEATS,
    )


SETTINGS = {
    "paper: Euler 50, signs": gf.PAPER_DENSITY,
    "the same, probe kept": dataclasses.replace(gf.PAPER_DENSITY, redraw=False),
    "Euler 50, separate": gf.DensitySettings(**EULER),
    "midpoint 10, combined": gf.DensitySettings(tangents="combined"),
    "default: midpoint 10": gf.DensitySettings(),
    "midpoint 10, two probes": gf.DensitySettings(n_probes=2),
    "midpoint 10, four probes": gf.DensitySettings(n_probes=4),
    "midpoint 10, late grid": gf.DensitySettings(grid="late"),
    "midpoint 10, early grid": gf.DensitySettings(grid="early"),
    "FAST_DENSITY": gf.FAST_DENSITY,
    "ab2 10, early grid, three probes": RANKING,
    "rk4 5": gf.DensitySettings(n_steps=5, solver="rk4"),
}


def reference_score(flow: gf.GeoFlow) -> gf.Epistemic:
    """400 steps, four probes in each: 1,600 draws."""
    generator = torch.Generator().manual_seed(1)
    return gf.epistemic(
        flow,
        *concept_pairs(flow.config.image_dim),
        n_steps=400,
        n_probes=4,
        solver="ab2",
        generator=generator,
    )


def quality(flow: gf.GeoFlow, reference: gf.Epistemic) -> str:
    qualities = {name: measure(flow, reference, settings) for name, settings in SETTINGS.items()}
    rows = [{"setting": name, **dataclasses.asdict(value)} for name, value in qualities.items()]
    kept, paper = qualities["the same, probe kept"], qualities["paper: Euler 50, signs"]
    separate = qualities["Euler 50, separate"]
    gate("redrawn probes cut the standard deviation by 3", kept.score_sd > 3 * paper.score_sd)
    gate("separate tangents and aligned probes cut it by 2 more", paper.score_sd > 2 * separate.score_sd)
    gate("midpoint with 10 steps is within .1 nat", abs(qualities["default: midpoint 10"].joint_bias) <= 0.1)
    gate("three probes rank as the reference does", qualities["ab2 10, early grid, three probes"].spearman >= 0.99)
    assert reference.stderr is not None
    notes = {"reference stderr": float(reference.stderr.mean()), "spread of the score": float(reference.score.std())}
    return report("density_quality", rows, notes)


def widths(references: dict[int, gf.Epistemic]) -> str:
    """One and two probes on worlds of several widths: noise grows with the width, the spread of the score faster."""
    names = (
        "default: midpoint 10",
        "FAST_DENSITY",
        "midpoint 10, two probes",
    )
    rows = []
    for dim, reference in references.items():
        flow, spread = concept_flow(dim), float(reference.score.std())
        for name in names:
            measured = measure(flow, reference, SETTINGS[name])
            rows.append({"width": dim, "spread of the score": spread, "setting": name, **dataclasses.asdict(measured)})
    table = report("density_widths", rows, {})
    for row in rows:
        if row["width"] == WIDTHS[-1] and row["setting"] in ("default: midpoint 10", "FAST_DENSITY"):
            gate(f"{row['setting']} ranks as the reference does at width {row['width']}", row["spearman"] >= 0.99)
    return table


def ablation(flow: gf.GeoFlow, reference: gf.Epistemic) -> str:
    """The paper's: steps 10 to 50, probes 1 to 5, with its own solver and tangents."""
    rows = []
    for steps in (10, 20, 30, 40, 50):
        for probes in (1, 3, 5):
            measured = measure(flow, reference, dataclasses.replace(gf.PAPER_DENSITY, n_steps=steps, n_probes=probes))
            rows.append({"steps": steps, "probes": probes, **dataclasses.asdict(measured)})
    return report("density_ablation", rows, {})


def run() -> str:
    """The study."""
    references = {dim: reference_score(concept_flow(dim)) for dim in WIDTHS}
    ranks = widths(references)
    flow = concept_flow()
    return "\n\n".join((quality(flow, references[NARROW]), ranks, ablation(flow, references[NARROW])))
