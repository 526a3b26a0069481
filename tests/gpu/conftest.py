"""Who asks for the tests of a GPU by `-m gpu`, as `make test-gpu` does, is told why they cannot run."""

from __future__ import annotations

import pytest

from tools.gpu_report import missing


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU every test here would be skipped, and the run would look like a success."""
    reason = missing()
    if config.getoption("markexpr") == "gpu" and reason is not None and items:
        raise pytest.UsageError(f"the tests of a GPU cannot run: {reason}")
