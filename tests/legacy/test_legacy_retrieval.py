"""Files that an earlier release wrote for retrieval: they are still read, and give the numbers they gave then."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.retrieval import marginals
from tests.legacy.recorded import as_recorded

FILES = Path(__file__).parent / "files"
COLUMNS = json.loads((FILES / "expected.json").read_text())["columns"]
"""By command and column, what the earlier release gave for the rows of `queries.npy`."""


@pytest.fixture
def flow() -> gf.GeoFlow:
    return gf.GeoFlow.from_pretrained(FILES / "model")


@pytest.fixture
def queries() -> torch.Tensor:
    return torch.from_numpy(open_rows(FILES / "queries.npy", "queries")[np.arange(24)])


@pytest.fixture
def gallery(tmp_path) -> Path:
    """A copy of the gallery with the marginals beside it."""
    shutil.copytree(FILES / "gallery.npy.geoflow_index", tmp_path / "gallery.npy.geoflow_index")
    return Path(shutil.copy(FILES / "gallery.npy", tmp_path))


def check_columns(command: str, result: object) -> None:
    """Compares every column except the numbers of the queries: integers exactly, the others to 1e-5.

    The bound on the risk is infinitely steep in the entropy where all items are equally likely, so it is compared by
    the entropy that it stands for.
    """
    columns = {name: values for name, values in COLUMNS[command].items() if name != "query"}
    for name, values in columns.items():
        expected, column = torch.tensor(values, dtype=torch.float64), getattr(result, name).cpu()
        if column.is_floating_point():
            if name == "risk_lower_bound":
                gallery = np.load(FILES / "gallery.npy", mmap_mode="r")
                choices = result.index.shape[1] + 1 if isinstance(result, gf.Reranked) else len(gallery)
                expected, column = (fano(x, choices) for x in (expected, column))
            torch.testing.assert_close(column.double(), expected, atol=1e-5, rtol=0)
        else:
            assert torch.equal(column, expected.long()), name


def fano(risk: torch.Tensor, choices: int) -> torch.Tensor:
    """The largest entropy, in nats, that a choice among so many items has at this risk."""
    return torch.special.entr(risk) + torch.special.entr(1 - risk) + risk * math.log(choices - 1)


def test_scores_are_the_same(flow, queries, gallery):
    settings = {"n_samples": 8, "n_steps": 3, "seed": 2}
    check_columns("entropy", gf.RetrievalEntropy.fast(flow, gallery, **settings)(queries))


def test_stored_marginals_are_used(flow, queries, gallery, monkeypatch):
    reference = torch.from_numpy(np.load(FILES / "run_text.npy")[40:60])
    monkeypatch.setattr(marginals, "log_mean_scores", lambda *_: pytest.fail("the marginals are computed again"))
    settings = {"n_samples": 8, "n_steps": 3, "seed": 2, "posterior": "bayes", "reference": reference}
    scorer = gf.RetrievalEntropy.fast(flow, gallery, **settings)
    check_columns("bayes", scorer(queries))
    job = json.loads((FILES / "bayes.parquet.blocks" / "job.json").read_text())
    assert scorer.settings == {name: job[name] for name in scorer.settings}
    assert list(scorer.settings) == [name for name in job if name in scorer.settings]
    assert scorer.marginal_settings == job["marginals"]


@as_recorded
def test_calibration_is_loaded(flow, queries, gallery):
    reranker = gf.BayesReranker(flow, gallery, direction="t2i", shortlist=12, n_steps=2)
    calibration = reranker.load_calibration(FILES / "model")
    stored = json.loads((FILES / "model" / "rerank_t2i.json").read_text())
    assert list(calibration.weights) == [stored[name] for name in ("alpha", "beta", "outside")]
    assert reranker.made_for == stored["made_for"]
    job = json.loads((FILES / "rerank.parquet.blocks" / "job.json").read_text())
    assert reranker.settings == {name: job[name] for name in reranker.settings}
    check_columns("rerank", reranker(queries))


def test_index_is_loaded(flow, queries):
    rows = torch.from_numpy(np.load(FILES / "gallery.npy"))
    index = gf.GalleryIndex.load(FILES / "index.safetensors", rows)
    built = gf.GalleryIndex.build(rows, width=4)
    assert index.digest == built.digest
    torch.testing.assert_close(index.rows.abs(), built.rows.abs(), atol=1e-6, rtol=0)  # eigenvectors have no sign
    scorer = gf.RetrievalEntropy.fast(flow, gf.Gallery(rows, index, prune="always"), n_samples=8, n_steps=3, seed=2)
    post = scorer(queries)
    expected = torch.tensor(COLUMNS["entropy"]["entropy"]).double()
    assert bool(((post.entropy.double() - expected).abs() <= post.entropy_bound + 1e-5).all())
