"""What a terminal, a notebook and a log show of a long computation."""

from __future__ import annotations

import builtins
import re
import sys
import types

import pytest
from rich.console import Console

from geoflow_fast.runtime import progress
from geoflow_fast.runtime.progress import ProgressLine, progress_bar
from geoflow_fast.training.logging import TrainingLine


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves; both this package and rich read it."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    return now


def shown(line: ProgressLine, width: int = 80) -> str:
    """What the live line shows on a terminal of this width."""
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(line.bar.get_renderable())
    return capture.get().rstrip("\n")


@pytest.mark.parametrize("seconds", [0.01, 1.0, 45.0, 400.0])
def test_the_time_left_appears_however_slow_steps_are(clock, seconds):
    line = TrainingLine(120_000, 0, shown=True)
    for step in range(1, 61):
        clock[0] += seconds
        line.update(step, {"loss": 3.2117, "val_loss": 2.9604, "coupling_share": 0.12} if step == 50 else {})
    words = shown(line.line)
    line.close()
    hours, minutes, rest = map(int, words.split()[-1].split(":"))
    assert 3600 * hours + 60 * minutes + rest == pytest.approx((120_000 - 60) * seconds, rel=1e-3)


def test_a_line_of_training_fits_eighty_columns_and_keeps_the_validation_loss(clock):
    line = TrainingLine(120_000, 119_000, shown=True)
    line.update(119_000, {"val_loss": 2.9604})
    for step in range(119_001, 120_001):
        clock[0] += 0.2
        line.update(step, {"loss": 3.2117, "coupling_share": 0.12} if step % 50 == 0 else {})
    words = shown(line.line)
    line.close()
    assert "\n" not in words
    assert len(words) <= 80
    assert re.sub(r"━+", "━", words).startswith("training ━ 120000/120000 loss 3.212 val 2.96 OT 12% 5/s 0:00:00")


@pytest.mark.parametrize(
    ("start", "seconds", "expected"),
    [
        (0, 0.04, "expected: at most 14 min for 20,000 steps (25 steps/s, measured over the first 50)\n"),
        (15_000, 4.0, "expected: at most 5.6 h for 5,000 steps (0.25 steps/s, measured over the first 50)\n"),
        (0, 0.001, ""),  # over in 20 seconds
    ],
)
def test_the_expected_time_is_that_of_the_first_steps_times_all(clock, capsys, start, seconds, expected):
    """Neither the validation before the first step nor the step that warms up counts."""
    line = TrainingLine(20_000, start, shown=None)
    line.line.told = clock[0] + 1e6  # no other lines
    clock[0] += 60
    line.update(start, {"val_loss": 3.0})
    clock[0] += 20
    for step in range(start + 1, start + 200):
        line.update(step, {})
        clock[0] += seconds
    line.close()
    assert capsys.readouterr().err == expected


def test_the_expected_time_stands_above_a_live_line_and_nowhere_if_nothing_is_shown(clock, capsys):
    for shown in (True, False):
        line = TrainingLine(20_000, 0, shown=shown)
        for step in range(60):
            clock[0] += 1.0
            line.update(step, {})
        line.close()
        assert ("expected: at most 5.6 h for 20,000 steps (1 steps/s" in capsys.readouterr().err) is shown


def test_a_log_gets_a_plain_line_now_and_then(clock, capsys):
    line = ProgressLine(1000, 100, "queries", label="scoring")
    for done in range(101, 201):
        clock[0] += 0.5
        line.update(done, "loss 3")
    line.close()
    assert capsys.readouterr().err == "scoring 160 of 1,000, loss 3 2 queries/s, 0:07:00 left\n"
    with progress_bar(10, 0, "rows", shown=False) as advance:
        clock[0] += 100
        advance(5)
    assert capsys.readouterr().err == ""


def test_a_notebook_has_a_live_line_if_it_can_show_one(monkeypatch):
    assert not progress.in_notebook()
    kernel = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", kernel, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    find = progress.importlib.util.find_spec
    for installed in (False, True):
        monkeypatch.setattr(
            progress.importlib.util, "find_spec", lambda name, _i=installed: _i if name == "ipywidgets" else find(name)
        )
        assert progress.in_notebook() is installed
