"""Likelihoods: the epistemic score of the paper's network against straightforward autograd, and how good it is.

Speed is measured at the paper's size, where random weights will do; variance, bias and ranks on a flow trained on the
concept world, which is kept beside the results for the next run. Gates: the twin and the library agree on velocities
and divergences, cost is linear, and the speed-ups, memory, bias and ranks named in `gate_speed`, `memory`, `quality`,
`equal_error` and `widths` hold. The default and FAST_DENSITY, with one probe, are asked for ranks at width 128: on the
narrow world, where the score spreads by few nats, it takes three probes.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import geoflow_fast as gf
from benchmarks.bench_training import WIDTH, PlainFlow
from benchmarks.common import RESULTS, gate, report, time_together
from geoflow_fast.density import draw_seed
from geoflow_fast.divergence import Probes
from geoflow_fast.geometry import DIRECTIONS, exp_map, log_area, sample_uniform
from geoflow_fast.worlds import ConceptWorld

ROWS = 256
REPEATS = 4
NARROW = 24
WIDTHS = (NARROW, 128)
EULER = {"n_steps": 50, "solver": "euler"}
INDEPENDENT = {"probe": "gaussian", "orthogonal": "none"}
RANKING = {"n_steps": 10, "solver": "ab2", "grid": "early", "n_probes": 3}


def paper_flow() -> gf.GeoFlow:
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig.paper()).eval().requires_grad_(False)
    for name, parameter in flow.named_parameters():
        if not name.startswith("encoders"):
            parameter.normal_(0, 0.02)
    return flow


def autograd_log_density(
    plain: PlainFlow, image: Tensor, text: Tensor, code: int, steps: int, probes: Callable[[int, int, Tensor], Tensor]
) -> Tensor:
    """What one would first write: Euler back from t=1, one vector-Jacobian product a step, a time for every row."""
    points, rows = [image, text], len(image)
    moving = {0: (0, 1), 1: (1,), 2: (0,)}[code]
    direction = torch.full((rows,), code, dtype=torch.int8)
    total = torch.full((rows,), -sum(log_area(points[s].shape[1]) for s in moving), dtype=torch.float64)
    for step in range(steps):
        points = [x.detach().requires_grad_() for x in points]
        velocity = plain(*points, torch.full((rows,), 1 - step / steps), direction)
        probe = {s: probes(step, s, points[s].detach()) for s in moving}
        along = sum((velocity[s] * probe[s]).sum() for s in moving)
        pulled = torch.autograd.grad(along, [points[s] for s in moving])
        total -= sum((g * probe[s]).sum(1).double() for s, g in zip(moving, pulled)) / steps
        for s in moving:
            points[s] = exp_map(points[s].detach(), -velocity[s].detach() / steps)
    return total


def signs(_step: int, _stream: int, x: Tensor) -> Tensor:
    """The paper's probes: random signs, projected."""
    e = torch.randint(0, 2, x.shape).to(x.dtype).mul_(2).sub_(1)
    return e - (e * x).sum(1, keepdim=True) * x


def autograd_score(plain: PlainFlow, image: Tensor, text: Tensor, steps: int) -> Tensor:
    joint, i2t, t2i = (autograd_log_density(plain, image, text, code, steps, signs) for code in range(3))
    return i2t + t2i - 2 * joint


def gate_same_numbers(flow: gf.GeoFlow, plain: PlainFlow) -> None:
    """The same weights and Gaussian probes give the same log-density."""
    image, text = sample_uniform(6, WIDTH), sample_uniform(6, WIDTH)
    for code, direction in enumerate(DIRECTIONS):
        seed = int(draw_seed(torch.Generator().manual_seed(3), image))
        probes = Probes(seed, torch.arange(6), 1, "gaussian", "none", False, "sphere")
        theirs = autograd_log_density(plain, image, text, code, 2, lambda n, s, x: probes.draw(n, s, x)[0])  # noqa: B023
        options: dict[str, Any] = {"solver": "euler", "tangents": "combined", **INDEPENDENT}
        ours = gf.log_density(flow, image, text, direction, 2, generator=torch.Generator().manual_seed(3), **options)
        gate(f"{direction} log-density against the twin", torch.allclose(ours, theirs, rtol=1e-5))


