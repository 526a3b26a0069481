"""The CUDA kernels of the transport solver, compiled for the CPU and run thread by thread (cuda_emulation/emulation.h).

The very headers that nvcc compiles are checked against float64, under four orders of threads, with AddressSanitizer,
UndefinedBehaviorSanitizer and ThreadSanitizer; and faults put into them on purpose must be caught.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pybind11
import pytest

from tests.gpu_emulated.cuda_emulation.workshop import EMULATION, ROOT, SANITIZER_STATUS, SCHEDULES, Array, Workshop
from tests.reliability.races import units
from tools.cuda_build import DYNAMIC_SHARED


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("cuda_emulation"))


def test_the_build_table_knows_the_shared_memory_of_launches() -> None:
    entries = {"float": "float", "Half": "geoflow::cuda::Half"}
    sizes = {
        **dict.fromkeys(("score_kernel<Half>", "score_kernel<float>"), "kScoreSharedBytes"),
        **{
            f"sinkhorn_kernel<{vectors}, {entry}>": f"kSinkhornSharedBytes<{vectors}, {qualified}>"
            for vectors in (1, 2, 4)
            for entry, qualified in entries.items()
        },
    }
    assert sizes.keys() == DYNAMIC_SHARED.keys()
    source = '#include "cuda/score.cuh"\n#include "cuda/sinkhorn.cuh"\n' + "".join(
        f"static_assert(geoflow::cuda::{size} == {DYNAMIC_SHARED[name]});\n" for name, size in sizes.items()
    )
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", f"-I{EMULATION}", f"-I{ROOT / 'csrc'}", "-x", "c++", "-"]
    outcome = subprocess.run(command, input=source, text=True, capture_output=True)
    assert outcome.returncode == 0, outcome.stderr


# ---- scores -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreCase:
    rows: int
    cols: int
    dims: tuple[int, int]
    half: bool = False

    def clouds(self) -> list[Array]:
        """x0, y0, x1, y1: unit rows, of which some coincide and some are antipodes, as the kernel is given them."""
        return [x.astype(np.float16) for x in self.points()]

    def points(self) -> list[Array]:
        """The same before they are rounded to float16."""
        rng = np.random.default_rng(self.rows + 1000 * self.cols)
        clouds = [rng.standard_normal((n, d)) for d in self.dims for n in (self.rows, self.cols)]
        x0, y0, x1, y1 = ((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in clouds)
        shared = min(self.rows, self.cols) // 3
        y0[:shared] = x0[:shared]
        y1[:shared] = -x1[:shared]
        return [x0, y0, x1, y1]

    def run(self, workshop: Workshop, build: str = "plain", schedule: str = "greedy", edit: Any = None) -> Any:
        return workshop.start(
            "emulate_score",
            build,
            edit,
            self.clouds(),
            schedule=SCHEDULES[schedule],
            seed=1,
            **{"-DHALF_ENTRIES": self.half},
            rows=self.rows,
            cols=self.cols,
            dim0=self.dims[0],
            dim1=self.dims[1],
        )

    def scores(self, output: bytes) -> Array:
        """The scores [rows, cols] that the kernel wrote."""
        scores = np.frombuffer(output, np.float16 if self.half else np.float32).reshape(self.rows, -1)
        assert np.isfinite(scores).all()
        return scores[:, : self.cols].astype(np.float64)

    def check(self, output: bytes) -> None:
        """Against float64; an arc may be off by the dot product's error times the slope of the arc sine."""
        scores = self.scores(output)
        truth, allowed = np.zeros((self.rows, self.cols)), np.full((self.rows, self.cols), 2e-6)
        dot_error = 8e-4
        x0, y0, x1, y1 = (x.astype(np.float64) for x in self.points())
        for x, y in ((x0, y0), (x1, y1)):
            dot = np.clip(x @ y.T, -1, 1)
            truth += np.arcsin(dot)
            allowed += dot_error * 2 / np.sqrt(1 - dot**2 + dot_error)
        if self.half:
            allowed += 2.0**-11 * np.abs(truth)
        assert (np.abs(scores - truth) <= allowed).all()


