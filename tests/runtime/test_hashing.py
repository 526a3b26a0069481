"""Digests: equal for equal values, different for values that differ in anything, also in where one ends."""

from __future__ import annotations

import itertools
import uuid

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.data.ids import Ids
from geoflow_fast.runtime import hashing

UUID = uuid.UUID(int=7)
APART = [
    ["a", "b"],
    ["a\0b"],
    ["a\0b", "c"],
    ["a", "b\0c"],
    ["ab", ""],
    ["", "ab"],
    ["a, b"],
    ['a", "b'],
    [1, 2],
    ["1", "2"],
    [1, "2"],
    [None, "a"],
    ["None", "a"],
    [UUID],
    [str(UUID)],
    [b"a", b"b"],
]


def objects(values: list) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def test_objects_differ_by_value_type_and_length():
    digests = [hashing.digest([objects(values)]) for values in APART]
    assert len(set(digests)) == len(APART)
    for first, second in itertools.combinations(APART[:6], 2):
        assert hashing.digest([objects(first), objects(second)]) != hashing.digest([objects(second), objects(first)])
    assert hashing.digest([objects(["a"]), objects(["b"])]) != hashing.digest([objects(["a", "b"])])


def test_equal_objects_have_equal_digests():
    """Wherever they lie in memory, and however text is stored."""
    for values in APART:
        copies = [bytes(x) if isinstance(x, bytes) else x for x in values]
        assert hashing.digest([objects(copies)]) == hashing.digest([objects(list(values))])
    words = ["".join(("some ", "words")), "b"]
    assert hashing.digest([objects(words)]) == hashing.digest([objects(["some words", "b"])])
    assert hashing.digest([np.array(words)]) == hashing.digest([objects(words)])


def test_arrays_inside_objects_count_in_full():
    rows = np.random.default_rng(0).normal(size=(2, 5000))
    changed = rows.copy()
    changed[0, 2500] += 1e-9
    assert hashing.digest([objects(list(rows))]) != hashing.digest([objects(list(changed))])
    assert hashing.digest([objects(list(rows))]) == hashing.digest([objects(list(rows.copy()))])


@pytest.mark.parametrize("change", [lambda x: x.T, lambda x: x.astype(np.float64), lambda x: -x, lambda x: x[:, :2]])
def test_arrays_differ_by_shape_type_and_content(change):
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert hashing.digest([rows]) != hashing.digest([change(rows)])
    assert hashing.digest([torch.from_numpy(rows)]) != hashing.digest([torch.from_numpy(change(rows).copy())])


def test_ids_that_joined_would_be_equal_are_different():
    digests = [Ids.given(ids, 2, "ids").digest() for ids in (["a\0b", "c"], ["a", "b\0c"], ["1", "2"], [1, 2])]
    assert len(set(digests)) == 4
    rows = np.eye(3, dtype=np.float32)[:2]
    galleries = [gf.Gallery(rows, ids=ids) for ids in (["a\0b", "c"], ["a", "b\0c"])]
    assert galleries[0].ids.digest() != galleries[1].ids.digest()
