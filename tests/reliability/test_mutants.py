"""Faults in the numeric core are noticed: bugs put in by hand, and random mutants."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.reliability import mutants, planted
from tests.reliability.changed_code import (
    BROKEN_OFF,
    CAUGHT,
    CRASHES,
    HANGS,
    SURVIVED,
    BrokenOffError,
    Change,
    Outcome,
    give_changed_code,
    judged,
)
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


def test_every_mutant_that_counts_as_equivalent_has_its_line_and_a_reason():
    possible = {mutant.name: mutant for file in mutants.CORE for mutant in mutants.candidates(file)}
    assert set(EQUIVALENT) <= set(possible)  # none is about code that is gone
    for name, equivalent in EQUIVALENT.items():
        change = possible[name].change
        line = (ROOT / change.file).read_text().splitlines()[change.line - 1]
        assert (change.file, line.strip()) == (equivalent.file, equivalent.line)
        assert len(equivalent.why.split()) > 3


def test_another_draw_has_other_mutants_of_the_same_names():
    ours, others = ({mutant.name: mutant for mutant in mutants.drawn(seed)} for seed in (mutants.SEED, 1))
    shared = set(ours) & set(others)
    assert 0 < len(shared) < len(ours) / 2
    assert all(ours[name].change == others[name].change for name in shared)


def test_the_first_result_of_a_draw_stays_what_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "RECORDS", tmp_path)
    monkeypatch.setattr("tests.reliability.figures.RECORDS", tmp_path)
    monkeypatch.setattr(mutants, "on_presets_path", lambda _: True)
    first, *others = [mutant for mutant in mutants.drawn(1) if mutant.name not in EQUIVALENT]
    written(tmp_path, mutants.Part(), (first, Outcome(SURVIVED)))
    mutants.record_first(1)
    assert not list(tmp_path.glob("*.json"))  # the others have not run
    written(tmp_path, mutants.Part(), *((mutant, Outcome(CAUGHT, "a_test")) for mutant in others))
    monkeypatch.setattr(mutants, "tests_digest", lambda _: "that of tests in which there is a new one")
    written(tmp_path, mutants.Part(), (first, Outcome(CAUGHT, "a_new_test")))
    assert mutants.results(1) == {first.name: Outcome(CAUGHT, "a_new_test")}
    mutants.record_first(1)
    figures = json.loads((tmp_path / "random_mutants_of_seed_1_when_first_run.json").read_text())
    assert (figures["survived"], figures["survived_on_the_path_of_presets"]) == (1, 1)
    assert figures["caught"] == len(others)
    assert figures["score"] == round(len(others) / (len(others) + 1), 3)


def written(folder: Path, part: mutants.Part, *outcomes: tuple[mutants.Mutant, Outcome]) -> None:
    """Keeps results as a run does, in a folder of the test's own."""
    for mutant, outcome in outcomes:
        part.keep(mutant, outcome)
    assert (folder / f"mutants{part.suffix}.jsonl").exists()


def test_the_page_is_not_written_while_mutants_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "RECORDS", tmp_path)
    before = PAGE.read_text()
    written(tmp_path, mutants.Part(), (mutants.drawn()[0], Outcome(CAUGHT, "a_test")))
    with pytest.raises(SystemExit, match="have no result with the tests as they are now"):
        mutants.write()
    assert PAGE.read_text() == before


def test_results_of_all_parts_are_read_and_the_last_one_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "RECORDS", tmp_path)
    one, other = mutants.drawn()[:2]
    written(tmp_path, mutants.Part(), (one, Outcome(SURVIVED)), (other, Outcome(CRASHES)))
    written(tmp_path, mutants.Part(2, 2), (one, Outcome(CAUGHT, "a_test")))
    assert mutants.results() == {one.name: Outcome(CAUGHT, "a_test"), other.name: Outcome(CRASHES)}
    monkeypatch.setattr(mutants, "tests_digest", lambda _: "that of tests which somebody has changed")
    assert mutants.results() == {}


