"""Does a guarantee still hold? Exact p-values, corrected for repeated looks; changes that are there are noticed."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

import geoflow_fast as gf
from geoflow_fast.decisions import drift
from geoflow_fast.decisions.watch import EMBEDDINGS, HITS, MISSING, SCORES
from geoflow_fast.jobs.watch import WatchSettings, watch_file
from geoflow_fast.runtime import parquet
from tests.decisions.helpers import search

K = 20


@pytest.fixture(scope="module")
def rule():
    fitted, tested = search(400, K, seed=1), search(800, K, seed=2)
    trust = gf.Trust().fit(fitted.scores, fitted.relevant)
    hits = np.random.default_rng(0).integers(300, size=tested.scores.shape)
    return trust.certify(tested.scores, tested.relevant, 0.2, encoder="small").with_hits(hits)


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
    certificate = health.last.overlap.certificate
    assert certificate is not None
    assert health.last.overlap.effective > 600  # nothing changed, so that nearly all judged queries count
    assert certificate.threshold == pytest.approx(rule.threshold, abs=0.2)
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


def test_too_little_overlap_is_said(rule):
    far = embeddings_of(500, 4, 30.0)
    health = gf.watch(
        rule, search(500, K, seed=3).scores, embeddings=far, judged_embeddings=embeddings_of(800, 5), every=500
    )
    assert health.last.overlap.certificate is None
    assert "not enough overlap" in health.last.overlap.words


def test_a_reweighted_threshold_keeps_its_promise():
    """Live queries are mostly the hard ones. The new threshold is stricter, and its error is as promised."""

    def part(n, seed, hard):
        lists = search(4 * n, K, seed=seed)
        level = np.random.default_rng(seed).normal(size=4 * n) - 2.0 * (lists.relevant[:, 0] == 0)
        likely = stats.norm.cdf(-1.5 * level) if hard else 0.5
        keep = np.flatnonzero(np.random.default_rng(seed + 1).random(4 * n) < likely)
        return lists.scores[keep[:n]], lists.relevant[keep[:n]], level[keep[:n], None]

    fit, test, live = part(500, 1, hard=False), part(2000, 3, hard=False), part(1000, 5, hard=True)
    rule = gf.Trust().fit(*fit).certify(test[0], test[1], 0.2, features=test[2])
    health = gf.watch(rule, live[0], features=live[2], every=500)
    assert not health.holds
    certificate = health.last.overlap.certificate
    right = live[1][-500:, 0]
    answered = health.p_right >= certificate.threshold
    assert answered.mean() > 0.02
    assert 1 - right[answered].mean() <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / answered.sum())


def test_another_encoder_ends_the_guarantee(rule, tmp_path):
    rule.save(tmp_path / "rule.json")
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


def test_an_estimator_of_scikit_learn_may_be_given(rule):
    tree = pytest.importorskip("sklearn.tree").DecisionTreeClassifier(max_depth=2, random_state=0)
    health = gf.watch(rule, search(200, K, match=0.0, seed=3).scores, classifier=tree, every=200, false_alarms=0.9)
    assert [each.auroc > 0.6 for each in health.last.drifts if each.view == SCORES] == [True]


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
    with pytest.raises(ValueError, match="certify it again"):
        gf.watch(dataclasses.replace(rule, reference=None), scores)
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
