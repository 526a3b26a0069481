"""The plan of a batch: frequencies of directions, times and dropout, and the order of its rows."""

from __future__ import annotations

import pytest
import torch

from geoflow_fast.directions import ROW_ORDER, Direction
from geoflow_fast.flow.curriculum import RAMP_LEVELS, Curriculum, draw_batch_plan


def test_joint_probability_follows_the_paper():
    curriculum = Curriculum(steps=1000)
    assert [curriculum.joint_probability(step) for step in (0, 149, 150)] == [0, 0, 0]
    assert curriculum.joint_probability(225) == pytest.approx(0.2)
    assert [curriculum.joint_probability(step) for step in (300, 999)] == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize(("conditional", "first"), [(0.0, 0), (0.5, 5), (1.0, 10)])
def test_without_a_ramp_joint_rows_begin_at_once(conditional, first):
    curriculum = Curriculum(steps=10, conditional_share=conditional, ramp_share=0.0)
    assert [curriculum.joint_probability(step) for step in range(10)] == [0.0] * first + [0.4] * (10 - first)


def test_directions_times_and_dropout_have_the_frequencies_of_the_curriculum():
    p_joint = Curriculum(steps=1000).joint_probability(500)
    plan = draw_batch_plan(200_000, p_joint, 0.1, torch.Generator().manual_seed(3))
    shares = torch.tensor(plan.counts) / 200_000
    torch.testing.assert_close(shares, torch.tensor([0.3, 0.4, 0.3]), atol=0.005, rtol=0)
    conditional = plan.direction != Direction.JOINT.code
    assert float(plan.drop[conditional].float().mean()) == pytest.approx(0.1, abs=0.005)
    assert not plan.drop[~conditional].any()
    assert float(plan.t.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(plan.t.std()) == pytest.approx(12**-0.5, abs=0.005)
    assert 0 <= float(plan.t.min()) <= float(plan.t.max()) < 1


@pytest.mark.parametrize("rows", [1, 7, 129])
@pytest.mark.parametrize("p_joint", [0.0, 0.4, 1.0])
def test_rows_are_sorted_and_counted(rows, p_joint):
    plan = draw_batch_plan(rows, p_joint, 0.1, torch.Generator().manual_seed(0))
    expected = [direction.code for direction, count in zip(ROW_ORDER, plan.counts) for _ in range(count)]
    assert plan.direction.tolist() == expected
    if p_joint in (0.0, 1.0):
        assert plan.counts[1] == rows * p_joint


@pytest.mark.parametrize("rows", [1, 7, 129, 8192])
@pytest.mark.parametrize("p_joint", [0.0, 0.175, 0.4, 1.0])
def test_fixed_directions_have_their_share_of_every_batch(rows, p_joint):
    plans = [draw_batch_plan(rows, p_joint, 0.1, torch.Generator().manual_seed(seed), fixed=True) for seed in range(3)]
    (counts,) = {plan.counts for plan in plans}
    i2t, joint, t2i = counts
    assert joint == round(p_joint * rows)
    assert 0 <= t2i - i2t <= 1
    assert sum(counts) == rows
    drawn = draw_batch_plan(rows, p_joint, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(plans[0].t, drawn.t)  # times are drawn as they would be otherwise
    assert not plans[0].drop[i2t : i2t + joint].any()
    expected = [direction.code for direction, count in zip(ROW_ORDER, counts) for _ in range(count)]
    assert plans[0].direction.tolist() == expected


def test_the_ramp_of_fixed_directions_has_few_levels():
    curriculum = Curriculum(steps=1000)
    shares = [curriculum.joint_share(step) for step in range(1000)]
    assert len(set(shares)) == RAMP_LEVELS + 1
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(0.4)
    differences = [share - curriculum.joint_probability(step) for step, share in enumerate(shares)]
    assert max(map(abs, differences)) <= 0.4 / RAMP_LEVELS / 2 + 1e-9
    assert sum(differences) == pytest.approx(0, abs=0.1)
    assert Curriculum(steps=10, p_joint=0.0).joint_share(9) == 0
