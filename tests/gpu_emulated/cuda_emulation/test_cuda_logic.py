"""The CUDA path without CUDA: fake CUDA tensors pass through the checks, dispatch, allocation and launch grids."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import geoflow_fast as gf
from geoflow_fast import ops
from geoflow_fast.distributed import ALONE
from geoflow_fast.likelihood import density
from geoflow_fast.ops import dispatch, triton_kernels
from geoflow_fast.retrieval.marginals import log_mean_scores
from geoflow_fast.training import loop
from geoflow_fast.training.objective import Objective

pytest.importorskip("triton", reason="the CUDA path needs triton")
from geoflow_fast.kernels import gallery, geodesic, network, probes
from geoflow_fast.kernels.launch import element_tile, row_tile
from geoflow_fast.ops.adaln import adaln_half_rows
from geoflow_fast.ops.triton_kernels import WIDEST_ROW
from tools import aot
from tools.launches import counted, device_guards, on_gpu


class KernelsOfFakeTensors(TorchDispatchMode):
    """Calls the backend of an operation for fake tensors too, for which torch would only compute shapes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "geoflow":
            return dispatch.choose(func.name().split("::")[1], args[0], args[-1], args)(*args[:-1])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches():
    """Makes CUDA tensors fake ones, pretends that there is a driver, and yields the launches that were recorded."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        device_guards(),
        aot.recorded() as recorded,
        KernelsOfFakeTensors(),
    ):
        yield recorded


def cuda(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")


def names(launches):
    return [launch.name for launch in launches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cuda_tensors_are_served_by_triton_in_their_own_dtype(launches, dtype):
    x, row = cuda(6, 4, 96, dtype=dtype), cuda(96, dtype=dtype)
    for y in (
        ops.adaln(x, row, row),
        ops.gate_residual(x, x, x, row, keep=cuda(6, 4, 96, dtype=torch.int8).view(torch.bool), dropout=0.1),
        ops.swiglu(x, x),
    ):
        assert (y.device.type, y.dtype, y.shape) == ("cuda", dtype, x.shape)
    assert ops.swiglu(x).shape == (6, 4, 48)
    mean, rows = ops.flow_loss(*[cuda(5, 8, dtype=dtype)] * 6, cuda(5, dtype=torch.int8))
    assert (mean.shape, rows.shape, rows.dtype) == ((), (5,), torch.float32)
    assert names(launches) == [
        "adaln_kernel",
        "gate_residual_kernel",
        "swiglu_kernel",
        "swiglu_kernel",
        "flow_loss_kernel",
    ]


@pytest.mark.parametrize("dropped", [False, True])
def test_interpolant_of_two_widths(launches, dropped):
    image, text = cuda(7, 33), cuda(7, 20)
    drop = cuda(7, dtype=torch.int8).view(torch.bool) if dropped else None
    made = ops.masked_interpolant(image, text, image, text, cuda(7), cuda(7, dtype=torch.int8), drop=drop)
    assert [tuple(x.shape) for x in made] == [(7, 33), (7, 20), (7, 33), (7, 20)]
    assert {x.device.type for x in made} == {"cuda"}
    assert names(launches) == ["masked_interpolant_kernel"]
    with pytest.raises(ValueError, match="text1"):
        ops.masked_interpolant(image, text, image, cuda(7, 21), cuda(7), cuda(7, dtype=torch.int8))
    with pytest.raises(ValueError, match="cpu"):
        ops.masked_interpolant(image, text, image, text, torch.rand(7), cuda(7, dtype=torch.int8))


@pytest.mark.parametrize("solver", ["midpoint", "euler", "rk4"])
def test_the_likelihood_never_waits_for_the_device(solver):
    """But for the checks of what comes in, which end the call if they fail, and of what came out of all steps."""
    seed = torch.zeros((), dtype=torch.int64)
    with counted() as count:
        with torch.device("meta"):
            flow = gf.GeoFlow(gf.GeoFlowConfig(12, 10, hidden=32, depth=2)).eval()
        on_gpu(flow)
        with mock.patch.object(density, "draw_seed", return_value=int(seed)):
            ep = gf.epistemic(flow, cuda(6, 12), cuda(6, 10), n_steps=3, n_probes=2, solver=solver)
    for x in (ep.joint, ep.score):
        assert (x.shape, x.dtype, x.device.type) == ((6,), torch.float64, "cuda")
    assert dict(count.synchronisations) == {"item": 4}
    evaluations = {"euler": 3, "midpoint": 6, "rk4": 12}[solver]
    # One launch serves both streams of all three solves in each of two blocks.
    assert count.kernels["triton:segment_swiglu_kernel"] == evaluations * 2
    assert count.kernels["triton:segment_gate_adaln_kernel"] == evaluations * 4
    probed = {"euler": 3, "midpoint": 3, "rk4": 12}[solver]
    assert count.kernels["triton:probe_traces_kernel"] == probed * 4


def test_sphere_operations(launches):
    x = cuda(7, 33)
    assert ops.tangent_step(x, x, 0.1, v_free=x, guidance=2.0).shape == (7, 33)
    assert names(launches) == ["tangent_step_kernel"]
    tile = row_tile(33)
    assert launches[0].grid == ((7 + tile.rows - 1) // tile.rows,)


@pytest.mark.parametrize(
    ("queries", "items", "dtype"),
    [
        (1, 100_000, torch.bfloat16),
        (1, 5000, torch.float32),
        (9, 5000, torch.bfloat16),
        (64, 5000, torch.float32),
        (5000, 300, torch.float16),
    ],
)
def test_gallery_fills_the_device_and_covers_the_gallery(launches, queries, items, dtype):
    """Small blocks of queries, too: as many programs as there are processors, or one for every tile of items."""
    post = ops.gallery_posterior(cuda(queries, 50, 128, dtype=dtype), cuda(items, 128, dtype=dtype), 100.0)
    assert post.entropy.shape == (queries,)
    assert (post.top_index.shape, post.top_index.dtype) == ((queries, 10), torch.int64)
    split = [launch for launch in launches if launch.name == "gallery_split_kernel"]
    assert len(split) == (2 if dtype == torch.float32 else 0)
    tile, merge = launches[-2:]
    assert tile.meta["PARTS"] == (2 if dtype == torch.float32 else 1)
    assert tile.arguments[0].dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    blocks, shares = tile.grid
    config = gallery.CONFIGS[gallery.eligible(False, queries, True)[0]]
    assert queries <= config.most
    assert blocks * config.queries >= queries > (blocks - 1) * config.queries
    per_share = tile.arguments[-1]
    assert shares * per_share >= items > (shares - 1) * per_share
    assert blocks * shares >= 132 or per_share <= config.items
    assert merge.grid == (queries, 1)


def test_extreme_kappas_of_float32_rows_are_multiplied_as_they_are(launches):
    ops.gallery_posterior(cuda(64, 5, 128), cuda(500, 128), 3e4)
    assert names(launches) == ["gallery_tile_kernel", "gallery_merge_kernel"]
    assert launches[0].arguments[0].dtype == torch.float32
    assert launches[0].meta["PRECISION"] == "tf32x3"


@pytest.mark.parametrize("queries", [1, 9, 64])
@pytest.mark.parametrize("exact", [False, True])
def test_tuning_never_changes_the_number_of_queries_in_a_tile(queries, exact):
    """The grid and the shares are fixed before the configuration is chosen."""
    chosen = [gallery.CONFIGS[name] for name in gallery.eligible(exact, queries, True)]
    assert len({(config.queries, config.items) for config in chosen}) == 1
    assert all(gallery.DEEPEST % config.depth == 0 for config in gallery.CONFIGS.values())


def test_under_deterministic_algorithms_tiles_are_not_chosen_by_timing(launches):
    """Two processes must not round in different orders because their clocks differ."""
    inputs = cuda(64, 50, 128, dtype=torch.bfloat16), cuda(5000, 128, dtype=torch.bfloat16), 10.0, 5, None, None
    assert len(gallery.eligible(False, 64, True)) > 1
    gallery.gallery_statistics(*inputs)
    assert launches[0].kernel is gallery.gallery_tile_kernel  # measures
    torch.use_deterministic_algorithms(True)
    try:
        gallery.gallery_statistics(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert launches[2].kernel is gallery.gallery_tile_kernel.fn
    assert launches[2].meta["CHUNK"] == gallery.CONFIGS["slim"].chunk


def test_gallery_pads_ragged_widths(launches):
    ops.gallery_posterior(cuda(2, 3, 33, dtype=torch.float16), cuda(9, 33, dtype=torch.float16), 1.0)
    assert launches[0].arguments[-3] == 48
    ops.gallery_posterior(cuda(2, 3, 33), cuda(9, 33), 1.0)
    assert launches[-2].arguments[-3] == gallery.DEEPEST


def test_gallery_serves_lists_longer_than_the_kernel_keeps(launches):
    post = ops.gallery_posterior(cuda(2, 3, 16), cuda(999, 16), 1.0, top_k=200)
    assert post.top_index.shape == (2, 200)
    assert launches[-2].meta["WRITE_SCORES"]
    assert launches[-2].arguments[9].shape == (2, 999)


def test_gallery_multiplies_in_bfloat16_where_it_is_asked_to(launches, monkeypatch):
    """The interpreter's tests see what becomes of the best items, which fake tensors cannot be."""
    module = sys.modules["geoflow_fast.ops.gallery_posterior"]
    shortened = lambda rough, _, k: (*rough[:3], *(x.narrow(1, 0, k) for x in rough[3:]))  # noqa: E731
    monkeypatch.setattr(module, "_with_exact_top", shortened)
    post = ops.gallery_posterior(cuda(2, 3, 256), cuda(999, 256), 1.0, precision="bfloat16")
    assert post.top_index.shape == (2, 10)
    assert names(launches) == ["gallery_tile_kernel", "gallery_merge_kernel"]
    assert launches[0].arguments[0].dtype == torch.bfloat16


