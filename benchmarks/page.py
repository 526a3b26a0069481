"""docs/performance.md from pytest-benchmark's JSON: `python -m benchmarks.page FILE`.

`<!-- bench: KEY -->` begins a block and `<!-- bench: end -->` ends it; words outside of blocks are written by hand. A
block whose results are missing keeps what it has. KEY is `machine`, `growth`, `estimates`, `cost WIDTH`, `cases TEST`
(a table per group), `wide TEST` (a line per group, a column per contender) or `figure NAME`, where TEST is the name of
a function without its `test_`.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import estimates
from benchmarks.cases import FOR_COMPARISON, OURS, PEER
from benchmarks.inputs import PAPER
from benchmarks.limits import Limits, Work
from benchmarks.methods.results import cell, markdown
from benchmarks.test_cost import FAISS_PASS, FAST_SAMPLES, PAPER_SAMPLES, RERANKED, SCORING_PASS, SEARCH_PASS
from geoflow_fast.flow.sampling import FAST_SAMPLING
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.files import write_atomic

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "performance.md", ROOT / "docs" / "images"
COLOURS_KEPT = 64
BLOCK = re.compile(r"(<!-- bench: (?!end)(.+?) -->\n)(.*?)(<!-- bench: end -->)", flags=re.DOTALL)
OUR_COLOUR, PEER_COLOUR, LIMIT_COLOUR, GREY = "#1f5fa8", "#b9c2cc", "#d1495b", "#8a8f98"
COLOURS = ("#1f5fa8", "#d1495b", "#2a9d8f", "#d98f2b", "#8d6cab", "#7a9e3b", "#5f7a8a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MANY = 100
"""Rounds from which the 99th percentile is worth a column."""

Report = dict[str, Any]
"""pytest-benchmark's JSON."""
Rows = list[dict[str, Any]]


def main(path: str) -> None:
    """Blocks and figures from a report."""
    report = json.loads(Path(path).read_text())
    write_atomic(PAGE, filled(PAGE.read_text(), lambda key: block(key, report)).encode())
    print(f"{PAGE.relative_to(ROOT)} holds {len(report['benchmarks'])} benchmarks of {report['datetime'][:10]}")


def filled(text: str, make: Callable[[str], str | None]) -> str:
    """The page with every block made again; `make` returns None for one that stays as it is."""

    def replace(match: re.Match[str]) -> str:
        begin, key, old, end = match.groups()
        new = make(key)
        return begin + (old if new is None else new + "\n") + end

    return BLOCK.sub(replace, text)


def block(key: str, report: Report) -> str | None:
    """What belongs under a key, or None if that was not measured. ValueError for a key that means nothing."""
    kind, *rest = key.split()
    if kind == "machine":
        return machine_words(report)
    if kind == "growth":
        return markdown([growth_row(rows) for rows in growths(report)]) if growths(report) else None
    if kind == "estimates":
        return markdown(estimates.rows())
    if kind == "cost" and len(rest) == 1:
        return cost_table(report, f"d = {rest[0]}")
    if kind in ("cases", "wide") and len(rest) == 1:
        found = groups(report, rest[0])
        if not found:
            return None
        return case_tables(found) if kind == "cases" else markdown([wide_row(*one, found) for one in found.items()])
    if kind == "figure" and len(rest) == 1:
        return figure_words(rest[0], report)
    known = "machine, growth, estimates, cost WIDTH, cases TEST, wide TEST, figure NAME"
    raise ValueError(f"{PAGE.name} has a block {key!r}; blocks are {known}")


def groups(report: Report, test: str = "") -> dict[str, Rows]:
    """Contenders by group, of the test of this name or of all."""
    found: dict[str, Rows] = {}
    for one in report["benchmarks"]:
        name = one["name"].partition("[")[0].removeprefix("test_")
        if "contender" in one["extra_info"] and test in ("", name):
            found.setdefault(one["group"], []).append({**one["extra_info"], **one["stats"]})
    return found


