"""The pictures of the demo's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.demo.clip_world import EXACT, LADDER, SOFTMAX
from geoflow_fast.demo.flows import sphere_centres
from geoflow_fast.demo.study import ENTROPY, IMAGE_DENSITY, RERANKER, SCORE, TRUTH, DirectionOutcome, Outcome
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.figures import DIRECTION_TITLES
from geoflow_fast.evaluation.metrics import reliability, retrieval_calibration, selective_accuracy
from geoflow_fast.runtime import plots
from geoflow_fast.worlds import ConceptWorld

FILES = {
    "spheres": "flow_on_spheres.png",
    "calibration": "calibration.png",
    "selective": "selective_accuracy.png",
    "certain": "certain_and_uncertain.png",
    "unseen": "unseen.png",
    "densities": "densities.png",
    "clip": "clip_world.png",
}
"""The files of the pictures, by the names that the page's template has for them."""

BLUE, ORANGE, GREEN, PURPLE, GREY, PALE = "#3b6fb6", "#e07b28", "#3f9b6c", "#8e5ea8", "#6f7680", "#c9ced6"
GROUPS = (BLUE, ORANGE, GREEN, PURPLE, "#c44e52", "#4aa8b8", "#b59a2d", "#7f7f7f")
VAGUENESS = ("specific", "middling", "vague")
DENSITY_TITLES = {
    "joint": "log p(image, text)",
    "text|image": "log p(text | image)",
    "image|text": "log p(image | text)",
    "image": "log p(image)",
    "text": "log p(text)",
    "pmi": "pointwise mutual information",
}


def draw_all(outcome: Outcome, world: ConceptWorld, out: Path) -> None:
    """Draws all pictures of the measurements, as PNG files in `out`."""
    draw_calibration(outcome, out / FILES["calibration"])
    draw_selective(outcome, out / FILES["selective"])
    draw_densities(outcome, out / FILES["densities"])
    draw_unseen(outcome, out / FILES["unseen"])
    draw_certain(outcome, world, out / FILES["certain"])
    draw_clip(outcome, out / FILES["clip"])


def _panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    figure, panels = plots.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options
    )
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, panels


def draw_calibration(outcome: Outcome, picture: Path) -> None:
    """Draws recall in ten bins of the uncertainty; below, stated probabilities against shares of right answers."""
    figure, panels = _panels(2, 2, 10, 7.6, sharey="row")
    for column, part in enumerate(outcome.by_direction.values()):
        axes = panels[0, column]
        tenths = range(1, 11)
        for name, colour, marker in ((TRUTH, PALE, "s"), (RERANKER, ORANGE, "D"), (ENTROPY, BLUE, "o")):
            calibration = retrieval_calibration(part.uncertainty[name], part.correct)
            label = f"{name}, AUROC {calibration.auroc:.3f}"
            axes.plot(tenths, calibration.recall, color=colour, marker=marker, markersize=5, label=label)
        axes.axhline(part.plain_recall, color=GREY, linewidth=0.8, linestyle=":")
        title = DIRECTION_TITLES[part.direction]
        axes.set(title=title, xlabel="tenth of the queries, most certain first", ylim=(0, 1.03))
        axes.set_xticks(list(tenths))
        axes.legend(frameon=False, fontsize=8.5, loc="upper right")
        _draw_reliability(panels[1, column], part)
    panels[0, 0].set_ylabel("share of right answers (Recall@1)")
    panels[1, 0].set_ylabel("share that was right")
    plots.save_figure(figure, picture)


def _draw_reliability(axes: Any, part: DirectionOutcome) -> None:
    bins = reliability(part.reranked.p_answer, part.correct)
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    axes.plot(bins.confidence, bins.accuracy, color=ORANGE, marker="D", markersize=5)
    for x, y, count in zip(bins.confidence, bins.accuracy, bins.count):
        if count:
            axes.annotate(f"{count}", (x, y), xytext=(4, -11), textcoords="offset points", fontsize=7.5, color=GREY)
    title = f"calibration error {part.calibration_error:.3f} (small numbers: queries)"
    axes.set(xlabel="re-ranker's probability that the answer is right", xlim=(-0.02, 1.04), ylim=(-0.09, 1.05))
    axes.set_title(title, fontsize=10, color=GREY)


def draw_selective(outcome: Outcome, picture: Path) -> None:
    """Draws the accuracy when only the most certain queries are answered."""
    figure, panels = _panels(1, 2, 10, 4.3, sharey=True)
    coverage = [k / 50 for k in range(5, 51)]
    for axes, part in zip(panels.flat, outcome.by_direction.values()):
        curves = {TRUTH: (PALE, "-", 3.0), ENTROPY: (BLUE, "-", 2.0), RERANKER: (ORANGE, "-", 2.0)}
        training_free = [name for name in part.uncertainty if name not in curves]
        styles = curves | {
            name: (GREY, style, 1.2) for name, style in zip(training_free, ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1))))
        }
        for name, (colour, style, width) in styles.items():
            curve = selective_accuracy(part.uncertainty[name], part.correct, coverage)
            axes.plot(curve.coverage, curve.accuracy, color=colour, linestyle=style, linewidth=width, label=name)
        axes.set(title=DIRECTION_TITLES[part.direction], xlabel="share of the queries that are answered")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        axes.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    panels[0, 0].set_ylabel("share of right answers")
    panels[0, 1].legend(frameon=False, fontsize=8.5)
    plots.save_figure(figure, picture)


