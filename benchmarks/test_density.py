"""Likelihoods: the epistemic score of the paper's network against straightforward autograd.

Peers take the gradient of the plain torch network: Euler back along great circles, and torchdiffeq in the space around
the sphere with the divergence as one more state. Gates: with the same probes, twin and library have the same
log-density and torchdiffeq's is close; the scores of all agree within their noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.cases import (
    PAPER_NAME,
    PEER,
    Case,
    Contender,
    Scaling,
    each,
    each_size,
    in_bfloat16,
    renamed,
    with_mkl_alone,
)
from benchmarks.inputs import Rows, row_flops
from benchmarks.limits import Work
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.likelihood.probes import Probes
from geoflow_fast.likelihood.reverse_ode import draw_seed
from geoflow_fast.manifolds import SPHERE

HALF = gf.DensitySettings(precision="bfloat16")


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs to score, with Euler steps of the paper's kind."""

    rows: Rows
    steps: int

    def ours(self, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return gf.epistemic(self.rows.flow, self.rows.image, self.rows.text, generator=generator, **options).score

    def paper(self) -> Tensor:
        return self.ours(n_steps=self.steps, settings=gf.PAPER_DENSITY)

    def by(self, log_density: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(1)
        rows = self.rows
        joint, i2t, t2i = (
            log_density(rows.plain, rows.image, rows.text, code, self.steps, twins.signs) for code in range(3)
        )
        return i2t + t2i - 2 * joint

    def truths(self) -> tuple[Tensor, Tensor]:
        """After these Euler steps, and after many better ones, once the log-densities are known to be the twin's."""
        check_same_numbers(self.rows)
        return self.ours(n_steps=self.steps, solver="euler"), self.ours(n_steps=40, solver="ab2")


def check_same_numbers(rows: Rows) -> None:
    """The same weights and probes give the same log-density."""
    image, text = rows.image[:6], rows.text[:6]
    settings = gf.DensitySettings(n_steps=2, solver="euler", tangents="combined", redraw=False)
    for code, direction in enumerate(DIRECTIONS):
        seed = int(draw_seed(torch.Generator().manual_seed(3), image))
        probes = Probes(seed, torch.arange(6), settings, SPHERE)
        given = image, text, code, 2, lambda n, s, x, probes=probes: probes.draw(n, s, x)[0]
        generator = torch.Generator().manual_seed(3)
        ours = gf.log_density(rows.flow, image, text, direction, generator=generator, settings=settings)
        twin = twins.autograd_log_density(rows.plain, *given)
        assert torch.allclose(ours, twin, rtol=1e-5, atol=1e-3), f"{direction} log-density differs from the twin's"


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
        Contender("geoflow_fast, default, bfloat16", lambda p: p.ours(settings=HALF), agrees=within_noise(1)),
    ),
    Contender("geoflow_fast, `FAST_DENSITY`", lambda p: p.ours(settings=gf.FAST_DENSITY), agrees=within_noise(1)),
)


def case(
    config: gf.GeoFlowConfig, rows: int, steps: int, contenders: Sequence[Contender], *, quick: bool = False
) -> Case:
    # Points and one tangent each through the network of all three directions.
    flops = 2 * steps * rows * sum(row_flops(config, direction) for direction in DIRECTIONS)
    return Case(
        f"Epistemic score, {rows} pairs, {steps} Euler steps, d = {config.image_dim}",
        lambda: Pairs(Rows.draw(config, rows), steps),
        Pairs.truths,
        within_noise(0),
        contenders,
        Work(flops=flops),
        quick,
    )


CASES = (
    case(gf.GeoFlowConfig.small(256, 256), 32, 10, renamed(CONTENDERS, PAPER_NAME, "10 Euler steps"), quick=True),
    case(gf.GeoFlowConfig.paper(), 64, 50, CONTENDERS),
)


def over(name: str) -> Callable[[int], Callable[[], Any]]:
    def make(size: int) -> Callable[[], Any]:
        given = {"rows": 128, "n_steps": 4, "n_probes": 1, name: size}
        pairs = Pairs(Rows.draw(gf.GeoFlowConfig.small(256, 256), given.pop("rows")), 0)
        settings = gf.DensitySettings(**given)
        return lambda: pairs.ours(settings=settings)

    return make


SCALINGS = (
    Scaling("Epistemic score", "B", (64, 128, 256, 512), over("rows")),
    Scaling("Epistemic score", "steps", (2, 4, 8, 16), over("n_steps")),
    Scaling("Epistemic score", "probes", (1, 2, 4, 8), over("n_probes")),
)


@each(CASES)
def test_epistemic_score(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each_size(SCALINGS)
def test_growth(grow: Any, scaling: Scaling, size: int) -> None:
    grow(scaling, size)
