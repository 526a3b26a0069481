"""The solvers of entropic transport: plain torch, compiled for CPUs, CUDA, and float64 where float32 does not do.

All have the same course. An iteration makes the rows of the plan exact, looks at the L1 violation of the columns, and
makes the columns exact. It stops when the violation is at most a tolerance, which bounds that of the rows after the
column update. What rounding adds to the violation is bounded beforehand (`Span`): where float32 cannot hold the plan
to the tolerance asked for, its potentials are the start of iterations in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from geoflow_fast.distributed import ALONE, World
from geoflow_fast.ops import native
from geoflow_fast.ops.transport import Problem, SinkhornSettings, Span

# Largest |S - centre| / eps whose exponential the kernel domain may hold: float32 reaches e^+-87, float16 e^+-9.7.
_KERNEL_REACH = {torch.float32: 80.0, torch.float16: 9.0}
# Column sums below this have lost terms to underflow: kLeastSum of csrc/cpu/sinkhorn_passes.h.
_LEAST_SUM = 1e-30
_LEAST_WIDE_SUM = 1e-280
_ROWS_AT_ONCE = 256
# Largest range of the cost over eps at which the CUDA backend starts from zero potentials.
_FAST_SPAN = 160.0
# Rows in bfloat16: from which sizes on they pay, how much of eps their rounding may be, and how many times its size two
# scores must differ for their order to be trusted.
_LEAST_ROUNDED_WIDTH = 128
_LEAST_ROUNDED_ENTRIES = 1 << 20
_ROUNDING_SHARE = 0.01
_ROUNDING_SPREAD = 6.0
# Entries of the matrix that are in float64 at a time: 2 MB, which stay in the cache of a processor, or 128 MB, which
# keep a GPU busy.
_WIDE_ENTRIES, _WIDE_ENTRIES_OF_A_GPU = 1 << 18, 1 << 24


class Solve(Protocol):
    """A solved problem."""

    @property
    def iterations(self) -> int:
        """Reads of the matrix."""

    @property
    def error(self) -> float:
        """An upper bound of the L1 violation of the row sums of the plan, rounding included."""

    @property
    def converged(self) -> bool:
        """Whether the error is within the tolerance that was asked for."""

    def plan(self) -> tuple[Tensor, Tensor, float]:
        """Potentials f [n] and g [m] of the problem's costs, float64, and the cost of the plan."""

    def assign(self, uniform: Tensor | None) -> Tensor:
        """Target of each row, int64 [n]: the plan's argmax, or a draw from the row at `uniform` [n] in [0, 1)."""


# ---- reference ----------------------------------------------------------------------------------------------------


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


def assign_reference(cost: Tensor, g: Tensor, eps: float, uniform: Tensor | None) -> Tensor:
    """Target column of each row, int64 [n]: argmax_j of the plan, or its inverse row distribution at `uniform` [n]."""
    if uniform is None:
        return (g - cost).argmax(dim=1)
    cumulative = torch.softmax((g - cost).double() / eps, dim=1).cumsum(dim=1)
    target = uniform.double() * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=cost.shape[1] - 1)


class ReferenceSolve:
    """A problem solved in plain torch, in the dtype of the input or, where float32 cannot hold the plan, in float64."""

    def __init__(self, problem: Problem, settings: SinkhornSettings):
        cost, eps = problem.dense(), settings.eps
        span = span_of(cost, is_centred=False)
        span.check(settings)
        if span.rounding(cost.dtype, eps) > settings.tol / 2:
            cost = cost.double()
        rounding = span.rounding(cost.dtype, eps)
        tol = max(settings.tol - rounding, 0.0)
        self._cost, self._eps = cost, eps
        self._f, self._g, self.iterations, violation = sinkhorn_reference(cost, eps, tol, settings.max_iter)
        self.converged, self.error = judge(violation, tol, rounding, settings)

    def plan(self) -> tuple[Tensor, Tensor, float]:
        """Potentials in float64, and the cost of the plan."""
        plan = ((self._f[:, None] + self._g - self._cost) / self._eps).exp()
        return self._f.double(), self._g.double(), float((plan * self._cost).sum())

    def assign(self, uniform: Tensor | None) -> Tensor:
        """Target of each row."""
        return assign_reference(self._cost, self._g, self._eps, uniform)


