"""Distributions on the unit sphere that are concentrated around a point: bumps and von Mises-Fisher distributions.

A bump is what the field v(x) = c (mu - <mu, x> x), followed for unit time, makes of the uniform distribution:
log p(y) = -log_area(d) - (d-1) log(cosh c - <mu, y> sinh c), the more concentrated around mu the larger the strength c.
A von Mises-Fisher distribution has the log-density kappa <mu, x> + log C_d(kappa), which is linear in x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.geometry import inner, log_area
from geoflow_fast.noise import sample_uniform

SHARPEST = 40.0
"""Largest strength of a bump: beyond it exp(-2 c) vanishes in float32."""


def log_bump(cosine: Tensor, c: Tensor | float, d: int) -> Tensor:
    """Log-density of a bump of strength `c` in R^d, at points whose cosine with its centre is `cosine`."""
    c = torch.as_tensor(c, dtype=cosine.dtype, device=cosine.device)
    # This is cosh c - cosine sinh c with the larger exponential factored out: computed directly, the difference would
    # lose its digits for sharp bumps. A cosine beyond 1 is due to rounding.
    along, strength = cosine.clamp(-1, 1) * c.sign(), c.abs()
    return -log_area(d) - (d - 1) * (strength + torch.log(((1 - along) + torch.exp(-2 * strength) * (1 + along)) / 2))


def sample_bump(centre: Tensor, c: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """Draws one point from the bump of strength `c` (float or [n]) around each row of `centre` [n, d].

    The samples are exact: the flow moves a uniform point along its great circle through mu, and divides the tangent of
    half its angle to mu by exp(c).
    """
    n, d = centre.shape
    start = sample_uniform(n, d, generator=generator, dtype=centre.dtype)
    cosine = inner(start, centre)
    sideways = start - cosine * centre
    sine = sideways.norm(dim=1, keepdim=True)
    strength = torch.as_tensor(c, dtype=centre.dtype, device=centre.device).reshape(-1, 1)
    half = torch.atan2(sine, cosine) / 2
    angle = 2 * torch.atan2(half.sin(), half.cos() * strength.exp())
    moved = angle.cos() * centre + angle.sin() * sideways / sine.clamp(min=torch.finfo(sine.dtype).tiny)
    return moved / moved.norm(dim=1, keepdim=True)


LEAST_ORDER = 32.0
"""The expansion below is exact to float64 for Bessel functions of at least this order; others use a recurrence."""

# Polynomials U_k(p) of Debye's uniform expansion, by powers of p (Abramowitz and Stegun 9.3.9).
_DEBYE = (
    {1: 3 / 24, 3: -5 / 24},
    {2: 81 / 1152, 4: -462 / 1152, 6: 385 / 1152},
    {3: 30375 / 414720, 5: -369603 / 414720, 7: 765765 / 414720, 9: -425425 / 414720},
    {
        4: 4465125 / 39813120,
        6: -94121676 / 39813120,
        8: 349922430 / 39813120,
        10: -446185740 / 39813120,
        12: 185910725 / 39813120,
    },
)


def log_bessel_ratio(order: float, x: Tensor) -> Tensor:
    """log(I_v(x) / x^v) of order v >= 0 for x >= 0, float64: smooth at x = 0, where it is -v log 2 - lgamma(v + 1).

    Debye's uniform expansion gives it for an order of at least `LEAST_ORDER`, and the recurrence
    I_{v-1} = (2v / x) I_v + I_{v+1}, which is stable, leads down from there.
    """
    x = x.double()
    square = x.square()
    above = max(0, math.ceil(LEAST_ORDER - order))
    v = order + above
    value, ratio = _debye(v, square), torch.exp(_debye(v + 1, square) - _debye(v, square))
    for _ in range(above):
        # With J_v = I_v / x^v: J_{v-1} = 2v J_v + x^2 J_{v+1}; `ratio` is J_{v+1} / J_v.
        growth = 2 * v + square * ratio
        value, ratio, v = value + growth.log(), 1 / growth, v - 1
    return value


def _debye(v: float, square: Tensor) -> Tensor:
    """log(I_v(x) / x^v) of a large order v, as a function of x^2."""
    root = torch.sqrt(1 + square / v**2)
    p = 1 / root
    series = torch.ones_like(p)
    for k, polynomial in enumerate(_DEBYE, 1):
        series = series + sum((weight * p**power for power, weight in polynomial.items()), torch.zeros_like(p)) / v**k
    leading = v * (root - torch.log1p(root) - math.log(v)) - 0.5 * math.log(2 * math.pi * v)
    return leading - 0.5 * root.log() + series.log()


def log_vmf_normalizer(kappa: Tensor, d: int) -> Tensor:
    """log C_d(kappa), float64, of the density C_d(kappa) exp(kappa <mu, x>) on the unit sphere of R^d."""
    return -d / 2 * math.log(2 * math.pi) - log_bessel_ratio(d / 2 - 1, kappa)


def log_vmf(cosine: Tensor, kappa: float, d: int) -> Tensor:
    """Log-density of the von Mises-Fisher distribution in R^d, at points whose cosine with its mean is `cosine`."""
    normalizer = log_vmf_normalizer(torch.tensor(kappa, dtype=torch.float64, device="cpu"), d)
    return kappa * cosine + float(normalizer)


def sample_vmf(mean: Tensor, kappa: float, generator: torch.Generator | None = None) -> Tensor:
    """Draws one point from the von Mises-Fisher distribution of concentration `kappa` > 0 around each row of `mean`
    [n, d].

    A bump of tanh c = peak is proposed, and accepted by the ratio of the densities, which is largest at the cosine
    `peak` (Ulrich, 1984). In any dimension at least two proposals of three are accepted.
    """
    n, d = mean.shape
    peak = 2 * kappa / (d - 1 + math.hypot(2 * kappa, d - 1))
    points, waiting = torch.empty_like(mean), torch.arange(n, device=mean.device)
    while len(waiting):
        centre = mean[waiting]
        proposed = sample_bump(centre, math.atanh(peak), generator)
        cosine = inner(proposed, centre).squeeze(-1)
        log_ratio = kappa * (cosine - peak) + (d - 1) * torch.log((1 - peak * cosine) / (1 - peak**2))
        chance = torch.rand(len(waiting), generator=generator, dtype=mean.dtype, device="cpu")
        accepted = chance.log() <= log_ratio
        points[waiting[accepted]] = proposed[accepted]
        waiting = waiting[~accepted]
    return points
