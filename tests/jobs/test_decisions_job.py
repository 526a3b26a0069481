"""`geoflow trust` and `geoflow threshold`: files in and out against the library, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

import geoflow_fast as gf
from geoflow_fast.jobs import decisions
from geoflow_fast.runtime.parquet import read_columns
from tests.jobs.processes import run_geoflow

K = 5


def lists(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [n, k] of a search that is right where the first score stands out, and whether it is."""
    rng = np.random.default_rng(seed)
    scores = np.sort(rng.normal(size=(count, K)), axis=1)[:, ::-1].copy()
    strength = rng.exponential(1.5, size=count)
    scores[:, 0] = scores[:, 1] + strength
    return scores, rng.random(count) < 1 / (1 + np.exp(-3 * (strength - 1)))


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, count, seed in (("judged", 200, 0), ("check", 400, 1), ("new", 300, 2)):
        scores, right = lists(count, seed)
        np.save(f"{name}.npy", scores)
        np.save(f"{name}_labels.npy", right)
    return tmp_path


def threshold(monkeypatch, *more: str, **options: object) -> int:
    return run_geoflow(monkeypatch, "threshold", *more, **{"rule": "rule.json", **options})


@pytest.mark.usefixtures("desk")
def test_trust_is_fitted_saved_and_applied_to_new_lists(monkeypatch, capsys):
    flags = {"scores": "judged.npy", "labels": "judged_labels.npy", "trust": "t.json", "out": "judged.parquet"}
    assert run_geoflow(monkeypatch, "trust", **flags) == 0
    assert "right, softmax: " in capsys.readouterr().out
    assert run_geoflow(monkeypatch, "trust", scores="new.npy", trust="t.json", out="new.parquet") == 0
    expected = gf.Trust().fit(np.load("judged.npy"), np.load("judged_labels.npy"))
    columns, new = read_columns(Path("new.parquet")), np.load("new.npy")
    assert columns["query"].tolist() == list(range(300))
    np.testing.assert_allclose(columns["p_right"], expected.predict_proba(new)[:, 1])
    np.testing.assert_allclose(columns["p_no_match"], expected.p_no_match(new))
    np.testing.assert_allclose(np.stack(columns["relevance"]), expected.relevance(new))
    assert run_geoflow(monkeypatch, "trust", **flags) == 2
    assert "t.json exists" in capsys.readouterr().err
    assert run_geoflow(monkeypatch, "trust", "--overwrite", "--json", **flags) == 0
    assert json.loads(capsys.readouterr().out)["queries"] == 200


@pytest.mark.usefixtures("desk")
def test_a_rule_is_certified_on_other_queries_and_applied(monkeypatch, capsys):
    assert run_geoflow(monkeypatch, "trust", scores="judged.npy", labels="judged_labels.npy", trust="t.json") == 0
    known = {"scores": "check.npy", "labels": "check_labels.npy", "trust": "t.json"}
    assert threshold(monkeypatch, **known, max_error=0.2, encoder="clip", gallery_size=9) == 0
    expected = (
        gf.Trust()
        .fit(np.load("judged.npy"), np.load("judged_labels.npy"))
        .certify(np.load("check.npy"), np.load("check_labels.npy"), 0.2, encoder="clip", gallery_size=9)
    )
    assert expected.certified
    said = capsys.readouterr()
    assert repr(expected) in said.out
    assert "warning" not in said.err
    assert threshold(monkeypatch, scores="new.npy", out="decided.parquet", encoder="clip") == 0
    columns, new = read_columns(Path("decided.parquet")), np.load("new.npy")
    answered = expected(new, encoder="clip")
    assert columns["answer"].tolist() == answered.tolist()
    assert f"answers {answered.mean():.1%} of these queries\n" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="not told which one made these lists"):
        assert threshold(monkeypatch, scores="new.npy", out="decided.parquet") == 0
    assert threshold(monkeypatch, scores="new.npy", out="decided.parquet", encoder="siglip") == 2
    assert "made with" in capsys.readouterr().err


