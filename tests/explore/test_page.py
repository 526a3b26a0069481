"""The page of `geoflow explore`: what goes in comes out as text, and files are read from where they may be."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import os
import re
import struct
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from geoflow_fast.explore import sources
from geoflow_fast.explore.page import Explored, Items, Marked, data, render, script_data, write_page
from geoflow_fast.explore.thumbnails import Thumbnails
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.pages import charts
from tests.decisions.helpers import search
from tests.explore.helpers import ARABIC, END, LONG, SCRIPT, sample_page


class Tags(HTMLParser):
    """All tags of a page, and the content of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag == "script"

    def handle_endtag(self, _tag):
        self.inside = False

    def handle_data(self, content):
        if self.inside:
            self.scripts.append(content)


def test_nothing_in_the_data_is_markup():
    page = render(sample_page())
    tags = Tags(page)
    assert [tag for tag, _ in tags.tags].count("script") == 2
    assert not [tag for tag, attributes in tags.tags if "onerror" in attributes or attributes.get("id") == "broken"]
    assert "<found>" not in page
    stored = json.loads(tags.scripts[0])
    assert stored["captions"][:4] == [SCRIPT, LONG, ARABIC, END]
    assert stored["items"][3] == "<i>photo</i> 3"


@pytest.mark.parametrize("hostile", [SCRIPT, END, "'\"><svg/onload=alert(1)>", "{{ 7 * 7 }}", "<!-- <script>"])
def test_words_in_every_place_of_a_page_are_words(hostile):
    page = vars(sample_page(12))
    everywhere = {
        "title": hostile,
        "lead": hostile,
        "ids": [hostile] * 12,
        "captions": [hostile] * 12,
        "items": Items([hostile] * 120),
        "evidence": {hostile: page["evidence"]["cosine"]},
        "facts": {hostile: page["facts"]["entropy"]},
        "marked": [Marked(hostile, hostile, [0, 1])],
        "verdict": (hostile, False),
        "ladder": [{"name": hostile, "gain": hostile, "kept": hostile}],
    }
    plain, spoiled = Tags(render(sample_page(12))), Tags(render(Explored(**{**page, **everywhere})))
    kinds = {tag for tag, _ in plain.tags}
    assert {tag for tag, _ in spoiled.tags} <= kinds
    assert [tag for tag, _ in spoiled.tags].count("script") == 2
    assert not [name for _, attributes in spoiled.tags for name in attributes if name.startswith("on")]
    stored = json.loads(spoiled.scripts[0])
    assert stored["captions"] == [hostile] * 12


