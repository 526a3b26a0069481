"""The benchmarks' own arithmetic: gates, limits, fits, the page's blocks, and the comparison of commits."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from benchmarks import common, compare, page, suite
from benchmarks.flows import row_flops
from benchmarks.limits import Limits, Work, copy_bandwidth, exp_rate, gemm_peak, read_bandwidth
from benchmarks.suite import FOR_COMPARISON, PEER, Case, Contender, Scaling
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow


def a_case(**changes: object) -> Case:
    contenders = (
        Contender("peer", lambda x: x.sort().values, PEER),
        Contender("ours", lambda x: torch.sort(x)[0]),
        Contender("beside", lambda _: None, FOR_COMPARISON, agrees=lambda *_: True),
        Contender("absent", lambda x: x, PEER, needs="no_such_package"),
    )
    case = Case("sort", lambda: torch.rand(100), torch.msort, torch.equal, contenders, Work(bytes=400.0), rounds=2)
    return dataclasses.replace(case, **changes)


def test_a_case_is_gated_timed_and_tabled():
    measured = suite.measure(a_case())
    assert [row["contender"] for row in measured["rows"]] == ["peer", "ours", "beside"]
    assert measured["not installed"] == ["absent"]
    for row in measured["rows"]:
        assert len(row["seconds"]) == 6  # short calls have three times the rounds
        assert row["median"] == pytest.approx(np.median(row["seconds"]))
        assert row["memory"] >= 0
    json.dumps(measured)
    rows = suite.case_rows(measured, {"flops": 1.0, "bytes": 4e6, "exps": 1.0})
    assert rows[0]["speed-up over the best peer"] == "1.00x"
    assert rows[2]["speed-up over the best peer"] == rows[2]["share of the limit (memory)"] == ""
    limit = 1e-4 / measured["rows"][1]["median"]
    assert rows[1]["share of the limit (memory)"] == f"{100 * limit:.0f} %"


def test_a_case_without_any_peer_is_tabled_and_drawn(tmp_path):
    ours = [contender for contender in a_case().contenders if contender.kind != PEER]
    absent = [contender for contender in a_case().contenders if not contender.present]
    measured = suite.measure(a_case(contenders=(*ours, *absent)))
    limits = {"flops": 1.0, "bytes": 4e6, "exps": 1.0}
    assert {row["speed-up over the best peer"] for row in suite.case_rows(measured, limits)} == {""}
    results = {"sort": {"cases": [measured], "scalings": [], "tables": {}, "limits": limits}}
    assert "Not installed: absent." in suite.text_of(results["sort"])
    assert page.draw_peers(results, tmp_path / "peers.png")
    assert page.draw_roofline(results, tmp_path / "roofline.png")


@pytest.mark.slow
def test_quick_runs_without_optional_packages(monkeypatch):
    """Every suite has cases whose peers are in packages that `pip install .` does not bring."""
    find = suite.importlib.util.find_spec
    optional = {c.needs for case in suite.all_cases(quick=True) for c in case.contenders if c.needs}
    assert {"ot", "faiss", "torchdiffeq"} <= optional
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None if name in optional else find(name))
    without = [case for case in suite.all_cases(quick=True) if all(c.kind != PEER for c in case.present)]
    assert without, "a case whose peers are all missing is what this test is about"
    for case in without:
        measured = suite.measure(dataclasses.replace(case, rounds=1))
        assert suite.case_rows(measured, {"flops": 1.0, "bytes": 1.0, "exps": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("name", suite.suites())
def test_every_contender_of_a_suite_gives_its_answer(name):
    """With small sizes, so that a change of the library that breaks a benchmark is noticed before the long run."""
    for case in suite.all_cases(quick=True, only=[name]):
        assert suite.measure(dataclasses.replace(case, rounds=1))["rows"]


def test_small_sizes_are_not_called_the_papers():
    quick = [contender.name for case in suite.all_cases(quick=True) for contender in case.contenders]
    assert [name for name in quick if "paper" in name] == []
    others = sum(len(choose(Contender("", lambda x: x))) for choose in (suite.in_bfloat16, suite.with_mkl_alone))
    assert sum("20 samples x 10 steps" in name for name in quick) == 2 + others
    full = [contender.name for case in suite.all_cases(quick=False) for contender in case.contenders]
    assert sum(suite.PAPER_NAME in name for name in full) == 3 + others


def test_a_wrong_answer_has_no_time():
    wrong = (*a_case().contenders, Contender("wrong", lambda x: x))
    with pytest.raises(SystemExit, match="gate failed: sort, wrong"):
        suite.measure(a_case(contenders=wrong))


def test_the_limit_is_the_longest_part():
    limits = Limits(flops=10.0, bytes=5.0, exps=1.0)
    assert limits.seconds(Work(flops=100, bytes=5, exps=1)) == 10
    assert limits.bound_by(Work(flops=100, bytes=5, exps=1)) == "products"
    assert limits.bound_by(Work(flops=1, bytes=5, exps=2)) == "exponentials"
    rates = gemm_peak(256, 64, 5), copy_bandwidth(1, 5), read_bandwidth(1, 5), exp_rate(100_000, 5)
    assert all(1e5 < rate < 1e15 for rate in rates)


@pytest.mark.parametrize("power", [-1.0, 0.5, 2.0])
def test_fits_find_the_exponent(power, monkeypatch):
    sizes = (10, 20, 50)
    assert common.exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)
    monkeypatch.setattr(
        suite, "time_turns", lambda calls, rounds: {name: [float(name) ** power] * rounds for name in calls}
    )
    fit = suite.fit(Scaling("op", "N", sizes, lambda _: lambda: None, expected=power))
    assert fit["exponent"] == pytest.approx(power)
    assert suite.scaling_rows([fit])[0]["exponent"] == f"{power:.2f}"


def test_peak_memory_sees_what_was_freed():
    (total, _, memory) = common.watched(lambda: float(torch.ones(2**24).sum()))
    assert total == 2**24
    assert math.isnan(memory) or memory > 0.9 * 2**26


def test_operations_of_a_row_are_two_per_weight():
    config = GeoFlowConfig(24, 40, hidden=32, depth=3, heads=4)
    flow = GeoFlow(config)
    weights = sum(p.numel() for block in flow.blocks for p in block.parameters() if p.dim() > 2)
    weights -= sum(p.numel() for block in flow.blocks for p in (block.cross_scale, block.forward_scale))
    weights += sum(p.numel() for part in (flow.encoders, flow.decoders) for p in part.parameters() if p.dim() == 2)
    assert row_flops(config, "joint") == 2 * weights


def test_names_are_suites_or_studies():
    names = suite.names()
    assert {"gallery", "ot", "density", "entropy", "rerank", "training", "interpolant", "network", "cost"} <= set(names)
    for name in set(names) - set(suite.suites()):
        assert callable(suite.module_of(name).run)
    cases = suite.all_cases(quick=True)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        kinds = {contender.kind for contender in case.contenders}
        assert {suite.OURS, PEER} <= kinds


# The page


def results() -> page.Results:
    case = suite.measure(a_case())
    facts = {"processor": "P", "threads": 2, "torch": "2", "instructions": "AVX2", "day": "2026-01-02"}
    scaling = {
        "operation": "op",
        "variable": "N",
        "sizes": [1, 2],
        "seconds": [1.0, 2.0],
        "exponent": 1.0,
        "expected": 1.0,
    }
    table = {"name": "t", "rows": [{"a": 1.0}], "notes": {"more": 2.5, "nested": {}}}
    limits = {"flops": 1e11, "bytes": 1e10, "exps": 1e9}
    return {
        "sorts": {
            "machine": facts,
            "limits": limits,
            "cases": [case],
            "scalings": [scaling],
            "tables": {"t": table},
        }
    }


def test_blocks_are_filled_and_words_stay():
    begin, end = "<!-- bench: table sorts t -->\n", "<!-- bench: end -->"
    rest = f"\nafter\n<!-- bench: cases other -->\nkept\n{end}"
    text = page.filled(f"before\n{begin}old\n{end}{rest}", lambda key: page.block(key, results()))
    assert text == f"before\n{begin}| a |\n|---|\n| 1 |\n\nmore 2.5.\n{end}{rest}"
    assert page.filled(text, lambda key: page.block(key, results())) == text
    assert '"P" (AVX2)' in page.block("machine", results())
    assert "| op | N | 1 / 2 |" in page.block("scalings", results())
    with pytest.raises(ValueError, match="'tabel x'"):
        page.block("tabel x", results())


def test_every_block_of_the_page_belongs_to_a_suite():
    keys = [match[1] for match in page.BLOCK.findall(page.PAGE.read_text())]
    assert {"machine", "scalings"} <= set(keys)
    named = {key.split()[1] for key in keys if key.startswith(("cases", "table"))}
    assert named == set(suite.suites())
    assert {key.split()[1] for key in keys if key.startswith("figure")} == set(page.FIGURES)
    for key in keys:
        page.block(key, {})


@pytest.mark.parametrize("name", ["peers", "roofline", "scaling", "cost"])
def test_figures_are_drawn_if_there_are_results(name, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PICTURES", tmp_path)
    measured = results()
    assert page.block(f"figure {name}", {}) is None
    if name == "cost":
        row = {"s per 1,000 queries": "search", "N = 1e4": "0.5", "N = 1e5": "*5*"}
        notes = {"passes": {}, "model": "small"}
        measured["cost"] = {
            **measured["sorts"],
            "tables": {"queries_0": {"name": "queries_0", "rows": [row], "notes": notes}},
        }
    assert f"(images/performance_{name}.png)" in page.block(f"figure {name}", measured)
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
        (["main", "HEAD", "--only", "nonsense"], "no suite named nonsense; there are"),
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


def test_the_worker_checks_before_it_times(monkeypatch):
    wrong = (*a_case().contenders, Contender("wrong", lambda x: x))
    monkeypatch.setattr(suite, "all_cases", lambda **_: [a_case(contenders=wrong)])
    server = compare.Server([])
    assert server.list() == [["sort", ["ours", "wrong"]]]
    server.load(0)
    assert server.check("ours") > 0
    assert server.time("ours", 3) > 0
    with pytest.raises(SystemExit, match="gate failed: sort, wrong"):
        server.check("wrong")