def draw_densities(outcome: Outcome, picture: Path) -> None:
    """Draws learned against true log-densities of new pairs."""
    figure, panels = _panels(2, 3, 11, 7.2)
    for axes, (name, (estimate, truth)) in zip(panels.flat, outcome.densities.items()):
        axes.scatter(truth.numpy(), estimate.numpy(), s=6, alpha=0.35, color=BLUE, linewidths=0)
        ends = [float(truth.min()), float(truth.max())]
        axes.plot(ends, ends, color=ORANGE, linewidth=1.5)
        axes.set_title(f"{DENSITY_TITLES[name]}\ncorrelation {outcome.agreement[name].correlation:.3f}", fontsize=11)
        axes.set(xlabel="true, nats", ylabel="learned, nats")
    plots.save_figure(figure, picture)


def draw_unseen(outcome: Outcome, picture: Path) -> None:
    """Draws how surprised the flow is at known concepts, at siblings of them, and at a group it has never seen."""
    figure, panels = _panels(1, 2, 10, 3.9)
    colours = {"known": BLUE, "near": GREEN, "far": ORANGE}
    words = {"known": "known concepts", "near": "unseen, in a known group", "far": "unseen group"}
    for axes, name in zip(panels.flat, (SCORE, IMAGE_DENSITY)):
        scores = outcome.unseen.scores[name]
        every = torch.cat(list(scores.values()))
        low, high = float(every.quantile(0.002)), float(every.quantile(0.998))
        for kind, score in scores.items():
            auroc = "" if kind == "known" else f", AUROC {outcome.unseen.auroc(name, kind):.2f}"
            shape = {"bins": 40, "range": (low, high), "density": True}
            axes.hist(score.numpy(), **shape, color=colours[kind], alpha=0.25)
            axes.hist(score.numpy(), **shape, color=colours[kind], histtype="step", label=words[kind] + auroc)
        axes.set(title=name.removeprefix("flow: "), xlabel="nats; further right is more surprising", yticks=[])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.28)
        axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    plots.save_figure(figure, picture)


