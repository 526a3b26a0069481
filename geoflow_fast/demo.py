"""Pictures of the geometry: geodesics from noise to data and uniform samples on a sphere in three dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoflow_fast import geometry, plots


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
