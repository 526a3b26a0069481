"""Figures of results: recall by bin, selective accuracy, reliability, AUROC.

A method has the same colour and line style in all of them: the library's own are bold, training-free ones dashed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.results import Comparison, Result
from geoflow_fast.evaluation.untrained import UNTRAINED
from geoflow_fast.runtime import plots

OWN_COLOURS = {
    "rerank": "#d1495b",
    "entropy": "#1f5fa8",
    "entropy_paper": "#12355b",
    "epistemic": "#2a9d8f",
    "ladder": "#5a2d82",
}
OTHER_COLOURS = (
    "#d98f2b",
    "#8d6cab",
    "#7a9e3b",
    "#b5651d",
    "#c77cba",
    "#5f7a8a",
    "#a3913a",
    "#0aa1b5",
    "#9c4f4f",
    "#6b6fb0",
    "#4d8b57",
    "#b08a9e",
    "#3f6f8f",
    "#c2703d",
    "#7d7d3a",
    "#a0527f",
)
KNOWN: dict[str, bool] = dict.fromkeys(UNTRAINED, True)
"""Other methods in the order of their colours, and whether they need no training."""
GREY = "#8a8f98"
DASHED = (0, (4, 2))
DIRECTION_TITLES: dict[str, str] = {Direction.T2I: "text to image", Direction.I2T: "image to text"}


@dataclass(frozen=True)
class Series:
    """Values over an axis, with a standard deviation if there are several runs."""

    values: Sequence[float]
    spread: Sequence[float] | None = None


def style_of(method: str) -> dict[str, Any]:
    """The colour and line style of a method, a component or anything else with a name, the same wherever it occurs."""
    if method in OWN_COLOURS:
        return {"color": OWN_COLOURS[method], "linewidth": 2.4, "linestyle": "-", "zorder": 4}
    number = list(KNOWN).index(method) if method in KNOWN else sum(map(ord, method))
    return {
        "color": OTHER_COLOURS[number % len(OTHER_COLOURS)],
        "linewidth": 1.4,
        "linestyle": DASHED if KNOWN.get(method, False) else "-",
        "zorder": 3,
    }


def draw_calibration(datasets: Mapping[str, Comparison], path: Path, *, stacked: bool = False) -> Path:
    """Draws Recall@1 of plain search in bins of the uncertainty: a row per direction, a column per data set. The shaded
    area is one standard deviation over seeds. `stacked`, here and below: the directions of a single data set stand one
    above the other, with the legend below them, as suits a narrow page."""

    def fill(axes: Any, results: Sequence[Result]) -> None:
        for result in results:
            bins = np.arange(1, len(result.bin_recall) + 1)
            series = Series(result.bin_recall, result.bin_recall_spread)
            line(axes, bins, series, result.title, style_of(result.method))
        axes.set_xticks(bins)
        axes.axhline(results[0].plain_recall, color=GREY, linewidth=0.8, linestyle=":")

    return _grid(datasets, path, fill, "bin of uncertainty, low to high", "Recall@1 in the bin", stacked=stacked)


def draw_selective(datasets: Mapping[str, Comparison], path: Path, *, stacked: bool = False) -> Path:
    """Draws the accuracy of plain search after the least certain queries have been turned away."""

    def fill(axes: Any, results: Sequence[Result]) -> None:
        for result in results:
            series = Series(result.accuracy, result.accuracy_spread)
            line(axes, 1 - np.array(result.coverage), series, result.title, style_of(result.method))

    return _grid(datasets, path, fill, "share of queries turned away", "accuracy on the rest", stacked=stacked)


def draw_auroc(datasets: Mapping[str, Comparison], path: Path, *, stacked: bool = False) -> Path:
    """Draws the AUROC of "plain search is wrong", best on top, with its bootstrap interval or one standard deviation
    over seeds."""

    def fill(axes: Any, results: Sequence[Result]) -> None:
        ranked = sorted(results, key=lambda result: result.numbers["auroc"])
        for height, result in enumerate(ranked):
            value, spread = result.numbers["auroc"], result.spread.get("auroc", 0.0)
            ends = result.intervals.get("auroc", [value - spread, value + spread])
            colour = style_of(result.method)["color"]
            axes.plot(ends, [height, height], color=colour, linewidth=2.2, solid_capstyle="round")
            axes.plot(value, height, "o", color=colour, markersize=7)
        axes.set_yticks(range(len(ranked)), [result.title for result in ranked])
        axes.axvline(0.5, color=GREY, linewidth=0.8, linestyle=":")

    height = 0.9 + 0.3 * max(len(run.of(direction)) for run in datasets.values() for direction in run.directions)
    layout: dict[str, Any] = {"legend": False, "height": height, "share": False, "stacked": stacked}
    return _grid(datasets, path, fill, 'AUROC of "plain search is wrong"', "", **layout)


def draw_reliability(datasets: Mapping[str, Comparison], path: Path, *, stacked: bool = False) -> Path:
    """Draws the stated probability that plain search is right against the share that was; the areas of points show
    numbers of queries."""

    def fill(axes: Any, results: Sequence[Result]) -> None:
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
        for result in results:
            if result.stated is None:
                continue
            count = np.array(result.stated["count"])
            style = style_of(result.method)
            x, y = (np.array(result.stated[name], dtype=float) for name in ("confidence", "accuracy"))
            filled = count > 0
            axes.plot(x[filled], y[filled], label=f"{result.title}, ECE {result.numbers['ece']:.3f}", **style)
            axes.scatter(x[filled], y[filled], s=6 + 240 * count[filled] / count.sum(), color=style["color"], zorder=5)
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        axes.set_aspect("equal")
        axes.legend(frameon=False, fontsize=8, loc="upper left")

    names = "stated probability of being right", "share that was right"
    return _grid(datasets, path, fill, *names, legend=False, height=4.2, stacked=stacked)


def _grid(
    datasets: Mapping[str, Comparison],
    path: Path,
    fill: Any,
    xlabel: str,
    ylabel: str,
    *,
    legend: bool = True,
    height: float = 3.2,
    share: bool = True,
    stacked: bool = False,
) -> Path:
    """Draws a panel for every direction (rows) and data set (columns); a single data set has one row unless it is
    `stacked`."""
    names = list(datasets)
    directions = list(dict.fromkeys(direction for run in datasets.values() for direction in run.directions))
    rows, columns = (1, len(directions)) if len(names) == 1 and not stacked else (len(directions), len(names))
    width = 4.6 * columns + (2.6 if legend and not stacked else 0.0) + (0.0 if share else 1.6)
    below = 0.9 if legend and stacked else 0.0
    figure, panels = plots.subplots(rows, columns, figsize=(width, height * rows + 0.5 + below), squeeze=False)
    for axes, (direction, name) in zip(panels.flat, itertools.product(directions, names)):
        results = datasets[name].of(direction)
        if results:
            fill(axes, results)
        title = DIRECTION_TITLES.get(direction, direction) + (f", {name}" if len(names) > 1 else "")
        first = axes in panels[:, 0]
        finish(axes, title, xlabel, ylabel if first or not share else "")
    return save(figure, panels, path, legend=legend, below=stacked)


def line(axes: Any, x: Any, series: Series, label: str, style: Mapping[str, Any]) -> None:
    """Draws a series, with its standard deviation as a shaded area."""
    values = np.asarray(series.values, dtype=float)
    axes.plot(x, values, label=label, **style)
    if series.spread is not None and len(series.spread):
        spread = np.asarray(series.spread, dtype=float)
        axes.fill_between(x, values - spread, values + spread, color=style["color"], alpha=0.15, linewidth=0)


def finish(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    """Gives a panel its title, labels and grid."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(xlabel)
    if ylabel:
        axes.set_ylabel(ylabel)
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, panels: Any, path: Path, *, legend: bool = True, below: bool = False) -> Path:
    """Saves the figure, with one legend for all panels to their right or `below` them."""
    if legend:
        entries: dict[str, Any] = {}
        for axes in panels.flat:
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles))
        location = {"loc": "outside lower center", "ncols": 2} if below else {"loc": "outside right center"}
        figure.legend(entries.values(), entries.keys(), frameon=False, fontsize=9, **location)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    plots.save_figure(figure, path)
    return path