def draw_certain(outcome: Outcome, world: ConceptWorld, picture: Path, shown: int = 3, items: int = 8) -> None:
    """Draws the probabilities of the likeliest images of the most and the least certain captions, beside the true
    ones."""
    part = outcome.by_direction[Direction.T2I]
    order = part.reranked.entropy.argsort()
    figure, panels = _panels(shown, 2, 10.5, 2.7 * shown, sharex=True)
    for column, (words, queries) in enumerate((("most", order[:shown]), ("least", order.flip(0)[:shown]))):
        for axes, query in zip(panels[:, column], queries.tolist()):
            index = part.reranked.index[query, :items]
            learned, truth = part.reranked.prob[query, :items], part.truth[query, index]
            concept = outcome.concept[index].tolist()
            colours = [GROUPS[k // world.PER_GROUP] for k in concept]
            height = torch.arange(items, device="cpu").numpy()
            axes.barh(height - 0.19, learned.numpy(), 0.36, color=colours)
            axes.barh(height + 0.19, truth.numpy(), 0.36, color="white", edgecolor=colours, hatch="////", linewidth=0.8)
            labels = [f"{_name(world, k)}{'  ★' if i == query else ''}" for k, i in zip(concept, index.tolist())]
            axes.set_yticks(height, labels, fontsize=8.5)
            axes.invert_yaxis()
            own = int(outcome.concept[query])
            level = VAGUENESS[int(world.level[own])]
            entropy = f"H = {float(part.reranked.entropy[query]):.2f} nats"
            title = f"{words} certain: a {level} caption of {_name(world, own)}, {entropy}"
            axes.set_title(title, fontsize=10, loc="left")
    for axes in panels[-1]:
        axes.set(xlabel="probability that this image is meant", xlim=(0, 1.02))
    plots.save_figure(figure, picture)


def draw_clip(outcome: Outcome, picture: Path) -> None:
    """Draws the ladder's probabilities against the exact ones in the world as wide as CLIP; below, the share of wrong
    answers over the share answered, with queries whose item is missing."""
    figure, panels = _panels(2, 2, 10, 8, sharey="row")
    coverage = [k / 50 for k in range(5, 51)]
    for column, search in enumerate(outcome.clip.values()):
        axes = panels[0, column]
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
        for right, colour, words in ((True, BLUE, "right"), (False, ORANGE, "wrong")):
            shown = search.there & (search.correct == right)
            points = (search.p_answer[method][shown].numpy() for method in (EXACT, LADDER))
            axes.scatter(*points, s=12, alpha=0.5, color=colour, linewidths=0, label=words)
        axes.set(title=DIRECTION_TITLES[search.direction], xlabel="exact probability that the answer is right")
        axes.legend(frameon=False, fontsize=8.5, loc="upper left")
        below = panels[1, column]
        for method, colour, style in ((EXACT, GREY, "-"), (LADDER, ORANGE, "-"), (SOFTMAX, GREY, "--")):
            curve = search.risk(method, coverage)
            below.plot(curve.coverage, 1 - curve.accuracy, color=colour, linestyle=style, linewidth=2, label=method)
        below.set(xlabel="share of the queries that are answered", ylim=(0, None))
        for axis in (below.xaxis, below.yaxis):
            axis.set_major_formatter(lambda x, _: f"{x:.0%}")
    panels[0, 0].set_ylabel("stated probability: cosine, hubs and head")
    panels[1, 0].set_ylabel("share of wrong answers")
    panels[1, 1].legend(frameon=False, fontsize=8.5, loc="lower right")
    plots.save_figure(figure, picture)


def _name(world: ConceptWorld, concept: int) -> str:
    """The letter of the concept's group and its number within the group."""
    return f"{'ABCDEFGH'[concept // world.PER_GROUP]}{concept % world.PER_GROUP + 1}"


CAMERA = (24.0, 32.0)
"""Elevation and azimuth of the view of the two spheres, in degrees."""
TIMES = (0.0, 0.4, 0.7, 1.0)
TRAIL = 0.12
"""Length in time of the part of a path that is drawn behind a point."""


def draw_spheres(image: Tensor, text: Tensor, picture: Path) -> None:
    """Draws points [stops, n, 3] on two spheres at several times, coloured by where the first of each pair ends."""
    centres = sphere_centres().float()
    ends = (image[-1] @ centres.T).argmax(1)
    colours = [GROUPS[k] for k in ends.tolist()]
    figure = plots.new_figure(figsize=(3.0 * len(TIMES), 6.3))
    for row, paths in enumerate((image, text)):
        for column, time in enumerate(TIMES):
            axes = figure.add_subplot(2, len(TIMES), row * len(TIMES) + column + 1, projection="3d")
            _sphere(axes)
            stop = round(time * (len(paths) - 1))
            first = max(0, round((time - TRAIL) * (len(paths) - 1)))
            _trails(axes, paths[first : stop + 1], colours)
            _points(axes, paths[stop], colours)
            if row == 0:
                axes.set_title({0.0: "t = 0: noise", 1.0: "t = 1: data"}.get(time, f"t = {time}"), fontsize=12, y=0.98)
            if column == 0:
                axes.text2D(
                    -0.02,
                    0.5,
                    ("images", "texts")[row],
                    transform=axes.transAxes,
                    fontsize=12,
                    rotation=90,
                    va="center",
                )
    figure.subplots_adjust(left=0.02, right=1, bottom=0, top=0.95, wspace=0, hspace=0)
    plots.save_figure(figure, picture)


def _sphere(axes: Any) -> None:
    axes.view_init(*CAMERA)
    polar, around = (
        torch.linspace(0, end, n, dtype=torch.float32, device="cpu") for end, n in ((torch.pi, 13), (2 * torch.pi, 25))
    )
    x, y = torch.outer(polar.sin(), around.cos()), torch.outer(polar.sin(), around.sin())
    z = torch.outer(polar.cos(), torch.ones_like(around))
    axes.plot_wireframe(x.numpy(), y.numpy(), z.numpy(), color="#dcdfe4", linewidth=0.4)
    axes.set_proj_type("ortho")
    axes.set_box_aspect((1, 1, 1), zoom=1.5)
    axes.set_axis_off()


def _facing(points: Tensor) -> Tensor:
    """Which points lie on the half of the sphere that the camera sees."""
    elevation, azimuth = torch.deg2rad(torch.tensor(CAMERA, dtype=torch.float32, device="cpu"))
    camera = torch.stack([elevation.cos() * azimuth.cos(), elevation.cos() * azimuth.sin(), elevation.sin()])
    return points @ camera > 0


def _points(axes: Any, points: Tensor, colours: list[str]) -> None:
    near = _facing(points)
    for part, alpha in ((~near, 0.12), (near, 0.85)):
        chosen = [colour for colour, here in zip(colours, part.tolist()) if here]
        axes.scatter(*points[part].T.numpy(), s=9, color=chosen, alpha=alpha, depthshade=False, linewidths=0)


def _trails(axes: Any, paths: Tensor, colours: list[str]) -> None:
    """The last stretch of each path, where the camera sees it."""
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    if len(paths) < 2:
        return
    pieces = torch.stack((paths[:-1], paths[1:]), dim=2)  # [stretches, n, 2, 3]
    seen = _facing(pieces).all(-1)
    shades = [colour for row in seen.tolist() for colour, here in zip(colours, row) if here]
    axes.add_collection3d(Line3DCollection(pieces[seen].numpy(), colors=shades, linewidths=0.7, alpha=0.45))
