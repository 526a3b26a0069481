"""Entropic optimal transport with uniform marginals, from a cost matrix or from points on the two spheres."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.distributed import World
from geoflow_fast.geometry import check_rows
from geoflow_fast.geometry import eps as check_dtype
from geoflow_fast.noise import StructuredNoise
from geoflow_fast.ops import dispatch, native
from geoflow_fast.ops.dispatch import Backend
from geoflow_fast.runtime import checks

Noise = Tensor | StructuredNoise
Factors = tuple[Noise, Noise, Tensor, Tensor]

COSTS = ("arc", "chord")
STORAGES = {"float32": torch.float32, "float16": torch.float16}
LARGEST_EPS = 1e30
"""Far above any cost: larger ones would overflow where eps is multiplied."""
NAMES = ("image0", "text0", "image1", "text1")

# Largest |S - centre| / eps whose exponential the kernel domain may hold: float32 reaches e^+-87, float16 e^+-9.7.
_KERNEL_REACH = {torch.float32: 80.0, torch.float16: 9.0}
# Largest (max C - min C) / eps of a matrix in float16. Scores are rounded by up to a 4096th of it: at this spread about
# a hundredth of the mass is misplaced.
_HALF_SPREAD = 160.0
# Column sums below this have lost terms to underflow: kLeastSum of csrc/cpu/sinkhorn_passes.h.
_LEAST_SUM = 1e-30
_ROWS_AT_ONCE = 256
# Largest range of the cost over eps that the CUDA backend anneals to; float32 resolves less than that.
_FINEST = 2.0**60


@dataclass(frozen=True)
class SinkhornResult:
    """An entropic transport plan P_ij = exp((f_i + g_j - C_ij) / eps) with uniform marginals, given by its potentials.

    `f` [n] and `g` [m] are float64; column sums are exact. `marginal_error` is an upper bound of the L1 violation of
    the row sums: the violation of the column sums before the last column update, which can only reduce it
    (csrc/sinkhorn.h). `transport_cost` is sum_ij P_ij C_ij. `iterations` counts full iterations, each of which reads
    the matrix once. `converged` is false if `max_iter` iterations did not reach `tol`; a RuntimeWarning says so too.
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


@dataclass(frozen=True)
class Problem:
    """A checked transport problem, as backends receive it: a given cost matrix [n, m], or two pairs of point clouds."""

    cost: str
    matrix: Tensor | None
    noise: tuple[Noise, Noise] | None
    data: tuple[Tensor, Tensor] | None
    weights: tuple[float, float]
    shape: tuple[int, int]
    """Rows (noise) and columns (data)."""
    anchor: Tensor
    """A tensor that tells the device."""

    def clouds(self) -> tuple[tuple[Noise, Noise], tuple[Tensor, Tensor]]:
        """Noise and data, (image, text) each; only where no matrix was given."""
        if self.noise is None or self.data is None:
            raise ValueError("this transport problem was given as a matrix")
        return self.noise, self.data

    def dense(self) -> Tensor:
        """The cost matrix in plain torch, [n, m], in the dtype of the input."""
        if self.matrix is not None:
            return self.matrix
        noise, data = self.clouds()
        image0, text0 = (as_dense(x, data[0].dtype) for x in noise)
        return transport_cost_reference(image0, text0, *data, self.cost, self.weights)


