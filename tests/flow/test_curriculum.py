"""Frequencies and order of the questions a batch asks."""

from __future__ import annotations

import pytest
import torch

from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.flow.curriculum import ROW_ORDER, Curriculum, draw_questions


def test_joint_probability_follows_the_paper():
    curriculum = Curriculum(steps=1000)
    assert [curriculum.joint_probability(step) for step in (0, 149, 150)] == [0, 0, 0]
    assert curriculum.joint_probability(225) == pytest.approx(0.2)
    assert [curriculum.joint_probability(step) for step in (300, 999)] == pytest.approx([0.4, 0.4])


def test_frequencies():
    questions = Curriculum(steps=1000).draw(500, 200_000, torch.Generator().manual_seed(3))
    shares = torch.tensor(questions.counts) / 200_000
    torch.testing.assert_close(shares, torch.tensor([0.3, 0.4, 0.3]), atol=0.005, rtol=0)
    conditional = questions.direction != DIRECTIONS.index("joint")
    assert float(questions.drop[conditional].float().mean()) == pytest.approx(0.1, abs=0.005)
    assert not questions.drop[~conditional].any()
    assert float(questions.t.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(questions.t.std()) == pytest.approx(12**-0.5, abs=0.005)
    assert 0 <= float(questions.t.min()) <= float(questions.t.max()) < 1


@pytest.mark.parametrize("rows", [1, 7, 129])
@pytest.mark.parametrize("p_joint", [0.0, 0.4, 1.0])
def test_rows_are_sorted_and_counted(rows, p_joint):
    questions = draw_questions(rows, p_joint, 0.1, torch.Generator().manual_seed(0))
    expected = [code for code, count in zip(ROW_ORDER, questions.counts) for _ in range(count)]
    assert questions.direction.tolist() == expected
    if p_joint in (0.0, 1.0):
        assert questions.counts[1] == rows * p_joint
