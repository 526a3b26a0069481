"""Rules keep what they promise, answer nearly as much as the truth allows, and are saved and read again."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pandas
import polars
import pytest
import torch
from scipy import special, stats

import geoflow_fast as gf
from geoflow_fast.decisions import bounds, certify
from geoflow_fast.decisions.bounds import bounded_evidence
from geoflow_fast.decisions.model import combined, hit_features
from tests.decisions.helpers import copied, search

MATCHED, MISSING = search(8000, seed=11), search(8000, match=0.0, seed=12)


@pytest.fixture(scope="module")
def trust() -> gf.Trust:
    known = search(300)
    return gf.Trust().fit(known.scores, known.relevant)


@pytest.fixture(scope="module")
def rule(trust) -> gf.Rule:
    tested = search(2000, seed=1)
    return trust.certify(tested.scores, tested.relevant)


def traffic(share: float, count: int = 8000):
    """Lists and outcomes of new traffic, a `share` of which has no right item."""
    missing = np.arange(count) < share * count
    scores = np.where(missing[:, None], MISSING.scores[:count], MATCHED.scores[:count])
    return scores, MATCHED.first[:count] & ~missing


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("labels", ["first", "relevant"])
def test_a_rule_holds_on_new_traffic_without_matches(trust, share, labels):
    tested = search(2000, seed=1)
    made = trust.certify(tested.scores, getattr(tested, labels), 0.1, no_match_share=share)
    scores, right = traffic(share)
    answered = made(scores)
    assert answered.mean() > 0.15
    assert 1 - right[answered].mean() <= 0.1


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_an_estimated_share_holds_and_is_near_the_true_one(trust, share):
    tested = search(2000, seed=1)
    scores, right = traffic(share)
    live = np.random.default_rng(0).permutation(len(scores))[:4000]
    made = trust.certify(tested.scores, tested.relevant, no_match_share="estimate", unlabelled=scores[live])
    assert share <= made.no_match_share <= share + 0.15
    answered = made(scores)
    assert answered.mean() > 0.1
    assert 1 - right[answered].mean() <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("estimated", [False, True])
def test_the_promise_is_broken_at_most_as_often_as_promised(trust, share, estimated):
    """300 draws of 1,000 judged queries; the error of a rule is that on 40,000 others."""
    model, pilot = trust._model, trust._pilot
    pool = search(40_000, seed=20)
    none, no = search(40_000, match=0.0, seed=21), np.empty((40_000, 0))
    rng = np.random.default_rng(0)
    broken, answered = 0, []
    for _ in range(300):
        rows = rng.integers(40_000, size=1000)
        arguments = {"no_match_share": share}
        if estimated:
            absent = rng.random(3000) < share
            some = rng.integers(40_000, size=3000)
            live = np.where(absent[:, None], none.scores[some], pool.scores[some])
            arguments = {"no_match_share": "estimate", "unlabelled": live}
        made = trust.certify(pool.scores[rows], pool.relevant[rows], 0.1, **arguments)
        given = [model.p_answer(each.scores, no, made.score_share) >= made.threshold for each in (pool, none)]
        total = (1 - share) * given[0].mean() + share * given[1].mean()
        wrong = (1 - share) * (given[0] & ~pool.first).mean() + share * given[1].mean()
        broken += wrong > 0.1 * total
        answered.append(total)
    assert broken <= stats.binom.ppf(0.999, 300, 0.05)
    thresholds = np.unique(combined(pilot.first, pilot.no_match, share))
    best = 0.0
    score = [model.p_answer(each.scores, no, share) for each in (pool, none)]
    for threshold in thresholds:
        given = [each >= threshold for each in score]
        total = (1 - share) * given[0].mean() + share * given[1].mean()
        wrong = (1 - share) * (given[0] & ~pool.first).mean() + share * given[1].mean()
        best = max(best, total if wrong <= 0.1 * total else 0.0)
    assert np.mean(answered) > 0.7 * best


def test_copies_of_items_change_nothing(trust, rule):
    """Storing every item five times answers the same queries, with lists as long as before."""
    new = search(2000, seed=3)
    np.testing.assert_array_equal(rule(copied(new, 5, 50).scores), rule(new.scores))
    tested = copied(search(2000, seed=1), 5, 50)
    again = trust.certify(tested.scores, tested.relevant, no_match_share=0.3)
    plain = trust.certify(search(2000, seed=1).scores, search(2000, seed=1).relevant, no_match_share=0.3)
    np.testing.assert_array_equal(again(new.scores), plain(new.scores))


def test_the_precision_of_what_is_shown(trust):
    tested, new = search(3000, seed=1), search(6000, seed=2)
    made = trust.certify(tested.scores, tested.relevant, precision=0.8, no_match_share=0.2)
    shown = made.show(new.scores)
    assert shown.shape == (6000, 50)
    some = shown.any(1)
    np.testing.assert_array_equal(made(new.scores), some)
    assert 0.2 < some.mean() < 0.95
    wrong = (shown & ~new.relevant)[some].sum(1) / shown[some].sum(1)
    none = made(MISSING.scores)
    total = 0.8 * some.mean() + 0.2 * none.mean()
    assert (0.8 * some.mean() * wrong.mean() + 0.2 * none.mean()) / total <= 0.2
    with pytest.raises(ValueError, match=r"precision needs labels \[n, k\]"):
        trust.certify(tested.scores, tested.first, precision=0.8)


def test_queries_that_were_fitted_are_refused(trust):
    known, tested = search(300), search(300, seed=1)
    with pytest.raises(ValueError, match="300 of 300 rows that were fitted"):
        trust.certify(known.scores[::-1], known.relevant[::-1])
    mixed = np.arange(300) < 151
    scores, labels = (
        np.where(mixed[:, None], getattr(known, name), getattr(tested, name)) for name in ("scores", "relevant")
    )
    with pytest.raises(ValueError, match="151 of 300 rows that were fitted"):
        trust.certify(scores, labels)
    trust.certify(scores[2:], labels[2:], 0.5)  # half of them may be equal by chance


def test_lists_of_ties_are_equal_by_chance():
    known, tested = search(60, k=5), search(60, k=5, seed=1)
    for each in (known, tested):
        each.scores[:40] = 0.5
    assert gf.Trust().fit(known.scores, known.first).certify(tested.scores, tested.first, 0.9).certified


def test_a_rule_is_saved_and_read(rule, tmp_path):
    rule.save(tmp_path / "rule.json")
    loaded = gf.Rule.load(tmp_path / "rule.json")
    assert loaded == rule
    np.testing.assert_array_equal(loaded(MATCHED.scores), rule(MATCHED.scores))


def test_a_rule_that_certified_nothing_says_so(trust, tmp_path):
    tested = search(20, seed=1)
    made = trust.certify(tested.scores, tested.relevant, 0.001)
    assert not made.certified
    assert not made(MATCHED.scores).any()
    assert "nothing could be certified with 20 queries" in repr(made)
    made.save(tmp_path / "rule.json")
    assert not gf.Rule.load(tmp_path / "rule.json").certified


def test_a_rule_says_what_it_does(rule):
    words = repr(rule)
    for part in (
        "lists of 50 hits",
        "at most 10% wrong among the answers",
        "95% confidence",
        "answers where",
        "assumes",
    ):
        assert part in words
    certificate = rule.certificate
    assert certificate.error <= certificate.error_bound <= rule.max_error
    wrong = round(certificate.error * certificate.answered * 2000)
    exact = gf.evaluation.clopper_pearson_upper(wrong, round(certificate.answered * 2000))
    assert certificate.error_bound == pytest.approx(exact)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v | {"format": 2}, "format 2"),
        (lambda v: v | {"what": "song"}, "song"),
        (lambda v: v | {"certificate": {}}, "threshold"),
        (lambda v: v | {"certificate": v["certificate"] | {"error_bound": None}}, "error_bound must be a number"),
        (lambda v: v | {"max_error": 7}, "max_error"),
        (lambda v: v | {"unit": "tons"}, "unit must be one of"),
        (lambda v: v | {"model": v["model"] | {"hits": [1, 2]}}, "out of range"),
        (lambda v: v | {"model": v["model"] | {"unit": "__import__('os')"}}, "damaged or not a rule"),
        (lambda _: [], "damaged or not a rule"),
    ],
)
def test_damaged_files_are_named(rule, tmp_path, change, words):
    rule.save(tmp_path / "rule.json")
    values = change(json.loads((tmp_path / "rule.json").read_text()))
    (tmp_path / "rule.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=words) as error:
        gf.Rule.load(tmp_path / "rule.json")
    assert "rule.json" in str(error.value)


def test_other_lists_encoders_and_galleries_are_refused(trust):
    tested, new = search(500, seed=1), MATCHED.scores[:3]
    made = trust.certify(tested.scores, tested.relevant, encoder="ViT-B-32", gallery_size=400)
    assert made(new, "ViT-B-32", 400).shape == (3,)
    with pytest.warns(UserWarning, match="made with encoder 'ViT-B-32' and is not told which one made these lists"):
        made(new)
    with pytest.warns(UserWarning, match="is not told"):
        made.show(new, gallery_size=400)
    with pytest.raises(ValueError, match="encoder 'ViT-B-32', not 'ViT-L-14'"):
        made(new, encoder="ViT-L-14")
    with pytest.raises(ValueError, match="gallery_size 400, not 500"):
        made(new, gallery_size=500)
    with pytest.raises(ValueError, match="lists of 10 hits, but this was fitted on lists of 50"):
        made(new[:, :10])


def test_answers_come_as_the_callers_kind_of_table(rule):
    scores = MATCHED.scores[:6]
    expected = rule(scores)
    frame = pandas.DataFrame(scores, index=list("uvwxyz"))
    assert rule(frame).to_dict() == dict(zip("uvwxyz", expected.tolist()))
    assert rule.show(frame).index.tolist() == list("uvwxyz")
    assert rule(polars.DataFrame(scores)).to_list() == expected.tolist()
    assert rule(torch.from_numpy(scores)).dtype == torch.bool
    assert rule.show(torch.from_numpy(scores))[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"no_match_share": "estimate"}, "needs unlabelled="),
        ({"no_match_share": "guess"}, "must be a number or 'estimate'"),
        ({"unlabelled": MATCHED.scores}, "used with no_match_share='estimate' only"),
        ({"max_error": 0.0}, "max_error"),
        ({"confidence": 1.0}, "confidence"),
        ({"no_match_share": 1.0}, "no_match_share"),
        ({"gallery_size": 0}, "gallery_size"),
    ],
)
def test_errors_of_certify(trust, arguments, words):
    with pytest.raises(ValueError, match=words):
        trust.certify(MATCHED.scores[:500], MATCHED.relevant[:500], **arguments)


class TestBounds:
    def test_bounded_losses_pass_too_easily_at_most_as_often_as_promised(self):
        """Losses of 0, 1/3, 2/3 and 1 whose mean is the tested one."""
        rng = np.random.default_rng(0)
        loss = rng.choice([0, 1 / 3, 2 / 3, 1.0], p=[0.85, 0.06, 0.03, 0.06], size=(20_000, 150))
        evidence = bounds.bounded_evidence(loss.sum(1), np.full(20_000, 150), 0.1)
        assert 0.002 < (evidence <= 0.05).mean() <= 0.05

    @pytest.mark.parametrize("share", [0.0, 0.3])
    def test_the_share_is_exceeded_at_most_as_often_as_promised(self, share):
        """Log-odds are normal around 0, or around 1 for queries without a match."""
        rng = np.random.default_rng(0)
        estimated = []
        for _ in range(400):
            queries, twins, live = (rng.normal(mean, 1, 1000) for mean in (0, 1, 0))
            live += rng.random(1000) < share
            signals = (certify.signal(each, share) for each in (queries, twins, live))
            estimated.append(certify.Share.estimated(*signals).bound(0.9))
        assert np.mean(np.array(estimated) < share) <= 0.13
        assert share < np.median(estimated) < share + 0.15

    def test_the_probabilities_of_shares_are_those_of_the_normal_approximation(self):
        rng = np.random.default_rng(1)
        queries, live = rng.random(500), rng.random(300) + 0.4
        twins = queries + 0.5 + 0.3 * rng.random(500)
        share = certify.Share.estimated(queries, twins, live)
        assert share.prob.sum() == pytest.approx(1)
        for value in (0.5, 0.6, 0.7):
            mixed = queries + value * (twins - queries)
            error = np.sqrt(live.var() / 300 + mixed.var() / 500)
            expected = stats.norm.cdf((mixed.mean() - live.mean()) / error)
            assert share.prob[share.values <= value + 1e-9].sum() == pytest.approx(expected, abs=1e-4)
        assert share.bound(0.95) == share.values[share.position(0.95)]

    def test_signals_that_tell_nothing_leave_every_share_possible(self):
        same = np.random.default_rng(0).random(100)
        assert certify.Share.estimated(same, same, same).bound(0.5) == 1.0
        assert certify.Share.known(0.2).bound(0.95) == 0.2

    def test_outcomes_of_mixed_traffic_are_counted(self):
        rng = np.random.default_rng(0)
        score, wrong, twin, thresholds = rng.random(50), rng.random(50) < 0.4, rng.random(50), np.array([0.9, 0.5, 0.1])
        outcomes = certify.answer_outcomes(score, wrong, twin, thresholds)
        drawn, shares = rng.random(50), np.array([0.0, 0.35, 1.0])
        given, loss = outcomes.counts(drawn, shares)
        for row, share in enumerate(shares):
            replaced = drawn < share
            for column, threshold in enumerate(thresholds):
                accepted = np.where(replaced, twin, score) >= threshold
                assert given[row, column] == accepted.sum()
                assert loss[row, column] == (accepted & (wrong | replaced)).sum()

    def test_values_without_any_weight_are_spaced_evenly(self):
        values = np.array([0.2, 0.1, 0.3])
        assert certify.spaced(values, np.zeros(3)).tolist() == certify.spaced(values, np.ones(3)).tolist()

    def test_a_fixed_sequence_stops_at_the_first_test_that_fails(self):
        for evidence, passed in ([0.01, 0.04, 0.2, 0.01], 2), ([0.2, 0.0], 0), ([0.01], 1), ([], 0):
            levels = 0.05 * (np.arange(len(evidence)) == 0)
            assert bounds.last_passed(np.array(evidence), levels) == passed

    def test_a_test_that_passes_hands_its_level_on(self):
        levels = np.array([0.02, 0.0, 0.03, 0.0])
        assert bounds.last_passed(np.array([0.01, 0.02, 0.05, 0.05]), levels) == 4
        assert bounds.last_passed(np.array([0.01, 0.03, 0.04, 0.01]), levels) == 1  # the second loses the level
        assert bounds.last_passed(np.array([0.5, 0.01, 0.03, 0.03]), levels) == 4  # the third has one of its own
        assert bounds.last_passed(np.zeros(2), np.zeros(2)) == 0

    def test_false_tests_pass_at_most_as_often_as_promised(self):
        """Tests that are all false, dependent as those of nested sets are."""
        rng = np.random.default_rng(0)
        levels = 0.1 * certify.starting_levels(12, 30)
        assert levels.sum() == pytest.approx(0.1)
        wrong = (rng.random((4000, 600)) < 0.1).cumsum(1)[:, 19::20]
        evidence = bounds.binomial_evidence(wrong, np.arange(20, 601, 20), 0.1)
        passed = np.mean([bounds.last_passed(row, levels) > 0 for row in evidence])
        assert 0.01 < passed <= 0.1

    def test_an_upper_bound_is_what_the_test_does_not_reject(self):
        assert certify.upper_bound(3, 50, 0.95, bounds.binomial_evidence) == pytest.approx(
            bounds.clopper_pearson_upper(3, 50), abs=1e-9
        )
        assert certify.upper_bound(50, 50, 0.95, bounds.binomial_evidence) == 1


def test_what_a_rule_shows_is_what_its_probabilities_reach(trust, rule):
    """First hits alone if it is about answers, any number of hits if it is about items."""
    nothing = np.zeros((len(MATCHED.scores), 0))
    shown = rule.show(MATCHED.scores)
    assert not shown[:, 1:].any()
    reached = rule.model.p_answer(MATCHED.scores, nothing, rule.score_share) >= rule.threshold
    np.testing.assert_array_equal(shown[:, 0], reached)
    np.testing.assert_array_equal(rule(MATCHED.scores), reached)
    tested = search(500, seed=1)
    about_items = trust.certify(tested.scores, tested.relevant, precision=0.5)
    several = about_items.show(MATCHED.scores)
    reached = about_items.model.p_shown(MATCHED.scores, nothing, about_items.score_share) >= about_items.threshold
    np.testing.assert_array_equal(several, reached)
    assert several[:, 1:].any()


@pytest.mark.parametrize(("loss", "count", "mean"), [(0.5, 100, 0.1), (3.4, 60, 0.3), (0.0, 20, 0.2), (7.0, 20, 0.3)])
def test_bounded_losses_have_the_smaller_of_two_bounds(loss, count, mean):
    rate = min(loss / count, mean)
    parts = [p * np.log(p / q) for p, q in ((rate, mean), (1 - rate, 1 - mean)) if p > 0]
    bentkus = np.e * stats.binom(count, mean).cdf(np.ceil(loss))
    expected = min(1.0, np.exp(-count * sum(parts)), bentkus)
    ours = bounded_evidence(np.array([loss]), np.array([count]), mean)
    assert float(ours[0]) == pytest.approx(expected, rel=1e-9)


def test_candidates_are_as_many_as_there_may_be_and_denser_where_few_are_answered():
    values = np.random.default_rng(0).random(100_000)
    thresholds = certify.spaced(values, np.ones(len(values)))
    assert len(thresholds) == certify.CANDIDATES
    answered = (values[:, None] >= thresholds).mean(0)
    np.testing.assert_allclose(answered, (np.arange(1, certify.CANDIDATES + 1) / certify.CANDIDATES) ** 2, atol=1e-3)


def test_the_share_that_explains_the_signals_of_live_queries():
    logit = np.log(0.2 / 0.8), np.log(0.8 / 0.2)
    pilot = SimpleNamespace(no_match=np.full(9, logit[0]), twin_no_match=np.full(9, logit[1]))
    for share in (0.0, 0.25, 0.5):
        live = np.repeat(logit, (int(100 * (1 - share)), int(100 * share)))
        assert certify.likely_share(pilot, live) == pytest.approx(share, abs=1e-9)


def test_queries_still_differ_where_none_seems_to_have_a_match():
    """Their signals are beyond those of the twins: the share stays below one, so that probabilities are left."""
    pilot = SimpleNamespace(no_match=np.full(9, -1.0), twin_no_match=np.full(9, 1.0))
    for live in (1.0, 1.3, 5.0):
        share = certify.likely_share(pilot, np.full(9, live))
        assert 0.8 < share < 1
        prob = combined(np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.0, -1.0]), share)
        assert 0 < prob[0] < prob[1] < prob[2] < 1
    assert certify.likely_share(pilot, np.full(9, -3.0)) == 0


def test_tests_begin_where_whole_errors_leave_most_evidence():
    """Two thresholds promise 1.9 errors among 30 answers and 2.01 among 38: as whole numbers one and two."""
    given = np.zeros((100, 2), bool)
    pilot = SimpleNamespace(given=given, rates=lambda _: (np.array([0.30, 0.38]), np.array([0.019, 0.0201])))
    stated = np.array([0.019 / 0.30, 0.0201 / 0.38])
    evidence = [stats.binom(n, 0.2).cdf(wrong) for n, wrong in ((30, 1), (38, 2))]
    assert evidence[0] < evidence[1]
    assert certify.most_promising(pilot, stated, 0.0, 100, 0.2) == 0


def test_features_of_hits_are_differences_of_their_log_odds():
    """Under the softmax of the list at the temperature of the fit, in a list of distinct scores."""
    scores = np.sort(np.random.default_rng(0).normal(size=(20, 6)))[:, ::-1]
    temperature, unit = 1.7, 0.6
    columns = hit_features(scores, scores, np.arange(20.0), temperature, unit)
    prob = special.softmax(temperature * scores / unit, axis=1)
    np.testing.assert_allclose(columns[:, :, 0], special.logit(prob) - special.logit(prob[:, :1]), atol=1e-6)
    np.testing.assert_allclose(columns[:, :, 1], np.repeat(np.arange(20.0)[:, None], 6, axis=1))
    np.testing.assert_allclose(columns[:, :, 3], scores / unit)
