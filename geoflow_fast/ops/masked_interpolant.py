"""Interpolant and target velocity on both spheres, with the given stream pinned, in one pass over the inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from geoflow_fast.directions import Direction, check_codes
from geoflow_fast.geometry import UNIT_TOLERANCE, capturing, check_rows, eps, interpolate
from geoflow_fast.ops import dispatch, native, triton_kernels
from geoflow_fast.runtime import checks

FourStreams = tuple[Tensor, Tensor, Tensor, Tensor]


def masked_interpolant(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    *,
    drop: Tensor | None = None,
    backend: str = "auto",
    out: FourStreams | None = None,
    check: bool = True,
) -> FourStreams:
    """Inputs and targets of masked flow matching: (image_t, text_t, v_image, v_text).

    `image0` [B, d_I] and `text0` [B, d_T] are noise, `image1` and `text1` data, all unit rows in float32 or float64;
    `t` [B] is in [0, 1]; `direction` is int8 [B] with the codes of `DIRECTIONS`. A generated stream lies on
    the geodesic from noise to data, and its velocity is the paper's target omega/sin(omega) [cos(t omega) z_1 -
    cos((1-t) omega) z_0]; a given stream is its data point with zero velocity. `drop`, bool [B], marks rows under
    guidance dropout, whose given stream is replaced by its noise; joint rows ignore it.

    `check=False` is for values that are known to be right: it leaves out the checks of rows, times and directions, for
    which a GPU has to be waited for. `out`: four tensors to write the results to, which saves allocations in a loop.
    Differentiable in the four points through the reference backend, which is used whenever a gradient is required.
    """
    inputs = (image0, text0, image1, text1)
    _check(inputs, t, direction, drop, values=check)
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, t))
    if wants_gradient:
        if backend not in ("auto", "reference"):
            raise ValueError(f"masked_interpolant: backend {backend!r} has no gradient; use 'reference' or detach")
        backend = "reference"
    times = t.to(image0.dtype)
    if out is None:
        streams: FourStreams = _forward(*inputs, times, direction, drop, check, str(backend))
        return streams
    if wants_gradient:
        raise ValueError("out= cannot be combined with inputs that require a gradient")
    _check_out(inputs, out)
    dispatch.choose("masked_interpolant", image0, backend, inputs)(*inputs, times, direction, drop, check, out=out)
    return out


def _check(inputs: FourStreams, t: Tensor, direction: Tensor, drop: Tensor | None, *, values: bool) -> None:
    """Shapes, dtypes, devices and, with `values`, ranges; the rows themselves are checked while they are read."""
    names = ("image0", "text0", "image1", "text1")
    first = inputs[0]
    for name, x in zip((*names, "t", "direction"), (*inputs, t, direction)):
        if checks.dense(x, name).device != first.device:
            raise ValueError(f"{name} is on {x.device}, but image0 is on {first.device}")
    for name, x, twin in zip(names, inputs, (inputs[0], inputs[1]) * 2):
        eps(x.dtype)
        if x.dtype != first.dtype:
            raise TypeError(f"{name} is {x.dtype}, but image0 is {first.dtype}")
        if x.dim() != 2 or twin.dim() != 2 or x.shape != (len(first), twin.shape[1]) or x.shape[1] < 2:
            raise ValueError(f"{name} must be [B, d] with d >= 2 and shaped as its twin, got {tuple(x.shape)}")
    rows = first.shape[0]
    if not t.is_floating_point() or t.shape != (rows,):
        raise ValueError(f"t must be a floating-point tensor of shape [{rows}], got {t.dtype} {tuple(t.shape)}")
    if direction.dtype != torch.int8 or direction.shape != (rows,):
        raise ValueError(f"direction must be int8 of shape [{rows}], got {direction.dtype} {tuple(direction.shape)}")
    if values and not (capturing(direction) or direction.is_meta):
        check_codes(direction)
    if values and not capturing(t) and bool((outside := ~((t >= 0) & (t <= 1))).any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"t row {row} is {float(t[row]):.6g}, outside [0, 1]")
    if drop is None:
        return
    checks.dense(drop, "drop")
    if drop.dtype != torch.bool or drop.shape != (rows,) or drop.device != first.device:
        raise ValueError(f"drop must be bool of shape [{rows}] on {first.device}, got {drop.dtype} {tuple(drop.shape)}")


def _check_out(inputs: FourStreams, out: FourStreams) -> None:
    if len(out) != 4 or len({id(x) for x in out}) != 4:
        raise ValueError(f"out needs four different tensors (image_t, text_t, v_image, v_text), got {len(out)}")
    for name, target, like in zip(("image_t", "text_t", "v_image", "v_text"), out, inputs[:2] * 2):
        if target.shape != like.shape or target.dtype != like.dtype or target.device != like.device:
            raise ValueError(f"out: {name} must be {like.dtype} {tuple(like.shape)} on {like.device}")
        if not target.is_contiguous():
            raise ValueError(f"out: {name} must be contiguous")
        others = [x for x in out if x is not target]
        if any(_overlap(target, other) for other in (*inputs, *others)):
            raise ValueError(f"out: {name} shares memory with an input or another output")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory between the first and the last element of `a` meets that of `b`."""
    if not a.numel() or not b.numel():
        return False
    ends = [x.data_ptr() + x.element_size() * sum((n - 1) * s for n, s in zip(x.shape, x.stride())) for x in (a, b)]
    return a.data_ptr() <= ends[1] and b.data_ptr() <= ends[0]


