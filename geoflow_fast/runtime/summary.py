"""Results that print as a short summary instead of a wall of numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

FEW = 6
"""Arrays and lists of so many numbers are printed as they are."""


class Summarised:
    """Base of dataclasses that hold arrays, declared with `repr=False`: they print the shape and the range of each."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        lines = [f"  {name}: {brief(value)}" for name, value in values.items() if value is not None]
        return "\n".join((f"{type(self).__name__}(", *lines, ")"))


def brief(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return _brief_array(value.detach().double().cpu().numpy(), str(value.dtype).removeprefix("torch."))
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return _brief_array(value.astype(np.float64), str(value.dtype))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (str, bool, int)) or (isinstance(value, Sized) and len(value) <= FEW):
        return repr(value)
    return f"{len(value)} entries" if isinstance(value, Sized) else repr(value)


def _brief_array(values: NDArray[np.float64], dtype: str) -> str:
    """The shape of an array, and the range and median of its numbers."""
    shape, known = list(values.shape), values[~np.isnan(values)]
    if values.size <= FEW and values.ndim < 2:
        return f"[{', '.join(f'{x:.4g}' for x in values.reshape(-1))}]"
    if not len(known):
        return f"{shape} {dtype}" + (", all NaN" if values.size else "")
    if dtype == "bool":
        return f"{shape} bool, {known.mean():.1%} true"
    missing = f", {1 - len(known) / values.size:.1%} NaN" if len(known) < values.size else ""
    low, high = float(known.min()), float(known.max())
    if dtype.startswith(("int", "uint")):
        return f"{shape} {dtype}, {low:.0f} to {high:.0f}"
    middle = float(np.median(known)) if math.isfinite(low + high) else math.nan
    return f"{shape} {low:.4g} to {high:.4g}, median {middle:.4g}{missing}"