def growths(report: Report) -> list[Rows]:
    """Sizes of each operation."""
    found: dict[tuple[str, str], Rows] = {}
    for one in report["benchmarks"]:
        info = one["extra_info"]
        if "operation" in info:
            found.setdefault((info["operation"], info["variable"]), []).append({**info, **one["stats"]})
    return [sorted(rows, key=lambda row: row["size"]) for rows in found.values() if len(rows) > 1]


def exponent(rows: Rows) -> float:
    """Slope of log seconds over log size, by least squares."""
    return float(np.polyfit(*(np.log([row[key] for row in rows]) for key in ("size", "median")), 1)[0])


def growth_row(rows: Rows) -> dict[str, Any]:
    """A fit as a line of the table."""
    return {
        "operation": rows[0]["operation"],
        "over": rows[0]["variable"],
        "sizes": " / ".join(f"{row['size']:,}" for row in rows),
        "ms": " / ".join(cell(1e3 * row["median"]) for row in rows),
        "exponent": f"{exponent(rows):.2f}",
        "by arithmetic": f"{rows[0]['expected']:g}",
    }


def best_peer(rows: Rows) -> float | None:
    """Seconds of the fastest peer, if there is one."""
    return min((row["median"] for row in rows if row["kind"] == PEER), default=None)


def case_tables(found: dict[str, Rows]) -> str:
    """A titled table for each group."""
    return "\n\n".join(f"**{name}**\n\n{markdown(case_rows(rows))}" for name, rows in found.items())


def case_rows(rows: Rows) -> list[dict[str, Any]]:
    """Contenders: time, ratio to the best peer, memory, share of the machine's limit, and what else they tell."""
    peer, table = best_peer(rows), []
    for row in rows:
        compared = row["kind"] != FOR_COMPARISON
        line = {"": row["contender"], "ms": 1e3 * row["median"]}
        line["±"] = f"{100 * row['iqr'] / 2 / row['median']:.0f} %" if row["rounds"] > 1 else ""
        if row["rounds"] >= MANY:
            line["p99, ms"] = 1e3 * float(np.percentile(row["data"], 99))
        if peer:
            line["speed-up over the best peer"] = f"{peer / row['median']:.2f}x" if compared else ""
        if "peak" in row:
            line["peak MB"] = f"{row['peak'] / 1e6:,.0f}"
        if any("limited by" in other for other in rows):
            limited = "limited by" in row
            line["share of the limit"] = f"{row['share of the limit']:.0%}, {row['limited by']}" if limited else ""
        if row.get("queries"):
            line["s per 1,000"] = per_thousand(row)
        table.append(line | row.get("columns", {}))
    return table


def per_thousand(row: dict[str, Any]) -> float:
    """Seconds of a thousand queries."""
    return 1000 * row["median"] / row["queries"]


def wide_row(name: str, rows: Rows, found: dict[str, Rows]) -> dict[str, Any]:
    """A group as one line: seconds of a thousand queries, or milliseconds of a call and its ratio to the best peer."""
    by_name, peer = {row["contender"]: row for row in rows}, best_peer(rows)
    line: dict[str, Any] = {"": name}
    for other in dict.fromkeys(row["contender"] for rows in found.values() for row in rows):
        row = by_name.get(other)
        if row is None:
            line[other] = ""
        elif row.get("queries"):
            line[other] = cell(per_thousand(row))
        else:
            ratio = f" ({peer / row['median']:.2f}x)" if peer and row["kind"] == OURS else ""
            line[other] = cell(1e3 * row["median"]) + ratio
    return line


