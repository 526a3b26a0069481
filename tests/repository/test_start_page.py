"""The start-here page, followed literally: every step in a new session, alone and beside busy processes."""

from __future__ import annotations

import pytest

from geoflow_fast.runtime import processors
from tools import start_page


def test_the_steps_are_those_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```\npip install .\ngeoflow doctor  # a comment\ngeoflow train \\\n  --out a\n```\n"
        "```python\nx = 1\n```\n```text\nno\n```\n"
    )
    words = [command[1:] for command in start_page.steps(page)]
    assert words == [
        ["-m", "geoflow_fast", "doctor"],
        ["-m", "geoflow_fast", "train", "--out", "a"],
        ["-c", "x = 1\n"],
    ]
    assert len(start_page.steps()) > 4


def test_a_step_that_fails_is_shown(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)  # a new session does not know it\n```\n")
    with pytest.raises(SystemExit, match="NameError: name 'x' is not defined"):
        start_page.follow(page)


@pytest.mark.slow
def test_the_page_beside_busy_processes_takes_at_most_three_times_as_long(capsys):
    if processors.is_busy():
        pytest.skip("the machine is busy, so that nothing can be compared with it at rest")
    alone = start_page.follow()
    with start_page.busy(processors.affinity()):
        beside = start_page.follow()
    with capsys.disabled():
        print(f"\nstart-here page: {alone:.0f} s alone, {beside:.0f} s beside busy processes")
    assert beside <= 3 * alone
