"""Pairs with several captions per image, and a small flow with random weights."""

from __future__ import annotations

import pytest
import torch

import geoflow_fast as gf
from tests.evaluation.helpers import DIM, captioned


@pytest.fixture(scope="package")
def pairs() -> gf.EmbeddingPairs:
    return captioned(40, 3, 0)


@pytest.fixture(scope="package")
def held_out() -> gf.EmbeddingPairs:
    return captioned(90, 3, 1)


@pytest.fixture(scope="package")
def small_flow() -> gf.GeoFlow:
    torch.manual_seed(1)
    flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1, layer_scale=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return flow.eval()
