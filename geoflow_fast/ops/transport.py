"""A transport problem as its solvers receive it: checked, and with what rounding does to its plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.geometry import UNIT_TOLERANCE, capturing, check_rows
from geoflow_fast.geometry import eps as check_dtype
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.warn import warn_user

Factors = tuple[Tensor, Tensor, Tensor, Tensor]
Weights = tuple[float, float]

COSTS = ("arc", "chord")
STORAGES = {"float32": torch.float32, "float16": torch.float16}
LARGEST_EPS = 1e30
"""Far above any cost: larger ones would overflow where eps is multiplied."""
HALF_SPAN = 160.0
"""Largest (max C - min C) / eps of a matrix in float16, whose costs are rounded by up to a 4096th of their span: here
about a hundredth of the mass is misplaced."""
NAMES = ("image0", "text0", "image1", "text1")

# The marginal error that any solve is meant to reach, whatever its tol: beyond it there is no plan to speak of.
_PASSABLE = 1e-3
# Potentials of float32 are a good start for float64 as long as rounding does no more than this to the plan.
_COARSE = 0.1
# Roundings of a plan's entry and of its sums that do not grow with the costs.
_ROUNDINGS = 16


@dataclass(frozen=True)
class Problem:
    """A checked transport problem: a given cost matrix [n, m], or two pairs of point clouds."""

    cost: str
    matrix: Tensor | None
    noise: tuple[Tensor, Tensor] | None
    data: tuple[Tensor, Tensor] | None
    weights: Weights
    shape: tuple[int, int]
    """Rows (noise) and columns (data)."""
    anchor: Tensor
    """A tensor that tells the device."""

    def clouds(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Noise and data, (image, text) each; only where no matrix was given."""
        if self.noise is None or self.data is None:
            raise ValueError("this transport problem was given as a matrix")
        return self.noise, self.data

    def dense(self) -> Tensor:
        """The cost matrix in plain torch, [n, m], in the dtype of the input."""
        if self.matrix is not None:
            return self.matrix
        noise, data = self.clouds()
        return transport_cost_reference(*noise, *data, self.cost, self.weights)

    def flat(self) -> tuple[Any, ...]:
        """The problem as tensors and numbers, which is what an operation takes; `Problem.of` reverses it."""
        if self.matrix is not None:
            return self.matrix, None, None, None, self.shape[0], self.cost, *self.weights
        noise, data = self.clouds()
        return *data, *noise, self.shape[0], self.cost, *self.weights

    @classmethod
    def of(
        cls,
        first: Tensor,
        text1: Tensor | None,
        image0: Tensor | None,
        text0: Tensor | None,
        rows: int,
        cost: str,
        *weights: float,
    ) -> Problem:
        """The problem that `flat` took apart; `first` is the matrix or image1."""
        pair = weights[0], weights[1]
        if text1 is None or image0 is None or text0 is None:
            return cls(cost, first, None, None, pair, (rows, first.shape[1]), first)
        return cls(cost, None, (image0, text0), (first, text1), pair, (rows, first.shape[0]), first)


@dataclass(frozen=True)
class SinkhornSettings:
    """How far to solve: `eps` in units of the cost, `tol` as L1 marginal violation, and how to store the matrix."""

    eps: float
    tol: float
    max_iter: int
    storage: torch.dtype

    def flat(self) -> tuple[float, float, int, torch.dtype]:
        """The settings as an operation takes them."""
        return self.eps, self.tol, self.max_iter, self.storage


@dataclass(frozen=True)
class Stage:
    """How far float32 carries a solve: down to `eps` and `tol`. Only if `is_last` are these what the user asked for;
    `rounding` is then what its potentials add to the error of the plan."""

    eps: float
    tol: float
    rounding: float
    is_last: bool


