"""Retrieval gives the same numbers whatever torch's default device is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import geometry


@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_a_foreign_default_device_changes_nothing():
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(8, 8, hidden=16, depth=1, layer_scale=0.5)).eval()
    gallery, queries, image = (geometry.normalize(torch.randn(n, 8)) for n in (100, 5, 80))
    pairs = gf.EmbeddingPairs.from_arrays(image, geometry.normalize(image + 0.1 * torch.randn(80, 8)))

    def results() -> list[Tensor]:
        items = gallery.half().numpy()
        scorer = gf.RetrievalEntropy.fast(flow, items)
        fitted = gf.fit_bandwidth(flow, pairs, guidances=(0.0,), kappas=(1.0, 4.0, 16.0), max_queries=8)
        reranker = gf.BayesReranker(flow, items, shortlist=12, n_steps=2)
        plain = reranker(queries.numpy()).prob
        reranker.calibrate(pairs)
        return [scorer(queries.numpy()).entropy, fitted.table, plain, reranker(queries).prob]

    expected = results()
    torch.set_default_device("meta")
    try:
        assert all(torch.equal(x, y) for x, y in zip(results(), expected, strict=True))
    finally:
        torch.set_default_device(None)
