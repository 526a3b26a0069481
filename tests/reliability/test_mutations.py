"""Every guard in the list is needed: without it the test that is named beside it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.figures import PAGE, between, record
from tests.reliability.mutations import BEGIN, END, GUARDS, Guard, table

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "site", "docs", "demo_output", "runs", "__pycache__", "*.egg-info"
)
FAILED = 1
"""pytest's status when tests ran and some failed; others tell of a run that did not come about."""
HANGS_AFTER = 300.0
"""Seconds; a guard against waiting is missed in a test that does not end."""

caught: list[str] = []


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_the_guard_is_where_the_list_says(guard: Guard):
    assert (ROOT / guard.file).read_text().count(guard.text) == 1
    file, _, name = guard.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


def test_the_page_has_the_list():
    assert between(PAGE.read_text(), BEGIN, END) == table(), "make reliability"


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository in another place, with the compiled code as it is."""
    folder = tmp_path_factory.mktemp("mutated") / "repository"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


@pytest.fixture
def without(copy: Path, request) -> Iterator[Path]:
    """The copy without one guard."""
    guard: Guard = request.param
    path = copy / guard.file
    whole = path.read_text()
    path.write_text(whole.replace(guard.text, guard.without))
    yield copy
    path.write_text(whole)


def run(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *tests]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANGS_AFTER)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, FAILED, "it hangs")


@pytest.mark.slow
def test_with_all_guards_the_tests_pass(copy):
    done = run(copy, *sorted({guard.test for guard in GUARDS}))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("without", "guard"), [(guard, guard) for guard in GUARDS], indirect=["without"])
def test_without_its_guard_a_test_fails(without, guard):
    done = run(without, "-x", guard.test)
    assert done.returncode == FAILED, done.stdout[-3000:]
    caught.append(guard.name)


@pytest.mark.slow
def test_the_count():
    """Of all above; this one is the last."""
    assert len(caught) == len(GUARDS) >= 10
    record("mutations", guards_taken_out=len(GUARDS), caught_by_a_test=len(caught))
