"""Entropic optimal transport with uniform marginals, from a cost matrix or from points on the two spheres."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, native
from geoflow_fast.ops.transport import (
    Factors,
    Problem,
    SinkhornSettings,
    make_problem,
    make_settings,
    warn_unconverged,
)
from geoflow_fast.ops.transport_solvers import ReferenceSolve, Solve, cuda_matrix, load_scores, solve_cpu, solve_cuda

FLAT = 8
"""How many arguments of an operation describe its problem; those of the settings follow."""


@dataclass(frozen=True)
class SinkhornResult:
    """An entropic transport plan P_ij = exp((f_i + g_j - C_ij) / eps) with uniform marginals, given by its potentials.

    `f` [n] and `g` [m] are float64. C is the given matrix, or what `transport_cost` gives for the points on the same
    backend. `marginal_error` is an upper bound of the L1 violation of the row sums of P; it consists of the violation
    of the column sums before the last column update, which can only reduce it (csrc/sinkhorn.h), and a bound of what
    rounding does, which also bounds the violation of the column sums. `transport_cost` is sum_ij P_ij C_ij.
    `iterations` counts full iterations, each of which reads the matrix once. `converged` is false if `max_iter`
    iterations did not reach `tol`, and a RuntimeWarning is given. In a function that `torch.compile` or `torch.export`
    traces the four numbers are tensors without dimensions: to read them would cut the graph.
    """

    f: Tensor
    g: Tensor
    iterations: int
    marginal_error: float
    transport_cost: float
    converged: bool

    @property
    def potentials(self) -> tuple[Tensor, Tensor]:
        """The potentials (f, g)."""
        return self.f, self.g


def sinkhorn(
    cost: Tensor | str = "arc",
    factors: Factors | None = None,
    *,
    eps: float = 0.05,
    tol: float = 1e-3,
    max_iter: int = 1000,
    weights: tuple[float, float] = (1.0, 1.0),
    storage: str = "float32",
    backend: str = "auto",
) -> SinkhornResult:
    """Solves entropic optimal transport with uniform marginals; the result has potentials, error and cost of the plan.

    `cost` is a matrix [n, m] (mass moves from rows to columns), or "arc" (the paper: sum of the two arc lengths) or
    "chord" (sum of the two squared chords |x - y|^2) between `factors` = (image0, text0, image1, text1): noise
    [n, d_I], [n, d_T] and data [m, d_I], [m, d_T], unit rows. `weights` multiply the image and the text term. `eps` is
    the regularisation, in units of the cost.

    The solver stops once the L1 violation of a marginal is at most `tol`; if it reaches `max_iter` first, `converged`
    is false and a RuntimeWarning gives the error reached. The CPU and CUDA backends work in float32 for any input and
    store one n x m matrix and O(n + m) more; `backend="reference"` works in the dtype of the input. Where eps is so
    small beside the costs, or `tol` so small, that float32 cannot hold the plan (below about 2e-4 of the largest cost
    for the default `tol`), float64 iterations follow, in plain torch. Where float64 cannot hold it either (below about
    5e-13 of the largest cost), a ValueError names the smallest eps that works.

    `storage="float16"` halves the matrix by rounding its costs: the result describes the plan of the rounded costs.
    The sum of |P - exact P| is then below 1e-4 (4 + s), where s = (max C - min C) / eps: 2e-3 at s = 16
    and 1.6e-2 at s = 160. A larger s is refused.
    """
    problem = make_problem(cost, factors, weights)
    settings = make_settings(eps, tol, max_iter, storage)
    f, g, report = _sinkhorn(*problem.flat(), *settings.flat(), str(backend))
    if torch.compiler.is_compiling():
        iterations, error, total, converged = report.unbind()
        return SinkhornResult(f, g, iterations.long(), error, total, converged.bool())
    iterations, error, total, converged = report.tolist()
    return SinkhornResult(f, g, int(iterations), error, total, bool(converged))


def transport_cost(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    *,
    cost: str = "arc",
    weights: tuple[float, float] = (1.0, 1.0),
    backend: str = "auto",
) -> Tensor:
    """The cost matrix [n, m] that `sinkhorn` and `ot_assign` use for these points, in their dtype; the CPU and CUDA
    backends compute it in float32."""
    problem = make_problem(cost, (image0, text0, image1, text1), weights)
    matrix: Tensor = _transport_cost(*problem.flat(), str(backend))
    return matrix


# ---- operations ----------------------------------------------------------------------------------------------------


def unpack(arguments: tuple[Any, ...]) -> tuple[Problem, SinkhornSettings]:
    """Problem and settings from the arguments of an operation."""
    return Problem.of(*arguments[:FLAT]), SinkhornSettings(*arguments[FLAT : FLAT + 4])


def sinkhorn_operation(
    first: Tensor,
    text1: Tensor | None,
    image0: Tensor | None,
    text0: Tensor | None,
    rows: int,
    cost: str,
    image_weight: float,
    text_weight: float,
    eps: float,
    tol: float,
    max_iter: int,
    storage: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sinkhorn` of a problem in pieces (`Problem.flat`): f [n], g [m], and a report on the CPU, float64 [4]:
    iterations, marginal error, transport cost and whether it converged."""
    problem = first, text1, image0, text0, rows, cost, image_weight, text_weight
    return _report(ReferenceSolve, *problem, eps, tol, max_iter, storage)


