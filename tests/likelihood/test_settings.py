"""Settings of a log-density: what their defaults stand for, and which values are refused."""

from __future__ import annotations

import inspect

import pytest

import geoflow_fast as gf


@pytest.mark.parametrize(
    ("options", "learns"),
    [({}, True), ({"redraw": False}, False), ({"shared": True}, False), ({"probe": "rademacher"}, False)],
)
def test_probes_learn_where_they_follow_the_path_of_a_row(options, learns):
    assert gf.DensitySettings(**options).learns is learns


def test_facts_are_everything_that_the_numbers_depend_on():
    facts = {
        "n_steps": 10,
        "n_probes": 1,
        "solver": "midpoint",
        "divergence": "hutchinson",
        "probe": "aligned",
        "redraw": True,
        "tangents": "separate",
        "grid": "uniform",
        "shared": False,
        "precision": "float32",
    }
    assert list(gf.DensitySettings().facts().items()) == list(facts.items())
    assert gf.DensitySettings(shared=True).facts() == {**facts, "shared": True}


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("n_probes must be an integer, got True", {"n_probes": True}),
        ("n_steps must be an integer, got True", {"n_steps": True}),
        ("n_steps must be an integer, got 2.0", {"n_steps": 2.0}),
        ("probe must be one of aligned, rademacher, got", {"probe": "gaussian"}),
        ("tangents must be", {"tangents": "alternating"}),
        ("grid must be", {"grid": "log"}),
    ],
)
def test_bad_settings(message, options):
    with pytest.raises(TypeError if "integer" in message else ValueError, match=message):
        gf.DensitySettings(**options)


@pytest.mark.parametrize("call", [gf.log_density, gf.epistemic])
def test_calls_have_at_most_twelve_parameters(call):
    assert len(inspect.signature(call).parameters) <= 12
