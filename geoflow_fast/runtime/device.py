"""The device that a name means."""

from __future__ import annotations

import torch


def usable_device(name: str) -> torch.device:
    """The device of that name ("auto": a GPU if there is one), after a first use of it."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
