"""Plain search over pairs with several captions per image."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.retrieval.task import RetrievalTask
from tests.evaluation.helpers import captioned


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("k", [1, 5])
def test_recall_is_that_of_all_cosines(pairs, direction, k):
    image, text = pairs.image[np.arange(40)], pairs.text[np.arange(120)]
    cosine = text @ image.T if direction == "t2i" else image @ text.T
    right = pairs.image_row[:, None] == np.arange(40)
    right = right if direction == "t2i" else right.T
    best = np.argsort(-cosine, axis=1)[:, :k]
    expected = np.take_along_axis(right, best, axis=1).any(1).mean()
    task = RetrievalTask.of(pairs, direction)
    answers = plain_search(task, k)
    assert answers.recall(k) == pytest.approx(expected)
    assert np.array_equal(answers.index.numpy(), best)
    for query, own in enumerate(task.own):
        assert set(own[own >= 0].tolist()) == set(np.flatnonzero(right[query]))


@pytest.mark.parametrize(("direction", "items"), [("t2i", 20), ("i2t", 60)])
def test_an_image_that_is_stored_once_per_text_is_one_item(direction, items):
    """clip-retrieval stores images like this: rows repeat, and the group tells which belong to one image."""
    once = captioned(20, 3, 3)
    repeated = gf.EmbeddingPairs.from_arrays(once.image[once.image_row], once.text[np.arange(60)])
    repeated.group = once.group
    answers = [plain_search(RetrievalTask.of(part, direction), 10) for part in (once, repeated)]
    assert len(RetrievalTask.of(repeated, direction).items) == items
    for k in (1, 5, 10):
        assert answers[1].recall(k) == answers[0].recall(k)


def test_queries_are_drawn_by_the_seed(pairs):
    few = [RetrievalTask.of(pairs, "t2i", max_queries=7, seed=seed) for seed in (0, 0, 1)]
    assert len(few[0]) == 7
    assert len(few[0].items) == 40
    assert torch.equal(few[0].queries, few[1].queries)
    assert not torch.equal(few[0].queries, few[2].queries)
