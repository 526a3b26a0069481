"""The demo's report in a browser: every figure is visible and inside the page, and nothing is loaded from elsewhere.

`make test-browser` runs this with Debian's chromium. GEOFLOW_REPORT names a report to open; without it a short demo
makes one. The screenshot stays beside the report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from geoflow_fast import demo

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: apt-get install chromium")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
]
# The page forbids scripts, so a copy without that policy is measured.
MEASURE = """<script>window.addEventListener("load", () => {
  const images = [...document.images].map(
    i => ({natural: i.naturalWidth, complete: i.complete, ...box(i), alt: i.alt,
      frame: box(i.parentElement), scrolls: getComputedStyle(i.parentElement).overflowX == "auto"}));
  function box(e) { const r = e.getBoundingClientRect(); return {x: r.x, y: r.y, width: r.width, height: r.height}; }
  const captions = [...document.querySelectorAll("caption, figcaption")].map(box);
  const lines = [...document.querySelectorAll("tbody td")].map(e => e.getClientRects().length && e.offsetHeight
    <= 1.9 * parseFloat(getComputedStyle(e).lineHeight) + 2 * parseFloat(getComputedStyle(e).paddingTop)
    || e.parentElement.firstElementChild.offsetHeight >= e.offsetHeight);
  const page = {width: document.documentElement.clientWidth, scroll: document.documentElement.scrollWidth,
    height: document.documentElement.scrollHeight};
  const requests = performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:"));
  const out = document.createElement("pre"); out.id = "measured";
  out.textContent = JSON.stringify({images, captions, page, requests, lines}); document.body.append(out);
});</script></body>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("GEOFLOW_REPORT")
    if given:
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("demo")
    assert demo.run(folder, 0, 20, lambda _: None) is not None
    return folder / demo.REPORT


def browse(profile: Path, *arguments: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("width", [1280, 600, 500])  # the narrowest window that the browser opens: a phone
def test_every_figure_is_visible(report, tmp_path, width):
    copy = tmp_path / "measured.html"
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text(encoding="utf-8"))
    copy.write_text(open_page.replace("</body>", MEASURE), encoding="utf-8")
    dom = browse(tmp_path / "profile", f"--window-size={width},900", "--dump-dom", copy.as_uri())
    measured = json.loads(re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)[1].replace("&amp;", "&"))
    page = measured["page"]
    assert len(measured["images"]) == len(list(report.parent.glob("*.png")))
    for image in measured["images"]:
        assert image["complete"], image
        assert image["natural"] > 0, image
        assert image["width"] > 200, image
        assert image["height"] > 100, image
        assert image["x"] >= 0, image
        # On a phone, panels side by side keep a readable size and scroll inside their own frame.
        inside = image["frame"] if image["scrolls"] and width <= 500 else image
        assert inside["x"] + inside["width"] <= page["width"], image
        assert width > 500 or image["width"] >= min(450, image["natural"]), image
        assert image["y"] + image["height"] <= page["height"], image
        assert len(image["alt"]) > 20, image
    for caption in measured["captions"]:  # a wide table scrolls, but its caption wraps
        assert caption["x"] + caption["width"] <= page["width"], caption
    assert all(measured["lines"])  # no cell wraps but the name of its row
    assert page["scroll"] <= page["width"]  # nothing sticks out sideways
    assert measured["requests"] == []


def test_a_screenshot_shows_more_than_an_empty_page(report, tmp_path):
    picture = report.with_name("screenshot.png")
    browse(tmp_path / "profile", "--window-size=1280,7000", f"--screenshot={picture}", report.as_uri())
    pixels = pytest.importorskip("matplotlib.image").imread(picture)[..., :3]
    assert pixels.shape[:2] == (7000, 1280)
    dark = (pixels.min(-1) < 0.5).mean(axis=1)
    assert (dark[:4000] > 0).mean() > 0.5  # text or figure on most lines
