"""The data and the flow of the tests of the evaluation."""

from __future__ import annotations

from tests.evaluation.conftest import held_out, pairs, small_flow

__all__ = ["held_out", "pairs", "small_flow"]