SCORES = [
    ScoreCase(1, 1, (8, 8)),
    ScoreCase(7, 129, (40, 72)),
    ScoreCase(129, 7, (40, 8)),
    ScoreCase(260, 150, (40, 8)),
    ScoreCase(150, 260, (64, 136)),
    ScoreCase(130, 130, (128, 96), half=True),
    ScoreCase(1, 1, (8, 8), half=True),
    ScoreCase(140, 131, (40, 48), half=True),
]


@pytest.mark.parametrize("case", SCORES, ids=str)
def test_scores_match_float64(workshop: Workshop, case: ScoreCase) -> None:
    outcome = case.run(workshop)
    assert outcome.returncode == 0, outcome.stderr.decode()
    case.check(outcome.stdout)


def test_scores_cross_the_groups_of_tiles(workshop: Workshop) -> None:
    """More than kScoreGroup rows of tiles, the last group smaller than the others."""
    case = ScoreCase(1170, 260, (8, 16))
    outcome = case.run(workshop)
    assert outcome.returncode == 0, outcome.stderr.decode()
    case.check(outcome.stdout)


@pytest.mark.parametrize("schedule", ["greedy", "reversed"])
def test_launchers_ask_the_device_and_leave_the_current_one_alone(workshop: Workshop, schedule: str) -> None:
    """On a device with 99 KB of shared memory a block, too; and they name a driver that is too old. See
    emulate_launchers.cpp."""
    outcome = workshop.start("emulate_launchers", "plain", None, [], schedule=SCHEDULES[schedule], seed=1)
    assert outcome.returncode == 0, outcome.stderr.decode()


# ---- solver -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    iterations: int
    converged: bool
    error: float
    f: Array
    g: Array
    row_mass: Array
    argmax: Array
    draw: Array


