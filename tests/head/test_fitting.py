"""Training of a head: a world whose posterior is known, what counts as a negative, exact resume, and bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.geometry import normalize
from geoflow_fast.head import fitting
from geoflow_fast.head.fitting import HeadObjective, bank_rows, fit_scales, held_out_search, linear_map
from geoflow_fast.noise import sample_uniform
from geoflow_fast.training.loop import Run
from tests import ranks
from tests.head.test_loss import naive_scores
from tests.head.test_model import random_head, same
from tests.ranks import run_ranks

CONFIG = gf.HeadConfig(
    steps=24, batch_size=16, lr=5e-3, warmup_steps=4, val_every=6, checkpoint_every=5, log_every=1, hidden=8, bank=9
)
NO_BANK = dataclasses.replace(CONFIG, bank=0)
CPU = torch.device("cpu")


def some_pairs(images: int = 60, captions: int = 2, widths: tuple[int, int] = (6, 5), seed: int = 0):
    """Texts are a linear map of their image, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    image = sample_uniform(images, widths[0], generator=generator)
    index = torch.arange(images).repeat_interleave(captions)
    text = image[index] @ torch.randn(widths, generator=torch.Generator().manual_seed(99))
    text = text + 0.3 * torch.randn(text.shape, generator=generator)
    return gf.EmbeddingPairs.from_arrays(image, normalize(text), index)


def objective(pairs: gf.EmbeddingPairs, config: gf.HeadConfig = CONFIG) -> HeadObjective:
    head = random_head(config, pairs.image_dim, pairs.text_dim)
    return HeadObjective(head, pairs, some_pairs(8, widths=(pairs.image_dim, pairs.text_dim), seed=1), config)


# ---- worlds whose posterior is known ------------------------------------------------------------------------------


COUNTS = torch.tensor([[12, 3, 1, 2], [1, 14, 3, 5], [2, 2, 16, 1], [4, 9, 1, 3], [1, 3, 5, 7]])
"""How often image i (a row) and text t (a column) occur together."""


@pytest.mark.parametrize("points", [1, 3])
def test_a_head_learns_the_exact_ratio_of_a_discrete_world(points):
    """Images are five axes and texts four, so one point can express every table of ratios. The whole table is one
    batch, whose loss is lowest at log p(item | query) / p(item) up to a constant per query: scores come within 0.03
    nats of it, and the posterior over the gallery of all items within 0.003 of the softmax of the true ratios."""
    image = torch.arange(5).repeat_interleave(4).repeat_interleave(COUNTS.flatten())
    text = torch.arange(4).repeat(5).repeat_interleave(COUNTS.flatten())
    pairs = gf.EmbeddingPairs.from_arrays(torch.eye(5)[image], torch.eye(4)[text])
    config = gf.HeadConfig(
        steps=200,
        batch_size=len(pairs),
        lr=0.03,
        warmup_steps=5,
        weight_decay=0.0,
        clip=100.0,
        val_every=50,
        hidden=16,
        dropout=0.0,
        bank=0,
    )
    head = gf.PosteriorHead.fit(pairs, config, val=pairs, k=points)
    joint = COUNTS.double() / COUNTS.sum()
    ratio = (joint / joint.sum(0) / joint.sum(1, keepdim=True)).log()
    for direction, truth in (("t2i", ratio.T), ("i2t", ratio)):
        queries, gallery = (torch.eye(n) for n in truth.shape)
        scorer = gf.RetrievalEntropy(head, gallery, direction, top_k=len(gallery))
        posterior = scorer(queries)
        wanted = truth.softmax(1)
        probability = whole(posterior.top_index, posterior.top_prob.double())
        torch.testing.assert_close(probability, wanted, rtol=0, atol=3e-3)
        differences = probability.log() - truth
        assert float((differences - differences.mean(1, keepdim=True)).abs().max()) < 0.03
        torch.testing.assert_close(posterior.entropy.double(), torch.special.entr(wanted).sum(1), rtol=0, atol=5e-3)


