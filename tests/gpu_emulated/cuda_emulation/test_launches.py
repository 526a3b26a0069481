"""The counter of kernels, and what the GPU path may ask of a GPU at most."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import geoflow_fast as gf

pytest.importorskip("triton", reason="the CUDA path needs triton")
from geoflow_fast import ops
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.flow.sampling import network_rows_at_once
from geoflow_fast.head.loss import _tiles, point_scores
from geoflow_fast.likelihood.reverse_ode import density_estimates, pairs_at_once
from geoflow_fast.ops import dispatch, extension
from geoflow_fast.ops.ot_assign import assign_late
from geoflow_fast.retrieval.gallery import GPU_BLOCK_ROWS
from geoflow_fast.retrieval.sources import FlowSource
from geoflow_fast.runtime.device import rows_at_once
from geoflow_fast.runtime.graphs import Graphs
from tools import costs, launches
from tools.launches import Count, counted, fake_rows, list_launches, on_gpu, training


@functools.cache
def path(name: str) -> Count:
    """What a documented path asks for, counted once for all tests."""
    return launches.PATHS[name]()


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in place of the paper's, where only what a call or a step asks for once is of interest."""
    shape = dataclasses.replace(gf.GeoFlowConfig.paper(), depth=2)
    monkeypatch.setattr(gf.GeoFlowConfig, "paper", staticmethod(lambda: shape))


def test_kernels_bytes_and_operations_of_a_product_and_a_sum():
    with counted() as count:
        a, b = fake_rows(8, 16), fake_rows(16, 4)
        c = a @ b
        c.relu()
    assert dict(count.kernels) == {"torch:mm": 1, "torch:relu": 1}
    assert count.flops == {"float32": 2 * 8 * 16 * 4}
    assert count.bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4) + 4 * 2 * 8 * 4
    assert not count.synchronisations


def test_kernels_without_products_do_not_run_beside_products():
    """Bytes of a product hide behind its operations, or these behind the bytes; those of other kernels hide nowhere."""
    with counted() as count:
        (fake_rows(8, 16) @ fake_rows(16, 4)).relu()
        ops.swiglu(fake_rows(6, 10), fake_rows(6, 10))
    assert count.row_bytes == 4 * (2 * 8 * 4 + 3 * 6 * 10)
    rates = costs.ProductRates(bfloat16=1e3, float32=1e2, bandwidth=10.0)
    moving = costs.BANDWIDTH_SHARE * rates.bandwidth
    for operations, multiplying in ((6.0, 60 / moving), (6e3, 6e3 / (costs.COMPUTE_SHARE * 1e2))):
        seconds = costs.seconds(costs.Work(0, 100, operations, 40), rates, "float32")
        assert seconds == pytest.approx(multiplying + 40 / moving)


def test_the_bytes_between_products_are_those_that_are_counted():
    shape = gf.GeoFlowConfig.paper()
    velocity = costs.velocity_work(shape, 2 * launches.QUERIES * launches.SAMPLES)
    assert path("one guided velocity").row_bytes == pytest.approx(velocity.row_bytes, rel=0.05)
    likelihood = costs.likelihood_work(shape, launches.PAIRS)
    assert path("one likelihood evaluation").row_bytes == pytest.approx(likelihood.row_bytes, rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["velocity", "likelihood"])
def test_the_costs_are_those_that_are_counted(path, precision):
    """No estimate assumes a path that does not exist: kernels are equal, operations and bytes nearly."""
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
    with counted() as count:
        samples, items = fake_rows(16, 50, 1024, dtype=dtype), fake_rows(5000, 1024, dtype=dtype)
        gf.kernels.gallery.gallery_statistics(samples, items, kappa, 10, None, None)
    kind = "bfloat16" if dtype == torch.bfloat16 else "tf32" if kappa > 1e4 else "float32"
    work = costs.scoring_work(16, 50, 5000, 1024, kind)
    unit = "tf32" if kind == "tf32" else "bfloat16"
    assert count.flops == {unit: pytest.approx(work.operations)}
    assert count.kernels.total() == work.kernels
    assert count.bytes == pytest.approx(work.bytes, rel=0.35)  # and what it writes


