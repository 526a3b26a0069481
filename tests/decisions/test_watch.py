"""Does a guarantee still hold? Exact p-values, corrected for repeated looks; changes that are there are noticed."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from scipy import special, stats

import geoflow_fast as gf
from geoflow_fast.decisions import drift, lists
from geoflow_fast.decisions.watch import EMBEDDINGS, HITS, MISSING, SCORES, Looks, looked_at
from geoflow_fast.jobs.watch import WatchSettings, watch_file
from geoflow_fast.runtime import parquet
from tests.decisions.helpers import search

K = 20


@pytest.fixture(scope="module")
def rule():
    fitted, tested = search(400, K, seed=1), search(800, K, seed=2)
    trust = gf.Trust().fit(fitted.scores, fitted.relevant)
    hits = np.random.default_rng(0).integers(300, size=tested.scores.shape)
    return trust.certify(tested.scores, tested.relevant, 0.2).with_hits(hits)


def hits_of(n, low=0, high=300, seed=1):
    return np.random.default_rng(seed).integers(low, high, size=(n, K))


def embeddings_of(n, seed, shift=0.0):
    rows = np.random.default_rng(seed).normal(size=(n, 100))
    rows[:, 0] += shift
    return rows


def test_a_log_like_the_judged_queries_holds(rule):
    log = search(600, K, seed=3)
    health = gf.watch(
        rule,
        log.scores,
        hits=hits_of(600),
        embeddings=embeddings_of(600, 4),
        judged_embeddings=embeddings_of(800, 5),
    )
    assert health.holds
    assert [look.end for look in health.looks] == [100, 200, 300, 400, 500, 600]
    assert [look.start for look in health.looks] == [0, 0, 0, 0, 0, 100]
    assert {each.view for each in health.last.drifts} == {MISSING, SCORES, HITS, EMBEDDINGS}
    assert abs(health.last.expected - log.first.mean()) < 4 * health.last.stderr
    assert health.last.no_match_share < 0.15
    assert len(health.to_label) == 50
    assert set(health.to_label) <= set(range(100, 600))
    assert "holds" in health.verdict


def test_missing_items_are_noticed_and_estimated(rule):
    health = gf.watch(rule, search(500, K, match=0.5, seed=3).scores)
    assert not health.holds
    assert health.alarm.end <= 500
    assert MISSING in health.verdict or SCORES in health.verdict
    assert health.last.no_match_share == pytest.approx(0.5, abs=4 * health.last.no_match_stderr)
    assert health.last.expected < 0.6 * rule.reference.right.mean() + 0.1
    assert "seem to have no right item" in health.verdict


@pytest.mark.parametrize("view", [HITS, EMBEDDINGS])
def test_other_items_and_other_queries_are_noticed(rule, view):
    changed = {HITS: hits_of(500, 60, 360), EMBEDDINGS: hits_of(500)}[view]
    shift = 0.6 if view == EMBEDDINGS else 0.0
    health = gf.watch(
        rule,
        search(500, K, seed=3).scores,
        hits=changed,
        embeddings=embeddings_of(500, 4, shift),
        judged_embeddings=embeddings_of(800, 5),
        every=250,
    )
    assert [each.view for each in health.alarm.drifts if each.corrected <= 0.05] == [view]
    assert view in health.verdict


def test_another_encoder_ends_the_guarantee(rule, tmp_path):
    dataclasses.replace(rule, encoder="small").save(tmp_path / "rule.json")
    parquet.write_columns(tmp_path / "log.parquet", {"scores": search(10, K, seed=3).scores}, 10)
    files = (tmp_path / "rule.json", tmp_path / "log.parquet", tmp_path / "health.parquet")
    watched = watch_file(*files, WatchSettings(encoder="large"))
    assert not watched.holds
    assert "the encoder is large and not small" in watched.verdict
    assert watch_file(*files, WatchSettings(encoder="small")).holds


def test_p_values_are_uniform_or_larger():
    """Of 300 draws without a change about 5 % have p <= .05, and 20 % p <= .2."""
    rng = np.random.default_rng(7)
    values = []
    for _ in range(300):
        columns = rng.normal(size=(120, 3))
        folds = drift.folds_of(120, rng)
        live = np.arange(120) >= 70
        drifted = drift.drift_between(
            "x", drift.linear_classifier(columns, folds), live, folds, part=0.5, false_alarms=0.05, rng=rng
        )
        values.append(drifted.p_value)
    for level in (0.05, 0.2, 0.5):
        assert stats.binom.sf(np.sum(np.array(values) <= level) - 1, 300, level) > 1e-3


def test_many_ties_raise_no_alarm():
    """Rows that are all equal say nothing about which of them are live."""
    rng = np.random.default_rng(0)
    folds, live = drift.folds_of(600, rng), np.arange(600) >= 400
    for classify in (
        drift.linear_classifier(np.ones((600, 4)), folds),
        drift.item_classifier(np.zeros((600, 3), np.int64), folds),
        drift.GivenScore(np.ones(600)),
    ):
        drifted = drift.drift_between("x", classify, live, folds, part=0.05, false_alarms=0.05, rng=rng)
        assert drifted.p_value > 0.01


def test_the_parts_of_all_looks_sum_to_one():
    assert sum(drift.spending(look) for look in range(1, 200_000)) == pytest.approx(1, abs=0.01)
    assert all(drift.spending(k) > drift.spending(k + 1) > 0 for k in range(1, 100))


def test_the_linear_classifier_is_that_of_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(203, 5)) * [1, 2, 3, 4, 5]
    live = np.arange(203) >= 120
    folds = drift.folds_of(203, rng)
    score = drift.linear_classifier(columns, folds)(live[None].astype(float))
    scaled = (columns - columns.mean(0)) / columns.std(0)
    won = pairs = 0
    for rows in folds:
        seen = np.setdiff1d(np.arange(203), rows)
        ridge = linear_model.Ridge(alpha=drift.RIDGE * 203).fit(scaled[seen], live[seen])
        assert np.corrcoef(ridge.predict(scaled[rows]), score[0, rows])[0, 1] > 1 - 1e-12
        here = live[rows].sum() * (~live[rows]).sum()
        won, pairs = won + here * metrics.roc_auc_score(live[rows], score[0, rows]), pairs + here
    assert drift._auroc(score, live[None].astype(float), folds)[0] == pytest.approx(won / pairs)


@pytest.mark.parametrize(("rows", "live"), [(2, 1), (3, 1), (3, 2), (9, 4)])
def test_few_pairs_of_queries_have_an_auroc(rows, live):
    """The share of pairs in which the live query has the higher score: of all pairs or of those within a fold."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        score, labels = rng.permutation(rows) + 0.5, rng.permutation(np.arange(rows) < live)
        higher = score[labels][:, None] > score[~labels]
        given = drift.GivenScore(score).auroc(labels[None].astype(float))
        folds = [rng.permutation(rows), np.arange(rows, rows + 3)]  # in the second all are live
        both = np.concatenate((score, np.zeros(3)))[None], np.concatenate((labels, np.ones(3)))[None]
        assert given[0] == drift._auroc(*both, folds)[0] == pytest.approx(higher.mean())
    assert drift._auroc(*both, folds[1:])[0] == 0.5