@dataclass(frozen=True)
class SolveCase:
    rows: int
    cols: int
    blocks: int = 2
    wide: bool = False
    eps: float = 0.05
    tol: float = 1e-3
    max_iter: int = 8
    span: float = 1.0  # of the costs
    shift: float = 0.0  # added to all costs, which are this less the scores
    tilt: float = 0.0  # span of a part u_i + v_j, which changes the potentials and not the plan
    halvings: int = 0
    half: bool = False

    @property
    def entry(self) -> Any:
        """The type of the matrix."""
        return np.float16 if self.half else np.float32

    def cost(self) -> Array:
        """In float64, of scores that were rounded to the matrix's type."""
        rng = np.random.default_rng(self.rows + 1000 * self.cols)
        cost = self.shift + self.span * rng.random((self.rows, self.cols))
        cost += self.tilt * (rng.random((self.rows, 1)) + rng.random(self.cols))
        return self.shift - (self.shift - cost).astype(self.entry).astype(np.float64)

    def uniform(self) -> Array:
        return np.random.default_rng(7).random(self.rows)

    def run(self, workshop: Workshop, build: str = "plain", schedule: str = "greedy", edit: Any = None) -> Any:
        stride = -(-self.cols // 4) * 4
        matrix = np.full((self.rows, stride), np.nan, self.entry)  # padding must not matter
        matrix[:, : self.cols] = self.shift - self.cost()
        return workshop.start(
            "emulate_sinkhorn",
            build,
            edit,
            [matrix, self.uniform()],
            schedule=SCHEDULES[schedule],
            seed=1,
            wide=int(self.wide),
            **{"-DHALF_ENTRIES": self.half},
            blocks=self.blocks,
            rows=self.rows,
            cols=self.cols,
            stride=stride,
            eps=self.eps,
            tol=self.tol,
            max_iter=self.max_iter,
            halvings=self.halvings,
            offset=self.shift,
        )

    def read(self, output: bytes) -> Solution:
        offset = 0

        def take(dtype: Any, count: int) -> Array:
            nonlocal offset
            values = np.frombuffer(output, dtype, count, offset)
            offset += values.nbytes
            return values

        iterations, error, converged = take(np.float64, 3)
        return Solution(
            int(iterations),
            bool(converged),
            float(error),
            take(np.float64, self.rows),
            take(np.float64, self.cols),
            take(np.float32, self.rows),
            take(np.int64, self.rows),
            take(np.int64, self.rows),
        )

    def truth(self) -> tuple[int, float, Array, Array]:
        """Iterations, error, f and g of the same algorithm in float64 (csrc/sinkhorn.h)."""
        cost, g, iteration = self.cost(), np.zeros(self.cols), 0
        for halvings in range(self.halvings, -1, -1):
            eps, error, budget = self.eps * 2**halvings, np.inf, self.max_iter - iteration
            if halvings > 0:
                budget = min(self.max_iter // 16, budget - 1)
            while error > self.tol and budget > 0:
                iteration, budget = iteration + 1, budget - 1
                f = -eps * (_logsumexp((g - cost) / eps, 1) + np.log(self.rows))
                log_columns = _logsumexp((f[:, None] + g - cost) / eps, 0)
                error = np.abs(np.exp(log_columns) - 1 / self.cols).sum()
                g = g - eps * (log_columns + np.log(self.cols))
        return iteration, error, f, g

    def check(self, output: bytes, within: float = 2e-5, floor: float = 1e-6) -> Solution:
        """`within`: allowed error of the potentials in units of eps; `floor`: of a marginal error of zero."""
        readings, cost, (iterations, error, f, g) = self.read(output), self.cost(), self.truth()
        for name, value in vars(readings).items():
            assert np.isfinite(value).all(), name
        assert readings.iterations == iterations
        assert readings.converged == (error <= self.tol)
        assert readings.error == pytest.approx(error, rel=1e-2 + 20 * within, abs=floor)
        np.testing.assert_allclose(readings.f, f, atol=within * self.eps, rtol=0)
        np.testing.assert_allclose(readings.g, g, atol=within * self.eps, rtol=0)
        plan = np.exp((f[:, None] + g - cost) / self.eps) * self.rows
        np.testing.assert_allclose(readings.row_mass, plan.sum(1), rtol=1e-4 + 4 * within)
        score = g - cost
        chosen = score[np.arange(self.rows), readings.argmax]
        assert (score.max(1) - chosen <= 4 * within * self.eps).all()
        share = plan.cumsum(1) / plan.sum(1, keepdims=True)
        upper = share[np.arange(self.rows), readings.draw]
        lower = upper - (plan / plan.sum(1, keepdims=True))[np.arange(self.rows), readings.draw]
        slack = 1e-5 + 4 * within
        assert ((lower - slack <= self.uniform()) & (self.uniform() <= upper + slack)).all()
        return readings


def _logsumexp(x: Array, axis: int) -> Array:
    top = x.max(axis, keepdims=True)
    return np.squeeze(top, axis) + np.log(np.exp(x - top).sum(axis))


# Every instantiation that ships: one, two and four vectors a thread, and the wide kernel.
SOLVES = [
    SolveCase(1, 1, blocks=1),
    SolveCase(1, 7, blocks=1),
    SolveCase(129, 7, blocks=3),
    SolveCase(7, 129, blocks=3),
    SolveCase(33, 1023),
    SolveCase(61, 517, blocks=4, shift=1.5),
    SolveCase(40, 2100, blocks=3),
    SolveCase(11, 2101),
    SolveCase(13, 5001, blocks=3),
    SolveCase(9, 8191),
    SolveCase(9, 8300, blocks=3),
    SolveCase(23, 517, wide=True),
    SolveCase(1, 1, blocks=1, half=True),
    SolveCase(61, 517, blocks=4, shift=1.5, half=True),
    SolveCase(11, 2101, shift=1.5, half=True),
    SolveCase(9, 8191, shift=1.5, half=True),
    SolveCase(23, 517, shift=1.5, wide=True, half=True),
    SolveCase(40, 40, blocks=1, shift=1000.0, eps=0.05, max_iter=40),
]


@pytest.mark.parametrize("case", SOLVES, ids=str)
def test_solver_matches_float64(workshop: Workshop, case: SolveCase) -> None:
    outcome = case.run(workshop)
    assert outcome.returncode == 0, outcome.stderr.decode()
    case.check(outcome.stdout)


@pytest.mark.parametrize(
    ("case", "within"),
    [
        (SolveCase(33, 33, blocks=1, eps=10.0), 2e-5),
        (SolveCase(33, 40, blocks=1, eps=0.005, max_iter=40), 2e-4),
        (SolveCase(33, 33, blocks=1, eps=1e-4, max_iter=60), 2e-2),
        (SolveCase(40, 33, blocks=1, eps=1.0, span=1e6, max_iter=60), 0.3),
        (SolveCase(33, 517, eps=1.0, span=1e6, max_iter=8, wide=True), 0.3),
        (SolveCase(40, 33, blocks=1, eps=0.005, halvings=4, max_iter=80), 2e-4),
        (SolveCase(17, 33, blocks=1, eps=1e-4, halvings=10, max_iter=64, wide=True), 2e-2),
        (SolveCase(17, 40, blocks=1, eps=1.0, span=1e5, halvings=14, max_iter=16), 0.1),
    ],
    ids=str,
)
def test_solver_stays_finite_and_right_at_any_range(workshop: Workshop, case: SolveCase, within: float) -> None:
    """Columns underflow here by thousands of nats. In float32 an exponent of 1e6 nats is known to 0.1 nats."""
    outcome = case.run(workshop)
    assert outcome.returncode == 0, outcome.stderr.decode()
    case.check(outcome.stdout, within)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "within"),
    [
        (SolveCase(64, 64, eps=1e-3, max_iter=500), 2e-3),
        (SolveCase(48, 48, eps=1.0, span=1e6, max_iter=300), 0.3),
        (SolveCase(600, 600, blocks=4, eps=0.05, max_iter=100), 2e-5),
        (SolveCase(300, 2300, blocks=3, eps=0.01, max_iter=60), 1e-4),
        (SolveCase(30, 16400, blocks=3, max_iter=20), 2e-5),
        (SolveCase(1500, 8190, blocks=4, max_iter=2), 2e-5),
    ],
    ids=str,
)
def test_long_solves(workshop: Workshop, case: SolveCase, within: float) -> None:
    outcome = case.run(workshop)
    assert outcome.returncode == 0, outcome.stderr.decode()
    case.check(outcome.stdout, within)


