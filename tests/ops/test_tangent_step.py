"""The fused solver step: it is exp_map after projection, stays on the sphere, and serves guidance."""

from __future__ import annotations

import math

import pytest
import torch

from geoflow_fast import geometry, noise, ops

OP = "tangent_step"
SHAPES = [(1, 2), (7, 3), (33, 129), (2, 1023)]


def state(rows, width, dtype=torch.float64):
    x = noise.sample_uniform(rows, width, dtype=dtype)
    return x, *(torch.randn(rows, width, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("h", [0.1, -0.02, 0.0])
def test_it_is_the_exponential_map_of_the_projected_velocity(shape, h, backend):
    x, v, _ = state(*shape)
    expected = geometry.exp_map(x, h * geometry.project_tangent(x, v))
    torch.testing.assert_close(ops.tangent_step(x, v, h, backend=backend), expected, rtol=0, atol=1e-12)


def test_guidance_extrapolates_before_the_projection(backend):
    x, v, v_free = state(5, 17)
    together = ops.tangent_step(x, v, 0.1, v_free=v_free, guidance=3.0, backend=backend)
    torch.testing.assert_close(together, ops.tangent_step(x, v + 3 * (v - v_free), 0.1, backend=backend))


def test_renormalising_agrees_to_first_order(backend):
    x, v, _ = state(9, 33)
    gaps = []
    for h in (1e-2, 1e-3):
        straight = ops.tangent_step(x, v, h, retraction="renormalise", backend=backend)
        gaps.append((straight - ops.tangent_step(x, v, h, backend=backend)).norm(dim=-1).max().item())
    assert gaps[1] < gaps[0] / 500  # the difference is of third order in h


@pytest.mark.parametrize("retraction", ["exp", "renormalise"])
def test_a_long_path_stays_on_the_sphere(retraction, backend):
    x, v, _ = state(4, 65, torch.float32)
    for _ in range(200):
        x = ops.tangent_step(x, v, 0.7, retraction=retraction, backend=backend)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(4), rtol=0, atol=1e-6)


def test_half_a_turn_reaches_the_antipode(backend):
    x, v, _ = state(3, 5)
    v = geometry.project_tangent(x, v)
    v = v / v.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(ops.tangent_step(x, v, math.pi, backend=backend), -x, rtol=0, atol=1e-12)


def test_gradients_come_from_the_reference():
    x, v, v_free = state(3, 4)
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
