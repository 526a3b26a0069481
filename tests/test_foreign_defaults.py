"""`pytest --foreign` sees library code that names no device or no dtype, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.foreign_defaults import LIBRARY, TESTS, foreign_defaults

SOURCE = """
import torch
from torch import nn

class Careless(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

CALLS = {
    "zeros": lambda: torch.zeros(2),
    "tensor": lambda: torch.tensor([1.0]),
    "arange": lambda: torch.arange(2.0),
    "full": lambda: torch.full((2,), 0.5),
    "rand": lambda: torch.rand(2, generator=None),
    "eye": lambda: torch.eye(2),
    "as_tensor": lambda: torch.as_tensor([0.5]),
    "linear": lambda: nn.Linear(2, 2).weight,
    "quotient": lambda: torch.tensor([1], device="cpu") / 2,
    "module": lambda: Careless().weight,
    "named": lambda: torch.zeros(2, dtype=torch.float32, device="cpu"),
    "entered": lambda: entered(),
    "alike": lambda: torch.zeros_like(torch.zeros(2, dtype=torch.float32, device="cpu")),
}

def entered():
    with torch.device("cpu"):
        return torch.zeros(2, dtype=torch.float32)
"""


def calls_in(folder: str) -> dict[str, Callable[[], Tensor]]:
    """The calls of `SOURCE`, as if it were a file in this folder."""
    names: dict[str, Any] = {"__name__": "careless"}
    exec(compile(SOURCE, f"{folder}careless.py", "exec"), names)
    return names["CALLS"]


CARELESS = [name for name in calls_in(TESTS) if name not in ("named", "entered", "alike")]


@pytest.mark.parametrize("folder", LIBRARY)
def test_careless_allocations_of_the_library_are_seen(folder):
    for name, call in calls_in(folder).items():
        with foreign_defaults("device"):
            device = call().device.type
        with foreign_defaults("dtype"):
            dtype = call().dtype
        # Modules are made on the default device, and a quotient is where its terms are.
        assert device == ("meta" if name in CARELESS and name not in ("module", "quotient") else "cpu"), name
        assert dtype == (torch.float64 if name in CARELESS else torch.float32), name


@pytest.mark.parametrize("kind", ["device", "dtype"])
def test_allocations_of_tests_are_left_alone(kind):
    with foreign_defaults(kind):
        for name, call in calls_in(TESTS).items():
            assert (call().device.type, call().dtype) == ("cpu", torch.float32), name
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("kind", ["device", "dtype"])
def test_threads_are_seen_too(kind):
    seen: list[Tensor] = []
    zeros = calls_in(LIBRARY[0])["zeros"]
    with foreign_defaults(kind):
        thread = threading.Thread(target=lambda: seen.append(zeros()))
        thread.start()
        thread.join()
    assert (seen[0].device.type, seen[0].dtype) != ("cpu", torch.float32)
