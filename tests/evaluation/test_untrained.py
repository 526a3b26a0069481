"""References that need no training, against dense cosines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation import auroc
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.evaluation.untrained import UNTRAINED, knn_distance, margin, max_softmax, softmax_entropy
from geoflow_fast.geometry import normalize
from geoflow_fast.retrieval.task import RetrievalTask
from tests.evaluation.helpers import planted, planted_pairs

DIM = 12


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(planted_pairs(500, 1), planted_pairs(2000, 0))


@pytest.fixture(scope="module", params=["t2i", "i2t"])
def task(request: pytest.FixtureRequest) -> RetrievalTask:
    return RetrievalTask.of(planted_pairs(200, 2), request.param)


def fitted(name: str, study: Study, task: RetrievalTask) -> Method:
    method = UNTRAINED[name](study)
    method.fit(task)
    return method


def uncertainty(name: str, study: Study, task: RetrievalTask) -> Tensor:
    answers = plain_search(task).index[:, 0]
    method = fitted(name, study, task)
    parts = [method.score(rows, answers[rows]) for rows in (slice(0, 70), slice(70, len(task)))]
    return torch.cat([part.uncertainty for part in parts])


def sides(count: int, seed: int, direction: Direction) -> tuple[Tensor, Tensor]:
    """Queries and items of planted pairs."""
    pairs = planted(count, seed)[:2]
    return direction.queries(*pairs), direction.items(*pairs)


def test_against_dense_cosines(study, task):
    cosine = task.queries.double() @ task.items.T.double()
    pi = (fitted("max_softmax", study, task).scale * cosine).softmax(1)
    best = cosine.topk(2).values
    known = sides(2000, 0, task.direction)[0].double()
    expected = {
        "max_softmax": 1 - pi.amax(1),
        "margin": best[:, 1] - best[:, 0],
        "softmax_entropy": torch.special.entr(pi).sum(1),
        "knn": 1 - (task.queries.double() @ known.T).topk(10).values[:, -1],
    }
    assert set(expected) == set(UNTRAINED)
    for name, truth in expected.items():
        torch.testing.assert_close(uncertainty(name, study, task), truth, atol=2e-5, rtol=1e-4, msg=name)


def test_stated_probabilities_are_those_of_the_softmax(study, task):
    method = fitted("max_softmax", study, task)
    answers = plain_search(task).index[:, 0]
    scores = method.score(slice(None), answers)
    log_pi = (method.scale * task.queries.double() @ task.items.T.double()).log_softmax(1)
    torch.testing.assert_close(scores.p_answer, log_pi.exp().amax(1), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(scores.nll, -log_pi.diagonal(), atol=1e-4, rtol=1e-4)
    assert torch.equal(scores.top, answers)


def test_temperature_is_tuned_on_held_out_pairs(study, task):
    """No other temperature gives the true items of the held-out pairs more probability."""
    queries, items = sides(500, 1, task.direction)
    scale = fitted("softmax_entropy", study, task).scale
    losses = [
        float(-(factor * scale * queries @ items.T).log_softmax(1).diagonal().mean()) for factor in (0.8, 1, 1.25)
    ]
    assert losses[1] == min(losses)


def test_finds_planted_uncertainty(study, task):
    vague = planted(200, 2)[2]
    for name in ("max_softmax", "margin", "softmax_entropy"):
        assert auroc(uncertainty(name, study, task), ~vague) > 0.7, name


def test_shards_change_nothing(tmp_path):
    image, text, _ = planted(200, 2)
    for number, part in enumerate(image.split(70)):
        np.save(tmp_path / f"part_{number}.npy", part.numpy())
    whole, parts = gf.Gallery(image), gf.Gallery(tmp_path)
    torch.testing.assert_close(margin(text, whole), margin(text, parts), atol=1e-6, rtol=1e-6)
    for score in (max_softmax, softmax_entropy):
        torch.testing.assert_close(score(text, whole, 9.0), score(text, parts, 9.0), atol=1e-6, rtol=1e-6)


def test_the_margin_of_a_single_item_is_zero():
    assert margin(torch.eye(DIM)[:3], gf.Gallery(torch.eye(DIM)[:1])).tolist() == [0.0] * 3


def test_knn_is_uncertain_about_what_it_has_not_seen():
    generator = torch.Generator().manual_seed(0)
    known = normalize(torch.randn(1000, DIM, generator=generator) + torch.eye(DIM)[0] * 6)
    strange = normalize(torch.randn(200, DIM, generator=generator) + torch.eye(DIM)[1] * 6)
    usual = normalize(torch.randn(200, DIM, generator=generator) + torch.eye(DIM)[0] * 6)
    distance = knn_distance(torch.cat((usual, strange)), known, 5)
    assert auroc(distance, torch.arange(400) < 200) > 0.99


def test_too_few_training_pairs_are_named():
    with pytest.raises(ValueError, match="fewer than neighbours=10"):
        UNTRAINED["knn"](Study(planted_pairs(50, 0), planted_pairs(8, 0)))
