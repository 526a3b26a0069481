"""Items with the same embedding up to rounding are one item."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geoflow_fast import noise
from geoflow_fast.retrieval.copies import SAME_ITEM, first_numbers


def lowest_by_definition(items: Tensor, number: Tensor, valid: Tensor) -> Tensor:
    """The same from all pairs, whose groups have no chains here."""
    unit = torch.nn.functional.normalize(items.double(), dim=2)
    same = torch.einsum("qkd,qld->qkl", unit, unit) > SAME_ITEM
    same &= valid.unsqueeze(1) & valid.unsqueeze(2)
    same |= torch.eye(items.shape[1], dtype=torch.bool)
    return number.unsqueeze(1).expand_as(same).masked_fill(~same, 10**9).amin(2)


@pytest.mark.parametrize("dim", [2, 24, 512])
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_groups_are_those_of_all_pairs(dim, copies):
    generator = torch.Generator().manual_seed(dim + copies)
    rows = noise.sample_uniform(41, dim, generator=generator)
    every = torch.cat([rows, *(rows.half().float() for _ in range(copies - 1))])
    number = torch.stack([torch.randperm(len(every), generator=generator) for _ in range(7)])
    valid = torch.rand(number.shape, generator=generator) < 0.9
    first = first_numbers(every[number], number, valid)
    assert torch.equal(first, lowest_by_definition(every[number], number, valid))
    if copies == 5:
        assert float((first == number).double().mean()) < 0.4


@pytest.mark.parametrize("dim", [2, 8, 24, 64])
def test_copies_may_differ_in_norm_as_much_as_rows_may(dim):
    rows = noise.sample_uniform(50, dim, generator=torch.Generator().manual_seed(dim))
    every = torch.cat((1.0009 * rows, 0.9991 * rows))[None]
    number = torch.arange(100)[None]
    expected = torch.arange(50).repeat(2)[None]
    assert torch.equal(first_numbers(every, number, number >= 0), expected)


def test_chains_are_one_group():
    """Each row is a copy of the next, while the ends are too far apart."""
    angle = torch.arange(5, dtype=torch.float64) * 1.2e-3
    rows = torch.stack((angle.cos(), angle.sin()), dim=1)[None].float()
    number = torch.tensor([[4, 2, 3, 9, 1]])
    assert first_numbers(rows, number, torch.ones(1, 5, dtype=torch.bool)).tolist() == [[1] * 5]


@pytest.mark.parametrize("shape", [(0, 4), (3, 1)])
def test_nothing_to_compare(shape):
    number = torch.zeros(shape, dtype=torch.long)
    assert torch.equal(first_numbers(torch.ones(*shape, 3) / 3**0.5, number, number == 0), number)
