"""docs/performance.md from the results: what stands between its marks, and the figures.

`<!-- bench: KEY -->` begins a block and `<!-- bench: end -->` ends it; words outside of blocks are written by hand. A
block whose results are missing keeps what it has. KEY is `machine`, `scalings`, `cases SUITE`, `table SUITE NAME` or
`figure NAME`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common import cell, load, markdown
from benchmarks.limits import Limits, Work
from benchmarks.suite import FOR_COMPARISON, OURS, PEER, case_words, scaling_rows, suites
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.files import write_atomic

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "performance.md", ROOT / "docs" / "images"
COLOURS_KEPT = 64
BLOCK = re.compile(r"(<!-- bench: (?!end)(.+?) -->\n)(.*?)(<!-- bench: end -->)", flags=re.DOTALL)
OUR_COLOUR, PEER_COLOUR, LIMIT_COLOUR, GREY = "#1f5fa8", "#b9c2cc", "#d1495b", "#8a8f98"
COLOURS = ("#1f5fa8", "#d1495b", "#2a9d8f", "#d98f2b", "#8d6cab", "#7a9e3b", "#5f7a8a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Results = dict[str, dict[str, Any]]


def write() -> None:
    """Blocks and figures from all results that there are."""
    results = {name: result for name in suites() if (result := load(name)) is not None}
    text = filled(PAGE.read_text(), lambda key: block(key, results))
    write_atomic(PAGE, text.encode())
    print(f"{PAGE.relative_to(ROOT)} holds the results of {', '.join(results)}")


def filled(text: str, make: Callable[[str], str | None]) -> str:
    """The page with every block made anew; `make` returns None for one that stays as it is."""

    def replace(match: re.Match[str]) -> str:
        begin, key, old, end = match.groups()
        new = make(key)
        return begin + (old if new is None else new + "\n") + end

    return BLOCK.sub(replace, text)


def block(key: str, results: Results) -> str | None:
    """What belongs under a key, or None if that was not measured. ValueError for a key that means nothing."""
    kind, *rest = key.split()
    if kind == "machine":
        return machine_words(results) if results else None
    if kind == "scalings":
        fits = [scaling for suite in results.values() for scaling in suite["scalings"]]
        return markdown(scaling_rows(fits)) if fits else None
    if kind == "cases" and len(rest) == 1:
        suite = results.get(rest[0])
        return None if suite is None else "\n\n".join(case_words(suite))
    if kind == "table" and len(rest) == 2:
        table = results.get(rest[0], {}).get("tables", {}).get(rest[1])
        return None if table is None else markdown(table["rows"]) + note_words(table["notes"])
    if kind == "figure" and len(rest) == 1:
        return figure_words(rest[0], results)
    if kind == "study" and len(rest) == 1:
        study = load(rest[0])
        return None if study is None else markdown(study["rows"])
    known = "machine, scalings, cases SUITE, table SUITE NAME, figure NAME, study NAME"
    raise ValueError(f"{PAGE.name} has a block {key!r}; blocks are {known}")


def machine_words(results: Results) -> str:
    """Where and when, and the limits: the range over the suites, each of which measured them for itself."""
    facts = [suite["machine"] for suite in results.values()]
    days = sorted({fact["day"] for fact in facts})
    first = facts[0]
    rows = [
        {"limit": title, "measured": span([unit * suite["limits"][name] for suite in results.values()]), "by": how}
        for name, title, unit, how in (
            ("flops", "matrix products, GFLOP/s", 1e-9, "torch, float32: the faster of `torch.mm` and oneDNN"),
            ("bytes", "memory, GB/s", 1e-9, "the faster of a streaming read and a copy"),
            ("exps", "exponentials, 10^9/s", 1e-9, "`torch.exp` on an array in the cache"),
        )
    ]
    words = (
        f"Measured {' and '.join(days)} on {first['threads']} threads of a processor that calls itself "
        f'"{first["processor"]}" ({first["instructions"]}), torch {first["torch"]}.'
    )
    return f"{words}\n\n{markdown(rows)}"


def span(values: Sequence[float]) -> str:
    """Least and largest, with three digits."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def note_words(notes: dict[str, Any]) -> str:
    """Numbers beside a table, in one line; what is nested is for JSON alone."""
    numbers = {name: value for name, value in notes.items() if isinstance(value, (int, float))}
    shown = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {cell(value)}" for name, value in numbers.items()
    ]
    return f"\n\n{'; '.join(shown)}." if shown else ""


# ---- figures ------------------------------------------------------------------------------------------------------


