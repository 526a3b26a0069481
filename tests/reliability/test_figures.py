"""The page of figures has a row for everything that is said to be killed."""

from __future__ import annotations

import re

import pytest

from tests.reliability.faults import TASKS
from tests.reliability.figures import BEGIN, END, PAGE, ROOT, between, replaced, row_of, updated
from tests.reliability.test_faults import COMMANDS, WHOLE

ROWS = dict(
    re.findall(r"^\| (.+?) \| (.+?) \| \d{4}-\d\d-\d\d \|$", between(PAGE.read_text(), BEGIN, END), re.MULTILINE)
)


@pytest.mark.parametrize("name", TASKS)
def test_each_task_has_its_kills_and_disk_errors_on_the_page(name):
    survived = re.match(
        r"kills survived (\d+); .*between two files (\d+); within a write (\d+)", ROWS[f"kills of {name}"]
    )
    assert survived is not None
    assert int(survived[1]) >= 50
    assert min(int(survived[2]), int(survived[3])) > 0
    for what in (f"operations of {name}", f"disk errors of {name}"):
        assert re.fullmatch(r"kinds of operations (killed at|that failed) \d+", ROWS[what])


@pytest.mark.parametrize("command", [*COMMANDS, *WHOLE])
def test_each_command_that_is_killed_is_on_the_page(command):
    assert re.search(r"survived [1-9]", ROWS[f"kills of geoflow {command}"])


def test_a_figure_takes_the_place_of_the_earlier_one():
    page = replaced(PAGE.read_text(), BEGIN, END, "| Check | Figures | Day |\n|---|---|---|\n| b | x 1 | 2026-01-01 |")
    new = updated(
        page, {"a_c": {"large_number": 12345, "share": 0.12345, "day": "2026-01-02"}, "b": {"day": "2026-01-03"}}
    )
    assert between(new, BEGIN, END).splitlines()[2:] == [
        "| a c | large number 12,345; share 0.123 | 2026-01-02 |",
        row_of("b", {"day": "2026-01-03"}),
    ]


def test_the_tests_that_the_page_names_for_each_part_exist():
    section = PAGE.read_text().split("## Heads, rules, stores, pages and logs")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)((?:::\w+)+)`", section)
    assert len(named) > 10
    for file, names in named:
        source = (ROOT / "tests" / file).read_text()
        for name in names.split("::")[1:]:
            assert re.search(rf"(def|class) {name}\b", source), (file, name)
