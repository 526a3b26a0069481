"""The interface of fields: flows have it, other fields are given it, and threads may share a flow in any mode."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods.euclidean import EUCLIDEAN, EuclideanConfig
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.flow.fields import PlainField, as_flow
from geoflow_fast.geometry import project_tangent
from geoflow_fast.manifolds import SPHERE
from geoflow_fast.noise import sample_uniform
from geoflow_fast.worlds import PairField

FLOW = gf.GeoFlowConfig(image_dim=9, text_dim=7, hidden=32, depth=2, heads=4, dropout=0.5, layer_scale=0.5)


def random_flow(config: gf.GeoFlowConfig = FLOW) -> gf.GeoFlow:
    """A flow none of whose weights is zero, in training mode."""
    flow = gf.GeoFlow(config)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.normal_(0, 0.25, generator=torch.Generator().manual_seed(parameter.numel()))
    return flow.train()


def test_a_flow_has_the_interface_itself():
    flow = random_flow()
    assert as_flow(flow) is flow
    assert flow.network is flow
    assert flow.manifold is SPHERE
    assert flow.flow_dims == (9, 7)
    assert flow.example.dtype == torch.float32
    assert gf.GeoFlow(EuclideanConfig(9, 7, 32, 1)).manifold is EUCLIDEAN


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_other_field_is_given_the_interface(direction):
    field = PairField(torch.eye(5, dtype=torch.float64), 0.7)
    flow = as_flow(field, (5, 5))
    assert isinstance(flow, PlainField)
    assert flow.network is None
    assert flow.manifold is SPHERE
    assert flow.flow_dims == (5, 5)
    image, text = (sample_uniform(4, 5, dtype=torch.float64) for _ in range(2))
    assert flow.stream_to_flow(image, 0) is image
    assert flow.stream_from_flow(text, 1) is text
    expected = field.velocity(image, text, 0.3, direction)
    with flow.velocity_at([0.3], direction) as velocity:
        for a, b in zip(velocity(image, text, 0.3), expected):
            assert torch.equal(a, b)


def test_widths_of_another_field_are_asked_for_when_they_are_needed():
    with pytest.raises(ValueError, match=r"dims=\(image, text\) is needed to sample from a PairField"):
        gf.sample(PairField(torch.eye(3), 1.0), text=sample_uniform(1, 3))


def test_a_field_that_is_a_module_is_in_eval_mode_only_meanwhile():
    class Field(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Dropout(), torch.nn.Dropout().eval()])

        def velocity(self, image, text, *_):
            return torch.zeros_like(image), torch.zeros_like(text)

    field = Field()
    with as_flow(field, (2, 2)).velocity_at([0.0], Direction.JOINT):
        assert not any(module.training for module in field.modules())
    assert [module.training for module in field.modules()] == [True, True, True, False]


def test_prepared_velocities_have_no_dropout_in_either_mode():
    flow, image, text = random_flow(), sample_uniform(6, 9), sample_uniform(6, 7)
    for direction in DIRECTIONS:
        dropped = flow.train().velocity(image, text, 0.4, direction)
        with flow.velocity_at([0.4], direction) as velocity:
            prepared = velocity(image, text, 0.4)
        plain = flow.eval().velocity(image, text, 0.4, direction)
        for stream in direction.generated:
            v = project_tangent((image, text)[stream], prepared[stream])
            torch.testing.assert_close(v, plain[stream])
            assert not torch.allclose(v, dropped[stream])


@pytest.mark.parametrize("training", [True, False])
def test_threads_that_share_a_flow_agree_and_leave_its_mode_alone(training):
    """Eight threads score and sample with one flow; a ninth watches its mode."""
    flow = random_flow().train(training)
    flow.blocks[0].eval()
    modes = [module.training for module in flow.modules()]
    scorer = gf.RetrievalEntropy(flow, sample_uniform(64, 9), "t2i", n_samples=6, n_steps=4)
    queries, image = sample_uniform(12, 7), sample_uniform(12, 9)
    changed, done = [], False

    def score(_: int) -> list[torch.Tensor]:
        def generator() -> torch.Generator:
            return torch.Generator().manual_seed(3)

        return [
            scorer(queries).entropy,
            *gf.sample(flow, n_samples=4, n_steps=3, generator=generator()),
            gf.log_density(flow, image, queries, n_steps=2, generator=generator()),
        ]

    def watch() -> None:
        while not done:
            changed.extend(m for m, mode in zip(flow.modules(), modes) if m.training is not mode)

    expected = score(0)
    with ThreadPoolExecutor(9) as pool:
        watching = pool.submit(watch)
        results = list(pool.map(score, range(16)))
        done = True
        watching.result()
    for result in results:
        for a, b in zip(result, expected):
            assert torch.equal(a, b)
    assert not changed
    assert [module.training for module in flow.modules()] == modes
