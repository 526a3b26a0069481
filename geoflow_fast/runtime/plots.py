"""Pictures in files, drawn by matplotlib without a display."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from geoflow_fast.runtime.extras import needs
from geoflow_fast.runtime.files import write_atomic


def pyplot() -> Any:
    """Returns matplotlib's pyplot module, set up to draw to files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(needs("drawing", "matplotlib", "eval")) from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save_figure(figure: Any, path: Path) -> None:
    """Writes the figure as a PNG file, atomically, and closes the figure even if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda file: figure.savefig(file, dpi=140, format="png"))
    finally:
        pyplot().close(figure)
