"""Trust: probabilities of result lists, in every kind of table, and what scikit-learn expects."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings

import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest
import torch
from scipy import special
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict, cross_val_score

import geoflow_fast as gf
from geoflow_fast.decisions import lists
from geoflow_fast.decisions.logistic import log_losses, mean_and_error
from geoflow_fast.decisions.model import RIGHT, _climb
from geoflow_fast.evaluation.metrics import auroc
from tests.decisions.helpers import copied, search

NEW = search(4000, seed=1)


@pytest.fixture(scope="module")
def trust() -> gf.Trust:
    known = search(400)
    return gf.Trust().fit(known.scores, known.relevant)


def test_probabilities_are_calibrated(trust):
    prob = trust.predict_proba(NEW.scores)
    assert prob.shape == (4000, 2)
    np.testing.assert_allclose(prob.sum(1), 1)
    assert prob[:, 1].mean() == pytest.approx(NEW.first.mean(), abs=0.04)
    for part in np.array_split(np.argsort(prob[:, 1]), 5):
        assert prob[part, 1].mean() == pytest.approx(NEW.first[part].mean(), abs=0.07)


def test_a_hundred_queries_are_enough_and_take_less_than_a_second():
    known = search(100, seed=2)
    start = time.process_time()
    few = gf.Trust().fit(known.scores, known.first)
    assert time.process_time() - start < 1
    assert auroc(-few.predict_proba(NEW.scores)[:, 1], NEW.first) > 0.8


def test_the_level_of_the_list_is_used_where_it_helps(trust):
    """The others' scores tell nothing here that the first does not: the level is worth having and is reported."""
    kept = {(rung.question, rung.name): rung for rung in trust.report if rung.kept}
    assert ("right", "softmax") in kept
    assert ("no match", "level") in kept
    assert all(rung.gain > rung.stderr for rung in trust.report if rung.kept)
    assert all(rung.gain <= rung.stderr for rung in trust.report if not rung.kept)


def test_features_of_the_caller_are_kept_only_if_they_help():
    rng = np.random.default_rng(0)
    known = search(300, seed=3)
    noise = rng.normal(size=(300, 2))
    telling = known.first[:, None] + 0.5 * rng.normal(size=(300, 1))
    with_noise = gf.Trust().fit(known.scores, known.first, noise)
    assert not any(rung.kept for rung in with_noise.report if rung.name == "features" and rung.question == "right")
    with_hint = gf.Trust().fit(known.scores, known.first, telling)
    assert next(rung for rung in with_hint.report if rung.name == "features").kept
    plain = gf.Trust().fit(known.scores, known.first)
    hint = NEW.first[:, None] + 0.5 * rng.normal(size=(4000, 1))
    better = log_losses(special.logit(with_hint.predict_proba(NEW.scores, hint)[:, 1]), NEW.first).mean()
    assert better < log_losses(special.logit(plain.predict_proba(NEW.scores)[:, 1]), NEW.first).mean() - 0.05
    with pytest.raises(ValueError, match="features has 0 columns, but 1 were fitted"):
        with_hint.predict_proba(NEW.scores)


def test_relevance_is_calibrated_for_every_hit_and_need_not_sum_to_one():
    """With two right items in every list the probabilities of a row sum to about the number of those that it shows."""
    rng = np.random.default_rng(0)

    def two(n: int):
        scores = rng.normal(size=(n, 200))
        scores[:, :2] += rng.uniform(1, 6, (n, 1))
        order = np.argsort(-scores, axis=1)[:, :30]
        return np.take_along_axis(scores, order, 1), order < 2

    fitted = gf.Trust().fit(*two(400))
    scores, relevant = two(3000)
    prob = fitted.relevance(scores)
    assert prob.sum(1).mean() == pytest.approx(relevant.sum(1).mean(), abs=0.1)
    assert prob.sum(1).max() > 1.5
    assert (np.diff(prob, axis=1) <= 0).all()
    for low, high in ((0.05, 0.3), (0.3, 0.7), (0.7, 1.0)):
        inside = (prob > low) & (prob <= high)
        assert relevant[inside].mean() == pytest.approx(prob[inside].mean(), abs=0.08)
    np.testing.assert_allclose(prob[:, 0], fitted.predict_proba(scores)[:, 1])