def speed(steps: int = 5, rounds: int = 2) -> tuple[str, dict[str, float]]:
    """Seconds of a score of 256 pairs; Euler is timed over `steps` of its 50 steps, its cost being linear in them."""
    flow = paper_flow()
    plain = PlainFlow(flow).eval().requires_grad_(False)
    gate_same_numbers(flow, plain)
    image, text = sample_uniform(ROWS, WIDTH), sample_uniform(ROWS, WIDTH)
    euler: dict[str, Any] = {"n_steps": steps, "solver": "euler"}
    seconds = time_together(
        {
            "autograd, 50 Euler steps": lambda: autograd_score(plain, image, text, steps),
            "one tangent per solve, 50 Euler steps": lambda: gf.epistemic(
                flow, image, text, tangents="combined", **euler
            ),
            "separate tangents, 50 Euler steps": lambda: gf.epistemic(flow, image, text, **euler),
        },
        rounds,
    )
    seconds = {name: 50 / steps * value for name, value in seconds.items()}
    seconds |= time_together(
        {
            "default: midpoint, 10 steps": lambda: gf.epistemic(flow, image, text),
            "FAST_DENSITY": lambda: gf.epistemic(flow, image, text, **gf.FAST_DENSITY),
        },
        1,
    )
    slowest = seconds["autograd, 50 Euler steps"]
    rows = [
        {"setting": name, "seconds": value, "speed-up": slowest / value, "pairs per second": ROWS / value}
        for name, value in seconds.items()
    ]
    return report("density_speed", rows, {"rows": ROWS, "steps timed": steps}), seconds


MEMORY_RUN = """
import json, sys, torch
from benchmarks import bench_density as bench
import geoflow_fast as gf
from geoflow_fast.geometry import sample_uniform
flow = bench.paper_flow()
plain = bench.PlainFlow(flow).eval().requires_grad_(False) if sys.argv[1] == "autograd" else None
image, text = (sample_uniform(bench.ROWS, bench.WIDTH) for _ in range(2))
def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
def run(rows, steps):
    if plain is None:
        gf.epistemic(flow, image[:rows], text[:rows], n_steps=steps, solver="euler")
    else:
        bench.autograd_score(plain, image[:rows], text[:rows], steps)
run(1, 1)
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
run(bench.ROWS, 2)
print(json.dumps(resident("VmHWM") - before))
"""


