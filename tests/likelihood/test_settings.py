"""Settings of a log-density: what their defaults stand for, how they unpack, and which old keywords still work."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import geoflow_fast as gf
from tests.likelihood.helpers import random_flow, random_pairs, seeded


@pytest.mark.parametrize(
    ("options", "probe", "orthogonal"),
    [
        ({}, "aligned", "none"),
        ({"orthogonal": "none"}, "aligned", "none"),
        ({"orthogonal": "probes"}, "gaussian", "probes"),
        ({"redraw": False}, "gaussian", "steps"),
        ({"shared": True}, "gaussian", "steps"),
        ({"probe": "gaussian"}, "gaussian", "steps"),
        ({"probe": "rademacher"}, "rademacher", "none"),
    ],
)
def test_probes_that_are_not_chosen_follow_from_the_other_settings(options, probe, orthogonal):
    settings = gf.DensitySettings(**options)
    assert (settings.probe_kind, settings.orthogonal_to) == (probe, orthogonal)
    assert dataclasses.replace(gf.DensitySettings(), **options) == settings


def test_facts_are_the_ten_that_earlier_releases_wrote():
    facts = {
        "n_steps": 10,
        "n_probes": 1,
        "solver": "midpoint",
        "divergence": "hutchinson",
        "probe": "aligned",
        "redraw": True,
        "orthogonal": "none",
        "tangents": "separate",
        "grid": "uniform",
        "shared": False,
    }
    assert list(gf.DensitySettings(memory=2**20).facts().items()) == list(facts.items())
    assert gf.DensitySettings(shared=True).facts() == {
        **facts, "probe": "gaussian", "orthogonal": "steps", "shared": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("n_probes must be an integer, got True", {"n_probes": True}),
        ("n_steps must be an integer, got True", {"n_steps": True}),
        ("n_steps must be an integer, got 2.0", {"n_steps": 2.0}),
        ("memory must be at least 1, got 0", {"memory": 0}),
        ("memory must be an integer, got 1.5", {"memory": 1.5}),
        ("probe must be", {"probe": "uniform"}),
        ("tangents must be", {"tangents": "both"}),
        ("grid must be", {"grid": "log"}),
        ("needs probe='gaussian', got 'rademacher'", {"orthogonal": "steps", "probe": "rademacher"}),
        ("needs probe='gaussian', got 'aligned'", {"orthogonal": "steps", "probe": "aligned"}),
        ("needs redraw=True", {"redraw": False, "probe": "aligned"}),
        ("and shared=False", {"shared": True, "probe": "aligned"}),
        ("orthogonal must be", {"orthogonal": "all"}),
    ],
)
def test_bad_settings(message, options):
    with pytest.raises(TypeError if "integer" in message else ValueError, match=message):
        gf.DensitySettings(**options)


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("settings", [gf.PAPER_DENSITY, gf.FAST_DENSITY])
@pytest.mark.parametrize("call", [gf.log_density, gf.epistemic])
def test_settings_unpack_into_keywords(call, settings):
    """The keywords that follow override them, as in the object itself."""
    flow, pair = random_flow(), random_pairs(3)
    unpacked = call(flow, *pair, generator=seeded(), **{**settings, "n_steps": 2})
    passed = call(flow, *pair, generator=seeded(), settings=dataclasses.replace(settings, n_steps=2))
    if call is gf.epistemic:
        unpacked, passed = unpacked.score, passed.score
    assert torch.equal(unpacked, passed)
    assert (settings["solver"], settings["grid"]) == (settings.solver, settings.grid)


def test_keywords_of_earlier_releases_still_work():
    flow, pair = random_flow(), random_pairs(3)
    old = {"probe": "gaussian", "redraw": False, "orthogonal": None, "tangents": "combined", "grid": "late"}
    settings = gf.DensitySettings(n_steps=2, **old)
    for call, more in ((gf.log_density, {"shared": True}), (gf.epistemic, {"divergence": "hutchinson"})):
        with pytest.warns(DeprecationWarning, match="is deprecated") as warned:
            by_keyword = call(flow, *pair, n_steps=2, generator=seeded(), memory=2**20, **old, **more)
        assert {record.filename for record in warned} == {__file__}
        by_settings = call(flow, *pair, generator=seeded(), settings=dataclasses.replace(settings, **more))
        if call is gf.epistemic:
            by_keyword, by_settings = by_keyword.score, by_settings.score
        assert torch.equal(by_keyword, by_settings)
    with pytest.warns(DeprecationWarning, match="grid"):
        steps = gf.suggest_steps(flow, *pair, 0.5, generator=seeded(), grid="early")
    assert steps == gf.suggest_steps(flow, *pair, 0.5, generator=seeded(), settings=gf.DensitySettings(grid="early"))


@pytest.mark.parametrize("call", [gf.log_density, gf.epistemic, gf.suggest_steps])
def test_calls_have_at_most_twelve_parameters(call):
    assert len([name for name in inspect.signature(call).parameters if name != "deprecated"]) <= 12