def test_relevance_of_other_hits_without_labels_of_them():
    known = search(300)
    prob = gf.Trust().fit(known.scores, known.first).relevance(NEW.scores)
    looked_at = slice(1, lists.depth_of(50))
    apart = (lists.distinct_ranks(NEW.scores) == np.arange(50)).all(1)
    assert (prob[apart, : lists.depth_of(50)].sum(1) <= 1 + 1e-9).all()
    assert NEW.relevant[:, looked_at].sum(1).mean() < prob[:, looked_at].sum(1).mean()  # some are further down
    assert (np.diff(prob, axis=1) <= 0).all()


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_missing_items_are_found_with_calibrated_probabilities(share):
    known = search(1500, seed=4)
    trust = gf.Trust().fit(known.scores, known.relevant)
    mixed = search(6000, match=1 - share, seed=5)
    prob = trust.p_no_match(mixed.scores, share)
    exact = auroc(-mixed.evidence, ~mixed.missing)
    assert auroc(prob, ~mixed.missing) - 0.5 > 0.95 * (exact - 0.5) > 0.2
    for part in np.array_split(np.argsort(prob), 4):
        assert prob[part].mean() == pytest.approx(mixed.missing[part].mean(), abs=0.08)


@pytest.mark.parametrize("labels", ["first", "relevant"])
def test_copies_of_items_change_nothing(labels):
    """Storing every item five times leaves a tenth of the list, and what is looked at stays the same."""
    known = search(300)
    plain = gf.Trust().fit(known.scores, getattr(known, labels))
    five = copied(known, 5, 50)
    again = gf.Trust().fit(five.scores, getattr(five, labels))
    new = copied(NEW, 5, 50)
    expected = plain.predict_proba(NEW.scores)
    np.testing.assert_allclose(again.predict_proba(new.scores), expected, atol=1e-9)
    np.testing.assert_allclose(plain.predict_proba(new.scores), expected, atol=1e-9)
    np.testing.assert_allclose(again.p_no_match(new.scores), plain.p_no_match(NEW.scores), atol=1e-9)
    np.testing.assert_allclose(plain.relevance(new.scores)[:, ::5], plain.relevance(NEW.scores)[:, :10], atol=1e-9)


def test_ties_up_to_rounding_are_copies():
    scores = np.array([[0.9, 0.9 - 1e-8, 0.5, 0.5, 0.1], [0.9, 0.8, 0.7, 0.6, 0.5]])
    assert lists.distinct_ranks(scores).tolist() == [[0, 0, 1, 1, 2], [0, 1, 2, 3, 4]]
    assert lists.first_distinct(scores, 4)[0].tolist() == [0.9, 0.5, 0.1, 0.1]
    chosen = np.array([[False, True, False, False, False], [True, False, False, False, True]])
    assert lists.taken_out(scores, chosen).tolist() == [[0.5, 0.5, 0.1, 0.1, 0.1], [0.8, 0.7, 0.6, 0.6, 0.6]]
    assert lists.taken_out(scores, np.ones_like(chosen))[1].tolist() == [0.5] * 5


@pytest.fixture(scope="module")
def short() -> gf.Trust:
    """Fitted on lists of five hits."""
    known = search(100, k=5)
    return gf.Trust().fit(known.scores, known.relevant)


