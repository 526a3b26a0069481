"""`python -m benchmarks.methods --study NAME`: a study of quality, which takes minutes to hours."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

from benchmarks.methods import studies


def study_names() -> list[str]:
    """The names of all studies."""
    return sorted(module.name for module in pkgutil.iter_modules(studies.__path__))


def main(arguments: list[str]) -> None:
    """Runs what the arguments ask for and prints its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("--study", choices=study_names(), required=True, metavar="NAME", help=", ".join(study_names()))
    given = parser.parse_args(arguments)
    print(importlib.import_module(f"{studies.__name__}.{given.study}").run())


if __name__ == "__main__":
    main(sys.argv[1:])
