"""The fused solver steps: they are exp_map after projection, stay on the sphere, and serve guidance, stages and AB2."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import geometry, noise, ops
from geoflow_fast.ops.tangent_step import (
    tangent_ab2_reference,
    tangent_ab2_rows,
    tangent_stage_reference,
    tangent_stage_rows,
    tangent_step_reference,
)

OP = "tangent_step"
SHAPES = [(1, 2), (7, 3), (33, 129), (2, 1023)]
SIZES = [(1, 7), (7, 2), (7, 129), (129, 7), (3, 1023)]
STEPS = [0.1, -0.02, 0.0, 1e-6, -40.0, 1e4]
"""From far below rounding to thousands of turns, for velocities of length one or so."""


def state(rows, width, dtype=torch.float64):
    x = noise.sample_uniform(rows, width, dtype=dtype)
    return x, *(torch.randn(rows, width, dtype=dtype) / width**0.5 for _ in range(4))


def in_double(*arguments):
    return [x.double() if isinstance(x, Tensor) else x for x in arguments]


def assert_close(actual: Tensor, truth: Tensor, backend: str, turn: float = 0.0) -> None:
    """Compiled steps are rounded once. Plain torch knows the angle of a turn no better than float32 does."""
    bound = 1.2e-7 if backend == "cpu" else 2e-6 * (1 + abs(turn))
    assert actual.dtype == torch.float32
    assert float((actual.double() - truth).abs().max()) <= bound * max(1.0, float(truth.abs().max()))


def test_the_compiled_steps_are_listed():
    assert gf.backends()[OP]["cpu"] == "available"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("h", [0.1, -0.02, 0.0])
def test_it_is_the_exponential_map_of_the_projected_velocity(shape, h):
    x, v, *_ = state(*shape)
    expected = geometry.exp_map(x, h * geometry.project_tangent(x, v))
    torch.testing.assert_close(ops.tangent_step(x, v, h), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("guidance", [None, 0.0, 3.0])
@pytest.mark.parametrize("retraction", ["exp", "renormalise"])
def test_steps_agree_with_float64(size, guidance, retraction, backend):
    x, v, v_free, *_ = state(*size, torch.float32)
    free = None if guidance is None else v_free
    for h in STEPS:
        y = ops.tangent_step(x, v, h, v_free=free, guidance=guidance or 0.0, retraction=retraction, backend=backend)
        truth = tangent_step_reference(*in_double(x, v, h, free, guidance or 0.0, retraction == "renormalise"))
        assert_close(y, truth, backend, 0.0 if retraction == "renormalise" else 10 * h)
        assert float((y.double().norm(dim=1) - 1).abs().max()) <= (6.1e-8 if backend == "cpu" else 3e-7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("guided", "adds"), [(True, True), (True, False), (False, True), (False, False)])
def test_stages_agree_with_float64(size, guided, adds, backend):
    at, x, v, v_free, total = state(*size, torch.float32)
    inputs = x, at, v, -0.7, v_free if guided else None, 3.0, total if adds else None, 0.3
    results, truths = tangent_stage_rows(*inputs, backend), tangent_stage_reference(*in_double(*inputs))
    assert_close(results[0], truths[0], backend)
    if adds:
        assert_close(results[1], truths[1], backend)
    else:
        assert results[1].shape == truths[1].shape == (0,)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("guided", "begun"), [(True, True), (True, False), (False, True), (False, False)])
def test_two_step_steps_agree_with_float64(size, guided, begun, backend):
    x, v, v_free, old, _ = state(*size, torch.float32)
    for h in STEPS:
        inputs = x, v, h, v_free if guided else None, 3.0, old if begun else None, 0.6
        results, truths = tangent_ab2_rows(*inputs, backend), tangent_ab2_reference(*in_double(*inputs))
        for result, truth in zip(results, truths, strict=True):
            assert_close(result, truth, backend, 30 * h)


@pytest.mark.parametrize("operation", ["tangent_step", "tangent_stage", "tangent_ab2"])
def test_strided_and_empty_rows(operation, backend):
    """Transposed, with gaps between rows, every other row, one row for all; and none."""
    run = getattr(torch.ops.geoflow, operation).default

    def arguments(x, at, v, free, old):
        return {
            "tangent_step": (x, v, 0.3, free, 2.0, False),
            "tangent_stage": (x, at, v, 0.3, free, 2.0, old, 0.1),
            "tangent_ab2": (x, v, 0.3, free, 2.0, old, 0.6),
        }[operation]

    x, v, free, old, _ = state(6, 129, torch.float32)
    wide = torch.full((6, 140), math.nan)
    wide[:, :129] = free
    strided = x.T.contiguous().T, x.repeat_interleave(2, 0)[::2], v[:1].expand(6, -1), wide[:, :129], old.flip(0)
    assert not strided[0].is_contiguous()
    whole = [part.contiguous() for part in strided]
    for result, expected in zip(run(*arguments(*strided), backend), run(*arguments(*whole), backend), strict=True):
        torch.testing.assert_close(result, expected)
        assert result.is_contiguous()
    nothing = run(*arguments(*(torch.empty(0, 5) for _ in range(5))), backend)
    assert all(part.shape == (0, 5) for part in ([nothing] if operation == "tangent_step" else nothing))


@pytest.mark.parametrize("retraction", ["exp", "renormalise"])
def test_points_without_a_velocity_stay(retraction, backend):
    """The velocity is zero, or points off the sphere, which the projection removes."""
    x, *_ = state(7, 129, torch.float32)
    for v in (torch.zeros_like(x), 2 * x):
        for h in (0.3, -1e3):
            y = ops.tangent_step(x, v, h, retraction=retraction, backend=backend)
            assert_close(y, x.double(), backend, 1e-1 * h)


def test_guidance_extrapolates_before_the_projection(backend):
    x, v, v_free, *_ = state(5, 17, torch.float32)
    together = ops.tangent_step(x, v, 0.1, v_free=v_free, guidance=3.0, backend=backend)
    torch.testing.assert_close(together, ops.tangent_step(x, v + 3 * (v - v_free), 0.1, backend=backend))


def test_renormalising_agrees_to_first_order():
    x, v, *_ = state(9, 33)
    v = v * 33**0.5
    gaps = []
    for h in (1e-2, 1e-3):
        straight = ops.tangent_step(x, v, h, retraction="renormalise")
        gaps.append((straight - ops.tangent_step(x, v, h)).norm(dim=-1).max().item())
    assert gaps[1] < gaps[0] / 500  # the difference is of third order in h


@pytest.mark.parametrize("retraction", ["exp", "renormalise"])
def test_a_long_path_stays_on_the_sphere(retraction, backend):
    x, v, *_ = state(4, 65, torch.float32)
    for _ in range(200):
        x = ops.tangent_step(x, v, 5.6, retraction=retraction, backend=backend)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(4), rtol=0, atol=1e-6)


def test_half_a_turn_reaches_the_antipode_and_a_whole_one_returns(backend):
    x, v, *_ = state(3, 5, torch.float32)
    v = geometry.project_tangent(*in_double(x, v))
    v = (v / v.norm(dim=-1, keepdim=True)).float()
    for h, end in ((math.pi, -x), (-math.pi, -x), (2 * math.pi, x)):
        torch.testing.assert_close(ops.tangent_step(x, v, h, backend=backend), end, rtol=0, atol=2e-6)


def test_a_two_step_step_carries_its_velocity_by_parallel_transport():
    x, v, _, old, _ = state(9, 6)
    u, old = geometry.project_tangent(x, v), geometry.project_tangent(x, old)
    y, carried = tangent_ab2_reference(x, v, 0.8, None, 0.0, old, 0.6)
    torch.testing.assert_close(y, geometry.exp_map(x, 0.8 * (u + 0.6 * (u - old))))
    torch.testing.assert_close(carried, geometry.parallel_transport(x, y, u))


def test_gradients_come_from_the_reference():
    x, v, v_free, *_ = state(3, 4)
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: ops.tangent_step(x, v, 0.3, v_free=v_free, guidance=1.0), (v,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": torch.zeros(3, 4)}, "v must have the shape"),
        ({"v": torch.zeros(3, 5, dtype=torch.float64)}, "v is torch.float64"),
        ({"h": float("nan")}, "finite"),
        ({"retraction": "jump"}, "retraction must be one of"),
        ({"backend": "cuda"}, "cuda"),
        ({"x": torch.zeros(3, 5, dtype=torch.float16)}, "float32 and float64"),
    ],
)
def test_errors_name_the_argument(change, words):
    arguments = {"x": torch.eye(5)[:3], "v": torch.zeros(3, 5), "h": 0.1, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        ops.tangent_step(**arguments)