def whole(top_index: Tensor, top_prob: Tensor) -> Tensor:
    """The probabilities of all items, in the order of the items."""
    return torch.zeros_like(top_prob).scatter_(1, top_index, top_prob)


@pytest.mark.parametrize("change", [{}, {"bias_hidden": 4}, {"bank": 0}], ids=str)
def test_the_reported_likelihood_is_that_of_the_scorer(change):
    """-log p of the own item over held-out items and those training items that are not of the bank, as
    `RetrievalEntropy` reads it from the head."""
    pairs, val = some_pairs(50, 1), some_pairs(20, 1, seed=1)
    config = dataclasses.replace(CONFIG, **change)
    head = gf.PosteriorHead.fit(pairs, config, val=val, k=3)
    others = np.setdiff1d(np.arange(50), bank_rows(pairs, config))
    sides = [torch.cat(side) for side in zip(val[np.arange(20)], pairs[others])]
    total = 0.0
    for direction in CONDITIONAL:
        queries, gallery = direction.queries(*sides)[:20], direction.items(*sides)
        posterior = gf.RetrievalEntropy(head, gallery, direction, top_k=20 + len(others))(queries)
        own = whole(posterior.top_index, posterior.top_prob.double())[torch.arange(20), torch.arange(20)]
        assert head.report[f"nll_{direction}"] == pytest.approx(-float(own.log().mean()), abs=1e-4)
        total -= float(own.log().mean())
    assert head.report["nll"] == pytest.approx(total, abs=1e-4)


def test_held_out_pairs_ask_for_a_scale_and_a_hub_correction():
    """Where concentrations are higher by a factor, the scale is lower by it, and the loss is not above that of the head
    as it was."""
    image = sample_uniform(240, 6)
    pairs = gf.EmbeddingPairs.from_arrays(image, normalize(image + 0.2 * torch.randn_like(image)))
    pairs, val = pairs.split(0.8, 0)
    head = gf.PosteriorHead(dataclasses.replace(CONFIG, points=1), 6, 6)
    head.bank_image[:], head.bank_text[:] = pairs[np.arange(9)]
    searches = [held_out_search(pairs, val, direction, NO_BANK, CPU) for direction in CONDITIONAL]
    first = fit_scales(head, searches)
    scale, weight = head.scale.clone(), head.hub_weight.clone()
    assert fitting.SCALES[2] <= float(scale.min()) <= float(scale.max()) < fitting.SCALES[-1]
    for tower in head.towers.values():
        tower.log_concentration.data.add_(np.log(2.0) / 2)
    again = fit_scales(head, searches)
    torch.testing.assert_close(head.scale, scale / 2**0.5)
    torch.testing.assert_close(head.hub_weight, weight, atol=0.03, rtol=0)
    assert again == pytest.approx(first, rel=1e-4)
    head.scale.fill_(1.0)
    head.hub_weight.zero_()
    for search in searches:
        raw = head.raw_points(search.queries, search.direction)
        scores = naive_scores(raw.points, raw.log_weights, search.items)
        plain = fitting.contrastive_losses(scores, search.right, search.copies).mean().detach()
        assert again[str(search.direction)] <= float(plain)


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_the_linear_map_is_the_ridge_regression_of_items_on_queries(direction):
    pairs = some_pairs(30, 1)
    image, text = (x.double().numpy() for x in pairs[np.arange(30)])
    queries, items = direction.queries(image, text), direction.items(image, text)
    width = queries.shape[1]
    ridge = np.sqrt(fitting.BASE_RIDGE * np.square(queries).sum() / width)
    inputs = np.concatenate((queries, ridge * np.eye(width)))
    targets = np.concatenate((items, np.zeros((width, items.shape[1]))))
    wanted = np.linalg.lstsq(inputs, targets, rcond=None)[0].T
    np.testing.assert_allclose(linear_map(pairs, direction, 0).numpy(), wanted, atol=1e-5)


