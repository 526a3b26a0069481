"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from geoflow_fast.runtime.words import one_line


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns in one line. The warning is attributed to the line outside of this package and torch, and so is shown once
    for it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(one_line(message), category, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame belongs to this package or torch; code that torch has compiled has no module."""
    return frame.f_globals.get("__name__", "torch").partition(".")[0] in ("geoflow_fast", "torch")
