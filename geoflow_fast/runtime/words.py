"""Text from files and users, made fit to be shown."""

from __future__ import annotations


def one_line(text: object) -> str:
    """The text in one line: white space and characters that control a terminal or the direction of writing become
    single spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
