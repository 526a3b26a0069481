"""Directions are their names wherever text is wanted, and know their streams."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from geoflow_fast.directions import CONDITIONAL, DIRECTIONS, Direction


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_direction_is_its_name(direction):
    name = str(direction)
    assert direction == name == f"{direction}"
    assert hash(direction) == hash(name)
    assert json.loads(json.dumps({"direction": direction})) == {"direction": name}
    assert Direction.of(name) is Direction.of(direction) is Direction(name) is direction
    assert pickle.loads(pickle.dumps(direction)) is copy.deepcopy(direction) is direction
    assert DIRECTIONS[direction.code] is direction


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_one_stream_is_given_and_the_other_generated(direction):
    assert {direction.given, *direction.generated} == {0, 1}
    assert direction.reverse.generated == (direction.given,)
    assert (direction.queries(0, 1), direction.items(0, 1)) == (direction.given, *direction.generated)
    assert direction.pair(direction.queries("image", "text"), direction.items("image", "text")) == ("image", "text")


def test_unknown_directions_are_refused():
    for value in ("t2t", None, 1):
        with pytest.raises(ValueError, match=r"direction must be one of \('joint', 'i2t', 't2i'\), got"):
            Direction.of(value)
    with pytest.raises(ValueError, match=r"direction must be one of \('i2t', 't2i'\), got 'joint'"):
        Direction.of("joint", conditional=True)
