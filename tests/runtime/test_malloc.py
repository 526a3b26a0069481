"""Freed memory is kept by commands that train; the library leaves the allocator of its process alone."""

from __future__ import annotations

import mmap
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geoflow_fast.runtime import malloc
from tests.jobs.processes import run_geoflow

ROOT = Path(__file__).parents[2]
LARGE, BLOCKS = 1 << 29, 32
"""Bytes, more than what a C library keeps by itself, and in how many tensors they are."""
WATCHED = """
import ctypes

class Watched(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "mallopt":
            print(name)
        return super().__getattr__(name)

ctypes.CDLL = Watched
"""
TRAINED = """
import geoflow_fast as gf
image, text, _ = gf.worlds.ConceptWorld().sample(64)
config = gf.TrainConfig(steps=2, batch_size=16, warmup_steps=1, val_every=2)
pairs = gf.EmbeddingPairs.from_arrays(image, text)
gf.train(gf.GeoFlow(gf.GeoFlowConfig.tiny(24, 24)), pairs, config, progress=False)
"""
KEPT = """
from geoflow_fast.runtime.malloc import keep_freed_memory
keep_freed_memory()
"""


@pytest.fixture
def untold(monkeypatch):
    """An environment in which the user has said nothing about memory."""
    for name in malloc.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def in_a_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fresh_pages() -> int:
    """Pages that tensors of LARGE bytes in all, which come and go, take from the system."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.empty(LARGE // BLOCKS // 4).fill_(1.0) for _ in range(BLOCKS)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def keep_for_good():
    few = 0.05 * LARGE / mmap.PAGESIZE
    fresh_pages()
    assert fresh_pages() > few
    malloc.keep_freed_memory()
    fresh_pages()
    assert all(fresh_pages() < few for _ in range(3))


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told to keep freed memory")
@pytest.mark.usefixtures("untold")
def test_freed_memory_is_kept():
    """In a process of its own, whose heap is not in pieces."""
    in_a_process("from tests.runtime import test_malloc; test_malloc.keep_for_good()")


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
@pytest.mark.usefixtures("untold")
def test_only_who_asks_changes_the_allocator(monkeypatch):
    assert in_a_process(WATCHED + TRAINED) == ""
    assert "mallopt" in in_a_process(WATCHED + KEPT)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert in_a_process(WATCHED + KEPT) == ""


@pytest.mark.parametrize(("command", "wrong"), [("train", {"pairs": "nowhere"}), ("demo", {"steps": 0})])
def test_commands_that_train_keep_freed_memory(monkeypatch, tmp_path, command, wrong):
    asked: list[None] = []
    monkeypatch.setattr(malloc, "keep_freed_memory", lambda: asked.append(None))
    assert run_geoflow(monkeypatch, command, out=tmp_path / "out", **wrong) == 2
    assert len(asked) == 1