def test_nothing_is_loaded_and_only_the_own_script_runs():
    page = render(sample_page())
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1])
    own = base64.b64encode(hashlib.sha256(Tags(page).scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert "innerHTML" not in page


def test_numbers_survive():
    page = sample_page(50)
    stored = json.loads(script_data(data(page)))
    np.testing.assert_allclose(np.array(stored["p"]) / stored["scale"], page.p_right, atol=1e-4)
    assert stored["hits"] == page.hits.ravel().tolist()
    cosine = np.array(stored["evidence"]).reshape(50, 5, 3)[:, :, 0] / stored["nats"]
    np.testing.assert_allclose(cosine, page.evidence["cosine"], atol=0.01)
    assert stored["facts"]["entropy"][0] is None  # JSON has no NaN


@pytest.mark.parametrize("n", [0, 1, 7])
def test_small_pages_are_written(n, tmp_path):
    page = sample_page(n)
    assert write_page(page, tmp_path / "deep/page.html").stat().st_size > 1000


def test_lone_surrogates_do_not_stop_the_page(tmp_path):
    page = sample_page(5)
    broken = Explored(**{**vars(page), "captions": ["\ud800 half a character", *page.captions[1:]]})
    assert "half a character" in write_page(broken, tmp_path / "page.html").read_text("utf-8")


def test_wrong_shapes_are_named():
    page = vars(sample_page(5))
    with pytest.raises(ValueError, match="captions has 1 rows"):
        Explored(**{**page, "captions": ["one"]})
    with pytest.raises(ValueError, match="numbers of the 1 items"):
        Explored(**{**page, "items": Items(["one"])})


def test_the_chart_is_in_its_frame():
    chart = charts.risk_coverage(
        {"a": ([0.1, 0.5, 1.0], [float("nan"), 0.1, 0.37]), "b": ([1.0], [2.0])},
        max_error=0.1,
        certified=(0.5, 0.05, "rule"),
    )
    for curve in chart.curves:
        for point in curve.points.split():
            x, y = map(float, point.split(","))
            assert chart.left <= x <= chart.right
            assert chart.above <= y <= chart.below
    assert chart.top == 1.0
    assert chart.limit == pytest.approx(chart.below - 0.1 * (chart.below - chart.above), abs=0.1)
    intervals = charts.whiskers([("a", 0.8, 0.7, 0.9), ("b", 0.6, float("nan"), float("nan"))], best="a")
    assert [row.best for row in intervals.rows] == [True, False]
    assert all(0 <= row.low <= row.at <= row.high <= 100 for row in intervals.rows)


@pytest.fixture
def photos(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    picture = image.new("RGB", (640, 320), (200, 30, 30))
    picture.save(folder / "one.jpg")
    picture.save(folder / "deep/two.png")
    picture.save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "broken.jpg").write_bytes(b"no picture")
    (tmp_path / "photos2").mkdir()
    picture.save(tmp_path / "photos2/near.png")
    (folder / "linked").symlink_to(tmp_path)
    whole = (folder / "deep/two.png").read_bytes()
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    size = struct.pack(">II", 60_000, 60_000)  # a small file that says that it unpacks to billions of pixels
    header = b"IHDR" + size + whole[24:29]
    check = struct.pack(">I", zlib.crc32(header))
    (folder / "bomb.png").write_bytes(whole[:12] + header + check + whole[33:])
    (folder / "page.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    os.mkfifo(folder / "pipe")
    return folder


def test_thumbnails_are_small_and_found_by_name(photos):
    thumbnails = Thumbnails(photos)
    for name in ("one.jpg", "one", "deep/two.png"):
        picture = thumbnails(name)
        assert picture.startswith("data:image/jpeg;base64,")
        assert len(picture) < 4000
    assert thumbnails.skipped == {}


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "deep/../../secret.png", "link.png", "../photos/../secret", "../photos2/near", "linked/secret"],
)
def test_thumbnails_do_not_leave_their_folder(photos, name):
    thumbnails = Thumbnails(photos)
    assert thumbnails(name) == ""
    assert "leads out of the folder" in thumbnails.skipped[name]


@pytest.mark.parametrize(
    "name",
    [
        *("", "broken.jpg", "missing.jpg", "deep", "a\0b", "/etc/passwd", "bomb.png", "pipe", "page.svg", "half.png"),
        *("..\\secret.png", "%2e%2e/secret.png", "~/secret.png", "x" * 300, "\ud800"),
    ],
)
def test_what_is_no_picture_has_no_thumbnail(photos, name):
    thumbnails = Thumbnails(photos)
    assert thumbnails(name) == ""
    assert thumbnails.skipped[name]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(NotADirectoryError, match="nowhere"):
        Thumbnails(tmp_path / "nowhere")


# ---- what the commands wrote ----


@pytest.fixture
def run_folder(tmp_path):
    """A folder as `geoflow rerank`, `density`, `threshold` and `watch` leave it."""
    import geoflow_fast as gf

    lists = search(300, 20, items=60, seed=1)
    prob = np.exp(lists.scores) / np.exp(lists.scores).sum(1, keepdims=True)
    index = np.stack([np.random.default_rng(row).permutation(60)[:20] for row in range(300)])
    columns = {"query": np.arange(300), "index": index, "prob": prob, "p_answer": prob[:, 0], "entropy": prob[:, 1]}
    columns["evidence_cosine"] = lists.scores[:, :10]
    parquet.write_columns(tmp_path / "ranked.parquet", columns, 300)
    density = {"pair": np.arange(300), "pmi": np.arange(300.0), "p_value": np.linspace(0, 1, 300)}
    parquet.write_columns(tmp_path / "density.parquet", density, 300)
    log_prob = np.log(np.maximum(prob, 1e-12))
    trust = gf.Trust(log_prob=True).fit(log_prob[:150], lists.relevant[:150])
    trust.certify(log_prob[150:], lists.relevant[150:], 0.3).save(tmp_path / "rule.json")
    (tmp_path / "health.json").write_text('{"verdict": "It holds.", "holds": true}')
    return tmp_path, lists.relevant


def test_a_run_is_put_together(run_folder):
    folder, relevant = run_folder
    run = sources.RunFiles.open(folder)
    rows = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    rows[1] = rows[0]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.save(folder / "gallery.npy", rows)
    (folder / "captions.txt").write_text("\n".join(f"caption {row}" for row in range(300)))
    page = sources.explored(
        run,
        sources.described([folder / "captions.txt"], "text"),
        sources.described([folder / "gallery.npy"], "image"),
        labels=relevant,
        hits=5,
    )
    assert page.captions[7] == "caption 7"
    assert page.hits.shape == (300, 5)
    named = np.array([int(page.items.ids[item]) for item in page.hits[7]])
    assert (named == parquet.read_columns(folder / "ranked.parquet")["index"][7][:5]).all()
    assert page.evidence["cosine"].shape == (300, 5)
    assert page.certified.max_error == 0.3
    assert page.verdict == ("It holds.", True)
    assert (page.right == relevant[:, 0]).all()
    marks = {each.name: list(each.rows) for each in page.marked}
    assert marks["suspected wrong captions"] == list(range(6))  # the least PMI
    assert marks["strangers"] == list(range(6))
    index = parquet.read_columns(folder / "ranked.parquet")["index"]
    both = [row for row in range(300) if {0, 1} <= set(index[row][:5].tolist())]
    assert sorted(marks["near-duplicates"]) == both
    answered = run.rule(run.lists.scores)
    np.testing.assert_array_equal(page.p_right >= page.certified.threshold, answered)
    render(page)


def test_what_is_missing_is_said(run_folder, tmp_path):
    folder, _ = run_folder
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="has no lists"):
        sources.RunFiles.open(folder / "empty")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sources.RunFiles.open(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"captions\.txt"):
        sources.described([tmp_path / "captions.txt"], "text")
    parquet.write_columns(folder / "again.parquet", parquet_columns(folder), 300)
    with pytest.raises(ValueError, match="several files of lists"):
        sources.RunFiles.open(folder)


