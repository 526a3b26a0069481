"""Samples against closed forms, and guidance against its definition."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import geoflow_fast as gf
from geoflow_fast import geometry, noise
from geoflow_fast.directions import Direction
from geoflow_fast.flow import sampling, solvers
from geoflow_fast.worlds import PairField
from tests.samples import seeded


@pytest.fixture
def flow(flow: gf.GeoFlow) -> gf.GeoFlow:
    return flow.double()


@pytest.mark.parametrize(("direction", "dim"), [("i2t", 12), ("t2i", 12)])
def test_conditional_samples_have_the_distribution_of_the_closed_form(direction, dim):
    """Along the flow of this field atanh<R x, y> grows by c: a uniform start gives a known distribution of cosines."""
    rotation = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=seeded()))[0]
    field, query = PairField(rotation, 1.3), noise.sample_uniform(1, dim, dtype=torch.float64)
    side = {"i2t": "image", "t2i": "text"}[direction]
    settings = {"n_samples": 4000, "n_steps": 40, "solver": "rk4", "guidance": 0.0, "dims": (dim, dim)}
    image, text = gf.sample(field, **{side: query}, generator=seeded(3), **settings)
    drawn = (image if direction == "t2i" else text)[0]
    target = query @ rotation.T if direction == "i2t" else query @ rotation
    cosine = (drawn @ target.squeeze(0)).clamp(-1, 1)
    before = torch.tanh(torch.atanh(cosine) - 1.3)
    # The cosine of a uniform point with a fixed one: (1 + u) / 2 is Beta((d - 1) / 2, (d - 1) / 2).
    assert stats.kstest(((1 + before) / 2).numpy(), stats.beta((dim - 1) / 2, (dim - 1) / 2).cdf).pvalue > 0.01


@pytest.mark.parametrize("solver", ["euler", "midpoint", "ab2", "rk4"])
def test_guided_samples_follow_the_definition(flow, solver):
    """They are compared with a loop that evaluates the two fields separately, query by query."""
    text, lam, steps, draws = noise.sample_uniform(3, 7, dtype=torch.float64), 1.7, 6, 4
    image, given = gf.sample(
        flow, text=text, n_samples=draws, n_steps=steps, guidance=lam, solver=solver, generator=seeded(5)
    )
    assert given is text
    assert image.shape == (3, draws, 10)
    settings = gf.SamplingSettings(n_samples=draws)
    start = sampling.StartingPoints.draw(settings, (10, 7), Direction.T2I, seeded(5)).to(text)
    for q in range(3):

        def rate(point, t, _weight, q=q):
            conditional = flow.velocity(point[0], text[q].expand(draws, -1), t, "t2i")[0]
            free = flow.velocity(point[0], start.condition, t, "t2i")[0]
            return (conditional + lam * (conditional - free),)

        with torch.no_grad():
            (expected,) = solvers.integrate(rate, (start.generated,), solvers.time_grid(steps), solver=solver)
        torch.testing.assert_close(image[q], expected)


def step_by_step(solver: str, velocity, x: Tensor, grid: list[float]) -> Tensor:
    """The solvers by their definitions: tangent velocities, combined first and followed by functions of `geometry`."""
    before = None
    for now, after in itertools.pairwise(grid):
        h, middle = after - now, (now + after) / 2
        first = velocity(x, now)
        if solver in ("euler", "ab2"):
            combined = first
            if solver == "ab2" and before is not None:
                old = geometry.parallel_transport(before[0], x, before[1])
                combined = first + h / (2 * before[2]) * (first - old)
            before = (x, first, h)
            x = geometry.exp_map(x, h * combined)
            continue
        second = velocity(geometry.normalize(x + h / 2 * first), middle)
        mean = second
        if solver == "rk4":
            third = velocity(geometry.normalize(x + h / 2 * second), middle)
            fourth = velocity(geometry.normalize(x + h * third), after)
            mean = (first + 2 * second + 2 * third + fourth) / 6
        x = geometry.normalize(x + h * mean)
    return x


@pytest.mark.parametrize("solver", ["euler", "midpoint", "ab2", "rk4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("guidance", [0.0, 3.0])
def test_fused_steps_follow_the_separate_operations(flow, solver, dtype, guidance):
    """Guidance, projection and step in one pass, against one after the other in float64."""
    settings = gf.SamplingSettings(n_samples=5, n_steps=7, guidance=guidance, solver=solver, grid="late")
    text = noise.sample_uniform(1, 7)
    drawn = sampling.StartingPoints.draw(settings, (10, 7), Direction.T2I, seeded(5)).to(text.double())
    start = sampling.StartingPoints(geometry.normalize(drawn.generated), geometry.normalize(drawn.condition))

    def velocity(x: Tensor, t: float) -> Tensor:
        conditional = flow.velocity(x, text.double().expand(5, -1), t, "t2i")[0]
        return conditional + guidance * (conditional - flow.velocity(x, start.condition, t, "t2i")[0])

    with torch.no_grad():
        grid = solvers.time_grid(7, kind="late").tolist()
        expected = step_by_step(solver, velocity, start.generated, grid)
    given = text.to(dtype)
    samples = sampling.sample_conditional(flow.to(dtype), given, Direction.T2I, start.to(given), settings)[0]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(samples.double(), expected, rtol=0, atol=tolerance)


class Recorder(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("solver", "operation", "times"),
    [("euler", "step", 1), ("ab2", "ab2", 1), ("midpoint", "stage", 2), ("rk4", "stage", 4)],
)
@pytest.mark.parametrize("guidance", [0.0, 3.0])
def test_an_evaluation_is_followed_in_one_pass(flow, solver, operation, times, guidance, monkeypatch):
    """One fused operation for each evaluation of the network; no projection, sum or public check beside it."""
    flow, text, steps = flow.float(), noise.sample_uniform(3, 7), 6
    settings = gf.SamplingSettings(n_samples=4, n_steps=steps, guidance=guidance, solver=solver)
    start = sampling.StartingPoints.draw(settings, flow.flow_dims, Direction.T2I, seeded())
    for module, name in ((geometry, "tangent_part"), (gf.ops, "tangent_step")):
        monkeypatch.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} is called"))
    with Recorder() as recorder:
        sampling.sample_conditional(flow, text, Direction.T2I, start, settings)
    fused = {name: count for name, count in recorder.seen.items() if name.startswith("geoflow::tangent")}
    assert fused == {f"geoflow::tangent_{operation}": times * steps}
    assert not recorder.seen["aten::sum"]
    assert not recorder.seen["aten::linalg_vector_norm"]  # queries were checked by the public call


def test_joint_samples_are_followed_in_one_pass(flow):
    with Recorder() as recorder:
        gf.sample(flow.float(), n_samples=4, n_steps=6)
    assert recorder.seen["geoflow::tangent_step"] == 12  # two streams
    assert not recorder.seen["aten::sum"]


def test_samples_do_not_depend_on_how_queries_are_batched(flow, monkeypatch):
    image = noise.sample_uniform(9, 10, dtype=torch.float64)
    _, whole = gf.sample(flow, image=image, n_samples=5, n_steps=4, generator=seeded())
    monkeypatch.setattr(sampling, "ROWS_AT_ONCE", 23)
    _, pieces = gf.sample(flow, image=image, n_samples=5, n_steps=4, generator=seeded())
    torch.testing.assert_close(whole, pieces)
    _, alone = gf.sample(flow, image=image[4:5], n_samples=5, n_steps=4, generator=seeded())
    torch.testing.assert_close(whole[4:5], alone)


def test_joint_samples_repeat_have_unit_norm_and_leave_the_mode_alone(flow):
    flow.train()
    image, text = gf.sample(flow, n_samples=6, n_steps=3, generator=seeded())
    again = gf.sample(flow, n_samples=6, n_steps=3, generator=seeded())
    assert image.shape == (6, 10)
    assert text.shape == (6, 7)
    assert torch.equal(image, again[0])
    assert flow.training
    torch.testing.assert_close(image.norm(dim=1), torch.ones(6, dtype=torch.float64))
    assert gf.sample(flow, text=torch.empty(0, 7, dtype=torch.float64), n_samples=4)[0].shape == (0, 4, 10)


def test_a_flow_with_preprocessing_returns_embeddings():
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(10, 7, hidden=16, depth=1, heads=2, centre=True, pca_dim=4)).eval()
    image, _ = gf.sample(flow, text=noise.sample_uniform(2, 7), n_samples=3, n_steps=2, generator=seeded())
    assert image.shape == (2, 3, 10)
    torch.testing.assert_close(image.norm(dim=-1), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_samples": 0}, "n_samples"),
        ({"n_steps": 0}, "n_steps"),
        ({"guidance": -1.0}, "guidance"),
        ({"guidance": math.nan}, "guidance"),
        ({"solver": "heun"}, "solver"),
        ({"text": torch.ones(2, 7, dtype=torch.float64)}, "text row 0 has norm"),
        ({"text": torch.ones(7, dtype=torch.float64)}, r"\[Q, d\]"),
        ({"image": noise.sample_uniform(2, 10)}, "not both"),
    ],
)
def test_bad_input_is_refused(flow, change, words):
    arguments = {"text": noise.sample_uniform(2, 7, dtype=torch.float64), **change}
    with pytest.raises(ValueError, match=words):
        gf.sample(flow, **arguments)


def test_keywords_override_settings_and_settings_override_defaults(flow):
    text = noise.sample_uniform(2, 7, dtype=torch.float64)
    settings = gf.SamplingSettings(n_samples=3, n_steps=4, guidance=1.0, solver="ab2", grid="late", noise="orthogonal")
    whole = gf.sample(flow, text=text, settings=settings, generator=seeded())[0]
    assert whole.shape == (2, 3, 10)
    keywords = {"n_samples": 3, "n_steps": 4, "guidance": 1.0, "solver": "ab2"}
    rest = gf.SamplingSettings(grid="late", noise="orthogonal")
    assert torch.equal(gf.sample(flow, text=text, generator=seeded(), settings=rest, **keywords)[0], whole)
    with pytest.raises(TypeError, match=r"sample\(\) got an unexpected keyword argument 'grid'"):
        gf.sample(flow, text=text, grid="late")
    with pytest.raises(TypeError, match="settings must be SamplingSettings, got dict"):
        gf.sample(flow, text=text, settings={"n_steps": 4})


@pytest.mark.parametrize("change", [{"grid": "odd"}, {"noise": "pink"}])
def test_bad_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        gf.SamplingSettings(**change)


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        gf.FAST_SAMPLING.n_steps = 3
