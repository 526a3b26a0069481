"""The HTML report: what is put in comes out, escaped, readable by a parser and in need of nothing from elsewhere."""

from __future__ import annotations

import base64
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from geoflow_fast.evaluation.report import Report
from geoflow_fast.runtime.pages import charts

HOSTILE = "<script>alert('x')</script> & \"quotes\""
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Elements in order as (tag, attributes), the text in each of some tags, and whether all tags are closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
            self.words.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.words[self._open[-1]][-1] += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def png(path: Path, width: int = 3, height: int = 2) -> Path:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + bytes(width) for _ in range(height)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    return path


def test_words_come_out_as_they_went_in(tmp_path):
    page = Report(HOSTILE, HOSTILE)
    page.section(HOSTILE, HOSTILE, "second")
    page.table([{HOSTILE: HOSTILE}], HOSTILE)
    page.figure(png(tmp_path / "a.png"), HOSTILE)
    parsed = Page(page.write(tmp_path / "deep/er/report.html"))
    for tag in ("title", "h1", "h2", "caption", "figcaption"):
        assert parsed.words[tag] == [HOSTILE], tag
    assert parsed.words["p"] == [HOSTILE, HOSTILE, "second"]
    assert parsed.words["th"] == [HOSTILE, HOSTILE]
    assert "script" not in parsed.words
    assert parsed.attributes("img")[0]["alt"] == HOSTILE


def test_figures_are_inside_the_page_with_their_size(tmp_path):
    page = Report("t", "l")
    picture = png(tmp_path / "a.png", 7, 5)
    page.figure(picture, "what it says", alt="what it shows")
    (image,) = Page(page.write(tmp_path / "r.html")).attributes("img")
    assert (image["width"], image["height"], image["alt"]) == ("7", "5", "what it shows")
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == picture.read_bytes()


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    page = Report("t", "l")
    for number in range(3):
        page.section(f"part {number}")
    page.figure(png(tmp_path / "a.png"), "c")
    parsed = Page(page.write(tmp_path / "r.html"))
    addresses = [
        value for _, attributes in parsed.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert len(addresses) == 4
    assert all(address.startswith(("#s", "data:image/png")) for address in addresses)
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in parsed.attributes("meta"))


def test_tables_show_numbers_right_and_mark_the_best(tmp_path):
    page = Report("t", "l")
    rows = [
        {"method": "a", "AUROC": np.float64(0.9004), "error": 0.25, "count": 1234567},
        {"method": "b", "AUROC": 0.5, "error": 0.125, "count": 3, "note": "x"},
        {"method": "c", "AUROC": float("nan"), "error": None, "count": np.int64(2), "note": True},
    ]
    page.table(rows, "caption", best={"AUROC": "max", "error": "min"})
    parsed = Page(page.write(tmp_path / "r.html"))
    assert parsed.words["th"] == ["method", "AUROC", "error", "count", "note", "a", "b", "c"]
    assert parsed.words["td"] == ["0.900", "0.250", "1,234,567", "–", "0.500", "0.125", "3", "x", "–", "–", "2", "yes"]
    kinds = [attributes.get("class") for attributes in parsed.attributes("td")]
    assert kinds[:4] == ["number best", "number", "number", None]
    assert kinds[4:8] == ["number", "number best", "number", None]
    assert kinds[8:] == ["number", "number", "number", None]


def test_bad_input_is_refused(tmp_path):
    page = Report("t", "l")
    with pytest.raises(ValueError, match="a row with a column"):
        page.table([], "c")
    with pytest.raises(ValueError, match="'b': 'max'"):
        page.table([{"a": 1}], "c", best={"b": "max"})
    with pytest.raises(ValueError, match="'a': 'most'"):
        page.table([{"a": 1}], "c", best={"a": "most"})
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        page.figure(tmp_path / "none.png", "c")
    (tmp_path / "bad.png").write_text("not a picture")
    with pytest.raises(ValueError, match=r"bad\.png is not a PNG"):
        page.figure(tmp_path / "bad.png", "c")


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    page = Report("old", "l")
    path = page.write(tmp_path / "r.html")
    before = path.read_bytes()
    monkeypatch.setattr(page, "render", lambda: "half \ud800")  # cannot be encoded
    with pytest.raises(ValueError, match="surrogates"):
        page.write(path)
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"r.html"}


def test_what_pages_open_with(tmp_path):
    """An answer, tiles, a curve and whiskers come out in order, what is folded is inside <details>, and all is text."""
    page = Report("t", "l")
    page.answer(HOSTILE)
    page.cards([(HOSTILE, "42 %", HOSTILE), ("second", "1", "note")])
    page.risk(charts.risk_coverage({HOSTILE: ([0.5, 1.0], [0.1, 0.3])}, max_error=0.2), "risk of it")
    rows = [("first", 0.9, 0.8, 0.95), (HOSTILE, 0.6, float("nan"), float("nan"))]
    page.intervals(charts.whiskers(rows, best="first"), "values of it")
    with page.folded(HOSTILE):
        page.table([{"a": 1}], "inside")
    page.text("after")
    parsed = Page(page.write(tmp_path / "r.html"))
    classes = [attributes["class"] for _, attributes in parsed.elements if attributes.get("class")]
    order = [
        "lead-answer",
        "cards",
        "card",
        "card",
        "chart",
        "limit",
        "intervals",
        "interval chosen",
        "interval",
        "wide",
    ]
    assert [name for name in classes if name in order] == order
    assert parsed.words["dt"] == [HOSTILE, "second"]
    assert parsed.words["dd"] == ["42 %", HOSTILE, "1", "note"]
    assert parsed.words["summary"] == [HOSTILE]
    assert "script" not in parsed.words
    curve = parsed.attributes("polyline")[0]
    assert len(curve["points"].split()) == 2
    lines = [each for each in parsed.attributes("line") if each.get("y1") == "5"]
    assert float(lines[0]["x1"]) < float(lines[0]["x2"])
    assert lines[1]["x1"] == lines[1]["x2"]  # no interval
    tags = [tag for tag, _ in parsed.elements]
    assert tags.index("details") < tags.index("table")
    assert "lines are 95 % intervals" in parsed.words["figcaption"][1]
    bare = charts.whiskers([("a", 0.6, float("nan"), float("nan"))])
    assert not bare.known
