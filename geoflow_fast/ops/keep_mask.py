"""Dropout masks: which entries of a branch are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, native
from geoflow_fast.runtime import checks


def keep_mask(
    shape: torch.Size | tuple[int, ...], share: float, device: torch.device | str = "cpu", *, backend: str = "auto"
) -> Tensor:
    """Dropout mask: a bool tensor whose entries are false with probability `share`, independently of each other.

    Uses torch's global generator, so `torch.manual_seed` determines the mask. On the CPU one number drawn from it seeds
    a hash of each entry's position, so that the mask does not depend on the number of threads.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), got {share}")
    keep = torch.empty(shape, dtype=torch.bool, device=checks.device(device))
    result: Tensor = dispatch.choose("keep_mask", keep, backend)(keep, share)
    return result


@dispatch.register("keep_mask", "reference", devices=dispatch.EVERYWHERE)
def _reference(keep: Tensor, share: float) -> Tensor:
    return keep.bernoulli_(1 - share)


@dispatch.register("keep_mask", "cpu", devices=("cpu",), missing=native.missing)
def _cpu(keep: Tensor, share: float) -> Tensor:
    native.keep_mask(keep, share, int(torch.randint(2**32, (), device="cpu")))
    return keep
