"""Hot paths: contenders on one input behind a gate, and how the cost of an operation grows.

A module `bench_<name>` with `cases(quick)` is a suite of hot paths; it may add `scalings(quick)`, and `tables()` for
what does not fit that form. `python -m benchmarks`, the front for pytest-benchmark and `compare` all read these.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import benchmarks
from benchmarks.common import cell, exponent, gate, machine, markdown, spread, time_turns, watched
from benchmarks.limits import Limits, Work
from geoflow_fast.ops import native, product

PREFIX = "bench_"
OURS, PEER, FOR_COMPARISON = "ours", "peer", "beside"
"""A peer computes the same answer by other means. A contender for comparison computes something else; only its cost
matters."""
PAPER_NAME = "the paper's settings"
LONG = 2.0
"""Seconds. The first call of a longer one counts as a round, since warming up hardly matters there."""
SHORT = 0.05
"""Seconds. A shorter call gets three times as many rounds."""

Agrees = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Contender:
    """One way to do it: `run(inputs)` gives the answer."""

    name: str
    run: Callable[[Any], Any]
    kind: str = OURS
    needs: str = ""
    """A package without which it is left out."""
    agrees: Agrees | None = None
    """(answer, truth) -> whether it is right, in place of the case's."""

    @property
    def present(self) -> bool:
        """Whether what it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def in_bfloat16(*contenders: Contender) -> tuple[Contender, ...]:
    """The contenders where the processor multiplies in bfloat16, else none."""
    return contenders if native.missing_bfloat16() is None else ()


def with_mkl_alone(*contenders: Contender) -> tuple[Contender, ...]:
    """The contenders with float32 products of MKL alone, where the library asks oneDNN for them, else none."""
    if product.missing_onednn() is not None:
        return ()
    return tuple(
        dataclasses.replace(one, name=f"{one.name}, products of MKL", run=functools.partial(_by_mkl, one.run))
        for one in contenders
    )


def _by_mkl(run: Callable[[Any], Any], inputs: Any) -> Any:
    with mock.patch.object(product, "missing_onednn", return_value="MKL is timed"):
        return run(inputs)


def renamed(contenders: Sequence[Contender], old: str, new: str) -> tuple[Contender, ...]:
    """The contenders with `old` replaced by `new` in their names, for sizes at which a name would be wrong."""
    return tuple(dataclasses.replace(one, name=one.name.replace(old, new)) for one in contenders)


@dataclass(frozen=True)
class Case:
    """Contenders on one input. `truth(inputs)` is what answers are held against."""

    name: str
    inputs: Callable[[], Any]
    truth: Callable[[Any], Any]
    agrees: Agrees
    contenders: Sequence[Contender]
    work: Work
    rounds: int = 5

    def make(self) -> Any:
        """The input; always the same."""
        torch.manual_seed(0)
        return self.inputs()

    @property
    def present(self) -> list[Contender]:
        """The contenders that are installed."""
        return [contender for contender in self.contenders if contender.present]

    def check(self, contender: Contender, answer: Any, truth: Any) -> None:
        """Stops the run if the answer is wrong."""
        gate(f"{self.name}, {contender.name}", (contender.agrees or self.agrees)(answer, truth))


@dataclass(frozen=True)
class Scaling:
    """Seconds of one operation over one of its sizes; `make(size)` gives the call, `expected` is the exponent by
    arithmetic."""

    operation: str
    variable: str
    sizes: Sequence[int]
    make: Callable[[int], Callable[[], Any]]
    expected: float = 1.0
    rounds: int = 3


@dataclass(frozen=True)
class Table:
    """Rows of a suite that do not fit `Case`, under a name by which the page asks for them."""

    name: str
    rows: list[dict[str, Any]]
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


def names() -> list[str]:
    """All benchmarks: suites of hot paths, and studies of quality."""
    modules = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name.removeprefix(PREFIX) for name in modules if name.startswith(PREFIX))


def module_of(name: str) -> ModuleType:
    """The module of a benchmark."""
    return importlib.import_module(f"benchmarks.{PREFIX}{name}")


def suites() -> list[str]:
    """Names of the benchmarks that have hot paths."""
    return [name for name in names() if hasattr(module_of(name), "cases") or hasattr(module_of(name), "tables")]


def all_cases(*, quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """The cases of all suites, or of those named."""
    modules = [module_of(name) for name in only or suites()]
    return [case for module in modules if hasattr(module, "cases") for case in module.cases(quick)]


def measure(case: Case) -> dict[str, Any]:
    """Seconds and peak memory of every contender, after the gate."""
    data = case.make()
    truth = case.truth(data)
    rows: dict[str, dict[str, Any]] = {}
    for contender in case.present:
        answer, first, memory = watched(lambda c=contender: c.run(data))
        case.check(contender, answer, truth)
        del answer
        rows[contender.name] = {"contender": contender.name, "kind": contender.kind, "memory": memory, "first": first}
    calls = {c.name: (lambda c=c: c.run(data)) for c in case.present}
    slowest = max(row["first"] for row in rows.values())
    for name, seconds in time_turns(calls, case.rounds * (3 if slowest < SHORT else 1)).items():
        row = rows[name]
        first = row.pop("first")
        row["seconds"] = [*seconds, first] if first > LONG else seconds
        row["median"], row["spread"] = statistics.median(row["seconds"]), spread(row["seconds"])
    missing = [c.name for c in case.contenders if not c.present]
    return {
        "name": case.name,
        "work": dataclasses.asdict(case.work),
        "rows": list(rows.values()),
        "not installed": missing,
    }


def fit(scaling: Scaling) -> dict[str, Any]:
    """Seconds over sizes, in turns, with the exponent that fits them."""
    calls = {str(size): scaling.make(size) for size in scaling.sizes}
    time_turns(calls, 1)
    turns = time_turns(calls, scaling.rounds)
    seconds = [statistics.median(turns[str(size)]) for size in scaling.sizes]
    return {
        "operation": scaling.operation,
        "variable": scaling.variable,
        "sizes": list(scaling.sizes),
        "seconds": seconds,
        "exponent": exponent(scaling.sizes, seconds),
        "expected": scaling.expected,
    }


def run_suite(name: str, *, quick: bool, announce: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """All that a suite measures, as it is written to JSON."""
    module = module_of(name)
    result: dict[str, Any] = {"suite": name, "machine": machine(), "quick": quick, "cases": [], "scalings": []}
    result["tables"] = {}
    tries = 2 if quick else 5
    limits = Limits.measure(tries)
    for case in module.cases(quick) if hasattr(module, "cases") else ():
        announce(f"{name}: {case.name}")
        result["cases"].append(measure(case))
        limits = limits.best(Limits.measure(tries))
    result["limits"] = dataclasses.asdict(limits)
    for scaling in module.scalings(quick) if hasattr(module, "scalings") else ():
        announce(f"{name}: {scaling.operation} over {scaling.variable}")
        result["scalings"].append(fit(scaling))
    for table in module.tables() if hasattr(module, "tables") and not quick else ():
        announce(f"{name}: {table.name} done")
        result["tables"][table.name] = dataclasses.asdict(table)
    return result


def text_of(result: dict[str, Any]) -> str:
    """The result of a suite as Markdown."""
    scalings = [markdown(scaling_rows(result["scalings"]))] if result["scalings"] else []
    return "\n\n".join((*case_words(result), *scalings, *(markdown(t["rows"]) for t in result["tables"].values())))


def case_words(result: dict[str, Any]) -> Iterator[str]:
    """Title and table of each case."""
    for case in result["cases"]:
        missing = f"\n\nNot installed: {', '.join(case['not installed'])}." if case["not installed"] else ""
        yield f"**{case['name']}**\n\n{markdown(case_rows(case, result['limits']))}{missing}"


def case_rows(case: dict[str, Any], limits: dict[str, float]) -> list[dict[str, Any]]:
    """A case as rows of a table: time, ratio to the best peer, memory, share of the machine's limit."""
    work, bound = Work(**case["work"]), Limits(**limits)
    peers = [row["median"] for row in case["rows"] if row["kind"] == PEER]
    limit = bound.seconds(work)
    return [
        {
            "": row["contender"],
            "ms": 1e3 * row["median"],
            "±": f"{100 * row['spread']:.0f} %",
            "speed-up over the best peer": f"{min(peers) / row['median']:.2f}x"
            if peers and row["kind"] != FOR_COMPARISON
            else "",
            "peak MB": f"{row['memory'] / 1e6:,.0f}",
            f"share of the limit ({bound.bound_by(work)})": ""
            if row["kind"] == FOR_COMPARISON
            else f"{100 * limit / row['median']:.0f} %",
        }
        for row in case["rows"]
    ]


def scaling_rows(scalings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fits as rows of a table."""
    return [
        {
            "operation": fit["operation"],
            "over": fit["variable"],
            "sizes": " / ".join(f"{size:,}" for size in fit["sizes"]),
            "ms": " / ".join(cell(1e3 * value) for value in fit["seconds"]),
            "exponent": f"{fit['exponent']:.2f}",
            "by arithmetic": f"{fit['expected']:g}",
        }
        for fit in scalings
    ]
