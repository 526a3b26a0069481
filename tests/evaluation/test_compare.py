"""Comparisons: their numbers are those of the metrics, they are stored, averaged over seeds, and continued."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

import geoflow_fast as gf
from geoflow_fast.evaluation.compare import ScoredQueries, compare, judge, score_queries
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.metrics import answered_share
from geoflow_fast.evaluation.registry import create
from geoflow_fast.evaluation.results import Comparison, aggregate
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.evaluation.untrained import Margin, MaxSoftmax
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import parquet

TRAINING_FREE = ("max_softmax", "margin", "softmax_entropy")


def test_numbers_are_those_of_the_metrics(pairs, held_out):
    study = Study(held_out)
    comparison = compare(study, pairs, TRAINING_FREE, resamples=20)
    assert [(result.method, result.direction) for result in comparison.results] == [
        (name, direction) for direction in ("t2i", "i2t") for name in TRAINING_FREE
    ]
    method = MaxSoftmax(study)
    task = RetrievalTask.of(pairs, "i2t")
    method.fit(task)
    answers = plain_search(task)
    scores = method.score(slice(None), answers.index[:, 0])
    result = comparison.of("i2t")[0]
    assert result.numbers["auroc"] == gf.evaluation.auroc(scores.uncertainty, answers.correct)
    assert result.numbers["aurc"] == gf.evaluation.aurc(scores.uncertainty, answers.correct)
    assert result.numbers["nll"] == pytest.approx(float(scores.nll.mean()))
    assert result.numbers["ece"] == gf.evaluation.reliability(scores.p_answer, answers.correct).ece
    assert result.plain_recall == result.numbers["recall"] == answers.recall(1)
    assert math.isnan(comparison.of("i2t")[1].numbers["nll"])  # the margin states no probabilities
    low, high = result.intervals["auroc"]
    assert low <= result.numbers["auroc"] <= high


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_judgements_that_say_what_pairs_say_give_the_same_numbers(pairs, held_out, direction, tmp_path):
    """The texts of an image all are right for it; a query that nothing was judged right for changes nothing."""
    study, names = Study(held_out), ("max_softmax", "margin", "ladder")
    paired = RetrievalTask.of(pairs, direction)
    query, column = np.nonzero(paired.own.numpy() >= 0)
    qrels = gf.Qrels(query + 1, paired.own.numpy()[query, column], np.ones(len(query)))
    queries = np.concatenate((paired.queries[:1].numpy(), paired.queries.numpy()))
    task = RetrievalTask.from_qrels(queries, paired.items, qrels, direction)
    judged = compare(study, task, names, resamples=0, folder=tmp_path)
    for result, expected in zip(
        judged.results, compare(study, pairs, names, directions=[direction], resamples=0).results
    ):
        assert (result.method, result.direction) == (expected.method, direction)
        assert (result.queries, result.items) == (expected.queries, expected.items)
        for name in ("auroc", "aurc", "recall", "nll", "ece"):
            assert result.numbers[name] == pytest.approx(expected.numbers[name], rel=1e-4, nan_ok=True)
    scores = parquet.read_columns(tmp_path / f"scores/ladder_{direction}.parquet")
    assert scores["query"].tolist() == list(range(1, len(task) + 1))


def test_items_that_tie_are_right_for_the_queries_that_judgements_name():
    """Four items are one point and nearest to all queries; each query has another number of right ones among them."""
    items = np.concatenate((np.repeat(np.eye(1, 8), 4, 0), -np.eye(2, 8))).astype(np.float32)
    query, item = np.nonzero(np.tri(4, 6))
    task = RetrievalTask.from_qrels(items[:4], items, gf.Qrels(query, item, np.ones(len(query))), "t2i")
    assert plain_search(task).first_right.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_a_task_has_a_direction_and_a_width_of_its_own(pairs, held_out):
    task = RetrievalTask.of(pairs, "t2i")
    with pytest.raises(ValueError, match="belong to pairs"):
        compare(Study(held_out), task, ("margin",), max_queries=20)
    narrow = gf.EmbeddingPairs.from_arrays(np.eye(20, 5) + 0.1, np.eye(20, 5) + 0.1, normalize=True)
    with pytest.raises(ValueError, match="width 5, but the held-out pairs have 8"):
        compare(Study(held_out), narrow, ("margin",))


def test_results_come_back_from_disk(pairs, held_out, tmp_path):
    comparison = compare(Study(held_out), pairs, ("margin", "softmax_entropy"), resamples=10)
    comparison.save(tmp_path)
    assert str(Comparison.load(tmp_path)) == str(comparison)  # NaN is not equal to itself
    json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    columns = parquet.read_columns(tmp_path / "results.parquet")
    assert columns["method"].tolist() == [result.method for result in comparison.results]
    assert columns["auroc"].tolist() == [result.numbers["auroc"] for result in comparison.results]
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"results\.json is damaged"):
        Comparison.load(tmp_path)


def test_mean_and_deviation_over_seeds(pairs, held_out):
    runs = [compare(Study(held_out, seed=s), pairs, ("margin",), resamples=0, max_queries=30) for s in range(3)]
    mean = aggregate(runs).results[0]
    values = [run.results[0].numbers["auroc"] for run in runs]
    assert len(set(values)) > 1
    assert mean.numbers["auroc"] == pytest.approx(np.mean(values))
    assert mean.spread["auroc"] == pytest.approx(np.std(values, ddof=1))
    assert mean.seeds == [0, 1, 2]
    assert mean.accuracy == pytest.approx(np.mean([run.results[0].accuracy for run in runs], axis=0))
    assert math.isnan(mean.numbers["ece"])
    with pytest.raises(ValueError, match="comparison 1 has other methods"):
        aggregate([runs[0], Comparison([])])
    with pytest.raises(ValueError, match="nothing"):
        aggregate([])


def test_stored_scores_are_not_computed_again(pairs, held_out, tmp_path, monkeypatch):
    first = compare(Study(held_out), pairs, ("margin",), resamples=0, folder=tmp_path)
    monkeypatch.setattr(Margin, "score", lambda *_: pytest.fail("computed again"))
    second = compare(Study(held_out), pairs, ("margin",), resamples=0, folder=tmp_path)
    assert str(first) == str(second)
    with pytest.raises(FileExistsError, match="margin_t2i"):
        compare(Study(held_out, seed=1), pairs, ("margin",), folder=tmp_path)


@pytest.mark.parametrize("name", ["rerank", "knn", "none"])
def test_a_method_that_cannot_be_made_stops_the_comparison_at_once(pairs, held_out, name, monkeypatch):
    monkeypatch.setattr(Margin, "fit", lambda *_: pytest.fail("began to work"))
    with pytest.raises(ValueError, match=name):
        compare(Study(held_out), pairs, ("margin", name))


def test_too_few_queries_for_the_bins_are_refused(pairs, held_out):
    with pytest.raises(ValueError, match="bins"):
        compare(Study(held_out), pairs, ("margin",), max_queries=5)


class Slow(Method):
    """A method that costs something and is stopped by the user while it is fitted."""

    name, title = "slow", "slow"

    def operations(self, queries: int) -> float:
        return 1e9 * queries

    def facts(self):
        return {}

    def _fit(self, task):  # noqa: ARG002
        raise KeyboardInterrupt

    def score(self, rows, answers):  # noqa: ARG002
        raise AssertionError("it was stopped before")


def test_a_stop_leaves_a_report_of_the_cheap_methods(pairs, held_out):
    reports, lines = [], []
    names = (Slow(Study(held_out)), "margin", "max_softmax")
    with pytest.raises(KeyboardInterrupt):
        compare(Study(held_out), pairs, names, resamples=9, announce=lines.append, report=reports.append)
    (known,) = reports
    assert [(r.method, r.direction) for r in known.results] == [
        (method, direction) for direction in ("t2i", "i2t") for method in ("margin", "max_softmax")
    ]
    assert all(r.lead for r in known.results)
    assert lines.index("t2i: slow") > lines.index("i2t: cosine margin")  # the cheapest come first


def test_how_many_can_be_answered():
    uncertainty, right = [1.0, 2.0, 2.0, 3.0, 4.0], [1, 1, 0, 1, 0]
    shares = {0.0: 0.2, 0.05: 0.2, 0.25: 0.8, 0.3: 0.8, 0.34: 0.8, 0.4: 1.0}
    for error, share in shares.items():
        assert answered_share(uncertainty, right, error) == pytest.approx(share), error
    assert answered_share([0.0, 1.0], [0, 1], 0.1) == 0.0
    rng = np.random.default_rng(0)
    score, hits = rng.integers(0, 9, 200), rng.random(200) > 0.3
    for error in (0.05, 0.2, 0.29, 0.35):
        kept = [score <= level for level in np.unique(score)]
        expected = max((k.mean() for k in kept if (~hits[k]).mean() <= error), default=0.0)
        assert answered_share(score, hits, error) == pytest.approx(expected)


def test_pooled_folds_are_judged_as_one(pairs, held_out):
    halves = pairs.split(0.5, 0)
    folds = []
    for half in halves:
        task = RetrievalTask.of(half, "t2i")
        folds.append(score_queries(create("max_softmax", Study(held_out)), task, plain_search(task)))
    whole = ScoredQueries.pooled(folds)
    assert len(np.unique(whole.columns["image"])) == 40  # numbers of images do not collide
    (result,) = judge([whole], resamples=0)
    assert (result.queries, result.items) == (len(pairs), 20)
    alone = [compare(Study(held_out), half, ("max_softmax",), directions=("t2i",), resamples=0) for half in halves]
    recall = [part.results[0].numbers["recall"] for part in alone]
    assert result.numbers["recall"] == pytest.approx(np.mean(recall))
    with pytest.raises(ValueError, match="one method and direction"):
        ScoredQueries.pooled([folds[0], dataclasses.replace(folds[1], method="other")])