@dataclass(frozen=True)
class SinkhornSettings:
    """How far to solve: `eps` in units of the cost, `tol` as L1 marginal violation, and how to store the matrix."""

    eps: float
    tol: float
    max_iter: int
    storage: torch.dtype


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

    The solver stops once the L1 violation of a marginal is at most `tol`; if it reaches `max_iter` first, the result
    says so and a RuntimeWarning gives the error reached. The CPU backend works in float32 for any input and stores one
    n x m matrix and O(n + m) more. `storage="float16"` halves the matrix. The sum of |P - exact P| is then below
    1e-4 (4 + s), where s = (max C - min C) / eps: 2e-3 at s = 16 and 1.6e-2 at s = 160. A larger s is refused with a
    ValueError. Exponentials of the cost are used as long as they fit their range and log-sum-exp otherwise, so no eps
    or cost overflows. `backend="reference"` works in the dtype of the input.
    """
    problem = make_problem(cost, factors, weights)
    settings = make_settings(eps, tol, max_iter, storage)
    solve = dispatch.choose("sinkhorn", problem.anchor, backend)
    result: SinkhornResult = solve(problem, settings)
    if not result.converged:
        warn_unconverged(result.iterations, result.marginal_error, settings)
    return result


def transport_cost(
    image0: Noise,
    text0: Noise,
    image1: Tensor,
    text1: Tensor,
    *,
    cost: str = "arc",
    weights: tuple[float, float] = (1.0, 1.0),
    backend: str = "auto",
) -> Tensor:
    """The cost matrix [n, m] that `sinkhorn` and `ot_assign` use for these points; float32 from the CPU backend."""
    problem = make_problem(cost, (image0, text0, image1, text1), weights)
    matrix: Tensor = dispatch.choose("transport_cost", problem.anchor, backend)(problem)
    return matrix


def make_settings(eps: float, tol: float, max_iter: int, storage: str) -> SinkhornSettings:
    """Checks the scalar arguments."""
    eps, tol = (checks.positive(x, name, LARGEST_EPS) for name, x in (("eps", eps), ("tol", tol)))
    max_iter = checks.integer(max_iter, "max_iter", 1, 2**31 - 1)
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    return SinkhornSettings(eps, tol, max_iter, STORAGES[storage])


def make_problem(cost: Tensor | str, factors: Factors | None, weights: tuple[float, float] = (1.0, 1.0)) -> Problem:
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
    noise: tuple[Noise, Noise] = (image0, text0)
    if isinstance(image0, Tensor) and isinstance(text0, Tensor):
        noise = (image0.detach(), text0.detach())
    elif isinstance(image0, Tensor) or isinstance(text0, Tensor):
        noise = (as_dense(image0, image1.dtype), as_dense(text0, image1.dtype))
    data = image1.detach(), text1.detach()
    shape = image0.shape[0], image1.shape[0]
    return Problem(cost, None, noise, data, (float(weights[0]), float(weights[1])), shape, data[0])


def as_dense(noise: Noise, dtype: torch.dtype) -> Tensor:
    """Noise as a plain tensor."""
    return noise.detach() if isinstance(noise, Tensor) else noise.dense(dtype)


def _checked_matrix(cost: Tensor) -> Tensor:
    check_dtype(checks.with_values(cost, "cost").dtype)
    if cost.dim() != 2 or cost.numel() == 0:
        raise ValueError(f"cost must be a matrix with at least one row and one column, got shape {tuple(cost.shape)}")
    cost = cost.detach()
    low, high = torch.aminmax(cost)
    if not float(high) - float(low) <= torch.finfo(torch.float32).max:
        bad = ~torch.isfinite(cost)
        where = f"is not finite at {tuple(bad.nonzero()[0].tolist())}" if bool(bad.any()) else "spans more than a float"
        raise ValueError(f"cost {where}")
    return cost


def _check_clouds(factors: Factors) -> None:
    """Types, devices, shapes and rows of the four clouds."""
    for name, x in zip(NAMES, factors):
        if not isinstance(x, Tensor) and (name.endswith("1") or not isinstance(x, StructuredNoise)):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    first = factors[2]
    for name, x, twin, partner in zip(NAMES, factors, factors[2:] + factors[:2], (0, 0, 2, 2)):
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device}, but image1 is on {first.device}")
        if isinstance(x, Tensor):
            check_dtype(x.dtype)
            if x.dtype != first.dtype:
                raise TypeError(f"{name} is {x.dtype}, but image1 is {first.dtype}")
        if len(x.shape) != 2 or x.shape[0] == 0:
            raise ValueError(f"{name} must be [rows, width] with at least one row, got {tuple(x.shape)}")
        if len(twin.shape) == 2 and x.shape[1] != twin.shape[1]:
            raise ValueError(f"{name} has width {x.shape[1]}, but its twin has {twin.shape[1]}")
        if x.shape[0] != factors[partner].shape[0]:
            raise ValueError(f"{name} has {x.shape[0]} rows, but {NAMES[partner]} has {factors[partner].shape[0]}")
    for name, x in zip(NAMES, factors):
        if isinstance(x, Tensor):
            check_rows(x, name)


def warn_unconverged(iterations: int, error: float, settings: SinkhornSettings, stacklevel: int = 3) -> None:
    """Warns of an unfinished solve; the warning is attributed to the user's call."""
    warnings.warn(
        f"sinkhorn stopped after {iterations} iterations with marginal error {error:.3g} > tol={settings.tol:g}; "
        "raise max_iter, eps or tol",
        RuntimeWarning,
        stacklevel=stacklevel,
    )


# ---- reference ----------------------------------------------------------------------------------------------------


