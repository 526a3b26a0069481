"""Interpolant and target velocity on both spheres, with the given stream pinned, in one pass over the inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geoflow_fast.geometry import UNIT_TOLERANCE, capturing, check_rows, eps
from geoflow_fast.ops import dispatch, native, reference, triton_kernels
from geoflow_fast.ops.rows import check_directions
from geoflow_fast.runtime import checks

Streams = tuple[Tensor, Tensor, Tensor, Tensor]


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
    out: Streams | None = None,
) -> Streams:
    """Inputs and targets of masked flow matching: (image_t, text_t, v_image, v_text).

    `image0` [B, d_I] and `text0` [B, d_T] are noise, `image1` and `text1` data, all unit rows in float32 or float64;
    `t` [B] is in [0, 1]; `direction` is int8 [B] with the codes of `geometry.DIRECTIONS`. A generated stream lies on
    the geodesic from noise to data, and its velocity is the paper's target omega/sin(omega) [cos(t omega) z_1 -
    cos((1-t) omega) z_0]; a given stream is its data point with zero velocity. `drop`, bool [B], marks rows under
    guidance dropout, whose given stream is replaced by its noise; joint rows ignore it.

    `out`: four tensors to write the results to, which saves allocations in a loop. Differentiable in the four points
    through the reference backend, which is used whenever a gradient is required.
    """
    inputs = (image0, text0, image1, text1)
    _check(inputs, t, direction, drop)
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, t))
    if wants_gradient:
        if backend not in ("auto", "reference"):
            raise ValueError(f"masked_interpolant: backend {backend!r} has no gradient; use 'reference' or detach")
        backend = "reference"
    if out is not None:
        if wants_gradient:
            raise ValueError("out= cannot be combined with inputs that require a gradient")
        _check_out(inputs, out)
    run = dispatch.choose("masked_interpolant", image0, backend)
    result: Streams = run(image0, text0, image1, text1, t.to(image0.dtype), direction, drop, out)
    return result


def _check(inputs: Streams, t: Tensor, direction: Tensor, drop: Tensor | None) -> None:
    """Shapes, dtypes, devices and ranges; the rows themselves are checked while they are read."""
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
    check_directions(direction)
    _check_times(t)
    if drop is None:
        return
    checks.dense(drop, "drop")
    if drop.dtype != torch.bool or drop.shape != (rows,) or drop.device != first.device:
        raise ValueError(f"drop must be bool of shape [{rows}] on {first.device}, got {drop.dtype} {tuple(drop.shape)}")


def _check_times(t: Tensor) -> None:
    if capturing(t):
        return
    outside = ~((t >= 0) & (t <= 1))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"t row {row} is {float(t[row]):.6g}, outside [0, 1]")


def _check_out(inputs: Streams, out: Streams) -> None:
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


@dispatch.register("masked_interpolant", "reference", devices=("cpu", "cuda"))
def _reference(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    out: Streams | None,
) -> Streams:
    _check_shown_rows(image0, text0, image1, text1, direction, drop)
    result = reference.masked_interpolant(image0, text0, image1, text1, t, direction, drop)
    if out is None:
        return result
    for target, value in zip(out, result):
        target.copy_(value)
    return out


def _check_shown_rows(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, direction: Tensor, drop: Tensor | None
) -> None:
    """Names the first bad row among those that are read; what a given stream does not show is not looked at."""
    dropped = torch.zeros_like(direction, dtype=torch.bool) if drop is None else drop
    for stream, noise, data, given in (
        ("image", image0, image1, direction == reference.I2T),
        ("text", text0, text1, direction == reference.T2I),
    ):
        for name, x, unread in ((f"{stream}0", noise, given & ~dropped), (f"{stream}1", data, given & dropped)):
            if bool(unread.any()):
                axis = torch.eye(1, x.shape[1], dtype=x.dtype, device=x.device)
                x = torch.where(unread.unsqueeze(-1), axis, x.detach())
            check_rows(x, name)


@dispatch.register("masked_interpolant", "cpu", devices=("cpu",), missing=native.missing)
def _cpu(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    out: Streams | None,
) -> Streams:
    return _fused(native.masked_interpolant, (image0, text0, image1, text1), t, direction, drop, out)


@dispatch.register(
    "masked_interpolant",
    "triton",
    devices=triton_kernels.devices,
    missing=triton_kernels.missing,
    dtypes=(torch.float32,),
)
def _triton_backend(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    out: Streams | None,
) -> Streams:
    run = triton_kernels.kernel("geodesic", "masked_interpolant")
    return _fused(run, (image0, text0, image1, text1), t, direction, drop, out)


def _fused(
    run: Callable[..., int],
    inputs: Streams,
    t: Tensor,
    direction: Tensor,
    drop: Tensor | None,
    out: Streams | None,
) -> Streams:
    """Runs a fused backend on contiguous tensors; it returns the first row that is off the sphere, or -1."""
    image0, text0, image1, text1, t, direction = (x.detach().contiguous() for x in (*inputs, t, direction))
    drop = drop if drop is None else drop.contiguous()
    image_t, text_t, v_image, v_text = out or tuple(torch.empty_like(x) for x in (image0, text0, image0, text0))
    bad_row = run(
        (image0, text0), (image1, text1), t, direction, drop, (image_t, text_t), (v_image, v_text), UNIT_TOLERANCE
    )
    if bad_row >= 0:
        _check_shown_rows(image0, text0, image1, text1, direction, drop)
        raise ValueError(f"row {bad_row} holds a point that is not on the unit sphere")
    return image_t, text_t, v_image, v_text
