"""Which data pair each noise pair is sent to: optimal-transport couplings of a training batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.directions import Direction
from geoflow_fast.geometry import UNIT_TOLERANCE, capturing, check_rows
from geoflow_fast.geometry import eps as check_dtype
from geoflow_fast.ops import dispatch, extension, transport
from geoflow_fast.ops.sinkhorn import check_limits, rounding_of, sinkhorn_reference, warn_unconverged

ASSIGNMENTS = ("argmax", "sample", "exact")
COUPLINGS = ("paper", "sample", "exact", "independent")
CONDITIONAL_COUPLINGS = ("paper", "independent", "c2ot")

FARTHEST = 2 * math.pi
"""The largest cost of a pair: the sum of two arc lengths."""
NAMES = ("image0", "text0", "image1", "text1")

# The bisection of c2ot looks at this many rows of the batch; its ratio is then known to about a tenth of itself.
_PILOT_ROWS = 512
_BISECTIONS = 40

Points = tuple[Tensor, Tensor, Tensor, Tensor]


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
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """Couples noise pairs with data pairs by optimal transport: the data row for each noise row, int64 [B].

    `image0` [B, d_I] and `text0` [B, d_T] are noise, `image1` and `text1` data, unit rows. The cost of a pair is the
    paper's, the sum of the two arc lengths. `assignment`: "argmax" (the paper: the largest entry of each row of the
    entropic plan), "sample" (a draw from each row, with `generator`) or "exact" (linear assignment without entropy,
    which uses every data row once). `eps`, `tol`, `max_iter` and `backend` are those of `sinkhorn`. On GPUs, points are
    rounded to float16 before their inner products are taken, and costs are kept in float16 where eps is at least 0.04.
    A warning tells of a plan that was not solved, but not inside `torch.compile` or a CUDA graph.
    """
    points = _checked((image0, text0, image1, text1))
    eps, tol, max_iter = check_limits(eps, tol, max_iter)
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"assignment must be one of {', '.join(ASSIGNMENTS)}, got {assignment!r}")
    if assignment == "exact":
        return _exact(_arc(points[0], points[2]) + _arc(points[1], points[3]))
    uniform = None
    if assignment == "sample":
        device = image1.device if generator is None else generator.device
        uniform = torch.rand(len(image0), generator=generator, dtype=torch.float64, device=device).to(image1.device)
    index, report = assign_late(points, eps, uniform, tol, max_iter, backend)
    if not capturing(report):
        warn_if_unsolved(report, eps, tol)
    return index


def assign_late(
    points: Points,
    eps: float,
    uniform: Tensor | None = None,
    tol: float = 1e-3,
    max_iter: int = 1000,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`ot_assign` of checked points that does not wait for a GPU: the data row for each noise row, int64 [B], and a
    report on the device for `warn_if_unsolved`. With `uniform` [B] in [0, 1), rows are drawn."""
    index, _, _, report = _operation(*points, eps, tol - check_plan(eps, tol=tol), max_iter, uniform, str(backend))
    return index, report


def check_plan(eps: float, name: str = "eps", tol: float = 1e-3) -> float:
    """What rounding adds to the error of a plan between points. A ValueError names the smallest `eps` that works."""
    return rounding_of(0.0, FARTHEST, FARTHEST, eps, tol, torch.float32, name)


def warn_if_unsolved(report: Tensor, eps: float, tol: float = 1e-3) -> None:
    """Warns if the plan at `eps` was not solved."""
    iterations, violation, converged = report.tolist()
    if not converged:
        warn_unconverged(int(iterations), violation + check_plan(eps, tol=tol), tol)


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
    points = _checked((image0, text0, image1, text1))
    if coupling == "independent":
        return torch.arange(len(image0), device=image1.device)
    if coupling == "c2ot":
        return _c2ot(points, direction.generated[0], target_ratio)
    assignment = "argmax" if coupling == "paper" else coupling
    return ot_assign(
        *points, eps=eps, tol=tol, max_iter=max_iter, assignment=assignment, generator=generator, backend=backend
    )