@dataclass(frozen=True)
class Span:
    """Costs between `low` and `high`, and how well potentials of a precision can hold a plan of them.

    An entry of the plan is exp((f + g - C) / eps): what rounding does to f, g and C is divided by eps. If `is_centred`,
    float32 only has to hold the differences of costs to the middle one.
    """

    low: float
    high: float
    is_centred: bool

    def rounding(self, dtype: torch.dtype, eps: float) -> float:
        """A bound of the L1 marginal error that comes from rounding in this precision."""
        return float(torch.finfo(dtype).eps) * (self._reach(dtype) / eps + _ROUNDINGS)

    def least_eps(self, dtype: torch.dtype, tol: float) -> float:
        """The smallest eps at which rounding takes no more than half of `tol`."""
        return self._reach(dtype) / (tol / (2 * float(torch.finfo(dtype).eps)) - _ROUNDINGS)

    def check(self, settings: SinkhornSettings) -> None:
        """Raises a ValueError that names the smallest eps that works if no potentials hold the plan."""
        least = self.least_eps(torch.float64, max(settings.tol, _PASSABLE))
        if not settings.eps >= least:
            raise ValueError(
                f"eps={settings.eps:g} is too small for costs between {self.low:g} and {self.high:g}: float64 holds "
                f"their plan for eps of at least {_rounded_up(least)}"
            )
        if settings.storage != torch.float16:
            return
        if not self.high - self.low <= 2 * float(torch.finfo(torch.float16).max):
            raise ValueError(
                f"storage='float16' cannot hold costs between {self.low:g} and {self.high:g}: use 'float32'"
            )
        least = (self.high - self.low) / HALF_SPAN
        if settings.eps < least:
            raise ValueError(
                f"eps={settings.eps:g} is too small for storage='float16' and costs between {self.low:g} and "
                f"{self.high:g}: use 'float32', or an eps of at least {_rounded_up(least)}"
            )

    def stage(self, settings: SinkhornSettings) -> Stage:
        """How far to solve in float32, which is all the way at any usual eps."""
        least = self.least_eps(torch.float32, max(settings.tol, _COARSE))
        # What float16 does to the costs is past mending: the plan is that of the stored costs, whatever follows.
        eps = settings.eps if settings.storage == torch.float16 else max(settings.eps, least)
        rounding = self.rounding(torch.float32, eps)
        is_last = settings.storage == torch.float16 or (eps == settings.eps and rounding <= settings.tol / 2)
        # The violation that float32 sees falls below what rounding does to the plan, but not to zero.
        tol = max(settings.tol - rounding, 0.0) if is_last else max(settings.tol, rounding / 4)
        return Stage(eps, tol, rounding, is_last)

    def _reach(self, dtype: torch.dtype) -> float:
        """The largest number that is rounded."""
        span = self.high - self.low
        return span if self.is_centred and dtype == torch.float32 else max(abs(self.low), abs(self.high), span)


def _rounded_up(x: float) -> str:
    """Two digits of a number that is no smaller than `x`."""
    return next(text for text in (f"{x:.2g}", f"{1.06 * x:.2g}") if float(text) >= x)


def make_settings(eps: float, tol: float, max_iter: int, storage: str) -> SinkhornSettings:
    """Checks the scalar arguments."""
    eps, tol = (checks.positive(x, name, LARGEST_EPS) for name, x in (("eps", eps), ("tol", tol)))
    max_iter = checks.integer(max_iter, "max_iter", 1, 2**31 - 1)
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    return SinkhornSettings(eps, tol, max_iter, STORAGES[storage])


def make_problem(cost: Tensor | str, factors: Factors | None, weights: Weights = (1.0, 1.0)) -> Problem:
    """Checks a cost matrix, or the name of a cost and the point clouds it is between."""
    if isinstance(cost, Tensor):
        if factors is not None:
            raise ValueError("give either a cost matrix or factors, not both")
        matrix = _checked_matrix(cost)
        return Problem("given", matrix, None, None, (1.0, 1.0), (len(matrix), matrix.shape[1]), matrix)
    if cost not in COSTS:
        raise ValueError(f"cost must be a matrix or one of {', '.join(COSTS)}, got {cost!r}")
    if factors is None or len(factors) != 4:
        raise ValueError(f"cost={cost!r} needs factors=(image0, text0, image1, text1)")
    if len(weights) != 2 or any(not (math.isfinite(w) and w >= 0) for w in weights) or sum(weights) == 0:
        raise ValueError(f"weights must be two finite numbers >= 0, not both 0, got {weights}")
    _check_clouds(factors)
    image0, text0, image1, text1 = factors
    noise = image0.detach(), text0.detach()
    data = image1.detach(), text1.detach()
    shape = image0.shape[0], image1.shape[0]
    return Problem(cost, None, noise, data, (float(weights[0]), float(weights[1])), shape, data[0])


