"""The border of compiled code: what a bound function is given is checked there, and an error names the argument."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.ops import extension

pytestmark = pytest.mark.skipif(extension.missing() is not None, reason="needs the compiled extension")
Case = tuple[dict[str, Any], tuple[str, ...]]


def cases() -> dict[str, Case]:
    """Good arguments of every bound function of tensors, and the names of those that may be None."""
    x, shift, scale = torch.randn(15, 4), torch.randn(5, 4), torch.randn(5, 4)  # which 4 and 6 rows do not divide
    branch = {"gate": x + 1, "value": x + 2, "layer_scale": scale, "keep": x > 0, "dropout": 0.5}
    streams = {f"{part}{stream}": torch.randn(15, 4) for part in ("v_", "target_", "") for stream in ("image", "text")}
    streams["direction"] = torch.arange(15, dtype=torch.int8) % 3
    step = {"x": x, "v": x + 1, "h": 0.1, "v_free": x + 2, "guidance": 2.0}
    points = {name: functional.normalize(torch.randn(15, 4), dim=-1) for name in ("image0", "text0", "image1", "text1")}
    points |= {"t": torch.rand(15), "direction": streams["direction"], "drop": x[:, 0] > 0}
    points |= {"check": True}
    scored = {"samples": torch.randn(3, 5, 4), "gallery": x, "kappa": 9.0}
    scored |= {"item_bias": torch.randn(15), "sample_bias": torch.randn(3, 5)}
    return {
        "adaln": ({"x": x, "shift": shift, "scale": scale, "eps": 1e-6}, ()),
        "adaln_backward": ({"grad": x, "x": x + 1, "scale": scale, "eps": 1e-6}, ()),
        "swiglu": ({"gate": x, "value": x + 1}, ("value",)),
        "swiglu_backward": ({"grad": x, "gate": x - 1, "value": x + 1}, ("value",)),
        "gate_residual": (branch | {"residual": x}, ("gate", "keep")),
        "gate_residual_backward": (branch | {"grad": x}, ("gate", "keep")),
        "flow_loss": (streams, ()),
        "flow_loss_backward": (streams | {"grad": torch.rand(15)}, ()),
        "tangent_step": (step | {"renormalise": False}, ("v_free",)),
        "tangent_stage": (step | {"at": x, "total": x + 3, "weight": 0.3}, ("v_free", "total")),
        "tangent_ab2": (step | {"carried": x + 3, "share": 0.5}, ("v_free", "carried")),
        "gallery_posterior": (scored | {"top_k": 3, "precision": "float32"}, ("item_bias", "sample_bias")),
        "gallery_scores": (scored, ("item_bias", "sample_bias")),
        "gallery_search": ({"queries": x, "gallery": x + 1, "top_k": 3}, ()),
        "masked_interpolant": (points, ("drop",)),
    }


CASES = cases()
WITHOUT_GAPS = ("masked_interpolant", "gallery_posterior", "gallery_scores", "gallery_search")
"""Functions that take whole matrices."""
each = pytest.mark.parametrize("name", sorted(CASES))


def call(name: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    results = getattr(extension.loaded(), name)(**arguments)
    return results if isinstance(results, tuple) else (results,)


@pytest.fixture(params=["capsule", "without the capsule"])
def _exchange(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors cross by torch's exchange table, or as older releases of torch let them."""
    if request.param == "capsule" and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange table")
    if request.param == "without the capsule":
        extension.connect(extension.loaded(), exchange=None, alone=0)
    yield
    extension.connect(extension.loaded(), alone=0)  # as conftest.py has it


def floats(arguments: dict[str, Any]) -> list[str]:
    return [name for name, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()]


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "a number": lambda _: 3.0,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "without a storage": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "complex": lambda x: x.to(torch.complex64),
    "one column more": lambda x: torch.cat((x, x[..., :1]), -1),
    "one row less": lambda x: x[:-1],
    "one row more": lambda x: torch.cat((x, x[:1])),
    "no dimension": lambda x: x.flatten()[0],
}


