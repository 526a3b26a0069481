"""Figures that the reliability checks write, and the table of them in docs/reliability.md.

A check calls `record`; `python -m tests.reliability.figures` puts what was recorded into the page. A figure that a run
did not produce keeps the value that the page has.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "build" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Figure = str | int | float


def record(check: str, **figures: Figure) -> None:
    """Keeps what `check` counted or measured, with the day, for the page."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    kept = {**figures, "day": time.strftime("%Y-%m-%d")}
    (RECORDS / f"{check}.json").write_text(json.dumps(kept, indent=2) + "\n")


def recorded() -> dict[str, dict[str, Figure]]:
    """What was recorded last, by check."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def row_of(check: str, figures: dict[str, Figure]) -> str:
    """One line of the table."""
    shown = "; ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in figures.items() if name != "day")
    return f"| {check.replace('_', ' ')} | {shown} | {figures['day']} |"


def _shown(value: Figure) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else value


def updated(page: str, records: dict[str, dict[str, Figure]]) -> str:
    """The page with the lines of `records` in place of those of the same checks, in alphabetical order."""
    lines = between(page, BEGIN, END).splitlines()
    kept = {line.split("|")[1].strip(): line for line in lines[2:]}
    kept |= {check.replace("_", " "): row_of(check, figures) for check, figures in records.items()}
    return replaced(page, BEGIN, END, "\n".join([*lines[:2], *(kept[check] for check in sorted(kept))]))


def between(page: str, begin: str, end: str) -> str:
    """What stands between two marks."""
    return page.split(f"{begin}\n")[1].split(end)[0].removesuffix("\n")


def replaced(page: str, begin: str, end: str, body: str) -> str:
    """The page with `body` between two marks."""
    before, _, rest = page.partition(f"{begin}\n")
    return f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(), recorded()))
    print(f"{PAGE.relative_to(ROOT)} holds the figures of {', '.join(recorded()) or 'no check'}")