def span_of(cost: Tensor, *, is_centred: bool) -> Span:
    """The extremes of a matrix; waits for the device."""
    low, high = torch.aminmax(cost)
    return Span(float(low), float(high), is_centred)


def judge(violation: float, tol: float, rounding: float, settings: SinkhornSettings) -> tuple[bool, float]:
    """Whether a solve that aimed at `tol` has converged, and its error with rounding."""
    error = violation + rounding
    # tol + rounding may exceed settings.tol by its own rounding
    converged = violation <= tol and rounding <= settings.tol
    return converged, min(error, settings.tol) if converged else error


# ---- falling eps --------------------------------------------------------------------------------------------------


class Passes(Protocol):
    """What can iterate: (outcome, iterations, column violation); `f` and `g` are updated in place."""

    def iterate(self, f: Tensor, g: Tensor, eps: float, tol: float, max_iter: int) -> tuple[int, int, float]:
        """Sinkhorn iterations."""


def anneal(passes: Passes, f: Tensor, g: Tensor, eps: tuple[float, float], tol: float, budget: tuple[int, int]) -> int:
    """Carries the potentials from eps[0], where they settle at once, down by halves to the eps[1] that is asked for.

    At an eps far below the spread of the cost this takes several times fewer iterations than starting from zero.
    `budget`: iterations of one stage and of all together. Returns the iterations done.
    """
    now, least = eps
    stage, total = budget
    done = 0
    while now > 2 * least and min(stage, total - done) > 0:
        done += passes.iterate(f, g, now, tol, min(stage, total - done))[1]
        now /= 2
    return done


# ---- float64 ------------------------------------------------------------------------------------------------------