def test_float32_converges_where_exponents_are_thousands(workshop: Workshop) -> None:
    """tol is far below the last bit of an exponent, 1e-3: what still moves of the potentials is kept apart."""
    case = SolveCase(33, 40, blocks=1, eps=1e-4, span=3e-4, tilt=1.0, tol=1e-5, max_iter=100)
    outcome = case.run(workshop)
    assert outcome.returncode == 0, outcome.stderr.decode()
    readings = case.read(outcome.stdout)
    assert readings.converged
    assert np.abs(readings.row_mass - 1).mean() <= 2e-5


def test_ties_go_to_the_first_column(workshop: Workshop) -> None:
    """Equal costs: every column is as good; the answer must not depend on lanes."""
    case = SolveCase(5, 300, span=0.0)
    readings = case.read(case.run(workshop).stdout)
    assert (readings.argmax == 0).all()


# ---- order of threads, and sanitizers -----------------------------------------------------------------------------

SMALL_SCORE = ScoreCase(131, 134, (40, 40))
SMALL_SCORE_HALF = ScoreCase(131, 134, (40, 72), half=True)
SMALL_SOLVE = SolveCase(7, 2101, max_iter=3)
SMALL_SOLVE_SHORT = SolveCase(7, 515, max_iter=2)
SMALL_WIDE = SolveCase(7, 2101, max_iter=2, wide=True)
SMALL_HALF = SolveCase(7, 2101, max_iter=3, shift=1.5, half=True)
SMALL = [SMALL_SCORE, SMALL_SCORE_HALF, SMALL_SOLVE, SMALL_SOLVE_SHORT, SMALL_WIDE, SMALL_HALF]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_schedule_gives_the_same_bits(workshop: Workshop, case: Any) -> None:
    outputs = {name: case.run(workshop, schedule=name) for name in SCHEDULES}
    for name, outcome in outputs.items():
        assert outcome.returncode == 0, f"{name}: {outcome.stderr.decode()}"
    assert len({outcome.stdout for outcome in outputs.values()}) == 1
    case.check(outputs["shuffled"].stdout)


