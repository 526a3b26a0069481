"""Noise of training rows as a function of seed, step and row number alone, so that any process can draw any row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, extension, triton_kernels
from geoflow_fast.ops.triton_kernels import WIDEST_ROW
from geoflow_fast.runtime import checks

ROUNDS = 10
MULTIPLIERS, RAISES = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def counter_noise(
    numbers: Tensor, width: int, seed: int, step: int, stream: int, *, unit: bool = True, backend: str = "auto"
) -> Tensor:
    """Rows of standard normal numbers [n, width], float32, on the device of `numbers` (int64 [n], below 2^32); if
    `unit`, scaled to unit norm.

    A row depends on its number, `seed` (64 bits), `step` and `stream` (32 bits each) alone: they are counter and key of
    Philox 4x32-10, whose words the Box-Muller transform turns into normal numbers. Devices agree to rounding.
    """
    if checks.dense(numbers, "numbers").dim() != 1 or numbers.dtype != torch.int64:
        raise ValueError(f"numbers must be int64 [n], got {numbers.dtype} {tuple(numbers.shape)}")
    checks.integer(width, "width", 2)
    checks.integer(seed, "seed", 0, 2**64 - 1)
    for name, value in (("step", step), ("stream", stream)):
        checks.integer(value, name, 0, WORD)
    checks.boolean(unit, "unit")
    signed = seed - 2**64 if seed >= 2**63 else seed
    noise: Tensor = _draw(numbers, width, signed, step, stream, unit, str(backend))
    return noise


def counter_noise_reference(numbers: Tensor, width: int, seed: int, step: int, stream: int, unit: bool) -> Tensor:
    """The noise in plain torch. Columns are in four blocks: word k of a counter's four makes the columns of block k."""
    quarter = -(-width // 4)
    column = torch.arange(quarter, device=numbers.device).expand(len(numbers), -1)
    counters = numbers.unsqueeze(1).expand(-1, quarter), column, torch.full_like(column, step)
    words = philox((*counters, torch.full_like(column, stream)), seed)
    uniform = [((word >> 8).double() + 0.5) * 2.0**-24 for word in words]
    normal = []
    for radius, turn in zip(uniform[::2], uniform[1::2]):
        radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * turn
        normal += [radius * angle.cos(), radius * angle.sin()]
    noise = torch.cat(normal, dim=1)[:, :width]
    return (noise / torch.linalg.vector_norm(noise, dim=1, keepdim=True) if unit else noise).float()


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, ...]:
    """Philox 4x32-10: four random words, as int64 tensors below 2^32, for each counter of four words."""
    c0, c1, c2, c3 = counters
    keys = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(ROUNDS):
        # Products wrap around at 2^64, which leaves their two words right.
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = ((second >> 32) & WORD) ^ c1 ^ keys[0], second & WORD
        c2, c3 = ((first >> 32) & WORD) ^ c3 ^ keys[1], first & WORD
        keys = [(key + rise) & WORD for key, rise in zip(keys, RAISES)]
    return c0, c1, c2, c3


def _asked_width(inputs: Sequence[Any]) -> int:
    """The width of the rows that a call asks for: none of its tensors has it."""
    return int(inputs[1]) if inputs else 0


# A program holds a row in quarters.
_kernel = triton_kernels.backend("geodesic", "counter_noise", (torch.int64,), widest=4 * WIDEST_ROW)
_draw = dispatch.operation(
    "counter_noise",
    counter_noise_reference,
    cpu=extension.bound("counter_noise", (torch.int64,)),
    triton=dataclasses.replace(_kernel, width=_asked_width),
    differentiable=False,
    fake=lambda numbers, width, *_: numbers.new_empty(len(numbers), width, dtype=torch.float32),
)