class TestTables:
    SCORES = NEW.scores[:7, :5]

    def test_frames_of_pandas_keep_their_index_and_columns(self, short):
        frame = pandas.DataFrame(self.SCORES, index=list("abcdefg"), columns=[f"hit{j}" for j in range(5)])
        prob, relevance, none = short.predict_proba(frame), short.relevance(frame), short.p_no_match(frame)
        assert prob.index.tolist() == relevance.index.tolist() == none.index.tolist() == list("abcdefg")
        assert relevance.columns.tolist() == frame.columns.tolist()
        np.testing.assert_array_equal(prob.to_numpy(), short.predict_proba(self.SCORES))
        listed = pandas.DataFrame({"scores": list(self.SCORES)})
        np.testing.assert_array_equal(short.relevance(listed).to_numpy(), relevance.to_numpy())

    def test_frames_of_polars(self, short):
        frame = polars.DataFrame(self.SCORES, schema=[f"hit{j}" for j in range(5)])
        relevance = short.relevance(frame)
        assert isinstance(relevance, polars.DataFrame)
        assert relevance.columns == frame.columns
        assert isinstance(short.p_no_match(frame), polars.Series)
        listed = polars.DataFrame({"scores": self.SCORES.tolist()})
        np.testing.assert_array_equal(short.relevance(listed).to_numpy(), relevance.to_numpy())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_tensors(self, short, dtype):
        scores = torch.from_numpy(self.SCORES).to(dtype)
        prob = short.predict_proba(scores)
        assert isinstance(prob, torch.Tensor)
        np.testing.assert_allclose(prob.numpy(), short.predict_proba(scores.double().numpy()))

    def test_parquet_files_and_tables_of_pyarrow(self, short, tmp_path):
        wide = pyarrow.table({f"hit{j}": column for j, column in enumerate(self.SCORES.T)})
        listed = pyarrow.table({"scores": self.SCORES.tolist()})
        for name, table in {"wide": wide, "listed": listed}.items():
            pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
            for given in (table, tmp_path / f"{name}.parquet", str(tmp_path / f"{name}.parquet")):
                result = short.relevance(given)
                assert isinstance(result, pyarrow.Table)
                values = np.column_stack([column.to_numpy() for column in result.columns])
                np.testing.assert_array_equal(values, short.relevance(self.SCORES))

    def test_labels_in_frames(self):
        known = search(60, k=5)
        expected = gf.Trust().fit(known.scores, known.relevant).predict_proba(self.SCORES)
        for labels in (pandas.DataFrame(known.relevant), polars.DataFrame(known.relevant.astype(int) * 2)):
            np.testing.assert_array_equal(gf.Trust().fit(known.scores, labels).predict_proba(self.SCORES), expected)


def test_unsorted_lists_are_sorted_on_demand(trust):
    rng = np.random.default_rng(0)
    known, order = search(400), rng.permutation(50)
    mixed = gf.Trust(presorted=False).fit(known.scores[:, order], known.relevant[:, order])
    np.testing.assert_array_equal(mixed.relevance(NEW.scores[:, order]), trust.relevance(NEW.scores)[:, order])


def with_nan(scores):
    scores = scores.copy()
    scores[7, 3] = np.nan
    return scores


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, y: (s[:5], y[:5]), "scores has 5 queries; at least 10 judged ones are needed"),
        (lambda s, y: (with_nan(s), y), "scores has nan in row 7"),
        (lambda s, y: (-s, y), "best hit first, but in row 0 column 1"),
        (lambda s, y: (s, y[:-1]), r"labels must be \[60\] or \[60, 5\]"),
        (lambda s, _: (s, np.ones(60)), "first hit is right for all 60"),
        (lambda s, _: (s, np.arange(60)), r"labels \[n\] must be True or 1 .* but row 2 is 2"),
        (lambda s, y: (s[:, :1], y), "at least two hits"),
        (lambda s, y: (s[0], y), r"must hold one list of scores per query, \[n, k\]"),
        (lambda s, _: (s, None), "labels are missing"),
    ],
)
def test_errors_say_what_and_where(change, words):
    known = search(60, k=5)
    with pytest.raises(ValueError, match=words):
        gf.Trust().fit(*change(known.scores, known.first))


def test_lists_of_another_length_are_refused(trust):
    with pytest.raises(ValueError, match="lists of 20 hits, but this was fitted on lists of 50"):
        trust.predict_proba(NEW.scores[:, :20])


