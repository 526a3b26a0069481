"""Widths of vector stores: compiled code writes whole vectors into rows that need not be a multiple of a vector wide.

Every kernel runs at every width from one number to two vectors and one more, on memory that is filled with NaN before
it is handed out, and must give what plain torch gives in float64. `tests/ops/test_targets.py` repeats this for the
other instruction sets of the processor, `tests/reliability/sanitize.py` under a build that fills scratch memory too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

from geoflow_fast import ops
from geoflow_fast.ops import extension
from tests.ops.test_native_fuzz import (
    check_gallery,
    check_interpolant,
    check_network_rows,
    check_solver_steps,
    check_transport,
    close,
    unit,
)

pytestmark = pytest.mark.skipif(extension.missing() is not None, reason="needs the compiled extension")
WIDTHS = range(1, 2 * 16 + 2)
"""Up to two vectors of the widest instruction set, and one number more."""
PANEL = 96 + 5
"""Items of a full panel of the gallery's kernels, and some more."""


@pytest.fixture(autouse=True)
def _memory_full_of_nan() -> Iterator[None]:
    """What torch or compiled code allocates is full of NaN and the like, so that what a kernel leaves unwritten or
    reads too far shows."""
    extension.loaded().fill_results(True)
    filled, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, True
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    extension.loaded().fill_results(False)
    torch.use_deterministic_algorithms(was)
    deterministic.fill_uninitialized_memory = filled


def divided(width: int) -> list[tuple[int, int]]:
    """All numbers of queries and of samples of each that make a row of products `width` wide."""
    return [(queries, width // queries) for queries in range(1, width + 1) if width % queries == 0]


def test_memory_is_full_of_nan():
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_galleries(stored, biased):
    for width in WIDTHS:
        for queries, draws in divided(width):
            check_gallery("float32", queries, draws, PANEL, 19, 5, "gap", "gap", biased, width, stored)


@pytest.mark.skipif(extension.missing_bfloat16() is not None, reason=str(extension.missing_bfloat16()))
@pytest.mark.parametrize("biased", [False, True])
def test_galleries_in_bfloat16(biased):
    for width in WIDTHS:
        for queries, draws in divided(width):
            check_gallery("bfloat16", queries, draws, PANEL, 19, 5, "gap", "gap", biased, width)


@pytest.mark.parametrize("changed", ["queries", "items", "dim", "top_k"])
def test_searches(changed):
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        size = {"queries": 3, "items": 40, "dim": 21, "top_k": 1} | {changed: width}
        queries, items = unit(generator, size["queries"], size["dim"]), unit(generator, size["items"], size["dim"])
        for stored in (torch.float32, torch.float16, torch.bfloat16):
            rows = items.to(stored)
            score, index = ops.gallery_search(queries, rows, size["top_k"], "cpu")
            cosine = queries.double() @ rows.double().T
            close(score, cosine.topk(size["top_k"]).values, 1e-6)
            close(cosine.gather(1, index), cosine.topk(size["top_k"]).values, 1e-6)


@pytest.mark.skipif(extension.missing_int8() is not None, reason=str(extension.missing_int8()))
@pytest.mark.parametrize("changed", ["queries", "dim", "top_k", "rest"])
def test_searches_by_codes(changed):
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        size = {"queries": 3, "dim": 21, "top_k": 3, "rest": 0} | {changed: width}
        rows = unit(generator, 4096 + size["rest"], size["dim"])
        queries = unit(generator, size["queries"], size["dim"])
        by_codes = ops.gallery_search(queries, rows, size["top_k"], codes=ops.RowCodes.encode(rows))
        for got, wanted in zip(by_codes, ops.gallery_search(queries, rows, size["top_k"]), strict=True):
            assert torch.equal(got, wanted), size


@pytest.mark.parametrize("changed", ["rows", "cols", "dim"])
def test_transport(changed):
    for width in WIDTHS:
        size = {"rows": 5, "cols": 21, "dim": 6} | {changed: width}
        check_transport(size["rows"], size["cols"], size["dim"], "gap", width)


@pytest.mark.parametrize("gated", [False, True])
def test_network_rows(gated):
    for width in WIDTHS:
        check_network_rows(2, 3, width, "gap", "gap", gated, width)


@pytest.mark.parametrize("guided", [False, True])
def test_solver_steps(guided):
    for width in WIDTHS[1:]:
        for more in (False, True):
            check_solver_steps(3, width, ["gap"] * 5, guided, more, width)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("layout", ["whole", "gap", "offset"])
def test_interpolants(double, layout):
    for width in WIDTHS[1:]:
        check_interpolant(7, width, width + 1, layout, layout, double, True, width)
