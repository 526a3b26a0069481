"""Which direction, time and guidance dropout each row of a training batch has, and how directions change over a run.

The rows of a batch are sorted by direction: i2t, joint, t2i. Data rows are shuffled beforehand, so this loses nothing,
and the rows in which the network generates a stream are contiguous (image: all but i2t; text: all but t2i).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.data.rows import Index
from geoflow_fast.directions import ROW_CODES, Counts, row_directions

RAMP_LEVELS = 16
"""Shares of joint rows above zero that a run has if the directions of its batches are fixed."""


@dataclass(frozen=True)
class Curriculum:
    """Probability of joint rows over a run of `steps` steps: zero at first, then a linear ramp, then `p_joint`.

    In the paper all rows are conditional for the first 15 % of the run, the ramp takes the next 15 %, and then 40 % of
    the rows are joint; the other rows are half i2t, half t2i.
    """

    steps: int
    conditional_share: float = 0.15
    ramp_share: float = 0.15
    p_joint: float = 0.40

    def joint_probability(self, step: int) -> float:
        """Probability that a row of the 0-based step `step` is joint."""
        start = self.conditional_share * self.steps
        ramp = self.ramp_share * self.steps
        if step < start:
            return 0.0
        return self.p_joint * min(1.0, (step - start) / ramp) if ramp > 0 else self.p_joint

    def joint_share(self, step: int) -> float:
        """The share of joint rows where every batch has the same number of them: `joint_probability`, whose ramp rises
        in a few steps, so that a run has few kinds of batches."""
        levels = RAMP_LEVELS / self.p_joint if self.p_joint else 0.0
        return round(levels * self.joint_probability(step)) / levels if levels else 0.0


@dataclass(frozen=True)
class BatchPlan:
    """What the rows of a batch are trained on: `direction` codes int8 [B], sorted in `ROW_ORDER` with `counts` rows of
    each; times `t` [B]; and guidance dropout `drop`, bool [B]."""

    direction: Tensor
    counts: Counts
    t: Tensor
    drop: Tensor

    def select(self, rows: Index) -> BatchPlan:
        """The plan of some of the rows, which are numbered in ascending order."""
        codes = self.direction[rows]
        i2t, joint, t2i = (int((codes == code).sum()) for code in ROW_CODES)
        return BatchPlan(codes, (i2t, joint, t2i), self.t[rows], self.drop[rows])


def draw_batch_plan(
    rows: int, p_joint: float, p_drop: float, generator: torch.Generator, *, fixed: bool = False
) -> BatchPlan:
    """Draws for each row a direction (joint with probability `p_joint`, else i2t or t2i evenly), a uniform time and
    guidance dropout, which a conditional row has with probability `p_drop`. If `fixed`, directions are not drawn: each
    has its share of the rows, rounded."""
    u = torch.rand(rows, generator=generator, dtype=torch.float64, device="cpu")
    n_joint = int((u < p_joint).sum())
    n_i2t = int((u >= p_joint + (1 - p_joint) / 2).sum())
    if fixed:
        n_joint = round(p_joint * rows)
        n_i2t = (rows - n_joint) // 2
    counts = (n_i2t, n_joint, rows - n_i2t - n_joint)
    t = torch.rand(rows, generator=generator, dtype=torch.float32, device="cpu")
    drop = torch.rand(rows, generator=generator, dtype=torch.float32, device="cpu") < p_drop
    drop[n_i2t : n_i2t + n_joint] = False
    return BatchPlan(row_directions(counts), counts, t, drop)
