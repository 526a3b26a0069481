"""Figures of zero-shot classification and of settings that are varied, in the style of `geoflow evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.methods.zero_shot import ZeroShot
from geoflow_fast.evaluation import figures
from geoflow_fast.runtime import plots

COMPONENT_COLOURS = {"image": "#1f5fa8", "text": "#d1495b", "pmi": "#5bb0e8", "sum": "#2a9d8f"}
MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_components(datasets: Mapping[str, ZeroShot], path: Path) -> Path:
    """Draws the selective accuracy of zero-shot classification by each component, training-free ones dashed."""
    figure, panels = plots.subplots(1, len(datasets), figsize=(4.4 * len(datasets) + 2.6, 3.9), squeeze=False)
    for axes, (name, outcome) in zip(panels[0], datasets.items()):
        for part in outcome.components:
            style = figures.style_of(part.name)
            if part.learned:
                style = {"color": COMPONENT_COLOURS[part.name], "linewidth": 2.4, "linestyle": "-", "zorder": 4}
            else:
                style |= {"linestyle": figures.DASHED}
            figures.line(axes, 1 - np.array(part.coverage), figures.Series(part.accuracy), part.title, style)
        axes.axhline(outcome.accuracy, color=figures.GREY, linewidth=0.8, linestyle=":")
        figures.finish(axes, name, "share of images turned away", "accuracy on the rest")
    return figures.save(figure, panels, path)


def draw_ablation(
    panels: Mapping[str, Mapping[str, figures.Series]],
    x: Sequence[float],
    path: Path,
    *,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
) -> Path:
    """Draws a number over a setting: a panel per entry (a direction, a data set), a line per series. The shaded area is
    one standard deviation over runs."""
    figure, grid = plots.subplots(1, len(panels), figsize=(4.2 * len(panels) + 2.2, 3.8), squeeze=False, sharey=True)
    for number, (axes, (title, lines)) in enumerate(zip(grid[0], panels.items())):
        for line, (name, series) in enumerate(lines.items()):
            style = figures.style_of(name)
            if name not in figures.OWN_COLOURS and name not in figures.KNOWN:
                colours = [*figures.OWN_COLOURS.values(), *figures.OTHER_COLOURS]
                style |= {"color": colours[line % len(colours)], "linewidth": 2.0}
            style |= {"marker": MARKERS[line % len(MARKERS)], "markersize": 5}
            figures.line(axes, np.asarray(x, dtype=float), series, name, style)
        if log_x:
            axes.set_xscale("log")
        axes.set_xticks(list(x), [f"{value:g}" for value in x])
        axes.minorticks_off()
        figures.finish(axes, title, xlabel, ylabel if number == 0 else "")
    return figures.save(figure, grid, path)
