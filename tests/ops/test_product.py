"""Products of float32 rows by the library that is faster on this processor: right whatever the strides, differentiable
like torch's own, and taken only where they pay."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.ops import dispatch, extension, product
from geoflow_fast.ops.product import product_into

pytestmark = pytest.mark.skipif(
    not product.has_onednn(), reason="this build of torch has no oneDNN product of float32 rows"
)
product_is_missing = product.missing_onednn.__wrapped__
LARGE = (300, 129, 257)
"""Rows, depth and columns from which oneDNN is asked."""


@pytest.fixture(params=["this processor", "wide"])
def processor(request, monkeypatch):
    """As it is here, and as on a processor whose width MKL does not use."""
    if request.param == "wide":
        monkeypatch.setattr(product, "missing_onednn", lambda: None)


def matrix(rows: int, columns: int, kind: str) -> torch.Tensor:
    if kind == "transposed":
        return torch.randn(columns, rows).T
    if kind == "a part":
        return torch.randn(rows, columns + 5)[:, 2:-3]
    if kind == "every other column":
        return torch.randn(rows, 2 * columns)[:, ::2]
    return torch.randn(rows, columns)


KINDS = ("whole", "transposed", "a part", "every other column")


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("shape", [LARGE, (1, 7, 5), (129, 1023, 128), (32, 64, 1024), (0, 64, 128)])
def test_products_are_right_whatever_the_strides(shape, left, right):
    rows, depth, columns = shape
    x, weight = matrix(rows, depth, left), matrix(depth, columns, right)
    expected = x.double() @ weight.double()
    torch.testing.assert_close(product.product(x, weight).double(), expected, atol=2e-4, rtol=1e-5)
    out = torch.full((rows, 2 * columns), torch.nan)[:, columns:]
    product_into(out, x, weight)
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.usefixtures("processor")
def test_batches_are_multiplied_one_by_one():
    rows, depth, columns = LARGE
    x, weight = torch.randn(2, rows, 2 * depth)[..., :depth], torch.randn(2, columns, depth).mT
    expected = x.double() @ weight.double()
    torch.testing.assert_close(product.product(x, weight).double(), expected, atol=2e-4, rtol=1e-5)
    out = torch.full((rows, 2, columns), torch.nan).transpose(0, 1)
    product_into(out, x, weight)
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_are_those_of_torch(batch):
    rows, depth, columns = LARGE
    x, weight = torch.randn(*batch, rows, depth), torch.randn(*batch, depth, columns)
    factor, again = torch.randn(*batch, rows, columns), torch.randn(*batch, rows, depth)

    def derivatives(multiply, dtype):
        a, b = (y.to(dtype).requires_grad_() for y in (x, weight))
        first = torch.autograd.grad((multiply(a, b) ** 2 * factor.to(dtype)).sum(), (a, b), create_graph=True)
        return [*first, *torch.autograd.grad((first[0] * again.to(dtype)).sum(), (a, b))]

    for ours, exact in zip(derivatives(product.product, torch.float32), derivatives(torch.matmul, torch.float64)):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.detach().abs().max()))


@pytest.mark.usefixtures("processor")
def test_transforms_of_torch_are_served():
    rows, depth, columns = LARGE
    x, tangent, weight = torch.randn(rows, depth), torch.randn(rows, depth), torch.randn(depth, columns)
    y, dy = torch.func.jvp(lambda x: product.product(x, weight), (x,), (tangent,))
    torch.testing.assert_close((y, dy), (x @ weight, tangent @ weight), atol=2e-4, rtol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = product.product(torch.autograd.forward_ad.make_dual(x, tangent), weight)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, dy, atol=2e-4, rtol=1e-5)
    stacked = torch.vmap(lambda x: product.product(x, weight))(torch.stack((x, tangent)))
    torch.testing.assert_close(stacked, torch.stack((y, dy)), atol=2e-4, rtol=1e-5)


def asked(x: torch.Tensor, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether oneDNN multiplies these."""
    calls, multiply = [], product._multiply
    with monkeypatch.context() as patch:
        patch.setattr(product, "_multiply", lambda *factors: calls.append(1) or multiply(*factors))
        product.product(x, weight)
    return bool(calls)


