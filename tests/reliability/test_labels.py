"""Kinds of labels: those whose meaning is stated are read alike at every entry, and all others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.evaluation import metrics
from geoflow_fast.jobs import decisions
from tests.decisions.helpers import search
from tests.jobs.processes import run_geoflow

FITTED, TESTED = search(120, 5, seed=1), search(300, 5, seed=2)

STATED: dict[str, Callable[[np.ndarray], Any]] = {
    "bool": lambda right: right,
    "int": lambda right: right.astype(int),
    "uint8": lambda right: right.astype(np.uint8),
    "float": lambda right: right.astype(np.float32),
    "list": lambda right: right.tolist(),
    "objects": lambda right: np.array([bool(x) if k % 2 else int(x) for k, x in enumerate(right)], object),
    "column": lambda right: right[:, None],
    "tensor": torch.from_numpy,
    "pandas bool": pandas.Series,
    "pandas boolean": lambda right: pandas.Series(right, dtype="boolean"),
    "pandas Int64": lambda right: pandas.Series(right.astype(int), dtype="Int64"),
    "pandas Float64": lambda right: pandas.Series(right.astype(float), dtype="Float64"),
    "pandas arrow": lambda right: pandas.Series(right, dtype="bool[pyarrow]"),
    "pandas frame": lambda right: pandas.DataFrame({"right": pandas.array(right, dtype="boolean")}),
    "polars": polars.Series,
    "arrow": lambda right: pyarrow.table({"right": right}),
    "arrow int": lambda right: pyarrow.table({"right": right.astype(int)}),
}
"""Whether the first hit is right, [n]."""


def _words(wrong: str, right: str) -> Callable[[np.ndarray], Any]:
    return lambda known: np.where(known, right, wrong)


REFUSED: dict[str, Callable[[np.ndarray], Any]] = {
    "right and wrong": _words("wrong", "right"),
    "hit and miss": _words("miss", "hit"),
    "correct and incorrect": _words("incorrect", "correct"),
    "yes and no": _words("no", "yes"),
    "digits as text": _words("0", "1"),
    "words as objects": lambda right: np.where(right, "right", "wrong").astype(object),
    "bytes": lambda right: np.where(right, b"1", b"0"),
    "1 and 2": lambda right: np.where(right, 1, 2),
    "2 and 1": lambda right: np.where(right, 2, 1),
    "1 and -1": lambda right: np.where(right, 1, -1),
    "0 and 2": lambda right: np.where(right, 2, 0),
    "shares": lambda right: np.where(right, 1.0, 0.5),
    "NaN": lambda right: np.where(np.arange(len(right)) == 7, np.nan, right),
    "None": lambda right: np.where(np.arange(len(right)) == 7, None, right),
    "pandas NA": lambda right: pandas.Series([pandas.NA, *right[1:].tolist()], dtype="boolean"),
    "polars null": lambda right: polars.Series([None, *right[1:].tolist()]),
    "arrow null": lambda right: pyarrow.table({"right": [None, *right[1:].tolist()]}),
    "categories": lambda right: pandas.Series(pandas.Categorical(np.where(right, "right", "wrong"))),
    "dates": lambda right: np.where(right, "2020-01-01", "1970-01-01").astype("datetime64[D]"),
    "complex": lambda right: right.astype(complex),
    "masked": lambda right: np.ma.masked_array(right, np.arange(len(right)) == 3),
    "masked nowhere": lambda right: np.ma.masked_array(right, np.zeros(len(right), bool)),
    "a masked one in a list": lambda right: [np.ma.masked, *right[1:].tolist()],
}


@pytest.fixture(scope="module")
def trust() -> gf.Trust:
    return gf.Trust().fit(FITTED.scores, FITTED.first)


@pytest.mark.parametrize("kind", STATED)
def test_stated_kinds_of_labels_are_read_alike(trust, kind):
    again = gf.Trust().fit(FITTED.scores, STATED[kind](FITTED.first))
    assert again._model == trust._model
    rules = [each.certify(TESTED.scores, STATED[kind](TESTED.first), 0.3) for each in (trust, again)]
    assert rules[0] == rules[1] == trust.certify(TESTED.scores, TESTED.first, 0.3)
    assert rules[0].certified


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_of_labels_are_refused(trust, kind):
    with pytest.raises((ValueError, TypeError), match="labels"):
        gf.Trust().fit(FITTED.scores, REFUSED[kind](FITTED.first))
    with pytest.raises((ValueError, TypeError), match="labels"):
        trust.certify(TESTED.scores, REFUSED[kind](TESTED.first), 0.3)


GRADES = {
    "bool": lambda relevant: relevant,
    "grades": lambda relevant: relevant * 3.0,
    "judged bad": lambda relevant: np.where(relevant, 2, -1),
    "halves": lambda relevant: relevant / 2,
    "tensor": torch.from_numpy,
    "pandas": lambda relevant: pandas.DataFrame(relevant).astype("boolean"),
    "polars": lambda relevant: polars.DataFrame(relevant.astype(np.int8)),
}
NO_GRADES = {
    "words": _words("wrong", "right"),
    "digits as text": _words("0", "1"),
    "1 and 2": lambda relevant: np.where(relevant, 2, 1),
    "stars": lambda relevant: np.where(relevant, 5.0, 1.0),
    "NaN": lambda relevant: np.where(relevant, 1.0, np.nan),
    "masked": lambda relevant: np.ma.masked_array(relevant, ~relevant),
    "masked rows": lambda relevant: [np.ma.masked_array(row, ~row) for row in relevant],
}


@pytest.mark.parametrize("kind", GRADES)
def test_grades_above_zero_are_relevant(kind):
    expected = gf.Trust().fit(FITTED.scores, FITTED.relevant)
    graded = gf.Trust().fit(FITTED.scores, GRADES[kind](FITTED.relevant))
    assert graded._model == expected._model
    tested = GRADES[kind](TESTED.relevant)
    assert graded.certify(TESTED.scores, tested, precision=0.6) == expected.certify(
        TESTED.scores, TESTED.relevant, precision=0.6
    )


@pytest.mark.parametrize("kind", NO_GRADES)
def test_grades_that_do_not_say_what_is_wrong_are_refused(trust, kind):
    for certified in ({"max_error": 0.3}, {"precision": 0.6}):
        with pytest.raises((ValueError, TypeError), match="labels"):
            trust.certify(TESTED.scores, NO_GRADES[kind](TESTED.relevant), **certified)
    with pytest.raises((ValueError, TypeError), match="labels"):
        gf.Trust().fit(FITTED.scores, NO_GRADES[kind](FITTED.relevant))


METRICS = {
    "auroc": metrics.auroc,
    "aurc": metrics.aurc,
    "selective_accuracy": metrics.selective_accuracy,
    "retrieval_calibration": metrics.retrieval_calibration,
    "answered_share": lambda x, right: metrics.answered_share(x, right, 0.1),
    "auroc_leads": lambda x, right: metrics.auroc_leads({"x": x}, right, resamples=10),
    "reliability": lambda x, right: metrics.reliability(np.arange(len(x)) / len(x), right),
}


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_read_the_same_kinds(metric):
    """`correct` may be a share of ties, and words are no numbers."""
    uncertainty, right = np.arange(120.0), FITTED.first
    expected = METRICS[metric](uncertainty, right)
    for kind in ("int", "float", "list", "objects", "tensor", "pandas boolean", "polars"):
        assert str(METRICS[metric](uncertainty, STATED[kind](right))) == str(expected), kind
    for kind in REFUSED.keys() - {"shares"}:
        with pytest.raises((ValueError, TypeError), match="correct"):
            METRICS[metric](uncertainty, REFUSED[kind](right))


def test_files_of_labels_are_read_alike(tmp_path):
    right = FITTED.first
    asked = decisions.ResultLists(Path("x"), FITTED.scores, np.arange(120), None)
    np.save(tmp_path / "bool.npy", right)
    np.save(tmp_path / "float.npy", right.astype(float))
    pyarrow.csv.write_csv(pyarrow.table({"labels": right}), tmp_path / "bool.csv")
    pyarrow.csv.write_csv(pyarrow.table({"id": np.arange(120), "right": right.astype(int)}), tmp_path / "int.csv")
    pyarrow.parquet.write_table(pyarrow.table({"labels": right}), tmp_path / "bool.parquet")
    for name in ("bool.npy", "float.npy", "bool.csv", "int.csv", "bool.parquet"):
        known = decisions.open_labels(tmp_path / name, asked)
        assert known.dtype == bool, name
        np.testing.assert_array_equal(known, right, err_msg=name)
    np.save(tmp_path / "grades.npy", FITTED.relevant * 2.0)
    np.testing.assert_array_equal(decisions.open_labels(tmp_path / "grades.npy", asked), FITTED.relevant)


SPOILED = {
    "words.npy": _words("wrong", "right"),
    "words.csv": _words("wrong", "right"),
    "words.parquet": _words("miss", "hit"),
    "two.npy": lambda right: np.where(right, 1, 2),
    "two.csv": lambda right: np.where(right, 1, 2),
    "two.parquet": lambda right: np.where(right, 2, 1),
    "null.parquet": lambda right: [None, *right[1:].tolist()],
    "gap.parquet": lambda right: [None, *right[1:].astype(int).tolist()],
}


@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("command", ["trust", "threshold", "explore"])
def test_commands_refuse_other_kinds_in_files(monkeypatch, capsys, tmp_path, name, command):
    monkeypatch.chdir(tmp_path)
    values = SPOILED[name](FITTED.first)
    if name.endswith(".npy"):
        np.save(name, values)
    else:
        write = pyarrow.csv.write_csv if name.endswith(".csv") else pyarrow.parquet.write_table
        write(pyarrow.table({"labels": values}), name)
    prob = np.exp(FITTED.scores) / np.exp(FITTED.scores).sum(1, keepdims=True)
    table = {"query": np.arange(120), "index": np.tile(np.arange(5), (120, 1)).tolist(), "prob": prob.tolist()}
    pyarrow.parquet.write_table(pyarrow.table(table), "lists.parquet")
    flags = {
        "trust": {"scores": "lists.parquet", "trust": "t.json"},
        "threshold": {"scores": "lists.parquet", "rule": "r.json"},
        "explore": {"out": "page.html"},
    }[command]
    more = ["lists.parquet"] if command == "explore" else []
    assert run_geoflow(monkeypatch, command, *more, **flags, labels=name) == 2
    assert name in capsys.readouterr().err
    assert not any(Path(each).exists() for each in ("t.json", "r.json", "page.html"))


UNIT = np.eye(8, dtype=np.float32)[:6]
MASKED = np.ma.masked_array(UNIT, UNIT > 0)
NUMBERS = np.ma.masked_array(np.arange(6), np.arange(6) == 2)
FLOW = gf.GeoFlow(gf.GeoFlowConfig.tiny(8, 8)).eval()
SCORES = np.ma.masked_array(TESTED.scores, TESTED.scores > 2)

BORDERS: dict[str, Callable[[], Any]] = {
    "Trust.fit scores": lambda: gf.Trust().fit(SCORES, TESTED.first),
    "Trust.fit features": lambda: gf.Trust().fit(TESTED.scores, TESTED.first, SCORES[:, :1]),
    "Trust.fit rows": lambda: gf.Trust().fit(list(SCORES), TESTED.first),
    "predict_proba": lambda: gf.Trust().fit(FITTED.scores, FITTED.first).predict_proba(SCORES),
    "p_no_match": lambda: gf.Trust().fit(FITTED.scores, FITTED.first).p_no_match(SCORES),
    "relevance": lambda: gf.Trust().fit(FITTED.scores, FITTED.first).relevance(SCORES),
    "certify": lambda: gf.Trust().fit(FITTED.scores, FITTED.first).certify(SCORES, TESTED.first),
    "certify unlabelled": lambda: (
        gf.Trust()
        .fit(FITTED.scores, FITTED.first)
        .certify(TESTED.scores, TESTED.first, no_match_share="estimate", unlabelled=SCORES)
    ),
    "Rule": lambda: certified()(SCORES),
    "Rule.show": lambda: certified().show(SCORES),
    "watch": lambda: gf.watch(certified(), SCORES),
    "watch hits": lambda: gf.watch(certified(), TESTED.scores, hits=np.ma.masked_array(np.zeros((300, 5), int))),
    "auroc": lambda: metrics.auroc(NUMBERS, np.arange(6) > 2),
    "bootstrap": lambda: gf.evaluation.bootstrap_interval(np.mean, NUMBERS),
    "spearman": lambda: gf.evaluation.spearman(NUMBERS, np.arange(6)),
    "EmbeddingPairs": lambda: gf.EmbeddingPairs.from_arrays(MASKED, UNIT),
    "EmbeddingPairs texts": lambda: gf.EmbeddingPairs.from_arrays(UNIT, MASKED),
    "EmbeddingPairs index": lambda: gf.EmbeddingPairs.from_arrays(UNIT, UNIT, NUMBERS),
    "EmbeddingPairs ids": lambda: gf.EmbeddingPairs.from_arrays(UNIT, UNIT, ids=NUMBERS),
    "EmbeddingPairs rows": lambda: gf.EmbeddingPairs.from_arrays(UNIT, UNIT)[NUMBERS],
    "Embeddings": lambda: gf.Embeddings.from_arrays(MASKED),
    "Gallery": lambda: gf.Gallery(MASKED),
    "Gallery ids": lambda: gf.Gallery(UNIT, ids=list(NUMBERS)),
    "Qrels": lambda: gf.Qrels(NUMBERS, np.arange(6), np.ones(6)),
    "Qrels grade": lambda: gf.Qrels(np.arange(6), np.arange(6), np.ma.masked_array(np.ones(6))),
    "RetrievalEntropy": lambda: gf.RetrievalEntropy(FLOW, UNIT, "t2i", n_samples=2, n_steps=2)(MASKED),
    "log_density": lambda: gf.log_density(FLOW, MASKED, UNIT, n_steps=2),
    "epistemic": lambda: gf.epistemic(FLOW, image=MASKED, n_steps=2),
    "epistemic partners": lambda: gf.epistemic(FLOW, image=UNIT, text_partners=MASKED, n_steps=2),
    "BayesReranker": lambda: gf.BayesReranker(FLOW, UNIT, "t2i")(MASKED),
    "store": lambda: gf.stores.CustomStore(lambda *_: ([], []), None, 8).search(MASKED, 2),
}
"""Calls that take arrays, with a masked one."""


def certified() -> gf.Rule:
    return gf.Trust().fit(FITTED.scores, FITTED.first).certify(TESTED.scores, TESTED.first, 0.3)


@pytest.mark.parametrize("name", BORDERS)
def test_masked_arrays_are_refused_at_every_border(name):
    with pytest.raises(TypeError, match="is a masked array"):
        BORDERS[name]()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30, 1e74])
@pytest.mark.parametrize("level", [0.0, 1.0, 1e9, 1e70])
def test_probabilities_are_numbers_at_every_scale_of_scores(scale, level):
    fitted, tested = (each.scores * scale + level for each in (FITTED, TESTED))
    trust = gf.Trust().fit(fitted, FITTED.relevant)
    for values in (trust.predict_proba(tested), trust.relevance(tested), trust.p_no_match(tested)):
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert (values <= 1).all()
    rule = trust.certify(tested, TESTED.relevant, 0.4, no_match_share=0.1)
    assert np.isfinite(rule.certificate.error_bound)


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-160, 1e160, 1e300])
def test_scores_that_cannot_be_computed_with_are_refused(scale):
    with pytest.raises(ValueError, match=r"scores (differ within a list by .* too little|.* sizes up to 1e\+75)"):
        gf.Trust().fit(FITTED.scores * scale, FITTED.first)


@pytest.mark.parametrize("scores", [TESTED.scores * 1e-320, TESTED.scores * 1e70, TESTED.scores * 0.0])
def test_scores_of_another_scale_than_the_fitted_ones_give_numbers(trust, scores):
    for values in (trust.predict_proba(scores), trust.relevance(scores), trust.p_no_match(scores)):
        assert np.isfinite(values).all()


def test_text_that_could_be_a_number_is_no_score():
    with pytest.raises(TypeError, match="scores must hold real numbers"):
        gf.Trust().fit(FITTED.scores.astype(str), FITTED.first)
    with pytest.raises(TypeError, match="scores must hold real numbers"):
        gf.Trust().fit(FITTED.scores.astype(str).astype(object), FITTED.first)
    with pytest.raises(TypeError, match="uncertainty must hold real numbers"):
        metrics.auroc(["1", "2"], [True, False])
