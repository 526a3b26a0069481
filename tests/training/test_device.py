"""What a GPU run does otherwise than one on a CPU, as far as it can be seen without a GPU: streams, late reading, noise
by counters, weights in bfloat16."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.runtime.late import LateValues
from geoflow_fast.training.batches import Batch, BatchMaker, OwnStream, tensors_of
from geoflow_fast.training.device_rows import DeviceRows, send
from geoflow_fast.training.flow_matching import FlowMatching
from geoflow_fast.training.half import HalfTwin
from geoflow_fast.training.loop import TrainingDiverged, complete
from tests.samples import randomised
from tests.training.test_training import CONFIG, SHAPE, make, new_flow, new_run, some_pairs


class Stream:
    """A stream that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def record_event(self) -> object:
        event = object()
        self.calls.append(("record", event))
        return event

    def wait_event(self, event: object) -> None:
        self.calls.append(("wait", event))

    def wait_stream(self, stream: object) -> None:
        self.calls.append(("wait", stream))

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait")


def test_memory_of_prefetched_batches_is_kept_for_the_stream_that_reads_it(monkeypatch):
    own, training = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: training)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    recorded: list[tuple[int, object]] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: recorded.append((x.data_ptr(), stream)))
    maker = make(CONFIG)
    made = OwnStream(maker.training, torch.device("cuda"))
    first, second = made.make(0), made.make(1)
    made.hand_over(first)
    assert training.calls == [("wait", own.calls[1][1])]  # the event of the first batch, not of the second
    assert own.calls[0] == ("wait", training)
    assert {address for address, _ in recorded} == {x.data_ptr() for x in tensors_of(first)}
    assert len(tensors_of(first)) == 6
    assert all(stream is training for _, stream in recorded)
    made.hand_over(second)
    assert training.calls[1] == ("wait", own.calls[2][1])


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_late_values_are_waited_for_only_when_asked(monkeypatch):
    events: list[Event] = []

    def record() -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(record_event=record))
    late: LateValues[int] = LateValues(torch.device("cuda"))
    for number in range(4):
        late.put(number, torch.tensor([float(number)]))
    assert list(late.arrived()) == []
    events[0].done = events[2].done = True
    assert [note for note, _ in late.arrived()] == [0]  # in order: 2 comes after 1
    assert [(note, float(x)) for note, x in late.arrived(spared=1)] == [(1, 1.0), (2, 2.0)]
    assert not events[3].done
    assert [note for note, _ in late.arrived(spared=0)] == [3]


def test_a_loss_that_is_read_late_names_its_step_and_leaves_the_best_weights(monkeypatch, tmp_path):
    """As on a GPU, which takes further steps before the host hears of the loss."""
    quiet = dataclasses.replace(CONFIG, steps=8, val_every=4, log_every=50, checkpoint_every=50)
    run, pending = new_run(quiet), []
    monkeypatch.setattr(run.outcomes, "put", lambda *entry: pending.append(entry))
    monkeypatch.setattr(run.outcomes, "arrived", lambda spared=None: list(pending) if spared == 0 else [])
    training_batch = run.objective.training_batch

    def batch_of(step: int) -> Batch:
        batch = training_batch(step)
        return dataclasses.replace(batch, v_image=batch.v_image * math.nan) if step == 5 else batch

    monkeypatch.setattr(run.objective, "training_batch", batch_of)
    with pytest.raises(TrainingDiverged, match="not finite at step 5"):
        complete(run, tmp_path)
    assert run.step > 6
    assert not run.module.training
    assert run.best
    assert all(torch.equal(x, run.best[name]) for name, x in run.module.state_dict().items())


class ForgetsScales(torch.optim.AdamW):
    """An optimiser that does not read what `torch.amp.GradScaler` tells one."""

    def step(self, closure=None):
        for name in ("grad_scale", "found_inf"):
            self.__dict__.pop(name, None)
        return super().step(closure)


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_gradients_are_clipped_whatever_the_optimiser_does(monkeypatch, clip):
    monkeypatch.setattr(torch.optim, "AdamW", ForgetsScales)
    run = new_run(dataclasses.replace(CONFIG, clip=clip))
    _, norm = run.optimise(run.objective.training_batch(0))
    decay = run.optimizer.defaults["betas"][0]
    moments = [run.optimizer.state[p]["exp_avg"] for p in run.module.parameters() if p in run.optimizer.state]
    clipped = float(torch.nn.utils.get_total_norm(moments)) / (1 - decay)
    assert 1e-3 < float(norm) < 1e3
    assert clipped == pytest.approx(min(clip, float(norm)), rel=1e-4)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_on_a_device_are_those_of_the_pairs(monkeypatch, tmp_path, resident, dtype):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    rng = np.random.default_rng(0)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rng.normal(size=(30, 6)), rng.normal(size=(50, 5)))]
    index = rng.integers(0, 30, 50)
    gf.EmbeddingPairs.from_arrays(unit[0].astype(dtype), unit[1].astype(dtype), index).save(tmp_path, dtype=dtype)
    pairs = gf.EmbeddingPairs.open(tmp_path)
    rows = DeviceRows(pairs, torch.device("cpu"), resident=resident)
    chosen = np.array([49, 0, 7, 7, 23])
    sent = send(rows.numbers(chosen), torch.device("cpu"))
    for ours, expected in zip(rows.gather(sent, chosen), pairs[chosen]):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_rows_on_a_device_are_those_of_the_pairs(monkeypatch, resident, size):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    pairs, config = some_pairs(), dataclasses.replace(CONFIG, coupling="independent")
    plain, device = (BatchMaker(new_flow(), pairs, config, size - 1, size) for _ in range(2))
    device.rows = DeviceRows(pairs, torch.device("cpu"), resident=resident)
    for step in (0, 7):
        expected, ours = (maker.training(step) for maker in (plain, device))
        assert len(ours) == len(range(size - 1, config.batch_size, size))
        assert ours.counts == expected.counts
        for name in ("t", "codes", "image", "text", "v_image", "v_text"):
            torch.testing.assert_close(getattr(ours, name), getattr(expected, name), atol=1e-5, rtol=1e-5)


