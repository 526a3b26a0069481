"""What each row of a batch is asked: direction, time and guidance dropout.

Rows come sorted by direction, i2t, joint, t2i. Data rows are shuffled before, so nothing is lost, and the network
gains: the rows in which a stream is generated are then contiguous (image: all but i2t; text: all but t2i).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.data.rows import Index
from geoflow_fast.directions import DIRECTIONS

ROW_ORDER = tuple(DIRECTIONS.index(name) for name in ("i2t", "joint", "t2i"))
"""Direction codes in the order in which sorted rows stand."""


Counts = tuple[int, int, int]
"""Number of i2t, joint and t2i rows of a sorted batch."""


@dataclass(frozen=True)
class Curriculum:
    """Probability of joint rows over a run of `steps` steps: none, then a linear ramp, then `p_joint`.

    The paper: conditional rows only for the first 15 % of the run, ramp over the next 15 %, then 0.40; the other rows
    are half i2t, half t2i. A conditional row is under guidance dropout with probability `p_drop`.
    """

    steps: int
    conditional_share: float = 0.15
    ramp_share: float = 0.15
    p_joint: float = 0.40
    p_drop: float = 0.10

    def joint_probability(self, step: int) -> float:
        """Probability that a row of 0-based step `step` is joint."""
        start = self.conditional_share * self.steps
        ramp = self.ramp_share * self.steps
        if step < start:
            return 0.0
        return self.p_joint * min(1.0, (step - start) / ramp) if ramp > 0 else self.p_joint

    def draw(self, step: int, rows: int, generator: torch.Generator) -> Questions:
        """Questions for the `rows` rows of step `step`."""
        return draw_questions(rows, self.joint_probability(step), self.p_drop, generator)


@dataclass(frozen=True)
class Questions:
    """Direction codes int8 [B], sorted in `ROW_ORDER` with `counts` rows each; times [B]; guidance dropout bool [B]."""

    direction: Tensor
    counts: Counts
    t: Tensor
    drop: Tensor

    def select(self, rows: Index) -> Questions:
        """The questions of some rows, numbered in ascending order."""
        direction = self.direction[rows]
        i2t, joint, t2i = (int((direction == code).sum()) for code in ROW_ORDER)
        return Questions(direction, (i2t, joint, t2i), self.t[rows], self.drop[rows])


def draw_questions(rows: int, p_joint: float, p_drop: float, generator: torch.Generator) -> Questions:
    """Draws a direction per row (joint with `p_joint`, else i2t or t2i evenly), a uniform time and guidance dropout."""
    u = torch.rand(rows, generator=generator, dtype=torch.float64)
    n_joint = int((u < p_joint).sum())
    n_i2t = int((u >= p_joint + (1 - p_joint) / 2).sum())
    counts = (n_i2t, n_joint, rows - n_i2t - n_joint)
    direction = row_directions(counts)
    t = torch.rand(rows, generator=generator)
    drop = torch.rand(rows, generator=generator) < p_drop
    return Questions(direction, counts, t, drop & (direction != DIRECTIONS.index("joint")))


def row_directions(counts: Counts, device: torch.device | str = "cpu") -> Tensor:
    """Direction codes int8 [B] of the rows of a sorted batch."""
    codes = torch.tensor(ROW_ORDER, dtype=torch.int8, device=device)
    return torch.repeat_interleave(codes, torch.tensor(counts, device=device), output_size=sum(counts))
