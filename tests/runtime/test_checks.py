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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_any_floating_type(dtype):
    like, x = torch.empty(0), torch.tensor([[0.5, -1.0], [0.25, 2.0]])
    rows = checks.rows(x.to(dtype).requires_grad_(), "x", 2, like)
    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    assert torch.equal(rows, x)
    assert torch.equal(torch.from_numpy(checks.array(x.to(dtype), "x")).float(), x)
    assert checks.rows(x, "x", 2, like).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f8", np.longdouble])
def test_rows_of_arrays(dtype):
    x = np.array([[0.5, -1.0], [0.25, 2.0]], dtype)
    x.flags.writeable = False
    rows = checks.rows(x[::-1], "x", 2, torch.empty(0, dtype=torch.float64))
    assert rows.tolist() == [[0.25, 2.0], [0.5, -1.0]]
    assert rows.dtype == torch.float64


@pytest.mark.filterwarnings("error")
def test_rows_of_an_array_are_copied_only_if_they_have_to_be():
    x, like = np.ones((3, 2), np.float32), torch.empty(0)
    assert checks.rows(x, "x", 2, like).data_ptr() == x.ctypes.data
    x.flags.writeable = False
    unaligned = np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 2)
    for other in (x, x[::-1], np.broadcast_to(x[:1], (3, 2)), unaligned):
        rows = checks.rows(other, "x", 2, like)
        assert rows.data_ptr() != other.ctypes.data
        assert rows.tolist() == x.tolist()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([[1.0, 0.0]], TypeError, "x must be a tensor or an array, got list"),
        (np.ones((2, 2), int), TypeError, "x must be floating point, got int64"),
        (torch.ones(2, 2, dtype=torch.int32), TypeError, "x must be floating point, got torch.int32"),
        (torch.ones(2, 2, device="meta"), ValueError, "x is on the meta device"),
        (np.ones((2, 3)), ValueError, r"x must be \[Q, 2\], got \(2, 3\)"),
        (torch.ones(2), ValueError, r"x must be \[Q, 2\], got \(2,\)"),
    ],
)
def test_what_are_not_rows(value, error, message):
    with pytest.raises(error, match=message):
        checks.rows(value, "x", 2, torch.empty(0), count="Q")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rounding_of_half_precision_leaves_rows_of_unit_norm(dtype):
    x = torch.nn.functional.normalize(torch.randn(500, 7), dim=1)
    rows = checks.rows(torch.cat((x, 2 * x)).to(dtype), "x", 7, x)
    torch.testing.assert_close(rows[:500].norm(dim=1), torch.ones(500))
    assert torch.equal(rows[500:], (2 * x).to(dtype).float())
