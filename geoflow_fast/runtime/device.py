"""The device that a command or a call runs on: its choice, and its clock."""

from __future__ import annotations

import time

import torch


def usable_device(name: str) -> torch.device:
    """Returns the device of that name, after using it once; "auto" is a GPU if there is one, otherwise the CPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


# unchecked: called with the device of a tensor
def spare_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that nobody uses, with what torch holds in reserve for this process."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


# unchecked: called with the device of a tensor
def clock(device: torch.device) -> float:
    """Seconds, as `time.perf_counter` counts them, once everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
