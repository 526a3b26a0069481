"""Dropout masks: which entries of a branch are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, extension
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
    device = device if isinstance(device, torch.device) else checks.device(device)
    like = torch.empty((), dtype=torch.bool, device=device).expand(shape)
    mask: Tensor = _draw(like, share, str(backend))
    return mask


def keep_mask_reference(like: Tensor, share: float) -> Tensor:
    """A mask of the shape of `like`, on its device."""
    return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - share)


def _cpu(like: Tensor, share: float) -> Tensor:
    seed = int(torch.randint(2**32, (), device="cpu"))
    mask: Tensor = extension.required().keep_mask(like.shape, share, seed)
    return mask


_draw = dispatch.operation(
    "keep_mask",
    keep_mask_reference,
    cpu=extension.backend(_cpu, dtypes=None),
    differentiable=False,
    tags=(torch.Tag.nondeterministic_seeded,),
)
