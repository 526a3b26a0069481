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
    task = pair_task(asking, direction, 2, seed=4, among=pairs)
    chosen = drawn(len(asking), 2, 4)
    image, text = asking[chosen]
    assert torch.equal(task.queries, direction.queries(image, text))
    assert task.own.shape == (2, 1)
    assert torch.equal(task.items[task.own[:, 0]], direction.items(image, text))
    assert len(task.items) == direction.items(4, 7)
    typical = typical_queries(others, direction, 2, seed=4)
    assert torch.equal(typical, direction.queries(*others[drawn(len(others), 2, 4)]))


def test_pairs_without_queries_are_refused(pairs):
    with pytest.raises(ValueError, match="there is no query to search for"):
        RetrievalTask.of(pairs.subset([]), "t2i")
    with pytest.raises(ValueError, match="leave no query to fit on"):
        pair_task(pairs, Direction.T2I, 0, seed=0)
