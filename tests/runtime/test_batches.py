"""Work on many rows a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from geoflow_fast.runtime import batches
from geoflow_fast.runtime.batches import batch_rows, check_batch_size, in_batches, put_rows


@dataclass(frozen=True)
class Parts:
    squares: Tensor
    pairs: Tensor
    label: str
    missing: Tensor | None = None


@pytest.mark.parametrize("size", [1, 2, 5, 6, 7, 100])
@pytest.mark.parametrize("count", [0, 1, 6, 7])
def test_batches_are_consecutive_and_joined_in_order(count, size):
    seen, numbers = [], torch.arange(count)

    def compute(rows: slice) -> Parts:
        seen.append((rows.start, rows.stop))
        some = numbers[rows]
        return Parts(some**2, torch.stack((some, -some), 1), f"batch {len(seen)}")

    whole = in_batches(compute, count, size)
    assert whole.squares.tolist() == [k**2 for k in range(count)]
    assert whole.pairs.shape == (count, 2)
    assert whole.pairs[:, 1].tolist() == [-k for k in range(count)]
    assert (whole.label, whole.missing) == ("batch 1", None)
    assert seen == [(low, min(low + size, count)) for low in range(0, max(count, 1), size)]
    assert torch.equal(in_batches(lambda rows: numbers[rows] + 1, count, size), numbers + 1)


def test_an_error_in_the_middle_ends_the_work():
    def compute(rows: slice) -> Tensor:
        if rows.start >= 4:
            raise KeyboardInterrupt
        return torch.zeros(rows.stop - rows.start)

    with pytest.raises(KeyboardInterrupt):
        in_batches(compute, 10, 2)


def test_some_rows_are_replaced():
    whole = Parts(torch.zeros(5), torch.zeros(5, 2), "whole")
    put_rows(whole, torch.tensor([3, 1]), Parts(torch.tensor([3.0, 1.0]), torch.ones(2, 2), "part"))
    assert whole.squares.tolist() == [0, 1, 0, 3, 0]
    assert whole.pairs.sum(1).tolist() == [0, 2, 0, 2, 0]


def test_a_batch_fits_into_its_memory_and_has_at_least_one_row():
    cpu = torch.device("cpu")
    assert batch_rows(None, cpu, 2**20) == batches.CPU_BYTES // 2**20
    assert batch_rows(None, cpu, 10 * batches.CPU_BYTES) == 1
    assert batch_rows(7, cpu, 2**20) == 7


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "3"])
def test_a_batch_size_is_a_positive_integer(bad):
    with pytest.raises((ValueError, TypeError), match="batch_size must be"):
        check_batch_size(bad)
    assert check_batch_size(None) is None
