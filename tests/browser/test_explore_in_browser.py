"""The page of `geoflow explore` in a browser: search, slider, keys, hostile words, two widths, light and dark.

Screenshots stay in the folder that GEOFLOW_SCREENSHOTS names, if it is set. With GEOFLOW_REPORT, the page of the demo
beside that report is looked at, too, and its picture for the README taken.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from geoflow_fast.explore.page import write_page
from geoflow_fast.explore.thumbnails import data_uri
from tests.browser.webdriver import BROWSER, DRIVER, browser
from tests.explore.helpers import ARABIC, LONG, SCRIPT, sample_page

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no chromium or chromedriver: apt-get install chromium chromium-driver"
)
MANY, PICTURES = 10_000, 2000
SHOWN = "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)"


def pictures(count):
    """Thumbnails of as many colours, as large as those of photographs."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 60, (12, 12, 3)).repeat(8, 0).repeat(8, 1)
    colours = rng.integers(0, 195, (count, 1, 1, 3))
    return tuple(data_uri(image.fromarray((blocks + colour).astype(np.uint8))) for colour in colours)


def slide(window, value):
    window.run(
        "const s = document.getElementById('slider'); s.value = 1000 * arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        value,
    )


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    page = sample_page(thumbnails=pictures(120))
    return page, write_page(page, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture
def opened(window, small):
    window.size(1280, 900)
    window.scheme("light")
    window.open(small[1])
    return window, small[0]


def rows_in_sight(window):
    return window.run("return document.querySelectorAll('.row').length")


def settle(window):
    """Waits for the pause after typing, and for the next picture."""
    window.call("timeouts", {"script": 60_000})
    window.call(
        "execute/async",
        {"script": "const d = arguments[0]; setTimeout(() => requestAnimationFrame(() => d()), 150)", "args": []},
    )


def test_hostile_words_are_text(opened):
    window, _ = opened
    assert window.run("return document.title") == "What the search <found>"
    assert window.text("#detail h3") == SCRIPT
    assert window.run("return document.querySelectorAll('#list img, #broken').length") == 0
    window.press("Escape", "j")
    assert len(window.text("#detail h3")) >= len(LONG.strip()) - 1
    assert window.run("return document.querySelector('#detail h3').offsetHeight") < 400  # a long caption scrolls
    window.press("j")
    assert window.text("#detail h3") == ARABIC
    assert window.run("return getComputedStyle(document.querySelector('#detail h3')).direction") == "rtl"
    window.press("j")
    assert "</script>" in window.text("#detail h3")


def test_search_finds_captions_and_ids(opened):
    window, page = opened
    window.press("/", *"query-77")
    settle(window)
    assert rows_in_sight(window) == 1
    assert "query-77" in window.text(".row")
    window.run("document.getElementById('search').value = ''")
    window.press(*"kites sand")
    settle(window)
    both = sum("kites" in words and "sand" in words for words in page.captions)
    assert window.text("#count").startswith(f"{both} of 300 queries")
    window.press(*" nothing has this")
    settle(window)
    assert window.text("#detail") == "No query fits."


def test_the_slider_says_what_numpy_says(opened):
    window, page = opened
    p = np.round(page.p_right, 4)
    for value in (0.0, 0.3, 0.7, 0.999):
        slide(window, value)
        answered = p >= value - 1e-9
        words = window.text("#outcome")
        assert words.startswith(f"Answers {100 * answered.mean():.1f}% of the queries ({answered.sum()})")
        if answered.any():
            assert f"{100 * (1 - p[answered]).mean():.1f}% of the answers are expected to be wrong" in words
            assert f"{100 * (~page.right[answered]).mean():.1f}% were" in words
        assert ("guaranteed" in words) == (value == 0.7)
        assert ("only that one was certified" in words) == (value != 0.7)


def test_hits_have_names_pictures_bars_and_probabilities(opened):
    window, page = opened
    window.press("Escape", "Home", "j", "j", "j", "j", "j")
    row = 5
    ranks = [rank for rank in range(6) if page.hits[row, rank] >= 0]
    names = [page.items.ids[page.hits[row, rank]] for rank in ranks]
    assert window.run(SHOWN, ".hits .name") == names
    share = [page.prob[row, rank] for rank in ranks]
    assert window.run(SHOWN, ".hits .number") == [f"{100 * x:.{1 if x < 0.1 else 0}f}%" for x in np.round(share, 4)]
    bars = window.run(
        "return [...document.querySelectorAll('.hits .bar')].map(b => b.firstChild.offsetWidth / b.offsetWidth)"
    )
    np.testing.assert_allclose(bars, share, atol=0.02)
    seen = window.run(
        "return [...document.querySelectorAll('.hits img')].map(i => [i.naturalWidth, i.offsetWidth, i.alt])"
    )
    assert seen == [[96, 72, name] for name in names]


def test_every_rung_of_evidence_is_told(opened):
    window, page = opened
    window.press("Escape", "Home", "j", "j", "j", "j", "j")
    row = 5
    assert window.run(SHOWN, ".told tr:first-child th") == ["hit", "cosine", "hub correction", "head", "sum"]
    told = np.array([float(each) for each in window.run(SHOWN, ".told td")]).reshape(-1, 4)
    expected = np.stack([page.evidence[name][row] for name in ("cosine", "hub", "head")], axis=1)[: len(told)]
    assert len(told) == next((rank for rank in range(5) if page.hits[row, rank] < 0), 5)
    np.testing.assert_allclose(told[:, :3], expected, atol=0.0051)
    np.testing.assert_allclose(told[:, 3], expected.sum(1), atol=0.02)
    assert window.run("return document.querySelectorAll('.ladder li').length") == 1


def test_views_follow_the_slider(opened):
    window, page = opened
    p = np.round(page.p_right, 4)
    for key, answered in (("4", True), ("5", False)):
        window.press("Escape", key)
        for value in (0.2, 0.9):
            slide(window, value)
            settle(window)
            count = int((p >= value).sum() if answered else (p < value).sum())
            assert window.text("#count").startswith(f"{count} of 300 queries.")


def test_keys_move_choose_and_come_back(opened):
    window, page = opened
    order = np.argsort(-page.p_right, kind="stable")
    window.press("3")
    assert window.text("#detail .facts").startswith(f"query-{order[-1]} ")
    window.press("2")
    assert window.text("#detail .facts").startswith(f"query-{order[0]} ")
    window.press("j", "j", "k")
    assert window.text("#detail .facts").startswith(f"query-{order[1]} ")
    window.press("Escape", "End")
    assert window.text("#detail .facts").startswith(f"query-{order[-1]} ")
    assert window.run("return document.getElementById('list').scrollTop") > 0
    window.press("t")
    assert window.run("return document.activeElement.id") == "slider"
    before = window.text("#threshold")
    window.press("ArrowRight")
    assert float(window.text("#threshold")) == pytest.approx(float(before) + 0.001)
    window.press("c")
    assert window.text("#threshold") == ".700"
    window.press("/")
    assert window.run("return document.activeElement.id") == "search"
    window.press("Escape")
    assert window.run("return document.activeElement.id") == "list"
    window.press("7")
    settle(window)
    assert window.text("#count").startswith("6 of 300 queries. unlike <all> others")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_both_widths_light_and_dark(opened, tmp_path, width, scheme):
    window, _ = opened
    window.size(width, 1800)
    window.scheme(scheme)
    window.press("Escape", "4")
    settle(window)
    page = window.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert page[0] <= page[1] == width  # nothing sticks out sideways
    paper, ink = window.run(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color].map("
        "c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 765)"
    )
    assert (paper > 0.9 and ink < 0.3) if scheme == "light" else (paper < 0.2 and ink > 0.8)
    small = "return [...document.querySelectorAll('button, input')].filter(e => e.offsetHeight < 30).length"
    assert window.run(small) == 0  # large enough for a finger
    folder = Path(os.environ.get("GEOFLOW_SCREENSHOTS", tmp_path))
    picture = window.screenshot(folder / f"explore_{width}_{scheme}.png")
    assert picture.stat().st_size > 20_000


MOVES = """const s = document.getElementById('slider'), times = [];
for (let k = 0; k < 200; k++) {
  s.value = (k * 37) % 1000;
  const start = performance.now();
  s.dispatchEvent(new Event('input'));
  document.body.offsetHeight;  // lays the page out
  times.push(performance.now() - start);
}
return times.sort((a, b) => a - b);"""


@pytest.mark.parametrize("shown", [0, PICTURES], ids=["words", "pictures"])
def test_ten_thousand_queries_do_not_lag(window, tmp_path, shown):
    page = write_page(sample_page(MANY, items=2000, thumbnails=pictures(shown)), tmp_path / "many.html")
    assert page.stat().st_size < 16 << 20
    window.size(1280, 900)
    window.open(page)
    settle(window)
    (paint,) = window.run("return performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)")
    assert 0 < paint < 5000
    print(f"\n{shown} thumbnails: {page.stat().st_size / 2**20:.1f} MiB, first paint {paint:.0f} ms", end="")
    for key, view in (("1", "all"), ("4", "answered")):
        window.press("Escape", key)
        moves = window.run(MOVES)
        print(f", slider, {view}: {moves[100]:.1f} ms (median), {moves[190]:.1f} ms (95 %)", end="")
        assert moves[100] < 50
        assert rows_in_sight(window) < 40  # only those in sight exist
    window.press("Escape", "1", "End")
    settle(window)
    assert window.run("return document.getElementById('list').scrollTop") > 600_000
    assert f"query-{MANY - 1}" in window.text("#detail .facts")


REPORT = os.environ.get("GEOFLOW_REPORT")


@pytest.mark.skipif(not REPORT, reason="no demo: `make demo`, then `make test-browser`")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_of_the_demo(window, tmp_path, width, scheme):
    window.size(width, 1720)
    window.scheme(scheme)
    window.open(Path(str(REPORT)).with_name("explore.html"))
    window.press("Escape", "4", "End")
    settle(window)
    page = window.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert page[0] <= page[1] == width
    assert "no longer holds" in window.text("#verdict")
    tabs = " ".join(window.run(SHOWN, "#tabs button"))
    assert all(name in tabs for name in ("strangers", "near-duplicates", "suspected wrong captions"))
    broken = "return [...document.querySelectorAll('.hits img')].filter(i => i.complete && !i.naturalWidth).length"
    assert window.run(broken) == 0
    window.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    folder = Path(os.environ.get("GEOFLOW_SCREENSHOTS", tmp_path))
    assert window.screenshot(folder / f"demo_{width}_{scheme}.png").stat().st_size > 20_000
