"""Directions: their names, what they generate and are given, and batches of rows that are sorted by them."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.directions import (
    CONDITIONAL,
    DIRECTIONS,
    ROW_ORDER,
    STREAMS,
    Direction,
    check_codes,
    row_directions,
    sort_rows,
)

JOINT, I2T, T2I = Direction.JOINT, Direction.I2T, Direction.T2I


@pytest.mark.parametrize(("direction", "name"), [(JOINT, "joint"), (I2T, "i2t"), (T2I, "t2i")])
def test_a_direction_is_as_good_as_its_name(direction, name):
    assert direction == name
    assert hash(direction) == hash(name)
    assert {name: 1}[direction] == 1
    assert str(direction) == f"{direction}" == "{}".format(direction) == name  # noqa: UP032
    assert f"{direction:>6}" == name.rjust(6)
    assert json.dumps({"direction": direction}) == json.dumps({"direction": name})
    assert Direction.of(name) is Direction.of(direction) is Direction(name) is DIRECTIONS[direction.code] is direction
    assert Direction.of(json.loads(json.dumps(direction))) is direction
    assert pickle.loads(pickle.dumps(direction)) is copy.deepcopy(direction) is direction


def test_the_error_lists_the_names():
    with pytest.raises(ValueError, match=r"^direction must be one of \('joint', 'i2t', 't2i'\), got 'sideways'$"):
        Direction.of("sideways")
    with pytest.raises(ValueError, match=r"^direction must be one of \('i2t', 't2i'\), got 'joint'$"):
        Direction.of("joint", conditional=True)
    for value in ("T2I", "", None, 1, 2.5, ["t2i"], b"t2i"):
        with pytest.raises(ValueError, match="direction must be one of"):
            Direction.of(value)


def test_public_calls_raise_the_same_error():
    flow = gf.GeoFlow(gf.GeoFlowConfig(4, 3, hidden=8, depth=1, heads=2))
    image, text = torch.eye(4)[:2], torch.eye(3)[:2]
    calls = [
        lambda: flow.velocity(image, text, 0.5, "sideways"),
        lambda: gf.log_density(flow, image, text, "sideways"),
        lambda: gf.RetrievalEntropy(flow, image, "sideways"),
        lambda: gf.BayesReranker(flow, image, "sideways"),
        lambda: gf.worlds.ConceptWorld(4).gallery_posterior(image, image, "sideways"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"direction must be one of \(.*'i2t', 't2i'\), got 'sideways'"):
            call()


def test_streams_that_are_generated_and_given():
    assert [STREAMS[stream] for stream in JOINT.generated] == ["image", "text"]
    assert [STREAMS[stream] for stream in I2T.generated] == ["text"]
    assert [STREAMS[stream] for stream in T2I.generated] == ["image"]
    assert JOINT.given is None
    assert STREAMS[I2T.given] == "image"
    assert STREAMS[T2I.given] == "text"


def test_reverse():
    assert (JOINT.reverse, I2T.reverse, T2I.reverse) == (JOINT, T2I, I2T)
    for direction in CONDITIONAL:
        assert direction.reverse.reverse is direction
        assert direction.reverse.generated == (direction.given,)


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_pair_puts_queries_and_items_back_where_they_belong(direction):
    image, text = object(), object()
    queries, items = direction.queries(image, text), direction.items(image, text)
    assert queries is (image, text)[direction.given]
    assert items is (image, text)[direction.generated[0]]
    assert direction.pair(queries, items) == (image, text)
    assert direction.reverse.queries(image, text) is items


def test_codes_number_the_directions():
    assert [direction.code for direction in DIRECTIONS] == [0, 1, 2]
    assert DIRECTIONS == ("joint", "i2t", "t2i")
    assert CONDITIONAL == ("i2t", "t2i")
    assert ROW_ORDER == ("i2t", "joint", "t2i")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_counts_of_a_batch_of_one_direction(direction):
    counts = direction.counts(5)
    assert sum(counts) == 5
    assert counts[ROW_ORDER.index(direction)] == 5
    assert row_directions(counts).tolist() == [direction.code] * 5


@pytest.mark.parametrize("rows", [0, 1, 7, 129])
def test_sorting_groups_the_rows_of_each_direction_and_keeps_their_order(rows):
    codes = torch.randint(0, 3, (rows,), dtype=torch.int8, generator=torch.Generator().manual_seed(rows))
    order, counts = sort_rows(codes, rows)
    assert torch.equal(codes[order], row_directions(counts))
    assert row_directions(counts).dtype == torch.int8
    for group in order.split(counts):
        assert group.tolist() == sorted(group.tolist())
    # Rows in which a stream is generated are contiguous: the image in all but the first, the text in all but the last.
    image = [Direction(DIRECTIONS[code]).given != 0 for code in codes[order].tolist()]
    text = [Direction(DIRECTIONS[code]).given != 1 for code in codes[order].tolist()]
    assert image == [row >= counts[0] for row in range(rows)]
    assert text == [row < rows - counts[2] for row in range(rows)]


def test_codes_that_are_not_directions_are_refused():
    with pytest.raises(ValueError, match="direction row 2 is 3; codes are 0 joint, 1 i2t, 2 t2i"):
        check_codes(torch.tensor([0, 1, 3, -1], dtype=torch.int8))
    with pytest.raises(ValueError, match="direction row 0 is -1"):
        sort_rows(torch.tensor([-1], dtype=torch.int8), 1)
    with pytest.raises(ValueError, match=r"int8 codes \[3\], got torch.int64 \(3,\)"):
        sort_rows(torch.zeros(3, dtype=torch.long), 3)
    with pytest.raises(ValueError, match=r"int8 codes \[3\], got torch.int8 \(2,\)"):
        sort_rows(torch.zeros(2, dtype=torch.int8), 3)
