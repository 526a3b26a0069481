"""Settings and networks of a head, and its files."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import geoflow_fast as gf
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.head.model import FIRST_CONCENTRATION, KIND, MOST_LOG_CONCENTRATION, head_digest
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

CONFIG = gf.HeadConfig(points=3, hidden=8, bank=5, bias_hidden=4)
I2T, T2I = CONDITIONAL


def random_head(config: gf.HeadConfig = CONFIG, image_dim: int = 6, text_dim: int = 6) -> gf.PosteriorHead:
    """A head none of whose weights has its first value."""
    head = gf.PosteriorHead(config, image_dim, text_dim).eval()
    with torch.no_grad():
        for x in head.parameters():
            x.add_(0.2 * torch.randn_like(x))
        head.scale.copy_(torch.tensor([0.8, 1.25]))
        head.hub_weight.copy_(torch.tensor([0.5, 0.75]))
        for bank in (head.bank_image, head.bank_text):
            bank.copy_(sample_uniform(*bank.shape))
    head.report = {"points": config.points, "nll": 1.5}
    return head


def same(a: gf.PosteriorHead, b: gf.PosteriorHead) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


# ---- settings -----------------------------------------------------------------------------------------------------


def test_settings_survive_json():
    config = dataclasses.replace(CONFIG, noise=0.25, seed=7, ema_decay=0.9)
    assert gf.HeadConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(ValueError, match=r"differ from those of this release's HeadConfig: \['heads'\]"):
        gf.HeadConfig.from_json({**config.to_json(), "heads": 3})
    with pytest.raises(ValueError, match=r"\['bank'\]"):
        gf.HeadConfig.from_json({name: x for name, x in config.to_json().items() if name != "bank"})


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"points": 0}, ValueError),
        ({"points": 65}, ValueError),
        ({"points": 2.0}, TypeError),
        ({"points": True}, TypeError),
        ({"hidden": 0}, ValueError),
        ({"bank": -1}, ValueError),
        ({"bias_hidden": 1 << 17}, ValueError),
        ({"noise": -0.1}, ValueError),
        ({"noise": math.nan}, ValueError),
        ({"dropout": 1.0}, ValueError),
        ({"dropout": -0.1}, ValueError),
        ({"dropout": "some"}, TypeError),
        ({"steps": 0}, ValueError),
    ],
    ids=str,
)
def test_an_error_names_the_setting(change, kind):
    with pytest.raises(kind, match=next(iter(change))):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("widths", [(0, 4), (4, 0), (4, 1 << 21)], ids=str)
def test_a_head_has_widths_within_limits(widths):
    with pytest.raises(ValueError, match=r"image_dim|text_dim"):
        gf.PosteriorHead(CONFIG, *widths)


def test_a_head_is_made_of_a_head_config():
    with pytest.raises(TypeError, match="config must be a HeadConfig, got TrainConfig"):
        gf.PosteriorHead(gf.TrainConfig(), 4, 4)


# ---- networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_the_first_point_is_nearly_the_query_itself(direction):
    head = gf.PosteriorHead(dataclasses.replace(CONFIG, points=1), 6, 6)
    queries = sample_uniform(9, 6)
    points = head.points(queries, direction)
    torch.testing.assert_close(points.points.norm(dim=2), torch.full((9, 1), FIRST_CONCENTRATION))
    assert float(functional.cosine_similarity(points.points[:, 0], queries).min()) > 0.98
    assert not points.log_weights.any()
    assert not head.item_bias(queries, direction).any()


def test_several_points_begin_in_different_places():
    points = gf.PosteriorHead(CONFIG, 6, 6).points(sample_uniform(9, 6), T2I).points / FIRST_CONCENTRATION
    nearest = torch.cdist(points, points) + 9 * torch.eye(3)
    assert float(nearest.min()) > 0.05


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_points_are_those_of_the_definition(direction):
    """Written out one query at a time, in float64."""
    head = random_head(image_dim=6, text_dim=4).double()
    for name in CONDITIONAL:
        head.towers[str(name)].base.copy_(torch.randn_like(head.towers[str(name)].base))
    queries = sample_uniform(7, direction.queries(6, 4), dtype=torch.float64)
    items = sample_uniform(5, direction.items(6, 4), dtype=torch.float64)
    made, bias, scale = head.points(queries, direction), head.item_bias(items, direction), head.scale_of(direction)
    weights = {name.removeprefix(f"towers.{direction}."): x for name, x in head.state_dict().items()}
    for row, query in enumerate(queries):
        moved = (weights["base"] + weights["change.weight"]) @ query
        inner = weights["inner.weight"] @ query + weights["inner.bias"]
        hidden = inner * torch.sigmoid(inner)
        offsets = (weights["offsets.weight"] @ hidden + weights["offsets.bias"]).view(3, -1)
        change, logits = (weights["shape.weight"] @ hidden + weights["shape.bias"]).view(2, 3)
        for k in range(3):
            centre = (moved + offsets[k]) / (moved + offsets[k]).norm()
            length = torch.exp(weights["log_concentration"][k] + change[k])
            torch.testing.assert_close(made.points[row, k], scale * length * centre)
            torch.testing.assert_close(made.log_weights[row, k], scale * logits.log_softmax(0)[k])
    first, _, last = head.biases[str(direction)]
    for row, item in enumerate(items):
        inner = first.weight @ item + first.bias
        wanted = scale * (last.weight @ (inner * torch.sigmoid(inner)))
        torch.testing.assert_close(bias[row], wanted[0])


def test_concentrations_have_a_limit():
    head = random_head()
    head.towers["t2i"].log_concentration.data.fill_(1e3)
    lengths = head.raw_points(sample_uniform(3, 6), T2I).points.norm(dim=2)
    torch.testing.assert_close(lengths, torch.full((3, 3), math.exp(MOST_LOG_CONCENTRATION)))


def test_points_have_no_dropout_in_either_mode():
    head, queries = random_head(dataclasses.replace(CONFIG, dropout=0.5)), sample_uniform(5, 6)
    assert torch.equal(head.train().points(queries, I2T).points, head.eval().points(queries, I2T).points)
    dropped = head.raw_points(queries, I2T, dropout=0.5).points
    assert not torch.equal(dropped, head.raw_points(queries, I2T).points)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_a_head_can_be_called(direction):
    """The call gives the points, with gradients, and hooks fire for it and for a scorer."""
    head = random_head(image_dim=6, text_dim=4)
    queries = sample_uniform(7, 4 if direction == "t2i" else 6).double().requires_grad_()
    made, wanted = head(queries, direction), head.points(queries, direction)
    assert torch.equal(made.points, wanted.points)
    assert torch.equal(made.log_weights, wanted.log_weights)
    assert not wanted.points.requires_grad
    made.points.sum().backward()
    assert queries.grad is not None
    assert head.towers[direction].inner.weight.grad is not None
    seen = []
    head.register_forward_hook(lambda _, arguments, points: seen.append((arguments[0].shape, points.points.shape)))
    head(queries, direction)
    gf.RetrievalEntropy(head, sample_uniform(5, 6 if direction == "t2i" else 4), direction)(queries)
    item = 6 if direction == "t2i" else 4
    assert (queries.shape, (7, 3, item)) in seen[:1]
    assert (queries.shape, (7, 3, item)) in seen[1:]
    assert head(queries[:0], direction).points.shape == (0, 3, item)
    for bad, words in (
        (queries[0], r"queries must be \[Q, \d\]"),
        (sample_uniform(3, 9), r"queries must be \[Q, \d\], got \(3, 9\)"),
        (2 * queries, "queries row 0 has norm 2"),
    ):
        with pytest.raises(ValueError, match=words):
            head(bad, direction)
    with pytest.raises(ValueError, match="direction must be one of"):
        head(queries, "joint")


def test_the_bank_is_that_of_the_queries():
    head = random_head(image_dim=6, text_dim=4)
    assert torch.equal(head.bank(Direction.T2I), head.bank_text)
    assert torch.equal(head.bank(Direction.I2T), head.bank_image)
    assert torch.equal(head.bank("t2i"), head.bank_text)
    assert (head.scale_of("t2i"), head.hub_weight_of("i2t")) == (1.25, 0.5)
    for call in (head.bank, head.scale_of, head.hub_weight_of):
        with pytest.raises(ValueError, match="direction must be one of"):
            call("joint")


def test_one_line_says_what_a_head_is():
    assert "image 6 x text 4, 3 points" in repr(random_head(text_dim=4))


# ---- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("change", [{}, {"bank": 0, "bias_hidden": 0, "points": 1}], ids=["whole", "plain"])
def test_a_head_survives_its_file(tmp_path, dtype, change):
    head = random_head(dataclasses.replace(CONFIG, **change), 6, 4).to(dtype)
    head.save_pretrained(tmp_path / "head")
    loaded = gf.PosteriorHead.from_pretrained(tmp_path / "head")
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert same(head, loaded)
    assert (loaded.config, loaded.report, loaded.training) == (head.config, head.report, False)
    assert loaded.example.dtype == dtype
    assert head_digest(loaded) == head_digest(head)
    assert json.loads((tmp_path / "head/config.json").read_text())["kind"] == KIND


def test_the_digest_is_that_of_everything_a_score_depends_on():
    head = random_head()
    seen = {head_digest(head)}
    for x in (head.scale, head.hub_weight, head.bank_text, head.towers["t2i"].inner.weight.data):
        x.mul_(0.5)
        seen.add(head_digest(head))
    assert len(seen) == 5
    head.report = {}
    assert head_digest(head) in seen


@pytest.fixture
def folder(tmp_path) -> Path:
    random_head().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_file_is_refused(folder, damage):
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    middle = len(raw) - 40
    if damage == "cut":
        del raw[middle:]
    elif damage == "flipped":
        raw[middle] ^= 1
    path.write_bytes({"empty": b"", "text": b"not a head"}.get(damage, bytes(raw)))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        gf.PosteriorHead.from_pretrained(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"image_dim": 7},
        {"image_dim": -1},
        {"text_dim": 2**40},
        {"text_dim": "wide"},
        {"report": 3},
        {"config": 7},
        {"config": {"points": 3}},
        {"config": {**CONFIG.to_json(), "points": 4}},
        {"config": {**CONFIG.to_json(), "hidden": 2**40}},
        {"config": {**CONFIG.to_json(), "bank": 10**9}},
        {"config": {**CONFIG.to_json(), "bias_hidden": 0}},
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_is_refused(folder, change):
    """Its checksum is right; nothing is allocated for what it claims."""
    path = folder / "model.safetensors"
    tensors, info = load_tensors(path, kind=KIND)
    save_tensors(path, tensors, kind=KIND, info={**info, **change})
    with pytest.raises((ValueError, TypeError), match=r"model\.safetensors"):
        gf.PosteriorHead.from_pretrained(folder)


@pytest.mark.parametrize("name", ["scale", "bank_text", "towers.t2i.log_concentration"])
def test_a_file_without_one_of_its_tensors_is_refused(folder, name):
    path = folder / "model.safetensors"
    tensors, info = load_tensors(path, kind=KIND)
    del tensors[name]
    save_tensors(path, tensors, kind=KIND, info=info)
    with pytest.raises(ValueError, match=rf"holds nothing as {name}"):
        gf.PosteriorHead.from_pretrained(folder)


def test_flows_and_heads_are_not_taken_for_each_other(folder, flow):
    with pytest.raises(ValueError, match=KIND):
        gf.GeoFlow.from_pretrained(folder)
    flow.save_pretrained(folder / "flow")
    with pytest.raises(ValueError, match=KIND):
        gf.PosteriorHead.from_pretrained(folder / "flow")
    with pytest.raises(OSError, match="nowhere"):
        gf.PosteriorHead.from_pretrained(folder / "nowhere")