def test_what_was_learned_is_saved(trust, tmp_path):
    trust.save(tmp_path / "trust.json")
    loaded = gf.Trust.load(tmp_path / "trust.json")
    np.testing.assert_array_equal(loaded.relevance(NEW.scores), trust.relevance(NEW.scores))
    assert loaded.report == trust.report
    assert loaded.certify(NEW.scores, NEW.relevant) == trust.certify(NEW.scores, NEW.relevant)
    values = json.loads((tmp_path / "trust.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(values | {"format": 99}))
    with pytest.raises(ValueError, match=r"other\.json is damaged or not a fitted Trust: format 99"):
        gf.Trust.load(tmp_path / "other.json")


def test_files_keep_digests_of_the_fitted_queries(trust, tmp_path):
    trust.save(tmp_path / "trust.json")
    known = search(400)
    with pytest.raises(ValueError, match="400 of 400 rows that were fitted"):
        gf.Trust.load(tmp_path / "trust.json").certify(known.scores, known.relevant)
    values = json.loads((tmp_path / "trust.json").read_text())
    del values["seen"]
    (tmp_path / "trust.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"trust\.json.*'seen'"):
        gf.Trust.load(tmp_path / "trust.json")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([None] + [True, False] * 29 + [True], "row 0 is None"),
        ([1, 0] * 29 + [1, float("nan")], "row 59 is nan"),
        ([1, 0] * 29 + ["yes", 1], "row 58 is 'yes'"),
    ],
)
def test_objects_that_are_no_labels_are_named(labels, words):
    with pytest.raises(ValueError, match=words):
        gf.Trust().fit(NEW.scores[:60], np.array(labels, dtype=object))


@pytest.mark.parametrize("kind", [bool, int, float])
def test_scikit_learn_clones_and_cross_validates(kind):
    known = search(300)
    copy = clone(gf.Trust(seed=3, presorted=False))
    assert copy.get_params() == {"seed": 3, "presorted": False, "log_prob": False}
    labels = known.first.astype(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prob = cross_val_predict(gf.Trust(), known.scores, labels, cv=3, method="predict_proba")
        answers = cross_val_predict(gf.Trust(), known.scores, labels, cv=3)
        accuracy = cross_val_score(gf.Trust(), known.scores, labels, cv=3, scoring="accuracy")
    assert prob.shape == (300, 2)
    assert roc_auc_score(labels, prob[:, 1]) > 0.8
    np.testing.assert_array_equal(answers, prob[:, 1] >= 0.5)
    assert accuracy.mean() == pytest.approx((answers == known.first).mean(), abs=1e-9)
    assert gf.Trust().fit(known.scores, labels).classes_.tolist() == [False, True]


def test_neither_torch_nor_frames_are_imported():
    code = """
import sys
import numpy as np
import geoflow_fast as gf
rng = np.random.default_rng(0)
scores = np.sort(rng.normal(size=(60, 10)))[:, ::-1]
labels = rng.random(60) < 0.5
trust = gf.Trust().fit(scores, labels)
trust.p_no_match(scores), trust.relevance(scores), trust.certify(scores + 1, labels)(scores)
print(sorted({"torch", "pandas", "polars", "sklearn", "pyarrow"} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


def test_the_softmax_is_that_of_scipy():
    heads = lists.first_distinct(NEW.scores, 9)
    expected = special.logit(special.softmax(2.0 * heads, axis=1)[:, 0])
    np.testing.assert_allclose(lists.softmax_logit(heads, 2.0), expected, rtol=1e-6)


def test_a_query_is_judged_by_a_fit_that_has_not_seen_its_fold():
    """What happened in a fold changes nothing of what is said about it; what happened in rows that are not learned
    from changes nothing at all."""
    rng = np.random.default_rng(0)
    n = 150
    heads = np.sort(rng.normal(size=(n, 4)), axis=1)[:, ::-1]
    ahead, fold, learned, features = heads[:, 0] - heads[:, 1], np.arange(n) % 5, np.arange(n) % 7 > 0, np.empty((n, 0))
    positive = rng.random(n) < special.expit(5 * ahead - 2)

    def judged(happened):
        return _climb(RIGHT, heads, features, happened, learned, 1.0, fold, np.arange(n))

    answer, gains, logit = judged(positive)
    others = judged(np.where(learned, positive, ~positive))
    assert others[:2] == (answer, gains)
    np.testing.assert_array_equal(others[2], logit)
    for number in range(5):
        out = fold == number
        # A fold in which the first is right where the second is near asks for other weights and temperatures.
        other, _, without = judged(np.where(out, ahead < 0.3, positive))
        assert other.groups == answer.groups == ("softmax",)
        np.testing.assert_array_equal(without[out], logit[out])
        assert (without[~out] != logit[~out]).all()


def test_the_error_of_a_mean_counts_each_query_once():
    """Values of one query that are all equal say no more than one of them."""
    values = np.array([3.0, -1.0, 4.0, 1.0, 5.0])
    expected = values.mean(), values.std() / np.sqrt(5)
    assert mean_and_error(values, np.arange(5)) == pytest.approx(expected)
    assert mean_and_error(np.tile(values, 3), np.tile(np.arange(5), 3)) == pytest.approx(expected)
    assert mean_and_error(values, np.zeros(5, int)) == pytest.approx((values.mean(), 0.0))
