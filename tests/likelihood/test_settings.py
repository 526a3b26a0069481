"""Settings of a log-density: what their defaults stand for, and which values are refused."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import geoflow_fast as gf


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


def test_facts_are_everything_that_the_numbers_depend_on():
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
        "precision": "float32",
    }
    assert list(gf.DensitySettings().facts().items()) == list(facts.items())
    assert gf.DensitySettings(shared=True).facts() == {
        **facts, "probe": "gaussian", "orthogonal": "steps", "shared": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("n_probes must be an integer, got True", {"n_probes": True}),
        ("n_steps must be an integer, got True", {"n_steps": True}),
        ("n_steps must be an integer, got 2.0", {"n_steps": 2.0}),
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


@pytest.mark.parametrize("call", [gf.log_density, gf.epistemic, gf.suggest_steps])
def test_calls_have_at_most_twelve_parameters(call):
    assert len(inspect.signature(call).parameters) <= 12