def transport_cost_reference(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, cost: str, weights: tuple[float, float]
) -> Tensor:
    """Cost of moving noise row i to data row j, [n, m]: a weighted sum over the two spheres.

    "arc" is the arc length acos<x, y>, "chord" the squared chord |x - y|^2 = 2 - 2 <x, y> of unit rows.
    """
    total = torch.zeros(image0.shape[0], image1.shape[0], dtype=image0.dtype, device=image0.device)
    for noise, data, weight in ((image0, image1, weights[0]), (text0, text1, weights[1])):
        cosine = (noise @ data.T).clamp(-1, 1)
        total += weight * (cosine.acos() if cost == "arc" else 2 - 2 * cosine)
    return total


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


def _transport_cost_reference(problem: Problem) -> Tensor:
    return problem.dense()


def _sinkhorn_reference(problem: Problem, settings: SinkhornSettings) -> SinkhornResult:
    cost = problem.dense()
    f, g, iterations, error = sinkhorn_reference(cost, settings.eps, settings.tol, settings.max_iter)
    plan = ((f[:, None] + g - cost) / settings.eps).exp()
    total = float((plan * cost).sum())
    return SinkhornResult(f.double(), g.double(), iterations, error, total, error <= settings.tol)


# ---- compiled, CPU ------------------------------------------------------------------------------------------------


class CpuSolve:
    """One problem on its way through the compiled solver: build, choose the domain, iterate, read."""

    def __init__(self, problem: Problem, settings: SinkhornSettings, matrix: native.TransportMatrix | None = None):
        self._settings = settings
        self._rows, self._cols = problem.shape
        self._matrix = matrix or native.TransportMatrix(self._rows, self._cols, settings.storage)
        self._f = torch.zeros(self._rows, dtype=torch.float64, device="cpu")
        self._g = torch.zeros(self._cols, dtype=torch.float64, device="cpu")
        self.iterations, self.error, self.converged = 0, math.inf, False
        self._offset, low, high = load_scores(self._matrix, problem, settings.eps)
        # Exponentials where they fit their range; else scores, and a start from larger values of eps.
        if not self._matrix.in_kernel_domain:
            if settings.storage == torch.float16 and high - low > _HALF_SPREAD * settings.eps:
                raise ValueError(
                    f"storage='float16' allows a cost that spans {_HALF_SPREAD:g} eps, but this one spans "
                    f"{(high - low) / settings.eps:.4g} eps: take storage='float32' or a larger eps"
                )
            if (high - low) / 2 <= _KERNEL_REACH[settings.storage] * settings.eps:
                self._matrix.enter_kernel((low + high) / 2, settings.eps)
            else:
                self._anneal((high - low) / 10)
        self._iterate()

    def _anneal(self, eps: float) -> None:
        """Carries the potentials from a large eps, where they settle at once, down by halves to the one asked for.

        At an eps far below the spread of the cost this takes several times fewer iterations than starting from zero.
        """
        stage = self._settings.max_iter // 16
        while eps > 2 * self._settings.eps and stage > 0:
            budget = min(stage, self._settings.max_iter - 1 - self.iterations)
            if budget < 1:
                return
            _, iterations, _ = self._matrix.iterate(self._f, self._g, eps, self._settings.tol, budget)
            self.iterations += iterations
            eps /= 2

    def _iterate(self) -> None:
        """Iterates to the end; where the kernel domain cannot follow the potentials, goes on in the score domain."""
        eps, tol, max_iter = self._settings.eps, self._settings.tol, self._settings.max_iter
        while True:
            outcome, iterations, error = self._matrix.iterate(self._f, self._g, eps, tol, max_iter - self.iterations)
            self.iterations += iterations
            if outcome != self._matrix.OUT_OF_RANGE:
                break
            self._matrix.leave_kernel()
        self.error, self.converged = error, outcome == self._matrix.CONVERGED

    def result(self) -> SinkhornResult:
        """Potentials of C (the solver's refer to S = offset - C), and the plan's cost from one more read."""
        cost = self._offset - self._matrix.mean_score(self._f, self._g, self._settings.eps)
        return SinkhornResult(self._f + self._offset, self._g, self.iterations, self.error, cost, self.converged)

    def assign(self, uniform: Tensor | None) -> Tensor:
        """Target of each row: the plan's argmax, or a draw from the row."""
        return self._matrix.assign(self._f, self._g, self._settings.eps, uniform)


