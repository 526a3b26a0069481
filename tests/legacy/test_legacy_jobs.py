"""Jobs that the previous release left half finished are continued: their blocks and shards are kept, and the results
agree with those that the previous release itself came to. Where it computed other results, they are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.jobs.density import density_file
from geoflow_fast.jobs.embed import embed_images
from geoflow_fast.jobs.entropy import open_scorer, score_file
from geoflow_fast.jobs.job import Job
from geoflow_fast.jobs.rerank import open_reranker, rerank_file, settle_calibration
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.runtime.parquet import read_columns
from tests.legacy.recorded import as_recorded

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())["columns"]


def entropy(folder: Path, out: Path) -> None:
    scorer = open_scorer(
        folder / "model", folder / "gallery.npy", "t2i", fast=True, device="cpu", n_samples=8, n_steps=3, seed=2
    )
    score_file(scorer, folder / "queries.npy", out, block=8, with_top=True, progress=False)


def bayes(folder: Path, out: Path) -> None:
    reference = torch.from_numpy(np.load(folder / "run_text.npy")[40:60])
    settings = {"n_samples": 8, "n_steps": 3, "seed": 2, "posterior": "bayes", "reference": reference}
    scorer = open_scorer(folder / "model", folder / "gallery.npy", "t2i", fast=True, device="cpu", **settings)
    score_file(scorer, folder / "queries.npy", out, block=8, progress=False)


def density(folder: Path, out: Path) -> None:
    settings = DensitySettings(n_steps=3, n_probes=2)
    density_file(folder / "model", folder / "pairs", out, settings, seed=1, device="cpu", block=64, progress=False)


def rerank(folder: Path, out: Path, *, overwrite: bool = False) -> None:
    reranker = open_reranker(folder / "model", folder / "gallery.npy", "t2i", device="cpu", shortlist=12, n_steps=2)
    settle_calibration(reranker, folder / "model", None, None)
    rerank_file(reranker, folder / "queries.npy", out, block=8, overwrite=overwrite, progress=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(FILES, tmp_path / "files"))


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Collects the first row of every block that a job computes."""
    run, first_rows = Job.run, []

    def recording(job: Job, compute: Callable, **options) -> None:
        def recorded(rows, advance):
            first_rows.append(rows.start)
            return compute(rows, advance)

        run(job, recorded, **options)

    monkeypatch.setattr(Job, "run", recording)
    return first_rows


def check_columns(out: Path, name: str) -> None:
    columns, expected = read_columns(out), EXPECTED[name]
    assert [name for name in columns if not name.startswith("evidence_")] == list(expected)  # those are new
    for name, column in expected.items():
        values = np.stack(columns[name]) if columns[name].dtype == object else columns[name]
        np.testing.assert_allclose(values, column, rtol=1e-5, atol=1e-5, err_msg=name)


@as_recorded
def test_half_finished_shortlists_of_the_previous_release_are_refused(folder, computed):
    """Copies of an item now count as one, so that blocks of both releases would not fit together. This gallery has no
    copies, so the results agree."""
    out = folder / "rerank.parquet"
    with pytest.raises(ValueError, match=r"blocks of another release.*ask to overwrite"):
        rerank(folder, out)
    assert computed == []
    rerank(folder, out, overwrite=True)
    assert computed == [0, 8, 16]
    check_columns(out, "rerank")


@pytest.mark.parametrize(("job", "left"), [(entropy, [8, 16]), (bayes, [8, 16]), (density, [64, 128])])
def test_half_finished_jobs_of_the_previous_release_are_continued(folder, computed, job, left):
    out = folder / f"{job.__name__}.parquet"
    job(folder, out)
    assert computed == left
    check_columns(out, job.__name__)
    assert not out.with_name(f"{out.name}.blocks").exists()
    # The bayes job finds its marginals in the file that the previous release kept.
    assert len(list((folder / "gallery.npy.geoflow_index").glob("*.safetensors"))) == 1


def test_a_finished_file_of_the_previous_release_is_recognised(folder, computed):
    before = (folder / "finished.parquet").read_bytes()
    entropy(folder, folder / "finished.parquet")
    assert computed == []
    assert (folder / "finished.parquet").read_bytes() == before


def test_a_half_finished_folder_of_embeddings_is_continued(folder):
    class Recording(ColourEncoder):
        images = 0

        def encode_images(self, images):
            self.images += len(images)
            return super().encode_images(images)

    pictures = sorted(path for path in (folder / "pictures").rglob("*") if path.is_file())
    for path in pictures:  # the facts of the job hold the times of change
        os.utime(path, (1_700_000_000, 1_700_000_000))
    count = sum(path.suffix != ".txt" for path in pictures)
    old = np.load(folder / "embedded.shards" / "img_emb" / "img_emb_0.npy")

    encoder = Recording()
    summary = embed_images(
        folder / "pictures", encoder, folder / "embedded", shard_rows=4, batch_size=2, progress=False
    )

    assert summary.images == count
    assert encoder.images == count - len(old) == count - 4
    np.testing.assert_array_equal(np.load(folder / "embedded" / "img_emb" / "img_emb_0.npy"), old)
    assert not (folder / "embedded.shards").exists()
    fresh = embed_images(
        folder / "pictures", ColourEncoder(), folder / "fresh", shard_rows=4, batch_size=2, progress=False
    )
    assert fresh == summary
    continued, anew = (gf.EmbeddingPairs.open(folder / name) for name in ("embedded", "fresh"))
    for a, b in zip(continued[np.arange(len(anew))], anew[np.arange(len(anew))]):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
