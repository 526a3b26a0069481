"""Memory of large results is used again, and never while somebody still reads it."""

from __future__ import annotations

import gc
import mmap
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.runtime import buffers
from geoflow_fast.runtime.buffers import BufferPool
from geoflow_fast.training.batches import Batch
from geoflow_fast.training.flow_matching import FlowMatching

ROOT = Path(__file__).parents[2]
LARGE, BLOCKS = 1 << 29, 32
"""Bytes, more than what a C library keeps by itself, and in how many tensors they are."""
needs_glibc = pytest.mark.skipif(buffers._glibc() is None, reason="only glibc can be told to keep freed memory")


@pytest.fixture
def untold(monkeypatch):
    """An environment in which the user has said nothing about memory."""
    for name in buffers.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


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


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def fresh_pages() -> int:
    """Pages that tensors of LARGE bytes in all, which come and go, take from the system."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.empty(LARGE // BLOCKS // 4).fill_(1.0) for _ in range(BLOCKS)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@needs_glibc
@pytest.mark.usefixtures("untold")
def test_freed_memory_is_kept_for_a_while():
    """In a process of its own, whose heap is not in pieces."""
    command = [sys.executable, "-c", "from tests.runtime import test_buffers; test_buffers.keep_for_a_while()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def keep_for_a_while():
    few = 0.05 * LARGE / mmap.PAGESIZE
    with buffers.freed_memory_kept():
        fresh_pages()
        assert fresh_pages() < few
        with buffers.freed_memory_kept():  # as by another run in the same process
            assert fresh_pages() < few
        assert fresh_pages() < few
        inside = resident()
    assert inside - resident() > 0.7 * LARGE


@pytest.mark.usefixtures("untold")
def test_the_users_choice_of_memory_to_keep_counts(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    with buffers.freed_memory_kept():
        assert not buffers._keepers()._count


@needs_glibc
@pytest.mark.usefixtures("untold")
def test_training_keeps_freed_memory(monkeypatch):
    def losses(objective: FlowMatching, batch: Batch) -> torch.Tensor:
        keepers.append(buffers._keepers()._count)
        return forward(objective, batch)

    forward, keepers = FlowMatching.losses, []
    monkeypatch.setattr(FlowMatching, "losses", losses)
    image, text, _ = gf.worlds.ConceptWorld().sample(64)
    pairs = gf.EmbeddingPairs.from_arrays(image, text)
    config = gf.TrainConfig(steps=3, batch_size=16, warmup_steps=1, val_every=3)
    gf.train(gf.GeoFlow(gf.GeoFlowConfig.tiny(24, 24)), pairs, config, progress=False)
    assert set(keepers) == {1}
    assert not buffers._keepers()._count