def test_images_and_texts_of_unequal_width_begin_with_the_linear_map():
    made = objective(some_pairs(), CONFIG)
    made.prepare()
    for direction in CONDITIONAL:
        assert torch.equal(made.head.towers[str(direction)].base, linear_map(made.pairs, direction, 0))


# ---- batches ------------------------------------------------------------------------------------------------------


def naive_loss(made: HeadObjective, index: np.ndarray) -> Tensor:
    """The losses [B] of a batch in both directions, item by item: only items of other images are negatives, and an
    image is one item however many of its captions are in the batch."""
    image, text = made.pairs[index]
    group, head = made.pairs.group[index].tolist(), made.head
    total = torch.zeros(len(index))
    for direction in CONDITIONAL:
        raw = head.raw_points(direction.queries(image, text), direction)
        items = direction.items(image, text)
        scores = naive_scores(raw.points, raw.log_weights, items) + head.raw_item_bias(items, direction)
        firsts = [j for j, number in enumerate(group) if group.index(number) == j]
        for row, number in enumerate(group):
            others = firsts if direction is Direction.T2I else range(len(group))
            wrong = torch.stack([scores[row, j] for j in others if group[j] != number])
            right = [j for j in range(len(group)) if group[j] == number]
            losses = [torch.cat((scores[row, j : j + 1], wrong)).logsumexp(0) - scores[row, j] for j in right]
            total[row] += torch.stack(losses).mean()
    return total


def test_the_captions_of_an_image_are_never_its_negatives():
    pairs = some_pairs(5, captions=4)
    config = dataclasses.replace(CONFIG, batch_size=13, points=2)
    made = objective(pairs, config)
    made.head.eval()
    for step in range(3):
        index = made.order[step]
        assert len(np.unique(pairs.group[index])) < len(index)
        with torch.no_grad():
            torch.testing.assert_close(made.losses(made.training_batch(step)), naive_loss(made, index))


def test_a_batch_of_one_image_has_no_loss():
    pairs = some_pairs(1, captions=16)
    made = objective(pairs)
    losses = made.losses(made.training_batch(0))
    assert losses.tolist() == [0.0] * 16


def test_held_out_galleries_have_limits_and_know_the_right_items(monkeypatch):
    pairs, val = some_pairs(7, 3), some_pairs(9, 3, seed=1)
    monkeypatch.setattr(fitting, "VALIDATION_QUERIES", 8)
    for most, foreign in ((10**9, 21), (30, 3), (27, 0), (12, 0)):
        monkeypatch.setattr(fitting, "VALIDATION_ITEMS", most)
        for direction in CONDITIONAL:
            search = held_out_search(pairs, val, direction, NO_BANK, CPU)
            own = min(27, most)
            assert (len(search.queries), len(search.items)) == (8, own + foreign)
            # An item is right if it is of the same image; training items, which come last, are of none.
            image = val.image[np.arange(9)]
            number = [int((torch.from_numpy(image) == x).all(1).nonzero()) for x in images_of(val, search, direction)]
            right = torch.tensor(number)[:, None] == torch.tensor(items_of(val, search, direction, own))
            assert torch.equal(search.right[:, :own], right)
            assert not search.right[:, own:].any()
            once = direction is Direction.I2T
            expected = [1.0 if once else float((search.item_image == x).sum()) for x in search.item_image]
            assert search.copies.tolist() == expected


def images_of(val: gf.EmbeddingPairs, search: fitting.Search, direction: Direction) -> Tensor:
    """The image rows of the queries."""
    if direction is Direction.I2T:
        return search.queries
    image, text = val[np.arange(len(val))]
    return torch.stack([image[(text == x).all(1)][0] for x in search.queries])