def figure_words(name: str, results: Results) -> str | None:
    """Draws a figure and returns its place in the page, or None if its results are missing."""
    if name not in FIGURES:
        raise ValueError(f"{PAGE.name} has a figure {name!r}; figures are {', '.join(FIGURES)}")
    make, title, caption = FIGURES[name]
    picture = f"performance_{name}.png"
    if not make(results, PICTURES / picture):
        return None
    return f"![{title}](images/{picture})" + (f"\n\n*{caption}*" if caption else "")


def best(case: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fastest contender of a kind; of ours the first, which needs no special setting."""
    rows = [row for row in case["rows"] if row["kind"] == kind]
    return rows[0] if kind == OURS else min(rows, key=lambda row: row["median"])


def draw_peers(results: Results, path: Path) -> bool:
    """Bars of time per case, as multiples of this library's plain call."""
    cases = [case for suite in results.values() for case in suite["cases"]]
    if not cases:
        return False
    columns = 2
    lines = -(-len(cases) // columns)
    counts = [max(len(case["rows"]) for case in cases[k * columns : (k + 1) * columns]) for k in range(lines)]
    figure, panels = plots.subplots(
        lines,
        columns,
        figsize=(12.5, sum(0.75 + 0.27 * count for count in counts)),
        squeeze=False,
        height_ratios=[0.9 + 0.3 * count for count in counts],
    )
    for number, (axes, case) in enumerate(zip(panels.flat, cases)):
        ours = best(case, OURS)["median"]
        rows = sorted(case["rows"], key=lambda row: -row["median"])
        values = [row["median"] / ours for row in rows]
        colours = {OURS: OUR_COLOUR, PEER: PEER_COLOUR, FOR_COMPARISON: "white"}
        axes.barh(
            range(len(rows)),
            values,
            height=0.7,
            color=[colours[row["kind"]] for row in rows],
            edgecolor=[GREY if row["kind"] == FOR_COMPARISON else "none" for row in rows],
        )
        for height, (row, value) in enumerate(zip(rows, values)):
            words = f" {value:.3g}x   {shown_seconds(row['median'])}"
            axes.text(value, height, words, va="center", fontsize=8, color="#333")
        axes.set_yticks(range(len(rows)), [plain_name(row["contender"]) for row in rows], fontsize=8.5)
        axes.set_xlim(0, 1.34 * max(values))
        axes.plot([1, 1], [-0.5, len(rows) - 0.5], color=OUR_COLOUR, linewidth=0.8, linestyle=":")
        axes.set_ylim(
            len(rows) - counts[number // columns] - 0.6, len(rows) - 0.4
        )  # bars of a line of panels are alike
        axes.set_title(textwrap.fill(case["name"], 46), fontsize=9.5, loc="left")
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    for axes in panels.flat[len(cases) :]:
        axes.set_visible(False)
    return save(figure, path)


def plain_name(name: str) -> str:
    return name.replace("`", "")


def shown_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def draw_roofline(results: Results, path: Path) -> bool:
    """Work per byte against work per second: ours full, the best peer hollow, under what the machine allows."""
    shown = [(case, Work(**case["work"])) for suite in results.values() for case in suite["cases"]]
    shown = [(case, work) for case, work in shown if work.bytes]
    if not shown:
        return False
    limits = Limits(*(max(s["limits"][name] for s in results.values()) for name in ("flops", "bytes", "exps")))
    figure, axes = plots.subplots(figsize=(9.2, 5.4))
    roof = np.logspace(-1.2, 4.2, 200)
    axes.plot(roof, np.minimum(limits.flops, roof * limits.bytes) / 1e9, color=LIMIT_COLOUR, linewidth=1.8)
    top, slope = limits.flops / 1e9, limits.bytes / 1e9
    axes.text(roof[-1], 1.12 * top, f"matrix products, {top:.0f} GFLOP/s", ha="right", fontsize=9)
    axes.text(0.25, 1.5 * 0.25 * slope, f"memory, {slope:.0f} GB/s", rotation=34, fontsize=9, ha="center")
    for number, (case, work) in enumerate(shown):
        # An operation without products is counted by its exponentials, or by one operation per number moved.
        operations = work.flops or work.exps or work.bytes / 4
        x, colour, marker = operations / work.bytes, COLOURS[number % 7], MARKERS[(number + number // 7) % 7]
        ours = operations / best(case, OURS)["median"] / 1e9
        if any(row["kind"] == PEER for row in case["rows"]):
            peer = operations / best(case, PEER)["median"] / 1e9
            axes.plot([x, x], [peer, ours], color=colour, linewidth=1, alpha=0.6)
            axes.plot(x, peer, marker, color=colour, markerfacecolor="white", markersize=7)
        axes.plot(x, ours, marker, color=colour, markersize=8, label=plain_name(case["name"]))
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that must be moved", ylabel="G operations/s")
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    return save(figure, path)


def draw_scalings(results: Results, path: Path) -> bool:
    """Seconds over every size, with the fitted power."""
    scalings = [scaling for suite in results.values() for scaling in suite["scalings"]]
    if not scalings:
        return False
    columns = 5
    lines = -(-len(scalings) // columns)
    figure, panels = plots.subplots(lines, columns, figsize=(13.5, 2.6 * lines), squeeze=False)
    for axes, fit in zip(panels.flat, scalings):
        sizes, values = np.array(fit["sizes"], dtype=float), 1e3 * np.array(fit["seconds"])
        middle = np.exp(np.log(values).mean() - fit["exponent"] * np.log(sizes).mean())
        axes.plot(sizes, middle * sizes ** fit["exponent"], color=GREY, linewidth=1.2)
        axes.plot(sizes, values, "o", color=OUR_COLOUR, markersize=6)
        axes.set(xscale="log", yscale="log", xlabel=fit["variable"])
        axes.set_xticks(sizes, [f"{size:g}" if size < 10_000 else f"{size / 1000:g}k" for size in sizes], fontsize=8)
        axes.minorticks_off()
        low, high = values.min() / 1.6, values.max() * 1.6
        axes.set_ylim(low, high)
        axes.set_yticks(values, [cell(float(value)) for value in values], fontsize=8)
        power = f"{fit['variable']}$^{{{fit['exponent']:.2f}}}$"
        axes.set_title(f"{fit['operation']}\n$\\propto$ {power}", fontsize=9.5)
        axes.grid(color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for line in panels:
        line[0].set_ylabel("ms")
    for axes in panels.flat[len(scalings) :]:
        axes.set_visible(False)
    return save(figure, path)


def draw_costs(results: Results, path: Path) -> bool:
    """Seconds per 1,000 queries over the size of the gallery; hollow where computed."""
    tables = [table for table in results.get("cost", {}).get("tables", {}).values() if "passes" in table["notes"]]
    if not tables:
        return False
    figure, panels = plots.subplots(1, len(tables), figsize=(6.0 * len(tables), 4.4), squeeze=False, sharey=True)
    for axes, table in zip(panels[0], tables):
        for number, row in enumerate(table["rows"]):
            title, *cells = row.values()
            sizes = [float(name.split(" = ")[1]) for name in list(row)[1:]]
            values = [float(text.strip("*").replace(",", "")) for text in cells]
            style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 6}
            axes.plot(sizes, values, label=plain_name(title), linewidth=1.6, **style)
            computed = [(x, y) for x, y, text in zip(sizes, values, cells) if text.startswith("*")]
            for x, y in computed:
                axes.plot(x, y, **style, markerfacecolor="white", linestyle="none")
        axes.set(xscale="log", yscale="log", xlabel="items in the gallery")
        axes.set_title(table["notes"]["model"], fontsize=11)
        axes.grid(color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("seconds per 1,000 queries")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=9, ncols=3)
    return save(figure, path)


def save(figure: Any, path: Path) -> bool:
    figure.set_layout_engine("constrained", h_pad=0.06, w_pad=0.08)
    plots.save_figure(figure, path)
    with Image.open(path) as picture:  # a palette takes a third of the bytes
        small = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS_KEPT)
    small.save(path, optimize=True)
    return True


FIGURES: dict[str, tuple[Callable[[Results, Path], bool], str, str]] = {
    "peers": (
        draw_peers,
        "Time of every contender as a multiple of geoflow_fast",
        "Blue: this library; grey: peers; outlined: something else, for scale. Multiples of the first blue call of "
        "each panel.",
    ),
    "roofline": (
        draw_roofline,
        "Operations per second against operations per byte",
        "Full marks: this library; hollow: the best peer. Where there are matrix products these alone are counted; of "
        "the interpolant, one operation per number moved.",
    ),
    "scaling": (draw_scalings, "Seconds over every size, with the fitted power", ""),
    "cost": (
        draw_costs,
        "Seconds per 1,000 queries over the size of the gallery",
        "Hollow marks are computed, not measured.",
    ),
}
"""Of the page: how to draw it, what it shows, and its caption."""