def cost_table(report: Report, width: str) -> str | None:
    """Seconds of 1,000 queries over the size of the gallery: what does not depend on it, and passes. A cell of a size
    that was not measured is in proportion to the largest that was, in italics."""
    fixed: dict[str, float] = {}
    passes: dict[str, dict[int, float]] = {}
    for name, rows in groups(report).items():
        network, _, items = name.partition(", N = ")
        for row in (row for row in rows if row.get("queries") and network.endswith(width)):
            over = passes.setdefault(row["contender"], {}) if items else fixed
            over[int(items.replace(",", "")) if items else row["contender"]] = per_thousand(row)
    if not (fixed and passes):
        return None
    sizes = sorted({size for over in passes.values() for size in over} | set(estimates.GALLERIES))

    def line(title: str, once: float, over: dict[int, float], times: float = 1.0) -> dict[str, str]:
        most, cells = max(over), {}
        for size in sizes:
            value = cell(once + times * over.get(size, over[most] * size / most))
            cells[f"N = 1e{len(str(size)) - 1}"] = value if size in over else f"*{value}*"
        return {"s per 1,000 queries": title, **cells}

    paper = PAPER.n_samples / FAST_SAMPLING.n_samples  # as many times the pass of the fast samples
    table = [line(f"plain {way}", 0.0, passes[way]) for way in (FAISS_PASS, SEARCH_PASS) if way in passes]
    table += [
        line("plain search and `BayesReranker`", fixed[RERANKED], passes[SEARCH_PASS]),
        line("`RetrievalEntropy.fast`", fixed[FAST_SAMPLES], passes[SCORING_PASS]),
        line("`RetrievalEntropy`, the paper's settings", fixed[PAPER_SAMPLES], passes[SCORING_PASS], paper),
    ]
    return markdown(table)


def machine_words(report: Report) -> str | None:
    """Where and when, and the range of the limits that the modules measured."""
    limits = [one["extra_info"]["limits"] for one in report["benchmarks"] if "limits" in one["extra_info"]]
    if not limits:
        return None
    facts = report["machine_info"]
    rows = [
        {"limit": title, "measured": span([unit * one[name] for one in limits]), "by": how}
        for name, title, unit, how in (
            ("flops", "matrix products, GFLOP/s", 1e-9, "torch, float32: the faster of `torch.mm` and oneDNN"),
            ("bytes", "memory, GB/s", 1e-9, "the faster of a streaming read and a copy"),
            ("exps", "exponentials, 10^9/s", 1e-9, "`torch.exp` on an array in the cache"),
        )
    ]
    words = (
        f"Measured {report['datetime'][:10]} on {facts['threads']} threads of a processor that calls itself "
        f'"{facts["processor"]}" ({facts["instructions"]}), torch {facts["torch"]}.'
    )
    return f"{words}\n\n{markdown(rows)}"


