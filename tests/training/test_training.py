"""Training: the objective, what the network is shown, exact resume, and failures that leave the run intact."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods.euclidean import twin_of
from geoflow_fast import ops
from geoflow_fast.directions import DIRECTIONS, Counts, row_directions
from geoflow_fast.flow.curriculum import draw_batch_plan
from geoflow_fast.geometry import interpolate
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.files import locked
from geoflow_fast.runtime.tensors import load_tensors
from geoflow_fast.training import batches
from geoflow_fast.training.batches import Batch, BatchMaker, Prefetcher, coupling_groups, generator_for
from geoflow_fast.training.flow_matching import FlowMatching, train_from_preset
from geoflow_fast.training.logging import METRICS_FILE, Metrics, StepRate
from geoflow_fast.training.loop import Run
from tests.ranks import CONTEXT
from tests.samples import random_pairs, randomised

SHAPE = gf.GeoFlowConfig(image_dim=6, text_dim=5, hidden=16, depth=2, heads=2, layer_scale=0.1)
CONFIG = gf.TrainConfig(
    steps=24, batch_size=16, lr=3e-3, warmup_steps=4, val_every=6, checkpoint_every=5, log_every=1, ema_decay=0.9
)


def some_pairs(n: int = 120, shape: gf.GeoFlowConfig = SHAPE) -> gf.EmbeddingPairs:
    return random_pairs(n, (shape.image_dim, shape.text_dim))


def new_flow(shape: gf.GeoFlowConfig = SHAPE) -> gf.GeoFlow:
    torch.manual_seed(1)
    return gf.GeoFlow(shape)


def make(config: gf.TrainConfig, flow: gf.GeoFlow | None = None, pairs: gf.EmbeddingPairs | None = None) -> BatchMaker:
    return BatchMaker(flow or new_flow(), pairs or some_pairs(), config)


def new_run(
    config: gf.TrainConfig = CONFIG,
    flow: gf.GeoFlow | None = None,
    pairs: gf.EmbeddingPairs | None = None,
    val: gf.EmbeddingPairs | None = None,
) -> Run[Batch]:
    pairs = pairs or some_pairs()
    return Run(FlowMatching(flow or new_flow(), pairs, val or pairs, config))


def row_losses(flow: gf.GeoFlow, batch: Batch) -> torch.Tensor:
    return FlowMatching(flow, some_pairs(), some_pairs(), CONFIG).losses(batch)


def same_weights(a: gf.GeoFlow, b: gf.GeoFlow) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def test_loss_gradients_by_finite_differences():
    flow = new_flow(dataclasses.replace(SHAPE, hidden=8, depth=1, dropout=0.0)).double()
    randomised(flow, 0.4)
    counts: Counts = (2, 1, 2)
    points = [sample_uniform(5, d, dtype=torch.float64) for d in (6, 5, 6, 5)]
    batch = Batch(*points, torch.rand(5, dtype=torch.float64), row_directions(counts), counts)
    names = [name for name, _ in flow.named_parameters()]
    flow.forward = lambda: row_losses(flow, batch)

    def loss(*weights):
        return torch.func.functional_call(flow, dict(zip(names, weights)), ()).mean()

    weights = [p.detach().clone().requires_grad_() for p in flow.parameters()]
    assert torch.autograd.gradcheck(loss, weights, fast_mode=True)


def test_loss_is_the_squared_tangent_error_of_generated_streams():
    flow = randomised(new_flow())
    batch = make(CONFIG, flow).training(20)
    assert batch.codes.tolist() == [code for code, n in zip((1, 0, 2), batch.counts) for _ in range(n)]
    v_image, v_text = flow.velocity(batch.image, batch.text, batch.t, batch.codes)
    image_error, text_error = (v_image - batch.v_image).square().sum(1), (v_text - batch.v_text).square().sum(1)
    torch.testing.assert_close(row_losses(flow, batch), image_error + text_error, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conditional", ["independent", "paper"])
def test_the_network_never_sees_the_answer(monkeypatch, conditional):
    """At t=0 a generated stream is its noise, whatever its data; a given stream is its data, whatever its noise."""
    config = dataclasses.replace(
        CONFIG, p_drop=0.0, conditional_share=0.0, ramp_share=0.0, conditional_coupling=conditional
    )
    draw = batches.draw_batch_plan

    def draw_at_time_zero(*arguments, **options):
        drawn = draw(*arguments, **options)
        return dataclasses.replace(drawn, t=torch.zeros_like(drawn.t))

    monkeypatch.setattr(batches, "draw_batch_plan", draw_at_time_zero)
    seen = {}
    original = gf.ops.masked_interpolant
    monkeypatch.setattr(gf.ops, "masked_interpolant", lambda *a, **k: seen.update(inputs=a) or original(*a, **k))
    batch = make(config).training(20)
    image0, text0, image1, text1 = seen["inputs"][:4]
    n_i2t, n_joint, n_t2i = batch.counts
    assert min(batch.counts) > 0
    torch.testing.assert_close(batch.image[n_i2t:], image0[n_i2t:])
    torch.testing.assert_close(batch.text[: n_i2t + n_joint], text0[: n_i2t + n_joint])
    assert torch.equal(batch.image[:n_i2t], image1[:n_i2t])
    assert torch.equal(batch.text[-n_t2i:], text1[-n_t2i:])
    changed = [torch.roll(x, 1, 0) for x in (image1, text1)]
    direction = seen["inputs"][5]
    again = original(image0, text0, *changed, torch.zeros(16), direction)
    torch.testing.assert_close(again[0][n_i2t:], batch.image[n_i2t:])
    torch.testing.assert_close(again[1][: n_i2t + n_joint], batch.text[: n_i2t + n_joint])


def test_guidance_dropout_shows_noise_instead_of_the_condition():
    always = dataclasses.replace(CONFIG, p_drop=1.0)
    maker = make(always)
    batch = maker.training(0)
    n_i2t = batch.counts[0]
    data = maker.pairs[maker.order[0]][0]
    assert batch.counts[1] == 0
    distance = torch.cdist(batch.image[:n_i2t], data)
    assert float(distance.min()) > 1e-3
    assert not batch.v_image[:n_i2t].any()


def test_conditional_rows_keep_their_own_pair_and_joint_rows_are_coupled():
    config = dataclasses.replace(CONFIG, batch_size=100, p_drop=0.0, conditional_share=0.0, ramp_share=0.0)
    maker = make(config)
    batch = maker.training(3)
    n_i2t, _, n_t2i = batch.counts
    image, text = maker.pairs[maker.order[3]]
    torch.testing.assert_close(batch.image[:n_i2t], image[:n_i2t])
    torch.testing.assert_close(batch.text[-n_t2i:], text[-n_t2i:])
    assert [rule for _, _, rule in coupling_groups(batch.counts, config)] == ["independent", "paper", "independent"]
    paper = dataclasses.replace(config, conditional_coupling="paper")
    assert coupling_groups(batch.counts, paper) == [(slice(0, 100), "joint", "paper")]


@pytest.mark.parametrize("coupling", ["paper", "sample", "exact", "independent"])
@pytest.mark.parametrize("conditional", ["paper", "independent", "c2ot"])
def test_every_coupling_makes_valid_batches(coupling, conditional):
    config = dataclasses.replace(
        CONFIG,
        coupling=coupling,
        conditional_coupling=conditional,
        batch_size=64,
        conditional_share=0.0,
        ramp_share=0.0,
    )
    batch = make(config).training(0)
    for x, v in ((batch.image, batch.v_image), (batch.text, batch.v_text)):
        torch.testing.assert_close(x.norm(dim=1), torch.ones(64), atol=1e-5, rtol=0)
        assert float((x * v).sum(1).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("shape", "change"),
    [(SHAPE, {"precision": "bfloat16"}), (twin_of(SHAPE), {})],
)
def test_training_works_with_other_precision_and_manifold(shape, change, tmp_path):
    config = dataclasses.replace(CONFIG, **change, steps=6, conditional_share=0.0, ramp_share=0.0)
    flow = new_flow(shape)
    report = gf.train(flow, some_pairs(shape=shape), config, out=tmp_path)
    assert report.finished
    assert np.isfinite(report.best_val_loss)
    assert all(p.dtype == torch.float32 for p in flow.parameters())
    losses = [json.loads(line).get("val_loss") for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert len({loss for loss in losses if loss is not None}) > 2  # weights move, though pairs of noise teach nothing


def test_one_step_equals_a_plain_reimplementation():
    """Without coupling and dropout: loss, clipping, schedule and AdamW are written out again from their definitions."""
    config = dataclasses.replace(
        CONFIG,
        coupling="independent",
        ema_decay=None,
        conditional_share=0.0,
        ramp_share=0.0,
        p_drop=0.3,
        weight_decay=0.5,  # large enough for its effect to be seen
    )
    flow = randomised(new_flow(dataclasses.replace(SHAPE, dropout=0.0)), 0.2).train()
    twin = new_flow(flow.config)
    twin.load_state_dict(flow.state_dict())
    pairs = some_pairs()
    run, step = new_run(config, flow, pairs), 2
    maker = make(config, flow, pairs)
    run.step = step

    generator = generator_for(config.seed, "batch", step)
    p_joint = config.curriculum.joint_probability(step)
    plan = draw_batch_plan(config.batch_size, p_joint, config.p_drop, generator)
    image1, text1 = pairs[maker.order[step]]
    numbers = torch.arange(config.batch_size)
    seed = int(np.random.SeedSequence((config.seed, *b"noise")).generate_state(1, np.uint64)[0])
    noise = [ops.counter_noise(numbers, d, seed, step, stream, backend="reference") for stream, d in enumerate((6, 5))]
    inputs, targets = [], []
    for stream, (data, given) in enumerate(((image1, "i2t"), (text1, "t2i"))):
        point, velocity = interpolate(noise[stream], data, plan.t)
        fixed = (plan.direction == DIRECTIONS.index(given))[:, None]
        inputs.append(torch.where(fixed, torch.where(plan.drop[:, None], noise[stream], data), point))
        targets.append(torch.where(fixed, torch.zeros_like(velocity), velocity))
    outputs = twin.velocity(inputs[0], inputs[1], plan.t, plan.direction)
    loss = sum((v - u).square().sum() for v, u in zip(outputs, targets)) / config.batch_size
    gradients = torch.autograd.grad(loss, list(twin.parameters()))
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    lr = config.lr * (step + 1) / config.warmup_steps
    with torch.no_grad():
        for parameter, g in zip(twin.parameters(), gradients):
            g = g * min(1.0, config.clip / float(norm))
            # In the first step of Adam both moments, corrected for their start at zero, are g and g^2.
            parameter.mul_(1 - lr * config.weight_decay).sub_(lr * g / (g.abs() + 1e-8))

    losses, measured = run.optimise(maker.training(step))
    assert float(losses.mean()) == pytest.approx(loss.item(), rel=1e-5)
    assert float(measured) == pytest.approx(float(norm), rel=1e-4)
    for (name, a), b in zip(flow.named_parameters(), twin.parameters()):
        # The first step of Adam depends on the sign of the gradient, which is random for gradients of rounding size.
        assert float(((a - b).abs() > 1e-5).float().mean()) < 0.02, name


def test_accumulation_gives_the_same_step():
    whole, pieces = new_flow(dataclasses.replace(SHAPE, dropout=0.0)), new_flow(dataclasses.replace(SHAPE, dropout=0.0))
    pairs = some_pairs()
    results = []
    for flow, count in ((whole, 1), (pieces, 5)):
        config = dataclasses.replace(CONFIG, accumulate=count)
        run = new_run(config, flow, pairs)
        run.step = 20
        results.append(run.optimise(make(config, flow, pairs).training(20)))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert float(results[0][1]) == pytest.approx(float(results[1][1]), rel=1e-4)


def test_there_may_be_more_pieces_than_validation_rows():
    losses = [new_run(dataclasses.replace(CONFIG, accumulate=count), val=some_pairs(3)).validate() for count in (1, 8)]
    assert losses[0]["val_loss"] == pytest.approx(losses[1]["val_loss"])


def test_a_run_may_be_shorter_than_its_warm_up():
    config = dataclasses.replace(CONFIG, steps=20, warmup_steps=100)
    rates = [config.learning_rate(step) for step in range(20)]
    assert rates[:2] == pytest.approx([config.lr / 2, config.lr])
    assert rates[-1] < 0.01 * config.lr


@pytest.mark.parametrize(("first", "last"), [(0, 4), (3, 4), (2, 9), (4, 4)])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_makes_each_of_its_batches_once(first, last, enabled):
    """No batch beyond the last step is made, which the end of a run would wait for."""
    made = []
    prefetcher = Prefetcher(lambda step: made.append(step) or -step, first, last, torch.device("cpu"), enabled=enabled)
    got = [prefetcher.get(step) for step in range(first, last)]
    if enabled:
        prefetcher.pool.submit(int).result()  # the thread has begun whatever it was asked for before
    prefetcher.close()
    assert got == [-step for step in range(first, last)]
    assert made == list(range(first, last))


def test_the_step_rate_is_that_since_the_last_call(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", iter([1.0, 3.0, 4.0]).__next__)
    rate = StepRate(10)
    assert (rate(20), rate(30)) == (5.0, 10.0)


def test_training_goes_on_while_the_clock_stands_still(tmp_path, monkeypatch):
    """Clocks of virtual machines do not move between two readings."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    config = dataclasses.replace(CONFIG, steps=2, log_every=1)
    gf.train(new_flow(), some_pairs(), config=config, out=tmp_path, progress=False)
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for name in ("steps_per_second", "batch_wait_share", "coupling_share"):
        assert [line[name] for line in lines[1:]] == [0, 0]


