"""No result depends on torch's default device or default dtype, which a program may set for its own purposes.

Every public call is made twice with arguments that were made beforehand: with torch's own defaults and with foreign
ones. The answers must agree bit for bit. Modules are the exception: like those of torch they are created on the default
device, so calls that create some are made under a foreign dtype only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reliability.guesses import GIVEN, GUESSED
from tests.reliability.hostile import Target
from tests.reliability.surface import surface

EVERY = [*GIVEN, *GUESSED]
CREATES_MODULES = {
    "baselines.train_preset",
    "baselines.Activations.from_arrays",
    *(name for name, value in surface().items() if inspect.isclass(value) and issubclass(value, torch.nn.Module)),
} - {"RetrievalEntropy", "BayesReranker"}  # these are made of a flow and follow its device
# `make test` makes every call under one of the two, `make test-slow` under the other.
CASES = [
    pytest.param(
        target,
        kind,
        id=f"{target.name}-{kind}",
        marks=[pytest.mark.slow] if (kind == "meta") == bool(number % 2) and target.name not in CREATES_MODULES else [],
    )
    for number, target in enumerate(EVERY)
    for kind in ("meta", "float64")
    if not (kind == "meta" and target.name in CREATES_MODULES)
]


@contextlib.contextmanager
def foreign_defaults(kind: str) -> Iterator[None]:
    """Tensors that name no device are without values, or those that name no dtype are float64."""
    if kind == "meta":
        with torch.device("meta"):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def numbers(value: Any, name: str = "result") -> dict[str, Any]:
    """Every number in a result, by where it stands."""
    if isinstance(value, torch.nn.Module):
        return numbers(dict(value.state_dict()), name)
    if isinstance(value, Tensor):
        return {
            f"{name} {value.device} {value.dtype}": value.detach().cpu().numpy() if value.device.type == "cpu" else 0
        }
    if isinstance(value, (np.ndarray, float, int, str)):
        return {name: value}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    parts = value.items() if isinstance(value, dict) else ()
    parts = [(key, entry) for key, entry in parts if key != "seconds"]
    return {path: part for key, entry in parts for path, part in numbers(entry, f"{name}.{key}").items()}


def outcome(target: Target, arguments: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    try:
        result = target.call(**arguments)
    except (ValueError, TypeError, OSError) as error:  # a few guessed arguments are refused
        return {"error": f"{type(error).__name__}: {error}"}
    return numbers(result)


@pytest.mark.parametrize(("target", "kind"), CASES)
def test_every_public_call_ignores_defaults(target, kind, tmp_path, monkeypatch):
    arguments = []
    for _ in range(2):
        torch.manual_seed(1)
        arguments.append(dict(target.good()))
    outcomes = []
    for part, context in enumerate((contextlib.nullcontext(), foreign_defaults(kind))):
        (tmp_path / str(part)).mkdir()
        monkeypatch.chdir(tmp_path / str(part))
        with context:
            outcomes.append(outcome(target, arguments[part]))
    plain, foreign = outcomes
    assert plain.keys() == foreign.keys()
    for path, value in plain.items():
        if target.name.startswith("OpenClipEncoder."):  # torch's own attention is fused without a default device only
            np.testing.assert_allclose(foreign[path], value, rtol=1e-4, atol=1e-5, err_msg=path)
        else:
            np.testing.assert_array_equal(foreign[path], value, err_msg=path)
