"""Rows gathered from a table of embeddings as it is stored, in float32 and of unit norm."""

from __future__ import annotations

import torch
from torch import Tensor

from geoflow_fast import geometry
from geoflow_fast.geometry import capturing
from geoflow_fast.ops import dispatch, triton_kernels
from geoflow_fast.ops.triton_kernels import WIDEST_ROW
from geoflow_fast.runtime import checks


def unit_rows(table: Tensor, index: Tensor, *, backend: str = "auto") -> Tensor:
    """The rows `index` (int64 [B], which only a CPU checks) of `table` [N, d], floating point, scaled to unit norm:
    float32 [B, d]."""
    checks.floating(table, "table")
    checks.dense(index, "index")
    if table.dim() != 2 or index.dim() != 1:
        raise ValueError(f"need table [N, d] and index [B], got {tuple(table.shape)} and {tuple(index.shape)}")
    if index.dtype != torch.int64 or index.device != table.device:
        raise ValueError(f"index must be int64 on {table.device}, got {index.dtype} on {index.device}")
    # On a GPU it would have to wait for the values.
    if index.device.type == "cpu" and len(index) and not capturing(index):
        low, high = index.aminmax()
        if low < 0 or high >= len(table):
            raise ValueError(f"index must be rows of a table of {len(table)}, got {int(low)} to {int(high)}")
    rows: Tensor = _gather(table, index, str(backend))
    return rows


def unit_rows_reference(table: Tensor, index: Tensor) -> Tensor:
    """Gathers, scales and converts."""
    return geometry.unit_rows(table[index]).float()


_gather = dispatch.operation(
    "unit_rows",
    unit_rows_reference,
    triton=triton_kernels.backend("geodesic", "unit_rows", widest=WIDEST_ROW),
    differentiable=False,
    fake=lambda table, index: table.new_empty(len(index), table.shape[1], dtype=torch.float32),
)
