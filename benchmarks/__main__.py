"""`python -m benchmarks [name ...]` runs the named benchmarks (all without a name) and prints their tables."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def main(wanted: list[str]) -> None:
    prefix = "bench_"
    known = [
        m.name.removeprefix(prefix) for m in pkgutil.iter_modules(benchmarks.__path__) if m.name.startswith(prefix)
    ]
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise SystemExit(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}")
    for name in wanted or known:
        print(f"## {name}\n", flush=True)
        print(importlib.import_module(f"benchmarks.{prefix}{name}").run(), end="\n\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