def test_the_portable_switch_gives_the_same_bits(workshop: Workshop) -> None:
    """Fibers by ucontext, for processors without the assembly."""
    expected, portable = (SMALL_SOLVE_SHORT.run(workshop, build) for build in ("plain", "portable"))
    assert portable.returncode == 0, portable.stderr.decode()
    assert portable.stdout == expected.stdout


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_clean_under_address_and_undefined_sanitizers(workshop: Workshop, case: Any) -> None:
    outcome = case.run(workshop, "address", "reversed")
    assert outcome.returncode == 0, outcome.stderr.decode()


@pytest.mark.parametrize("case", [SMALL_SCORE, SMALL_SOLVE, SMALL_WIDE], ids=str)
def test_clean_under_thread_sanitizer(workshop: Workshop, case: Any) -> None:
    outcome = case.run(workshop, "thread", "forward")
    assert outcome.returncode == 0, outcome.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("build", ["address", "thread"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_clean_under_sanitizers_in_every_schedule(workshop: Workshop, case: Any, build: str, schedule: str) -> None:
    outcome = case.run(workshop, build, schedule)
    assert outcome.returncode == 0, outcome.stderr.decode()


# ---- faults that must be caught -----------------------------------------------------------------------------------

BLOCK_SUM = """    __syncthreads();
    return warp_sum<kWarps>("""
STAGE_BARRIER = (
    "        __syncthreads();  // this stage has arrived for all, and all are done with the one fetched next\n"
)
GRID_BARRIER = """    update_columns(p, w, now.growth, update_scratch);
    grid_sync();
"""
UPDATE_BARRIER = """        scratch[threadIdx.x] = sum;
        __syncthreads();
"""


def _caught_by_result(case: Any, outcome: Any) -> bool:
    assert outcome.returncode in (0, 3), outcome.stderr.decode()
    if outcome.returncode == 3:
        return True
    try:
        case.check(outcome.stdout)
    except AssertionError:
        return True
    return False


def _caught_by_sanitizer(_case: Any, outcome: Any) -> bool:
    report = outcome.stderr.decode()
    return outcome.returncode == SANITIZER_STATUS and ("data race" in report or "ERROR: AddressSanitizer" in report)


@dataclass(frozen=True)
class Fault:
    what: str
    header: str
    old: str
    new: str
    case: Any
    build: str
    schedules: tuple[str, ...]
    caught: Callable[[Any, Any], bool]


ALL = tuple(SCHEDULES)
FAULTS = [
    Fault(
        "missing barrier in a block sum, seen as a race",
        "sinkhorn.cuh", BLOCK_SUM, BLOCK_SUM.removeprefix("    __syncthreads();\n"),
        SMALL_SOLVE, "thread", ("forward",), _caught_by_sanitizer,
    ),
    Fault(
        "missing barrier in a block sum, seen in the result",
        "sinkhorn.cuh", BLOCK_SUM, BLOCK_SUM.removeprefix("    __syncthreads();\n"),
        SMALL_SOLVE, "plain", ALL, _caught_by_result,
    ),
    Fault(
        "missing barrier between the stages of the scores",
        "score.cuh", STAGE_BARRIER, "",
        SMALL_SCORE, "thread", ("forward",), _caught_by_sanitizer,
    ),
    Fault(
        "missing barrier of the grid, a race between blocks",
        "sinkhorn.cuh", GRID_BARRIER, GRID_BARRIER.replace("    grid_sync();\n", ""),
        SMALL_SOLVE, "thread", ("forward",), _caught_by_sanitizer,
    ),
    Fault(
        "barrier that only some threads reach",
        "sinkhorn.cuh", UPDATE_BARRIER, UPDATE_BARRIER.replace("__syncthreads", "if (warp < 15) __syncthreads"),
        SMALL_SOLVE, "plain", ALL, _caught_by_result,
    ),
    Fault(
        "off by one in shared memory",
        "sinkhorn.cuh",
        "x = warp_max(x);\n    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32]",
        "x = warp_max(x);\n    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32 + 1]",
        SMALL_SOLVE, "address", ("forward",), _caught_by_sanitizer,
    ),
    Fault(
        "ragged row fetched in full",
        "sinkhorn.cuh", "kBytes * min(max(left - skip, 0), 4)", "4 * kBytes",
        SMALL_SOLVE_SHORT, "address", ("forward",), _caught_by_sanitizer,
    ),
    Fault(
        "ragged columns not masked",
        "sinkhorn.cuh", "if (c >= left) reference.at[c]", "if (c > left) reference.at[c]",
        SMALL_SOLVE, "plain", ALL, _caught_by_result,
    ),
    Fault(
        "asynchronous copy not waited for",
        "sinkhorn.cuh", "copy_wait<kStages - 1>();", "copy_wait<kStages>();",
        SMALL_SOLVE, "plain", ("forward", "greedy"), _caught_by_result,
    ),
    Fault(
        "row fetched into a place that has not been read",
        "sinkhorn.cuh",
        "    Four weight[kVectors];\n    float largest = minus_infinity();\n",
        "    refill();\n    Four weight[kVectors];\n    float largest = minus_infinity();\n",
        SMALL_SOLVE, "plain", ("reversed",), _caught_by_result,
    ),
    Fault(
        "more shared memory than a desktop GPU has",
        "sinkhorn.cuh", "constexpr int kStages = 2;", "constexpr int kStages = 3;",
        SolveCase(9, 8191), "plain", ("greedy",), _caught_by_result,
    ),
    Fault(
        "ragged rows of the scores not masked",
        "score.cuh", "if (row + 8 * half >= p.rows) continue;", "if (row >= p.rows) continue;",
        SMALL_SCORE, "address", ("forward",), _caught_by_sanitizer,
    ),
    Fault(
        "fragments of the multiplication in the wrong order",
        "score.cuh",
        "first[4] = {upper.at[0], lower.at[0], upper.at[1], lower.at[1]}",
        "first[4] = {upper.at[0], upper.at[1], lower.at[0], lower.at[1]}",
        SMALL_SCORE, "plain", ("greedy",), _caught_by_result,
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_injected_fault_is_caught(workshop: Workshop, fault: Fault) -> None:
    for schedule in fault.schedules:
        outcome = fault.case.run(workshop, fault.build, schedule, (fault.header, fault.old, fault.new))
        assert fault.caught(fault.case, outcome), f"{fault.what}: went unnoticed under {schedule}"


# ---- from the public operations down ------------------------------------------------------------------------------


ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the objects of csrc/cpu are listed for x86-64")


def check_operations(folder: Path, kernels: Sequence[Path] = (), seconds: int = 900) -> None:
    """Runs check_ops.py on an extension for the emulated device, with objects in the place of kernels."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    extension = folder / f"_C{suffix}"
    compiler = [
        *("g++", "-std=c++17", "-O1", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-unknown-pragmas"),
        *("-DGEOFLOW_WITH_CUDA=1", f"-I{EMULATION}", f"-I{ROOT / 'csrc'}"),
        *(f"-I{folder}" for folder in (pybind11.get_include(), sysconfig.get_paths()["include"])),
    ]
    rest = [EMULATION / "emulation.cpp", *(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc" / "cuda").glob("*.cu")]
    objects = []
    for name, source, flags in [*units(), *((f"{path.stem}-{path.suffix[1:]}", path, []) for path in rest)]:
        objects.append(str(folder / f"{name}.o"))
        subprocess.run([*compiler, *flags, "-x", "c++", "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run(["g++", "-shared", "-fopenmp", *objects, *map(str, kernels), "-o", str(extension)], check=True)
    script = [sys.executable, str(EMULATION / "check_ops.py"), str(extension)]
    outcome = subprocess.run(script, capture_output=True, text=True, timeout=seconds)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.slow
@ON_X86
def test_operations_through_the_emulated_device(tmp_path: Path) -> None:
    """The whole way of backend="cuda", from the user's call to the kernels; see cuda_emulation/check_ops.py."""
    check_operations(tmp_path)
