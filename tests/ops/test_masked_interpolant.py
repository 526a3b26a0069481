"""Every backend of `ops.masked_interpolant` against float64: masks, odd sizes, strides, edges, bad input."""

from __future__ import annotations

import math

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry as g
from geoflow_fast import noise
from geoflow_fast.ops.masked_interpolant import masked_interpolant_reference

OP = "masked_interpolant"
JOINT, I2T, T2I = range(3)


def make(rows: int, image_width: int, text_width: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    widths = {"image0": image_width, "text0": text_width, "image1": image_width, "text1": text_width}
    batch = {name: noise.sample_uniform(rows, d, dtype=dtype) for name, d in widths.items()}
    batch["t"] = torch.rand(rows, dtype=dtype)
    batch["direction"] = torch.arange(rows, dtype=torch.int8) % 3
    return batch


def truth(batch: dict[str, torch.Tensor], drop: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    wide = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    return masked_interpolant_reference(**wide, drop=drop)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("rows", [0, 1, 7, 129])
@pytest.mark.parametrize("widths", [(2, 3), (7, 129), (1023, 64), (1024, 1024)])
def test_matches_the_float64_reference(backend, rows, widths, dtype, tol):
    batch = make(rows, *widths, dtype)
    drop = torch.arange(rows) % 4 == 1
    for chosen in (None, drop):
        result = gf.ops.masked_interpolant(**batch, drop=chosen, backend=backend)
        for value, expected in zip(result, truth(batch, chosen)):
            assert value.dtype == dtype
            assert torch.allclose(value.double(), expected, atol=tol)


def test_given_streams_are_pinned_bit_for_bit(backend):
    batch = make(60, 33, 17)
    drop = torch.arange(60) % 2 == 1
    image, text, v_image, v_text = gf.ops.masked_interpolant(**batch, drop=drop, backend=backend)
    image_given, text_given = batch["direction"] == I2T, batch["direction"] == T2I
    assert torch.equal(image[image_given & ~drop], batch["image1"][image_given & ~drop])
    assert torch.equal(image[image_given & drop], batch["image0"][image_given & drop])
    assert torch.equal(text[text_given & ~drop], batch["text1"][text_given & ~drop])
    assert torch.equal(text[text_given & drop], batch["text0"][text_given & drop])
    assert v_image[image_given].abs().max() == 0
    assert v_text[text_given].abs().max() == 0


def test_what_is_not_shown_is_not_read(backend):
    """The noise of a given stream never reaches the result, not even as NaN."""
    batch = make(9, 12, 12)
    clean = gf.ops.masked_interpolant(**batch, backend=backend)
    batch["image0"][batch["direction"] == I2T] = float("nan")
    batch["text0"][batch["direction"] == T2I] = float("nan")
    for value, expected in zip(gf.ops.masked_interpolant(**batch, backend=backend), clean):
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    "angle", [0.0, 1e-8, 1e-4, 0.0099, 1.0, 2.99, 3.01, 3.13, math.pi - 1e-4, math.pi - 1e-7, math.pi]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_angle_gives_unit_tangent_finite_rows(backend, angle, dtype):
    rows, d = 24, 40
    a = noise.sample_uniform(rows, d, dtype=torch.float64)
    u = g.normalize(g.project_tangent(a, torch.randn(rows, d, dtype=torch.float64)))
    b = math.cos(angle) * a + math.sin(angle) * u
    a, b, t = a.to(dtype), b.to(dtype), torch.linspace(0, 1, rows, dtype=dtype)
    direction = torch.zeros(rows, dtype=torch.int8)
    image, text, v_image, _ = gf.ops.masked_interpolant(a, b, b, a, t, direction, backend=backend)
    tol = 200 * torch.finfo(dtype).eps
    assert torch.allclose(image.norm(dim=-1), torch.ones(rows, dtype=dtype), atol=tol, rtol=0)
    assert torch.allclose(text.norm(dim=-1), torch.ones(rows, dtype=dtype), atol=tol, rtol=0)
    assert (image * v_image).sum(-1).abs().max() < 4 * tol
    assert torch.allclose(v_image.norm(dim=-1), g.angle(a, b), atol=4 * tol, rtol=0)
    assert torch.allclose(image, g.geodesic(a, b, t), atol=16 * tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_turns_are_right_to_the_last_digits(backend, dtype):
    """In the plane of two axes the sine of a small angle stands alone, and no larger number hides its error."""
    angle, t = torch.tensor([1e-6, 1e-4, 1e-3, 5e-3, 9.9e-3, 1.01e-2, 0.1, 1.5]), torch.tensor([0, 0.003, 0.3, 0.9, 1])
    angle, t = (x.flatten().double() for x in torch.meshgrid(angle, t, indexing="ij"))
    b = torch.stack((angle.cos(), angle.sin()), 1).to(dtype)
    a, t = torch.eye(2, dtype=dtype)[:1].expand_as(b), t.to(dtype)
    direction = torch.zeros(len(b), dtype=torch.int8)
    image, _, v_image, _ = gf.ops.masked_interpolant(a, a, b, b, t, direction, backend=backend)
    angle = torch.atan2(b[:, 1].double(), b[:, 0].double())
    turn, tol = angle * t.double(), 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(image[:, 1].double(), turn.sin(), rtol=tol, atol=0)
    torch.testing.assert_close(v_image[:, 1].double(), angle * turn.cos(), rtol=tol, atol=0)
    torch.testing.assert_close(image[:, 0].double(), turn.cos(), rtol=0, atol=tol)
    torch.testing.assert_close(v_image[:, 0].double(), -angle * turn.sin(), rtol=0, atol=tol)


@pytest.mark.parametrize("d", [2, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1 - 9e-4, 1 + 9e-4])
@pytest.mark.parametrize("angle", [1.0, 2.0, 3.1, math.pi - 1e-6, math.pi - 1e-13, math.pi])
def test_rows_of_norm_nearly_one_that_lean_on_all_axes_alike(backend, d, dtype, scale, angle):
    """Norms within the tolerance are let through, and the axis of departure at the antipode is far from tangent."""
    signs = torch.where(torch.arange(d) % 2 == 1, -1.0, 1.0).double()
    a = signs / math.sqrt(d)
    u = g.orthogonal_direction(a)
    b = -a if angle == math.pi else math.cos(angle) * a + math.sin(angle) * u
    rows = 9
    a, b = (x.to(dtype).expand(rows, -1) for x in (scale * a, b if angle != math.pi else scale * b))
    t, direction = torch.linspace(0, 1, rows, dtype=dtype), torch.zeros(rows, dtype=torch.int8)
    image, _, v_image, _ = gf.ops.masked_interpolant(a, a, b, b, t, direction, backend=backend)
    tol = 200 * torch.finfo(dtype).eps
    point, velocity = (x.double() for x in (image, v_image))
    unit = a[0].double() / a[0].double().norm()
    start, slope = point @ unit, velocity @ unit
    w = float(g.angle(a[:1].double(), b[:1].double()))
    time = t.double() * w
    # The path turns by w in the plane of a and of a tangent that is orthogonal to a, whatever the norm of a.
    torch.testing.assert_close(start, scale * torch.cos(time), rtol=0, atol=tol)
    torch.testing.assert_close(slope, -scale * w * torch.sin(time), rtol=0, atol=4 * tol)
    away = point - start.unsqueeze(1) * unit
    assert torch.allclose(away.norm(dim=1), torch.sin(time), atol=2e-3)


def test_strided_and_expanded_input(backend):
    batch = make(14, 20, 10)
    expected = gf.ops.masked_interpolant(**batch, backend=backend)
    strided = dict(batch)
    strided["image0"] = batch["image0"].T.contiguous().T
    strided["text1"] = torch.cat([batch["text1"], batch["text1"]], 1)[:, :10]
    strided["t"] = torch.stack([batch["t"], batch["t"]], 1)[:, 0]
    strided["direction"] = torch.stack([batch["direction"], batch["direction"]], 1)[:, 1]
    for value, wanted in zip(gf.ops.masked_interpolant(**strided, backend=backend), expected):
        assert torch.allclose(value, wanted, atol=1e-6)
    one = batch["image0"][:1]
    expanded = {**batch, "image0": one.expand(14, -1)}
    copied = {**batch, "image0": one.repeat(14, 1)}
    one_row, many_rows = (gf.ops.masked_interpolant(**x, backend=backend) for x in (expanded, copied))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one_row, many_rows))


def test_result_does_not_depend_on_threads(backend):
    batch = make(257, 65, 33)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gf.ops.masked_interpolant(**batch, backend=backend)
        torch.set_num_threads(2)
        two = gf.ops.masked_interpolant(**batch, backend=backend)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def test_gradient_goes_through_the_reference():
    batch = make(6, 4, 5, torch.float64)
    points = [batch.pop(name).requires_grad_() for name in ("image0", "text0", "image1", "text1")]
    unit = lambda *xs: gf.ops.masked_interpolant(*[g.normalize(x) for x in xs], **batch)  # noqa: E731
    torch.autograd.gradcheck(unit, points)
    with pytest.raises(ValueError, match="no gradient"):
        gf.ops.masked_interpolant(*points, **batch, backend="cpu")


@pytest.mark.parametrize("name", ["image0", "text0", "image1", "text1"])
def test_bad_rows_are_named(backend, name):
    for value, message in ((float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "zeros"), (3.0, "norm")):
        batch = make(8, 6, 6)
        batch["direction"].zero_()
        batch[name][5] = value
        with pytest.raises(ValueError, match=rf"{name} row 5 .*{message}"):
            gf.ops.masked_interpolant(**batch, backend=backend)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"text1": torch.ones(8, 5)}, ValueError, "text1"),
        ({"image1": torch.ones(7, 6)}, ValueError, "image1"),
        ({"image1": torch.ones(8, 6, dtype=torch.float64)}, TypeError, "image1"),
        ({"image0": torch.ones(8, 6, dtype=torch.float16)}, TypeError, "float16"),
        ({"image0": torch.ones(8, 6, dtype=torch.int64)}, TypeError, "int64"),
        ({"image0": torch.ones(8)}, ValueError, "image0"),
        ({"t": torch.full((8,), 1.5)}, ValueError, "t row 0 is 1.5"),
        ({"t": torch.full((8,), float("nan"))}, ValueError, "t row 0"),
        ({"t": torch.rand(7)}, ValueError, "t must be"),
        ({"t": 0.5}, TypeError, "t must be a tensor"),
        ({"direction": torch.full((8,), 3, dtype=torch.int8)}, ValueError, "direction row 0 is 3"),
        ({"direction": torch.zeros(8, dtype=torch.int64)}, ValueError, "int8"),
        ({"drop": torch.zeros(8)}, ValueError, "drop"),
        ({"text0": torch.ones(8, 6, device="meta")}, ValueError, "text0 is on meta"),
        ({"image0": torch.tensor(1.0)}, ValueError, "image0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(backend, change, error, message):
    with pytest.raises(error, match=message):
        gf.ops.masked_interpolant(**{**make(8, 6, 6), **change}, backend=backend)


@pytest.mark.parametrize("tolerances", [-1.01, -0.99, 0.99, 1.01])
def test_rows_are_unit_within_the_tolerance_of_geometry(tolerances):
    """Compiled code has a copy of that number."""
    batch = make(3, 6, 6)
    batch["direction"].zero_()
    batch["image1"] = batch["image1"] * (1 + tolerances * g.UNIT_TOLERANCE)
    if abs(tolerances) < 1:
        gf.ops.masked_interpolant(**batch)
    else:
        with pytest.raises(ValueError, match="image1 row 0"):
            gf.ops.masked_interpolant(**batch)
