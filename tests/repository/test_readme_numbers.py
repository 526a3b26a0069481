"""The README's table claims nothing that docs/benchmarks.md does not show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBER = r"[+-]?\d*\.\d+"
INTERVAL = re.compile(rf"\(({NUMBER}) to ({NUMBER})\)")


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a page, each as rows of cells by heading."""
    every = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines())
        every.append([dict(zip(head, row)) for row in rows])
    return every


def test_numbers_of_the_readme_come_from_the_page_of_benchmarks():
    shown: set[str] = set()
    leads: set[tuple[float, float]] = set()
    for table in tables((ROOT / "docs" / "benchmarks.md").read_text()):
        for row in table:
            shown |= {f"{float(number):.3f}" for number in re.findall(NUMBER, row.get("AUROC", ""))[:1]}
            leads |= {(float(a), float(b)) for a, b in INTERVAL.findall(row.get("gain in AUROC", ""))}
    readme = next(
        table for table in tables((ROOT / "README.md").read_text()) if any("AUROC" in key for key in table[0])
    )
    claims = [cell for row in readme for cell in list(row.values())[1:]]
    assert len(claims) > 10
    assert sum(bool(INTERVAL.search(cell)) for cell in claims) >= len(claims) / 2
    for cell in claims:
        number = re.search(NUMBER, cell)
        assert number is not None, cell
        assert f"{float(number[0]):.3f}" in shown, cell
        for low, high in INTERVAL.findall(cell):
            assert (float(low), float(high)) in leads, cell