class WideSolve:
    """Ends in float64 what another solver has begun in float32; plain torch, on any device.

    `cost` [n, m] of any dtype is read block by block; beside it there are O(n + m) numbers. `g` [m] is where the
    solver came to in `iterations` iterations, at `eps`. With a `world`, the rows are some of those of all ranks, of
    which there are as many as columns. Column sums and `g` are on the host, where ranks add up the sums and the next
    step is decided: a GPU is waited for once an iteration.
    """

    def __init__(
        self,
        cost: Tensor,
        span: Span,
        settings: SinkhornSettings,
        g: Tensor,
        eps: float,
        iterations: int,
        world: World = ALONE,
    ):
        self._cost, self._settings, self._world = cost, settings, world
        self._middle = (span.low + span.high) / 2
        rows, cols = cost.shape
        self._log_rows = math.log(rows if world.size == 1 else cols)
        self._block = max(1, (_WIDE_ENTRIES_OF_A_GPU if cost.is_cuda else _WIDE_ENTRIES) // cols)
        self._f = torch.zeros(rows, dtype=torch.float64, device=cost.device)
        self._g = g.double().cpu()
        rounding = span.rounding(torch.float64, settings.eps)
        tol = max(settings.tol - rounding, 0.0)
        left = settings.max_iter - iterations
        budget = settings.max_iter // 16, left - 1
        left -= anneal(self, self._f, self._g, (eps / 2, settings.eps), max(tol, rounding), budget)
        _, last, violation = self.iterate(self._f, self._g, settings.eps, tol, left)
        self.iterations = settings.max_iter - left + last
        self.converged, self.error = judge(violation, tol, rounding, settings)

    def iterate(self, f: Tensor, g: Tensor, eps: float, tol: float, max_iter: int) -> tuple[int, int, float]:
        """Iterations in float64: (outcome, iterations, column violation)."""
        goal, violation = 1 / len(g), math.inf
        for iteration in range(max_iter):
            sums = self._column_sums(f, g, eps)
            violation = float((sums - goal).abs().sum())
            log_sums = sums.log() if float(sums.min()) > _LEAST_WIDE_SUM else self._log_column_sums(f, g, eps)
            g += eps * (math.log(goal) - log_sums)
            if violation <= tol:
                return native.TransportMatrix.CONVERGED, iteration + 1, violation
        return native.TransportMatrix.STOPPED, max_iter, violation

    def _column_sums(self, f: Tensor, g: Tensor, eps: float) -> Tensor:
        """Makes the rows exact, in `f`, and returns the column sums of that plan over the rows of all ranks."""
        there = self._on_device(g)
        sums = torch.zeros_like(there)
        for cost, potential in zip(self._blocks(), f.split(self._block)):
            scores = cost.neg_().add_(there).div_(eps)  # [block, m]
            shares = scores.softmax(1)
            # the log-sum-exp of a row is its largest score less the logarithm of the share of that
            potential.copy_((shares.amax(1).log_() - scores.amax(1) - self._log_rows).mul_(eps))
            sums += shares.sum(0)
        return self._world.all_reduce(sums.cpu()).mul_(math.exp(-self._log_rows))

    def _log_column_sums(self, f: Tensor, g: Tensor, eps: float) -> Tensor:
        """The logarithms of the column sums by a second read, for columns to which no row gives mass that a float can
        hold, as happens while potentials are far from settled."""
        there = self._on_device(g)
        sums = torch.full((1, len(g)), -math.inf, dtype=torch.float64, device=there.device)
        for cost, potential in zip(self._blocks(), f.split(self._block)):
            scores = cost.neg_().add_(there).add_(potential.unsqueeze(1)).div_(eps)
            sums = torch.logaddexp(sums, scores.logsumexp(0, keepdim=True))
        return self._world.gather_rows(sums.cpu(), [1] * self._world.size).logsumexp(0)

    def _on_device(self, g: Tensor) -> Tensor:
        """Potentials beside the costs. Nothing waits for a copy from pinned memory."""
        if self._cost.is_cuda:
            return g.pin_memory().to(self._cost.device, non_blocking=True)
        return g.to(self._cost.device)

    def _blocks(self) -> Iterator[Tensor]:
        """Costs less the middle one, in float64, [block, m] each."""
        for rows in self._cost.split(self._block):
            yield rows.double().sub_(self._middle) if rows.dtype != torch.float64 else rows - self._middle

    def plan(self) -> tuple[Tensor, Tensor, float]:
        """Potentials of the costs, and the cost of the plan."""
        total, eps, g = self._middle, self._settings.eps, self._on_device(self._g)
        for cost, f in zip(self._blocks(), self._f.split(self._block)):
            plan = ((f.unsqueeze(1) + g - cost) / eps).exp_()
            total += float(plan.mul_(cost).sum(1).sum())  # rows first: the sum must not depend on the number of threads
        return self._f + self._middle, g, total

    def assign(self, uniform: Tensor | None) -> Tensor:
        """Target of each row."""
        g = self._on_device(self._g)
        draws = [None] * len(self._cost) if uniform is None else uniform.split(self._block)
        parts = [assign_reference(c, g, self._settings.eps, u) for c, u in zip(self._blocks(), draws)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=g.device)


def solve_panel(problem: Problem, settings: SinkhornSettings, world: World, *, compiled: bool = False) -> WideSolve:
    """Solves for this rank's rows of a square problem between points, in plain torch on any device, together with the
    other ranks. With `compiled`, costs come from the GPU solver's kernel, of points that are rounded to float16."""
    highest = (math.pi if problem.cost == "arc" else 4.0) * sum(problem.weights)
    has_kernel = compiled and problem.shape[0] > 0  # a launch has at least one row
    cost = cuda_matrix(problem, half_points=True)[0].costs() if has_kernel else problem.dense()
    span = Span(0.0, highest, False)
    span.check(settings)
    g = torch.zeros(problem.shape[1], dtype=torch.float64, device="cpu")
    # Far below the range of the cost, potentials come down from larger values of eps.
    start = settings.eps if highest <= _FAST_SPAN * settings.eps else highest / 10
    return WideSolve(cost, span, settings, g, start, 0, world)


# ---- compiled, CPU ------------------------------------------------------------------------------------------------


def solve_cpu(
    problem: Problem, settings: SinkhornSettings, world: World | None = None, *, rounded: bool = False
) -> Solve:
    """Solves in compiled float32, and ends in float64 where that is needed. With a `world`, the problem's rows are
    this rank's rows of a square problem. `rounded` allows inner products of rows in bfloat16, where they pay and change
    potentials by less than 1e-3; the largest entries of the plan's rows are those of float32 nevertheless."""
    solve = CpuSolve(problem, settings, world, rounded and world is None and _may_be_rounded(problem, settings))
    return solve if solve.stage.is_last else solve.in_float64(problem)


def _rounding_of(problem: Problem) -> float:
    """The root mean square, and somewhat more, of what rounding rows to bfloat16 does to a cost: a product of two
    coordinates is off by .6 2^-8, those of a row are independent, and d^(-1/2) is the share of each."""
    _, data = problem.clouds()
    slope = 1.0 if problem.cost == "arc" else 2.0
    return 2.0**-8 * slope * sum(weight / math.sqrt(x.shape[1]) for weight, x in zip(problem.weights, data))


def _may_be_rounded(problem: Problem, settings: SinkhornSettings) -> bool:
    """Whether rows in bfloat16 pay: on a processor with such a unit, for large problems whose plan hardly changes."""
    if problem.matrix is not None or native.missing_bfloat16() is not None:
        return False
    _, data = problem.clouds()
    single = all(x.dtype == torch.float32 for x in data)
    wide = min(x.shape[1] for x in data) >= _LEAST_ROUNDED_WIDTH
    large = problem.shape[0] * problem.shape[1] >= _LEAST_ROUNDED_ENTRIES
    return single and wide and large and _rounding_of(problem) <= _ROUNDING_SHARE * settings.eps


class CpuSolve:
    """One problem on its way through the compiled solver: build, choose the domain, iterate, read."""

    def __init__(self, problem: Problem, settings: SinkhornSettings, world: World | None, rounded: bool):
        self._settings, self._world = settings, world
        self._mended = problem if rounded else None
        rows, cols = problem.shape
        kind = native.TransportMatrix if world is None else functools.partial(Panel, world=world)
        self._matrix = kind(rows, cols, settings.storage)
        self._f = torch.zeros(rows, dtype=torch.float64, device="cpu")
        self._g = torch.zeros(cols, dtype=torch.float64, device="cpu")
        self._offset, low, high = load_scores(self._matrix, problem, settings.eps, rounded=rounded)
        is_centred = problem.matrix is not None or settings.storage == torch.float16
        self._span = Span(self._offset - high, self._offset - low, is_centred)
        self._span.check(settings)
        self.stage = self._span.stage(settings)
        self.iterations = 0
        # Exponentials where they fit their range; else scores, and a start from larger values of eps.
        if not self._matrix.in_kernel_domain:
            if (high - low) / 2 <= _KERNEL_REACH[settings.storage] * self.stage.eps:
                self._matrix.enter_kernel((low + high) / 2, self.stage.eps)
            else:
                budget = settings.max_iter // 16, settings.max_iter - 1
                start = (high - low) / 10, self.stage.eps
                self.iterations = anneal(self._matrix, self._f, self._g, start, self.stage.tol, budget)
        violation = self._iterate()
        self.converged, self.error = judge(violation, self.stage.tol, self.stage.rounding, settings)

    def _iterate(self) -> float:
        """Iterates to the end; where the kernel domain cannot follow the potentials, goes on in the score domain.
        Returns the column violation."""
        most = self._settings.max_iter
        if not self.stage.is_last:  # at least one iteration is left for float64, most of them if eps falls further
            most = most - 1 if self.stage.eps == self._settings.eps else min(most - 1, self.iterations + most // 16)
        while True:
            outcome, iterations, violation = self._matrix.iterate(
                self._f, self._g, self.stage.eps, self.stage.tol, most - self.iterations
            )
            self.iterations += iterations
            if outcome != self._matrix.OUT_OF_RANGE:
                return violation
            self._matrix.leave_kernel()

    def in_float64(self, problem: Problem) -> WideSolve:
        """Ends the solve for the costs as `transport_cost` gives them."""
        cost = problem.matrix
        if cost is None:
            if self._matrix.in_kernel_domain or self._mended is not None:
                load_scores(self._matrix, problem, None)
            cost = self._offset - self._matrix.scores()
        world = self._world or ALONE
        return WideSolve(cost, self._span, self._settings, self._g, self.stage.eps, self.iterations, world)

    def plan(self) -> tuple[Tensor, Tensor, float]:
        """Potentials of C (the solver's refer to S = offset - C), and the plan's cost from one more read."""
        cost = self._offset - self._matrix.mean_score(self._f, self._g, self._settings.eps)
        return self._f + self._offset, self._g, cost

    def assign(self, uniform: Tensor | None) -> Tensor:
        """Target of each row."""
        if self._mended is None or uniform is not None:
            return self._matrix.assign(self._f, self._g, self._settings.eps, uniform)
        problem, (noise, data) = self._mended, self._mended.clouds()
        pairs = [(n.float().contiguous(), d.float().contiguous()) for n, d in zip(noise, data)]
        arc, margin = problem.cost == "arc", _ROUNDING_SPREAD * _rounding_of(problem)
        return self._matrix.resolve(pairs[0], pairs[1], problem.weights, arc, self._g, self._settings.eps, margin)


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
        image: tuple[Tensor, Tensor],
        text: tuple[Tensor, Tensor],
        weights: tuple[float, float],
        arc: bool,
        kernel_eps: float | None,
        *,
        bfloat16: bool = False,
    ) -> tuple[float, float]:
        """`TransportMatrix.build`; the extremes of S are those of all rows."""
        self._matrix.kernel = kernel_eps is not None
        low, high = math.inf, -math.inf
        if self._shape[0]:
            low, high = super().build(image, text, weights, arc, kernel_eps, bfloat16=bfloat16)
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
    matrix: native.TransportMatrix, problem: Problem, kernel_eps: float | None, *, rounded: bool = False
) -> tuple[float, float, float]:
    """Fills the matrix with S = offset - C: (offset, lowest S, highest S).

    With `kernel_eps`, and if no cost of this kind can leave the range, exponentials are written at once. `rounded`:
    from rows in bfloat16.
    """
    if problem.matrix is not None:
        low, high = (float(x) for x in torch.aminmax(problem.matrix))
        # In float32, as the compiled code takes it: potentials are given back with the very offset that was subtracted.
        offset = float(torch.tensor((low + high) / 2, dtype=torch.float32, device="cpu"))
        # Centred before it is rounded to float32: a large common offset would cost the small differences.
        cost = problem.matrix if problem.matrix.dtype == torch.float32 else (problem.matrix - offset).float()
        return offset, *matrix.load(cost.contiguous(), offset if cost.dtype == problem.matrix.dtype else 0.0)
    noise, data = problem.clouds()
    image, text = ((n.float().contiguous(), d.float().contiguous()) for n, d in zip(noise, data))
    offset = (math.pi / 2 if problem.cost == "arc" else 2.0) * sum(problem.weights)
    if kernel_eps is not None and not offset / kernel_eps <= _KERNEL_REACH[matrix.storage]:
        kernel_eps = None
    arc = problem.cost == "arc"
    return offset, *matrix.build(image, text, problem.weights, arc, kernel_eps, bfloat16=rounded)


