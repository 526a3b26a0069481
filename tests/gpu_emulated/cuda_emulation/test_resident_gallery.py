"""Galleries that stay in the memory of a GPU, which is faked: what is kept between calls, and which kernels serve."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="the CUDA path needs triton")
import geoflow_fast as gf
from geoflow_fast import ops
from geoflow_fast.retrieval import parts as kept_parts
from tools import launches
from tools.launches import counted, fake_rows

ITEMS, WIDTH = 5000, 256


def splits(gallery: gf.Gallery, count: launches.Count, **options: object) -> int:
    """How many arrays of rows a call splits; one is that of the samples."""
    before = count.kernels["triton:gallery_split_kernel"]
    gallery.statistics(fake_rows(4, 8, WIDTH), **{"kappa": 30.0, "top_k": 10, **options})
    return count.kernels["triton:gallery_split_kernel"] - before


def test_the_parts_of_a_gallery_are_kept_from_the_second_call_on():
    with counted() as count:
        gallery = gf.Gallery(fake_rows(ITEMS, WIDTH))
        assert [splits(gallery, count) for _ in range(4)] == [2, 2, 1, 1]
        assert splits(gallery.with_store(None), count) == 1  # the same rows
        assert splits(gallery, count, precision="auto") == 1  # so few samples are not rounded
        assert splits(gallery, count, precision="bfloat16") == 0
        assert splits(gallery, count, kappa=3e4) == 0  # TF32


def test_a_write_to_the_gallery_splits_it_again():
    with counted() as count:
        rows = fake_rows(ITEMS, WIDTH)
        gallery = gf.Gallery(rows)
        assert [splits(gallery, count) for _ in range(3)] == [2, 2, 1]
        rows.neg_()
        assert [splits(gallery, count) for _ in range(3)] == [2, 2, 1]


def test_a_write_that_torch_does_not_count_is_seen_in_some_rows():
    """As one through `.data` would be: the answer of the comparison is made up here."""
    with counted() as count:
        gallery = gf.Gallery(fake_rows(ITEMS, WIDTH))
        assert [splits(gallery, count) for _ in range(3)] == [2, 2, 1]
        with mock.patch.object(kept_parts, "bool", return_value=False, create=True):
            assert splits(gallery, count) == 2
        assert splits(gallery, count) == 1


def test_parts_are_not_kept_where_memory_is_scarce():
    with counted() as count, mock.patch.object(kept_parts, "spare_memory", return_value=15 * ITEMS * WIDTH):
        gallery = gf.Gallery(fake_rows(ITEMS, WIDTH))
        assert [splits(gallery, count) for _ in range(4)] == [2, 2, 2, 2]


def test_a_graph_does_not_contain_parts_that_could_be_freed():
    with counted() as count:
        gallery = gf.Gallery(fake_rows(ITEMS, WIDTH))
        for _ in range(3):
            splits(gallery, count)
        with mock.patch.object(kept_parts, "capturing", return_value=True):
            assert splits(gallery, count) == 2


def test_galleries_that_are_copied_to_the_gpu_block_by_block_keep_nothing():
    with counted() as count:
        gallery = gf.Gallery(torch.nn.functional.normalize(torch.randn(300, WIDTH), dim=1).numpy())
        assert [splits(gallery, count) for _ in range(3)] == [2, 2, 2]


def test_posteriors_of_a_head_read_the_gallery_once():
    assert launches.head(64).bytes < 1.3 * 4 * 1024 * launches.ITEMS


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
