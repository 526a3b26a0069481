"""What nvcc makes of the CUDA kernels for every architecture: nothing in local memory, tensor cores, wide loads."""

from __future__ import annotations

import re

import pytest
import torch

from geoflow_fast import ops
from tools import cuda_build
from tools.cuda_build import ARCHITECTURES, CompiledKernel

ENTRIES = ("float", "Half")
KERNELS = (
    *("score_kernel<float>", "score_kernel<Half>"),
    *(f"sinkhorn_kernel<{vectors}, {entry}>" for vectors in (1, 2, 4) for entry in ENTRIES),
    *(f"sinkhorn_{name}_kernel<{entry}>" for name in ("wide", "result", "sample") for entry in ENTRIES),
)
# Of a block. Desktop and workstation GPUs (3090, 4090, 5090, A10, L4, L40S) have 99 KB.
SHARED_LIMIT = {
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99 * 1024),
    "sm_80": 163 * 1024,
    **dict.fromkeys(("sm_90", "sm_100"), 227 * 1024),
}
# Threads of a block, which the register file of 65,536 must hold.
THREADS = {"score_kernel": 256, "sinkhorn_kernel": 512, "sinkhorn_wide_kernel": 512}
RESULT_THREADS = 256


SOON = "sm_86"
"""The architecture of `make test`, of those with the least shared memory; `make test-slow` builds for the others."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == SOON else pytest.mark.slow) for name in ARCHITECTURES],
)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kernels(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompiledKernel]:
    if cuda_build.nvcc() is None:
        pytest.skip("nvcc is not on PATH")
    return cuda_build.compile_for(tmp_path_factory.mktemp("cubin"), architecture)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_backend_says_why() -> None:
    with pytest.raises(ValueError, match=r"(no CUDA driver|no CUDA device|no CUDA code)"):
        ops.sinkhorn(torch.rand(3, 3), backend="cuda")


def test_all_kernels_are_built(kernels: dict[str, CompiledKernel]) -> None:
    assert sorted(kernels) == sorted(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_lives_in_local_memory(kernels: dict[str, CompiledKernel], name: str) -> None:
    kernel = kernels[name]
    assert kernel.stack_bytes == 0
    assert kernel.spilled_bytes == 0
    assert kernel.count(r"\b(LDL|STL)\b") == 0


@pytest.mark.parametrize("name", KERNELS)
def test_a_block_fits(architecture: str, kernels: dict[str, CompiledKernel], name: str) -> None:
    assert kernels[name].shared_bytes <= SHARED_LIMIT[architecture]
    threads = THREADS.get(re.sub("<.*", "", name), RESULT_THREADS)
    registers = -(-kernels[name].registers // 8) * 8
    assert registers * threads <= 65536


@pytest.mark.parametrize("entry", ENTRIES)
def test_two_blocks_of_the_smallest_solver_share_a_multiprocessor(
    architecture: str, kernels: dict[str, CompiledKernel], entry: str
) -> None:
    kernel = kernels[f"sinkhorn_kernel<1, {entry}>"]
    assert 2 * kernel.registers * 512 <= 65536
    assert 2 * kernel.shared_bytes <= SHARED_LIMIT[architecture]


@pytest.mark.parametrize("name", KERNELS[:2])
def test_scores_use_tensor_cores(kernels: dict[str, CompiledKernel], name: str) -> None:
    """A stage is two groups of 4 x 4 tiles times 2 steps of 16. Nothing else multiplies."""
    kernel = kernels[name]
    assert kernel.count(r"HMMA\.16816\.F32\b") == 64
    assert kernel.count(r"LDGSTS\.E\S*\.128") >= 8
    assert kernel.count(r"\bLDS\.128") == 24  # of a group: 4 columns + 8 rows
    assert kernel.count(r"\bLDS(\.U)?(\.32|\.64)?\b(?!\.128)") == kernel.count(r"@!PT LDS RZ")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("vectors", [1, 2, 4])
def test_an_iteration_takes_one_exponential_per_entry(
    kernels: dict[str, CompiledKernel], vectors: int, entry: str
) -> None:
    """sm_80 holds a second copy of the row's tail, for warps that have diverged; none ever does."""
    kernel = kernels[f"sinkhorn_kernel<{vectors}, {entry}>"]
    assert kernel.count(r"MUFU\.EX2") in (4 * vectors, 8 * vectors)
    # Two rows ahead before the loop, one in it, of which sm_80 has two copies, too.
    wide = r"\.128" if entry == "float" else r"(\.64|\.BYPASS\.64)?"
    assert kernel.count(rf"LDGSTS\.E\S*{wide}") in (3 * vectors, 4 * vectors)
    assert kernel.count(r"\bLDS\.128") >= (2 if entry == "float" else 1) * vectors


@pytest.mark.parametrize("name", ["wide", "result", "sample"])
def test_rows_are_read_four_entries_at_a_time(kernels: dict[str, CompiledKernel], name: str) -> None:
    assert kernels[f"sinkhorn_{name}_kernel<float>"].count(r"\bLDG\.E\S*\.128") >= 3
    half = kernels[f"sinkhorn_{name}_kernel<Half>"]
    assert half.count(r"\bLDG\.E\S*\.64") >= 1
    assert half.count(r"\bLDG\.E\S*\.U16") == 0
