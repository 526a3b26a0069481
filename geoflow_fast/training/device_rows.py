"""Rows of pairs on a GPU: gathered there from a copy of all pairs, or sent batch by batch as they are stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from geoflow_fast import ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import BLOCK_ROWS, Index, Rows

RESIDENT_SHARE = 0.25
"""Largest share of a GPU's free memory that a copy of the pairs may take."""


class DeviceRows:
    """The rows of both modalities of `pairs`, in float32 and of unit norm, on a GPU.

    If they fit, as they are stored, into a share of its free memory, they are copied there once; else each batch is
    sent as it is stored, float16 or float32, from pinned memory. Either way the GPU converts and scales them, and
    nothing waits for it. Rows stored in float64 are scaled on the host before they become float32.
    """

    def __init__(self, pairs: EmbeddingPairs, device: torch.device, *, resident: bool | None = None) -> None:
        self.pairs, self.device = pairs, device
        self.sides = pairs.image, pairs.text
        if resident is None:
            size = sum(len(rows) * rows.dim * min(rows.dtype.itemsize, 4) for rows in self.sides)
            resident = size <= RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
        self.tables = [self._copy(rows) for rows in self.sides] if resident else None

    def _copy(self, rows: Rows) -> Tensor:
        kind = torch.float16 if rows.dtype == np.float16 else torch.float32
        table = torch.empty(len(rows), rows.dim, dtype=kind, device=self.device)
        for low in range(0, len(rows), BLOCK_ROWS):
            numbers = np.arange(low, min(low + BLOCK_ROWS, len(rows)))
            table[low : low + BLOCK_ROWS] = _on_host(rows, numbers).to(self.device)
        return table

    def numbers(self, index: Index) -> tuple[Tensor, Tensor]:
        """Numbers of the image and of the text rows of the pairs `index` [B], on the host."""
        image, text = self.pairs.image_row[index], self.pairs.text_row[index]
        return torch.from_numpy(image), torch.from_numpy(text)

    def gather(self, numbers: Sequence[Tensor], index: Index) -> tuple[Tensor, Tensor]:
        """The rows of the pairs `index` [B], whose `numbers` the device has."""
        if self.tables is not None:
            image, text = (ops.unit_rows(table, rows) for table, rows in zip(self.tables, numbers))
            return image, text
        own = self.pairs.image_row[index], self.pairs.text_row[index]
        order = torch.arange(len(index), device=self.device)
        stored = (_on_host(rows, where) for rows, where in zip(self.sides, own))
        image, text = (ops.unit_rows(send([x], self.device)[0], order) for x in stored)
        return image, text


def _on_host(rows: Rows, index: Index) -> Tensor:
    """Rows as they are stored, or unit rows where float32 may not hold what is stored."""
    return torch.from_numpy(rows[index] if rows.dtype == np.float64 else rows.stored(index))


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors of the host to a GPU in one transfer from pinned memory, which nothing waits for. Tensors with
    wider entries must come first."""
    raw = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors]).pin_memory()
    parts = raw.to(device, non_blocking=True).split([x.numel() * x.element_size() for x in tensors])
    return [part.view(x.dtype).view(x.shape) for part, x in zip(parts, tensors)]
