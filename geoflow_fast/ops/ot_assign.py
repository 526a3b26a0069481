"""Which data pair each noise pair is sent to: optimal-transport couplings of a training batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.directions import Direction
from geoflow_fast.distributed import World
from geoflow_fast.ops import dispatch, native
from geoflow_fast.ops.sinkhorn import transport_cost, unpack
from geoflow_fast.ops.transport import (
    HALF_SPAN,
    NAMES,
    Factors,
    Problem,
    SinkhornSettings,
    make_problem,
    make_settings,
    warn_unconverged,
)
from geoflow_fast.ops.transport_solvers import CudaSolve, ReferenceSolve, Solve, solve_cpu, solve_cuda, solve_panel
from geoflow_fast.runtime import checks

ASSIGNMENTS = ("argmax", "sample", "exact")
COUPLINGS = ("paper", "sample", "exact", "independent")
CONDITIONAL_COUPLINGS = ("paper", "independent", "c2ot")

TOLERANCE, MOST_ITERATIONS = 1e-3, 1000

# The bisection of c2ot looks at this many rows of the batch; its ratio is then known to about a tenth of itself.
_PILOT_ROWS = 512
_BISECTIONS = 40


def ot_assign(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    *,
    eps: float = 0.05,
    tol: float = 1e-3,
    max_iter: int = 1000,
    assignment: str = "argmax",
    cost: Tensor | str = "arc",
    storage: str = "float32",
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """Couples noise pairs with data pairs by optimal transport: the data row for each noise row, int64 [B].

    `image0` [B, d_I] and `text0` [B, d_T] are noise, `image1` and `text1` data, unit rows.
    `assignment`: "argmax" (the paper: the largest entry of each row of the entropic plan), "sample" (a draw from each
    row, with `generator`) or "exact" (linear assignment without entropy, which uses every data row once).
    `cost`: "arc" (the paper: sum of the two arc lengths), "chord" or a matrix [B, B]; with a matrix the points only
    determine the batch size. On GPUs, points are rounded to float16 before their inner products are taken. `eps`,
    `tol`, `max_iter`, `storage` and `backend` are those of `sinkhorn`.
    """
    problem = _make_square_problem((image0, text0, image1, text1), cost)
    return _assign(problem, make_settings(eps, tol, max_iter, storage), assignment, generator, backend)


def _assign(
    problem: Problem,
    settings: SinkhornSettings,
    assignment: str,
    generator: torch.Generator | None,
    backend: str,
) -> Tensor:
    """Solves a square problem and reads the data row for each noise row, as `ot_assign` describes."""
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"assignment must be one of {', '.join(ASSIGNMENTS)}, got {assignment!r}")
    if assignment == "exact":
        return _exact(problem, backend)
    uniform = None
    if assignment == "sample":
        device = problem.anchor.device if generator is None else generator.device
        uniform = torch.rand(problem.shape[0], generator=generator, dtype=torch.float64, device=device)
        uniform = uniform.to(problem.anchor.device)
    index: Tensor = _operation(*problem.flat(), *settings.flat(), uniform, str(backend))
    return index


def ot_assign_panel(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    world: World,
    *,
    eps: float = 0.05,
    tol: float = 1e-3,
    max_iter: int = 1000,
    uniform: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`ot_assign` for a batch whose noise is divided among ranks: the data row for each of this rank's rows, int64 [n].

    `image0` [n, d_I] and `text0` [n, d_T] are this rank's noise, with any number of rows; `image1` and `text1` are all
    B data pairs, as many as the ranks have noise rows in total. All ranks must call together. With `uniform` [n] in
    [0, 1) the data row is drawn from the plan; without it, it is the largest entry. Each iteration adds up the column
    sums of all ranks in one call. `backend`: "cpu" (compiled, in float32 as far as that goes), "cuda" (costs by the
    compiled kernel, of points rounded to float16, and iterations in plain torch in float64) or "reference" (all of it
    in plain torch, on any device); by default the first that can serve.
    """
    for name, x in zip(NAMES, (image0, text0, image1, text1)):
        if checks.with_values(x, name).dim() != 2:
            raise ValueError(f"{name} must be [rows, d], got {tuple(x.shape)}")
    if uniform is not None and checks.with_values(uniform, "uniform").shape != (len(image0),):
        raise ValueError(f"uniform must be [{len(image0)}], got {tuple(uniform.shape)}")
    if len(image0):
        problem = make_problem("arc", (image0, text0, image1, text1))
    else:
        problem = Problem("arc", None, (image0, text0), (image1, text1), (1.0, 1.0), (0, len(image1)), image1)
    settings = make_settings(eps, tol, max_iter, "float32")
    dispatch.choose("ot_assign", image1, backend)  # raises if it cannot serve, warns where plain torch has to
    if backend == "auto":
        kind = image1.device.type
        missing = native.missing_cuda() if kind == "cuda" else native.missing()
        backend = kind if kind in ("cpu", "cuda") and missing is None else "reference"
    solve: Solve = (
        solve_cpu(problem, settings, world)
        if backend == "cpu"
        else solve_panel(problem, settings, world, compiled=backend == "cuda")
    )
    if world.is_main and not solve.converged:
        warn_unconverged(solve.iterations, solve.error, settings)
    return solve.assign(uniform)


