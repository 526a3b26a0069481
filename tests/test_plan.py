"""`geoflow plan`: its arithmetic is compared with sums done by hand and with the rules of the code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import plan as planning
from geoflow_fast.cli.app import main
from geoflow_fast.flow import costs
from geoflow_fast.jobs.entropy import preferred_layout
from geoflow_fast.jobs.queries import BLOCK_QUERIES
from geoflow_fast.plan import DEVICES, as_table, parameters, plan_scoring, plan_training


def test_a_billion_items_by_hand():
    plan = plan_scoring(10**9, 1024, 10**6, "h100", 64)
    assert plan.scoring_operations == 2 * 10**6 * 50 * 10**9 * 1024
    assert plan.gallery_bytes == 4.096e12
    assert plan.gallery_bytes_per_machine == 4.096e12 / 8
    assert plan.layout == "gallery"
    assert plan.passes == 15_625
    assert plan.link_bytes == 15_625 * 4.096e12
    # A float32 product is made of three in bfloat16; a device has 120 blocks of items, of 56 kernels each.
    starts = 15_625 * 120 * 56 * 20e-6
    assert plan.hours["scoring"] == pytest.approx((3 * 1.024e20 / (0.6 * 989e12 * 64) + starts) / 3600)
    assert plan.hours["link"] == pytest.approx(15_625 * 4.096e12 / (0.85 * 50e9 * 64) / 3600)
    assert plan.bound_by == "link"
    assert plan.total_hours == pytest.approx(sum(plan.hours.values()))  # one after the other


def test_sampling_counts_the_papers_network():
    """Two streams of eight blocks, one stream of the last feed-forward, encoder and decoder of the generated one."""
    cross, forward = 2 * 512 * 512 / 4, 3 * 512 * 1408
    row = 2 * (16 * (cross + forward) - forward + 2 * 32 * 512)
    plan = plan_scoring(100, 32, 7, "a100", 1)
    assert plan.sampling_operations == pytest.approx(row * 7 * 50 * 50 * 2)
    fast = plan_scoring(100, 32, 7, "a100", 1, fast=True)
    assert fast.sampling_operations == pytest.approx(row * 7 * 40 * 8 * 2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["velocity", "likelihood"])
def test_the_costs_are_those_that_are_counted(path, precision):
    """No estimate assumes a path that does not exist: kernels are equal, operations and bytes nearly."""
    launches = pytest.importorskip("tools.launches")
    shape = gf.GeoFlowConfig.paper()
    if path == "velocity":
        count = launches.sampling(4, precision) - launches.sampling(3, precision)
        work = costs.velocity_work(shape, 2 * launches.QUERIES * launches.SAMPLES, precision)
    else:
        count = launches.likelihood(4, precision) - launches.likelihood(3, precision)
        work = costs.likelihood_work(shape, launches.PAIRS, precision)
    assert count.kernels.total() == work.kernels
    assert count.flops[precision] == pytest.approx(work.operations, rel=0.02)
    assert count.bytes == pytest.approx(work.bytes, rel=0.05)


@pytest.mark.parametrize("kappa", [100.0, 2e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_costs_of_scoring_are_those_that_are_counted(dtype, kappa):
    """Operations by the units that compute them, and kernels, of the launches that the code makes."""
    launches = pytest.importorskip("tools.launches")
    with launches.counted() as count:
        samples, items = launches.fake_rows(16, 50, 1024, dtype=dtype), launches.fake_rows(5000, 1024, dtype=dtype)
        gf.kernels.gallery.gallery_statistics(samples, items, kappa, 10, None, None)
    kind = "bfloat16" if dtype == torch.bfloat16 else "tf32" if kappa > 1e4 else "float32"
    work = costs.scoring_work(16, 50, 5000, 1024, kind)
    unit = "tf32" if kind == "tf32" else "bfloat16"
    assert count.flops == {unit: pytest.approx(work.operations)}
    assert count.kernels.total() == work.kernels
    assert count.bytes == pytest.approx(work.bytes, rel=0.35)  # and what it writes


def test_blocks_of_items_wait_for_each_other():
    """What the plan assumes of a gallery that is mapped: its kernels, and that nothing is copied beside them."""
    launches = pytest.importorskip("tools.launches")
    counts = []
    for blocks in (2, 3):
        rows = np.zeros((blocks * planning.GPU_BLOCK_ROWS, 16), dtype=np.float32)
        rows[:, 0] = 1.0
        with launches.counted() as count:
            gf.Gallery(rows).statistics(launches.fake_rows(4, 8, 16), 30.0, planning.TOP_K)
        counts.append(count)
    block = counts[1] - counts[0]
    assert block.kernels.total() == costs.scoring_work(4, 8, 1, 16).kernels + planning.BLOCK_KERNELS
    assert block.synchronisations == {"copy to the device": 1, "item": 1}


def test_the_memory_of_this_machine_is_no_link():
    assert plan_scoring(10_000, 64, 10, "cpu", 1).hours["link"] == 0.0


def test_small_batches_wait_for_the_host():
    shape, rates = gf.GeoFlowConfig.paper(), DEVICES["h100"].products
    work = costs.velocity_work(shape, 500, "bfloat16")
    replayed, started = (costs.seconds(work, rates, "bfloat16", replayed=how) for how in (True, False))
    assert started - replayed == pytest.approx(67 * 18e-6)
    assert started > 3 * replayed


def test_the_link_is_no_bottleneck_from_the_advised_block_on():
    plan = plan_scoring(10**8, 512, 10**5, "a100", 8, layout="gallery")
    enough = plan_scoring(10**8, 512, 10**5, "a100", 8, layout="gallery", block=plan.advised_block)
    assert enough.hours["link"] <= enough.hours["scoring"] * 1.01
    fewer = plan_scoring(10**8, 512, 10**5, "a100", 8, layout="gallery", block=plan.advised_block // 2)
    assert fewer.hours["link"] > 1.5 * fewer.hours["scoring"]


def test_the_layout_depends_on_memory_and_blocks():
    assert preferred_layout(10, 20, 4, 4) == "queries"
    assert preferred_layout(11, 20, 4, 4) == "gallery"
    assert preferred_layout(10, 20, 3, 4) == "gallery"
    assert plan_scoring(10**6, 512, 10**6, "h100", 8).layout == "queries"
    assert plan_scoring(10**6, 512, 10**6, "h100", 8).network_bytes == 0
    assert plan_scoring(10**6, 512, 100, "h100", 8).layout == "gallery"


def test_network_does_not_depend_on_items_or_devices():
    one = plan_scoring(10**6, 512, 1000, "h100", 8, layout="gallery")
    more = plan_scoring(10**9, 512, 1000, "h100", 64, layout="gallery")
    assert one.network_bytes_per_query == more.network_bytes_per_query > 50 * 512 * 4


def test_this_machine_is_measured():
    torch.set_num_threads(1)
    plan = plan_scoring(10_000, 64, 10, "cpu", 1)
    assert 0 < plan.total_hours < 1


@pytest.mark.parametrize("bad", [{"items": 0}, {"queries": 0}, {"devices": 0}, {"dim": -1}, {"block": 0}])
def test_counts_must_be_positive(bad):
    sizes = {"items": 10, "dim": 8, "queries": 5, "device": "h100", "devices": 1, **bad}
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be at least 1"):
        plan_scoring(**sizes)


def test_unknown_device_names_the_known_ones():
    with pytest.raises(ValueError, match=f"one of {', '.join(DEVICES)}, cpu, got 'tpu'"):
        plan_scoring(10, 8, 5, "tpu", 1)


def test_the_hours_in_the_documentation_are_the_plans():
    page = (Path(__file__).parents[1] / "docs/scaling.md").read_text()
    hours = [plan_scoring(10**9, 1024, 10**6, "h100", 64, block=block).total_hours for block in (BLOCK_QUERIES, 1024)]
    words = " ".join(page.split())
    assert f"{hours[0]:.3g} hours with the default {BLOCK_QUERIES} queries" in words
    assert f"{hours[1]:.3g} with `--block 1024`" in words


def test_command_line(monkeypatch, capsys):
    words = ["plan", "--gallery", "1e9", "--dim", "64", "--queries", "1e4", "--device", "b200", "--gpus", "16"]
    expected = plan_scoring(10**9, 64, 10**4, "b200", 16)
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["geoflow", *words, *more])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
    shown, _, machine = capsys.readouterr().out.partition("{")
    assert as_table(expected)["estimate"] in shown
    assert json.loads("{" + machine)["total_hours"] == expected.total_hours


@pytest.fixture
def geoflow(monkeypatch, capsys):
    """`geoflow plan --json` with more flags: what it prints, or the error."""

    def call(*words: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["geoflow", "plan", *words, "--json"])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return json.loads(out) if not end.value.code else {"error": err}

    return call


def test_the_network_of_a_model(geoflow, tmp_path):
    shape = gf.GeoFlowConfig(12, 12, hidden=16, depth=1)
    gf.GeoFlow(shape).save_pretrained(tmp_path)
    given = geoflow("--model", str(tmp_path), "--gallery", "100", "--queries", "7", "--device", "a100")
    own = plan_scoring(100, 12, 7, "a100", 1, shape=shape)
    assert given["sampling_operations"] == own.sampling_operations
    papers = plan_scoring(100, 12, 7, "a100", 1)
    assert papers.sampling_operations > 1000 * own.sampling_operations


def test_training_is_estimated(geoflow):
    given = geoflow("--pairs", "5e5", "--dim", "512", "--preset", "small", "--device", "h100", "--gpus", "4")[
        "training"
    ]
    config = gf.TrainConfig.small()
    assert (given["steps"], given["batch_size"], given["pairs"]) == (config.steps, config.batch_size, 500_000)
    one = plan_training(500_000, 512, "h100", 1, preset="small")
    assert one.total_hours == pytest.approx(4 * given["total_hours"])
    assert as_table(one)["parameters"] == f"{parameters(gf.GeoFlowConfig.small(512, 512)):,}"
    assert plan_training(2000, 64, "a100", 1).steps == gf.TrainConfig.auto(2000, 8).steps


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--pairs", "1e4"], "give --dim, the width of the embeddings, or --model"),
        (["--dim", "64"], "give --gallery and --queries, to estimate scoring, or --pairs"),
        (["--dim", "64", "--gallery", "1e6"], "give --gallery and --queries"),
        (["--dim", "64", "--pairs", "3"], "must be at least 4, got 3"),
    ],
)
def test_what_an_estimate_needs(geoflow, words, error):
    assert error in geoflow(*words)["error"]


def test_a_busy_machine_is_measured_as_if_it_were_free(monkeypatch):
    """A second in which others compute does not count."""
    clock = {"wall": 0.0, "own": 0.0}
    monkeypatch.setattr(planning.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(planning.time, "thread_time", lambda: clock["own"])

    def run() -> None:
        clock["wall"] += 5.0
        clock["own"] += 0.5

    assert planning._seconds(run) == 0.5