def _checked_matrix(cost: Tensor) -> Tensor:
    check_dtype(checks.with_values(cost, "cost").dtype)
    if cost.dim() != 2 or cost.numel() == 0:
        raise ValueError(f"cost must be a matrix with at least one row and one column, got shape {tuple(cost.shape)}")
    cost = cost.detach()
    if capturing(cost):
        return cost
    low, high = torch.aminmax(cost)
    if not max(float(high) - float(low), abs(float(low)), abs(float(high))) <= torch.finfo(torch.float32).max:
        bad = ~torch.isfinite(cost)
        where = (
            f"is not finite at {tuple(bad.nonzero()[0].tolist())}"
            if bool(bad.any())
            else "is beyond the range of float32"
        )
        raise ValueError(f"cost {where}")
    return cost


def _check_clouds(factors: Factors) -> None:
    """Types, devices, shapes and rows of the four clouds."""
    for name, x in zip(NAMES, factors):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    first = factors[2]
    for name, x, twin, partner in zip(NAMES, factors, factors[2:] + factors[:2], (0, 0, 2, 2)):
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device}, but image1 is on {first.device}")
        check_dtype(x.dtype)
        if x.dtype != first.dtype:
            raise TypeError(f"{name} is {x.dtype}, but image1 is {first.dtype}")
        if len(x.shape) != 2 or x.shape[0] == 0:
            raise ValueError(f"{name} must be [rows, width] with at least one row, got {tuple(x.shape)}")
        if len(twin.shape) == 2 and x.shape[1] != twin.shape[1]:
            raise ValueError(f"{name} has width {x.shape[1]}, but its twin has {twin.shape[1]}")
        if x.shape[0] != factors[partner].shape[0]:
            raise ValueError(f"{name} has {x.shape[0]} rows, but {NAMES[partner]} has {factors[partner].shape[0]}")
    if first.is_cuda and not capturing(first) and _are_unit(factors):
        return
    for name, x in zip(NAMES, factors):
        check_rows(x, name)


def _are_unit(clouds: Factors) -> bool:
    """Whether `check_rows` has nothing to say about any of the clouds: a GPU is waited for once, not for each."""
    norms = torch.cat([torch.linalg.vector_norm(x.detach(), dim=1) for x in clouds])
    return bool(((norms - 1).abs() <= UNIT_TOLERANCE).all())


def warn_unconverged(iterations: int, error: float, settings: SinkhornSettings) -> None:
    """Warns of an unfinished solve."""
    warn_user(
        f"sinkhorn stopped after {iterations} iterations with marginal error {error:.3g} > tol={settings.tol:g}; "
        "raise max_iter, eps or tol",
        RuntimeWarning,
    )


def transport_cost_reference(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, cost: str, weights: Weights
) -> Tensor:
    """Cost of moving noise row i to data row j, [n, m]: a weighted sum over the two spheres.

    "arc" is the arc length acos<x, y>, "chord" the squared chord |x - y|^2 = 2 - 2 <x, y> of unit rows.
    """
    total = torch.zeros(image0.shape[0], image1.shape[0], dtype=image0.dtype, device=image0.device)
    for noise, data, weight in ((image0, image1, weights[0]), (text0, text1, weights[1])):
        cosine = (noise @ data.T).clamp(-1, 1)
        total += weight * (cosine.acos() if cost == "arc" else 2 - 2 * cosine)
    return total