@pytest.mark.parametrize(
    ("shape", "pays"),
    [
        (LARGE, True),
        ((31, 512, 512), False),
        ((512, 63, 512), False),
        ((512, 512, 127), False),
        ((32, 64, 1000), False),
    ],
)
def test_small_products_stay_with_torch(shape, pays, monkeypatch):
    monkeypatch.setattr(product, "missing_onednn", lambda: None)
    rows, depth, columns = shape
    assert asked(torch.randn(rows, depth), torch.randn(depth, columns), monkeypatch) == pays


def test_other_types_processors_and_autocast_stay_with_torch(monkeypatch):
    rows, depth, columns = LARGE
    x, weight = torch.randn(rows, depth), torch.randn(depth, columns)
    monkeypatch.setattr(product, "missing_onednn", lambda: None)
    assert asked(x, weight, monkeypatch)
    assert not asked(x.double(), weight.double(), monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        assert not asked(x, weight, monkeypatch)
        assert product.product(x, weight).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not asked(x, weight, monkeypatch)
    monkeypatch.setattr(product, "missing_onednn", lambda: "MKL uses the whole width of this processor")
    assert not asked(x, weight, monkeypatch)
    with pytest.raises(dispatch.BackendUnavailable, match="uses the whole width"):
        dispatch.choose("product", x, "cpu")


def test_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(extension, "mkl_is_narrow", lambda: True)
    monkeypatch.setattr(extension, "missing", lambda: None)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert product_is_missing() is None
    monkeypatch.setattr(extension, "mkl_is_narrow", lambda: False)
    assert "MKL uses the whole width" in product_is_missing()
    monkeypatch.setattr(extension, "missing", lambda: "the compiled extension is not built")
    assert product_is_missing() == "the compiled extension is not built"
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert "without MKL" in product_is_missing()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "no oneDNN" in product_is_missing()


@pytest.mark.usefixtures("processor")
def test_shapes_that_do_not_fit_are_those_of_torch():
    rows, depth, columns = LARGE
    x, weight = torch.randn(3, rows, depth), torch.randn(2, depth, columns)
    with pytest.raises(RuntimeError):
        product.product(x, weight)
    for other in (weight[:1], weight[0]):
        torch.testing.assert_close(product.product(x, other), x @ other, atol=2e-4, rtol=1e-5)


@pytest.mark.skipif(extension.missing() is not None, reason=str(extension.missing()))
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux lists processors in /proc")
def test_the_processor_is_told_by_its_family():
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    family = int(facts.get("cpu family", "0")) if facts.get("vendor_id") == "AuthenticAMD" else 0
    assert extension.mkl_is_narrow() == (family >= 26 and extension.isa().startswith("avx512"))


def test_a_flow_computes_the_same_by_either_library(monkeypatch):
    """Velocities and their gradients, a step of training, samples and densities."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(96, 80, hidden=256, depth=2, heads=2, layer_scale=1.0, dropout=0.0))
    for parameter in flow.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    image, text = gf.noise.sample_uniform(130, 96), gf.noise.sample_uniform(130, 80)

    def results() -> list[torch.Tensor]:
        own = copy.deepcopy(flow)
        made = []
        for mode in (own.eval(), own.train()):
            x = image.clone().requires_grad_()
            v = mode.velocity(x, text, 0.4, "joint")
            (v[0].square().sum() + v[1].square().sum()).backward()
            made += [*(y.detach() for y in v), x.grad]
        made += [own.blocks[0].expand.weight.grad, own.blocks[0].cross_weight.grad]
        own.eval()
        draw = {"n_samples": 40, "n_steps": 2, "generator": torch.Generator().manual_seed(1)}
        density = {"n_steps": 2, "generator": torch.Generator().manual_seed(1)}
        return [*made, gf.sample(own, text=text[:4], **draw)[0], gf.log_density(own, image, text, **density)]

    counted, multiply = [], product._multiply
    monkeypatch.setattr(product, "missing_onednn", lambda: None)
    monkeypatch.setattr(product, "_multiply", lambda *factors: counted.append(1) or multiply(*factors))
    by_onednn = results()
    assert len(counted) > 50
    monkeypatch.setattr(product, "missing_onednn", lambda: "it is not asked")
    for ours, plain in zip(by_onednn, results()):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