# ---- compiled, CUDA -----------------------------------------------------------------------------------------------


def solve_cuda(problem: Problem, settings: SinkhornSettings, *, half_points: bool = False) -> Solve:
    """Solves in float32 on the GPU, and ends in float64 where that is needed. `half_points` as in `cuda_matrix`."""
    solve = CudaSolve(problem, settings, half_points)
    return solve if solve.stage.is_last else solve.in_float64(problem)


class CudaSolve:
    """One problem on its way through the GPU solver; nothing waits for the GPU before the result is asked for."""

    def __init__(self, problem: Problem, settings: SinkhornSettings, half_points: bool):
        self._settings = settings
        self._transport, self._shift, self._span = cuda_matrix(problem, settings.storage, half_points)
        self.stage = self._span.stage(settings)
        if problem.matrix is None and not (self.stage.is_last and self._span.high <= _FAST_SPAN * settings.eps):
            self._span = span_of(self._transport.costs(), is_centred=False)  # closer than what any points could cost
            self.stage = self._span.stage(settings)
        self._span.check(settings)
        stage, spread = self.stage, self._span.high - self._span.low
        # On the way to eps it is halved, but not at all unless it is far below the cost's range.
        halvings = 0 if spread <= _FAST_SPAN * stage.eps else int(math.log2(spread / (10 * stage.eps)))
        most = settings.max_iter if stage.is_last else max(settings.max_iter - 1, 1)
        self._transport.solve(stage.eps, stage.tol, most, halvings)

    @functools.cached_property
    def _outcome(self) -> tuple[int, bool, float]:
        """(iterations, whether converged, error)."""
        iterations, _, violation = self._transport.status()
        return iterations, *judge(violation, self.stage.tol, self.stage.rounding, self._settings)

    @property
    def iterations(self) -> int:
        """Reads of the matrix; waits for the GPU."""
        return self._outcome[0]

    @property
    def converged(self) -> bool:
        """Whether the error is within the tolerance; waits for the GPU."""
        return self._outcome[1]

    @property
    def error(self) -> float:
        """A bound of the plan's error; waits for the GPU."""
        return self._outcome[2]

    @property
    def status(self) -> Tensor:
        """What the solver says about its end, on the device: `native.CudaTransport.read_status` explains it."""
        return self._transport.status_on_device

    def in_float64(self, problem: Problem) -> WideSolve:
        """Ends the solve for the costs as `transport_cost` gives them."""
        cost = self._transport.costs() if problem.matrix is None else problem.matrix
        g, done = self._transport.read()[2], self.iterations
        if done == self._settings.max_iter:  # one iteration was asked for, and it is the one in float64
            g, done = torch.zeros_like(g), 0
        return WideSolve(cost, self._span, self._settings, g, self.stage.eps, done)

    def plan(self) -> tuple[Tensor, Tensor, float]:
        """Potentials, and the plan's cost from one more read of the matrix."""
        _, f, g, _, row_cost = self._transport.read()
        return f + self._shift, g, float(row_cost.double().mean()) + self._shift

    def assign(self, uniform: Tensor | None) -> Tensor:
        """Target of each row."""
        return self._transport.read()[0] if uniform is None else self._transport.sample(uniform)