@pytest.mark.parametrize("named", [False, True])
def test_a_rule_of_many_queries_and_long_lists_is_saved_and_read(tmp_path, named):
    fitted, tested = search(400, 512, items=600, seed=1), search(5000, 512, items=600, seed=2)
    numbers = np.random.default_rng(0).integers(10**9, size=tested.scores.shape)
    hits = np.char.add("catalogue/item-", numbers.astype(str)).astype(object) if named else numbers
    trust = gf.Trust().fit(fitted.scores, fitted.relevant)
    trust.certify(tested.scores, tested.relevant, 0.2).with_hits(hits).save(tmp_path / "rule.json")
    loaded = gf.Rule.load(tmp_path / "rule.json").reference
    assert len(loaded) == 5000
    assert (loaded.hits == hits[:, :21]).all()


def test_hits_that_a_rule_does_not_keep_change_nothing():
    """Neither of its own queries nor of those whose first hit is taken out."""
    fitted, tested, live = search(400, 64, seed=1), search(800, 64, seed=2), search(500, 64, seed=3, match=0.5)
    hits = np.random.default_rng(0).integers(300, size=tested.scores.shape)
    trust = gf.Trust().fit(fitted.scores, fitted.relevant)
    rule = trust.certify(tested.scores, tested.relevant, 0.3, no_match_share=0.3).with_hits(hits)
    whole = dataclasses.replace(rule, reference=dataclasses.replace(rule.reference, hits=hits))
    log = {"hits": np.random.default_rng(1).integers(300, size=live.scores.shape)}
    kept, all_kept = (gf.watch(each, live.scores, every=500, **log).last.drifts for each in (rule, whole))
    assert [each.view for each in kept] == [MISSING, SCORES, HITS]
    for of_kept, of_all in zip(kept, all_kept):
        np.testing.assert_array_equal(of_kept.score, of_all.score)


