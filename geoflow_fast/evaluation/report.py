"""One HTML page with words, tables and pictures: a single file that needs no network and prints well, light or dark."""

from __future__ import annotations

import base64
import contextlib
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geoflow_fast.runtime import checks, pages
from geoflow_fast.runtime.files import read_small, write_atomic
from geoflow_fast.runtime.pages import charts

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
NO_VALUE = "–"
BEST: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min}


class Unranked(float):
    """A number that is shown but never marked as the best of its column, such as one of the truth itself."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text and how it is shown."""

    text: str
    number: bool
    best: bool = False

    @property
    def classes(self) -> str:
        """Names of the styles that apply."""
        return " ".join(name for name in ("number", "best") if getattr(self, name))


@dataclass(frozen=True)
class TableRows:
    """A table as a page shows it, see `Report.table`."""

    head: list[Cell]
    body: list[list[Cell]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, object]], best: Mapping[str, str] | None = None) -> TableRows:
        """The table of these rows, in which the best value of some columns is marked."""
        if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
            raise TypeError(f"rows must be mappings from columns to values, got {rows!r}")
        if best is not None and not isinstance(best, Mapping):
            raise TypeError(f"best must map columns to 'max' or 'min', got {best!r}")
        columns = list(dict.fromkeys(checks.words(name, "the name of a column") for row in rows for name in row))
        if not columns:
            raise ValueError("a table needs a row with a column")
        best = dict(best or {})
        unknown = [f"{name!r}: {which!r}" for name, which in best.items() if name not in columns or which not in BEST]
        if unknown:
            raise ValueError(f"best must name columns {columns} and 'max' or 'min', got {', '.join(unknown)}")
        marked = {name: _best_of([row.get(name) for row in rows], which) for name, which in best.items()}
        number = {name: all(_is_number(row.get(name)) for row in rows) for name in columns}
        head = [Cell(name, number[name]) for name in columns]
        body = [
            [
                Cell(shown(row.get(name)), number[name], name in marked and _is_best(row.get(name), marked[name]))
                for name in columns
            ]
            for row in rows
        ]
        return cls(head, body)


@dataclass(frozen=True)
class EmbeddedPicture:
    """A PNG image that is embedded in a page."""

    width: int
    height: int
    source: str
    """The image itself, as a data URI."""

    @classmethod
    def read(cls, path: str | Path) -> EmbeddedPicture:
        """The picture in a PNG file."""
        data = read_small(checks.path(path, "png_path"))
        if not data.startswith(PNG_SIGNATURE) or len(data) < 24:
            raise ValueError(f"{path} is not a PNG file")
        width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        return cls(width, height, f"data:image/png;base64,{base64.b64encode(data).decode()}")


class Report:
    """A self-contained HTML page, filled from top to bottom by `section`, `text`, `table` and `figure`, then written.

    Text is escaped, so nothing in it is interpreted as HTML.
    """

    def __init__(self, title: str, lead: str) -> None:
        self.title, self.lead = checks.words(title, "title"), checks.words(lead, "lead")
        self._sections: dict[str, str] = {}
        self._content: list[dict[str, Any]] = []

    def section(self, heading: str, *paragraphs: str) -> None:
        """Begins a section with a heading and paragraphs."""
        for words in (heading, *paragraphs):
            checks.words(words, "heading or paragraph")
        name = f"s{len(self._sections) + 1}"
        self._sections[name] = heading
        self._content.append({"kind": "heading", "id": name, "words": heading})
        self.text(*paragraphs)

    def text(self, *paragraphs: str) -> None:
        """Adds paragraphs to the current section."""
        self._content += [{"kind": "paragraph", "words": checks.words(words, "paragraph")} for words in paragraphs]

    def table(self, rows: Sequence[Mapping[str, object]], caption: str, best: Mapping[str, str] | None = None) -> None:
        """Adds a table with one row per mapping and columns in order of appearance; missing values show as a dash.

        Numbers are right-aligned, fractions with three decimals. `best` maps the names of columns to "max" or "min",
        whose best value is then marked.
        """
        checks.words(caption, "caption")
        self._content.append({"kind": "table", "table": TableRows.of(rows, best), "caption": caption})

    def figure(self, png_path: str | Path, caption: str, alt: str | None = None) -> None:
        """Adds a PNG image, embedded in the page. `alt`: a description for readers who cannot see it, by default the
        caption."""
        checks.words(caption, "caption")
        alt = caption if alt is None else checks.words(alt, "alt") or caption
        self._content.append(
            {"kind": "figure", "picture": EmbeddedPicture.read(png_path), "caption": caption, "alt": alt}
        )

    def answer(self, words: str) -> None:
        """Adds the sentence that the page is about, which stands out."""
        self._content.append({"kind": "answer", "words": checks.words(words, "words")})

    def cards(self, tiles: Sequence[tuple[str, str, str]]) -> None:
        """Adds a row of tiles, each with a name, a value and a word about it."""
        shown_tiles = [
            {"name": name, "value": value, "note": note, "tone": "", "id": ""} for name, value, note in tiles
        ]
        self._content.append({"kind": "cards", "tiles": shown_tiles})

    def risk(self, chart: charts.RiskCoverage, caption: str) -> None:
        """Adds a picture of the error over the share that is answered."""
        if not isinstance(chart, charts.RiskCoverage):
            raise TypeError(f"chart must be a RiskCoverage, got {type(chart).__name__}")
        self._content.append({"kind": "risk", "chart": chart, "caption": checks.words(caption, "caption")})

    def intervals(self, chart: charts.Whiskers, caption: str) -> None:
        """Adds values with their intervals."""
        if not isinstance(chart, charts.Whiskers):
            raise TypeError(f"chart must be Whiskers, got {type(chart).__name__}")
        self._content.append({"kind": "intervals", "chart": chart, "caption": checks.words(caption, "caption")})

    @contextlib.contextmanager
    def folded(self, summary: str) -> Iterator[None]:
        """What is added inside is folded until a reader opens it."""
        self._content.append({"kind": "fold", "words": checks.words(summary, "summary")})
        yield
        self._content.append({"kind": "unfold"})

    def render(self) -> str:
        """The HTML of the page so far. Its content security policy forbids loading anything from elsewhere."""
        page = {"title": self.title, "lead": self.lead, "sections": self._sections, "content": self._content}
        return pages.render("report.html.j2", **page)

    def write(self, path: str | Path) -> Path:
        """Writes the page to `path`, atomically, and returns the path."""
        return write_page(self.render(), path)


def write_page(page: str, path: str | Path) -> Path:
    """Writes a page, whole or not at all, and returns its path."""
    path = checks.path(path, "path")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode())
    return path


def shown(value: object) -> str:
    """The text of a value in a table: numbers with three decimals or separated thousands, a dash for no value."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real):
        return NO_VALUE if float(value) != float(value) else f"{float(value):.3f}"
    return str(value)


def _is_number(value: object) -> bool:
    """True for numbers and for a missing value, which stands among them as a dash."""
    return value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _best_of(values: Sequence[object], which: str) -> float | None:
    ranked = (value for value in values if isinstance(value, numbers.Real) and not isinstance(value, Unranked))
    known = [float(value) for value in ranked if value == value]
    return BEST[which](known) if known else None


def _is_best(value: object, best: float | None) -> bool:
    return value == best and value is not None and not isinstance(value, Unranked)
