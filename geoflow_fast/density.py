"""Log-densities by the reverse ODE: log p(x_1) = log p_0(x_0) - integral of the divergence along the path."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.geometry import DIRECTIONS, check_rows, dot, log_area, project_tangent
from geoflow_fast.integrate import Field, Points, Streams, eval_mode, geometry_of, integrate, time_grid

DIVERGENCES = ("hutchinson", "exact")
STREAMS = ("image", "text")
# Streams that move, by direction.
GENERATED = {"joint": (0, 1), "i2t": (1,), "t2i": (0,)}


def log_density(
    field: Field,
    image: Tensor,
    text: Tensor,
    direction: str = "joint",
    n_steps: int = 10,
    n_probes: int = 1,
    solver: str = "midpoint",
    divergence: str = "hutchinson",
    generator: torch.Generator | None = None,
    return_stderr: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-density of the generated streams at the pairs (`image` [B, d_I], `text` [B, d_T]): float64 [B], in nats.

    "joint": log p(image, text); "i2t": log p(text | image); "t2i": log p(image | text). The path is followed from t=1
    to t=0 in `n_steps` steps of `solver`. `divergence="hutchinson"` draws `n_probes` probes anew at every step, one
    tangent per stream, so that the Jacobian blocks between streams do not enter; "exact" costs d evaluations and is for
    small d. `return_stderr` adds the standard error of the estimate [B] over the probes (at least two). A network is
    evaluated in eval mode and left in its own. With centring or principal components the density is that of the points
    in the flow's coordinates (`GeoFlow.to_flow`), not of the embeddings themselves.
    """
    _check(image, text, direction, n_steps, n_probes, divergence, return_stderr)
    point = getattr(field, "to_flow", lambda *pair: pair)(image, text)
    geometry = geometry_of(field)
    probes = n_probes if divergence == "hutchinson" else 1
    integral = torch.zeros(probes, len(image), dtype=torch.float64, device=image.device)

    def rate(at: Points, t: float, weight: float) -> Points:
        nonlocal integral
        if weight == 0:
            with torch.no_grad():
                return field.velocity(at[0], at[1], t, direction)
        velocity, trace = _divergence(field, (at[0], at[1]), t, direction, divergence, n_probes, generator, geometry)
        integral = integral + weight * trace
        return velocity

    with eval_mode(field):
        start = integrate(rate, point, time_grid(n_steps, reverse=True), solver=solver, geometry=geometry)
    base = sum(_log_base(start[stream], geometry) for stream in GENERATED[direction])
    estimates = base + integral
    if not return_stderr:
        return estimates.mean(0)
    return estimates.mean(0), estimates.std(0) / math.sqrt(probes)


def _check(
    image: Tensor, text: Tensor, direction: str, n_steps: int, n_probes: int, divergence: str, return_stderr: bool
) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence must be one of {DIVERGENCES}, got {divergence!r}")
    if n_steps < 1 or n_probes < 1:
        raise ValueError(f"n_steps={n_steps} and n_probes={n_probes} must be at least 1")
    if return_stderr and (n_probes < 2 or divergence != "hutchinson"):
        raise ValueError("return_stderr needs divergence='hutchinson' and n_probes >= 2")
    if image.dim() != 2 or text.dim() != 2 or len(image) != len(text):
        raise ValueError(
            f"image and text must be [B, d] with equal B, got {tuple(image.shape)} and {tuple(text.shape)}"
        )
    check_rows(image, "image")
    check_rows(text, "text")


def _log_base(x: Tensor, geometry: str) -> Tensor:
    """Log-density [B] of the base law at `x`: uniform on the sphere, or standard normal."""
    d = x.shape[1]
    if geometry == "sphere":
        return torch.full((len(x),), -log_area(d), dtype=torch.float64, device=x.device)
    return -0.5 * x.double().square().sum(1) - d / 2 * math.log(2 * math.pi)


def _divergence(
    field: Field,
    point: Streams,
    t: float,
    direction: str,
    divergence: str,
    n_probes: int,
    generator: torch.Generator | None,
    geometry: str,
) -> tuple[Streams, Tensor]:
    """Velocities at `point` and the divergence, one estimate per probe: [K, B] float64."""
    with torch.enable_grad():
        inputs = tuple(x.detach().requires_grad_() for x in point)
        velocity = field.velocity(inputs[0], inputs[1], t, direction)
        total = torch.zeros(1, len(inputs[0]), dtype=torch.float64, device=inputs[0].device)
        for stream in GENERATED[direction]:
            x, v = inputs[stream], velocity[stream]
            if not v.requires_grad:
                if bool(v.any()):
                    raise ValueError(f"the {STREAMS[stream]} velocity must be differentiable in the points")
                continue  # a stream that stands still has no divergence
            if divergence == "exact":
                total = total + _trace(x, v, geometry)
            else:
                probes = [_probe(x.detach(), geometry, generator) for _ in range(n_probes)]
                total = total + torch.stack([_quadratic_form(x, v, probe) for probe in probes])
    return (velocity[0].detach(), velocity[1].detach()), total


def _probe(x: Tensor, geometry: str, generator: torch.Generator | None) -> Tensor:
    """Gaussian probe; on the sphere tangent at `x` and of norm sqrt(d - 1): exact on the trace's isotropic part."""
    e = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    if geometry != "sphere":
        return e
    return torch.nn.functional.normalize(project_tangent(x, e), dim=-1) * math.sqrt(x.shape[1] - 1)


def _quadratic_form(x: Tensor, v: Tensor, probe: Tensor) -> Tensor:
    """e^T (dv/dx) e per row: [B] float64."""
    (pulled,) = torch.autograd.grad(v, x, probe, retain_graph=True, materialize_grads=True)
    return dot(pulled.double(), probe.double()).squeeze(-1)


def _trace(x: Tensor, v: Tensor, geometry: str) -> Tensor:
    """Trace of dv/dx, on the sphere of its tangent part tr(J) - x^T J x: [B] float64."""
    trace = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for column in range(x.shape[1]):
        (row,) = torch.autograd.grad(v[:, column].sum(), x, retain_graph=True, materialize_grads=True)
        trace = trace + row[:, column].double()
    return trace - _quadratic_form(x, v, x.detach()) if geometry == "sphere" else trace
