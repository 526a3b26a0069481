"""The benchmarks' own arithmetic: gates, limits, fits, the page's blocks, and the comparison of commits."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import cases, compare, page, test_cost
from benchmarks.cases import FOR_COMPARISON, PEER, Case, Contender
from benchmarks.inputs import row_flops
from benchmarks.limits import Limits, Work, copy_bandwidth, exp_rate, gemm_peak, read_bandwidth
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow

ROOT = Path(__file__).parents[2]
SUITE = """
import torch
from benchmarks.cases import PEER, Case, Contender, Scaling, each, each_size
from benchmarks.limits import Limits, Work

Limits.measure = classmethod(lambda cls: cls(1.0, 4e6, 1.0))
contenders = (
    Contender("peer", lambda x: x.sort().values, PEER),
    Contender("ours", lambda x: torch.sort(x)[0]),
    Contender("wrong", lambda x: x),
    Contender("absent", lambda x: x, PEER, needs="no_such_package"),
)

@each([Case("sort", lambda: torch.rand(100), torch.msort, torch.equal, contenders, Work(bytes=400.0))])
def test_sort(race, case, contender):
    race(case, contender)

@each_size([Scaling("sleep", "N", (1, 2), lambda size: lambda: sum(range(100_000 * size)))])
def test_growth(grow, scaling, size):
    grow(scaling, size)
"""


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    # pytest-benchmark times nothing in a worker of pytest-xdist, which these variables make of any process.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, page.Report]:
    """What pytest-benchmark prints and writes about a small suite."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text("from benchmarks.conftest import *")
    (folder / "test_suite.py").write_text(SUITE)
    done = pytest_in(folder, "-ra", "--benchmark-only", "--benchmark-json=times.json")
    return done.stdout, json.loads((folder / "times.json").read_text())


def test_contenders_are_gated_timed_and_tabled(measured):
    words, report = measured
    assert "sort: wrong gives a wrong answer" in words
    assert "no_such_package is not installed" in words
    assert "1 failed, 4 passed, 1 skipped" in words
    assert "memory        sort: ours" in words
    rows = page.groups(report)["sort"]
    assert [row["contender"] for row in rows] == ["peer", "ours"]
    assert report["machine_info"]["threads"] >= 1
    table = page.case_rows(rows)
    assert table[0]["speed-up over the best peer"] == "1.00x"
    assert table[1]["share of the limit"] == f"{1e-4 / rows[1]['median']:.0%}, memory"
    assert page.wide_row("sort", rows, {"sort": rows})["peer"] == page.cell(1e3 * rows[0]["median"])
    assert page.growth_row(page.growths(report)[0])["sizes"] == "1 / 2"


def test_contenders_without_a_peer_are_tabled(measured):
    ours = [row for row in page.groups(measured[1])["sort"] if row["kind"] != PEER]
    assert "speed-up over the best peer" not in page.case_rows(ours)[0]


def test_gates_hold_at_small_sizes():
    """So that a change of the library that breaks a benchmark is noticed before the long run."""
    words = [
        "benchmarks",
        "--benchmark-disable",
        "-q",
        "-k",
        "quick and (interpolant or posterior or coupling or search)",
    ]
    done = pytest_in(ROOT, *words)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_all_gates_hold_at_small_sizes():
    done = pytest_in(ROOT, "benchmarks", "--benchmark-disable", "-q", "-k", "quick")
    assert done.returncode == 0, done.stdout


def test_small_sizes_are_not_called_the_papers():
    quick = [contender.name for case in cases.all_cases(quick=True) for contender in case.contenders]
    assert [name for name in quick if "paper" in name] == []
    assert sum("20 samples x 10 steps" in name for name in quick) >= 2
    full = [contender.name for case in cases.all_cases(quick=False) for contender in case.contenders]
    assert sum(cases.PAPER_NAME in name for name in full) >= 3


def test_rows_have_names_of_their_own_and_a_peer():
    quick = cases.all_cases(quick=True)
    both = [*quick, *cases.all_cases(quick=False)]
    assert len({case.name for case in both}) == len(both)
    for case in quick:
        assert {cases.OURS, PEER} <= {contender.kind for contender in case.contenders}


def test_the_limit_is_the_longest_part():
    limits = Limits(flops=10.0, bytes=5.0, exps=1.0)
    assert limits.seconds(Work(flops=100, bytes=5, exps=1)) == 10
    assert limits.bound_by(Work(flops=100, bytes=5, exps=1)) == "products"
    assert limits.bound_by(Work(flops=1, bytes=5, exps=2)) == "exponentials"
    rates = gemm_peak(256, 64, 5), copy_bandwidth(1, 5), read_bandwidth(1, 5), exp_rate(100_000, 5)
    assert all(1e5 < rate < 1e15 for rate in rates)