def test_item_marginals_are_computed_by_the_kernels(launches):
    """From the scores of a whole tile of items, not by plain torch."""
    parts = mock.Mock(blocks=lambda *_: [(0, cuda(700, 16))])
    marginals = log_mean_scores(cuda(5, 3, 16), parts, 10.0)
    assert marginals.shape == (700,)
    assert launches[-2].meta["WRITE_SCORES"]


def test_double_precision_is_left_to_plain_torch(launches):
    x = cuda(4, 8, dtype=torch.float64)
    assert ops.swiglu(x, x).dtype == torch.float64
    assert not launches
    with pytest.raises(dispatch.BackendUnavailable, match="float64"):
        ops.swiglu(x, x, backend="triton")


def test_mixed_devices_are_refused(launches):
    x, here = cuda(4, 8), torch.empty(4, 8)
    with pytest.raises(ValueError, match="scale is on cpu"):
        ops.adaln(x, x, here)
    with pytest.raises(ValueError, match="gallery is on cpu"):
        ops.gallery_posterior(cuda(2, 3, 8), here, 1.0)
    assert not launches


def test_backward_kernels_are_given_partial_sums_per_tile(launches):
    tile = row_tile(512)
    _, d_shift, d_scale = network.adaln_backward(cuda(1000, 512), cuda(1000, 512), cuda(2, 512), 1e-6)
    assert d_shift.shape == d_scale.shape == (2, 512)
    tiles = -(-500 // tile.rows)
    assert launches[0].grid == (2 * tiles,)
    assert launches[0].arguments[4].shape == (2, tiles, 512)
    _, _, d_scale = network.gate_residual_backward(cuda(8, 512), None, cuda(8, 512), cuda(8, 512), None, 0.0)
    assert d_scale.shape == (8, 512)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_tests_of_a_gpu_do_not_pass_without_one():
    """`make test-gpu` with a torch that was built for CPUs has tested nothing, and must say so."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_density_gpu.py"]
    outcome = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert outcome.returncode != 0
    assert "the tests of a GPU cannot run: torch" in outcome.stderr


def test_without_a_device_triton_says_so():
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert "no CUDA device" in (triton_kernels.missing() or "")
        with pytest.raises(dispatch.BackendUnavailable, match="no CUDA device"):
            ops.swiglu(torch.ones(2, 2), torch.ones(2, 2), backend="triton")


@pytest.mark.parametrize("width", [1, 7, 129, 1023, 1024, 1408, WIDEST_ROW])
def test_tiles_cover_their_rows(width):
    tile = row_tile(width)
    assert tile.columns >= width
    assert tile.rows * tile.columns >= 2048
    assert 4 <= tile.warps <= 32
    small = element_tile(width)
    assert small.rows * small.columns == 2048


def test_a_tile_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match=str(WIDEST_ROW)):
        row_tile(WIDEST_ROW + 1)


WIDE = WIDEST_ROW + 904
WIDE_CALLS = {
    "adaln_half": lambda backend="auto": adaln_half_rows(cuda(3, WIDE), cuda(1, WIDE), cuda(1, WIDE), 1e-6, backend),
    "unit_rows": lambda **b: ops.unit_rows(cuda(9, WIDE), cuda(3, dtype=torch.int64), **b),
    "adaln": lambda **b: ops.adaln(cuda(3, WIDE), cuda(WIDE), cuda(WIDE), **b),
    "tangent_step": lambda **b: ops.tangent_step(cuda(3, WIDE), cuda(3, WIDE), 0.1, **b),
    "flow_loss": lambda **b: ops.flow_loss(
        *(cuda(3, width) for width in (8, WIDE) * 3), cuda(3, dtype=torch.int8), **b
    )[1],
}


@pytest.mark.parametrize("name", WIDE_CALLS)
def test_rows_wider_than_a_program_are_served_by_plain_torch(launches, name):
    """Of two streams, either may be the wide one."""
    result = WIDE_CALLS[name]()
    assert (result.shape[0], result.device.type) == (3, "cuda")
    assert not launches
    with pytest.raises(dispatch.BackendUnavailable, match=f"at most {WIDEST_ROW} entries, and these have {WIDE}"):
        WIDE_CALLS[name](backend="triton")


def test_noise_wider_than_a_program_is_drawn_by_plain_torch(launches):
    """A program holds four columns of a row where others hold one."""
    numbers, widest = cuda(3, dtype=torch.int64), 4 * WIDEST_ROW
    assert ops.counter_noise(numbers, widest + 1, 5, 6, 0).shape == (3, widest + 1)
    assert not launches
    with pytest.raises(dispatch.BackendUnavailable, match=f"at most {widest} entries, and these have {widest + 1}"):
        ops.counter_noise(numbers, widest + 1, 5, 6, 0, backend="triton")
    assert ops.counter_noise(numbers, widest, 5, 6, 0).shape == (3, widest)
    assert names(launches) == ["counter_noise_kernel"]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "name", ["masked_interpolant", "adaln_segments", "gate_adaln_segments", "tangent_probes", "probe_traces"]
)
def test_passes_over_wide_rows_are_left_to_plain_torch(name):
    rows, table = [cuda(3, width) for width in (8, WIDE)], dispatch._OPERATIONS[name]
    assert dispatch.choose(name, rows[0], inputs=rows) is table["reference"].function
    assert dispatch.choose(name, rows[0], inputs=rows[:1]) is table["triton"].function


def segment_call(kernel, pairs):
    """A call that serves both streams of three solves, 14 rows a pair."""
    rows, table, parameter = 14 * pairs, cuda(6, 10, dtype=torch.int32), cuda(6, 96)
    h, y = cuda(rows, 96), cuda(rows, 96)
    if kernel == "adaln":
        network.segment_adaln(h, None, parameter, parameter, y, table, pairs, 1e-6, False)
    elif kernel == "gate_adaln":
        products = cuda(rows, 192)
        network.segment_gate_adaln(h, products, 4, parameter, parameter, parameter, h, y, table, pairs, 1e-6, False)
    else:
        network.segment_swiglu(cuda(rows, 192), y, table, pairs)


def probe_call(kernel, rows):
    x, e = cuda(rows, 96), cuda(2, rows, 96)
    if kernel == "draw":
        probes.tangent_probes(x, cuda(rows, dtype=torch.int64), cuda(dtype=torch.int64), 3, 1, 2, False, x, 95)
    else:
        probes.probe_traces(x, x, e, e, cuda(2, rows, dtype=torch.float64), 0.1, -95.0, 95, True, x)


ROW_CALLS = {
    "counter_noise": lambda rows: geodesic.counter_noise(cuda(rows, dtype=torch.int64), 96, 2**62 + 1, rows, 1, True),
    "unit_rows": lambda rows: geodesic.unit_rows(cuda(2 * rows, 96), cuda(rows, dtype=torch.int64)),
    "cross_residual": lambda rows: network.cross_residual(
        cuda(2 * rows, 96), cuda(8, rows, 48), cuda(2, 96), None, 0.0
    ),
    "cross_residual_backward": lambda rows: network.cross_residual_backward(
        cuda(2 * rows, 96), cuda(8, rows, 48), cuda(2, 96), None, 0.0
    ),
    "segment_adaln": functools.partial(segment_call, "adaln"),
    "segment_gate_adaln": functools.partial(segment_call, "gate_adaln"),
    "segment_swiglu": functools.partial(segment_call, "swiglu"),
    "tangent_probes": functools.partial(probe_call, "draw"),
    "probe_traces": functools.partial(probe_call, "read"),
    "gallery_split": lambda rows: gallery.split_rows(cuda(rows, 96), False),
}
"""The row kernels that tests/gpu_emulated/aot/test_compile.py does not call with other numbers of rows."""


@pytest.mark.parametrize("name", ROW_CALLS)
def test_other_row_kernels_are_compiled_once_for_any_number_of_rows_too(launches, name):
    """One, odd, and multiples of 16: what the compiler is given is the same."""
    for rows in (1, 2, 15, 16, 17, 160, 8192):
        ROW_CALLS[name](rows)
    assert set(names(launches)) == {f"{name}_kernel"}
    assert len({aot.compiler_key(launch) for launch in launches}) == 1


def test_plain_torch_for_cuda_tensors_warns_once_and_names_the_remedy(launches, monkeypatch):
    """A build without CUDA code, or a driver that is too old, must not cost a training run its speed in silence."""
    reasons = iter(["no CUDA code here; reinstall with nvcc", "no CUDA code here; reinstall with nvcc", None])
    entry = dispatch._OPERATIONS["ot_solve"]["cuda"]
    broken = dataclasses.replace(entry, missing=lambda: next(reasons))
    monkeypatch.setitem(dispatch._OPERATIONS["ot_solve"], "cuda", broken)
    monkeypatch.setattr(dispatch, "_WARNED", set())
    points = cuda(4, 8)
    with pytest.warns(RuntimeWarning, match="ot_solve .* plain torch.*reinstall with nvcc"):
        assert dispatch.choose("ot_solve", points) is dispatch._OPERATIONS["ot_solve"]["reference"].function
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.choose("ot_solve", points)
        assert dispatch.choose("ot_solve", points) is entry.function
    assert not launches


@pytest.mark.usefixtures("launches")
def test_automatic_precision_asks_for_bfloat16_units_not_for_emulation(monkeypatch):
    """GPUs before Ampere emulate bfloat16, slower than float32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    nothing = mock.Mock(fingerprint=lambda: "")
    module = torch.nn.ParameterList([torch.nn.Parameter(cuda(2, 2))])
    objective = mock.Mock(module=module, config=gf.TrainConfig(ema_decay=None), pairs=nothing, val=nothing, world=ALONE)
    objective.gains_from_bfloat16 = functools.partial(Objective.gains_from_bfloat16, objective)
    assert loop.Run(objective).bfloat16 is False
