"""Masked interpolant: points on both geodesics and their velocities, a third of the rows of each direction, float32.

Work: each input that is needed is read once and each output written once. Peers: this library's reference, the textbook
formula (acos of the dot product, no care at the edges) in as few torch calls as it takes, and flow_matching's path.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class InterpolantInput:
    """Noise and data of both streams, times and directions."""

    points: twins.Points
    t: Tensor
    direction: Tensor

    @classmethod
    def draw(cls, rows: int, width: int) -> InterpolantInput:
        points = tuple(sample_uniform(rows, width) for _ in range(4))
        direction = (torch.arange(rows) % 3).to(torch.int8)
        return cls(points, torch.rand(rows), direction)

    def op(self, backend: str) -> tuple[Tensor, ...]:
        return gf.ops.masked_interpolant(*self.points, self.t, self.direction, backend=backend)


CONTENDERS = (
    Contender("torch, reference", lambda b: b.op("reference"), PEER),
    Contender("torch, textbook", lambda b: twins.textbook_interpolant(b.points, b.t, b.direction), PEER),
    Contender(
        "flow_matching, GeodesicProbPath",
        lambda b: peers.flow_matching_interpolant(b.points, b.t, b.direction),
        PEER,
        needs="flow_matching",
    ),
    Contender("geoflow_fast", lambda b: b.op("cpu")),
)


def case(rows: int, width: int, *, quick: bool = False) -> Case:
    # Given rows, a third per stream, read one point instead of two.
    traffic = 4 * width * (8 * rows - 2 * rows // 3)
    return Case(
        f"Interpolant, B = {rows}, d = {width}",
        lambda: InterpolantInput.draw(rows, width),
        lambda b: b.op("reference"),
        lambda result, truth: all(torch.allclose(a, b, atol=2e-6) for a, b in zip(result, truth)),
        CONTENDERS,
        Work(bytes=traffic),
        quick,
    )


CASES = (case(2048, 512, quick=True), case(8192, 1024))


def over_rows(rows: int) -> Callable[[], Any]:
    batch = InterpolantInput.draw(rows, 512)
    return lambda: batch.op("cpu")


@each(CASES)
def test_interpolant(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each_size([Scaling("Interpolant, d = 512", "B", (1024, 2048, 4096, 8192), over_rows)])
def test_growth(grow: Any, scaling: Scaling, size: int) -> None:
    grow(scaling, size)
