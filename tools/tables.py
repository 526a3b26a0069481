"""Tables of the documentation that scripts write."""

from __future__ import annotations

from pathlib import Path


def replace_between(page: Path, begin: str, end: str, table: str) -> None:
    """Replaces what stands between the lines `begin` and `end` of a page."""
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} must hold the two lines {begin!r} and {end!r} once each")
    before, rest = text.split(begin)
    page.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")
