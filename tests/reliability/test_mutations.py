"""Every guard is needed: without its statement, the test of the same name fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.reliability.figures import PAGE, ROOT, between, record
from tests.reliability.mutations import BEGIN, END, Guard, guard_tests, guards, table

LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "site", "demo_output", "runs", "__pycache__", "*.egg-info")
FAILED = 1
"""The exit status of pytest when tests ran and some failed; other values mean that they did not run."""
HANGS_AFTER = 300.0
"""Seconds. A test that waits forever without its guard counts as failed."""
GUARDS = guards()
TESTS = {test.name: test for test in guard_tests()}

caught: list[str] = []


def test_every_guard_has_a_test_of_its_name():
    assert sorted(guard.name for guard in GUARDS) == sorted(TESTS)
    assert max(Counter(guard.name for guard in GUARDS).values()) == 1
    assert len(TESTS) == len(guard_tests())


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_can_be_taken_out(guard: Guard):
    source = (ROOT / guard.file).read_text()
    changed = guard.removed_from(source, TESTS[guard.name].without)
    compile(changed, guard.file, "exec")
    assert changed != source


def test_the_page_has_the_list():
    assert between(PAGE.read_text(), BEGIN, END) == table(), "make reliability"


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository in another place, with the compiled code as it is."""
    folder = tmp_path_factory.mktemp("mutated") / "repository"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


def run(folder: Path, *tests: str, seconds: float = HANGS_AFTER) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *tests]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, FAILED, "it hangs")


@pytest.mark.slow
def test_with_all_guards_the_tests_pass(copy):
    done = run(copy, *sorted({test.test for test in TESTS.values()}), seconds=len(TESTS) * HANGS_AFTER)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_without_its_guard_a_test_fails(copy, guard):
    path, test = copy / guard.file, TESTS[guard.name]
    source = path.read_text()
    path.write_text(guard.removed_from(source, test.without))
    try:
        done = run(copy, "-x", test.test)
    finally:
        path.write_text(source)
    assert done.returncode == FAILED, done.stdout[-3000:]
    caught.append(guard.name)


@pytest.mark.slow
def test_the_count():
    """Runs last and records how many guards the tests above have caught."""
    assert len(caught) == len(GUARDS) >= 10
    record("mutations", guards_taken_out=len(GUARDS), caught_by_a_test=len(caught))
