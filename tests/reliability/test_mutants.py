"""Faults in the numeric core are noticed: bugs put in by hand, and random mutants."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.reliability import mutants, planted
from tests.reliability.changed_code import CAUGHT
from tests.reliability.equivalent import EQUIVALENT
from tests.reliability.figures import PAGE, ROOT, between, record


@pytest.mark.parametrize("bug", planted.PLANTED, ids=lambda bug: bug.name)
def test_a_bug_can_be_put_in(bug):
    change = bug.change
    assert change.source != (ROOT / bug.file).read_text()
    if not change.is_native:
        compile(change.source, bug.file, "exec")
    file, _, name = bug.test.partition("::")
    assert f"def {name.rsplit('::', 1)[-1]}(" in (ROOT / "tests" / file).read_text()


def test_the_page_has_the_bugs():
    assert between(PAGE.read_text(), planted.BEGIN, planted.END) == planted.table(), "make reliability"


def test_mutants_are_drawn_from_the_whole_core():
    drawn = mutants.drawn()
    assert len(drawn) >= 150
    assert len({mutant.name for mutant in drawn}) == len(drawn)
    assert Counter(mutants.language(mutant.change.file) for mutant in drawn) == mutants.DRAWN
    assert {mutant.change.file for mutant in drawn} == set(mutants.CORE)
    for mutant in drawn:
        if not mutant.change.is_native:
            compile(mutant.change.source, mutant.change.file, "exec")


def test_every_mutant_that_counts_as_equivalent_is_drawn_and_has_a_reason():
    names = {mutant.name for mutant in mutants.drawn()}
    assert set(EQUIVALENT) <= names
    assert all(len(reason.split()) > 3 for reason in EQUIVALENT.values())


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of this folder in a process that has not imported the package."""
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_every_bug_that_was_put_in_is_noticed():
    done = in_a_process("tests.reliability.planted", "--run")
    lines = [line for line in done.stdout.splitlines() if line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in lines] == [CAUGHT] * len(planted.PLANTED), done.stdout
    record("bugs_put_in_by_hand", bugs=len(planted.PLANTED), caught_by_a_test=len(lines))


@pytest.mark.slow
def test_random_mutants_are_noticed():
    """About forty minutes on one core, or as long as the mutants take that have no result yet."""
    done = in_a_process("tests.reliability.mutants")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts, survivors = mutants.summary()
    assert not sum(row["waiting"] for row in counts.values())
    assert mutants.score(counts) >= mutants.LEAST_SCORE
    assert not [mutant.shown for mutant in survivors if mutants.on_presets_path(mutant)]
