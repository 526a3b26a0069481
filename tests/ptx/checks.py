"""The checks of tests/interpreter against float64, by kernel, for the machine that runs compiled PTX."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.interpreter import test_kernels as kernels
from tests.interpreter import test_segments as segments

HALF = torch.bfloat16
Check = Callable[[int, int], object]

# Of `rows` rows of `width` entries, as far as a kernel leaves the choice. A norm of one entry is the rounding error of
# its mean over the root of eps: what `div.full` may be off, times a thousand.
ROW_KERNELS: dict[str, Check] = {
    "tangent_step": lambda rows, width: kernels.check_tangent_step(kernels.KERNELS, rows, max(width, 2)),
    "tangent_stage": lambda rows, width: kernels.check_tangent_stage(kernels.KERNELS, rows, max(width, 2)),
    "tangent_ab2": lambda rows, width: kernels.check_tangent_ab2(kernels.KERNELS, rows, max(width, 2)),
    "masked_interpolant": lambda rows, width: kernels.check_interpolant(kernels.KERNELS, rows, (max(width, 2), 5)),
    "bad rows": lambda _rows, _width: kernels.check_bad_row(kernels.KERNELS),
    "counter_noise": lambda _, width: kernels.test_counter_noise_is_that_of_the_reference(max(width, 2), True),
    "unit_rows": lambda _, width: kernels.test_unit_rows_are_those_of_the_reference(width, torch.float16),
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
    "flow_loss": lambda rows, width: kernels.check_flow_loss(kernels.KERNELS, rows, (width, 3)),
    "segment_adaln": lambda rows, width: segments.test_adaln_of_segments(rows, width, HALF, True),
    "segment_gate_adaln": lambda rows, width: segments.test_gates_and_adaln_of_segments(
        rows, 3 * -(-width // 3), 3, HALF
    ),
    "segment_swiglu": lambda rows, width: segments.test_swiglu_of_segments(rows, width, torch.float32),
    "tangent_probes": lambda rows, width: segments.test_probes(rows, max(width, 2), 2, "aligned"),
    "probe_traces": lambda rows, width: segments.test_traces(rows, max(width, 2), 2, True, True, torch.float32),
}

# The float32 rows of all but the exact one are split into bfloat16 parts.
GALLERY: dict[str, Callable[[], object]] = {
    "few, bfloat16": lambda: kernels.check_gallery(kernels.KERNELS, "few", dtype=HALF),
    "few, biased": lambda: kernels.check_gallery(kernels.KERNELS, "few", bias=True),
    "some": lambda: kernels.check_gallery(kernels.KERNELS, "some"),
    "slim": lambda: kernels.check_gallery(kernels.KERNELS, "slim"),
    "slim, float16": lambda: kernels.check_gallery(kernels.KERNELS, "slim", dtype=torch.float16),
    "exact": lambda: kernels.check_gallery(kernels.KERNELS, "exact"),
    "exact, kappa of 1e5": lambda: kernels.check_gallery(kernels.KERNELS, "exact", kappa=1e5, items=70, bias=True),
    "one of everything": lambda: kernels.check_gallery(kernels.KERNELS, "slim", 1, 1, 1, 2, 12.0, 1, 1),
    "129 items, 7 wide": lambda: kernels.check_gallery(kernels.KERNELS, "few", 2, 8, 129, 7, 12.0, 5, 3),
    "1023 items, 129 wide": lambda: kernels.check_gallery(
        kernels.KERNELS, "few", 2, 7, 1023, 129, 20.0, 5, 2, dtype=HALF
    ),
    "scores alone": lambda: kernels.test_item_marginals_in_the_kernels(),
    "equal items": lambda: kernels.test_gallery_keeps_equal_items_in_order(),
}