def test_blocks_of_a_mapped_gallery_wait_for_each_other():
    """A block of items takes as many kernels as estimates count, is copied once and waited for once."""
    counts = []
    for blocks in (2, 3):
        rows = np.zeros((blocks * GPU_BLOCK_ROWS, 16), dtype=np.float32)
        rows[:, 0] = 1.0
        with counted() as count:
            gf.Gallery(rows).statistics(fake_rows(4, 8, 16), 30.0, 10)
        counts.append(count)
    block = counts[1] - counts[0]
    assert block.kernels.total() == costs.scoring_work(4, 8, 1, 16).kernels + costs.BLOCK_KERNELS
    assert block.synchronisations == {"copy to the device": 1, "item": 1}


def test_small_batches_wait_for_the_host():
    shape, rates = gf.GeoFlowConfig.paper(), costs.PEAKS["h100"]
    work = costs.velocity_work(shape, 500, "bfloat16")
    replayed, started = (costs.seconds(work, rates, "bfloat16", replayed=how) for how in (True, False))
    assert started - replayed == pytest.approx(67 * 18e-6)
    assert started > 3 * replayed


def test_views_and_host_work_are_free():
    with counted() as count:
        x = fake_rows(6, 10)
        x.view(3, 20).T[1:].unsqueeze(0).expand(5, -1, -1).detach()
        host = torch.arange(6.0).square().sum()
        assert float(host) == 55.0  # tensors on the host have values
    assert not count.kernels
    assert not count.synchronisations


def test_own_kernels_are_counted_with_what_their_wrappers_do():
    with counted() as count:
        rows = fake_rows(6, 10)
        ops.adaln(rows, fake_rows(10), fake_rows(10))
        ops.adaln(fake_rows(10, 6).T, fake_rows(10), fake_rows(10))
    assert count.kernels == {"triton:adaln_kernel": 2, "torch:clone": 1}


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: bool((x > 0).all()), "item"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: x + torch.ones(4, device="cpu").to(x.device), "copy to the device"),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), "copy to the device"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index by a mask"),
    ],
)
def test_what_the_host_waits_for(wait, name):
    with counted() as count:
        wait(fake_rows(4))
    assert dict(count.synchronisations) == {name: 1}


def test_copies_of_pinned_memory_do_not_wait():
    with counted() as count:
        torch.ones(4, device="cpu").pin_memory().to("cuda", non_blocking=True)
        fake_rows(4).to("cpu", non_blocking=True)
    assert not count.synchronisations
    assert count.copied == 32


def test_backward_passes_and_lists_of_tensors():
    with counted() as count:
        layer = on_gpu(nn.Linear(8, 4, device="meta"))
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        layer(fake_rows(16, 8)).sum().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    assert count.kernels["torch:addmm"] == 1
    assert count.kernels["torch:mm"] == 1  # the gradient of the weight
    assert count.kernels["torch:_fused_adamw_"] == 1
    assert count.kernels["torch:_foreach_norm"] == 2


def test_launches_over_lists():
    small, large = torch.empty(10, device="meta"), torch.empty(65536 * 320, device="meta")
    assert list_launches([[small] * 110]) == 1
    assert list_launches([[small] * 111]) == 2
    assert list_launches([[small] * 65] * 2) == 2
    assert list_launches([[large]]) == 1
    assert list_launches([[large, small]]) == 2


def test_a_training_step_waits_for_nothing_and_starts_at_most_450_kernels():
    """The paper's run: noise, gathering, coupling, network, loss, optimiser. 1,060 kernels and 8 waits before."""
    step = path("one training step")
    assert not step.synchronisations
    assert step.kernels.total() <= 450
    assert not step.replays
    assert step.of("counter_noise") == step.of("unit_rows") == 2
    assert step.of("sinkhorn_kernel") == 1


def test_a_training_step_multiplies_points_once_and_in_float16():
    """The coupling needs no more; the network multiplies in bfloat16."""
    step = path("one training step")
    assert step.of("score_kernel") == 1
    assert step.flops["float16"] == 2 * 2048 * launches.BATCH**2
    assert not step.flops["tf32"]


@pytest.mark.parametrize(("eps", "half"), [(0.05, True), (0.03, False)])
def test_training_keeps_its_cost_matrix_in_float16_where_eps_allows(eps, half):
    with (
        counted() as count,
        mock.patch.object(extension.required(), "transport", wraps=extension.required().transport) as made,
    ):
        rows = fake_rows(512, 64)
        target, report = assign_late((rows, rows, rows, rows), eps)
    assert made.call_args.kwargs["half"] == half
    assert (target.shape, report.shape) == ((512,), (3,))
    assert count.flops == {"float16": 2 * 128 * 512**2}
    assert not count.synchronisations


