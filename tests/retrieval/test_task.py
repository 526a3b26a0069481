"""The one retrieval task: which queries are drawn, which items they search, and which of these are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.task import RetrievalTask, pair_task, typical_queries

IMAGE_OF_TEXT = np.array([3, 0, 0, 1, 3, 2, 3])


@pytest.fixture
def pairs() -> gf.EmbeddingPairs:
    """Seven texts of four images; images 0 and 3 have several."""
    return gf.EmbeddingPairs.from_arrays(sample_uniform(4, 5), sample_uniform(7, 5), image_index=IMAGE_OF_TEXT)


def drawn(count: int, most: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("direction", CONDITIONAL)
def test_queries_are_drawn_by_the_seed_and_search_all_items(pairs, direction, seed):
    task = RetrievalTask.of(pairs, direction, max_queries=3, seed=seed)
    count = direction.queries(4, 7)
    rows = drawn(count, 3, seed)
    assert task.query_row.tolist() == rows.tolist()
    assert len(task.items) == direction.items(4, 7)
    for query, own in zip(rows, task.own):
        texts = np.flatnonzero(query == IMAGE_OF_TEXT)
        expected = direction.queries(texts, [IMAGE_OF_TEXT[query]])
        assert own[own >= 0].tolist() == list(expected)
    assert bool(task.is_right(task.own.clamp(min=0))[task.own >= 0].all())
    image, text = task.pairs_with(task.own[:, 0])
    assert torch.equal(direction.queries(image, text), task.queries)


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_items_that_are_right_for_no_query_can_be_left_out(pairs, direction):
    whole = RetrievalTask.of(pairs, direction, max_queries=2, seed=1)
    part = RetrievalTask.of(pairs, direction, max_queries=2, seed=1, all_items=False)
    assert torch.equal(part.queries, whole.queries)
    assert torch.equal(part.query_image, whole.query_image)
    assert sorted(part.own[part.own >= 0].tolist()) == list(range(len(part.items)))
    assert torch.equal(part.own >= 0, whole.own >= 0)
    own = part.own >= 0
    assert torch.equal(part.items[part.own[own]], whole.items[whole.own[own]])


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_every_pair_asks_for_its_own_item_alone(pairs, direction):
    asking, others = pairs.split(0.5, seed=0)
    task = pair_task(asking, direction, 2, seed=4)
    chosen = drawn(len(asking), 2, 4)
    image, text = asking[chosen]
    assert torch.equal(task.queries, direction.queries(image, text))
    assert task.own.shape == (2, 1)
    assert torch.equal(task.items[task.own[:, 0]], direction.items(image, text))
    assert len(task.items) == len(np.unique(direction.items(asking.image_row, asking.text_row)))
    typical = typical_queries(others, direction, 2, seed=4)
    assert torch.equal(typical, direction.queries(*others[drawn(len(others), 2, 4)]))


def test_pairs_without_queries_are_refused(pairs):
    with pytest.raises(ValueError, match="there is no query to search for"):
        RetrievalTask.of(pairs.subset([]), "t2i")
    with pytest.raises(ValueError, match="leave no query to fit on"):
        pair_task(pairs, Direction.T2I, 0, seed=0)


@pytest.mark.parametrize("direction", CONDITIONAL)
def test_judgements_that_say_what_pairs_say_give_the_same_task(pairs, direction):
    paired = RetrievalTask.of(pairs, direction)
    numbers = np.arange(4)[IMAGE_OF_TEXT], np.arange(7)
    qrels = gf.Qrels(direction.queries(*numbers), direction.items(*numbers), np.ones(7))
    judged = RetrievalTask.from_qrels(paired.queries, paired.items.numpy(), qrels, direction)
    assert judged.own.tolist() == paired.own.tolist()
    everything = torch.arange(-1, len(paired.items)).repeat(len(paired), 1)
    assert torch.equal(judged.is_right(everything), paired.is_right(everything))
    for one, other in zip(judged.pairs_with(judged.own[:, 0]), paired.pairs_with(paired.own[:, 0])):
        torch.testing.assert_close(one, other)


def judgements(seed: int) -> tuple[gf.Qrels, np.ndarray]:
    """Grades 0 to 2 of some of 9 queries and 6 items, and all of them as a table [9, 6]."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 3, (9, 6)) * (rng.random((9, 6)) < 0.4)
    table[4] = 0
    query, item = rng.permutation(np.argwhere((table > 0) | (rng.random((9, 6)) < 0.3))).T
    return gf.Qrels(query, item, table[query, item]), table


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_items_may_be_right_for_any_queries(seed, least):
    """No numbering of images could say this: queries share some of their items."""
    qrels, table = judgements(seed)
    queries = sample_uniform(9, 5)
    task = RetrievalTask.from_qrels(queries, sample_uniform(6, 5), qrels, "t2i", least_grade=least)
    right = table >= least
    assert task.query_row.tolist() == np.flatnonzero(right.any(1)).tolist()
    torch.testing.assert_close(task.queries, queries[task.query_row])
    every = torch.arange(6).repeat(len(task), 1)
    assert task.is_right(every).tolist() == right[task.query_row].tolist()
    backwards = torch.arange(len(task)).flip(0)
    assert task.is_right(every.unsqueeze(2), backwards).squeeze(2).tolist() == right[task.query_row][::-1].tolist()
    assert not task.is_right(torch.full((len(task), 1), -1)).any()
    for row, own in zip(task.query_row, task.own):
        listed = own[own >= 0].numpy()
        assert sorted(listed) == np.flatnonzero(right[row]).tolist()
        assert (np.diff(table[row, listed]) <= 0).all()
    few = RetrievalTask.from_qrels(queries, task.items, qrels, "t2i", least_grade=least, max_queries=2, seed=seed)
    assert few.query_row.tolist() == task.query_row[drawn(len(task), 2, seed)].tolist()
    assert few.is_right(every[:2]).tolist() == right[few.query_row].tolist()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queries": sample_uniform(9, 4)}, "queries of 4 and items of 5"),
        ({"items": 2 * sample_uniform(6, 5)}, "items row 0 has norm 2"),
        ({"queries": sample_uniform(3, 5)}, "name query 8, but there are 3 rows"),
        ({"least_grade": 3}, "no judgement has at least the grade 3"),
        ({"direction": "joint"}, "direction"),
        ({"max_queries": 0}, "max_queries"),
    ],
)
def test_bad_judgements_are_refused(changes, words):
    good = {"queries": sample_uniform(9, 5), "items": sample_uniform(6, 5), "direction": "t2i"}
    with pytest.raises(ValueError, match=words):
        RetrievalTask.from_qrels(**good | {"qrels": gf.Qrels([0, 8], [1, 2], [1, 1])} | changes)
    with pytest.raises(TypeError, match="qrels must be Qrels"):
        RetrievalTask.from_qrels(**good, qrels=np.eye(9, 6))