@pytest.mark.usefixtures("desk")
def test_without_a_trust_half_of_the_queries_fit_one(monkeypatch, capsys):
    assert threshold(monkeypatch, "--json", scores="check.npy", labels="check_labels.npy", max_error=0.3) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["certified"]
    assert facts["certificate"]["tested"] == 200
    assert facts["left_out"] == 0


@pytest.mark.usefixtures("desk")
def test_without_a_trust_the_rule_is_applied_to_all_lists(monkeypatch, capsys):
    known = {"scores": "check.npy", "labels": "check_labels.npy", "max_error": 0.3}
    assert threshold(monkeypatch, **known, out="decided.parquet") == 0
    assert "of these queries, by which it was made" in capsys.readouterr().out
    columns = read_columns(Path("decided.parquet"))
    assert columns["query"].tolist() == list(range(400))
    assert columns["answer"].tolist() == gf.Rule.load("rule.json")(np.load("check.npy")).tolist()


@pytest.mark.usefixtures("desk")
def test_a_rule_knows_the_rows_that_it_was_certified_on(monkeypatch):
    """Also if the file does not name its hits: embeddings of judged queries belong to rows of the file."""
    assert threshold(monkeypatch, scores="check.npy", labels="check_labels.npy", max_error=0.3) == 0
    rule = gf.Rule.load("rule.json")
    row = rule.reference.row
    assert len(set(row.tolist())) == 200
    heads = rule.model.heads(np.load("check.npy")[row])
    np.testing.assert_allclose(rule.reference.heads, heads, rtol=1e-6)
    assert rule.reference.right.tolist() == np.load("check_labels.npy")[row].tolist()


@pytest.mark.usefixtures("desk")
def test_probabilities_are_known_as_such(monkeypatch, capsys):
    """What `geoflow rerank` wrote is learned from as probabilities, and is not mixed with scores."""
    scores, right = np.load("check.npy"), np.load("check_labels.npy")
    prob = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    table = {"query": np.arange(400), "index": np.tile(np.arange(K), (400, 1)).tolist(), "prob": prob.tolist()}
    pyarrow.parquet.write_table(pyarrow.table(table), "ranked.parquet")
    known = {"scores": "ranked.parquet", "labels": "check_labels.npy"}
    assert threshold(monkeypatch, **known, max_error=0.3, no_match_share=0.1) == 0
    assert gf.Rule.load("rule.json").model.log_prob
    assert run_geoflow(monkeypatch, "trust", **known, trust="t.json") == 0
    expected = gf.Trust(log_prob=True).fit(np.log(prob), right)
    assert run_geoflow(monkeypatch, "trust", scores="ranked.parquet", trust="t.json", out="o.parquet") == 0
    np.testing.assert_allclose(read_columns(Path("o.parquet"))["p_no_match"], expected.p_no_match(np.log(prob)))
    mixed = {"scores": "check.npy", "labels": "check_labels.npy", "trust": "t.json"}
    assert threshold(monkeypatch, "--overwrite", **mixed) == 2
    assert "t.json was learned from probabilities, and check.npy holds scores" in capsys.readouterr().err


