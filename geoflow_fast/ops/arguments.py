"""What the operations on rows share: the checks of their arguments, and the forms that their backends take."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from geoflow_fast.runtime import checks

Pair = tuple[Tensor, Tensor]
"""Image and text, or a result and its K derivatives."""


def check_floating(optional: Collection[str] = (), **tensors: Tensor | None) -> None:
    """Checks that these are dense floating-point tensors on the device of the first; those named in `optional` may be
    None."""
    first: Tensor | None = None
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        x = checks.floating(x, name)
        first = x if first is None else first
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device}, but {next(iter(tensors))} is on {first.device}")


def check_shape(shape: torch.Size, like: str, **tensors: Tensor | None) -> None:
    """Checks that every tensor that is given has this shape, which is that of the argument called `like`."""
    for name, x in tensors.items():
        if x is not None and checks.dense(x, name).shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)} of {like}, got {tuple(x.shape)}")


def rows_of(x: Tensor) -> Tensor:
    """`x` [..., H] as [R, H]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def groups_of(group: Tensor, name: str, rows: Tensor) -> Tensor:
    """`group` [H] or [..., H] as [G, H], where G divides the number of rows: each group serves R/G rows in turn."""
    if group.dim() < 1 or group.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one column, got {tuple(group.shape)}")
    flat = rows_of(group)
    if flat.shape[1] != rows.shape[1]:
        raise ValueError(f"{name} has width {flat.shape[1]}, but the rows have width {rows.shape[1]}")
    if rows.shape[0] % flat.shape[0] if flat.shape[0] else rows.shape[0]:
        raise ValueError(f"{name} has {flat.shape[0]} rows, which do not divide the {rows.shape[0]} they apply to")
    return flat


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of intermediate results: float32 for half-precision tensors, else the tensor's own."""
    return torch.promote_types(x.dtype, torch.float32)


def beside_groups(group: Tensor, rows: Tensor) -> Pair:
    """`rows` [R, H] as [G, R/G, H] and `group` [G, H] as [G, 1, H]: row r belongs to group r // (R/G)."""
    per_group = -1 if group.shape[0] else 0
    return rows.reshape(group.shape[0], per_group, rows.shape[-1]), group.unsqueeze(1)
