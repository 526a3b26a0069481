"""The reverse solve: the order of its solvers, its chunks, and errors that name row and step."""

from __future__ import annotations

import math

import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods.euclidean import EuclideanConfig
from geoflow_fast.directions import Direction
from geoflow_fast.flow.inference import InferenceNetwork
from geoflow_fast.likelihood.reverse_ode import _ReverseSolve, density_estimates
from tests.likelihood.helpers import oracles, random_flow, random_pairs, seeded


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("ab2", 2), ("rk4", 4)])
def test_order_of_the_solvers(solver, order):
    image, text, (field, _) = oracles(16)
    truth = field.log_density(image, text, "joint")
    options = {"solver": solver, "divergence": "exact"}
    errors = [float((gf.log_density(field, image, text, n_steps=n, **options) - truth).abs().max()) for n in (10, 20)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.4)


@pytest.mark.parametrize("options", [{}, {"n_probes": 3, "shared": True}, {"divergence": "exact"}])
def test_chunks_do_not_change_the_result(options, monkeypatch):
    sizes = []
    run = _ReverseSolve.run
    monkeypatch.setattr(_ReverseSolve, "run", lambda self: sizes.append(len(self.pair[0])) or run(self))
    flow = random_flow()
    image, text = random_pairs(50)
    whole, pieces = (
        gf.log_density(flow, image, text, generator=seeded(), batch_size=size, settings=gf.DensitySettings(**options))
        for size in (None, 7)
    )
    assert sizes[0] == 50 == sum(sizes[1:])
    assert len(sizes) > 2  # one solve, then several chunks
    torch.testing.assert_close(whole, pieces, atol=1e-11, rtol=0)
    settings, joint = gf.DensitySettings(), (Direction.JOINT,)
    part = density_estimates(flow, image[30:], text[30:], joint, settings, 3, first_row=30)
    every = density_estimates(flow, image, text, joint, settings, 3)
    torch.testing.assert_close(part, every[..., 30:], atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", [gf.GeoFlowConfig, EuclideanConfig])
def test_shared_probes_do_not_depend_on_the_rows(kind):
    flow = random_flow(kind=kind)
    image, text = random_pairs(9)
    options = {"direction": "i2t", "settings": gf.DensitySettings(shared=True)}
    shared = gf.log_density(flow, image, text, generator=seeded(), **options)
    alone = [gf.log_density(flow, image[[row]], text[[row]], generator=seeded(), **options) for row in range(9)]
    torch.testing.assert_close(shared, torch.cat(alone))


def test_a_path_that_breaks_raises():
    class Broken:
        def velocity(self, image, text, *_):
            return image * math.nan, torch.zeros_like(text)

    image, text, _ = oracles(4)
    with pytest.raises(ValueError, match="row 0 became non-finite in step 0"):
        gf.log_density(Broken(), image, text, "joint")


@pytest.mark.parametrize(("solver", "below", "where"), [("euler", 0.75, r"3 \(t=0.7\)"), ("rk4", 0.54, r"4 \(t=0.5\)")])
@pytest.mark.parametrize(("solve", "stream", "name"), [(0, 1, "joint"), (2, 0, "t2i")])
def test_a_solve_that_breaks_on_the_way_names_row_and_step(monkeypatch, solve, stream, name, solver, below, where):
    """The network's output for one pair, in a later chunk, turns NaN on the way."""
    flow = random_flow()
    image, text = random_pairs(8)
    call = InferenceNetwork.__call__

    def breaking(self, t, solves):
        outputs = call(self, t, solves)
        if t < below:
            outputs[solve, stream][0][(solves[0].points[1] - text[6]).norm(dim=1) < 0.5] = math.nan
        return outputs

    monkeypatch.setattr(InferenceNetwork, "__call__", breaking)
    with pytest.raises(ValueError, match=rf"{name}: divergence row 6 became non-finite in step {where} of {solver}"):
        gf.epistemic(flow, image, text, batch_size=4, settings=gf.DensitySettings(solver=solver))
