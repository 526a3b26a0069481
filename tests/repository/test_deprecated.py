"""What an earlier release allowed still works for one more release, with a warning that says what to use instead."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.jobs.entropy import ScoreSummary


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(12, 8), dim=-1)


@pytest.fixture
def square_flow() -> gf.GeoFlow:
    return gf.GeoFlow(gf.GeoFlowConfig(8, 8, hidden=16, depth=1)).eval()


def test_the_divergence_of_epistemic_may_be_its_seventh_argument(square_flow, rows):
    expected = gf.epistemic(square_flow, rows, rows, n_steps=2, settings=gf.DensitySettings(divergence="exact"))
    with pytest.warns(DeprecationWarning, match="divergence"):
        scored = gf.epistemic(square_flow, rows, rows, 2, 1, "midpoint", "exact")
    torch.testing.assert_close(scored.score, expected.score)


@pytest.mark.parametrize("name", ["n_samples", "noise", "solve", "index", "prune"])
def test_settings_of_a_scorer_are_still_its_attributes(square_flow, rows, name):
    scorer = gf.RetrievalEntropy.fast(square_flow, rows)
    homes = {"solve": scorer.sampling, "index": scorer.gallery.index, "prune": scorer.gallery.prune}
    with pytest.warns(DeprecationWarning, match=rf"RetrievalEntropy\.{name} is deprecated"):
        value = getattr(scorer, name)
    assert value == (homes[name] if name in homes else getattr(scorer.sampling, name))


def test_the_density_settings_of_a_reranker_are_still_called_solve(square_flow, rows):
    reranker = gf.BayesReranker(square_flow, rows)
    with pytest.warns(DeprecationWarning, match=r"BayesReranker\.density"):
        assert reranker.solve is reranker.density
    with pytest.raises(AttributeError):
        reranker.nonsense  # noqa: B018


def test_settings_are_mappings_of_keywords(square_flow, rows):
    assert list(gf.FAST_DENSITY) == ["n_steps", "n_probes", "solver", "settings"]
    assert "n_steps" in gf.FAST_DENSITY
    assert gf.PAPER_DENSITY["probe"] == "rademacher"
    assert dict(gf.FAST_SAMPLING)["n_samples"] == 40
    unpacked = gf.log_density(square_flow, rows, rows, generator=torch.manual_seed(0), **gf.FAST_DENSITY)
    passed = gf.log_density(square_flow, rows, rows, generator=torch.manual_seed(0), settings=gf.FAST_DENSITY)
    assert torch.equal(unpacked, passed)
    assert len({gf.FAST_DENSITY, dataclasses.replace(gf.FAST_DENSITY)}) == 1


def test_suggest_steps_takes_settings_but_no_number_of_steps(square_flow, rows):
    assert gf.suggest_steps(square_flow, rows, rows, tolerance=50.0, **gf.FAST_DENSITY) >= 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_steps'"):
        gf.suggest_steps(square_flow, rows, rows, n_steps=4)


def test_a_summary_of_scores_has_its_earlier_name():
    summary = ScoreSummary(3, 5, {}, {}, half_or_more=0.25, mean_risk_lower_bound=0.1)
    with pytest.warns(DeprecationWarning, match="use half_or_more"):
        assert summary.confident == 0.25


def test_a_retrieval_task_takes_the_name_of_a_direction(rows):
    made = gf.evaluation.retrieval.RetrievalSet.of(gf.EmbeddingPairs.from_arrays(rows, rows), "t2i")
    assert dataclasses.replace(made, direction="i2t").direction is gf.Direction.I2T
    with pytest.raises(ValueError, match="direction must be one of"):
        dataclasses.replace(made, direction="joint")
