"""The density of a flow trained on the concept world is compared with the density its data came from."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.evaluation.agreement import DensityAgreement, agreement, densities
from geoflow_fast.worlds import ConceptWorld


def trained_agreement(seed: int, pairs: int, rows: int, **changes) -> dict[str, DensityAgreement]:
    world = ConceptWorld()
    image, text, _ = world.sample(pairs, generator=torch.Generator().manual_seed(100 + seed))
    torch.manual_seed(seed)
    flow = gf.GeoFlow(gf.GeoFlowConfig.tiny())
    config = dataclasses.replace(gf.TrainConfig.tiny(), seed=seed, **changes)
    gf.train(flow, gf.EmbeddingPairs.from_arrays(image, text), config)
    return agreement(densities(world, flow, rows=rows))


def test_a_short_run_learns_the_shape_of_the_density():
    measured = trained_agreement(0, pairs=10_000, rows=200, steps=200, warmup_steps=20, batch_size=128)
    assert measured["joint"].correlation > 0.85, measured
    assert measured["text|image"].correlation > 0.85, measured
    assert measured["image|text"].correlation > 0.75, measured
    assert measured["pmi"].correlation > 0.7, measured
    assert abs(measured["joint"].bias) < 6, measured


@pytest.mark.slow
def test_the_learned_density_is_the_true_one():
    """The paper's coupling of conditional rows ties noise to the condition, which makes its PMI worse. All numbers are
    medians of three seeds."""
    ours = [trained_agreement(seed, 60_000, 1000) for seed in range(3)]
    papers = [trained_agreement(seed, 60_000, 1000, conditional_coupling="paper") for seed in range(3)]
    floor = {"joint": 0.97, "text|image": 0.98, "image|text": 0.96, "image": 0.90, "text": 0.90, "pmi": 0.94}
    for name, least in floor.items():
        assert statistics.median(run[name].correlation for run in ours) >= least, (name, ours)
        assert abs(statistics.median(run[name].bias for run in ours)) <= 1, (name, ours)
    gap = statistics.median(a["pmi"].correlation for a in ours) - statistics.median(
        a["pmi"].correlation for a in papers
    )
    assert gap >= 0.05, (ours, papers)
