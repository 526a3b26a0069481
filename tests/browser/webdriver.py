"""Chromium, driven by the WebDriver protocol of chromedriver: enough of it to type, press keys, move and look."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Escape": "\ue00c", "Enter": "\ue007", "ArrowDown": "\ue015", "ArrowUp": "\ue013", "ArrowRight": "\ue014"}
KEYS |= {"ArrowLeft": "\ue012", "End": "\ue010", "Home": "\ue011", "PageDown": "\ue00f"}


class Session:
    """One window of the browser."""

    def __init__(self, address: str, session: str) -> None:
        self.address = f"{address}/session/{session}"

    def call(self, path: str, value: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """Asks chromedriver for something."""
        return _ask(f"{self.address}/{path}", value if method == "POST" else None, method)

    def open(self, page: Path) -> None:
        """Opens a file and waits until it is loaded."""
        self.call("url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.call("execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Presses keys, by their names or characters, wherever the focus is."""
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.call("actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def text(self, selector: str) -> str:
        """The text that an element shows."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def screenshot(self, path: Path) -> Path:
        """Writes what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("screenshot", method="GET")))
        return path

    def scheme(self, name: str) -> None:
        """Asks for a light or a dark page."""
        media = {"features": [{"name": "prefers-color-scheme", "value": name}]}
        self.call("goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})

    def size(self, width: int, height: int) -> None:
        """Makes the page as wide and high as a screen, also narrower than windows can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Session]:
    """A window of a browser of its own, with an empty profile."""
    assert BROWSER is not None
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            port = next(match[1] for line in driver.stdout if (match := re.search(r"successfully on port (\d+)", line)))
            address = f"http://127.0.0.1:{port}"
            options = {"binary": BROWSER, "args": [*QUIET, f"--user-data-dir={profile}"]}
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            session = Session(address, _ask(f"{address}/session", wanted)["sessionId"])
            yield session
            session.call("", method="DELETE")
        finally:
            driver.terminate()


def _ask(address: str, value: dict[str, Any] | None, method: str = "POST") -> Any:
    body = None if method != "POST" else json.dumps(value or {}).encode()
    request = urllib.request.Request(address.rstrip("/"), body, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:  # its body says what went wrong
        raise RuntimeError(error.read().decode("utf-8", "replace")[:2000]) from error