def test_what_is_sent_arrives_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    parts = [torch.arange(7), torch.rand(7), torch.arange(7, dtype=torch.int8), torch.rand(7) < 0.5]
    for ours, expected in zip(send(parts, torch.device("cpu")), parts):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)
    assert [x.shape for x in send([torch.rand(3, 2), torch.rand(0)], torch.device("cpu"))] == [(3, 2), (0,)]


# ---- noise by counters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", ["paper", "independent"])
def test_a_run_begins_on_a_device_with_the_batches_of_another(monkeypatch, coupling):
    """Noise, pairs, times and directions are those of a CPU, to rounding; the plain torch twin stands for the GPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    pairs, config = some_pairs(), dataclasses.replace(CONFIG, coupling=coupling)
    cpu, device = make(config, pairs=pairs), make(config, pairs=pairs)
    device.rows = DeviceRows(pairs, torch.device("cpu"), resident=True)
    draw = gf.ops.counter_noise
    monkeypatch.setattr(gf.ops, "counter_noise", lambda *given, **named: draw(*given, **named, backend="reference"))
    ours = device.training(30)
    monkeypatch.undo()
    for name in ("t", "codes", "image", "text", "v_image", "v_text"):
        torch.testing.assert_close(getattr(ours, name), getattr(cpu.training(30), name), atol=1e-5, rtol=1e-5)


# ---- bfloat16 ------------------------------------------------------------------------------------------------------


def test_the_precision_of_a_run_is_chosen_once_and_kept(monkeypatch, tmp_path):
    """A run that began in float32 continues in float32."""
    pairs, flow = some_pairs(), new_flow()
    config = dataclasses.replace(CONFIG, steps=10, checkpoint_every=5)
    monkeypatch.setattr(FlowMatching, "gains_from_bfloat16", lambda _: False)
    gf.train(flow, pairs, config, out=tmp_path)
    monkeypatch.setattr(FlowMatching, "gains_from_bfloat16", lambda _: True)
    run = new_run(config, flow, pairs)
    assert run.bfloat16
    monkeypatch.setattr(run, "_check_same_run", lambda *_: None)  # the rows of validation are others
    run.load(tmp_path)
    assert not run.bfloat16


@pytest.mark.parametrize(
    ("hidden", "unit", "gain", "gains"),
    [(256, None, 2.0, True), (256, None, 1.1, False), (128, None, 2.0, False), (256, "none", 2.0, False)],
)
def test_bfloat16_is_chosen_where_it_pays(monkeypatch, hidden, unit, gain, gains):
    monkeypatch.setattr("geoflow_fast.ops.extension.missing_bfloat16", lambda: unit)
    monkeypatch.setattr("geoflow_fast.flow.precision._measured_gain", lambda: gain)
    flow = gf.GeoFlow(dataclasses.replace(SHAPE, hidden=hidden))
    assert FlowMatching(flow, some_pairs(), some_pairs(), CONFIG).gains_from_bfloat16() == gains


def test_gradients_of_the_twin_are_those_of_float32_but_for_rounding():
    """The twin has the weights of products in bfloat16, and shares the rest; pieces add up in float32."""
    flow = randomised(new_flow(dataclasses.replace(SHAPE, dropout=0.0)), 0.2).train()
    run = new_run(dataclasses.replace(CONFIG, accumulate=2), flow)
    batch = run.objective.training_batch(20)
    results = []
    for autocast in (False, True):
        for piece in batch.pieces(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = run.objective.losses(piece)
            losses.mean().backward()
        results.append({name: parameter.grad for name, parameter in flow.named_parameters()})
        flow.zero_grad()
    exact, rounded = results
    twin = HalfTwin(flow.train())
    twin.refresh()
    run.objective.twin = twin
    for piece in batch.pieces(2):
        run.objective.losses(piece).mean().backward()
        twin.hand_over_gradients()
    halves = dict(twin.module.named_parameters())
    assert halves["blocks.0.cross_weight"].dtype == torch.bfloat16
    assert halves["blocks.0.cross_scale"] is flow.blocks[0].cross_scale
    assert all(p.grad is None for p in halves.values() if p.dtype == torch.bfloat16)
    assert all(parameter.grad.dtype == torch.float32 for parameter in flow.parameters())

    def error(gradients: dict[str, torch.Tensor]) -> float:
        return float(torch.stack([(x - exact[name]).norm() for name, x in gradients.items()]).norm())

    assert 0 < error({name: x.grad for name, x in flow.named_parameters()}) < 1.5 * error(rounded)


def test_an_eps_that_no_plan_can_have_is_refused_before_the_run_begins():
    with pytest.raises(ValueError, match=r"sinkhorn_eps=0.0001 is too small .* for sinkhorn_eps of at least 0\.000"):
        gf.TrainConfig(sinkhorn_eps=1e-4)
    assert gf.TrainConfig(sinkhorn_eps=1e-4, coupling="independent").sinkhorn_eps == 1e-4