def test_draws_from_a_plan_are_one_more_launch():
    counts = []
    for uniform in (None, torch.rand(512, dtype=torch.float64)):
        with counted() as count:
            rows = fake_rows(512, 64)
            assign_late((rows, rows, rows, rows), 0.05, None if uniform is None else uniform.to("cuda"))
        counts.append({name: count.of(name) for name in ("sinkhorn_kernel", "sinkhorn_result", "sinkhorn_sample")})
    assert [list(each.values()) for each in counts] == [[1, 1, 0], [1, 1, 1]]


def test_a_plan_warns_where_the_kernels_are_missing(monkeypatch):
    monkeypatch.setattr(dispatch, "_WARNED", set())
    table, remedy = dispatch._OPERATIONS["ot_solve"], "no CUDA code here; reinstall with nvcc"
    with counted() as count, mock.patch.object(extension, "missing_cuda", return_value=remedy):
        broken = dataclasses.replace(table["cuda"], missing=extension.missing_cuda)
        rows = fake_rows(64, 8)
        with mock.patch.dict(table, cuda=broken), pytest.warns(RuntimeWarning) as warned:
            assign_late((rows, rows, rows, rows), 0.05, max_iter=1)
    assert any("plain torch" in str(w.message) and remedy in str(w.message) for w in warned)
    assert not count.of("cuda:")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flows_of_16_bits_sample_and_score_on_a_gpu(dtype):
    """Their products are in their own type, points and densities are not."""
    with counted() as count:
        flow = launches.paper_flow(dtype)
        settings = gf.SamplingSettings(n_samples=4, n_steps=1)
        samples = FlowSource(flow, Direction.T2I, settings, 100.0, 0).draw(fake_rows(3, 1024)).samples
        pair, seed = (fake_rows(64, 1024), fake_rows(64, 1024)), fake_rows(dtype=torch.int64)
        density_estimates(flow, *pair, DIRECTIONS, gf.DensitySettings(n_steps=1, solver="euler"), seed)
    assert (samples.dtype, samples.shape) == (torch.float32, (3, 4, 1024))
    assert count.flops[str(dtype).removeprefix("torch.")] > 0.99 * count.flops.total()


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("resident", [True, False])
def test_pairs_are_kept_on_the_device_or_sent_without_a_wait(monkeypatch, resident):
    if not resident:
        monkeypatch.setattr("geoflow_fast.training.device_rows.RESIDENT_SHARE", 0.0)
    step = training(2, batch_size=64)
    assert not step.synchronisations
    assert step.of("unit_rows") == 2
    # Times, directions and row numbers alone, or the rows too.
    assert (step.copied > 64 * 1024 * 4) != resident


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_guided_velocity_is_at_most_70_kernels_and_never_waits(precision):
    count = launches.sampling(4, precision) - launches.sampling(3, precision)
    assert count.kernels.total() <= 70
    assert not count.synchronisations
    assert count.flops[precision] > 0.99 * sum(count.flops.values())  # but for the shifts and scales of a time


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_likelihood_evaluation_is_at_most_180_kernels_and_never_waits(precision):
    count = launches.likelihood(4, precision) - launches.likelihood(3, precision)
    assert count.kernels.total() <= 180
    assert not count.synchronisations
    assert count.flops[precision] > 0.99 * sum(count.flops.values())  # but for the shifts and scales of a time


def test_a_solve_waits_once_at_its_end():
    """Beside the check of what comes in, a solve of any length asks once whether all states were finite."""
    assert dict(launches.likelihood(2).synchronisations) == {"item": 2}  # of states and of divergences


