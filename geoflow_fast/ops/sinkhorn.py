"""Entropic optimal transport with uniform marginals between given costs, in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.geometry import capturing
from geoflow_fast.geometry import eps as check_dtype
from geoflow_fast.ops import dispatch, extension, transport
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.warn import warn_user

LARGEST_EPS = 1e35
"""Larger ones would overflow where eps is multiplied."""
# Roundings of a plan's entry and of its sums that do not grow with the costs.
_ROUNDINGS = 16
# The most of a tolerance that rounding may take: what iterations see of it falls below a quarter, but not to zero.
_SHARE = 0.8
# A range that keeps 1 / eps finite where all costs are equal.
_LEAST_REACH = 1e-30

Solver = Callable[[Tensor, float, float, float, float, int], tuple[Tensor, Tensor, int, float]]


@dataclass(frozen=True)
class SinkhornResult:
    """An entropic transport plan P_ij = exp((f_i + g_j - cost_ij) / eps) with uniform marginals, given by its
    potentials `f` [n] and `g` [m], which are float64.

    `marginal_error` is an upper bound of the L1 violation of the row sums of P; it consists of the violation of the
    column sums before the last column update, which can only reduce it (csrc/sinkhorn.h), and a bound of what rounding
    does, which also bounds the violation of the column sums.
    """

    cost: Tensor
    eps: float
    f: Tensor
    g: Tensor
    iterations: int
    marginal_error: float
    converged: bool

    @property
    def plan(self) -> Tensor:
        """P [n, m], in the dtype of the cost: what `ot.sinkhorn` of POT returns."""
        return ((self.f.unsqueeze(1) + self.g - self.cost) / self.eps).exp().to(self.cost.dtype)

    @property
    def transport_cost(self) -> float:
        """sum_ij P_ij cost_ij."""
        return float((self.plan.double() * self.cost).sum())


def sinkhorn(
    cost: Tensor, eps: float = 0.05, *, tol: float = 1e-3, max_iter: int = 1000, backend: str = "auto"
) -> SinkhornResult:
    """Solves entropic optimal transport with uniform marginals for the matrix `cost` [n, m]: mass moves from rows to
    columns. `eps` is the regularisation, in units of the cost.

    The solver stops once the L1 violation of a marginal is at most `tol`; if it reaches `max_iter` first, `converged`
    is false and a RuntimeWarning gives the error reached. The CPU and CUDA backends work in float32 for any input and
    store one n x m matrix and O(n + m) more; `backend="reference"` works in the dtype of the input. Where eps is so
    small beside the range of the costs that the potentials cannot hold the plan to `tol` (below 1.5e-4 of the range
    for the default `tol` in float32), a ValueError names the smallest eps that works.
    """
    eps, tol, max_iter = check_limits(eps, tol, max_iter)
    check_dtype(checks.with_values(cost, "cost").dtype)
    if cost.dim() != 2 or cost.numel() == 0:
        raise ValueError(f"cost must be a matrix with at least one row and one column, got shape {tuple(cost.shape)}")
    cost = cost.detach()
    f, g, report = _operation(cost, eps, tol, max_iter, str(backend))
    if capturing(report):
        iterations, error, converged = report.unbind()
        return SinkhornResult(cost, eps, f, g, iterations.long(), error, converged.bool())
    iterations, error, converged = report.tolist()
    return SinkhornResult(cost, eps, f, g, int(iterations), error, bool(converged))


def check_limits(eps: float, tol: float, max_iter: int) -> tuple[float, float, int]:
    """Checks the scalar arguments of a solve."""
    eps, tol = (checks.positive(x, name, LARGEST_EPS) for name, x in (("eps", eps), ("tol", tol)))
    return eps, tol, checks.integer(max_iter, "max_iter", 1, 2**31 - 1)


def rounding_of(
    low: float, high: float, reach: float, eps: float, tol: float, dtype: torch.dtype, name: str = "eps"
) -> float:
    """A bound of the L1 marginal error that comes from rounding in this precision, of costs in a range of which numbers
    up to `reach` are rounded: an entry of the plan is exp((f + g - C) / eps), so what rounding does to f, g and C is
    divided by eps. A ValueError names the smallest eps, or the smallest `tol`, if it leaves too little of `tol`."""
    unit = float(torch.finfo(dtype).eps)
    rounding = unit * (reach / eps + _ROUNDINGS)
    if rounding <= _SHARE * tol:
        return rounding
    kind = str(dtype).removeprefix("torch.")
    left = _SHARE * tol / unit - _ROUNDINGS
    if left <= 0:
        raise ValueError(
            f"tol={tol:g} is too small: {kind} resolves at least {_rounded_up(2 * _ROUNDINGS * unit / _SHARE)}"
        )
    raise ValueError(
        f"{name}={eps:g} is too small for costs between {low:g} and {high:g}: to tol={tol:g}, {kind} holds their plan "
        f"for {name} of at least {_rounded_up(reach / left)}"
    )


def _rounded_up(x: float) -> str:
    """Two digits of a number that is no smaller than `x`."""
    return next(text for text in (f"{x:.2g}", f"{1.06 * x:.2g}") if float(text) >= x)


def warn_unconverged(iterations: int, error: float, tol: float) -> None:
    """Warns of an unfinished solve."""
    warn_user(
        f"sinkhorn stopped after {iterations} iterations with marginal error {error:.3g} > tol={tol:g}; "
        "raise max_iter, eps or tol",
        RuntimeWarning,
    )


def sinkhorn_reference(cost: Tensor, eps: float, tol: float, max_iter: int) -> tuple[Tensor, Tensor, int, float]:
    """Potentials f [n], g [m] of the plan P = exp((f + g - C) / eps) with uniform marginals; iterations; error.

    Log domain. An iteration makes the rows exact, looks at the L1 violation of the columns, and makes the columns
    exact; it stops when the violation is at most `tol`, which bounds that of the rows after the column update.
    """
    n, m = cost.shape
    g = torch.zeros(m, dtype=cost.dtype, device=cost.device)
    iteration, error = 0, math.inf
    while error > tol and iteration < max_iter:
        iteration += 1
        f = -eps * (torch.logsumexp((g - cost) / eps, dim=1) + math.log(n))
        log_columns = torch.logsumexp((f[:, None] + g - cost) / eps, dim=0)
        error = float((log_columns.exp() - 1 / m).abs().sum())
        g = g - eps * (log_columns + math.log(m))
    return f, g, iteration, error


# ---- operation -----------------------------------------------------------------------------------------------------


def sinkhorn_operation(cost: Tensor, eps: float, tol: float, max_iter: int) -> tuple[Tensor, Tensor, Tensor]:
    """Potentials f [n] and g [m], float64, and a report on the CPU, float64 [3]: iterations, marginal error and whether
    it converged."""
    return _solved(_plain, None, cost, eps, tol, max_iter)


def _solved(
    solve: Solver, dtype: torch.dtype | None, cost: Tensor, eps: float, tol: float, max_iter: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solves in `dtype`, by default that of the cost, for costs less the middle one: a large common offset would cost
    the small differences."""
    dtype = dtype or cost.dtype
    low, high = (float(x) for x in torch.aminmax(cost))
    if not max(high - low, abs(low), abs(high)) <= torch.finfo(torch.float32).max:
        bad = ~torch.isfinite(cost)
        where = (
            f"not finite at {tuple(bad.nonzero()[0].tolist())}" if bool(bad.any()) else "beyond the range of float32"
        )
        raise ValueError(f"cost is {where}")
    # The potentials that are returned hold the middle cost, too, in float64.
    offset = max(abs(low), abs(high)) * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    rounding = rounding_of(low, high, max(high - low, offset, _LEAST_REACH), eps, tol, dtype)
    middle = float(torch.tensor((low + high) / 2, dtype=cost.dtype, device="cpu"))
    f, g, iterations, violation = solve(cost, middle, high - low, eps, tol - rounding, max_iter)
    converged = violation <= tol - rounding
    error = min(violation + rounding, tol) if converged else violation + rounding
    if not converged:
        warn_unconverged(iterations, error, tol)
    report = torch.tensor([iterations, error, converged], dtype=torch.float64, device="cpu")
    return f.double() + middle, g.double(), report


def _plain(
    cost: Tensor, middle: float, _spread: float, eps: float, tol: float, max_iter: int
) -> tuple[Tensor, Tensor, int, float]:
    return sinkhorn_reference(cost - middle, eps, tol, max_iter)


_operation = dispatch.operation(
    "sinkhorn",
    sinkhorn_operation,
    cpu=extension.backend(functools.partial(_solved, transport.sinkhorn, torch.float32), dtypes=None),
    cuda=extension.cuda_backend(functools.partial(_solved, transport.sinkhorn_cuda, torch.float32)),
    differentiable=False,
    fake=lambda cost, *_: (
        *(torch.empty(n, dtype=torch.float64, device=cost.device) for n in cost.shape),
        torch.empty(3, dtype=torch.float64, device="cpu"),
    ),
)
