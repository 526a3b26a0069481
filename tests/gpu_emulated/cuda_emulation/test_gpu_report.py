"""The table that owners of a GPU are asked for: with a GPU that is faked, and without one."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="the CUDA path needs triton")
from tools import aot, gpu_report, launches
from tools.gpu_report import Row

ROOT = Path(__file__).parents[3]
OTHERS = {
    name for name in launches.PATHS if not name.startswith(("one guided", "one likelihood", "sampling", "likelihood"))
}


class Event:
    """An event of a device on which everything takes two milliseconds."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: Event) -> float:
        return 2.0


@pytest.fixture
def card():
    """A GPU without values, and with a clock."""
    with (
        launches.counted() as count,
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H100 80GB HBM3"),
        mock.patch.object(gpu_report, "on_device", launches.on_gpu),
    ):
        yield count


@pytest.fixture
def small(monkeypatch):
    """Fewer rows, steps and repetitions."""
    for name, number in {"STEPS": 1, "BATCH": 128, "ITEMS": 2000}.items():
        monkeypatch.setattr(gpu_report, name, number)
    monkeypatch.setattr(gpu_report, "milliseconds", functools.partial(gpu_report.milliseconds, repeats=1))


@pytest.mark.usefixtures("small")
def test_every_path_and_kernel_has_a_line(card, monkeypatch):
    monkeypatch.setattr(gpu_report, "_calls", lambda _: iter([Row("a call", 2.0, 1.0, "")]))
    rows = list(gpu_report.timings())
    assert {row.took for row in rows} == {2.0}, [row for row in rows if row.took is None]
    named = [row.what for row in rows]
    assert named[-len(aot.table_cases()) :] == [case.name for case in aot.table_cases()]
    plans = ["costs, one iteration and the argmax of 128 x 128 pairs", "the same with 40 Sinkhorn iterations more"]
    assert named[10:13] == ["a call", *plans]
    assert card.of("cuda:sinkhorn_kernel") > 0
    paths = rows[1:10]
    assert {row.note for row in paths} == {"replayed"}  # as the table of estimates has it
    assert rows[0].note == "1,074 GB/s"
    assert all(row.expected > 0 for row in rows)
    assert card.replays > 0
    text = gpu_report.table({"tests": "61 passed (exit status 0)"}, rows)
    assert "| compared with | H100 |" in text
    assert len(text.splitlines()) == 4 + 2 + 3 + len(rows)


@pytest.mark.slow
@pytest.mark.usefixtures("card", "small")
@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated", "ignore:sinkhorn stopped")
def test_the_other_paths_have_the_estimates_of_their_counts(monkeypatch):
    """Entropies, re-ranking, head and training steps; the other paths have lines of their own, in each precision."""
    counts = {name: launches.Count().to_json() | {"kernels": 441, "started": 24} for name in OTHERS}
    monkeypatch.setattr(gpu_report, "counted", lambda: counts)
    rows = list(gpu_report._calls("h100"))
    assert {row.what for row in rows} == OTHERS
    assert {(row.took, row.expected) for row in rows} == {(2.0, launches.estimated_ms(counts[rows[0].what], "h100"))}


def test_a_call_that_fails_has_a_line_too(card):  # noqa: ARG001
    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB\nmore")

    row = gpu_report.timed("a large call", too_large, 1.5, str)
    assert row == Row("a large call", None, 1.5, "failed: CUDA out of memory. Tried to allocate 40 GiB")
    assert "| a large call | - | 1.50 | - | failed: CUDA out" in gpu_report.table({}, [row])


def test_the_command_prints_a_table(card, monkeypatch, capsys):  # noqa: ARG001
    monkeypatch.setattr(gpu_report, "missing", lambda: None)
    monkeypatch.setattr(gpu_report, "outcome", lambda _: "61 passed (exit status 0)")
    monkeypatch.setattr(gpu_report, "timings", lambda: iter([Row("copy of 1 GB", 1.0, 0.5, "2,147 GB/s")]))
    gpu_report.main()
    assert "| copy of 1 GB | 1.00 | 0.50 | 2.00 | 2,147 GB/s |" in capsys.readouterr().out
    monkeypatch.setattr(gpu_report, "outcome", lambda _: "1 failed (exit status 1)")
    with pytest.raises(SystemExit) as error:
        gpu_report.main()
    assert error.value.code == 1


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA T4", "a100"),
    ],
)
def test_a_gpu_is_compared_with_its_own_kind(name, like):
    assert gpu_report.known_gpu(name) == like


def test_what_tests_print_is_shown_and_its_last_line_kept(capsys):
    code = "print('F'); print('==== 1 failed in 2.0s ===='); raise SystemExit(1)"
    assert gpu_report.outcome([sys.executable, "-c", code]) == "1 failed in 2.0s (exit status 1)"
    assert capsys.readouterr().out.startswith("F\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_fails_and_says_why():
    command = [sys.executable, "-m", "tools.gpu_report"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("there is nothing to report about a GPU: torch")
    assert "Traceback" not in done.stderr
