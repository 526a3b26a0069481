"""Every kernel compiled for GPUs that are not here, with gates on what the compiler made of it.

Run in a process of its own, without the interpreter: `pytest tests/gpu_emulated/aot`, which is what `make test` does.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from geoflow_fast.kernels import gallery
from tools import aot

TABLE = aot.table_cases()
QUICK = {case.name: case for case in TABLE}
EVERY = {case.name: case for case in aot.configuration_cases()}
DOT = "gallery_tile_kernel"


def check_gates(launch: aot.Launch, capability: int) -> aot.Compiled:
    built = aot.compile_nvidia(launch, capability)
    assert built.stack == 0, f"{built.stack} bytes of stack"
    assert built.spills == 0, f"{built.spills} local loads and stores"
    assert built.registers <= 255
    assert built.shared <= aot.SHARED_LIMIT[capability]
    if launch.name == DOT:
        assert aot.TENSOR_CORE[capability] in built.ptx
        # One exponential per entry of the product; the rescaling by new maxima and, once per tile of items, the masses
        # may be computed by several threads each.
        tile = launch.meta
        entries = tile["CHUNK"] * tile["QUERIES"] * tile["ITEMS"] // (32 * tile["num_warps"])
        assert entries <= built.count(r"ex2\.approx") <= 3 * entries
        assert built.count(r"cp\.async\.cg\.shared\.global|cp\.async\.bulk") > 0  # 16 bytes at a time
    else:
        assert not re.search(r"mma|wgmma", built.ptx)
    return built


# Every architecture in `make test-slow`; of those that are compiled alike, one each otherwise.
SOON = {name: (89, 100) if any(word in name for word in ("gallery", "the same")) else (120,) for name in QUICK}
PAIRS = [(name, capability) for name, case in QUICK.items() for capability in case.capabilities]


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, number, marks=() if number in SOON[name] or number == 90 else pytest.mark.slow)
        for name, number in PAIRS
    ],
)
def test_paper_sizes_pass_the_gates(name, capability):
    for launch in QUICK[name].launches():
        built = check_gates(launch, capability)
        if launch.name not in (DOT, "gallery_merge_kernel", "gallery_split_kernel", "counter_noise_kernel"):
            assert built.count(r"ld\.global\S*\.v4\.") >= 2, "loads are narrower than 128 bits"
            assert built.count(r"st\.global\S*\.v4\.") >= 1 or launch.name == "flow_loss_kernel"


def test_the_table_covers_every_kernel():
    """A kernel that no case launches would never be compiled."""
    sources = Path(gallery.__file__).parent.glob("*.py")
    written = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert written == {launch.name for case in TABLE for launch in case.launches()}


@pytest.mark.parametrize("name", [*aot.NETWORK, "tangent_step", "tangent_stage", "tangent_ab2", "masked_interpolant"])
def test_row_kernels_are_compiled_once_for_any_number_of_rows(name):
    """One, odd, and multiples of 16: what the compiler is given is the same, but for one row in a group of its own."""
    calls = [aot.call_with_rows(name, rows, width=96) for rows in (2, 15, 16, 17, 160, 8192)]
    launches = [launch for call in calls for launch in aot.Case(name, call).launches()]
    assert len({aot.compiler_key(launch) for launch in launches}) == 1


@pytest.mark.parametrize(
    ("bias", "scores", "top", "measured"),
    [(False, False, 16, True), (True, False, 16, False), (False, True, 16, False), (False, False, 17, False)],
)
def test_wide_tiles_are_for_plain_scores_and_short_lists(bias, scores, top, measured):
    """They would spill on sm_90, the one architecture that they are for: what no gate has seen is not chosen."""
    call = aot.gallery_call(None, torch.bfloat16, 64, 50, 5000, 1024, bias, top, scores=scores)
    tile = aot.Case("gallery", call).launches()[0]
    assert (tile.kernel is gallery.gallery_tile_kernel) == measured  # of two configurations


def test_long_lists_of_few_queries_fill_a_gpu():
    """As many programs as there are multiprocessors, and lists that are merged in rounds."""
    tile, *rounds = EVERY["few bf16 one query, top 64 of a million"].launches()
    assert tile.grid[0] * tile.grid[1] > 132
    assert [launch.grid for launch in rounds] == [(1, 5), (1, 1)]
    assert all(launch.meta["LISTED"] <= gallery.MAX_LISTED for launch in rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capability"), [(name, number) for name, case in EVERY.items() for number in case.capabilities]
)
def test_every_configuration_passes_the_gates(name, capability):
    for launch in EVERY[name].launches():
        check_gates(launch, capability)