@pytest.mark.usefixtures("desk")
def test_queries_that_were_fitted_are_not_tested(monkeypatch, capsys):
    known = {"scores": "judged.npy", "labels": "judged_labels.npy", "trust": "t.json"}
    assert run_geoflow(monkeypatch, "trust", **known) == 0
    assert threshold(monkeypatch, **known) == 2
    assert "200 of 200 rows that were fitted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [{"max_error": 0.2}, {"confidence": 0.9}, {"precision": 0.5}, {"no_match_share": 0.1}, {"trust": "t.json"}],
    ids=lambda flags: next(iter(flags)),
)
@pytest.mark.usefixtures("desk")
def test_flags_of_a_rule_are_refused_where_it_is_only_applied(monkeypatch, capsys, flags):
    known = {"scores": "check.npy", "labels": "check_labels.npy", "max_error": 0.4}
    assert threshold(monkeypatch, **known) == 0
    assert threshold(monkeypatch, scores="new.npy", out="decided.parquet", **flags) == 2
    name = next(iter(flags)).replace("_", "-")
    assert f"--{name} says how to make a rule" in capsys.readouterr().err
    assert not Path("decided.parquet").exists()
    Path("settings.toml").write_text("max-error = 0.2\n")
    assert threshold(monkeypatch, scores="new.npy", out="decided.parquet", config="settings.toml") == 2
    assert threshold(monkeypatch, "--overwrite", scores="new.npy", out="decided.parquet") == 0


@pytest.mark.usefixtures("desk")
def test_a_bad_share_is_refused_before_anything_is_written(monkeypatch, capsys):
    flags = {"scores": "judged.npy", "labels": "judged_labels.npy", "trust": "t.json", "out": "o.parquet"}
    assert run_geoflow(monkeypatch, "trust", **flags, no_match_share=0) == 2
    assert "--no-match-share" in capsys.readouterr().err
    assert not Path("t.json").exists()


def captioned(images: int, captions: int) -> None:
    """Writes pairs whose images have several captions, and the file of a search for each of them, right for some."""
    rng = np.random.default_rng(0)
    scores, right = lists(images * captions, 5)
    own = np.repeat(np.arange(images), captions)
    rows = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rng.normal(size=(n, 4)) for n in (images, len(own)))]
    gf.EmbeddingPairs.from_arrays(*rows, own).save("pairs")
    hits = (own[:, None] + 1 + np.arange(K)) % images
    hits[right, 0] = own[right]
    columns = {"query": np.arange(len(own)), "index": hits.tolist(), "scores": scores.tolist()}
    pyarrow.parquet.write_table(pyarrow.table(columns), "ranked.parquet")


@pytest.mark.parametrize(("trusted", "tested", "left_out"), [(False, 50, 100), (True, 100, 200)])
@pytest.mark.usefixtures("desk")
def test_one_caption_of_an_image_is_tested(monkeypatch, capsys, trusted, tested, left_out):
    captioned(100, 3)
    flags = {"scores": "ranked.parquet", "pairs": "pairs", "max_error": 0.4}
    if trusted:
        assert run_geoflow(monkeypatch, "trust", scores="judged.npy", labels="judged_labels.npy", trust="t.json") == 0
        flags["trust"] = "t.json"
        capsys.readouterr()
    assert threshold(monkeypatch, "--json", **flags) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["certificate"]["tested"], facts["left_out"]) == (tested, left_out)
    assert threshold(monkeypatch, "--overwrite", **flags) == 0
    assert f"left out {left_out} queries" in capsys.readouterr().out


def test_images_are_either_fitted_or_tested():
    image = np.random.default_rng(0).integers(-4, 30, size=101)
    fitted, tested = decisions.tested_queries(image, 0.5, seed=1)
    images = len(set(image.tolist()))
    assert len(tested) == len(set(image[tested].tolist())) == images - round(images / 2)
    assert not set(image[fitted].tolist()) & set(image[tested].tolist())
    assert len(fitted) == np.isin(image, image[fitted]).sum()


def test_rows_outside_the_pairs_are_named():
    rows = np.eye(4)
    scores, hits = np.zeros((4, 2)), np.zeros((4, 2), int)
    pairs = gf.EmbeddingPairs.from_arrays(rows, rows)
    for query, wrong in ([0, -3, 1, 2], -3), ([0, 1, 9, 7], 9):
        asked = decisions.ResultLists(Path("x.parquet"), scores, np.array(query), hits)
        with pytest.raises(ValueError, match=rf"query {wrong} is not one of the 4 rows"):
            decisions.labels_from_pairs(asked, pairs, "t2i")


