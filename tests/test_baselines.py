"""Baselines: each against something independent, and each finds planted uncertainty."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import baselines
from geoflow_fast.baselines import KNNDistance, Margin, MaxSoftmax, SoftmaxEntropy
from geoflow_fast.geometry import normalize, sample_uniform

DIM, ITEMS = 12, 400
REFERENCES = ("max_softmax", "margin", "softmax_entropy", "knn")


def planted(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs whose text lies near its image or, for a vague half at one end of the first axis, far from it."""
    generator = torch.Generator().manual_seed(seed)
    image = sample_uniform(count, DIM, generator=generator)
    vague = image[:, 0] > 0
    noise = torch.randn(count, DIM, generator=generator) * torch.where(vague, 0.35, 0.05).unsqueeze(1)
    return image, normalize(image + noise), vague


def planted_pairs(count: int, seed: int) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(*planted(count, seed)[:2])


def auroc(score: Tensor, positive: Tensor) -> float:
    above = score[positive].unsqueeze(1) - score[~positive]
    return float((above > 0).double().mean() + (above == 0).double().mean() / 2)


@pytest.fixture(scope="module")
def world() -> tuple[Tensor, Tensor, Tensor]:
    return planted(ITEMS, 2)


@pytest.fixture(scope="module")
def references() -> dict[str, baselines.Baseline]:
    found = {}
    for name in REFERENCES:
        found[name] = baselines.find(name)(DIM, DIM)
        assert found[name].fit(planted_pairs(2000, 0), planted_pairs(500, 1)) is None
    return found


def sides(world: tuple[Tensor, Tensor, Tensor], direction: str) -> tuple[Tensor, Tensor]:
    return (world[1], world[0]) if direction == "t2i" else (world[0], world[1])


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
class TestReferences:
    def test_against_dense_cosines(self, references, world, direction):
        queries, items = sides(world, direction)
        cosine = queries.double() @ items.T.double()
        place = ("i2t", "t2i").index(direction)
        scale = float(references["max_softmax"].scale[place])
        pi = (scale * cosine).softmax(1)
        best = cosine.topk(2).values
        own = planted(2000, 0)[1 if direction == "t2i" else 0].double()
        expected = {
            "max_softmax": 1 - pi.amax(1),
            "margin": best[:, 1] - best[:, 0],
            "softmax_entropy": torch.special.entr(pi).sum(1),
            "knn": 1 - (queries.double() @ own.T).topk(10).values[:, -1],
        }
        for name, truth in expected.items():
            found = references[name].uncertainty(queries, items, direction)
            torch.testing.assert_close(found, truth, atol=2e-5, rtol=1e-4, msg=name)

    def test_temperature_is_tuned_on_held_out_pairs(self, references, direction):
        """No other temperature gives the true items of the held-out pairs more probability."""
        image, text, _ = planted(500, 1)
        queries, items = (text, image) if direction == "t2i" else (image, text)
        scale = float(references["softmax_entropy"].scale[("i2t", "t2i").index(direction)])
        losses = [
            float(-(factor * scale * queries @ items.T).log_softmax(1).diagonal().mean()) for factor in (0.8, 1, 1.25)
        ]
        assert losses[1] == min(losses)

    def test_finds_planted_uncertainty(self, references, world, direction):
        queries, items = sides(world, direction)
        for name in ("max_softmax", "margin", "softmax_entropy"):
            assert auroc(references[name].uncertainty(queries, items, direction), world[2]) > 0.7, name

    def test_shards_change_nothing(self, references, world, direction, tmp_path):
        queries, items = sides(world, direction)
        for number, part in enumerate(items.split(70)):
            np.save(tmp_path / f"part_{number}.npy", part.numpy())
        for method in references.values():
            whole, parts = (method.uncertainty(queries, x, direction) for x in (items, tmp_path))
            torch.testing.assert_close(whole, parts, atol=1e-6, rtol=1e-6)


def test_knn_knows_what_it_has_not_seen():
    generator = torch.Generator().manual_seed(0)
    image = normalize(torch.randn(1000, DIM, generator=generator) + torch.eye(DIM)[0] * 6)
    method = KNNDistance(DIM, DIM, neighbours=5)
    method.fit(gf.EmbeddingPairs.from_arrays(image, image))
    strange = normalize(torch.randn(200, DIM, generator=generator) + torch.eye(DIM)[1] * 6)
    usual = normalize(torch.randn(200, DIM, generator=generator) + torch.eye(DIM)[0] * 6)
    found = method.uncertainty(torch.cat((usual, strange)), image, "i2t")
    assert auroc(found, torch.arange(400) >= 200) > 0.99


class TestSaving:
    @pytest.mark.parametrize("name", REFERENCES)
    def test_comes_back(self, references, world, name, tmp_path):
        references[name].save(tmp_path)
        back = baselines.load(tmp_path)
        assert type(back) is type(references[name])
        expected = references[name].uncertainty(world[1], world[0], "t2i")
        assert torch.equal(back.uncertainty(world[1], world[0], "t2i"), expected)

    def test_of_another_method(self, references, tmp_path):
        references["margin"].save(tmp_path)
        with pytest.raises(ValueError, match="holds a 'margin', not a 'knn'"):
            KNNDistance.load(tmp_path)

    def test_damaged(self, references, tmp_path):
        references["knn"].save(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
            baselines.load(tmp_path)

    def test_unknown_method(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"method": "oracle"}))
        with pytest.raises(ValueError, match="method must be one of max_softmax, margin"):
            baselines.load(tmp_path)

    def test_empty_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="holds no baseline"):
            baselines.load(tmp_path)

    def test_unfitted(self, tmp_path):
        with pytest.raises(ValueError, match="nothing to save"):
            Margin(DIM, DIM).save(tmp_path)
        assert not list(tmp_path.iterdir())


class TestBadInput:
    def test_unfitted(self, world):
        with pytest.raises(ValueError, match="max_softmax is not fitted"):
            MaxSoftmax(DIM, DIM).uncertainty(world[1], world[0], "t2i")

    @pytest.mark.parametrize(
        ("queries", "items", "direction", "words"),
        [
            (torch.ones(3, DIM), torch.eye(DIM), "t2i", "queries row 0 has norm"),
            (torch.eye(DIM)[:, :-1], torch.eye(DIM), "t2i", r"queries must be \[Q, 12\]"),
            (torch.eye(DIM), torch.eye(DIM - 1), "t2i", "gallery has width 11"),
            (torch.eye(DIM), torch.eye(DIM), "joint", "direction must be one of"),
        ],
    )
    def test_is_named(self, references, queries, items, direction, words):
        with pytest.raises(ValueError, match=words):
            references["margin"].uncertainty(queries, items, direction)

    def test_widths(self):
        with pytest.raises(ValueError, match="one width, got 4 and 5"):
            SoftmaxEntropy(4, 5)
        with pytest.raises(ValueError, match="pairs have widths 12 and 12, not 5 and 5"):
            Margin(5, 5).fit(planted_pairs(10, 0))
        with pytest.raises(ValueError, match="fewer than neighbours=10"):
            KNNDistance(DIM, DIM).fit(planted_pairs(8, 0))
