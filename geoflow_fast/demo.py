"""What `geoflow demo` does: pictures of the geometry, and a flow trained on a world whose densities are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoflow_fast import geometry, plots
from geoflow_fast.data import EmbeddingPairs
from geoflow_fast.model import GeoFlow, GeoFlowConfig
from geoflow_fast.training import TrainConfig, train
from geoflow_fast.worlds import Agreement, ConceptWorld, agreement, densities

PAIRS = 60_000


def learn_concepts(out: Path, seed: int, steps: int | None = None) -> GeoFlow | None:
    """Trains a small flow on pairs of the concept world, in the folder `out`, where an interrupted run goes on.

    About two minutes on two cores. None if it was interrupted.
    """
    image, text, _ = ConceptWorld().sample(PAIRS, generator=torch.Generator().manual_seed(100 + seed))
    torch.manual_seed(seed)
    flow = GeoFlow(GeoFlowConfig.tiny())
    config = dataclasses.replace(TrainConfig.tiny(), seed=seed)
    if steps is not None:
        config = dataclasses.replace(config, steps=steps)
    report = train(flow, EmbeddingPairs.from_arrays(image, text), config, out=out)
    return flow if report.finished else None


def draw_densities(flow: GeoFlow, picture: Path) -> dict[str, Agreement]:
    """Draws learned against true log-densities of fresh pairs of the concept world, and says how well they agree."""
    found = densities(ConceptWorld(), flow)
    scores = agreement(found)
    figure, panels = plots.pyplot().subplots(2, 3, figsize=(12, 8), layout="constrained")
    titles = ("log p(image, text)", "log p(text | image)", "log p(image | text)", "log p(image)", "log p(text)", "PMI")
    for axes, title, (name, (estimate, truth)) in zip(panels.flat, titles, found.items()):
        axes.scatter(truth.numpy(), estimate.numpy(), s=5, alpha=0.4, color="#3b6fb6", linewidths=0)
        ends = [float(truth.min()), float(truth.max())]
        axes.plot(ends, ends, color="#e07b28", linewidth=1.5)
        axes.set(
            title=f"{title}: correlation {scores[name].correlation:.3f}", xlabel="true, nats", ylabel="learned, nats"
        )
    figure.suptitle("The flow's log-densities of 1,000 new pairs against the law that made them")
    plots.save_figure(figure, picture)
    return scores


def draw_sphere(out: Path, seed: int) -> Path:
    """Writes `sphere.png` into `out`: uniform samples on S^2, and geodesics that carry some of them to one cap."""
    generator = torch.Generator().manual_seed(seed)
    figure = plots.pyplot().figure(figsize=(11, 5.6))
    samples = geometry.sample_uniform(900, 3, generator=generator)
    axes = _sphere_axes(figure, 1, "Uniform samples on the sphere")
    _scatter(axes, samples, "#3b6fb6")
    axes = _sphere_axes(figure, 2, "Geodesics from noise (blue) to data (orange)")
    _geodesics(axes, samples[:28], generator)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=0.92, wspace=0)
    picture = out / "sphere.png"
    plots.save_figure(figure, picture)
    return picture


def _sphere_axes(figure: Any, position: int, title: str) -> Any:
    axes = figure.add_subplot(1, 2, position, projection="3d")
    axes.view_init(elev=22, azim=35)
    polar = torch.linspace(0, torch.pi, 25)
    around = torch.linspace(0, 2 * torch.pi, 49)
    x, y = torch.outer(polar.sin(), around.cos()), torch.outer(polar.sin(), around.sin())
    z = torch.outer(polar.cos(), torch.ones_like(around))
    axes.plot_wireframe(x.numpy(), y.numpy(), z.numpy(), color="#d8d8d8", linewidth=0.4)
    axes.set_proj_type("ortho")
    axes.set_box_aspect((1, 1, 1), zoom=1.55)
    axes.set_axis_off()
    axes.set_title(title)
    return axes


def _facing(points: Tensor) -> Tensor:
    """Which points lie on the half of the sphere that the camera of `_sphere_axes` sees."""
    elevation, azimuth = torch.deg2rad(torch.tensor([22.0, 35.0]))
    camera = torch.stack([elevation.cos() * azimuth.cos(), elevation.cos() * azimuth.sin(), elevation.sin()])
    return points @ camera > 0


def _scatter(axes: Any, points: Tensor, color: str, size: float = 7) -> None:
    near = _facing(points)
    for part, alpha in ((~near, 0.15), (near, 0.9)):
        axes.scatter(*points[part].T.numpy(), s=size, color=color, alpha=alpha, depthshade=False, linewidths=0)


def _geodesics(axes: Any, noise: Tensor, generator: torch.Generator) -> None:
    pole = torch.tensor([0.75, 0.55, 0.35]).expand_as(noise)
    data = geometry.normalize(pole + 0.22 * torch.randn(noise.shape, generator=generator))
    times = torch.linspace(0, 1, 60)
    paths = geometry.geodesic(noise[:, None], data[:, None], times)
    for path in paths:
        near = _facing(path)[:, None]
        for part, alpha in ((~near, 0.25), (near, 0.9)):
            visible = torch.where(part, path, torch.nan)
            axes.plot(*visible.T.numpy(), color="#777777", linewidth=1.0, alpha=alpha)
    _scatter(axes, noise, "#3b6fb6", 26)
    _scatter(axes, data, "#e07b28", 26)