def _checked(points: Points) -> Points:
    """Types, devices, shapes and rows of the four clouds."""
    first = points[2]
    for name, x, twin in zip(NAMES, points, points[2:] + points[:2]):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not isinstance(first, Tensor):
            raise TypeError(f"image1 must be a tensor, got {type(first).__name__}")
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device}, but image1 is on {first.device}")
        check_dtype(x.dtype)
        if x.dtype != first.dtype:
            raise TypeError(f"{name} is {x.dtype}, but image1 is {first.dtype}")
        if len(x.shape) != 2 or x.shape[0] == 0:
            raise ValueError(f"{name} must be [rows, width] with at least one row, got {tuple(x.shape)}")
        if isinstance(twin, Tensor) and len(twin.shape) == 2 and x.shape[1] != twin.shape[1]:
            raise ValueError(f"{name} has width {x.shape[1]}, but its twin has {twin.shape[1]}")
        if x.shape[0] != points[0].shape[0]:
            raise ValueError(
                f"{name} has {x.shape[0]} rows, but image0 has {points[0].shape[0]}; a batch needs as many"
            )
    image0, text0, image1, text1 = (x.detach() for x in points)
    points = image0, text0, image1, text1
    if not (first.is_cuda and not capturing(first) and _are_unit(points)):
        for name, x in zip(NAMES, points):
            check_rows(x, name)
    return points


def _are_unit(points: Points) -> bool:
    """Whether `check_rows` has nothing to say about any of the clouds: a GPU is waited for once, not for each."""
    norms = torch.cat([torch.linalg.vector_norm(x, dim=1) for x in points])
    return bool(((norms - 1).abs() <= UNIT_TOLERANCE).all())


def _arc(noise: Tensor, data: Tensor) -> Tensor:
    """Arc lengths between all rows."""
    return (noise @ data.T).clamp(-1, 1).acos()


def _exact(cost: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.from_numpy(columns).to(device=cost.device, dtype=torch.int64)


def _c2ot(points: Points, generated: int, target_ratio: float) -> Tensor:
    """Exact transport with cost arc(generated) + w arc(condition); `generated` is 0 for image, 1 for text."""
    if not 0 < target_ratio <= 1:
        raise ValueError(f"target_ratio must be in (0, 1], got {target_ratio}")
    noise, data, condition = points[generated], points[2 + generated], points[3 - generated]
    weight = condition_weight(noise, data, condition, target_ratio)
    # In place of the condition stream's noise stands its data: the distance between conditions i and j.
    return _exact(_arc(noise, data) + weight * _arc(condition, condition))


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


# ---- operation -----------------------------------------------------------------------------------------------------


def ot_solve_reference(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    eps: float,
    tol: float,
    max_iter: int,
    uniform: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The entropic plan between two clouds of pairs, solved until its columns are off by at most `tol`: the largest
    entry of each row, or with `uniform` [n] in [0, 1) a draw from it, int64 [n]; its potentials f [n] and g [m],
    float64; and a report [3], float64: iterations, violation of the columns, and whether that is within `tol`."""
    cost = _arc(image0, image1) + _arc(text0, text1)
    f, g, iterations, violation = sinkhorn_reference(cost, eps, tol, max_iter)
    report = torch.tensor([iterations, violation, violation <= tol], dtype=torch.float64, device=cost.device)
    return assign_reference(cost, g, eps, uniform), f.double(), g.double(), report


def assign_reference(cost: Tensor, g: Tensor, eps: float, uniform: Tensor | None) -> Tensor:
    """Target column of each row, int64 [n]: argmax_j of the plan, or its inverse row distribution at `uniform` [n]."""
    if uniform is None:
        return (g - cost).argmax(dim=1)
    cumulative = torch.softmax((g - cost).double() / eps, dim=1).cumsum(dim=1)
    target = uniform.double() * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=cost.shape[1] - 1)


def _shapes(image0: Tensor, text0: Tensor, image1: Tensor, *_: object) -> tuple[Tensor, ...]:  # noqa: ARG001
    sizes = ((len(image0), torch.int64), *((n, torch.float64) for n in (len(image0), len(image1), 3)))
    return tuple(image0.new_empty(n, dtype=dtype) for n, dtype in sizes)


_operation = dispatch.operation(
    "ot_solve",
    ot_solve_reference,
    cpu=extension.backend(transport.ot_solve, dtypes=None),
    cuda=extension.cuda_backend(transport.ot_solve_cuda),
    differentiable=False,
    fake=_shapes,
)