def _report(solver: Callable[[Problem, SinkhornSettings], Solve], *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, settings = unpack(arguments)
    solve = solver(problem, settings)
    f, g, cost = solve.plan()
    if not solve.converged:
        warn_unconverged(solve.iterations, solve.error, settings)
    numbers = [solve.iterations, solve.error, cost, solve.converged]
    return f, g, torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _sinkhorn_shapes(first: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, cost = arguments[3:5]
    columns = first.shape[1] if cost == "given" else first.shape[0]
    f, g = (torch.empty(n, dtype=torch.float64, device=first.device) for n in (rows, columns))
    return f, g, torch.empty(4, dtype=torch.float64, device="cpu")


def transport_cost_operation(
    first: Tensor,
    text1: Tensor | None,
    image0: Tensor | None,
    text0: Tensor | None,
    rows: int,
    cost: str,
    image_weight: float,
    text_weight: float,
) -> Tensor:
    """`transport_cost` of a problem in pieces (`Problem.flat`)."""
    return Problem.of(first, text1, image0, text0, rows, cost, image_weight, text_weight).dense()


def _transport_cost_cpu(*arguments: Any) -> Tensor:
    problem = Problem.of(*arguments)
    matrix = native.TransportMatrix(*problem.shape, torch.float32)
    offset, _, _ = load_scores(matrix, problem, None)
    return (offset - matrix.scores()).to(problem.anchor.dtype)


def _transport_cost_cuda(*arguments: Any) -> Tensor:
    problem = Problem.of(*arguments)
    return cuda_matrix(problem)[0].costs().to(problem.anchor.dtype).contiguous()


_transport_cost = dispatch.operation(
    "transport_cost",
    transport_cost_operation,
    cpu=native.backend(_transport_cost_cpu, dtypes=None),
    cuda=native.cuda_backend(_transport_cost_cuda),
    differentiable=False,
    fake=lambda first, text1, image0, text0, rows, *_: first.new_empty(rows, first.shape[0]),  # noqa: ARG005
)
_sinkhorn = dispatch.operation(
    "sinkhorn",
    sinkhorn_operation,
    cpu=native.backend(functools.partial(_report, solve_cpu), dtypes=None),
    cuda=native.cuda_backend(functools.partial(_report, solve_cuda)),
    differentiable=False,
    fake=_sinkhorn_shapes,
)
