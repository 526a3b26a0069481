"""The network's hand-written forward mode against torch.func.jvp and autograd, and the work it leaves out."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import geoflow_fast as gf
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.flow.inference import NETWORKS_KEPT, InferenceNetwork, Solve
from geoflow_fast.geometry import project_tangent
from geoflow_fast.noise import sample_uniform
from tests.samples import randomised

TIME = 0.7


def random_flow(dtype: torch.dtype = torch.float32, **changes) -> gf.GeoFlow:
    """A network whose every part matters."""
    torch.manual_seed(0)
    shape = {"hidden": 32, "depth": 3, "heads": 2, "layer_scale": 0.5} | changes
    return randomised(gf.GeoFlow(gf.GeoFlowConfig(10, 7, **shape)).to(dtype), 1 / math.sqrt(32))


def random_input(flow: gf.GeoFlow, rows: int = 5, probes: int = 2):
    dtype = next(flow.parameters()).dtype
    points = tuple(sample_uniform(rows, d, dtype=dtype) for d in flow.config.flow_dims)
    tangents = tuple(torch.randn(probes, rows, d, dtype=dtype) for d in flow.config.flow_dims)
    return points, tangents


def all_solves(flow: gf.GeoFlow, points, tangents) -> list[Solve]:
    image, text = points
    d_image, d_text = tangents
    return [
        Solve(Direction.JOINT, points, tangents),
        Solve(Direction.I2T, (flow.encoders[0](image), text), (d_image[:0], d_text)),
        Solve(Direction.T2I, (image, flow.encoders[1](text)), (d_image, d_text[:0])),
        Solve(Direction.JOINT, points, tangents, paired=True),
    ]


def raw_output(flow: gf.GeoFlow, image, text, direction: Direction):
    modulation = flow.modulations(torch.tensor([TIME], dtype=image.dtype), direction)[0].unbind()
    return flow._network(image, text, modulation, direction.counts(len(image)))


def tangent_of(solve: Solve, stream: int, k: int, tangents):
    """The k-th tangent that moves a stream, as a pair; unless tangents are paired it is zero in the other stream."""
    return tuple(x[k] if solve.paired or s == stream else torch.zeros_like(x[k]) for s, x in enumerate(tangents))


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value - truth).norm() / truth.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@torch.no_grad()
def test_parity_with_torch_func_jvp(dtype, tolerance):
    flow = random_flow(dtype)
    points, tangents = random_input(flow)
    network = InferenceNetwork(flow, DIRECTIONS, [0.2, TIME])
    solves = all_solves(flow, points, tangents)
    outputs = network(TIME, solves)
    assert set(outputs) == {(n, stream) for n, solve in enumerate(solves) for stream in solve.direction.generated}
    for (number, stream), (y, dy) in outputs.items():
        solve = solves[number]
        for k in range(len(dy)):
            truth, d_truth = torch.func.jvp(
                lambda a, b, d=solve.direction, s=stream: raw_output(flow, a, b, d)[s],
                points,
                tangent_of(solve, stream, k, tangents),
            )
            assert relative(y, truth) < tolerance
            assert relative(dy[k], d_truth) < tolerance


def test_parity_with_autograd():
    """<e, J e> of each generated stream equals that of the vector-Jacobian product."""
    flow = random_flow()
    points, tangents = random_input(flow)
    with torch.no_grad():
        network = InferenceNetwork(flow, DIRECTIONS, [TIME])
        solves = all_solves(flow, points, tangents)[:3]
        outputs = network(TIME, solves)
    for (number, stream), (_, dy) in outputs.items():
        inputs = [x.clone().requires_grad_() for x in points]
        out = raw_output(flow, *inputs, solves[number].direction)[stream]
        for k, probe in enumerate(tangents[stream]):
            (pulled,) = torch.autograd.grad(out, inputs[stream], probe, retain_graph=True)
            torch.testing.assert_close((dy[k] * probe).sum(1), (pulled * probe).sum(1), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_buffers_carry_nothing_from_call_to_call():
    """After larger solves, and with all buffers filled with NaN, the result is the same to the bit."""
    flow = random_flow()
    network = InferenceNetwork(flow, DIRECTIONS, [TIME])
    small, large = (all_solves(flow, *random_input(flow, rows, probes)) for rows, probes in ((5, 2), (9, 3)))
    first = {key: (y.clone(), dy.clone()) for key, (y, dy) in network(TIME, small).items()}
    network(TIME, large)
    for buffer in network._buffers.values():
        buffer.fill_(math.nan)
    for key, dual in network(TIME, small).items():
        torch.testing.assert_close(dual, first[key], rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "probes"), [(0, 2), (1, 0), (7, 0), (129, 1)])
@torch.no_grad()
def test_sizes(rows, probes):
    flow = random_flow()
    points, tangents = random_input(flow, rows, probes)
    network = InferenceNetwork(flow, DIRECTIONS, [TIME])
    solves = all_solves(flow, points, tangents)
    for (number, stream), (y, dy) in network(TIME, solves).items():
        assert dy.shape == (probes, rows, flow.config.flow_dims[stream])
        truth = raw_output(flow, *points, solves[number].direction)[stream]
        torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_no_output_needs_is_not_computed():
    """The multiplications of a pass with one tangent per stream are as many as counted by hand."""
    flow = random_flow(hidden=32, depth=2, heads=2)
    c, rows = flow.config, 3
    points, tangents = random_input(flow, rows, 1)
    network = InferenceNetwork(flow, DIRECTIONS, [TIME])
    cross, forward = 2 * c.hidden * c.hidden // c.heads, 3 * c.inner * c.hidden
    both_streams = 2 * (2 * cross + forward)  # two cross-gates and the first feed-forward
    ends = [forward + 2 * c.hidden * d for d in c.flow_dims]  # last feed-forward, encoder and decoder of a stream
    expected = {
        ("i2t", False): 2 * (both_streams + ends[1]),
        ("t2i", False): 2 * (both_streams + ends[0]),
        ("joint", True): 2 * (both_streams + sum(ends)),
        ("joint", False): 3 * both_streams + 2 * sum(ends),  # each of two tangents ends in its own stream
    }
    for solve in all_solves(flow, points, tangents):
        with FlopCounterMode(display=False) as counter:
            network(TIME, [solve])
        assert counter.get_total_flops() == 2 * rows * expected[solve.direction, solve.paired]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("anchored", [True, False])
def test_a_prepared_velocity_is_the_velocity(direction, rows, anchored):
    """Before its tangent projection; a given stream has no rows."""
    flow = random_flow(torch.float64, anchored=anchored)
    if anchored:
        flow.anchor.image_map.normal_()
        flow.anchor.text_map.normal_()
        flow.anchor.shares.copy_(torch.tensor([0.3, 0.6]))
    points, _ = random_input(flow, rows)
    with flow.velocity_at([0.2, TIME], direction) as velocity:
        prepared = velocity(*points, TIME)
    assert not any(v.requires_grad for v in prepared)
    for stream, (v, truth, x) in enumerate(zip(prepared, flow.velocity(*points, TIME, direction), points)):
        if stream in direction.generated:
            torch.testing.assert_close(project_tangent(x, v), truth)
        else:
            assert v.shape == (0, x.shape[1])


# ---- what a flow keeps between calls -------------------------------------------------------------------------------


def kept(flow: gf.GeoFlow) -> list[InferenceNetwork]:
    return [network for _, network in flow._prepared._idle]


def test_a_flow_in_eval_mode_keeps_what_it_prepared():
    flow = random_flow(torch.float32).eval()
    for _ in range(2):
        with flow.prepared((Direction.T2I,), [0.2, TIME]) as first:
            assert kept(flow) == []
    assert kept(flow) == [first]
    with flow.prepared((Direction.T2I,), [0.2, TIME]) as own, flow.prepared((Direction.T2I,), [0.2, TIME]) as other:
        assert own is first
        assert other is not first  # nobody else writes to its buffers meanwhile
    for number in range(2 * NETWORKS_KEPT):
        with flow.prepared((Direction.I2T,), [number / 100]):
            pass
    assert len(kept(flow)) == NETWORKS_KEPT
    for copied in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        assert kept(copied) == []


def change_in_place(flow: gf.GeoFlow) -> None:
    with torch.no_grad():
        flow.decoders[0][1].weight.mul_(2)
    flow.refresh()


def train_a_step(flow: gf.GeoFlow) -> None:
    change_in_place(flow.train())
    flow.eval()


def load_others(flow: gf.GeoFlow) -> None:
    flow.load_state_dict(
        {name: 2 * x if name.startswith("decoders.0.1") else x for name, x in flow.state_dict().items()}
    )


def halve(flow: gf.GeoFlow) -> None:
    flow.to(torch.bfloat16).to(torch.float32)


@pytest.mark.parametrize("change", [change_in_place, train_a_step, load_others, halve])
def test_weights_that_change_are_seen(change):
    flow, text = random_flow(torch.float32).eval(), sample_uniform(3, 7)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        seed = torch.Generator().manual_seed(0)
        image, _ = gf.sample(flow, text=text, n_samples=2, n_steps=2, generator=seed)
        return image, gf.log_density(flow, image[:, 0], text, n_steps=2, generator=seed)

    before = run()
    assert all(torch.equal(a, b) for a, b in zip(before, run()))
    change(flow)
    after = run()
    assert not any(torch.equal(a, b) for a, b in zip(before, after))
    flow = copy.deepcopy(flow)  # which keeps nothing
    assert all(torch.equal(a, b) for a, b in zip(after, run()))


def test_weights_that_are_loaded_in_part_are_seen():
    flow, text = random_flow(torch.float32).eval(), sample_uniform(3, 7)

    def run() -> torch.Tensor:
        return gf.sample(flow, text=text, n_samples=2, n_steps=2, generator=torch.Generator().manual_seed(0))[0]

    before = run()
    others = {name: 2 * x for name, x in flow.state_dict().items() if name.startswith(("decoders", "modulation"))}
    with pytest.raises(RuntimeError, match="Missing key"):
        flow.load_state_dict(others)
    assert not torch.equal(run(), before)
    assert torch.equal(run(), (flow.refresh(), run())[1])


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_what_is_kept_does_not_depend_on_the_context_that_made_it(context, precision):
    settings = gf.SamplingSettings(n_samples=2, n_steps=2, precision=precision)
    flow, text = random_flow(torch.float32).eval(), sample_uniform(3, 7)

    def run() -> torch.Tensor:
        return gf.sample(flow, text=text, generator=torch.Generator().manual_seed(0), settings=settings)[0]

    alone = run()
    flow.refresh()
    for _ in range(2):
        with context():
            within = run()
        assert torch.equal(run(), alone)
    with context():
        assert torch.equal(run(), within)


def test_weights_that_change_during_a_call_are_not_kept():
    flow = random_flow(torch.float32).eval()
    with flow.prepared((Direction.T2I,), [TIME]):
        flow.refresh()
    assert kept(flow) == []


def test_a_flow_in_training_mode_keeps_nothing():
    flow = random_flow(torch.float32).train()
    with flow.prepared((Direction.T2I,), [TIME]):
        pass
    assert kept(flow) == []


def test_threads_share_a_flow():
    flow, text = random_flow(torch.float32).eval(), sample_uniform(40, 7)

    def run(rows):
        return gf.sample(flow, text=text[rows], n_samples=3, n_steps=4, generator=torch.Generator().manual_seed(1))[0]

    blocks = [slice(k, k + 2) for k in range(0, 40, 2)]
    alone = [run(rows) for rows in blocks]
    with ThreadPoolExecutor(4) as pool:
        for expected, actual in zip(alone, pool.map(run, blocks)):
            torch.testing.assert_close(actual, expected)