@pytest.mark.usefixtures("desk")
def test_columns_of_ids_are_neither_scores_nor_labels():
    scores, right = np.load("judged.npy"), np.load("judged_labels.npy")
    ids = {"id": np.arange(200), "Image_ID": np.arange(200)}
    hits = {f"hit {k}": scores[:, k] for k in range(K)}
    pyarrow.csv.write_csv(pyarrow.table({**ids, **hits}), "s.csv")
    pyarrow.csv.write_csv(pyarrow.table({**ids, "right": right.astype(int)}), "l.csv")
    read = decisions.open_lists(Path("s.csv"))
    np.testing.assert_allclose(read.scores, scores)
    assert decisions.open_labels(Path("l.csv"), read).tolist() == right.tolist()
    pyarrow.csv.write_csv(pyarrow.table({"year": ids["id"], "right": right.astype(int)}), "l.csv")
    with pytest.raises(ValueError, match=r"l\.csv has 2 labels in each row, but one is needed, .* or 5"):
        decisions.open_labels(Path("l.csv"), read)


@pytest.mark.usefixtures("desk")
def test_nothing_certified_is_said_loudly_and_no_error(monkeypatch, capsys):
    np.save("wrong.npy", np.arange(400) % 20 == 0)
    assert threshold(monkeypatch, scores="check.npy", labels="wrong.npy", max_error=0.01) == 0
    said = capsys.readouterr()
    assert "geoflow: warning: NOTHING COULD BE CERTIFIED" in said.err
    assert threshold(monkeypatch, "--json", "--overwrite", scores="check.npy", labels="wrong.npy", max_error=0.01) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # Infinity and NaN are no JSON
    assert facts["certificate"]["threshold"] is None
    assert threshold(monkeypatch, scores="new.npy", out="decided.parquet") == 0
    assert not read_columns(Path("decided.parquet"))["answer"].any()


@pytest.mark.usefixtures("desk")
def test_the_share_without_a_match_is_given_or_estimated(monkeypatch, capsys):
    known = {"scores": "check.npy", "labels": "check_labels.npy", "max_error": 0.4}
    assert threshold(monkeypatch, "--json", **known, no_match_share=0.3) == 0
    assert json.loads(capsys.readouterr().out)["no_match_share"] == 0.3
    estimated = {"no_match_share": "estimate", "unlabelled": "new.npy"}
    assert threshold(monkeypatch, "--json", "--overwrite", **known, **estimated) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["no_match_share"] <= 1
    assert threshold(monkeypatch, "--overwrite", **known, no_match_share="estimate") == 2
    assert "--unlabelled" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["parquet lists", "parquet columns", "csv"])
@pytest.mark.usefixtures("desk")
def test_scores_come_in_several_forms(kind):
    scores = np.load("judged.npy")
    columns = {"query": [f"q{k}" for k in range(len(scores))]}
    if kind == "parquet lists":
        pyarrow.parquet.write_table(pyarrow.table({**columns, "scores": scores.tolist()}), "s.parquet")
    else:
        table = pyarrow.table({**columns, **{f"hit {k}": scores[:, k] for k in range(K)}})
        write = pyarrow.csv.write_csv if kind == "csv" else pyarrow.parquet.write_table
        write(table, "s.csv" if kind == "csv" else "s.parquet")
    read = decisions.open_lists(Path("s.csv" if kind == "csv" else "s.parquet"))
    np.testing.assert_allclose(read.scores, scores)
    assert read.query.tolist() == columns["query"]