@pytest.mark.parametrize("power", [-1.0, 0.5, 2.0])
def test_fits_find_the_exponent(power):
    assert page.exponent([{"size": size, "median": 3 * size**power} for size in (10, 20, 50)]) == pytest.approx(power)


def test_peak_memory_sees_what_was_freed():
    (total, _, memory) = cases.watched(lambda: float(torch.ones(2**24).sum()))
    assert total == 2**24
    assert math.isnan(memory) or memory > 0.9 * 2**26


def test_operations_of_a_row_are_two_per_weight():
    config = GeoFlowConfig(24, 40, hidden=32, depth=3, heads=4)
    flow = GeoFlow(config)
    weights = sum(p.numel() for block in flow.blocks for p in block.parameters() if p.dim() > 2)
    weights -= sum(p.numel() for block in flow.blocks for p in (block.cross_scale, block.forward_scale))
    weights += sum(p.numel() for part in (flow.encoders, flow.decoders) for p in part.parameters() if p.dim() == 2)
    assert row_flops(config, "joint") == 2 * weights


# The page


def test_blocks_are_filled_and_words_stay(measured):
    begin, end = "<!-- bench: growth -->\n", "<!-- bench: end -->"
    rest = f"\nafter\n<!-- bench: cases other -->\nkept\n{end}"
    text = page.filled(f"before\n{begin}old\n{end}{rest}", lambda key: page.block(key, measured[1]))
    assert "old" not in text
    assert "| sleep | N | 1 / 2 |" in text
    assert text.endswith(rest)
    assert "**sort**\n\n|  | ms |" in page.block("cases sort", measured[1])
    assert f'"{measured[1]["machine_info"]["processor"]}"' in page.block("machine", measured[1])
    with pytest.raises(ValueError, match="'tabel x'"):
        page.block("tabel x", measured[1])


def timed(group: str, contender: str, seconds: float, queries: int) -> dict[str, object]:
    info = {"contender": contender, "kind": "ours", "queries": queries}
    return {"name": "test_x", "group": group, "extra_info": info, "stats": {"median": seconds}}


def test_costs_are_sums_of_parts_and_in_proportion_where_nothing_was_measured():
    parts = {test_cost.FAST_SAMPLES: 2.0, test_cost.PAPER_SAMPLES: 8.0, test_cost.RERANKED: 4.0}
    fixed = [timed("A network, d = 512", name, seconds, 10) for name, seconds in parts.items()]
    passes = [
        timed(f"d = 512, N = {items:,}", name, seconds * items / 10_000, 100)
        for items in (10_000, 100_000)
        for name, seconds in ((test_cost.SEARCH_PASS, 0.1), (test_cost.SCORING_PASS, 2.0))
    ]
    other = [timed("d = 1024, N = 10,000", test_cost.SEARCH_PASS, 7.0, 1)]
    table = page.block("cost 512", {"benchmarks": fixed + passes + other})
    assert table.splitlines()[2:] == [
        "| plain search, geoflow_fast | 1 | 10 | *100* | *1,000* |",
        "| plain search and `BayesReranker` | 401 | 410 | *500* | *1,400* |",
        "| `RetrievalEntropy.fast` | 220 | 400 | *2,200* | *20,200* |",
        "| `RetrievalEntropy`, the paper's settings | 825 | 1,050 | *3,300* | *25,800* |",
    ]
    assert page.block("cost 256", {"benchmarks": fixed + passes}) is None


def test_every_block_of_the_page_belongs_to_a_benchmark():
    keys = [match[1] for match in page.BLOCK.findall(page.PAGE.read_text())]
    assert {"machine", "growth", "estimates"} <= set(keys)
    named = [name for key in keys if key.startswith(("cases", "wide")) for name in key.split()[1:]]
    text = "\n".join(path.read_text() for path in (ROOT / "benchmarks").glob("test_*.py"))
    elsewhere = ["growth", "streamed", "search_pass", "scoring_pass"]  # in the blocks `growth` and `cost`
    tests = set(re.findall(r"^def test_(\w+)\(", text, re.MULTILINE))
    assert sorted(named) == sorted(tests.difference(elsewhere))
    assert {key.split()[1] for key in keys if key.startswith("figure")} == set(page.FIGURES)
    for key in keys:
        page.block(key, {"benchmarks": []})


@pytest.mark.parametrize("name", page.FIGURES)
def test_figures_are_drawn_if_there_are_results(name, tmp_path, monkeypatch, measured):
    monkeypatch.setattr(page, "PICTURES", tmp_path)
    assert page.block(f"figure {name}", {"benchmarks": []}) is None
    assert f"(images/performance_{name}.png)" in page.block(f"figure {name}", measured[1])
    assert [path.name for path in tmp_path.iterdir()] == [f"performance_{name}.png"]


