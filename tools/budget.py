"""`python -m tools.budget` prints the size of each part of the tree, next to the size that is planned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOM = "geoflow_fast/"
# Parts of the package by folder or module, with the lines that are expected when the plan is done.
PACKAGE = {
    "geometry manifolds directions noise spherical linear worlds": 1250,
    "ops": 3200,
    "flow": 2000,
    "likelihood": 1000,
    "training": 1700,
    "head": 700,
    "retrieval": 1900,
    "decisions": 2000,
    "data": 1000,
    "stores": 600,
    "encoders": 900,
    "scoring jobs": 950,
    "evaluation": 900,
    "explore demo": 1000,
    "runtime": 1400,
    "cli": 900,
    "baselines plan distributed": 0,
}
CODE = (".py", ".pyi", ".j2", ".js", ".css")
REST = {
    "kernels": (("kernels/",), (".py",), 1900),
    "csrc": (("csrc/",), (".h", ".cpp", ".cu", ".cuh", ".json"), 6300),
    "benchmarks": (("benchmarks/",), (".py",), 5500),
    "tests": (("tests/",), (".py", ".cpp", ".h", ".cuh"), 31000),
    "tools": (("tools/",), (".py",), 1200),
    "examples": (("examples/",), (".py",), 600),
}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def text(names: list[str]) -> str:
    return "".join((ROOT / name).read_text(encoding="utf-8") for name in names)


def main() -> int:
    files = tracked()
    own = [name for name in files if name.startswith(ROOM) and name.endswith(CODE)]
    left, rows = set(own), []
    for part, expected in PACKAGE.items():
        begins = tuple(f"{ROOM}{name}{end}" for name in part.split() for end in ("/", "."))
        found = [name for name in own if name.startswith(begins)]
        left -= set(found)
        rows.append((part, text(found).count("\n"), expected))
    rows.append(("package files", text(sorted(left)).count("\n"), 0))
    rows.append(("package", text(own).count("\n"), 21500))
    for part, (begins, ends, expected) in REST.items():
        found = [name for name in files if name.startswith(begins) and name.endswith(ends)]
        rows.append((part, text(found).count("\n"), expected))
    pages = [name for name in files if name.endswith(".md") and (name.startswith("docs/") or name == "README.md")]
    rows.append(("docs and README, words", len(text(pages).split()), 22000))
    names = re.findall(r" as \w+$", (ROOT / ROOM / "__init__.pyi").read_text(encoding="utf-8"), re.MULTILINE)
    rows.append(("modules", sum(name.endswith(".py") for name in own), 0))
    rows.append(("public names", len(names), 38))
    for part, now, expected in rows:
        sys.stdout.write(f"{part:<62}{now:>9,}{f'{expected:,}' if expected else '':>10}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