def ranked(direction: str, pairs: gf.EmbeddingPairs) -> np.ndarray:
    """Writes the file of a search of all pairs in both kinds of rows, and returns its hits [n, 3]."""
    image, text = pairs.image[np.arange(len(pairs.image))], pairs.text[np.arange(len(pairs.text))]
    queries, items = (text, image) if direction == "t2i" else (image, text)
    cosine = queries @ items.T
    hits = np.argsort(-cosine, axis=1)[:, :3]
    prob = np.exp(np.take_along_axis(cosine, hits, axis=1)) / 100
    columns = {"query": np.arange(len(queries)), "index": hits.tolist(), "prob": prob.tolist()}
    pyarrow.parquet.write_table(pyarrow.table(columns), "ranked.parquet")
    return hits


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_pairs_and_judgements_label_the_hits_of_rerank(tmp_path, monkeypatch, direction):
    """Against loops over all hits, for images with several captions."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    index = rng.permutation(np.repeat(np.arange(12), 3))
    rows = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rng.normal(size=(n, 4)) for n in (12, 36))]
    gf.EmbeddingPairs.from_arrays(*rows, index).save("pairs")
    pairs = gf.EmbeddingPairs.open("pairs")
    hits = ranked(direction, pairs)
    known, image = decisions.labels_from_pairs(decisions.open_lists(Path("ranked.parquet")), pairs, direction)
    texts = pairs.image_row  # the image of each text
    expected = [
        [(texts[q] == item if direction == "t2i" else texts[item] == q) for item in row] for q, row in enumerate(hits)
    ]
    assert known.tolist() == expected
    numbers = dict(zip(texts if direction == "t2i" else np.arange(12), image))
    assert image.tolist() == [numbers[each] for each in (texts if direction == "t2i" else np.arange(12))]
    assert len(set(image.tolist())) == 12
    # The same as judgements, with ids of different types and grades.
    judged = [(q, item) for q, row in enumerate(hits.tolist()) for item, right in zip(row, expected[q]) if right]
    table = {"query": [str(q) for q, _ in judged], "item": [i for _, i in judged], "grade": [2] * len(judged)}
    pyarrow.csv.write_csv(pyarrow.table(table), "qrels.csv")
    pyarrow.parquet.write_table(pyarrow.table(table), "qrels.parquet")
    for name in ("qrels.csv", "qrels.parquet"):
        grades = decisions.labels_from_qrels(decisions.open_lists(Path("ranked.parquet")), Path(name))
        assert grades.tolist() == (2.0 * np.array(expected)).tolist()


def test_a_pair_that_is_judged_twice_is_named(tmp_path):
    file = tmp_path / "qrels.csv"
    asked = decisions.ResultLists(Path("x"), np.zeros((1, 2)), np.array(["q"]), np.array([["a", "b"]]))
    file.write_text("query,item,grade\nq,a,1\nq,b,0.5\nq,a,0\n")
    with pytest.raises(ValueError, match=r"qrels\.csv .* row 2 judges the query and the item of row 0 a second time"):
        decisions.labels_from_qrels(asked, file)
    file.write_text("query,item,grade\nq,b,0.5\n")
    assert decisions.labels_from_qrels(asked, file).tolist() == [[0, 0.5]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"scores": "judged.npy", "labels": "new_labels.npy"}, "new_labels.npy has 300 rows, but judged.npy has 200"),
        ({"scores": "nowhere.npy", "labels": "new_labels.npy"}, "nowhere.npy"),
        ({"scores": "judged.npy"}, "give --out"),
        ({"scores": "judged.npy", "qrels": "judged.npy"}, "does not name its hits"),
        ({"scores": "judged.npy", "labels": "judged_labels.npy", "qrels": "x.csv"}, "give one of --labels"),
        ({"scores": "judged.npy", "labels": "judged_labels.npy", "max_error": 2}, "--max-error"),
        ({"scores": "judged.npy", "labels": "judged_labels.npy", "column": "x"}, "has no column 'x'"),
    ],
)
@pytest.mark.usefixtures("desk")
def test_bad_input_is_named_and_no_rule_is_written(monkeypatch, capsys, flags, words):
    assert threshold(monkeypatch, **flags) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not Path("rule.json").exists()
