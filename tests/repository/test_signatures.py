"""Public calls are short: at most twelve parameters; what few users set is in a settings object."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from tests.reliability.surface import parameters_of, surface

MOST = 12


def is_settings(value: Any) -> bool:
    """Whether a class only holds settings: a frozen dataclass called Config or Settings."""
    frozen = dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen
    return inspect.isclass(value) and frozen and value.__name__.endswith(("Config", "Settings"))


CALLS = {name: value for name, value in surface().items() if not is_settings(value)}


@pytest.mark.parametrize("name", CALLS)
def test_a_public_call_has_at_most_twelve_parameters(name):
    names = [parameter.name for parameter in parameters_of(CALLS[name])]
    assert len(names) <= MOST, names
