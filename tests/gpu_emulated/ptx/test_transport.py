"""The compiled PTX of the CUDA kernels, in place of their source in the programs of the emulated device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu_emulated.cuda_emulation import test_cuda_emulation as source
from tests.gpu_emulated.cuda_emulation.test_cuda_emulation import SCORES, SOLVES
from tests.gpu_emulated.cuda_emulation.test_cuda_static import KERNELS
from tests.gpu_emulated.cuda_emulation.workshop import SCHEDULES
from tests.gpu_emulated.ptx.checks import EVERY_KERNEL, MORE_SCORES, MORE_SOLVES
from tests.gpu_emulated.ptx.cuda import CompiledWorkshop, kernels_of, launches_noted

# Costs whose exponents differ by thousands, with the error that they are allowed.
RANGES = source.test_solver_stays_finite_and_right_at_any_range.pytestmark[0].args[1]  # type: ignore[attr-defined]


def test_sanitizers_and_schedules_see_every_kernel() -> None:
    kernels: set[str] = set()

    def note(name: str, _build: str, _edit: Any, _arrays: Any, **arguments: float) -> None:
        types = tuple(flag for flag in arguments if flag.startswith("-D") and arguments[flag])
        kernels.update(kernels_of(name, types, arguments))

    for case in EVERY_KERNEL:
        case.run(SimpleNamespace(start=note))
    assert kernels == set(KERNELS)


@pytest.mark.parametrize("case", [*SOLVES, *MORE_SOLVES, *SCORES, *MORE_SCORES], ids=str)
def test_float64_agrees(workshop: CompiledWorkshop, case: Any) -> None:
    outcome = case.run(workshop)
    assert outcome.returncode == 0, outcome.stderr.decode()
    # A single row is solved by the first iteration, and the marginal error that the second one finds is that of the
    # first one's logarithms: of column sums down to 2^-29, where lg2.approx may be off by 1.6e-7 of its result. If all
    # were off to the same side, that would be 3.2e-6 of a column's mass; it comes to 1.3e-6 for 7 columns, of which
    # 3e-7 is left with exact logarithms.
    case.check(outcome.stdout, **({"floor": 2e-6} if isinstance(case, source.SolveCase) else {}))


@pytest.mark.parametrize(("case", "within"), RANGES, ids=str)
def test_solver_stays_finite_and_right_at_any_range(workshop: CompiledWorkshop, case: Any, within: float) -> None:
    source.test_solver_stays_finite_and_right_at_any_range(workshop, case, within)


@pytest.mark.parametrize(
    "test",
    [
        source.test_scores_cross_the_groups_of_tiles,
        source.test_float32_converges_where_exponents_are_thousands,
        source.test_ties_go_to_the_first_column,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_of_the_source_holds_for_its_ptx(workshop: CompiledWorkshop, test: Any) -> None:
    test(workshop)


@pytest.mark.parametrize("case", EVERY_KERNEL, ids=str)
def test_every_schedule_gives_the_same_bits(workshop: CompiledWorkshop, case: Any) -> None:
    source.test_every_schedule_gives_the_same_bits(workshop, case)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("build", ["address", "thread"])
@pytest.mark.parametrize("case", EVERY_KERNEL, ids=str)
def test_clean_under_sanitizers(workshop: CompiledWorkshop, case: Any, build: str, schedule: str) -> None:
    outcome = case.run(workshop, build, schedule)
    assert outcome.returncode == 0, outcome.stderr.decode()


@pytest.mark.parametrize("schedule", ["greedy", "reversed"])
def test_launchers(workshop: CompiledWorkshop, schedule: str) -> None:
    source.test_launchers_ask_the_device_and_leave_the_current_one_alone(workshop, schedule)


@source.ON_X86
def test_operations_down_to_the_ptx(workshop: CompiledWorkshop, tmp_path: Path) -> None:
    """The whole way of backend="cuda", from the user's call through bindings and launchers to every compiled kernel."""
    with launches_noted(tmp_path / "launches") as launched:
        kernels = [workshop.kernel(name, "plain") for name in workshop.names()]
        source.check_operations(tmp_path, kernels, seconds=7200)
    assert launched.keys() == set(KERNELS)


@pytest.mark.parametrize("fault", source.FAULTS, ids=lambda fault: fault.what)
def test_fault_in_the_source_is_caught_in_its_ptx(workshop: CompiledWorkshop, fault: source.Fault) -> None:
    source.test_injected_fault_is_caught(workshop, fault)
