"""Directions: which of the two streams, image and text, a flow generates and which one is given."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from geoflow_fast.runtime import checks

STREAMS = ("image", "text")
IMAGE, TEXT = range(2)

Counts = tuple[int, int, int]
"""Number of i2t, joint and t2i rows of a batch whose rows are sorted in this order."""

T = TypeVar("T")


class Direction(str, Enum):
    """What a flow generates: both streams ("joint"), the text of a given image ("i2t") or the image of a given text
    ("t2i").

    In retrieval the given stream is that of the queries, and the generated one that of the items. A direction equals
    its name, so users may pass either; `Direction.of` turns what they pass into a direction.
    """

    JOINT = "joint", 0, (IMAGE, TEXT), None
    I2T = "i2t", 1, (TEXT,), IMAGE
    T2I = "t2i", 2, (IMAGE,), TEXT

    code: int
    """Number of the direction in tensors: 0 for joint, 1 for i2t, 2 for t2i."""
    generated: tuple[int, ...]
    """The streams that move: 0 for the image, 1 for the text."""
    given: int | None
    """The stream that stays where it is; None if both are generated."""

    def __new__(cls, name: str, code: int, generated: tuple[int, ...], given: int | None) -> Direction:
        direction = str.__new__(cls, name)
        direction._value_ = name
        direction.code, direction.generated, direction.given = code, generated, given
        return direction

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    @classmethod
    def of(cls, value: object, *, conditional: bool = False) -> Direction:
        """Returns the direction of this name. A ValueError lists the names if there is no such direction, or if it is
        "joint" and only a `conditional` one will do."""
        known = [direction for direction in cls if not (conditional and direction is cls.JOINT)]
        for direction in known:
            if isinstance(value, str) and value == direction:
                return direction
        raise ValueError(f"direction must be one of {tuple(map(str, known))}, got {value!r}")

    @property
    def reverse(self) -> Direction:
        """The direction that generates what this one is given; "joint" is its own reverse."""
        return {Direction.I2T: Direction.T2I, Direction.T2I: Direction.I2T}.get(self, self)

    def queries(self, image: T, text: T) -> T:
        """Whichever of the two belongs to the given stream, which is that of the queries in retrieval."""
        return text if self is Direction.T2I else image

    def items(self, image: T, text: T) -> T:
        """Whichever of the two belongs to the generated stream, which is that of the items in retrieval."""
        return image if self is Direction.T2I else text

    def pair(self, queries: T, items: T) -> tuple[T, T]:
        """(image, text) from what belongs to the given and to the generated stream."""
        return (items, queries) if self is Direction.T2I else (queries, items)

    def counts(self, rows: int) -> Counts:
        """Counts of a sorted batch whose `rows` rows all have this direction."""
        i2t, joint, t2i = (rows if direction is self else 0 for direction in ROW_ORDER)
        return i2t, joint, t2i


DIRECTIONS = tuple(Direction)
"""The directions in the order of their codes."""
CONDITIONAL = (Direction.I2T, Direction.T2I)
ROW_ORDER = (Direction.I2T, Direction.JOINT, Direction.T2I)
"""The order in which the rows of a sorted batch stand. The rows in which a stream is generated are then contiguous:
for the image all but the first, for the text all but the last."""
ROW_CODES = tuple(direction.code for direction in ROW_ORDER)


def row_directions(counts: Counts, device: torch.device | str = "cpu") -> Tensor:
    """Direction codes, int8 [B], of the rows of a sorted batch."""
    # Nothing is copied to the device, which would have to be waited for.
    parts = [torch.full((rows,), code, dtype=torch.int8, device=device) for rows, code in zip(counts, ROW_CODES)]
    return torch.cat(parts)


def sort_rows(codes: Tensor, rows: int) -> tuple[Tensor, Counts]:
    """Returns the order [B] that sorts `rows` rows by their direction `codes`, int8 [B], and the counts of each
    direction. Rows of one direction keep their order."""
    if checks.dense(codes, "direction").dtype != torch.int8 or codes.shape != (rows,):
        raise ValueError(f"direction must be a name or int8 codes [{rows}], got {codes.dtype} {tuple(codes.shape)}")
    check_codes(codes)
    rank_of_code = torch.tensor([ROW_ORDER.index(direction) for direction in DIRECTIONS], device=codes.device)
    rank = rank_of_code[codes.long()]
    i2t, joint, t2i = torch.bincount(rank, minlength=len(DIRECTIONS)).tolist()
    return rank.argsort(stable=True), (i2t, joint, t2i)


def check_codes(codes: Tensor) -> None:
    """Raises a ValueError that names the first entry of `codes` [B] that is not the code of a direction."""
    unknown = (codes < 0) | (codes >= len(DIRECTIONS))
    if bool(unknown.any()):
        row = int(unknown.nonzero()[0])
        raise ValueError(f"direction row {row} is {int(codes[row])}; codes are 0 joint, 1 i2t, 2 t2i")
