"""What all benchmarks share: the input of a case, its gate, and the limits of the machine beside its time."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import FOR_COMPARISON, Case, Contender, Scaling, growth, watched
from benchmarks.limits import Limits
from geoflow_fast.ops import extension

LONG, BUDGET, MOST_ROUNDS = 4.0, 2.0, 50
"""Seconds from which one round must do, seconds for the rounds of a shorter call, and how many there are at most."""


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Names the processor, its instructions and the threads in JSON."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1] for line in lines if line.startswith("model name")]
    machine_info |= {
        "processor": (names or [platform.processor()])[0].strip(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.split("+")[0],
        "instructions": extension.isa() if extension.missing() is None else torch.backends.cpu.get_cpu_capability(),
    }


@dataclasses.dataclass
class Held:
    """Input and truth of the case that is being timed."""

    case: Case | None = None
    inputs: Any = None
    truth: Any = None

    def hold(self, case: Case) -> None:
        if self.case is case:
            return
        self.drop()  # before the next input is made
        self.inputs = case.make()
        self.truth = case.truth(self.inputs)
        self.case = case

    def drop(self) -> None:
        self.case = self.inputs = self.truth = None


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.drop()


@pytest.fixture(scope="session")
def best() -> list[Limits]:
    """The best rates of the session so far: the clock of a machine moves."""
    return []


@pytest.fixture(scope="module")
def limits(best: list[Limits]) -> Limits:
    """What the machine can do, measured again for each module."""
    now = Limits.measure()
    best[:] = [now.best(best[0]) if best else now]
    return best[0]


@pytest.fixture
def race(benchmark: Any, held: Held, request: pytest.FixtureRequest) -> Callable[[Case, Contender], None]:
    """Checks the answer of a contender and times it."""

    def run(case: Case, contender: Contender) -> None:
        if not contender.present:
            pytest.skip(f"{contender.needs} is not installed")
        held.hold(case)
        answer, seconds, memory = watched(lambda: contender.run(held.inputs))
        assert case.right(contender, answer, held.truth), f"{case.name}: {contender.name} gives a wrong answer"
        if benchmark.disabled:
            benchmark(lambda: None)  # the answer is right, which is all that `--benchmark-disable` asks
            return
        benchmark.group = case.name
        benchmark.extra_info |= {"contender": contender.name, "kind": contender.kind, "peak": memory}
        benchmark.extra_info |= {"queries": contender.queries, "columns": case.columns(answer, held.truth)}
        del answer
        rounds = case.rounds or (1 if seconds > LONG else min(max(3, int(BUDGET / seconds)), MOST_ROUNDS))
        benchmark.pedantic(contender.run, args=(held.inputs,), rounds=rounds)
        work = contender.work or case.work
        if any(dataclasses.astuple(work)) and contender.kind != FOR_COMPARISON:
            limits = request.getfixturevalue("limits")
            limit = limits.seconds(work)
            benchmark.extra_info |= {"work": dataclasses.asdict(work), "limits": dataclasses.asdict(limits)}
            benchmark.extra_info |= {
                "limited by": limits.bound_by(work),
                "share of the limit": limit / benchmark.stats.stats.median,
            }

    return run


@pytest.fixture
def grow(benchmark: Any) -> Callable[[Scaling, int], None]:
    """Times an operation at one of its sizes; `page` fits the exponent."""

    def run(scaling: Scaling, size: int) -> None:
        torch.manual_seed(0)
        call = scaling.make(size)
        benchmark.group = f"{scaling.operation} over {scaling.variable}"
        benchmark.extra_info |= growth(scaling.operation, scaling.variable, size, scaling.expected)
        benchmark.pedantic(call, rounds=7, warmup_rounds=1)

    return run


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the shares of the machine's limits, which the table of times has no column for."""
    rows = [row for row in config._benchmarksession.benchmarks if "limited by" in row.extra_info]
    if rows:
        terminalreporter.section("share of the limit reached")
    for row in rows:
        share, by = row.extra_info["share of the limit"], row.extra_info["limited by"]
        terminalreporter.write_line(f"{share:7.0%}  {by:12}  {row.group}: {row.extra_info['contender']}")
