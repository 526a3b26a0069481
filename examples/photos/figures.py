"""The figures that only this study has; the others are those of `geoflow evaluate`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import Findings, Judged

from geoflow_fast.directions import Direction
from geoflow_fast.encoders.sources import read_image
from geoflow_fast.evaluation.compare import BLOCK_QUERIES
from geoflow_fast.evaluation.figures import BLUE, DIRECTION_TITLES, GREY, INK, ORANGE
from geoflow_fast.evaluation.ladder_methods import Ladder
from geoflow_fast.runtime import plots

SHOWN, CHOICES = 4, 4
"""Captions at either end, and the most probable images of each."""
RIGHT = "#0b6e4f"
SIDE = 160
"""Pixels of a thumbnail."""


def draw_rungs(findings: Findings, path: Path) -> Path:
    """What each rung of evidence brought on the queries that calibrate: a dot per fold, a bar for the mean."""
    figure, panels = plots.subplots(1, 2, figsize=(6, 3.4), layout="constrained", sharey=True)
    for axes, (direction, folds) in zip(panels, findings.folds.items()):
        ladders = [fold.rungs for fold in folds]
        # The first rung is the search itself; what it brings over nothing would dwarf the others.
        names = [rung.name for rung in ladders[0][1:]]
        for position in range(len(names)):
            rungs = [ladder[position + 1] for ladder in ladders]
            gain, kept = np.array([rung.gain for rung in rungs]), np.array([rung.kept for rung in rungs])
            stderr = float(np.sqrt(np.mean([rung.stderr**2 for rung in rungs])))
            axes.bar(position, gain.mean(), 0.55, color=BLUE, alpha=0.25)
            axes.errorbar(position - 0.2, gain.mean(), stderr, color=INK, capsize=3, linewidth=1.2)
            spread = position + np.linspace(-0.1, 0.2, len(gain))
            axes.scatter(spread[kept], gain[kept], s=26, color=BLUE, zorder=3)
            axes.scatter(spread[~kept], gain[~kept], s=26, facecolors="white", edgecolors=ORANGE, zorder=3)
        kept_in = [sum(ladder[position + 1].kept for ladder in ladders) for position in range(len(names))]
        labels = [f"{name}\nkept {count} of {len(folds)}" for name, count in zip(names, kept_in)]
        axes.set_xticks(range(len(names)), labels)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_title(DIRECTION_TITLES[direction], fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("gain over the rungs before, nats a query", fontsize=9)
    plots.save_figure(figure, path)
    return path


def draw_captions(findings: Findings, path: Path) -> Path | None:
    """The captions whose answer is most and least certain. With pictures, the most probable ones follow each caption,
    and the right one is framed. None if the captions are not known."""
    photos = findings.photos
    if photos.captions is None:
        return None
    most, least = extremes(findings.folds[Direction.T2I])
    return (
        _draw_pictures(findings, (most, least), path) if photos.pictures else _draw_words(findings, (most, least), path)
    )


def extremes(folds: Sequence[Judged]) -> tuple[list[tuple[Judged, int]], list[tuple[Judged, int]]]:
    """The folds and numbers of the most certain captions, and of the least certain ones, of different images each."""
    every = sorted(
        (value, fold, query)
        for fold, judged in enumerate(folds)
        for query, value in enumerate(entropies(judged.pipeline))
    )
    ends = []
    for ordered in (every, every[::-1]):
        first: dict[tuple[int, int], tuple[Judged, int]] = {}
        for _, fold, query in ordered:
            first.setdefault((fold, int(folds[fold].scored[0].columns["image"][query])), (folds[fold], query))
        ends.append(list(first.values())[:SHOWN])
    return ends[0], ends[1]


def entropies(pipeline: Ladder) -> list[float]:
    """Nats of each query over its shortlist and "outside"."""
    blocks = pipeline.task.queries.split(BLOCK_QUERIES)
    return torch.cat([pipeline.reranker.rerank(block).entropy for block in blocks]).tolist()


def _asked(pipeline: Ladder, query: int) -> tuple[list[int], list[float], float, int]:
    """Of one query the most probable items and their probabilities, among how many images it seems to leave the choice
    open, and the right item."""
    post = pipeline.reranker.rerank(pipeline.task.queries[query : query + 1])
    index, prob = post.index[0, :CHOICES].tolist(), post.prob[0, :CHOICES].tolist()
    return index, prob, float(post.entropy.exp()), int(pipeline.task.own[query, 0])


def _draw_pictures(findings: Findings, ends: Sequence[Sequence[tuple[Judged, int]]], path: Path) -> Path:
    lines = [(title, *row) for title, rows in zip(("most certain", "least certain"), ends) for row in rows]
    # Narrow, so that it can be read on a phone: the caption stands above its pictures.
    figure = plots.new_figure(figsize=(6, 2.05 * len(lines)), layout="constrained")
    for part, (title, judged, query) in zip(figure.subfigures(len(lines), 1), lines):
        index, prob, among, own = _asked(judged.pipeline, query)
        words = _words(findings, judged, query, f"{title}, as if among {among:.1f} images")
        part.suptitle(words, fontsize=9, x=0.01, ha="left")
        for axes, position in zip(part.subplots(1, CHOICES), range(CHOICES)):
            axes.set(xticks=[], yticks=[])
            if position >= len(index):
                axes.axis("off")
                continue
            axes.imshow(_thumbnail(findings.photos.pictures, int(judged.pipeline.task.item_row[index[position]])))
            right = index[position] == own
            axes.set_xlabel(f"{prob[position]:.0%}", fontsize=9, color=RIGHT if right else INK, labelpad=2)
            for spine in axes.spines.values():
                spine.set(color=RIGHT if right else "#dddddd", linewidth=3 if right else 0.8)
    plots.save_figure(figure, path)
    return path


def _draw_words(findings: Findings, ends: Sequence[Sequence[tuple[Judged, int]]], path: Path) -> Path:
    figure, axes = plots.subplots(figsize=(6, 0.5 * 2 * (SHOWN + 1)), layout="constrained")
    axes.axis("off")
    height = 1.0
    step = 1 / (2 * (SHOWN + 1))
    for title, rows in zip(("most certain", "least certain"), ends):
        axes.text(0, height, f"{title} captions", fontsize=11, va="top", weight="bold", color=INK)
        height -= step * 0.8
        for judged, query in rows:
            index, _, among, own = _asked(judged.pipeline, query)
            verdict = "found" if index[0] == own else "not found"
            colour = RIGHT if index[0] == own else ORANGE
            axes.text(0, height, f"{among:.1f} images\n{verdict}", fontsize=8.5, va="top", color=colour)
            axes.text(0.17, height, _words(findings, judged, query, ""), fontsize=8.5, va="top", color=INK)
            height -= step
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    plots.save_figure(figure, path)
    return path


def _words(findings: Findings, judged: Judged, query: int, before: str) -> str:
    """A caption in at most two lines. Dollar signs are words here, not formulas."""
    assert findings.photos.captions is not None
    caption = findings.photos.captions[int(judged.pipeline.task.query_row[query])]
    text, width = (f"{before}: {caption}", 86) if before else (caption, 72)
    return "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" ...")).replace("$", r"\$")


def _thumbnail(pictures: Sequence[Path] | None, row: int) -> Any:
    """A square picture of the file, its sides padded with white."""
    from PIL import ImageOps

    assert pictures is not None
    return np.asarray(ImageOps.pad(read_image(pictures[row]), (SIDE, SIDE), color="white"))