@pytest.mark.usefixtures("_exchange")
@pytest.mark.parametrize("wrong", sorted(WRONG))
@each
def test_an_argument_that_does_not_fit_is_named(name, wrong):
    if name == "gallery_search" and "row" in wrong:
        pytest.skip("there may be any number of queries, and of items")
    good, _ = CASES[name]
    tensors = [key for key, x in good.items() if isinstance(x, Tensor)]
    for key in tensors:
        with pytest.raises((TypeError, ValueError)) as error:
            call(name, {**good, key: WRONG[wrong](good[key])})
        words = str(error.value)
        assert any(other in words for other in (tensors if wrong.startswith(("one", "no")) else [key])), words
        assert len(words) < 200  # no backtrace of C++
        assert "\n" not in words


@pytest.mark.usefixtures("_exchange")
@each
def test_another_type_or_rows_with_gaps_are_left_to_torch(name):
    """NotServed says so: an operation goes on to torch then."""
    good, _ = CASES[name]
    for key in floats(good):
        x = good[key]
        gaps = (torch.stack((x, x), -1)[..., 0], x.T.contiguous().T) if x.dim() == 2 else ()
        for other in (x.double(), *(() if key == "gallery" else (x.half(),)), *gaps):
            words = "expected torch.float" if other.dtype == torch.float64 else key
            with pytest.raises(extension.loaded().NotServed, match=words):
                call(name, {**good, key: other})


@pytest.mark.usefixtures("_exchange")
@each
def test_rows_may_stand_apart(name):
    """A stride of the rows, of zero or of more than the width, and rows that begin anywhere; results do not change."""
    good, _ = CASES[name]
    wanted = call(name, good)
    for key in floats(good):
        x = good[key]
        width = x.shape[-1]
        inner = torch.full((*x.shape[:-1], width + 3), torch.nan)[..., 1 : 1 + width] if x.dim() > 1 else x.clone()
        inner.copy_(x)
        if name in WITHOUT_GAPS and x.dim() > 1:
            with pytest.raises(extension.loaded().NotServed, match=f"{key} must be contiguous"):
                call(name, {**good, key: inner})
            continue
        for got, right in zip(call(name, {**good, key: inner}), wanted):
            assert torch.equal(got, right)


@pytest.mark.usefixtures("_exchange")
@each
def test_missing_arguments_are_errors(name):
    good, optional = CASES[name]
    for key, x in good.items():
        if isinstance(x, Tensor) and key not in optional:
            with pytest.raises(TypeError, match=f"{key} must be a torch.Tensor, not NoneType"):
                call(name, {**good, key: None})
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call(name, {other: value for other, value in good.items() if other != key})


@pytest.mark.usefixtures("_exchange")
@each
def test_gradients_and_subclasses_are_values_here(name):
    """Below the dispatcher only values are left; what asks for a gradient was taken care of above."""
    good, _ = CASES[name]
    wanted = call(name, good)
    leaves = {k: x.clone().requires_grad_() if k in floats(good) else x for k, x in good.items()}
    for got, right in zip(call(name, leaves), wanted):
        assert torch.equal(got, right)
        assert not got.requires_grad


@pytest.mark.usefixtures("_exchange")
def test_codes_are_those_of_the_gallery():
    module, rows = extension.loaded(), torch.randn(20, 70)
    code, scale, error, largest = module.encode_rows(rows)
    assert code.dtype == torch.uint8
    assert code.shape == (20, module.code_stride(70))
    assert largest == pytest.approx(float(rows.norm(dim=1).max()))
    for wrong in (rows.double(), rows[:, ::2], rows.T, rows[:0], rows[0], rows.to("meta"), rows.numpy()):
        with pytest.raises((TypeError, ValueError), match="gallery"):
            module.encode_rows(wrong)
    if extension.missing_int8() is None:
        good = {"code": code, "scale": scale, "error": error}
        shared = {"queries": rows, "gallery": rows, "largest_norm": largest, "top_k": 1}
        for name, x in good.items():
            for wrong in (x[:-1], x.double(), torch.stack((x, x), -1)[..., 0], x.to("meta"), None):
                with pytest.raises((TypeError, ValueError), match=name):
                    module.search_codes(**shared, **{**good, name: wrong})


