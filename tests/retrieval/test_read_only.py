"""Nothing is written into the folder of a gallery: one on a read-only disk calibrates and scores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform
from tests.read_only import read_only
from tests.retrieval.test_evidence import hub_pairs, hub_world


@pytest.fixture
def gallery_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the shards of a gallery; it and the one above are read-only."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, rows in enumerate(hub_world(800, 7)[0].split(500)):
        np.save(folder / f"items_{number}.npy", rows.numpy())
    with read_only(tmp_path):
        yield folder


def test_the_folder_is_read_only(gallery_folder):
    for write in (
        lambda: (gallery_folder / "new").mkdir(),
        lambda: (gallery_folder / "new").write_bytes(b"x"),
        lambda: os.open(gallery_folder.parent / "new", os.O_WRONLY | os.O_CREAT),
        lambda: (gallery_folder / "items_0.npy").rename(gallery_folder / "other.npy"),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            write()


@pytest.fixture(scope="module")
def head() -> gf.PosteriorHead:
    config = gf.HeadConfig(steps=60, batch_size=128, points=2, hidden=32, val_every=20, bank=64)
    return gf.PosteriorHead.fit(hub_pairs(1000, 5), config, k=2)


def rows_of(path: Path) -> torch.Tensor:
    files = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    return torch.from_numpy(np.concatenate([np.load(file) for file in files]))


def assert_same(first: gf.Reranked, second: gf.Reranked) -> None:
    assert torch.equal(first.index, second.index)
    torch.testing.assert_close(first.prob, second.prob, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("source", ["shards", "shards/items_0.npy"])
def test_a_reranker_without_models_calibrates_and_scores(gallery_folder, source):
    queries = sample_uniform(5, 8)
    reranker = gf.BayesReranker(None, gallery_folder.parent / source, shortlist=64)
    reranker.calibrate(hub_pairs(600, 8))
    assert reranker.evidence_names == ("cosine", "hub")
    assert_same(reranker(queries), reranker.with_gallery(rows_of(gallery_folder.parent / source))(queries))


@pytest.mark.parametrize("shortlist_by", ["cosine", "head"])
def test_a_reranker_with_a_head_calibrates_and_scores(gallery_folder, head, shortlist_by):
    queries = sample_uniform(5, 8)
    reranker = gf.BayesReranker(None, gallery_folder, shortlist=64, head=head, shortlist_by=shortlist_by)
    reranker.calibrate(hub_pairs(600, 8))
    assert "head" in reranker.evidence_names
    assert_same(reranker(queries), reranker.with_gallery(rows_of(gallery_folder))(queries))


def test_a_head_scores(gallery_folder, head):
    queries = sample_uniform(5, 8)
    result = gf.RetrievalEntropy(head, gallery_folder)(queries)
    assert torch.equal(result.map_index, gf.RetrievalEntropy(head, rows_of(gallery_folder))(queries).map_index)