# ---- plain torch ---------------------------------------------------------------------------------------------------


def masked_interpolant_reference(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, t: Tensor, direction: Tensor, drop: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Point and target velocity on both spheres, [B, d_I] and [B, d_T], with the given stream pinned to its data.

    Each stream follows its geodesic from noise (t=0) to data (t=1) unless `direction` [B] says that it is given: then
    it is its data point, or its noise where `drop` [B] is set, at zero velocity.
    """
    _check_shown_rows(image0, text0, image1, text1, direction, drop)
    return _both_streams(image0, text0, image1, text1, t, direction, drop)


def masked_interpolant_operation(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`masked_interpolant_reference`; unless `check`, rows are not looked at."""
    inputs = image0, text0, image1, text1, t, direction, drop
    return masked_interpolant_reference(*inputs) if check else _both_streams(*inputs)


def _both_streams(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, t: Tensor, direction: Tensor, drop: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    image_t, v_image = _stream(image0, image1, t, direction == Direction.I2T.code, drop)
    text_t, v_text = _stream(text0, text1, t, direction == Direction.T2I.code, drop)
    return image_t, text_t, v_image, v_text


def _stream(noise: Tensor, data: Tensor, t: Tensor, given: Tensor, drop: Tensor | None) -> tuple[Tensor, Tensor]:
    point, velocity = interpolate(noise, data, t)
    given = given.unsqueeze(-1)
    shown = data if drop is None else torch.where(drop.unsqueeze(-1), noise, data)
    return torch.where(given, shown, point), torch.where(given, torch.zeros_like(velocity), velocity)


def _check_shown_rows(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, direction: Tensor, drop: Tensor | None
) -> None:
    """Names the first bad row among those that are read; what a given stream does not show is not looked at."""
    if capturing(direction) or is_fake(direction):
        return
    dropped = torch.zeros_like(direction, dtype=torch.bool) if drop is None else drop
    for stream, noise, data, given in (
        ("image", image0, image1, direction == Direction.I2T.code),
        ("text", text0, text1, direction == Direction.T2I.code),
    ):
        for name, x, unread in ((f"{stream}0", noise, given & ~dropped), (f"{stream}1", data, given & dropped)):
            if bool(unread.any()):
                axis = torch.eye(1, x.shape[1], dtype=x.dtype, device=x.device)
                x = torch.where(unread.unsqueeze(-1), axis, x.detach())
            check_rows(x, name)


# ---- fused ---------------------------------------------------------------------------------------------------------


def _fused(kernel: Callable[..., int]) -> Callable[..., FourStreams]:
    """A backend that runs `kernel` on contiguous tensors; it returns the first row that is off the sphere, or -1."""

    def run(
        image0: Tensor,
        text0: Tensor,
        image1: Tensor,
        text1: Tensor,
        t: Tensor,
        direction: Tensor,
        drop: Tensor | None,
        check: bool,
        *,
        out: FourStreams | None = None,
    ) -> FourStreams:
        inputs = [x.detach().contiguous() for x in (image0, text0, image1, text1)]
        image_t, text_t, v_image, v_text = out or tuple(torch.empty_like(x) for x in inputs[:2] * 2)
        bad_row = kernel(
            (inputs[0], inputs[1]),
            (inputs[2], inputs[3]),
            t.detach().contiguous(),
            direction.contiguous(),
            drop if drop is None else drop.contiguous(),
            (image_t, text_t),
            (v_image, v_text),
            UNIT_TOLERANCE,
            check,
        )
        if bad_row >= 0:
            _check_shown_rows(image0, text0, image1, text1, direction, drop)
            raise ValueError(f"row {bad_row} holds a point that is not on the unit sphere")
        return image_t, text_t, v_image, v_text

    return run


def _compiled(*arguments: Any) -> int:
    """The compiled kernel checks rows while it reads them, at no cost; `check` only says whether that counts."""
    bad_row = native.masked_interpolant(*arguments[:-1])
    return bad_row if arguments[-1] else -1


_triton = triton_kernels.backend("geodesic", "masked_interpolant", (torch.float32,), triton_kernels.WIDEST_ROW)
_forward = dispatch.operation(
    "masked_interpolant",
    masked_interpolant_operation,
    cpu=native.backend(_fused(_compiled), dtypes=None),
    triton=dataclasses.replace(_triton, function=_fused(_triton.function)),
    fake=lambda image0, text0, *_: tuple(torch.empty_like(x) for x in (image0, text0, image0, text0)),
    rowwise=True,
)
