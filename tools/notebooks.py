"""Renders the notebooks of examples/notebooks, which are scripts, as pages with their output: docs/notebooks.

`python -m tools.notebooks` runs every script cell by cell. Comments that open a cell become text, what it prints stands
below its code, and so do the pictures that it saves.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS, PAGES = ROOT / "examples" / "notebooks", ROOT / "docs" / "notebooks"


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook."""

    title: str
    words: str
    code: str

    @property
    def page(self) -> str:
        """The cell without its output, in Markdown."""
        words = f"{self.words}\n\n" if self.words else ""
        return f"## {self.title}\n\n{words}```python\n{self.code}\n```\n"


def cells_of(notebook: Path) -> list[Cell]:
    """The cells of a script, each of which begins with `# %% title` and comments that explain it."""
    _, *parts = re.split(r"^# %% ", notebook.read_text(), flags=re.MULTILINE)
    cells = []
    for part in parts:
        title, *lines = part.splitlines()
        count = next((number for number, line in enumerate(lines) if not line.startswith("# ")), len(lines))
        words = " ".join(line.removeprefix("# ") for line in lines[:count])
        cells.append(Cell(title, words, "\n".join(lines[count:]).strip()))
    return cells


def heading(notebook: Path) -> str:
    """The top of a page: the first sentence of the script, and where it is."""
    words = (ast.get_docstring(ast.parse(notebook.read_text())) or "").splitlines()[0].rstrip(".")
    return f"# {words}\n\nThis is the script `{notebook.relative_to(ROOT)}` with its output.\n"


def rendered(notebook: Path, pictures: Path) -> str:
    """The page of a notebook, which is run for it; the pictures that it saves are moved to a folder."""
    parts, names = [heading(notebook)], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)):
        for cell in cells_of(notebook):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.code, str(notebook), "exec"), names)
            parts.append(cell.page)
            if printed.getvalue():
                parts.append(f"```text\n{printed.getvalue()}```\n")
            for picture in sorted(Path(folder).glob("*.png")):
                shutil.move(picture, pictures / picture.name)
                parts.append(f"![{cell.title}]({picture.name})\n")
    return "\n".join(parts)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Works in a folder, without a screen."""
    before, screen = Path.cwd(), os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "Agg"
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.pop("MPLBACKEND") if screen is None else os.environ.update(MPLBACKEND=screen)


def main() -> None:
    """Writes the pages of all notebooks."""
    PAGES.mkdir(exist_ok=True)
    for notebook in sorted(NOTEBOOKS.glob("*.py")):
        page = PAGES / f"{notebook.stem}.md"
        page.write_text(rendered(notebook, PAGES))
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