def items_of(val: gf.EmbeddingPairs, search: fitting.Search, direction: Direction, own: int) -> list[int]:
    """The numbers of the images of the held-out items."""
    image, text = val[np.arange(len(val))]
    side = direction.items(image, text)
    return [int(val.group[int((side == x).all(1).nonzero()[0])]) for x in search.items[:own]]


def test_pieces_and_half_precision_give_the_same_losses():
    """Scores of concentrated points are in the thousands; bfloat16 would round them by ten."""
    made = objective(some_pairs(widths=(6, 6)), dataclasses.replace(CONFIG, points=1))
    made.head.eval()
    for tower in made.head.towers.values():
        for parameter in (*tower.offsets.parameters(), *tower.shape.parameters(), *tower.change.parameters()):
            torch.nn.init.zeros_(parameter)
        tower.log_concentration.data.fill_(np.log(3000.0))
    batch = made.training_batch(0)
    with torch.no_grad():
        whole_batch = made.losses(batch)
        pieces = torch.cat([made.losses(piece) for piece in batch.pieces(5)])
        with torch.autocast("cpu", torch.bfloat16):
            half = made.losses(batch)
    torch.testing.assert_close(pieces, whole_batch)
    torch.testing.assert_close(half, whole_batch, rtol=1e-4, atol=1e-2)
    assert float(whole_batch.max()) > 100


def test_training_in_half_precision_works():
    config = dataclasses.replace(CONFIG, precision="bfloat16", bias_hidden=4)
    head = gf.PosteriorHead.fit(some_pairs(), config, k=2)
    assert np.isfinite(head.report["nll"])
    assert all(x.dtype == torch.float32 for x in head.state_dict().values())


@pytest.mark.parametrize("pays", [False, True])
def test_auto_trains_in_bfloat16_where_that_pays(monkeypatch, pays):
    monkeypatch.setattr(fitting, "bfloat16_pays", lambda _: pays)
    run = Run(objective(some_pairs(), dataclasses.replace(CONFIG, precision="auto")))
    assert run.precision == ("bfloat16" if pays else "float32")
    assert run.bfloat16 is pays


def test_noise_and_dropout_are_for_training_alone():
    made = objective(some_pairs(), dataclasses.replace(CONFIG, noise=0.5, dropout=0.5))
    batch = made.training_batch(0)
    made.head.train()
    assert not torch.equal(made.losses(batch), made.losses(batch))
    made.head.eval()
    assert torch.equal(made.losses(batch), made.losses(batch))


def test_the_bank_repeats_pairs_where_they_are_fewer():
    made = objective(some_pairs(4, 2), dataclasses.replace(CONFIG, batch_size=8, bank=20))
    made.prepare()
    rows = {tuple(row) for row in made.head.bank_text.tolist()}
    assert len(rows) == 4  # half of the pairs
    assert rows <= {tuple(row) for row in made.pairs[np.arange(8)][1].tolist()}
    torch.testing.assert_close(made.head.bank_image.norm(dim=1), torch.ones(20))


