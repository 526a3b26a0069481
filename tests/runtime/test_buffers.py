"""Memory of large results is used again, and never while somebody still reads it."""

from __future__ import annotations

import gc

import torch

import geoflow_fast as gf
from geoflow_fast.runtime import buffers
from geoflow_fast.runtime.buffers import BufferPool


def test_memory_returns_when_the_last_view_dies():
    pool, like = BufferPool(), torch.empty(700, 600)
    first = pool.empty_like(like)
    assert first.shape == like.shape
    assert first.dtype == like.dtype
    assert first.is_contiguous()
    address, view = first.data_ptr(), first[3:].view(-1)
    assert address % 64 == 0
    del first
    gc.collect()
    assert pool.idle_bytes == 0
    assert pool.empty_like(like).data_ptr() != address
    view.fill_(1.0)
    del view
    gc.collect()
    assert pool.idle_bytes >= 2 * 700 * 600 * 4
    kept = [pool.empty_like(like) for _ in range(3)]
    assert address in {x.data_ptr() for x in kept}
    assert len({x.data_ptr() for x in kept}) == 3


def test_small_and_other_tensors_come_from_torch():
    pool = BufferPool()
    for like in (torch.empty(10, 10), torch.empty(2000, 2000, device="meta"), torch.empty(0, 4)):
        made = pool.empty_like(like)
        assert (made.shape, made.device, made.dtype) == (like.shape, like.device, like.dtype)
    del made
    assert pool.idle_bytes == 0


def test_idle_memory_has_a_limit(monkeypatch):
    monkeypatch.setattr(buffers, "MOST_IDLE_BYTES", 3 << 20)
    pool, like = BufferPool(), torch.empty(1 << 18)
    made = [pool.empty_like(like) for _ in range(5)]
    del made
    gc.collect()
    assert 0 < pool.idle_bytes <= 3 << 20


def test_results_of_the_interpolant_stay_what_they_are():
    torch.manual_seed(0)
    clouds = [gf.geometry.normalize(torch.randn(1500, 256)) for _ in range(4)]
    t, direction = torch.rand(1500), (torch.arange(1500) % 3).to(torch.int8)
    first = gf.ops.masked_interpolant(*clouds, t, direction, backend="cpu")
    copies = [x.clone() for x in first]
    views = [x[1:7] for x in first]
    del first
    for _ in range(4):
        gf.ops.masked_interpolant(*reversed(clouds), t, direction, backend="cpu")
    assert all(torch.equal(view, copy[1:7]) for view, copy in zip(views, copies))
