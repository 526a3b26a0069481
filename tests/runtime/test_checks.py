"""Checks of arguments: what they return, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geoflow_fast.runtime import checks


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_numpy_become_plain_ones(value):
    assert type(checks.integer(value, "n")) is int
    assert checks.integer(value, "n", 3, 3) == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", None, float("nan"), torch.tensor(3)])
def test_what_is_not_an_integer(value):
    with pytest.raises(TypeError, match="n must be an integer, got"):
        checks.integer(value, "n")


def test_integers_out_of_range():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        checks.integer(0, "n", 1)
    with pytest.raises(ValueError, match="n must be at most 5, got 6"):
        checks.integer(6, "n", 1, 5)


def test_tensors():
    x = torch.ones(2, 2)
    assert checks.dense(x, "x") is checks.floating(x, "x") is checks.with_values(x, "x") is x
    for value, message in ((x.to_sparse(), "x must be a dense tensor"), ([1.0], "x must be a tensor, got list")):
        with pytest.raises(TypeError, match=message):
            checks.dense(value, "x")
    with pytest.raises(TypeError, match="x must be floating point"):
        checks.floating(x.int(), "x")
    with pytest.raises(ValueError, match="has no values"):
        checks.with_values(x.to("meta"), "x")
    assert checks.floating(x.to("meta"), "x").is_meta
