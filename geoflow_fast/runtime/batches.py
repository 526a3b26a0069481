"""Work on many rows a batch at a time, so that memory grows with the results and not with what they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import rows_at_once

R = TypeVar("R")

CPU_BYTES = 128 * 2**20
"""Memory that a processor gives to one batch, in bytes."""
GPU_COPIES = 4
"""How often a GPU may have the rows of a batch in memory: kernels take them split, rounded or padded."""


def check_batch_size(batch_size: object) -> int | None:
    """Returns the `batch_size` of a public call, None or a positive integer, or raises an error."""
    return None if batch_size is None else checks.integer(batch_size, "batch_size", 1)


def batch_rows(batch_size: int | None, device: torch.device, row_bytes: float) -> int:
    """How many rows make a batch: `batch_size` if a caller gave one, otherwise as many as `CPU_BYTES` have room for at
    `row_bytes` each, or on a GPU half of its spare memory (`rows_at_once`), copies included."""
    if batch_size is not None:
        return batch_size
    return rows_at_once(device, GPU_COPIES * row_bytes, max(1, int(CPU_BYTES / row_bytes)))


def in_batches(compute: Callable[[slice], R], count: int, size: int) -> R:
    """What `compute` returns for `count` rows, which it is called for in batches of at most `size` consecutive ones.

    Results are as `joined` takes them. No rows are one batch.
    """
    if count <= size:
        return compute(slice(0, count))
    batches = (slice(low, min(low + size, count)) for low in range(0, count, size))
    return joined(((rows, compute(rows)) for rows in batches), count)


def joined(parts: Iterable[tuple[slice | Tensor, R]], count: int) -> R:
    """The whole result for `count` rows, from (rows, result for them).

    A result is a tensor with one entry for each row, or a dataclass whose tensors are; of the other fields, those of
    the first part count. Each part is copied to its place in the whole as soon as it is there.
    """
    whole: R | None = None
    for rows, part in parts:
        if whole is None:
            room = {name: x.new_empty(count, *x.shape[1:]) for name, x in _tensors(part).items()}
            whole = cast(R, room[""] if isinstance(part, Tensor) else dataclasses.replace(cast(Any, part), **room))
        put_rows(whole, rows, part)
    assert whole is not None
    return whole


def put_rows(whole: R, rows: slice | Tensor, part: R) -> None:
    """Copies a part of a result to its rows in the whole."""
    places = _tensors(whole)
    for name, x in _tensors(part).items():
        places[name][rows] = x


def _tensors(part: object) -> dict[str, Tensor]:
    """The tensors of a result by the name of their field; "" is that of a result that is a tensor."""
    if isinstance(part, Tensor):
        return {"": part}
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(cast(Any, part))}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
