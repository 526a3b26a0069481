"""Every operation gives the same result whatever torch's default device and default dtype are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from geoflow_fast import ops
from tests.samples import unit

ROWS, WIDTH, ITEMS = 12, 6, 40


def calls() -> dict[str, Callable[[str], object]]:
    """Each operation on fixed inputs, as a function of the backend."""
    x, y, z, w = (unit(ROWS, WIDTH, seed=seed) for seed in range(4))
    directions = torch.arange(ROWS).to(torch.int8) % 3
    times = torch.linspace(0, 1, ROWS)
    samples, gallery = unit(3, 5, WIDTH), unit(ITEMS, WIDTH, seed=9)
    bias = torch.linspace(-1, 1, ITEMS)
    return {
        "adaln": lambda b: ops.adaln(x, y[:1], z[:1], backend=b),
        "swiglu": lambda b: ops.swiglu(x, y, backend=b),
        "gate_residual": lambda b: ops.gate_residual(x, y, z, w[:1], backend=b),
        "flow_loss": lambda b: ops.flow_loss(x, y, z, w, y, z, directions, backend=b),
        "keep_mask": lambda b: ops.keep_mask((ROWS, WIDTH), 0.3, backend=b),
        "masked_interpolant": lambda b: ops.masked_interpolant(x, y, z, w, times, directions, backend=b),
        "tangent_step": lambda b: ops.tangent_step(x, y, 0.3, v_free=z, guidance=2.0, backend=b),
        "gallery_posterior": lambda b: ops.gallery_posterior(samples, gallery, 9.0, 4, b, item_bias=bias),
        "sinkhorn": lambda b: ops.sinkhorn(x @ y.T, 0.02, backend=b),
        "ot_assign": lambda b: ops.ot_assign(x, y, z, w, eps=0.2, backend=b),
        "ot_assign by drawing": lambda b: ops.ot_assign(x, y, z, w, eps=0.2, assignment="sample", backend=b),
        "exact assignment": lambda b: ops.ot_assign(x, y, z, w, assignment="exact", backend=b),
        "c2ot": lambda b: ops.couple(x, y, z, w, coupling="c2ot", direction="i2t", backend=b),
    }


CALLS = calls()


def tensors_of(result: object) -> Iterator[Tensor]:
    """The tensors among a result: itself, its items or its fields."""
    if isinstance(result, Tensor):
        yield result
    else:
        for part in result if isinstance(result, tuple) else vars(result).values():
            if isinstance(part, Tensor):
                yield part


@pytest.fixture(params=["meta", "float64"])
def foreign_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """A function that changes a default of torch's; it is changed back when the test ends."""

    def change() -> None:
        if request.param == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)

    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_defaults(name, backend, foreign_default):
    torch.manual_seed(3)
    expected = list(tensors_of(CALLS[name](backend)))
    foreign_default()
    torch.manual_seed(3)
    result = list(tensors_of(CALLS[name](backend)))
    assert len(result) == len(expected) > 0
    for got, wanted in zip(result, expected):
        assert got.dtype == wanted.dtype
        assert got.device == wanted.device
        assert torch.equal(got, wanted)


def test_gradients_do_not_depend_on_defaults(foreign_default):
    leaves = [unit(ROWS, WIDTH, seed=seed).requires_grad_() for seed in range(3)]
    scale = torch.ones(WIDTH, requires_grad=True)
    weight = unit(ROWS, WIDTH, seed=7)

    def gradients() -> tuple[Tensor, ...]:
        x = ops.adaln(leaves[0], scale, scale)
        out = ops.gate_residual(x, leaves[1], ops.swiglu(leaves[1], leaves[2]), scale)
        return torch.autograd.grad((out * weight).sum(), (*leaves, scale))

    expected = gradients()
    foreign_default()
    for got, wanted in zip(gradients(), expected):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
