"""The checks of the interpreter and of the emulated device against float64, by kernel, for compiled PTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from tests.gpu_emulated.cuda_emulation.test_cuda_emulation import SMALL, ScoreCase, SolveCase
from tests.gpu_emulated.interpreter import test_kernels as kernels
from tests.gpu_emulated.interpreter import test_segments as segments

HALF = torch.bfloat16
Check = Callable[[int, int], object]


@contextmanager
def contiguous_rows() -> Iterator[None]:
    """Inside, rows follow each other in memory, as those of a network do. With widths that are multiples of 16 the
    compiler then takes 16 bytes at a time."""
    with mock.patch.object(kernels, "rows_with_gaps", lambda rows, width, dtype: torch.randn(rows, width).to(dtype)):
        yield


def beside(width: int, ragged: int) -> int:
    """The width of the other stream: a multiple of 16 beside one, ragged beside others."""
    return ragged if width % 16 else 48


def check_counter_noise(rows: int, width: int) -> None:
    """Row numbers from the first to the last that there is."""
    numbers = torch.linspace(0, 2**32 - 1, rows, dtype=torch.float64).long()
    for seed, step, stream in ((1, 1, 0), (2**63 - 25, 2**31 + 5, 1), (-(2**63), 16, 1)):
        noise = kernels.geodesic.counter_noise(numbers, width, seed, step, stream, True)
        kernels.assert_close(noise, kernels.counter_noise_reference(numbers, width, seed, step, stream, True))


def check_unit_rows(rows: int, width: int) -> None:
    """Of a table with more rows than are asked for, some of them twice."""
    table, index = (3 * torch.randn(rows + 4, width)).half(), torch.randint(rows + 4, (rows,))
    expected = kernels.unit_rows_reference(table.double(), index)
    kernels.assert_close(kernels.geodesic.unit_rows(table, index), expected)


# Of `rows` rows of `width` entries, as far as a kernel leaves the choice. A norm of one entry is the rounding error of
# its mean over the root of eps: what `div.full` may be off, times a thousand.
ROW_KERNELS: dict[str, Check] = {
    "tangent_step": lambda rows, width: kernels.check_tangent_step(kernels.KERNELS, rows, max(width, 2)),
    "tangent_stage": lambda rows, width: kernels.check_tangent_stage(kernels.KERNELS, rows, max(width, 2)),
    "tangent_ab2": lambda rows, width: kernels.check_tangent_ab2(kernels.KERNELS, rows, max(width, 2)),
    "masked_interpolant": lambda rows, width: kernels.check_interpolant(
        kernels.KERNELS, rows, (max(width, 2), beside(width, 5))
    ),
    "bad rows": lambda _rows, _width: kernels.check_bad_row(kernels.KERNELS),
    "counter_noise": lambda rows, width: check_counter_noise(rows, max(width, 2)),
    "unit_rows": check_unit_rows,
    "cross_residual": lambda rows, width: kernels.test_cross_residual_is_that_of_the_reference(
        rows, 3, -(-width // 3), HALF, True
    ),
    "adaln": lambda rows, width: kernels.check_adaln(kernels.KERNELS, rows, max(width, 2), groups=1),
    "adaln half": lambda rows, width: kernels.check_adaln(
        kernels.KERNELS, rows, max(width, 2), groups=rows, dtype=HALF
    ),
    "gate_residual": lambda rows, width: kernels.check_gate_residual(kernels.KERNELS, rows, width, groups=1),
    "swiglu": lambda rows, width: kernels.check_swiglu(kernels.KERNELS, rows, width + width % 2),
    "swiglu half": lambda rows, width: kernels.check_swiglu(kernels.KERNELS, rows, width + width % 2, dtype=HALF),
    "flow_loss": lambda rows, width: kernels.check_flow_loss(kernels.KERNELS, rows, (width, beside(width, 3))),
    "segment_adaln": lambda rows, width: segments.test_adaln_of_segments(rows, width, HALF, True),
    "segment_gate_adaln": lambda rows, width: segments.test_gates_and_adaln_of_segments(
        rows, 3 * -(-width // 3), 3, HALF
    ),
    "segment_swiglu": lambda rows, width: segments.test_swiglu_of_segments(rows, width, torch.float32),
    "tangent_probes": lambda rows, width: segments.test_probes(rows, max(width, 2), 2, "aligned"),
    "probe_traces": lambda rows, width: segments.test_traces(rows, max(width, 2), 2, True, True, torch.float32),
}
# Multiples of 16, and of the three heads: they are compiled as widths of 512 and 1024 are.
WIDTHS_IN_STEPS = (384, 768)

# The float32 rows of all but the exact ones are split into bfloat16 parts.
GALLERY: dict[str, Callable[[], object]] = {
    "few, bfloat16": lambda: kernels.check_gallery(kernels.KERNELS, "few", dtype=HALF),
    "few, biased": lambda: kernels.check_gallery(kernels.KERNELS, "few", bias=True),
    "some": lambda: kernels.check_gallery(kernels.KERNELS, "some"),
    "slim": lambda: kernels.check_gallery(kernels.KERNELS, "slim"),
    "slim, float16": lambda: kernels.check_gallery(kernels.KERNELS, "slim", dtype=torch.float16),
    "exact": lambda: kernels.check_gallery(kernels.KERNELS, "exact"),
    "exact, kappa of 1e5": lambda: kernels.check_gallery(kernels.KERNELS, "exact", kappa=1e5, items=70, bias=True),
    "exact-few": lambda: kernels.check_gallery(kernels.KERNELS, "exact-few"),
    "exact-few, kappa of 1e5": lambda: kernels.check_gallery(
        kernels.KERNELS, "exact-few", kappa=1e5, items=129, bias=True
    ),
    "one of everything": lambda: kernels.check_gallery(kernels.KERNELS, "slim", 1, 1, 1, 2, 12.0, 1, 1),
    "7 items, 40 wide": lambda: kernels.check_gallery(kernels.KERNELS, "some", 7, 3, 7, 40, 5.0, 5, 1),
    "129 items, 7 wide": lambda: kernels.check_gallery(kernels.KERNELS, "few", 2, 8, 129, 7, 12.0, 5, 3),
    "129 items, 64 wide": lambda: kernels.check_gallery(
        kernels.KERNELS, "slim", 17, 8, 129, 64, 20.0, 5, 2, dtype=HALF
    ),
    "1023 items, 129 wide": lambda: kernels.check_gallery(
        kernels.KERNELS, "few", 2, 7, 1023, 129, 20.0, 5, 2, dtype=HALF
    ),
    "scores alone": lambda: kernels.test_item_marginals_in_the_kernels(),
    "equal items": lambda: kernels.test_gallery_keeps_equal_items_in_order(),
}

# ---- transport: what the cases of tests/gpu_emulated/cuda_emulation leave to the others of the same template ----

SCORED = {"shift": 1.5}
# With SMALL, every kernel that ships.
EVERY_KERNEL = [
    *SMALL,
    SolveCase(7, 515, max_iter=2, half=True, **SCORED),
    SolveCase(7, 4101, max_iter=2),
    SolveCase(7, 4101, max_iter=2, half=True, **SCORED),
    SolveCase(7, 2101, max_iter=2, wide=True, half=True, **SCORED),
]
MORE_SCORES = [
    # In eight dimensions many pairs are within 60 degrees, where the arc sine goes another way.
    ScoreCase(130, 130, (8, 8)),
    ScoreCase(130, 130, (8, 8), half=True),
    ScoreCase(7, 1023, (40, 8)),
    ScoreCase(1023, 7, (8, 16), half=True),
]
# From a larger eps downwards, in each kernel of the solver.
STEPS = [
    SolveCase(7, cols, wide=wide, half=half, eps=0.05, halvings=2, max_iter=18, **(SCORED if half else {}))
    for cols, wide in ((515, False), (2101, False), (4101, False), (517, True))
    for half in (False, True)
]
MORE_SOLVES = [
    SolveCase(1, 7, blocks=1, half=True),
    SolveCase(7, 129, blocks=3, half=True, **SCORED),
    SolveCase(129, 7, blocks=3, half=True, **SCORED),
    SolveCase(33, 1023, half=True, **SCORED),
    SolveCase(1, 1, blocks=1, wide=True),
    SolveCase(1, 7, blocks=1, wide=True, half=True),
    SolveCase(129, 7, blocks=3, wide=True),
    SolveCase(7, 129, blocks=3, wide=True, half=True, **SCORED),
    SolveCase(33, 1023, wide=True),
    *STEPS,
]
