"""Plain English and telling names: phrases and names that say nothing to a reader occur nowhere."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PHRASES = (
    "Of no queries.",
    "A bool is none.",
    "every so manieth row",
    "its absence is said before",
    "Raised when equal settings come to give other numbers",
    "then it keeps nobody out",
    "they go without a word of their own",
)
NAMES = {"found", "say", "way", "place", "room", "Questions", "Ahead", "Pace", "Watch", "Side", "Strangers", "Refused"}
NAMES |= {"BESIDE", "DEAREST_BOUND"}
EXCEPT = ("tests/repository/test_words.py", "CHANGELOG.md")


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match, without those that may name what is forbidden."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a checkout of git")
    return [ROOT / name for name in listed.stdout.splitlines() if name not in EXCEPT and (ROOT / name).is_file()]


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The names that a module gives to variables, parameters, functions and classes, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno


def test_no_phrase_that_a_native_speaker_would_not_write():
    occurrences = []
    for path in tracked():
        text = " ".join(path.read_bytes().decode(errors="ignore").split())
        occurrences += [f"{path.relative_to(ROOT)}: {phrase}" for phrase in PHRASES if phrase in text]
    assert occurrences == []


def test_no_name_that_says_nothing():
    occurrences = []
    for path in tracked("*.py"):
        for name, line in identifiers(ast.parse(path.read_text())):
            if name in NAMES:
                occurrences.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert occurrences == []


def test_no_class_name_has_two_meanings():
    homes = defaultdict(list)
    for path in tracked("geoflow_fast/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