class Panel(native.TransportMatrix):
    """Some rows of a square problem whose other rows other ranks hold; each column's sum is added up over all of them.

    Every rank has all columns, and takes part in every call, with no rows too. The ranks go through the same steps,
    and end with the same `g`. One iteration sends one float64 per column.
    """

    def __init__(self, rows: int, cols: int, storage: torch.dtype, world: World):
        super().__init__(rows, cols, storage)
        self._world = world

    def build(
        self,
        image: tuple[Noise, Tensor],
        text: tuple[Noise, Tensor],
        weights: tuple[float, float],
        arc: bool,
        kernel_eps: float | None,
    ) -> tuple[float, float]:
        """`TransportMatrix.build`; the extremes of S are those of all rows."""
        self._matrix.kernel = kernel_eps is not None
        low, high = super().build(image, text, weights, arc, kernel_eps) if self._shape[0] else (math.inf, -math.inf)
        extremes = torch.tensor([-low, high], dtype=torch.float64, device="cpu")
        self._world.all_reduce(extremes, "max")
        return -float(extremes[0]), float(extremes[1])

    def iterate(self, f: Tensor, g: Tensor, eps: float, tol: float, max_iter: int) -> tuple[int, int, float]:
        """`TransportMatrix.iterate` over the rows of all ranks."""
        goal, error = 1 / len(g), math.inf
        for iteration in range(max_iter):
            sums = self._column_sums(f, g, eps)
            if sums is None:
                return self.OUT_OF_RANGE, iteration, error
            error = float((sums - goal).abs().sum())
            if float(sums.min()) < _LEAST_SUM:
                g.copy_(eps * (math.log(goal) - self._column_logsumexp(f, eps)))
            else:
                g += eps * (goal / sums).log()
            if error <= tol:
                return self.CONVERGED, iteration + 1, error
        return self.STOPPED, max_iter, error

    def _column_sums(self, f: Tensor, g: Tensor, eps: float) -> Tensor | None:
        """Sums of the plan's columns over the rows of all ranks; None if one of them cannot hold its own."""
        own = self.panel_pass(f, g, eps, len(g)) if self._shape[0] else torch.zeros_like(g)
        total = torch.zeros(len(g) + 1, dtype=torch.float64, device="cpu")  # the last one counts the ranks that cannot
        total[:-1], total[-1] = (0.0, 1.0) if own is None else (own, 0.0)
        self._world.all_reduce(total)
        return None if total[-1] > 0 else total[:-1]

    def _column_logsumexp(self, f: Tensor, eps: float) -> Tensor:
        """log sum_i exp((f_i + S_ij) / eps) over the rows of all ranks, for columns to which no row gives mass that a
        float can hold; in the score domain, where alone that happens."""
        own = torch.full((1, self._shape[1]), -math.inf, dtype=torch.float64, device="cpu")
        for rows, potential in zip(self.scores().split(_ROWS_AT_ONCE), f.split(_ROWS_AT_ONCE)):
            scores = (rows.double() + potential.unsqueeze(1)) / eps
            own = torch.logaddexp(own, scores.logsumexp(0, keepdim=True))
        return self._world.gather_rows(own, [1] * self._world.size).logsumexp(0)


def load_scores(
    matrix: native.TransportMatrix, problem: Problem, kernel_eps: float | None
) -> tuple[float, float, float]:
    """Fills the matrix with S = offset - C: (offset, lowest S, highest S).

    With `kernel_eps`, and if no cost of this kind can leave the range, exponentials are written at once.
    """
    if problem.matrix is not None:
        low, high = (float(x) for x in torch.aminmax(problem.matrix))
        # In float32, as the compiled code takes it: potentials are given back with the very offset that was subtracted.
        offset = float(torch.tensor((low + high) / 2, dtype=torch.float32, device="cpu"))
        # Centred before it is rounded to float32: a large common offset would cost the small differences.
        cost = problem.matrix if problem.matrix.dtype == torch.float32 else (problem.matrix - offset).float()
        return offset, *matrix.load(cost.contiguous(), offset if cost.dtype == problem.matrix.dtype else 0.0)
    noise, data = problem.clouds()
    image, text = (
        (n.float().contiguous() if isinstance(n, Tensor) else n, d.float().contiguous()) for n, d in zip(noise, data)
    )
    offset = (math.pi / 2 if problem.cost == "arc" else 2.0) * sum(problem.weights)
    if kernel_eps is not None and not offset / kernel_eps <= _KERNEL_REACH[matrix.storage]:
        kernel_eps = None
    return offset, *matrix.build(image, text, problem.weights, problem.cost == "arc", kernel_eps)