def cuda_matrix(
    problem: Problem, storage: torch.dtype = torch.float32, half_points: bool = False
) -> tuple[native.CudaTransport, float, Span]:
    """The matrix on the device, what to add to its costs to get the problem's, and the range of these.

    Dot products are those of float32 points, or of the points rounded to float16: with `half_points`, for a matrix in
    float16, and where `torch.set_float32_matmul_precision` allows TF32 for torch's own, which is as accurate. The range
    is that of a given matrix, or what points of this kind can cost at most.
    """
    transport = native.CudaTransport(*problem.shape, problem.anchor.device, storage)
    if problem.matrix is not None:
        span = span_of(problem.matrix, is_centred=True)
        middle = (span.low + span.high) / 2
        if problem.matrix.dtype == storage:
            transport.load(problem.matrix.contiguous(), middle)
            return transport, 0.0, span
        # Centred before it is rounded: a large common offset would cost the small differences.
        transport.load((problem.matrix - middle).to(storage), 0.0)
        return transport, middle, span
    noise, data = problem.clouds()
    half = half_points or storage == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    dtype = torch.float16 if half else torch.float32
    image, text = ((n.to(dtype).contiguous(), d.to(dtype).contiguous()) for n, d in zip(noise, data))
    transport.build(image, text, problem.weights, problem.cost == "arc")
    return transport, 0.0, Span(0.0, (math.pi if problem.cost == "arc" else 4.0) * sum(problem.weights), False)
