"""Notebooks are scripts, and their pages show what the scripts are and print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.notebooks import NOTEBOOKS, PAGES, cells_of, heading, rendered

SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
NUMBER = re.compile(r"\d+\.?\d*")


def without_output(page: str) -> str:
    """A page without what its cells printed and drew."""
    return re.sub(r"^(```text\n.*?^```|!\[.*?\)$)\n\n?", "", page, flags=re.DOTALL | re.MULTILINE).strip()


def test_there_are_notebooks():
    assert len(SCRIPTS) >= 2
    assert {path.stem for path in SCRIPTS} == {path.stem for path in PAGES.glob("*.md")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_shows_the_script_of_today(script):
    page = (PAGES / f"{script.stem}.md").read_text()
    cells = cells_of(script)
    assert without_output(page) == "\n".join([heading(script), *(cell.page for cell in cells)]).strip()
    printing = sum("print(" in cell.code for cell in cells)
    assert page.count("```text") == printing > 3
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert pictures
    assert all((PAGES / name).stat().st_size > 5000 for name in pictures)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_shows_what_the_script_prints(script, tmp_path: Path):
    """The same words, and numbers that differ by rounding only."""
    pages = [rendered(script, tmp_path), (PAGES / f"{script.stem}.md").read_text()]
    assert NUMBER.sub("#", pages[0]) == NUMBER.sub("#", pages[1])
    numbers = [[float(number) for number in NUMBER.findall(page)] for page in pages]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.02, rel=0.05)
