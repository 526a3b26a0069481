"""Figures of comparisons."""

from __future__ import annotations

from PIL import Image

from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.registry import METHODS
from geoflow_fast.evaluation.results import aggregate
from tests.evaluation.helpers import is_picture


def test_figures_of_one_and_of_several_data_sets(pairs, held_out, tmp_path):
    runs = [compare(Study(held_out, seed=s), pairs, ("margin", "max_softmax"), resamples=9) for s in range(2)]
    two = {"first": aggregate(runs), "second": runs[0]}
    stackable = (figures.draw_calibration, figures.draw_reliability)
    drawers = (*stackable, figures.draw_selective, figures.draw_auroc)
    for number, draw in enumerate(drawers):
        assert is_picture(draw({"only": runs[0]}, tmp_path / f"one{number}.png"))
        assert is_picture(draw(two, tmp_path / f"two{number}.png"))
    for draw in stackable:
        with Image.open(draw({"only": runs[0]}, tmp_path / "stacked.png", stacked=True)) as picture:
            assert picture.height > picture.width


def test_a_method_looks_the_same_everywhere():
    names = list(METHODS)
    styles = [figures.style_of(name) for name in names]
    assert styles == [figures.style_of(name) for name in names]
    colours = [style["color"] for style in styles]
    assert len(set(colours[:5])) == 5
