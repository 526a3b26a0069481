"""Which kernels serve a search on a GPU, which is faked."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the CUDA path needs triton")
from geoflow_fast import ops
from tools.launches import counted, fake_rows

ITEMS, WIDTH = 5000, 256


@pytest.mark.parametrize(("top_k", "tiles"), [(10, 1), (100, 1)])
def test_search_is_served_by_the_kernel(top_k, tiles):
    """Rows are read once, as they are, and nothing is sorted in full."""
    with counted() as count:
        score, index = ops.gallery_search(fake_rows(64, WIDTH), fake_rows(ITEMS, WIDTH), top_k)
        assert (score.shape, index.shape, index.dtype) == ((64, top_k), (64, top_k), torch.int64)
    assert count.kernels["triton:gallery_tile_kernel"] == tiles
    assert count.kernels["triton:gallery_split_kernel"] == 0
    assert not count.of("sort")
    assert set(count.flops) == {"tf32"}
