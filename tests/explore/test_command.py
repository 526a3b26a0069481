"""`geoflow explore` and `geoflow watch --page`, from files to a page."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

import geoflow_fast as gf
from geoflow_fast.cli.app import app
from geoflow_fast.runtime import parquet
from tests.decisions.helpers import search

K = 10


def stored(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)[1])


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Judged lists, a log that has changed, captions, names and photographs."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    judged, live = search(600, K, items=40, seed=1), search(200, K, items=40, match=0.0, seed=2)
    rng = np.random.default_rng(0)
    hits = np.stack([rng.permutation(40)[:K] for _ in range(800)])
    trust = gf.Trust().fit(judged.scores[:300], judged.relevant[:300])
    trust.certify(judged.scores[300:], judged.relevant[300:], 0.3).with_hits(hits[300:600]).save("rule.json")
    ids = np.array([f"q{row}" for row in range(200)], dtype=object)
    parquet.write_columns(tmp_path / "log.parquet", {"query": ids, "index": hits[600:], "scores": live.scores}, 200)
    parquet.write_columns(tmp_path / "labels.parquet", {"labels": live.relevant}, 200)
    (tmp_path / "captions.txt").write_text("\n".join(f"<b>caption</b> {row}" for row in range(200)))
    (tmp_path / "names.txt").write_text("\n".join(["../rule.json", *(f"photo_{item}" for item in range(1, 40))]))
    (tmp_path / "photos").mkdir()
    for item in range(1, 40):
        image.new("RGB", (50, 40), (6 * item, 0, 99)).save(tmp_path / f"photos/photo_{item}.jpg")
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_page_from_files(desk):
    given = ("--rule", "rule.json", "--queries", "captions.txt", "--gallery", "names.txt", "--images", "photos")
    result = run("explore", "log.parquet", *given, "--labels", "labels.parquet", "--out", "page.html", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert (facts["queries"], facts["items"]) == (200, 40)
    page = stored(desk / "page.html")
    assert page["captions"][3] == "<b>caption</b> 3"
    assert page["ids"][3] == "q3"
    pictures = dict(zip(page["items"], page["thumbnails"]))
    assert pictures["0"] == ""  # its name leads out of the folder
    assert all(pictures[str(item)].startswith("data:image/jpeg") for item in range(1, 40))
    assert page["right"] == [0] * 200


def test_a_log_without_a_rule_has_no_probabilities(desk):
    (desk / "rule.json").rename(desk / "elsewhere.json")
    result = run("explore", "log.parquet", "--out", "page.html")
    assert isinstance(result.exception, ValueError)
    assert "give the --rule" in str(result.exception)
    assert not (desk / "page.html").exists()


def test_watch_shows_the_queries_that_changed(desk):
    files = ("--rule", "rule.json", "--queries", "log.parquet", "--out", "health.parquet")
    result = run("watch", *files, "--page", "changed.html", "--captions", "captions.txt")
    assert result.exit_code == 3, result.output
    page = stored(desk / "changed.html")
    odds = page["facts"]["times as frequent as among judged queries"]
    assert odds == sorted(odds, reverse=True)
    assert sorted(page["ids"]) == sorted(f"q{row}" for row in range(200))
    assert page["captions"][0] == f"<b>caption</b> {page['ids'][0][1:]}"
    assert not page["holds"]
    worth = next(each for each in page["marked"] if each["name"] == "worth judging")
    label = parquet.read_columns(desk / "health.label.parquet")
    assert [page["ids"][position] for position in worth["rows"]] == label["query"].tolist()
    assert "no longer holds" in (desk / "changed.html").read_text()


def test_the_page_of_a_watch_says_what_its_exit_status_says(desk):
    """An alarm of an earlier call ends the guarantee for good; without a look that is due there is no page."""
    files = ("--rule", "rule.json", "--queries", "log.parquet", "--out", "health.parquet")
    assert run("watch", *files).exit_code == 3
    none = run("watch", *files, "--page", "again.html")
    assert none.exit_code == 3
    assert "Wrote no again.html" in none.output
    assert not (desk / "again.html").exists()
    assert json.loads(run("watch", *files, "--page", "again.html", "--json").output)["page"] is None
    # The log goes on with queries like the judged ones.
    quiet, stored_log = search(600, K, items=40, seed=9), parquet.read_columns(desk / "log.parquet")
    scores = np.concatenate((np.stack(stored_log["scores"]), quiet.scores))
    hits = np.stack([np.random.default_rng(row).permutation(40)[:K] for row in range(800)])
    hits[:200] = np.stack(stored_log["index"])
    ids = np.array([f"q{row}" for row in range(800)], dtype=object)
    parquet.write_columns(desk / "log.parquet", {"query": ids, "index": hits, "scores": scores}, 800)
    result = run("watch", *files, "--page", "later.html")
    assert result.exit_code == 3
    assert "Wrote health.parquet and later.html" in result.output
    assert not stored(desk / "later.html")["holds"]
    page = (desk / "later.html").read_text()
    assert "The guarantee no longer holds because queries 0 to 100" in page
    assert "The guarantee holds" not in page


def test_items_and_queries_are_found_by_their_ids(desk):
    """A folder of embeddings whose rows have ids gives items their words, whatever the order of its rows."""
    rng = np.random.default_rng(3)
    rows = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rng.normal(size=(n, 6)) for n in (40, 200))]
    rows[0][1] = rows[0][0]
    items = [f"item-{39 - row}" for row in range(40)]
    asked = [f"q{199 - row}" for row in range(200)]
    pairs = gf.EmbeddingPairs.from_arrays(*rows, rng.integers(40, size=200), image_ids=items, ids=asked)
    pairs.save("embedded")
    for folder, column, words in (
        ("img_metadata", "image_path", [f"name of {each}" for each in items]),
        ("metadata", "caption", [f"words of {each}" for each in asked]),
    ):
        (desk / "embedded" / folder).mkdir()
        parquet.write_columns(
            desk / "embedded" / folder / f"{folder}_0.parquet", {column: np.array(words, object)}, len(words)
        )
    log = parquet.read_columns(desk / "log.parquet")
    hits = np.array([[f"item-{item}" for item in row] for row in np.stack(log["index"])], dtype=object)
    hits[0, 0] = "unheard-of"
    columns = {"query": log["query"], "index": hits, "scores": np.stack(log["scores"])}
    parquet.write_columns(desk / "named.parquet", columns, 200)
    given = ("--rule", "rule.json", "--queries", "embedded", "--gallery", "embedded", "--out", "page.html")
    result = run("explore", "named.parquet", *given)
    assert result.exit_code == 0, result.output
    page = stored(desk / "page.html")
    assert page["captions"][3] == "words of q3"
    names = dict(zip(page["items"], page["itemCaptions"]))
    assert all(name == ("" if item == "unheard-of" else f"name of {item}") for item, name in names.items())
    twice = next(each for each in page["marked"] if each["name"] == "near-duplicates")["rows"]
    assert sorted(twice) == [row for row in range(200) if {"item-39", "item-38"} <= set(hits[row, :5])]
    assert "1 items have ids that the gallery&#39;s files do not know" in (desk / "page.html").read_text()
