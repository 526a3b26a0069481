"""One folder of compiled kernels for all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu_emulated.ptx.cuda import CompiledWorkshop
from tests.gpu_emulated.ptx.machine import Builder, Machine
from tools import cuda_build


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("ptx"))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, builder: Builder) -> CompiledWorkshop:
    if cuda_build.nvcc() is None:
        pytest.skip("nvcc is not on PATH")
    return CompiledWorkshop(tmp_path_factory.mktemp("transport"), builder)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """torch.empty holds NaN (and the largest integers), so that an output that was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def served(builder: Builder) -> Callable[..., Machine]:
    """Runs a check with all its launches on a machine."""

    def run(check: Callable[[], object], **settings: Any) -> Machine:
        torch.manual_seed(0)
        with Machine(builder, **settings).serving() as machine:
            check()
        assert machine.outputs, "nothing was launched"
        return machine

    return run
