"""Checks and reshapes shared by the operations that work row by row."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.geometry import capturing
from geoflow_fast.runtime import checks


def with_derivatives(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`. While a compiler traces, its forward pass alone: the dispatch then gives plain torch, which the
    compiler fuses and differentiates itself."""
    forward: Callable[..., Any] = function.forward
    return forward if torch.compiler.is_compiling() else function.apply


def check_floating(optional: Collection[str] = (), **tensors: Tensor | None) -> None:
    """Every one is a dense floating-point tensor on the device of the first; those named in `optional` may be None."""
    first: Tensor | None = None
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        x = checks.floating(x, name)
        first = x if first is None else first
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device}, but {next(iter(tensors))} is on {first.device}")


def check_shape(shape: torch.Size, like: str, **tensors: Tensor | None) -> None:
    """Every tensor that is given has this shape, which is that of the argument called `like`."""
    for name, x in tensors.items():
        if x is not None and checks.dense(x, name).shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)} of {like}, got {tuple(x.shape)}")


def check_directions(direction: Tensor) -> None:
    """Every entry of `direction` [B] is a code of `geometry.DIRECTIONS`."""
    if capturing(direction) or direction.is_meta:
        return
    unknown = (direction < 0) | (direction >= len(DIRECTIONS))
    if bool(unknown.any()):
        row = int(unknown.nonzero()[0])
        raise ValueError(f"direction row {row} is {int(direction[row])}; codes are 0 joint, 1 i2t, 2 t2i")


def rows_of(x: Tensor) -> Tensor:
    """`x` [..., H] as [R, H]."""
    return x.reshape(-1, x.shape[-1])


def groups_of(group: Tensor, name: str, rows: Tensor) -> Tensor:
    """`group` [H] or [..., H] as [G, H], where G divides the number of rows: each group serves R/G rows in turn."""
    if group.dim() < 1 or group.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one column, got {tuple(group.shape)}")
    flat = rows_of(group)
    if flat.shape[-1] != rows.shape[-1]:
        raise ValueError(f"{name} has width {flat.shape[-1]}, but the rows have width {rows.shape[-1]}")
    if flat.shape[0] == 0 or rows.shape[0] % flat.shape[0] != 0:
        raise ValueError(f"{name} has {flat.shape[0]} rows, which do not divide the {rows.shape[0]} they apply to")
    return flat


Out = tuple[Tensor, Tensor]
"""Room for a result and its K derivatives, both contiguous."""


def out_rows(out: Out | None, y: torch.Size, dy: torch.Size, like: Tensor) -> Out | None:
    """`out` as the matrices [R, W] and [K, R, W] that a backend fills, after a check of its shapes `y` and `dy`."""
    if out is None:
        return None
    for name, x, shape in (("out[0]", out[0], y), ("out[1]", out[1], dy)):
        if x.shape != shape or not x.is_contiguous():
            raise ValueError(f"{name} must be a contiguous {tuple(shape)}, got {tuple(x.shape)} {x.stride()}")
        if x.dtype != like.dtype or x.device != like.device:
            raise ValueError(f"{name} must be {like.dtype} on {like.device}, got {x.dtype} on {x.device}")
    rows = rows_of(out[0])
    return rows, out[1].view(dy[0], *rows.shape)


def with_out(jvp: Callable[..., Out]) -> Callable[..., Out]:
    """A plain torch `jvp` with one argument more, the last: None, or where its results are copied to."""

    def run(*arguments: Any) -> Out:
        *inputs, out = arguments
        found = jvp(*inputs)
        if out is None:
            return found
        return out[0].copy_(found[0]), out[1].copy_(found[1])

    return run


def check_tangents(tangent: Tensor, name: str, primal: Tensor) -> None:
    """`tangent` is [K, *primal.shape]."""
    if tangent.dim() != primal.dim() + 1 or tangent.shape[1:] != primal.shape:
        raise ValueError(f"{name} must be [K, {', '.join(map(str, primal.shape))}], got {tuple(tangent.shape)}")