def span(values: Sequence[float]) -> str:
    """Least and largest, with three digits."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


# ---- figures ------------------------------------------------------------------------------------------------------


def figure_words(name: str, report: Report) -> str | None:
    """Draws a figure and returns its place in the page, or None if its results are missing."""
    if name not in FIGURES:
        raise ValueError(f"{PAGE.name} has a figure {name!r}; figures are {', '.join(FIGURES)}")
    make, title, caption = FIGURES[name]
    picture = f"performance_{name}.png"
    if not make(report, PICTURES / picture):
        return None
    return f"![{title}](images/{picture})" + (f"\n\n*{caption}*" if caption else "")


def our(rows: Rows) -> dict[str, Any]:
    """The first of our contenders, which needs no special setting."""
    return next(row for row in rows if row["kind"] == OURS)


def raced(report: Report) -> dict[str, Rows]:
    """The groups whose work is known and that have a peer."""
    found = groups(report)
    return {n: rows for n, rows in found.items() if best_peer(rows) and any("work" in row for row in rows)}


def draw_peers(report: Report, path: Path) -> bool:
    """Bars of time per group, as multiples of this library's plain call."""
    shown = raced(report)
    if not shown:
        return False
    columns, sizes = 2, [len(rows) for rows in shown.values()]
    lines = -(-len(shown) // columns)
    counts = [max(sizes[k * columns : (k + 1) * columns]) for k in range(lines)]
    figure, panels = plots.subplots(
        lines,
        columns,
        figsize=(12.5, sum(0.75 + 0.27 * count for count in counts)),
        squeeze=False,
        height_ratios=[0.9 + 0.3 * count for count in counts],
    )
    for number, (axes, (name, contenders)) in enumerate(zip(panels.flat, shown.items())):
        ours = our(contenders)["median"]
        rows = sorted(contenders, key=lambda row: -row["median"])
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
        axes.set_title(textwrap.fill(name, 46), fontsize=9.5, loc="left")
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    return save(figure, path)


def plain_name(name: str) -> str:
    return name.replace("`", "")


def shown_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def draw_roofline(report: Report, path: Path) -> bool:
    """Work per byte against work per second: ours full, the best peer hollow, under what the machine allows."""
    shown = {name: rows for name, rows in raced(report).items() if our(rows)["work"]["bytes"]}
    if not shown:
        return False
    measured = [row["limits"] for rows in shown.values() for row in rows if "limits" in row]
    limits = Limits(*(max(one[name] for one in measured) for name in ("flops", "bytes", "exps")))
    figure, axes = plots.subplots(figsize=(9.2, 5.4))
    roof = np.logspace(-1.2, 4.2, 200)
    axes.plot(roof, np.minimum(limits.flops, roof * limits.bytes) / 1e9, color=LIMIT_COLOUR, linewidth=1.8)
    top, slope = limits.flops / 1e9, limits.bytes / 1e9
    axes.text(roof[-1], 1.12 * top, f"matrix products, {top:.0f} GFLOP/s", ha="right", fontsize=9)
    axes.text(0.25, 1.5 * 0.25 * slope, f"memory, {slope:.0f} GB/s", rotation=34, fontsize=9, ha="center")
    for number, (name, rows) in enumerate(shown.items()):
        work = Work(**our(rows)["work"])
        # An operation without products is counted by its exponentials, or by one operation per number moved.
        operations = work.flops or work.exps or work.bytes / 4
        x, colour, marker = operations / work.bytes, COLOURS[number % 7], MARKERS[(number + number // 7) % 7]
        ours, peer = operations / our(rows)["median"] / 1e9, operations / best_peer(rows) / 1e9
        axes.plot([x, x], [peer, ours], color=colour, linewidth=1, alpha=0.6)
        axes.plot(x, peer, marker, color=colour, markerfacecolor="white", markersize=7)
        axes.plot(x, ours, marker, color=colour, markersize=8, label=plain_name(name))
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that must be moved", ylabel="G operations/s")
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    return save(figure, path)


def draw_growth(report: Report, path: Path) -> bool:
    """Seconds over every size, with the fitted power."""
    shown = growths(report)
    if not shown:
        return False
    columns = 5
    lines = -(-len(shown) // columns)
    figure, panels = plots.subplots(lines, columns, figsize=(13.5, 2.6 * lines), squeeze=False)
    for axes, rows in zip(panels.flat, shown):
        sizes = np.array([row["size"] for row in rows], dtype=float)
        values, fitted = 1e3 * np.array([row["median"] for row in rows]), exponent(rows)
        middle = np.exp(np.log(values).mean() - fitted * np.log(sizes).mean())
        axes.plot(sizes, middle * sizes**fitted, color=GREY, linewidth=1.2)
        axes.plot(sizes, values, "o", color=OUR_COLOUR, markersize=6)
        axes.set(xscale="log", yscale="log", xlabel=rows[0]["variable"])
        axes.set_xticks(sizes, [f"{size:g}" if size < 10_000 else f"{size / 1000:g}k" for size in sizes], fontsize=8)
        axes.minorticks_off()
        low, high = values.min() / 1.6, values.max() * 1.6
        axes.set_ylim(low, high)
        axes.set_yticks(values, [cell(float(value)) for value in values], fontsize=8)
        power = f"{rows[0]['variable']}$^{{{fitted:.2f}}}$"
        axes.set_title(f"{rows[0]['operation']}\n$\\propto$ {power}", fontsize=9.5)
        axes.grid(color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for line in panels:
        line[0].set_ylabel("ms")
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    return save(figure, path)


def save(figure: Any, path: Path) -> bool:
    figure.set_layout_engine("constrained", h_pad=0.06, w_pad=0.08)
    plots.save_figure(figure, path)
    with Image.open(path) as picture:  # a palette takes a third of the bytes
        small = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS_KEPT)
    small.save(path, optimize=True)
    return True


FIGURES: dict[str, tuple[Callable[[Report, Path], bool], str, str]] = {
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
    "scaling": (draw_growth, "Seconds over every size, with the fitted power", ""),
}
"""Of the page: how to draw it, what it shows, and its caption."""


if __name__ == "__main__":
    main(sys.argv[1])