def assign_late(
    noise: tuple[Tensor, Tensor], data: tuple[Tensor, Tensor], eps: float, uniform: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`ot_assign` on a GPU that nothing waits for: the data row for each noise row, int64 [B], and the solver's status
    on the device for `warn_if_unsolved`. Where float32 does not do, the solve ends in float64 after all, which waits,
    and there is no status."""
    shape = len(noise[0]), len(data[0])
    problem = Problem("arc", None, noise, data, (1.0, 1.0), shape, data[0])
    settings = make_settings(eps, TOLERANCE, MOST_ITERATIONS, coupling_storage(problem, eps))
    solve = solve_cuda(problem, settings, half_points=True)
    if not isinstance(solve, CudaSolve):
        return solve.assign(uniform), None
    return solve.assign(uniform), solve.status


def warn_if_unsolved(status: Tensor, eps: float) -> None:
    """Warns if the plan at `eps` was not solved; `status` is on the host."""
    iterations, converged, violation = native.CudaTransport.read_status(status)
    if not converged:
        warn_unconverged(iterations, violation, make_settings(eps, TOLERANCE, MOST_ITERATIONS, "float32"))


def couple(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    *,
    coupling: str = "paper",
    direction: str = "joint",
    eps: float = 0.05,
    tol: float = 1e-3,
    max_iter: int = 1000,
    target_ratio: float = 0.01,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """The coupling of a training batch by name: int64 [B]; noise row i is coupled with data row index[i].

    For joint rows: "paper" (row argmax of the entropic plan), "sample", "exact" or "independent" (row i with row i).
    For conditional rows (`direction` "i2t" or "t2i"): "paper" (the joint plan, as in the paper), "independent", or
    "c2ot" (arXiv 2503.10636): exact transport of the generated stream's noise, where the cost is the arc length plus w
    times the arc length between conditions, and noise row i has the condition of data row i. The weight w is found by
    bisection so that a share `target_ratio` of all pairs (i, j) costs no more than the pair (i, i): 1 / B gives the
    independent coupling, 1 ignores the conditions.
    """
    direction = Direction.of(direction)
    names = COUPLINGS if direction is Direction.JOINT else CONDITIONAL_COUPLINGS
    if coupling not in names:
        raise ValueError(f"coupling of {direction} rows must be one of {', '.join(names)}, got {coupling!r}")
    problem = _make_square_problem((image0, text0, image1, text1), "arc")
    if coupling == "independent":
        return torch.arange(problem.shape[0], device=image1.device)
    if coupling == "c2ot":
        return _c2ot(problem, direction.generated[0], target_ratio, backend)
    settings = make_settings(eps, tol, max_iter, coupling_storage(problem, eps))
    return _assign(problem, settings, "argmax" if coupling == "paper" else coupling, generator, backend)


def coupling_storage(problem: Problem, eps: float) -> str:
    """How a training batch keeps its cost matrix: in float16 on GPUs, which wait for memory, where eps allows it."""
    widest = math.pi * sum(problem.weights)
    on_gpu = problem.anchor.device.type in native.cuda_devices()
    return "float16" if on_gpu and widest <= HALF_SPAN * eps else "float32"


def _make_square_problem(factors: Factors, cost: Tensor | str) -> Problem:
    problem = make_problem(cost if isinstance(cost, str) else "arc", factors)
    if problem.shape[0] != problem.shape[1]:
        rows, cols = problem.shape
        raise ValueError(f"{NAMES[2]} has {cols} rows, but {NAMES[0]} has {rows}; a batch needs as many")
    if isinstance(cost, str):
        return problem
    given = make_problem(cost, None)
    if given.shape != problem.shape or given.anchor.device != problem.anchor.device:
        raise ValueError(
            f"cost must be [{problem.shape[0]}, {problem.shape[1]}] on {problem.anchor.device}, "
            f"got {tuple(cost.shape)} on {cost.device}"
        )
    return given


def _exact(problem: Problem, backend: str) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    cost = problem.matrix
    if cost is None:
        noise, data = problem.clouds()
        cost = transport_cost(*noise, *data, cost=problem.cost, weights=problem.weights, backend=backend)
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.from_numpy(columns).to(device=problem.anchor.device, dtype=torch.int64)


def _c2ot(problem: Problem, generated: int, target_ratio: float, backend: str) -> Tensor:
    """Exact transport with cost arc(generated) + w arc(condition); `generated` is 0 for image, 1 for text."""
    if not 0 < target_ratio <= 1:
        raise ValueError(f"target_ratio must be in (0, 1], got {target_ratio}")
    noise, data = problem.clouds()
    moved, condition = noise[generated], data[1 - generated]
    weight = condition_weight(moved, data[generated], condition, target_ratio)
    # In place of the condition stream's noise stands its data: the distance between conditions i and j.
    clouds = (condition, moved) if generated == 1 else (moved, condition)
    weights = (weight, 1.0) if generated == 1 else (1.0, weight)
    return _exact(make_problem("arc", (*clouds, *data), weights), backend)


def condition_weight(noise: Tensor, data: Tensor, condition: Tensor, target_ratio: float) -> float:
    """The weight w at which a share `target_ratio` of pairs has arc(noise_i, data_j) + w arc(c_i, c_j) <= arc(i, i).

    The share falls from its value at w = 0 to 1/B (the pairs (i, i) themselves, up to repeated conditions); it is
    measured on the first rows of the batch. 0 when even w = 0 has fewer pairs than asked for.
    """
    rows = slice(0, _PILOT_ROWS)
    moved = (noise[rows] @ data.T).clamp(-1, 1).acos()
    between = (condition[rows] @ condition.T).clamp(-1, 1).acos()
    between.fill_diagonal_(0.0)  # acos of a rounded 1 is not 0
    gain = moved.diagonal()[:, None] - moved

    def share(weight: float) -> float:
        return float((weight * between <= gain).double().mean())

    if share(0.0) <= target_ratio:
        return 0.0
    low, high = 0.0, 1.0
    while share(high) > target_ratio and high < 1e6:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) > target_ratio else (low, middle)
    return high


# ---- operations ----------------------------------------------------------------------------------------------------


def ot_assign_operation(
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
    uniform: Tensor | None,
) -> Tensor:
    """`ot_assign` of a problem in pieces (`Problem.flat`): the largest entry of each row of the plan, or with `uniform`
    [n] in [0, 1) a draw from it."""
    problem = first, text1, image0, text0, rows, cost, image_weight, text_weight
    return _solve_and_assign(ReferenceSolve, *problem, eps, tol, max_iter, storage, uniform)


def _solve_and_assign(solver: Callable[[Problem, SinkhornSettings], Solve], *arguments: Any) -> Tensor:
    problem, settings = unpack(arguments)
    solve = solver(problem, settings)
    index = solve.assign(arguments[-1])
    if not solve.converged:
        warn_unconverged(solve.iterations, solve.error, settings)
    return index


_operation = dispatch.operation(
    "ot_assign",
    ot_assign_operation,
    cpu=native.backend(functools.partial(_solve_and_assign, functools.partial(solve_cpu, rounded=True)), dtypes=None),
    cuda=native.cuda_backend(functools.partial(_solve_and_assign, functools.partial(solve_cuda, half_points=True))),
    differentiable=False,
    fake=lambda first, text1, image0, text0, rows, *_: first.new_empty(rows, dtype=torch.int64),  # noqa: ARG005
)