def test_a_rule_remembers_its_queries(rule, tmp_path):
    rule.save(tmp_path / "rule.json")
    loaded = gf.Rule.load(tmp_path / "rule.json").reference
    for name in ("heads", "twins"):
        np.testing.assert_allclose(getattr(loaded, name), getattr(rule.reference, name), rtol=1e-6)
    assert (loaded.right == rule.reference.right).all()
    assert (loaded.hits == rule.reference.hits).all()
    values = json.loads((tmp_path / "rule.json").read_text())
    values["reference"]["heads"][0][0] = float("nan")
    (tmp_path / "bad.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"bad\.json.*heads of its queries are damaged"):
        gf.Rule.load(tmp_path / "bad.json")


def test_wrong_input_is_named(rule):
    scores = search(100, K, seed=3).scores
    with pytest.raises(ValueError, match="go together"):
        gf.watch(rule, scores, embeddings=embeddings_of(100, 1))
    with pytest.raises(ValueError, match="certified on row 799"):
        gf.watch(rule, scores, embeddings=embeddings_of(100, 1), judged_embeddings=embeddings_of(10, 1))
    with pytest.raises(ValueError, match="nothing to look at"):
        gf.watch(rule, scores[:99])
    with pytest.raises(ValueError, match="hits must be"):
        gf.watch(rule, scores, hits=hits_of(7))


def test_a_log_that_grows_is_continued(rule, tmp_path):
    rule.save(tmp_path / "rule.json")
    quiet, changed = search(210, K, seed=3), search(400, K, match=0.2, seed=4)
    ids = np.array([f"q{k}" for k in range(610)], dtype=object)
    log, out = tmp_path / "log.parquet", tmp_path / "health.parquet"

    def watched(scores, **settings):
        parquet.write_columns(log, {"query": ids[: len(scores)], "scores": scores}, len(scores))
        return watch_file(tmp_path / "rule.json", log, out, WatchSettings(**settings))

    early = watched(quiet.scores[:50])
    assert early.holds
    assert early.facts()["waiting"] == 50
    assert not out.exists()
    first = watched(quiet.scores)
    assert (first.holds, first.facts()["looks"], first.waiting) == (True, 2, 10)
    both = np.concatenate((quiet.scores, changed.scores))
    second = watched(both)
    assert not second.holds
    assert "no longer holds because" in second.verdict
    table = parquet.read_columns(out)
    assert table["look"].tolist() == [1, 2, 3, 4, 5, 6]
    assert table["holds"].tolist()[:2] == [True, True]
    assert not json.loads((tmp_path / "health.json").read_text())["holds"]
    label = parquet.read_columns(tmp_path / "health.label.parquet")
    assert label["query"].tolist() == [f"q{row}" for row in label["row"]]
    again = watched(both)
    assert again.health is None
    assert (again.holds, again.waiting) == (False, 10)
    with pytest.raises(ValueError, match="a log may only grow"):
        watched(changed.scores)
    with pytest.raises(ValueError, match="another rule or other settings"):
        watched(both, every=200)


def test_an_edited_log_is_noticed(rule, tmp_path):
    """Whatever is edited: scores, ids or their type, items, embeddings; a row that is added changes nothing."""
    rule.save(tmp_path / "rule.json")
    log, out = tmp_path / "log.parquet", tmp_path / "health.parquet"
    rows = embeddings_of(150, 4)
    np.save(tmp_path / "judged.npy", embeddings_of(800, 5))
    plain = {
        "query": np.array([f"q{k}" for k in range(150)], object),
        "index": hits_of(150),
        "scores": search(150, K, seed=3).scores,
        "rows": rows / np.linalg.norm(rows, axis=1, keepdims=True),
    }

    def watched(count=150, **changed):
        columns = {name: column[:count] for name, column in {**plain, **changed}.items()}
        np.save(tmp_path / "rows.npy", columns.pop("rows"))
        parquet.write_columns(log, columns, count)
        settings = WatchSettings(embeddings=tmp_path / "rows.npy", judged_embeddings=tmp_path / "judged.npy")
        return watch_file(tmp_path / "rule.json", log, out, settings)

    judged = np.load(tmp_path / "judged.npy")
    np.save(tmp_path / "judged.npy", judged / np.linalg.norm(judged, axis=1, keepdims=True))
    watched(120)
    assert watched().waiting == 50
    moved = plain["query"].copy()
    moved[:2] = ["q0\x00q1", "q2"]
    joined = plain["query"].copy()
    joined[:2] = ["q0", "q1\x00q2"]
    other = {
        "query": [moved, joined, np.roll(plain["query"], 1), np.arange(150)],
        "index": [np.where(plain["index"] == plain["index"][0, 0], 999, plain["index"])],
        "scores": [plain["scores"] + 1e-9],
        "rows": [np.roll(plain["rows"], 1, axis=0)],
    }
    for name, edits in other.items():
        for edited in edits:
            with pytest.raises(ValueError, match="a log may only grow"):
                watched(**{name: edited})
    watched()
    np.save(tmp_path / "judged.npy", np.roll(np.load(tmp_path / "judged.npy"), 1, axis=0))
    with pytest.raises(ValueError, match="another rule or other settings"):
        watched()


def test_items_that_later_queries_lack_change_nothing_before(rule, tmp_path):
    """A hit that is missing turns a column of integers into one of floating-point numbers."""
    rule.save(tmp_path / "rule.json")
    files = (tmp_path / "rule.json", tmp_path / "log.parquet", tmp_path / "health.parquet")
    scores, hits = search(150, K, seed=3).scores, hits_of(150).tolist()
    for count in (120, 150):
        if count == 150:
            hits[130][-1] = None
        columns = {"index": pyarrow.array(hits[:count]), "scores": scores[:count]}
        parquet.write_columns(files[1], columns, count)
        assert watch_file(*files, WatchSettings()).waiting == count - 100


def test_the_exit_status_tells_cron(rule, tmp_path):
    rule.save(tmp_path / "rule.json")
    scores = search(100, K, match=0.0, seed=4).scores
    parquet.write_columns(tmp_path / "log.parquet", {"scores": scores}, 100)
    command = [sys.executable, "-m", "geoflow_fast", "watch", "--rule", "rule.json", "--queries", "log.parquet"]
    command += ["--out", "health.parquet", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["verdict"].startswith("The guarantee no longer holds because queries 0 to 100")


@pytest.mark.parametrize(("every", "expected"), [(0, 1 / 1001), (10, 0.1), (1, 1.0), (300, 4 / 1001)])
def test_permutations_are_counted_with_the_observed_one(every, expected):
    """Every so many permutations reach the observed value: the p-value counts the observed one as one of them."""
    drawn = 0

    def auroc_of(labels):
        nonlocal drawn
        numbers = np.arange(drawn + 1, drawn + len(labels) + 1)
        drawn += len(labels)
        return (numbers % every == 0 if every else np.zeros(len(labels))).astype(float)

    p = drift._permutation_p_value(auroc_of, np.arange(6) % 2.0, 1.0, 20, 1000, np.random.default_rng(0))
    assert p == pytest.approx(expected)


# ---- what a guarantee rests on ----


def test_p_values_are_corrected_for_views_and_looks(rule):
    log = search(300, K, match=0.0, seed=3)
    for before in (0, 2):
        health = looked_at(rule, log.scores, Looks(before=before), hits=hits_of(300))
        look = health.looks[0]
        parts = {MISSING: 3 / 5, SCORES: 1 / 5, HITS: 1 / 5}
        assert look.number == before + 1
        for each in look.drifts:
            own = drift.spending(look.number) * parts[each.view]
            assert each.corrected == pytest.approx(min(1.0, each.p_value / own))
        assert look.p_value < 0.05  # so that the correction is seen
        assert health.alarm is look


def test_looks_after_an_alarm_of_an_earlier_call_are_cheap(rule, tmp_path, monkeypatch):
    rule.save(tmp_path / "rule.json")
    scores = search(300, K, match=0.0, seed=4).scores
    files = (tmp_path / "rule.json", tmp_path / "log.parquet", tmp_path / "health.parquet")
    drawn, plain = [], drift._permutation_p_value

    def counted(auroc_of, labels, observed, enough, most, rng):
        drawn.append(most)
        return plain(auroc_of, labels, observed, enough, most, rng)

    monkeypatch.setattr(drift, "_permutation_p_value", counted)
    parquet.write_columns(files[1], {"scores": scores[:100]}, 100)
    first = watch_file(*files, WatchSettings())
    assert not first.holds
    before = max(drawn)
    drawn.clear()
    parquet.write_columns(files[1], {"scores": scores}, 300)
    second = watch_file(*files, WatchSettings())
    assert len(second.health.looks) == 2
    assert max(drawn) <= before / 8
    assert second.verdict == first.verdict  # that of the alarm
    assert second.health.alarm is None


def test_equal_lists_are_equal_although_a_rule_keeps_few_digits(rule, tmp_path):
    """A log of the judged queries themselves: each is tied with itself, so that the AUROC is one half."""
    rule.save(tmp_path / "rule.json")
    loaded = gf.Rule.load(tmp_path / "rule.json")
    health = gf.watch(loaded, search(800, K, seed=2).scores, window=800, every=800)
    missing = next(each for each in health.last.drifts if each.view == MISSING)
    assert missing.auroc == pytest.approx(0.5, abs=1e-12)
    for name in ("heads", "twins", "features"):
        np.testing.assert_array_equal(getattr(loaded.reference, name), getattr(rule.reference, name))


def test_digits_are_significant_ones():
    values = np.array([[0.123456789, -1234567.89, 3e-9, 0.0], [27.6310211159, 1.0, -0.00012345678, 9.99999996]])
    expected = [[float(f"{x:.7g}") for x in row] for row in values.tolist()]
    assert lists.rounded(values).tolist() == expected
    assert lists.rounded(lists.rounded(values)).tolist() == expected


def test_a_rule_without_a_guarantee_is_not_watched(rule, tmp_path):
    empty = dataclasses.replace(rule, certificate=dataclasses.replace(rule.certificate, threshold=math.inf))
    with pytest.raises(ValueError, match="no guarantee to watch"):
        gf.watch(empty, search(100, K, seed=3).scores)
    empty.save(tmp_path / "rule.json")
    parquet.write_columns(tmp_path / "log.parquet", {"scores": search(10, K, seed=3).scores}, 10)
    with pytest.raises(ValueError, match="no guarantee to watch"):
        watch_file(tmp_path / "rule.json", tmp_path / "log.parquet", tmp_path / "h.parquet", WatchSettings())


def test_queries_worth_judging_are_new_and_uncertain(rule):
    """The last hundred come from elsewhere: of these, such as are neither surely right nor surely wrong."""
    log = search(500, K, seed=3)
    embeddings = np.concatenate((embeddings_of(400, 4), embeddings_of(100, 6, 8.0)))
    health = gf.watch(rule, log.scores, embeddings=embeddings, judged_embeddings=embeddings_of(800, 5), every=500)
    assert (health.to_label >= 400).mean() > 0.9
    new = np.arange(400, 500)
    left = np.setdiff1d(new, health.to_label)
    spread = health.p_right * (1 - health.p_right)
    assert spread[np.intersect1d(new, health.to_label)].mean() > 1.5 * spread[left].mean()


@pytest.fixture(scope="module")
def reckoning():
    """A rule that reckons with a share of 30 % without a match."""
    fitted, tested = search(400, K, seed=1), search(800, K, seed=2)
    trust = gf.Trust().fit(fitted.scores, fitted.relevant)
    hits = np.where(tested.relevant, 1000, np.random.default_rng(0).integers(300, size=tested.scores.shape))
    return trust.certify(tested.scores, tested.relevant, 0.3, no_match_share=0.3).with_hits(hits)


@pytest.mark.parametrize(("match", "holds"), [(1.0, True), (0.85, True), (0.7, True), (0.3, False)])
def test_a_rule_that_reckons_with_missing_items_is_not_surprised_by_them(reckoning, match, holds):
    log = search(500, K, match=match, seed=13)
    health = gf.watch(reckoning, log.scores, every=500)
    assert health.holds == holds
    if not holds:
        assert "the rule assumes 30%" in health.verdict


def test_a_missing_item_is_no_hit(reckoning):
    reference = reckoning.reference
    gone = reference.with_missing(np.ones(len(reference), bool))
    np.testing.assert_array_equal(gone.heads, reference.twins)
    assert not gone.right.any()
    assert (gone.hits[reference.right] != 1000).all()
    assert (gone.hits[reference.right, -1] == -1).all()
    np.testing.assert_array_equal(gone.hits[~reference.right], reference.hits[~reference.right])


# ---- lists of probabilities ----


def posterior_lists(n, seed, match=1.0, items=60):
    """The first hits of an exact posterior over all items, as logarithms, and which are right."""
    searched = search(n, items, items=items, match=match, seed=seed)
    log_prob = 3 * searched.scores - special.logsumexp(3 * searched.scores, axis=1, keepdims=True)
    return log_prob[:, :K], searched.relevant[:, :K]


def test_a_missing_item_leaves_its_probability_to_the_others():
    searched = search(50, 60, items=60, seed=5)
    kept = np.sort(np.where(searched.relevant, -np.inf, 3 * searched.scores), axis=1)[:, ::-1]
    expected = kept - special.logsumexp(kept, axis=1, keepdims=True)
    log_prob, right = posterior_lists(50, 5)
    twins = lists.taken_out(log_prob, right, log_prob=True)
    known = right.any(1)
    told = known & (np.exp(log_prob[:, 0]) < 0.99)  # of other lists rounding hides what is beyond them
    assert told.sum() > 20
    np.testing.assert_allclose(twins[told, : K - 1], expected[told, : K - 1], atol=2e-4)
    np.testing.assert_array_equal(twins[~known], log_prob[~known])  # the right item is further down
    sure = np.log(np.array([[1.0, 3e-9, 1e-9, 1e-9]], np.float32)).astype(float)  # rounding leaves nothing beyond
    top = np.exp(lists.taken_out(sure, np.eye(1, 4, dtype=bool), log_prob=True))
    assert top[0, 0] == pytest.approx(0.6, rel=1e-6)


def test_missing_items_of_probability_lists_are_estimated():
    """Without their nature known, lists of probabilities hide how many items are missing."""
    fitted, tested, live = posterior_lists(500, 1), posterior_lists(1500, 2), posterior_lists(500, 3, match=0.6)
    rule = gf.Trust(log_prob=True).fit(*fitted).certify(*tested, 0.2)
    last = gf.watch(rule, live[0], every=500).last
    assert last.no_match_share == pytest.approx(0.4, abs=3 * last.no_match_stderr)
    assert last.no_match_stderr < 0.12
    # What is expected of the answers reckons with that share.
    answered = rule(live[0])
    assert last.expected == pytest.approx(live[1][:, 0].mean(), abs=3 * last.stderr)
    assert last.expected_error == pytest.approx(1 - live[1][answered, 0].mean(), abs=0.08)
    with pytest.warns(UserWarning, match=r"say Trust\(log_prob=True\)"):
        plain = gf.Trust().fit(*fitted)
    mistaken = gf.watch(plain.certify(*tested, 0.2), live[0], every=500).last
    assert mistaken.no_match_share < 0.4 - 3 * mistaken.no_match_stderr


def test_certificates_of_probability_lists_hold_without_matches():
    fitted, tested = posterior_lists(500, 1), posterior_lists(2000, 2)
    trust = gf.Trust(log_prob=True).fit(*fitted)
    rule = trust.certify(*tested, 0.2, no_match_share=0.4)
    live, right = posterior_lists(8000, 4, match=0.6)
    answered = rule(live)
    assert answered.mean() > 0.05
    assert 1 - right[answered, 0].mean() <= 0.2


def test_lists_of_probabilities_stay_such(tmp_path):
    fitted, tested = posterior_lists(300, 1), posterior_lists(300, 2)
    trust = gf.Trust(log_prob=True).fit(*fitted)
    trust.save(tmp_path / "trust.json")
    loaded = gf.Trust.load(tmp_path / "trust.json")
    assert loaded.log_prob
    rules = [each.certify(*tested, 0.3, no_match_share=0.2) for each in (trust, loaded)]
    np.testing.assert_array_equal(rules[0].reference.twins, rules[1].reference.twins)
    spoiled = tested[0].copy()
    spoiled[7] += 0.5
    with pytest.raises(ValueError, match="row 7 sum to"):
        trust.certify(spoiled, tested[1])
