"""Single numbers of a watch that a verdict hides: what is worth judging, odds, and shares of which nothing is known."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import geoflow_fast as gf
from geoflow_fast.decisions.watch import TO_LABEL, _numbered, _odds
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


@pytest.mark.parametrize(("match", "more"), [(1.0, False), (0.5, True)])
def test_the_error_of_what_is_expected_has_three_parts(rule, match, more):
    """Those of the live queries, of the probabilities on the judged ones, and of the share without a right item where
    the log surely holds more of this than the rule reckons with."""
    log, no, tested = search(300, K, match=match, seed=3), np.empty((300, 0)), search(400, K, seed=2)
    last = gf.watch(rule, log.scores, every=300, false_alarms=0.9).last
    share, error = last.no_match_share, last.no_match_stderr
    assert (share - 2 * error > 0) == more
    p = rule.model.p_answer(log.scores, no, share if more else 0.0)
    off = tested.first - rule.model.p_answer(tested.scores, np.empty((400, 0)), 0.0)
    of_share = p.mean() - rule.model.p_answer(log.scores, no, share + error).mean() if more else 0.0
    assert last.expected == pytest.approx(p.mean(), rel=1e-5)
    assert last.stderr == pytest.approx(np.sqrt(p.var() / 300 + off.var() / 400 + of_share**2), rel=1e-5)
    assert abs(last.expected - log.first.mean()) < 4 * last.stderr < 0.4


def test_where_there_is_no_hit_there_is_no_item():
    """Ids may be words, and then what is missing may be None or -1; equal words have equal numbers."""
    words = np.array([["b", "a", -1], ["c", None, None], ["a", "-", "b"]], dtype=object)
    numbers = _numbered(words)
    there = [[True, True, False], [True, False, False], [True, True, True]]
    assert (numbers >= 0).tolist() == there
    assert (numbers[~np.array(there)] == -1).all()
    assert numbers[0, 0] == numbers[2, 2]
    assert numbers[0, 1] == numbers[2, 0]
    assert len(set(numbers[there].tolist())) == 4
    np.testing.assert_array_equal(_numbered(numbers.astype(np.int32)), numbers)
