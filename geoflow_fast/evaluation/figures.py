"""Figures of results: recall by bin, selective accuracy, components, ablations, reliability, AUROC, thresholds.

A method has the same colour and line style in all of them: the library's own are bold, training-free ones dashed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geoflow_fast import baselines
from geoflow_fast.decisions.bounds import Bools, Floats, clopper_pearson_upper
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.abstention import AbstentionThreshold
from geoflow_fast.evaluation.metrics import selective_accuracy
from geoflow_fast.evaluation.results import Comparison, Result
from geoflow_fast.evaluation.statistics import Values, scored_answers
from geoflow_fast.evaluation.zero_shot import ZeroShot
from geoflow_fast.runtime import checks, plots

OWN_COLOURS = {
    "rerank": "#d1495b",
    "entropy": "#1f5fa8",
    "entropy_bayes": "#4f9bd9",
    "entropy_paper": "#12355b",
    "epistemic": "#2a9d8f",
    "ladder": "#5a2d82",
}
COMPONENT_COLOURS = {"image": "#1f5fa8", "text": "#d1495b", "pmi": "#5bb0e8", "sum": "#2a9d8f"}
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
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#8a8f98"
DASHED = (0, (4, 2))
INK, BLUE, ORANGE, RIGHT, WRONG = "#2b2f36", "#1f5fa8", "#d98f2b", "#a9c4e4", "#d1495b"
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
    names = list(baselines.METHODS)
    number = names.index(method) if method in names else sum(map(ord, method))
    training_free = method in names and not baselines.METHODS[method].TRAINED
    return {
        "color": OTHER_COLOURS[number % len(OTHER_COLOURS)],
        "linewidth": 1.4,
        "linestyle": DASHED if training_free else "-",
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
            _line(axes, bins, series, result.title, style_of(result.method))
        axes.set_xticks(bins)
        axes.axhline(results[0].plain_recall, color=GREY, linewidth=0.8, linestyle=":")

    return _grid(datasets, path, fill, "bin of uncertainty, low to high", "Recall@1 in the bin", stacked=stacked)


def draw_selective(datasets: Mapping[str, Comparison], path: Path, *, stacked: bool = False) -> Path:
    """Draws the accuracy of plain search after the least certain queries have been turned away."""

    def fill(axes: Any, results: Sequence[Result]) -> None:
        for result in results:
            series = Series(result.accuracy, result.accuracy_spread)
            _line(axes, 1 - np.array(result.coverage), series, result.title, style_of(result.method))

    return _grid(datasets, path, fill, "share of queries turned away", "accuracy on the rest", stacked=stacked)


def draw_risk(datasets: Mapping[str, Comparison], path: Path, *, stacked: bool = False) -> Path:
    """Draws the share of wrong answers of plain search among the most certain ones, over the share that is answered."""

    def fill(axes: Any, results: Sequence[Result]) -> None:
        for result in results:
            series = Series([1 - share for share in result.accuracy], result.accuracy_spread)
            _line(axes, np.array(result.coverage), series, result.title, style_of(result.method))
        axes.set_ylim(bottom=0)

    return _grid(datasets, path, fill, "share of queries answered", "share of answers that are wrong", stacked=stacked)


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


def draw_components(datasets: Mapping[str, ZeroShot], path: Path) -> Path:
    """Draws the selective accuracy of zero-shot classification by each component, training-free ones dashed."""
    figure, panels = plots.subplots(1, len(datasets), figsize=(4.4 * len(datasets) + 2.6, 3.9), squeeze=False)
    for axes, (name, outcome) in zip(panels[0], datasets.items()):
        for part in outcome.components:
            style = style_of(part.name)
            if part.learned:
                style = {"color": COMPONENT_COLOURS[part.name], "linewidth": 2.4, "linestyle": "-", "zorder": 4}
            else:
                style |= {"linestyle": DASHED}
            _line(axes, 1 - np.array(part.coverage), Series(part.accuracy), part.title, style)
        axes.axhline(outcome.accuracy, color=GREY, linewidth=0.8, linestyle=":")
        _finish(axes, name, "share of images turned away", "accuracy on the rest")
    return _save(figure, panels, path)


def draw_ablation(
    panels: Mapping[str, Mapping[str, Series]],
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
            style = style_of(name)
            if name not in OWN_COLOURS and name not in baselines.METHODS:
                colours = [*OWN_COLOURS.values(), *OTHER_COLOURS]
                style |= {"color": colours[line % len(colours)], "linewidth": 2.0}
            style |= {"marker": MARKERS[line % len(MARKERS)], "markersize": 5}
            _line(axes, np.asarray(x, dtype=float), series, name, style)
        if log_x:
            axes.set_xscale("log")
        axes.set_xticks(list(x), [f"{value:g}" for value in x])
        axes.minorticks_off()
        _finish(axes, title, xlabel, ylabel if number == 0 else "")
    return _save(figure, grid, path)


def draw_abstention(
    act: AbstentionThreshold,
    uncertainty: Values,
    correct: Values,
    path: str | Path | None = None,
    *,
    new: tuple[Values, Values] | None = None,
    label: str = "uncertainty",
    axes: Sequence[Any] | None = None,
) -> Path | None:
    """Plots the threshold `act` with the answers it was computed from, and the error rate it gives, into the PNG file
    `path`, which is returned, or into two `axes` of matplotlib, left and right, whose figure is the caller's.

    Left: histogram of right and wrong answers by uncertainty; `label` is the name on the axis. Right: share of wrong
    answers among the most certain ones over the share that is answered; the band extends up to the Clopper-Pearson
    bound of each share taken alone. `new`: (uncertainty, correct) of later queries, drawn as a second curve and a
    cross.
    """
    if not isinstance(act, AbstentionThreshold):
        raise TypeError(f"act must be an AbstentionThreshold, got {type(act).__name__}")
    if (path is None) == (axes is None):
        raise TypeError("draw_abstention needs a path, or two axes to draw into, and not both")
    path, label = None if path is None else checks.path(path, "path"), checks.words(label, "label")
    if axes is not None and (len(own := list(axes)) != 2 or not all(hasattr(each, "hist") for each in own)):
        raise TypeError("axes must be two Axes of matplotlib, as subplots(1, 2) makes them")
    score, right = _drawable(uncertainty, correct, "uncertainty")
    if new is not None and not (isinstance(new, (tuple, list)) and len(new) == 2):
        raise TypeError(f"new must be a pair (uncertainty, correct), got {type(new).__name__}")
    later = None if new is None else _drawable(*new, "uncertainty of new")
    figure, (left, over) = plots.subplots(1, 2, figsize=(11, 4.3)) if axes is None else (None, axes)
    _draw_parted(left, act, score, right)
    _draw_risk(over, act, score, right, later)
    _finish(left, "right and wrong answers\n", f"{label} of a query", "queries")
    _finish(over, "error rate against coverage\n", "share of queries answered", "share of answers that are wrong")
    left.xaxis.label.set_parse_math(False)  # a dollar sign in the label stays a dollar sign
    if figure is not None and path is not None:
        figure.set_layout_engine("constrained", w_pad=0.12)
        plots.save_figure(figure, path)
    return path


def _drawable(values: Values, correct: Values, name: str) -> tuple[Floats, Bools]:
    """The scores and which answers are right, as `scored_answers`, if the scores can be drawn on an axis."""
    score, right = scored_answers(values, correct, name)
    beyond = np.abs(score) > checks.LARGEST
    if beyond.any():
        row = int(beyond.argmax())
        raise ValueError(f"{name} must be finite and at most {checks.LARGEST:g}, but row {row} is {score[row]}")
    return score, right


def _draw_parted(axes: Any, act: AbstentionThreshold, score: Floats, right: Bools) -> None:
    edges = np.linspace(score.min(), score.max(), 41) if np.ptp(score) > 0 else 1
    axes.hist([score[right], score[~right]], edges, stacked=True, color=[RIGHT, WRONG], label=["right", "wrong"])
    if act.certified:
        axes.axvline(act.threshold, color=INK, linewidth=1.6)
        above = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "color": INK, "fontsize": 9}
        axes.annotate("answer", (act.threshold, 1.0), (-5, 3), ha="right", **above)
        axes.annotate("abstain", (act.threshold, 1.0), (5, 3), ha="left", **above)
    axes.legend(frameon=False, fontsize=9)


def _draw_risk(
    axes: Any, act: AbstentionThreshold, score: Floats, right: Bools, later: tuple[Floats, Bools] | None
) -> None:
    coverage, risk = _risk_curve(score, right)
    given = np.rint(coverage * len(score)).astype(int)
    bound = [
        clopper_pearson_upper(min(n, round(share * n)), n, act.confidence)
        for share, n in zip(risk.tolist(), given.tolist())
    ]
    axes.plot(coverage, risk, color=BLUE, linewidth=2.2, label=f"{len(score):,} calibration queries")
    axes.fill_between(coverage, risk, bound, color=BLUE, alpha=0.15, linewidth=0, label=f"{act.confidence:.0%} bound")
    if later is not None:
        axes.plot(*_risk_curve(*later), color=ORANGE, linewidth=1.4, label=f"{len(later[0]):,} new queries")
    axes.axhline(act.target_risk, color=WRONG, linewidth=1.2, linestyle=DASHED)
    axes.text(1.0, act.target_risk, f"target {act.target_risk:.0%} ", color=WRONG, ha="right", va="bottom", fontsize=9)
    if act.certified:
        for colour, marker, name, group in ((BLUE, "o", "calibration", (score, right)), (ORANGE, "X", "new", later)):
            if group is not None and (answered := act.answers(group[0])).any():
                share, wrong = answered.mean(), 1 - group[1][answered].mean()
                words = f"threshold, {name}: {share:.0%} answered, {wrong:.1%} wrong"
                axes.plot(share, wrong, marker, color=colour, markersize=9, label=words, zorder=5, linestyle="none")
    else:
        axes.text(0.5, 0.5, "nothing could be certified:\nabstain always", transform=axes.transAxes, ha="center")
    axes.set(xlim=(0, 1.01), ylim=(0, max(1.4 * float(risk.max()), 1.6 * act.target_risk)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _risk_curve(score: Floats, right: Bools) -> tuple[Floats, Floats]:
    """Coverages from a twentieth of the answers on (fewer are too noisy), and the share of wrong answers at each."""
    count = len(score)
    coverage = np.unique(np.linspace(max(1, count // 20), count, 100).round()) / count
    return coverage, 1 - selective_accuracy(score, right, coverage.tolist()).accuracy


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
        _finish(axes, title, xlabel, ylabel if first or not share else "")
    return _save(figure, panels, path, legend=legend, below=stacked)


def _line(axes: Any, x: Any, series: Series, label: str, style: Mapping[str, Any]) -> None:
    values = np.asarray(series.values, dtype=float)
    axes.plot(x, values, label=label, **style)
    if series.spread is not None and len(series.spread):
        spread = np.asarray(series.spread, dtype=float)
        axes.fill_between(x, values - spread, values + spread, color=style["color"], alpha=0.15, linewidth=0)


def _finish(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(xlabel)
    if ylabel:
        axes.set_ylabel(ylabel)
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, panels: Any, path: Path, *, legend: bool = True, below: bool = False) -> Path:
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
