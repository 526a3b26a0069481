"""Figures of comparisons and of abstention thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import geoflow_fast as gf
from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.registry import all_methods
from geoflow_fast.evaluation.results import aggregate
from tests.evaluation.helpers import is_picture


def test_figures_of_one_and_of_several_data_sets(pairs, held_out, tmp_path):
    runs = [compare(Study(held_out, seed=s), pairs, ("margin", "max_softmax"), resamples=9) for s in range(2)]
    two = {"first": aggregate(runs), "second": runs[0]}
    stackable = (figures.draw_calibration, figures.draw_risk, figures.draw_reliability)
    drawers = (*stackable, figures.draw_selective, figures.draw_auroc)
    for number, draw in enumerate(drawers):
        assert is_picture(draw({"only": runs[0]}, tmp_path / f"one{number}.png"))
        assert is_picture(draw(two, tmp_path / f"two{number}.png"))
    for draw in stackable:
        with Image.open(draw({"only": runs[0]}, tmp_path / "stacked.png", stacked=True)) as picture:
            assert picture.height > picture.width
    curves = {
        title: {"a": figures.Series([1, 2, 3], [0.1, 0.1, 0.1]), "b": figures.Series([3, 2, 1])} for title in "xy"
    }
    options = {"xlabel": "steps", "ylabel": "AUROC", "log_x": True}
    assert is_picture(figures.draw_ablation(curves, [1, 10, 100], tmp_path / "ablation.png", **options))


class TestAbstentionFigure:
    """An answer with uncertainty u is wrong with probability u."""

    @pytest.fixture
    def drawn(self, monkeypatch):
        """The figure that would be saved."""
        drawn = []
        save = figures.plots.save_figure

        def keep(figure, path):
            drawn.append(figure)
            save(figure, path)

        monkeypatch.setattr(figures.plots, "save_figure", keep)
        return drawn

    def answers(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed)
        score = generator.random(count)
        return score, generator.random(count) > score

    def test_threshold_and_points_are_where_the_numbers_say(self, drawn, tmp_path):
        (score, right), (later, later_right) = self.answers(2000, 0), self.answers(777, 1)
        act = gf.evaluation.abstention_threshold(score, right, target_risk=0.2)
        path = figures.draw_abstention(act, score, right, tmp_path / "a.png", new=(later, later_right))
        assert is_picture(path)
        parted, risk = drawn[0].axes
        assert any(np.allclose(line.get_xdata(), act.threshold) for line in parted.lines)
        assert sum(patch.get_height() for patch in parted.patches) > 0
        marked = [line.get_xydata()[0] for line in risk.lines if line.get_marker() in ("o", "X")]
        for point, (u, ok) in zip(marked, ((score, right), (later, later_right)), strict=True):
            np.testing.assert_allclose(point, [(u <= act.threshold).mean(), (~ok[u <= act.threshold]).mean()])
        coverage, wrong = risk.lines[0].get_data()
        assert wrong[-1] == pytest.approx(1 - right.mean())
        assert coverage[-1] == 1

    def test_it_draws_into_axes_of_the_caller(self, tmp_path, monkeypatch):
        import matplotlib
        from matplotlib.figure import Figure

        monkeypatch.setitem(matplotlib.rcParams, "backend", "svg")  # whatever the user has chosen
        score, right = np.linspace(0, 1, 60), np.arange(60) % 7 > 0
        act = gf.evaluation.abstention_threshold(score, right, target_risk=0.5)
        axes = Figure().subplots(1, 2)
        assert figures.draw_abstention(act, score, right, axes=axes, label="doubt") is None
        assert axes[0].get_xlabel() == "doubt of a query"
        assert axes[1].lines
        assert is_picture(figures.draw_abstention(act, score, right, tmp_path / "a.png"))
        assert matplotlib.rcParams["backend"] == "svg"
        for wrong in ({}, {"axes": axes[:1]}, {"axes": axes, "path": tmp_path / "b.png"}, {"axes": [1, 2]}):
            with pytest.raises(TypeError, match="axes"):
                figures.draw_abstention(act, score, right, **wrong)
        assert not (tmp_path / "b.png").exists()

    @pytest.mark.parametrize("count", [2, 7, 129])
    def test_the_figure_tells_that_nothing_is_certified(self, count, drawn, tmp_path):
        act = gf.evaluation.abstention_threshold(np.zeros(count), np.zeros(count), target_risk=0.1)
        assert is_picture(figures.draw_abstention(act, np.zeros(count), np.zeros(count), str(tmp_path / "a.png")))
        assert any("abstain always" in text.get_text() for text in drawn[0].axes[1].texts)

    def test_bad_input_is_refused_before_anything_is_drawn(self, tmp_path):
        act = gf.evaluation.abstention_threshold(*self.answers(200, 0), target_risk=0.3)
        with pytest.raises(ValueError, match="row 1 is 3"):
            figures.draw_abstention(act, [0.1, 0.2], [1, 3], tmp_path / "a.png")
        with pytest.raises(ValueError, match="entries"):
            figures.draw_abstention(act, [0.1, 0.2], [1, 0], tmp_path / "a.png", new=([1.0], [1, 1]))
        assert not list(tmp_path.iterdir())


def test_a_method_looks_the_same_everywhere():
    names = all_methods()
    styles = [figures.style_of(name) for name in names]
    assert styles == [figures.style_of(name) for name in names]
    colours = [style["color"] for style in styles]
    assert len(set(colours[:5])) == 5
