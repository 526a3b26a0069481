"""The hot paths for pytest-benchmark: `pytest benchmarks`, with all of its options (--benchmark-compare, -json, ...).

Contenders are those of `python -m benchmarks --quick`, each on its own; ratios between them are better taken from
there, where they run in turns. A contender whose answer is wrong fails.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from benchmarks import suite

CASES = {case.name: case for case in suite.all_cases(quick=True)}
PAIRS = [(name, contender.name) for name, case in CASES.items() for contender in case.contenders]


@lru_cache(maxsize=1)
def prepared(name: str) -> tuple[Any, Any]:
    """Input and truth of the case that is being timed."""
    case = CASES[name]
    data = case.make()
    return data, case.truth(data)


@pytest.mark.parametrize(("name", "contender"), PAIRS, ids=lambda part: part)
def test_contender(benchmark: Any, name: str, contender: str) -> None:
    case = CASES[name]
    one = next(c for c in case.contenders if c.name == contender)
    if not one.present:
        pytest.skip(f"{one.needs} is not installed")
    data, truth = prepared(name)
    benchmark.group = name
    answer = benchmark.pedantic(one.run, args=(data,), rounds=case.rounds, warmup_rounds=1)
    case.check(one, answer, truth)