def _transport_cost_cpu(problem: Problem) -> Tensor:
    matrix = native.TransportMatrix(*problem.shape, torch.float32)
    offset, _, _ = load_scores(matrix, problem, None)
    return offset - matrix.scores()


def _sinkhorn_cpu(problem: Problem, settings: SinkhornSettings) -> SinkhornResult:
    return CpuSolve(problem, settings).result()


# ---- compiled, CUDA -----------------------------------------------------------------------------------------------


class CudaSolve:
    """One problem on its way through the GPU solver; nothing waits for the GPU before `outcome` or `result`."""

    def __init__(self, problem: Problem, settings: SinkhornSettings):
        if settings.storage != torch.float32:
            raise ValueError("storage='float16' is for the cpu backend; the cuda backend keeps the matrix in float32")
        self._settings = settings
        self._transport, self._shift = cuda_matrix(problem)
        halvings = _halvings(problem, self._transport, settings.eps)
        self._transport.solve(settings.eps, settings.tol, settings.max_iter, halvings)

    def outcome(self) -> tuple[bool, int, float]:
        """(converged, iterations, column violation)."""
        iterations, converged, error = self._transport.status()
        return converged, iterations, error

    def result(self) -> SinkhornResult:
        """Potentials and what one more read of the matrix tells."""
        _, f, g, row_mass, row_cost = self._transport.read()
        row_error = float((row_mass.double() - 1).abs().mean())
        cost = float(row_cost.double().mean()) + self._shift
        converged, iterations, _ = self.outcome()
        converged = converged and row_error <= self._settings.tol
        return SinkhornResult(f + self._shift, g, iterations, row_error, cost, converged)

    def assign(self, uniform: Tensor | None) -> Tensor:
        """Target of each row: the plan's argmax, or a draw from the row."""
        return self._transport.read()[0] if uniform is None else self._transport.sample(uniform)


def cuda_matrix(problem: Problem) -> tuple[native.CudaTransport, float]:
    """The matrix on the device, and what to add to its costs to get the problem's.

    Dot products have float32 accuracy, or TF32 where `torch.set_float32_matmul_precision` allows it for torch's own.
    """
    transport = native.CudaTransport(*problem.shape, problem.anchor.device)
    if problem.matrix is not None:
        low, high = (float(x) for x in torch.aminmax(problem.matrix))
        middle = (low + high) / 2
        if problem.matrix.dtype == torch.float32:
            transport.load(problem.matrix.contiguous(), middle)
            return transport, 0.0
        # Centred before it is rounded to float32: a large common offset would cost the small differences.
        transport.load((problem.matrix - middle).float(), 0.0)
        return transport, middle
    noise, data = problem.clouds()
    image, text = ((as_dense(n, d.dtype).float().contiguous(), d.float().contiguous()) for n, d in zip(noise, data))
    precise = torch.get_float32_matmul_precision() == "highest"
    transport.build(image, text, problem.weights, problem.cost == "arc", precise)
    return transport, 0.0


def _halvings(problem: Problem, transport: native.CudaTransport, eps: float) -> int:
    """How often to halve eps on the way to the one asked for: not at all unless it is far below the cost's range."""
    largest = {"given": math.inf, "arc": math.pi, "chord": 4.0}[problem.cost] * sum(problem.weights)
    if largest <= 2 * _KERNEL_REACH[torch.float32] * eps:
        return 0
    spread = transport.spread()
    if spread > _FINEST * eps:
        raise ValueError(f"eps={eps} is too small for a cost that spans {spread}: float32 does not resolve it")
    return 0 if spread <= 2 * _KERNEL_REACH[torch.float32] * eps else int(math.log2(spread / (10 * eps)))


def _transport_cost_cuda(problem: Problem) -> Tensor:
    return cuda_matrix(problem)[0].costs()


def _sinkhorn_cuda(problem: Problem, settings: SinkhornSettings) -> SinkhornResult:
    return CudaSolve(problem, settings).result()


dispatch.register(
    "transport_cost",
    reference=Backend(_transport_cost_reference, ("cpu", "cuda")),
    cpu=native.backend(_transport_cost_cpu, dtypes=None),
    cuda=native.cuda_backend(_transport_cost_cuda),
)
dispatch.register(
    "sinkhorn",
    reference=Backend(_sinkhorn_reference, ("cpu", "cuda")),
    cpu=native.backend(_sinkhorn_cpu, dtypes=None),
    cuda=native.cuda_backend(_sinkhorn_cuda),
)
