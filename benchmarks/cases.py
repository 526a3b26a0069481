"""Cases: contenders on one input, what their answers are held against, and how the cost of an operation grows.

A module `test_<operation>` lists its cases; `conftest.race` checks an answer and times it. `benchmarks.compare` takes
the quick cases of all modules.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import math
import pkgutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import benchmarks
from benchmarks.limits import Work
from geoflow_fast.ops import extension, product

OURS, PEER, FOR_COMPARISON = "ours", "peer", "beside"
"""A peer computes the same answer by other means. A contender for comparison computes something else; only its cost
matters."""
PAPER_NAME = "the paper's settings"
STATUS = Path("/proc/self/status")

NOTHING = Work()
Agrees = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Contender:
    """One way to do it: `run(inputs)` gives the answer."""

    name: str
    run: Callable[[Any], Any]
    kind: str = OURS
    needs: str = ""
    """A package without which it is skipped."""
    agrees: Agrees | None = None
    """(answer, truth) -> whether it is right, in place of the case's."""
    work: Work | None = None
    """In place of the case's."""
    queries: int = 0
    """Queries of a call, where the cost of a thousand is of interest."""

    @property
    def present(self) -> bool:
        """Whether what it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def in_bfloat16(*contenders: Contender) -> tuple[Contender, ...]:
    """The contenders where the processor multiplies in bfloat16, else none."""
    return contenders if extension.missing_bfloat16() is None else ()


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
    work: Work = NOTHING
    quick: bool = False
    rounds: int = 0
    """Zero: as many as two seconds hold, at least three."""
    columns: Callable[[Any, Any], dict[str, Any]] = lambda *_: {}
    """More columns of the table."""

    def make(self) -> Any:
        """The input; always the same."""
        torch.manual_seed(0)
        return self.inputs()

    def right(self, contender: Contender, answer: Any, truth: Any) -> bool:
        """Whether a contender's answer is right."""
        return (contender.agrees or self.agrees)(answer, truth)

    def contender(self, name: str) -> Contender:
        """The contender of that name."""
        return next(one for one in self.contenders if one.name == name)


@dataclass(frozen=True)
class Scaling:
    """One operation over one of its sizes; `make(size)` gives the call, `expected` is the exponent by arithmetic."""

    operation: str
    variable: str
    sizes: Sequence[int]
    make: Callable[[int], Callable[[], Any]]
    expected: float = 1.0


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrises a test by `case` and `contender`; `-k quick` selects the cases of small sizes."""
    pairs = [(case, contender) for case in cases for contender in case.contenders]
    names = [f"{'quick' if case.quick else 'full'}-{contender.name}" for case, contender in pairs]
    return pytest.mark.parametrize(("case", "contender"), pairs, ids=names)


def each_size(scalings: Sequence[Scaling]) -> pytest.MarkDecorator:
    """Parametrises a test by `scaling` and `size`."""
    pairs = [(scaling, size) for scaling in scalings for size in scaling.sizes]
    return pytest.mark.parametrize(("scaling", "size"), pairs, ids=[f"{s.variable}-{size}" for s, size in pairs])


def growth(operation: str, variable: str, size: int, expected: float = 1.0) -> dict[str, Any]:
    """What JSON says of an operation at one of its sizes, so that `page` can fit the exponent."""
    return {"operation": operation, "variable": variable, "size": size, "expected": expected}


def all_cases(*, quick: bool) -> list[Case]:
    """The cases of all modules that have small or full sizes."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names if name.startswith("test_")]
    return [case for module in modules for case in getattr(module, "CASES", ()) if case.quick is quick]


def status_bytes(key: str) -> int:
    """A line of /proc/self/status, such as VmRSS, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{STATUS} has no {key}")


def watched(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `run` returns, its seconds, and how far the resident memory of this process rose above its start meanwhile,
    in bytes (NaN where there is no /proc)."""
    if STATUS.exists():
        # Pages that malloc keeps for itself would be used again unseen.
        ctypes.CDLL(None).malloc_trim(0)
        (STATUS.parent / "clear_refs").write_text("5")
    before = status_bytes("VmRSS") if STATUS.exists() else math.nan
    start = time.perf_counter()
    answer = run()
    seconds = time.perf_counter() - start
    return answer, seconds, max(0.0, status_bytes("VmHWM") - before) if STATUS.exists() else math.nan
