"""One HTML page with words, tables and pictures: a single file that needs no network and prints well, light or dark."""

from __future__ import annotations

import base64
import html
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import read_small, write_atomic

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
NO_VALUE = "–"
BEST: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min}

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --accent: #2f5f9e;
  --best: #e3eefb; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181e; --ink: #e4e8ee; --soft: #9aa5b3; --line: #323a45; --accent: #8ab4f0; --best: #24364d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 17px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 .8rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 3rem 0 .6rem; padding-top: 1.2rem;
  border-top: 1px solid var(--line); }
p { max-width: 44rem; margin: .7rem 0; }
.lead { font-size: 1.15rem; color: var(--soft); }
nav { font-size: .92rem; margin-top: 1.4rem; }
nav ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }
a { color: var(--accent); }
.wide { overflow-x: auto; margin: 1.4rem 0; }
table { border-collapse: collapse; font-size: .92rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
caption, figcaption { color: var(--soft); font-size: .92rem; line-height: 1.45; text-align: left; max-width: 52rem; }
caption { padding-bottom: .6rem; }
th, td { padding: .38rem .8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; vertical-align: bottom; max-width: 8rem; }
tbody th { font-weight: 400; min-width: 12rem; }
.number { text-align: right; }
td.number { white-space: nowrap; }
.best { background: var(--best); font-weight: 700; }
figure { margin: 1.6rem 0 2rem; }
img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; }
figcaption { margin-top: .6rem; }
@media print {
  :root { color-scheme: light; --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --best: #eee; }
  body { font-size: 10.5pt; } main { max-width: none; padding: 0; } nav { display: none; } h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; } .wide { overflow: visible; } img { max-height: 22cm; width: auto; border: 0; } }
"""


class Report:
    """A self-contained HTML page, filled from top to bottom by `section`, `text`, `table` and `figure`, then written.

    Text is escaped, so nothing in it is interpreted as HTML.
    """

    def __init__(self, title: str, lead: str) -> None:
        self.title, self.lead = checks.words(title, "title"), checks.words(lead, "lead")
        self._headings: list[str] = []
        self._body: list[str] = []

    def section(self, heading: str, *paragraphs: str) -> None:
        """Begins a section with a heading and paragraphs."""
        for words in (heading, *paragraphs):
            checks.words(words, "heading or paragraph")
        self._headings.append(heading)
        self._body.append(f'<h2 id="s{len(self._headings)}">{html.escape(heading)}</h2>')
        self.text(*paragraphs)

    def text(self, *paragraphs: str) -> None:
        """Adds paragraphs to the current section."""
        self._body += [f"<p>{html.escape(checks.words(words, 'paragraph'))}</p>" for words in paragraphs]

    def table(self, rows: Sequence[Mapping[str, object]], caption: str, best: Mapping[str, str] | None = None) -> None:
        """Adds a table with one row per mapping and columns in order of appearance; missing values show as a dash.

        Numbers are right-aligned, fractions with three decimals. `best` maps the names of columns to "max" or "min",
        whose best value is then marked.
        """
        checks.words(caption, "caption")
        if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
            raise TypeError(f"rows must be mappings from columns to values, got {rows!r}")
        if best is not None and not isinstance(best, Mapping):
            raise TypeError(f"best must map columns to 'max' or 'min', got {best!r}")
        columns = list(dict.fromkeys(checks.words(name, "the name of a column") for row in rows for name in row))
        best = dict(best or {})
        unknown = [f"{name!r}: {which!r}" for name, which in best.items() if name not in columns or which not in BEST]
        if not columns or unknown:
            known = f"columns {columns} and 'max' or 'min', got {', '.join(unknown)}"
            raise ValueError("a table needs a row with a column" if not columns else f"best must name {known}")
        marked = {name: _best_of([row.get(name) for row in rows], which) for name, which in best.items()}
        right = {name for name in columns if all(_stands_right(row.get(name)) for row in rows)}
        head = "".join(_cell('th scope="col"', name, right=name in right) for name in columns)
        lines = []
        for row in rows:
            cells = [
                _cell(
                    'th scope="row"' if name == columns[0] else "td",
                    shown(row.get(name)),
                    right=name in right,
                    best=name in marked and row.get(name) == marked[name],
                )
                for name in columns
            ]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        self._body.append(
            f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(caption)}"><table><caption>'
            f"{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        )

    def figure(self, png_path: str | Path, caption: str, alt: str | None = None) -> None:
        """Adds a PNG image, embedded in the page. `alt`: a description for readers who cannot see it, by default the
        caption."""
        checks.words(caption, "caption")
        if alt is not None:
            checks.words(alt, "alt")
        data = read_small(checks.path(png_path, "png_path"))
        if not data.startswith(PNG_SIGNATURE) or len(data) < 24:
            raise ValueError(f"{png_path} is not a PNG file")
        width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        self._body.append(
            f'<figure><img width="{width}" height="{height}" alt="{html.escape(alt or caption)}" '
            f'src="data:image/png;base64,{base64.b64encode(data).decode()}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def render(self) -> str:
        """The HTML of the page so far. Its content security policy forbids loading anything from elsewhere."""
        title, lead = html.escape(self.title), html.escape(self.lead)
        links = "".join(
            f'<li><a href="#s{number}">{html.escape(heading)}</a></li>'
            for number, heading in enumerate(self._headings, start=1)
        )
        contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(self._headings) > 2 else ""
        body = "\n".join(self._body)
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{contents}
{body}
</main>
</body>
</html>
"""

    def write(self, path: str | Path) -> Path:
        """Writes the page to `path`, atomically, and returns the path."""
        path = checks.path(path, "path")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.render().encode())
        return path


def shown(value: object) -> str:
    """A value as a cell of a table."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real):
        return NO_VALUE if float(value) != float(value) else f"{float(value):.3f}"
    return str(value)


def _stands_right(value: object) -> bool:
    return value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _best_of(values: Sequence[object], which: str) -> float | None:
    known = [float(value) for value in values if isinstance(value, numbers.Real) and value == value]
    return BEST[which](known) if known else None


def _cell(tag: str, words: str, *, right: bool, best: bool = False) -> str:
    names = " ".join(name for name, given in (("number", right), ("best", best)) if given)
    kind = f' class="{names}"' if names else ""
    return f"<{tag}{kind}>{html.escape(words)}</{tag[:2]}>"
