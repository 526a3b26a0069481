"""The only importer of the compiled extension: tensors are checked here, then pointers, sizes and streams cross.

Every function takes tensors that its operation has already validated in the user's terms; the checks here guard memory.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def extension() -> ModuleType | None:
    """The compiled extension; None when it was never built. One that is there but does not load is an error."""
    try:
        return importlib.import_module("geoflow_fast._C")
    except ModuleNotFoundError as error:
        if error.name != "geoflow_fast._C":
            raise
        return None


def missing() -> str | None:
    """Why the compiled CPU code cannot be used; None if it can."""
    if extension() is None:
        return "the compiled extension is not built; reinstall geoflow_fast with a C++17 compiler at hand"
    return None


def missing_cuda() -> str | None:
    """Why the compiled CUDA code cannot be used; None if it can."""
    module = extension()
    if module is None:
        return missing()
    return module.cuda_status() or None


def _built() -> ModuleType:
    module = extension()
    if module is None:
        raise OSError(missing())
    return module


def cpu_features() -> list[str]:
    """Instruction sets the compiled CPU code will use on this machine, beyond the baseline."""
    return list(_built().cpu_features())


def _guard(device: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    """The last check before a pointer crosses: device, dtype and contiguity."""
    for name, tensor in tensors.items():
        if tensor.device.type != device:
            raise ValueError(f"{name} is on {tensor.device}, expected {device}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


def masked_interpolant(
    noise: tuple[Tensor, Tensor],
    data: tuple[Tensor, Tensor],
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    point: tuple[Tensor, Tensor],
    velocity: tuple[Tensor, Tensor],
    tolerance: float,
) -> int:
    """Fills `point` and `velocity` (image, text); returns the first row that is not unit within `tolerance`, or -1."""
    rows, widths = t.numel(), [x.shape[1] for x in noise]
    dtype = noise[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"masked_interpolant works in float32 and float64, not {dtype}")
    for k, stream in enumerate(("image", "text")):
        parts = {f"{stream}0": noise[k], f"{stream}1": data[k], f"{stream}_t": point[k], f"v_{stream}": velocity[k]}
        _guard("cpu", dtype, **parts)
        for name, part in parts.items():
            if part.shape != (rows, widths[k]):
                raise ValueError(f"{name} has shape {tuple(part.shape)}, expected {(rows, widths[k])}")
    _guard("cpu", dtype, t=t)
    _guard("cpu", torch.int8, direction=direction)
    if direction.numel() != rows:
        raise ValueError(f"direction has {direction.numel()} entries for {rows} rows")
    if drop is not None:
        _guard("cpu", torch.bool, drop=drop)
        if drop.numel() != rows:
            raise ValueError(f"drop has {drop.numel()} entries for {rows} rows")
    addresses = [part.data_ptr() for group in zip(noise, data, point, velocity) for part in group]
    return int(
        _built().masked_interpolant(
            dtype == torch.float64,
            addresses,
            widths,
            rows,
            t.data_ptr(),
            direction.data_ptr(),
            0 if drop is None else drop.data_ptr(),
            tolerance,
            torch.get_num_threads(),
        )
    )
