"""Single numbers of a watch that a verdict hides: what is worth judging, odds, and shares of which nothing is known."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import geoflow_fast as gf
from geoflow_fast.decisions.watch import TO_LABEL, _odds
from tests.decisions.helpers import search

K = 20


@pytest.fixture(scope="module")
def rule() -> gf.Rule:
    fitted, tested = search(300, K, seed=1), search(400, K, seed=2)
    return gf.Trust().fit(fitted.scores, fitted.relevant).certify(tested.scores, tested.relevant, 0.2)


def test_the_queries_to_judge_are_frequent_in_the_log_and_uncertain(rule):
    health = gf.watch(rule, search(300, K, seed=3).scores, every=300)
    worth = health.odds * np.sqrt(health.p_right * (1 - health.p_right))
    chosen = health.to_label - health.last.start
    assert len(chosen) == TO_LABEL
    assert (np.diff(worth[chosen]) <= 0).all()
    assert worth[chosen].min() >= np.delete(worth, chosen).max()


def test_where_queries_without_their_items_look_alike_nothing_is_known_of_their_share(rule):
    alike = dataclasses.replace(rule.reference, twins=rule.reference.heads)
    last = gf.watch(dataclasses.replace(rule, reference=alike), search(300, K, seed=3).scores, every=300).last
    assert (last.no_match_share, last.no_match_stderr) == (0.0, 1.0)


def test_the_first_query_of_the_log_is_live():
    """It alone has another score, which is therefore one of live queries."""
    score = np.zeros(20)
    score[10] = 1.0
    odds = _odds([SimpleNamespace(score=score)], 10)
    assert odds[10] > 1 > odds[0]