def parquet_columns(folder):
    stored = parquet.read_columns(folder / "ranked.parquet", ["index", "prob"])
    return {name: np.stack(column) for name, column in stored.items()}


def test_only_a_rule_about_answers_is_marked(run_folder):
    """A rule about shown hits has a threshold of another quantity."""
    folder, relevant = run_folder
    run = sources.RunFiles.open(folder)
    assert sources.explored(run, sources.Described(), sources.Described()).uncertified == ""
    other = dataclasses.replace(run, rule=dataclasses.replace(run.rule, unit="items"))
    page = sources.explored(other, sources.Described(), sources.Described(), labels=relevant)
    assert page.certified is None
    assert "about the hits that are shown" in render(page)
    assert data(page)["certified"] is None


def test_strangers_are_far_from_their_neighbours(run_folder):
    """Without densities, embeddings tell."""
    folder, _ = run_folder
    (folder / "density.parquet").unlink()
    rows = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32) * [0.1, 0.1, 0.1, 0] + [1, 0, 0, 0]
    odd = [17, 80, 211]
    rows[odd] = np.eye(4)[1:] * [[1], [1], [-1]]
    np.save(folder / "queries.npy", (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))
    asked = sources.described([folder / "queries.npy"], "text")
    page = sources.explored(sources.RunFiles.open(folder), asked, sources.Described())
    marks = {each.name: list(each.rows) for each in page.marked}
    assert sorted(marks["strangers"][:3]) == odd
    assert len(marks["strangers"]) == 6


def test_labels_that_contradict_a_sure_answer_are_doubted(run_folder):
    folder, relevant = run_folder
    run = sources.RunFiles.open(folder)
    p = sources.explored(run, sources.Described(), sources.Described(), labels=relevant).p_right
    sure = np.argsort(-p)[:2]
    assert (p[sure] >= sources.SURE).all()
    wrong = relevant.copy()
    wrong[sure, 0] = False
    page = sources.explored(run, sources.Described(), sources.Described(), labels=wrong)
    doubted = next(each for each in page.marked if each.name == "suspected wrong labels")
    assert list(doubted.rows)[:2] == sure.tolist()
    assert all(not wrong[row, 0] and p[row] >= sources.SURE for row in doubted.rows)
