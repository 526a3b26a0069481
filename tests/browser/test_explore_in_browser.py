"""The page of `geoflow explore` in a browser: search, slider, keys, hostile words, two widths, light and dark.

Screenshots stay in the folder that GEOFLOW_SCREENSHOTS names, if it is set.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from geoflow_fast.explore.page import write_page
from tests.browser.webdriver import BROWSER, DRIVER, browser
from tests.explore.helpers import ARABIC, LONG, SCRIPT, sample_page

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no chromium or chromedriver: apt-get install chromium chromium-driver"
)
MANY = 10_000


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    page = sample_page()
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
    window.call("timeouts", {"script": 5000})
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
        window.run(
            "const s = document.getElementById('slider'); s.value = 1000 * arguments[0];"
            "s.dispatchEvent(new Event('input'))",
            value,
        )
        answered = p >= value - 1e-9
        words = window.text("#outcome")
        assert words.startswith(f"Answers {100 * answered.mean():.1f}% of the queries ({answered.sum()})")
        if answered.any():
            assert f"{100 * (1 - p[answered]).mean():.1f}% of the answers are expected to be wrong" in words
            assert f"{100 * (~page.right[answered]).mean():.1f}% were" in words
        assert ("guaranteed" in words) == (value >= 0.7)


def test_keys_move_choose_and_come_back(opened):
    window, page = opened
    order = np.argsort(-page.p_right, kind="stable")
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


def test_ten_thousand_queries_do_not_lag(window, tmp_path):
    page = write_page(sample_page(MANY, items=2000), tmp_path / "many.html")
    assert page.stat().st_size < 8 << 20
    window.size(1280, 900)
    window.open(page)
    paint = window.run("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
    moves = window.run(
        """const s = document.getElementById('slider'), times = [];
        for (let k = 0; k < 200; k++) {
          s.value = (k * 37) % 1000;
          const start = performance.now();
          s.dispatchEvent(new Event('input'));
          document.body.offsetHeight;  // lays the page out
          times.push(performance.now() - start);
        }
        return times.sort((a, b) => a - b);"""
    )
    assert rows_in_sight(window) < 40  # only those in sight exist
    print(f"{page.stat().st_size / 2**20:.1f} MiB, first paint {paint:.0f} ms, ", end="")
    print(f"slider {moves[100]:.1f} ms (median), {moves[190]:.1f} ms (95 %)")
    assert moves[100] < 50
    window.press("Escape", "End")
    settle(window)
    assert window.run("return document.getElementById('list').scrollTop") > 600_000
    assert f"query-{MANY - 1}" in window.text("#detail .facts")
