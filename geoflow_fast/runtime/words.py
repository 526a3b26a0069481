"""Text from files and users, made fit to be shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def one_line(text: object) -> str:
    """The text in one line: white space and characters that control a terminal or the direction of writing become
    single spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())


def words_of(values: NDArray[Any]) -> NDArray[Any]:
    """The text of each value, as objects: an array of text would give each the room of the longest."""
    import numpy as np  # not at the top: the help of a command needs no arrays

    words = np.empty(values.shape, object)
    words.reshape(-1)[:] = [str(value) for value in values.reshape(-1).tolist()]
    return words
