"""Calls on one row, in microseconds: what an operation costs before its kernel has anything to do.

Beside the operations stand calls of torch that are known to be short, `layer_norm` on the same row and a product with
`topk`; neither is the same work as what it stands beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.cases import FOR_COMPARISON, PEER, Case, Contender, each
from geoflow_fast import ops
from geoflow_fast.noise import sample_uniform

WIDTH, ITEMS, TOP_K = 8, 100, 10


@dataclass(frozen=True)
class Row:
    """Rows of one call: a point, three others and the wide row of a SwiGLU layer; times and directions."""

    x: Tensor
    v: Tensor
    shift: Tensor
    scale: Tensor
    wide: Tensor
    points: tuple[Tensor, ...]
    t: Tensor
    direction: Tensor

    @classmethod
    def draw(cls) -> Row:
        v, shift, scale = torch.randn(3, 1, WIDTH)
        points = tuple(sample_uniform(1, WIDTH) for _ in range(4))
        direction = torch.zeros(1, dtype=torch.int8)
        return cls(points[0], v, shift, scale, torch.randn(1, 2 * WIDTH), points, torch.rand(1), direction)


OPERATIONS: dict[str, Callable[[Row, str], Any]] = {
    "adaln": lambda r, backend: ops.adaln(r.v, r.shift, r.scale, backend=backend),
    "swiglu": lambda r, backend: ops.swiglu(r.wide, backend=backend),
    "tangent_step": lambda r, backend: ops.tangent_step(r.x, r.v, 0.1, backend=backend),
    "masked_interpolant": lambda r, backend: ops.masked_interpolant(*r.points, r.t, r.direction, backend=backend),
}


def close(answer: Any, truth: Any) -> bool:
    if isinstance(truth, Tensor):
        answer, truth = (answer,), (truth,)
    return all(torch.allclose(a, b, atol=2e-6) for a, b in zip(answer, truth, strict=True))


def case(name: str) -> Case:
    run = OPERATIONS[name]
    return Case(
        f"One row of {WIDTH}, `{name}`",
        Row.draw,
        lambda r: run(r, "reference"),
        close,
        (
            Contender("torch, reference", lambda r: run(r, "reference"), PEER),
            Contender(
                "torch, `layer_norm`",
                lambda r: functional.layer_norm(r.v, (WIDTH,)),
                FOR_COMPARISON,
                agrees=lambda answer, _: answer.shape == (1, WIDTH),
            ),
            Contender("geoflow_fast", lambda r: run(r, "auto")),
        ),
    )


def search() -> Case:
    return Case(
        f"One query, N = {ITEMS}, d = 64",
        lambda: (sample_uniform(1, 64), sample_uniform(ITEMS, 64)),
        lambda rows: (rows[0] @ rows[1].T).topk(TOP_K),
        lambda answer, truth: torch.allclose(answer[0], truth[0], atol=1e-6) and torch.equal(answer[1], truth[1]),
        (
            Contender("torch, product and topk", lambda rows: (rows[0] @ rows[1].T).topk(TOP_K), PEER),
            Contender("geoflow_fast", lambda rows: ops.gallery_search(*rows, TOP_K)),
        ),
    )


CASES = (*(case(name) for name in OPERATIONS), search())


@each(CASES)
def test_calls(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)
