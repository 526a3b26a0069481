"""Retrieval entropy end to end, sampling included, 1024 wide with the paper's network.

Peers solve the ODE of the plain torch network with two passes for guidance and modulations per row: Euler steps along
great circles in torch, flow_matching's solver on the sphere, torchdiffeq in the space around it; then a dense
posterior. Gates: the same entropies from the paper's settings.
"""

from __future__ import annotations

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
from benchmarks.inputs import PAPER, Scene, row_flops
from benchmarks.limits import Work


def within(nats: float, index: int = 0) -> Callable[[Tensor, Any], bool]:
    return lambda result, truth: torch.allclose(result.double(), truth[index], rtol=0, atol=nats)


OURS = Contender(f"geoflow_fast, {PAPER_NAME}", Scene.paper)
CONTENDERS = (
    Contender("torch", lambda s: s.by(twins.plain_samples), PEER),
    # Steps of the other two are not along great circles.
    Contender(
        "flow_matching", lambda s: s.by(peers.flow_matching_samples), PEER, needs="flow_matching", agrees=within(0.1)
    ),
    Contender("torchdiffeq", lambda s: s.by(peers.torchdiffeq_samples), PEER, needs="torchdiffeq", agrees=within(0.1)),
    OURS,
    *with_mkl_alone(OURS),
    *in_bfloat16(
        Contender(f"geoflow_fast, {PAPER_NAME}, bfloat16", lambda s: s.paper("bfloat16"), agrees=within(0.05))
    ),
    Contender("geoflow_fast, `RetrievalEntropy.fast`", Scene.fast, agrees=within(2e-3, index=1)),
)


def case(
    config: gf.GeoFlowConfig,
    items: int,
    draws: int,
    steps: int,
    contenders: Sequence[Contender],
    *,
    queries: int = 2,
    quick: bool = False,
) -> Case:
    rows = queries * draws
    flops = 2 * steps * rows * row_flops(config, "t2i") + 2 * rows * items * config.image_dim
    return Case(
        f"Retrieval entropy, {queries} queries, {draws} samples x {steps} steps, N = {items:,}, d = {config.image_dim}",
        lambda: Scene.draw(config, queries, items, n_samples=draws, n_steps=steps),
        Scene.truths,
        within(2e-3),
        contenders,
        Work(flops=flops, bytes=4 * items * config.image_dim),
        quick,
    )


SMALL = renamed(CONTENDERS, PAPER_NAME, "20 samples x 10 steps")
CASES = (
    case(gf.GeoFlowConfig.small(256, 256), 1000, 20, 10, SMALL, quick=True),
    case(gf.GeoFlowConfig.paper(), 10_000, PAPER.n_samples, PAPER.n_steps, CONTENDERS),
)


def over(name: str) -> Callable[[int], Callable[[], Any]]:
    def make(size: int) -> Callable[[], Any]:
        return Scene.draw(gf.GeoFlowConfig.small(), 2, 1000, **{"n_samples": 20, "n_steps": 10, name: size}).paper

    return make


SCALINGS = (
    Scaling("Retrieval entropy", "steps", (10, 20, 40, 80), over("n_steps")),
    Scaling("Retrieval entropy", "M", (10, 20, 40, 80), over("n_samples")),
)


@each(CASES)
def test_entropy(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


@each_size(SCALINGS)
def test_growth(grow: Any, scaling: Scaling, size: int) -> None:
    grow(scaling, size)
