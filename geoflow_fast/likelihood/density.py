"""Log-densities by the reverse ODE and the epistemic score made of them (Sec. 4.2 and D of the paper).

log p(x_1) = log p_0(x_0) - integral of the divergence along the path that leads from x_1 at t = 1 back to x_0 at t = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.flow.solvers import Field
from geoflow_fast.geometry import check_rows
from geoflow_fast.likelihood.probes import STREAMS
from geoflow_fast.likelihood.reverse_ode import _check_pairs, _freedoms, _in_flow, density_estimates, draw_seed
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.runtime import checks

TYPICALITIES = ("density", "absolute")


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
    *,
    probe: str | None = None,
    redraw: bool = True,
    orthogonal: str | None = None,
    tangents: str = "separate",
    grid: str = "uniform",
    shared: bool = False,
    memory: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-density at the pairs (`image` [B, d_I], `text` [B, d_T]), unit rows: float64 [B], in nats.

    `direction="joint"`: log p(image, text); "i2t": log p(text | image); "t2i": log p(image | text). The ODE is solved
    from t=1 to t=0 in `n_steps` steps of `solver` ("euler", "midpoint", "rk4" or "ab2") on the time grid `grid`:
    "uniform", or with shorter steps near the noise ("early") or near the data ("late").

    `divergence="hutchinson"` estimates the divergence with the mean over `n_probes` random probes; "exact" needs one
    tangent per coordinate and is for small d. `probe`: "gaussian", of fixed norm in the tangent space; "aligned" (the
    default where applicable), which removes the noise along the direction in which the Jacobian acted most in earlier
    steps; or "rademacher", the paper's. `redraw`: draw new probes at every step, or keep them along the path.
    `orthogonal`, for Gaussian probes: orthogonal to those of earlier "steps" (the default; `n_probes` independent
    sets), to the other "probes" of the same step, or "none".

    `tangents`, for the joint direction: "separate" moves one stream at a time, which removes the Jacobian blocks
    between streams, the source of most of the noise; "combined" moves both, which costs less; "alternating" also moves
    both, but flips the text's sign at every other step, so that those blocks cancel between steps.

    `return_stderr` also returns the standard error [B] over the probes, of which there must be at least two. Probes
    depend on `generator` and the row, aligned ones on its path too; with `shared` they are the same for all rows, which
    makes differences between rows less noisy.

    A `GeoFlow` is evaluated in eval mode, as many rows at a time as fit into `memory` bytes; this does not change the
    result beyond rounding. With centring or principal components the density is that of the points in the flow's
    coordinates (`GeoFlow.to_flow`), not that of the embeddings.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    settings = DensitySettings(n_steps, n_probes, solver, divergence, probe, redraw, orthogonal, tangents, grid, shared)
    _check_stderr(settings, return_stderr)
    _check_pairs(image, text)
    estimates = density_estimates(field, image, text, (direction,), settings, draw_seed(generator, image), memory)[0]
    if not return_stderr:
        return estimates.mean(0)
    return estimates.mean(0), _stderr(estimates, settings, max(_freedoms(field, image, text, (direction,))))


@dataclass(frozen=True)
class Epistemic:
    """Log-densities of B pairs and the epistemic score, each float64 [B] in nats; joint = image + text + pmi."""

    joint: Tensor
    """log p(image, text)."""
    text_given_image: Tensor
    """log p(text | image)."""
    image_given_text: Tensor
    """log p(image | text)."""
    image: Tensor
    """log p(image) = joint - text_given_image, averaged over partners if there are any."""
    text: Tensor
    """log p(text) = joint - image_given_text, averaged likewise."""
    pmi: Tensor
    """Pointwise mutual information, joint - image - text."""
    score: Tensor
    """Epistemic score (Eq. 7): -image - text; with absolute typicality the sum of the distances from the typical
    values."""
    stderr: Tensor | None = None
    """Standard error of -image - text over the probes, if requested."""

    def typical(self) -> tuple[float, float]:
        """Means of -log p(image) and of -log p(text). Those of training pairs are the argument `typical` of
        `epistemic`."""
        return float(-self.image.mean()), float(-self.text.mean())


def epistemic(
    field: Field,
    image: Tensor,
    text: Tensor,
    n_steps: int = 10,
    n_probes: int = 1,
    solver: str = "midpoint",
    divergence: str = "hutchinson",
    generator: torch.Generator | None = None,
    return_stderr: bool = False,
    *,
    typicality: str = "density",
    typical: tuple[float, float] | None = None,
    image_partners: Tensor | None = None,
    text_partners: Tensor | None = None,
    probe: str | None = None,
    redraw: bool = True,
    orthogonal: str | None = None,
    tangents: str = "separate",
    grid: str = "uniform",
    memory: int | None = None,
) -> Epistemic:
    """Epistemic score and log-densities of the pairs (`image` [B, d_I], `text` [B, d_T]), unit rows.

    The joint and both conditional ODEs are solved as one batch with the same probes, aligned ones following the joint
    solve. The settings of the solves are those of `log_density`.

    `typicality="density"` scores -log p(image) - log p(text). "absolute" scores |-log p - typical|, summed over both
    modalities, because a density higher than that of training pairs is unusual too; `typical` is `Epistemic.typical()`
    of training pairs.

    A marginal is computed together with a partner, the other side of the pair, and with finitely many steps depends on
    it a little. `text_partners`, [M, d_T] for all rows or [B, M, d_T], average log p(image) over the pair's own text
    and M more, at the cost of two solves each; `image_partners` do so for log p(text). The probes of the m-th partner
    depend on generator, row and m.
    """
    settings = DensitySettings(n_steps, n_probes, solver, divergence, probe, redraw, orthogonal, tangents, grid)
    _check_stderr(settings, return_stderr)
    _check_typical(typicality, typical)
    _check_pairs(image, text)
    partners = [_partners_of(field, (image, text)[s], x, s) for s, x in enumerate((image_partners, text_partners))]
    seed = draw_seed(generator, image)
    estimates = density_estimates(field, image, text, DIRECTIONS, settings, seed, memory)
    joint, i2t, t2i = estimates
    marginals = [[joint - i2t], [joint - t2i]]
    for stream, rows in enumerate(partners):
        for m, partner in enumerate(rows):
            pair, way = ((image, partner), "i2t") if stream == 1 else ((partner, text), "t2i")
            joint, conditional = density_estimates(field, *pair, ("joint", way), settings, seed + m + 1, memory)
            marginals[1 - stream].append(joint - conditional)
    of_image, of_text = (torch.stack(found).mean(0) for found in marginals)
    freedom = max(_freedoms(field, image, text, DIRECTIONS))
    spread = _stderr(of_image + of_text, settings, freedom) if return_stderr else None
    return chain_rule(estimates, (of_image, of_text), typical, spread)


def chain_rule(
    estimates: Tensor,
    marginals: tuple[Tensor, Tensor] | None = None,
    typical: tuple[float, float] | None = None,
    stderr: Tensor | None = None,
) -> Epistemic:
    """The decomposition from estimates [3, K, B] of the `DIRECTIONS`; `marginals` of image and text, [K, B] each, are
    those that follow from them if none better are given."""
    joint, i2t, t2i = estimates.mean(1)
    image, text = (joint - i2t, joint - t2i) if marginals is None else (x.mean(0) for x in marginals)
    score = -image - text
    if typical is not None:
        score = (-image - typical[0]).abs() + (-text - typical[1]).abs()
    return Epistemic(joint, i2t, t2i, image, text, joint - image - text, score, stderr)


def suggest_steps(
    field: Field,
    image: Tensor,
    text: Tensor,
    tolerance: float = 0.1,
    direction: str = "joint",
    solver: str = "midpoint",
    *,
    grid: str = "uniform",
    divergence: str = "hutchinson",
    n_probes: int = 1,
    generator: torch.Generator | None = None,
    max_steps: int = 512,
    memory: int | None = None,
) -> int:
    """Number of steps at which doubling it changes the log-density of these pilot pairs by at most `tolerance` nats.

    The change is the mean over the pairs of |log p(n) - log p(2n)|. Both use the same probes, kept along the path, so
    that only the discretisation differs. About a hundred pairs are enough. If `max_steps` steps do not reach the
    tolerance, a ValueError is raised.
    """
    if not tolerance > 0 or checks.integer(max_steps, "max_steps", 1) < 2:
        raise ValueError(f"tolerance={tolerance} must be positive and max_steps={max_steps} at least 2")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    _check_pairs(image, text)
    seed = draw_seed(generator, image)
    steps, before, change = 2, None, math.inf
    while steps <= 2 * max_steps:
        settings = DensitySettings(steps, n_probes, solver, divergence, redraw=False, grid=grid)
        found = density_estimates(field, image, text, (direction,), settings, seed, memory)[0].mean(0)
        if before is not None:
            change = float((found - before).abs().mean())
            if change <= tolerance:
                return steps // 2
        steps, before = 2 * steps, found
    raise ValueError(f"doubling {steps // 4} steps of {solver} still moves the log-density by {change:.3g} nats")


def _partners_of(field: Field, own: Tensor, partners: Tensor | None, stream: int) -> tuple[Tensor, ...]:
    """The M partners [B, d] of the rows `own` [B, d] of a stream, given as [M, d] or [B, M, d], checked."""
    if partners is None:
        return ()
    name = f"{STREAMS[stream]}_partners"
    if not isinstance(partners, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(partners).__name__}")
    rows, width = own.shape
    if (
        partners.shape[-1:] != (width,)
        or partners.shape[-2:-1] in {(), (0,)}
        or partners.shape[:-2] not in {(), (rows,)}
    ):
        raise ValueError(f"{name} must be [M, {width}] or [{rows}, M, {width}], got {tuple(partners.shape)}")
    if partners.dtype != own.dtype or partners.device != own.device:
        raise ValueError(
            f"{name} is {partners.dtype} on {partners.device}, but {STREAMS[stream]} is {own.dtype} on {own.device}"
        )
    check_rows(partners, name)
    _in_flow(field, partners, stream, name)
    return partners.expand(rows, -1, -1).unbind(1)


def _check_typical(typicality: str, typical: tuple[float, float] | None) -> None:
    if typicality not in TYPICALITIES:
        raise ValueError(f"typicality must be one of {TYPICALITIES}, got {typicality!r}")
    if (typicality == "absolute") != (typical is not None):
        raise ValueError("typicality='absolute' and typical=(image, text) go together: see Epistemic.typical")
    if typical is not None and (len(typical) != 2 or not all(math.isfinite(value) for value in typical)):
        raise ValueError(f"typical must be two finite numbers, for image and text, got {typical!r}")


def _check_stderr(settings: DensitySettings, return_stderr: bool) -> None:
    if return_stderr and (settings.n_probes < 2 or settings.exact):
        raise ValueError("return_stderr needs divergence='hutchinson' and n_probes >= 2")


def epistemic_stderr(estimates: Tensor, settings: DensitySettings, field: Field, image: Tensor, text: Tensor) -> Tensor:
    """Standard error [B] of the epistemic score from estimates [3, K, B] of the `DIRECTIONS`."""
    joint, i2t, t2i = estimates
    return _stderr(2 * joint - i2t - t2i, settings, max(_freedoms(field, image, text, DIRECTIONS)))


def _stderr(estimates: Tensor, settings: DensitySettings, freedom: int) -> Tensor:
    """Standard error [B] of the mean of the estimates [K, B]."""
    return estimates.std(0) * math.sqrt(settings.correction(freedom) / settings.n_probes)
