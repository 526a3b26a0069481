"""How kernels are cut into programs and started; every launch goes through `launch`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from geoflow_fast.ops.triton_kernels import WIDEST_ROW

row_kernel = triton.jit(do_not_specialize=["rows", "group_size", "tiles", "tangents"])
"""Declares a kernel that is compiled once for any number of rows, groups and tangents: a solver's last batch, or a
batch whose rows have other directions, must not wait for a compiler."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns (powers of two) of a program's tile, and the warps that share it."""

    rows: int
    columns: int
    warps: int

    @property
    def options(self) -> dict[str, int]:
        """Launch options. With more than 4 warps ptxas would rather spill than use the registers that are there."""
        return self.roomy if self.warps > 4 else {"num_warps": self.warps}

    @property
    def roomy(self) -> dict[str, int]:
        """The options of a kernel for which ptxas would do so with fewer warps, too."""
        return {"num_warps": self.warps, **({"maxnreg": 128} if torch.version.hip is None else {})}


def row_tile(width: int) -> Tile:
    """The tile of kernels that reduce over a row: whole rows, 16 elements a thread and at least 4 warps."""
    if width > WIDEST_ROW:
        raise ValueError(f"one program holds rows of at most {WIDEST_ROW} entries, got {width}")
    columns = max(16, triton.next_power_of_2(width))
    return Tile(max(1, 2048 // columns), columns, max(4, columns // 512))


def element_tile(width: int) -> Tile:
    """The tile of elementwise kernels: 512 bytes of float32 from each of 16 rows, so ragged widths waste little."""
    columns = min(128, max(16, triton.next_power_of_2(width)))
    return Tile(2048 // columns, columns, 4)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Starts `kernel` on the device of its first argument."""
    first: Tensor = args[0]
    on_device = torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext()
    with on_device:
        kernel[grid](*args, **meta)


def by_rows(x: Tensor) -> Tensor:
    """`x` with the last dimension contiguous, which is what kernels index; other strides are kept."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
