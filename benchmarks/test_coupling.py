"""Optimal-transport coupling: cost build, Sinkhorn to an error of 1e-3, row argmax; eps = 0.05, float32.

Peers do the same number of iterations on the same points (geomloss anneals and is given four times as many): POT, and
Sinkhorn in torch in the log domain and in the kernel domain, the latter as one writes it and once more without
avoidable copies. torchcfm and flash-sinkhorn know squared chords only, and are compared on those, as costs that
`sinkhorn` is given; POT and `sinkhorn` on uniform costs. Limits: torch's own matrix product for the build, one
streaming read of the matrix for an iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.cases import PEER, Case, Contender, Scaling, each, each_size
from benchmarks.limits import Work
from geoflow_fast.noise import sample_uniform

WIDTH, EPS = 1024, 0.05


@dataclass(frozen=True)
class Problem:
    """Points, and how many iterations an error of 1e-3 takes."""

    points: twins.Points
    iterations: int

    @classmethod
    def draw(cls, n: int, width: int) -> Problem:
        points = random_points(n, width)
        return cls(points, int(torch.ops.geoflow.ot_solve(*points, EPS, 1e-3, 1000, None, "auto")[3][0]))

    def ours(self) -> Tensor:
        return gf.ops.ot_assign(*self.points, eps=EPS, backend="cpu")

    @property
    def joined(self) -> tuple[Tensor, Tensor]:
        """Noise [n, 2d] and data [n, 2d]: squared distances between these are the sum of the two squared chords."""
        return torch.cat(self.points[:2], 1), torch.cat(self.points[2:], 1)


def random_points(n: int, width: int = WIDTH) -> twins.Points:
    return tuple(sample_uniform(n, width) for _ in range(4))


def share_alike(least: float) -> Callable[[Tensor, Tensor], bool]:
    return lambda result, truth: float((result == truth).float().mean()) >= least


def arc_truth(problem: Problem) -> Tensor:
    """The converged log domain: three iterations more than an error of 1e-3 takes."""
    return twins.torch_log_domain(problem.points, problem.iterations + 3, EPS)


ARC = (
    Contender("POT, float32", lambda p: peers.pot_assign(p.points, p.iterations, EPS), PEER, needs="ot"),
    Contender(
        "geomloss",
        lambda p: peers.geomloss_assign(p.points, p.iterations, EPS),
        PEER,
        needs="geomloss",
        agrees=share_alike(0.99),  # it averages updates and converges later
    ),
    Contender("torch, log domain", lambda p: twins.torch_log_domain(p.points, p.iterations, EPS), PEER),
    Contender("torch, kernel domain", lambda p: twins.torch_kernel_domain(p.points, p.iterations, EPS), PEER),
    Contender(
        "torch, kernel domain, in place", lambda p: twins.torch_kernel_in_place(p.points, p.iterations, EPS), PEER
    ),
    Contender("geoflow_fast", lambda p: p.ours()),
)


def squared_chords(problem: Problem) -> gf.ops.SinkhornResult:
    x, y = problem.joined
    return gf.ops.sinkhorn(4 - 2 * (x @ y.T), EPS, backend="cpu")


def chord_truth(problem: Problem) -> tuple[Tensor, Tensor, float]:
    """Row argmax, the cost matrix, and the mean cost under the plan."""
    result = squared_chords(problem)
    return (result.g - result.cost).argmax(1), result.cost, result.transport_cost


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
    Contender(
        "geoflow_fast",
        lambda p: (lambda result: (result.g - result.cost).argmax(1))(squared_chords(p)),
        agrees=lambda result, truth: share_alike(0.999)(result, truth[0]),
    ),
)


GIVEN = (
    Contender("POT, float32", lambda given: peers.pot_plan(*given, EPS), PEER, needs="ot"),
    Contender("geoflow_fast", lambda given: gf.ops.sinkhorn(given[0], EPS, backend="cpu").plan),
)


def given(n: int) -> Case:
    """The plan [n, n] of a matrix of uniform costs, which POT and ours are given, in as many iterations."""

    def draw() -> tuple[Tensor, int]:
        cost = torch.rand(n, n)
        return cost, gf.ops.sinkhorn(cost, EPS).iterations

    def same(plan: Tensor, truth: Tensor) -> bool:
        return float((plan - truth).abs().sum()) < 0.01

    def truth(problem: tuple[Tensor, int]) -> Tensor:
        return gf.ops.sinkhorn(problem[0].double(), EPS, tol=1e-6, backend="reference").plan

    return Case(f"Plan of a cost matrix, {n} x {n}", draw, truth, same, GIVEN, Work(bytes=4 * n * n * 12))


def matrix_work(n: int, width: int, iterations: int = 2) -> Work:
    """Two products, and one pass over the matrix to write it, one per iteration and one for the argmax; an arc cosine
    (per sphere) and an exponential per entry."""
    return Work(flops=4 * n * n * width, bytes=4 * n * n * (2 + iterations), exps=3 * n * n)


def arc(n: int, width: int = WIDTH, *, quick: bool = False) -> Case:
    work = matrix_work(n, width)
    return Case(
        f"Coupling, B = {n}, d = {width}",
        lambda: Problem.draw(n, width),
        arc_truth,
        share_alike(0.999),
        ARC,
        work,
        quick,
    )


def chord(n: int, width: int = WIDTH) -> Case:
    return Case(
        f"Coupling by a matrix of squared chords, B = {n}, d = {width}",
        lambda: Problem.draw(n, width),
        chord_truth,
        drawn_like,
        CHORD,
        matrix_work(n, width, 9),
    )


def assigned(eps: float, assignment: str) -> Contender:
    def run(points: twins.Points) -> Tensor:
        return gf.ops.ot_assign(*points, eps=eps, assignment=assignment)

    return Contender(assignment if assignment == "exact" else f"{assignment}, eps = {eps}", run)


def choices(n: int) -> Case:
    """What a coupling costs and does at other eps, next to the exact assignment."""
    pairs = [(eps, assignment) for eps in (0.05, 0.01, 0.005) for assignment in ("argmax", "sample")]

    def effect(index: Tensor, cost: Tensor) -> dict[str, str]:
        mean = float(cost.gather(1, index[:, None]).mean())
        return {"targets used": f"{100 * len(index.unique()) / n:.1f} %", "mean cost": f"{mean:.4f}"}

    def closer(index: Tensor, cost: Tensor) -> bool:
        """The pairs of every coupling are closer than independent ones."""
        return bool(cost.gather(1, index[:, None]).mean() < cost.diagonal().mean())

    return Case(
        f"Couplings at other eps, B = {n}",
        lambda: random_points(n),
        twins.torch_cost,
        closer,
        (*(assigned(*pair) for pair in pairs), assigned(EPS, "exact")),
        columns=effect,
    )


CASES = (arc(1024, 256, quick=True), arc(2048), arc(8192), chord(2048), given(2048))


def over_rows(n: int) -> Callable[[], Any]:
    points = random_points(n, 256)
    return lambda: gf.ops.ot_assign(*points, eps=EPS, backend="cpu")


@each(CASES)
def test_coupling(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each([choices(4096)])
def test_choices(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each_size([Scaling("Coupling, d = 256", "B", (1024, 2048, 4096, 8192), over_rows, expected=2.0)])
def test_growth(grow: Any, scaling: Scaling, size: int) -> None:
    grow(scaling, size)
