"""Who asks for the tests of a GPU by `-m gpu`, as `make test-gpu` does, is told why they cannot run."""

from __future__ import annotations

import importlib.util

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU every test here would be skipped, and the run would look like a success."""
    reason = missing()
    if config.getoption("markexpr") == "gpu" and reason is not None and items:
        raise pytest.UsageError(f"the tests of a GPU cannot run: {reason}")


def missing() -> str | None:
    """What the tests of a GPU lack here, if anything."""
    if not torch.backends.cuda.is_built():
        return (
            f"torch {torch.__version__} is a build without CUDA; install one with CUDA into .venv, "
            "by the command that pytorch.org gives for your driver"
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; see `nvidia-smi` and `geoflow doctor`"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return None
