"""Pictures in files, drawn by matplotlib without a display, its pyplot or a change of the backend that it is set to."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from geoflow_fast.runtime.extras import needs
from geoflow_fast.runtime.files import write_atomic


def need_matplotlib() -> Any:
    """The module of figures; a ValueError says how to install matplotlib if it is missing."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(needs("drawing", "matplotlib", "eval")) from error


def new_figure(**settings: Any) -> Any:
    """An empty figure, made with these keywords of `matplotlib.figure.Figure`."""
    return need_matplotlib().Figure(**settings)


def subplots(rows: int = 1, columns: int = 1, *, figsize: Any, layout: str | None = None, **panels: Any) -> Any:
    """A figure and its axes, as pyplot's `subplots` returns them."""
    figure = new_figure(figsize=figsize, layout=layout)
    return figure, figure.subplots(rows, columns, **panels)


def save_figure(figure: Any, path: Path) -> None:
    """Writes the figure as a PNG file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: figure.savefig(file, dpi=140, format="png"))
