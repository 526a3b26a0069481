"""Checks of the arguments of public calls. Each function returns the value in its plain form, or raises a TypeError or
ValueError that names the argument. torch is imported by those that are about tensors, not with the module.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST = float(np.finfo(np.float32).max)
"""The largest number that float32 arithmetic can hold."""
LARGEST_SEED = 2**63 - 1
LARGEST_COUNT = 10**9
"""The largest number of steps and the like: a run with more would never end."""


def dense(x: object, name: str, *, is_floating: bool = False, has_values: bool = False) -> Tensor:
    """Returns `x` if it is a dense tensor, and, where asked for, one of floating-point numbers whose values exist."""
    import torch
    from torch import Tensor

    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}; convert with .to_dense()")
    if is_floating and not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if has_values and x.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values")
    return x


floating = functools.partial(dense, is_floating=True)
with_values = functools.partial(dense, is_floating=True, has_values=True)


def number(x: object, name: str, least: float = -LARGEST, most: float = LARGEST) -> float:
    """Returns `x` as a finite float between `least` and `most`."""
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {x!r}")
    if not math.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    if not least <= x <= most:
        raise ValueError(f"{name} must be a number between {least:g} and {most:g}, got {x}")
    return float(x)


def positive(x: object, name: str, most: float = LARGEST) -> float:
    """Returns `x` as a float above zero and at most `most`."""
    if isinstance(x, (int, float)) and not 0 < x < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {x}")
    return number(x, name, most=most)


def integer(x: object, name: str, least: int = 0, most: int = LARGEST_SEED) -> int:
    """Returns `x` as an int between `least` and `most`. Integers of numpy are accepted; booleans are not."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {x!r}")
    if x < least:
        raise ValueError(f"{name} must be at least {least}, got {x}")
    if x > most:
        raise ValueError(f"{name} must be at most {most}, got {x}")
    return int(x)


def indices(x: object, name: str, count: int, least: int = 0) -> Tensor:
    """Returns `x` if it is a tensor of integers between `least` and `count` - 1."""
    import torch

    tensor = dense(x, name)
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.is_meta:
        raise TypeError(f"{name} must be integers (int64 or int32), got {tensor.dtype} on {tensor.device}")
    if tensor.numel():
        low, high = int(tensor.min()), int(tensor.max())
        if low < least or high >= count:
            raise ValueError(f"{name} must be between {least} and {count - 1}, got {low if low < least else high}")
    return tensor


def is_tensor(x: object) -> bool:
    """Whether `x` is a tensor; if nobody has imported torch yet, nothing is."""
    return "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor)


def unmasked(x: object, name: str) -> None:
    """Raises a TypeError if `x` is a masked array or a sequence of some: conversions drop the mask without a word, and
    what it hides would count as data."""
    parts = x if isinstance(x, (list, tuple)) else (x,)
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        raise TypeError(
            f"{name} is a masked array, whose mask would be ignored: leave out the masked rows, or fill them"
        )


def array(x: object, name: str) -> NDArray[Any]:
    """Returns the values of a tensor, an array or a sequence as an array on the CPU, which shares memory if it can.
    Masked arrays are refused."""
    unmasked(x, name)
    if is_tensor(x):
        tensor = dense(x, name, has_values=True).detach()
        half = str(tensor.dtype) == "torch.bfloat16"  # which numpy does not have
        return np.asarray((tensor.float() if half else tensor).cpu().numpy())
    try:
        return np.asarray(x)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} is not an array: {error}") from error


def reals(x: object, name: str) -> NDArray[np.float64]:
    """Returns the numbers or booleans of a tensor, an array or a sequence as float64. Text is refused even where it
    could be read as a number, and so are dates and complex numbers."""
    values = array(x, name)
    is_text = values.dtype == object and any(isinstance(each, (str, bytes)) for each in values.reshape(-1).tolist())
    if is_text or values.dtype.kind not in "biufO":
        raise TypeError(f"{name} must hold real numbers, got {'text' if is_text else values.dtype}")
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold real numbers: {error}") from error


def rows(x: object, name: str, width: int, like: Tensor, count: str = "B") -> Tensor:
    """Returns the rows `x` [B, width], a tensor or an array in any floating-point type, with the dtype and device of
    `like`. A tensor that has them already is not copied, nor is such an array if it can be written to. `count` is what
    errors call the number of rows.

    Half precision rounds the norm of a row too: one that differs from 1 by no more than that is made 1 again.
    """
    import torch
    from torch import Tensor

    if isinstance(x, np.ndarray):
        unmasked(x, name)
        if x.dtype.kind != "f":
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        known_to_torch = x.dtype.isnative and x.dtype.itemsize <= np.dtype(np.float64).itemsize
        x = torch.from_numpy(np.require(x, x.dtype if known_to_torch else np.float64, ["C", "A", "W", "E"]))
    elif not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor or an array, got {type(x).__name__}")
    x = with_values(x, name).detach()
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"{name} must be [{count}, {width}], got {tuple(x.shape)}")
    converted = x.to(like)
    if x.dtype not in (torch.float16, torch.bfloat16):
        return converted
    norm = torch.linalg.vector_norm(converted, dim=1, keepdim=True)
    return torch.where((norm - 1).abs() <= torch.finfo(x.dtype).eps, converted / norm, converted)


def path(x: object, name: str) -> Path:
    """Returns text or a path as a path that the operating system accepts."""
    if not isinstance(x, (str, os.PathLike)) or not isinstance(text := os.fspath(x), str):
        raise TypeError(f"{name} must be a path, got {x!r}")
    if not text or "\0" in text:
        raise ValueError(f"{name} must be a path, got {text!r}")
    return Path(text)


def boolean(x: object, name: str) -> bool:
    """Returns `x` if it is True or False."""
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {x!r}")
    return x


def words(x: object, name: str) -> str:
    """Returns `x` if it is text."""
    if not isinstance(x, str):
        raise TypeError(f"{name} must be text, got {x!r}")
    return x


def one_of(x: object, name: str, choices: Sequence[str]) -> None:
    """Raises a ValueError that lists the `choices` unless `x` is one of them."""
    if x not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {x!r}")


PRECISIONS = ("auto", "float32", "bfloat16")
"""Names of the numbers in which products are computed."""


def precision(x: object, *more: str) -> str:
    """Returns `x` if it is the name of a precision, or one `more` that the caller knows."""
    one_of(x, "precision", (*PRECISIONS, *more))
    return str(x)


def device(x: object, name: str = "device") -> torch.device:
    """Returns `x` as a device of a kind that torch knows."""
    import torch

    if not isinstance(x, (str, torch.device)):
        raise TypeError(f"{name} must be a device or its name, got {x!r}")
    try:
        return torch.device(x)
    except RuntimeError as error:
        raise ValueError(f"{name} {x!r} is unknown to torch: {str(error).splitlines()[0]}") from error
