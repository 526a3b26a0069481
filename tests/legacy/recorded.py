"""Tests that compare with numbers that an earlier release recorded on a processor with AVX2.

Sums of other targets are rounded in another order, which a density amplifies to a few 1e-5 in a probability. So these
tests run with that target, in a process of their own where another one is in use.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from geoflow_fast.ops import native

RECORDED = "avx2"


def as_recorded(test: Callable[..., None]) -> Callable[..., None]:
    """Makes a test run with the target that its numbers were recorded with."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        if native.isa() == RECORDED:
            test(*arguments, **fixtures)
            return
        if RECORDED not in native.supported_isas():
            pytest.skip(f"the numbers were recorded with {RECORDED}, which this processor does not have")
        name = f"{sys.modules[test.__module__].__file__}::{test.__name__}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
        environment = os.environ | {"GEOFLOW_ISA": RECORDED}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    return run