# ---- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stop_at(monkeypatch) -> Iterator[Any]:
    """Makes the step with this number, counted over all runs from now on, raise an exception or send a Ctrl-C."""
    optimise = Run.optimise
    left: list[Any] = [None, ""]

    def counted(run: Run[Any], batch: Any) -> Any:
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                left[0] = None
                if left[1] == "kill":
                    raise RuntimeError("killed")
                os.kill(os.getpid(), signal.SIGINT)
        return optimise(run, batch)

    monkeypatch.setattr(Run, "optimise", counted)

    def stop(steps: int, how: str) -> None:
        left[:] = [steps, how]

    return stop


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_files(folder: Path, expected: Path) -> None:
    for name in ("model.safetensors", "last.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert steps_of(folder) == steps_of(expected)


@pytest.mark.parametrize("change", [{}, {"noise": 0.2, "ema_decay": 0.9, "bias_hidden": 4}], ids=["plain", "all"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path, stop_at, change):
    pairs, config = some_pairs(), dataclasses.replace(CONFIG, **change)
    straight = gf.PosteriorHead.fit(pairs, config, k=2, out=tmp_path / "straight")
    for steps in (3, 7, 9):  # before the first checkpoint, after it, and after a later one
        stop_at(steps, "kill")
        with pytest.raises(RuntimeError, match="killed"):
            gf.PosteriorHead.fit(pairs, config, k=2, out=tmp_path / "killed")
    stop_at(2, "interrupt")
    stopped = gf.PosteriorHead.fit(pairs, config, k=2, out=tmp_path / "killed")
    assert (stopped.report["finished"], stopped.report["steps"]) == (False, 13)  # ten steps were kept
    head = gf.PosteriorHead.fit(pairs, config, k=2, out=tmp_path / "killed")
    assert head.report == straight.report
    assert same(head, straight)
    assert_same_files(tmp_path / "killed", tmp_path / "straight")
    assert steps_of(tmp_path / "killed") == list(range(25))


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_an_unfinished_head_says_so_when_it_is_read(tmp_path, stop_at, how):
    """A kill leaves the weights of a checkpoint, whose scales are not fitted yet; Ctrl-C leaves a head with scales."""
    stop_at(12, how)
    with pytest.raises(RuntimeError) if how == "kill" else contextlib.nullcontext():
        gf.PosteriorHead.fit(some_pairs(), CONFIG, k=2, out=tmp_path)
    with pytest.warns(UserWarning, match=rf"the head in {tmp_path} is not finished: .* PosteriorHead\.fit") as caught:
        head = gf.PosteriorHead.from_pretrained(tmp_path)
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    assert head.report["finished"] is False
    assert ("nll" in head.report) == (how == "interrupt")
    gf.PosteriorHead.fit(some_pairs(), CONFIG, k=2, out=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gf.PosteriorHead.from_pretrained(tmp_path).report["finished"]


def test_a_finished_run_returns_at_once(tmp_path, stop_at):
    first = gf.PosteriorHead.fit(some_pairs(), CONFIG, k="auto", out=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    stop_at(0, "kill")  # the first step of any run
    again = gf.PosteriorHead.fit(some_pairs(), CONFIG, k="auto", out=tmp_path)
    assert same(first, again)
    assert first.report == again.report == gf.PosteriorHead.from_pretrained(tmp_path).report
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before


def test_what_is_in_the_folder_of_a_run(tmp_path):
    head = gf.PosteriorHead.fit(some_pairs(), CONFIG, k=2, out=tmp_path / "one")
    own = {".lock", "README.md", "config.json", "last.safetensors", "metrics.jsonl", "model.safetensors"}
    assert {path.name for path in (tmp_path / "one").iterdir()} == own
    loaded = gf.PosteriorHead.from_pretrained(tmp_path / "one")
    assert same(head, loaded)
    assert loaded.report == head.report
    assert not loaded.training
    gf.PosteriorHead.fit(some_pairs(), CONFIG, k="auto", out=tmp_path / "auto")
    own_of_auto = {"config.json", "model.safetensors", "trials"}
    assert {path.name for path in (tmp_path / "auto").iterdir()} == {"README.md", *own_of_auto}
    trials = tmp_path / "auto/trials"
    assert {path.name for path in trials.iterdir()} == {f"points_{k}_dropout_{CONFIG.dropout}" for k in (1, 4, 8)}
    for folder in trials.iterdir():
        assert {path.name for path in folder.iterdir()} == own


def test_auto_keeps_the_head_with_the_highest_likelihood(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "POINTS", (1, 2, 3))
    pairs = some_pairs()
    alone = {points: gf.PosteriorHead.fit(pairs, CONFIG, k=points) for points in (1, 2, 3)}
    best = min(alone.values(), key=lambda head: head.report["nll"])
    for out in (None, tmp_path):
        head = gf.PosteriorHead.fit(pairs, CONFIG, k="auto", out=out)
        assert head.report["trials"] == [alone[points].report for points in (1, 2, 3)]
        assert head.report == {**best.report, "trials": head.report["trials"]}
        assert same(head, best)


def test_auto_compares_short_runs_where_pairs_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "FEW_PAIRS", 50)
    monkeypatch.setattr(fitting, "POINTS", (1, 2))
    head = gf.PosteriorHead.fit(some_pairs(), CONFIG, k="auto", out=tmp_path)
    short = round(fitting.TRIAL_SHARE * CONFIG.steps)
    assert [trial["steps"] for trial in head.report["trials"]] == [short, short]
    assert head.report["steps"] == 24
    chosen = min(head.report["trials"], key=lambda trial: trial["nll"])
    assert head.report["points"] == chosen["points"]
    assert same(head, gf.PosteriorHead.fit(some_pairs(), CONFIG, k=chosen["points"]))


@pytest.mark.parametrize("many", [False, True])
def test_an_interrupted_choice_ends_at_once_and_is_continued(tmp_path, monkeypatch, stop_at, many):
    """The Ctrl-C comes in the second trial, or in the long run after short trials."""
    monkeypatch.setattr(fitting, "FEW_PAIRS", 50 if many else 10**6)
    monkeypatch.setattr(fitting, "POINTS", (1, 2, 3))
    straight = gf.PosteriorHead.fit(some_pairs(), CONFIG, k="auto", out=tmp_path / "straight")
    short = round(fitting.TRIAL_SHARE * CONFIG.steps)
    stop_at(short * 3 + 5 if many else 24 + 5, "interrupt")
    stopped = gf.PosteriorHead.fit(some_pairs(), CONFIG, k="auto", out=tmp_path / "stopped")
    assert (stopped.report["finished"], stopped.report["steps"]) == (False, 6)
    assert (tmp_path / f"stopped/trials/points_3_dropout_{CONFIG.dropout}").exists() == many
    head = gf.PosteriorHead.fit(some_pairs(), CONFIG, k="auto", out=tmp_path / "stopped")
    assert head.report == straight.report
    assert same(head, straight)


def test_only_the_same_run_is_continued(tmp_path):
    gf.PosteriorHead.fit(some_pairs(), CONFIG, k=2, out=tmp_path)
    harmless = dataclasses.replace(CONFIG, checkpoint_every=3, log_every=9, prefetch=False)
    gf.PosteriorHead.fit(some_pairs(), harmless, k=2, out=tmp_path)
    with pytest.raises(ValueError, match=r"another configuration \(lr 0\.005 -> 0\.1\)"):
        gf.PosteriorHead.fit(some_pairs(), dataclasses.replace(CONFIG, lr=0.1), k=2, out=tmp_path)
    with pytest.raises(ValueError, match=r"points 2 -> 3"):
        gf.PosteriorHead.fit(some_pairs(), CONFIG, k=3, out=tmp_path)
    with pytest.raises(ValueError, match="other pairs"):
        gf.PosteriorHead.fit(some_pairs(61), CONFIG, k=2, out=tmp_path)
    fresh = gf.PosteriorHead.fit(some_pairs(61), CONFIG, k=2, out=tmp_path, resume=False)
    assert same(fresh, gf.PosteriorHead.from_pretrained(tmp_path))


def test_a_damaged_state_is_refused(tmp_path):
    gf.PosteriorHead.fit(some_pairs(), CONFIG, k=2, out=tmp_path)
    path = tmp_path / "last.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"last\.safetensors"):
        gf.PosteriorHead.fit(some_pairs(), CONFIG, k=2, out=tmp_path)


def test_the_seed_decides_everything_and_nothing_else_does():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    heads = [gf.PosteriorHead.fit(some_pairs(), CONFIG, k=2, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same(heads[0], heads[1])
    assert not same(heads[0], heads[2])
    assert heads[0].config.seed == 3


def test_settings_of_ones_own_have_a_seed_and_a_number_of_points():
    """What is not given as `k` and `seed` is taken from them; what is given takes their place."""
    config = dataclasses.replace(CONFIG, steps=2, points=3, seed=5)
    own = gf.PosteriorHead.fit(some_pairs(), config)
    assert (own.config.points, own.config.seed) == (3, 5)
    assert "trials" not in own.report
    assert same(own, gf.PosteriorHead.fit(some_pairs(), dataclasses.replace(config, points=1, seed=0), k=3, seed=5))
    other = gf.PosteriorHead.fit(some_pairs(), config, k=2, seed=0)
    assert (other.config.points, other.config.seed) == (2, 0)


def test_two_ranks_train_like_one_process(tmp_path):
    one = ranks.fit_head(ALONE, tmp_path / "one")
    many = run_ranks(2, ranks.fit_head, tmp_path / "many")
    assert all(np.array_equal(rank["weights"], many[0]["weights"]) for rank in many)
    np.testing.assert_allclose(many[0]["weights"], one["weights"], atol=1e-4)
    assert many[0]["report"]["nll"] == pytest.approx(one["report"]["nll"], rel=1e-4)
    written = gf.PosteriorHead.from_pretrained(tmp_path / "many")
    assert np.array_equal(torch.cat([p.detach().flatten() for p in written.parameters()]), many[0]["weights"])


# ---- few pairs, and bad input -------------------------------------------------------------------------------------


def test_fifty_pairs_are_enough_to_learn_something():
    """With the settings that follow from the number of pairs; blind guesses would have log 50 nats each."""
    pairs = some_pairs(50, 1, (8, 8))
    head = gf.PosteriorHead.fit(pairs, k=1)  # it stops early
    assert head.config.dropout == fitting.FEW.dropout
    assert head.config.batch_size == 45
    test = some_pairs(50, 1, (8, 8), seed=2)
    image, text = test[np.arange(50)]
    posterior = gf.RetrievalEntropy(head, image, "t2i", top_k=50)(text)
    own = whole(posterior.top_index, posterior.top_prob.double()).diagonal()
    assert -float(own.log().mean()) < 0.5 * np.log(50)


@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (2, 1), (24, 3)], ids=str)
@pytest.mark.parametrize("images", [2, 50])
def test_narrow_embeddings_and_few_images(widths, images):
    head = gf.PosteriorHead.fit(
        some_pairs(images, 1, widths) if min(widths) > 1 else signs(images, widths), CONFIG, k=2
    )
    assert np.isfinite(head.report["nll"])
    posterior = gf.RetrievalEntropy(head, normalize(torch.randn(4, widths[0])))(normalize(torch.randn(3, widths[1])))
    assert torch.isfinite(posterior.entropy).all()


def signs(images: int, widths: tuple[int, int]) -> gf.EmbeddingPairs:
    """Pairs where a side may be one wide: a sign."""
    return gf.EmbeddingPairs.from_arrays(*(normalize(torch.randn(images, width)) for width in widths))


def test_one_image_needs_held_out_pairs_and_teaches_nothing():
    one = some_pairs(1, 4)
    with pytest.raises(ValueError, match="single image"):
        gf.PosteriorHead.fit(one, CONFIG)
    head = gf.PosteriorHead.fit(one, dataclasses.replace(CONFIG, weight_decay=0.0), val=some_pairs(9), k=1)
    assert head.config.batch_size == 4
    fresh = gf.PosteriorHead.fit(one, dataclasses.replace(CONFIG, steps=1, lr=1e-30), val=some_pairs(9), k=1)
    assert torch.equal(head.towers["t2i"].inner.weight, fresh.towers["t2i"].inner.weight)


def test_the_share_that_is_held_out_is_a_setting(monkeypatch):
    seen = []
    split = gf.EmbeddingPairs.split
    monkeypatch.setattr(gf.EmbeddingPairs, "split", lambda *a: seen.append(a[1:]) or split(*a))
    for share in (0.5, 0.1):
        gf.PosteriorHead.fit(some_pairs(), dataclasses.replace(CONFIG, steps=1, val_fraction=share), k=1, seed=4)
    monkeypatch.setattr(fitting, "HELD_OUT_IMAGES", 3)
    gf.PosteriorHead.fit(some_pairs(), dataclasses.replace(CONFIG, steps=1), k=1)
    assert seen == [(0.5, 4), (0.1, 4), (0.05, 0)]


def test_an_error_names_what_is_wrong():
    pairs = some_pairs()
    empty = pairs.subset([])
    for change, kind, words in (
        ({"pairs": [1]}, TypeError, "pairs must be EmbeddingPairs, got list"),
        ({"val": "val"}, TypeError, "val must be EmbeddingPairs, got str"),
        ({"pairs": empty}, ValueError, "pairs hold no pairs"),
        ({"val": empty}, ValueError, "val hold no pairs"),
        ({"val": some_pairs(widths=(6, 4))}, ValueError, "val have widths 6 and 4, but pairs have 6 and 5"),
        ({"conf": gf.TrainConfig()}, TypeError, "conf must be a HeadConfig, got TrainConfig"),
        ({"k": "many"}, ValueError, "k must be a number of points or \"auto\", got 'many'"),
        ({"k": 0}, ValueError, "points must"),
        ({"k": 2.0}, TypeError, "points must be an integer"),
        ({"seed": -1}, ValueError, "seed"),
        ({"out": 3}, TypeError, "out"),
        ({"device": "nowhere"}, ValueError, "device 'nowhere' cannot be used here"),
    ):
        with pytest.raises(kind, match=words):
            gf.PosteriorHead.fit(**{"pairs": pairs, "conf": CONFIG, "k": 1, **change})
    with pytest.raises(ValueError, match="batch_size=16 is too small for 17 ranks"):
        HeadObjective(random_head(CONFIG, 6, 5), pairs, pairs, CONFIG, World(0, 17))


def test_the_bank_does_not_count_against_its_own_items():
    """In a world without hubs no item is near to everything, and nothing is to be corrected."""
    generator = torch.Generator().manual_seed(3)
    image = sample_uniform(700, 16, generator=generator)
    text = normalize(image + 0.25 * torch.randn(image.shape, generator=generator))
    pairs, val = gf.EmbeddingPairs.from_arrays(image, text).split(0.3, 0)
    config = dataclasses.replace(CONFIG, points=1, bank=128, batch_size=64)
    head = gf.PosteriorHead(config, 16, 16)
    objective = HeadObjective(head, pairs, val, config)
    objective.prepare()
    for search in objective.held_out.searches:
        partners = {row.tobytes() for row in head.bank(search.direction.reverse).numpy()}
        assert not any(row.tobytes() in partners for row in search.items.numpy())
    fit_scales(head, objective.held_out.searches)
    assert float(head.hub_weight.max()) < 0.3


@pytest.mark.parametrize("least", [math.inf, None])
@torch.no_grad()
def test_hubs_are_not_corrected_where_no_weight_is_better_than_none(monkeypatch, least):
    """Whatever the search ends with: a loss that is too high, or the very loss of no correction."""
    made = objective(some_pairs())
    search = held_out_search(some_pairs(), some_pairs(8, seed=1), Direction.T2I, CONFIG, CPU)

    def ended(loss: Callable[[float], float], **_: object) -> SimpleNamespace:
        return SimpleNamespace(x=0.5, fun=loss(0.0) if least is None else least)

    monkeypatch.setattr(fitting, "minimize_scalar", ended)
    weight, loss = fitting._best_hub_weight(made.head, search, 1.0)
    assert weight == 0.0
    assert loss == fitting._best_hub_weight(made.head, search, 1.0)[1] < math.inf
