"""Solves that are captured and replayed: when, of which calls, and why not. The GPU is played by the CPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.runtime import graphs
from geoflow_fast.runtime.graphs import Graphs, versions


@pytest.fixture
def captured(monkeypatch) -> list[str]:
    """Lets CPU tensors pass for those of a GPU; a captured solve runs again on the tensors that the graph holds."""
    events: list[str] = []

    def capture(solve, inputs):
        held = [x.clone() for x in inputs]
        events.append("captured")

        def replay(*given):
            for to, x in zip(held, given):
                to.copy_(x)
            events.append("replayed")
            return solve(*held).clone()

        return replay

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "unsuitable", lambda _: None)
    return events


def test_the_second_call_of_a_kind_is_captured(captured):
    kept, made = Graphs(), []

    def make():
        made.append(1)
        return lambda x: 2 * x

    for number in range(4):
        x = torch.full((3,), float(number))
        assert torch.equal(kept.run("kind", None, make, x), 2 * x)
    assert captured == ["captured", "replayed", "replayed", "replayed"]
    assert len(made) == 1
    assert kept.reason is None
    kept.run("other", None, make, torch.ones(3))
    assert "first call of its kind" in kept.reason


def test_a_reason_is_stated(captured, monkeypatch):
    kept = Graphs()
    kept.run("kind", "somebody watches", lambda: torch.square, torch.ones(2))
    assert kept.reason == "somebody watches"
    monkeypatch.undo()
    kept.run("kind", None, lambda: torch.square, torch.ones(2))
    assert kept.reason == "the tensors are not on a GPU"
    assert captured == []


def test_only_a_few_kinds_are_kept(captured):
    kept = Graphs()
    for kind in range(20):
        for _ in range(2):
            kept.run(kind, None, lambda: torch.square, torch.ones(2))
    assert len(kept._graphs) <= graphs.KEPT
    assert captured.count("captured") == 20


def test_weights_that_change_make_another_kind():
    layer = torch.nn.Linear(2, 2)
    before = versions(layer.state_dict().values())
    assert versions(layer.state_dict().values()) == before
    with torch.no_grad():
        layer.weight.add_(1)
    assert versions(layer.state_dict().values()) != before


def test_copies_of_a_flow_have_no_graphs(captured):
    flow = gf.GeoFlow(gf.GeoFlowConfig(4, 4, hidden=8, depth=1, heads=2))
    flow.graphs.run("kind", None, lambda: torch.square, torch.ones(2))
    for twin in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        assert not twin.graphs._solves
    assert captured == []
