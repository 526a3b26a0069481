"""The examples run as they stand, with weights that need no download."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.usefixtures("_torchvision_operators")
def test_open_clip_retrieval(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["open_clip_retrieval.py", "--steps=20"])
    runpy.run_path(str(EXAMPLES / "open_clip_retrieval.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("nats, as if among") == 4
    assert "120 pictures; kappa" in shown
