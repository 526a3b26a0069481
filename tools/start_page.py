"""Follows the start-here page literally, every step in a process of its own, on the machine as it is and beside others.

    python -m tools.start_page [--busy 2]

prints the seconds of both runs. `--busy`: processes that do nothing but compute. Close everything else first.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from geoflow_fast.runtime import processors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/abstention.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def steps(page: Path = PAGE) -> list[list[str]]:
    """The commands of the page, from top to bottom; a block of Python is one."""
    commands: list[list[str]] = []
    for language, code in BLOCK.findall(page.read_text()):
        if language == "python":
            commands.append([sys.executable, "-c", code])
        elif language in ("", "sh", "bash"):
            lines = (shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines())
            commands += [
                [sys.executable, "-m", "geoflow_fast", *words[1:]] for words in lines if words[:1] == ["geoflow"]
            ]
    return commands


def follow(page: Path = PAGE) -> float:
    """Takes all steps in an empty folder; returns the seconds that took."""
    said = (*processors.WAIT_VARIABLES, "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in said}
    environment["PYTHONPATH"] = str(ROOT)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for command in steps(page):
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - began


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs this many processes that keep a processor busy each."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def main(arguments: list[str]) -> None:
    """Prints the seconds of both runs and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m tools.start_page", description=__doc__)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep the processors busy")
    given = parser.parse_args(arguments)
    alone = follow()
    print(f"alone: {alone:.0f} s", flush=True)
    with busy(given.busy):
        beside = follow()
    print(f"beside {given.busy} busy processes: {beside:.0f} s, {beside / alone:.2f} times as long")


if __name__ == "__main__":
    main(sys.argv[1:])