def test_the_learning_rate_follows_its_schedule_and_validation_is_the_same_every_time():
    config = dataclasses.replace(CONFIG, steps=100, warmup_steps=10)
    rates = [config.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(config.lr / 10)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(config.lr)
    assert rates[55] == pytest.approx(config.lr / 2)
    assert rates[-1] < 0.001 * config.lr
    run = new_run(config, val=some_pairs(9))
    assert run.validate() == run.validate()


def test_validation_shows_every_direction_pairs_from_everywhere():
    """Rows are sorted by direction, and pairs in files often by kind. A direction must not get one kind alone."""
    rows = 200
    image, text = (sample_uniform(rows, d, generator=torch.Generator().manual_seed(d)) for d in (6, 5))
    pairs = gf.EmbeddingPairs.from_arrays(image, text)
    maker = make(dataclasses.replace(CONFIG, batch_size=rows), pairs=pairs)
    batch = maker.validation(pairs, 0)
    i2t, joint, _ = batch.counts
    shown = {"i2t": batch.image[:i2t] @ image.T, "t2i": batch.text[i2t + joint :] @ text.T}  # the given stream is shown
    for direction, cosine in shown.items():
        best, number = cosine.max(1)
        torch.testing.assert_close(best, torch.ones_like(best))
        assert len(set(number.tolist())) == len(number) > 30, direction
        share = float((number < rows // 2).double().mean())
        assert abs(share - 0.5) < 4 * 0.5 / len(number) ** 0.5, direction
    again = maker.validation(pairs, 0)
    assert torch.equal(again.image, batch.image)


def test_a_flow_learns_eight_pairs_by_heart():
    shape = dataclasses.replace(SHAPE, hidden=64, dropout=0.0)
    config = gf.TrainConfig(steps=300, batch_size=8, lr=5e-3, warmup_steps=10, p_drop=0.0, val_every=300, log_every=300)
    generator = torch.Generator().manual_seed(0)
    image, text = (sample_uniform(8, d, generator=generator) for d in (6, 5))
    pairs = gf.EmbeddingPairs.from_arrays(image, text)
    flow = new_flow(shape)
    gf.train(flow, pairs, config, val=pairs)
    # Following the learned field from noise must land on the text of the given image.
    y = sample_uniform(8, 5, generator=generator)
    with torch.no_grad():
        for k in range(50):
            y = torch.nn.functional.normalize(y + flow.velocity(image, y, k / 50, "i2t")[1] / 50)
    assert float((y * text).sum(1).median()) > 0.95


def test_a_run_stops_early_and_keeps_the_best_weights(monkeypatch):
    """Of the validation losses 6, 5, 4, 4.5, 5, ... the third is the best; three more, no better, end the run."""
    config = dataclasses.replace(CONFIG, steps=500, patience=3, val_every=2, val_batches=1, ema_decay=None)
    original, seen = FlowMatching.losses, []

    def scripted(self, batch):
        losses = original(self, batch)
        if self.flow.training:
            return losses
        seen.append({name: x.clone() for name, x in self.flow.state_dict().items()})
        return torch.full_like(losses, (6, 5, 4, 4.5, 5, 5.5)[len(seen) - 1])

    monkeypatch.setattr(FlowMatching, "losses", scripted)
    flow = new_flow()
    report = gf.train(flow, some_pairs(), config)
    assert report.stopped_early
    assert report.finished
    assert (report.steps, report.best_step, report.best_val_loss) == (8, 2, 4.0)
    assert all(torch.equal(x, seen[2][name]) for name, x in flow.state_dict().items())
    assert not torch.equal(seen[2]["modulation.weight"], seen[3]["modulation.weight"])
    assert not flow.training


@pytest.mark.parametrize(
    ("before", "loss", "improves"),
    [(1.0, 0.996, False), (1.0, 0.994, True), (1e-5, 9.5e-6, False), (1e-5, 8e-6, True), (1.0, 2.0, False)],
)
def test_an_improvement_must_be_large_enough_absolutely_and_relatively(before, loss, improves):
    run = new_run()
    run.improved_loss = before
    assert run.improves(loss) is improves


def test_a_finished_run_returns_at_once(tmp_path):
    first, second = new_flow(), new_flow()
    report = gf.train(first, some_pairs(), CONFIG, out=tmp_path)
    again = gf.train(second, some_pairs(), CONFIG, out=tmp_path)
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(report, seconds=0.0)
    assert same_weights(first, second)
    assert same_weights(first, gf.GeoFlow.from_pretrained(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(25))
    assert {"loss", "loss_i2t", "lr", "p_joint", "batch_wait_share"} <= set(lines[-1])
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 1, 3, 6, 12, 18, 24]


def train_until(folder: Path, steps: int, how: signal.Signals) -> None:
    """Trains, and sends this process a signal after `steps` steps. The exit status tells whether the run has stopped
    after the step that was interrupted."""
    optimise, taken = Run.optimise, []

    def counted(self, batch):
        taken.append(batch)
        if len(taken) > steps:
            os.kill(os.getpid(), how)
        return optimise(self, batch)

    Run.optimise = counted
    report = gf.train(new_flow(), some_pairs(), CONFIG, out=folder)
    sys.exit((report.finished, report.steps) != (False, steps + 1))


def run_until(folder: Path, steps: int, how: signal.Signals = signal.SIGKILL) -> int | None:
    """Does so in a process of its own, and returns its exit status."""
    return ended(train_until, folder, steps, how)


def ended(task: Callable[..., object], *arguments: object) -> int | None:
    """The exit status of a process that does this. No fork of this one: it may have threads."""
    process = CONTEXT.Process(target=task, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def checkpoint_step(folder) -> int:
    return load_tensors(folder / "last.safetensors", kind="training state")[1]["step"]


def test_killed_runs_end_with_the_same_bits(tmp_path):
    whole = new_flow()
    gf.train(whole, some_pairs(), CONFIG, out=tmp_path / "whole")
    for steps in (3, 7, 9):  # before the first checkpoint, after it, and after a later one
        assert run_until(tmp_path / "killed", steps) == -signal.SIGKILL
    flow = new_flow()
    report = gf.train(flow, some_pairs(), CONFIG, out=tmp_path / "killed")
    assert report.finished
    assert same_weights(flow, whole)
    for name in ("last.safetensors", "model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(25))


def test_interrupt_saves_and_the_same_call_continues(tmp_path):
    whole = new_flow()
    gf.train(whole, some_pairs(), CONFIG)
    assert run_until(tmp_path, 8, signal.SIGINT) == 0  # the step that was interrupted is finished first
    assert checkpoint_step(tmp_path) == 9
    flow = new_flow()
    assert gf.train(flow, some_pairs(), CONFIG, out=tmp_path).finished
    assert same_weights(flow, whole)


def test_a_run_with_other_settings_is_not_continued(tmp_path):
    gf.train(new_flow(), some_pairs(), CONFIG, out=tmp_path)
    with pytest.raises(ValueError, match=r"lr 0\.003 -> 0\.1"):
        gf.train(new_flow(), some_pairs(), dataclasses.replace(CONFIG, lr=0.1), out=tmp_path)
    with pytest.raises(ValueError, match="other pairs"):
        gf.train(new_flow(), some_pairs(130), CONFIG, out=tmp_path)
    with pytest.raises(ValueError, match="hidden 16 -> 32"):
        gf.train(new_flow(dataclasses.replace(SHAPE, hidden=32)), some_pairs(), CONFIG, out=tmp_path)
    assert gf.train(new_flow(), some_pairs(130), CONFIG, out=tmp_path, resume=False).finished


def test_integers_of_numpy_are_accepted_and_stored_as_plain_integers(tmp_path):
    config = dataclasses.replace(CONFIG, steps=np.int64(2), batch_size=np.int32(CONFIG.batch_size))
    assert type(config.steps) is type(config.batch_size) is int
    assert gf.train(new_flow(), some_pairs(), config, out=tmp_path).steps == 2


def test_a_run_on_other_validation_pairs_is_not_continued(tmp_path):
    config = dataclasses.replace(CONFIG, steps=2)
    gf.train(new_flow(), some_pairs(), config, val=some_pairs(10), out=tmp_path)
    with pytest.raises(ValueError, match="other validation pairs"):
        gf.train(new_flow(), some_pairs(), config, val=some_pairs(11), out=tmp_path)


def test_starting_afresh_removes_the_old_state(tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, steps=2)
    gf.train(new_flow(), some_pairs(), config, out=tmp_path)

    def diverge(*_):
        raise gf.TrainingDiverged("at once")

    monkeypatch.setattr(Run, "optimise", diverge)
    with pytest.raises(gf.TrainingDiverged, match="no checkpoint was written yet"):
        gf.train(new_flow(), some_pairs(), config, out=tmp_path, resume=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", METRICS_FILE]
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()] == [0]


def test_a_folder_takes_one_run_at_a_time_and_keeps_no_temporary_files(tmp_path):
    config = dataclasses.replace(CONFIG, steps=2)
    with locked(tmp_path), pytest.raises(OSError, match="another run is writing to"):
        gf.train(new_flow(), some_pairs(), config, out=tmp_path)
    (tmp_path / ".last.safetensors.000000000007.tmp").write_text("left by a writer that was killed")
    assert gf.train(new_flow(), some_pairs(), config, out=tmp_path).finished
    assert not list(tmp_path.glob(".*.tmp"))


def test_divergence_names_the_step_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    optimise = Run.optimise

    def poisoned(self, batch):
        if self.step == 13:
            batch.v_image.fill_(float("nan"))
        return optimise(self, batch)

    monkeypatch.setattr(Run, "optimise", poisoned)
    with pytest.raises(gf.TrainingDiverged, match=r"not finite at step 13 .*checkpoint of step 10 is kept"):
        gf.train(new_flow(), some_pairs(), CONFIG, out=tmp_path)
    tensors, info = load_tensors(tmp_path / "last.safetensors", kind="training state")
    assert info["step"] == 10
    assert all(bool(torch.isfinite(x).all()) for x in tensors.values())


def train_on_a_full_disk(folder: Path, limit: int) -> None:
    """Trains where no file may be longer than `limit`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(OSError, match=f"could not write {folder / 'last.safetensors'}"):
        gf.train(new_flow(), some_pairs(), CONFIG, out=folder)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    run_until(tmp_path, 7)
    before = (tmp_path / "last.safetensors").read_bytes()
    # The limit is enough for the metrics and the best weights, but not for the state of the run.
    assert ended(train_on_a_full_disk, tmp_path, len(before) // 2) == 0
    assert (tmp_path / "last.safetensors").read_bytes() == before
    assert checkpoint_step(tmp_path) == 5
    assert not list(tmp_path.glob(".*.tmp"))


def test_metrics_that_cannot_be_written_name_their_file(tmp_path):
    metrics = Metrics(tmp_path, 0)
    metrics.path = Path("/dev/full")
    with pytest.raises(OSError, match="could not write /dev/full"):
        metrics.write(1, {"loss": 1.0})


def test_an_error_names_what_is_wrong_with_the_input(tmp_path):
    with pytest.raises(ValueError, match=r"pairs have widths \(5, 5\)"):
        gf.train(new_flow(), some_pairs(shape=dataclasses.replace(SHAPE, image_dim=5)), CONFIG)
    with pytest.raises(ValueError, match="too few for batch_size=16"):
        gf.train(new_flow(), some_pairs(12), CONFIG)
    with pytest.raises(TypeError, match="log must be a function of a record, got 'wandb'"):
        gf.train(new_flow(), some_pairs(), CONFIG, log="wandb")
    for change, message in (
        ({"coupling": "magic"}, "coupling"),
        ({"conditional_coupling": "exact"}, "conditional_coupling"),
        ({"steps": 0}, "steps"),
        ({"lr": -1.0}, "lr"),
        ({"p_joint": 1.5}, "p_joint"),
        ({"accumulate": 17}, "accumulate"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"min_improvement": float("nan")}, "min_improvement"),
        ({"min_relative_improvement": -0.1}, "min_relative_improvement"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **change)
    for change in ({"steps": 2.5}, {"seed": True}, {"log_every": "1"}):
        with pytest.raises(TypeError, match=f"{next(iter(change))} must be an integer"):
            dataclasses.replace(CONFIG, **change)
    (tmp_path / "last.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        gf.train(new_flow(), some_pairs(), CONFIG, out=tmp_path)


def test_the_preset_of_the_paper_has_its_settings():
    paper = gf.TrainConfig.paper()
    assert (paper.steps, paper.batch_size, paper.lr, paper.warmup_steps) == (120_000, 8192, 6e-4, 4000)
    assert (paper.weight_decay, paper.clip, paper.p_joint, paper.p_drop) == (1e-3, 1.0, 0.40, 0.10)
    assert (paper.coupling, paper.conditional_coupling, paper.val_every, paper.val_batches) == (
        "paper",
        "paper",
        2000,
        5,
    )
    assert gf.TrainConfig().conditional_coupling == "independent"


def test_centring_and_pca_are_fitted_and_saved(tmp_path):
    shape = dataclasses.replace(SHAPE, centre=True, pca_dim=3)
    flow = new_flow(shape)
    gf.train(flow, some_pairs(shape=shape), CONFIG, out=tmp_path)
    assert float(flow.preprocess[0].mean.abs().max()) > 0
    assert same_weights(flow, gf.GeoFlow.from_pretrained(tmp_path))


@pytest.mark.parametrize("kept", [True, False])
def test_a_function_gets_every_record_of_the_metrics(tmp_path, kept):
    records: list[dict[str, float]] = []
    gf.train(new_flow(), some_pairs(), CONFIG, out=tmp_path if kept else None, log=records.append)
    assert [record["step"] for record in records] == sorted({record["step"] for record in records})
    assert records[0].keys() == {"step", "val_loss"}
    assert records[-1].keys() >= {"step", "loss", "gradient_norm", "lr", "val_loss"}
    assert records[-1]["step"] == CONFIG.steps
    if kept:
        assert records == [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]


def test_the_command_trains_and_refuses_another_configuration(tmp_path, run):
    some_pairs().save(tmp_path / "pairs")
    command = ["train", "--pairs", tmp_path / "pairs", "--out", tmp_path / "run"]
    command += ["--preset", "tiny", "--steps", 3, "--batch-size", 16, "--no-head"]
    code, out, err = run(*command)
    assert code == 0, err
    assert "finished at step 3" in out
    assert gf.GeoFlow.from_pretrained(tmp_path / "run").config.image_dim == 6
    code, _, err = run(*command, "--lr", 0.5)
    assert code == 2
    assert "another configuration" in err


@pytest.mark.parametrize("device", ["sideways", "cuda:99"])
def test_an_error_names_a_device_that_cannot_be_used(tmp_path, device):
    options = {"centre": False, "pca_dim": None}
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here"):
        train_from_preset(some_pairs(), tmp_path / "run", "tiny", None, {}, device=device, **options)


@pytest.mark.slow
def test_a_run_may_be_killed_at_any_moment(tmp_path):
    """The process is killed at random times, wherever it happens to be, until the run has finished."""
    whole = new_flow()
    gf.train(whole, some_pairs(), CONFIG, out=tmp_path / "whole")
    rng = np.random.default_rng(0)
    for _ in range(20):
        process = CONTEXT.Process(target=train_until, args=(tmp_path / "killed", 1000, signal.SIGKILL))
        process.start()
        time.sleep(rng.uniform(0.2, 2))
        process.kill()
        process.join()
    flow = new_flow()
    gf.train(flow, some_pairs(), CONFIG, out=tmp_path / "killed")
    assert same_weights(flow, whole)
