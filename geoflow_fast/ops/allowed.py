"""Filtered search: which items there are for which query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.runtime import checks
from geoflow_fast.runtime.batches import joined

R = TypeVar("R")
Rows = slice | Tensor
"""Which queries."""
Mask = Tensor | NDArray[np.bool_]

ROWS_AT_ONCE = 16_384
"""Rows of items that are gathered at a time."""
COPY_COST = 32
"""Queries for which a row can be scored in the time that it takes to copy it."""


@dataclass(frozen=True)
class Allowed:
    """The items that a search may return; all others do not exist for it.

    There are two ways to serve queries, which give the same results. Those that share a mask with many others, or whose
    mask allows little, search copies of the rows that it allows, some at a time. The rest, with masks of their own
    that allow more, are served together, from the scores of all items.
    """

    mask: Tensor
    """Bool, [N] for all queries or [Q, N]."""

    @classmethod
    def of(cls, allowed: Mask | None, queries: int, items: int, device: torch.device) -> Allowed | None:
        """The argument `allowed` of a call with so many queries and items; None is no filter. Anything but a boolean
        mask that leaves an item to every query is a TypeError or a ValueError, which names the query."""
        if allowed is None:
            return None
        mask: Any = allowed
        if isinstance(allowed, np.ndarray):  # which torch may not read where it stands
            mask = torch.from_numpy(np.require(checks.array(allowed, "allowed"), requirements=("C", "W")))
        mask = checks.dense(mask, "allowed", has_values=True)
        if mask.dtype != torch.bool:
            raise TypeError(f"allowed must be a boolean mask over the items, got {mask.dtype}")
        if mask.shape not in ((items,), (queries, items)):
            raise ValueError(f"allowed must be [{items}] or [{queries}, {items}], got {tuple(mask.shape)}")
        empty = ~mask.any(-1)
        if bool(empty.any()):
            query = "any query" if mask.dim() == 1 else f"query {int(empty.nonzero()[0])}"
            raise ValueError(f"allowed leaves no item to {query}")
        return cls(mask.to(device))

    def of_queries(self, rows: slice | Tensor) -> Allowed:
        """The filter of the queries `rows`."""
        return self if self.mask.dim() == 1 else Allowed(self.mask[rows])

    def count(self, queries: int) -> Tensor:
        """How many items there are for each query: [Q] int64."""
        return self.mask.sum(-1).expand(queries)

    def has(self, index: Tensor) -> Tensor:
        """Which of the items `index` [Q, K], numbers or -1, there are for their query: [Q, K] bool."""
        number = index.clamp(min=0)
        there = self.mask[number] if self.mask.dim() == 1 else self.mask.gather(1, number)
        return there & (index >= 0)

    def serve(self, queries: int, copied: Callable[[Rows, Tensor], R], scored: Callable[[Rows, Tensor], R]) -> R:
        """What `copied(rows, kept)` gives for the queries `rows`, for which there are the items numbered `kept`,
        ascending, and what `scored(rows, mask)` gives for those with the masks [rows, N]."""
        items = self.mask.shape[-1]
        if self.mask.dim() == 1 or queries == 0:
            kept = (self.mask if self.mask.dim() == 1 else ~self.mask.any(0)).nonzero().squeeze(1)
            if COPY_COST * len(kept) <= queries * items or queries == 0:
                return copied(slice(None), kept)
            return scored(slice(None), self.mask.expand(queries, -1))
        alike: dict[bytes, list[int]] = {}
        for row, packed in enumerate(np.packbits(self.mask.cpu().numpy(), axis=1)):
            alike.setdefault(packed.tobytes(), []).append(row)
        groups, together = [], []
        for rows, count in zip(alike.values(), self.mask[[rows[0] for rows in alike.values()]].sum(1).tolist()):
            if COPY_COST * count <= len(rows) * items:
                groups.append(torch.tensor(rows, device=self.mask.device))
            else:
                together += rows

        def parts() -> Iterator[tuple[Rows, R]]:
            for rows in groups:
                yield rows, copied(rows, self.mask[rows[0]].nonzero().squeeze(1))
            if together:
                rows = torch.tensor(together, device=self.mask.device)
                yield rows, scored(rows, self.mask[rows])

        return joined(parts(), queries)


def check_finite(rows: Tensor, name: str) -> None:
    """Raises a ValueError that names the first of the `rows` [Q, ...] that holds a NaN or infinity."""
    bad = ~torch.isfinite(rows).flatten(1).all(dim=1)
    if bool(bad.any()):
        raise ValueError(f"{name} row {int(bad.nonzero()[0])} is not finite")


def kept_blocks(items: Tensor, first: int, kept: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The items with the numbers `kept`, ascending, of a block of `items` [n, d] that begins with number `first`:
    (numbers [m], rows [m, d]), some at a time. A stretch of consecutive ones is not copied."""
    low, high = torch.searchsorted(kept, torch.tensor([first, first + len(items)], device=kept.device)).tolist()
    for numbers in kept[low:high].split(ROWS_AT_ONCE) if high > low else ():
        begin, end = int(numbers[0]) - first, int(numbers[-1]) - first + 1
        yield numbers, items[begin:end] if end - begin == len(numbers) else items[(numbers - first).to(items.device)]