# Comparing commits


def turns_of(ratio: float, noise: float, count: int = 15) -> tuple[list[float], list[float]]:
    """Turns in which the machine drifts by a factor of two, B takes `ratio` times as long as A, and both jitter."""
    draw = np.random.default_rng(1)
    drift = np.linspace(1, 2, count)
    a, b = (drift * np.exp(noise * draw.standard_normal(count)) for _ in range(2))
    return list(a), list(ratio * b)


@pytest.mark.parametrize(("ratio", "noise", "slower"), [(1.3, 0.02, True), (1.0, 0.05, False), (1.3, 0.5, False)])
def test_slower_means_beyond_threshold_and_spread(ratio, noise, slower, capsys):
    result = compare.Ratio.of("call", *turns_of(ratio, noise))
    assert result.low <= result.value <= result.high
    assert result.slower(0.1) is slower
    assert compare.verdict([result], 0.1) == int(slower)
    assert f"{int(slower)} of 1 calls became slower by more than 10 %" in capsys.readouterr().out


def test_drift_of_the_machine_cancels():
    result = compare.Ratio.of("call", *turns_of(0.5, 0.0))
    assert result.value == pytest.approx(0.5)
    assert result.faster(0.1)
    assert not result.slower(0.1)


def test_turns_alternate():
    assert list(compare.turns(3)) == [("A", "B"), ("B", "A"), ("A", "B")]


def test_many_small_losses_fail_together(capsys):
    ratios = [compare.Ratio(name, 1.0, 1.06, 1.0, 1.09) for name in "xyz"]
    assert compare.verdict(ratios, 0.1, 1.1) == 0
    assert compare.verdict(ratios, 0.1, 1.03) == 1
    assert "geometric mean of all ratios is 1.060" in capsys.readouterr().out


def test_verdict_as_json(capsys):
    ratios = [compare.Ratio("x", 1.0, 2.0, 1.9, 2.1), compare.Ratio("y", 1.0, 1.0, 0.9, 1.1)]
    assert compare.verdict(ratios, 0.1, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["slower"] == ["x"]
    assert [row["value"] for row in told["ratios"]] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "required: A"),
        (["main", "HEAD", "--threshold", "0"], "--threshold must be above 0"),
        (["main", "HEAD", "--rounds", "2"], "--rounds must be at least 3"),
    ],
)
def test_bad_arguments_end_with_status_2(words, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        compare.arguments_of(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_arguments():
    given = compare.arguments_of(["main"])
    assert (given.a, given.b, given.threshold, given.only) == ("main", "HEAD", 0.1, [])


def test_an_unknown_commit_cannot_be_compared(capsys):
    assert compare.main(["no-such-commit-anywhere"]) == 2
    assert "no-such-commit-anywhere" in capsys.readouterr().err


def test_a_row_that_a_commit_lacks_must_be_listed(monkeypatch):
    monkeypatch.setattr(compare, "REMOVED", {"sort: gone": "it is deleted"})
    assert compare.common_rows(["sort: ours", "sort: gone"], ["sort: ours"]) == ["sort: ours"]
    with pytest.raises(RuntimeError, match=r"sort: lost \(not in B\)"):
        compare.common_rows(["sort: ours", "sort: lost"], ["sort: ours"])
    with pytest.raises(RuntimeError, match=r"sort: new \(not in A\)"):
        compare.common_rows(["sort: ours"], ["sort: ours", "sort: new"])


def test_rows_that_are_there_are_not_listed_as_removed():
    case_rows = {f"{case.name}: {one.name}" for case in cases.all_cases(quick=True) for one in case.contenders}
    assert case_rows.isdisjoint(compare.REMOVED)


def test_the_worker_checks_before_it_times(monkeypatch):
    contenders = (
        Contender("peer", lambda x: x.sort().values, PEER),
        Contender("ours", lambda x: torch.sort(x)[0]),
        Contender("wrong", lambda x: x),
        Contender("beside", lambda _: None, FOR_COMPARISON),
    )
    case = Case("sort", lambda: torch.rand(100), torch.msort, torch.equal, contenders)
    monkeypatch.setattr(compare, "all_cases", lambda **_: [case])
    server = compare.Server([])
    assert server.list() == [["sort", ["ours", "wrong"]]]
    assert compare.rows_of(server.list()) == {"sort: ours": (0, "ours"), "sort: wrong": (0, "wrong")}
    server.load(0)
    assert server.check("ours") > 0
    assert server.time("ours", 3) > 0
    with pytest.raises(AssertionError, match="sort: wrong gives a wrong answer"):
        server.check("wrong")
