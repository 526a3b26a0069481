"""`python -m benchmarks [name ...]`: hot paths, then docs/performance.md and its figures from all results there are.

`--quick` takes small sizes and prints tables only. `--json` prints what was measured as one JSON object in place of
tables. Studies of quality are in `python -m benchmarks.methods study NAME`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks import page, suite
from benchmarks.common import save


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run; all suites of hot paths if none")
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    parser.add_argument("--json", action="store_true", help="one JSON object to standard output")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(suite.names()))
    if unknown:
        raise SystemExit(f"no benchmark named {', '.join(unknown)}; there are {', '.join(suite.names())}")
    hot = suite.suites()
    results: dict[str, Any] = {}
    for name in given.names or hot:
        if name not in hot:
            results[name] = suite.module_of(name).run()
        else:
            results[name] = run_suite(name, quick=given.quick)
        if not given.json:
            words = results[name] if isinstance(results[name], str) else suite.text_of(results[name])
            print(f"## {name}\n\n{words}\n", flush=True)
    if given.json:
        print(json.dumps(results, indent=2))
    if not given.quick and any(isinstance(value, dict) for value in results.values()):
        page.write()


def run_suite(name: str, *, quick: bool) -> dict[str, Any]:
    """Measures a suite; its results are kept unless they are quick ones."""
    result = suite.run_suite(name, quick=quick, announce=lambda words: print(words, file=sys.stderr, flush=True))
    if not quick:
        save(name, result)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