def memory() -> str:
    """Peak resident memory of a score beyond the weights, each in a process of its own."""
    peak = {}
    for name in ("autograd", "geoflow_fast"):
        command = [sys.executable, "-c", MEMORY_RUN, name]
        peak[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 2**20
    gate("peak memory under half of autograd's", peak["geoflow_fast"] < 0.5 * peak["autograd"])
    rows = [
        {"implementation": name, "peak MiB beyond the weights": value, "share": value / peak["autograd"]}
        for name, value in peak.items()
    ]
    return report("density_memory", rows, {"rows": ROWS})


def linearity() -> str:
    """Seconds against pairs, steps and probes, each doubled three times, with a straight line through them."""
    flow = gf.GeoFlow(gf.GeoFlowConfig.small(256, 256)).eval()
    image, text = sample_uniform(512, 256), sample_uniform(512, 256)

    def seconds(rows: int = 128, n_steps: int = 4, n_probes: int = 1) -> float:
        def run() -> gf.Epistemic:
            pair = image[:rows], text[:rows]
            return gf.epistemic(flow, *pair, n_steps=n_steps, n_probes=n_probes, **INDEPENDENT)

        return time_together({"run": run}, 3)["run"]

    rows = []
    for name, values in (("rows", (64, 128, 256, 512)), ("n_steps", (2, 4, 8, 16)), ("n_probes", (1, 2, 4, 8))):
        x = torch.tensor(values, dtype=torch.float64)
        y = torch.tensor([seconds(**{name: value}) for value in values], dtype=torch.float64)
        design = torch.stack((torch.ones_like(x), x), 1)
        fit = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
        share = 1 - float((design @ fit - y).square().sum() / (y - y.mean()).square().sum())
        gate(f"cost linear in {name}", share > 0.97)
        rows.append(
            {"in": name, "values": "/".join(map(str, values)), "ms each": 1e3 * float(fit[1]), "R^2 of the line": share}
        )
    return report("density_linearity", rows, {})


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


def measure(flow: gf.GeoFlow, reference: gf.Epistemic, **options: Any) -> Quality:
    image, text = concept_pairs(flow.config.image_dim)
    found = [
        gf.epistemic(flow, image, text, generator=torch.Generator().manual_seed(100 + k), **options)
        for k in range(REPEATS)
    ]
    joint, score = torch.stack([ep.joint for ep in found]), torch.stack([ep.score for ep in found])
    known = slice(0, ROWS // 2)
    return Quality(
        float(joint.var(0).mean().sqrt()),
        float(score.var(0).mean().sqrt()),
        float((joint.mean(0) - reference.joint).mean()),
        float((score.mean(0) - reference.score).mean()),
        sum(float(spearmanr(x, reference.score)[0]) for x in score) / REPEATS,
        sum(float(spearmanr(x[known], reference.score[known])[0]) for x in score) / REPEATS,
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "paper: Euler 50, signs": dict(gf.PAPER_DENSITY),
    "the same, probe kept": {**gf.PAPER_DENSITY, "redraw": False},
    "Euler 50, separate, Gaussian, independent": {**EULER, **INDEPENDENT},
    "Euler 50, separate": EULER,
    "midpoint 10, combined": {"tangents": "combined"},
    "midpoint 10, alternating": {"tangents": "alternating"},
    "midpoint 10, Gaussian, independent": INDEPENDENT,
    "midpoint 10, Gaussian, orthogonal to earlier steps": {"probe": "gaussian"},
    "default: midpoint 10": {},
    "midpoint 10, two probes": {"n_probes": 2},
    "midpoint 10, four probes": {"n_probes": 4},
    "midpoint 10, four orthogonal probes": {"n_probes": 4, "orthogonal": "probes"},
    "midpoint 10, late grid": {"grid": "late"},
    "midpoint 10, early grid": {"grid": "early"},
    "FAST_DENSITY": dict(gf.FAST_DENSITY),
    "ab2 10, early grid, three probes": RANKING,
    "rk4 5": {"n_steps": 5, "solver": "rk4"},
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
    found = {name: measure(flow, reference, **options) for name, options in SETTINGS.items()}
    rows = [{"setting": name, **dataclasses.asdict(value)} for name, value in found.items()]
    kept, paper = found["the same, probe kept"], found["paper: Euler 50, signs"]
    separate = found["Euler 50, separate, Gaussian, independent"]
    gate("redrawn probes cut the standard deviation by 3", kept.score_sd > 3 * paper.score_sd)
    gate("separate tangents cut it by 2 more", paper.score_sd > 2 * separate.score_sd)
    gate("midpoint with 10 steps is within .1 nat", abs(found["default: midpoint 10"].joint_bias) <= 0.1)
    gate("three probes rank as the reference does", found["ab2 10, early grid, three probes"].spearman >= 0.99)
    assert reference.stderr is not None
    notes = {"reference stderr": float(reference.stderr.mean()), "spread of the score": float(reference.score.std())}
    return report("density_quality", rows, notes), found


def widths(references: dict[int, gf.Epistemic]) -> str:
    """One and two probes on worlds of several widths: noise grows with the width, the spread of the score faster."""
    settings: dict[str, dict[str, Any]] = {
        "default: midpoint 10": {},
        "FAST_DENSITY": dict(gf.FAST_DENSITY),
        "midpoint 10, Gaussian, orthogonal to earlier steps": {"probe": "gaussian"},
        "midpoint 10, two probes": {"n_probes": 2},
    }
    rows = []
    for dim, reference in references.items():
        flow, spread = concept_flow(dim), float(reference.score.std())
        for name, options in settings.items():
            found = measure(flow, reference, **options)
            rows.append({"width": dim, "spread of the score": spread, "setting": name, **dataclasses.asdict(found)})
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
            found = measure(flow, reference, **{**gf.PAPER_DENSITY, "n_steps": steps, "n_probes": probes})
            rows.append({"steps": steps, "probes": probes, **dataclasses.asdict(found)})
    return report("density_ablation", rows, {})


def equal_error(seconds: dict[str, float], found: dict[str, Quality]) -> str:
    """Cost of one standard error: seconds times variance, over that of autograd at the paper's setting."""
    base = seconds["autograd, 50 Euler steps"] * found["paper: Euler 50, signs"].score_sd ** 2
    pairs = {
        "separate tangents, 50 Euler steps": "Euler 50, separate",
        "default: midpoint, 10 steps": "default: midpoint 10",
        "FAST_DENSITY": "FAST_DENSITY",
    }
    rows = [
        {"setting": name, "speed-up at equal standard error": base / (seconds[name] * found[other].score_sd ** 2)}
        for name, other in pairs.items()
    ]
    gate("5x at equal standard error", max(row["speed-up at equal standard error"] for row in rows) >= 5)
    return report("density_equal_error", rows, {})


def gate_speed(seconds: dict[str, float]) -> None:
    base = seconds["autograd, 50 Euler steps"]
    for name, factor in (
        ("one tangent per solve, 50 Euler steps", 1.25),
        ("separate tangents, 50 Euler steps", 1.0),
        ("default: midpoint, 10 steps", 3.0),
        ("FAST_DENSITY", 5.0),
    ):
        gate(f"{name} at least {factor}x autograd", base / seconds[name] >= factor)


def run() -> str:
    begin = time.perf_counter()
    table, seconds = speed()
    gate_speed(seconds)
    references = {dim: reference_score(concept_flow(dim)) for dim in WIDTHS}
    ranks = widths(references)
    flow = concept_flow()
    numbers, found = quality(flow, references[NARROW])
    parts = (
        table,
        memory(),
        linearity(),
        numbers,
        ranks,
        equal_error(seconds, found),
        ablation(flow, references[NARROW]),
    )
    return "\n\n".join((*parts, f"{time.perf_counter() - begin:.0f} s in all"))
