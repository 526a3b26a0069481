"""The bfloat16 parts of a gallery that stays in the memory of a GPU, kept from one call to the next."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from geoflow_fast.geometry import capturing
from geoflow_fast.ops.gallery_lists import split_rows
from geoflow_fast.runtime.device import spare_memory

SHARE_OF_MEMORY = 0.25
"""Share of a GPU's spare memory that the parts may take, which are as large as the rows."""


class KeptParts:
    """Makes the parts of float32 rows when they are asked for a second time, and keeps them as long as the rows are the
    same; a gallery that is scored once needs no second copy of itself."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, Tensor | None, Tensor | None] = None, None, None

    def of(self, rows: Tensor, some: Tensor, mark: Hashable) -> Tensor | None:
        """The parts of `rows` [N, d] on a GPU; None where kernels had better split the rows themselves: in the first
        call, where memory is scarce, and in a CUDA graph, which would outlive the parts.

        `mark` differs after writes that torch counts, and `some` of the rows tell of others.
        """
        if rows.is_inference() or capturing(rows):
            return None
        known, sample, parts = self._kept
        if mark != known:
            self._kept = mark, None, None
            return None
        if parts is not None and sample is not None and bool((some == sample).all()):
            return parts
        if 4.0 * rows.numel() > SHARE_OF_MEMORY * spare_memory(rows.device):
            return None
        sample, parts = some.clone(), split_rows(rows)
        torch.cuda.current_stream(rows.device).synchronize()  # callers on other streams may read them, too
        self._kept = mark, sample, parts
        return parts
