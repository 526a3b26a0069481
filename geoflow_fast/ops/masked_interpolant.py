"""Interpolant and target velocity on both spheres, with the given stream pinned, in one pass over the inputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from geoflow_fast.directions import Direction, check_codes
from geoflow_fast.geometry import UNIT_TOLERANCE, capturing, check_rows, eps, interpolate
from geoflow_fast.ops import dispatch, extension, triton_kernels
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
    check: bool = True,
) -> FourStreams:
    """Inputs and targets of masked flow matching: (image_t, text_t, v_image, v_text).

    `image0` [B, d_I] and `text0` [B, d_T] are noise, `image1` and `text1` data, all unit rows in float32 or float64;
    `t` [B] is in [0, 1]; `direction` is int8 [B] with the codes of `DIRECTIONS`. A generated stream lies on
    the geodesic from noise to data, and its velocity is the paper's target omega/sin(omega) [cos(t omega) z_1 -
    cos((1-t) omega) z_0]; a given stream is its data point with zero velocity. `drop`, bool [B], marks rows under
    guidance dropout, whose given stream is replaced by its noise; joint rows ignore it.

    `check=False` is for values that are known to be right: it leaves out the checks of rows, times and directions, for
    which a GPU has to be waited for. Differentiable in the four points through the reference backend, which is used
    whenever a gradient is required.
    """
    streams: FourStreams = _forward(image0, text0, image1, text1, t, direction, drop, bool(check), backend)
    return streams


def _check(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    check: bool,  # noqa: ARG001
) -> None:
    """Shapes, dtypes and devices."""
    inputs, names = (image0, text0, image1, text1), ("image0", "text0", "image1", "text1")
    for name, x in zip((*names, "t", "direction"), (*inputs, t, direction)):
        if checks.dense(x, name).device != image0.device:
            raise ValueError(f"{name} is on {x.device}, but image0 is on {image0.device}")
    for name, x, twin in zip(names, inputs, (image0, text0) * 2):
        eps(x.dtype)
        if x.dtype != image0.dtype:
            raise TypeError(f"{name} is {x.dtype}, but image0 is {image0.dtype}")
        if x.dim() != 2 or twin.dim() != 2 or x.shape != (len(image0), twin.shape[1]) or x.shape[1] < 2:
            raise ValueError(f"{name} must be [B, d] with d >= 2 and shaped as its twin, got {tuple(x.shape)}")
    rows = image0.shape[0]
    if not t.is_floating_point() or t.shape != (rows,):
        raise ValueError(f"t must be a floating-point tensor of shape [{rows}], got {t.dtype} {tuple(t.shape)}")
    if direction.dtype != torch.int8 or direction.shape != (rows,):
        raise ValueError(f"direction must be int8 of shape [{rows}], got {direction.dtype} {tuple(direction.shape)}")
    if drop is None:
        return
    checks.dense(drop, "drop")
    if drop.dtype != torch.bool or drop.shape != (rows,) or drop.device != image0.device:
        raise ValueError(
            f"drop must be bool of shape [{rows}] on {image0.device}, got {drop.dtype} {tuple(drop.shape)}"
        )


def _check_times_and_directions(t: Tensor, direction: Tensor) -> None:
    if capturing(t) or capturing(direction) or direction.is_meta or is_fake(direction):
        return
    check_codes(direction)
    if bool((outside := ~((t >= 0) & (t <= 1))).any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"t row {row} is {float(t[row]):.6g}, outside [0, 1]")


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
    """`masked_interpolant_reference`; unless `check`, rows, times and directions are not looked at."""
    if check:
        _check_times_and_directions(t, direction)
    inputs = image0, text0, image1, text1, t.to(image0.dtype), direction, drop
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


# ---- compiled C++ and Triton ---------------------------------------------------------------------------------------


def _cpu(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    check: bool,
) -> FourStreams:
    points = [x.contiguous() for x in (image0, text0, image1, text1)]
    dropped = None if drop is None else drop.contiguous()
    module = extension.required()
    try:
        results: FourStreams = module.masked_interpolant(
            *points, t.to(image0.dtype).contiguous(), direction.contiguous(), dropped, check, UNIT_TOLERANCE
        )
        return results
    except module.NotServed:
        _check_times_and_directions(t, direction)
        _check_shown_rows(image0, text0, image1, text1, direction, drop)
        raise


def _triton(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    check: bool,
) -> FourStreams:
    if check:
        _check_times_and_directions(t, direction)
    noise, data = (image0.contiguous(), text0.contiguous()), (image1.contiguous(), text1.contiguous())
    image_t, text_t, v_image, v_text = (torch.empty_like(x) for x in noise * 2)
    bad_row = _KERNEL.function(
        noise,
        data,
        t.to(image0.dtype).contiguous(),
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


_KERNEL = triton_kernels.backend("geodesic", "masked_interpolant", (torch.float32,), triton_kernels.WIDEST_ROW)
_forward = dispatch.operation(
    "masked_interpolant",
    masked_interpolant_operation,
    check=_check,
    cpu=dataclasses.replace(extension.bound("masked_interpolant", dtypes=None), function=_cpu),
    triton=dataclasses.replace(_KERNEL, function=_triton),
    fake=lambda image0, text0, *_: tuple(torch.empty_like(x) for x in (image0, text0, image0, text0)),
    rowwise=True,
)