@pytest.mark.usefixtures("_exchange")
def test_results_own_their_memory_and_are_aligned():
    good, _ = CASES["adaln"]
    (result,) = call("adaln", good)
    assert result.data_ptr() % 64 == 0
    copy, shape, storage, gone = result.clone(), result.shape, result.untyped_storage(), weakref.ref(result)
    del result
    assert gone() is None
    for _ in range(50):
        call("adaln", good)
    assert torch.equal(torch.empty(0).set_(storage, 0, shape), copy)


@pytest.mark.usefixtures("_exchange")
def test_arguments_are_given_back():
    good, _ = CASES["adaln"]
    for key in floats(good):
        x = good[key].clone()
        before, seen = sys.getrefcount(x), weakref.ref(x)
        call("adaln", {**good, key: x})
        with pytest.raises(ValueError, match=r"width|one shape"):
            call("adaln", {**good, key: x[:, :2]})
        assert sys.getrefcount(x) == before
        del x
        assert seen() is None


@pytest.mark.usefixtures("_exchange")
def test_leading_dimensions_are_rows():
    x, shift, scale = (CASES["adaln"][0][key] for key in ("x", "shift", "scale"))
    adaln, unserved = extension.loaded().adaln, extension.loaded().NotServed
    flat = adaln(x, shift, scale, 1e-6)
    deep = adaln(x.view(5, 3, 1, 4), shift.view(1, 5, 4), scale.view(1, 5, 4), 1e-6)
    assert torch.equal(deep, flat.view(5, 3, 1, 4))
    assert torch.equal(adaln(x[0], shift[0], scale[0], 1e-6), adaln(x[:1], shift[:1], scale[:1], 1e-6)[0])
    with pytest.raises(unserved, match="x must have its rows at equal distances"):
        adaln(x.view(5, 3, 4).transpose(0, 1), shift, scale, 1e-6)
    assert adaln(x[:0], shift, scale, 1e-6).shape == (0, 4)
    with pytest.raises(ValueError, match="more than 8 dimensions"):
        adaln(x.view(*(1,) * 8, 15, 4), shift, scale, 1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.adaln(torch.ones(4, 3), torch.ones(2, 3), torch.ones(2, 1, 3), 1e-6), "one shape"),
        (lambda c: c.adaln(torch.ones(4, 3), torch.ones(3), torch.ones(3), float("nan")), "eps must be finite"),
        (lambda c: c.tangent_step(torch.ones(3), torch.ones(3), 0.1, None, 0.0, False), r"x must be \[B, d\]"),
        (
            lambda c: c.masked_interpolant(
                *(torch.ones(2, 1),) * 4, torch.ones(2), torch.zeros(2, dtype=torch.int8), None, True, 1e-3
            ),
            "image0 must be .* with d >= 2",
        ),
    ],
)
def test_the_border_refuses_what_the_checks_in_python_refuse(call, words):
    with pytest.raises(ValueError, match=words):
        call(extension.required())


def test_small_work_stays_in_the_calling_thread(monkeypatch):
    """Threads are asked for above the threshold alone, which follows the way in which they wait."""
    asked: list[int] = []
    monkeypatch.setattr(extension, "usable_threads", lambda: asked.append(1) or 2)
    for variable, value, small in (
        ("OMP_WAIT_POLICY", "active", extension.SMALL),
        ("OMP_WAIT_POLICY", "PASSIVE", extension.SMALL_WHEN_ASLEEP),
        ("GOMP_SPINCOUNT", "0", extension.SMALL_WHEN_ASLEEP),
    ):
        for other in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(variable, value)
        extension.connect(extension.loaded())
        for rows, wanted in ((small // 8, 0), (small // 8 + 1, 1)):
            asked.clear()
            extension.loaded().adaln(torch.zeros(rows, 8), torch.zeros(1, 8), torch.zeros(1, 8), 1e-6)
            assert len(asked) == wanted
    monkeypatch.undo()
    extension.connect(extension.loaded(), alone=0)


WITHOUT = """
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    torch.Tensor.__dlpack_c_exchange_api__ = None
from geoflow_fast import ops
x = torch.randn(4, 6)
assert torch.equal(ops.adaln(x, x, x, backend="cpu"), ops.adaln(x, x, x))
print("served")
"""


def test_a_torch_without_the_capsule_is_served():
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert result.stdout.strip() == "served", result.stderr
