"""The examples run as they stand, with weights that need no download."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.usefixtures("_torchvision_operators")
def test_open_clip_retrieval(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["open_clip_retrieval.py", "--steps=20"])
    runpy.run_path(str(EXAMPLES / "open_clip_retrieval.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("nats, as if among") == 4
    assert "120 pictures; kappa" in shown


def run_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names a script ends with, run whole in `folder`; its picture is there."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    with Image.open(folder / f"{name}.png") as picture:
        assert min(picture.size) > 400
    return names


@pytest.mark.slow
def test_ood_filter_finds_strangers_at_the_rate_of_false_alarms_it_was_given(tmp_path, monkeypatch):
    names = run_example("ood_filter", tmp_path, monkeypatch)
    assert names["auroc"]["unseen group"]["flow"] > 0.8
    assert names["alarms"]["unseen group"] > 3 * names["rate"]
    # 800 familiar images: three standard deviations of their share, and of the threshold made of 1,000 others.
    assert abs(names["alarms"]["known concepts"] - names["rate"]) < 0.035


@pytest.mark.slow
def test_clean_pairs_finds_swapped_captions(tmp_path, monkeypatch):
    names = run_example("clean_pairs", tmp_path, monkeypatch)
    by_name = names["precisions"]
    assert by_name["PMI of the flow"] > by_name["cosine"] + 0.1
    assert by_name["PMI of the flow"] > 4 * names["share"]