# ---- graphs: while one is captured, waits, copies from or to the host and questions for free memory raise here ---


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sampling_is_one_replay(precision):
    eager, replayed = launches.sampling(3, precision), launches.sampling(3, precision, calls=launches.CALLS)
    assert replayed.replays == 1
    assert replayed.started <= 20
    # The host checks what comes in, and whether all that comes out is finite.
    assert set(replayed.synchronisations) == {"item"}
    assert 3 * 65 < replayed.kernels.total() <= eager.kernels.total()  # modulations and weights are not computed again
    assert replayed.flops[precision] > 0.95 * eager.flops[precision]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "midpoint"},
        {"solver": "rk4", "n_probes": 2, "redraw": False},
        {"probe": "rademacher", "tangents": "combined"},
        {"solver": "ab2", "shared": True},
        {"precision": "bfloat16", "tangents": "combined"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
@pytest.mark.usefixtures("shallow")
def test_densities_are_one_replay(options):
    replayed = launches.likelihood(3, calls=launches.CALLS, **options)
    assert replayed.replays == 1
    assert replayed.started <= 20
    assert dict(replayed.synchronisations) == {"item": 1}  # whether all is finite


def test_a_step_with_fixed_directions_is_one_replay():
    """Network, gradients, optimiser and learning rate are in the graph; the batch is made on a stream of its own."""
    drawn, fixed = path("one training step"), path("one training step, fixed directions")
    assert fixed.replays == 1
    assert not fixed.synchronisations
    assert fixed.started <= 40
    assert fixed.kernels.total() <= 450
    assert fixed.flops.total() == pytest.approx(drawn.flops.total(), rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [{"accumulate": 2}, {"precision": "float32"}],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.usefixtures("shallow")
def test_other_steps_are_one_replay_too(changes):
    step = training(3, batch_size=64, fixed_directions=True, **changes)
    assert step.replays == 1
    assert not step.synchronisations


def test_what_a_graph_cannot_contain_is_refused():
    reasons = []
    for bad in (
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(4).to(x.device, non_blocking=True),
        lambda x: x * torch.cuda.mem_get_info()[0],
        lambda x: torch.cuda.synchronize() or x,
    ):
        with counted() as count:
            kept = Graphs()
            for _ in range(3):
                kept.replay("kind", lambda bad=bad: bad, fake_rows(4), repeatable=False)
            assert not count.replays
        reasons.append(kept.reason)
    assert all("cannot contain" in reason for reason in reasons)
    assert len(set(reasons)) == len(reasons)


# ---- batches follow the memory of the GPU ------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "rows"), [(70e9, 32_768), (2e9, 4096), (2e5, 1)])
def test_rows_at_once_follow_the_free_memory(free, rows):
    with counted(), mock.patch.object(torch.cuda, "mem_get_info", return_value=(int(free), int(80e9))):
        device = fake_rows(1).device
        assert rows_at_once(device, 132_000.0, 512) == rows
        assert rows_at_once(torch.device("cpu"), 132_000.0, 512) == 512


def test_calls_are_cut_by_the_memory_of_the_gpu():
    """16,000 to 32,000 rows of the network at once, where there is room for them."""
    with counted():
        flow = launches.paper_flow()
        settings = gf.DensitySettings(n_steps=6)
        assert pairs_at_once(flow, DIRECTIONS, settings) == 32_768 // 7
        assert pairs_at_once(flow, DIRECTIONS[1:2], dataclasses.replace(settings, shared=True)) == 32_768 // 2
        assert network_rows_at_once(flow, fake_rows(1), 512) == 32_768
    cpu = gf.GeoFlow(gf.GeoFlowConfig.tiny(8, 8))
    assert network_rows_at_once(cpu, torch.empty(1), 512) == 512


def test_a_large_call_for_densities_replays_its_chunks():
    """Chunks of one size are one graph, within a single call."""
    settings = gf.DensitySettings(n_steps=1, solver="euler")
    with counted() as count:
        pair = fake_rows(4 * 4681 + 7, 1024), fake_rows(4 * 4681 + 7, 1024)
        density_estimates(launches.paper_flow(), *pair, DIRECTIONS, settings, fake_rows(dtype=torch.int64))
    assert count.replays == 3


def test_re_ranking_waits_for_no_shapes():
    """Candidates that are not there are solved, too: a GPU need not tell how many there are, and shapes stay."""
    count = path("5 re-ranked queries")
    assert count.replays == 1
    assert not {"nonzero", "index by a mask", "_unique2"} & set(count.synchronisations)
    assert sum(count.flops.values()) > 100e9  # all 160 pairs


def test_the_head_of_a_gpu_takes_all_queries_at_once():
    with counted() as count:
        points, items = fake_rows(2048, 8, 64), fake_rows(4096, 64)
        point_scores(points, fake_rows(2048, 8), items)
    assert count.kernels["torch:logsumexp"] == 1
    points, items = torch.randn(40, 8, 6), torch.randn(9000, 6)
    assert len(_tiles(points, items)) == 2  # 8 * 9000 products a query, 2 million at once


def test_few_points_of_a_head_are_not_worth_rounding_the_gallery_for():
    """Rounding takes ten passes over the gallery: for 64 queries, three products are faster than one."""
    assert path("head posteriors of 64 queries").bytes < 4 * 4 * 1024 * launches.ITEMS


@pytest.mark.parametrize(("name", "most"), [("entropies of 5 queries", 200), ("head posteriors of 64 queries", 250)])
def test_posteriors_start_few_kernels_besides_the_solve(name, most):
    assert path(name).started <= most
