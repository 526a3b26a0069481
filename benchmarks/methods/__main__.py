"""`python -m benchmarks.methods NAME ...`: trains and scores methods that GeoFlow is compared with; see `cli`."""

from __future__ import annotations

import sys

from benchmarks.methods.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
