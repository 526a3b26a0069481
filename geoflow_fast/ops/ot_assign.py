"""Which data pair each noise pair is sent to: optimal-transport couplings of a training batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.directions import Direction
from geoflow_fast.distributed import World
from geoflow_fast.ops import dispatch, native
from geoflow_fast.ops.dispatch import Backend
from geoflow_fast.ops.sinkhorn import (
    NAMES,
    CpuSolve,
    CudaSolve,
    Factors,
    Noise,
    Panel,
    Problem,
    SinkhornSettings,
    as_dense,
    make_problem,
    make_settings,
    sinkhorn_reference,
    transport_cost,
    warn_unconverged,
)
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.settings import deprecated_keyword

ASSIGNMENTS = ("argmax", "sample", "exact")
COUPLINGS = ("paper", "sample", "exact", "independent")
CONDITIONAL_COUPLINGS = ("paper", "independent", "c2ot")

# The bisection of c2ot looks at this many rows of the batch; its ratio is then known to about a tenth of itself.
_PILOT_ROWS = 512
_BISECTIONS = 40


def ot_assign(
    image0: Noise,
    text0: Noise,
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
    **deprecated: Any,
) -> Tensor:
    """Couples noise pairs with data pairs by optimal transport: the data row for each noise row, int64 [B].

    `image0` [B, d_I] and `text0` [B, d_T] are noise, `image1` and `text1` data, unit rows. The noise of both spheres
    may also be a `geometry.StructuredNoise`, which replaces the matrix products of the cost by fast transforms.
    `assignment`: "argmax" (the paper: the largest entry of each row of the entropic plan), "sample" (a draw from each
    row, with `generator`) or "exact" (linear assignment without entropy, which uses every data row once).
    `cost`: "arc" (the paper: sum of the two arc lengths), "chord" or a matrix [B, B]; with a matrix the points only
    determine the batch size. `eps`, `tol`, `max_iter`, `storage` and `backend` are those of `sinkhorn`.
    """
    weights = deprecated_keyword(deprecated, "weights", "ot_assign", "cost=transport_cost(..., weights=...)")
    if deprecated:
        raise TypeError(f"ot_assign() got an unexpected keyword argument {next(iter(deprecated))!r}")
    problem = _make_square_problem((image0, text0, image1, text1), cost, weights or (1.0, 1.0))
    return _assign(problem, make_settings(eps, tol, max_iter, storage), assignment, generator, backend)


def _assign(
    problem: Problem, settings: SinkhornSettings, assignment: str, generator: torch.Generator | None, backend: str
) -> Tensor:
    """Solves a square problem and reads the data row for each noise row, as `ot_assign` describes."""
    if assignment == "exact":
        return _exact(problem, backend)
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"assignment must be one of {', '.join(ASSIGNMENTS)}, got {assignment!r}")
    uniform = None
    if assignment == "sample":
        device = problem.anchor.device if generator is None else generator.device
        uniform = torch.rand(problem.shape[0], generator=generator, dtype=torch.float64, device=device)
        uniform = uniform.to(problem.anchor.device)
    solve = dispatch.choose("ot_assign", problem.anchor, backend)
    index, converged, iterations, error = solve(problem, settings, uniform)
    if not converged:
        warn_unconverged(iterations, error, settings, stacklevel=4)
    result: Tensor = index
    return result


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
) -> Tensor:
    """`ot_assign` for a batch whose noise is divided among ranks: the data row for each of this rank's rows, int64 [n].

    `image0` [n, d_I] and `text0` [n, d_T] are this rank's noise, with any number of rows; `image1` and `text1` are all
    B data pairs, as many as the ranks have noise rows in total. All ranks must call together. With `uniform` [n] in
    [0, 1) the data row is drawn from the plan; without it, it is the largest entry. For CPU tensors; needs the compiled
    extension.
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
    dispatch.choose("ot_assign", image1, "cpu")  # raises if it is not built or cannot serve
    solve = CpuSolve(problem, settings, Panel(*problem.shape, settings.storage, world))
    if world.is_main and not solve.converged:
        warn_unconverged(solve.iterations, solve.error, settings)
    return solve.assign(uniform)


def couple(
    image0: Noise,
    text0: Noise,
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
    problem = _make_square_problem((image0, text0, image1, text1), "arc", (1.0, 1.0))
    if coupling == "independent":
        return torch.arange(problem.shape[0], device=image1.device)
    if coupling == "c2ot":
        return _c2ot(problem, direction.generated[0], target_ratio, backend)
    settings = make_settings(eps, tol, max_iter, "float32")
    return _assign(problem, settings, "argmax" if coupling == "paper" else coupling, generator, backend)


def _make_square_problem(factors: Factors, cost: Tensor | str, weights: tuple[float, float]) -> Problem:
    problem = make_problem(cost if isinstance(cost, str) else "arc", factors, weights)
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
    moved = as_dense(noise[generated], data[0].dtype)
    condition = data[1 - generated]
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


def ot_assign_reference(cost: Tensor, g: Tensor, eps: float, uniform: Tensor | None) -> Tensor:
    """Target column of each row, int64 [n]: argmax_j of the plan, or its inverse row distribution at `uniform` [n]."""
    if uniform is None:
        return (g - cost).argmax(dim=1)
    cumulative = torch.softmax((g - cost).double() / eps, dim=1).cumsum(dim=1)
    target = uniform.double() * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=cost.shape[1] - 1)


def _ot_assign_reference(
    problem: Problem, settings: SinkhornSettings, uniform: Tensor | None
) -> tuple[Tensor, bool, int, float]:
    cost = problem.dense()
    _, g, iterations, error = sinkhorn_reference(cost, settings.eps, settings.tol, settings.max_iter)
    index = ot_assign_reference(cost, g, settings.eps, uniform)
    return index, error <= settings.tol, iterations, error


def _ot_assign_cpu(
    problem: Problem, settings: SinkhornSettings, uniform: Tensor | None
) -> tuple[Tensor, bool, int, float]:
    solve = CpuSolve(problem, settings)
    return solve.assign(uniform), solve.converged, solve.iterations, solve.error


def _ot_assign_cuda(
    problem: Problem, settings: SinkhornSettings, uniform: Tensor | None
) -> tuple[Tensor, bool, int, float]:
    solve = CudaSolve(problem, settings)
    return solve.assign(uniform), *solve.outcome()


dispatch.register(
    "ot_assign",
    reference=Backend(_ot_assign_reference, ("cpu", "cuda")),
    cpu=native.backend(_ot_assign_cpu, dtypes=None),
    cuda=native.cuda_backend(_ot_assign_cuda),
)
