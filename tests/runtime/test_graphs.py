"""Solves and training steps that are captured and replayed: when, of which calls, why not, and that the results are
those of the calls themselves. The GPU is played by the CPU (`tape.py`)."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import math
import pickle
import threading
from collections.abc import Callable

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.directions import CONDITIONAL, DIRECTIONS, Direction
from geoflow_fast.flow.sampling import StartingPoints, sample_conditional
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime import graphs
from geoflow_fast.runtime.graphs import Graphs
from tests.likelihood.helpers import random_flow
from tests.runtime.tape import GraphsOnCpu, StandIns
from tests.training.test_training import CONFIG, new_flow, new_run


@pytest.fixture
def gpu(monkeypatch) -> GraphsOnCpu:
    return GraphsOnCpu(monkeypatch)


def pairs(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, text = (sample_uniform(rows, d, generator=generator) for d in (6, 5))
    return image, text


# ---- when ----------------------------------------------------------------------------------------------------------


def test_the_second_call_of_a_kind_is_captured(gpu):
    kept, made = Graphs(), []

    def make():
        made.append(1)
        return lambda x: 2 * x

    assert kept.replay("kind", make, torch.ones(3)) is None
    assert "first call of its kind" in kept.reason
    assert not made  # a single call costs no memory either
    for number in range(3):
        x = torch.full((3,), float(number))
        assert torch.equal(kept.replay("kind", make, x), 2 * x)
        assert kept.reason is None
    assert gpu.events == ["captured", "replayed", "replayed", "replayed"]
    assert len(made) == 1


def test_reasons_on_a_machine_without_a_gpu():
    assert graphs.unsuitable(torch.ones(2)) == "the tensors are not on a GPU"
    flow = random_flow(torch.float32)
    flow.captured("kind", lambda _: torch.square, "float32", 1)(torch.ones(2))
    assert flow.graphs.reason == "the tensors are not on a GPU"


def test_training_mode_is_a_reason(gpu):
    flow = random_flow(torch.float32).train()
    for _ in range(3):
        flow.captured("kind", lambda _: torch.square, "float32", 1)(torch.ones(2))
    assert "training mode" in flow.graphs.reason
    assert gpu.events == []


def test_a_capture_that_fails_is_told_and_not_tried_again(gpu, caplog):
    def waits(x):
        return x * float(x.sum())

    flow = random_flow(torch.float32)
    run = flow.captured("kind", lambda _: waits, "float32", 1)
    with caplog.at_level(logging.WARNING):
        results = [run(torch.full((2,), float(k))) for k in range(4)]
    assert [x.tolist() for x in results] == [[2.0 * k * k] * 2 for k in range(4)]
    assert "not permitted when stream is capturing" in flow.graphs.reason
    assert len(caplog.records) == 1
    assert gpu.events == []


def test_only_a_few_kinds_are_kept(gpu):
    kept = Graphs()
    for kind in range(20):
        for _ in range(2):
            kept.replay(kind, lambda: torch.square, torch.ones(2))
    assert len(kept._graphs) == graphs.KEPT
    assert len(kept._seen) <= graphs.KEPT
    assert gpu.events.count("captured") == 20


def test_weights_and_surroundings_that_change_make_another_kind(gpu, monkeypatch):
    flow, before = random_flow(torch.float32), graphs.surroundings

    def call():
        flow.captured("kind", lambda _: torch.square, "float32", 1)(torch.ones(2))
        return flow.graphs.reason

    assert call() == graphs.FIRST
    assert call() is None
    flow.refresh()
    assert call() == graphs.FIRST
    monkeypatch.setattr(graphs, "surroundings", lambda: "TF32")
    assert call() == graphs.FIRST
    monkeypatch.setattr(graphs, "surroundings", before)
    assert call() is None
    assert gpu.events.count("captured") == 2


def test_what_surrounds_a_call():
    before = graphs.surroundings()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert graphs.surroundings() != before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert graphs.surroundings() == before


@pytest.mark.usefixtures("gpu")
def test_copies_of_a_flow_have_no_graphs():
    flow = gf.GeoFlow(gf.GeoFlowConfig(4, 4, hidden=8, depth=1, heads=2))
    for _ in range(2):
        flow.graphs.replay("kind", lambda: torch.square, torch.ones(2))
    assert flow.graphs._graphs
    for twin in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        assert not twin.graphs._graphs
        assert not twin.graphs._seen


@pytest.mark.usefixtures("gpu")
def test_threads_take_turns():
    """Two threads that share a flow must not write to the inputs of a graph at the same time."""
    kept, inside, overlaps = Graphs(), threading.Lock(), []

    def slow(x):
        overlaps.append(not inside.acquire(blocking=False))
        try:
            for _ in range(20):
                x = x + 1
            return x
        finally:
            if not overlaps[-1]:
                inside.release()

    for _ in range(2):
        kept.replay("kind", lambda: slow, torch.zeros(2))
    wrong: list[float] = []

    def work(start: float) -> None:
        for number in range(50):
            x = torch.full((2,), start + number)
            y = kept.replay("kind", lambda: slow, x)
            if not torch.equal(y, x + 20):
                wrong.append(float(x[0]))

    threads = [threading.Thread(target=work, args=(1000.0 * k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any(overlaps)


# ---- a graph owns what it touches ------------------------------------------------------------------------------------


def captured_calls(flow: gf.GeoFlow) -> dict[str, Callable[[], object]]:
    """Every kind of call that is captured."""
    image, text = pairs(9, 0)
    entropy = gf.RetrievalEntropy(flow, image, direction="t2i", n_samples=3, n_steps=2)
    return {
        "samples": lambda: gf.sample(flow, text=text, n_samples=3, n_steps=2),
        "guided by noise of their own": lambda: gf.sample(flow, image=image, n_samples=3, n_steps=2, solver="ab2"),
        "pairs": lambda: gf.sample(flow, n_samples=3, n_steps=2),
        "bfloat16": lambda: gf.sample(flow, text=text, settings=gf.SamplingSettings(3, 2, precision="bfloat16")),
        "density": lambda: gf.log_density(flow, image, text, n_steps=2),
        "epistemic": lambda: gf.epistemic(flow, image, text, n_steps=2),
        "entropy": lambda: entropy(text),
        "given points known by number": lambda: density_estimates(
            flow, image, text, (Direction.T2I,), gf.DensitySettings(n_steps=2, shared=True), 0, 0, torch.arange(9) // 3
        ),
    }


CALLS = (
    "samples", "guided by noise of their own", "pairs", "bfloat16", "density", "epistemic", "entropy",
    "given points known by number",
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_graph_touches_lives_as_long_as_the_graph(monkeypatch, name):
    """The network that was prepared for it, with shifts and scales, low-precision weights, buffers and tables."""
    capture = graphs.capture
    gpu = GraphsOnCpu(monkeypatch)
    monkeypatch.setattr(graphs, "capture", capture)
    stand_ins = StandIns(monkeypatch)
    flow = random_flow(torch.float32, anchored=True).eval()
    call = captured_calls(flow)[name]
    gpu.capturing = True  # nothing on the host asks for a value
    call()
    call()
    gc.collect()
    assert stand_ins.touched
    for touched in stand_ins.touched:
        assert touched.outside
        assert touched.freed() == 0
    flow.refresh()
    gc.collect()
    assert any(touched.freed() for touched in stand_ins.touched)


def test_what_a_training_step_touches_lives_as_long_as_its_graph(monkeypatch):
    capture = graphs.capture
    gpu = GraphsOnCpu(monkeypatch)
    monkeypatch.setattr(graphs, "capture", capture)
    stand_ins, run = StandIns(monkeypatch), new_run(FIXED)
    gpu.capturing = True
    for step in range(3):
        run.optimise(run.objective.training_batch(step))
    gc.collect()
    assert [touched.freed() for touched in stand_ins.touched] == [0]


# ---- the results are those of the calls themselves -------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        gf.SamplingSettings(7, 3),
        gf.SamplingSettings(3, 2, guidance=0.0, solver="rk4"),
        gf.SamplingSettings(5, 3, solver="ab2", grid="late", precision="bfloat16"),
        gf.SamplingSettings(4, 2, solver="midpoint"),
    ],
    ids=lambda s: s.solver,
)
@pytest.mark.parametrize("direction", CONDITIONAL)
def test_replayed_samples(gpu, monkeypatch, settings, direction):
    """Other queries every time, in chunks of two sizes."""
    monkeypatch.setattr("geoflow_fast.flow.sampling.ROWS_AT_ONCE", 3 * 2 * settings.n_samples)
    flow = random_flow(torch.float32, anchored=True, centre=True)
    width = direction.queries(6, 5)
    start = StartingPoints.draw(settings, flow.flow_dims, direction, torch.Generator().manual_seed(0))
    for call in range(3):
        queries = sample_uniform(8, width, generator=torch.Generator().manual_seed(call))
        gpu.on = False
        expected = sample_conditional(flow, queries, direction, start, settings)
        gpu.on = True
        assert torch.equal(sample_conditional(flow, queries, direction, start, settings), expected)
        assert (flow.graphs.reason is None) == (call > 0)
    assert gpu.events.count("captured") == 2
    assert gpu.events.count("replayed") >= 4


def test_replayed_pairs(gpu):
    flow, settings = random_flow(torch.float32), gf.SamplingSettings(9, 3)
    for call in range(3):
        gpu.on = False
        expected = gf.sample(flow, settings=settings, generator=torch.Generator().manual_seed(call))
        gpu.on = True
        drawn = gf.sample(flow, settings=settings, generator=torch.Generator().manual_seed(call))
        assert all(torch.equal(x, y) for x, y in zip(drawn, expected))
    assert gpu.events == ["captured", "replayed", "replayed"]


DENSITIES = {
    "aligned": gf.DensitySettings(n_steps=3),
    "paper": gf.DensitySettings(n_steps=3, solver="euler", probe="rademacher", tangents="combined"),
    "kept": gf.DensitySettings(n_steps=3, n_probes=2, solver="ab2", redraw=False, grid="early"),
    "exact": gf.DensitySettings(n_steps=2, solver="rk4", divergence="exact"),
    "shared": gf.DensitySettings(n_steps=2, shared=True),
    "bfloat16": gf.DensitySettings(n_steps=2, precision="bfloat16"),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_replayed_densities(gpu, name):
    """Other pairs, seeds and numbers of rows every time, in chunks."""
    directions = (Direction.T2I,) if name in ("exact", "shared") else DIRECTIONS
    settings = DENSITIES[name]
    flow = random_flow(torch.float32, anchored=True)
    for call in range(3):
        image, text = pairs(15, call)
        options = {"seed": 5 + call, "first_row": 100 * call, "batch_size": 4}
        gpu.on = False
        expected = density_estimates(flow, image, text, directions, settings, **options)
        gpu.on = True
        assert torch.equal(density_estimates(flow, image, text, directions, settings, **options), expected)
    assert flow.graphs.reason is None
    assert gpu.events.count("replayed") >= 2


@pytest.mark.parametrize("solver", ["euler", "midpoint"])
def test_a_replay_that_is_not_finite_names_its_row(gpu, solver):
    """Of states that break in the last step, too, which no divergence shows."""
    flow, settings = random_flow(torch.float32), gf.DensitySettings(n_steps=2, solver=solver)
    for call in range(2):
        density_estimates(flow, *pairs(9, call), DIRECTIONS, settings, 0)
    assert gpu.events[-1] == "replayed"
    image, text = pairs(9, 2)
    image[4] = math.nan
    with pytest.raises(ValueError, match="row 104 became non-finite"):
        density_estimates(flow, image, text, DIRECTIONS, settings, 0, first_row=100)


def test_a_state_that_breaks_in_the_last_step_shows_in_the_result(gpu):
    """The base density of the sphere does not look at the point: without more, it would hide it."""
    from geoflow_fast.likelihood import reverse_ode

    flow, settings = random_flow(torch.float32), gf.DensitySettings(n_steps=1, solver="euler")
    gpu.capturing = True  # nothing checks states
    broken = reverse_ode.integrate

    def breaks(*arguments, **options):
        return tuple(x * math.nan for x in broken(*arguments, **options))

    try:
        reverse_ode.integrate = breaks
        result = density_estimates(flow, *pairs(3, 0), (Direction.JOINT,), settings, 0)
    finally:
        reverse_ode.integrate = broken
    assert bool(result.isnan().all())


FIXED = dataclasses.replace(CONFIG, fixed_directions=True, batch_size=18, conditional_share=0.25, ramp_share=0.25)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 3, "ema_decay": None},
        {"precision": "bfloat16"},
    ],
    ids=["adamw", "pieces", "bfloat16"],
)
def test_replayed_training_steps(gpu, changes):
    """Weights, averages and moments are those of steps that were not replayed, over all kinds of batches that the
    curriculum brings: conditional rows alone, the ramp, and the rest."""
    config = dataclasses.replace(FIXED, **changes)
    flow = gf.GeoFlowConfig(6, 5, hidden=16, depth=2, heads=2, layer_scale=0.1, dropout=0.2)
    runs, outcomes = [], []
    for on in (False, True):
        gpu.on = on
        run = new_run(config, new_flow(flow))
        if not on:  # the same rounding of the learning rate
            run.optimizer.param_groups[0]["lr"] = run.learning_rate = torch.tensor(config.lr)
        gpu.host = [] if run.averaged is None else [run.averaged.n_averaged]
        outcomes.append([run.optimise(run.objective.training_batch(step)) for step in range(config.steps)])
        runs.append(run)
    plain, replayed = runs
    assert gpu.events.count("replayed") > config.steps / 2
    assert plain.why_not_captured == "the tensors are not on a GPU"
    for step, ((losses, norm), (own, own_norm)) in enumerate(zip(*outcomes)):
        assert torch.equal(losses, own), step
        assert torch.equal(norm, own_norm), step
    for x, y in zip(plain.module.state_dict().values(), replayed.module.state_dict().values()):
        assert torch.equal(x, y)
    for x, y in zip(plain.module.parameters(), replayed.module.parameters()):
        for key, value in plain.optimizer.state[x].items():
            assert torch.equal(value, replayed.optimizer.state[y][key]), key
    if plain.averaged is not None:
        for x, y in zip(plain.averaged.module.parameters(), replayed.averaged.module.parameters()):
            assert torch.equal(x, y)


@pytest.mark.parametrize("on", [True, False], ids=["replayed", "one by one"])
def test_a_run_with_replayed_steps_is_continued(gpu, tmp_path, on):
    """A checkpoint has nothing of the graphs: the run goes on, also where steps are not replayed."""

    def steps(run, first, last):
        gpu.host = [run.averaged.n_averaged]
        for step in range(first, last):
            run.optimise(run.objective.training_batch(step))
        return run

    whole = steps(new_run(FIXED), 0, 24)
    begun = steps(new_run(FIXED), 0, 13)
    begun.validate()
    begun.save(tmp_path)
    gpu.on = on
    continued = new_run(FIXED)
    continued.load(tmp_path)
    steps(continued, 13, 24)
    for x, y in zip(whole.module.state_dict().values(), continued.module.state_dict().values()):
        if on:
            assert torch.equal(x, y)
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)  # a learning rate in float32 or in float64


@pytest.mark.usefixtures("gpu")
def test_reasons_of_a_run():
    run = new_run(dataclasses.replace(FIXED, fixed_directions=False))
    assert "the number of rows of each direction is drawn in every step" in run.why_not_captured
    assert not run.optimizer.param_groups[0].get("capturable", False)
    assert run.learning_rate is None
