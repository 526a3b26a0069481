"""Likelihoods: the epistemic score of the paper's network against straightforward autograd, and how good it is.

Peers take the gradient of the plain torch network: Euler back along great circles, and torchdiffeq in the space around
the sphere with the divergence as one more state. Gates: with the same probes, twin and library have the same
log-density and torchdiffeq's is close; the scores of all agree within their noise.

The study (`python -m benchmarks --study density`): variance, bias and ranks on a flow trained on the concept world,
which is kept beside the results for the next run. The default and FAST_DENSITY, with one probe, are asked for ranks at
width 128: on the narrow world, where the score spreads by few nats, it takes three probes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.bench_network import Rows
from benchmarks.common import RESULTS, gate, report
from benchmarks.flows import row_flops
from benchmarks.limits import Work
from benchmarks.suite import PAPER_NAME, PEER, Case, Contender, Scaling, in_bfloat16, renamed, with_mkl_alone
from benchmarks.suite import measure as measure_case
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.reverse_ode import draw_seed
from geoflow_fast.manifolds import SPHERE
from geoflow_fast.worlds import ConceptWorld

ROWS = 256
REPEATS = 4
NARROW = 24
WIDTHS = (NARROW, 128)
EULER = {"n_steps": 50, "solver": "euler"}
INDEPENDENT = {"probe": "gaussian", "orthogonal": "none"}
HALF = gf.DensitySettings(precision="bfloat16")
RANKING = dataclasses.replace(gf.FAST_DENSITY, n_probes=3)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs to score, with Euler steps of the paper's kind."""

    rows: Rows
    steps: int

    def ours(self, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return gf.epistemic(self.rows.flow, self.rows.image, self.rows.text, generator=generator, **options).score

    def paper(self) -> Tensor:
        return self.ours(**{**gf.PAPER_DENSITY, "n_steps": self.steps})

    def by(self, log_density: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(1)
        rows = self.rows
        joint, i2t, t2i = (
            log_density(rows.plain, rows.image, rows.text, code, self.steps, twins.signs) for code in range(3)
        )
        return i2t + t2i - 2 * joint

    def truths(self) -> tuple[Tensor, Tensor]:
        """After these Euler steps, and after many better ones, once the log-densities are known to be the twin's."""
        gate_same_numbers(self.rows)
        return self.ours(n_steps=self.steps, solver="euler"), self.ours(n_steps=40, solver="ab2")


def gate_same_numbers(rows: Rows) -> None:
    """The same weights and Gaussian probes give the same log-density."""
    image, text = rows.image[:6], rows.text[:6]
    settings = gf.DensitySettings(n_steps=2, solver="euler", tangents="combined", **INDEPENDENT)
    for code, direction in enumerate(DIRECTIONS):
        seed = int(draw_seed(torch.Generator().manual_seed(3), image))
        probes = Probes(seed, torch.arange(6), settings, SPHERE)
        given = image, text, code, 2, lambda n, s, x, probes=probes: probes.draw(n, s, x)[0]
        generator = torch.Generator().manual_seed(3)
        ours = gf.log_density(rows.flow, image, text, direction, generator=generator, settings=settings)
        twin = twins.autograd_log_density(rows.plain, *given)
        gate(f"{direction} log-density against the twin", torch.allclose(ours, twin, rtol=1e-5, atol=1e-3))


def within_noise(index: int) -> Callable[[Tensor, tuple[Tensor, Tensor]], bool]:
    """The mean differs from one of the truths by no more than chance, five standard errors, and one part in twenty for
    the steps."""

    def agrees(estimate: Tensor, truths: tuple[Tensor, Tensor]) -> bool:
        change = estimate - truths[index]
        chance = 5 * float(change.std()) / len(change) ** 0.5
        return abs(float(change.mean())) < chance + 0.05 * abs(float(truths[index].mean()))

    return agrees


OURS = Contender("geoflow_fast, default", lambda p: p.ours(), agrees=within_noise(1))
CONTENDERS = (
    Contender("torch, autograd", lambda p: p.by(twins.autograd_log_density), PEER),
    Contender("torchdiffeq, autograd", lambda p: p.by(peers.torchdiffeq_log_density), PEER, needs="torchdiffeq"),
    Contender(f"geoflow_fast, {PAPER_NAME}", Pairs.paper),
    OURS,
    *with_mkl_alone(OURS),
    *in_bfloat16(
        Contender("geoflow_fast, default, bfloat16", lambda p: p.ours(**HALF), agrees=within_noise(1)),
    ),
    Contender("geoflow_fast, `FAST_DENSITY`", lambda p: p.ours(**gf.FAST_DENSITY), agrees=within_noise(1)),
)


def cases(quick: bool) -> list[Case]:
    config, rows, steps = (
        (gf.GeoFlowConfig.small(256, 256), 32, 10) if quick else (gf.GeoFlowConfig.paper(), 64, EULER["n_steps"])
    )
    # Points and one tangent each through the network of all three directions.
    flops = 2 * steps * rows * sum(row_flops(config, direction) for direction in DIRECTIONS)
    return [
        Case(
            f"Epistemic score, {rows} pairs, {steps} Euler steps, d = {config.image_dim}",
            lambda: Pairs(Rows.draw(config, rows), steps),
            Pairs.truths,
            within_noise(0),
            renamed(CONTENDERS, PAPER_NAME, f"{steps} Euler steps") if quick else CONTENDERS,
            Work(flops=flops),
            rounds=1 if not quick else 3,
        )
    ]


def scalings(quick: bool) -> list[Scaling]:
    config = gf.GeoFlowConfig.small(256, 256)
    usual = {"rows": 32, "n_steps": 4, "n_probes": 1} if quick else {"rows": 128, "n_steps": 4, "n_probes": 1}

    def over(name: str) -> Callable[[int], Callable[[], Any]]:
        def make(size: int) -> Callable[[], Any]:
            given = {**usual, name: size}
            pairs = Pairs(Rows.draw(config, given.pop("rows")), 0)
            return lambda: pairs.ours(**given, **INDEPENDENT)

        return make

    rows = usual["rows"]
    return [
        Scaling("Epistemic score", "B", (rows // 2, rows, 2 * rows, 4 * rows), over("rows")),
        Scaling("Epistemic score", "steps", (2, 4, 8, 16), over("n_steps")),
        Scaling("Epistemic score", "probes", (1, 2, 4, 8), over("n_probes")),
    ]


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
    "Euler 50, separate, Gaussian, independent": gf.DensitySettings(**EULER, **INDEPENDENT),
    "Euler 50, separate": gf.DensitySettings(**EULER),
    "midpoint 10, combined": gf.DensitySettings(tangents="combined"),
    "midpoint 10, alternating": gf.DensitySettings(tangents="alternating"),
    "midpoint 10, Gaussian, independent": gf.DensitySettings(**INDEPENDENT),
    "midpoint 10, Gaussian, orthogonal to earlier steps": gf.DensitySettings(probe="gaussian"),
    "default: midpoint 10": gf.DensitySettings(),
    "midpoint 10, two probes": gf.DensitySettings(n_probes=2),
    "midpoint 10, four probes": gf.DensitySettings(n_probes=4),
    "midpoint 10, four orthogonal probes": gf.DensitySettings(n_probes=4, orthogonal="probes"),
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
        return_stderr=True,
    )


def quality(flow: gf.GeoFlow, reference: gf.Epistemic) -> tuple[str, dict[str, Quality]]:
    qualities = {name: measure(flow, reference, settings) for name, settings in SETTINGS.items()}
    rows = [{"setting": name, **dataclasses.asdict(value)} for name, value in qualities.items()]
    kept, paper = qualities["the same, probe kept"], qualities["paper: Euler 50, signs"]
    separate = qualities["Euler 50, separate, Gaussian, independent"]
    gate("redrawn probes cut the standard deviation by 3", kept.score_sd > 3 * paper.score_sd)
    gate("separate tangents cut it by 2 more", paper.score_sd > 2 * separate.score_sd)
    gate("midpoint with 10 steps is within .1 nat", abs(qualities["default: midpoint 10"].joint_bias) <= 0.1)
    gate("three probes rank as the reference does", qualities["ab2 10, early grid, three probes"].spearman >= 0.99)
    assert reference.stderr is not None
    notes = {"reference stderr": float(reference.stderr.mean()), "spread of the score": float(reference.score.std())}
    return report("density_quality", rows, notes), qualities


def widths(references: dict[int, gf.Epistemic]) -> str:
    """One and two probes on worlds of several widths: noise grows with the width, the spread of the score faster."""
    names = (
        "default: midpoint 10",
        "FAST_DENSITY",
        "midpoint 10, Gaussian, orthogonal to earlier steps",
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


def equal_error(seconds: dict[str, float], qualities: dict[str, Quality]) -> str:
    """Cost of one standard error: seconds times variance, over that of autograd at the paper's setting."""
    base = seconds[CONTENDERS[0].name] * qualities["paper: Euler 50, signs"].score_sd ** 2
    pairs = {
        "geoflow_fast, default": "default: midpoint 10",
        "geoflow_fast, `FAST_DENSITY`": "FAST_DENSITY",
    }
    rows = [
        {"setting": name, "speed-up at equal standard error": base / (seconds[name] * qualities[other].score_sd ** 2)}
        for name, other in pairs.items()
    ]
    gate("5x at equal standard error", max(row["speed-up at equal standard error"] for row in rows) >= 5)
    return report("density_equal_error", rows, {})


def run() -> str:
    """The study."""
    references = {dim: reference_score(concept_flow(dim)) for dim in WIDTHS}
    ranks = widths(references)
    flow = concept_flow()
    numbers, qualities = quality(flow, references[NARROW])
    measured = measure_case(cases(quick=False)[0])
    seconds = {row["contender"]: row["median"] for row in measured["rows"]}
    return "\n\n".join((numbers, ranks, equal_error(seconds, qualities), ablation(flow, references[NARROW])))
