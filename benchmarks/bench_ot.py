"""Optimal-transport coupling: cost build, Sinkhorn to an error of 1e-3, row argmax; eps = 0.05, float32.

Peers do the same number of iterations on the same points (geomloss anneals and is given four times as many): POT, and
Sinkhorn in torch in the log domain and in the kernel domain, the latter as one writes it and once more without
avoidable copies. torchcfm and flash-sinkhorn know squared chords only, and are compared on those. Limits: torch's own
matrix product for the build, one streaming read of the matrix for an iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.common import time_together, watched
from benchmarks.limits import Limits, Work
from benchmarks.suite import PEER, Case, Contender, Scaling, Table
from geoflow_fast.noise import StructuredNoise, sample_uniform
from geoflow_fast.ops import native

WIDTH, EPS = 1024, 0.05
EXACT_SIZE = 4096


@dataclass(frozen=True)
class Problem:
    """Points, the same data with structured noise, and how many iterations an error of 1e-3 takes."""

    points: twins.Points
    structured: tuple[StructuredNoise, StructuredNoise]
    cost: str
    iterations: int

    @classmethod
    def draw(cls, n: int, width: int, cost: str = "arc") -> Problem:
        points = random_points(n, width)
        noise = StructuredNoise.draw(n, width), StructuredNoise.draw(n, width)
        return cls(points, noise, cost, gf.ops.sinkhorn(cost, points, eps=EPS).iterations)

    def ours(self, **options: Any) -> Tensor:
        return gf.ops.ot_assign(*self.points, eps=EPS, cost=self.cost, backend="cpu", **options)

    def with_structured_noise(self) -> Tensor:
        return gf.ops.ot_assign(*self.structured, *self.points[2:], eps=EPS, backend="cpu")

    @property
    def joined(self) -> tuple[Tensor, Tensor]:
        """Noise [n, 2d] and data [n, 2d]: squared distances between these are the sum of the two squared chords."""
        return torch.cat(self.points[:2], 1), torch.cat(self.points[2:], 1)


def random_points(n: int, width: int = WIDTH) -> twins.Points:
    return tuple(sample_uniform(n, width) for _ in range(4))


def share_alike(least: float) -> Callable[[Tensor, Tensor], bool]:
    return lambda result, truth: float((result == truth).float().mean()) >= least


def structured_truth(problem: Problem) -> Callable[[Tensor], bool]:
    dense = tuple(x.dense() for x in problem.structured)
    expected = gf.ops.ot_assign(*dense, *problem.points[2:], eps=EPS, backend="cpu")
    return lambda result: share_alike(0.999)(result, expected)


def arc_truth(problem: Problem) -> tuple[Tensor, Callable[[Tensor], bool]]:
    """The converged log domain (three iterations more than an error of 1e-3 takes), and what structured noise gives."""
    return twins.torch_log_domain(problem.points, problem.iterations + 3, EPS), structured_truth(problem)


ARC = (
    Contender("POT, float32", lambda p: peers.pot_assign(p.points, p.iterations, EPS), PEER, needs="ot"),
    Contender(
        "geomloss",
        lambda p: peers.geomloss_assign(p.points, p.iterations, EPS),
        PEER,
        needs="geomloss",
        agrees=lambda result, truth: share_alike(0.99)(result, truth[0]),  # it averages updates and converges later
    ),
    Contender("torch, log domain", lambda p: twins.torch_log_domain(p.points, p.iterations, EPS), PEER),
    Contender("torch, kernel domain", lambda p: twins.torch_kernel_domain(p.points, p.iterations, EPS), PEER),
    Contender(
        "torch, kernel domain, in place", lambda p: twins.torch_kernel_in_place(p.points, p.iterations, EPS), PEER
    ),
    Contender("geoflow_fast", lambda p: p.ours()),
    Contender(
        "geoflow_fast, float16 storage",
        lambda p: p.ours(storage="float16"),
        agrees=lambda result, truth: share_alike(0.99)(result, truth[0]),
    ),
    Contender(
        "geoflow_fast, structured noise",
        lambda p: p.with_structured_noise(),
        agrees=lambda result, truth: truth[1](result),
    ),
)


def chord_truth(problem: Problem) -> tuple[Tensor, Tensor, float]:
    """Row argmax, the cost matrix, and the mean cost under the plan."""
    cost = gf.ops.transport_cost(*problem.points, cost="chord")
    return problem.ours(), cost, gf.ops.sinkhorn(cost, eps=EPS).transport_cost


def drawn_like(result: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor, float]) -> bool:
    """Pairs drawn from the plan have its mean cost, up to four standard errors."""
    cost = truth[1][result]
    return abs(float(cost.mean()) - truth[2]) < 4 * float(cost.std()) / math.sqrt(len(cost))


CHORD = (
    Contender(
        "flash-sinkhorn, reference",
        lambda p: peers.flash_sinkhorn_assign(*p.joined, p.iterations, EPS),
        PEER,
        needs="flash_sinkhorn",
        agrees=lambda result, truth: share_alike(0.99)(result, truth[0]),
    ),
    Contender("torchcfm, drawn", lambda p: peers.torchcfm_draw(*p.joined, EPS), PEER, needs="torchcfm"),
    Contender("geoflow_fast", lambda p: p.ours(), agrees=lambda result, truth: share_alike(0.999)(result, truth[0])),
    Contender("geoflow_fast, drawn", lambda p: (torch.arange(len(p.points[0])), p.ours(assignment="sample"))),
)


def matrix_work(n: int, width: int, iterations: int = 2) -> Work:
    """Two products, and one pass over the matrix to write it, one per iteration and one for the argmax; an arc cosine
    (per sphere) and an exponential per entry."""
    return Work(flops=4 * n * n * width, bytes=4 * n * n * (2 + iterations), exps=3 * n * n)


def cases(quick: bool) -> list[Case]:
    width, sizes, chords = (256, (1024,), 512) if quick else (WIDTH, (2048, 8192), 2048)
    agrees = share_alike(0.999)
    result = [
        Case(
            f"Coupling, B = {n}, d = {width}",
            lambda n=n: Problem.draw(n, width),
            arc_truth,
            lambda result, truth: agrees(result, truth[0]),
            ARC,
            matrix_work(n, width),
            rounds=1 if n > 4096 else 3,
        )
        for n in sizes
    ]
    chord = Case(
        f"Coupling by squared chords, B = {chords}, d = {width}",
        lambda: Problem.draw(chords, width, "chord"),
        chord_truth,
        drawn_like,
        CHORD,
        matrix_work(chords, width, 9),
        rounds=2,
    )
    return [*result, chord]


def scalings(quick: bool) -> list[Scaling]:
    def coupling(n: int) -> Callable[[], Any]:
        points = random_points(n, 256)
        return lambda: gf.ops.ot_assign(*points, eps=EPS, backend="cpu")

    sizes = (256, 512, 1024, 2048) if quick else (1024, 2048, 4096, 8192)
    return [Scaling("Coupling, d = 256", "B", sizes, coupling, expected=2.0)]


def tables() -> Iterator[Table]:
    torch.manual_seed(0)
    yield stages(8192, random_points(8192))
    yield choices()


def stages(n: int, points: twins.Points) -> Table:
    """The stages of one solve on their own, on one shared matrix that `build` fills first."""
    limits = Limits.measure()
    matrix = native.TransportMatrix(n, n, torch.float32)
    f, g = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    image0, text0, image1, text1 = points
    seconds = time_together(
        {
            "cost and kernel build": lambda: matrix.build((image0, image1), (text0, text1), (1.0, 1.0), True, EPS),
            "one iteration": lambda: matrix.iterate(f, g, EPS, 1e-30, 1),
            "row argmax": lambda: matrix.assign(f, g, EPS, None),
        },
        rounds=3,
    )
    limits = limits.best(Limits.measure())
    one_pass = Work(bytes=4 * n * n)
    work = {"cost and kernel build": Work(flops=4 * n * n * WIDTH), "one iteration": one_pass, "row argmax": one_pass}
    rows = [
        {
            f"stage at B = {n}": name,
            "ms": 1e3 * value,
            "limit, ms": 1e3 * limits.seconds(work[name]),
            "limited by": limits.bound_by(work[name]),
            "share of the limit": f"{100 * limits.seconds(work[name]) / value:.0f} %",
        }
        for name, value in seconds.items()
    ]
    peak = {s: watched(lambda s=s: gf.ops.ot_assign(*points, eps=EPS, storage=s))[2] for s in ("float32", "float16")}
    return Table("stages", rows, {f"peak memory / float32 matrix, {s}": peak[s] / (4 * n * n) for s in peak})


def choices() -> Table:
    """What the coupling does at other eps, against the exact assignment."""
    n, points = EXACT_SIZE, random_points(EXACT_SIZE)
    cost = gf.ops.transport_cost(*points)
    rows: list[dict[str, Any]] = []
    for eps in (0.05, 0.01, 0.005):
        iterations = gf.ops.sinkhorn("arc", points, eps=eps).iterations
        for assignment in ("argmax", "sample"):
            index = gf.ops.ot_assign(*points, eps=eps, assignment=assignment)
            rows.append(_choice(f"{assignment}, eps = {eps}", iterations, index, cost))
    rows.append(_choice("exact", "", gf.ops.ot_assign(*points, assignment="exact"), cost))
    rows.append(_choice("independent", "", torch.arange(n), cost))
    return Table("choices", rows, {"B": n})


def _choice(name: str, iterations: int | str, index: Tensor, cost: Tensor) -> dict[str, Any]:
    n = len(index)
    return {
        "coupling": name,
        "iterations": iterations,
        "targets used": f"{100 * len(index.unique()) / n:.1f} %",
        "mean cost": f"{float(cost[torch.arange(n), index].mean()):.4f}",
    }