def test_the_digest_of_tests_is_that_of_all_they_import(monkeypatch):
    core, read = "geoflow_fast/likelihood/evaluators.py", Path.read_text
    whole = mutants.tests_digest.__wrapped__
    before = whole(core)
    monkeypatch.setattr(Path, "read_text", lambda path: read(path) + "\n" * path.match("tests/likelihood/helpers.py"))
    assert whole(core) != before
    assert whole("geoflow_fast/noise.py") == mutants.tests_digest("geoflow_fast/noise.py")


def test_parts_share_the_mutants_without_splitting_a_file():
    drawn = mutants.drawn()
    parts = [mutants.Part.parse(f"{number}/3").of_mutants(drawn) for number in (1, 2, 3)]
    assert sorted(m.name for part in parts for m in part) == sorted(m.name for m in drawn)
    files = [{m.change.file for m in part} for part in parts]
    assert sum(map(len, files)) == len(set().union(*files)) == len(mutants.CORE)
    assert mutants.Part().of_mutants(drawn) == drawn
    assert len({mutants.Part(number, 3).folder for number in (1, 2, 3)}) == 3
    for text in ("0/2", "3/2", "2", "1/0", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no part"):
            mutants.Part.parse(text)


@pytest.mark.parametrize(
    ("status", "test", "expected"),
    [
        (0, "", SURVIVED),
        (1, "a_test", CAUGHT),
        (2, "import of a_test", CAUGHT),
        (1, "", CRASHES),  # a library ended the process
        (-11, "", CRASHES),
        (-6, "a_test", CRASHES),
        (None, "", HANGS),
    ],
)
def test_what_a_status_says(status, test, expected, tmp_path):
    outcome = judged(status, test, 1.0, tmp_path / "output.txt")
    assert outcome.status == expected
    assert outcome.noticed == (expected != SURVIVED)


@pytest.mark.parametrize("status", [2, BROKEN_OFF, 4, 5])
def test_tests_that_were_not_run_say_nothing(status, tmp_path):
    (tmp_path / "output.txt").write_text("there are no tests\n")
    with pytest.raises(BrokenOffError, match=rf"(?s)status {status}.*there are no tests"):
        judged(status, "", 1.0, tmp_path / "output.txt")


@pytest.mark.slow
def test_a_function_that_another_has_made_is_changed_with_it():
    """What a decorator or a factory made when its module was imported is what tests call."""
    change = Change.of_text(
        "geoflow_fast/ops/masked_interpolant.py", "(inputs[2], inputs[3])", "(inputs[3], inputs[2])"
    )
    points, t, direction = torch.eye(4).split(1), torch.zeros(1), torch.zeros(1, dtype=torch.int8)
    seen = []
    run = importlib.import_module(change.module)._fused(lambda _, data, *_rest: seen.append(data) or -1)
    try:
        give_changed_code(change, "_fused")
        run(*points, t, direction, None, False)
    finally:
        give_changed_code(dataclasses.replace(change, after=change.before), "_fused")
    run(*points, t, direction, None, False)
    for (image, text), expected in zip(seen, (points[:1:-1], points[2:]), strict=True):
        assert torch.equal(image, expected[0])
        assert torch.equal(text, expected[1])


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
    counts, survivors = mutants.summary(mutants.SEED, mutants.results())
    mutants.record_figures()
    assert not mutants.wrongly_equivalent()
    assert mutants.score(counts) >= mutants.LEAST_SCORE
    assert not [mutant.shown for mutant in survivors if mutants.on_presets_path(mutant)]


NOTHING_TO_SEE = """
from tests.reliability.changed_code import BrokenOffError, Change, Collected, Job, Runner
try:
    Runner().run(None, ["tests/test_geometry.py::test_that_nobody_wrote"])
except BrokenOffError:
    print("no test")
nothing = Change.of_text("geoflow_fast/geometry.py", "def normalize(", "def normalize(")
jobs = [Job("a", nothing, "normalize", ("tests/test_plan.py",)), Job("b", nothing, "nobody", ("tests/test_plan.py",))]
Collected(jobs, lambda job, outcome: print(f"{job.name}: {type(outcome).__name__}")).run()
"""


@pytest.mark.slow
def test_a_child_that_breaks_off_has_noticed_nothing():
    done = subprocess.run([sys.executable, "-c", NOTHING_TO_SEE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in ("no test", "a: Outcome", "b: BrokenOffError") if line not in done.stdout] == []
